# SPDX-License-Identifier: Apache-2.0
"""Value and gradient of every loss of TRL's GRPO and RLOO against the TRL that is installed, on a fixed ragged batch.

TRL's own `_compute_loss` runs on a stand-in for its trainer, and its statements for advantages and sampler weights are
taken from its source and run unchanged; all in float64. jrl's side is what `jrl.trl.GRPOTrainer` binds.
"""

from __future__ import annotations

import collections
import inspect
import itertools
import textwrap
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.grpo_algorithms import algorithm
from jrl.losses import PolicyLoss, Targets
from jrl.ops import (
    decoupled_advantages,
    drop_weights,
    sequence_weights,
    token_weights,
    truncate_weights,
)
from jrl.trl.group_method import (
    BY_TOKENS,
    CLIPPED,
    DDOF,
    EPSILON,
    LOSS_TYPES,
    GRPOMethod,
    RLOOMethod,
    grpo_advantages,
    grpo_loss,
    rloo_advantages,
    rloo_loss,
)
from jrl.typing import Predictions
from tests.losses.policy_gradient_cases import BATCH, GROUPS, MASK, without_row

pytestmark = pytest.mark.parity

TOLERANCE = 1e-10
LENGTH, GROUP = BATCH["constant_length"], BATCH["group_size"]
NEW, OLD, REF, SAMPLER, ENTROPY = (
    np.asarray(BATCH[name])
    for name in ("logprobs", "old_logprobs", "ref_logprobs", "sampler_logprobs", "entropy")
)
SCORES = np.asarray(BATCH["scores"])
LEVELS, SCALINGS = ("token", "sequence"), ("group", "batch", "none")
# Of the clip, as TRL's fields; a `delta` is read by the clipped losses alone. The widths lie between the ratios of the
# batch, so that each clip acts on some actions and on others not.
CLIPS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"epsilon": 0.2},
    "higher": {"epsilon": 0.2, "epsilon_high": 0.28},
    "narrow": {"epsilon": 0.1, "epsilon_high": 0.05},
    "delta": {"epsilon": 0.2, "epsilon_high": 0.28, "delta": 1.5},
}
KLS: Mapping[str, Mapping[str, Any]] = {
    "none": {"beta": 0.0},
    "k3": {"beta": 0.04, "use_bias_correction_kl": False},
    "k3 times ratio": {"beta": 0.04, "use_bias_correction_kl": True},
}
MASKS = {"all rows": MASK, "two rows truncated": MASK & without_row(6) & without_row(9)}
MODES = ("none", "token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CAPS = {"none": 1.0, "token_truncate": 1.2, "token_mask": 1.2, "sequence_truncate": 1.6, "sequence_mask": 1.6}
OFF_POLICY = (None, 0.02)


class _Accelerator:
    """One process."""

    num_processes, sync_gradients = 1, True

    def gather(self, x: Any) -> Any:
        return x

    gather_for_metrics = gather

    def reduce(self, x: Any, reduction: str = "sum") -> Any:
        del reduction
        return x


@pytest.fixture(scope="module")
def trl() -> Iterator[Any]:
    """TRL's two modules, with torch in float64."""
    torch = pytest.importorskip("torch")
    version = pytest.importorskip("trl").__version__
    if not version.startswith("1."):
        pytest.skip(f"TRL {version} has another GRPO; the parity extra has 1.16")
    from trl.trainer import grpo_trainer, rloo_trainer

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield types.SimpleNamespace(torch=torch, grpo=grpo_trainer, rloo=rloo_trainer)
    torch.set_default_dtype(before)


def statements(module: Any, trainer: str, start: str, end: str) -> str:
    """TRL's own statements from the line that holds `start` up to the line that holds `end`, that line included."""
    source = inspect.getsource(vars(module)[trainer]._generate_and_score_completions)
    first = source.rindex("\n", 0, source.index(start)) + 1
    last = source.index("\n", source.index(end, first)) + 1
    return textwrap.dedent(source[first:last])


def trl_advantages(trl: Any, scores: np.ndarray, **fields: Any) -> np.ndarray:
    """Advantages by TRL's statements; scores (N, F), NaN where a function says None."""
    rewards = trl.torch.tensor(scores.reshape(len(scores), -1))
    me = types.SimpleNamespace(
        reward_weights=trl.torch.tensor(fields.pop("weights", [1.0] * rewards.shape[1])),
        reward_funcs=[None] * rewards.shape[1],
        multi_objective_aggregation="sum_then_normalize",
        scale_rewards="group",
    )
    vars(me).update(fields)
    names = {**vars(trl.grpo), "self": me, "rewards_per_func": rewards}
    names |= {"num_generations": GROUP, "device": "cpu"}
    code = statements(trl.grpo, "GRPOTrainer", "unscorable_mask = ", "advantages = torch.nan_to_num")
    exec(code, names)
    return np.asarray(names["advantages"])


def trl_rloo_advantages(trl: Any, scores: np.ndarray, mask: np.ndarray, **fields: Any) -> np.ndarray:
    """Advantages of RLOO by TRL's statements."""
    torch = trl.torch
    me = types.SimpleNamespace(reward_weights=torch.ones(1), reward_funcs=[None], **fields)
    names = {**vars(trl.rloo), "self": me, "rewards_per_func": torch.tensor(scores.reshape(-1, 1))}
    names |= {"num_generations": GROUP, "device": "cpu", "gather": lambda x: x}
    names |= {
        "old_per_token_logps": torch.tensor(OLD),
        "ref_per_token_logps": torch.tensor(REF),
        "completion_mask": torch.tensor(mask.astype(float)),
    }
    code = statements(trl.rloo, "RLOOTrainer", "unscorable_mask = ", "advantages = torch.nan_to_num")
    exec(code, names)
    return np.asarray(names["advantages"])


def trl_weights(trl: Any, mode: str, mask: np.ndarray) -> Any:
    """Sampler weights by TRL's statements; None without a correction."""
    if mode == "none":
        return None
    me = types.SimpleNamespace(
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_max=CAPS[mode],
        vllm_importance_sampling_clip_min=None,
    )
    source = inspect.getsource(trl.grpo.GRPOTrainer._generate_and_score_completions)
    first = source.rindex("\n", 0, source.index("per_token_logps_diff = (old")) + 1
    last = source.index("# Compute the per-token log probabilities for the reference model", first)
    live = trl.torch.tensor(mask.astype(float))
    names = {**vars(trl.grpo), "self": me, "completion_mask": live, "mask": live, "tool_mask": None}
    names |= {
        "old_per_token_logps": trl.torch.tensor(OLD),
        "sampling_per_token_logps": trl.torch.tensor(SAMPLER),
    }
    exec(textwrap.dedent(source[first:last]), names)
    return names["vllm_importance_sampling_ratio"]


def trl_loss(
    trl: Any,
    trainer: str,
    method: GRPOMethod | RLOOMethod,
    advantages: np.ndarray,
    mask: np.ndarray,
    weights: Any,
) -> tuple[float, np.ndarray]:
    """Loss and gradient by TRL's `_compute_loss`, on a stand-in that holds what it reads of a trainer."""
    torch = trl.torch
    logprobs, live = torch.tensor(NEW, requires_grad=True), torch.tensor(mask.astype(float))
    corrected = weights is not None
    fields = {name: value for name, value in vars(method).items() if name != "name"}
    me = types.SimpleNamespace(
        **{**fields, "epsilon_low": method.epsilon, "epsilon_high": method.high},
        args=types.SimpleNamespace(**fields, steps_per_generation=1),
        accelerator=_Accelerator(),
        model=types.SimpleNamespace(training=True),
        aux_loss_enabled=False,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        use_vllm=corrected,
        vllm_importance_sampling_correction=corrected,
        max_completion_length=LENGTH,
        _entropy_bonus_enabled=bool(fields.get("entropy_coef")),
        use_adaptive_entropy=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.tensor(ENTROPY), None),
    )
    for name in ("get_off_policy_mask", "get_gamma_weights"):
        vars(me)[name] = vars(trl.grpo.GRPOTrainer)[name].__func__
    nothing = torch.zeros(len(mask), 1, dtype=torch.long)
    inputs = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": torch.zeros(mask.shape, dtype=torch.long),
        "completion_mask": live,
        "advantages": torch.tensor(advantages),
        "old_per_token_logps": torch.tensor(OLD),
        "old_logps": (torch.tensor(OLD) * live).sum(1),
        "ref_per_token_logps": torch.tensor(REF),
        "sampling_per_token_logps": torch.tensor(SAMPLER),
        "num_items_in_batch": live.sum(),
        "importance_sampling_ratio": weights,
    }
    of_trl = {"grpo": trl.grpo.GRPOTrainer, "rloo": trl.rloo.RLOOTrainer}[trainer]._compute_loss
    loss = inspect.unwrap(of_trl)(me, types.SimpleNamespace(training=True), inputs)
    loss.backward()
    return float(loss.detach()), np.asarray(logprobs.grad)


def jrl_losses(
    loss: PolicyLoss, advantages: np.ndarray, masks: np.ndarray, weights: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Losses (C) and gradients (C N T) of several batches; NaN stands wherever nothing may be read."""

    def of_one(per_row: Any, mask: Any, weight: Any) -> Any:
        def hidden(array: Any) -> Any:
            return jnp.where(mask, array, jnp.nan)

        targets = Targets(
            old_logprobs=hidden(OLD),
            old_values=None,
            advantages=hidden(per_row[:, None]),
            returns=None,
            mask=mask,
            ref_logprobs=None if loss.kl is None else hidden(REF),
            sampler_logprobs=None if loss.off_policy_threshold is None else hidden(SAMPLER),
            weights=weight,
        )

        def of_logprobs(logprobs: Any) -> Any:
            out = loss(Predictions(logprobs, None, hidden(ENTROPY), lambda: logprobs[..., None]), targets)
            return out.loss_sum / out.weight.astype(logprobs.dtype)

        return jax.value_and_grad(of_logprobs)(hidden(NEW))

    with jax.enable_x64(True):
        found = jax.vmap(of_one)(jnp.asarray(advantages), jnp.asarray(masks), jnp.asarray(weights))
        return np.asarray(found[0]), np.asarray(found[1])


def jrl_weights(mode: str, mask: np.ndarray) -> np.ndarray:
    """Sampler weights by jrl's ops; 1 without a correction."""
    if mode == "none":
        return np.ones(mask.shape)
    level, form = mode.split("_")
    with jax.enable_x64(True):
        given = jnp.asarray(OLD), jnp.asarray(SAMPLER), jnp.asarray(mask)
        raw = token_weights(*given) if level == "token" else sequence_weights(*given)
        found = (
            truncate_weights(raw, cap=CAPS[mode])
            if form == "truncate"
            else drop_weights(raw, low=0.0, high=CAPS[mode])
        )
        return np.asarray(found)


def jrl_advantages(of: Callable[..., Any], method: Any, scores: np.ndarray) -> np.ndarray:
    with jax.enable_x64(True):
        every = jnp.ones(len(scores), bool)
        return np.asarray(of(method, jnp.asarray(scores), None, jnp.asarray(GROUPS), every))


def method_of(loss_type: str, **fields: Any) -> GRPOMethod:
    return GRPOMethod(
        **{"gen_kwargs": {"max_new_tokens": LENGTH}, "num_generations": GROUP, "loss_type": loss_type}
        | fields
    )


def assert_close(found: np.ndarray, wanted: np.ndarray, scale: float, message: str) -> None:
    np.testing.assert_allclose(found, wanted, rtol=0, atol=TOLERANCE * max(scale, 1.0), err_msg=message)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_grpo_loss_is_that_of_trl(trl, loss_type, level):
    """All clips, KL terms and off-policy masks of a loss type and a level; in each, a third of all scalings, masks and
    sampler weights, drawn anew. TRL's quirks within: rows that are masked as a whole count in the denominators of grpo,
    sapo, dr_grpo and luspo (policy-gradient.md 2.4, trap 4), and the cap of cispo is `epsilon_high` itself (2.3)."""
    if loss_type == "vespo" and level == "sequence":
        with pytest.raises(ValueError, match="whole completion in any case"):
            method_of(loss_type, importance_sampling_level=level)
        return
    # jrl refuses a correction beside vespo, whose φ TRL gives the weight to (3, sampler correction).
    modes = MODES if loss_type != "vespo" else ("none",)
    clips = [name for name in CLIPS if name != "delta" or loss_type in CLIPPED]
    data = list(itertools.product(SCALINGS, MASKS, modes))
    advantages = {scaling: trl_advantages(trl, SCORES, scale_rewards=scaling) for scaling in SCALINGS}
    masks = np.stack([MASKS[name] for _, name, _ in data])
    weights = np.stack([jrl_weights(mode, MASKS[name]) for _, name, mode in data])
    per_row = np.stack([advantages[scaling] for scaling, _, _ in data])
    seen, drawn = set(), np.random.default_rng(0)
    for clip, kl, threshold in itertools.product(clips, KLS, OFF_POLICY):
        some = drawn.permutation(len(data))[: -(-len(data) // 3)]
        fields = {**CLIPS[clip], **KLS[kl], "off_policy_mask_threshold": threshold}
        method = method_of(loss_type, importance_sampling_level=level, **fields)
        losses, gradients = jrl_losses(grpo_loss(method), per_row[some], masks[some], weights[some])
        for which, loss, gradient in zip(some, losses, gradients, strict=True):
            scaling, mask, mode = data[which]
            given = advantages[scaling], MASKS[mask], trl_weights(trl, mode, MASKS[mask])
            wanted, slope = trl_loss(trl, "grpo", method, *given)
            name = f"{loss_type}, {level}, clip {clip}, KL {kl}, δ {threshold}, {scaling}, {mask}, {mode}"
            assert_close(loss, wanted, abs(wanted), name)
            assert_close(gradient, slope, float(np.abs(slope).max()), name)
            seen.add(round(wanted, 12))
    assert len(seen) > len(data), "most combinations differ from each other"


@pytest.mark.parametrize("loss_type", BY_TOKENS)
def test_the_entropy_bonus_of_a_loss_by_tokens_is_that_of_trl(trl, loss_type):
    method = method_of(loss_type, entropy_coef=0.3)
    advantages = trl_advantages(trl, SCORES)
    losses, gradients = jrl_losses(grpo_loss(method), advantages[None], MASK[None], np.ones((1, *MASK.shape)))
    wanted, slope = trl_loss(trl, "grpo", method, advantages, MASK, None)
    assert_close(losses[0], wanted, abs(wanted), loss_type)
    assert_close(gradients[0], slope, float(np.abs(slope).max()), loss_type)
    with pytest.raises(ValueError, match="a mean over tokens"):
        method_of("grpo", entropy_coef=0.3)


def test_a_correction_of_vespo_is_refused():
    with pytest.raises(ValueError, match="`surrogate: vespo`"):
        algorithm("vespo", importance_sampling_mode="token_truncate")


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("mode", MODES[1:])
def test_sampler_weights_are_those_of_trl(trl, mode, mask):
    wanted = np.asarray(trl_weights(trl, mode, MASKS[mask]))
    found = jrl_weights(mode, MASKS[mask])
    np.testing.assert_allclose(found, np.broadcast_to(wanted, found.shape), rtol=TOLERANCE)
    assert len(np.unique(found)) > 2 and (("mask" in mode) == bool((found == 0).any()))


@pytest.mark.parametrize("failed", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_advantages_are_those_of_trl(trl, scaling, failed):
    """Deviations with ddof 1 and ε 1e-4 (policy-gradient.md 2.1); a row without a reward gets 0."""
    scores = np.where(np.arange(12) == 10, np.nan, SCORES) if failed else SCORES
    wanted = trl_advantages(trl, scores, scale_rewards=scaling)
    found = jrl_advantages(grpo_advantages, method_of("dapo", scale_rewards=scaling), scores)
    np.testing.assert_allclose(found, wanted, rtol=TOLERANCE, atol=TOLERANCE)
    assert (wanted[4:8] == 0).all() and (wanted[:4] != 0).all(), "one group has no spread"


@pytest.mark.parametrize("name", ["scores_two_functions", "scores_two_functions_failed"])
def test_advantages_of_several_functions_are_those_of_trl(trl, name):
    """GDPO, TRL's `normalize_then_sum`."""
    scores = np.asarray(BATCH[name], float)
    weights = [1.0, 0.5]
    fields = {"multi_objective_aggregation": "normalize_then_sum", "weights": weights}
    wanted = trl_advantages(trl, scores, **fields)
    with jax.enable_x64(True):
        given = jnp.asarray(scores), jnp.asarray(weights), jnp.asarray(GROUPS), jnp.ones(12, bool)
        found = decoupled_advantages(*given, ddof=DDOF, epsilon=EPSILON)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=TOLERANCE)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("clip", ["plain", "higher", "narrow"])
@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("reward_clip", [None, 0.6])
@pytest.mark.parametrize("beta", [0.0, 0.05])
def test_the_rloo_loss_is_that_of_trl(trl, beta, reward_clip, normalize, clip, mask):
    """The ratio is of the whole completion, and k1 summed over it is in the score (policy-gradient.md 2.2, 2.5). TRL's
    value, not its gradient, holds −A of a row without an action, whose ratio is 1 there."""
    live = MASKS[mask]
    fields = {"beta": beta, "normalize_advantages": normalize}
    clip_range = None if reward_clip is None else (-reward_clip, reward_clip)
    wanted = trl_rloo_advantages(trl, SCORES, live, reward_clip_range=clip_range, **fields)
    method = RLOOMethod(num_generations=GROUP, reward_clip=reward_clip, **CLIPS[clip], **fields)
    clipped = SCORES if reward_clip is None else np.clip(SCORES, -reward_clip, reward_clip)
    scores = clipped - beta * np.sum(np.where(live, OLD - REF, 0.0), axis=1)
    found = jrl_advantages(rloo_advantages, method, scores)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=TOLERANCE)

    losses, gradients = jrl_losses(rloo_loss(method), wanted[None], live[None], np.ones((1, *live.shape)))
    value, slope = trl_loss(trl, "rloo", method, wanted, live, None)
    value += np.where(live.any(axis=1), 0.0, wanted).mean()
    assert_close(losses[0], value, abs(value), "value")
    assert_close(gradients[0], slope, float(np.abs(slope).max()), "gradient")

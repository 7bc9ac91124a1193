# SPDX-License-Identifier: Apache-2.0
"""Every `make_*_update` keeps one contract: `(state, frozen, batch, key) -> (state, metrics)`.

A new algorithm adds a row to `CASES`, nothing else.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.forward import Reader
from jrl.learners.ddpo import init_ddpo_state, make_ddpo_update
from jrl.learners.dpo import init_dpo_state, make_dpo_update
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_algorithms import algorithm
from jrl.learners.ilql import ILQLConfig, init_ilql_state, make_ilql_update
from jrl.learners.online import init_online_state, make_online_update
from jrl.learners.ppo import PPOConfig
from jrl.learners.reward_gradient import REWARD, make_reward_gradient_update
from jrl.learners.reward_gradient_config import RewardGradientConfig
from jrl.learners.reward_model import make_reward_model_update
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.ops.metrics import finalize
from jrl.ops.rewards import last_token_scores
from jrl.trlx.loop import make_loss_update
from jrl.typing import (
    DDPOBatch,
    DifferentiableReward,
    Features,
    Frozen,
    Max,
    Mean,
    Min,
    PolicyFns,
    RewardGradientBatch,
    Rollouts,
    Trajectories,
    Update,
)
from tests.diffusion_toy import SD_SCHEDULE
from tests.learners.batches import (
    CHUNK_BYTES,
    adam,
    copied,
    random_comparisons,
    random_preferences,
    random_sequences,
    rewarded_samples,
    stored_rollouts,
)
from tests.learners.ddpo_bandit import FROZEN, SHAPE, STEPS, bandit, bandit_config, theta
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.tiny import tiny_policy

NUM_ROWS = 8
WIDTH = random_sequences(NUM_ROWS).mask.shape[1]


class Case(NamedTuple):
    """One algorithm.

    Attributes:
      make: `(policy, logprob_chunk_bytes, minibatch_size) -> update`.
      init: `params -> state`.
      batch: A batch of NUM_ROWS rows.
      num_q_heads: Q heads of the model.
      reads_logits: Whether the language-model head is read.
      start: `() -> (params, frozen)` of a model that is no language model.
    """

    make: Callable[[PolicyFns, int, int, int], Update]
    init: Callable[[Any], Any]
    batch: Callable[[], Any]
    num_q_heads: int = 0
    reads_logits: bool = True
    start: Callable[[], tuple[Any, Any]] | None = None


def _ppo(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    return ppo_update(
        policy,
        adam(),
        PPOConfig(ppo_epochs=2, target=1.0, scale_reward="running"),
        batch_size=4,
        minibatch_size=minibatch_size,
        logprob_chunk_bytes=chunk_bytes,
        temperature=1.0,
    )


GRPO = algorithm("dapo", num_rollouts=8, num_generations=4, num_iterations=2, beta=0.04, kl_estimator="k2")


def _grpo(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    return make_online_update(
        Reader(policy, chunk_bytes=chunk_bytes),
        adam(),
        grpo_recipe(GRPO),
        batch_size=4,
        minibatch_size=minibatch_size,
    )


def _grouped_rollouts() -> Rollouts:
    """Two groups, of which one is left out."""
    rollouts = stored_rollouts("llama", 1, num_rows=NUM_ROWS, drift=0.1)
    groups = jnp.arange(NUM_ROWS) // 4
    return rollouts._replace(groups=groups, kept=groups == 1)


def _sft(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    return make_sft_update(
        Reader(policy, chunk_bytes=chunk_bytes), adam(), batch_size=NUM_ROWS, minibatch_size=minibatch_size
    )


def _ilql(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    return make_ilql_update(
        Reader(policy, chunk_bytes=chunk_bytes),
        adam(),
        ILQLConfig(steps_for_target_q_sync=2),
        batch_size=NUM_ROWS,
        minibatch_size=minibatch_size,
    )


def _reward_model(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    del chunk_bytes

    def score(params: Any, frozen: Frozen, inputs: Any, dropout_key: Any) -> Any:
        features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, dropout_key)
        return last_token_scores(policy.heads(params, features.value)["values"], inputs.attention_mask)

    config = RewardConfig(center_rewards_coefficient=0.01)
    return make_reward_model_update(score, adam(), config, batch_size=NUM_ROWS, minibatch_size=minibatch_size)


def _dpo(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    return make_dpo_update(
        Reader(policy, chunk_bytes=chunk_bytes),
        adam(),
        DPOConfig(
            loss_type=["sigmoid", "sft"], use_weighting=True, sync_ref_model=True, ref_model_sync_steps=2
        ),
        batch_size=NUM_ROWS,
        minibatch_size=minibatch_size,
    )


DDPO = bandit_config(old_log_probs="recompute", ema_decay=0.9)


def _ddpo(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    del policy, chunk_bytes
    return make_ddpo_update(
        bandit(), SD_SCHEDULE, adam(), DDPO, batch_size=NUM_ROWS, minibatch_size=minibatch_size
    )


def _random_trajectories() -> DDPOBatch:
    rng = np.random.default_rng(0)
    states = jnp.asarray(rng.normal(size=(NUM_ROWS, STEPS + 1, *SHAPE)), jnp.float32)
    trajectories = Trajectories(states, jnp.zeros((NUM_ROWS, STEPS)), jnp.ones((NUM_ROWS, 1, 1)))
    advantages = jnp.asarray(rng.normal(size=NUM_ROWS), jnp.float32)
    return DDPOBatch(trajectories, FROZEN["strength"], advantages)


class _ScriptTrainer:
    """The part of a trainer with a loss of its own that its update reads."""

    def __init__(self, policy: PolicyFns, minibatch_size: int) -> None:
        self.opt, self.mb_size, self.model = adam(), minibatch_size, self
        self.config = jrl.default_sft_config()
        self._policy = policy
        self._bound: tuple[Any, Frozen] | None = None

    @contextlib.contextmanager
    def bound(self, params: Any, frozen: Frozen) -> Iterator[None]:
        self._bound = params, frozen
        yield
        self._bound = None

    def loss(self, batch: Any) -> tuple[jax.Array, dict[str, Any]]:
        assert self._bound is not None, "called outside `bound`"
        params, frozen = self._bound
        features = self._policy.branch(params, frozen, self._policy.trunk(frozen, batch), batch, None)
        loss = jnp.mean(jnp.square(self._policy.heads(params, features.value)["values"] - 1.0))
        return loss, {"losses/total": loss}


def _loss(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    del chunk_bytes
    trainer: Any = _ScriptTrainer(policy, minibatch_size)
    return make_loss_update(trainer)


def _reward_gradient(policy: PolicyFns, chunk_bytes: int, minibatch_size: int) -> Update:
    del policy, chunk_bytes

    def score(params: Any, images: jax.Array, conditions: jax.Array) -> jax.Array:
        return -jnp.square(images.mean(axis=(1, 2, 3)) - params["target"] - conditions)

    return make_reward_gradient_update(
        bandit(),
        DifferentiableReward(score),
        SD_SCHEDULE,
        adam(),
        RewardGradientConfig(sample_num_steps=STEPS, num_last_steps=2, sample_guidance_scale=1.0),
        batch_size=NUM_ROWS,
        minibatch_size=minibatch_size,
    )


CASES = {
    "ddpo": Case(
        _ddpo,
        lambda params: init_ddpo_state(params, adam(), DDPO),
        _random_trajectories,
        reads_logits=False,
        start=lambda: (theta(), FROZEN),
    ),
    "dpo": Case(
        _dpo,
        lambda params: init_dpo_state(params, adam(), jax.tree.map(jnp.copy, params)),
        lambda: random_preferences(NUM_ROWS, copies=1),
    ),
    "ilql": Case(
        _ilql,
        lambda params: init_ilql_state(params, adam()),
        lambda: rewarded_samples(NUM_ROWS),
        num_q_heads=2,
    ),
    "loss": Case(
        _loss,
        lambda params: init_train_state(params, adam()),
        lambda: random_sequences(NUM_ROWS).inputs,
        reads_logits=False,
    ),
    "online": Case(
        _ppo,
        lambda params: ppo_state(params, adam(), PPOConfig()),
        lambda: stored_rollouts("llama", 1, num_rows=NUM_ROWS, drift=0.1),
    ),
    "online, with groups": Case(
        _grpo, lambda params: init_online_state(params, adam(), grpo_recipe(GRPO)), _grouped_rollouts
    ),
    "reward_gradient": Case(
        _reward_gradient,
        lambda params: init_train_state(params, adam()),
        lambda: RewardGradientBatch(*_random_trajectories()[:2], jnp.arange(NUM_ROWS, dtype=jnp.float32)),
        reads_logits=False,
        start=lambda: (theta(), {**FROZEN, REWARD: {"target": jnp.float32(0.3)}}),
    ),
    "reward_model": Case(
        _reward_model,
        lambda params: init_train_state(params, adam()),
        lambda: random_comparisons(NUM_ROWS),
        reads_logits=False,
    ),
    "sft": Case(_sft, lambda params: init_train_state(params, adam()), lambda: random_sequences(NUM_ROWS)),
}


@functools.cache
def run(name: str) -> dict[str, Any]:
    """Three calls of an algorithm's jitted update on the tiny grouped-query model with one unfrozen layer."""
    case = CASES[name]
    policy, params, frozen, _ = tiny_policy("llama", 1, num_q_heads=case.num_q_heads)
    if case.start is not None:
        params, frozen = case.start()
    traces = []
    update = case.make(policy, CHUNK_BYTES, 4)

    def counted(state: Any, frozen: Frozen, batch: Any, key: Any) -> Any:
        traces.append(1)
        return update(state, frozen, batch, key)

    jitted = jax.jit(counted, donate_argnums=0)
    before, batch = case.init(copied(params)), case.batch()
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), before)
    frozen_before = jax.tree.map(np.array, frozen)
    state, donated = before, jax.tree.leaves(before)
    for step in range(3):
        state, metrics = jitted(state, frozen, batch, jax.random.key(step))
    jax.block_until_ready(state)
    return dict(
        update=update,
        params=params,
        reads_logits=case.reads_logits,
        start=shapes,
        state=state,
        metrics=metrics,
        traces=len(traces),
        compilations=jitted._cache_size(),
        donated=[leaf.is_deleted() for leaf in donated],
        frozen=(frozen_before, frozen),
    )


@pytest.fixture(scope="module", params=sorted(CASES))
def result(request: pytest.FixtureRequest) -> dict[str, Any]:
    return run(request.param)


def test_every_learner_has_a_case() -> None:
    made = set()
    for path in Path(jrl.__path__[0]).rglob("*.py"):
        made |= set(re.findall(r"^def make_(\w+)_update\(", path.read_text(encoding="utf-8"), re.MULTILINE))
    assert made == {name.partition(",")[0] for name in CASES}


def test_an_update_takes_state_frozen_batch_and_key(result: dict[str, Any]) -> None:
    parameters = inspect.signature(result["update"]).parameters
    names, more = ["state", "frozen", "batch", "key"], ["last_step", "reference"]
    assert list(parameters) in [[*names, *more[:count]] for count in range(3)]
    assert all(parameters[name].default is None for name in list(parameters)[len(names) :])


def test_the_state_keeps_its_tree_shapes_and_types(result: dict[str, Any]) -> None:
    after = jax.tree.map(lambda x: (x.shape, x.dtype), result["state"])
    assert jax.tree.structure(after) == jax.tree.structure(result["start"])
    assert after == result["start"]


def test_lore_7_2_parameters_and_moments_are_float32(result: dict[str, Any]) -> None:
    types = {leaf.dtype for leaf in jax.tree.leaves(result["state"])}
    assert types == {np.dtype("float32"), np.dtype("int32"), np.dtype("bool")}


def test_an_update_is_traced_and_compiled_once(result: dict[str, Any]) -> None:
    assert result["traces"] == 1 and result["compilations"] == 1


def test_the_state_is_donated_whole(result: dict[str, Any]) -> None:
    assert all(result["donated"])


def test_lore_7_5_frozen_arrays_are_the_same_to_the_bit(result: dict[str, Any]) -> None:
    jax.tree.map(np.testing.assert_array_equal, *result["frozen"])


def test_parameters_move(result: dict[str, Any]) -> None:
    state, params = result["state"], result["params"]
    train = getattr(state, "train", state)
    # All but the value head, which supervised tuning leaves alone, and a head that is not read.
    unread = {"v_head"} if result["reads_logits"] else {"lm_head"}
    trained = {name: tree for name, tree in train.params.items() if name not in unread}
    for (path, new), old in zip(
        jax.tree_util.tree_leaves_with_path(trained),
        jax.tree.leaves({name: params[name] for name in trained}),
        strict=True,
    ):
        assert np.any(np.asarray(new) != np.asarray(old)), path


def test_metrics_are_means_and_maxima_of_scalars(result: dict[str, Any]) -> None:
    for name, metric in result["metrics"].items():
        assert isinstance(metric, Mean | Max | Min), name
        assert all(jnp.ndim(part) == 0 for part in metric), name
        assert name.count("/") == 1, name
    numbers = finalize(result["metrics"])
    assert all(np.isfinite(value) for value in numbers.values())
    assert {"optim/grad_norm", "optim/learning_rate", "optim/skipped_steps"} <= set(numbers)


LARGE_VOCAB = 50_257


def wide_policy(num_q_heads: int, width: int = 4) -> tuple[PolicyFns, Any]:
    """A policy whose only large arrays are its heads, and shapes of its parameters."""

    def branch(params: Any, frozen: Any, trunk: Any, inputs: Any, dropout_key: Any) -> Features:
        hidden = jax.nn.one_hot(inputs.tokens % width, width) * params["scale"]
        return Features(hidden, hidden)

    def heads(params: Any, hidden: Any, actions: Any = None) -> Any:
        found = {"values": hidden @ params["v_head"]} if "v_head" in params else {}
        if "q_heads" in params:
            kernels = params["q_heads"].values()
            found["q_values"] = jnp.stack(
                [hidden @ kernel for kernel in kernels]
                if actions is None
                else [
                    jnp.sum(hidden * jnp.moveaxis(kernel[:, actions], 0, -1), axis=-1) for kernel in kernels
                ]
            )
        return found

    policy = PolicyFns(
        trunk=lambda frozen, inputs: None,
        branch=branch,
        logits=lambda params, frozen, hidden: hidden @ params["head"],
        heads=heads,
        init_cache=lambda params, frozen, prompts, length: None,
        decode=lambda params, frozen, inputs, cache: (branch(params, frozen, None, inputs, None), cache),
    )
    shape = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    params = {"scale": shape(()), "head": shape((width, LARGE_VOCAB)), "v_head": shape((width,))}
    if num_q_heads:
        params["q_heads"] = {str(i): shape((width, LARGE_VOCAB)) for i in range(num_q_heads)}
    return policy, params


def largest_array(jaxpr: Any) -> int:
    """Most elements of any array in a jaxpr, inner ones included."""

    def sizes(jaxpr: Any) -> Iterator[int]:
        for equation in jaxpr.eqns:
            for variable in equation.outvars:
                yield int(np.prod(variable.aval.shape))
            for inner in jax.extend.core.jaxprs_in_params(equation.params):
                yield from sizes(inner)

    return max(sizes(jaxpr))


@pytest.mark.parametrize("name", sorted(name for name, case in CASES.items() if case.reads_logits))
def test_no_update_holds_the_logits_of_a_whole_minibatch(name: str) -> None:
    """At B·T = 4 chunks and V = 50,257; with room for all of it, the plain path does hold them."""
    case = CASES[name]
    policy, params = wide_policy(case.num_q_heads)
    minibatch = 4
    whole = minibatch * WIDTH * LARGE_VOCAB
    state = jax.eval_shape(case.init, params)
    batch = jax.eval_shape(case.batch)

    def largest(chunk_bytes: int) -> int:
        update = case.make(policy, chunk_bytes, minibatch)
        return largest_array(jax.make_jaxpr(update)(state, {}, batch, jax.random.key(0)).jaxpr)

    assert largest(4 * whole // 4) < whole
    assert largest(64 * whole) >= whole, "room for logits and every head's Q values"


def test_ilql_has_one_of_its_reads_in_memory_at_a_time() -> None:
    """Where not all fit: else the compiler computes logits and heads again side by side."""
    case = CASES["ilql"]
    policy, params = wide_policy(case.num_q_heads)
    state, batch, minibatch = jax.eval_shape(case.init, params), jax.eval_shape(case.batch), 4
    one = 4 * minibatch * WIDTH * LARGE_VOCAB

    def reads_held(chunk_bytes: int) -> float:
        update = jax.jit(case.make(policy, chunk_bytes, minibatch))
        compiled = update.lower(state, {}, batch, jax.random.key(0)).compile()
        return compiled.memory_analysis().temp_size_in_bytes / one

    assert reads_held(one) < 2 and reads_held(4 * one) < 2
    assert reads_held(6 * one) > 3, "logits and values of two heads are kept"

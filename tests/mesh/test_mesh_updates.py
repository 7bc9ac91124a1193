# SPDX-License-Identifier: Apache-2.0
"""On the same stored rollouts, one device and eight compute the same update."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.forward import Reader
from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_config import GRPOConfig
from jrl.learners.ilql import ILQLConfig, init_ilql_state, make_ilql_update
from jrl.learners.online import init_online_state, make_online_update
from jrl.learners.ppo import PPOConfig
from jrl.learners.sft import make_sft_update
from jrl.learners.state import TrainState, init_train_state
from jrl.mesh import batch_sharding, make_mesh, replicated, tree_shardings
from jrl.models.policy import init_reference
from jrl.ops.metrics import finalize
from tests.learners.batches import (
    CHUNK_BYTES,
    adam,
    copied,
    random_sequences,
    rewarded_samples,
    sgd,
    stored_rollouts,
)
from tests.learners.ppo_parts import ppo_state, ppo_update
from tests.tiny import loud_heads, tiny_lm, tiny_policy

pytestmark = pytest.mark.mesh

NUM_ROWS = 16
LR = 1e-3
REMATERIALIZED = "Involuntary full rematerialization"


def place(mesh: Mesh | None, state: Any, frozen: Any, batch: Any) -> tuple[Any, Any, Any]:
    """Everything where a run on this mesh would have it; without a mesh, on one device."""
    # Placing may share a buffer with what is placed, and donating deletes it for both.
    state = copied(state)
    if mesh is None:
        return state, frozen, batch
    rows = batch_sharding(mesh)
    return (
        jax.device_put(state, tree_shardings(mesh, state)[0]),
        jax.device_put(frozen, tree_shardings(mesh, frozen)[0]),
        jax.tree.map(lambda x: jax.device_put(x, rows), batch),
    )


def run(
    update: Any, mesh: Mesh | None, state: Any, frozen: Any, batch: Any, reference: Any = None
) -> tuple[TrainState, dict[str, float]]:
    """The train state after one call of the update, on the host, and its metrics."""
    state, frozen, batch = place(mesh, state, frozen, batch)
    if mesh is not None and reference is not None:
        reference = jax.device_put(reference, tree_shardings(mesh, reference)[0])
    more = () if reference is None else (None, reference)
    jitted = jax.jit(update, donate_argnums=0)
    if mesh is None:
        state, metrics = jitted(state, frozen, batch, jax.random.key(0), *more)
    else:
        with jax.set_mesh(mesh):
            key = jax.device_put(jax.random.key(0), replicated(mesh))
            state, metrics = jitted(state, frozen, batch, key, *more)
    train = state if isinstance(state, TrainState) else state.train
    return jax.device_get(train), finalize(metrics)


def ppo(
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    *,
    steps: int,
    unfrozen: int = -1,
    family: str = "llama",
) -> tuple[TrainState, dict[str, float]]:
    """One PPO update of 1 or 4 optimizer steps on stored rollouts."""
    policy, params, frozen, _ = tiny_policy(family, unfrozen)
    config = PPOConfig(
        ppo_epochs=2 if steps > 1 else 1, target=1.0, scale_reward="running", entropy_coef=0.01
    )
    update = ppo_update(
        policy,
        optimizer,
        config,
        batch_size=NUM_ROWS // 2 if steps > 1 else NUM_ROWS,
        minibatch_size=8,
        logprob_chunk_bytes=CHUNK_BYTES,
        temperature=0.8,
    )
    rollouts = stored_rollouts(family, unfrozen, num_rows=NUM_ROWS, temperature=0.8, drift=0.1)
    return run(update, mesh, ppo_state(params, optimizer, config), frozen, rollouts)


def sft(
    optimizer: optax.GradientTransformation, mesh: Mesh | None, *, steps: int
) -> tuple[TrainState, dict[str, float]]:
    """One supervised step."""
    assert steps == 1
    policy, params, frozen, _ = tiny_policy("llama", -1, None)
    update = make_sft_update(
        Reader(policy, chunk_bytes=CHUNK_BYTES), optimizer, batch_size=NUM_ROWS, minibatch_size=8
    )
    return run(update, mesh, init_train_state(params, optimizer), frozen, random_sequences(NUM_ROWS))


def ilql(
    optimizer: optax.GradientTransformation, mesh: Mesh | None, *, steps: int, unfrozen: int = -1
) -> tuple[TrainState, dict[str, float]]:
    """One step of ILQL, a sync at its end. Q heads are split over the vocabulary, as the head of the logits."""
    assert steps == 1
    policy, params, frozen, _ = tiny_policy("llama", unfrozen, num_q_heads=2)
    config = ILQLConfig(beta=0.5, alpha=0.25, steps_for_target_q_sync=1)
    update = make_ilql_update(
        Reader(policy, chunk_bytes=CHUNK_BYTES), optimizer, config, batch_size=NUM_ROWS, minibatch_size=8
    )
    state = init_ilql_state(loud_heads(params), optimizer)
    return run(update, mesh, state, frozen, rewarded_samples(NUM_ROWS))


def grpo(
    optimizer: optax.GradientTransformation,
    mesh: Mesh | None,
    *,
    steps: int,
    reduction: str = "token",
    estimator: str = "group_relative",
    aggregation: str = "sum_then_normalize",
    kl_estimator: str = "k2",
) -> tuple[TrainState, dict[str, float]]:
    """One update of 1 or 4 optimizer steps; each of four groups lies on several devices, and one is left out."""
    policy, params, frozen, _ = tiny_policy("llama", -1)
    reference = init_reference(tiny_lm("llama", seed=1)[1]) if kl_estimator == "full" else None
    config = GRPOConfig(
        num_generations=4,
        num_rollouts=NUM_ROWS,
        num_iterations=2 if steps > 1 else 1,
        estimator=estimator,
        scale_rewards="group" if estimator == "group_relative" else "none",
        reduction=reduction,
        beta=0.04,
        kl_estimator=kl_estimator,
        entropy_coef=0.01,
        reward_weights=[1.0, 0.5, 2.0],
        multi_objective_aggregation=aggregation,
    )
    recipe = grpo_recipe(config)
    update = make_online_update(
        Reader(policy, 0.8, chunk_bytes=CHUNK_BYTES),
        optimizer,
        recipe,
        batch_size=NUM_ROWS // 2 if steps > 1 else NUM_ROWS,
        minibatch_size=8,
    )
    rollouts = stored_rollouts("llama", -1, num_rows=NUM_ROWS, temperature=0.8, drift=0.1)
    groups = jnp.arange(NUM_ROWS) // 4
    grouped = rollouts._replace(groups=groups, kept=groups != 2)
    if recipe.aggregate is not None:
        scores = jax.random.normal(jax.random.key(5), (NUM_ROWS, 3))
        silent = jax.random.bernoulli(jax.random.key(6), 0.2, scores.shape)
        grouped = grouped._replace(scores_by_function=jnp.where(silent, jnp.nan, scores))
    return run(update, mesh, init_online_state(params, optimizer, recipe), frozen, grouped, reference)


@functools.cache
def expected(
    algorithm: Callable[..., Any], rule: str, steps: int, **kwargs: Any
) -> tuple[TrainState, dict[str, float]]:
    """What one device computes."""
    return algorithm(OPTIMIZERS[rule](), None, steps=steps, **kwargs)


# The tiny T5 has a head of deviation 1: at a rate of 0.1 it diverges, and rounding with it.
OPTIMIZERS = {"sgd": lambda: sgd(0.1), "t5_sgd": lambda: sgd(1e-3), "adam": lambda: adam(LR)}


def ratio_noise(family: str, unfrozen: int = -1) -> float:
    """How far rounding takes the first ratio from 1: four ulp of the largest |log-prob| on either side.

    The tiny T5's log-probs reach 35 nats, Llama's 6.5: one bound for both would be too tight or too wide.
    """
    rollouts = stored_rollouts(family, unfrozen, num_rows=NUM_ROWS, temperature=0.8)
    return float(8 * np.spacing(np.float32(np.max(np.abs(rollouts.scored.logprobs)))))


def assert_metrics_agree(
    actual: dict[str, float], wanted: dict[str, float], noise: float | None = None
) -> None:
    """`noise`: the largest deviation of the first ratio, which is rounding and so differs."""
    assert actual.keys() == wanted.keys()
    for name, value in wanted.items():
        if name.endswith("/ratio_max_dev_first_minibatch"):
            assert noise is not None and actual[name] <= noise
        else:
            assert actual[name] == pytest.approx(value, rel=1e-5, abs=1e-5), name


def first_moment(state: TrainState) -> Any:
    """After one step of Adam from rest, (1 − β1) times the gradient."""
    return optax.tree.get(state.opt_state, "mu")


def largest(of: Callable[[np.ndarray, np.ndarray], float], first: Any, second: Any) -> float:
    return max(map(of, jax.tree.leaves(first), jax.tree.leaves(second)))


def difference(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.max(np.abs(a - b)))


def significant(moment: np.ndarray, a: np.ndarray, b: np.ndarray) -> float:
    """Largest difference where the gradient is more than the noise of a sum: Adam scales noise up to a full step."""
    real = np.abs(moment) > 1e-6 * np.linalg.norm(moment)
    return float(np.max(np.abs(a - b), where=real, initial=0.0))


def relative_to_norm(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / max(np.linalg.norm(b), 1e-6))


@pytest.mark.parametrize("algorithm", [ppo, sft, ilql])
def test_lore_5_2_gradients_and_metrics_agree(
    algorithm: Callable[..., Any], mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    wanted, wanted_metrics = expected(algorithm, "adam", 1)
    capfd.readouterr()
    actual, metrics = algorithm(adam(LR), mesh, steps=1)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama"))
    assert largest(relative_to_norm, first_moment(actual), first_moment(wanted)) < 1e-5
    moved = jax.tree.map(significant, first_moment(wanted), actual.params, wanted.params)
    assert max(jax.tree.leaves(moved)) < 0.05 * LR


@pytest.mark.parametrize("reduction", ["constant", "token", "sequence", "sequence_sum", "group_token"])
def test_lore_5_2_groups_may_lie_on_several_devices(
    reduction: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two rows of each group on a device: baselines and denominators are those of the whole batch."""
    wanted, wanted_metrics = expected(grpo, "adam", 1, reduction=reduction)
    capfd.readouterr()
    actual, metrics = grpo(adam(LR), make_mesh(8, 1, 1), steps=1, reduction=reduction)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama"))
    assert largest(relative_to_norm, first_moment(actual), first_moment(wanted)) < 1e-5


def test_each_functions_scores_may_lie_on_several_devices(capfd: pytest.CaptureFixture[str]) -> None:
    """GDPO: deviations within the groups, and those of the weighted sums over the whole batch."""
    wanted, wanted_metrics = expected(grpo, "adam", 1, aggregation="normalize_then_sum")
    capfd.readouterr()
    actual, metrics = grpo(adam(LR), make_mesh(8, 1, 1), steps=1, aggregation="normalize_then_sum")
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama"))
    assert largest(relative_to_norm, first_moment(actual), first_moment(wanted)) < 1e-5
    summed, _ = expected(grpo, "adam", 1, reduction="token")
    assert largest(relative_to_norm, first_moment(actual), first_moment(summed)) > 1e-2


def test_the_whole_divergence_agrees(mesh: Mesh, capfd: pytest.CaptureFixture[str]) -> None:
    """Policy and reference read in every microbatch, on every mesh."""
    wanted, wanted_metrics = expected(grpo, "adam", 1, kl_estimator="full")
    capfd.readouterr()
    actual, metrics = grpo(adam(LR), mesh, steps=1, kl_estimator="full")
    assert REMATERIALIZED not in capfd.readouterr().err
    assert metrics["grpo/kl_term"] > 0.1
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama"))
    assert largest(relative_to_norm, first_moment(actual), first_moment(wanted)) < 1e-5


@pytest.mark.parametrize("estimator", ["group_relative", "group_then_batch"])
def test_lore_4_13_a_whole_update_with_groups_agrees(
    estimator: str, mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two epochs of two steps."""
    wanted, wanted_metrics = expected(grpo, "sgd", 4, estimator=estimator)
    capfd.readouterr()
    actual, metrics = grpo(OPTIMIZERS["sgd"](), mesh, steps=4, estimator=estimator)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise("llama"))
    assert largest(difference, actual.params, wanted.params) < 1e-6
    assert int(actual.step) == 4


@pytest.mark.parametrize(("family", "unfrozen"), [("llama", -1), ("llama", 1), ("t5", -1), ("t5", 1)])
def test_lore_4_4_a_whole_ppo_update_agrees(
    family: str, unfrozen: int, mesh: Mesh, capfd: pytest.CaptureFixture[str]
) -> None:
    """Two epochs of two steps: whitening, moments and denominators are those of the whole batch."""
    rule = "t5_sgd" if family == "t5" else "sgd"
    wanted, wanted_metrics = expected(ppo, rule, 4, unfrozen=unfrozen, family=family)
    capfd.readouterr()
    actual, metrics = ppo(OPTIMIZERS[rule](), mesh, steps=4, unfrozen=unfrozen, family=family)
    assert REMATERIALIZED not in capfd.readouterr().err
    assert_metrics_agree(metrics, wanted_metrics, ratio_noise(family, unfrozen))
    assert largest(difference, actual.params, wanted.params) < 1e-6
    assert int(actual.step) == 4


def test_parameters_and_moments_are_really_split() -> None:
    mesh = make_mesh(1, 2, 4)
    _, params, _, _ = tiny_policy("llama", -1)
    placed, _, _ = place(mesh, init_train_state(params, adam()), {}, jnp.zeros(8))
    for tree in (placed.params, optax.tree.get(placed.opt_state, "mu")):
        embedding = tree["embed"]["embedding"]
        assert embedding.sharding.shard_shape(embedding.shape) == (
            embedding.shape[0] // 4,
            embedding.shape[1] // 2,
        )
        # Two key/value heads do not divide over four: replicated on that axis.
        kernel = tree["layers_0"]["attn"]["k"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (kernel.shape[0] // 2, *kernel.shape[1:])


def test_the_encoder_and_the_cross_attention_are_split_too() -> None:
    mesh = make_mesh(1, 2, 4)
    _, params, _, _ = tiny_policy("t5", -1)
    placed = jax.device_put(params, tree_shardings(mesh, params)[0])
    for layer, part in (("encoder_layers_0", "attn"), ("layers_1", "attn"), ("layers_1", "cross")):
        kernel = placed[layer][part]["k"]["kernel"]
        assert kernel.sharding.shard_shape(kernel.shape) == (16, 1, 8)
    bias = placed["decoder_relative_bias"]["embedding"]
    assert bias.sharding.shard_shape(bias.shape) == (8, 1)


def test_an_involuntary_rematerialization_would_be_seen(capfd: pytest.CaptureFixture[str]) -> None:
    """The compiler says it on standard error, from outside Python: this is what the other tests look for."""
    mesh = make_mesh(2, 2, 2)
    rows = NamedSharding(mesh, PartitionSpec(("data", "fsdp", "tensor")))
    crossed = NamedSharding(mesh, PartitionSpec("tensor", "data"))
    jax.jit(jnp.sin, in_shardings=rows, out_shardings=crossed)(jnp.ones((16, 16)))
    assert REMATERIALIZED in capfd.readouterr().err

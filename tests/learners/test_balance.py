# SPDX-License-Identifier: Apache-2.0
"""The balance loss of a mixture is of the whole optimizer batch, in every learner, and costs nothing when off."""

from __future__ import annotations

import copy
import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.balance import BALANCE
from jrl.learners.dpo import init_dpo_state, make_dpo_update
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig, init_ilql_state, make_ilql_update
from jrl.learners.online import init_online_state, make_online_update
from jrl.learners.ppo import PPOConfig, ppo_recipe
from jrl.learners.sft import SFTConfig, make_sft_update
from jrl.learners.state import init_train_state
from jrl.models.checkpoint import load_checkpoint
from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.model import CausalLM
from jrl.models.noise import EmbeddingNoise
from jrl.models.policy import make_policy
from jrl.ops import balance_loss
from jrl.ops.metrics import finalize
from jrl.typing import Rollouts, Scored
from tests.learners.batches import (
    CHUNK_BYTES,
    copied,
    random_preferences,
    random_sequences,
    rewarded_samples,
    sgd,
)
from tests.models.family_cases import CASES
from tests.tiny import tiny_lm

NUM_ROWS, COEF = 6, 0.5


@functools.cache
def model() -> tuple[CausalLM, Any]:
    """A tiny mixture, with a value head and two Q heads."""
    lm = CausalLM.from_config(CASES["mixtral"])
    sizes = lm.feature_width, lm.vocab_size, lm.config.padded_vocab_size
    heads = {"v_head": init_value_head("mlp", lm.feature_width, jax.random.key(1))}
    return lm, lm.init(jax.random.key(0)) | heads | init_q_heads(2, *sizes, jax.random.key(2))


def reader(coef: float, **options: Any) -> Reader:
    return Reader(model()[0].policy(counts_experts=coef > 0, **options), chunk_bytes=CHUNK_BYTES)


def body() -> Any:
    return {
        name: tree for name, tree in copied(model()[1]).items() if "head" not in name or name == "lm_head"
    }


def sft(coef: float, minibatch_size: int, **options: Any) -> tuple[Any, Any, Any]:
    update = make_sft_update(
        reader(coef, **options), sgd(), batch_size=8, minibatch_size=minibatch_size, balance_coef=coef
    )
    return update, init_train_state(body(), sgd()), random_sequences(NUM_ROWS)


def dpo(coef: float, minibatch_size: int) -> tuple[Any, Any, Any]:
    config = DPOConfig(router_aux_loss_coef=coef)
    update = make_dpo_update(reader(coef), sgd(), config, batch_size=8, minibatch_size=minibatch_size)
    return update, init_dpo_state(body(), sgd()), random_preferences(NUM_ROWS, copies=1)


def ilql(coef: float, minibatch_size: int) -> tuple[Any, Any, Any]:
    config = ILQLConfig(router_aux_loss_coef=coef)
    update = make_ilql_update(reader(coef), sgd(), config, batch_size=8, minibatch_size=minibatch_size)
    return update, init_ilql_state(copied(model()[1]), sgd()), rewarded_samples(NUM_ROWS)


def ppo(coef: float, minibatch_size: int) -> tuple[Any, Any, Any]:
    recipe = ppo_recipe(PPOConfig(ppo_epochs=1))
    update = make_online_update(
        reader(coef), sgd(), recipe, batch_size=8, minibatch_size=minibatch_size, balance_coef=coef
    )
    params = {name: tree for name, tree in copied(model()[1]).items() if "q_heads" not in name}
    sequences = random_sequences(NUM_ROWS)
    noise = jax.random.normal(jax.random.key(5), sequences.mask.shape)
    scored = Scored(noise - 4, noise - 4, 0 * noise)
    return update, init_online_state(params, sgd(), recipe), Rollouts(sequences, scored, noise)


LEARNERS = {"sft": sft, "dpo": dpo, "ilql": ilql, "ppo": ppo}


def step(name: str, coef: float, minibatch_size: int, **options: Any) -> tuple[Any, dict[str, float]]:
    """Parameters of the layers after one step of gradient descent, and the metrics."""
    update, state, batch = LEARNERS[name](coef, minibatch_size, **options)
    state, metrics = jax.jit(update)(state, {}, batch, jax.random.key(0))
    train = state.train if hasattr(state, "train") else state
    return train.params, finalize(metrics)


def routers(params: Any) -> np.ndarray:
    return np.stack([params[f"layers_{layer}"]["experts"]["router"]["kernel"] for layer in range(2)])


@pytest.mark.slow
@pytest.mark.parametrize("name", LEARNERS)
def test_microbatches_change_nothing_and_the_routers_move(name):
    whole, metrics = step(name, COEF, 8)
    parts, accumulated = step(name, COEF, 2)
    assert accumulated[BALANCE] == pytest.approx(metrics[BALANCE], rel=1e-5)
    assert 1.9 < metrics[BALANCE] < 5.0  # k = 2 at perfect balance, E = 5 at most
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), parts, whole)
    off, without = step(name, 0.0, 8)
    assert BALANCE not in without
    assert np.abs(routers(off) - routers(whole)).max() > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"share_layers": True}, {"remat": True}])
def test_shared_bodies_and_recomputed_layers_change_nothing(options):
    plain, metrics = step("sft", COEF, 8)
    found, again = step("sft", COEF, 8, **options)
    assert again[BALANCE] == pytest.approx(metrics[BALANCE], rel=1e-6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-6), found, plain)


@pytest.mark.parity
@pytest.mark.parametrize("case", ["mixtral", "jamba"])
def test_equals_the_loss_of_the_whole_torch_model(case, tmp_path):
    torch = pytest.importorskip("torch")
    from tests.models.parity import perturbed

    oracle = perturbed(copy.deepcopy(CASES[case]), 0)
    oracle.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    inputs = random_sequences(NUM_ROWS).inputs
    policy = loaded.model.policy(counts_experts=True)
    load = jax.jit(lambda p: policy.branch(p, {}, None, inputs, None).load)(loaded.params)
    load = jax.tree.map(lambda x: x.sum(axis=0), load)
    with torch.no_grad():
        wanted = oracle(
            torch.tensor(np.asarray(inputs.tokens)).long(),
            attention_mask=torch.tensor(np.asarray(inputs.attention_mask)).long(),
            output_router_logits=True,
        ).aux_loss
    np.testing.assert_allclose(balance_loss(load, load), float(wanted), atol=1e-6)


def test_a_loss_of_ones_own_is_refused():
    def own(params: Any, frozen: Any, batch: Any) -> Any:
        return jnp.float32(0.0), jnp.float32(1.0), {}

    update = make_sft_update(
        reader(COEF), sgd(), batch_size=8, minibatch_size=8, balance_coef=COEF, objective=own
    )
    with pytest.raises(ValueError, match="`router_aux_loss_coef` must be 0 beside a loss of your own"):
        jax.eval_shape(
            update, init_train_state(body(), sgd()), {}, random_sequences(NUM_ROWS), jax.random.key(0)
        )


def test_experts_that_do_not_train_are_refused():
    config = model()[0].config
    noise = EmbeddingNoise(5.0, alone=True)
    dense, expert = (replace(config.layers[0], experts=found) for found in (None, config.layers[0].experts))
    some = replace(config, layers=(dense, expert, dense, dense))
    for unfrozen in (0, 1, 2):
        with pytest.raises(ValueError, match=r"no layer with experts trains: .* experts are in \[1\]"):
            make_policy(some, num_layers_unfrozen=unfrozen, counts_experts=True)
    make_policy(some, num_layers_unfrozen=3, counts_experts=True)
    make_policy(some, num_layers_unfrozen=-1, counts_experts=True, noise=noise)
    with pytest.raises(ValueError, match="beside `neftune_noise_alpha` where layers are frozen"):
        make_policy(some, num_layers_unfrozen=3, counts_experts=True, noise=noise)


def test_what_has_no_experts_is_refused():
    with pytest.raises(ValueError, match="`router_aux_loss_coef` must be 0 for a model without a mixture"):
        tiny_lm("llama")[0].policy(counts_experts=True)
    with pytest.raises(ValueError, match=r"`method\.router_aux_loss_coef` must be at least 0, got -1"):
        SFTConfig(router_aux_loss_coef=-1.0)

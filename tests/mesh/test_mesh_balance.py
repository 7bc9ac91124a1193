# SPDX-License-Identifier: Apache-2.0
"""The balance loss of a mixture, and a record of its experts, on eight devices as on one."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.balance import BALANCE
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.mesh import make_mesh, tree_shardings
from jrl.ops.metrics import finalize
from jrl.placement import place_rows
from jrl.rollout.sampler import GenerationSettings, Sampler
from tests.learners.batches import CHUNK_BYTES, random_sequences, sgd
from tests.learners.test_balance import COEF, body, model, routers
from tests.tiny import EOS_ID, PAD_ID, tiny_prompts

pytestmark = pytest.mark.mesh


def step(mesh: Any, minibatch_size: int) -> tuple[Any, dict[str, float]]:
    """Parameters after one step of gradient descent on eight rows, and the metrics."""
    policy = model()[0].policy(counts_experts=True)
    reader = Reader(policy, chunk_bytes=CHUNK_BYTES)
    update = make_sft_update(reader, sgd(), batch_size=8, minibatch_size=minibatch_size, balance_coef=COEF)
    params, batch = body(), random_sequences(8)
    if mesh is None:
        state, metrics = jax.jit(update)(init_train_state(params, sgd()), {}, batch, jax.random.key(0))
        return jax.device_get(state.params), finalize(metrics)
    with jax.set_mesh(mesh):
        params = jax.device_put(params, tree_shardings(mesh, params)[0])
        state = init_train_state(params, sgd())
        state, metrics = jax.jit(update)(state, {}, place_rows(mesh, batch), jax.random.key(0))
        return jax.device_get(state.params), finalize(metrics)


def test_the_loss_is_of_all_rows_on_all_devices():
    params, metrics = step(None, 8)
    found, split = step(make_mesh(2, 2, 2), 4)
    assert split[BALANCE] == pytest.approx(metrics[BALANCE], rel=1e-5)
    np.testing.assert_allclose(routers(found), routers(params), atol=1e-5)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), found, params)


def test_records_are_those_of_one_device():
    lm, params = model()
    policy = lm.policy(routing_replay=True)
    settings = GenerationSettings(6, (EOS_ID,), PAD_ID)
    found = []
    for mesh in (make_mesh(1, 1, 1, devices=jax.devices()[:1]), make_mesh(2, 2, 2)):
        with jax.set_mesh(mesh):
            placed = jax.device_put(params, tree_shardings(mesh, params)[0])
            prompts = place_rows(mesh, tiny_prompts(8))
            sampler = Sampler(policy, mesh=mesh)
            found.append(
                jax.device_get(sampler(placed, {}, prompts, np.arange(8), settings, jax.random.key(1)))
            )
    one, eight = found
    np.testing.assert_array_equal(eight.tokens, one.tokens)
    written = np.arange(6)[None, :] < one.lengths[:, None] - 1
    known = np.concatenate([np.asarray(tiny_prompts(8).attention_mask), written[:, :5]], axis=1)
    assert known.any() and (one.experts[known] >= 0).all()
    np.testing.assert_array_equal(eight.experts[known], one.experts[known])

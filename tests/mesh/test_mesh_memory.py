# SPDX-License-Identifier: Apache-2.0
"""What `jrl plan` foretells is what the compiler reserves: arguments to the byte, temporary memory within a fifth.

Without remat only: XLA's CPU compiler does not order a program for memory, and so keeps much of what it recomputes.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from transformers import LlamaConfig

import jrl
from jrl.forward import Reader
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.mesh import batch_sharding, make_mesh, replicated
from jrl.models.model import make_model
from jrl.trainers.plan.run_plan import plan_run
from jrl.typing import ModelInputs, Sequences
from tests.mesh.shapes import key_shape, on, shape

pytestmark = pytest.mark.mesh
ROWS, LENGTH = 16, 128
MODEL = LlamaConfig(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=8,
    intermediate_size=768,
    vocab_size=4096,
    max_position_embeddings=256,
    tie_word_embeddings=False,
)


@pytest.mark.parametrize("sizes", [(1, 8, 1), (2, 2, 2), (1, 1, 8)], ids=str)
def test_the_plan_is_what_the_compiler_reserves(sizes):
    train = {"batch_size": ROWS, "minibatch_size": ROWS, "seq_length": LENGTH}
    config = jrl.default_sft_config().evolve(model={"model_path": MODEL}, train=train)
    mesh = make_mesh(*sizes)
    plan = plan_run(config, mesh.abstract_mesh)
    batch = on(mesh, batch_shapes(), batch_sharding(mesh))
    found = compiled_update(config, mesh, batch).memory_analysis()
    step_bytes = 4  # the key is not an argument: without dropout nothing reads it
    rows = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(batch))
    assert found.argument_size_in_bytes == sum(plan.held.values()) + rows + step_bytes
    assert plan.step_bytes == pytest.approx(found.temp_size_in_bytes, rel=1 / 5)


def batch_shapes() -> Sequences:
    inputs = ModelInputs(shape(ROWS, LENGTH, dtype=jnp.int32), shape(ROWS, LENGTH, dtype=bool))
    return Sequences(inputs, shape(ROWS, dtype=jnp.int32), shape(ROWS, LENGTH - 1, dtype=bool))


def compiled_update(config: Any, mesh: Any, batch: Sequences) -> Any:
    """The update of SFT as a trainer compiles it, from shapes alone."""
    lm = make_model(MODEL)
    key = key_shape()
    params = jax.eval_shape(lambda key: lm.split_params(lm.init(key), num_layers_unfrozen=-1)[0], key)
    optimizer = make_optimizer(
        config.optimizer.name,
        config.optimizer.kwargs,
        make_schedule(config.scheduler.name, config.scheduler.kwargs),
        max_grad_norm=config.train.max_grad_norm,
    )
    policy = lm.policy(num_layers_unfrozen=-1)
    cut = {"batch_size": ROWS, "minibatch_size": ROWS}
    update = make_sft_update(Reader(policy, chunk_bytes=config.train.logprob_chunk_bytes), optimizer, **cut)
    state = jax.eval_shape(lambda params: init_train_state(params, optimizer), params)
    state = on(mesh, state)
    places = jax.tree.map(lambda x: x.sharding, state)
    with jax.set_mesh(mesh):
        jitted = jax.jit(update, donate_argnums=0, out_shardings=(places, replicated(mesh)))
        return jitted.lower(state, {}, batch, on(mesh, key, replicated(mesh))).compile()

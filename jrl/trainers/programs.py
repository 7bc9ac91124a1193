# SPDX-License-Identifier: Apache-2.0
"""A run's compiled calls: what trainers call, and what `jrl plan --compile` compiles for absent devices.

Both take a program from the same function, so a plan speaks of the very program that runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding

from jrl.compilation import COMPILER_OPTIONS
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.mesh import replicated, tree_shardings
from jrl.placement import rows_sharding
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.trainers.config.gen_kwargs import parse_gen_kwargs
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.plan.model_part import LanguageShapes, ModelShapes
from jrl.typing import ModelInputs, Params, SamplingKnobs, Sequences, Update


@dataclass(frozen=True)
class Program:
    """A compiled call, and what it is called with.

    Attributes:
      name: What it does: "sample", "score", "update", ...
      function: From `jax.jit`.
      arguments: Trees of `jax.ShapeDtypeStruct` with shardings, by position.
      held: Places of the arguments that a run holds anyway: parameters, a reference, the state.
      rounds: Of a loop that may end early, if it does not: tokens of a completion, optimizer steps of a pass.
    """

    name: str
    function: Any
    arguments: tuple[Any, ...]
    held: tuple[int, ...] = (0, 1)
    rounds: int = 1

    @property
    def given(self) -> tuple[Any, ...]:
        """The other arguments."""
        return tuple(tree for place, tree in enumerate(self.arguments) if place not in self.held)

    def result(self) -> Any:
        """Shapes of what it returns."""
        return jax.eval_shape(self.function, *self.arguments)


def optimizer_of(config: TRLConfig) -> optax.GradientTransformation:
    """The optimizer and schedule that a configuration names, behind the limit of the gradient's norm."""
    optimizer, scheduler = config.optimizer, config.scheduler
    return make_optimizer(
        optimizer.name,
        optimizer.kwargs,
        make_schedule(scheduler.name, scheduler.kwargs),
        max_grad_norm=config.train.max_grad_norm,
    )


def jit_update(init: Callable[[Params], Any], update: Update, params: Params, mesh: Mesh) -> tuple[Any, Any]:
    """(the jitted update, which takes its state over by donation; the state's shardings).

    Args:
      init: Makes the first state of trainable parameters.
      update: `(state, frozen, batch, key, ...) -> (state, metrics)`.
      params: Trainable parameters, arrays or shapes.
      mesh: Where they are.
    """
    shardings, _ = tree_shardings(mesh, jax.eval_shape(init, params))
    jitted = jax.jit(
        update,
        donate_argnums=0,
        out_shardings=(shardings, replicated(mesh)),
        compiler_options=COMPILER_OPTIONS,
    )
    return jitted, shardings


def with_shardings(tree: Any, shardings: Any) -> Any:
    """Shapes of a tree, each with its place: one sharding for all, or a tree of them."""
    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: _placed(leaf, shardings), tree)
    return jax.tree.map(_placed, tree, shardings)


def placed_bytes(tree: Any) -> int:
    """Bytes of a tree of shapes with shardings on one device."""
    return sum(
        math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )


def weights_on(mesh: Mesh, tree: Any) -> Any:
    """Shapes of parameters or of a state, placed as `jrl.mesh` places them."""
    return with_shardings(tree, tree_shardings(mesh, tree)[0])


def rows_on(mesh: Mesh, tree: Any) -> Any:
    """Shapes of arrays with leading rows, placed as rows are."""
    return jax.tree.map(lambda leaf: _placed(leaf, rows_sharding(mesh, leaf.shape[0])), tree)


def number_on(mesh: Mesh, dtype: Any = jnp.float32) -> Any:
    """Shape of a number that every device has."""
    return _placed(jax.ShapeDtypeStruct((), dtype), replicated(mesh))


def array_of(*sizes: int, dtype: Any = jnp.float32) -> Any:
    """Shape of an array, where a tree of arrays wants one."""
    return jax.ShapeDtypeStruct(sizes, dtype)


def key_on(mesh: Mesh) -> Any:
    """Shape of a random key that every device has."""
    return _placed(jax.eval_shape(lambda: jax.random.key(0)), replicated(mesh))


def _placed(leaf: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def planned_settings(
    model: LanguageShapes, gen_kwargs: Mapping[str, Any], *, steers: bool = False
) -> GenerationSettings:
    """`gen_kwargs` as settings where no tokenizer need be: which ids end or fill a row changes no program's size."""
    last = model.lm.vocab_size - 1
    ends = model.lm.eos_token_ids or (last,)
    return parse_gen_kwargs(gen_kwargs, eos_token_id=ends, pad_token_id=last, steers=steers)[0]


def sampling_program(
    model: LanguageShapes,
    mesh: Mesh,
    settings: GenerationSettings,
    *,
    num_rows: int,
    width: int,
    num_generations: int = 1,
) -> Program:
    """A sampling call.

    Args:
      model: As shapes.
      mesh: Where it is.
      settings: How it samples.
      num_rows: Samples of the call.
      width: Tokens of the prompts.
      num_generations: Samples of each prompt.
    """
    num_prompts = num_rows // num_generations
    tokens, mask = (array_of(num_prompts, width, dtype=dtype) for dtype in (jnp.int32, jnp.bool_))
    prompts = ModelInputs(tokens, mask)
    if model.lm.family.kind == "seq2seq":
        start = array_of(num_prompts, 1, dtype=jnp.int32)
        real = array_of(num_prompts, 1, dtype=jnp.bool_)
        prompts = ModelInputs(start, real, context_tokens=tokens, context_mask=mask)
    top_p = None if settings.top_p == 1 else number_on(mesh)
    beta = None if settings.beta is None else number_on(mesh)
    arguments = (
        weights_on(mesh, model.params),
        weights_on(mesh, model.frozen),
        rows_on(mesh, prompts),
        with_shardings(array_of(num_rows, dtype=jnp.int32), replicated(mesh)),
        SamplingKnobs(number_on(mesh), top_p, beta),
        key_on(mesh),
    )
    sampler = Sampler(model.policy, mesh=mesh)
    program = sampler.program(settings, num_rows, num_generations)
    return Program("sample", program, arguments, rounds=settings.max_new_tokens)


def evaluation_program(
    config: TRLConfig, model: LanguageShapes, mesh: Mesh, *, num_rows: int | None = None, steers: bool = False
) -> Program:
    """The sampling call of an evaluation.

    Args:
      config: The run's.
      model: As shapes.
      mesh: Where it is.
      num_rows: Of the call; default: an optimizer batch.
      steers: Whether Q heads steer it.
    """
    settings = planned_settings(model, config.method.gen_kwargs, steers=steers)
    width = config.train.seq_length - settings.max_new_tokens
    return sampling_program(model, mesh, settings, num_rows=num_rows or config.train.batch_size, width=width)


def update_program(
    model: ModelShapes,
    mesh: Mesh,
    init: Callable[[Params], Any],
    update: Update,
    batch: Any,
    *more: Any,
    rounds: int = 1,
    held: tuple[int, ...] = (0, 1),
) -> Program:
    """An update that takes a batch of rows and a key.

    Args:
      model: As shapes.
      mesh: Where it is.
      init: Makes the first state of trainable parameters.
      update: What is compiled.
      batch: Shapes of its rows.
      *more: Further arguments, with their shardings.
      rounds: As in `Program`.
      held: As in `Program`.
    """
    jitted, shardings = jit_update(init, update, model.params, mesh)
    state = with_shardings(jax.eval_shape(init, model.params), shardings)
    arguments = state, weights_on(mesh, model.frozen), rows_on(mesh, batch), key_on(mesh), *more
    return Program("update", jitted, arguments, held, rounds=rounds)


def sequence_shapes(model: LanguageShapes, rows: int, length: int, packed: bool = False) -> Sequences:
    """Shapes of rows that are learned from: a window of all their actions.

    Args:
      model: As shapes; of a seq2seq model the encoder reads as many tokens.
      rows: How many.
      length: Tokens of each.
      packed: Whether several samples share a row.
    """
    shape = partial(array_of, rows, dtype=jnp.int32)
    tokens, mask = shape(length), shape(length, dtype=jnp.bool_)
    inputs = ModelInputs(tokens, mask, shape(length) if packed else None)
    if model.lm.family.kind == "seq2seq":
        inputs = inputs._replace(context_tokens=tokens, context_mask=mask)
    return Sequences(inputs, shape(), shape(length - 1, dtype=jnp.bool_))

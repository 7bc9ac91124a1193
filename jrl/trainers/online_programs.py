# SPDX-License-Identifier: Apache-2.0
"""Compiled calls of an online run: sampling, scoring, update; what `jrl plan --compile` compiles of them."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from jrl.forward import Reader
from jrl.learners.config import OnlineConfig
from jrl.learners.online import init_online_state, make_online_update
from jrl.learners.recipe import Recipe
from jrl.models.policy import init_reference
from jrl.rollout.assemble import assemble
from jrl.rollout.experience import scoring_program
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loop.run import ends_within_iteration
from jrl.trainers.plan.model_part import LanguageShapes
from jrl.trainers.programs import (
    Program,
    array_of,
    number_on,
    optimizer_of,
    planned_settings,
    rows_on,
    sampling_program,
    update_program,
    weights_on,
)
from jrl.typing import Completions, PolicyFns, Rollouts, Scored, Sequences, Update


def online_programs(config: TRLConfig, recipe: Recipe, model: LanguageShapes, mesh: Mesh) -> list[Program]:
    """Sampling call, what follows it, and the update of an iteration.

    Args:
      config: The run's.
      recipe: The algorithm.
      model: As shapes.
      mesh: Where it is.
    Raises:
      ValueError: If rollouts are drawn on slots.
    """
    method = config.method
    assert isinstance(method, OnlineConfig), "it has a recipe"
    if method.rollout_slots is not None:
        raise ValueError(
            f"`method.rollout_slots` must be null where programs are compiled ahead, got {method.rollout_slots}: how "
            "many calls slots take shows as they write. `jrl plan` without --compile counts their cache."
        )
    settings = planned_settings(model, method.gen_experience_kwargs or method.gen_kwargs)
    sample = sampling_program(
        model,
        mesh,
        settings,
        num_rows=method.chunk_size,
        num_generations=method.num_generations,
        width=config.train.seq_length - settings.max_new_tokens,
    )
    completions = rows_on(mesh, sample.result())
    score = _scoring(config, recipe, model, mesh, sample, completions, settings.pad_token_id)
    rollouts = _planned_rollouts(method, recipe, score.result(), completions)
    optimizer = optimizer_of(config)
    update = make_update(config, recipe, model.policy, optimizer, temperature=settings.temperature)
    init = partial(init_online_state, optimizer=optimizer, recipe=recipe)
    is_cut = ends_within_iteration(
        config.train.total_steps,
        steps_per_iteration=_num_steps(config, recipe),
        max_iterations=config.train.epochs,
    )
    last_step = number_on(mesh, jnp.int32) if is_cut else None
    rounds = -(-method.num_rollouts // config.train.batch_size)
    own = _reference(recipe, model, mesh) if recipe.reads_reference else None
    held = (0, 1) if own is None else (0, 1, 5)
    step = update_program(model, mesh, init, update, rollouts, last_step, own, rounds=rounds, held=held)
    return [sample, score, step] if _with_scoring(config, recipe) else [sample, step]


def make_update(
    config: TRLConfig,
    recipe: Recipe,
    policy: PolicyFns,
    optimizer: optax.GradientTransformation,
    *,
    temperature: float,
    keep_ratios: bool = False,
) -> Update:
    """The update of an iteration, as a configuration asks for it."""
    train, method, is_stale = config.train, config.method, config.train.rollouts_ahead > 0
    assert isinstance(method, OnlineConfig), "the recipe is of one"
    return make_online_update(
        Reader(policy, temperature, chunk_bytes=train.logprob_chunk_bytes),
        optimizer,
        recipe,
        batch_size=train.batch_size,
        minibatch_size=train.rows_per_pass,
        keep_ratios=keep_ratios,
        is_its_own_past=recipe.is_its_own_past(_num_steps(config, recipe), is_stale=is_stale),
        scores_again=is_stale and recipe.weigh is not None,
        balance_coef=method.router_aux_loss_coef,
    )


def _num_steps(config: TRLConfig, recipe: Recipe) -> int:
    """Optimizer steps of an iteration."""
    assert isinstance(config.method, OnlineConfig), "the recipe is of one"
    return recipe.num_steps(config.method.num_rollouts, config.train.batch_size)


def _with_scoring(config: TRLConfig, recipe: Recipe) -> bool:
    """Whether an iteration's rollouts are passed through the model before its update."""
    return recipe.needs_scoring(_num_steps(config, recipe), is_stale=config.train.rollouts_ahead > 0)


def _scoring(
    config: TRLConfig,
    recipe: Recipe,
    model: LanguageShapes,
    mesh: Mesh,
    sample: Program,
    completions: Any,
    pad_token_id: int,
) -> Program:
    """What follows a sampling call: its sequences, and what policy and reference say of them."""
    method = config.method
    assert isinstance(method, OnlineConfig), "the recipe is of one"
    params, frozen, prompts, *_ = sample.arguments
    program = scoring_program(
        model.policy,
        mesh,
        num_rows=method.chunk_size,
        num_generations=method.num_generations,
        pad_token_id=pad_token_id,
        logprob_chunk_bytes=config.train.logprob_chunk_bytes,
        with_full_kl=recipe.kl is not None and recipe.kl.penalty == "full",
        with_scoring=_with_scoring(config, recipe),
    )
    own = _reference(recipe, model, mesh)
    arguments = params, frozen, own, prompts, completions, number_on(mesh)
    return Program("score", program, arguments, held=(0, 1, 2))


def _reference(recipe: Recipe, model: LanguageShapes, mesh: Mesh) -> Any:
    """The reference's own parameters; {} under an adapter, None where there is no reference."""
    return None if recipe.kl is None else weights_on(mesh, jax.eval_shape(init_reference, model.params))


def _planned_rollouts(
    method: OnlineConfig, recipe: Recipe, scored: tuple[Sequences, Scored], completions: Completions
) -> Rollouts:
    """Shapes of an iteration's rollouts, of the shapes of a call's."""
    shape = partial(array_of, method.num_rollouts)
    chunk = jax.tree.map(lambda x: shape(*x.shape[1:], dtype=x.dtype), (*scored, completions.logprobs))
    rules, num_functions = recipe.sampling, len(recipe.reward_weights or (1.0,))
    rows, penalty = (method.num_rollouts,), method.missing_eos_penalty
    found, _ = jax.eval_shape(
        partial(assemble, counts=rows, pad_token_id=0, eos_penalty=penalty, compare=False),
        [chunk],
        shape(completions.tokens.shape[1]),
        shape(dtype=jnp.int32),
        shape(dtype=jnp.bool_),
        None if method.num_generations == 1 else shape(dtype=jnp.int32),
        shape() if recipe.greedy_baseline else None,
        None if recipe.aggregate is None else shape(num_functions),
        shape(dtype=jnp.bool_) if rules.mixed_only or rules.mask_truncated else None,
    )
    return found

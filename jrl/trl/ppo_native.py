# SPDX-License-Identifier: Apache-2.0
"""jrl's PPO trainer in single steps: model, state and compiled update, fed by a script instead of a loop."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.compilation import COMPILER_OPTIONS
from jrl.interop import refuse_while_traced
from jrl.learners.optimizers import make_optimizer
from jrl.learners.recipe import Recipe
from jrl.losses.policy_gradient import Targets
from jrl.mesh import place, tree_shardings
from jrl.placement import place_rows
from jrl.rollout.score import make_score
from jrl.trainers.config import TRLConfig
from jrl.trainers.loading import PolicyBundle, load_policy
from jrl.trainers.loop import TrainingDivergedError
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.ppo import PPOTrainer
from jrl.trl.loaded_model import fresh_value_head
from jrl.trl.ppo_overrides import OverriddenMaths
from jrl.trl.step_records import WatchedHistory
from jrl.typing import Frozen, Metrics, Params, Rollouts, Scored, Sequences

VALUE_HEAD_STREAM = 5
"""Stream of the root key from which a value head is drawn that a script asked for with a deviation."""

Schedule = Callable[[Any], Any]


class StepwisePPO(PPOTrainer):
    """jrl's PPO without its loop: rollouts come from outside, one `step` at a time.

    Args:
      config: The run's configuration; `method.num_rollouts` rows make a step.
      owner: The trainer of TRL's shape, whose overridden methods count.
      base: jrl's class of it, against which they are told.
      tokenizer: Used as it is, in the place of the one loaded.
      v_head_std: Of a fresh value head's weights; 0 starts all values at 0.
      reference_path: Another checkpoint that is the reference; None: the model as it is now.
      optimizer: Used instead of the one that the configuration names.
      lr_schedule: Learning rate of every call of `step`, by its number; None: that of the configuration.

    Attributes:
      calls: Calls of `step` so far.
      best_score: Highest mean score that was pushed; None: none yet.
      forward: Compiled pass over whole rows, made on first use.
      optimizer: What trains.
      records: Of the calls of `step`, and the watch over them.
      single_step: Compiled optimizer step on given targets, made on first use.
    """

    keep_ratios = True

    def __init__(
        self,
        config: TRLConfig,
        *,
        owner: Any,
        base: type,
        tokenizer: Any,
        v_head_std: float = 0.0,
        reference_path: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        lr_schedule: Schedule | None = None,
    ) -> None:
        self.calls = 0
        self.best_score: float | None = None
        self.forward: Callable[..., Any] | None = None
        self.single_step: Callable[..., Any] | None = None
        self._v_head_std, self._reference_path, self._lr_schedule = v_head_std, reference_path, lr_schedule
        self._owner, self._base = owner, base
        self._given_tokenizer = tokenizer
        super().__init__(config, optimizer=optimizer)
        self.records = WatchedHistory(self.history, watch=self.config.train.watch)
        full = self.method.kl_penalty == "full"
        score = make_score(
            self.policy, logprob_chunk_bytes=self.config.train.logprob_chunk_bytes, with_full_kl=full
        )
        rows = self.config.train.rows_per_pass
        self._score = jax.jit(partial(_by_rows, score, rows), compiler_options=COMPILER_OPTIONS)
        self._estimate = jax.jit(self._estimates)
        self._traced_with = self.maths.own

    @cached_property
    def maths(self) -> OverriddenMaths:
        """Overridden methods for all programs: the object knows which of them is being traced."""
        return OverriddenMaths(
            self._owner,
            self._base,
            self.method,
            super().make_recipe(),
            vocab_size=lambda: self.lm.vocab_size,
        )

    def make_recipe(self) -> Recipe:
        """PPO's, with the owner's own parts where it has them."""
        return self.maths.recipe()

    def trace_anew(self) -> None:
        """Forgets what is compiled where a script has put other methods on its trainer since."""
        if self.maths.own != self._traced_with:
            self._traced_with = self.maths.own
            self.single_step = None
            programs: tuple[Any, ...] = self.update, self._estimate
            for program in programs:
                program.clear_cache()

    def load_model(self) -> PolicyBundle:
        """The model; a fresh value head is drawn as the script asked for."""
        bundle = replace(super().load_model(), tokenizer=self._given_tokenizer)
        head = bundle.params["v_head"]
        if not self._v_head_std or np.any(np.asarray(head["out"]["kernel"])):
            return bundle
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), VALUE_HEAD_STREAM)
        drawn = fresh_value_head("linear", bundle.lm.feature_width, key, self._v_head_std)
        placed = place(drawn, tree_shardings(self.mesh, {"v_head": drawn})[0]["v_head"])
        return replace(bundle, params={**bundle.params, "v_head": placed})

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """Builds the trainer, with another checkpoint as the reference where one was given."""
        super().build(params, make_reference if self._reference_path is None else self._other_reference)

    def _other_reference(self) -> Params:
        """Parameters of the other checkpoint, in the places of those that train.

        Raises:
          ValueError: If it is another architecture or vocabulary.
        """
        config = self.config.evolve(model={"model_path": self._reference_path, "num_layers_unfrozen": -1})
        with jax.set_mesh(self.mesh):
            other = load_policy(config, self.mesh, with_value_head=True)
        if other.lm.config != self.lm.config:
            raise ValueError(
                f"`ref_model` must have the architecture and vocabulary of the model ({self.lm.vocab_size} ids), got "
                f"{other.lm.family.model_type} with {other.lm.vocab_size}."
            )
        return other.params

    def make_optimizer(self) -> optax.GradientTransformation:
        """The configuration's, at the script's own rates where it has a schedule."""
        if self._lr_schedule is None:
            self.optimizer = super().make_optimizer()
            return self.optimizer
        schedule, every = self._lr_schedule, self.steps_per_iteration
        self.optimizer = make_optimizer(
            self.config.optimizer.name,
            self.config.optimizer.kwargs,
            lambda _: lambda count: schedule(count // every),
            max_grad_norm=self.config.train.max_grad_norm,
        )
        return self.optimizer

    @property
    def learning_rate(self) -> float:
        """Learning rate of the next step; NaN where the script's own optimizer knows it alone."""
        if self._given_optimizer is not None:
            return float("nan")
        if self._lr_schedule is not None:
            return float(self._lr_schedule(self.calls))
        return float(self.config.optimizer.kwargs["lr"])

    def score(self, sequences: Sequences) -> tuple[Sequences, Scored]:
        """Rows on the mesh, and their log-probabilities and values under the state's parameters and the reference."""
        with jax.set_mesh(self.mesh):
            placed = place_rows(self.mesh, sequences)
            return placed, self._score(self.params, self.frozen, self.ref_params, placed, jnp.float32(1.0))

    def estimates(self, rollouts: Rollouts) -> dict[str, Any]:
        """Scores, rewards and targets of the coming update, for statistics. The state is not changed."""
        with jax.set_mesh(self.mesh):
            return dict(self._estimate(self.state.kl_coef, self.state.moments, rollouts))

    def _estimates(self, kl_coef: jax.Array, moments: Any, rollouts: Rollouts) -> dict[str, Any]:
        scored, mask = rollouts.scored, rollouts.sequences.mask
        scores, _ = self.recipe.scaled_rewards(rollouts, moments)
        rewards, non_score, kls = self.maths.reward_parts(scores, scored, mask, kl_coef)
        assert scored.values is not None, "PPO has a critic"
        values, advantages, returns = self.maths.advantage_parts(rewards, scored.values, mask)
        targets = Targets(scored.logprobs, scored.values, advantages, returns, mask)
        moved = jnp.max(jnp.where(mask, jnp.abs(values - scored.values), 0.0))
        return {
            "scores": scores,
            "non_score_reward": non_score,
            "kls": kls,
            "targets": targets,
            "moved": moved,
        }

    def learn_from(self, rollouts: Rollouts) -> Metrics:
        """Runs an iteration of PPO: the compiled update, with the key, of a run of jrl's own.

        Raises:
          TrainingDivergedError: After `train.max_bad_steps` optimizer steps in a row that were not finite.
        """
        _, key = self.keys(self.calls)
        if self._lr_schedule is not None:
            self._set_schedule()
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.update(self.state, self.frozen, rollouts, key)
        self.calls += 1
        bad = metrics["optim/skipped_in_a_row"]
        worst = int(jax.device_get(bad)[0])
        if worst >= self.config.train.max_bad_steps:
            raise TrainingDivergedError(
                f"{worst} optimizer steps in a row had a non-finite loss or gradient; the parameters are those of the "
                "last finite step. Likely causes: a learning rate too high, or scores of extreme size."
            )
        return metrics

    def _set_schedule(self) -> None:
        """The schedule counts calls of `step`, also where steps were skipped or left out."""
        train, count = self.state.train, jnp.int32(self.calls * self.steps_per_iteration)
        opt_state = optax.tree.set(train.opt_state, steps=count)
        self.state = replace(self.state, train=replace(train, opt_state=opt_state))

    def data_sha256(self) -> dict[str, str]:
        """The model's alone: a script brings its rollouts itself."""
        return PolicyTrainer.data_sha256(self)

    def host_state(self) -> dict[str, Any]:
        """The counters that keys and schedules follow from, and where the watch stands."""
        own = {"calls": self.calls, "best_score": self.best_score, "watch": self.records.state()}
        return super().host_state() | own

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts them back; from a checkpoint of an earlier release, which has no watch, that one goes on as it is."""
        super().load_host_state(found)
        self.calls = int(found["calls"])
        self.best_score = found["best_score"]
        if "watch" in found:
            self.records.load(found["watch"])


class KLControl:
    """The KL coefficient, which the state holds."""

    def __init__(self, native: StepwisePPO) -> None:
        self._native = native
        self._bound: Any = None

    @property
    def value(self) -> float:
        """The coefficient of the next step; inside an overridden `compute_rewards` a traced number."""
        if self._bound is None:
            refuse_while_traced(
                "kl_ctl.value", "`compute_rewards` gets the present one: let it weigh the KL."
            )
        return float(self._native.state.kl_coef) if self._bound is None else self._bound

    @value.setter
    def value(self, kl_coef: float) -> None:
        state = self._native.state
        placed = place(np.float32(kl_coef), state.kl_coef.sharding)
        self._native.state = replace(state, kl_coef=placed)

    @contextlib.contextmanager
    def bound(self, kl_coef: Any) -> Iterator[None]:
        """Inside, `value` is this one."""
        self._bound = kl_coef
        try:
            yield
        finally:
            self._bound = None


def _by_rows(
    score: Callable[..., Scored],
    rows: int,
    params: Params,
    frozen: Frozen,
    ref_params: Params,
    sequences: Sequences,
    temperature: jax.Array,
) -> Scored:
    """Scores so many rows at a time; a chunk takes every n-th row, so that a sharded batch stays where it is."""
    total = sequences.starts.shape[0]
    chunks = total // rows
    if chunks <= 1 or total % rows:
        return score(params, frozen, ref_params, sequences, temperature)
    split = jax.tree.map(lambda x: jnp.swapaxes(x.reshape(rows, chunks, *x.shape[1:]), 0, 1), sequences)
    found = jax.lax.map(lambda part: score(params, frozen, ref_params, part, temperature), split)
    return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1).reshape(total, *x.shape[2:]), found)

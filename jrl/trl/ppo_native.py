# SPDX-License-Identifier: Apache-2.0
"""jrl's PPO trainer in single steps: model, state and compiled update, fed by a script instead of a loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jrl.learners.optimizers import make_optimizer
from jrl.learners.ppo import PPOState
from jrl.learners.ppo_estimates import KL_PENALTIES, learning_targets, scaled_scores, shape_rewards
from jrl.learners.state import TrainState
from jrl.mesh import place, tree_shardings
from jrl.rollout.score import make_score
from jrl.trainers.base import GENERATION_STREAM
from jrl.trainers.config import TRLConfig
from jrl.trainers.pending import TrainingDivergedError
from jrl.trainers.placing import place_rows
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.ppo import PPOTrainer
from jrl.trainers.setup import PolicyBundle, load_policy
from jrl.trl.loading import fresh_value_head
from jrl.typing import Frozen, Metrics, Params, PPOBatch, PRNGKey, Scored, Sequences

Schedule = Callable[[Any], Any]


class StepwisePPO(PPOTrainer):
    """jrl's PPO without its loop: rollouts come from outside, one `step` at a time.

    Args:
      config: The run's configuration; `method.num_rollouts` rows make a step.
      tokenizer: Used as it is, in the place of the one loaded.
      v_head_std: Of a fresh value head's weights; 0 starts all values at 0.
      reference_path: Another checkpoint that is the reference; None: the model as it is now.
      optimizer: Used instead of the one that the configuration names.
      lr_schedule: Learning rate of every call of `step`, by its number; None: that of the configuration.

    Attributes:
      calls: Calls of `step` so far.
      generations: Sampling calls so far.
      best_score: Highest mean score that was pushed; None: none yet.
      forward: Compiled pass over whole rows, made on first use.
      optimizer: What trains.
      single_step: Compiled optimizer step on given targets, made on first use.
    """

    keep_ratios = True

    def __init__(
        self,
        config: TRLConfig,
        *,
        tokenizer: Any,
        v_head_std: float = 0.0,
        reference_path: Any = None,
        optimizer: optax.GradientTransformation | None = None,
        lr_schedule: Schedule | None = None,
    ) -> None:
        self.calls = self.generations = 0
        self.best_score: float | None = None
        self.forward: Callable[..., Any] | None = None
        self.single_step: Callable[..., Any] | None = None
        self._v_head_std, self._reference_path, self._lr_schedule = v_head_std, reference_path, lr_schedule
        super().__init__(config, optimizer=optimizer)
        self.tokenizer = tokenizer
        full = self.method.kl_penalty == "full"
        score = make_score(
            self.policy, logprob_chunk_bytes=self.config.train.logprob_chunk_bytes, with_full_kl=full
        )
        rows = self.config.train.minibatch_size or self.config.train.batch_size
        self._score = jax.jit(partial(_by_rows, score, rows))
        self._estimate = jax.jit(self._estimates)

    def load_model(self) -> PolicyBundle:
        """The model; a fresh value head is drawn as the script asked for."""
        bundle = super().load_model()
        head = bundle.params["v_head"]
        if not self._v_head_std or np.any(np.asarray(head["out"]["kernel"])):
            return bundle
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), 5)
        drawn = fresh_value_head("linear", bundle.lm.feature_width, key, self._v_head_std)
        placed = place(drawn, tree_shardings(self.mesh, {"v_head": drawn})[0]["v_head"])
        return replace(bundle, params={**bundle.params, "v_head": placed})

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """With another checkpoint as the reference where one was given."""
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
        """Of the next step; NaN where the script's own optimizer knows it alone."""
        if self._given_optimizer is not None:
            return float("nan")
        if self._lr_schedule is not None:
            return float(self._lr_schedule(self.calls))
        return float(self.config.optimizer.kwargs["lr"])

    def generation_key(self) -> PRNGKey:
        """A fresh one for every sampling call: a function of the seed and the number of calls."""
        key = jax.random.fold_in(jax.random.fold_in(self.root_key, GENERATION_STREAM), self.generations)
        self.generations += 1
        return key

    def score(self, sequences: Sequences) -> tuple[Sequences, Scored]:
        """Rows on the mesh, and their log-probabilities and values under the state's parameters and the reference."""
        with jax.set_mesh(self.mesh):
            placed = place_rows(self.mesh, sequences)
            return placed, self._score(self.params, self.frozen, self.ref_params, placed, jnp.float32(1.0))

    def estimates(self, batch: PPOBatch) -> dict[str, Any]:
        """What the update will learn from, for statistics: scores, rewards and targets. The state is not changed."""
        with jax.set_mesh(self.mesh):
            return dict(self._estimate(self.state.kl_coef, self.state.moments, batch))

    def _estimates(self, kl_coef: jax.Array, moments: Any, batch: PPOBatch) -> dict[str, Any]:
        method, mask = self.method, batch.sequences.mask
        scores, _ = scaled_scores(batch, moments, method)
        targets = learning_targets(scores, batch, kl_coef, method)
        rewards = shape_rewards(
            jnp.zeros_like(scores), batch.scored, mask, kl_coef=kl_coef, kl_penalty=method.kl_penalty
        )
        kl = jnp.where(mask, KL_PENALTIES[method.kl_penalty](batch.scored), 0.0)
        return {"scores": scores, "non_score_reward": rewards, "kls": kl, "targets": targets}

    def learn_from(self, batch: PPOBatch) -> Metrics:
        """One iteration of PPO: the same compiled update, with the same key, as in a run of jrl's own.

        Raises:
          TrainingDivergedError: After `train.max_bad_steps` optimizer steps in a row that were not finite.
        """
        _, key = self.keys(self.calls)
        if self._lr_schedule is not None:
            self._set_schedule()
        with jax.set_mesh(self.mesh):
            self.state, metrics = self.update(self.state, self.frozen, batch, key)
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
        self.state = PPOState(
            TrainState(train.step, train.params, opt_state), self.state.kl_coef, self.state.moments
        )

    def data_sha256(self) -> dict[str, str]:
        """The model's alone: a script brings its rollouts itself."""
        return PolicyTrainer.data_sha256(self)

    def host_state(self) -> dict[str, Any]:
        """The counters that keys and schedules follow from."""
        return {"calls": self.calls, "generations": self.generations, "best_score": self.best_score}

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts the counters back."""
        self.calls, self.generations = int(found["calls"]), int(found["generations"])
        self.best_score = found["best_score"]


class KLControl:
    """The KL coefficient, which the state holds."""

    def __init__(self, native: StepwisePPO) -> None:
        self._native = native

    @property
    def value(self) -> float:
        """The coefficient of the next step."""
        return float(self._native.state.kl_coef)

    @value.setter
    def value(self, kl_coef: float) -> None:
        state = self._native.state
        placed = place(np.float32(kl_coef), state.kl_coef.sharding)
        self._native.state = PPOState(state.train, placed, state.moments)


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

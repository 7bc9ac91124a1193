# SPDX-License-Identifier: Apache-2.0
"""trlX's PPO trainer and what it leaves in its store."""

from __future__ import annotations

import functools
import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jrl.forward import Reader
from jrl.interop import TrainedModel, as_array, jrl_class, refuse_overrides
from jrl.learners.accumulate import Loss
from jrl.learners.credit import ScoreMoments, penalize
from jrl.learners.online import OnlineState, after_rollouts, online_objective
from jrl.losses.policy_gradient import Targets
from jrl.ops.alignment import length_mask
from jrl.rollout.experience import Experience
from jrl.trainers.checkpoints import CheckpointError
from jrl.trainers.loop import Stopwatch
from jrl.trainers.ppo import PPOTrainer
from jrl.trlx.data.ppo_types import PPORLBatch, PPORLElement
from jrl.trlx.functions import seed_rewards
from jrl.trlx.loop import Position
from jrl.trlx.refusals import NATIVE, PPO, ROLLOUTS
from jrl.trlx.registry import register_trainer
from jrl.trlx.store_rows import plain_element, read_element, refuse_own_loader
from jrl.trlx.stores import PPORolloutStorage
from jrl.trlx.trainer.accelerate_base_trainer import AccelerateRLTrainer
from jrl.typing import Frozen, ModelInputs, Params, Sequences


class _Collected(NamedTuple):
    """Rollouts that are not in the store yet, and what their rewards depend on."""

    experience: Experience
    kl_coef: Any
    moments: ScoreMoments
    learned: bool
    """Whether the run learns them, or has."""


@register_trainer
class AcceleratePPOTrainer(AccelerateRLTrainer):
    """PPO. While it learns, `store` holds the rollouts of the iteration that came last.

    A subclass that defines `make_experience` brings its own rollouts: it pushes `PPORLElement`s, and every epoch learns
    `ppo_epochs` passes over them.
    """

    native_class = PPOTrainer
    with_value_head = True
    REFUSED = NATIVE
    HOOKS = (*AccelerateRLTrainer.HOOKS, "make_experience")

    def __init__(self, config: Any, **kwargs: Any) -> None:
        self._collected: list[_Collected] = []
        self._learned: list[PPORLElement] = []
        super().__init__(config, **kwargs)
        trainer = self.native_ppo
        if trainer.policies is not None:
            raise ValueError(
                f"`train.rollouts_ahead` must be 0 for {type(self).__name__}, got "
                f"{trainer.config.train.rollouts_ahead}: its store holds the rollouts of one iteration. "
                "Take `jrl.train`."
            )
        self.store = PPORolloutStorage(self.tokenizer.pad_token_id, self.tokenizer.padding_side)
        self._ahead: tuple[int, Experience] | None = None
        self._num_made = 0
        if trainer.config.train.rollout_logging_dir is not None:
            self.setup_rollout_logging(trainer.config)
        self._has_prompts = "prompts" in vars(trainer)
        if self._has_prompts:
            trainer.collect = self._collect

    def _refuse_overrides(self) -> None:
        super()._refuse_overrides()
        if "make_experience" not in self._replaced_hooks():
            refuse_overrides(type(self), jrl_class(self), ROLLOUTS)

    @property
    def native_ppo(self) -> PPOTrainer:
        """jrl's own trainer."""
        return cast(PPOTrainer, self.native)

    @property
    def generate_experience_kwargs(self) -> Mapping[str, Any] | None:
        """Sampling options of rollouts, where they differ from evaluation's; read-only."""
        found = self.native_ppo.method.gen_experience_kwargs
        return None if found is None else MappingProxyType(found)

    def setup_model(self) -> TrainedModel:
        """The model, which knows its frozen reference."""
        return TrainedModel(self.native, reference=lambda: self.native_ppo.ref_params)

    def setup_rollout_logging(self, config: Any) -> None:
        """Nothing to prepare: a run writes its rollouts as JSON lines into `train.rollout_logging_dir`."""

    def add_prompt_pipeline(self, pipeline: Any) -> None:
        """Sets what rollouts start from.

        Raises:
          ValueError: If the trainer has no `reward_fn`.
        """
        if self.reward_fn is None:
            raise ValueError("AcceleratePPOTrainer learns online: give it a `reward_fn`.")
        trainer = self.native_ppo
        prompts = self._prompt_set(pipeline, trainer.rollout_settings().max_new_tokens)
        trainer.add_prompt_set(prompts, seed_rewards(self.reward_fn))
        trainer.collect, self._has_prompts = self._collect, True

    def make_experience(self, num_rollouts: int = 1024, iter_count: int = 0) -> None:
        """Samples, scores and rewards prompts, and pushes the rollouts to the store.

        The first call samples what `learn` would begin with, and `learn` uses it where it has as many rollouts as an
        iteration; every further call samples other prompts.

        Args:
          num_rollouts: Exactly so many.
          iter_count: Optimizer steps so far; without effect, since the state counts them.
        """
        del iter_count
        self._require_data()
        trainer = self.native_ppo
        learns_here = self._learns_here()
        # Where jrl's own trainer learns, its iterations are counted by the steps.
        begun = 0 if learns_here else math.ceil(self.iter_count / trainer.steps_per_iteration)
        iteration = begun + self._num_made
        with jax.set_mesh(trainer.mesh):
            experience = trainer.make_collector(num_rollouts)(
                trainer.params,
                trainer.frozen,
                trainer.ref_params,
                iteration,
                trainer.keys(iteration)[0],
                while_sampling=lambda: None,
                stopwatch=Stopwatch(),
            )
            begins = self._num_made == 0 and num_rollouts == trainer.method.num_rollouts and not learns_here
            self._keep(experience, learned=begins)
            if learns_here:  # no update of jrl's follows, which would do it
                state = trainer.state
                kl_coef, moments = self._after(state.kl_coef, state.moments, experience.rollouts)
                trainer.state = replace(state, kl_coef=kl_coef, moments=moments)
        if begins:
            self._ahead = iteration, experience
        self._num_made += 1

    @functools.cached_property
    def _after(self) -> Callable[..., tuple[Any, ScoreMoments]]:
        return jax.jit(functools.partial(after_rollouts, recipe=self.native_ppo.recipe))

    @property
    def _rollouts(self) -> PPORolloutStorage:
        return cast(PPORolloutStorage, self._store)

    def _fill_store(self) -> None:
        for collected in self._collected:
            found = rollout_elements(collected, self.native_ppo)
            self._rollouts.push(found)
            if collected.learned:
                self._learned += found
        self._collected.clear()

    def _learn(self) -> None:
        if not self._learns_here():
            self._refuse_other_rollouts()
        super()._learn()

    def _refuse_other_rollouts(self) -> None:
        """Refuses rollouts that the run would throw away: it collects its own."""
        refuse_own_loader(self._rollouts)
        learned = set(map(id, self._learned))
        if not all(one.learned for one in self._collected) or set(map(id, self._rollouts.history)) - learned:
            count = self.native_ppo.method.num_rollouts
            raise ValueError(
                f"`store` holds rollouts that this run would not learn: PPO collects its own, and of those made before "
                f"it learns the first `make_experience({count})` (`method.num_rollouts`) alone. Define "
                "`make_experience` in a subclass and push rollouts there, or call `trainer.store.clear_history()`."
            )

    def loss(self, batch: PPORLBatch) -> tuple[Any, dict[str, Any]]:
        """The clipped surrogate with its value loss on stored rollouts; advantages are whitened over the batch.

        Args:
          batch: Whose rewards hold the KL penalty already.
        Returns:
          The mean over actions, and the metrics of the learner.
        """
        return self._compiled_loss(self.model.params, self.model.frozen, None, batch)

    def _loss_of(self, params: Params, frozen: Frozen, targets: None, batch: PPORLBatch) -> Loss:
        trainer, recipe = self.native_ppo, self.native_ppo.recipe
        sequences, mask = self._sequences(batch)
        old_logprobs, old_values = (as_array(x, jnp.float32) for x in (batch.logprobs, batch.values))
        rewards = jnp.where(mask, as_array(batch.rewards, jnp.float32), 0.0)
        credit = recipe.estimate(rewards, old_values, mask, None)
        train, policy = trainer.config.train, trainer.lenient_policy
        return online_objective(
            Reader(policy, trainer.rollout_settings().temperature, chunk_bytes=train.logprob_chunk_bytes),
            params,
            frozen,
            sequences,
            Targets(old_logprobs, old_values, credit.advantages, credit.returns, mask),
            loss=recipe.loss,
            prefix=recipe.prefix,
            trunk=policy.trunk(frozen, sequences.inputs),
        )

    def prepare_learning(self) -> None:
        """Fills an empty store where a subclass learns in its own way; a run that resumes has its checkpoint's."""
        if self.config.train.resume_from_checkpoint is None:
            self._fill_empty_store()

    def begin_loop(self) -> None:
        """Fills the store where the run found no checkpoint to resume."""
        super().begin_loop()
        if self.position == Position():
            self._fill_empty_store()

    def _fill_empty_store(self) -> None:
        if self._replaced_hooks() and not len(self._rollouts) and not self._collected:
            self.make_experience(self.native_ppo.method.num_rollouts, self.iter_count)

    def _host_state(self) -> dict[str, Any]:
        found = super()._host_state()
        if not found:
            return found
        self._fill_store()
        rollouts = [self._rollouts[index] for index in range(len(self._rollouts))]
        strange = {type(one).__name__ for one in rollouts if type(one) is not PPORLElement}
        if strange:
            warnings.warn(
                f"No run can resume from this checkpoint: it cannot hold {sorted(strange)}. Push `PPORLElement`s.",
                stacklevel=2,
            )
        stored = None if strange else [plain_element(one) for one in rollouts]
        return {**found, "num_made": self._num_made, "rollouts": stored}

    def _load_host_state(self, found: Mapping[str, Any]) -> None:
        super()._load_host_state(found)
        if not found:
            return
        if found["rollouts"] is None:
            raise CheckpointError(
                "The checkpoint does not hold the rollouts that its run was learning: `store` had elements that are "
                "no `PPORLElement`. Start a new run."
            )
        self._clear()
        self._rollouts.push([PPORLElement(**read_element(one)) for one in found["rollouts"]])
        self._ahead, self._num_made = None, found["num_made"]

    def create_train_dataloader(self) -> Any:
        """Batches of the store, in an order of their own."""
        self._fill_store()
        return self._rollouts.create_loader(self.config.train.batch_size, shuffle=True)

    def post_epoch_callback(self) -> None:
        """Clears the store and makes new experience."""
        self._clear()
        self.make_experience(self.native_ppo.method.num_rollouts, self.iter_count)

    def push_to_store(self, data: Iterable[PPORLElement]) -> None:
        """Appends rollouts."""
        self._fill_store()
        self._rollouts.push(data)

    def load(self, directory: str | None = None, **kwargs: Any) -> None:
        """Loads a checkpoint; rollouts that were collected before belong to other parameters and are dropped."""
        super().load(directory, **kwargs)
        self._clear()
        self._ahead, self._num_made = None, 0

    def _collect(self, *arguments: Any, **options: Any) -> Experience:
        """Collects rollouts for the native trainer; they stay in the store until the next ones."""
        params, frozen, ref_params, iteration, key = arguments
        ahead, self._ahead = self._ahead, None
        self._num_made = 0
        if ahead is not None and ahead[0] == iteration:
            options["while_sampling"]()
            return ahead[1]
        self._clear()
        trainer = self.native_ppo
        collect = trainer.make_collector(trainer.method.num_rollouts)
        experience = collect(params, frozen, ref_params, iteration, key, **options)
        self._keep(experience, learned=True)
        return experience

    def _keep(self, experience: Experience, *, learned: bool) -> None:
        """Remembers rollouts with copies of what their rewards depend on: the state is given away by the update."""
        state: OnlineState = self.native_ppo.state
        kl_coef, moments = jax.tree.map(jnp.copy, (state.kl_coef, state.moments))
        self._collected.append(_Collected(experience, kl_coef, moments, learned))

    def _clear(self) -> None:
        self._collected.clear()
        self._learned.clear()
        self._rollouts.clear_history()

    def _sequences(self, batch: PPORLBatch) -> tuple[Sequences, Bool[Array, "B T"]]:
        """The rows of a batch, and its actions."""
        queries, responses = (as_array(x, jnp.int32) for x in (batch.query_tensors, batch.response_tensors))
        pad, left = self._rollouts.pad_token_id, self._rollouts.padding_side == "left"
        real = _used(queries != pad, left=left)
        if batch.query_lengths is not None:
            real = length_mask(as_array(batch.query_lengths, jnp.int32), width=queries.shape[1])
            real = real[:, ::-1] if left else real
        start = self.native.lm.decoder_start_token_id
        figures = (as_array(x, jnp.float32) for x in (batch.logprobs, batch.values, batch.rewards))
        written = responses if start is None else responses[:, 1:]
        # The pad token may be an action too, as EOS is where both are one; its figures tell it from padding.
        mask = _used((written != pad) | jnp.any(jnp.stack([x != 0 for x in figures]), axis=0))
        if batch.response_lengths is not None:
            mask = length_mask(as_array(batch.response_lengths, jnp.int32), width=written.shape[1])
        if start is not None:
            rows = jnp.concatenate([jnp.ones_like(mask[:, :1]), mask], axis=1)
            starts = jnp.zeros(mask.shape[0], jnp.int32)
            return Sequences(ModelInputs(responses, rows, None, queries, real), starts, mask), mask
        if not left:  # prompts end together, so that one window fits all rows
            shift = queries.shape[1] - jnp.sum(real, axis=1, dtype=jnp.int32)
            places = (jnp.arange(queries.shape[1])[None, :] - shift[:, None]) % queries.shape[1]
            queries, real = (jnp.take_along_axis(x, places, axis=1) for x in (queries, real))
        tokens, rows = (jnp.concatenate(pair, axis=1) for pair in ((queries, responses), (real, mask)))
        starts = jnp.full(mask.shape[0], queries.shape[1] - 1, jnp.int32)
        return Sequences(ModelInputs(tokens, rows), starts, mask), mask

    def _require_data(self) -> None:
        if not self._has_prompts:
            raise ValueError("AcceleratePPOTrainer has no prompts yet: `add_prompt_pipeline` sets them.")

    def _total_steps(self) -> int:
        trainer = self.native_ppo
        train = trainer.config.train
        return min(train.total_steps, train.epochs * trainer.steps_per_iteration)

    def _passes_of_epoch(self) -> int:
        return self.native_ppo.method.ppo_epochs

    def _unread(self) -> Mapping[str, str]:
        found = {**super()._unread(), **PPO}
        return found if "make_experience" in self._replaced_hooks() else {**found, **ROLLOUTS}

    def _steps_per_iteration(self) -> int:
        return 1 if self._replaced_hooks() else self.native_ppo.steps_per_iteration


def rollout_elements(collected: _Collected, trainer: PPOTrainer) -> list[PPORLElement]:
    """Rollouts as trlX stores them; rows whose reward failed are left out.

    Raises:
      ValueError: If the rollouts have a record of experts, for which trlX's rows have no place.
    """
    rollouts, method = collected.experience.rollouts, trainer.method
    if method.routing_replay:
        raise ValueError(
            "`method.routing_replay` must be False where rollouts go through trlX's store, got True: its rows hold no "
            "record of experts."
        )
    scaled, _ = trainer.recipe.scaled_rewards(rollouts, collected.moments)
    # Without an override of the configuration's: what the store holds is the score minus the KL penalty.
    penalized = penalize(method.kl_penalty)
    rewards = penalized(scaled, rollouts.scored, rollouts.sequences.mask, collected.kl_coef)
    sequences, scored, rewards = jax.device_get((rollouts.sequences, rollouts.scored, rewards))
    inputs, found = sequences.inputs, []
    for row, length in enumerate(sequences.mask.sum(axis=1).tolist()):
        if not length:
            continue
        start = int(sequences.starts[row]) + 1
        query, response = inputs.tokens[row, :start], inputs.tokens[row, start : start + length]
        if inputs.context_tokens is not None:
            query = inputs.context_tokens[row][inputs.context_mask[row]]
            response = inputs.tokens[row, : start + length]
        figures = (scored.logprobs, scored.values, rewards)
        found.append(PPORLElement(query, response, *(array[row, :length] for array in figures)))
    return found


def _used(real: Bool[Array, "B T"], *, left: bool = False) -> Bool[Array, "B T"]:
    """Columns up to the last one that is True; with `left` from the first one on, and the last column in any case."""
    if left:
        return jnp.cumsum(real.at[:, -1].set(True), axis=1) > 0
    return jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 0

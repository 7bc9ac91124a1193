# SPDX-License-Identifier: Apache-2.0
"""trlX's PPO trainer and what it leaves in its store."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jrl.learners.accumulate import Loss
from jrl.learners.ppo import PPOState, ppo_objective
from jrl.learners.ppo_config import PPOConfig
from jrl.learners.ppo_estimates import ScoreMoments, estimate_advantages, scaled_scores, shape_rewards
from jrl.ops.alignment import length_mask
from jrl.trainers.ppo import PPOTrainer
from jrl.trainers.ppo_experience import Experience
from jrl.trainers.timing import Stopwatch
from jrl.trlx.accelerate import AccelerateRLTrainer
from jrl.trlx.elements import PPORLBatch, PPORLElement
from jrl.trlx.model import TrainedModel, as_array
from jrl.trlx.registry import register_trainer
from jrl.trlx.stores import PPORolloutStorage
from jrl.typing import Frozen, ModelInputs, Params, PPOBatch, Scored, Sequences


class _Collected(NamedTuple):
    """Rollouts that are not in the store yet, and what their rewards depend on."""

    experience: Experience
    kl_coef: Any
    moments: ScoreMoments


@register_trainer
class AcceleratePPOTrainer(AccelerateRLTrainer):
    """PPO. While it learns, `store` holds the rollouts of the iteration that came last.

    A subclass that defines `make_experience` brings its own rollouts: it pushes `PPORLElement`s, and every epoch learns
    `ppo_epochs` passes over them.
    """

    native_class = PPOTrainer
    with_value_head = True
    HOOKS = (*AccelerateRLTrainer.HOOKS, "make_experience")

    def __init__(self, config: Any, **kwargs: Any) -> None:
        self._collected: list[_Collected] = []
        super().__init__(config, **kwargs)
        trainer = self.native_ppo
        self.n_inner_epochs = trainer.method.ppo_epochs
        self.store = PPORolloutStorage(self.tokenizer.pad_token_id, self.tokenizer.padding_side)
        self._ahead: tuple[int, Experience] | None = None
        self._made = 0
        if trainer.config.train.rollout_logging_dir is not None:
            self.setup_rollout_logging(trainer.config)
        self._has_prompts = "prompts" in vars(trainer)
        if self._has_prompts:
            trainer.collect = self._collect

    @property
    def native_ppo(self) -> PPOTrainer:
        """jrl's own trainer."""
        return cast(PPOTrainer, self.native)

    @property
    def generate_experience_kwargs(self) -> dict[str, Any] | None:
        """How rollouts sample, where that is another way than evaluation's."""
        return self.native_ppo.method.gen_experience_kwargs

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
        trainer.add_prompt_set(prompts, self.reward_fn)
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
        iteration = self.iter_count // trainer.steps_per_iteration + self._made
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
            self._keep(experience)
        if self._made == 0 and num_rollouts == trainer.method.num_rollouts:
            self._ahead = iteration, experience
        self._made += 1

    @property
    def _rollouts(self) -> PPORolloutStorage:
        return cast(PPORolloutStorage, self._store)

    def _fill_store(self) -> None:
        for collected in self._collected:
            self._rollouts.push(rollout_elements(collected, self.native_ppo))
        self._collected.clear()

    def loss(self, batch: PPORLBatch) -> tuple[Any, dict[str, Any]]:
        """The clipped surrogate with its value loss on stored rollouts; advantages are whitened over the batch.

        Args:
          batch: Whose rewards hold the KL penalty already.
        Returns:
          The mean over actions, and the metrics of the learner.
        """
        return self._compiled_loss(self.model.params, self.model.frozen, None, batch)

    def _loss_of(self, params: Params, frozen: Frozen, targets: None, batch: PPORLBatch) -> Loss:
        trainer, method = self.native_ppo, self.native_ppo.method
        sequences, mask = self._sequences(batch)
        scored = Scored(*(as_array(x, jnp.float32) for x in (batch.logprobs, batch.logprobs, batch.values)))
        rewards = jnp.where(mask, as_array(batch.rewards, jnp.float32), 0.0)
        learned = estimate_advantages(
            rewards,
            scored,
            mask,
            kl_coef=jnp.float32(0),
            gamma=method.gamma,
            gae_lambda=method.lam,
            whiten_rewards=method.whiten_rewards,
        )
        return ppo_objective(
            trainer.lenient_policy,
            params,
            frozen,
            trainer.lenient_policy.trunk(frozen, sequences.inputs),
            sequences,
            learned,
            config=method,
            temperature=trainer.rollout_settings().temperature,
            logprob_chunk_bytes=trainer.config.train.logprob_chunk_bytes,
        )

    def prepare_learning(self) -> None:
        """Fills an empty store where a subclass makes its own experience."""
        if self._replaced_hooks() and not len(self._rollouts) and not self._collected:
            self.make_experience(self.native_ppo.method.num_rollouts, self.iter_count)

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
        """As every trainer; what was collected before belongs to other parameters."""
        super().load(directory, **kwargs)
        self._clear()
        self._ahead, self._made = None, 0

    def _collect(self, *arguments: Any, **options: Any) -> Experience:
        """What the native trainer collects by: the rollouts stay in the store until the next ones."""
        params, frozen, ref_params, iteration, key = arguments
        ahead, self._ahead = self._ahead, None
        self._made = 0
        if ahead is not None and ahead[0] == iteration:
            options["while_sampling"]()
            return ahead[1]
        self._clear()
        trainer = self.native_ppo
        collect = trainer.make_collector(trainer.method.num_rollouts)
        experience = collect(params, frozen, ref_params, iteration, key, **options)
        self._keep(experience)
        return experience

    def _keep(self, experience: Experience) -> None:
        """Remembers rollouts with copies of what their rewards depend on: the state is given away by the update."""
        state: PPOState = self.native_ppo.state
        kl_coef, moments = jax.tree.map(jnp.copy, (state.kl_coef, state.moments))
        self._collected.append(_Collected(experience, kl_coef, moments))

    def _clear(self) -> None:
        self._collected.clear()
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
        if not self._replaced_hooks():
            return trainer.num_iterations * trainer.steps_per_iteration
        train = trainer.config.train
        return min(train.total_steps, train.epochs * trainer.steps_per_iteration)

    def _steps_per_iteration(self) -> int:
        return self.native_ppo.steps_per_iteration


def rollout_elements(collected: _Collected, trainer: PPOTrainer) -> list[PPORLElement]:
    """Rollouts as trlX stores them; rows whose reward failed are left out."""
    batch, method = collected.experience.batch, trainer.method
    rewards = _shaped_rewards(batch, collected, method)
    sequences, scored, rewards = jax.device_get((batch.sequences, batch.scored, rewards))
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


def _shaped_rewards(batch: PPOBatch, collected: _Collected, method: PPOConfig) -> jax.Array:
    """Per token: scores clipped and scaled as the update does it, minus the KL penalty."""
    mask, scored = batch.sequences.mask, batch.scored
    scores, _ = scaled_scores(batch, collected.moments, method)
    return shape_rewards(scores, scored, mask, kl_coef=collected.kl_coef, kl_penalty=method.kl_penalty)


def _used(real: Bool[Array, "B T"], *, left: bool = False) -> Bool[Array, "B T"]:
    """Columns up to the last one that is True; with `left` from the first one on, and the last column in any case."""
    if left:
        return jnp.cumsum(real.at[:, -1].set(True), axis=1) > 0
    return jnp.cumsum(real[:, ::-1], axis=1)[:, ::-1] > 0

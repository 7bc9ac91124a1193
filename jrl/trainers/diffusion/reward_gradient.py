# SPDX-License-Identifier: Apache-2.0
"""Reward gradients (DRaFT): a diffusion model learns from a reward that JAX can differentiate."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
from jax.sharding import Mesh

from jrl.learners.reward_gradient import REWARD, make_reward_gradient_update
from jrl.learners.reward_gradient_config import RewardGradientConfig
from jrl.learners.state import TrainState, init_train_state
from jrl.mesh import place, tree_shardings
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.placement import local_computation, place_rows
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.ddpo_gallery import Gallery
from jrl.trainers.diffusion.ddpo_prompts import PromptFunction, PromptRandomness, draw_prompts
from jrl.trainers.diffusion.ddpo_rewards import Answers, check_rewards
from jrl.trainers.diffusion.ddpo_sampling import to_host
from jrl.trainers.diffusion.differentiable import as_differentiable, as_reward_function
from jrl.trainers.diffusion.diffusion_trainer import DiffusionBundle, DiffusionTrainer, warn_of_rate
from jrl.trainers.diffusion.image_judging import judge_images
from jrl.trainers.diffusion.reward_gradient_programs import (
    reward_gradient_activations,
    reward_gradient_programs,
)
from jrl.trainers.plan.model_part import DiffusionShapes, ModelShapes
from jrl.trainers.programs import Program
from jrl.trainers.rollouts.rehearsal import Rehearsal, rehearsed
from jrl.typing import DifferentiableReward, Metrics, Params, RewardGradientBatch


class Iteration(NamedTuple):
    """Result of an iteration.

    Attributes:
      batch: What the update read.
      host: Figures known on the host.
      device: Metrics of the update, still being computed.
      rows: One dict an image.
    """

    batch: RewardGradientBatch
    host: dict[str, float]
    device: Metrics
    rows: list[dict[str, Any]]


@register_trainer("RewardGradientTrainer")
class RewardGradientTrainer(DiffusionTrainer):
    """Online DRaFT-K. `state` is a `TrainState`; one iteration is one optimizer step on freshly sampled images.

    Args:
      config: The run's configuration, whose `method` is a `RewardGradientConfig`.
      reward_function: `images (B, height, width, 3) in [0, 1] -> rewards (B,)` in JAX, or a `DifferentiableReward`.
      prompt_function: () → (prompt, metadata); it may draw from `random` and `numpy.random`.
      model: The diffusion model; None: `model.model_path` names it.
      optimizer: Used instead of the one that the configuration names.

    Attributes:
      memory: What the next iteration begins with: generators of the prompt function.
    """

    state: TrainState
    reward_function: DifferentiableReward
    unplanned = "the reward, what remat computes again, weights gathered, what is sent"

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_function: Any = None,
        prompt_function: PromptFunction | None = None,
        model: DiffusionModel | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self.check_callables({"prompt_function": prompt_function})
        assert prompt_function is not None
        self.prompt_function, self.reward_function = prompt_function, as_differentiable(reward_function)
        self._judge = as_reward_function(self.reward_function)
        super().__init__(config, model=model, optimizer=optimizer)

    @property
    def method(self) -> RewardGradientConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(RewardGradientConfig)

    def load_model(self) -> DiffusionBundle:
        """The denoiser, split into what trains and what does not, and the reward's weights among the latter."""
        bundle, weights = super().load_model(), dict(self.reward_function.params)
        placed = place(weights, tree_shardings(self.mesh, weights)[0])
        return dataclasses.replace(bundle, frozen={**bundle.frozen, REWARD: placed})

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """There is no reference: nothing holds the model to what it drew before."""
        del make_reference
        train = self.config.train
        if self.adapter is None:
            warn_of_rate(self.config.optimizer.kwargs.get("lr", 0.0), params)
        optimizer = self.make_optimizer()
        update = make_reward_gradient_update(
            self.denoiser,
            self.reward_function,
            self.model.schedule,
            optimizer,
            self.method,
            batch_size=train.batch_size,
            minibatch_size=train.rows_per_pass,
        )
        self.compile_learner(partial(init_train_state, optimizer=optimizer), update, params)
        self.memory: dict[str, Any] = {"random": PromptRandomness(train.seed).state()}
        self.gallery = Gallery(train, self.run_dir)
        self.sampler = self.make_sampler(train.batch_size)

    @property
    def rows_per_call(self) -> int:
        """Images of a sampling call: those of an optimizer step."""
        return self.config.train.batch_size

    def compute_rewards(self, batches: Sequence[list[Any]], is_async: bool = False) -> Answers:
        """(reward vectors, {} for each), one entry a sampling batch.

        Args:
          batches: [images, prompts, metadata] of each.
          is_async: Nothing waits for the host here, so it must be False.
        Raises:
          RewardError: If these are not one finite number an image.
        """
        assert not is_async
        with local_computation():
            found = [self._judge(*batch)[0] for batch in batches]
        vectors = [check_rewards(x, batch[1], "a batch") for x, batch in zip(found, batches, strict=True)]
        return tuple(vectors), ({},) * len(vectors)

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """Sampling call and update of an iteration."""
        method = config.method
        assert isinstance(method, RewardGradientConfig), "the registry saw to it"
        assert isinstance(model, DiffusionShapes), "the method saw to it"
        return reward_gradient_programs(config, method, model, mesh)

    @classmethod
    def activations(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> int | None:
        """Bytes of activations of the decoder and of the last K steps."""
        method = config.method
        assert isinstance(method, RewardGradientConfig), "the registry saw to it"
        assert isinstance(model, DiffusionShapes), "the method saw to it"
        return reward_gradient_activations(config, method, model, mesh)

    def one_iteration(self, number: int, *, while_updating: Callable[[], None]) -> Iteration:
        """Samples, and takes an optimizer step along the gradient of the rewards.

        Args:
          number: Of the iteration, which the keys follow from.
          while_updating: Called once the update is on its way.
        """
        rows = self.rows_per_call
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        sample_key, update_key = jax.random.split(jax.random.fold_in(root_key, number))
        randomness = PromptRandomness(0)
        randomness.load(self.memory["random"])
        prompts = draw_prompts(self.prompt_function, randomness, rows, images_per_prompt=1)
        texts, metadata = tuple(p.text for p in prompts), tuple(p.metadata for p in prompts)
        numbers = np.arange(rows, dtype=np.int32)
        negative = self.sampler.negative(self.frozen)
        trajectories, images = self.sampler(
            self.params, self.frozen, negative, texts, sample_key, starts=numbers, steps=numbers
        )
        with local_computation():
            wanted = self.reward_function.conditions_of(texts, metadata)
        batch = RewardGradientBatch(trajectories, negative, place_rows(self.mesh, wanted))
        self.state, metrics = self.update(self.state, self.frozen, batch, update_key)
        while_updating()
        judged = [to_host(images), texts, metadata]
        (rewards,), (found,) = judge_images(
            self.compute_rewards,
            [judged],
            False,
            counts=[rows],
            own=self.own_images(rows),
            name_batch=lambda _: f"iteration {number}",
            skip_errors=False,
        )
        self.gallery.keep([*judged, rewards, found])
        self.memory = {"random": randomness.state()}
        return Iteration(
            batch,
            {"rollout/images": float(rows), "reward/std": float(rewards.std())},
            metrics,
            [{"prompt": text, "reward": float(reward)} for text, reward in zip(texts, rewards, strict=True)],
        )

    def rehearse(self) -> Rehearsal:
        """Makes one iteration outside of a run; the trainer is used up by it."""
        with jax.set_mesh(self.mesh):
            done = self.one_iteration(0, while_updating=lambda: None)
            return rehearsed(done.batch, done.device, rows=done.rows, host=done.host)

    def learn(self) -> None:
        """Runs up to `total_steps` or `epochs` iterations, whichever ends first."""
        train = self.config.train
        with self.running(num_steps=train.total_steps, max_iterations=train.epochs) as run:
            self.gallery.begin(run.loggers.trackers)
            run.begin()
            for number in run.remaining():
                done = self.one_iteration(number, while_updating=run.flush)
                run.after(done.host, done.device, done.rows)

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    @property
    def sampling_params(self) -> Params:
        """Parameters that evaluations see and models are written of."""
        return self.params

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step

    def host_state(self) -> dict[str, Any]:
        """Generators of the prompt function."""
        return super().host_state() | self.memory

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts them back."""
        super().load_host_state(found)
        self.memory = {"random": found["random"]}

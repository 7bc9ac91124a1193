# SPDX-License-Identifier: Apache-2.0
"""DDPO: a diffusion model learns from what a reward function says of its images."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jrl.distributed import on_main
from jrl.learners.ddpo import DDPOState, init_ddpo_state
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.state import TrainState
from jrl.mesh import place, tree_shardings
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.placement import local_computation
from jrl.trainers.base import TRAINING_STREAM
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.ddpo_experience import Collector, Experience, batch_name
from jrl.trainers.diffusion.ddpo_gallery import Gallery, Tracker
from jrl.trainers.diffusion.ddpo_programs import check_sizes, ddpo_programs, make_update, steps_per_epoch
from jrl.trainers.diffusion.ddpo_prompts import PromptFunction
from jrl.trainers.diffusion.ddpo_rewards import Answers, ImageRewardCall, RewardFunction, judge
from jrl.trainers.diffusion.differentiable import as_reward_function
from jrl.trainers.diffusion.diffusion_trainer import DiffusionTrainer, warn_of_rate
from jrl.trainers.loop.run import Run
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.trainers.plan.model_part import DiffusionShapes, ModelShapes
from jrl.trainers.programs import Program
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.typing import DifferentiableReward, Metrics, Params, PRNGKey

ImageHook = Callable[[list[list[Any]], int, Tracker], Any]


class Epoch(NamedTuple):
    """Result of an epoch.

    Attributes:
      host: Figures known on the host.
      device: Metrics of the update, still being computed.
      rows: One dict an image.
    """

    host: dict[str, float]
    device: Metrics
    rows: list[dict[str, Any]]


@register_trainer("DDPOTrainer")
class DDPOTrainer(DiffusionTrainer):
    """Online DDPO. `state` is a `DDPOState`; one iteration of the run is one epoch.

    Args:
      config: The run's configuration, whose `method` is a `DDPOConfig`.
      reward_function: (images (B 3 Y X) float32 in [0, 1], prompts, metadata) → (rewards, reward metadata); or a
        `DifferentiableReward`.
      prompt_function: () → (prompt, metadata); it may draw from `random` and `numpy.random`.
      model: The diffusion model; None: `model.model_path` names it.
      image_samples_hook: Called once an epoch, between rewards and training, with [images, prompts, metadata, rewards,
        reward metadata] of each sampling batch, the optimizer steps so far, and a tracker that has `log_images`. Of
        several processes process 0 calls it, with all images; the reward metadata are what the function said there.
      optimizer: Used instead of the one that the configuration names.

    Attributes:
      memory: What the next epoch begins with: rewards of prompts, generators of the prompt function.
      gallery: Where images are shown.
    """

    state: DDPOState
    reward_function: RewardFunction | DifferentiableReward

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_function: RewardFunction | DifferentiableReward | None = None,
        prompt_function: PromptFunction | None = None,
        model: DiffusionModel | None = None,
        image_samples_hook: ImageHook | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self.check_callables({"reward_function": reward_function, "prompt_function": prompt_function})
        assert reward_function is not None and prompt_function is not None
        self.reward_function, self.prompt_function = reward_function, prompt_function
        self.image_samples_hook = image_samples_hook
        self._name_batch: Callable[[int], str] = lambda number: f"sampling batch {number}"
        super().__init__(config, model=model, optimizer=optimizer)

    @property
    def method(self) -> DDPOConfig:
        """The algorithm's section of the configuration."""
        return self.method_as(DDPOConfig)

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """The reference is the model without its adapter, or the copy that `frozen` holds."""
        del make_reference
        train, method = self.config.train, self.method
        check_sizes(self.config, method)
        if self.adapter is None:
            warn_of_rate(self.config.optimizer.kwargs.get("lr", 0.0), params)
        optimizer = self.make_optimizer()
        update = make_update(self.config, method, self.denoiser, self.model.schedule, optimizer)
        self.compile_learner(lambda p: init_ddpo_state(p, optimizer, method), update, params)
        self.memory = Collector.fresh_memory(train.seed)
        self.gallery = Gallery(train, self.run_dir)
        self.collect = Collector(
            self.make_sampler(method.sample_batch_size),
            method,
            lambda: self.prompt_function(),  # the one of the moment
            lambda batches, is_async: self.compute_rewards(batches, is_async),
            skip_errors=train.reward_errors == "skip",
            own_images=self.own_images,
        )

    @classmethod
    def programs(cls, config: TRLConfig, model: ModelShapes, mesh: Mesh) -> list[Program]:
        """Sampling call and update of an epoch."""
        method = config.method
        assert isinstance(method, DDPOConfig), "the registry saw to it"
        assert isinstance(model, DiffusionShapes), "the method saw to it"
        return ddpo_programs(config, method, model, mesh)

    def compute_rewards(self, batches: Sequence[list[Any]], is_async: bool = False) -> Answers:
        """(reward vectors, reward metadata), one entry a sampling batch.

        Args:
          batches: [images, prompts, metadata] of each; one that is asked for is waited for. Of several processes each
            is given its own images (`train.rewards_on`).
          is_async: Whether the reward function is called on `method.max_workers` threads, each batch as soon as its
            images are there; else in order, here.
        Raises:
          RewardError: If the function fails and errors are not skipped; the images are on disk by then.
        """
        train = self.config.train
        reward = self.reward_function
        call = ImageRewardCall(
            as_reward_function(reward) if isinstance(reward, DifferentiableReward) else reward,
            skip_errors=train.reward_errors == "skip",
            timeout=train.reward_timeout,
            failures=self.run_dir / "failed_rollouts",
        )
        return judge(call, batches, self._name_batch, workers=self.method.max_workers if is_async else None)

    def keys(self, epoch: int) -> tuple[PRNGKey, PRNGKey]:
        """Random keys of an epoch: for its samples, and for its update."""
        root_key = jax.random.fold_in(self.root_key, TRAINING_STREAM)
        sample_key, update_key = jax.random.split(jax.random.fold_in(root_key, epoch))
        return sample_key, update_key

    def one_epoch(
        self,
        epoch: int,
        *,
        while_sampling: Callable[[], None],
        stopwatch: Stopwatch,
        last_step: np.int32 | None = None,
    ) -> Epoch:
        """Samples, rewards, shows, and sends the update on its way.

        Args:
          epoch: Its number, which the keys follow from.
          while_sampling: Called once the first sampling call is on its way.
          stopwatch: Receives `rollout` and `reward`.
          last_step: As `make_ddpo_update`'s result takes it.
        """
        sample_key, update_key = self.keys(epoch)
        self._name_batch = lambda number: batch_name(epoch, number)
        found: Experience = self.collect(
            self.params,
            self.frozen,
            epoch,
            sample_key,
            self.memory,
            while_sampling=while_sampling,
            stopwatch=stopwatch,
        )
        if self.image_samples_hook is not None:
            on_main(partial(self._call_hook, self.image_samples_hook, found.images))
        self.gallery.keep(found.images[-1])
        self.state, metrics = self.update(self.state, self.frozen, found.batch, update_key, last_step)
        self.memory = found.memory
        return Epoch({"epoch": epoch, **found.metrics}, metrics, found.rows)

    def _call_hook(self, hook: ImageHook, images: list[list[Any]]) -> None:
        """Calls the user's hook."""
        step = int(jax.device_get(self.optimizer_steps()))
        with local_computation():
            hook(images, step, self.gallery.tracker)

    def run_epoch(self, run: Run, epoch: int) -> None:
        """Runs an epoch, with what falls due after it."""
        done = self.one_epoch(
            epoch, while_sampling=run.flush, stopwatch=run.stopwatch, last_step=run.end_of_state
        )
        run.after(done.host, done.device, done.rows)

    def learn(self) -> None:
        """Runs up to `total_steps` or `epochs` epochs, whichever ends first."""
        train = self.config.train
        with self.running(
            num_steps=train.total_steps,
            steps_per_iteration=self.steps_per_iteration,
            max_iterations=train.epochs,
        ) as run:
            self.gallery.begin(run.loggers.trackers)
            run.begin()
            for epoch in run.remaining():
                self.run_epoch(run, epoch)

    def run_evaluation(self, step: int) -> Evaluation | None:
        """Evaluates as every trainer of a diffusion model; errors of the reward function name the step."""
        self._name_batch = lambda number: f"evaluation at step {step}, batch {number}"
        return super().run_evaluation(step)

    @property
    def rows_per_call(self) -> int:
        """Images of a sampling call."""
        return self.method.sample_batch_size

    @property
    def keeps_reference(self) -> bool:
        """True where the KL from the model as it was is penalised: it is kept then."""
        return self.method.beta_kl > 0

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.train.params

    @property
    def sampling_params(self) -> Params:
        """Parameters that evaluations see and models are written of: the running mean where there is one."""
        return self.params if self.state.ema is None else self.state.ema

    def replace_params(self, params: Params) -> None:
        """Goes on from other weights, of the same shapes; the optimizer keeps its moments, and a running mean restarts.

        Args:
          params: As `params` has them, on the host or on devices.
        """
        # Buffers of its own: state is donated, and `place` copies nothing that is in its place already.
        placed = jax.tree.map(jnp.copy, place(params, tree_shardings(self.mesh, params)[0]))
        train = TrainState(self.state.train.step, placed, self.state.train.opt_state)
        ema = None if self.state.ema is None else jax.tree.map(jnp.copy, placed)
        self.state = DDPOState(train, ema, self.state.loss_scale)

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.train.step

    @property
    def steps_per_iteration(self) -> int:
        """Optimizer steps of an epoch."""
        return steps_per_epoch(self.config, self.method)

    def host_state(self) -> dict[str, Any]:
        """Rewards of prompts, and the generators of the prompt function."""
        return super().host_state() | self.memory

    def load_host_state(self, found: Mapping[str, Any]) -> None:
        """Puts both back."""
        super().load_host_state(found)
        self.memory = {name: value for name, value in found.items() if name != "draws"}

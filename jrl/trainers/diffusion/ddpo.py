# SPDX-License-Identifier: Apache-2.0
"""DDPO: a diffusion model learns from what a reward function says of its images."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jrl.learners.ddpo import DDPOState, init_ddpo_state
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.state import TrainState
from jrl.mesh import place, tree_shardings
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.rollout.keywords import refuse_async
from jrl.trainers.base import EVALUATION_STREAM, TRAINING_STREAM
from jrl.trainers.config.registry import register_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.ddpo_evaluation import evaluate_prompts
from jrl.trainers.diffusion.ddpo_experience import Collector, Experience, batch_name
from jrl.trainers.diffusion.ddpo_gallery import Gallery, Tracker
from jrl.trainers.diffusion.ddpo_programs import check_sizes, ddpo_programs, make_update, steps_per_epoch
from jrl.trainers.diffusion.ddpo_prompts import PromptFunction, PromptList
from jrl.trainers.diffusion.ddpo_rewards import Answers, ImageRewardCall, RewardFunction, judge
from jrl.trainers.diffusion.ddpo_sampling import Sampler
from jrl.trainers.diffusion.diffusion_trainer import DiffusionTrainer
from jrl.trainers.loggers.description import warn_of_unused_evaluation_steps
from jrl.trainers.loggers.safe_text import code_span
from jrl.trainers.loop.run import Run
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.trainers.plan.model_part import DiffusionShapes, ModelShapes
from jrl.trainers.programs import Program
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.typing import Metrics, Params, PRNGKey

LARGE, HIGHEST_RATE = 10**8, 5e-5
"""Weights of a network that trains as a whole, and the rate above which it is warned of."""
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
      reward_function: (images (B 3 Y X) float32 in [0, 1], prompts, metadata) → (rewards, reward metadata).
      prompt_function: () → (prompt, metadata); it may draw from `random` and `numpy.random`.
      model: The diffusion model; None: `model.model_path` names it.
      image_samples_hook: Called once an epoch, between rewards and training, with [images, prompts, metadata, rewards,
        reward metadata] of each sampling batch, the optimizer steps so far, and a tracker that has `log_images`.
      optimizer: Used instead of the one that the configuration names.

    Attributes:
      memory: What the next epoch begins with: rewards of prompts, generators of the prompt function.
      gallery: Where images are shown.
    """

    state: DDPOState
    epoch = "iteration"

    def __init__(
        self,
        config: TRLConfig,
        *,
        reward_function: RewardFunction | None = None,
        prompt_function: PromptFunction | None = None,
        model: DiffusionModel | None = None,
        image_samples_hook: ImageHook | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        for name, function in (("reward_function", reward_function), ("prompt_function", prompt_function)):
            if not callable(function):
                raise ValueError(
                    f"`{name}` must be a function given to DDPOTrainer, got {type(function).__name__}."
                )
            refuse_async(function, name)
        assert reward_function is not None and prompt_function is not None
        self.reward_function, self.prompt_function = reward_function, prompt_function
        self.image_samples_hook = image_samples_hook
        self._eval_sampler: Sampler | None = None
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
            _warn_of_rate(self.config.optimizer.kwargs.get("lr", 0.0), params)
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
          batches: [images, prompts, metadata] of each; one that is asked for is waited for.
          is_async: Whether the reward function is called on `method.max_workers` threads, each batch as soon as its
            images are there; else in order, here.
        Raises:
          RewardError: If the function fails and errors are not skipped; the images are on disk by then.
        """
        train = self.config.train
        call = ImageRewardCall(
            self.reward_function,
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
            step = int(jax.device_get(self.optimizer_steps()))
            self.image_samples_hook(found.images, step, self.gallery.tracker)
        self.gallery.keep(found.images[-1])
        self.state, metrics = self.update(self.state, self.frozen, found.batch, update_key, last_step)
        self.memory = found.memory
        return Epoch({"epoch": epoch, **found.metrics}, metrics, found.rows)

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
        """Images of `method.eval_prompts`, always from the same noise, and their rewards; None without any.

        The images of the last sampling batch are shown beside them.
        """
        self.gallery.show_last(step)
        prompts = self.method.eval_prompts
        if not prompts:
            return None
        if self._eval_sampler is None:
            rows = min(len(prompts), self.method.sample_batch_size)
            self._eval_sampler = self.make_sampler(rows, self.method.eval_eta, self.method.eval_num_steps)
        self._name_batch = lambda number: f"evaluation at step {step}, batch {number}"
        with jax.set_mesh(self.mesh):
            key = jax.random.fold_in(self.root_key, EVALUATION_STREAM)
            found = evaluate_prompts(
                self._eval_sampler,
                self.sampling_params,
                self.frozen,
                prompts,
                key,
                self.compute_rewards,
                skip_errors=self.config.train.reward_errors == "skip",
            )
        self.gallery.show("evaluation", found.images, found.prompts, found.rewards, step)
        return found.as_evaluation(self.method)

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

    def describe_data(self) -> dict[str, str]:
        """Describes the functions that draw prompts and judge images."""
        drawn = f"drawn by {code_span(_name(self.prompt_function))}"
        if isinstance(self.prompt_function, PromptList):
            drawn = f"{len(self.prompt_function.prompts):,}"
        unused = warn_of_unused_evaluation_steps(self.method.eval_num_steps, len(self.method.eval_prompts))
        return {"prompts": drawn, "rewards": f"by {code_span(_name(self.reward_function))}"} | unused

    def data_sha256(self) -> dict[str, str]:
        """The list of prompts', where they come from one, beside what every trainer has."""
        prompts = self.prompt_function
        found = {"prompts": prompts.sha256()} if isinstance(prompts, PromptList) else {}
        return super().data_sha256() | found


def _warn_of_rate(rate: float, params: Params) -> None:
    """Warns of an adapter's rate where all of a large network trains: images have gone black of it.

    Args:
      rate: Learning rate.
      params: The network's.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    if size > LARGE and rate > HIGHEST_RATE:
        warnings.warn(
            f"`optimizer.kwargs.lr` is {rate:g}, and all of a network of {size:,} weights trains: that rate is an "
            "adapter's. Take about 1e-5, or set `model.peft_config`.",
            stacklevel=2,
        )


def _name(function: Callable[..., Any]) -> str:
    """Name of a function."""
    return str(getattr(function, "__name__", type(function).__name__))

# SPDX-License-Identifier: Apache-2.0
"""TRL's DDPO trainer over jrl's own: the same constructor, the same methods, one compiled update an epoch."""

from __future__ import annotations

import contextlib
import functools
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from jrl.compilation import compiled
from jrl.distributed import on_main
from jrl.interop import refuse_overrides
from jrl.learners.ddpo_objective import DenoisingRows, ddpo_objective
from jrl.ops.ddim import step_of_timesteps
from jrl.ops.metrics import finalize
from jrl.ops.noise_schedule import DenoisingSteps
from jrl.ops.policy_gradient import clipped_surrogate
from jrl.placement import fetch
from jrl.trainers.cards import model_card
from jrl.trainers.checkpoints import CheckpointError
from jrl.trainers.diffusion import (
    Answers,
    PromptFunction,
    PromptRandomness,
    RewardFunction,
    draw_prompts,
    in_terms_of,
    to_host,
)
from jrl.trl.ddpo_config import DDPOConfig
from jrl.trl.ddpo_native import OwnedDDPO, native_config, steps_per_epoch
from jrl.trl.ddpo_pipeline import DDPOStableDiffusionPipeline
from jrl.trl.ddpo_sampler import channels_last
from jrl.trl.refusals import DDPO
from jrl.typing import DifferentiableReward
from jrl.upload import push_to_hub

__all__ = ["DDPOTrainer"]

# What errors of checkpoints speak of → the field here.
_FLAT_NAMES = {
    "train.resume_from_checkpoint": "resume_from",
    "train.overwrite: true": "overwrite=True",
    "train.checkpoint_dir": "logdir",
}
_SECTIONS = {"method.": "", "train.": ""}


class DDPOTrainer:
    """Reinforcement learning of a diffusion model.

    `step` and `compute_rewards` may be overridden, and what an override does counts. The loss and the sampler are
    compiled with everything around them: a subclass that overrides those is refused.

    Args:
      config: TRL's `DDPOConfig`.
      reward_function: (images (B 3 H W) float32 in [0, 1], prompts, metadata) → (rewards, reward metadata); or a
        `DifferentiableReward`.
      prompt_function: () → (prompt, metadata).
      sd_pipeline: What trains.
      image_samples_hook: (data, global_step, tracker), once an epoch, between rewards and training.

    Attributes:
      config: As given.
      reward_fn: The reward function.
      prompt_fn: The prompt function.
      sd_pipeline: The pipeline; it samples and saves with the parameters as they are now.
      image_samples_callback: The hook; it may be replaced at any time.
      num_train_timesteps: T', denoising steps that every sample is trained on in a pass.
      native: jrl's own trainer, with `state`, `history`, `config` and `run_dir`.
    """

    _tag_names: ClassVar[tuple[str, ...]] = ("jrl", "ddpo")

    def __init__(
        self,
        config: DDPOConfig,
        reward_function: RewardFunction | DifferentiableReward,
        prompt_function: PromptFunction,
        sd_pipeline: DDPOStableDiffusionPipeline,
        image_samples_hook: Callable[..., Any] | None = None,
    ) -> None:
        refuse_overrides(type(self), DDPOTrainer, DDPO)
        for name, function in (("reward_function", reward_function), ("prompt_function", prompt_function)):
            if not callable(function):
                raise ValueError(f"`{name}` must be a function, got {type(function).__name__}.")
        self.config, self.reward_fn, self.prompt_fn = config, reward_function, prompt_function
        self.sd_pipeline, self.image_samples_callback = sd_pipeline, image_samples_hook
        holds, reason = self._config_check()
        if not holds:
            raise ValueError(reason)
        try:
            with self._precision():
                self.native = OwnedDDPO(
                    self._native_config(), owner=self, model=sd_pipeline.model, precision=self._precision
                )
        except ValueError as error:
            error.args = (in_terms_of(_SECTIONS, str(error)),)
            raise
        self.num_train_timesteps = self.native.method.num_trained_steps
        sampler = self.native.collect.sampler
        self._samplers = {sampler.rows: sampler}
        sd_pipeline.attach(self.native)

    def _native_config(self) -> Any:
        pipeline = self.sd_pipeline
        return native_config(self.config, model=pipeline.model.name, use_lora=pipeline.use_lora)

    def _config_check(self) -> tuple[bool, str]:
        """(whether the configuration can be run, why not)."""
        try:
            self.config.check()
            self._native_config().validate()
        except (TypeError, ValueError) as error:
            return False, in_terms_of(_SECTIONS, str(error))
        return True, ""

    def _precision(self) -> contextlib.AbstractContextManager[Any]:
        """Context that decides if float32 products may round their factors; by default JAX decides."""
        return contextlib.nullcontext() if self.config.allow_tf32 else jax.default_matmul_precision("highest")

    def train(self, epochs: int | None = None) -> None:
        """Runs `step` until there are so many epochs, those before a resume included.

        Args:
          epochs: Default: `config.num_epochs`.
        Raises:
          CheckpointError: If `resume_from` names no checkpoint of this run, or the folder holds another one.
          RewardError: If the reward function fails; the images are on disk by then.
        """
        native = self.native
        native.config.train.epochs = epochs or self.config.num_epochs
        native.config.train.total_steps = native.config.train.epochs * steps_per_epoch(self.config)
        try:
            with self._precision():
                native.learn()
        except CheckpointError as error:
            text = str(error)
            for name, flat in _FLAT_NAMES.items():
                text = text.replace(name, flat)
            raise CheckpointError(text) from error

    def step(self, epoch: int, global_step: int) -> int:
        """Runs an epoch: samples, rewards, advantages, and all optimizer steps on them.

        Args:
          epoch: Its number: samples and orders follow from it and the seed.
          global_step: Optimizer steps so far.
        Returns:
          Optimizer steps after it. Outside of `train` nothing is logged or saved.
        """
        self.native.take_functions(self.reward_fn, self.prompt_fn)
        with self._precision():
            self.native.own_step(epoch, global_step)
        return global_step + self.native.steps_per_iteration

    def compute_rewards(self, prompt_image_pairs: Sequence[list[Any]], is_async: bool = False) -> Answers:
        """(reward vectors, reward metadata), one entry a sampling batch.

        Args:
          prompt_image_pairs: [images, prompts, metadata] of each. In a run they are there as they are sampled: one that
            is asked for is waited for, while the device goes on with the next.
          is_async: Whether the reward function is called on `max_workers` threads.
        """
        return self.native.own_rewards(prompt_image_pairs, is_async)

    def loss(self, advantages: Any, clip_range: float, ratio: Any) -> jax.Array:
        """Mean of max(−A·ρ, −A·clip(ρ, 1 ± ε)).

        Args:
          advantages: A, clipped already.
          clip_range: ε.
          ratio: ρ.
        """
        given = jnp.broadcast_arrays(jnp.log(jnp.asarray(ratio, jnp.float32)), jnp.float32(advantages))
        return jnp.mean(
            clipped_surrogate(given[0], jnp.zeros_like(given[0]), given[1], clip_range=clip_range)
        )

    def calculate_loss(
        self, latents: Any, timesteps: Any, next_latents: Any, log_probs: Any, advantages: Any, embeds: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(loss, approximate KL, share of clipped ratios) of single denoising steps under the present parameters.

        Args:
          latents: x before the step, (B C Y X).
          timesteps: (B,).
          next_latents: x after it.
          log_probs: Of the step under the policy that took it, (B,).
          advantages: (B,).
          embeds: With guidance (`train_cfg`) the negative prompt's and then the prompts', (2B Q D); else (B Q D).
        Raises:
          ValueError: If a timestep is none of those sampled at, or rows have different negative prompts.
        """
        native, method, steps = self.native, self.native.method, self._steps()
        times = np.atleast_1d(np.asarray(timesteps))
        if not np.isin(times, np.asarray(steps.timesteps)).all():
            raise ValueError(
                f"`timesteps` must be among those sampled at, {np.asarray(steps.timesteps).tolist()}, got "
                f"{times.tolist()}."
            )
        count, context = len(times), np.asarray(embeds, np.float32)
        negative = context[:1]
        if len(context) != count * (1 + method.train_cfg):
            raise ValueError(
                f"`embeds` must have {count * (1 + method.train_cfg)} rows for {count} timesteps where `train_cfg` is "
                f"{method.train_cfg}, got {len(context)}. Are the negative prompt's there, in front?"
            )
        if method.train_cfg:
            negative, context = context[:count], context[count:]
            if (negative != negative[:1]).any():
                raise ValueError("`embeds` must have the same negative prompt in all rows, got several.")
        rows = DenoisingRows(
            latents=channels_last(latents),
            next_latents=channels_last(next_latents),
            steps=step_of_timesteps(steps, jnp.asarray(times, steps.timesteps.dtype)),
            old_logprobs=jnp.asarray(log_probs, jnp.float32),
            advantages=jnp.asarray(advantages, jnp.float32),
            context=jnp.asarray(context),
            negative=jnp.asarray(negative[:1]),
            valid=jnp.ones(count, bool),
        )
        with self._precision():
            total, weight, metrics = self._objective(native.params, native.frozen, rows)
        found = finalize(jax.device_get(metrics))
        return (
            total / weight,
            jnp.float32(found["ddpo/approx_kl"]),
            jnp.float32(found["ddpo/clip_fraction"]),
        )

    @functools.cached_property
    def _objective(self) -> Callable[..., Any]:
        """(sum of the loss, weight, metrics) of (params, frozen, rows), compiled."""
        native = self.native
        objective = functools.partial(
            ddpo_objective,
            native.denoiser,
            steps=self._steps(),
            schedule=native.model.schedule,
            config=native.method,
        )
        return compiled(objective)

    def _steps(self) -> DenoisingSteps:
        """Denoising steps of sampling."""
        method = self.native.method
        return self.native.model.schedule.steps(method.sample_num_steps, method.sample_eta)

    def _generate_samples(
        self, iterations: int, batch_size: int
    ) -> tuple[list[dict[str, np.ndarray]], list[list[Any]]]:
        """(samples, [images, prompts, metadata]) of so many sampling batches; every call draws others.

        Returns:
          Of each batch: `prompt_ids`, `prompt_embeds`, `negative_prompt_embeds`, `timesteps` (B T), `latents` and
          `next_latents` (B T C Y X), `log_probs` (B T).
        """
        native = self.native
        if batch_size not in self._samplers:
            self._samplers[batch_size] = native.make_sampler(batch_size)
        sampler = self._samplers[batch_size]
        randomness = PromptRandomness(0)
        randomness.load(native.memory["random"])
        prompts = draw_prompts(self.prompt_fn, randomness, iterations * batch_size, images_per_prompt=1)
        native.memory = {**native.memory, "random": randomness.state()}
        key = native.draws.key()
        steps = self._steps()
        samples, pairs = [], []
        for start in range(0, len(prompts), batch_size):
            chosen = prompts[start : start + batch_size]
            texts, numbers = [prompt.text for prompt in chosen], np.arange(start, start + batch_size)
            with self._precision(), jax.set_mesh(native.mesh):
                negative = sampler.negative(native.frozen)
                found, images = sampler(
                    native.params, native.frozen, negative, texts, key, starts=numbers, steps=numbers
                )
            found = fetch(found)
            states = np.moveaxis(found.latents, -1, 2)
            samples.append(
                {
                    "prompt_ids": sampler.tokenize(texts),
                    "prompt_embeds": found.context,
                    "negative_prompt_embeds": np.repeat(fetch(negative), batch_size, axis=0),
                    "timesteps": np.tile(np.asarray(steps.timesteps), (batch_size, 1)),
                    "latents": states[:, :-1],
                    "next_latents": states[:, 1:],
                    "log_probs": found.logprobs,
                }
            )
            pairs.append([to_host(images), tuple(texts), tuple(prompt.metadata for prompt in chosen)])
        return samples, pairs

    # What it leaves behind.

    def save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """Writes a folder that diffusers reads, and the model card.

        Args:
          save_directory: Made if missing.
        """
        self._save_pretrained(save_directory)
        card = model_card(self.native)
        on_main(lambda: card.write(Path(save_directory)))

    def _save_pretrained(self, save_directory: str | os.PathLike[str]) -> None:
        """The pipeline alone."""
        self.sd_pipeline.save_pretrained(save_directory)

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | Sequence[str] | None = None,
    ) -> None:
        """Writes the model card, `README.md`, into the run's folder.

        Args:
          model_name: Title.
          dataset_name: Where the prompts come from.
          tags: Beside those that the card has.
        """
        added = [tags] if isinstance(tags, str) else list(tags or ())
        self.native.tags = tuple(dict.fromkeys([*self.native.tags, *added]))
        if dataset_name is not None:
            self.native.dataset_names = (dataset_name,)
        card, folder = model_card(self.native), self.native.run_dir

        def write() -> None:
            folder.mkdir(parents=True, exist_ok=True)
            card.write(folder, name=model_name)

        on_main(write)

    def push_to_hub(
        self,
        repo_id: str,
        *,
        commit_message: str = "End of training",
        private: bool | None = None,
        token: str | None = None,
    ) -> str:
        """Uploads what `save_pretrained` writes; returns the address.

        Args:
          repo_id: "organisation/name".
          commit_message: Of the upload.
          private: Whether a repository that is made is private.
          token: Of the hub; None: the one of this machine.
        """
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            options: dict[str, Any] = {"commit_message": commit_message, "private": private, "token": token}
            return on_main(lambda: push_to_hub(folder, repo_id, **options))

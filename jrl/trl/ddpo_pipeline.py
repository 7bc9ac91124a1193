# SPDX-License-Identifier: Apache-2.0
"""The diffusion pipeline of TRL's DDPO: what the trainer trains, and a script samples from and saves."""

from __future__ import annotations

import abc
import contextlib
import functools
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.distributed import on_main
from jrl.models.adapters import Lora
from jrl.models.diffusion import DIFFUSERS_STEM, LORA, UNET, DiffusionModel, has_lora, read_lora
from jrl.models.entries_io import check_entries, load_entries, parameter_targets
from jrl.models.safetensors_io import TensorFiles
from jrl.ops.ddim import ddim_logprob, ddim_mean, ddim_step, step_of_timesteps, steps_of_rows
from jrl.ops.flow_schedule import Schedule
from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule
from jrl.placement import fetch
from jrl.trainers.loop import says_what_takes_long
from jrl.trl.ddpo_native import OwnedDDPO
from jrl.trl.ddpo_sampler import ImageCall, Parts, channels_last
from jrl.typing import Params

__all__ = [
    "DDPOPipelineOutput",
    "DDPOSchedulerOutput",
    "DDPOStableDiffusionPipeline",
    "DefaultDDPOStableDiffusionPipeline",
]


class DDIMScheduler:
    """The steps of a noise schedule.

    Args:
      schedule: Of the model.

    Attributes:
      config: Keys of the schedule.
      init_noise_sigma: What the first noise is multiplied by: 1.
      num_inference_steps: As set; None before.
      timesteps: Descending; empty before.
    """

    init_noise_sigma = 1.0

    def __init__(self, schedule: Schedule) -> None:
        self._schedule = schedule
        self.config: dict[str, Any] = asdict(schedule)
        self.num_inference_steps: int | None = None
        self.timesteps = np.zeros(0, np.int32)

    @property
    def alphas_cumprod(self) -> np.ndarray:
        """ᾱ of every training timestep, float64.

        Raises:
          ValueError: If the model is a flow, which has none.
        """
        if not isinstance(self._schedule, NoiseSchedule):
            raise ValueError(
                "`alphas_cumprod` is of models with β; a flow has levels σ, `config` has its keys."
            )
        return self._schedule.alphas_cumprod

    def set_timesteps(self, num_inference_steps: int) -> None:
        """Sets the number of denoising steps, T.

        Raises:
          ValueError: If there are not so many timesteps.
        """
        steps = self._schedule.steps(num_inference_steps, 0.0)
        self.num_inference_steps, self.timesteps = num_inference_steps, np.asarray(steps.timesteps)

    def steps(self, eta: float) -> DenoisingSteps:
        """Coefficients of all steps.

        Args:
          eta: η.
        Raises:
          ValueError: If T is not set.
        """
        if self.num_inference_steps is None:
            raise ValueError("`scheduler.set_timesteps` must be called before a step is taken.")
        return self._schedule.steps(self.num_inference_steps, eta)

    def check_timesteps(self, timesteps: np.ndarray) -> None:
        """Refuses what is no timestep of a step.

        Raises:
          ValueError: Naming those that are.
        """
        if not np.isin(timesteps, self.timesteps).all():
            raise ValueError(
                f"`timestep` must be one of the scheduler's {self.timesteps.tolist()}, got {timesteps.tolist()}."
            )


@dataclass
class DDPOPipelineOutput:
    """Output of a pipeline for prompts.

    Attributes:
      images: (B 3 H W) float32 in [0, 1], Pillow images where asked for, or the last latents.
      latents: T + 1 arrays (B C Y X), from the first noise to the clean latents.
      log_probs: T arrays (B,): mean log-density of an element of each step's result; 0 at η = 0.
    """

    images: Any
    latents: list[np.ndarray]
    log_probs: list[np.ndarray]


@dataclass
class DDPOSchedulerOutput:
    """Output of a scheduler's step.

    Attributes:
      latents: After it, (B C Y X).
      log_probs: Of them, (B,).
    """

    latents: jax.Array
    log_probs: jax.Array


class DDPOStableDiffusionPipeline(abc.ABC):
    """Interface of a pipeline for `DDPOTrainer`: a `DiffusionModel`, with an adapter that trains or without.

    Attributes:
      model: Networks, schedule and tokenizer.
      use_lora: Whether an adapter trains, and the model itself is frozen.
    """

    model: DiffusionModel
    use_lora: bool

    @abc.abstractmethod
    def attach(self, trainer: OwnedDDPO) -> None:
        """Makes the pipeline sample and save with this trainer's parameters."""

    @property
    @abc.abstractmethod
    def scheduler(self) -> DDIMScheduler:
        """Scheduler of DDIM."""

    @abc.abstractmethod
    def save_pretrained(self, output_dir: str | os.PathLike[str]) -> None:
        """Writes a folder that diffusers reads, with the parameters as they are now."""

    @property
    def unet(self) -> Any:
        """The denoiser, without weights."""
        return self.model.unet

    @property
    def vae(self) -> Any:
        """The image decoder, without weights."""
        return self.model.vae

    @property
    def text_encoder(self) -> Any:
        """The text encoder, without weights."""
        return self.model.text_encoder

    @property
    def tokenizer(self) -> Any:
        """Texts to ids."""
        return self.model.tokenizer

    @property
    def autocast(self) -> Any:
        """A context that does nothing: what computes in which type is part of the compiled program."""
        return contextlib.nullcontext

    def set_progress_bar_config(self, **kwargs: Any) -> None:
        """Takes what scripts set, and shows no bar: a compiled loop has nothing to show between two steps."""
        del kwargs


class DefaultDDPOStableDiffusionPipeline(DDPOStableDiffusionPipeline):
    """Stable Diffusion, or any other `DiffusionModel`.

    The checkpoint's scheduler is replaced by DDIM, built from its own configuration. A LoRA file in the folder is read,
    and trains on where `use_lora` is set; without, it is merged into the weights.

    Args:
      pretrained_model_name: A folder in the layout of diffusers, a name on the hub, or a `DiffusionModel`.
      pretrained_model_revision: Of the hub.
      use_lora: Whether an adapter trains; else the whole denoiser does, at a far lower learning rate.
    """

    def __init__(
        self,
        pretrained_model_name: str | os.PathLike[str] | DiffusionModel,
        *,
        pretrained_model_revision: str = "main",
        use_lora: bool = True,
    ) -> None:
        model = pretrained_model_name
        if not isinstance(model, DiffusionModel):
            from jrl.models.diffusion import load_diffusion_model  # brings transformers along

            with says_what_takes_long("loading the model"):
                model = load_diffusion_model(model, revision=pretrained_model_revision)
        self.pretrained_model = model.name
        self.pretrained_revision, self.use_lora = pretrained_model_revision, use_lora
        self.model = model if use_lora else model.merged()
        # A shift that depends on the size is that of the model's own.
        self._scheduler = DDIMScheduler(self.model.at_size(self.model.latent_shape()).schedule)
        self._trainer: OwnedDDPO | None = None
        self._parts: Parts | None = None
        self._call = ImageCall(self.model)

    def attach(self, trainer: OwnedDDPO) -> None:
        """Makes the pipeline sample and save with this trainer's parameters."""
        self._trainer, self._parts = trainer, None

    def parts(self) -> Parts:
        """Parts for sampling: the trainer's, or the model as it was read."""
        trainer = self._trainer
        if trainer is not None:
            return Parts(trainer.denoiser, trainer.sampling_params, trainer.frozen)
        if self._parts is None:
            found = self.model.found_lora
            lora = None if found is None else found.lora
            params, frozen = self.model.split(
                lora=lora, key=jax.random.key(0), compute_dtype=jnp.float32, with_reference=False
            )
            functions = self.model.functions(compute_dtype=jnp.float32, lora=lora)
            self._parts = Parts(functions, *jax.device_put((params, frozen)))
        return self._parts

    def __call__(
        self,
        prompt: str | Sequence[str] | None = None,
        height: int | None = None,
        width: int | None = None,
        num_inference_steps: int = 50,
        guidance_scale: float = 7.5,
        negative_prompt: str | Sequence[str] | None = None,
        num_images_per_prompt: int = 1,
        eta: float = 0.0,
        generator: Any = None,
        latents: Any = None,
        prompt_embeds: Any = None,
        negative_prompt_embeds: Any = None,
        output_type: str = "pil",
        return_dict: bool = True,
        callback: Any = None,
        callback_steps: int = 1,
        cross_attention_kwargs: Any = None,
        guidance_rescale: float = 0.0,
    ) -> DDPOPipelineOutput | tuple[Any, list[np.ndarray], list[np.ndarray]]:
        """Samples images; the whole loop is one compiled program.

        Args:
          prompt: One text or several.
          height: In pixels; None: the model's.
          width: Likewise.
          num_inference_steps: T.
          guidance_scale: w; 1 and below: no guidance.
          negative_prompt: One text, or as many as prompts, all the same.
          num_images_per_prompt: Beside each other.
          eta: η of DDIM.
          generator: A seed or a key of JAX; None: another one at every call.
          latents: First noise, (B C Y X), in the place of a random one.
          prompt_embeds: In the place of `prompt`, (B Q D).
          negative_prompt_embeds: In the place of `negative_prompt`, (1 Q D) or all rows the same.
          output_type: "pil", "np" or "pt" (both (B 3 H W) NumPy in [0, 1]), or "latent".
          return_dict: False: a tuple.
          callback: Refused: nothing happens between two steps.
          callback_steps: Of the callback.
          cross_attention_kwargs: Refused.
          guidance_rescale: φ.
        Raises:
          ValueError: On a value out of range, or one that is refused.
        """
        del callback_steps
        for name, given in (("callback", callback), ("cross_attention_kwargs", cross_attention_kwargs)):
            if given is not None:
                raise ValueError(
                    f"`{name}` must be None: all steps are one compiled program, got {given!r:.60}."
                )
        with contextlib.nullcontext() if self._trainer is None else self._trainer.precision():
            found = self._call(
                self.parts(),
                texts=prompt,
                negative=negative_prompt,
                embeds=prompt_embeds,
                negative_embeds=negative_prompt_embeds,
                repeats=num_images_per_prompt,
                size=(height, width),
                initial=latents,
                generator=generator,
                num_steps=num_inference_steps,
                eta=eta,
                guidance_scale=guidance_scale,
                guidance_rescale=guidance_rescale,
            )
            images = found.output(output_type)
        self._scheduler.set_timesteps(num_inference_steps)
        latents, logprobs = fetch((found.trajectories.latents, found.trajectories.logprobs))
        states, log_probs = list(np.moveaxis(latents, (1, -1), (0, 2))), list(logprobs.T)
        result = DDPOPipelineOutput(images, states, log_probs)
        return result if return_dict else (result.images, result.latents, result.log_probs)

    def scheduler_step(
        self,
        model_output: Any,
        timestep: Any,
        sample: Any,
        eta: float = 0.0,
        use_clipped_model_output: bool = False,
        generator: Any = None,
        prev_sample: Any = None,
    ) -> DDPOSchedulerOutput:
        """Takes a step of DDIM, with the log-probability of its result.

        Args:
          model_output: Of the network, guidance included, (B C Y X).
          timestep: One, or one a row, of those of `scheduler.set_timesteps`.
          sample: x_t.
          eta: η.
          use_clipped_model_output: Whether the noise is computed anew where the clean sample was clipped.
          generator: A seed or a key of JAX.
          prev_sample: The result, whose log-probability is asked for; None: one is drawn.
        Raises:
          ValueError: If both a generator and a result are given, or the timestep is none of the scheduler's.
        """
        if generator is not None and prev_sample is not None:
            raise ValueError("`prev_sample` must be None where a `generator` is to draw it, got both.")
        x, output = channels_last(sample), channels_last(model_output)
        steps = self._scheduler.steps(eta)
        numbers = np.broadcast_to(np.asarray(timestep), (len(x),))
        self._scheduler.check_timesteps(numbers)
        at = steps_of_rows(steps, step_of_timesteps(steps, jnp.asarray(numbers, steps.timesteps.dtype)))
        options: dict[str, Any] = {
            "schedule": self.model.schedule,
            "use_clipped_model_output": use_clipped_model_output,
        }
        if prev_sample is not None:
            given = channels_last(prev_sample)
            return DDPOSchedulerOutput(jnp.moveaxis(given, -1, 1), _logprob(x, output, given, at, **options))
        noise = jax.random.normal(self._call.key(generator), x.shape)
        taken = _step(x, output, noise, at, **options)
        return DDPOSchedulerOutput(jnp.moveaxis(taken.next_latents, -1, 1), taken.logprobs)

    @property
    def scheduler(self) -> DDIMScheduler:
        """Scheduler of DDIM."""
        return self._scheduler

    def get_trainable_layers(self) -> Params:
        """A copy of what trains: the adapter's matrices, or the denoiser's weights."""
        return jax.tree.map(jnp.copy, self._training())  # training gives its own buffers away

    def _training(self) -> Params:
        return self.parts().params if self._trainer is None else self._trainer.params

    def save_pretrained(self, output_dir: str | os.PathLike[str]) -> None:
        """Writes a folder that diffusers reads, with the parameters as they are now.

        Of a model that came from no folder only what was trained is written.
        """
        lora = self._lora()
        params = _fetched(self.parts().params)
        writes_all = self.model.files is not None
        save = self.model.trained(params, lora).save if writes_all else self.model.writer(params, lora)
        on_main(lambda: save(Path(output_dir)))

    def save_checkpoint(
        self, models: Sequence[Any], weights: Sequence[Params], output_dir: str | os.PathLike[str]
    ) -> None:
        """Writes what trains: `pytorch_lora_weights.safetensors`, or the folder `unet`.

        That is what the next step starts from, and not the running mean that `save_pretrained` writes where there is
        one.

        Args:
          models: One, which is not looked at: the pipeline has it.
          weights: One tree, as `get_trainable_layers` gives it; empty: the present ones.
          output_dir: Made if missing.
        Raises:
          ValueError: If there are several models.
        """
        _check_one(models)
        params = _fetched(next(iter(weights), self._training()))
        write = self.model.writer(params, self._lora())
        on_main(lambda: write(Path(output_dir)))

    def load_checkpoint(self, models: Sequence[Any], input_dir: str | os.PathLike[str]) -> None:
        """Reads what `save_checkpoint` wrote, and goes on from it; so does a trainer that is made later.

        Args:
          models: One, which is not looked at.
          input_dir: The folder.
        Raises:
          ValueError: If there are several models, or the folder holds other tensors.
        """
        _check_one(models)
        folder = Path(input_dir)
        if self._trainer is None and self.use_lora and self._lora() is None and has_lora(folder):
            # No adapter has been made yet: the file's is the one that will train.
            self.model, self._parts = replace(self.model, found_lora=read_lora(folder, self.model.unet)), None
            return
        self._put(read_trained(self.model, folder, self._lora()))

    def _lora(self) -> Any:
        if self._trainer is not None:
            return self._trainer.adapter
        return None if self.model.found_lora is None else self.model.found_lora.lora

    def _put(self, params: Params) -> None:
        """Makes these the present parameters."""
        if self._trainer is None:
            parts = self.parts()
            self.model = self.model.trained(params, self._lora())
            self._parts = Parts(parts.functions, params, parts.frozen)
            return
        self._trainer.replace_params(params)


_OPTIONS = ("schedule", "use_clipped_model_output")
_step = jax.jit(ddim_step, static_argnames=_OPTIONS)


@functools.partial(jax.jit, static_argnames=_OPTIONS)
def _logprob(
    latents: jax.Array,
    output: jax.Array,
    given: jax.Array,
    at: DenoisingSteps,
    *,
    schedule: Schedule,
    use_clipped_model_output: bool,
) -> jax.Array:
    """Log-probability of a denoising step that was taken."""
    return ddim_logprob(
        given,
        ddim_mean(latents, output, at, schedule=schedule, use_clipped_model_output=use_clipped_model_output),
        at,
    )


def _fetched(params: Params) -> Params:
    """Parameters that the process which writes can read: of several processes none may hold all of them."""
    return params if jax.process_count() == 1 else fetch(dict(params), everywhere=False)


def _check_one(models: Sequence[Any]) -> None:
    if len(models) > 1:
        raise ValueError(f"`models` must hold the one that trains, got {len(models)}.")


def read_trained(model: DiffusionModel, folder: Path, lora: Lora | None) -> Params:
    """Reads the trained weights, as `DiffusionModel.split` lays them out.

    Args:
      model: Whose it is.
      folder: Holds `pytorch_lora_weights.safetensors`, or the denoiser's folder (`unet`, or `transformer`).
      lora: The adapter that trains; None: the denoiser does.
    Raises:
      FileNotFoundError: If the folder holds no such thing.
      ValueError: If it holds other tensors.
    """
    if lora is not None:
        return {LORA: _adapters(model, folder, lora)}
    files = TensorFiles(folder / model.unet.folder_name, DIFFUSERS_STEM)
    entries = model.unet.entries()
    names = {entry.name: entry.name for entry in entries if entry.name in files}
    check_entries(files, entries, names, is_ignored=lambda _: False, what="denoiser")
    shapes = jax.eval_shape(model.unet.init, jax.random.key(0))
    targets, _ = parameter_targets({UNET: shapes}, dtype=jnp.float32)
    return {UNET: load_entries(files, entries, targets[UNET])}


def _adapters(model: DiffusionModel, folder: Path, lora: Lora) -> dict[str, Any]:
    """The matrices of a file, for an adapter whose scale may be another than the file's."""
    found = read_lora(folder, model.unet)
    scales = {module.name: module.scale for module in found.lora.modules}
    shapes = {module.name: (module.rank, module.size_in) for module in lora.modules}
    held = {name: np.shape(weights["A"]) for name, weights in found.adapters.items()}
    if held != shapes:
        wrong = sorted(held.items() ^ shapes.items())[0][0]
        raise ValueError(
            f"{folder} holds another adapter than the one that trains: {wrong} has A of {held.get(wrong)}, expected "
            f"{shapes.get(wrong)}."
        )
    return {
        module.name: {
            "A": found.adapters[module.name]["A"],
            "B": found.adapters[module.name]["B"] * np.float32(scales[module.name] / module.scale),
        }
        for module in lora.modules
    }

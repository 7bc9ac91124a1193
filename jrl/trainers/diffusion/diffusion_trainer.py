# SPDX-License-Identifier: Apache-2.0
"""A trainer whose model makes images: read from a folder or given, sampled from, exported."""

from __future__ import annotations

import abc
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from jrl.learners.diffusion_config import DiffusionConfig
from jrl.mesh import place, tree_shardings
from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.heads import HeadsPlace
from jrl.placement import fetch
from jrl.rollout.keywords import refuse_async
from jrl.trainers.base import EVALUATION_STREAM, Trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.ddpo_evaluation import evaluate_prompts
from jrl.trainers.diffusion.ddpo_gallery import Gallery
from jrl.trainers.diffusion.ddpo_prompts import PromptFunction, PromptList
from jrl.trainers.diffusion.ddpo_rewards import Answers
from jrl.trainers.diffusion.ddpo_sampling import Sampler
from jrl.trainers.diffusion.image_judging import own_images
from jrl.trainers.loading.denoiser import bind_denoiser, check_denoiser, make_denoiser, split_denoiser
from jrl.trainers.loading.setup import ADAPTER_STREAM, ModelBundle
from jrl.trainers.loggers.description import describe_denoiser, warn_of_unused_evaluation_steps
from jrl.trainers.loggers.safe_text import code_span
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.typing import DenoiserFns, DifferentiableReward, Params

LARGE, HIGHEST_RATE = 10**8, 5e-5
"""Weights of a network that trains as a whole, and the rate above which it is warned of."""
_FIELDS = {
    f"{name}`": f"method.sample_{name}`" for name in ("num_steps", "eta", "height", "width", "guidance_scale")
}
"""Arguments of what a trainer is built of → fields of its configuration."""


@dataclass(frozen=True)
class DiffusionBundle(ModelBundle):
    """A diffusion model, ready to train.

    Attributes:
      model: Networks, schedule and tokenizer.
      denoiser: The model as algorithms see it.
    """

    adapter: Lora | None
    model: DiffusionModel
    denoiser: DenoiserFns


class DiffusionTrainer(Trainer):
    """A run that trains a diffusion model.

    Args:
      config: The run's configuration.
      model: The diffusion model; None: `model.model_path` names it.
      optimizer: Used instead of the one that the configuration names.

    Attributes:
      latent_shape: (Y, X, C) of one image's latents.
      prompt_function: The user's: draws a prompt.
      reward_function: The user's: judges images.
      gallery: Where images are shown.
    """

    loaded: DiffusionBundle
    prompt_function: PromptFunction
    reward_function: Callable[..., Any] | DifferentiableReward
    gallery: Gallery
    epoch = "iteration"

    def __init__(
        self,
        config: TRLConfig,
        *,
        model: DiffusionModel | None = None,
        optimizer: optax.GradientTransformation | None = None,
    ) -> None:
        self._given_model = model
        self._eval_sampler: Sampler | None = None
        try:
            super().__init__(config, optimizer=optimizer)
        except ValueError as error:
            error.args = (in_terms_of(_FIELDS, str(error)),)
            raise

    @property
    @abc.abstractmethod
    def method(self) -> DiffusionConfig:
        """The algorithm's section of the configuration."""

    def load_model(self) -> DiffusionBundle:
        """The denoiser, split into what trains and what does not, on the mesh.

        Raises:
          ValueError: If model and configuration do not fit each other.
        """
        section = self.config.model
        model = self._given_model or _read(section.model_path)
        check_denoiser(section)
        self.latent_shape = model.latent_shape(self.method.sample_height, self.method.sample_width)
        model = model.at_size(self.latent_shape)
        lora = bind_denoiser(model, section.peft_config)
        key = jax.random.fold_in(jax.random.key(self.config.train.seed), ADAPTER_STREAM)
        params, frozen = split_denoiser(
            self.config, model, lora, key=key, with_reference=self.keeps_reference
        )
        shardings, report = tree_shardings(self.mesh, params)
        params, frozen = place(params, shardings), place(frozen, tree_shardings(self.mesh, frozen)[0])
        denoiser = make_denoiser(self.config, model, lora)
        return DiffusionBundle(params, frozen, model.tokenizer, lora, model.name, report, model, denoiser)

    @property
    def model(self) -> DiffusionModel:
        """The diffusion model as it was given or read: it holds nothing that was trained."""
        return self.loaded.model

    @property
    def denoiser(self) -> DenoiserFns:
        """The model as algorithms see it."""
        return self.loaded.denoiser

    def make_sampler(self, rows: int, eta: float | None = None, num_steps: int | None = None) -> Sampler:
        """Samples so many rows a call, at the η and in the steps of training or at others."""
        return Sampler(
            self.denoiser,
            self.model.schedule,
            self.tokenizer,
            self.method,
            mesh=self.mesh,
            latent_shape=self.latent_shape,
            rows=rows,
            eta=eta,
            num_steps=num_steps,
            zero_negative=self.model.zero_negative,
        )

    def check_callables(self, functions: Mapping[str, Any]) -> None:
        """Refuses what cannot be called.

        Args:
          functions: Names of the constructor's arguments, and what was given.
        Raises:
          ValueError: Naming the argument.
        """
        for name, function in functions.items():
            if not callable(function):
                raise ValueError(
                    f"`{name}` must be a function given to {type(self).__name__}, got {type(function).__name__}."
                )
            refuse_async(function, name)

    @property
    def keeps_reference(self) -> bool:
        """True where the model as it was before training is kept, to be held against."""
        return False

    @property
    @abc.abstractmethod
    def rows_per_call(self) -> int:
        """Images of a sampling call."""

    def own_images(self, num_images: int) -> np.ndarray:
        """Numbers of the images of a sampling call that this process judges, as `train.rewards_on` says."""
        return own_images(self.mesh, num_images, on_main=self.config.train.rewards_on == "main")

    @abc.abstractmethod
    def compute_rewards(self, batches: Sequence[list[Any]], is_async: bool = False) -> Answers:
        """(reward vectors, reward metadata), one entry a sampling batch of [images, prompts, metadata]."""

    def run_evaluation(self, step: int) -> Evaluation | None:
        """Images of `method.eval_prompts`, always from the same noise, and their rewards; None without any.

        The images of the last sampling batch are shown beside them.
        """
        self.gallery.show_last(step)
        prompts = self.method.eval_prompts
        if not prompts:
            return None
        if self._eval_sampler is None:
            rows = min(len(prompts), self.rows_per_call)
            self._eval_sampler = self.make_sampler(rows, self.method.eval_eta, self.method.eval_num_steps)
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
                own_images=self.own_images,
            )
        self.gallery.show("evaluation", found.images, found.prompts, found.rewards, step)
        return found.as_evaluation(self.method)

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes nothing: prompts come from a function.

        Raises:
          ValueError: If anything is given.
        """
        if any(given is not None for given in (samples, rewards, prompts, eval_prompts)):
            raise ValueError(
                "this trainer draws its prompts from `prompt_function`: give neither `samples` nor `rewards` nor "
                "`prompts`; `method.eval_prompts` holds those of evaluations."
            )

    @property
    @abc.abstractmethod
    def sampling_params(self) -> Params:
        """Parameters that evaluations see and models are written of."""

    @property
    def exported_params(self) -> Params:
        """Parameters that evaluations see."""
        return self.sampling_params

    def model_writer(
        self, *, merge_adapter: bool = False, heads: HeadsPlace = "apart"
    ) -> Callable[[Path], None]:
        """A function that writes the parameters as they are now: copied to the host here, written whenever called.

        With an adapter that is `pytorch_lora_weights.safetensors`, else the folder `unet`, both as diffusers has them.

        Raises:
          ValueError: If an adapter is to be merged.
        """
        del heads  # there are none
        if merge_adapter:
            raise ValueError(
                "`merge_adapter` must be False for a diffusion model: its adapter is a file of its own, which "
                "diffusers loads beside the model."
            )
        params = self.exported_params
        if jax.process_count() > 1:
            params = fetch(dict(params), everywhere=False)
        return self.model.writer(params, lora=self.loaded.adapter)

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

    @property
    def architecture(self) -> Any:
        """The diffusion model's."""
        return self.model.architecture

    def describe_model(self) -> dict[str, str]:
        """Size, mesh and memory."""
        return describe_denoiser(
            self.model.name, self.params, self.frozen, state=self.state, mesh=self.mesh
        ) | {"latents": " x ".join(map(str, self.latent_shape))}


def warn_of_rate(rate: float, params: Params) -> None:
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


def in_terms_of(names: Mapping[str, str], text: str) -> str:
    """A message that speaks of what somebody else has set under another name.

    Args:
      names: Its name, or the beginning of it → the other one.
      text: The message, with names in backquotes.
    """
    for name, other in names.items():
        text = text.replace(f"`{name}", f"`{other}")
    return text


def _name(function: Any) -> str:
    """Name of a function, or of what a reward scores with."""
    function = function.score if isinstance(function, DifferentiableReward) else function
    return str(getattr(function, "__name__", type(function).__name__))


def _read(path: Any) -> DiffusionModel:
    """The model of a folder or of the hub."""
    from jrl.models.diffusion.folder import load_diffusion_model  # brings transformers along

    return load_diffusion_model(path)

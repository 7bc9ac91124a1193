# SPDX-License-Identifier: Apache-2.0
"""A pipeline of diffusers and jrl's model of its folder, and images that the two make of the same noise."""

from __future__ import annotations

import hashlib
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.models.diffusion.folder import load_diffusion_model
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.rollout.diffuse import denoise

KEY = jax.random.key(0)


class PipelinePair:
    """A pipeline of torch, and jrl's model of its folder, which is read without a warning.

    Attributes:
      folder: Of both.
      theirs: The pipeline that wrote it.
      ours: jrl's model.
      functions: Of it, in float32.
      params: That train: the whole denoiser.
      frozen: The rest.
    """

    def __init__(self, folder: Path, theirs: Any) -> None:
        self.folder, self.theirs, self.ours = folder, theirs, read_in_silence(folder)
        self.functions = self.ours.functions(compute_dtype=jnp.float32)
        self.params, self.frozen = self.ours.split(
            lora=None, key=KEY, compute_dtype=jnp.float32, with_reference=False
        )

    def images(
        self,
        initial: np.ndarray,
        contexts: tuple[jax.Array, jax.Array],
        *,
        num_steps: int,
        guidance_scale: float,
        eta: float = 0.0,
        noises: np.ndarray | None = None,
    ) -> Any:
        """(last latents, images) from the first noise, by the schedule at their size.

        Args:
          initial: The first noise.
          contexts: Of the prompts and of the negative one.
          num_steps: T.
          guidance_scale: w.
          eta: η.
          noises: Of each step; None: zeros.
        """
        schedule = self.ours.at_size(initial.shape[1:]).schedule
        drawn = jnp.zeros((num_steps, *initial.shape)) if noises is None else jnp.asarray(noises)

        def sample(params: Any, frozen: Any) -> Any:
            trajectories = denoise(
                self.functions,
                params,
                frozen,
                *contexts,
                jnp.asarray(initial),
                lambda number: drawn[number],
                steps=schedule.steps(num_steps, eta),
                schedule=schedule,
                guidance_scale=guidance_scale,
                guidance_rescale=0.0,
            )
            return trajectories.latents[:, -1], self.functions.decode(frozen, trajectories.latents[:, -1])

        return jax.jit(sample)(self.params, self.frozen)


def read_in_silence(folder: Path, **options: Any) -> DiffusionModel:
    """The model of a folder, read without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return load_diffusion_model(folder, **options)


def noise(*shape: int) -> np.ndarray:
    """The same normal numbers every time."""
    return np.random.default_rng(0).standard_normal(shape).astype(np.float32)


def digests(model: DiffusionModel) -> list[str]:
    """A digest of every weight."""
    return [hashlib.sha256(leaf.tobytes()).hexdigest() for leaf in jax.tree.leaves(dict(model.weights))]


def reread_half_precision(write: Callable[..., Any], folder: Path) -> tuple[set[str], dict[str, Any]]:
    """(dtypes of the weights of a folder of `fp16` files, its list of parts after jrl has written it)."""
    write(folder / "half", variant="fp16")
    model = read_in_silence(folder / "half", variant="fp16")
    model.save(folder / "again")
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(dict(model.weights))}
    return kinds, json.loads((folder / "again/model_index.json").read_text())

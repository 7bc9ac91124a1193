# SPDX-License-Identifier: Apache-2.0
"""Sampling calls of a DDPO run, and their images as they arrive on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Float, Int

from jrl.compilation import COMPILER_OPTIONS
from jrl.learners.diffusion_config import DiffusionConfig
from jrl.mesh import place, replicated
from jrl.ops.flow_schedule import Schedule
from jrl.placement import fetch, place_rows, rows_sharding
from jrl.rollout.collect import overlap
from jrl.rollout.diffuse import make_diffuse
from jrl.trainers.diffusion.ddpo_prompts import Prompt
from jrl.trainers.diffusion.ddpo_rewards import AwaitedBatches, Waiting
from jrl.trainers.diffusion.images import ImageError
from jrl.typing import DenoiserFns, Frozen, Params, PRNGKey, Trajectories

Tokenize = Callable[[Sequence[str]], Int[np.ndarray, "B Q"]]
_TOLERANCE = 1e-3
"""How far rounding may take an image out of [0, 1]."""


def diffusing_program(
    model: DenoiserFns,
    schedule: Schedule,
    method: DiffusionConfig,
    *,
    mesh: jax.sharding.Mesh,
    latent_shape: tuple[int, int, int],
    rows: int,
    eta: float | None = None,
    num_steps: int | None = None,
) -> Callable[..., tuple[Trajectories, jax.Array]]:
    """A sampling call, jitted: denoising and decoding of so many images.

    Args:
      model: The model as algorithms see it.
      schedule: Its noise.
      method: How to sample.
      mesh: Where rows go.
      latent_shape: (Y, X, C).
      rows: Of the call, global.
      eta: η; None: that of training.
      num_steps: T; None: that of training.
    Returns:
      `(params, frozen, tokens, negative, key, starts, steps) -> (trajectories, images)`; the last two are numbers of
      rows, as `Sampler` takes them. Of several processes each has all images, for whoever judges or shows them.
    """
    diffuse = make_diffuse(
        model,
        schedule,
        num_steps=num_steps or method.sample_num_steps,
        eta=method.sample_eta if eta is None else eta,
        guidance_scale=method.sample_guidance_scale,
        guidance_rescale=method.guidance_rescale,
        latent_shape=latent_shape,
    )

    def sample(
        params: Params,
        frozen: Frozen,
        tokens: jax.Array,
        negative: jax.Array,
        key: PRNGKey,
        starts: jax.Array,
        steps: jax.Array,
    ) -> tuple[Trajectories, jax.Array]:
        of_start, of_steps = jax.random.split(key)
        return diffuse(params, frozen, tokens, negative, _keys(of_start, starts), _keys(of_steps, steps))

    split = rows_sharding(mesh, rows)
    images = split if jax.process_count() == 1 else replicated(mesh)
    return jax.jit(sample, out_shardings=(split, images), compiler_options=COMPILER_OPTIONS)


class Sampler:
    """Images of prompts, and how they came about: one compiled call for so many rows.

    Args:
      model: The model as algorithms see it.
      schedule: Its noise.
      tokenize: Texts → ids.
      method: How to sample.
      mesh: Where rows go.
      latent_shape: (Y, X, C).
      rows: Of one call, global.
      eta: η; None: that of training.
      num_steps: T; None: that of training.
      zero_negative: See `DiffusionModel`.
    """

    def __init__(
        self,
        model: DenoiserFns,
        schedule: Schedule,
        tokenize: Tokenize,
        method: DiffusionConfig,
        *,
        mesh: jax.sharding.Mesh,
        latent_shape: tuple[int, int, int],
        rows: int,
        eta: float | None = None,
        num_steps: int | None = None,
        zero_negative: bool = False,
    ) -> None:
        self.tokenize, self.rows, self._mesh = tokenize, rows, mesh
        self._sample = diffusing_program(
            model,
            schedule,
            method,
            mesh=mesh,
            latent_shape=latent_shape,
            rows=rows,
            eta=eta,
            num_steps=num_steps,
        )
        # Nothing reads it where the network is told the guidance: zeros spare the encoders.
        is_zero = model.told is not None or (zero_negative and not method.negative_prompts)

        def encode(frozen: Frozen, tokens: jax.Array) -> jax.Array:
            context = model.encode(frozen, tokens)
            return jnp.zeros_like(context) if is_zero else context

        self._encode = jax.jit(encode, compiler_options=COMPILER_OPTIONS)
        self._negative_tokens = tokenize([method.negative_prompts])

    def negative(self, frozen: Frozen) -> Float[jax.Array, "1 Q D"]:
        """Context of the negative prompt, for the denoiser."""
        return self._encode(frozen, place(self._negative_tokens, replicated(self._mesh)))

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        negative: Float[jax.Array, "1 Q D"],
        texts: Sequence[str],
        key: PRNGKey,
        *,
        starts: np.ndarray,
        steps: np.ndarray,
    ) -> tuple[Trajectories, jax.Array]:
        """(trajectories, images with channels last) of `rows` prompts, on the device; waits for nothing.

        Args:
          params: Of the policy.
          frozen: The rest.
          negative: From the method of that name.
          texts: The prompts.
          key: Of all rows.
          starts: Numbers of the rows' first noises: rows with the same number start alike.
          steps: Numbers of the rows' noises on the way.
        """
        rows = place_rows(
            self._mesh, {"tokens": self.tokenize(texts), "starts": np.asarray(starts), "steps": steps}
        )
        return self._sample(params, frozen, rows["tokens"], negative, key, rows["starts"], rows["steps"])


def to_host(images: jax.Array) -> Float[np.ndarray, "B 3 Y X"]:
    """Images as callbacks get them: float32, channels first; waits for the device.

    Raises:
      ImageError: If they do not lie in [0, 1].
    """
    found = np.ascontiguousarray(np.moveaxis(np.asarray(fetch(images), np.float32), -1, 1))
    low, high = float(found.min()), float(found.max())
    if not (low >= -_TOLERANCE and high <= 1 + _TOLERANCE):  # NaN fails too
        raise ImageError(
            f"The model's images must lie in [0, 1], got {low:g} to {high:g}. Did training diverge, or does `decode` "
            "leave out the shift to [0, 1]?"
        )
    return np.clip(found, 0, 1)


@jax.jit
def _keys(key: PRNGKey, numbers: jax.Array) -> jax.Array:
    return jax.vmap(lambda number: jax.random.fold_in(key, number))(numbers)


class Batches(AwaitedBatches):
    """Sampling batches, [images, prompts, metadata] each: asking for one waits until its images are there.

    Args:
      dispatch: Number of a batch → its trajectories and images, on their way.
      prompts: Of all batches.
      count: Number of batches.
      while_sampling: Called once the first is on its way: the host is free then.
    """

    def __init__(
        self,
        dispatch: Callable[[int], tuple[Trajectories, jax.Array]],
        prompts: Sequence[Prompt],
        count: int,
        while_sampling: Callable[[], None],
    ) -> None:
        self._prompts, self._count = prompts, count
        self._arrived: list[list[Any]] = []
        self._trajectories: list[Trajectories] = []
        self.waiting = Waiting()
        self._arrivals = overlap(
            dispatch, self._receive, self._with_prompts, count, ahead=1, meanwhile=while_sampling
        )

    def __len__(self) -> int:
        return self._count

    def batch(self, number: int) -> list[Any]:
        """Waits for a batch."""
        while len(self._arrived) <= number:
            self._arrived.append(next(self._arrivals))
        return self._arrived[number]

    def take_trajectories(self) -> list[Trajectories]:
        """Hands over the trajectories of all batches so far, which are kept here no longer."""
        found, self._trajectories = self._trajectories, []
        return found

    def _receive(self, number: int, sent: tuple[Trajectories, jax.Array]) -> Float[np.ndarray, "B 3 Y X"]:
        trajectories, images = sent
        self._trajectories.append(trajectories)
        with self.waiting:
            return to_host(images)

    def _with_prompts(
        self, number: int, sent: tuple[Trajectories, jax.Array], images: Float[np.ndarray, "B 3 Y X"]
    ) -> list[Any]:
        rows = len(self._prompts) // self._count
        prompts = self._prompts[number * rows : (number + 1) * rows]
        return [images, tuple(p.text for p in prompts), tuple(p.metadata for p in prompts)]

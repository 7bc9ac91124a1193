# SPDX-License-Identifier: Apache-2.0
"""Calls of a pipeline: what a script gives it, as arguments of the sampler, and images as it wants them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.compilation import compiled
from jrl.models.diffusion import DiffusionModel
from jrl.ops.flow_schedule import Schedule
from jrl.placement import fetch
from jrl.rollout.diffuse import decode_in_chunks, denoise
from jrl.trainers.diffusion import to_host, to_pil
from jrl.trainers.loading import check_guidance
from jrl.trainers.rollouts import Draws
from jrl.typing import DenoiserFns, Frozen, Params, Trajectories

OUTPUTS = ("pil", "np", "pt", "latent")
_DECODED = 8


class Parts(NamedTuple):
    """Parts of a model that samples.

    Attributes:
      functions: The model as algorithms see it.
      params: What trains of it.
      frozen: The rest.
    """

    functions: DenoiserFns
    params: Params
    frozen: Frozen


class Sampled(NamedTuple):
    """Result of a sampling call.

    Attributes:
      trajectories: All latents and log-probabilities.
      decode: Latents → images, channels last.
    """

    trajectories: Trajectories
    decode: Callable[[jax.Array], jax.Array]

    def output(self, kind: str) -> Any:
        """The images as "pil", "np" or "pt", or the "latent"s, channels first.

        Raises:
          ValueError: On another word.
        """
        if kind not in OUTPUTS:
            raise ValueError(f"`output_type` must be one of {OUTPUTS}, got {kind!r}.")
        clean = self.trajectories.latents[:, -1]
        if kind == "latent":
            return np.moveaxis(fetch(clean), -1, 1)
        images = to_host(self.decode(clean))
        return [to_pil(image) for image in images] if kind == "pil" else images


class ImageCall:
    """Samples what a script asks for; programs are compiled once for each setting and number of rows.

    Args:
      model: Tokenizer, sizes and schedule.
    """

    def __init__(self, model: DiffusionModel) -> None:
        self._model, self._draws = model, Draws()
        self._programs: dict[tuple[Any, ...], Callable[..., Any]] = {}

    def key(self, generator: Any) -> jax.Array:
        """A seed or a key of JAX as a key; None: another one at every call."""
        if generator is None:
            return self._draws.key()
        if isinstance(generator, int | np.integer):
            return jax.random.key(int(generator))
        if isinstance(generator, jax.Array) and jnp.issubdtype(generator.dtype, jax.dtypes.prng_key):
            return generator
        raise ValueError(
            f"`generator` must be a seed or a key of `jax.random.key`, got {type(generator).__name__}."
        )

    def __call__(
        self,
        parts: Parts,
        *,
        texts: str | Sequence[str] | None,
        negative: str | Sequence[str] | None,
        embeds: Any,
        negative_embeds: Any,
        repeats: int,
        size: tuple[int | None, int | None],
        initial: Any,
        generator: Any,
        num_steps: int,
        eta: float,
        guidance_scale: float,
        guidance_rescale: float,
    ) -> Sampled:
        """Samples; the arguments are those of the pipeline's call.

        Raises:
          ValueError: If they do not fit each other.
        """
        has_negative = negative_embeds is not None or any(negative or "")
        check_guidance(
            parts.functions, scale=guidance_scale, rescale=guidance_rescale, has_negative=has_negative
        )
        context = self._context(parts, "prompt", texts, embeds)
        context = jnp.repeat(context, repeats, axis=0)
        away = self._negative(parts, negative or "", negative_embeds)
        latent_shape = self._model.latent_shape(*size)
        shape = (len(context), *latent_shape)
        start, on_way = jax.random.split(self.key(generator))
        noise = jax.random.normal(start, shape) if initial is None else _given_noise(initial, shape)
        schedule = self._model.at_size(latent_shape).schedule
        program = self._program(parts.functions, schedule, num_steps, eta, guidance_scale, guidance_rescale)
        trajectories = program(parts.params, parts.frozen, context, away, noise, on_way)
        decode = self._compiled(parts.functions.decode, lambda: _decoder(parts.functions))
        return Sampled(trajectories, functools.partial(decode, parts.frozen))

    def _compiled(self, key: Any, make: Callable[[], Callable[..., Any]]) -> Callable[..., Any]:
        """The compiled program of this key; it is made once."""
        if key not in self._programs:
            self._programs[key] = compiled(make())
        return self._programs[key]

    def _program(
        self,
        functions: DenoiserFns,
        schedule: Schedule,
        num_steps: int,
        eta: float,
        guidance_scale: float,
        guidance_rescale: float,
    ) -> Callable[..., Trajectories]:
        """The compiled loop of these settings."""
        steps = schedule.steps(num_steps, eta)

        def sample(
            params: Params,
            frozen: Frozen,
            context: jax.Array,
            away: jax.Array,
            noise: jax.Array,
            key: jax.Array,
        ) -> Trajectories:
            return denoise(
                functions,
                params,
                frozen,
                context,
                away,
                noise,
                lambda step: jax.random.normal(jax.random.fold_in(key, step), noise.shape),
                steps=steps,
                schedule=schedule,
                guidance_scale=guidance_scale,
                guidance_rescale=guidance_rescale,
            )

        settings = (functions, schedule, num_steps, eta, guidance_scale, guidance_rescale)
        return self._compiled(settings, lambda: sample)

    def _negative(self, parts: Parts, texts: str | Sequence[str], embeds: Any) -> jax.Array:
        """Context of the negative prompt, one row."""
        context = self._context(parts, "negative_prompt", texts, embeds)
        if np.any(np.asarray(context) != np.asarray(context[:1])):
            raise ValueError("`negative_prompt` must be the same in all rows, got several.")
        is_zero = self._model.zero_negative and embeds is None and not any(texts)
        return jnp.zeros_like(context[:1]) if is_zero else context[:1]

    def _context(self, parts: Parts, name: str, texts: str | Sequence[str] | None, embeds: Any) -> jax.Array:
        """Context for the denoiser: encoded texts, or as it is given."""
        if embeds is not None:
            return jnp.asarray(np.asarray(embeds), jnp.float32)
        if texts is None:
            raise ValueError(f"`{name}` must be given, or `{name}_embeds`, got neither.")
        rows = [texts] if isinstance(texts, str) else list(texts)
        encode = self._compiled(parts.functions.encode, lambda: parts.functions.encode)
        return encode(parts.frozen, jnp.asarray(self._model.tokenizer(rows)))


def _decoder(functions: DenoiserFns) -> Callable[[Frozen, jax.Array], jax.Array]:
    """(frozen, latents) → images, channels last."""

    def decode(frozen: Frozen, latents: jax.Array) -> jax.Array:
        return decode_in_chunks(lambda rows: functions.decode(frozen, rows), latents, decode_rows=_DECODED)

    return decode


def _given_noise(initial: Any, shape: tuple[int, ...]) -> jax.Array:
    """First noise, channels first, as the sampler wants it."""
    found = channels_last(initial)
    if found.shape != shape:
        expected = (shape[0], shape[3], *shape[1:3])
        raise ValueError(f"`latents` must have the shape {expected}, got {np.shape(initial)}.")
    return found


def channels_last(x: Any) -> jax.Array:
    """(B C Y X) of any library as (B Y X C) float32."""
    return jnp.moveaxis(jnp.asarray(x if isinstance(x, jax.Array) else np.asarray(x), jnp.float32), 1, -1)

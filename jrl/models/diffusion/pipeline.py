# SPDX-License-Identifier: Apache-2.0
"""A text-to-image diffusion model as a value: denoiser, image decoder, text encoder, tokenizer, schedule, weights.

It knows its parts by what they do (`Denoiser`, `ImageDecoder`, `TextEncoder`), so Stable Diffusion and a toy of a few
thousand weights are instances of the same class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jrl.models.adapters.lora import Lora
from jrl.models.diffusion.lora_files import FoundLora
from jrl.models.diffusion.parts import (
    Denoiser,
    ImageDecoder,
    PromptTokenizer,
    TakesGuidance,
    TextEncoder,
)
from jrl.models.diffusion.saving import FolderFiles, write_lora_folder, write_model_folder, write_unet_folder
from jrl.ops.flow_schedule import Schedule
from jrl.typing import DenoiserFns, Frozen, Params, PRNGKey

UNET, VAE_PART, TEXT_ENCODER = "unet", "vae", "text_encoder"
LORA, REFERENCE = "lora", "reference"


@dataclass(frozen=True, eq=False)
class DiffusionModel:
    """All parts of a text-to-image model, and nothing of a training run.

    Attributes:
      name: Where it came from, for messages and model cards.
      unet: The denoiser.
      vae: Makes images of latents.
      text_encoder: Reads prompts.
      tokenizer: Makes ids of prompts, padded to the length that the text encoder reads.
      schedule: Of the noise.
      weights: Of "unet", "vae" and "text_encoder": arrays of the host or of devices.
      sample_size: (Y, X) of the latents where nobody asks for another size.
      zero_negative: An empty negative prompt is a context of zeros, which the model was trained with, and is not read.
      found_lora: The adapter that came with the model; None: none did.
      files: What its folder held beside tensors, for `save`; None: it came from no folder.
    """

    name: str
    unet: Denoiser
    vae: ImageDecoder
    text_encoder: TextEncoder
    tokenizer: PromptTokenizer
    schedule: Schedule
    weights: Mapping[str, Params] = field(repr=False)
    sample_size: tuple[int, int]
    zero_negative: bool = False
    found_lora: FoundLora | None = field(default=None, repr=False)
    files: FolderFiles | None = field(default=None, repr=False)

    @property
    def architecture(self) -> dict[str, str]:
        """Descriptions of the parts and of the noise schedule: equal where two models differ in weights alone."""
        parts = {
            UNET: self.unet,
            VAE_PART: self.vae,
            TEXT_ENCODER: self.text_encoder,
            "schedule": self.schedule,
        }
        return {name: repr(part) for name, part in parts.items()}

    def latent_shape(self, height: int | None = None, width: int | None = None) -> tuple[int, int, int]:
        """(Y, X, C) of the latents of an image of this many pixels; None: the model's own size.

        Raises:
          ValueError: If the decoder makes no images of such a size.
        """
        factor = self.vae.factor * self.unet.patch_size
        edges = []
        for name, pixels, latents in zip(("height", "width"), (height, width), self.sample_size, strict=True):
            if pixels is not None and (pixels < factor or pixels % factor):
                raise ValueError(
                    f"`{name}` must be a positive multiple of {factor}, the pixels along the edge of what {self.name} "
                    f"reads as one latent, or as one patch of them; got {pixels}."
                )
            edges.append(latents if pixels is None else pixels // self.vae.factor)
        return edges[0], edges[1], self.vae.channels

    def at_size(self, latent_shape: tuple[int, int, int]) -> DiffusionModel:
        """The model with the schedule for images of this size; itself where the schedule does not depend on it.

        Args:
          latent_shape: (Y, X, C).
        """
        num_patches = latent_shape[0] * latent_shape[1] // self.unet.patch_size**2
        schedule = self.schedule.at_resolution(num_patches)
        return self if schedule == self.schedule else replace(self, schedule=schedule)

    def functions(self, *, compute_dtype: Any, remat: bool = False, lora: Lora | None = None) -> DenoiserFns:
        """Functions that algorithms call, on the trees that `split` gives.

        Args:
          compute_dtype: Of activations and matrix products. Images are decoded in float32 where it is float16, in which
            the decoder of Stable Diffusion overflows.
          remat: As for `Denoiser.apply`.
          lora: The adapter that trains; None: the whole denoiser does.
        """
        # The parts and not the model, whose weights they would keep alive.
        unet, vae, text_encoder = self.unet, self.vae, self.text_encoder
        is_fresh = lora is not None and self.found_lora is None
        bind = partial(_denoising, lora=lora, is_fresh=is_fresh, compute_dtype=compute_dtype, remat=remat)

        def encode(frozen: Frozen, tokens: Array) -> Array:
            return text_encoder.encode(frozen[TEXT_ENCODER], tokens, dtype=compute_dtype)

        def decode(frozen: Frozen, latents: Array) -> Array:
            return vae.decode(frozen[VAE_PART], latents, dtype=decoding_dtype(compute_dtype))

        found = DenoiserFns(encode, *bind(unet), decode)
        if not isinstance(unet, TakesGuidance):
            return found
        return replace(found, told=lambda scale: DenoiserFns(encode, *bind(unet.at_guidance(scale)), decode))

    def split(
        self, *, lora: Lora | None, key: PRNGKey, compute_dtype: Any, with_reference: bool
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Splits the model into trainable and frozen trees: {"lora": ...} or {"unet": ...}, and the rest.

        What trains is float32 and shares no memory with `weights`, so that it may be donated. What does not is in the
        dtype it is used in. Both are on the host where `weights` is, for the caller to place: a mesh may hold what no
        device of it does.

        Args:
          lora: The adapter that trains: a fresh one, or `found_lora.lora`, which goes on from what was found. None: the
            whole denoiser trains.
          key: For a fresh adapter.
          compute_dtype: As for `functions`.
          with_reference: Keeps the denoiser as it is now. With a fresh adapter that costs nothing: it is the base; of
            one that came with the model a copy is kept.
        Raises:
          ValueError: If the model came with an adapter and another one, or none, is to train.
        """
        if self.found_lora is not None and self.found_lora.lora is not lora:
            raise ValueError(
                f"{self.name} comes with an adapter, which must be what trains (`lora=model.found_lora.lora`): else it "
                "would be left out. Remove its file, or `merged()` it into the weights first."
            )
        dtypes = {TEXT_ENCODER: compute_dtype, VAE_PART: decoding_dtype(compute_dtype)}
        frozen = {name: _cast(self.weights[name], dtype) for name, dtype in dtypes.items()}
        if lora is None:
            if with_reference:
                frozen[REFERENCE] = _cast(self.weights[UNET], compute_dtype)
            return {UNET: _own(self.weights[UNET])}, frozen
        frozen[UNET] = _cast(self.weights[UNET], compute_dtype)
        if self.found_lora is None:
            return {LORA: _own(lora.init(key, self.weights[UNET]))}, frozen
        if with_reference:
            frozen[REFERENCE] = dict(self.found_lora.adapters)
        return {LORA: _own(self.found_lora.adapters)}, frozen

    def trained(self, params: Params, lora: Lora | None) -> DiffusionModel:
        """Returns a copy that holds the trained parameters on the host, in `weights` or in `found_lora`.

        Args:
          params: As `split` gave them.
          lora: As `split` was given it.
        """
        host = _on_host(params)
        if lora is not None:
            return replace(self, found_lora=FoundLora(lora, host[LORA]))
        return replace(self, weights={**self.weights, UNET: host[UNET]})

    def merged(self) -> DiffusionModel:
        """Returns a copy with `found_lora` merged into the denoiser: W + s·B·A in place of each adapted W."""
        if self.found_lora is None:
            return self
        unet = self.found_lora.lora.merge(self.weights[UNET], self.found_lora.adapters)
        return replace(self, weights={**self.weights, UNET: _on_host(unet)}, found_lora=None)

    def writer(self, params: Params, lora: Lora | None) -> Callable[[Path], None]:
        """A function that writes what was trained, as it is now: copied to the host here, written whenever called.

        It makes a folder with `pytorch_lora_weights.safetensors`, which diffusers' `load_lora_weights` reads, or one
        with the denoiser's own (`unet`, or `transformer`), which `from_pretrained` of its class reads.

        Args:
          params: As `split` gave them.
          lora: As `split` was given it.
        """
        host, unet = _on_host(params), self.unet

        def write(directory: Path) -> None:
            if lora is not None:
                write_lora_folder(directory, lora, host[LORA], part=unet.folder_name)
            else:
                config, name = unet.stored_config(), unet.folder_name
                write_unet_folder(directory, config, unet.entries(), host[UNET], name=name)

        return write

    def save(self, directory: Path) -> None:
        """Writes the whole folder, which `from_pretrained` of its pipeline in diffusers reads.

        A found adapter is written beside the weights, as it was found: `merged()` first for one model without it.

        Raises:
          ValueError: If the model came from no folder.
        """
        if self.files is None:
            raise ValueError(
                f"{self.name} came from no folder, so only its denoiser can be written; use `writer`."
            )
        write_model_folder(
            directory, self.files, self.weights, self.found_lora, denoiser=self.unet.folder_name
        )


def _denoising(
    unet: Denoiser, *, lora: Lora | None, is_fresh: bool, compute_dtype: Any, remat: bool
) -> tuple[Callable[..., Array], Callable[..., Array]]:
    """(`predict`, `reference`) of `DenoiserFns`."""

    def predict(params: Params, frozen: Frozen, latents: Array, timesteps: Array, context: Array) -> Array:
        base, adapter = (params[UNET], None) if lora is None else (frozen[UNET], lora.variables(params[LORA]))
        return unet.apply(base, adapter, latents, timesteps, context, dtype=compute_dtype, remat=remat)

    def reference(frozen: Frozen, latents: Array, timesteps: Array, context: Array) -> Array:
        # A fresh adapter changes nothing, so its base alone is the denoiser as it was.
        kept = REFERENCE in frozen
        if not kept and not is_fresh:
            raise ValueError(
                "the denoiser as it was before training was not kept: call `split` with `with_reference=True`."
            )
        base, adapter = (
            (frozen[REFERENCE], None)
            if lora is None
            else (frozen[UNET], lora.variables(frozen[REFERENCE]) if kept else None)
        )
        return unet.apply(base, adapter, latents, timesteps, context, dtype=compute_dtype, remat=remat)

    return predict, reference


def decoding_dtype(compute_dtype: Any) -> Any:
    """Dtype in which images are decoded: float16 overflows in the decoder of Stable Diffusion, bfloat16 does not."""
    return jnp.float32 if jnp.dtype(compute_dtype) == jnp.float16 else compute_dtype


def _cast(tree: Params, dtype: Any) -> Any:
    """The weights in another dtype, where they are; nothing is copied that has it."""
    return jax.tree.map(lambda leaf: leaf if leaf.dtype == dtype else leaf.astype(dtype), dict(tree))


def _own(tree: Params) -> Any:
    """Float32 arrays of their own, where they are: a device may otherwise take the host's memory as it is."""

    def own(leaf: Any) -> Any:
        make: Any = jnp.array if isinstance(leaf, jax.Array) else np.array
        return make(leaf, dtype=np.float32, copy=True)

    return jax.tree.map(own, dict(tree))


def _on_host(tree: Params) -> Any:
    """Copies arrays into the host's memory, leaf by leaf; arrays fetched from a device are not copied again."""

    def host(leaf: Any) -> np.ndarray:
        found: np.ndarray = jax.device_get(leaf)
        # On a CPU it is a view of the device's memory, which is reused where the leaf is donated.
        return found if isinstance(leaf, jax.Array) and found.flags.owndata else np.array(found)

    return jax.tree.map(host, dict(tree))

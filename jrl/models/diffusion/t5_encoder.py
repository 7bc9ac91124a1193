# SPDX-License-Identifier: Apache-2.0
"""The encoder of a T5 (Raffel et al. 2020, arXiv:1910.10683) as a part of a pipeline: jrl's T5 without decoder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.models.diffusion.t5_config import T5EncoderConfig, stored_t5_config
from jrl.models.families import t5
from jrl.models.families.base import Entry
from jrl.models.seq2seq import EncoderDecoder, init_encoder_decoder
from jrl.typing import Params, PRNGKey

SHARED, ENCODER = "shared.weight", "encoder."
_PATHS = ("embed", "encoder_")


def is_ignored(name: str) -> bool:
    """True for the embedding where a file holds it a second time."""
    return name == f"{ENCODER}embed_tokens.weight"


@dataclass(frozen=True)
class T5Encoder:
    """An encoder without weights.

    Attributes:
      config: The architecture.
    """

    config: T5EncoderConfig

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters."""
        whole = init_encoder_decoder(self.config.as_seq2seq(), key)
        return {name: part for name, part in whole.items() if name.startswith(_PATHS)}

    def encode(self, params: Params, tokens: Int[Array, "B Q"], *, dtype: Any) -> Float[Array, "B Q D"]:
        """Encodes prompts, whose padding is read like anything else.

        Args:
          params: Weights; they are cast to `dtype` where they are used.
          tokens: Ids, padded as the denoiser was trained with.
          dtype: Of the result, and of the computation; that is float32 where it is float16, in which a T5 overflows.
        """
        wide = jnp.float32 if jnp.dtype(dtype) == jnp.float16 else dtype
        module = EncoderDecoder(self.config.as_seq2seq(), wide)
        mask = jnp.ones(tokens.shape, bool)
        encoded: Any = module.apply({"params": params}, tokens, mask, method="encode")
        found: Array = encoded.astype(dtype)
        return found

    def entries(self) -> list[Entry]:
        """Every tensor of its file."""
        rows = self.config.vocab_size
        return [
            _cut(entry, rows) if entry.name == SHARED else entry
            for entry in t5.entries(self.config.as_seq2seq())
            if entry.name == SHARED or entry.name.startswith(ENCODER)
        ]

    def stored_config(self) -> dict[str, Any]:
        """Contents of config.json, as transformers reads it."""
        return stored_t5_config(self.config)


def _cut(entry: Entry, rows: int) -> Entry:
    """The embedding's entry, which writes so many rows whatever the writer says."""
    return replace(
        entry, transform=replace(entry.transform, save=lambda arrays, vocab_size: arrays[0][:rows])
    )

# SPDX-License-Identifier: Apache-2.0
"""Noise on the embeddings in training: NEFTune."""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jrl.typing import PRNGKey


@dataclass(frozen=True)
class EmbeddingNoise:
    """Independent uniform noise on every entry of the embedded row, in ±α/√(L·D).

    It is drawn where a forward pass is given a dropout key, and nowhere else: sampling, evaluation and export never see
    it. L is the padded length of the row, D the width of the embedding, and the noise is added to what the table holds,
    before anything scales it.

    Attributes:
      alpha: α; 5 to 15 in the paper.
      alone: Whether it is all that the key draws: dropout stays off.
    Reference: Jain et al. 2023, arXiv:2310.05914, algorithm 1.
    """

    alpha: float
    alone: bool = True

    def __call__(self, key: PRNGKey, tokens: Int[Array, "B L"], width: int) -> Float[Array, "B L W"]:
        """The noise of these rows.

        A row's noise follows from the key and from its tokens, not from its place: however a batch is cut into
        microbatches or spread over devices, its rows get the same.
        """
        length = tokens.shape[1]
        limit = self.alpha / math.sqrt(length * width)
        # Knuth's multiplicative hash of each column's number: odd, so that no token is lost modulo 2³².
        weights = jnp.arange(1, length + 1, dtype=jnp.uint32) * jnp.uint32(2654435761) | jnp.uint32(1)
        sums = jnp.sum(tokens.astype(jnp.uint32) * weights[None, :], axis=1, dtype=jnp.uint32)
        keys = jax.vmap(lambda number: jax.random.fold_in(key, number))(sums)
        return jax.vmap(
            lambda one: jax.random.uniform(one, (length, width), jnp.float32, minval=-limit, maxval=limit)
        )(keys)

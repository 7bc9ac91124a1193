# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in place of the MLP: every token visits a few of many gated MLPs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float

from jrl.models.config import Experts, TransformerConfig
from jrl.models.layers import ACTIVATIONS, Projection


class ExpertsMlp(nn.Module):
    """Routes every token to its experts and adds up their answers by the router's weights.

    Attributes:
      config: The decoder.
      experts: How many experts there are, and how they are chosen.
      dtype: Of the computation; the router is float32.
    """

    config: TransformerConfig
    experts: Experts
    dtype: Any

    @nn.compact
    def __call__(self, x: Float[Array, "B Q D"]) -> Float[Array, "B Q D"]:
        """What the experts add to the residual stream."""
        config, experts = self.config, self.experts
        init = nn.initializers.normal(config.init_range)
        scores = Projection(
            (config.width,), (experts.count,), False, config.init_range, jnp.float32, name="router"
        )(x)
        weights, chosen = jax.lax.top_k(jax.nn.softmax(scores, axis=-1), experts.per_token)
        if experts.renormalize:
            weights = weights / weights.sum(axis=-1, keepdims=True)
        wide, narrow = (
            (experts.count, config.width, experts.width),
            (experts.count, experts.width, config.width),
        )
        gate = self.param("gate", init, wide, jnp.float32).astype(self.dtype)
        up = self.param("up", init, wide, jnp.float32).astype(self.dtype)
        down = self.param("down", init, narrow, jnp.float32).astype(self.dtype)
        hidden = ACTIVATIONS[config.activation](jnp.einsum("bqd,edf->bqef", x, gate))
        out = jnp.einsum("bqef,efd->bqed", hidden * jnp.einsum("bqd,edf->bqef", x, up), down)
        share = (jax.nn.one_hot(chosen, experts.count) * weights[..., None]).sum(axis=-2)
        return jnp.einsum("bqed,bqe->bqd", out, share.astype(self.dtype))

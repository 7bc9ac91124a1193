# SPDX-License-Identifier: Apache-2.0
"""Prediction types of denoisers: the network's output as noise, clean latents, their mixture v, or a flow's velocity.

Reference: v: Salimans and Ho 2022, arXiv:2202.00512, section 4; velocity: Liu et al. 2022, arXiv:2209.03003.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float

Prediction = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""`(latents, output, signal, noise) -> (clean, noise)`: predicted clean latents and predicted noise; `signal` and
`noise` are the shares of both in the latents: √ᾱ_t and √(1 − ᾱ_t), or 1 − σ and σ of a flow."""


def from_epsilon(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Clean latents and noise where the output is the noise: x̂0 = (x − √(1−ᾱ)·out)/√ᾱ.

    Args:
      latents: x_t.
      output: Of the network.
      signal: √ᾱ_t, broadcast against the latents.
      noise: √(1 − ᾱ_t), likewise.
    Returns:
      x̂0 and ε̂.
    Reference: Ho et al. 2020, arXiv:2006.11239, eq. 15.
    Example:
      >>> import jax.numpy as jnp
      >>> clean, noise = from_epsilon(*jnp.array([[1.0], [0.5], [0.6], [0.8]]))
      >>> round(float(clean[0]), 4), round(float(noise[0]), 4)
      (1.0, 0.5)
    """
    return (latents - noise * output) / signal, output


def from_sample(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Clean latents and noise where the output is the clean latents: ε̂ = (x − √ᾱ·out)/√(1−ᾱ).

    Args:
      latents: x_t.
      output: Of the network.
      signal: √ᾱ_t, broadcast against the latents.
      noise: √(1 − ᾱ_t), likewise.
    Returns:
      x̂0 and ε̂.
    Reference: Ho et al. 2020, arXiv:2006.11239, eq. 4, solved for the noise.
    Example:
      >>> import jax.numpy as jnp
      >>> clean, noise = from_sample(*jnp.array([[1.0], [0.5], [0.6], [0.8]]))
      >>> round(float(clean[0]), 4), round(float(noise[0]), 4)
      (0.5, 0.875)
    """
    return output, (latents - signal * output) / noise


def from_v(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Clean latents and noise where the output is v = √ᾱ·ε − √(1−ᾱ)·x0: both are rotations of it and x.

    Args:
      latents: x_t.
      output: Of the network.
      signal: √ᾱ_t, broadcast against the latents.
      noise: √(1 − ᾱ_t), likewise.
    Returns:
      x̂0 and ε̂.
    Reference: Salimans and Ho 2022, arXiv:2202.00512, section 4.
    Example:
      >>> import jax.numpy as jnp
      >>> clean, noise = from_v(*jnp.array([[1.0], [0.5], [0.6], [0.8]]))
      >>> round(float(clean[0]), 4), round(float(noise[0]), 4)
      (0.2, 1.1)
    """
    return signal * latents - noise * output, signal * output + noise * latents


def from_flow(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """Clean latents and noise where the output is a rectified flow's velocity v = ε − x0, at x = (1 − σ)·x0 + σ·ε.

    Args:
      latents: x_σ.
      output: Of the network.
      signal: 1 − σ, broadcast against the latents.
      noise: σ, likewise.
    Returns:
      x̂0 = x − σ·v and ε̂ = x + (1 − σ)·v.
    Reference: Liu et al. 2022, arXiv:2209.03003, eq. 1.
    Example:
      >>> import jax.numpy as jnp
      >>> clean, noise = from_flow(*jnp.array([[1.0], [0.5], [0.75], [0.25]]))
      >>> float(clean[0]), float(noise[0])
      (0.875, 1.375)
    """
    return latents - noise * output, latents + signal * output


PREDICTIONS: Mapping[str, Prediction] = {
    "epsilon": from_epsilon,
    "sample": from_sample,
    "v_prediction": from_v,
    "flow_prediction": from_flow,
}
"""By the name in a scheduler's configuration."""

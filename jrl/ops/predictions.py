# SPDX-License-Identifier: Apache-2.0
"""What a denoiser's output says of the latents: noise, clean latents, or the mixture of both that is called v.

Reference: v: Salimans and Ho 2022, arXiv:2202.00512, section 4.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from jaxtyping import Array, Float

Prediction = Callable[[Array, Array, Array, Array], tuple[Array, Array]]
"""`(latents, output, signal, noise) -> (clean, noise)`: predicted clean latents and predicted noise; `signal` and
`noise` are √ᾱ_t and √(1 − ᾱ_t)."""


def from_epsilon(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The output is the noise: x̂0 = (x − √(1−ᾱ)·out)/√ᾱ."""
    return (latents - noise * output) / signal, output


def from_sample(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The output is the clean latents: ε̂ = (x − √ᾱ·out)/√(1−ᾱ)."""
    return output, (latents - signal * output) / noise


def from_v(
    latents: Float[Array, "*shape"],
    output: Float[Array, "*shape"],
    signal: Float[Array, "..."],
    noise: Float[Array, "..."],
) -> tuple[Float[Array, "*shape"], Float[Array, "*shape"]]:
    """The output is v = √ᾱ·ε − √(1−ᾱ)·x0: both are rotations of it and x."""
    return signal * latents - noise * output, signal * output + noise * latents


PREDICTIONS: Mapping[str, Prediction] = {
    "epsilon": from_epsilon,
    "sample": from_sample,
    "v_prediction": from_v,
}
"""By the name in a scheduler's configuration."""

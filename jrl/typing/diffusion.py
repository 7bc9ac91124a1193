# SPDX-License-Identifier: Apache-2.0
"""The contract between algorithms and models that make images, and their batches; letters as in `jrl.typing`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Array, Bool, Float, Int, Num

from jrl.typing.basic import Frozen, Params


@dataclass(frozen=True)
class DenoiserFns:
    """All an algorithm may know of a text-to-image diffusion model: pure functions of `(params, frozen)`.

    Latents and images have their channels last inside, latents are float32 always, and images lie in [0, 1].

    Attributes:
      encode: `(frozen, tokens) -> context`, (B, Q) ids to (B, Q, D): what the denoiser reads of a prompt.
      predict: `(params, frozen, latents, timesteps, context) -> output`, (B, Y, X, C), (B,) and (B, Q, D) to
        (B, Y, X, C) float32: the network's raw output, without guidance. What it predicts is the schedule's business.
      reference: `(frozen, latents, timesteps, context) -> output`: the same of the model as it was before training,
        with the adapter off, or from the copy that `frozen` holds.
      decode: `(frozen, latents) -> images`, (B, Y, X, C) to (B, height, width, 3) float32 in [0, 1].
      told: `scale -> DenoiserFns`: the model as it is told a guidance scale, where that is an input of the network;
        None: guidance is a second pass under the negative prompt.
    """

    encode: Callable[[Frozen, Int[Array, "B Q"]], Float[Array, "B Q D"]]
    predict: Callable[
        [Params, Frozen, Float[Array, "B Y X C"], Num[Array, "B"], Float[Array, "B Q D"]],
        Float[Array, "B Y X C"],
    ]
    reference: Callable[
        [Frozen, Float[Array, "B Y X C"], Num[Array, "B"], Float[Array, "B Q D"]], Float[Array, "B Y X C"]
    ]
    decode: Callable[[Frozen, Float[Array, "B Y X C"]], Float[Array, "B Z W 3"]]
    told: Callable[[float], DenoiserFns] | None = None

    def at_guidance(self, scale: float) -> tuple[DenoiserFns, float]:
        """(the model under this guidance, w of the second pass that is left to `jrl.ops.denoising.guided_output`).

        A network that is told the scale needs no second pass: w is 1 then. Samplers and learners ask here alike.

        Args:
          scale: w as a configuration has it.
        Raises:
          ValueError: If the network knows of no guidance, and is to be guided.
        """
        return (self, scale) if self.told is None else (self.told(scale), 1.0)


class Trajectories(NamedTuple):
    """Sampled denoising trajectories, row by row, from the first noise to the clean latents.

    Attributes:
      latents: The T + 1 states, float32: step s goes from `latents[:, s]` to `latents[:, s + 1]`.
      logprobs: Of each step's result under the policy that sampled it: mean log-density per latent element, in nats.
      context: What the denoiser read of the prompts.
    """

    latents: Float[Array, "B T+1 Y X C"]
    logprobs: Float[Array, "B T"]
    context: Float[Array, "B Q D"]


class DDPOBatch(NamedTuple):
    """All samples of one DDPO epoch.

    Attributes:
      trajectories: What was sampled.
      negative: Context of the negative prompt, the same for all rows.
      advantages: One a sample, or one for each of its steps, neither clipped nor centred again.
      valid: False on samples that are left out, such as those whose reward failed; None: all count.
    """

    trajectories: Trajectories
    negative: Float[Array, "1 Q D"]
    advantages: Float[Array, "N *T"]
    valid: Bool[Array, "N"] | None = None


@dataclass(frozen=True, eq=False)
class DifferentiableReward:
    """A reward of images that JAX can differentiate.

    Attributes:
      score: `(params, images, conditions) -> rewards`, images (B, height, width, 3) in [0, 1] to (B,): what a gradient
        passes.
      conditions: `(prompts, metadata) -> conditions`, on the host: arrays with a row for each image, of what a reward
        wants to know beside it; None: `score` gets {}.
      params: The reward's weights, which do not train; {}: it has none.
    """

    score: Callable[[Params, Float[Array, "B Z W 3"], Any], Float[Array, "B"]]
    conditions: Callable[[Sequence[str], Sequence[Any]], Any] | None = None
    params: Params = field(default_factory=dict)

    def __call__(self, images: Float[Array, "B Z W 3"], conditions: Any) -> Float[Array, "B"]:
        """Rewards of images, with the reward's own weights."""
        return self.score(self.params, images, conditions)

    def conditions_of(self, prompts: Sequence[str], metadata: Sequence[Any]) -> Any:
        """Conditions of these prompts, as `score` gets them; {} where there is no `conditions`."""
        return {} if self.conditions is None else self.conditions(prompts, metadata)


class RewardGradientBatch(NamedTuple):
    """Images of one optimizer step, before they are decoded.

    Attributes:
      trajectories: What was sampled.
      negative: Context of the negative prompt, the same for all rows.
      conditions: What the reward wants to know of each row.
    """

    trajectories: Trajectories
    negative: Float[Array, "1 Q D"]
    conditions: Any

# SPDX-License-Identifier: Apache-2.0
"""Learner states: arrays only, one frozen pytree each, replaced and never mutated.

Extend by holding a `TrainState`, not by inheriting from it. A state holds what the next step needs; what
merely describes the last one is a metric.
"""

from __future__ import annotations

import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Int

from jrl.typing import Params


@struct.dataclass
class TrainState:
    """Training state of the trainable parameters.

    Attributes:
      step: Optimizer steps attempted so far.
      params: Trainable arrays only.
      opt_state: State of the optax optimizer; counts the steps that were skipped as non-finite.
    """

    step: Int[Array, ""]
    params: Params
    opt_state: optax.OptState


def init_train_state(params: Params, optimizer: optax.GradientTransformation) -> TrainState:
    """State before the first step."""
    return TrainState(step=jnp.zeros((), jnp.int32), params=params, opt_state=optimizer.init(params))

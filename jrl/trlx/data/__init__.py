# SPDX-License-Identifier: Apache-2.0
"""trlX's data classes, filled with NumPy arrays: what all methods share."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Int


@dataclass
class GeneralElement:
    """Whatever a pipeline yields."""


@dataclass
class RLElement:
    """A step of an episode.

    Attributes:
      state: Prompts.
      action: Ids written after them, (T,).
      reward: Of that action.
    """

    state: Iterable[str] | None = None
    action: Int[np.ndarray, "T"] | None = None
    reward: float | None = None


@dataclass
class BatchElement:
    """Inputs of a transformer.

    Attributes:
      tokens: Ids, (B L).
      masks: 1 on real tokens, (B L).
    """

    tokens: Int[np.ndarray, "B L"]
    masks: Int[np.ndarray, "B L"]

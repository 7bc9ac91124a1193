# SPDX-License-Identifier: Apache-2.0
"""trlX's data classes of prompts and outputs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int


@dataclass
class PromptElement:
    """A prompt: its text and its ids (P,)."""

    text: str
    tokens: Int[np.ndarray, "P"]


@dataclass
class PromptBatch:
    """Prompts: their texts and their ids (B P)."""

    text: Iterable[str]
    tokens: Int[np.ndarray, "B P"]


@dataclass
class AccelerateRLElement:
    """An output: its ids and a reward for each, (T,)."""

    output_tokens: Int[np.ndarray, "T"]
    rewards: Float[np.ndarray, "T"]


@dataclass
class AccelerateRLBatchElement:
    """Outputs: their ids and a reward for each, (B T)."""

    output_tokens: Int[np.ndarray, "B T"]
    rewards: Float[np.ndarray, "B T"]

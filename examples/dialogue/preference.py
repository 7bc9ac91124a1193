# SPDX-License-Identifier: Apache-2.0
"""A small reward model: which of two replies is preferred, learned from pairs by words.

A reply is described by its words, and by every pair of a word of the request and a word of the reply, so that it counts
whether the reply speaks of what was asked. The score is linear in them; its weights minimise the Bradley-Terry loss.

Reference: Bradley and Terry 1952, "Rank analysis of incomplete block designs"; loss as in Ouyang et al. 2022,
arXiv:2203.02155, eq. 1.
"""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Sequence

import numpy as np

NUM_FEATURES = 2**14  # hashed: two features may share a weight
_WORD = re.compile(r"[a-z]+")
_LAST_REQUEST = re.compile(r"Human:(?!.*Human:)(.*)", re.DOTALL)


class Preference:
    """A linear reward model.

    Args:
      prompts: Texts that end where the reply begins; the last request counts.
      chosen: The preferred reply to each.
      rejected: The other one.
      num_steps: Steps of gradient descent over all pairs.
      learning_rate: Of each step.
      weight_decay: Of the weights, relative to the loss's gradient.
    """

    def __init__(
        self,
        prompts: Sequence[str],
        chosen: Sequence[str],
        rejected: Sequence[str],
        *,
        num_steps: int = 300,
        learning_rate: float = 20.0,
        weight_decay: float = 1e-4,
    ) -> None:
        difference = features(prompts, chosen) - features(prompts, rejected)
        # Every gradient is a combination of the pairs' differences, so the descent runs over their coefficients.
        products, coefficients = difference @ difference.T, np.zeros(len(difference), np.float32)
        for _ in range(num_steps):
            # d/dm −log σ(m) = −σ(−m), for the margin m between the replies.
            slope = -1.0 / (1.0 + np.exp(products @ coefficients))
            coefficients -= learning_rate * (slope / len(difference) + weight_decay * coefficients)
        self._weights = coefficients @ difference

    def __call__(self, prompts: Sequence[str], replies: Sequence[str]) -> list[float]:
        """Score of each reply, in nats: the difference of two is the log-odds that the first is preferred."""
        return [float(score) for score in features(prompts, replies) @ self._weights]

    def accuracy(self, prompts: Sequence[str], chosen: Sequence[str], rejected: Sequence[str]) -> float:
        """Share of pairs of which the chosen reply scores higher."""
        return float(np.mean(np.asarray(self(prompts, chosen)) > np.asarray(self(prompts, rejected))))


def features(prompts: Sequence[str], replies: Sequence[str]) -> np.ndarray:
    """float32 (B, NUM_FEATURES): which features a reply has, scaled to length 1, so that longer is not better."""
    found = np.zeros((len(prompts), NUM_FEATURES), np.float32)
    for row, prompt, reply in zip(found, prompts, replies, strict=True):
        last = _LAST_REQUEST.search(prompt)
        asked = sorted(set(_WORD.findall((last[1] if last else prompt).lower())) - {"assistant"})
        said = sorted(set(_WORD.findall(reply.lower())))
        names = itertools.chain(said, (f"{ours} {theirs}" for ours in asked for theirs in said))
        row[[zlib.crc32(name.encode()) % NUM_FEATURES for name in names]] = 1.0
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1.0)

# SPDX-License-Identifier: Apache-2.0
"""Rewards of the example: VADER's compound score, a classifier, or a function of your own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

from jax.sharding import Mesh
from vaderSentiment.vaderSentiment import SentimentIntensityAnalyzer

import jrl


@functools.cache
def _analyzer() -> SentimentIntensityAnalyzer:
    return SentimentIntensityAnalyzer()


def vader(samples: Sequence[str]) -> list[float]:
    """How positive each text reads: a lexicon's compound score in [−1, 1]; 0 where no word is known.

    Reference: Hutto and Gilbert 2014, "VADER: a parsimonious rule-based model for sentiment analysis of
    social media text".
    """
    return [_analyzer().polarity_scores(sample)["compound"] for sample in samples]


def valence(word: str) -> float:
    """How positive the lexicon has one word, in lower case, from −4 to 4; 0 where it is not known."""
    return float(_analyzer().lexicon.get(word, 0.0))


def reward_named(
    name: str,
    *,
    label: str | None = None,
    output: Literal["probability", "logit"] | None = None,
    mesh: Mesh | None = None,
) -> Callable[..., Any]:
    """The reward function that `--reward` names: `vader`, or what `jrl.load_reward` finds."""
    if name == "vader" and label is None and output is None:
        return vader
    return jrl.load_reward(name, label=label, output=output, mesh=mesh)

# SPDX-License-Identifier: Apache-2.0
"""Preferences of a judge who is hidden from training: pairs of completions, labelled as Bradley and Terry would.

The judge likes praise and does not believe gushing. What the first policy writes hardly ever gushes, so the pairs say a
lot about praise and next to nothing about too much of it: a reward model that learns from them is right about texts
like these, and wrong about those that a policy may find when it climbs that model's score.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from sentiment.judge import Checkpoint
from sentiment.rewards import vader, valence

PRAISE, GUSHING = 3.0, 80.0
"""Weights of the two things that the judge looks at, in nats of preference."""
BELIEVABLE = 0.15
"""Share of praising words above which a text gushes; in one of a hundred texts of the first policy it is higher."""


@dataclass(frozen=True)
class Pair:
    """Two completions of one prompt.

    Attributes:
      prompt: What both follow.
      chosen: The completion that was preferred.
      rejected: The other one.
      gap: True score of the chosen minus that of the rejected one, in nats. It is written down so that the best
        accuracy can be known; nothing that trains reads it.
    """

    prompt: str
    chosen: str
    rejected: str
    gap: float

    def record(self) -> dict[str, str]:
        """What trainers get."""
        return {"prompt": self.prompt, "chosen": self.chosen, "rejected": self.rejected}


def true_scores(samples: Sequence[str]) -> list[float]:
    """What the hidden judge thinks of each text (prompt and completion), in nats of preference.

        r(x) = 3 · sentiment − 80 · max(0, share of praising words − 0.15)

    Sentiment is VADER's compound score in [−1, 1]; a praising word is one that its lexicon has as positive.
    """
    return [
        PRAISE * sentiment - GUSHING * max(0.0, praise_share(text) - BELIEVABLE)
        for text, sentiment in zip(samples, vader(samples), strict=True)
    ]


def praise_share(text: str) -> float:
    """Share of the words of a text that VADER's lexicon has as positive; 0 of an empty text."""
    words = [word.strip(".,;:!?'\"").lower() for word in text.split()]
    return sum(valence(word) > 0 for word in words) / max(len(words), 1)


def make_pairs(
    policy: Checkpoint, prompts: Sequence[str], *, gen_kwargs: dict[str, int], seed: int
) -> list[Pair]:
    """Two samples of the policy for each prompt, one of them preferred with probability σ(difference of true scores).

    Args:
      policy: Writes the completions.
      prompts: Texts.
      gen_kwargs: As `Checkpoint.complete` takes them.
      seed: Of samples and preferences.
    Returns:
      Pairs, fewer than prompts: of those whose completions are equal, or one of which does not end in time, none is
      made, since its end would be the cut's and not the policy's.
    """
    texts = policy.complete([*prompts, *prompts], seed=seed, gen_kwargs=gen_kwargs)
    eos, count, rng = policy.tokenizer.eos_token_id, len(prompts), random.Random(seed)
    scores = true_scores(
        [prompt + output for prompt, output in zip(texts.prompts, texts.outputs, strict=True)]
    )
    pairs = []
    for first in range(count):
        second = first + count
        ended = all(texts.output_tokens[row][-1:] == [eos] for row in (first, second))
        if not ended or texts.outputs[first] == texts.outputs[second]:
            continue
        difference = scores[first] - scores[second]
        wins = rng.random() < 1.0 / (1.0 + math.exp(-difference))
        chosen, rejected = (first, second) if wins else (second, first)
        pairs.append(
            Pair(
                prompts[first],
                texts.outputs[chosen],
                texts.outputs[rejected],
                difference if wins else -difference,
            )
        )
    return pairs


def best_accuracy(pairs: Sequence[Pair]) -> float:
    """Expected share of pairs that one gets right who knows the true scores: the mean of σ(|gap|)."""
    gaps = np.abs([pair.gap for pair in pairs])
    return float(np.mean(1.0 / (1.0 + np.exp(-gaps))))


def accuracy(
    pairs: Sequence[Pair], chosen: Sequence[float], rejected: Sequence[float]
) -> tuple[float, float]:
    """(share of pairs whose chosen completion scores higher, share of those that the true scores order likewise)."""
    agrees = np.greater(chosen, rejected)
    truth = np.array([pair.gap > 0 for pair in pairs])
    return float(np.mean(agrees)), float(np.mean(agrees == truth))


def save_pairs(path: Path, pairs: Sequence[Pair]) -> None:
    """One pair a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(asdict(pair)) + "\n" for pair in pairs), encoding="utf-8")


def read_pairs(path: Path) -> list[Pair]:
    """What `save_pairs` wrote."""
    return [Pair(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]

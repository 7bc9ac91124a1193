# SPDX-License-Identifier: Apache-2.0
"""ROUGE: how much of a reference summary a text repeats, as F1 of words in lower case, without stemming.

Reference: Lin 2004, "ROUGE: A Package for Automatic Evaluation of Summaries".
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Sequence

_WORD = re.compile(r"[a-z0-9]+")


def rouge_n(text: str, reference: str, *, n: int) -> float:
    """F1 of the runs of `n` words that two texts share, each counted as often as both have it; in [0, 1].

    Example:
      >>> rouge_n("the cat sat", "the cat slept", n=1)
      0.6666666666666666
    """
    ours, theirs = _ngrams(_words(text), n), _ngrams(_words(reference), n)
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def rouge_l(text: str, reference: str) -> float:
    """F1 of the longest sequence of words that both have in this order, with gaps; in [0, 1].

    Example:
      >>> rouge_l("the old cat sat", "the cat sat down")
      0.75
    """
    ours, theirs = _words(text), _words(reference)
    longest = [0] * (len(theirs) + 1)  # of the words of `ours` so far, against each beginning of `theirs`
    for word in ours:
        diagonal = 0
        for place, other in enumerate(theirs, start=1):
            above = longest[place]
            longest[place] = diagonal + 1 if word == other else max(above, longest[place - 1])
            diagonal = above
    return _f1(longest[-1], len(ours), len(theirs))


def rouge(texts: Sequence[str], references: Sequence[str]) -> dict[str, list[float]]:
    """ROUGE-1, -2 and -L of each text, and the mean of the three."""
    pairs = list(zip(texts, references, strict=True))
    scores = {
        "rouge1": [rouge_n(text, reference, n=1) for text, reference in pairs],
        "rouge2": [rouge_n(text, reference, n=2) for text, reference in pairs],
        "rougeL": [rouge_l(text, reference) for text, reference in pairs],
    }
    return scores | {"rouge_mean": [sum(row) / 3 for row in zip(*scores.values(), strict=True)]}


def _words(text: str) -> list[str]:
    return _WORD.findall(text.lower())


def _ngrams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(zip(*(itertools.islice(words, start, None) for start in range(n)), strict=False))


def _f1(shared: int, num_ours: int, num_theirs: int) -> float:
    """Harmonic mean of shared/num_ours and shared/num_theirs; 0 where nothing is shared."""
    return 2 * shared / (num_ours + num_theirs) if shared else 0.0

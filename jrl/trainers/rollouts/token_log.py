# SPDX-License-Identifier: Apache-2.0
"""Tokens of a few rollouts with their figures, for the report: which iterations are kept, and the rows of the file."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np

from jrl.learners.online_tokens import TokenFigures
from jrl.trainers.loggers.token_rows import token_text

ROWS = 4
"""Rollouts that are kept of an iteration."""
MOST_TOKENS = 256
"""Tokens of a completion that are kept, from its beginning."""
MOST_CHARACTERS = 500
"""Characters of a prompt that are kept, from its end."""
PER_DOUBLING = 8
"""Iterations that are kept each time that their number doubles: a run of any length has few of them."""
_DIGITS = 4


def is_kept(iteration: int) -> bool:
    """True where the tokens of an iteration are kept: of the first ones all, then ever fewer.

    Args:
      iteration: Its number, from 0.

    Example:
      >>> [number for number in range(40) if is_kept(number)]
      [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 18, 20, 22, 24, 26, 28, 30, 32, 36]
    """
    every = 1 << max((iteration // PER_DOUBLING).bit_length() - 1, 0)
    return iteration % every == 0


def token_log(figures: TokenFigures, tokenizer: Any) -> list[dict[str, Any]]:
    """Rows of the file; waits for the figures.

    Args:
      figures: Of some rollouts.
      tokenizer: Gives the tokens' texts.
    Returns:
      A dictionary a row: `prompt`, `reward`, `ids`, `tokens`, and for each figure that there is a list with a number a
      token, None where the policy did not write it. Rows that are padding are left out.
    """
    host: TokenFigures = jax.device_get(figures)
    found = []
    for index, mask in enumerate(host.mask):
        if not mask.any():
            continue
        length = min(int(np.flatnonzero(mask)[-1]) + 1, MOST_TOKENS)
        ids = [int(token) for token in host.tokens[index, :length]]
        prompt = str(tokenizer.decode(host.prompt[index][host.prompt_mask[index]], skip_special_tokens=True))
        row: dict[str, Any] = {
            "prompt": prompt[-MOST_CHARACTERS:],
            "reward": _rounded(host.reward[index]),
            "ids": ids,
            "tokens": [token_text(tokenizer, token) for token in ids],
        }
        named = {"advantage": host.advantages, "kl": host.kl, "value": host.values, "logprob": host.logprobs}
        for name, values in named.items():
            if values is not None:
                row[name] = [
                    _rounded(value) if acts else None
                    for value, acts in zip(values[index, :length], mask, strict=False)
                ]
        found.append(row)
    return found


def _rounded(value: Any) -> float:
    return float(f"{float(value):.{_DIGITS}g}")

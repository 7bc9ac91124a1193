# SPDX-License-Identifier: Apache-2.0
"""Reward and metric functions as trlX calls them: the keywords of its calls, and rewards per token counted on the text.

trlX tokenises what it sampled again, and a reward for every token is one for every token of that. jrl trains on the
sampled ids, whose number may be another: a byte that is no text yet, merges that the policy did not make, an EOS that
is no part of `outputs`. Each reward goes to the sampled token in which its own token ends; their sum stays.
"""

from __future__ import annotations

import functools
import inspect
from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrl.rollout.keywords import RESERVED, refuse_async

OF_REWARDS, OF_METRICS = ("samples", "prompts", "outputs", "tokenizer"), ("samples", "prompts", "outputs")
"""What `**kwargs` of a function hold in trlX, beside the metadata of the prompts. What it names it gets in any case."""

_WINDOW = 16
"""Fewest ids that a window begins with."""
_CLEAN = 8
"""Fewest whole letters of them."""
_UNREADABLE = "\ufffd"
"""Stands in a text for bytes that are no letter."""


class SeedFunction:
    """A script's function under trlX's keywords.

    Args:
      function: The script's.
      offered: Those of jrl's own keywords that its `**kwargs` may hold.
    """

    def __init__(self, function: Callable[..., Any], offered: Sequence[str]) -> None:
        self.function = function
        self.__name__ = str(getattr(function, "__name__", type(function).__name__))
        given = _parameters(function)
        self._catches_all = any(one.kind is one.VAR_KEYWORD for one in given.values())
        self._names, self._hidden = set(given), set(RESERVED) - set(offered)
        named = [one for one in given.values() if one.kind is not one.VAR_KEYWORD]
        # Longer than every other name, so none of them.
        rest = inspect.Parameter(f"{max(given, key=len, default='')}_", inspect.Parameter.VAR_KEYWORD)
        self.__signature__ = inspect.Signature([*named, rest])

    def __call__(self, **given: Any) -> Any:
        """The function's answer to those keywords that it takes."""
        return self.function(
            **{
                name: value
                for name, value in given.items()
                if name in self._names or (self._catches_all and name not in self._hidden)
            }
        )


class SeedRewards(SeedFunction):
    """A reward function in trlX's form, whose rewards per token may be counted on the text."""

    def __call__(self, **given: Any) -> Any:
        """The function's answer, with as many rewards per token as there are sampled tokens."""
        answer = super().__call__(**given)
        if not isinstance(answer, list | tuple) or len(answer) != len(given["outputs"]):
            return answer
        return [
            placed(reward, output, ids, given["tokenizer"])
            for reward, output, ids in zip(answer, given["outputs"], given["output_tokens"], strict=True)
        ]


def seed_rewards(function: Any) -> Any:
    """A reward function as `SeedRewards`; what is none, or has no signature to read, as it is.

    Raises:
      ValueError: If it is async.
    """
    return _wrapped(function, SeedRewards, OF_REWARDS, "reward_fn")


def seed_metrics(function: Any) -> Any:
    """A metric function as `SeedFunction`; what is none, or has no signature to read, as it is.

    Raises:
      ValueError: If it is async.
    """
    return _wrapped(function, SeedFunction, OF_METRICS, "metric_fn")


def _wrapped(function: Any, kind: type[SeedFunction], offered: Sequence[str], role: str) -> Any:
    if callable(function):
        refuse_async(function, role)  # here, because nothing tells it of the wrapper
    readable = callable(function) and _parameters(function) is not None
    return kind(function, offered) if readable and not isinstance(function, SeedFunction) else function


def _parameters(function: Callable[..., Any]) -> Any:
    """Parameters of a function by name; None where there is no signature to read."""
    try:
        return inspect.signature(function).parameters
    except ValueError:  # some built-in functions have none
        return None


def placed(reward: Any, output: str, ids: Sequence[int], tokenizer: Any) -> Any:
    """Places a sample's reward on its sampled tokens.

    Args:
      reward: A number, or one for every token of the text; anything else is returned as it is.
      output: The text.
      ids: What was sampled.
      tokenizer: With offsets.
    """
    rewards = reward.tolist() if hasattr(reward, "tolist") else reward
    if not isinstance(rewards, list | tuple) or len(rewards) == len(ids) or not len(ids):
        return reward
    ends = _ends_in_text(output, len(rewards), tokenizer)
    if ends is None:
        return reward
    come = reached(ids, tokenizer)
    found = np.zeros(len(ids))
    for end, value in zip(ends, rewards, strict=True):
        found[min(bisect_left(come, end), len(ids) - 1)] += value
    return found.tolist()


def reached(ids: Sequence[int], tokenizer: Any) -> list[int]:
    """Number of letters of the text after each id: the length of `decode(ids[: place + 1])` at every place.

    Only a window is decoded at each place. Decoders look at what is near (letters split over ids, a space at the
    beginning, spaces before punctuation), so what a window's beginning changes is over `_CLEAN` letters later, and
    cancels in the difference of two of its lengths.
    """
    decode = functools.partial(tokenizer.decode, skip_special_tokens=True)
    # A run of byte tokens is read as one: a window must not begin inside.
    in_bytes = [_is_byte(token) for token in tokenizer.convert_ids_to_tokens(list(ids))]
    found: list[int] = []
    start, before, again = 0, 0, 2 * _WINDOW
    for place in range(len(ids)):
        found.append(before + len(decode(ids[start : place + 1])))
        if place + 1 < again:
            continue
        again = place + 1 + _WINDOW  # not at once again where no window can begin
        begin = place + 1 - _WINDOW
        window = "" if in_bytes[begin] else decode(ids[begin : place + 1])
        if len(window.replace(_UNREADABLE, "")) >= _CLEAN:
            start, before = begin, found[-1] - len(window)
    if found[-1] == len(decode(ids)):
        return found
    return [len(decode(ids[: place + 1])) for place in range(len(ids))]


def _is_byte(token: str | None) -> bool:
    """True where a token stands for one byte of a letter, as in `<0xE2>`; None is an id without a token."""
    return token is not None and len(token) == 6 and token.startswith("<0x")


def _ends_in_text(output: str, count: int, tokenizer: Any) -> list[int] | None:
    """End of each token in the text, if it has so many: with or without special tokens, or with an EOS behind."""
    if not tokenizer.is_fast:
        return None
    for special in (True, False):
        coded = tokenizer(output, add_special_tokens=special, return_offsets_mapping=True)
        # A special token stands for no text: it comes behind everything.
        ends = [end if end > start else len(output) + 1 for start, end in coded["offset_mapping"]]
        if len(ends) in (count, count - 1):
            return ends + [len(output) + 1] * (count - len(ends))
    return None

# SPDX-License-Identifier: Apache-2.0
"""Calls of the user's reward and metric functions: what they are given, and what they may answer."""

from __future__ import annotations

import asyncio
import inspect
import logging
import math
import numbers
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jrl.rollout.keywords import CURE_OF_ASYNC, accepted_keywords
from jrl.rollout.text import Texts

_logger = logging.getLogger(__name__)
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""What a user's function may raise that is its failure: all but an interrupt. One that runs what a policy wrote meets
`exit()` there, which must not end the run as if it were done."""


class RewardError(ValueError):
    """A reward function failed.

    Attributes:
      index: Row of the call that it failed on; None if no single row is to blame.
      prompt: That row's prompt, or None.
    """

    def __init__(self, message: str, *, index: int | None = None, prompt: str | None = None) -> None:
        super().__init__(message if index is None else f"{message} Sample {index} has the prompt {prompt!r}.")
        self.index, self.prompt = index, prompt


class MetricError(RewardError):
    """A metric function raised."""


class RewardTimeoutError(RewardError):
    """A reward function took too long."""


def call_reward_fn(
    reward_fn: Callable[..., Any],
    texts: Texts,
    *,
    tokenizer: Any,
    metadata: Mapping[str, Sequence[Any]],
    skip_errors: bool = False,
    timeout: float | None = None,
) -> list[float | np.ndarray]:
    """Rewards of some completions.

    The function is called with keywords only, and only with those of `samples`, `prompts`, `outputs`, `tokenizer`,
    `output_tokens` and the metadata keys that its signature takes. If it raises, its rows are tried one at a time to
    find out which is to blame.

    Args:
      reward_fn: The user's function: one number a sample, or one number for every token of its completion.
      texts: The completions.
      tokenizer: Handed through.
      metadata: One list a key, aligned with the rows.
      skip_errors: Rows that fail (by an exception, or a reward that is no finite number) become NaN, and the others
        are scored one at a time; otherwise the first stops the run. A wrong number of rewards always does.
      timeout: Seconds that one call may take; None waits for ever.
    Returns:
      One float, or float32 array over the completion's tokens, a row.
    Raises:
      RewardError: If it raises, takes too long, or answers with something else.
      ValueError: If it asks for an unknown keyword, or a metadata key is one of jrl's own keywords.
    """
    keywords = accepted_keywords(reward_fn, "reward_fn", texts, tokenizer, metadata)
    try:
        answer = call_within(reward_fn, keywords, timeout)
    except RewardTimeoutError:
        if not skip_errors:
            raise
        _logger.warning(
            "`reward_fn` took too long: all %d samples of this call are left out.", len(texts.outputs)
        )
        return [math.nan] * len(texts.outputs)
    except FAILURES as error:
        rewards = _one_by_one(reward_fn, keywords, texts, error, skip_errors=skip_errors, timeout=timeout)
    else:
        rewards = _split_answer(answer, len(texts.outputs))
    checked = [_check_row(reward, row, texts) for row, reward in enumerate(rewards)]
    return [_float_or_skip(reward, skip_errors=skip_errors) for reward in checked]


def call_metric_fn(
    metric_fn: Callable[..., Any],
    texts: Texts,
    *,
    tokenizer: Any,
    metadata: Mapping[str, Sequence[Any]],
) -> dict[str, list[float] | float]:
    """Metrics of some completions; the function is called as a reward function is.

    Args:
      metric_fn: The user's function: a dictionary from a name to one number a sample, or to one number in all.
      texts: The completions.
      tokenizer: Handed through.
      metadata: One list a key, aligned with the rows.
    Returns:
      A list of floats, or a float, for each name. NaN is allowed: it says that a sample has no such figure.
    Raises:
      MetricError: If it raises.
      RewardError: If it answers with something else.
      ValueError: If it asks for an unknown keyword.
    """
    keywords = accepted_keywords(metric_fn, "metric_fn", texts, tokenizer, metadata)
    try:
        answer = metric_fn(**keywords)
    except FAILURES as error:
        raise MetricError(f"`metric_fn` raised {type(error).__name__}: {error}.") from error
    if not isinstance(answer, Mapping):
        raise RewardError(
            f"`metric_fn` must return a dictionary from names to numbers, got {_named(answer)}."
        )
    count = len(texts.outputs)
    found: dict[str, list[float] | float] = {}
    for name, value in answer.items():
        plain = _plain(value)
        if _is_number(plain):
            found[str(name)] = float(plain)
        elif isinstance(plain, list) and len(plain) == count and all(_is_number(_plain(x)) for x in plain):
            found[str(name)] = [float(_plain(x)) for x in plain]
        else:
            shape = f"{len(plain)} entries" if isinstance(plain, list) else type(value).__name__
            raise RewardError(
                f"`metric_fn`: {name!r} must be one number a sample (a list of {count}) or one number, got {shape}."
            )
    return found


def to_reward_matrix(
    rewards: Sequence[float | np.ndarray], lengths: Int[np.ndarray, "B"], *, width: int
) -> Float[np.ndarray, "B T"]:
    """Rewards placed on the actions that earned them.

    Args:
      rewards: From `call_reward_fn`.
      lengths: Actions of each row, (B,).
      width: Columns of the completion window.
    Returns:
      float32 (B, width): a number sits on its row's last action, an array on the actions one by one; 0 elsewhere. A
      row that was skipped is NaN throughout.
    """
    placed = np.zeros((len(rewards), width), np.float32)
    for row, (reward, length) in enumerate(zip(rewards, lengths, strict=True)):
        if isinstance(reward, np.ndarray):
            placed[row, :length] = reward
        elif math.isnan(reward):
            placed[row] = math.nan
        else:
            placed[row, length - 1] = reward
    return placed


def call_within(
    reward_fn: Callable[..., Any],
    keywords: Mapping[str, Any],
    timeout: float | None,
    *,
    name: str = "reward_fn",
) -> Any:
    """Calls the user's function, within a time limit.

    Args:
      reward_fn: The function.
      keywords: Its arguments.
      timeout: Seconds after which it is given up; None waits for ever.
      name: What the user calls the argument that it came by.
    Raises:
      RewardTimeoutError: If it takes longer; else whatever it raises.
    """
    if timeout is None:
        return reward_fn(**keywords)
    outcome: list[tuple[Any, BaseException | None]] = []

    def work() -> None:
        try:
            outcome.append((reward_fn(**keywords), None))
        except BaseException as error:  # raised again in the caller's thread
            outcome.append((None, error))

    # A daemon: a call that never returns must not keep the process from ending.
    thread = threading.Thread(target=work, name="reward_fn", daemon=True)
    thread.start()
    thread.join(timeout)
    if not outcome:
        raise RewardTimeoutError(f"`{name}` took longer than `train.reward_timeout`, {timeout:g} s.")
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer


def _one_by_one(
    reward_fn: Callable[..., Any],
    keywords: Mapping[str, Any],
    texts: Texts,
    batch_error: BaseException,
    *,
    skip_errors: bool,
    timeout: float | None,
) -> list[Any]:
    """Rewards of single rows after the whole batch raised; the first row that raises as well is to blame."""
    rewards: list[Any] = []
    for row in range(len(texts.outputs)):
        single = {
            name: value if name == "tokenizer" else value[row : row + 1] for name, value in keywords.items()
        }
        try:
            answer = call_within(reward_fn, single, timeout)
        except FAILURES as error:
            blamed = RewardError(
                f"`reward_fn` raised {type(error).__name__}: {error}.", index=row, prompt=texts.prompts[row]
            )
            if not skip_errors:
                raise blamed from error
            rewards.append(blamed)
        else:
            rewards.append(_split_answer(answer, 1)[0])
    if not skip_errors:
        raise RewardError(
            f"`reward_fn` raised {type(batch_error).__name__}: {batch_error}. It did so on {len(texts.outputs)} "
            "samples together; it raises on none of them alone."
        ) from batch_error
    return rewards


def _split_answer(answer: Any, count: int) -> list[Any]:
    """Splits the function's return value into one entry a sample."""
    shape = tuple(getattr(answer, "shape", ()))
    rows = answer if isinstance(answer, list | tuple) else _plain(answer)
    if not isinstance(rows, list | tuple):
        raise RewardError(
            f"`reward_fn` must return one reward a sample, a list of {count}, got {_named(answer)}."
        )
    if len(rows) != count:
        raise RewardError(
            f"`reward_fn` must return one reward a sample: got {len(rows)} for {count} samples. Did it filter or "
            "repeat any?"
        )
    # A column (B, 1), as reward models return it, holds scalars.
    return [row[0] for row in rows] if shape[1:] == (1,) else list(rows)


def _check_row(reward: Any, row: int, texts: Texts) -> float | np.ndarray | RewardError:
    """A sample's reward as a float or an array over its tokens; an error where it is neither."""
    if isinstance(reward, RewardError):
        return reward
    prompt = texts.prompts[row]
    value = _plain(reward)
    if isinstance(value, list) and len(value) == 1 and not isinstance(reward, list | tuple):
        value = value[0]  # an array of one element is a scalar
    if _is_number(value):
        if math.isfinite(value):
            return float(value)
        return RewardError(f"The reward must be finite, got {value}.", index=row, prompt=prompt)
    entries = [_plain(entry) for entry in value] if isinstance(value, list) else None
    if entries is None or not all(_is_number(entry) for entry in entries):
        return RewardError(
            f"The reward must be a number, or a list of numbers, one a token; got {reward!r:.80}.",
            index=row,
            prompt=prompt,
        )
    num_tokens = len(texts.output_tokens[row])
    if len(entries) != num_tokens:
        return RewardError(
            f"Rewards per token must match len(output_tokens[{row}]): got {len(entries)} for {num_tokens} tokens. Were "
            "they counted on re-tokenised text?",
            index=row,
            prompt=prompt,
        )
    if not all(map(math.isfinite, entries)):
        bad = next(place for place, entry in enumerate(entries) if not math.isfinite(entry))
        return RewardError(
            f"Rewards must be finite, got {entries[bad]} at token {bad}.", index=row, prompt=prompt
        )
    return np.asarray(entries, np.float32)


def _float_or_skip(reward: float | np.ndarray | RewardError, *, skip_errors: bool) -> float | np.ndarray:
    if not isinstance(reward, RewardError):
        return reward
    if not skip_errors:
        raise reward
    _logger.warning("A sample is left out: %s", reward)
    return math.nan


def _named(answer: Any) -> str:
    """Names an answer that cannot be used, with the likely mistake."""
    name = type(answer).__name__
    if answer is None:
        return f"{name}. Is there no `return`?"
    if inspect.iscoroutine(answer):
        answer.close()  # or Python says that nobody awaited it
        return f"a coroutine. {CURE_OF_ASYNC}"
    if isinstance(answer, Iterator):
        return f"{name}, which is read once: make a list of it."
    return name


def _plain(value: Any) -> Any:
    """Arrays of any library (NumPy, JAX, torch on any device) as Python numbers and lists; tuples as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)

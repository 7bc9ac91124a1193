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
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from jrl.rollout.async_calls import Outcome, await_together
from jrl.rollout.keywords import CURE_OF_ASYNC, accepted_keywords, is_async
from jrl.rollout.text import Texts

_logger = logging.getLogger(__name__)
FAILURES = (Exception, SystemExit, asyncio.CancelledError)
"""What a user's function may raise that is its failure: all but an interrupt. One that runs what a policy wrote meets
`exit()` there, which must not end the run as if it were done."""
Reward = float | np.ndarray | None
"""Of a row: a number, one a token, or None where the function does not apply to it. NaN where it failed."""


class RewardError(ValueError):
    """A reward function failed.

    Attributes:
      index: Row of the call that it failed on; None if no single row is to blame.
      prompt: That row's prompt, or None.

    Args:
      message: What happened.
      index: As the attribute.
      prompt: Likewise.
      hint: What to do about it; stands last.
    """

    def __init__(
        self, message: str, *, index: int | None = None, prompt: str | None = None, hint: str = ""
    ) -> None:
        row = "" if index is None else f" Sample {index} has the prompt {prompt!r}."
        super().__init__(f"{message}{row}{hint and f' {hint}'}")
        self.index, self.prompt = index, prompt


class MetricError(RewardError):
    """A metric function raised."""


class RewardTimeoutError(RewardError):
    """A reward function took too long."""

    @classmethod
    def of(cls, role: str, timeout: float | None, *, held: bool = False) -> RewardTimeoutError:
        """The error of a function that messages call `role`; `held`: nothing else on its event loop could run."""
        cause = (
            ", and the event loop of the async functions stood still: an `async def` must await what takes long, or "
            "call it by `asyncio.to_thread`"
        )
        return cls(f"`{role}` took longer than `train.reward_timeout`, {timeout:g} s{cause if held else ''}.")


@dataclass(frozen=True)
class _Call:
    """A function of the user's, and what it is given."""

    function: Callable[..., Any]
    keywords: dict[str, Any]

    def __call__(self) -> Any:
        return self.function(**self.keywords)


def call_reward_fn(
    reward_fn: Callable[..., Any],
    texts: Texts,
    *,
    tokenizer: Any,
    metadata: Mapping[str, Sequence[Any]],
    skip_errors: bool = False,
    timeout: float | None = None,
) -> list[Reward]:
    """Rewards of some completions by one function; see `call_reward_fns`."""
    return call_reward_fns(
        {"reward_fn": reward_fn},
        texts,
        tokenizer=tokenizer,
        metadata=metadata,
        skip_errors=skip_errors,
        timeout=timeout,
    )[0]


def call_reward_fns(
    functions: Mapping[str, Callable[..., Any]],
    texts: Texts,
    *,
    tokenizer: Any,
    metadata: Mapping[str, Sequence[Any]],
    skip_errors: bool = False,
    timeout: float | None = None,
) -> list[list[Reward]]:
    """Rewards of some completions by each of some functions.

    A function is called with keywords only, and only with those of `samples`, `prompts`, `outputs`, `tokenizer`,
    `output_tokens` and the metadata keys that its signature takes. If it raises, its rows are tried one at a time to
    find out which is to blame. Those that are `async def` run together, after the others.

    Args:
      functions: The user's, by what messages call them: one number a sample, or one number for every token of its
        completion, or None where it does not apply to the sample.
      texts: The completions.
      tokenizer: Handed through.
      metadata: One list a key, aligned with the rows.
      skip_errors: Rows that fail (by an exception, or a reward that is no finite number) become NaN, and the others
        are scored one at a time; otherwise the first stops the run. A wrong number of rewards always does.
      timeout: Seconds that one call may take; None waits for ever.
    Returns:
      One list a function: of each row a float, a float32 array over the completion's tokens, or None.
    Raises:
      RewardError: If one raises, takes too long, or answers with something else.
      ValueError: If one asks for an unknown keyword, or a metadata key is one of jrl's own keywords.
    """
    calls = {
        role: _Call(function, accepted_keywords(function, role, texts, tokenizer, metadata))
        for role, function in functions.items()
    }
    found: dict[str, list[Reward]] = {}

    def take(role: str, outcome: Outcome) -> None:
        rows = _rewards_of(calls[role], outcome, texts, role=role, skip_errors=skip_errors, timeout=timeout)
        checked = [_check_row(reward, row, texts, role) for row, reward in enumerate(rows)]
        found[role] = [_reward_or_skip(reward, skip_errors=skip_errors) for reward in checked]

    together = {role: call for role, call in calls.items() if is_async(call.function)}
    for role, call in calls.items():
        if role not in together:
            take(role, _outcome(role, call, timeout))
    if together:
        for role, outcome in _awaited(together, timeout).items():
            take(role, outcome)
    return [found[role] for role in functions]


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
            "`metric_fn` must return a dictionary from names to numbers, got "
            f"{_named(answer, of_coroutine=CURE_OF_ASYNC)}"
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
        raise RewardTimeoutError.of(name, timeout)
    answer, error = outcome[0]
    if error is not None:
        raise error
    return answer


def _outcome(role: str, call: _Call, timeout: float | None) -> Outcome:
    """The answer of a function, or its failure; an interrupt is raised."""
    if is_async(call.function):
        return _awaited({role: call}, timeout)[role]
    try:
        return call_within(call.function, call.keywords, timeout, name=role), None
    except FAILURES as error:
        return None, error


def _awaited(calls: Mapping[str, _Call], timeout: float | None) -> dict[str, Outcome]:
    """Answers of async functions, or their failures."""

    def too_late(role: str, held: bool) -> BaseException:
        return RewardTimeoutError.of(role, timeout, held=held)

    return await_together(calls, timeout, too_late=too_late, failures=FAILURES)


def _rewards_of(
    call: _Call, outcome: Outcome, texts: Texts, *, role: str, skip_errors: bool, timeout: float | None
) -> list[Any]:
    """Rewards of the rows, as a function gave them; an error where one failed and errors are skipped."""
    answer, error = outcome
    count = len(texts.outputs)
    if error is None:
        return _split_answer(answer, count, role)
    if not isinstance(error, RewardTimeoutError):
        return _one_by_one(call, texts, error, role=role, skip_errors=skip_errors, timeout=timeout)
    if not skip_errors:
        raise error
    _logger.warning("`%s` took too long: all %d samples of this call are left out.", role, count)
    return [error] * count


def _one_by_one(
    call: _Call,
    texts: Texts,
    batch_error: BaseException,
    *,
    role: str,
    skip_errors: bool,
    timeout: float | None,
) -> list[Any]:
    """Rewards of single rows after the whole batch raised; the first row that raises as well is to blame."""
    rewards: list[Any] = []
    for row in range(len(texts.outputs)):
        single = {
            name: value if name == "tokenizer" else value[row : row + 1]
            for name, value in call.keywords.items()
        }
        answer, error = _outcome(role, _Call(call.function, single), timeout)
        if error is None:
            rewards.append(_split_answer(answer, 1, role)[0])
            continue
        blamed = RewardError(
            f"`{role}` raised {type(error).__name__}: {error}.",
            index=row,
            prompt=texts.prompts[row],
            hint=f"Call it on this completion by hand: {texts.outputs[row]!r:.80}"
            f"{'' if skip_errors else '; or set `train.reward_errors: skip`'}.",
        )
        if not skip_errors:
            raise blamed from error
        rewards.append(blamed)
    if not skip_errors:
        raise RewardError(
            f"`{role}` raised {type(batch_error).__name__}: {batch_error}. It did so on {len(texts.outputs)} "
            "samples together; it raises on none of them alone."
        ) from batch_error
    return rewards


def _split_answer(answer: Any, count: int, role: str) -> list[Any]:
    """Splits the function's return value into one entry a sample."""
    shape = tuple(getattr(answer, "shape", ()))
    rows = answer if isinstance(answer, list | tuple) else _plain(answer)
    if not isinstance(rows, list | tuple):
        named = _named(answer, of_coroutine="Give the `async def` function itself: that is awaited")
        raise RewardError(f"`{role}` must return one reward a sample, a list of {count}, got {named}")
    if len(rows) != count:
        raise RewardError(
            f"`{role}` must return one reward a sample: got {len(rows)} for {count} samples. Did it filter or "
            "repeat any? `outputs` has the completions, one reward each."
        )
    # A column (B, 1), as reward models return it, holds scalars.
    return [row[0] for row in rows] if shape[1:] == (1,) else list(rows)


def _check_row(reward: Any, row: int, texts: Texts, role: str) -> Reward | RewardError:
    """A sample's reward as a float or an array over its tokens, None as it is; an error where it is none of them."""
    if reward is None or isinstance(reward, RewardError):
        return reward
    prompt = texts.prompts[row]
    if isinstance(reward, Exception):
        return RewardError(f"`{role}` failed: {reward}.", index=row, prompt=prompt)
    value = _plain(reward)
    if isinstance(value, list) and len(value) == 1 and not isinstance(reward, list | tuple):
        value = value[0]  # an array of one element is a scalar
    if _is_number(value):
        if math.isfinite(value):
            return float(value)
        return RewardError(
            f"A reward of `{role}` must be finite, got {value}.",
            index=row,
            prompt=prompt,
            hint="A division by zero, or the mean of nothing? `train.reward_errors: skip` leaves such samples out.",
        )
    entries = [_plain(entry) for entry in value] if isinstance(value, list) else None
    if entries is None or not all(_is_number(entry) for entry in entries):
        return RewardError(
            f"A reward of `{role}` must be a number, a list of numbers, one a token, or None where it does not apply; "
            f"got {reward!r:.80}, of type {type(reward).__name__}.",
            index=row,
            prompt=prompt,
            hint="Return a score, such as 1.0 for a good sample and 0.0 for a bad one.",
        )
    num_tokens = len(texts.output_tokens[row])
    if len(entries) != num_tokens:
        return RewardError(
            f"Rewards per token of `{role}` must match len(output_tokens[{row}]): got {len(entries)} for {num_tokens} "
            "tokens. Were they counted on re-tokenised text? The function may take `output_tokens`: return one "
            f"a token of `output_tokens[{row}]`.",
            index=row,
            prompt=prompt,
        )
    unseen = _earned_by_nobody(entries, texts, row)
    if unseen is not None:
        return RewardError(
            f"Rewards per token of `{role}` must be 0 on tokens that the environment wrote, got {entries[unseen]} at "
            f"token {unseen}: nobody chose it. `turns` has the places of the policy's.",
            index=row,
            prompt=prompt,
        )
    if not all(map(math.isfinite, entries)):
        bad = next(place for place, entry in enumerate(entries) if not math.isfinite(entry))
        return RewardError(
            f"Rewards of `{role}` must be finite, got {entries[bad]} at token {bad}.",
            index=row,
            prompt=prompt,
        )
    return np.asarray(entries, np.float32)


def _earned_by_nobody(entries: Sequence[float], texts: Texts, row: int) -> int | None:
    """Place of the first reward on a token that the policy did not choose."""
    if texts.turns is None:
        return None
    own = {place for turn in texts.turns[row] for place in range(turn["start"], turn["end"])}
    return next((place for place, entry in enumerate(entries) if entry and place not in own), None)


def _reward_or_skip(reward: Reward | RewardError, *, skip_errors: bool) -> Reward:
    if not isinstance(reward, RewardError):
        return reward
    if not skip_errors:
        raise reward
    _logger.warning("A sample is left out: %s", reward)
    return math.nan


def _named(answer: Any, *, of_coroutine: str) -> str:
    """Names an answer that cannot be used, with the likely mistake, up to the end of the sentence."""
    name = type(answer).__name__
    if answer is None:
        return f"{name}. Is there no `return`?"
    if inspect.iscoroutine(answer):
        answer.close()  # or Python says that nobody awaited it
        return f"a coroutine. {of_coroutine}."
    if isinstance(answer, Iterator):
        return f"{name}, which is read once: make a list of it."
    return f"{name}: {answer!r:.60}."


def _plain(value: Any) -> Any:
    """Arrays of any library (NumPy, JAX, torch on any device) as Python numbers and lists; tuples as lists."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return list(value) if isinstance(value, tuple) else value


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real)

# SPDX-License-Identifier: Apache-2.0
"""Keywords of the user's reward and metric functions: each is given those that it takes, and no others."""

from __future__ import annotations

import copy
import functools
import inspect
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.rollout.text import Texts

RESERVED = ("samples", "prompts", "outputs", "tokenizer", "output_tokens")
"""jrl's own; the metadata of prompts adds its keys to them."""
_OTHER_NAMES = {
    "texts": "outputs",
    "completions": "outputs",
    "responses": "outputs",
    "completion_ids": "output_tokens",
}
"""What other libraries call them, for errors."""
CURE_OF_ASYNC = "Nothing awaits it: give a function that does, as by `return asyncio.run(judge(outputs))`"


def is_async(function: Callable[..., Any]) -> bool:
    """True for a function, or an object with a call, whose answer is awaited."""
    return any(inspect.iscoroutinefunction(called) for called in (function, type(function).__call__))


def reward_functions(given: Any, role: str = "reward_fn") -> tuple[Callable[..., Any], ...]:
    """The reward functions that a user gave, one or several.

    Args:
      given: A function, `async def` or not, or a list of them.
      role: What the user calls the argument that they came by.
    Raises:
      ValueError: If it is neither, the list is empty, or a function gives its answer piece by piece.
    """
    several = isinstance(given, list | tuple)
    functions = tuple(given) if several else (given,)
    if not functions:
        raise ValueError(f"`{role}` must be a function or a list of functions, got an empty list.")
    for place, function in enumerate(functions):
        where = f"{role}[{place}]" if several else role
        if not callable(function):
            expected = "a function" if several else "a function or a list of functions"
            cure = " A text names one on the command line alone." if isinstance(function, str) else ""
            raise ValueError(
                f"`{where}` must be {expected}, got {type(function).__name__} {function!r:.40}: give the function "
                f"itself, as in `{role}=my_reward`.{cure}"
            )
        if any(inspect.isasyncgenfunction(called) for called in (function, type(function).__call__)):
            raise ValueError(
                f"`{where}` must return its rewards at once, got an async generator: make a list of them."
            )
    return functions


def unique_names(functions: Sequence[Callable[..., Any]]) -> tuple[str, ...]:
    """Names of functions for metrics and messages: their own, with a number behind where two are alike.

    Args:
      functions: An object is named after its class, a `functools.partial` after its function.
    Example:
      >>> import functools
      >>> unique_names([len, len, functools.partial(sum), lambda outputs: outputs])
      ('len', 'len_2', 'sum', 'lambda')
    """
    found: list[str] = []
    for function in functions:
        inner = function
        while isinstance(inner, functools.partial):
            inner = inner.func
        called = inner.__name__ if hasattr(inner, "__name__") else type(inner).__name__
        name = re.sub(r"[^\w.-]+", "_", str(called)).strip("_") or "function"
        candidates = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
        found.append(next(candidate for candidate in candidates if candidate not in found))
    return tuple(found)


def refuse_async(function: Callable[..., Any], role: str) -> None:
    """Refuses a function whose answer must be awaited, before a run begins.

    Args:
      function: The user's.
      role: What the user calls the argument that it came by.
    Raises:
      ValueError: If it is one.
    """
    for called in (function, type(function).__call__):
        if inspect.iscoroutinefunction(called) or inspect.isasyncgenfunction(called):
            raise ValueError(f"`{role}` must be a function, got an async one. {CURE_OF_ASYNC}.")


def _own(entry: Any) -> Any:
    """A copy of what a function might change, of the kinds that a data set holds."""
    return copy.deepcopy(entry) if isinstance(entry, dict | list) else entry


def accepted_keywords(
    function: Callable[..., Any],
    role: str,
    texts: Texts,
    tokenizer: Any,
    metadata: Mapping[str, Sequence[Any]],
) -> dict[str, Any]:
    """Selects the keywords, of all that are offered, that a user's function accepts.

    Args:
      function: The user's.
      role: What the user calls the argument that it came by, for messages.
      texts: Completions.
      tokenizer: Handed through.
      metadata: One list a key, aligned with the rows.
    Raises:
      ValueError: If it asks for an unknown keyword, or a metadata key is one of jrl's own keywords.
    """
    clash = sorted(set(metadata) & set(RESERVED))
    if clash:
        raise ValueError(
            f"Prompt metadata may not be called {clash}: `{role}` gets its own arguments under {RESERVED}."
        )
    offered: dict[str, Any] = {
        "samples": list(texts.samples),
        "prompts": list(texts.prompts),
        "outputs": list(texts.outputs),
        "tokenizer": tokenizer,
        "output_tokens": [list(row) for row in texts.output_tokens],
        **({} if texts.turns is None else {"turns": copy.deepcopy(texts.turns)}),
        **({} if texts.failures is None else {"failures": list(texts.failures)}),
        **{name: [_own(entry) for entry in column] for name, column in metadata.items()},
    }
    last = "the last of them from the prompts' metadata" if metadata else ""
    return select_keywords(function, role, offered, last=last)


def _meant(name: str, offered: Mapping[str, Any]) -> str:
    """Suggests the name under which what another library calls so is offered, for an error."""
    other = _OTHER_NAMES.get(name)
    return f" Did you mean `{other}`?" if other in offered else ""


def select_keywords(
    function: Callable[..., Any], role: str, offered: Mapping[str, Any], *, last: str = ""
) -> dict[str, Any]:
    """The keywords, of all that are offered, that a user's function accepts.

    Args:
      function: The user's.
      role: What the user calls it, for messages.
      offered: Values by name.
      last: What messages say of the names beside.
    Raises:
      ValueError: If it needs one that is not offered.
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError:  # some built-in functions have no signature
        return dict(offered)
    needed = [
        p for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    for parameter in needed:
        if parameter.kind is parameter.POSITIONAL_ONLY or parameter.name not in offered:
            raise ValueError(
                f"`{role}` takes `{parameter.name}`, which it cannot be given by keyword: there are {sorted(offered)}"
                f"{f' ({last})' if last else ''}. Give it a default, or use one of these names."
                f"{_meant(parameter.name, offered)}"
            )
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    return {name: value for name, value in offered.items() if name in names}

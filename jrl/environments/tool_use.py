# SPDX-License-Identifier: Apache-2.0
"""Tools as an environment: Python functions that a policy calls in its chat template's own format.

A turn is read from the ids that were sampled. Each call in it is answered by a message of the role "tool", all of them
between the policy's turn and its next one; a turn without calls ends the episode. What was sampled is never encoded
again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from jrl.data.chat.rendering import reply_text
from jrl.data.chat.tool_calls import CallFormat, call_format, tool_schemas
from jrl.data.tokenizer import load_tokenizer
from jrl.environments.chat import as_messages, prompt_text
from jrl.rollout.async_calls import await_together
from jrl.rollout.keywords import is_async, select_keywords

OPENING = "opening"
"""Metadata of a prompt of `Tools.prompts`: its row, and what `reset` says to it."""
_OWN_METHODS = ("reset", "get_reward")
Factory = Callable[[], Any]


class Kit(NamedTuple):
    """Tools of a kind of episode.

    Attributes:
      factory: Makes the object whose methods are tools; None: there is none.
      format: How calls are read, with the schemas of all tools.
    """

    factory: Factory | None
    format: CallFormat


class Tools:
    """Makes the worlds of episodes in which a policy calls tools; an `environment` of `jrl.train`.

    Args:
      functions: Tools of every episode, `async def` or not. Type hints and docstring tell the model of them.
      tokenizer: With the chat template of a model that calls tools; or its folder, or name.
      factory: Makes an object for each episode whose public methods are tools, too; or several by name, of which a
        row's `environment` chooses. Its `reset`, if there is one, takes columns of the row by name and may return a
        text, which then stands behind the last message of the prompt; it must be a function of the row. Its
        `get_reward`, if there is one, gives what the episode has earned so far, and is asked after each turn.
      max_rounds: Turns whose calls are answered; None: no limit. Calls of a later turn are not.
      template_kwargs: More variables of the chat template.
    Raises:
      ValueError: If there is no tool, one cannot be described, or the template has no calls that can be read.
    """

    asks_rewards = True
    """Whether `get_reward` is asked after each turn."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        tokenizer: Any,
        *,
        factory: Factory | Mapping[str, Factory] | None = None,
        max_rounds: int | None = None,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        if max_rounds is not None and max_rounds < 0:
            raise ValueError(f"`max_rounds` must be at least 0, or None, got {max_rounds}.")
        self.functions, self.max_rounds = list(functions), max_rounds
        self.tokenizer, self.template_kwargs = load_tokenizer(tokenizer), dict(template_kwargs or {})
        self.by_name = isinstance(factory, Mapping)
        factories = dict(factory) if isinstance(factory, Mapping) else {None: factory}
        self.kits = {name: self._kit(one) for name, one in factories.items()}

    def _kit(self, factory: Factory | None) -> Kit:
        methods = [] if factory is None else list(tool_methods(factory()).values())
        schemas = tool_schemas([*self.functions, *methods])
        if not schemas:
            raise ValueError(
                "`functions` must hold at least one tool, or `factory` make an object that has one."
            )
        return Kit(factory, call_format(self.tokenizer, schemas, self.template_kwargs))

    def kit(self, row: Mapping[str, Any]) -> Kit:
        """The tools of a row.

        Raises:
          ValueError: If the row names none of several.
        """
        name = row.get("environment") if self.by_name else None
        if name not in self.kits:
            raise ValueError(
                f"`environment` of a row must be one of {sorted(map(str, self.kits))}, got {name!r}."
            )
        return self.kits[name]

    def prompts(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Prompts for `jrl.train`, in which the chat template tells the model of its tools.

        Args:
          rows: Each with `prompt`, messages or the text of the user's, and metadata.
        Returns:
          The rows with the rendered text as `prompt`, and with their `opening`.
        Raises:
          ValueError: If a row has no prompt, or the template refuses it.
        """
        found = []
        for number, row in enumerate(rows):
            if OPENING in row:
                raise ValueError(f"`rows[{number}]` may not have the key {OPENING!r}, which is jrl's own.")
            messages, opening = self.open(row, number)
            found.append({**row, "prompt": self.text(messages, row, number), OPENING: opening})
        return found

    def text(self, messages: Sequence[Mapping[str, Any]], row: Mapping[str, Any], number: int) -> str:
        """The text of a prompt.

        Args:
          messages: Of the prompt.
          row: Chooses the tools.
          number: Of the row, for errors.
        """
        schemas = self.kit(row).format.schemas
        return prompt_text(
            self.tokenizer, messages, tools=schemas, template_kwargs=self.template_kwargs, row=number
        )

    def open(self, row: Mapping[str, Any], number: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Messages of a row's prompt with what `reset` says behind them, and the metadata that its episodes need.

        Args:
          row: With `prompt`.
          number: Of the row.
        """
        messages = as_messages(row, number)
        said = self.begun(row)[1]
        if said is not None:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + said}
        return messages, {"row": dict(row), "said": said, "number": number}

    def begun(self, row: Mapping[str, Any]) -> tuple[Any, str | None]:
        """The object of an episode, and what its `reset` says to a row.

        Args:
          row: Its columns are keywords; that which chooses the tools is none.
        Raises:
          ValueError: If that is no text.
        """
        factory = self.kit(row).factory
        if factory is None:
            return None, None
        made = factory()
        if not hasattr(made, "reset"):
            return made, None
        columns = {name: value for name, value in row.items() if not (self.by_name and name == "environment")}
        said = made.reset(**select_keywords(made.reset, "factory.reset", columns))
        if not isinstance(said, str | None):
            raise ValueError(f"`reset` must return a text or None, got {said!r:.80}: images are not read.")
        return made, said

    def __call__(self) -> ToolWorld:
        """The world of one episode."""
        return ToolWorld(self)


class ToolWorld:
    """The world of one episode with tools.

    Attributes:
      messages: Of the episode, behind the prompt.
      turns: Ids of the policy's turns.
      number: Of the prompt's row.
      object: Whose methods are tools; None: there is none.
      calls: Number of calls so far.
      failed: How many of them raised, or named no tool.
    """

    role = None

    def __init__(self, tools: Tools) -> None:
        self._tools, self._earned = tools, 0.0
        self.messages: list[dict[str, Any]] = []
        self.turns: list[tuple[int, ...]] = []
        self.calls = self.failed = 0

    def reset(self, metadata: Mapping[str, Any]) -> None:
        """Begins.

        Args:
          metadata: Of a prompt that `Tools.prompts` made.
        Raises:
          ValueError: If it made none, or `reset` of the object says another thing than it said for the prompt.
        """
        if OPENING not in metadata:
            raise ValueError("Prompts of an environment of tools must come from `Tools.prompts(rows)`.")
        opening = metadata[OPENING]
        self.number = opening["number"]
        self._kit = self._tools.kit(opening["row"])
        self.object, said = self._tools.begun(opening["row"])
        if said != opening["said"]:
            raise ValueError(
                f"`reset` must be a function of the row: it said {opening['said']!r:.80} for the prompt, and "
                f"{said!r:.80} in an episode of it. Take chance from a column of the row."
            )
        own = {} if self.object is None else tool_methods(self.object)
        self._functions = {function.__name__: function for function in self._tools.functions} | own

    def step(self, ids: Sequence[int], turn: int) -> tuple[str, float, bool]:
        """Answers the calls of a turn; without any, the episode is over.

        Args:
          ids: All that was sampled in the turn.
          turn: Number of the turn.
        """
        tokenizer, limit = self._tools.tokenizer, self._tools.max_rounds
        message = self._kit.format.read(ids)
        self.messages.append(message)
        self.turns.append(tuple(ids))
        calls = message.get("tool_calls") or []
        # A turn that a limit cut is no end: the episode goes on, or a limit ends it too.
        ended = ids[-1] in tokenizer.all_special_ids
        if not calls or (limit is not None and turn >= limit):
            return "", self._reward(), ended
        answers = self._answers(calls)
        self.messages += answers
        text = reply_text(tokenizer, answers, template_kwargs=self._tools.template_kwargs)
        if ended:
            text = text.removeprefix(tokenizer.decode([ids[-1]]))
        return text, self._reward(), False

    def _reward(self) -> float:
        """What was earned since it was asked last."""
        if not self._tools.asks_rewards or not hasattr(self.object, "get_reward"):
            return 0.0
        earned, self._earned = self._earned, float(self.object.get_reward())
        return self._earned - earned

    def _answers(self, calls: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Messages of tools, in the order of their calls; async ones run together."""
        functions = [call["function"] for call in calls]
        waiting: dict[str, Callable[[], Any]] = {}
        results: dict[str, Any] = {}
        for place, function in enumerate(functions):
            tool, arguments = self._functions.get(function["name"]), function["arguments"]
            if tool is not None and is_async(tool):
                waiting[str(place)] = functools.partial(tool, **arguments)
                continue
            try:
                if tool is None:
                    raise ValueError(f"Tool {function['name']} not found.")
                results[str(place)] = tool(**arguments)
            except Exception as error:  # of a tool: the model reads what went wrong
                results[str(place)] = error
        awaited = (
            await_together(waiting, None, too_late=_never_late, failures=(Exception,)) if waiting else {}
        )
        results |= {place: value if error is None else error for place, (value, error) in awaited.items()}
        self.calls += len(functions)
        self.failed += sum(isinstance(result, Exception) for result in results.values())
        return [
            {"role": "tool", "name": function["name"], "content": _told(results[str(place)])}
            for place, function in enumerate(functions)
        ]


def tool_methods(made: Any) -> dict[str, Callable[..., Any]]:
    """Public methods of an object, `reset` and `get_reward` excepted, by name."""
    members = inspect.getmembers(type(made), predicate=inspect.isfunction)
    names = [name for name, _ in members if name not in _OWN_METHODS and not name.startswith("_")]
    return {name: getattr(made, name) for name in names}


def _told(result: Any) -> str:
    """What a model reads of a tool's result."""
    if isinstance(result, list) and any(
        isinstance(part, dict) and part.get("type") == "image" for part in result
    ):
        raise ValueError("A tool must answer in text, got an image: models of images are not trained.")
    return str({"error": str(result)}) if isinstance(result, Exception) else str(result)


def _never_late(name: str, held: bool) -> BaseException:
    raise AssertionError(f"{name}: there is no time limit, and {held} of it")

# SPDX-License-Identifier: Apache-2.0
"""TRL's text environments: a model writes, calls tools by marks in its text, and reads what they answer.

A turn samples `max_new_tokens` and is cut behind the first mark that ends it, so what is written behind a mark costs
time and counts for nothing.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from rich.console import Console
from rich.text import Text

from jrl.interop import as_torch
from jrl.trl.models import ModelHandle

__all__ = ["TextEnvironment", "TextHistory"]

_SYSTEM, _MODEL = "black on cyan3", "black on deep_sky_blue1"


class TextHistory:
    """The segments of one conversation, with a mask that says which tokens the model wrote.

    Args:
      text: First segment.
      tokens: Its ids.
      system: Whether it is given (True) or the model's own.

    Attributes:
      text: All segments.
      tokens: All ids: torch's where torch is loaded, else NumPy's.
      token_masks: 1 on the model's own ids.
      completed: Whether the conversation is over.
      truncated: Whether it was ended by its length.
      reward: Of the whole.
    """

    def __init__(self, text: str, tokens: Any, system: bool = True) -> None:
        self.text, self._tokens, self._masks = "", np.zeros(0, np.int64), np.zeros(0, np.int64)
        self.text_spans: list[tuple[int, int]] = []
        self.token_spans: list[tuple[int, int]] = []
        self.system_spans: list[bool] = []
        self.completed = self.truncated = False
        self.reward: Any = 0.0
        self.append_segment(text, tokens, system=system)

    @property
    def tokens(self) -> Any:
        """Ids of the whole history."""
        return as_torch(self._tokens)

    @property
    def token_masks(self) -> Any:
        """1 on the model's own ids, 0 elsewhere."""
        return as_torch(self._masks)

    def append_segment(self, text: str, tokens: Any, system: bool = True) -> None:
        """Adds a segment.

        Args:
          text: Not empty.
          tokens: Its ids.
          system: Whether it is given or the model's own.
        Raises:
          ValueError: If text or ids are empty.
        """
        ids = np.asarray(tokens, np.int64).reshape(-1)
        if not text or not ids.size:
            raise ValueError(f"`text` and `tokens` must not be empty, got {text!r} and {ids.size} ids.")
        self.text_spans.append((len(self.text), len(self.text) + len(text)))
        self.token_spans.append((len(self._tokens), len(self._tokens) + len(ids)))
        self.system_spans.append(system)
        self.text += text
        self._tokens = np.concatenate([self._tokens, ids])
        self._masks = np.concatenate([self._masks, np.full(len(ids), int(not system))])

    def complete(self, truncated: bool = False) -> None:
        """Ends the conversation."""
        self.completed, self.truncated = True, truncated

    @property
    def last_text_segment(self) -> str:
        """The newest segment."""
        start, end = self.text_spans[-1]
        return self.text[start:end]

    def split_query_response_tokens(self) -> tuple[Any, Any, Any]:
        """(ids of the first segment, ids of the others, their mask): what `PPOTrainer.step` takes."""
        split = self.token_spans[0][1]
        return self.tokens[:split], self.tokens[split:], self.token_masks[split:]

    def show_text(self, show_legend: bool = False) -> None:
        """Prints the segments, coloured by who wrote them."""
        shown = Text()
        for (start, end), system in zip(self.text_spans, self.system_spans, strict=True):
            shown.append(self.text[start:end], style=_SYSTEM if system else _MODEL)
        shown.append(f"\nReward: {self.reward}")
        console = Console()
        console.print(shown)
        if show_legend:
            console.print(Text(" given ", style=_SYSTEM) + Text(" model ", style=_MODEL))


class TextEnvironment:
    """Conversations of a model with tools: it calls by `<request><Tool>query<call>`, answers end with `<response>`.

    Args:
      model: Who writes: a handle, such as `trainer.model`.
      tokenizer: Of the model.
      tools: Name → function of a text, or a list of objects, which are called by the names of their classes.
      reward_fn: Gets the last segments of all conversations and the further arguments of `run`; one reward each.
      prompt: Stands before every query.
      max_turns: Most turns of a conversation.
      max_tool_reponse: Most characters of an answer (TRL's spelling).
      max_length: Most tokens of a conversation; None: no limit.
      generation_kwargs: Of `model.generate`.
    """

    request_token, call_token = "<request>", "<call>"
    response_token, submit_token = "<response>", "<submit>"

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: Any = None,
        tools: Mapping[str, Callable[[str], str]] | Sequence[Callable[[str], str]] = (),
        reward_fn: Callable[..., Sequence[Any]] | None = None,
        prompt: str = "",
        max_turns: int = 4,
        max_tool_reponse: int = 100,
        max_length: int | None = None,
        generation_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self.model, self.tokenizer, self.prompt, self.reward_fn = model, tokenizer, prompt, reward_fn
        self.tools = dict(tools) if isinstance(tools, Mapping) else {type(one).__name__: one for one in tools}
        self.max_turns, self.max_tool_response, self.max_length = max_turns, max_tool_reponse, max_length
        self.generation_kwargs = dict(generation_kwargs or {})

    def run(
        self, queries: Sequence[str], **rewards_kwargs: Any
    ) -> tuple[list[Any], list[Any], list[Any], list[Any], list[TextHistory]]:
        """Conversations from queries on: (queries, responses, masks, rewards, histories), one entry a query.

        Args:
          queries: What the prompt is followed by.
          **rewards_kwargs: Further arguments of `reward_fn`.
        """
        texts = [self.prompt + query for query in queries]
        histories = [TextHistory(text, self.tokenizer(text)["input_ids"]) for text in texts]
        for _ in range(self.max_turns):
            if all(history.completed for history in histories):
                break
            histories = self.tasks_end_check(self.generate(histories))
            histories = self.tasks_end_check([self.step(one) for one in histories], model_turn=False)
        self.compute_reward(histories, **rewards_kwargs)
        parts = [history.split_query_response_tokens() for history in histories]
        begun, written, masks = (list(column) for column in zip(*parts, strict=True))
        return begun, written, masks, [history.reward for history in histories], histories

    def step(self, history: TextHistory) -> TextHistory:
        """Answers the call that stands in the last segment, unless the conversation is over."""
        truncated, ended = self.task_end_check(history)
        if ended:
            history.complete(truncated=truncated)
        if history.completed:
            return history
        response = self._answer(history.last_text_segment)
        if len(response) > self.max_tool_response:
            response = response[: self.max_tool_response - 3] + "..."
        text = response + self.response_token
        history.append_segment(text, self.tokenizer(text, add_special_tokens=False)["input_ids"])
        return history

    def _answer(self, segment: str) -> str:
        """A tool's answer, or in its place what was wrong with the call: the model is to learn from it."""
        tool, query = self.parse_tool_call(segment)
        if tool is None or query is None:
            return f"Unknown tool call: {segment}"
        if tool not in self.tools:
            return f"Unknown tool {tool}."
        try:
            return str(self.tools[tool](query))
        except Exception as error:  # whatever a tool raises is its answer
            return f"Tool error: {error}"

    def parse_tool_call(self, text: str) -> tuple[str | None, str | None]:
        """(tool, query) of the first call in a text; (None, None) if there is none."""
        marks = re.escape(self.request_token), re.escape(self.call_token)
        found = re.search(rf"{marks[0]}[^<]*<(.*?)>(.*?){marks[1]}", text, re.DOTALL)
        return (found[1], found[2]) if found else (None, None)

    def compute_reward(self, histories: list[TextHistory], **reward_kwargs: Any) -> list[TextHistory]:
        """Gives every conversation its reward.

        Raises:
          ValueError: If there is no reward function, or it returns another number of rewards.
        """
        if self.reward_fn is None:
            raise ValueError("`reward_fn` must be given to run an environment.")
        rewards = list(self.reward_fn([one.last_text_segment for one in histories], **reward_kwargs))
        if len(rewards) != len(histories):
            raise ValueError(f"`reward_fn` must return {len(histories)} rewards, got {len(rewards)}.")
        for history, reward in zip(histories, rewards, strict=True):
            history.reward = reward
        return histories

    def generate(self, histories: list[TextHistory]) -> list[TextHistory]:
        """Samples the model's next turn in every conversation that goes on."""
        active = [history for history in histories if not history.completed]
        for history, ids in zip(active, self._generate_batched([one.tokens for one in active]), strict=True):
            history.append_segment(self.tokenizer.decode(np.asarray(ids)), ids, system=False)
        return histories

    def tasks_end_check(self, histories: list[TextHistory], model_turn: bool = True) -> list[TextHistory]:
        """Ends the conversations that are over."""
        for history in histories:
            truncated, ended = self.task_end_check(history, model_turn)
            if ended:
                history.complete(truncated=truncated)
        return histories

    def task_end_check(self, history: TextHistory, model_turn: bool = True) -> tuple[bool, bool]:
        """(ended by its length, ended): at an EOS, a submission, or a turn of the model without a call."""
        if history.completed:
            return False, False
        last = history.last_text_segment
        if self.max_length is not None and len(history.tokens) > self.max_length:
            return True, True
        called = self.request_token in last and self.call_token in last
        eos = self.tokenizer.eos_token
        ended = self.submit_token in last or (eos is not None and eos in last) or (model_turn and not called)
        return False, ended

    def _generate_batched(self, query_tensors: Sequence[Any], batch_size: int = 16) -> list[Any]:
        """Samples the model's text after each row, up to the first mark that ends a turn."""
        found: list[Any] = []
        pad = self.tokenizer.pad_token_id
        for start in range(0, len(query_tensors), batch_size):
            rows = [np.asarray(row).reshape(-1) for row in query_tensors[start : start + batch_size]]
            width = max(map(len, rows))
            ids = np.stack([np.pad(row, (width - len(row), 0), constant_values=pad) for row in rows])
            mask = np.stack([np.arange(width) >= width - len(row) for row in rows])
            written = np.asarray(
                self.model.generate(ids, mask, **{"pad_token_id": pad, **self.generation_kwargs})
            )
            found += [as_torch(self._cut(row)) for row in written[:, width:]]
        return found

    def _cut(self, ids: np.ndarray) -> np.ndarray:
        """Ids up to the one that completes a mark."""
        stops = (self.call_token, self.submit_token)
        ended = lambda size: any(stop in self.tokenizer.decode(ids[:size]) for stop in stops)  # noqa: E731
        if not ended(len(ids)):
            return ids
        return ids[: next(size for size in range(1, len(ids) + 1) if ended(size))]

# SPDX-License-Identifier: Apache-2.0
"""`tools` and `environment_factory` of TRL's GRPO: jrl's environment of tools, and what reward functions see of it."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jrl.data.tokenizer import tokenize
from jrl.environments.tool_use import Tools, ToolWorld
from jrl.rollout.environments import EnvironmentFailure

Turns = Sequence[Sequence[Mapping[str, Any]]]


class EpisodeTools(Tools):
    """Tools whose worlds stay until the reward functions have seen them. Rewards are TRL's, not those of turns.

    Attributes:
      played: Worlds of the episodes since the last `clear`.
    """

    asks_rewards = False

    def __init__(self, functions: Sequence[Callable[..., Any]], tokenizer: Any, **options: Any) -> None:
        super().__init__(functions, tokenizer, **options)
        self.played: list[ToolWorld] = []
        self._num_opened = 0

    def __call__(self) -> ToolWorld:
        """The world of one episode."""
        self.played.append(super().__call__())
        return self.played[-1]

    def encode(
        self, rows: Sequence[Mapping[str, Any]]
    ) -> tuple[list[list[int]], list[dict[str, Any]], list[dict[str, Any]]]:
        """Prompts of a data set.

        Args:
          rows: With `prompt` and further columns.
        Returns:
          Their ids; the rows, what `reset` says behind the prompt; and the metadata that their episodes need.
        """
        ids, changed, openings = [], [], []
        for number, row in enumerate(rows):
            messages, opening = self.open(row, number)
            (encoded,) = tokenize(self.tokenizer, [self.text(messages, row, number)])
            ids.append(encoded)
            changed.append({**row, "prompt": messages})
            openings.append({**opening, "number": self._num_opened + number})
        self._num_opened += len(rows)
        return ids, changed, openings

    def worlds(
        self,
        output_tokens: Sequence[Sequence[int]],
        turns: Turns,
        openings: Sequence[Mapping[str, Any]],
        failures: Sequence[str | None],
    ) -> list[ToolWorld]:
        """The world of each episode: of those of its row, the one that read the same turns.

        Args:
          output_tokens: All ids behind each prompt.
          turns: Of each episode.
          openings: Of each episode's row.
          failures: What an environment failed with.
        Raises:
          EnvironmentFailure: If one failed.
        """
        for failure in failures:
            if failure is not None:
                raise EnvironmentFailure(failure)
        found, seen = defaultdict(list), Counter[Any]()
        for world in self.played:
            if world.turns:
                found[world.number, tuple(world.turns)].append(world)
        worlds = []
        for ids, played, opening in zip(output_tokens, turns, openings, strict=True):
            key = opening["number"], tuple(tuple(ids[turn["start"] : turn["end"]]) for turn in played)
            # Rows whose turns are the same, to the id, have worlds that heard the same.
            worlds.append(found[key][seen[key] % len(found[key])])
            seen[key] += 1
        return worlds

    def figures(self) -> dict[str, float]:
        """TRL's metrics of tools; nothing where nothing was played."""
        if not self.played:
            return {}
        calls, failed = (
            sum(world.calls for world in self.played),
            sum(world.failed for world in self.played),
        )
        return {
            "tools/call_frequency": calls / len(self.played),
            "tools/failure_frequency": failed / calls if calls else 0.0,
        }

    def clear(self) -> None:
        """Lets the worlds go."""
        self.played.clear()


def messages_of(
    world: ToolWorld, turns: Sequence[Mapping[str, Any]], num_tokens: int
) -> list[dict[str, Any]]:
    """Messages of an episode; answers that the policy had no room to read are none.

    Args:
      world: Of the episode.
      turns: Of the episode.
      num_tokens: All ids behind the prompt.
    """
    messages = list(world.messages)
    while messages[-1]["role"] == "tool" and turns[-1]["end"] == num_tokens:
        messages.pop()
    return messages


def reward_methods(factory: Any) -> list[Callable[..., Any]]:
    """The `get_reward` of environments as reward functions, one a class, named after it.

    Args:
      factory: Of environments, or several by name.
    """
    factories = factory.values() if isinstance(factory, Mapping) else [factory]
    classes = {type(made): None for made in (one() for one in factories if one is not None)}
    return [_reward_of(own) for own in classes if hasattr(own, "get_reward")]


def _reward_of(own: Any) -> Callable[..., Any]:
    def rewards(environments: Sequence[Any], **others: Any) -> list[Any]:
        del others
        return [made.get_reward() if type(made) is own else None for made in environments]

    async def awaited(environments: Sequence[Any], **others: Any) -> list[Any]:
        del others
        return [await made.get_reward() if type(made) is own else None for made in environments]

    found = awaited if inspect.iscoroutinefunction(vars(own).get("get_reward")) else rewards
    found.__name__ = own.__name__
    return found

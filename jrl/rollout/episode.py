# SPDX-License-Identifier: Apache-2.0
"""An episode: what is to be played, and what has been so far. Who plays it is in `jrl.rollout.episodes`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from jrl.rollout.environments import EnvironmentFailure, World
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.text import Turn

KEPT_CHARACTERS = 2000
"""Of an observation that is too long to be read."""


class Task(NamedTuple):
    """An episode to be played.

    Attributes:
      number: Of the row: what is random of its samples depends on it and on the key alone.
      prompt: Ids of the prompt.
      begin: Makes its world; None: nothing answers, and the first turn is the last.
      limit: Most tokens behind the prompt, at least 1; None: `max_new_tokens`, which it may not exceed either way.
      is_own: Whether its world is this process's; else another process plays it, and tells what it says.
    """

    number: int
    prompt: list[int]
    begin: Callable[[], World] | None = None
    limit: int | None = None
    is_own: bool = True


class Said(NamedTuple):
    """Words of a world, as JSON holds them: processes tell each other.

    Attributes:
      text: Which the policy reads next.
      reward: Of the turn before.
      done: Whether the world has ended the episode.
      role: As in `jrl.rollout.environments.Environment`; said at the beginning.
      failure: What the world failed with; None: with nothing.
    """

    text: str = ""
    reward: float = 0.0
    done: bool = False
    role: str | None = None
    failure: str | None = None


@dataclass
class Episode:
    """An episode, while it is played and afterwards.

    Attributes:
      task: Which one.
      ids: All ids behind the prompt.
      actions: True on those that the policy wrote.
      logprobs: Of these, as the sampler drew them; 0 elsewhere.
      turns: Played so far.
      done: Whether the environment ended it.
      failure: What the environment failed with; None: with nothing.
      over: Whether it has ended, by whatever.
      valid: How many of its tokens, from the first one on, its slot holds; those behind were taken back.
      turn_start: Place of the turn at hand among the ids.
      world: Of this episode, once it has begun, in the process that plays it.
      role: Of what its world says.
    """

    task: Task
    ids: list[int] = field(default_factory=list)
    actions: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    done: bool = False
    failure: str | None = None
    over: bool = False
    valid: int = 0
    turn_start: int = 0
    world: World | None = None
    role: str | None = None

    @property
    def plays(self) -> bool:
        """True where a world answers its turns."""
        return self.task.begin is not None

    @property
    def known(self) -> list[int]:
        """Prompt and all that follows."""
        return self.task.prompt + self.ids

    def room(self, settings: GenerationSettings) -> int:
        """Tokens that may still follow."""
        limit = settings.max_new_tokens if self.task.limit is None else self.task.limit
        return min(limit, settings.max_new_tokens) - len(self.ids)

    def make_world(self) -> Said:
        """Makes the world, and returns what it says first."""
        assert self.task.begin is not None, "a world answers"
        try:
            self.world = self.task.begin()
        except EnvironmentFailure as error:
            return Said(failure=str(error))
        return Said(self.world.observation, role=self.world.role)

    def begin(self, said: Said) -> None:
        """Begins with what the world says first; a world that failed ends the episode."""
        self.role = said.role
        if said.failure is not None:
            self.fail(said.failure)

    def write(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds what the policy wrote, which the cache holds but for its newest token."""
        self.ids += ids
        self.actions += [True] * len(ids)
        self.logprobs += logprobs
        self.valid = len(self.known) - 1

    def end_turn(self, output: str, num_tokens: int) -> None:
        """Cuts the turn to so many tokens; where no world answers it, the episode is over.

        Args:
          output: Text of the turn.
          num_tokens: Of the turn.
        """
        self.cut(self.turn_start + num_tokens)
        if not self.plays:
            self.end()
            return
        turn = Turn(output=output, reward=0.0, observation="", start=self.turn_start, end=len(self.ids))
        self.turns.append(turn)

    def ask_world(self) -> Said:
        """Lets the world answer the turn that ended last."""
        assert self.world is not None, "it has begun"
        try:
            answer = self.world.step(self.turns[-1]["output"], self.ids[self.turn_start :])
        except EnvironmentFailure as error:
            return Said(failure=f"turn {len(self.turns) - 1}: {error}")
        return Said(*answer)

    def take_answer(self, said: Said) -> None:
        """Keeps the answer to the turn that ended last; one that failed or is the last ends the episode."""
        if said.failure is not None:
            self.fail(said.failure)
            return
        self.turns[-1]["observation"], self.turns[-1]["reward"] = said.text, said.reward
        self.done = said.done
        if self.done:
            self.end()

    def observe(self, encoded: Sequence[int]) -> None:
        """Adds what the world said; the next turn begins behind it."""
        self.ids += encoded
        self.actions += [False] * len(encoded)
        self.logprobs += [0.0] * len(encoded)
        self.turn_start = len(self.ids)

    def end(self) -> None:
        """Ends the episode, by whatever; its world is given up."""
        self.over, self.world = True, None

    def cut(self, length: int) -> None:
        """Takes back all behind a number of ids."""
        for column in (self.ids, self.actions, self.logprobs):
            del column[length:]
        self.valid = min(self.valid, len(self.known))

    def fail(self, failure: str) -> None:
        """Ends the episode without a reward."""
        self.failure = failure
        self.end()

    def leave_no_room(self, said: str) -> None:
        """Ends the episode at what the world said, which is not read; a log keeps the beginning of it."""
        if not self.turns:
            self.fail(
                f"the prompt and the first observation, of {len(said)} characters, leave no room for a turn"
            )
            return
        if len(said) > KEPT_CHARACTERS:
            self.turns[-1]["observation"] = f"{said[:KEPT_CHARACTERS]}..."
        self.end()

    def hold(self, count: int) -> None:
        """Notes that its slot holds so many of its tokens, from the first one on."""
        self.valid = count

    def unread(self) -> tuple[int, list[int]]:
        """Number of tokens that its slot holds already, and those that it must read behind them: all but the newest."""
        known = self.known
        good = min(self.valid, len(known) - 1)
        self.valid = len(known) - 1
        return good, known[good:-1]

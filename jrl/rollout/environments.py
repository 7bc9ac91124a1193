# SPDX-License-Identifier: Apache-2.0
"""Environments: worlds in which a policy acts by what it writes, and which answer by what it reads next.

An environment is a class, or another factory without arguments, of objects with `reset` and `step`, one object an
episode; or a plain function that answers a turn from all that was written so far. Each is called with keywords, and
only with those that its signature takes.
"""

from __future__ import annotations

import functools
import inspect
import math
import numbers
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from jrl.rollout.keywords import CURE_OF_ASYNC, is_async, select_keywords

FAILURES = (Exception, SystemExit)
"""What a user's environment may raise that is its failure: all but an interrupt."""
STEP_KEYWORDS = ("text", "ids", "turn", "texts")
RESET_KEYWORDS = ("prompt", "metadata", "seed")


class Environment(Protocol):
    """The world of one episode.

    Attributes:
      role: Of its observations in the tokenizer's chat template, such as "user" or "tool"; where it is missing or None,
        they are text that goes on from the policy's.
    """

    role: str | None

    def reset(self, *, prompt: str, metadata: Mapping[str, Any], seed: int) -> str:
        """Begins; may be missing.

        Args:
          prompt: Text that the episode begins with.
          metadata: Of the prompt; its keys are keywords, too.
          seed: The same for all samples of a prompt, and in every run of a configuration: a source of chance.
        Returns:
          Text that the policy reads behind the prompt; "" for none.
        """
        ...

    def step(
        self, *, text: str, ids: Sequence[int], turn: int, texts: Sequence[str]
    ) -> tuple[str, float, bool]:
        """Answers a turn.

        Args:
          text: What the policy wrote, without EOS and stop string.
          ids: All that it sampled in the turn.
          turn: Number of the turn, from 0.
          texts: Of all turns so far.
        Returns:
          (observation: text that the policy reads next, reward of the turn, whether the episode is over).
        """
        ...


class Answer(NamedTuple):
    """An environment's answer to a turn.

    Attributes:
      observation: Text that the policy reads next.
      reward: Of the turn.
      done: Whether the episode is over.
    """

    observation: str
    reward: float
    done: bool


class EnvironmentFailure(RuntimeError):
    """An environment raised, or answered with something else than it must."""


class World:
    """One episode's environment, whatever form the user's has.

    Args:
      environment: The user's.
      prompt: Text of the prompt.
      metadata: Of the prompt.
      seed: Of the prompt.

    Attributes:
      observation: The first one; "" for none.
      role: As in `Environment`.

    Raises:
      EnvironmentFailure: If the user's code raises.
    """

    def __init__(self, environment: Any, prompt: str, metadata: Mapping[str, Any], seed: int) -> None:
        given = {**metadata, "prompt": prompt, "metadata": dict(metadata), "seed": seed}
        self._turn = 0
        self._texts: list[str] = []
        self.observation, self.role = "", None
        if _is_plain(environment):
            self._step, self._given = environment, given
            return
        self._given = {}
        world = _called(environment, "environment", {})
        self._step = world.step
        self.role = world.role if hasattr(world, "role") else None
        if hasattr(world, "reset"):
            found = _called(world.reset, "environment.reset", given)
            if not isinstance(found, str | None):
                raise EnvironmentFailure(
                    f"`environment.reset` must return the first observation, a text, got {found!r:.80}."
                )
            self.observation = found or ""

    def step(self, text: str, ids: Sequence[int]) -> Answer:
        """The answer to a turn.

        Args:
          text: What was written.
          ids: As sampled.
        Raises:
          EnvironmentFailure: If the user's code raises, or gives no answer.
        """
        self._texts.append(text)
        own = {"text": text, "ids": list(ids), "turn": self._turn, "texts": list(self._texts)}
        self._turn += 1
        return _answer(_called(self._step, "environment.step", self._given | own))


def check_environment(environment: Any, metadata: Sequence[str] | None = None) -> None:
    """Refuses what could never be an environment.

    Args:
      environment: The user's.
      metadata: Keys of the prompts' metadata; None: not known yet, and no keyword is looked at.
    Raises:
      ValueError: If it is neither a factory of objects with `step` nor a function of a turn, or asks for a keyword
        that there is not.
    """
    if not callable(environment):
        raise ValueError(
            "`environment` must be a class with `step` (and `reset`), a function without arguments that makes such an "
            f"object, or a function that answers a turn; got {type(environment).__name__}. Is it an object? Every "
            "episode needs one of its own: give its class."
        )
    methods: dict[str, Callable[..., Any]] = {}
    own: Any = environment
    if inspect.isclass(environment):
        if not hasattr(environment, "step"):
            raise ValueError(f"`environment` must have `step`, which {environment.__name__} has not.")
        methods = {"step": functools.partial(own.step, None)}
        if hasattr(environment, "reset"):
            methods["reset"] = functools.partial(own.reset, None)
    elif _is_plain(environment):
        methods = {"step": environment}
    for method in methods.values():
        if is_async(method.func if isinstance(method, functools.partial) else method):
            raise ValueError(f"`environment` must not be async. {CURE_OF_ASYNC}.")
    if metadata is None:
        return
    names = {"reset": (*RESET_KEYWORDS, *metadata), "step": STEP_KEYWORDS}
    if _is_plain(environment):
        names["step"] = (*STEP_KEYWORDS, *RESET_KEYWORDS, *metadata)
    clash = sorted(set(metadata) & {*STEP_KEYWORDS, *RESET_KEYWORDS, "turns", "failures"})
    if clash:
        raise ValueError(
            f"Prompt metadata may not be called {clash}: environments get their own arguments so."
        )
    for name, method in methods.items():
        select_keywords(method, f"environment.{name}", dict.fromkeys(names[name]))


def _is_plain(environment: Any) -> bool:
    """True for a function that answers a turn; False for what makes objects."""
    if inspect.isclass(environment):
        return False
    parameters = inspect.signature(environment).parameters.values()
    return any(p.default is p.empty and p.kind is not p.VAR_POSITIONAL for p in parameters)


def _called(function: Callable[..., Any], role: str, offered: Mapping[str, Any]) -> Any:
    given = select_keywords(function, role, offered)  # what asks for another keyword is no failure of a world
    try:
        return function(**given)
    except FAILURES as error:
        raise EnvironmentFailure(f"`{role}` raised {type(error).__name__}: {error}") from error


def _answer(found: Any) -> Answer:
    """A checked answer."""
    if not isinstance(found, tuple | list) or len(found) != 3:
        raise EnvironmentFailure(
            f"`environment.step` must return (observation, reward, done), got {found!r:.80}."
        )
    observation, reward, done = found
    reward = reward.item() if hasattr(reward, "item") else reward
    done = done.item() if hasattr(done, "item") else done
    if not isinstance(observation, str):
        raise EnvironmentFailure(f"An observation must be a text, got {observation!r:.80}.")
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        raise EnvironmentFailure(f"The reward of a turn must be a finite number, got {reward!r:.80}.")
    if not isinstance(done, bool):
        raise EnvironmentFailure(f"`done` must be True or False, got {done!r:.80}.")
    return Answer(observation, float(reward), done)

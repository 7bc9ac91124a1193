# SPDX-License-Identifier: Apache-2.0
"""Games of TextArena for one player, as environments.

A prompt is what the game says first. The policy's turns are its actions, and the game's own rules say what is valid. It
answers by what it says anew: a policy that reads its whole episode needs no history again.

Reference: Guertler et al. 2025, arXiv:2504.11442.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jrl.environments import packages
from jrl.environments.chat import prompt_text
from jrl.environments.packages import Chance

_RAW = "-raw"
"""Behind the name of a game whose observations are messages, and whose actions stay as they are."""


class TextArena:
    """A game in plain text: observations go on from the policy's turn, each on lines of its own.

    Prompts come from `text_arena_prompts`. The reward is the game's, at its end; where a limit ends the episode before
    that, there is none. Everything is a function of the prompt's metadata, so worlds may live in worker processes.
    """

    role: ClassVar[str | None] = None

    def reset(self, game: str, game_seed: int, game_options: Mapping[str, Any]) -> None:
        """Begins.

        Args:
          game: Name in TextArena's registry.
          game_seed: Of all chance in it.
          game_options: Of its constructor.
        """
        self._game, self._chance, _ = started(game, game_seed, game_options)

    def step(self, text: str) -> tuple[str, float, bool]:
        """Plays a turn.

        Args:
          text: The action.
        """
        with self._chance.used():
            done, _ = self._game.step(text)
            said = _new_messages(self._game)
        if not done:
            return self._framed(said), 0.0, False
        rewards, figures = self._game.close()
        reason = f"[GAME] {figures[0].get('reason')}"
        return self._framed("\n".join(part for part in (said, reason) if part)), float(rewards[0]), True

    def _framed(self, said: str) -> str:
        return f"\n{said}\n" if self.role is None else said


class TextArenaChat(TextArena):
    """A game as a chat: the game is the user. Prompts need the tokenizer of the chat's template."""

    role = "user"


def text_arena_prompts(
    game: str,
    count: int,
    *,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
    tokenizer: Any = None,
    system_prompt: str | None = None,
) -> list[dict[str, Any]]:
    """Prompts of some games, with the metadata that `TextArena` and `TextArenaChat` begin from.

    Args:
      game: Name in TextArena's registry, such as "GuessTheNumber-v0".
      count: Of games.
      seed: Of the first; the others follow it.
      options: Of the game's constructor; lists, numbers and texts.
      tokenizer: Its chat template writes the prompt as the user's message, for `TextArenaChat`; None: plain text, for
        `TextArena`.
      system_prompt: Stands before it in a chat.
    Raises:
      ImportError: If TextArena is not installed.
      ValueError: If there is no such game, it is none for one player, or lacks something that it needs.
    """
    if system_prompt is not None and tokenizer is None:
        raise ValueError("`system_prompt` is a chat's: give `tokenizer`, too.")
    before = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]
    prompts = []
    for number in range(seed, seed + count):
        _, _, said = started(game, number, options or {})
        text = f"{said}\n"
        if tokenizer is not None:
            text = prompt_text(tokenizer, [*before, {"role": "user", "content": said}])
        prompts.append(
            {"prompt": text, "game": game, "game_seed": number, "game_options": dict(options or {})}
        )
    return prompts


def started(game: str, seed: int, options: Mapping[str, Any]) -> tuple[Any, Chance, str]:
    """A game that has begun, its chance, and what it says.

    Args:
      game: Name in the registry.
      seed: Of all chance.
      options: Of the constructor.
    Raises:
      ImportError: If TextArena is not installed.
      ValueError: If there is no such game, it is none for one player, or lacks something that it needs.
    """
    ta = packages.textarena()
    from textarena.envs.registration import ENV_REGISTRY

    if game + _RAW not in ENV_REGISTRY:
        raise ValueError(
            f"`game` must be one that TextArena registers, such as 'GuessTheNumber-v0', got {game!r}."
        )
    chance = Chance(seed)
    with chance.used():
        try:
            found = ta.make(game + _RAW, **options)
            found.reset(num_players=1, seed=seed)
        except LookupError as error:  # of nltk, whose data are files to be fetched
            raise ValueError(
                f"{game!r} needs data of nltk, which are not here: python -m nltk.downloader words "
                f"averaged_perceptron_tagger_eng ({_first_line(error)})."
            ) from error
        except AssertionError as error:
            raise ValueError(
                f"`game` must be for one player, got {game!r} ({_first_line(error)})."
            ) from error
        except (SyntaxError, ImportError, OSError, ValueError) as error:
            raise ValueError(
                f"{game!r} cannot be played here: {type(error).__name__}: {_first_line(error)}. Some games need a "
                "newer Python, other packages, or a language model over the network."
            ) from error
        if not isinstance(found.state, ta.SinglePlayerState):
            raise ValueError(f"`game` must be for one player, got {game!r}.")
        _mend(found.state)
        return found, chance, _new_messages(found)


def _mend(state: Any) -> None:
    """Puts reason and reward of an invalid move in their places: three games of 0.7.4 give them the other way round."""
    given = state.set_invalid_move

    def in_order(reason: Any = None, reward: Any = -1.0) -> None:
        given(*((reward, reason) if isinstance(reward, str) else (reason, reward)))

    state.set_invalid_move = in_order


def _new_messages(game: Any) -> str:
    """What the game says since it was asked last, as TextArena writes it; the player's own actions are known."""
    player, messages = game.get_observation()
    return "\n".join(f"[GAME] {message}" for sender, message, _ in messages if sender != player)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" *")]
    return lines[0] if lines else type(error).__name__

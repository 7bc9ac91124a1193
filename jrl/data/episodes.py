# SPDX-License-Identifier: Apache-2.0
"""Recorded episodes: turns of a policy and its environment, as rows to learn from.

A record is a mapping, one line of a JSON-lines file:

    {"prompt": "text before the first turn", "done": true,
     "turns": [{"output": "what the policy wrote", "reward": -1.0, "observation": "what it was answered"}, ...]}

Outputs are actions; the prompt and the observations are context. Each text is tokenised once, by itself, and no EOS is
added. A long episode becomes several rows, cut between turns: the row of a turn holds what a player sees who remembers
so many turns, and turns of the same beginning share a row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from jrl.data.batching import bucket_length, pad_right
from jrl.data.demonstrations.rows import DialogueRow, RowSet
from jrl.data.offline import RewardedRows
from jrl.data.ordering import batch_rows
from jrl.data.seam import continuations
from jrl.data.sources.fingerprint import fingerprint
from jrl.data.sources.named_sources import EPISODE_COLUMN
from jrl.data.tokenizer import begun, check_ids, count_ids, prompt_prefix, tokenize
from jrl.typing import ILQLBatch, ModelInputs


class Turn(NamedTuple):
    """A turn in ids.

    Attributes:
      output: The actions, at least one.
      reward: Of the turn; it is that of the last action.
      observation: What the environment answered; empty where it said nothing.
    """

    output: list[int]
    reward: float
    observation: list[int]


class Episode(NamedTuple):
    """A recorded episode in ids.

    Attributes:
      prompt: What stands before the first turn.
      turns: At least one.
      done: False where a limit cut the episode: the state behind its last turn is not terminal.
    """

    prompt: list[int]
    turns: list[Turn]
    done: bool

    @property
    def undiscounted_return(self) -> float:
        """Sum of the rewards."""
        return math.fsum(turn.reward for turn in self.turns)


@dataclass(frozen=True, kw_only=True)
class Windows:
    """The rule by which an episode is cut into rows.

    Attributes:
      prefix: Ids that begin every row, such as BOS.
      start_token_id: Begins a row that would begin with an action: the model cannot write the first token of a row.
      max_length: Most tokens of a row.
      context_turns: Most turns before the one that is learned; 0: its observation and output stand alone. None: as many
        as fit.
      keep_prompt: Whether rows that begin later than the episode begin with its prompt all the same.
    """

    prefix: tuple[int, ...]
    start_token_id: int
    max_length: int
    context_turns: int | None = None
    keep_prompt: bool = False


class Row(NamedTuple):
    """A run of turns of an episode.

    Attributes:
      tokens: Ids, the context first.
      learned: True on the actions that are learned from here; those of turns that are context belong to other rows.
      earned: Reward of each of them.
      after: Ids of the row that ends in the state behind the last action; empty where that state is terminal.
      return_after: Discounted return of the episode from that state on.
    """

    tokens: list[int]
    learned: list[bool]
    earned: Float[np.ndarray, "T"]
    after: list[int]
    return_after: float


def has_episodes(samples: Any) -> bool:
    """True where the first sample is a record of an episode."""
    is_list = isinstance(samples, Sequence) and not isinstance(samples, str)
    return is_list and len(samples) > 0 and isinstance(samples[0], Mapping) and EPISODE_COLUMN in samples[0]


def check_causal(decoder_start_token_id: int | None) -> None:
    """Refuses episodes for a seq2seq model, whose encoder reads one context a row.

    Raises:
      ValueError: If the model has a decoder's start id.
    """
    if decoder_start_token_id is not None:
        raise ValueError(
            "`samples`: episodes need a causal model, whose context grows with every turn; this one is seq2seq."
        )


def check_unset(**is_default: bool) -> None:
    """Refuses options of episodes where samples are none.

    Args:
      is_default: For each field of `method`, whether it says nothing.
    Raises:
      ValueError: If one says something.
    """
    for name, unset in is_default.items():
        if not unset:
            raise ValueError(
                f"`method.{name}` is for samples that are episodes (with `{EPISODE_COLUMN}`), and these are none: "
                "leave it out."
            )


def read_episodes(records: Sequence[Any], tokenizer: Any) -> list[Episode]:
    """Episodes of records, in ids.

    Args:
      records: Mappings as the module says. Where they hold `prompt_tokens`, or turns `output_tokens` or
        `observation_tokens`, those ids are taken as they are, and their text is not read. Left untouched.
      tokenizer: A transformers tokenizer.
    Raises:
      ValueError: If a record is malformed; the message names the episode and the turn.
    """
    num_ids = count_ids(tokenizer)
    checked = [_check_record(record, number, num_ids) for number, record in enumerate(records)]
    # Texts come again and again, and each is tokenised once.
    prompts = _tokenized((one[0] for one in checked), lambda texts: tokenize(tokenizer, texts))
    parts = (part for _, turns, _ in checked for output, _, said in turns for part in (output, said))
    found = _tokenized(parts, lambda texts: continuations(tokenizer, texts))

    def ids(part: str | list[int], known: Mapping[str, list[int]]) -> list[int]:
        return known[part] if isinstance(part, str) else part

    episodes = []
    for number, (prompt, turns, done) in enumerate(checked):
        read = [Turn(ids(output, found), reward, ids(said, found)) for output, reward, said in turns]
        for place, turn in enumerate(read):
            if not turn.output:
                raise ValueError(f"`samples`: {_where(number, place)}: `output` has no tokens, so no action.")
        episodes.append(Episode(ids(prompt, prompts), read, done))
    return episodes


def best_episodes(episodes: Sequence[Episode], share: float) -> list[Episode]:
    """The given share of the episodes, rounded up: those of highest return, in their order; of equals, the first.

    Example:
      >>> episodes = [Episode([], [Turn([5], reward, [])], True) for reward in (-3.0, -1.0, -2.0)]
      >>> [episode.turns[0].reward for episode in best_episodes(episodes, 0.5)]
      [-1.0, -2.0]
    """
    count = math.ceil(Fraction(str(share)) * len(episodes))  # in float, a tenth of 30 is more than 3
    ranked = sorted(range(len(episodes)), key=lambda i: -episodes[i].undiscounted_return)
    return [episodes[i] for i in sorted(ranked[:count])]


def cut_windows(
    episode: Episode, windows: Windows, *, gamma: float, reward_scale: float, number: int = 0
) -> list[Row]:
    """The rows of an episode, in order; every action is learned in one of them.

    Args:
      episode: In ids.
      windows: How it is cut.
      gamma: Discount per action, of `return_after`.
      reward_scale: Factor of rewards.
      number: Of the episode, for the error.
    Raises:
      ValueError: If a turn alone has more than `max_length` tokens.
    """
    starts = _starts(episode, windows, number)
    turns, num_turns = episode.turns, len(episode.turns)
    rewards = [reward_scale * turn.reward for turn in turns]
    ahead = [0.0] * (num_turns + 1)  # return from the first action of each turn on
    for place in reversed(range(num_turns)):
        ahead[place] = gamma ** (len(turns[place].output) - 1) * (rewards[place] + gamma * ahead[place + 1])
    rows = []
    ends = [place for place in range(1, num_turns) if starts[place] != starts[place - 1]]
    for first, end in zip([0, *ends], [*ends, num_turns], strict=True):
        tokens = _context(episode, starts[first], first, windows)
        learned, earned = [False] * len(tokens), list[float]()
        for place in range(first, end):
            said = turns[place - 1].observation if place > first else []
            output = turns[place].output
            tokens += said + output
            learned += [False] * len(said) + [True] * len(output)
            earned += [0.0] * (len(output) - 1) + [rewards[place]]
        ended = end == num_turns and episode.done
        after = [] if ended else _context(episode, starts[end], end, windows)
        rows.append(Row(tokens, learned, np.array(earned, np.float32), after, ahead[end]))
    return rows


class EpisodeSet(RowSet):
    """Rows of episodes, of which outputs are learned, and their batches.

    Args:
      episodes: In ids, at least one.
      windows: How they are cut.
      pad_token_id: Fills the columns behind each row.
      seed: Of the order.
      gamma: Discount per action.
      reward_scale: Factor of rewards.

    Attributes:
      windows_of_episodes: The rows, with what they earn.

    Further attributes are those of `RowSet`.

    Raises:
      ValueError: If a turn alone has more tokens than a row may have.
    """

    def __init__(
        self,
        episodes: Sequence[Episode],
        windows: Windows,
        *,
        pad_token_id: int,
        seed: int,
        gamma: float = 1.0,
        reward_scale: float = 1.0,
    ) -> None:
        self.windows_of_episodes = [
            row
            for number, episode in enumerate(episodes)
            for row in cut_windows(episode, windows, gamma=gamma, reward_scale=reward_scale, number=number)
        ]
        super().__init__(
            [DialogueRow(row.tokens, row.learned) for row in self.windows_of_episodes],
            pad_token_id=pad_token_id,
            max_length=windows.max_length,
            seed=seed,
        )


class RewardedEpisodes(RewardedRows):
    """Rows of episodes with what each action earned and what follows the last one, and their batches.

    Args:
      found: The rows.
      seed: Of the order.

    Attributes are those of `RewardedRows`.
    """

    def __init__(self, found: EpisodeSet, *, seed: int) -> None:
        self._cut, self._order = found, seed
        self._goes_on = any(row.after for row in found.windows_of_episodes)
        super().__init__(found, [row.earned for row in found.windows_of_episodes], seed=seed)

    def rewards_sha256(self) -> str:
        """Fingerprint of the rewards, and of what follows each row."""
        rest = [(row.after, row.return_after) for row in self._cut.windows_of_episodes]
        return fingerprint(super().rewards_sha256(), rest)

    def batch(self, step: int, batch_size: int) -> ILQLBatch:
        """The rows of optimizer step `step`, as in `RewardedRows`; rows of `after` have a bucket of their own."""
        batch = super().batch(step, batch_size)
        if not self._goes_on:
            return batch
        indices, real = batch_rows(step, batch_size, size=len(self), seed=self._order)
        cut = self._cut
        rows = [cut.windows_of_episodes[index] for index in indices]
        after = [row.after if is_real else [] for row, is_real in zip(rows, real, strict=True)]
        width = min(bucket_length(max(map(len, after))), cut.max_length)
        # NumPy stands where jax arrays are declared: whoever holds the mesh places them.
        inputs: Any = pad_right(after, pad_token_id=cut.pad_token_id, width=width)
        returns: Any = np.array([row.return_after for row in rows], np.float32) * real
        return batch._replace(after=ModelInputs(*inputs), returns_after=returns)


def make_windows(
    tokenizer: Any,
    *,
    max_length: int,
    context_turns: int | None,
    keep_prompt: bool,
    add_special_tokens: bool,
) -> Windows:
    """The rule for a tokenizer's ids; arguments as in `Windows` and `DialogueSet`."""
    start = tokenizer.eos_token_id if tokenizer.bos_token_id is None else tokenizer.bos_token_id
    return Windows(
        prefix=tuple(prompt_prefix(tokenizer, add_special_tokens=add_special_tokens)),
        start_token_id=start,
        max_length=max_length,
        context_turns=context_turns,
        keep_prompt=keep_prompt,
    )


def context_of(episode: Episode, windows: Windows) -> list[int]:
    """Ids that a player reads before its next turn, as a row of that turn would begin.

    Args:
      episode: The turns so far, none at the start; the last observation is the newest. It need not be `done`.
      windows: How rows are cut. `max_length` is what is left for context.
    Raises:
      ValueError: If what was said last has more than `max_length` tokens alone.
    """
    place = len(episode.turns)
    start = _start(episode, place, 0, windows)
    if start is None:
        raise ValueError(
            f"`max_length` must hold what was said last, which has {len(_beginning(episode, place, windows))} tokens; "
            f"got {windows.max_length}."
        )
    return _context(episode, start, place, windows)


def _starts(episode: Episode, windows: Windows, number: int) -> list[int]:
    """The turn with which the row of each turn begins; where the episode was cut, of the state behind it, too.

    It never falls: what does not fit before a turn does not fit before the next one.
    """
    found = list[int]()
    for place in range(len(episode.turns) + (not episode.done)):
        own = len(episode.turns[place].output) if place < len(episode.turns) else 0
        start = _start(episode, place, own, windows, found[-1] if found else 0)
        if start is None:
            raise ValueError(
                f"`samples`: {_where(number, place)} has more than {windows.max_length} tokens with what was said "
                "before it: raise `train.seq_length`, or leave the episode out."
            )
        found.append(start)
    return found


def _start(episode: Episode, place: int, own: int, windows: Windows, first: int = 0) -> int | None:
    """The first turn, `first` or later, whose row holds turn `place` with `own` actions of it; None: there is none."""
    if windows.context_turns is not None:
        first = max(first, place - windows.context_turns)
    room = windows.max_length - own - sum(map(_size, episode.turns[first:place]))
    for start in range(first, place + 1):
        if len(_beginning(episode, start, windows)) <= room:
            return start
        if start < place:
            room += _size(episode.turns[start])
    return None


def _size(turn: Turn) -> int:
    return len(turn.output) + len(turn.observation)


def _beginning(episode: Episode, start: int, windows: Windows) -> list[int]:
    """Ids from the beginning of a row to the first action of turn `start`."""
    said = episode.prompt if start == 0 else episode.turns[start - 1].observation
    if start > 0 and windows.keep_prompt:
        said = [*episode.prompt, *said]
    return begun(list(windows.prefix), said) or [windows.start_token_id]


def _context(episode: Episode, start: int, place: int, windows: Windows) -> list[int]:
    """Ids from the beginning of turn `start` to the first action of turn `place`."""
    between = (part for turn in episode.turns[start:place] for part in (turn.output, turn.observation))
    return list(chain(_beginning(episode, start, windows), *between))


_Part = str | list[int]


def _check_record(
    record: Any, number: int, num_ids: int
) -> tuple[_Part, list[tuple[_Part, float, _Part]], bool]:
    """Prompt, turns and `done` of a record; texts where it brings no ids."""
    where = f"episode {number}"
    if not isinstance(record, Mapping):
        raise ValueError(
            f"`samples`: {where} must be a mapping with `{EPISODE_COLUMN}`, got a {type(record).__name__}."
        )
    turns, done = record.get(EPISODE_COLUMN), record.get("done")
    if isinstance(turns, str | Mapping) or not isinstance(turns, Sequence) or not turns:
        raise ValueError(
            f"`samples`: {where}: `{EPISODE_COLUMN}` must be a list of at least one turn, got {turns!r}. Columns: "
            f"{sorted(map(str, record))}."
        )
    if not isinstance(done, bool):
        raise ValueError(
            f"`samples`: {where}: `done` must be true or false (false: a limit cut the episode), got {done!r}."
        )
    found = []
    for place, turn in enumerate(turns):
        if not isinstance(turn, Mapping):
            raise ValueError(f"`samples`: {_where(number, place)} must be a mapping, got {turn!r}.")
        reward = turn.get("reward")
        if isinstance(reward, bool) or not isinstance(reward, int | float) or not math.isfinite(reward):
            raise ValueError(
                f"`samples`: {_where(number, place)}: `reward` must be a finite number, got {reward!r}."
            )
        output, said = (
            _part(turn, name, _where(number, place), number, num_ids) for name in ("output", "observation")
        )
        found.append((output, float(reward), said))
    return _part(record, "prompt", where, number, num_ids), found, done


def _part(holder: Mapping[str, Any], name: str, where: str, number: int, num_ids: int) -> _Part:
    """The ids of a part, or its text where there are none."""
    ids, text = holder.get(f"{name}_tokens"), holder.get(name)
    if ids is not None:
        return check_ids(ids, f"{name}_tokens", number, num_ids)
    if not isinstance(text, str):
        raise ValueError(
            f"`samples`: {where}: `{name}` must be a text, or `{name}_tokens` ids; got {text!r}. Columns: "
            f"{sorted(map(str, holder))}."
        )
    return text


def _tokenized(parts: Iterable[_Part], write: Callable[[list[str]], list[list[int]]]) -> dict[str, list[int]]:
    """Ids of each text among the parts."""
    texts = list(dict.fromkeys(part for part in parts if isinstance(part, str)))
    return dict(zip(texts, write(texts), strict=True))


def _where(number: int, place: int) -> str:
    return f"turn {place} of episode {number}"

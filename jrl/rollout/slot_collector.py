# SPDX-License-Identifier: Apache-2.0
"""Collects what is written on slots: episodes of an environment, or completions of many lengths.

A row that is long holds up no other: as soon as one is over, the next takes its slot. Rows come in calls of fixed
numbers none the less, so that scoring has one shape and reward functions get the same batches whichever row ends first.
A call comes as soon as its rows are over and those of the calls before have come; slots write meanwhile.

Of several processes each knows all rows; the world of a row is in the process that judges it.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from jrl.data.prompts import PromptSet
from jrl.distributed import is_main
from jrl.placement import own_rows, place_rows
from jrl.rollout.collect import Call, Clock, Collector, Follow, given
from jrl.rollout.environments import World
from jrl.rollout.episode import Episode, Task
from jrl.rollout.episodes import Player
from jrl.rollout.gathering import Part
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.text import Texts, decode_rows
from jrl.typing import Completions, Frozen, Params, PRNGKey


@dataclass(frozen=True)
class SlotCollector(Collector):
    """Plays an episode for each prompt, or completes it; all else is as in `Collector`.

    Attributes:
      player: Plays.
      environment: The user's; None: each prompt has one completion a sample.
      slots: Rows that are written together; None: as many as a call has.
    """

    player: Player = field(kw_only=True)
    environment: Any = field(kw_only=True, default=None)
    slots: int | None = field(kw_only=True, default=None)

    def parts(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
        *,
        first: int = 0,
        width: int | None = None,
        follow: Follow | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        clock: Clock = lambda name: nullcontext(),
    ) -> Generator[tuple[Call, Part]]:
        """This process's rows call by call, as `Collector.parts` gives them; slots write while the caller judges."""
        total, rows_of_call = len(indices), self._rows_of_call(len(indices))
        own = self._judged_here(rows_of_call)
        columns = prompts.width(indices) if width is None else width
        token_lists = prompts.rows(indices, width=columns).token_lists
        worlds = self._worlds(token_lists, prompts.metadata(indices), key, first)
        episodes = [
            Episode(Task(first + row, ids, begin, is_own=row % rows_of_call in own))
            for row, (ids, begin) in enumerate(zip(token_lists, worlds, strict=True))
        ]
        playing = self.player.playing(
            params,
            frozen,
            episodes,
            settings,
            key,
            num_slots=min(self.slots or rows_of_call, total),
            prompt_width=columns,
            clock=clock,
        )
        for start in range(0, total, rows_of_call):
            count = min(rows_of_call, total - start)
            numbers = np.arange(start, start + rows_of_call) % total
            rows = [episodes[number] for number in numbers]
            while not all(row.over for row in rows):
                next(playing, None)
                meanwhile()
                meanwhile = lambda: None  # noqa: E731
            prompt = prompts.rows(indices[numbers[:: self.num_generations]], width=columns)
            inputs = place_rows(self.mesh, prompt.inputs)
            completions = self._completions(rows, settings)
            followed = None if follow is None else follow(inputs, completions)
            call = Call(prompt, count, given(completions), given(followed))
            judged = own[own < count]
            with clock("decode"):
                texts = self._texts([rows[row] for row in judged], settings, prompts.separator)
                part = Part(start + judged, texts)
            yield call, part

    def _judged_here(self, num_rows: int) -> np.ndarray:
        """Rows of a call that this process judges, ascending."""
        if self.on_main:
            return np.arange(num_rows if is_main() else 0)
        return own_rows(self.mesh, num_rows)

    def _worlds(
        self,
        token_lists: Sequence[Sequence[int]],
        metadata: Mapping[str, Sequence[Any]],
        key: PRNGKey,
        first: int,
    ) -> list[Callable[[], World] | None]:
        """Makers of the rows' worlds; None where there is no environment."""
        if self.environment is None:
            return [None] * len(token_lists)
        chance = [int(word) for word in np.asarray(jax.random.key_data(key)).reshape(-1)]

        def maker(row: int) -> Callable[[], World]:
            text = self.tokenizer.decode(token_lists[row], skip_special_tokens=True)
            own = {name: column[row] for name, column in metadata.items()}
            seed = _seed(chance, (first + row) // self.num_generations)
            return lambda: World(self.environment, text, own, seed)

        return [maker(row) for row in range(len(token_lists))]

    def _completions(self, episodes: Sequence[Episode], settings: GenerationSettings) -> Completions:
        """Episodes as rows on the mesh."""
        shape = (len(episodes), settings.max_new_tokens)
        tokens = np.full(shape, settings.pad_token_id, np.int32)
        logprobs, actions = np.zeros(shape, np.float32), np.zeros(shape, bool)
        for row, episode in enumerate(episodes):
            count = len(episode.ids)
            tokens[row, :count], actions[row, :count] = episode.ids, episode.actions
            logprobs[row, :count] = episode.logprobs
        lengths = np.asarray([len(episode.ids) for episode in episodes], np.int32)
        plays = self.environment is not None
        done = [episode.done if plays else episode.ids[-1] in settings.eos_token_id for episode in episodes]
        # NumPy stands where jax arrays are declared.
        arrays: Any = (tokens, lengths, np.asarray(done), logprobs, actions if plays else None)
        found: Completions = place_rows(self.mesh, Completions(*arrays))
        return found

    def _texts(
        self, episodes: Sequence[Episode], settings: GenerationSettings, separator: str | None
    ) -> Texts:
        """Texts of completions, or of whole episodes with their turns."""
        plays = self.environment is not None
        found = decode_rows(
            self.tokenizer,
            [episode.task.prompt for episode in episodes],
            [np.asarray(episode.ids, np.int32) for episode in episodes],
            np.asarray([len(episode.ids) for episode in episodes], np.int64),
            eos_token_ids=settings.eos_token_id,
            stop_sequences=() if plays else self.stop_sequences,  # one ends a turn, not an episode
            separator=separator,
        )
        if not plays:
            return found
        return replace(
            found,
            stopped=np.asarray([episode.done for episode in episodes], bool),
            turns=[episode.turns for episode in episodes],
            failures=[episode.failure for episode in episodes],
        )


def _seed(chance: Sequence[int], number: int) -> int:
    """Seed of a prompt's worlds: a function of the collection's key and the prompt's number in it."""
    return int(np.random.SeedSequence([*chance, number]).generate_state(1)[0])

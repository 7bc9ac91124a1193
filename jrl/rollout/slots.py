# SPDX-License-Identifier: Apache-2.0
"""Slots and who is in them: the host's side of `jrl.rollout.turns`.

A slot that another row takes keeps what it holds until that row is seated. So samples of one prompt share a pass over
it: the first reads it, and later ones copy it from any slot that begins with it, or cut back their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from jrl.rollout.episode import Episode
from jrl.rollout.sampler import GenerationSettings
from jrl.rollout.turns import Plan, TurnPrograms, Weights, Written
from jrl.typing import Cache, Frozen, Params, PRNGKey, SamplingKnobs


@dataclass
class Slots:
    """Slots, and who is in them.

    Attributes:
      programs: Of so many slots.
      weights: As these read them.
      cache: Of all slots.
      episodes: In each slot; None: it is free.
      held: Tokens in the cache of each, of whoever was there last.
      prompts: That they hold at their beginning; None: what they hold is unknown.
    """

    programs: TurnPrograms
    weights: Weights
    cache: Cache
    episodes: list[Episode | None]
    held: np.ndarray
    prompts: list[list[int] | None]

    @staticmethod
    def empty(programs: TurnPrograms, params: Params, frozen: Frozen) -> Slots:
        """Slots that hold nothing."""
        weights, count = programs.weights(params, frozen), programs.num_slots
        return Slots(
            programs,
            weights,
            programs.start(weights),
            [None] * count,
            np.zeros(count, np.int64),
            [None] * count,
        )

    @property
    def active(self) -> dict[int, Episode]:
        """Episodes by slot."""
        return {slot: episode for slot, episode in enumerate(self.episodes) if episode is not None}

    def seat(self, begun: Sequence[Episode], width: int) -> None:
        """Gives each episode a free slot that holds its prompt but for the newest token.

        A prompt that another slot holds, of a sample of the same prompt, is copied from there; each other one is read
        once. Where slots are split over devices, `catch_up` reads all of them.

        Args:
          begun: At most as many as there are free slots.
          width: Of the longest prompt there is.
        """
        if not self.programs.forgets_some:
            # Nobody can be given less than what a slot holds: only one that holds a prompt alone is of use.
            self.prompts = [
                prompt if prompt is None or held == len(prompt) - 1 else None
                for prompt, held in zip(self.prompts, self.held, strict=True)
            ]
        free = [slot for slot, episode in enumerate(self.episodes) if episode is None]
        seated = dict[int, Episode]()
        for episode in begun:
            prompt = episode.task.prompt
            slot = next((slot for slot in free if self.prompts[slot] == prompt), free[0])
            free.remove(slot)
            self.episodes[slot] = seated[slot] = episode
        if self.programs.is_split:
            return
        # A slot whose prompt changes is no source: it reads another one before anything is copied.
        sources = {
            tuple(prompt): slot
            for slot, prompt in enumerate(self.prompts)
            if prompt is not None and (slot not in seated or seated[slot].task.prompt == prompt)
        }
        read, copied = dict[int, list[int]](), dict[int, int]()
        for slot, episode in seated.items():
            prompt = episode.task.prompt
            source = sources.setdefault(tuple(prompt), slot)
            episode.hold(len(prompt) - 1)
            if source != slot:
                copied[slot] = source
            elif self.prompts[slot] != prompt:
                read[slot] = prompt[:-1]
                self.held[slot] = len(prompt) - 1
            self.prompts[slot] = prompt
        self.cache = self.programs.begin(self.weights, self.cache, read, width)
        counts = {slot: int(self.held[source]) - seated[slot].valid for slot, source in copied.items()}
        self.cache = self.programs.copy(
            self.cache, {slot: (source, counts[slot]) for slot, source in copied.items()}
        )
        for slot in copied:
            self.held[slot] = seated[slot].valid

    def catch_up(self) -> None:
        """Lets each slot hold all of its episode but the newest token."""
        counts, texts = np.zeros(len(self.episodes), np.int64), dict[int, list[int]]()
        for slot, episode in self.active.items():
            good, unread = episode.unread()
            if good < self.held[slot] and not self.programs.forgets_some:
                good, unread = 0, episode.known[:-1]
            counts[slot] = self.held[slot] - good
            self.held[slot] = good + len(unread)
            if unread:
                texts[slot] = unread
        if counts.any():
            self.cache = self.programs.forget(self.cache, counts)
        self.cache = self.programs.read(self.weights, self.cache, texts)

    def write(self, settings: GenerationSettings, knobs: SamplingKnobs, key: PRNGKey, least: int) -> Written:
        """Lets all of them write, until fewer than `least` do; what they wrote is still on the device."""
        plan = _plan(self.active, len(self.episodes), settings)
        self.cache, written = self.programs.write(
            self.weights, self.cache, plan, knobs, key, least_running=least
        )
        return written

    def release(self) -> None:
        """Frees the slots of episodes that are over; what they hold stays until others are seated."""
        self.episodes = [None if episode is None or episode.over else episode for episode in self.episodes]

    def fewer(self, programs: TurnPrograms) -> Slots:
        """The slots that are in use, and some others, as slots of programs for fewer."""
        active = self.active
        rest = [slot for slot in range(len(self.episodes)) if slot not in active]
        slots = sorted([*active, *rest[: programs.num_slots - len(active)]])
        return Slots(
            programs,
            self.weights,
            self.programs.take(self.cache, slots),
            [self.episodes[slot] for slot in slots],
            self.held[slots],
            [self.prompts[slot] for slot in slots],
        )


def _plan(active: Mapping[int, Episode], num_slots: int, settings: GenerationSettings) -> Plan:
    """What each slot is to do."""
    columns = np.zeros((len(Plan._fields), num_slots), np.int32)
    for slot, episode in active.items():
        written = len(episode.ids) - episode.turn_start
        room = episode.room(settings)
        if settings.max_turn_tokens is not None:
            room = min(room, settings.max_turn_tokens - written)
        columns[:, slot] = episode.known[-1], episode.task.number, len(episode.ids), written, room
    return Plan(*(jnp.asarray(column) for column in columns))

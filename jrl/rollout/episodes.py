# SPDX-License-Identifier: Apache-2.0
"""Episodes: the policy writes a turn, its environment answers, and so on until one of them or a limit ends it.

Ids that were sampled are the ids that are trained on: nothing is ever encoded again. What an environment says is
encoded once, as text that goes on from another one, and read into the cache that the turns before have left. Rows at
different turns share calls; where an episode is over, the next one takes its slot.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.data.batching import bucket_length
from jrl.data.prompts import PromptSet
from jrl.data.seam import continuations
from jrl.placement import place_rows
from jrl.rollout.collect import Call, Clock, Collector, Follow
from jrl.rollout.environments import EnvironmentFailure, World
from jrl.rollout.gathering import Part
from jrl.rollout.sampler import GenerationSettings, check_successors
from jrl.rollout.text import Texts, Turn, decode_rows
from jrl.rollout.turns import Plan, TurnPrograms
from jrl.typing import Completions, Frozen, Params, PolicyFns, PRNGKey
from jrl.typing.language import shares_columns

WRITE_TOKENS = 32
"""Most tokens that slots write between two looks of the host: a turn that is longer goes on in the next call."""
CONTEXT_TOKENS = 16
"""Tokens before a turn that its text is decoded behind: a sentencepiece turn alone would lose its first space."""
KEPT_CHARACTERS = 2000
"""Of an observation that is too long to be read."""
CHARACTERS_A_TOKEN = 64
"""An observation with more characters for each token that there is room for is too long, without being encoded."""


class Task(NamedTuple):
    """An episode to be played.

    Attributes:
      number: Of the row: what is random of its samples depends on it and on the key alone.
      prompt: Ids of the prompt.
      begin: Makes its world.
    """

    number: int
    prompt: list[int]
    begin: Callable[[], World]


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
      held: Tokens of it in the cache.
      valid: How many of them, from the first one on, it still has: those behind were taken back.
      turn_start: Place of the turn at hand among the ids.
      world: Of this episode, once it has begun.
    """

    task: Task
    ids: list[int] = field(default_factory=list)
    actions: list[bool] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    done: bool = False
    failure: str | None = None
    over: bool = False
    held: int = 0
    valid: int = 0
    turn_start: int = 0
    world: World | None = None

    @property
    def known(self) -> list[int]:
        """Prompt and all that follows."""
        return self.task.prompt + self.ids

    def begin(self) -> str:
        """Makes the world and returns what it says first; a world that fails ends the episode."""
        try:
            self.world = self.task.begin()
        except EnvironmentFailure as error:
            self.fail(str(error))
            return ""
        return self.world.observation

    def write(self, ids: Sequence[int], logprobs: Sequence[float]) -> None:
        """Adds what the policy wrote, which the cache holds but for its newest token."""
        self.ids += ids
        self.actions += [True] * len(ids)
        self.logprobs += logprobs
        self.held += len(ids)
        self.valid = self.held

    def end_turn(self, output: str, num_tokens: int) -> str:
        """Cuts the turn to so many tokens, lets the world answer it, and returns what it says.

        Args:
          output: Text of the turn.
          num_tokens: Of the turn.
        """
        assert self.world is not None, "it was begun"
        self.cut(self.turn_start + num_tokens)
        turn = Turn(output=output, reward=0.0, observation="", start=self.turn_start, end=len(self.ids))
        self.turns.append(turn)
        try:
            answer = self.world.step(output, self.ids[self.turn_start :])
        except EnvironmentFailure as error:
            self.fail(f"turn {len(self.turns) - 1}: {error}")
            return ""
        turn["observation"], turn["reward"] = answer.observation, answer.reward
        self.done = answer.done
        if self.done:
            self.end()
        return answer.observation

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

    def catch_up(self) -> tuple[int, list[int]]:
        """Tokens that the cache must forget, and ids that it must read, to hold all but the newest token."""
        known = self.known
        good = min(self.valid, len(known) - 1)
        too_many, unread = self.held - good, known[good:-1]
        self.held = self.valid = len(known) - 1
        return too_many, unread


def _no_template(text: str, role: str) -> str:
    raise ValueError(f"`environment.role` is {role!r}, and there is no chat template to write it.")


class Player:
    """Plays episodes on a number of slots of one model.

    Args:
      policy: A causal model.
      tokenizer: Of the model.
      mesh: Of the model.
      stop_sequences: Texts that end a turn.
      forbidden: A transition mask, as `check_logit_mask` gives it.
      reply: `(observation, role) -> text` between two turns, as a chat template writes it.
      workers: Worlds that may answer at the same time.
    Raises:
      ValueError: If there are several processes, or the model is none that goes on from turn to turn.
    """

    def __init__(
        self,
        policy: PolicyFns,
        tokenizer: Any,
        mesh: Mesh,
        stop_sequences: Sequence[str] = (),
        forbidden: jax.Array | None = None,
        reply: Callable[[str, str], str] = _no_template,
        workers: int = 1,
    ) -> None:
        if policy.own_columns is shares_columns:
            raise ValueError(
                "`environment` needs a causal language model: a turn of a seq2seq model does not go on."
            )
        if jax.process_count() > 1:
            raise ValueError(
                f"Episodes are played in one process, got {jax.process_count()}: environments of several processes "
                "cannot share calls yet. Run one process, with all its devices in one mesh."
            )
        self._policy, self._tokenizer, self._mesh, self._forbidden = policy, tokenizer, mesh, forbidden
        self._reply = reply
        self._threads = None
        if workers > 1:
            self._threads = ThreadPoolExecutor(workers, thread_name_prefix="environment")
        self._stop_sequences = tuple(stop_sequences)
        self._stop_ids = _ids_with(tokenizer, self._stop_sequences)
        self._programs: dict[Any, TurnPrograms] = {}

    def programs(self, settings: GenerationSettings, num_slots: int, length: int) -> TurnPrograms:
        """The compiled programs for these settings and sizes, made on first use; knobs are theirs to be given.

        Raises:
          ValueError: If the settings, beside a transition mask, leave nothing to draw.
        """
        steered = None if settings.beta is None else 0.0
        static = replace(
            settings, temperature=1.0, top_p=1.0, beta=steered, max_turns=None, max_turn_tokens=None
        )
        if (static, num_slots, length) not in self._programs:
            if self._forbidden is not None:
                check_successors(np.asarray(self._forbidden), settings)
            self._programs[static, num_slots, length] = TurnPrograms(
                self._policy,
                self._mesh,
                static,
                num_slots=num_slots,
                length=length,
                num_tokens=min(WRITE_TOKENS, settings.max_new_tokens),
                end_token_ids=tuple(sorted({*settings.eos_token_id, *self._stop_ids})),
            )
        return self._programs[static, num_slots, length]

    def play(
        self,
        params: Params,
        frozen: Frozen,
        tasks: Sequence[Task],
        settings: GenerationSettings,
        key: PRNGKey,
        *,
        num_slots: int,
        prompt_width: int | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        clock: Clock = lambda name: nullcontext(),
    ) -> list[Episode]:
        """Plays all episodes.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          tasks: The episodes.
          settings: How to sample; `max_new_tokens` counts all behind a prompt, observations included.
          key: Of the collection.
          num_slots: Episodes that are played together.
          prompt_width: Room for prompts, which programs are compiled for; None: as these need.
          meanwhile: Called once the first turns are on their way: the host is free then.
          clock: Measures `rollout` (waiting for samples) and `environment`.
        Returns:
          The episodes, in the order of the tasks.
        """
        width = prompt_width or bucket_length(max(len(task.prompt) for task in tasks))
        programs = self.programs(settings, num_slots, width + settings.max_new_tokens)
        knobs = settings.knobs._replace(forbidden=self._forbidden)
        weights = programs.weights(params, frozen)
        cache = programs.start(weights)
        waiting, found = deque(Episode(task) for task in tasks), list[Episode]()
        slots: list[Episode | None] = [None] * num_slots
        left = np.zeros(num_slots, np.int64)  # tokens that a slot holds of an episode that is over
        while True:
            with clock("environment"):
                self._fill(slots, waiting, found, settings)
            active = {slot: episode for slot, episode in enumerate(slots) if episode is not None}
            if not active:
                break
            cache = self._catch_up(programs, weights, cache, active, left)
            plan = _plan(active, num_slots, settings)
            least = max(1, len(active) // 2)
            cache, written = programs.write(weights, cache, plan, knobs, key, least_running=least)
            meanwhile()
            meanwhile = lambda: None  # noqa: E731
            with clock("rollout"):
                tokens, logprobs, lengths = jax.device_get(written)
            for slot, episode in active.items():
                count = int(lengths[slot])
                episode.write(tokens[slot, :count].tolist(), logprobs[slot, :count].tolist())
            with clock("environment"):
                self._answer(list(active.values()), settings)
            for slot, episode in active.items():
                if episode.over:
                    slots[slot], left[slot] = None, episode.held
        return found

    def _fill(
        self,
        slots: list[Episode | None],
        waiting: deque[Episode],
        found: list[Episode],
        settings: GenerationSettings,
    ) -> None:
        """Begins the next episodes in the slots that are free."""
        while waiting and None in slots:
            begun = [waiting.popleft() for _ in range(min(slots.count(None), len(waiting)))]
            found += begun
            for episode, said in zip(begun, self._together(Episode.begin, begun), strict=True):
                self._observe(episode, said, settings)
                if not episode.over:
                    slots[slots.index(None)] = episode

    def _catch_up(
        self,
        programs: TurnPrograms,
        weights: Any,
        cache: Any,
        active: Mapping[int, Episode],
        left: np.ndarray,
    ) -> Any:
        """The cache with all of each episode but its newest token."""
        counts, unread = np.zeros(programs.num_slots, np.int64), dict[int, list[int]]()
        for slot, episode in active.items():
            too_many, ids = episode.catch_up()
            counts[slot], left[slot] = left[slot] + too_many, 0
            if ids:
                unread[slot] = ids
        if counts.any():
            cache = programs.forget(cache, counts)
        return programs.read(weights, cache, unread)

    def _answer(self, episodes: Sequence[Episode], settings: GenerationSettings) -> None:
        """Ends the turns that are over, and lets the environments answer them."""
        texts = self._texts_of_turns(episodes, settings)
        most = settings.max_turn_tokens or settings.max_new_tokens

        def is_over(row: int) -> bool:
            ids = texts.output_tokens[row]
            full = episodes[row].turn_start + len(ids) >= settings.max_new_tokens
            ended = bool(texts.stopped[row]) or ids[-1] in settings.eos_token_id
            return ended or full or len(ids) >= most

        def answer(row: int) -> str:
            return episodes[row].end_turn(texts.outputs[row], len(texts.output_tokens[row]))

        rows = [row for row in range(len(episodes)) if is_over(row)]
        for row, said in zip(rows, self._together(answer, rows), strict=True):
            episode = episodes[row]
            full = len(episode.ids) >= settings.max_new_tokens
            if full or (settings.max_turns is not None and len(episode.turns) >= settings.max_turns):
                episode.end()
            self._observe(episode, said, settings)

    def _together(self, work: Callable[[Any], Any], rows: Sequence[Any]) -> Iterator[Any]:
        """Results of some rows, in their order, by as many threads as there are worlds that may answer together."""
        return map(work, rows) if self._threads is None else self._threads.map(work, rows)

    def _texts_of_turns(self, episodes: Sequence[Episode], settings: GenerationSettings) -> Texts:
        """Texts of the turns at hand, cut at the first stop string."""
        contexts = [
            (episode.task.prompt + episode.ids[: episode.turn_start])[-CONTEXT_TOKENS:]
            for episode in episodes
        ]
        rows = [episode.ids[episode.turn_start :] for episode in episodes]
        return decode_rows(
            self._tokenizer,
            contexts,
            [np.asarray(row) for row in rows],
            np.asarray([len(row) for row in rows]),
            eos_token_ids=settings.eos_token_id,
            stop_sequences=self._stop_sequences,
        )

    def _observe(self, episode: Episode, text: str, settings: GenerationSettings) -> None:
        """Appends what an environment said; where it leaves no room for an action, the episode is cut."""
        if episode.over:
            return
        room = settings.max_new_tokens - len(episode.ids)
        encoded = [] if len(text) > CHARACTERS_A_TOKEN * room else self._encoded(episode, text)
        if len(text) > CHARACTERS_A_TOKEN * room or len(encoded) >= room:
            episode.leave_no_room(text)
        else:
            episode.observe(encoded)

    def _encoded(self, episode: Episode, text: str) -> list[int]:
        """Ids of an observation, behind those that the episode has."""
        assert episode.world is not None, "it was begun"
        role = episode.world.role
        if role is not None and text and not episode.turns:
            raise ValueError(
                f"`environment.reset` must return no text where `environment.role` is {role!r}: it would stand in the "
                "policy's turn. Write it into the prompt."
            )
        if role is not None and episode.turns:
            text = self._reply(text, role)
        if not text:
            return []
        (encoded,) = continuations(self._tokenizer, [text])
        # The template ends the turn before; where the policy did that itself, it stands there already.
        has_ended = role is not None and episode.ids and encoded[:1] == episode.ids[-1:]
        return encoded[1:] if has_ended else encoded


@dataclass(frozen=True)
class EpisodeCollector(Collector):
    """Plays an episode for each prompt; all else is as in `Collector`.

    Attributes:
      player: Plays.
      environment: The user's.
    """

    player: Player = field(kw_only=True)
    environment: Any = field(kw_only=True)

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
    ) -> Iterator[tuple[Call, Part]]:
        """Episodes call by call, as `Collector.parts` gives completions; all are played before the first comes."""
        total, rows_of_call = len(indices), self._rows_of_call(len(indices))
        columns = prompts.width(indices) if width is None else width
        batch = prompts.rows(indices, width=columns)
        metadata = prompts.metadata(indices)
        texts = [self.tokenizer.decode(ids, skip_special_tokens=True) for ids in batch.token_lists]

        chance = [int(word) for word in np.asarray(jax.random.key_data(key)).reshape(-1)]

        def task(row: int) -> Task:
            own = {name: column[row] for name, column in metadata.items()}
            seed = _seed(chance, (first + row) // self.num_generations)
            begin = lambda: World(self.environment, texts[row], own, seed)  # noqa: E731
            return Task(first + row, batch.token_lists[row], begin)

        tasks = [task(row) for row in range(total)]
        episodes = self.player.play(params, frozen, tasks, settings, key, num_slots=rows_of_call, clock=clock)
        for start in range(0, total, rows_of_call):
            count = min(rows_of_call, total - start)
            numbers = np.arange(start, start + rows_of_call) % total
            rows = [episodes[number] for number in numbers]
            prompt = prompts.rows(indices[numbers[:: self.num_generations]], width=columns)
            inputs = place_rows(self.mesh, prompt.inputs)
            completions = self._completions(rows, settings)
            followed = None if follow is None else follow(inputs, completions)
            with clock("decode"):
                part = Part(numbers[:count], self._texts(rows[:count], settings, prompts.separator))
            yield Call(prompt, count, completions, followed), part

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
        done = np.asarray([episode.done for episode in episodes])
        # NumPy stands where jax arrays are declared.
        arrays: Any = (tokens, lengths, done, logprobs, actions)
        found: Completions = place_rows(self.mesh, Completions(*arrays))
        return found

    def _texts(
        self, episodes: Sequence[Episode], settings: GenerationSettings, separator: str | None
    ) -> Texts:
        """Texts of whole episodes, with their turns."""
        found = decode_rows(
            self.tokenizer,
            [episode.task.prompt for episode in episodes],
            [np.asarray(episode.ids, np.int32) for episode in episodes],
            np.asarray([len(episode.ids) for episode in episodes]),
            eos_token_ids=settings.eos_token_id,
            separator=separator,
        )
        return replace(
            found,
            stopped=np.asarray([episode.done for episode in episodes]),
            turns=[episode.turns for episode in episodes],
            failures=[episode.failure for episode in episodes],
        )


def environment(
    turns: Sequence[Sequence[Turn]],
    failures: Sequence[str | None],
    output_tokens: Sequence[Sequence[int]],
) -> list[Any]:
    """Rewards of the environment as a reward function gives them: of each token, the turn's on its last action.

    Args:
      turns: Of each episode.
      failures: What an environment failed with.
      output_tokens: All ids behind each prompt.
    Returns:
      One list a row; an `EnvironmentFailure` where the environment failed.
    """
    found: list[Any] = []
    for played, failure, ids in zip(turns, failures, output_tokens, strict=True):
        if failure is not None:
            found.append(EnvironmentFailure(failure))
            continue
        rewards = [0.0] * len(ids)
        for turn in played:
            rewards[turn["end"] - 1] += turn["reward"]
        found.append(rewards)
    return found


def recorded(tokenizer: Any, prompts: Sequence[Sequence[int]], texts: Texts) -> Iterator[dict[str, Any]]:
    """Episodes as data to learn from, one mapping each; those whose environment failed are left out.

    Args:
      tokenizer: Of the ids.
      prompts: Ids of each prompt.
      texts: What was played.
    """
    assert texts.turns is not None and texts.failures is not None, "they are episodes"
    for row, (prompt, turns) in enumerate(zip(prompts, texts.turns, strict=True)):
        ids = texts.output_tokens[row]
        if texts.failures[row] is not None or not turns:
            continue
        begun = [*prompt, *ids[: turns[0]["start"]]]
        stops = [*(turn["start"] for turn in turns[1:]), len(ids)]
        yield {
            "prompt": tokenizer.decode(begun, skip_special_tokens=True),
            "prompt_tokens": begun,
            "turns": [
                {
                    "output": tokenizer.decode(ids[turn["start"] : turn["end"]], skip_special_tokens=True),
                    "output_tokens": ids[turn["start"] : turn["end"]],
                    "reward": turn["reward"],
                    "observation": turn["observation"],
                    # The last one is not read: who learns from it encodes it.
                    **({"observation_tokens": ids[turn["end"] : stop]} if stop < len(ids) else {}),
                }
                for turn, stop in zip(turns, stops, strict=True)
            ],
            "done": bool(texts.stopped[row]),
        }


def episode_figures(texts: Texts) -> dict[str, float]:
    """Metrics of episodes: turns, actions, and how many their environment ended.

    Args:
      texts: At least one row.
    """
    assert texts.turns is not None, "they are episodes"
    return {
        "episode/turns": math.fsum(map(len, texts.turns)) / len(texts.turns),
        "episode/actions": math.fsum(map(len, texts.sampled())) / len(texts.turns),
        "episode/done_fraction": float(np.mean(texts.stopped)),
    }


def _plan(active: Mapping[int, Episode], num_slots: int, settings: GenerationSettings) -> Plan:
    """What each slot is to do."""
    columns = np.zeros((len(Plan._fields), num_slots), np.int32)
    for slot, episode in active.items():
        written = len(episode.ids) - episode.turn_start
        room = settings.max_new_tokens - len(episode.ids)
        if settings.max_turn_tokens is not None:
            room = min(room, settings.max_turn_tokens - written)
        columns[:, slot] = episode.known[-1], episode.task.number, len(episode.ids), written, room
    return Plan(*(jnp.asarray(column) for column in columns))


def _seed(chance: Sequence[int], number: int) -> int:
    """Seed of a prompt's worlds: a function of the collection's key and the prompt's number in it."""
    return int(np.random.SeedSequence([*chance, number]).generate_state(1)[0])


def _ids_with(tokenizer: Any, texts: Sequence[str]) -> frozenset[int]:
    """Ids of the vocabulary whose text holds one of some texts: whichever of them is written, the turn is over."""
    if not texts:
        return frozenset()
    ids = range(len(tokenizer))
    decoded = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    return frozenset(i for i, text in zip(ids, decoded, strict=True) if any(stop in text for stop in texts))

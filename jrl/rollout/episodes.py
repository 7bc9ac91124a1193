# SPDX-License-Identifier: Apache-2.0
"""Episodes: the policy writes a turn, its environment answers, and so on until one of them or a limit ends it.

Ids that were sampled are the ids that are trained on: nothing is ever encoded again. What an environment says is
encoded once, as text that goes on from another one, and read into the cache that the turns before have left. Rows at
different turns share calls; where an episode is over, the next one takes its slot. A completion is an episode of one
turn that nothing answers, so that rows of many lengths share slots without an environment, too.

Several processes play the same episodes on slots over all their devices. Each knows all that is sampled, and does the
same with it; only what worlds say is asked in one process, and told the others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.data.batching import bucket_length
from jrl.data.seam import continuations
from jrl.distributed import gather
from jrl.ops.checks import check_positive
from jrl.placement import local_computation
from jrl.rollout.collect import Clock
from jrl.rollout.environments import EnvironmentFailure
from jrl.rollout.episode import Episode, Said, Task
from jrl.rollout.sampler import GenerationSettings, check_successors
from jrl.rollout.slots import Slots
from jrl.rollout.text import Texts, Turn, decode_rows
from jrl.rollout.turns import TurnPrograms
from jrl.typing import Frozen, Params, PolicyFns, PRNGKey
from jrl.typing.language import shares_columns

TAIL_SHARE, FEWEST_SLOTS = 4, 4
"""Once no episode waits, and this share of the slots is enough for those that go on, they go on in so many slots alone.
The second number is the fewest. A step of GPT-2 on two CPU cores takes 0.4 times as long with 8 rows as with 32."""
WRITE_TOKENS = 32
"""Most tokens that slots write between two looks of the host: a turn that is longer goes on in the next call."""
CONTEXT_TOKENS = 16
"""Tokens before a turn that its text is decoded behind: a sentencepiece turn alone would lose its first space."""
CHARACTERS_A_TOKEN = 64
"""An observation with more characters for each token that there is room for is too long, without being encoded."""


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
      ValueError: If the model is none that goes on from turn to turn.
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
                "`environment` and `method.rollout_slots` need a causal language model, got an encoder-decoder "
                "(seq2seq). Set `model.model_path` to a decoder, such as gpt2, and `model.model_arch_type: causal`. "
                "Or leave them out: one completion a prompt, judged by `reward_fn`, is served."
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
        clock: Clock = lambda name: nullcontext(),
    ) -> list[Episode]:
        """Plays all episodes, and returns them in the order of the tasks. Arguments as of `playing`."""
        episodes = [Episode(task) for task in tasks]
        width = prompt_width or bucket_length(max(len(task.prompt) for task in tasks))
        playing = self.playing(
            params, frozen, episodes, settings, key, num_slots=num_slots, prompt_width=width, clock=clock
        )
        deque(playing, maxlen=0)
        return episodes

    def playing(
        self,
        params: Params,
        frozen: Frozen,
        episodes: Sequence[Episode],
        settings: GenerationSettings,
        key: PRNGKey,
        *,
        num_slots: int,
        prompt_width: int,
        clock: Clock = lambda name: nullcontext(),
    ) -> Iterator[None]:
        """Plays episodes; yields whenever slots write, for then the host is free. In the end all are over.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          episodes: Which have not begun.
          settings: How to sample; `max_new_tokens` counts all behind a prompt, observations included.
          key: Of the collection.
          num_slots: Episodes that are played together.
          prompt_width: Room for prompts, which programs are compiled for.
          clock: Measures `rollout` (waiting for samples) and `environment`, or `decode` where nothing answers.
        Raises:
          ValueError: If an episode's limit is not positive.
        """
        for episode in episodes:
            check_positive("limit", episode.room(settings))
        length = prompt_width + settings.max_new_tokens
        knobs = settings.knobs._replace(forbidden=self._forbidden)
        slots = Slots.empty(self.programs(settings, num_slots, length), params, frozen)
        waiting = deque(episodes)
        answers = any(episode.plays for episode in episodes)
        host = "environment" if answers else "decode"
        while True:
            with clock(host):
                begun = self._begin(slots.episodes.count(None), waiting, settings)
            slots.seat(begun, prompt_width)
            running = len(slots.active)
            if not running:
                return
            fewer = len(slots.episodes) // TAIL_SHARE
            may_shrink = not waiting and fewer >= FEWEST_SLOTS and not slots.programs.is_split
            if may_shrink and running <= fewer:
                slots = slots.fewer(self.programs(settings, fewer, length))
                may_shrink = False
            slots.catch_up()
            if answers:
                least = running // 2
            elif waiting:
                least = running - slots.programs.most_begun + 1
            else:
                least = fewer + 1 if may_shrink else 1
            written = slots.write(settings, knobs, key, max(1, least))
            yield
            with clock("rollout"):
                tokens, logprobs, lengths = jax.device_get(written)
            active = slots.active
            for slot, episode in active.items():
                count = int(lengths[slot])
                slots.held[slot] += count
                episode.write(tokens[slot, :count].tolist(), logprobs[slot, :count].tolist())
            with clock(host):
                self._answer(list(active.values()), settings)
            slots.release()

    def _begin(self, num_free: int, waiting: deque[Episode], settings: GenerationSettings) -> list[Episode]:
        """Begins the next episodes, until as many go on as there are free slots, and returns these."""
        found: list[Episode] = []
        while waiting and len(found) < num_free:
            begun = [waiting.popleft() for _ in range(min(num_free - len(found), len(waiting)))]
            played = [episode for episode in begun if episode.plays]
            for episode, said in zip(played, self._told(Episode.make_world, played), strict=True):
                episode.begin(said)
                self._observe(episode, said.text, settings)
            found += [episode for episode in begun if not episode.over]
        return found

    def _answer(self, episodes: Sequence[Episode], settings: GenerationSettings) -> None:
        """Ends the turns that are over, and lets the environments answer them."""
        most = settings.max_turn_tokens or settings.max_new_tokens

        def is_full(episode: Episode) -> bool:
            ended = episode.ids[-1] in settings.eos_token_id
            return ended or episode.room(settings) <= 0 or len(episode.ids) - episode.turn_start >= most

        if not self._stop_sequences:
            episodes = [episode for episode in episodes if is_full(episode)]
            for episode in episodes:
                if not episode.plays:
                    episode.end()  # nobody asks for its text yet
        episodes = [episode for episode in episodes if not episode.over]
        if not episodes:
            return
        texts = self._texts_of_turns(episodes, settings)
        rows = [row for row, episode in enumerate(episodes) if texts.stopped[row] or is_full(episode)]

        for row in rows:
            episodes[row].end_turn(texts.outputs[row], len(texts.output_tokens[row]))
        ended = [episodes[row] for row in rows if episodes[row].plays]
        for episode, said in zip(ended, self._told(Episode.ask_world, ended), strict=True):
            episode.take_answer(said)
            full = episode.room(settings) <= 0
            if full or (settings.max_turns is not None and len(episode.turns) >= settings.max_turns):
                episode.end()
            self._observe(episode, said.text, settings)

    def _told(self, ask: Callable[[Episode], Said], episodes: Sequence[Episode]) -> list[Said]:
        """What the worlds of some episodes say, in every process: each asks its own, as many at a time as may answer.

        Raises:
          PeerError: In all of several processes, if asking failed in one of them with what is no failure of a world.
        """
        if not episodes:
            return []
        own = [number for number, episode in enumerate(episodes) if episode.task.is_own]
        run = map if self._threads is None else self._threads.map
        found, failure = dict[str, Said](), None
        try:
            with local_computation():  # a pool's threads have no mesh anyway
                found = {
                    str(number): said
                    for number, said in zip(own, run(ask, [episodes[number] for number in own]), strict=True)
                }
        except Exception as error:  # the others wait for an answer, whatever happened
            failure = error
        told = {
            number: said for word in gather(found, failure=failure) for number, said in word.plain.items()
        }
        return [Said(*told[str(number)]) for number in range(len(episodes))]

    def _texts_of_turns(self, episodes: Sequence[Episode], settings: GenerationSettings) -> Texts:
        """Texts of the turns at hand, cut at the first stop string; of completions behind their whole prompts."""
        contexts = [
            episode.task.prompt
            if not episode.plays
            else (episode.task.prompt + episode.ids[: episode.turn_start])[-CONTEXT_TOKENS:]
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
        room = episode.room(settings)
        encoded = [] if len(text) > CHARACTERS_A_TOKEN * room else self._encoded(episode, text)
        if len(text) > CHARACTERS_A_TOKEN * room or len(encoded) >= room:
            episode.leave_no_room(text)
        else:
            episode.observe(encoded)

    def _encoded(self, episode: Episode, text: str) -> list[int]:
        """Ids of an observation, behind those that the episode has."""
        role = episode.role
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


def _ids_with(tokenizer: Any, texts: Sequence[str]) -> frozenset[int]:
    """Ids of the vocabulary whose text holds one of some texts: whichever of them is written, the turn is over."""
    if not texts:
        return frozenset()
    ids = range(len(tokenizer))
    decoded = tokenizer.batch_decode([[i] for i in ids], clean_up_tokenization_spaces=False)
    return frozenset(i for i, text in zip(ids, decoded, strict=True) if any(stop in text for stop in texts))

# SPDX-License-Identifier: Apache-2.0
"""Completions on slots: the same as the sampler's, whichever row ends first, and judged while others are written."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.prompts import PromptSet
from jrl.mesh import make_mesh
from jrl.models.model import make_model
from jrl.rollout.collect import Collected, Collector
from jrl.rollout.episode import Episode, Task
from jrl.rollout.episodes import Player
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.sampler import GenerationSettings, Sampler, check_logit_mask
from jrl.rollout.slot_collector import SlotCollector
from jrl.rollout.turns import TurnPrograms
from jrl.trainers.loop.stopwatch import CompileCounter
from jrl.typing import ModelInputs
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_hf_config, tiny_policy, tiny_tokenizer

MESH = make_mesh(1, 1, 1, devices=jax.devices()[:1])
TEXTS = ["a b", "the cat sat", "x", "dog ran off", "so it goes", "who", "rain falls here"]
TOKENS = 40


def settings(**more: Any) -> GenerationSettings:
    options = {"max_new_tokens": TOKENS} | more
    return GenerationSettings(eos_token_id=(EOS_ID,), pad_token_id=PAD_ID, **options)


@functools.cache
def prompts() -> PromptSet:
    return PromptSet(TEXTS, tiny_tokenizer(), max_length=16, seed=0, long_prompts="error")


@functools.cache
def forbidden() -> jax.Array | None:
    """Only every third id may follow one, and the EOS."""
    ids = np.arange(VOCAB_SIZE)
    mask = ((ids[:, None] + ids[None, :]) % 3 != 0) & (ids != EOS_ID)[None, :]
    return check_logit_mask(mask, VOCAB_SIZE)


class Judge:
    """Keeps what it is asked, batch by batch, and what the clock of the writes was then."""

    def __init__(self) -> None:
        self.batches: list[list[str]] = []
        self.times: list[int] = []
        self.writes = 0

    def __call__(self, outputs: list[str], **others: Any) -> list[float]:
        del others
        self.batches.append(outputs)
        self.times.append(self.writes)
        return [float(sum(letter in "aeiou" for letter in text)) for text in outputs]


def reward_call(judge: Judge) -> RewardCall:
    return RewardCall(judge, tiny_tokenizer(), skip_errors=False, timeout=None, failures=Path("unused"))


def collected(
    slots: int | None,
    *,
    stops: Sequence[str] = (),
    mask: bool = False,
    samples: int = 1,
    chunk_size: int = 6,
    judge: Judge | None = None,
    family: str = "llama",
    **options: Any,
) -> tuple[Collected, Judge]:
    """Two or three samples of each prompt, by the sampler (no slots) or on slots."""
    policy, params, frozen, _ = tiny_policy(family)
    judge = judge or Judge()
    parts = (
        Sampler(policy, forbidden=forbidden() if mask else None, mesh=MESH),
        tiny_tokenizer(),
        stops,
        MESH,
    )
    given: dict[str, Any] = dict(rewards=reward_call(judge), num_generations=samples, chunk_size=chunk_size)
    if slots is None:
        collect = Collector(*parts, **given)
    else:
        player = Player(policy, tiny_tokenizer(), MESH, stops, forbidden=forbidden() if mask else None)
        collect = SlotCollector(*parts, **given, player=player, slots=slots)
    indices = np.repeat(np.arange(len(TEXTS)), max(samples, 2))
    found = collect(
        params,
        frozen,
        prompts(),
        indices,
        settings(**options),
        jax.random.key(3),
        label="test",
        first=5,
        follow=lambda inputs, completions: None,
    )
    return found, judge


@functools.cache
def ordinary(**options: Any) -> tuple[Collected, Judge]:
    return collected(None, **options)


CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "groups": {"samples": 3},
    "stop strings": {"stops": ("e", "ab", "  ")},
    "a mask": {"mask": True},
    "at least eight tokens": {"min_new_tokens": 8},
    "filters": {"top_k": 20, "top_p": 0.9, "temperature": 0.7, "suppress_tokens": (9, 10)},
    "greedy": {"do_sample": False},
    # States sum up all that a slot has read: what is taken back, or held by another slot for long, is read again.
    "states": {"family": "qwen3_5_text", "samples": 3, "stops": ("e", "ab", "  ")},
}


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if case == "states" else []) for case in CASES]
)
def test_slots_write_what_the_sampler_does(case):
    options = CASES[case]
    (expected, asked), (found, judge) = ordinary(**options), collected(5, **options)
    assert found.texts.output_tokens == expected.texts.output_tokens
    assert found.texts.outputs == expected.texts.outputs and found.texts.prompts == expected.texts.prompts
    assert found.texts.stopped.tolist() == expected.texts.stopped.tolist()
    assert len(set(found.texts.lengths.tolist())) > 2, "rows are of many lengths"
    assert judge.batches == asked.batches, "rewards are asked for in the same batches"
    np.testing.assert_array_equal(found.rewards, expected.rewards)
    starts = range(0, len(found.texts.lengths), 6)
    for start, mine, other in zip(starts, found.calls, expected.calls, strict=True):
        assert mine.count == other.count and mine.completions.actions is None
        np.testing.assert_array_equal(mine.batch.inputs.tokens, other.batch.inputs.tokens)
        for row in range(mine.count):
            length = int(mine.completions.lengths[row])
            np.testing.assert_array_equal(
                mine.completions.tokens[row, :length], other.completions.tokens[row, :length]
            )
            assert (np.asarray(mine.completions.tokens[row, length:]) == PAD_ID).all()
            np.testing.assert_allclose(
                mine.completions.logprobs[row, :length], other.completions.logprobs[row, :length], atol=1e-5
            )
            if options.get("stops"):
                assert length == found.texts.lengths[row + start]
            else:
                assert mine.completions.terminated[row] == other.completions.terminated[row]
                assert length == other.completions.lengths[row]


@pytest.mark.parametrize("slots", [1, 16])
def test_they_depend_neither_on_the_number_of_slots_nor_on_the_rows_of_a_call(slots):
    expected, _ = ordinary()
    found, _ = collected(slots, chunk_size=4)
    assert found.texts.output_tokens == expected.texts.output_tokens


def test_the_last_rows_go_on_in_fewer_slots(monkeypatch):
    """16 slots, and 4 for the tail."""
    taken: list[int] = []
    take = TurnPrograms.take
    monkeypatch.setattr(
        TurnPrograms, "take", lambda self, cache, slots: taken.append(len(slots)) or take(self, cache, slots)
    )
    found, _ = collected(16, samples=3)
    assert taken == [4] and found.texts.output_tokens == ordinary(samples=3)[0].texts.output_tokens


def test_a_prompt_is_read_once_for_its_samples(monkeypatch):
    """But for those whose slots were all taken before its last sample began."""
    read: list[int] = []
    begin = TurnPrograms.begin

    def counted(self: Any, weights: Any, cache: Any, texts: dict[int, list[int]], width: int) -> Any:
        read.append(len(texts))
        return begin(self, weights, cache, texts, width)

    monkeypatch.setattr(TurnPrograms, "begin", counted)
    found, _ = collected(5, samples=3)
    assert found.texts.output_tokens == ordinary(samples=3)[0].texts.output_tokens
    assert len(TEXTS) <= sum(read) < 1.5 * len(TEXTS)
    read.clear()
    collected(len(TEXTS) * 3, samples=3, chunk_size=len(TEXTS) * 3)
    assert sum(read) == len(TEXTS)


def test_rewards_are_asked_for_while_others_are_written(monkeypatch):
    judge, write = Judge(), TurnPrograms.write

    def counted(self: Any, *given: Any, **options: Any) -> Any:
        judge.writes += 1
        return write(self, *given, **options)

    monkeypatch.setattr(TurnPrograms, "write", counted)
    collected(2, chunk_size=2, judge=judge)
    assert judge.times == sorted(judge.times) and judge.times[0] < judge.writes / 3
    assert sum(time < judge.writes for time in judge.times) >= len(judge.times) - 2


def player_of(family: str = "llama", **options: Any) -> tuple[Player, Any, Any]:
    policy, params, frozen, _ = tiny_policy(family)
    return Player(policy, tiny_tokenizer(), MESH, **options), params, frozen


def tasks(limits: Sequence[int | None]) -> list[Task]:
    return [Task(row, [5 + row, 6, 7][: 1 + row % 3], limit=limit) for row, limit in enumerate(limits)]


LIMITS = [3, 40, 1, 7, 12, 2, 30, 5]


def played(
    limits: Sequence[int | None], slots: int = 3, *, given: GenerationSettings | None = None
) -> list[Episode]:
    """Rows of these limits; unless settings say otherwise, nothing else ends them."""
    player, params, frozen = player_of()
    given = given or settings(min_new_tokens=TOKENS)
    return player.play(params, frozen, tasks(limits), given, jax.random.key(0), num_slots=slots)


class TestLimits:
    def test_each_row_has_its_own(self):
        whole, found = played([None] * len(LIMITS)), played(LIMITS)
        assert [len(episode.ids) for episode in found] == LIMITS
        for long, short, limit in zip(whole, found, LIMITS, strict=True):
            assert long.ids[:limit] == short.ids

    def test_the_sampler_knows_them_too(self):
        """With many ids that end a row, the pad among them: what follows a limit is no end."""
        policy, params, frozen, _ = tiny_policy("llama")
        rows = [task.prompt for task in tasks(LIMITS)]
        tokens = np.stack([np.pad(row, (3 - len(row), 0)) for row in rows])
        mask = np.stack([np.arange(3) >= 3 - len(row) for row in rows])
        ends = tuple(range(EOS_ID, EOS_ID + 8))
        given = GenerationSettings(max_new_tokens=TOKENS, eos_token_id=ends, pad_token_id=EOS_ID)
        knobs = given.knobs._replace(limits=jnp.asarray(LIMITS))
        program = Sampler(policy).program(given, len(rows))
        inputs = ModelInputs(jnp.asarray(tokens), jnp.asarray(mask))
        found = program(params, frozen, inputs, jnp.arange(len(rows)), knobs, jax.random.key(0))
        episodes = played(LIMITS, given=given)
        lengths = [len(episode.ids) for episode in episodes]
        assert found.lengths.tolist() == lengths and lengths != LIMITS
        assert found.terminated.tolist() == [episode.ids[-1] in ends for episode in episodes]
        assert 0 < np.sum(found.terminated) < len(rows)
        for row, episode in enumerate(episodes):
            assert found.tokens[row, : lengths[row]].tolist() == episode.ids
            assert (np.asarray(found.tokens[row, lengths[row] :]) == EOS_ID).all()
            assert (np.asarray(found.logprobs[row, lengths[row] :]) == 0).all()

    def test_one_that_leaves_no_token_is_refused(self):
        with pytest.raises(ValueError, match="limit"):
            played([3, 0])


def test_another_collection_compiles_nothing():
    player, params, frozen = player_of()
    for number in range(3):
        with CompileCounter() as counter:
            given = tasks([number + 1 + row % 9 for row in range(30)])
            player.play(
                params, frozen, given, settings(), jax.random.key(number), num_slots=16, prompt_width=8
            )
    assert counter.count == 0
    many, few = player._programs.values()
    assert many._begin._cache_size() == many._write._cache_size() == few._write._cache_size() == 1


class TestRefusals:
    def test_a_penalty_of_tokens_that_a_row_has(self):
        player, params, frozen = player_of()
        with pytest.raises(ValueError, match=r"`repetition_penalty` must be 1 .* `method\.rollout_slots`"):
            player.play(
                params,
                frozen,
                tasks([3]),
                settings(repetition_penalty=1.5),
                jax.random.key(0),
                num_slots=1,
            )

    def test_a_seq2seq_model(self):
        policy = make_model(tiny_hf_config("t5")).policy(num_layers_unfrozen=-1)
        with pytest.raises(ValueError, match=r"`method\.rollout_slots` need a causal language model"):
            Player(policy, tiny_tokenizer(), MESH)

# SPDX-License-Identifier: Apache-2.0
"""Rounds of sampling that replace groups without contrast: which prompts come, and what is drawn for them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.prompts import PromptSet
from jrl.learners import Selection
from jrl.mesh import make_mesh
from jrl.ops.rewards import overlong_penalty
from jrl.rollout.collect import Collector
from jrl.rollout.experience import Experience, ExperienceCollector
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.rewards import RewardError
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.trainers.loop.stopwatch import CompileCounter
from jrl.typing import SamplingRules
from tests.tiny import PAD_ID, tiny_policy, tiny_tokenizer

SIZE, WANTED = 2, 2
"""Samples of a prompt; prompts that an iteration learns from."""
TEXTS = ["a", "b b", "c", "d d d", "e", "f", "g" * 20]
ENDS: tuple[int, ...] = ()
"""Ids that end a completion; (): the tokenizer's alone."""
Reward = Callable[..., list[float]]


def solved_by_chance(*mixed: str) -> Reward:
    """1 and 0 in turn for these prompts, and 1 for all others."""

    def reward(prompts: list[str], outputs: list[str]) -> list[float]:
        del outputs
        return [float(row % 2 or prompt not in mixed) for row, prompt in enumerate(prompts)]

    return reward


@functools.cache
def model() -> tuple[Any, Any, Any, Sampler, Any]:
    """(policy, params, frozen, sampler, mesh), shared so that every shape is compiled once."""
    policy, params, frozen, _ = tiny_policy("gpt2", -1)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    return policy, params, frozen, Sampler(policy, mesh=mesh), mesh


def collector(
    reward: Reward | list[Reward],
    folder: Path,
    *,
    num_rollouts: int = WANTED * SIZE,
    compare_scores: bool = False,
    by_function: bool = False,
    missing_eos_penalty: float | None = None,
    **rules: Any,
) -> Any:
    policy, _, _, sampler, mesh = model()
    tokenizer = tiny_tokenizer()
    judged = RewardCall(reward, tokenizer, skip_errors=True, timeout=None, failures=folder)
    return ExperienceCollector(
        policy,
        Collector(sampler, tokenizer, (), mesh, 4, rewards=judged),
        PromptSet(TEXTS, tokenizer, max_length=32, seed=0, long_prompts="error"),
        GenerationSettings(
            max_new_tokens=5, eos_token_id=ENDS or (tokenizer.eos_token_id,), pad_token_id=PAD_ID
        ),
        num_rollouts=num_rollouts,
        num_generations=SIZE,
        logprob_chunk_bytes=1 << 20,
        missing_eos_penalty=missing_eos_penalty,
        sampling=SamplingRules(**({"mixed_only": True} | rules)),
        compare_scores=compare_scores,
        by_function=by_function,
    )


def collect(found: ExperienceCollector, *, first: int = 0, iteration: int = 0) -> Experience:
    _, params, frozen, _, mesh = model()
    with jax.set_mesh(mesh):
        return found(
            params,
            frozen,
            None,
            iteration,
            jax.random.key(5),
            first_prompt=first,
            while_sampling=lambda: None,
            stopwatch=lambda name: nullcontext(),
        )


def stream(first: int = 0, count: int = 21) -> list[str]:
    """Prompts as they come."""
    prompts = PromptSet(TEXTS, tiny_tokenizer(), max_length=32, seed=0, long_prompts="error")
    return [TEXTS[index] for index in prompts.order(np.arange(first, first + count))]


def learned(found: Experience) -> list[tuple[str, list[int]]]:
    """(prompt, tokens) of the rows that the batch has, by its own arrays."""
    sequences, tokenizer = found.rollouts.sequences, tiny_tokenizer()
    inputs, mask = jax.device_get((sequences.inputs, sequences.mask))
    starts = np.asarray(sequences.starts)
    rows = []
    for row in np.flatnonzero(mask.any(axis=1)):
        tokens = inputs.tokens[row][inputs.attention_mask[row]]
        begins = inputs.attention_mask[row][: starts[row] + 1].sum()
        prompt = tokenizer.decode(tokens[:begins], skip_special_tokens=True)
        rows.append((prompt, tokens[begins:].tolist()))
    return rows


MIXED = tuple(TEXTS[:3])


def expected(first: int, wanted: int = WANTED) -> tuple[list[str], int]:
    """Prompts that are learned from, one a completion, and how many are used up."""
    places = [place for place, text in enumerate(stream(first)) if text in MIXED][:wanted]
    return [stream(first)[place] for place in places for _ in range(SIZE)], places[-1] + 1


def test_lore_4_17_dropped_groups_are_refilled_in_order(tmp_path: Path) -> None:
    """The first mixed groups of the stream, wherever an iteration begins in it."""
    ask = collector(solved_by_chance(*MIXED), tmp_path, max_rounds=9)
    for first in (0, 1, 4, 5):
        found = collect(ask, first=first)
        prompts, used = expected(first)
        assert [prompt for prompt, _ in learned(found)] == prompts
        assert found.num_prompts == used and not found.degenerate
        shown = [row for row in found.rows if row["kept"]]
        assert [row["prompt"] for row in shown] == prompts
        assert [row["output_tokens"] for row in shown] == [tokens for _, tokens in learned(found)]
        metrics = found.metrics
        assert metrics["group/kept"] == WANTED and metrics["group/asked"] == len(found.rows) / SIZE
        assert metrics["group/asked"] == metrics["group/sampling_rounds"] * WANTED
        assert metrics["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in found.rows]))


def test_rows_have_their_own_figures(tmp_path: Path) -> None:
    """Rewards, log-probabilities and masks are those of the row that they stand in."""
    found = collect(collector(solved_by_chance(*MIXED), tmp_path, max_rounds=9))
    rollouts = jax.device_get(found.rollouts)
    shown = [row for row in found.rows if row["kept"]]
    np.testing.assert_array_equal(rollouts.rewards.sum(axis=1), [row["reward"] for row in shown])
    np.testing.assert_array_equal(
        rollouts.sequences.mask.sum(axis=1), [len(row["output_tokens"]) for row in shown]
    )
    mask = rollouts.sequences.mask
    np.testing.assert_allclose(rollouts.scored.logprobs[mask], rollouts.sampler_logprobs[mask], atol=1e-5)
    assert rollouts.groups.tolist() == [0, 0, 1, 1] and rollouts.kept is None


@pytest.mark.parametrize("per_round", [1, 2, 4])
def test_the_size_of_a_round_changes_nothing(per_round: int, tmp_path: Path) -> None:
    reward = solved_by_chance(*MIXED)
    plain = collect(collector(reward, tmp_path, max_rounds=9), first=3)
    other = collect(collector(reward, tmp_path, max_rounds=20, prompts_per_round=per_round), first=3)
    assert learned(other) == learned(plain) and other.num_prompts == plain.num_prompts
    np.testing.assert_allclose(other.rollouts.rewards, plain.rollouts.rewards)
    np.testing.assert_allclose(
        other.rollouts.scored.logprobs, plain.rollouts.scored.logprobs, rtol=1e-5, atol=1e-5
    )


def test_what_completes_a_prompt_depends_on_its_place_alone(tmp_path: Path) -> None:
    """Surplus is thrown away, and is the same when its turn comes, in another iteration and another round."""
    ask = collector(solved_by_chance(*MIXED), tmp_path, max_rounds=9, prompts_per_round=4)
    first = collect(ask, first=0)
    rows = {place: first.rows[place * SIZE : (place + 1) * SIZE] for place in range(4)}
    later = collect(ask, first=2, iteration=7)
    for place in (2, 3):
        again = later.rows[(place - 2) * SIZE : (place - 1) * SIZE]
        assert [row["output_tokens"] for row in again] == [row["output_tokens"] for row in rows[place]]
    assert later.rows[0]["output_tokens"] != later.rows[1]["output_tokens"]


def test_where_the_rounds_end_the_rest_stays_empty(tmp_path: Path) -> None:
    """One mixed prompt in seven: of two rounds of two prompts, one group or none is there to learn from."""
    only = stream()[1]
    found = collect(collector(solved_by_chance(only), tmp_path, max_rounds=2))
    assert [prompt for prompt, _ in learned(found)] == [only] * SIZE
    assert found.num_prompts == 4 and found.metrics["group/kept"] == 1
    mask, rewards = jax.device_get((found.rollouts.sequences.mask, found.rollouts.rewards))
    assert mask.any(axis=1).tolist() == [True, True, False, False] and not rewards[2:].any()
    logprobs = jax.device_get(found.rollouts.scored.logprobs)
    assert np.isfinite(logprobs).all()  # an empty row is no row of zeros, whose attention would be no number


def test_where_no_group_is_mixed_nothing_is_learned_from(tmp_path: Path) -> None:
    found = collect(collector(solved_by_chance(), tmp_path, max_rounds=3))
    assert found.degenerate and found.num_prompts == 6 and not learned(found)
    assert found.metrics["group/zero_std_fraction"] == 1 and found.metrics["reward/mean"] == 1


def test_the_limit_of_rounds_counts_rounds_of_any_size(tmp_path: Path) -> None:
    """Where it binds, smaller rounds reach less far: that alone of a round's size decides what is learned."""
    third = solved_by_chance(stream()[2])
    for per_round, texts in ((1, []), (2, [stream()[2]] * SIZE)):
        found = collect(collector(third, tmp_path, max_rounds=2, prompts_per_round=per_round))
        assert [prompt for prompt, _ in learned(found)] == texts and found.num_prompts == 2 * per_round


def test_nothing_is_compiled_anew_by_the_number_of_rounds(tmp_path: Path) -> None:
    ask = collector(solved_by_chance(*MIXED), tmp_path, max_rounds=9)
    collect(ask)
    with CompileCounter() as compilations:
        rounds = {collect(ask, first=first).metrics["group/sampling_rounds"] for first in range(5)}
    assert len(rounds) > 1 and compilations.count == 0


def test_a_failed_reward_makes_no_contrast_and_has_no_action(tmp_path: Path) -> None:
    """The second sample of each prompt has no reward: one score alone differs from none."""
    some = stream()[0]

    def reward(prompts: list[str], outputs: list[str]) -> list[float]:
        del outputs
        return [float("nan") if row % 2 and prompt != some else row % 2 for row, prompt in enumerate(prompts)]

    found = collect(collector(reward, tmp_path, max_rounds=1, prompts_per_round=3))
    assert [prompt for prompt, _ in learned(found)] == [some] * SIZE
    assert found.metrics["reward/failed"] == 2 and found.metrics["group/valid_mean"] == pytest.approx(4 / 3)
    assert found.metrics["reward/failed_fraction"] == pytest.approx(2 / 6)


class Outage:
    """A reward function that answers for so many prompts, of which the first alone is mixed, and fails from then on."""

    def __init__(self, num_prompts: int) -> None:
        self.left, self.asked = num_prompts * SIZE, 0

    def __call__(self, outputs: list[str]) -> list[float]:
        rows = range(self.asked, self.asked + len(outputs))
        self.asked += len(outputs)
        return [float(row > 0) if row < self.left else float("nan") for row in rows]


def test_a_reward_function_that_fails_on_all_is_asked_in_one_round(tmp_path: Path) -> None:
    reward = Outage(0)
    with pytest.raises(RewardError, match="No rollout of the iteration has a reward"):
        collect(collector(reward, tmp_path, max_rounds=9))
    assert reward.asked == WANTED * SIZE


@pytest.mark.parametrize(("per_round", "rounds"), [(1, 4), (2, 2), (4, 2)])
def test_an_outage_ends_the_rounds(per_round: int, rounds: int, tmp_path: Path) -> None:
    """As many prompts in a row as an iteration learns from, in whole rounds, and no reward for any."""
    reward = Outage(4 if per_round == 4 else 2)
    found = collect(collector(reward, tmp_path, max_rounds=20, prompts_per_round=per_round))
    assert found.metrics["group/sampling_rounds"] == rounds and reward.asked == rounds * per_round * SIZE
    assert [prompt for prompt, _ in learned(found)] == stream()[:1] * SIZE
    assert found.num_prompts == rounds * per_round and found.metrics["reward/failed_fraction"] == 0.5


def test_a_prompt_that_no_function_applies_to_is_no_outage(tmp_path: Path) -> None:
    """In rounds of one prompt, a round without a reward is not yet one."""
    spoken = [text for text in TEXTS if text != stream()[1]]

    def reward(prompts: list[str], outputs: list[str]) -> list[float]:
        del outputs
        return [float(row % 2) if prompt in spoken else float("nan") for row, prompt in enumerate(prompts)]

    found = collect(collector(reward, tmp_path, max_rounds=20, prompts_per_round=1))
    assert found.metrics["group/kept"] == WANTED and found.metrics["group/sampling_rounds"] == 3


def test_rounds_to_which_no_function_applies_are_no_outage(tmp_path: Path) -> None:
    """As many as an iteration learns from, at its beginning."""

    def reward(prompts: list[str], outputs: list[str]) -> list[float | None]:
        del outputs
        return [None if prompt in stream()[:WANTED] else float(row % 2) for row, prompt in enumerate(prompts)]

    found = collect(collector(reward, tmp_path, max_rounds=9))
    assert found.metrics["group/kept"] == WANTED and found.metrics["group/sampling_rounds"] == 2


class TestSilence:
    """An iteration taught nothing where scores alone are compared and those of every prompt are equal."""

    def test_equal_scores(self, tmp_path: Path) -> None:
        equal, mixed = solved_by_chance(), solved_by_chance(*TEXTS)
        rules = {"mixed_only": False, "compare_scores": True}
        assert collect(collector(equal, tmp_path, **rules)).degenerate
        assert not collect(collector(mixed, tmp_path, **rules)).degenerate
        assert not collect(collector(equal, tmp_path, mixed_only=False)).degenerate

    def test_what_shapes_a_score_is_not_in_the_raw_one(self, tmp_path: Path) -> None:
        rules = {"mixed_only": False, "compare_scores": True}
        for shape in ({"missing_eos_penalty": 1.0}, {"overlong_buffer": 2, "overlong_penalty": 0.5}):
            assert not collect(collector(solved_by_chance(), tmp_path, **rules, **shape)).degenerate

    def test_one_of_several_functions_that_differs_is_enough(self, tmp_path: Path) -> None:
        up, rules = (
            solved_by_chance(*TEXTS),
            {"mixed_only": False, "compare_scores": True, "by_function": True},
        )

        def down(prompts: list[str], outputs: list[str]) -> list[float]:
            return [1 - score for score in up(prompts, outputs)]

        def same(prompts: list[str], outputs: list[str]) -> list[float]:
            del outputs
            return [0.5] * len(prompts)

        assert not collect(collector([up, down], tmp_path, **rules)).degenerate  # the sums are equal
        assert collect(collector([same, solved_by_chance()], tmp_path, **rules)).degenerate


def test_rewards_a_token_that_sum_to_the_same_are_equal_scores(tmp_path: Path) -> None:
    """0.1 + 0.2 + 0.3 and 0.3 + 0.2 + 0.1 differ in float32, and in float64."""

    def reward(prompts: list[str], outputs: list[str], output_tokens: list[list[int]]) -> list[list[float]]:
        del prompts, outputs
        parts = [[0.1, 0.2, 0.3], [0.3, 0.2, 0.1]]
        return [(parts[row % 2] + [0.0] * 5)[: len(ids)] for row, ids in enumerate(output_tokens)]

    found = collect(collector(reward, tmp_path, mixed_only=False, compare_scores=True))
    assert found.degenerate
    rewards, mask = (np.asarray(x) for x in (found.rollouts.rewards, found.rollouts.sequences.mask))
    placed = (rewards != 0).sum(axis=1)
    assert (placed == 1).all() and len(np.unique(rewards.sum(axis=1))) == 1 and not rewards[~mask].any()


@pytest.mark.parametrize(
    ("rules", "is_there"),
    [({}, True), ({"mask_truncated": True}, False), ({"overlong_buffer": 2, "overlong_penalty": 0.5}, False)],
)
def test_cut_rows_are_counted_where_no_rule_deals_with_them(
    rules: dict[str, Any], is_there: bool, tmp_path: Path, often_short: None
) -> None:
    metrics = collect(collector(solved_by_chance(*TEXTS), tmp_path, **rules)).metrics
    assert 0 < metrics["completion/truncated_fraction"] < 1
    assert metrics.get("group/truncated_fraction") == (
        metrics["completion/truncated_fraction"] if is_there else None
    )


def test_groups_are_left_out_by_raw_scores_where_nothing_is_refilled(tmp_path: Path) -> None:
    """One round of the prompts of an iteration: rows stay where they are, and those of the other groups are marked."""
    found = collect(collector(solved_by_chance(stream()[1]), tmp_path))
    assert found.rollouts.kept is not None and found.rollouts.kept.tolist() == [False, False, True, True]
    assert found.metrics["group/kept"] == 1 and found.num_prompts == WANTED and not found.degenerate


def lengths(found: Experience) -> np.ndarray:
    """Tokens of each row that was sampled."""
    return np.asarray([len(row["output_tokens"]) for row in found.rows])


@pytest.fixture
def often_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fifth of the vocabulary ends a completion, so that some end before the limit and some do not."""
    tokenizer = tiny_tokenizer()
    ends = tuple(sorted({tokenizer.eos_token_id, *range(10, 30)}))
    monkeypatch.setitem(globals(), "ENDS", ends)


def test_lore_4_16_the_penalty_joins_the_score_after_the_groups_are_chosen(
    tmp_path: Path, often_short: None
) -> None:
    """Equal raw scores of unequal lengths are no contrast; and unequal ones are shaped on the last action."""
    plain = collect(collector(solved_by_chance(*TEXTS), tmp_path, num_rollouts=12))
    shaped = collect(
        collector(
            solved_by_chance(*TEXTS), tmp_path, num_rollouts=12, overlong_buffer=2, overlong_penalty=0.5
        )
    )
    count = lengths(plain)
    assert set(count) >= {4, 5} and count.min() <= 3, count
    penalty = 0.5 * np.asarray(overlong_penalty(jnp.asarray(count), max_length=5, buffer_length=2))
    assert set(penalty[count <= 3]) == {0.0} and set(penalty[count == 5]) == {-0.5}
    before, after = (jax.device_get(found.rollouts.rewards) for found in (plain, shaped))
    np.testing.assert_allclose((after - before).sum(axis=1), penalty)
    mask = jax.device_get(shaped.rollouts.sequences.mask)
    assert not (after - before)[:, :-1][mask[:, 1:]].any(), "it sits on the last action"
    assert [row["reward"] for row in shaped.rows] == [row["reward"] for row in plain.rows]
    uniform = collect(
        collector(solved_by_chance(), tmp_path, num_rollouts=12, overlong_buffer=2, overlong_penalty=0.5)
    )
    assert uniform.degenerate and not jax.device_get(uniform.rollouts.kept).any()


@pytest.mark.parametrize("rounds", [1, 3])
def test_truncated_rows_may_be_left_out_of_batch_and_groups(
    rounds: int, tmp_path: Path, often_short: None
) -> None:
    """A row that the limit cut is no action, and its score makes no contrast; the others of its group stay."""
    found = collect(
        collector(solved_by_chance(*TEXTS), tmp_path, num_rollouts=12, mask_truncated=True, max_rounds=rounds)
    )
    ended = np.asarray([row["output_tokens"][-1] in ENDS for row in found.rows])
    assert 0 < ended.sum() < len(ended)
    both = ended.reshape(-1, SIZE).all(axis=1)
    assert found.metrics["group/kept"] == min(both.sum(), 6)
    kept = jax.device_get(found.rollouts.kept)
    assert kept.sum() == found.metrics["group/kept"] * SIZE
    learned = Selection()(found.rollouts)
    np.testing.assert_array_equal(jax.device_get(learned.sequences.mask).any(axis=1), kept)
    assert found.metrics["completion/truncated_fraction"] == pytest.approx(np.mean(~ended))


def test_a_truncated_row_leaves_the_others_of_its_group(tmp_path: Path, often_short: None) -> None:
    """Without the rule of contrast: rows that ended are learned from, wherever they stand."""
    found = collect(
        collector(solved_by_chance(*TEXTS), tmp_path, num_rollouts=12, mask_truncated=True, mixed_only=False)
    )
    ended = np.asarray([row["output_tokens"][-1] in ENDS for row in found.rows])
    np.testing.assert_array_equal(jax.device_get(found.rollouts.kept), ended)
    assert found.metrics["group/valid_mean"] == pytest.approx(ended.mean() * SIZE)

# SPDX-License-Identifier: Apache-2.0
"""The sampler: where rows end, what is recorded, and what a sample may depend on."""

from __future__ import annotations

import dataclasses
from functools import partial

import jax
import numpy as np
import pytest

from jrl.ops.alignment import length_mask
from jrl.rollout import generate as generate_module
from jrl.rollout.generate import make_generate, prefill
from jrl.typing import Completions, ModelInputs
from jrl.typing.language import hands_on_itself
from tests.learners.tabular import EOS, VOCAB, tabular_policy
from tests.rollout.programs import (
    LONG,
    joined,
    knobs,
    long_rollout,
    prompts_ending_in,
    rescore,
    sample,
    sampler,
    table,
    tabled,
    walk,
    window_logits,
)
from tests.tiny import PAD_ID, tiny_policy, tiny_prompts

FAMILIES = ["gpt2", "llama"]
# From 2: EOS. From 3: 4, EOS. From 5: 5 for ever. From 7: 6, 3, 4, EOS.
WALK = table({2: EOS, 3: 4, 4: EOS, 7: 6, 6: 3})
RANDOM = tabled(np.random.default_rng(3).normal(size=(VOCAB, VOCAB)))
ROWS = 4096
STARTS = [2, 3, 5, 7]
# One shape for all tests of tables. Rows 0 to 3 start as above.
MIXED = prompts_ending_in(STARTS * (ROWS // 4))
ALIKE = prompts_ending_in([2] * ROWS)


def first(x: jax.Array) -> list:
    return x[:4].tolist()


@pytest.fixture(scope="module", params=FAMILIES)
def long(request: pytest.FixtureRequest) -> tuple[str, ModelInputs, Completions]:
    """64 sampled tokens a row of both families; the second has grouped key/value heads."""
    return request.param, *long_rollout(request.param)


@pytest.fixture(scope="module")
def random_walk() -> Completions:
    return walk(RANDOM, ALIKE)


class TestEnds:
    def test_lore_1_5_nothing_after_the_first_eos_counts_and_all_before_it_does(self):
        """EOS first, in the middle, absent, and on the last column."""
        found = walk(WALK, MIXED)
        assert first(found.tokens) == [[EOS, 0, 0, 0], [4, EOS, 0, 0], [5, 5, 5, 5], [6, 3, 4, EOS]]
        assert first(found.lengths) == [1, 2, 4, 4]
        assert first(found.terminated) == [True, True, False, True]
        mask = np.asarray(joined(MIXED, found, pad_token_id=0).mask)
        assert first(mask) == [[True] + [False] * 3, [True] * 2 + [False] * 2, [True] * 4, [True] * 4]

    def test_lore_1_3_pad_may_be_eos(self):
        """Here with two EOS ids, one of them the pad."""
        found = walk(WALK, MIXED, pad_token_id=EOS, eos_token_ids=(EOS, 6))
        assert first(found.tokens) == [[EOS] * 4, [4] + [EOS] * 3, [5] * 4, [6] + [EOS] * 3]
        assert first(found.lengths) == [1, 2, 4, 1]
        assert first(found.terminated) == [True, True, False, True]
        mask = np.asarray(joined(MIXED, found, pad_token_id=EOS).mask)
        stops = np.isin(found.tokens, (EOS, 6)) & mask
        assert stops[:4].sum(axis=1).tolist() == [1, 1, 0, 1], "each finished row has exactly one"

    def test_lore_1_4_the_sampled_eos_is_an_action(self, random_walk):
        """It is counted, unmasked and recorded with its log-probability."""
        ended = np.asarray(random_walk.terminated)
        assert 100 < ended.sum() < ROWS
        tokens, mask = (
            np.asarray(random_walk.tokens),
            np.asarray(joined(ALIKE, random_walk, pad_token_id=0).mask),
        )
        assert ((tokens == EOS) & mask).sum() == ended.sum()
        rows = np.flatnonzero(ended)
        last = np.asarray(random_walk.lengths)[rows] - 1
        assert (tokens[rows, last] == EOS).all()
        before = np.where(last > 0, tokens[rows, last - 1], 2)
        expected = log_table()[before, EOS]
        np.testing.assert_allclose(np.asarray(random_walk.logprobs)[rows, last], expected, atol=1e-5)

    def test_lore_1_8_a_row_cut_by_the_limit_is_not_terminated(self, random_walk):
        lengths, ended = np.asarray(random_walk.lengths), np.asarray(random_walk.terminated)
        assert (lengths[~ended] == 4).all()
        last = np.asarray(random_walk.tokens)[np.arange(ROWS), lengths - 1]
        np.testing.assert_array_equal(ended, last == EOS)

    def test_nothing_is_recorded_after_the_end(self, random_walk):
        after = ~np.asarray(length_mask(random_walk.lengths, width=4))
        np.testing.assert_array_equal(np.asarray(random_walk.logprobs)[after], 0.0)
        assert (np.asarray(random_walk.logprobs)[~after] < 0.0).all()
        assert (np.asarray(random_walk.tokens)[after] == 0).all()

    def test_the_loop_stops_when_every_row_has_ended(self):
        calls = []
        plain = tabular_policy()

        def decode(*arguments):
            jax.debug.callback(lambda: calls.append(1))
            return plain.decode(*arguments)

        policy = dataclasses.replace(plain, decode=decode)
        run = jax.jit(make_generate(policy, max_new_tokens=50, eos_token_ids=(EOS,), pad_token_id=0))
        found = run(*WALK, prompts_ending_in([2, 3, 7]), np.arange(3), knobs(), jax.random.key(0))
        jax.effects_barrier()
        assert found.lengths.tolist() == [1, 2, 4]
        assert len(calls) == 4, "the prefill, and one pass for each further token of the longest row"

    def test_the_width_must_be_positive(self):
        with pytest.raises(ValueError, match="`max_new_tokens` must be > 0, got 0"):
            make_generate(tabular_policy(), max_new_tokens=0, eos_token_ids=(), pad_token_id=0)


class TestSettings:
    def test_no_eos_before_min_new_tokens_and_never_a_suppressed_id(self, random_walk):
        assert np.min(random_walk.lengths) == 1
        assert np.isin([3, 6], random_walk.tokens).all()
        found = walk(RANDOM, ALIKE, min_new_tokens=2, suppress_token_ids=(3, 6))
        assert np.min(found.lengths) == 3
        assert not np.isin(found.tokens, (3, 6)).any()

    def test_a_huge_repetition_penalty_repeats_nothing(self):
        # All logits positive: a penalised one is all but 0.
        parameters = tabled(np.random.default_rng(0).uniform(1, 2, size=(VOCAB, VOCAB)))
        settings = dict(eos_token_ids=(), do_sample=False, repetition_penalty=1e9, max_new_tokens=VOCAB - 1)
        found = walk(parameters, prompts_ending_in([2, 5, 7]), **settings)
        for start, row in zip([2, 5, 7], found.tokens.tolist(), strict=True):
            assert sorted([start, *row]) == list(range(VOCAB)), "each id once, the prompt's included"

    def test_top_1_is_greedy(self):
        found = walk(RANDOM, MIXED, top_k=1, eos_token_ids=())
        best = np.argmax(log_table(), axis=1)
        for start, row in zip(STARTS, first(found.tokens), strict=True):
            assert row == [best[start], best[row[0]], best[row[1]], best[row[2]]]
        np.testing.assert_array_equal(found.logprobs, 0.0)

    def test_tokens_follow_the_policy(self, random_walk):
        """Pairs of two consecutive tokens: the numbers of two steps are independent."""
        tokens = np.asarray(random_walk.tokens)
        counts = np.bincount(tokens[:, 0] * VOCAB + tokens[:, 1], minlength=VOCAB**2)
        steps = np.exp(log_table())
        after_eos = np.eye(VOCAB)[0]  # pad
        pairs = steps[2][:, None] * np.where(np.arange(VOCAB)[:, None] == EOS, after_eos, steps)
        expected = ROWS * pairs.reshape(-1)
        enough = expected > 5
        chi_squared = np.sum(((counts - expected) ** 2 / np.maximum(expected, 1e-9))[enough])
        assert enough.sum() > 40
        assert chi_squared < enough.sum() + 4 * np.sqrt(2 * enough.sum())
        assert counts[expected == 0].sum() == 0

    def test_temperature_and_top_p_compile_once(self, long):
        family, prompts, _ = long
        for temperature, top_p in [(1.0, 1.0), (0.5, 1.0), (1.0, 0.3)]:
            sample(family, prompts, temperature=temperature, top_p=top_p)
        assert sampler(family, -1, 0)._cache_size() == 1


def log_table() -> np.ndarray:
    """log π of the random table, float64."""
    kernel = np.float64(RANDOM[0]["table"]["kernel"])
    return kernel - np.log(np.exp(kernel).sum(axis=1, keepdims=True))


class TestAgreement:
    def test_lore_2_7_cached_decoding_equals_one_pass(self, long):
        family, prompts, found = long
        sequences, scored = rescore(family, prompts, found)
        assert sequences.mask.all()
        difference = np.abs(np.asarray(scored.logprobs - found.logprobs)).max()
        print(f"lore 2.7: max |Δ logprob| over {LONG} tokens, {family}: {difference:.2e}")
        assert difference < 1e-4

    def test_greedy_takes_the_most_probable_of_a_full_pass(self, greedy):
        sequences, found = greedy
        np.testing.assert_array_equal(window_logits("llama", sequences).argmax(axis=-1), found.tokens)

    @pytest.fixture(scope="class")
    @classmethod
    def greedy(cls):
        found = sample("llama", tiny_prompts(), do_sample=False)
        return joined(tiny_prompts(), found, pad_token_id=0), found

    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_lore_2_1_sampler_and_learner_divide_by_the_temperature(self, long, temperature):
        family, prompts, _ = long
        found = sample(family, prompts, temperature=temperature)
        _, scored = rescore(family, prompts, found, temperature=temperature)
        difference = np.abs(np.asarray(scored.logprobs - found.logprobs)).max()
        print(f"lore 2.1: max |Δ logprob| at T = {temperature}, {family}: {difference:.2e}")
        assert difference < 1e-5
        _, wrong = rescore(family, prompts, found)
        assert np.abs(np.asarray(wrong.logprobs - found.logprobs)).max() > 0.1

    def test_lore_2_2_the_record_is_of_the_processed_distribution(self, long):
        """A learner without the filter shows the mass that the nucleus kept: 0.9 or a little more."""
        family, prompts, _ = long
        found = sample(family, prompts, top_p=0.9)
        sequences, scored = rescore(family, prompts, found)
        ratio = np.exp(np.asarray(scored.logprobs - found.logprobs, np.float64))
        print(f"lore 2.2: mean ratio under top-p 0.9, {family}: {ratio.mean():.4f}")
        weights = np.exp(window_logits(family, sequences))
        ordered = -np.sort(-weights / weights.sum(axis=-1, keepdims=True), axis=-1)
        kept = np.sum(ordered * (np.cumsum(ordered, axis=-1) - ordered < 0.9), axis=-1)
        np.testing.assert_allclose(ratio, kept, atol=1e-4)
        assert 0.9 < ratio.mean() < 0.93

    @pytest.mark.parametrize(("unfrozen", "value_layers"), [(0, 0), (1, 2)])
    def test_every_cut_samples_the_same(self, unfrozen, value_layers):
        prompts, whole = long_rollout("llama")
        cut = sample("llama", prompts, unfrozen=unfrozen, value_layers=value_layers)
        np.testing.assert_array_equal(cut.tokens, whole.tokens)
        np.testing.assert_allclose(cut.logprobs, whole.logprobs, atol=1e-5)


class TestIndependence:
    """Ids are equal; log-probabilities are to 1e-5: another shape may round the products differently."""

    @pytest.fixture(scope="class")
    @classmethod
    def alone(cls):
        """Each of two rows by itself, behind seven more columns of padding."""
        wider = jax.tree.map(lambda x: np.pad(x, ((0, 0), (7, 0))), tiny_prompts())
        return [
            sample("gpt2", jax.tree.map(lambda x, r=row: x[r : r + 1], wider), row_ids=[row])
            for row in (0, 1)
        ]

    def test_lore_1_2_samples_do_not_depend_on_left_padding_nor_on_the_chunk(self, alone):
        _, found = long_rollout("gpt2")
        for row, single in enumerate(alone):
            np.testing.assert_array_equal(single.tokens[0], found.tokens[row])
            np.testing.assert_allclose(single.logprobs[0], found.logprobs[row], atol=1e-5)

    def test_lore_2_8_samples_do_not_depend_on_neighbours(self, long):
        family, prompts, found = long
        mixed = jax.tree.map(lambda x, y: np.concatenate([x[:2], y[2:]]), prompts, tiny_prompts(seed=9))
        again = sample(family, mixed)
        np.testing.assert_array_equal(again.tokens[:2], found.tokens[:2])
        np.testing.assert_array_equal(again.logprobs[:2], found.logprobs[:2])
        assert (again.tokens[2:] != found.tokens[2:]).any()

    def test_lore_9_1_a_sample_belongs_to_key_and_row_number(self, long):
        family, prompts, found = long
        order = np.array([2, 0, 3, 1])
        again = sample(family, jax.tree.map(lambda x: x[order], prompts), row_ids=order)
        np.testing.assert_array_equal(again.tokens, found.tokens[order])
        # Samples of one prompt differ, a repetition repeats them, and another key gives others.
        one = jax.tree.map(lambda x: np.repeat(x[:1], 4, axis=0), prompts)
        once, twice, other = (sample(family, one, seed=seed) for seed in (0, 0, 1))
        assert len({tuple(row) for row in once.tokens.tolist()}) == 4
        np.testing.assert_array_equal(once.tokens, twice.tokens)
        assert (other.tokens != once.tokens).any()


class TestPrefill:
    @pytest.mark.parametrize("limit", [1, 8, 9, 20])
    @pytest.mark.parametrize(("family", "value_layers"), [("gpt2", 0), ("llama", 1)])
    def test_prompts_that_are_read_in_parts_give_the_same_samples(
        self, family: str, value_layers: int, limit: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy, params, frozen, _ = tiny_policy(family, num_value_layers_unfrozen=value_layers)
        prompts = tiny_prompts(4, 9)
        # Parts of 1 column, of 2 with one of padding before them all, of 1 row, and of 2.
        calls = [jax.jit(partial(prefill, policy, room=3))(params, frozen, prompts)]
        monkeypatch.setattr(generate_module, "PREFILL_TOKENS", limit)
        calls.append(jax.jit(partial(prefill, policy, room=3))(params, frozen, prompts))
        (whole, wanted), (parts, found) = calls
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), parts, whole)
        np.testing.assert_array_equal(found.positions, wanted.positions)
        generate = make_generate(policy, max_new_tokens=8, eos_token_ids=(), pad_token_id=PAD_ID)
        arguments = params, frozen, prompts, np.arange(4), knobs(), jax.random.key(0)
        cut = jax.jit(generate)(*arguments)
        monkeypatch.undo()
        np.testing.assert_array_equal(cut.tokens, jax.jit(generate)(*arguments).tokens)

    def test_a_model_that_puts_nothing_itself_reads_parts_as_well(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(generate_module, "PREFILL_TOKENS", 20)
        policy, params, frozen, _ = tiny_policy("llama")
        plain = dataclasses.replace(policy, within=hands_on_itself)
        one, two = (prefill(each, params, frozen, tiny_prompts(4, 9), 3) for each in (policy, plain))
        jax.tree.map(np.testing.assert_array_equal, one, two)

    def test_a_cache_that_changes_its_shape_is_refused_where_rows_are_read_in_parts(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        policy, params, frozen, _ = tiny_policy("llama")

        def shorter(*given):
            features, cache = policy.decode(*given)
            return features, cache._replace(mask=cache.mask[:, 1:])

        plain = dataclasses.replace(policy, within=hands_on_itself, decode=shorter)
        monkeypatch.setattr(generate_module, "PREFILL_TOKENS", 20)
        with pytest.raises(ValueError, match=r"of the shapes that it got: expected \(2, 12\), got \(2, 11\)"):
            prefill(plain, params, frozen, tiny_prompts(4, 9), 3)

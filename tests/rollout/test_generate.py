# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.alignment import join, length_mask
from jrl.ops.sampling import inverse_cdf
from jrl.rollout.generate import make_generate
from jrl.rollout.score import make_score
from jrl.typing import Features, PolicyFns, SamplingKnobs
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_policy, tiny_prompts

WIDTH, ROWS = 12, 8
ENDS = tuple(range(2, 10))  # many ids end a row, so that rows end in different places
PAD = ENDS[0]  # pad = EOS, the case in which a mask made from ids would be wrong
PROMPTS = tiny_prompts(B=ROWS)
KEY = jax.random.key(0)


def knobs(temperature=1.0, top_p=1.0):
    return SamplingKnobs(jnp.float32(temperature), jnp.float32(top_p))


class Runs:
    """The sampler and the scorer of a tiny model, compiled once."""

    def __init__(self, family):
        self.policy, self.params, self.frozen, self.ref_params = tiny_policy(family)
        settings = dict(max_new_tokens=WIDTH, eos_token_ids=ENDS, pad_token_id=PAD)
        self._generate = jax.jit(make_generate(self.policy, **settings))
        self._score = jax.jit(make_score(self.policy, logprob_chunk_bytes=2**28))
        self.score(self.generate())

    def generate(self, prompts=PROMPTS, rows=None, key=KEY, **numbers):
        rows = jnp.arange(ROWS) if rows is None else rows
        return self._generate(self.params, self.frozen, prompts, rows, knobs(**numbers), key)

    def score(self, completions, temperature=1.0, params=None):
        sequences = join(PROMPTS, completions, pad_token_id=PAD)
        params = self.params if params is None else params
        scored = self._score(params, self.frozen, self.ref_params, sequences, jnp.float32(temperature))
        return sequences, scored


@pytest.fixture(scope="module")
def gpt2():
    return Runs("gpt2")


@pytest.fixture(scope="module")
def llama():
    return Runs("llama")


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def runs(request):
    return request.getfixturevalue(request.param)


def gap(sequences, scored, completions):
    """log π_sampler − log π_learner on the actions."""
    return np.asarray(completions.logprobs - scored.logprobs)[np.asarray(sequences.mask)]


class TestAgreement:
    @pytest.mark.parametrize("temperature", [0.5, 2.0])
    def test_lore_2_1_learner_and_sampler_divide_by_the_temperature(self, runs, temperature):
        completions = runs.generate(temperature=temperature)
        sequences, scored = runs.score(completions, temperature=temperature)
        assert np.max(np.abs(gap(sequences, scored, completions))) < 1e-5
        _, wrong = runs.score(completions, temperature=1.0)
        assert np.max(np.abs(gap(sequences, wrong, completions))) > 1e-2

    def test_lore_3_7_filtered_sampling_leaves_unfiltered_finite_scores(self, gpt2):
        completions = gpt2.generate(top_p=0.5)
        sequences, scored = gpt2.score(completions)
        # What was sampled from has at least half of the mass and less than all: the record is larger.
        larger = gap(sequences, scored, completions)
        assert np.all((larger > 1e-4) & (larger < np.log(2) + 1e-4))

    def test_lore_3_6_a_copied_reference_scores_the_same_to_the_bit(self, gpt2):
        _, scored = gpt2.score(gpt2.generate())
        np.testing.assert_array_equal(scored.logprobs, scored.ref_logprobs)

    def test_values_are_of_the_state_before_the_action(self, gpt2):
        # A fresh head is zero everywhere, which any alignment would satisfy.
        head = {**gpt2.params["v_head"], "out": jax.tree.map(jnp.ones_like, gpt2.params["v_head"]["out"])}
        sequences, scored = gpt2.score(gpt2.generate(), params={**gpt2.params, "v_head": head})

        @jax.jit
        def everywhere(inputs):
            trunk = gpt2.policy.trunk(gpt2.frozen, inputs)
            features = gpt2.policy.branch(gpt2.params, gpt2.frozen, trunk, inputs, None)
            return gpt2.policy.heads({**gpt2.params, "v_head": head}, features.value)["values"]

        values = np.asarray(everywhere(sequences.inputs))
        for row, (start, mask) in enumerate(zip(sequences.starts, np.asarray(sequences.mask), strict=True)):
            length = int(mask.sum())
            expected = values[row, int(start) : int(start) + length]
            np.testing.assert_allclose(scored.values[row, :length], expected, atol=1e-5)


class TestEnds:
    def test_lore_1_8_a_row_cut_by_the_length_limit_is_not_terminated(self, gpt2):
        found = gpt2.generate()
        assert 0 < np.sum(found.terminated) < ROWS
        for row, length, terminated in zip(*map(np.asarray, found[:3]), strict=True):
            ends = np.isin(row[:length], ENDS)
            assert not ends[:-1].any()
            assert ends[-1] == terminated
            assert terminated or length == WIDTH
            assert np.all(row[length:] == PAD)

    def test_lore_1_3_with_pad_equal_to_eos_each_finished_row_has_one_unmasked_eos(self, gpt2):
        found = gpt2.generate()
        mask = np.asarray(join(PROMPTS, found, pad_token_id=PAD).mask)
        unmasked = np.isin(np.asarray(found.tokens), ENDS) & mask
        assert unmasked.sum(axis=1).tolist() == np.asarray(found.terminated, int).tolist()

    def test_lore_1_1_the_trained_ids_are_the_sampled_ids(self, gpt2):
        found = gpt2.generate()
        sequences = join(PROMPTS, found, pad_token_id=PAD)
        for row in range(ROWS):
            prompt = PROMPTS.tokens[row][PROMPTS.attention_mask[row]].tolist()
            sampled = found.tokens[row, : found.lengths[row]].tolist()
            stored = sequences.inputs.tokens[row][sequences.inputs.attention_mask[row]].tolist()
            assert stored == prompt + sampled

    def test_logprobs_after_the_end_are_zero(self, gpt2):
        found = gpt2.generate()
        inside = np.asarray(length_mask(found.lengths, width=WIDTH))
        assert not inside.all()
        np.testing.assert_array_equal(np.asarray(found.logprobs)[~inside], 0.0)
        assert np.all(np.asarray(found.logprobs)[inside] < 0.0)


class TestKeys:
    def test_lore_9_1_samples_depend_on_key_and_row_not_on_order_or_neighbours(self, gpt2):
        whole = gpt2.generate()
        order = jnp.array([2, 0, 3, 1, 7, 6, 5, 4])
        permuted = gpt2.generate(jax.tree.map(lambda x: x[order], PROMPTS), rows=order)
        np.testing.assert_array_equal(permuted.tokens, whole.tokens[order])
        others = tiny_prompts(B=ROWS, seed=1)
        mixed = jax.tree.map(lambda x, y: y.at[3].set(x[3]), PROMPTS, others)
        np.testing.assert_array_equal(gpt2.generate(mixed).tokens[3], whole.tokens[3])

    def test_lore_9_1_samples_of_one_prompt_differ_and_repeat(self, gpt2):
        one = jax.tree.map(lambda x: jnp.repeat(x[:1], ROWS, axis=0), PROMPTS)
        first = gpt2.generate(one).tokens.tolist()
        assert len({tuple(row) for row in first}) == ROWS
        assert gpt2.generate(one).tokens.tolist() == first
        assert gpt2.generate(one, key=jax.random.key(1)).tokens.tolist() != first


class TestSettings:
    """With a table as the model: the next token depends on the last one only."""

    table = jax.nn.log_softmax(2.0 * jax.random.normal(jax.random.key(5), (VOCAB_SIZE, VOCAB_SIZE)))

    def run(self, *, top_p=1.0, on_decode=None, **settings):
        def decode(params, frozen, inputs, cache):
            if on_decode is not None:
                jax.debug.callback(on_decode)
            rows = params[inputs.tokens]
            return Features(rows, rows), cache

        policy = PolicyFns(
            trunk=lambda *_: None,
            branch=lambda *_: None,
            logits=lambda params, frozen, hidden: hidden,
            heads=lambda *_: {},
            init_cache=lambda rows, length: (),
            decode=decode,
        )
        settings = dict(max_new_tokens=WIDTH, eos_token_ids=(), pad_token_id=PAD_ID) | settings
        generate = jax.jit(make_generate(policy, **settings))
        found = generate(self.table, {}, PROMPTS, jnp.arange(ROWS), knobs(top_p=top_p), KEY)
        return jax.tree.map(np.asarray, found)

    def test_greedy_follows_the_table(self):
        found = self.run(do_sample=False)
        before = np.concatenate([np.asarray(PROMPTS.tokens)[:, -1:], found.tokens[:, :-1]], axis=1)
        np.testing.assert_array_equal(found.tokens, np.argmax(np.asarray(self.table)[before], axis=-1))
        np.testing.assert_array_equal(found.tokens, self.run(top_k=1).tokens)
        np.testing.assert_array_equal(found.tokens, self.run(top_p=1e-6).tokens)

    def test_token_t_of_row_i_uses_the_key_folded_with_i_and_t(self):
        found = self.run()
        before = np.concatenate([np.asarray(PROMPTS.tokens)[:, -1:], found.tokens[:, :-1]], axis=1)
        for t in (0, 1, WIDTH - 1):
            keys = [jax.random.fold_in(jax.random.fold_in(KEY, row), t) for row in range(ROWS)]
            uniform = jnp.stack([jax.random.uniform(key) for key in keys])
            expected = jax.jit(inverse_cdf)(self.table[before[:, t]], uniform)
            np.testing.assert_array_equal(found.tokens[:, t], expected)

    def test_the_loop_stops_once_all_rows_are_done(self):
        calls = []
        found = self.run(eos_token_ids=tuple(range(VOCAB_SIZE)), on_decode=lambda: calls.append(1))
        jax.effects_barrier()
        assert found.lengths.tolist() == [1] * ROWS
        assert len(calls) == 1  # the prefill alone

    def test_min_new_tokens_and_suppressed_tokens(self):
        ends = tuple(range(2, 60))
        found = self.run(eos_token_ids=ends, min_new_tokens=3, suppress_token_ids=(60, 61, 62, 63, 64))
        assert np.min(found.lengths) == 4
        assert not np.isin(found.tokens, (60, 61, 62, 63, 64)).any()

    def test_a_huge_repetition_penalty_repeats_nothing(self):
        found = self.run(do_sample=False, repetition_penalty=1e9)
        for prompt, mask, row in zip(PROMPTS.tokens, PROMPTS.attention_mask, found.tokens, strict=True):
            assert len(set(row.tolist())) == WIDTH
            assert not set(row.tolist()) & set(prompt[mask].tolist())

# SPDX-License-Identifier: Apache-2.0
"""Processors against their definitions, and the draw against the exact distribution."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops.sampling import (
    Processor,
    SamplingContext,
    apply_temperature,
    best_advantages,
    draw,
    forbid,
    forbid_transitions,
    inverse_cdf,
    keep_top_k,
    keep_top_p,
    make_processors,
    penalize_repetition,
    steer,
)

ALMOST_ONE = np.nextafter(np.float32(1), np.float32(0))
INF = np.inf
# Compiled once for all tests; arrays are made with NumPy, and in few shapes.
sample = jax.jit(inverse_cdf)
draw_row = jax.jit(draw)
top_k = jax.jit(keep_top_k, static_argnames="k")
top_p_of = jax.jit(keep_top_p)
transitions = jax.jit(forbid_transitions)
advantages_of = jax.jit(best_advantages)
steered = jax.jit(steer)


def random_logits(*shape: int, seed: int = 0, scale: float = 2.0) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).normal(size=shape) * scale)


def random_uniform(count: int, seed: int = 0) -> np.ndarray:
    return np.float32(np.random.default_rng(seed).integers(0, 1 << 23, size=count) / (1 << 23))


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(np.asarray(logits, np.float64) - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def nucleus(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Which ids stay, by the definition: most probable first until the mass is reached, ties with the last."""
    probabilities = softmax(logits)
    mass, least = 0.0, INF
    for token in np.argsort(-probabilities, kind="stable"):
        if mass >= top_p and mass > 0:
            break
        mass, least = mass + probabilities[token], logits[token]
    return logits >= least


def sorted_nucleus(logits: np.ndarray, top_p: float) -> np.ndarray:
    """Which ids stay, read off sums over sorted rows in float64; no row is without its most probable id."""
    ordered = -np.sort(-logits, axis=-1)
    probabilities = softmax(ordered)
    before = np.cumsum(probabilities, axis=-1) - probabilities
    least = np.min(np.where(before < top_p, ordered, INF), axis=-1, keepdims=True)
    return np.isfinite(logits) & (logits >= np.minimum(least, ordered[:, :1]))


def rows_of_all_kinds() -> np.ndarray:
    """Rows of 40 logits, the last three of them padding: random, tied, few finite ones, extreme and tiny ones."""
    rng = np.random.default_rng(11)
    rows = rng.normal(size=(60, 40)) * 3
    rows[10:20] = rng.integers(-2, 3, size=(10, 40))
    rows[20:30][rng.random((10, 40)) < 0.9] = -INF
    rows[20:30, 5] = 1.0
    rows[30:40] = rng.choice([3e38, -3e38, 1e-30, -1e-30, 0.0, -0.0, 88.0], size=(10, 40))
    rows[40:50] = 1e-4 * rows[40:50] + 1e4
    rows[50], rows[51] = 0.0, -5.0
    rows[:, -3:] = -INF
    return np.float32(rows)


def context(**fields: object) -> SamplingContext:
    defaults = dict(num_sampled=np.int32(0), seen=None, temperature=np.float32(1.0), top_p=np.float32(1.0))
    return SamplingContext(**(defaults | fields))


def process(processors: tuple[Processor, ...], logits: np.ndarray, **fields: object) -> np.ndarray:
    return np.asarray(compiled(processors)(jnp.asarray(logits), context(**fields)))


@functools.cache
def compiled(processors: tuple[Processor, ...]) -> Callable[[jax.Array, SamplingContext], jax.Array]:
    def run(logits: jax.Array, context: SamplingContext) -> jax.Array:
        for processor in processors:
            logits = processor(logits, context)
        return logits

    return jax.jit(run)


class TestInverseCDF:
    @pytest.mark.parametrize("size", [1, 2, 16, 97])
    def test_evenly_spaced_numbers_give_each_token_its_share(self, size):
        logits = random_logits(size, seed=size)
        logits[size // 2] = -INF if size > 1 else 0.0
        count = 1 << 12
        uniform = np.float32((np.arange(count) + 0.5) / count)
        drawn = np.asarray(sample(np.broadcast_to(logits, (count, size)), uniform))
        assert drawn.dtype == np.int32
        # An interval of length p holds n·p of the numbers to within one at each end, and rounding moves an end by
        # far less than their spacing.
        shares = np.bincount(drawn, minlength=size)
        np.testing.assert_allclose(shares, count * softmax(logits), atol=1.0)
        assert (np.diff(drawn) >= 0).all(), "the distribution function runs over the ids in order"

    def test_random_numbers_give_the_distribution(self):
        size, count = 13, 20_000
        logits = random_logits(size, seed=3, scale=1.0)
        drawn = sample(np.broadcast_to(logits, (count, size)), random_uniform(count))
        counts = np.bincount(drawn, minlength=size)
        expected = count * softmax(logits)
        chi_squared = np.sum((counts - expected) ** 2 / expected)
        # χ² with 12 degrees of freedom exceeds 32.9 once in a thousand.
        assert chi_squared < 32.9

    @pytest.mark.parametrize("size", [5, 97, 1000])
    def test_never_a_token_without_probability(self, size):
        rng = np.random.default_rng(size)
        rows = 64
        logits = rng.normal(size=(rows, size)) * 30
        logits[rng.random((rows, size)) < 0.7] = -INF
        logits[:, -3:] = -INF  # a padded vocabulary
        logits[:, rng.integers(0, size - 3)] = 0.0
        extremes = [0.0, 1e-45, 1e-7, 0.5, float(np.nextafter(ALMOST_ONE, np.float32(0))), float(ALMOST_ONE)]
        for uniform in extremes:
            drawn = np.asarray(sample(np.float32(logits), np.full(rows, uniform, np.float32)))
            assert np.isfinite(logits[np.arange(rows), drawn]).all()
            assert (
                np.exp(logits - logits.max(1, keepdims=True), dtype=np.float32)[range(rows), drawn] > 0
            ).all()

    @pytest.mark.parametrize("position", [0, 4, 9, 10])
    @pytest.mark.parametrize("uniform", [0.0, 0.3, ALMOST_ONE])
    def test_a_single_finite_logit_is_certain(self, position, uniform):
        logits = np.full((1, 11), -INF, np.float32)
        logits[0, position] = -50.0
        assert sample(logits, np.full(1, uniform, np.float32)).tolist() == [position]

    def test_ends_of_the_interval_are_the_first_and_the_last_token(self):
        logits = jnp.array([[-INF, 0.0, 1.0, 0.0, -INF, -INF]] * 2)
        assert sample(logits, jnp.array([0.0, ALMOST_ONE])).tolist() == [1, 3]

    def test_lore_2_8_a_draw_does_not_depend_on_its_neighbours(self):
        logits, uniform = random_logits(64, 97, seed=5), random_uniform(64)
        together = np.asarray(draw_row(logits, uniform))
        alone = [sample(logits[i : i + 1], uniform[i : i + 1])[0] for i in range(64)]
        np.testing.assert_array_equal(together[0], alone)
        # In a batch of the same size, the log-probabilities too are equal bit for bit.
        order = np.random.default_rng(0).permutation(64)
        np.testing.assert_array_equal(draw_row(logits[order], uniform[order]), together[:, order])
        # Neighbours of another scale move nothing either, bit for bit.
        loud = logits * np.where(np.arange(64) < 8, 1, 100).astype(np.float32)[:, None]
        np.testing.assert_array_equal(np.asarray(draw_row(loud, uniform))[:, :8], together[:, :8])


class TestDraw:
    def test_log_probability_is_that_of_the_processed_distribution(self):
        logits = np.float32(np.log([[0.1, 0.2, 0.3, 0.4]]) + 7)
        tokens, logprobs = draw_row(top_k(logits, k=2), np.float32([0.1]))
        assert tokens.tolist() == [2]
        np.testing.assert_allclose(logprobs, [np.log(0.3 / 0.7)], rtol=1e-6)

    @pytest.mark.parametrize("size", [96, 97])
    def test_log_probability_is_normalised_over_all_blocks(self, size):
        """96 columns are blocks of 8; 97 have no divisor near their root and are padded."""
        logits = random_logits(64, size)
        tokens, logprobs = draw_row(logits, random_uniform(64))
        wanted = np.log(softmax(logits))[np.arange(64), tokens]
        np.testing.assert_allclose(logprobs, wanted, atol=1e-6)

    def test_without_random_numbers_it_is_greedy(self):
        logits = random_logits(64, 97)
        tokens, _ = draw_row(logits, None)
        np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))

    @pytest.mark.parametrize("seed", range(3))
    def test_top_1_is_greedy(self, seed):
        logits = random_logits(64, 97, seed=seed)
        tokens, logprobs = draw_row(top_k(logits, k=1), random_uniform(64, seed))
        np.testing.assert_array_equal(tokens, draw_row(logits, None)[0])
        np.testing.assert_array_equal(logprobs, 0.0)


class TestTopK:
    def test_golden(self):
        logits = np.float32([[1.0, 4.0, 2.0, 3.0]])
        assert top_k(logits, k=2).tolist() == [[-INF, 4.0, -INF, 3.0]]

    def test_ties_with_the_last_stay(self):
        logits = np.float32([[1.0, 3.0, 2.0, 2.0]])
        assert top_k(logits, k=2).tolist() == [[-INF, 3.0, 2.0, 2.0]]

    @pytest.mark.parametrize("k", [4, 5])
    def test_all_of_the_vocabulary_changes_nothing(self, k):
        logits = random_logits(1, 4)
        np.testing.assert_array_equal(top_k(logits, k=k), logits)

    @pytest.mark.parametrize("k", [1, 2, 7])
    def test_equals_the_sorted_form(self, k):
        logits = rows_of_all_kinds()
        least = np.sort(logits, axis=-1)[:, -k:][:, :1]
        np.testing.assert_array_equal(top_k(logits, k=k), np.where(logits >= least, logits, -INF))

    def test_a_whole_vocabulary(self):
        logits = random_logits(2, 50257, seed=4)
        assert np.isfinite(top_k(logits, k=50)).sum(axis=1).tolist() == [50, 50]

    @pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
    def test_half_precision_keeps_its_dtype_and_its_ties(self, dtype):
        logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, -INF]], dtype)
        kept = top_k(logits, k=2)
        assert kept.dtype == dtype and kept.tolist() == [[-INF, 3.0, 2.0, 2.0, -INF]]

    def test_nan_stays_to_be_seen(self):
        assert np.isnan(top_k(np.float32([[1.0, np.nan, 3.0]]), k=1)[0, 1])

    def test_k_must_be_positive(self):
        with pytest.raises(ValueError, match="`k` must be > 0, got 0"):
            top_k(random_logits(1, 4), k=0)


class TestTopP:
    @pytest.mark.parametrize("top_p", [1e-6, 0.1, 0.5, 0.9, 0.99])
    def test_equals_the_definition(self, top_p):
        logits = random_logits(64, 97, seed=7)
        logits[:, 50:60] = -INF
        kept = np.isfinite(top_p_of(logits, np.float32(top_p)))
        np.testing.assert_array_equal(kept, [nucleus(row, top_p) for row in logits])
        assert kept.any(axis=1).all()

    @pytest.mark.parametrize("top_p", [0.0, 1e-6, 0.3, 0.77, 0.999])
    def test_equals_the_sorted_form(self, top_p):
        """Up to rounding: a token at which the mass passes `top_p` to within 1e-6 may stay or go."""
        logits = rows_of_all_kinds()
        kept = np.isfinite(top_p_of(logits, np.float32(top_p)))
        fewest, most = (sorted_nucleus(logits, top_p + slack) for slack in (-1e-6, 1e-6))
        assert (fewest <= kept).all() and (kept <= most).all()
        assert (fewest == most).mean() > 0.9, "the bounds say something"

    def test_a_whole_vocabulary(self):
        logits = random_logits(2, 50257, seed=4)
        kept = np.isfinite(top_p_of(logits, np.float32(0.9)))
        fewest, most = (sorted_nucleus(logits, 0.9 + slack) for slack in (-1e-5, 1e-5))
        assert (fewest <= kept).all() and (kept <= most).all() and (most & ~fewest).sum() < 20

    def test_half_precision_keeps_its_dtype_and_its_ties(self):
        logits = jnp.asarray([[1.0, 3.0, 2.0, 2.0, -INF]], jnp.bfloat16)
        kept = top_p_of(logits, np.float32(0.7))
        assert kept.dtype == jnp.bfloat16 and kept.tolist() == [[-INF, 3.0, 2.0, 2.0, -INF]]

    def test_golden(self):
        # 0.5 passes 0.49; 0.5 + 0.25 passes 0.6; a tie with the least token kept stays: 0.125 twice for 0.8.
        logits = np.float32(np.log([[0.25, 0.125, 0.5, 0.125]]))
        for top_p, kept in [(0.49, [2]), (0.6, [0, 2]), (0.8, [0, 1, 2, 3])]:
            assert np.flatnonzero(np.isfinite(top_p_of(logits, np.float32(top_p)))[0]).tolist() == kept

    def test_the_most_probable_always_stays(self):
        logits = random_logits(64, 97)
        kept = top_p_of(logits, np.float32(0.0))
        assert (np.isfinite(kept).sum(axis=1) == 1).all()
        np.testing.assert_array_equal(np.argmax(kept, axis=1), np.argmax(logits, axis=1))

    def test_one_keeps_everything(self):
        logits = random_logits(64, 97, scale=30.0)
        logits[:, 3] = -INF
        np.testing.assert_array_equal(top_p_of(logits, np.float32(1.0)), logits)

    def test_what_is_kept_keeps_its_logit(self):
        logits = random_logits(64, 97)
        kept = top_p_of(logits, np.float32(0.7))
        np.testing.assert_array_equal(kept, np.where(np.isfinite(kept), logits, -INF))


class TestPenalties:
    def test_temperature_divides(self):
        logits = jnp.array([[2.0, -1.0, -INF]])
        assert apply_temperature(logits, jnp.float32(0.5)).tolist() == [[4.0, -2.0, -INF]]

    def test_forbid(self):
        assert forbid(jnp.zeros((2, 4)), (1, 3)).tolist() == [[0.0, -INF, 0.0, -INF]] * 2

    def test_repetition_golden(self):
        # Seen: 3/1.5 = 2 and −3·1.5 = −4.5; the others stay.
        logits = jnp.array([[3.0, -3.0, 3.0, -3.0, -INF]])
        seen = jnp.array([[True, True, False, False, True]])
        assert penalize_repetition(logits, seen, penalty=1.5).tolist() == [[2.0, -4.5, 3.0, -3.0, -INF]]

    def test_repetition_penalty_must_be_positive(self):
        with pytest.raises(ValueError, match="`penalty` must be > 0, got 0"):
            penalize_repetition(jnp.zeros((1, 2)), jnp.zeros((1, 2), bool), penalty=0.0)


class TestTransitions:
    def test_the_row_is_the_last_token_and_the_column_the_next(self):
        # After 2, only 0 and 1 may come; after 0, only 1. The fourth column pads the vocabulary.
        forbidden = np.array([[True, False, True], [False] * 3, [False, False, True]])
        logits = np.float32([[1.0, 2.0, 3.0, -INF]] * 3)
        out = transitions(logits, np.int32([2, 0, 1]), forbidden)
        assert out.tolist() == [[1.0, 2.0, -INF, -INF], [-INF, 2.0, -INF, -INF], [1.0, 2.0, 3.0, -INF]]

    def test_it_may_not_be_wider_than_the_logits(self):
        with pytest.raises(
            ValueError, match=r"`forbidden` must be square .* the logits, 4 columns, got \(5, 5\)"
        ):
            transitions(np.zeros((1, 4), np.float32), np.int32([0]), np.zeros((5, 5), bool))


class TestSteering:
    def test_the_smaller_q_counts_and_v_is_taken_off(self):
        q_values = np.float32([[[1.0, 5.0, -INF]], [[2.0, 4.0, -INF]]])
        assert advantages_of(q_values, np.float32([3.0])).tolist() == [[-2.0, 1.0, 0.0]]

    @pytest.mark.parametrize("beta", [0.0, 1.0, 100.0, -1.0])
    def test_a_padded_vocabulary_stays_impossible_at_any_beta(self, beta):
        """0·(−inf) and (−inf) − (−inf) would be NaN."""
        advantages = advantages_of(np.float32([[[1.0, -INF]], [[2.0, -INF]]]), np.float32([0.5]))
        out = steered(np.float32([[0.25, -INF]]), advantages, np.float32(beta))
        assert out.tolist() == [[0.25 + 0.5 * beta, -INF]]

    def test_at_beta_zero_nothing_changes_to_the_bit(self):
        logits = random_logits(64, 97, scale=30.0)
        advantages = random_logits(64, 97, seed=1, scale=1e6)
        np.testing.assert_array_equal(steered(logits, advantages, np.float32(0.0)), logits)

    def test_normalising_first_draws_the_same(self):
        """What the papers write is log softmax(z) + β(Q − V); V and the norm move a whole row by a constant."""
        logits, q = random_logits(64, 97), random_logits(64, 97, seed=1)
        values, uniform = random_logits(64, seed=2), random_uniform(64)
        beta = np.float32(3.0)
        ours = steered(logits, advantages_of(np.stack([q, q + 1]), values), beta)
        written = np.float32(np.log(softmax(logits)) + beta * (q - values[:, None]))
        drawn, expected = (draw_row(top_k(x / np.float32(0.7), k=20), uniform) for x in (ours, written))
        np.testing.assert_array_equal(drawn[0], expected[0])
        np.testing.assert_allclose(drawn[1], expected[1], atol=1e-5)


class TestMakeProcessors:
    def test_by_default_only_the_temperature_acts(self):
        logits = random_logits(2, 9)
        processors = make_processors()
        np.testing.assert_array_equal(process(processors, logits), logits)
        halved = process(processors, logits, temperature=np.float32(2.0))
        np.testing.assert_array_equal(halved, logits / 2)

    def test_eos_comes_back_after_the_shortest_length(self):
        processors = make_processors(eos_token_ids=(1, 3), min_new_tokens=2)
        for sampled, allowed in [(0, False), (1, False), (2, True), (3, True)]:
            out = process(processors, np.zeros((1, 5), np.float32), num_sampled=np.int32(sampled))
            assert np.isfinite(out)[0].tolist() == [True, allowed, True, allowed, True]

    def test_suppressed_ids_never_come(self):
        out = process(make_processors(suppress_token_ids=(0, 4)), np.zeros((1, 5), np.float32))
        assert np.isfinite(out)[0].tolist() == [False, True, True, True, False]

    def test_order_is_penalties_then_temperature_then_filters(self):
        # Penalty 2 on id 0: 4 → 2. T = 2: (1, 1.5, 0), p = 0.331, 0.546, 0.122: a mass of 0.69 needs ids 1 and 0.
        # Of the untempered (2, 3, 0), p = 0.259, 0.705, 0.035, id 1 alone would do; of (4, 3, 0) id 0 alone.
        processors = make_processors(repetition_penalty=2.0)
        seen = np.array([[True, False, False]])
        out = process(
            processors,
            np.float32([[4.0, 3.0, 0.0]]),
            seen=seen,
            temperature=np.float32(2.0),
            top_p=np.float32(0.69),
        )
        assert out.tolist() == [[1.0, 1.5, -INF]]

    def test_steering_comes_after_what_forbids_and_before_temperature_and_filters(self):
        # z = 0 1 2 0 and β(Q − V) = 2·(0 1 −2 5), with id 3 forbidden after 1: 0 3 −2 −∞; T = 2: 0 1.5 −1 −∞; k = 2.
        # Top-k before the steering would keep ids 1 and 2; the temperature before it would give 0 2.5 −3.
        forbidden = np.zeros((4, 4), bool)
        forbidden[1, 3] = True
        out = process(
            make_processors(top_k=2),
            np.float32([[0.0, 1.0, 2.0, 0.0]]),
            temperature=np.float32(2.0),
            last_tokens=np.int32([1]),
            forbidden=forbidden,
            advantages=np.float32([[0.0, 1.0, -2.0, 5.0]]),
            beta=np.float32(2.0),
        )
        assert out.tolist() == [[0.0, 1.5, -INF, -INF]]

    def test_top_k_comes_before_the_nucleus(self):
        # The two best of p = 0.4, 0.3, 0.2, 0.1 become 4/7 and 3/7: top-p 0.55 of that keeps one id, of all two.
        logits = np.float32(np.log([[0.4, 0.3, 0.2, 0.1]]))
        out = process(make_processors(top_k=2), logits, top_p=np.float32(0.55))
        assert np.isfinite(out)[0].tolist() == [True, False, False, False]

    def test_no_step_sorts_the_vocabulary(self):
        run = compiled(make_processors(top_k=5, repetition_penalty=2.0))
        seen = jax.ShapeDtypeStruct((2, 97), bool)
        text = run.lower(jax.ShapeDtypeStruct((2, 97), jnp.float32), context(seen=seen)).as_text()
        assert "stablehlo.while" in text
        assert not any(name in text for name in ("sort", "top_k", "reduce_window"))

    def test_a_sweep_of_temperature_and_top_p_compiles_once(self):
        processors = make_processors(top_k=5)
        for temperature, top_p in itertools.product((0.5, 2.0), (0.3, 1.0)):
            values = dict(temperature=np.float32(temperature), top_p=np.float32(top_p))
            process(processors, random_logits(2, 9), **values)
        assert compiled(processors)._cache_size() == 1

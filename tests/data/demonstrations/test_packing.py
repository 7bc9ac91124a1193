# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import time
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import BloomConfig, GPT2Config, LlamaConfig, MistralConfig

from jrl.data.demonstrations.packing import STRATEGIES, PackedRecords, pack_rows
from jrl.data.demonstrations.rows import DialogueRow
from jrl.forward import window_features, window_logprobs
from jrl.losses.sft import sft_loss
from jrl.models.model import make_model
from tests.data.demonstrations.packed import packed_set, plain_set, rows_of
from tests.tiny import VOCAB_SIZE

SPEC_LENGTHS = [5, 2, 3, 1]


def layout(strategy, lengths=SPEC_LENGTHS, capacity=4):
    """Tokens 1, 2, 3, ... over all samples, as the strategy lays them out."""
    starts = np.cumsum([0, *lengths])
    return [
        [
            token
            for sample, start, stop in pieces
            for token in range(starts[sample] + start + 1, starts[sample] + stop + 1)
        ]
        for pieces in STRATEGIES[strategy](lengths, capacity)
    ]


class TestStrategies:
    def test_golden(self):
        # Rows [1..5], [6, 7], [8, 9, 10], [11] in rows of 4.
        assert layout("bfd") == [[1, 2, 3, 4], [8, 9, 10, 11], [6, 7]]
        assert layout("bfd_split") == [[1, 2, 3, 4], [8, 9, 10, 5], [6, 7, 11]]
        assert layout("wrapped") == [[1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11]]

    def test_the_least_sufficient_space_is_taken(self):
        # After 6 and 5 of 8, spaces are 2 and 3: a piece of 2 goes into the former, the next one into the latter.
        assert [[piece.sample for piece in row] for row in STRATEGIES["bfd"]([5, 6, 2, 2], 8)] == [
            [1, 2],
            [0, 3],
        ]

    @given(
        lengths=st.lists(st.integers(0, 30), max_size=40),
        capacity=st.integers(2, 16),
        strategy=st.sampled_from(sorted(STRATEGIES)),
    )
    def test_every_token_once_or_lost_and_no_row_too_long(self, lengths, capacity, strategy):
        rows = STRATEGIES[strategy](lengths, capacity)
        assert all(0 < sum(piece.length for piece in row) <= capacity for row in rows)
        found = [
            (piece.sample, token) for row in rows for piece in row for token in range(piece.start, piece.stop)
        ]
        kept = [min(length, capacity) if strategy == "bfd" else length for length in lengths]
        assert sorted(found) == [
            (sample, token) for sample, count in enumerate(kept) for token in range(count)
        ]
        assert rows == STRATEGIES[strategy](lengths, capacity)
        if strategy == "wrapped":
            assert all(sum(piece.length for piece in row) == capacity for row in rows[:-1])
        elif rows:
            # No two rows would fit into one.
            fill = sorted(sum(piece.length for piece in row) for row in rows)
            assert len(rows) == 1 or fill[0] + fill[1] > capacity

    def test_many_rows_are_fast(self):
        lengths = np.random.default_rng(0).integers(1, 2049, 20_000).tolist()
        start = time.perf_counter()
        rows = STRATEGIES["bfd"](lengths, 2048)
        assert time.perf_counter() - start < 3
        assert sum(lengths) / (len(rows) * 2048) > 0.99


class TestPackedSet:
    def test_a_batch_knows_its_samples(self):
        found = packed_set(rows_of(5, 9, 3, 8))
        batch = found.batch_of(np.arange(2), np.array([True, True]))
        # 9 5 | 8 3
        assert found.lengths == [[9, 5], [8, 3]]
        assert batch.inputs.segment_ids.tolist() == [[1] * 9 + [2] * 5 + [0] * 2, [1] * 8 + [2] * 3 + [0] * 5]
        assert batch.inputs.attention_mask.sum(axis=1).tolist() == [14, 11]
        assert batch.inputs.segment_ids.dtype == np.int32

    def test_lore_1_11_the_first_token_of_a_sample_is_nobodys_target(self):
        rows = [DialogueRow([2, 3, 4], [True] * 3), DialogueRow([5, 6], [True] * 2)]
        batch = packed_set(rows, capacity=8).batch(0, 1)
        assert batch.inputs.tokens[0, :5].tolist() == [2, 3, 4, 5, 6]
        assert batch.mask.tolist() == [[True, True, False, True, False, False, False]]

    def test_what_is_cut_away_is_counted(self):
        found = packed_set(rows_of(20, 4), capacity=8)
        assert (found.num_lost, found.num_samples, len(found)) == (12, 2, 2)
        split = packed_set(rows_of(20, 4), capacity=8, strategy="bfd_split")
        assert (split.num_lost, len(split), split.efficiency) == (0, 3, 1.0)

    def test_lore_9_1_passes_are_functions_of_the_seed(self):
        rows = rows_of(*range(3, 15))
        one, two = (packed_set(rows) for _ in range(2))
        orders = []
        for step in range(6):
            np.testing.assert_array_equal(one.batch(step, 2).inputs.tokens, two.batch(step, 2).inputs.tokens)
            orders.append(one.batch(step, 2).inputs.tokens.tolist())
        assert orders[:3] != orders[3:]
        assert orders[0] != packed_set(rows, seed=5).batch(0, 2).inputs.tokens.tolist()
        assert one.sha256() == two.sha256() != packed_set(rows[1:]).sha256()

    def test_all_batches_have_one_width(self):
        found = packed_set(rows_of(3, 4, 15))
        assert {found.batch(step, 2).inputs.tokens.shape for step in range(4)} == {(2, 16)}

    def test_bad_options_are_named(self):
        with pytest.raises(ValueError, match=r"`packing_strategy` must be one of .* got 'ffd'"):
            packed_set(rows_of(3), strategy="ffd")
        with pytest.raises(ValueError, match=r"`capacity` must be at least 2 tokens .* got 1"):
            packed_set(rows_of(3), capacity=1)


def test_a_stream_is_packed_a_buffer_at_a_time():
    rows = rows_of(5, 9, 3, 8, 2)
    options = {"capacity": 16, "strategy": "bfd"}
    stream = PackedRecords(rows, lambda row, number: None if number == 2 else row, buffer=2, **options)
    expected = pack_rows(rows[:2], **options) + pack_rows([rows[3], rows[4]], **options)
    assert list(stream) == expected == list(stream)


CONFIGS = {
    "learned positions": GPT2Config(n_embd=32, n_layer=1, n_head=4, n_positions=64, vocab_size=VOCAB_SIZE),
    "rotary": LlamaConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=48,
        vocab_size=VOCAB_SIZE,
    ),
    "ALiBi": BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=VOCAB_SIZE),
    "sliding window": MistralConfig(
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=48,
        sliding_window=4,
        vocab_size=VOCAB_SIZE,
    ),
}


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("learned positions", marks=pytest.mark.slow),
        "rotary",
        pytest.param("ALiBi", marks=pytest.mark.slow),
        "sliding window",
    ],
)
def test_lore_1_11_packed_rows_compute_what_their_samples_would(kind):
    config = CONFIGS[kind]
    config.initializer_range = 0.2
    lm = make_model(config)
    params, policy = lm.init(jax.random.key(0)), lm.policy()
    rows = rows_of(9, 7, 11, 5)
    packed = packed_set(rows)
    assert packed.lengths == [[11, 5], [9, 7]]
    order = [2, 3, 0, 1]

    @jax.jit
    def run(sequences):
        def loss(params):
            features = window_features(policy, params, {}, None, sequences)
            options = {"temperature": 1.0, "chunk_bytes": 1 << 30}
            found = window_logprobs(policy, params, {}, features.policy, sequences, **options)
            total, weight, _ = sft_loss(found.logprobs, sequences.mask)
            return total / weight, found.logprobs

        return jax.value_and_grad(loss, has_aux=True)(params)

    alone = plain_set(rows).batch_of(np.asarray(order), np.ones(4, bool))
    together = packed.batch_of(np.arange(2), np.ones(2, bool))
    (loss, logprobs), grads = run(alone)
    (packed_loss, packed_logprobs), packed_grads = run(together)
    assert together.mask.sum() == alone.mask.sum()
    np.testing.assert_allclose(packed_logprobs[together.mask], logprobs[alone.mask], atol=1e-5)
    np.testing.assert_allclose(packed_loss, loss, atol=1e-5)
    for got, expected in zip(jax.tree.leaves(packed_grads), jax.tree.leaves(grads), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-5)


def test_lore_1_11_targets_stay_inside_their_sample():
    rows = rows_of(9, 7)
    batch = packed_set(rows).batch(0, 1)
    learned = batch.inputs.tokens[:, 1:][batch.mask].tolist()
    assert learned == [
        token for row in rows for token, flag in zip(row.tokens, row.learned, strict=True) if flag
    ]


class TestAgainstTRL:
    """`tests/golden/trl_packing.npz`, made by TRL 1.16.0."""

    GOLDEN = np.load(Path(__file__).resolve().parents[2] / "golden" / "trl_packing.npz")

    def theirs(self, strategy, sizes="rows", values="tokens"):
        bounds = np.cumsum(self.GOLDEN[f"{strategy}_{sizes}"])[:-1]
        return [part.tolist() for part in np.split(self.GOLDEN[f"{strategy}_{values}"], bounds)]

    def ours(self, strategy):
        lengths, capacity = self.GOLDEN["lengths"].tolist(), int(self.GOLDEN["capacity"])
        return STRATEGIES[strategy](lengths, capacity)

    @pytest.mark.parametrize("strategy", sorted(STRATEGIES))
    def test_rows_are_as_full(self, strategy):
        ours = [sum(piece.length for piece in row) for row in self.ours(strategy)]
        assert sorted(ours) == sorted(self.GOLDEN[f"{strategy}_rows"].tolist())

    @pytest.mark.parametrize("strategy", ["bfd", "bfd_split"])
    def test_rows_hold_pieces_of_the_same_lengths(self, strategy):
        ours = [[piece.length for piece in row] for row in self.ours(strategy)]
        assert ours == self.theirs(strategy, "counts", "parts")

    def test_wrapped_rows_are_the_same(self):
        ours = [
            [1000 * i + k for i, start, stop in row for k in range(start, stop)]
            for row in self.ours("wrapped")
        ]
        assert ours == self.theirs("wrapped")

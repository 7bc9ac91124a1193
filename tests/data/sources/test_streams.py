# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest

from jrl.data.preferences.comparison_format import ComparisonFormat
from jrl.data.preferences.preference_format import PreferenceFormat
from jrl.data.preferences.preference_set import ComparisonSet, PreferenceSet
from jrl.data.sources.records import RecordStream, read_records
from jrl.data.sources.streams import StreamSet
from jrl.data.tokenizer import load_tokenizer
from tests.tiny import tiny_tokenizer


class Numbers:
    """Counts from 0 whenever it is asked, and counts how often that was."""

    def __init__(self, size):
        self.size, self.starts, self.read = size, 0, 0

    def __iter__(self):
        self.starts += 1
        for number in range(self.size):
            self.read += 1
            yield number


def even(record, row):
    """Drops odd numbers."""
    return None if record % 2 else record


def stream_set(source, *, encode=lambda record, row: record, **options):
    collate = lambda rows, real: (list(rows), real.tolist())  # noqa: E731
    return StreamSet(RecordStream(source), encode, collate, **({"seed": 0} | options))


def real_rows(found, step, batch_size):
    rows, real = found.batch(step, batch_size)
    assert len(rows) == batch_size
    return [row for row, flag in zip(rows, real, strict=True) if flag]


class TestOrder:
    def test_a_pass_begins_with_a_new_batch(self):
        found = stream_set(Numbers(5))
        assert [found.batch(step, 2) for step in range(4)] == [
            ([0, 1], [True, True]),
            ([2, 3], [True, True]),
            ([4, 4], [True, False]),
            ([0, 1], [True, True]),
        ]

    def test_a_pass_that_ends_with_its_batch_leaves_no_empty_one(self):
        found = stream_set(Numbers(4))
        assert [real_rows(found, step, 2) for step in range(3)] == [[0, 1], [2, 3], [0, 1]]

    def test_left_out_records_take_no_place(self):
        found = stream_set(Numbers(7), encode=even)
        assert [real_rows(found, step, 2) for step in range(2)] == [[0, 2], [4, 6]]
        # A pass is over when the next one begins.
        found.batch(2, 2)
        assert found.num_dropped >= 3

    @pytest.mark.parametrize("shuffle_buffer", [0, 3])
    def test_lore_9_1_a_resumed_run_goes_on_with_the_same_rows(self, shuffle_buffer):
        options = {"encode": even, "shuffle_buffer": shuffle_buffer, "seed": 5}
        found = stream_set(Numbers(11), **options)
        forward = [found.batch(step, 4) for step in range(7)]
        assert stream_set(Numbers(11), **options).batch(5, 4) == forward[5]
        backward = stream_set(Numbers(11), **options)
        assert [backward.batch(step, 4) for step in reversed(range(7))] == forward[::-1]

    def test_another_batch_size_begins_the_stream_again(self):
        found = stream_set(Numbers(6))
        found.batch(0, 3)
        assert found.batch(1, 2) == ([2, 3], [True, True])

    def test_one_step_after_another_reads_each_record_once(self):
        numbers = Numbers(12)
        found = stream_set(numbers)
        for step in (0, 0, 1, 2, 2):
            found.batch(step, 3)
        assert (numbers.starts, numbers.read) == (1, 9)


class TestShuffling:
    def passes(self, seed, buffer, size=20):
        found = stream_set(Numbers(size), seed=seed, shuffle_buffer=buffer)
        return [real_rows(found, step, size) for step in range(2)]

    def test_each_record_comes_once_a_pass_and_passes_differ(self):
        one, two = self.passes(0, 6)
        assert sorted(one) == sorted(two) == list(range(20))
        assert one != two and one != sorted(one)

    def test_the_order_is_a_function_of_the_seed(self):
        assert self.passes(0, 6) == self.passes(0, 6) != self.passes(1, 6)

    def test_a_buffer_of_all_records(self):
        one, _ = self.passes(0, 50)
        assert sorted(one) == list(range(20)) != one

    def test_errors_name_the_place_in_the_stream_not_in_the_buffer(self):
        seen = []
        found = stream_set(
            Numbers(9), encode=lambda record, row: seen.append((record, row)), shuffle_buffer=4
        )
        with pytest.raises(ValueError, match="nothing to learn from is left of the stream"):
            found.batch(0, 2)
        assert all(record == row for record, row in seen) and len(seen) == 9


class TestErrors:
    def test_the_length_is_unknown(self):
        with pytest.raises(TypeError, match=r"length of a stream is not known: give `train\.total_steps`"):
            len(stream_set(Numbers(3)))

    def test_an_empty_stream(self):
        with pytest.raises(ValueError, match="it has no records, or all of them are too long"):
            stream_set(Numbers(0)).batch(0, 2)

    def test_a_generator_has_one_pass(self):
        found = stream_set(iter(range(3)))
        assert real_rows(found, 0, 2) == [0, 1] and real_rows(found, 1, 2) == [2]
        with pytest.raises(ValueError, match="gives its records once"):
            found.batch(2, 2)

    def test_a_negative_buffer(self):
        with pytest.raises(ValueError, match="`shuffle_buffer` must be at least 0, got -1"):
            stream_set(Numbers(3), shuffle_buffer=-1)


def test_the_fingerprint_holds_what_the_order_depends_on():
    found = [stream_set(Numbers(3)), stream_set(Numbers(3), seed=1), stream_set(Numbers(3), shuffle_buffer=2)]
    assert len({one.sha256() for one in found}) == 3


RECORDS = [{"prompt": "ab" * n, "chosen": "yes" * n, "rejected": "no"} for n in range(1, 6)]


class TestPairs:
    """A stream gives the batches that the same records give as a list, but for the order."""

    @pytest.fixture
    def tokenizer(self):
        return load_tokenizer(tiny_tokenizer())

    def check(self, streamed, listed):
        order = np.arange(5)
        for step, rows in enumerate((order[:2], order[2:4], order[[4, 4]])):
            batch = streamed.batch(step, 2)
            expected = listed.batch_of(rows, np.array([True, step < 2]))
            for one, other in zip(_leaves(batch), _leaves(expected), strict=True):
                np.testing.assert_array_equal(one, other)

    def test_preferences(self, tokenizer):
        rules = PreferenceFormat(tokenizer=tokenizer, max_length=12)
        with pytest.warns(UserWarning, match="were cut"):
            listed = PreferenceSet(RECORDS, tokenizer, max_length=12, seed=0)
        self.check(StreamSet(RecordStream(RECORDS), rules.encode, rules.collate, seed=0), listed)

    def test_comparisons(self, tokenizer):
        rules = ComparisonFormat(tokenizer=tokenizer, max_length=64)
        listed = ComparisonSet(RECORDS, tokenizer, max_length=64, seed=0)
        self.check(StreamSet(RecordStream(RECORDS), rules.encode, rules.collate, seed=0), listed)

    def test_an_iterable_dataset(self, tokenizer):
        datasets = pytest.importorskip("datasets")
        rules = ComparisonFormat(tokenizer=tokenizer, max_length=64)
        stream = read_records(datasets.Dataset.from_list(RECORDS).to_iterable_dataset())
        listed = ComparisonSet(RECORDS, tokenizer, max_length=64, seed=0)
        self.check(StreamSet(stream, rules.encode, rules.collate, seed=0), listed)

    @pytest.mark.parametrize("rules", [PreferenceFormat, ComparisonFormat])
    @pytest.mark.parametrize(
        ("record", "message"),
        [
            ({"prompt": "a", "chosen": "b"}, "row 1 needs the column 'rejected'"),
            (
                {
                    "chosen": [{"role": "user", "content": "a"}] * 2,
                    "rejected": [{"role": "user", "content": "b"}],
                },
                "row 1: ",
            ),
        ],
    )
    def test_errors_name_the_row(self, tokenizer, rules, record, message):
        made = rules(tokenizer=tokenizer, max_length=64)
        found = StreamSet(RecordStream([RECORDS[0], record]), made.encode, made.collate, seed=0)
        with pytest.raises(ValueError, match=message):
            found.batch(0, 2)

    @pytest.mark.parametrize("rules", [PreferenceFormat, ComparisonFormat])
    def test_equal_pairs_are_left_out(self, tokenizer, rules):
        made = rules(tokenizer=tokenizer, max_length=64)
        assert made.encode({"prompt": "a", "chosen": "b", "rejected": "b"}, 0) is None


def _leaves(batch):
    """The arrays of nested tuples."""
    if isinstance(batch, tuple):
        return [leaf for part in batch for leaf in _leaves(part)]
    return [] if batch is None else [batch]

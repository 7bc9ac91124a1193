# SPDX-License-Identifier: Apache-2.0
import itertools

import pytest

from jrl.data.sources.records import RecordStream, read_records

ROWS = [{"chosen": "a", "rejected": "b"}, {"chosen": "c", "rejected": "d"}]


class Countdown:
    """A stream that begins anew whenever it is asked."""

    def __init__(self, start):
        self.start = start

    def __iter__(self):
        return iter(range(self.start, 0, -1))


class Map:
    """As torch's data sets are: a length and places."""

    def __len__(self):
        return len(ROWS)

    def __getitem__(self, row):
        return ROWS[row]


class TestKinds:
    @pytest.mark.parametrize("source", [ROWS, tuple(ROWS), Map()])
    def test_what_has_a_length_becomes_a_list(self, source):
        found = read_records(source)
        assert found == ROWS and found is not source

    def test_one_split_of_several(self):
        splits = {"train": ROWS, "test": ROWS[:1]}
        assert read_records(splits, split="test") == ROWS[:1]
        with pytest.raises(ValueError, match=r"`split` must be one of \['test', 'train'\], got 'validation'"):
            read_records(splits, split="validation")

    def test_a_file(self, tmp_path):
        (tmp_path / "a.csv").write_text("chosen,rejected\na,b\nc,d\n")
        assert read_records(tmp_path / "a.csv") == read_records(str(tmp_path / "a.csv")) == ROWS

    def test_a_table_of_pandas(self):
        pandas = pytest.importorskip("pandas")
        assert read_records(pandas.DataFrame(ROWS)) == ROWS

    @pytest.mark.parametrize("source", [[], ()])
    def test_nothing(self, source):
        with pytest.raises(ValueError, match="holds no records"):
            read_records(source)

    def test_no_records_at_all(self):
        with pytest.raises(TypeError, match=r"records must be a list, .* or a stream, got int"):
            read_records(3)


class TestStreams:
    def test_what_has_no_length_is_a_stream(self):
        stream = read_records(Countdown(3))
        assert isinstance(stream, RecordStream) and read_records(stream) is stream
        assert list(stream.restart()) == [3, 2, 1]
        assert list(itertools.islice(stream, 2)) == [3, 2] and list(stream) == [3, 2, 1]

    def test_a_generator_gives_its_records_once(self):
        stream = read_records(row for row in ROWS)
        assert list(stream) == ROWS
        with pytest.raises(ValueError, match="this generator gives its records once"):
            stream.restart()

    def test_the_fingerprint_says_what_is_known(self):
        one, two = RecordStream(ROWS, identity="a"), RecordStream(ROWS, identity="b")
        assert one.fingerprint != two.fingerprint
        assert RecordStream(Countdown(3)).fingerprint == RecordStream(Countdown(4)).fingerprint
        assert RecordStream(Countdown(3)).fingerprint != RecordStream(Map()).fingerprint


class TestDatasets:
    @pytest.fixture
    def datasets(self, tmp_path, monkeypatch):
        monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path))
        return pytest.importorskip("datasets")

    def test_a_table(self, datasets):
        assert read_records(datasets.Dataset.from_list(ROWS)) == ROWS

    def test_splits(self, datasets):
        splits = datasets.DatasetDict({"test": datasets.Dataset.from_list(ROWS)})
        assert read_records(splits, split="test") == ROWS

    def test_a_stream_begins_anew(self, datasets):
        stream = read_records(datasets.Dataset.from_list(ROWS).to_iterable_dataset())
        assert isinstance(stream, RecordStream)
        assert list(stream) == list(stream) == ROWS

    def test_streams_of_other_columns_differ(self, datasets):
        one, two = (
            read_records(datasets.Dataset.from_list([row]).to_iterable_dataset())
            for row in ({"a": 1}, {"b": 1})
        )
        assert one.fingerprint != two.fingerprint
        again = read_records(datasets.Dataset.from_list([{"a": 1}]).to_iterable_dataset())
        assert again.fingerprint == one.fingerprint

    def test_parquet(self, datasets, tmp_path):
        path = tmp_path / "a.parquet"
        datasets.Dataset.from_list(ROWS).to_parquet(path)
        assert read_records(path) == ROWS

    def test_a_streamed_name(self, datasets, monkeypatch):
        calls = []

        def load_dataset(name, **options):
            calls.append((name, options))
            return datasets.Dataset.from_list(ROWS).to_iterable_dataset()

        monkeypatch.setattr(datasets, "load_dataset", load_dataset)
        assert list(read_records("some/pairs:test", streaming=True)) == ROWS
        assert calls == [("some/pairs", {"split": "test", "streaming": True, "trust_remote_code": False})]

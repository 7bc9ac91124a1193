# SPDX-License-Identifier: Apache-2.0
import json
import sys
import types

import pytest

from jrl.data.sources import load_prompts, load_samples


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return tmp_path / name

    return write


class TestPrompts:
    def test_lines(self, write):
        assert load_prompts(write("a.txt", "one \n\ntwö \x0c three\n")) == ["one ", "twö \x0c three"]

    def test_json_lines_with_metadata(self, write):
        lines = '{"prompt": "one", "topic": "x"}\n{"text": "two", "topic": "y"}\n"three"\n'
        assert load_prompts(write("a.jsonl", lines)) == [
            {"prompt": "one", "topic": "x"},
            {"prompt": "two", "topic": "y"},
            "three",
        ]

    @pytest.mark.parametrize("column", ["prompt", "text", "query"])
    def test_columns(self, write, column):
        path = write("a.csv", f'{column}\none\n"two, ""or"" three"\n')
        assert load_prompts(path) == ["one", 'two, "or" three']

    def test_json(self, write):
        assert load_prompts(write("a.json", json.dumps(["one", {"query": "two"}]))) == ["one", "two"]

    def test_missing_column_lists_those_found(self, write):
        with pytest.raises(ValueError, match=r"record 0 .*'query'.*found \['label', 'review'\]"):
            load_prompts(write("a.csv", "review,label\none,1\n"))


class TestSamples:
    @pytest.mark.parametrize("column", ["completion", "output", "response"])
    def test_pairs(self, write, column):
        line = json.dumps({"prompt": "one", column: "two", "text": "both"})
        assert load_samples(write("a.jsonl", line)) == [["one", "two"]]

    def test_texts_and_dialogues(self, write):
        path = write("a.jsonl", '"one"\n{"text": "two"}\n["a", "b", "c", "d"]\n')
        assert load_samples(path) == ["one", "two", ["a", "b", "c", "d"]]

    def test_missing_column_lists_those_found(self, write):
        with pytest.raises(ValueError, match=r"record 0 .*'completion'.*found \['prompt', 'reply'\]"):
            load_samples(write("a.jsonl", '{"prompt": "a", "reply": "b"}\n'))

    def test_no_text_names_the_record(self, write):
        with pytest.raises(ValueError, match='"text" of record 1 must be a text, got int'):
            load_samples(write("a.jsonl", '{"text": "a"}\n{"text": 3}\n'))


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.jsonl", '{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
            ("a.json", '{"prompt": "a"}', "must hold a list of records, got dict"),
            ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', r"One record a line is \.jsonl"),
            ("a.txt", "\n", "holds no records"),
            ("a.xlsx", "?", r"jrl reads .*'\.jsonl'.* files, got '\.xlsx'"),
        ],
    )
    def test_unreadable(self, write, name, text, message):
        with pytest.raises(ValueError, match=message):
            load_prompts(write(name, text))

    def test_missing(self):
        with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.jsonl"):
            load_prompts("nowhere.jsonl")


class TestDatasets:
    @pytest.fixture
    def calls(self, monkeypatch):
        calls = []

        def load_dataset(*arguments, **keywords):
            calls.append((arguments, keywords))
            return [{"text": "one", "label": 1}]

        monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
        return calls

    def test_by_name_and_split(self, calls):
        assert load_prompts("stanfordnlp/imdb:test") == [{"prompt": "one", "label": 1}]
        assert load_samples("stanfordnlp/imdb") == ["one"]
        name = ("stanfordnlp/imdb",)
        assert calls == [(name, {"split": "test"}), (name, {"split": "train"})]

    def test_parquet(self, calls, write):
        path = write("a.parquet", "")
        assert load_samples(path) == ["one"]
        assert calls == [(("parquet",), {"data_files": str(path), "split": "train"})]

    def test_missing_library_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ValueError, match=r"pip install 'jrl\[datasets\]'"):
            load_prompts("stanfordnlp/imdb")

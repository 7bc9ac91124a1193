# SPDX-License-Identifier: Apache-2.0
import csv
import json
import sys
import types

import pytest

from jrl.data.sources.named_sources import load_prompts, load_rewarded_samples, load_samples


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
        lines = '"one"\n{"text": "two"}\n["a", "b", "c", "d"]\n{"messages": ["e", "f"], "text": "all"}\n'
        path = write("a.jsonl", lines)
        assert load_samples(path) == ["one", "two", ["a", "b", "c", "d"], ["e", "f"]]

    def test_episodes_are_taken_as_they_are(self, write):
        record = {"prompt": "a", "output": "no output", "turns": [{"output": "b"}], "done": True}
        assert load_samples(write("a.jsonl", json.dumps(record))) == [record]

    def test_messages_with_roles_are_refused(self, write):
        line = '{"messages": [{"role": "user", "content": "hello"}]}'
        with pytest.raises(ValueError, match=r'"messages" of record 0 .* got .*role.*chat template'):
            load_samples(write("a.jsonl", line))

    def test_missing_column_lists_those_found(self, write):
        with pytest.raises(ValueError, match=r"record 0 .*'completion'.*found \['prompt', 'reply'\]"):
            load_samples(write("a.jsonl", '{"prompt": "a", "reply": "b"}\n'))

    def test_no_text_names_the_record(self, write):
        with pytest.raises(ValueError, match='"text" of record 1 must be a text, got int'):
            load_samples(write("a.jsonl", '{"text": "a"}\n{"text": 3}\n'))


class TestRewardedSamples:
    @pytest.mark.parametrize("column", ["reward", "score", "label"])
    def test_columns(self, write, column):
        rows = f"text,{column}\none,1\ntwo,-0.5\n"
        assert load_rewarded_samples(write("a.csv", rows)) == (["one", "two"], [1.0, -0.5])

    def test_the_first_column_that_there_is_counts(self, write):
        lines = (
            '{"prompt": "a", "output": "b", "label": 0, "reward": 2}\n{"messages": ["c", "d"], "score": 3}\n'
        )
        assert load_rewarded_samples(write("a.jsonl", lines)) == ([["a", "b"], ["c", "d"]], [2.0, 3.0])

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (
                '{"text": "a", "rating": 1}',
                r"record 1 .*'reward', 'score', 'label'.*found \['rating', 'text'\]",
            ),
            ('"a"', r"record 1 .*'reward', 'score', 'label'.*found str"),
            ('{"text": "a", "label": "good"}', "\"label\" of record 1 must be a number, got 'good'"),
            ('{"text": "a", "label": null}', '"label" of record 1 must be a number, got None'),
        ],
    )
    def test_no_reward_names_the_record(self, write, line, message):
        with pytest.raises(ValueError, match=message):
            load_rewarded_samples(write("a.jsonl", '{"text": "a", "reward": 1}\n' + line))


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text", "message"),
        [
            ("a.jsonl", '{"prompt": "a"}\nnot json\n', "line 2 is not JSON"),
            ("a.json", '{"prompt": "a"}', "must hold a list of records, got dict"),
            ("a.json", '{"prompt": "a"}\n{"prompt": "b"}', r"One record a line is \.jsonl"),
            ("a.txt", "\n", "holds no records"),
            ("a.json", "[" * 100_000 + "]" * 100_000, "nested too deeply"),
            ("a.jsonl", '"a"\n' + "[" * 100_000 + "]" * 100_000, "line 2 is nested too deeply"),
            ("a.csv", "prompt\na\0b\n", "line 2 holds a NUL character: is it UTF-16"),
            ("a.csv", "prompt\na\n\nb,c\n", "line 4 has more fields than the first line has names"),
            ("a.csv", "prompt,topic\na\n", "line 2 has fewer fields"),
            ("a.xlsx", "?", r"jrl reads .*'\.jsonl'.* files, got '\.xlsx'"),
        ],
    )
    def test_unreadable(self, write, name, text, message):
        with pytest.raises(ValueError, match=message):
            load_prompts(write(name, text))

    @pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.csv"])
    def test_another_encoding_names_the_file(self, tmp_path, name):
        (tmp_path / name).write_bytes("prompt\ncaf\xe9\n".encode("latin-1"))
        with pytest.raises(ValueError, match=rf"{name} must be text in UTF-8"):
            load_prompts(tmp_path / name)

    def test_a_field_of_a_csv_file_may_be_a_book(self, write):
        limit = csv.field_size_limit()
        assert load_prompts(write("a.csv", f"prompt\n{'x' * 200_000}\n")) == ["x" * 200_000]
        assert csv.field_size_limit() == limit

    def test_missing(self):
        with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.jsonl"):
            load_prompts("nowhere.jsonl")

    def test_a_misspelled_file_is_suggested_and_no_other(self, write):
        folder = write("run4.txt", "a").parent
        write("prompts.txt", "a")
        with pytest.raises(FileNotFoundError, match=r"Did you mean `prompts\.txt`\?"):
            load_prompts(folder / "promts.txt")
        with pytest.raises(FileNotFoundError) as error:
            load_prompts(folder / "nope.txt")
        assert "Did you mean" not in str(error.value) and "Give its path from there" in str(error.value)


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
        safe = {"trust_remote_code": False}
        assert calls == [(name, {"split": "test"} | safe), (name, {"split": "train"} | safe)]

    def test_parquet(self, calls, write):
        path = write("a.parquet", "")
        assert load_samples(path) == ["one"]
        options = {"data_files": str(path), "split": "train", "trust_remote_code": False}
        assert calls == [(("parquet",), options)]

    def test_missing_library_names_the_extra(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "datasets", None)
        with pytest.raises(ValueError, match="pip install datasets"):
            load_prompts("stanfordnlp/imdb")

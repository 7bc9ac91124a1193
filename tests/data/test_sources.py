# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from jrl.data.sources import load_prompts, load_samples


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        (tmp_path / name).write_text(text, encoding="utf-8")
        return str(tmp_path / name)

    return write


class TestPrompts:
    def test_lines(self, write):
        assert load_prompts(write("x.txt", "one \n\ntwö\n")) == ["one ", "twö"]

    def test_records(self, write):
        source = write("x.jsonl", '{"prompt": "a", "n": 1}\n"b"\n{"text": "c"}\n')
        assert load_prompts(source) == [{"prompt": "a", "n": 1}, "b", "c"]
        assert load_prompts(write("x.json", '["a", {"prompt": "b"}]')) == ["a", "b"]

    def test_csv(self, write):
        source = write("x.csv", 'prompt,label\n"a, b",1\n')
        assert load_prompts(source) == [{"prompt": "a, b", "label": "1"}]

    def test_errors(self, write):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            load_prompts("nowhere.txt")
        with pytest.raises(ValueError, match="record 1"):
            load_prompts(write("x.json", '["a", {"n": 1}]'))
        with pytest.raises(ValueError, match="no record"):
            load_prompts(write("x.txt", "\n"))
        with pytest.raises(ValueError, match="JSON list"):
            load_prompts(write("x.json", '{"prompt": "a"}'))


class TestSamples:
    def test_forms(self, write):
        lines = '"a"\n["b", "c"]\n{"prompt": "d", "completion": "e"}\n{"text": "f"}\n'
        assert load_samples(write("x.jsonl", lines)) == ["a", ["b", "c"], ["d", "e"], "f"]

    def test_a_prompt_without_output_is_refused(self, write):
        with pytest.raises(ValueError, match="record 0"):
            load_samples(write("x.jsonl", '{"prompt": "d"}\n'))

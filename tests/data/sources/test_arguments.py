# SPDX-License-Identifier: Apache-2.0
"""Every form in which a user may bring prompts and samples gives the same rows."""

import itertools
import json
from pathlib import Path

import pytest

from jrl.data.sources import arguments
from jrl.data.sources.arguments import prompt_rows, sample_rows
from jrl.data.sources.records import RecordStream

PROMPTS = [{"prompt": "2 + 2 =", "answer": "4"}, {"prompt": "3 + 4 =", "answer": "7"}]
SAMPLES = [{"prompt": "2 + 2 =", "completion": " 4"}, {"prompt": "3 + 4 =", "completion": " 7"}]
CHAT = [{"role": "user", "content": "What is 2 + 2?"}]
FORMS = (
    "list",
    "generator",
    "stream",
    "pandas",
    "Dataset",
    "DatasetDict",
    "IterableDataset",
    "jsonl",
    "json",
    "csv",
    "parquet",
)


def brought(form: str, rows: list[dict[str, str]], folder: Path):
    """The same rows in a form."""
    if form in ("list", "generator", "stream"):
        makers = {"list": list, "generator": iter, "stream": lambda found: RecordStream(iter(found))}
        return makers[form](rows)
    if form in ("jsonl", "json"):
        path = folder / f"rows.{form}"
        text = json.dumps(rows) if form == "json" else "\n".join(map(json.dumps, rows))
        path.write_text(text, encoding="utf-8")
        return str(path)
    if form in ("pandas", "csv"):
        table = pytest.importorskip("pandas").DataFrame(rows)
        if form == "pandas":
            return table
        table.to_csv(folder / "rows.csv", index=False)
        return folder / "rows.csv"
    datasets = pytest.importorskip("datasets")
    found = datasets.Dataset.from_list(rows)
    if form == "parquet":
        found.to_parquet(folder / "rows.parquet")
        return folder / "rows.parquet"
    if form == "DatasetDict":
        return datasets.DatasetDict(train=found)
    return found if form == "Dataset" else found.to_iterable_dataset()


@pytest.mark.parametrize("form", FORMS)
def test_prompts_are_the_same_rows(form, tmp_path):
    assert prompt_rows("prompts", brought(form, PROMPTS, tmp_path)) == PROMPTS


@pytest.mark.parametrize("form", FORMS)
def test_samples_are_the_same_rows(form, tmp_path):
    assert list(sample_rows(brought(form, SAMPLES, tmp_path), rewarded=False)) == SAMPLES


@pytest.mark.parametrize("form", ["pandas", "Dataset", "csv"])
def test_samples_with_rewards_become_pairs(form, tmp_path):
    found = sample_rows(brought(form, SAMPLES, tmp_path), rewarded=True)
    assert found == [["2 + 2 =", " 4"], ["3 + 4 =", " 7"]]


@pytest.mark.parametrize("column", ["text", "query", "messages"])
def test_a_column_of_a_table_may_have_another_name(column):
    table = pytest.importorskip("pandas").DataFrame({column: [CHAT if column == "messages" else "hello"]})
    expected = {"prompt": CHAT} if column == "messages" else "hello"
    assert prompt_rows("prompts", table) == [expected]


@pytest.mark.parametrize("form", ["generator", "stream"])
@pytest.mark.parametrize("column", ["text", "query"])
def test_a_column_of_a_stream_may_have_another_name(form, column, tmp_path):
    rows = [{column: "hello"}, {column: "you", "answer": "4"}, "a text"]
    found = prompt_rows("prompts", brought(form, rows, tmp_path))
    assert found == ["hello", {"prompt": "you", "answer": "4"}, "a text"]


@pytest.mark.parametrize("name", ["x" * 5000 + ".txt", "x" * 300 + "/prompts.txt"])
def test_a_name_too_long_for_a_file_is_no_file(name):
    with pytest.raises(FileNotFoundError, match=r"there is no file x{200}, seen from .* Give its path"):
        prompt_rows("prompts", name)


def test_messages_of_a_file_are_prompts(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": CHAT, "answer": "4"}), encoding="utf-8")
    assert prompt_rows("prompts", path) == [{"prompt": CHAT, "answer": "4"}]


def test_a_stream_without_an_end_is_refused(monkeypatch):
    monkeypatch.setattr(arguments, "MOST_ROWS", 3)
    assert len(prompt_rows("prompts", iter("abc"))) == 3
    with pytest.raises(ValueError, match=r"`eval_prompts` must end: a count .* more than 3 rows"):
        prompt_rows("eval_prompts", itertools.count())


def test_other_things_stay_as_they_are():
    for given in (None, "a single text", ["a"], Path("a")):
        assert prompt_rows("prompts", given) is given and sample_rows(given, rewarded=True) is given

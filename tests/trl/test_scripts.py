# SPDX-License-Identifier: Apache-2.0
"""Data and model of a script: mixtures of data sets, and what the model's options become."""

import json

import pytest

from jrl.data.sources.records import RecordStream
from jrl.models.adapters.config import read_adapter_config
from jrl.trl.parser import TrlParser
from jrl.trl.scripts import (
    DatasetConfig,
    DatasetMixtureConfig,
    ModelConfig,
    ScriptArguments,
    get_dataset,
    get_kbit_device_map,
    get_peft_config,
    get_quantization_config,
)


@pytest.fixture
def files(tmp_path):
    """Two files of 30 and 10 rows."""
    paths = []
    for name, count in (("a", 30), ("b", 10)):
        rows = [{"text": f"{name}{i}", "more": i} for i in range(count)]
        paths.append(str(tmp_path / f"{name}.jsonl"))
        (tmp_path / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return paths


def texts(rows):
    return [row["text"] for row in rows]


class TestMixture:
    def test_one_after_another_with_chosen_columns(self, files):
        found = get_dataset(
            DatasetMixtureConfig([{"path": files[1], "columns": ["text"]}, {"path": files[0]}])
        )
        assert texts(found["train"]) == [f"b{i}" for i in range(10)] + [f"a{i}" for i in range(30)]
        assert isinstance(found, dict) and isinstance(found["train"], list), (
            "a column of some rows alone is kept"
        )
        assert set(found["train"][0]) == {"text"} and set(found["train"][-1]) == {"text", "more"}
        assert list(found) == ["train"]

    @pytest.mark.parametrize(
        ("fractions", "sizes"), [((0.5, 0.5), (10, 10)), ((3, 1), (30, 10)), ((1, 4), (2, 10))]
    )
    def test_fractions_make_it_as_large_as_no_row_twice_allows(self, files, fractions, sizes):
        entries = [DatasetConfig(path, fraction=f) for path, f in zip(files, fractions, strict=True)]
        rows = texts(get_dataset(DatasetMixtureConfig(entries))["train"])
        assert rows == [f"a{i}" for i in range(sizes[0])] + [f"b{i}" for i in range(sizes[1])]

    @pytest.mark.parametrize(("size", "held_out"), [(0.25, 10), (3, 3)])
    def test_rows_are_held_out(self, files, size, held_out):
        found = get_dataset(DatasetMixtureConfig([{"path": f} for f in files], test_split_size=size))
        assert len(found["train"]) == 40 - held_out and len(found["test"]) == held_out
        assert not set(texts(found["train"])) & set(texts(found["test"]))

    def test_streams_are_read_as_they_come_and_again(self, files, monkeypatch):
        class Endless:
            def __iter__(self):
                yield from ({"text": str(i), "more": 0} for i in range(3))

        monkeypatch.setattr("jrl.trl.scripts.read_records", lambda *_, **__: RecordStream(Endless()))
        entries = [{"path": files[0], "columns": ["text"]}, {"path": files[1]}]
        found = get_dataset(DatasetMixtureConfig(entries, streaming=True))["train"]
        for _ in range(2):
            rows = list(found.restart())
            assert texts(rows) == ["0", "1", "2"] * 2 and set(rows[0]) == {"text"}
        with pytest.raises(ValueError, match="must be None for streamed data"):
            get_dataset(DatasetMixtureConfig(entries, streaming=True, test_split_size=1))

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ([{"pth": "x"}], r"`datasets\[0\]` must be a mapping that holds `path`"),
            ([{"path": "x", "splt": "y"}], "has no field `splt`. Did you mean `split`?"),
            ([{"path": "x", "fraction": 1}, {"path": "y"}], "for all of `datasets` or for none"),
            ([{"path": "x", "fraction": 0}], "`fraction` must be positive"),
        ],
    )
    def test_mistakes(self, entries, message):
        with pytest.raises(ValueError, match=message):
            DatasetMixtureConfig(entries)

    def test_mistakes_in_the_data(self, files):
        with pytest.raises(ValueError, match=r"record 0 lacks the column `txt`; it has \['more', 'text'\]"):
            get_dataset(DatasetMixtureConfig([{"path": files[0], "columns": ["txt"]}]))
        with pytest.raises(ValueError, match="must leave rows on both sides, got 40, 40 of 40"):
            get_dataset(DatasetMixtureConfig([{"path": f} for f in files], test_split_size=40))
        with pytest.raises(ValueError, match="at least one data set"):
            get_dataset(DatasetMixtureConfig())


class TestModel:
    def test_lora_in_the_keys_of_peft(self):
        assert get_peft_config(ModelConfig()) is None
        found = get_peft_config(ModelConfig(use_peft=True, lora_r=4, lora_target_modules=["all-linear"]))
        adapter = read_adapter_config(found)
        assert (adapter.r, adapter.lora_alpha, adapter.target_modules) == (4, 32, "all-linear")
        assert found["bias"] == "none"

    def test_bits(self):
        assert get_quantization_config(ModelConfig()) is None
        assert get_quantization_config(ModelConfig(load_in_8bit=True)) == "int8"
        assert get_quantization_config(ModelConfig(load_in_4bit=True)) == "nf4"
        with pytest.raises(ValueError, match="must be 'nf4', got 'fp4'"):
            get_quantization_config(ModelConfig(load_in_4bit=True, bnb_4bit_quant_type="fp4"))
        with pytest.raises(ValueError, match="must not both be true"):
            ModelConfig(load_in_4bit=True, load_in_8bit=True)
        assert get_kbit_device_map() is None

    def test_from_a_file_and_flags(self, tmp_path):
        path = tmp_path / "c.yaml"
        path.write_text(
            "datasets: [{path: x.jsonl, fraction: 0.5}]\nlora_target_modules: all-linear\ndtype: auto\n"
        )
        parser = TrlParser((ScriptArguments, ModelConfig, DatasetMixtureConfig))
        words = ["--config", str(path), "--dataset_name", "y", "--use_peft"]
        script, model, mixture = parser.parse_args_and_config(words)
        assert (script.dataset_name, model.use_peft, model.dtype) == ("y", True, "auto")
        assert mixture.datasets == [DatasetConfig("x.jsonl", fraction=0.5)]
        assert model.lora_target_modules == "all-linear"


def test_a_mixture_of_rows_alike_is_a_dataset_dict(tmp_path):
    datasets = pytest.importorskip("datasets")
    file = tmp_path / "rows.jsonl"
    file.write_text("".join(f'{{"text": "t{i}"}}\n' for i in range(10)))
    found = get_dataset(DatasetMixtureConfig([{"path": str(file)}], test_split_size=0.2))
    assert isinstance(found, datasets.DatasetDict) and found["train"].column_names == ["text"]
    assert found["test"]["text"] == ["t8", "t9"]

# SPDX-License-Identifier: Apache-2.0
"""Folders and configs: what is refused says so in one line, and nothing of a checkpoint is executed."""

import json
import re
import shutil
from pathlib import Path

import huggingface_hub
import numpy as np
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError
from huggingface_hub.utils import filter_repo_objects
from safetensors.numpy import save_file

import jrl
from jrl.models import folders
from jrl.models.checkpoint import load_checkpoint
from jrl.models.classifier import load_classifier
from jrl.models.hub import (
    find_checkpoint,
    find_folder,
    open_tensors,
    read_generation_config,
    read_hf_config,
)
from jrl.models.safetensors_io import conversion_line
from tests.tiny import tiny_hf_config

LLAMA = tiny_hf_config("llama").to_dict()
GPTQ = {"quant_method": "gptq", "bits": 4}


def folder_with(tmp_path, config):
    text = config if isinstance(config, str) else json.dumps(config)
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def one_line(error):
    return "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ('{"model_type": "lla', r"config.json is not valid JSON: .*Is it cut off\?"),
        ("[1]", "config.json must hold a JSON object, got list"),
        ({}, "`model_type` None is not supported; supported are: .*llama"),
        ({"model_type": "rwkv"}, "`model_type` 'rwkv' is not supported; supported are: .*llama"),
        (
            LLAMA | {"hidden_size": "wide"},
            "config.json is refused by transformers: .*'hidden_size' expected int",
        ),
        (LLAMA | {"hidden_size": 33}, "hidden size .33. is not a multiple of the number of attention heads"),
        (LLAMA | {"quantization_config": GPTQ}, "quantised .*'gptq'.*full-precision.*`model.frozen_dtype`"),
        (LLAMA | {"rope_scaling": {"rope_type": "spiral", "factor": 2.0}}, "spiral"),
        (LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        (LLAMA | {"rope_scaling": {"rope_type": "linear", "factor": 0.0}}, "`factor` .* positive .* got 0.0"),
        (LLAMA | {"compression_config": GPTQ}, "quantised .`compression_config`: 'gptq'.*full-precision"),
        (LLAMA | {"model_type": ["llama"]}, r"`model_type` \['llama'\] is not supported"),
        (LLAMA | {"num_attention_heads": 0}, "config.json .*ZeroDivisionError"),
        (LLAMA | {"num_key_value_heads": 0}, "config.json"),
        ('{"a":' * 100_000, "config.json is nested too deeply"),
        (LLAMA | {"rope_scaling": "double"}, "config.json is refused by transformers"),
        (
            LLAMA | {"num_hidden_layers": 10**9},
            "`num_hidden_layers` must be at most 10,000, got 1,000,000,000",
        ),
        ({"model_type": "gpt2", "n_layer": 10**9}, "`n_layer` must be at most 10,000"),
        ({"model_type": "gpt2", "vocab_size": 10**12}, "`vocab_size` must be at most 2,147,483,647"),
        (
            {"model_type": "t5", "num_layers": 2, "num_decoder_layers": 10**9},
            "`num_decoder_layers` must be at most",
        ),
        (
            "version https://git-lfs.github.com/spec/v1\noid sha256:0",
            "config.json is a git-lfs pointer.*git lfs pull",
        ),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_a_config_that_cannot_be_used_is_refused(tmp_path, config, message):
    folder_with(tmp_path, config)
    with pytest.raises(ValueError, match=message) as error:
        load_checkpoint(tmp_path)
    assert one_line(error) and str(tmp_path) in str(error.value)


def test_gguf_is_called_by_its_name(tmp_path):
    file = tmp_path / "tiny.Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    for path in (file, tmp_path):
        with pytest.raises(FileNotFoundError, match=r"tiny\.Q4_K_M\.gguf, a GGUF file.*gguf_file=") as error:
            load_checkpoint(path)
        assert one_line(error)


@pytest.mark.parametrize("model_type", ["my_model", "llama"])
def test_code_of_a_checkpoint_is_never_executed(tmp_path, model_type):
    auto_map = {"AutoConfig": "configuration_mine.MyConfig", "AutoModelForCausalLM": "modeling_mine.MyModel"}
    witness = tmp_path / "executed"
    for name in ("configuration_mine", "modeling_mine"):
        (tmp_path / f"{name}.py").write_text(f"open({str(witness)!r}, 'w').close()\n")
    folder_with(tmp_path, LLAMA | {"model_type": model_type, "auto_map": auto_map})
    if model_type == "llama":
        # The architecture is ours; its code is not needed, and the copy we save would not find it.
        assert "auto_map" not in read_hf_config(tmp_path).to_dict()
    else:
        with pytest.raises(
            ValueError, match=r"'my_model' comes with code of its own .*never runs code"
        ) as error:
            load_checkpoint(tmp_path)
        assert one_line(error)
    assert not witness.exists()


def test_an_adapter_alone_is_no_model(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileNotFoundError, match=r"no config.json. It holds an adapter .*`model.model_path`"):
        load_checkpoint(tmp_path)


def test_entries_to_change_are_named(tmp_path):
    folder_with(tmp_path, LLAMA)
    assert read_hf_config(tmp_path, {"rms_norm_eps": 0.5}).rms_norm_eps == 0.5
    with pytest.raises(
        ValueError, match=r"has no entry `rms_norm_epsilon` to change. Did you mean `rms_norm_eps`"
    ):
        read_hf_config(tmp_path, {"rms_norm_epsilon": 0.5})


def test_a_damaged_generation_config_is_named(tmp_path):
    assert read_generation_config(tmp_path) is None
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"generation_config.json is not valid JSON"):
        read_generation_config(tmp_path)


@pytest.mark.parametrize("path", ["", " "])
def test_an_empty_path_is_refused(path):
    for load in (load_checkpoint, jrl.load_model, jrl.estimate_cost):
        with pytest.raises(
            ValueError, match="`model_path` must be a folder or a name on the hub, got an empty"
        ):
            load(path)


def test_a_swap_that_was_killed_half_way_is_undone(tmp_path, monkeypatch):
    monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    (tmp_path / ".m.replaced").mkdir()
    folder_with(tmp_path / ".m.replaced", LLAMA)
    assert find_folder(tmp_path / "m") == tmp_path / "m"
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


class TestHub:
    """Names of the hub, without a network."""

    def test_offline(self, monkeypatch):
        def refuse(name, **patterns):
            raise LocalEntryNotFoundError("Cannot find an appropriate cached snapshot folder.\nMore lines.")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        monkeypatch.setenv("HF_HUB_OFFLINE", "1")
        monkeypatch.setenv("HF_HOME", "/cache")
        expected = (
            "'organisation/name' is no folder here, and the Hugging Face hub did not give it (LocalEntryNotFoundError: "
            "Cannot find an appropriate cached snapshot folder.). HF_HUB_OFFLINE is set. Without a network, copy the "
            "model into a folder and name that, or fill the cache (/cache, set by HF_HOME)"
        )
        for load in (load_checkpoint, jrl.load_model, jrl.estimate_cost):
            with pytest.raises(FileNotFoundError, match=re.escape(expected)) as error:
                load("organisation/name")
            assert one_line(error)

    def test_a_name_that_cannot_be_one(self):
        with pytest.raises(FileNotFoundError, match=r"'wrong:name' is no folder here.*HFValidationError"):
            load_checkpoint("wrong:name")

    def test_a_repository_of_pickles(self, monkeypatch, tmp_path):
        folder_with(tmp_path, LLAMA)
        monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda name, **patterns: str(tmp_path))
        for load in (load_checkpoint, load_classifier):
            with pytest.raises(
                FileNotFoundError, match=r"may hold it only as a pickle, .* never downloaded"
            ) as error:
                load("organisation/name")
            assert one_line(error)
            assert "snapshot_download('organisation/name', local_dir='name')" in str(error.value)
            assert conversion_line(Path("name")) in str(error.value)

    def test_only_configs_are_downloaded_for_the_cost(self, monkeypatch, tmp_path):
        asked = []
        folder_with(tmp_path, LLAMA)

        def download(name, *, allow_patterns, ignore_patterns):
            asked.append(allow_patterns)
            return str(tmp_path)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        jrl.estimate_cost("organisation/name")
        assert asked == [["config.json", "generation_config.json"]]

    def test_heads_that_lie_apart_come_with_the_model(self, monkeypatch, tmp_path):
        hub, cache = tmp_path / "hub", tmp_path / "cache"
        inner = ("", "heads", "head", "h", "heads_of_another", "headset", "heads/old", "onnx", "unet/heads")
        for number, name in enumerate(inner):
            (hub / name).mkdir(parents=True, exist_ok=True)
            save_file({f"tensor_{number}": np.zeros(2, np.float32)}, hub / name / "model.safetensors")
        folder_with(hub, LLAMA)

        def download(name, *, allow_patterns, ignore_patterns):
            given = [path.relative_to(hub).as_posix() for path in hub.rglob("*.*")]
            for path in filter_repo_objects(
                given, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
            ):
                (cache / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(hub / path, cache / path)
            return str(cache)

        monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
        found = find_checkpoint("organisation/name")
        assert {path.relative_to(cache).as_posix() for path in cache.rglob("*.*")} == {
            "config.json",
            "model.safetensors",
            "heads/model.safetensors",
        }
        assert set(open_tensors(found).info) == {"tensor_0", "tensor_1"}

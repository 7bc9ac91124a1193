# SPDX-License-Identifier: Apache-2.0
"""Files from elsewhere: pickles and code in them are refused and not run, and no path leads out of their folder."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pickle
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import jrl
from jrl import distributed
from jrl.data.chat.templates import render_prompt, with_chat_template
from jrl.data.tokenizer import load_tokenizer
from jrl.models.adapters.peft_format import read_adapter_folder
from jrl.models.checkpoint import load_checkpoint
from jrl.models.hub import find_folder, read_hf_config
from jrl.models.safetensors_io import TensorFiles
from jrl.trainers.checkpoints.manifest import (
    CheckpointError,
    _content_sha256,
    verify_manifest,
    write_manifest,
)
from jrl.trainers.loading.dpo_reference import load_logprobs, save_logprobs
from jrl.trl.scripts import DatasetConfig, DatasetMixtureConfig, get_dataset
from tests.tiny import tiny_tokenizer
from tests.trainers.runs import save_tiny_checkpoint


class Bomb:
    """Unpickled, it makes a file."""

    def __init__(self, target: Path) -> None:
        self.target = str(target)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.target,)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "ran"


@pytest.fixture
def bomb(target: Path) -> bytes:
    return pickle.dumps(Bomb(target))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


@pytest.fixture
def folder(tiny: Path, tmp_path: Path) -> Path:
    """A checkpoint of one's own to spoil."""
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def change(path: Path, **entries: Any) -> None:
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | entries))


def test_the_bomb_works(bomb, target):
    pickle.loads(bomb)
    assert target.exists()


class TestPickles:
    @pytest.mark.parametrize(
        "name", ["pytorch_model.bin", "pytorch_model-00001-of-00002.bin", "model.pt", "model.pkl"]
    )
    def test_weights(self, folder, bomb, target, name):
        (folder / "model.safetensors").unlink()
        (folder / name).write_bytes(bomb)
        with pytest.raises(FileNotFoundError, match="safetensors"):
            jrl.load_model(folder)
        assert not target.exists()

    @pytest.mark.parametrize("name", ["model.pt", "model.bin", "model.pkl"])
    def test_a_path_to_a_pickle(self, tmp_path, bomb, target, name):
        (tmp_path / name).write_bytes(bomb)
        with pytest.raises(FileNotFoundError, match="must be a folder or a name on the hub"):
            find_folder(tmp_path / name)
        assert not target.exists()

    @pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json"])
    def test_a_pipe_is_not_waited_for(self, folder, name):
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
        with pytest.raises(ValueError, match=f"{name} is neither a file nor a folder, but a pipe"):
            find_folder(folder)

    def test_an_adapter(self, tmp_path, bomb, target):
        change(tmp_path / "adapter_config.json", peft_type="LORA", r=2, base_model_name_or_path="x")
        (tmp_path / "adapter_model.bin").write_bytes(bomb)
        with pytest.raises(FileNotFoundError, match="a pickle, which can run code when it is read"):
            TensorFiles(tmp_path, "adapter_model")
        assert not target.exists()

    def test_a_pickle_under_a_safe_name(self, folder, bomb, target):
        (folder / "model.safetensors").write_bytes(bomb)
        with pytest.raises(ValueError, match="is not a readable safetensors file"):
            load_checkpoint(folder)
        assert not target.exists()

    @pytest.mark.parametrize("name", ["optimizer.pt", "training_args.bin", "rng_state.pth", "tokenizer.pkl"])
    def test_what_lies_beside_is_not_looked_at(self, folder, bomb, target, name):
        (folder / name).write_bytes(bomb)
        jrl.load_model(folder)
        load_tokenizer(folder)
        assert not target.exists()

    def test_arrays_in_a_cache(self, tmp_path, target):
        path = tmp_path / "reference.npz"
        row = [np.zeros(2, np.float32)]
        save_logprobs(path, row, row)
        with np.load(path) as whole:
            arrays = dict(whole)
        assert load_logprobs(path) is not None
        np.savez(path, allow_pickle=True, **arrays | {"chosen": np.array([Bomb(target)], object)})
        assert load_logprobs(path) is None, "computed anew"
        assert not target.exists()

    def test_arrays_between_processes(self, target):
        file = io.BytesIO()
        np.savez(
            file,
            allow_pickle=True,
            **{distributed._TEXT: np.frombuffer(b"null", np.uint8)},
            array_x=np.array([Bomb(target)], object),
        )
        with pytest.raises(ValueError, match="allow_pickle=False"):
            distributed._decode(np.frombuffer(file.getvalue(), np.uint8))
        with pytest.raises(ValueError, match="allow_pickle=False"):
            distributed._encode(None, {"x": np.array([Bomb(target)], object)})
        assert not target.exists()

    def test_tables_of_pandas(self, tmp_path, bomb, target):
        (tmp_path / "rows.pkl").write_bytes(bomb)
        entry = DatasetConfig("pandas", data_files=str(tmp_path / "rows.pkl"))
        with pytest.raises(ValueError, match="the builder 'pandas' reads pickles"):
            get_dataset(DatasetMixtureConfig([entry]))
        assert not target.exists()


class TestCodeOfACheckpoint:
    """Classes of its own, as transformers loads them with `trust_remote_code`."""

    @pytest.fixture
    def armed(self, folder: Path, target: Path) -> Path:
        code = f"import os\nos.mkdir({str(target)!r})\n"
        code += "class Own:\n    @classmethod\n    def from_pretrained(cls, *a, **k):\n        return cls()\n"
        (folder / "own.py").write_text(code)
        return folder

    def test_a_model(self, armed, target):
        change(armed / "config.json", auto_map={"AutoConfig": "own.Own", "AutoModelForCausalLM": "own.Own"})
        read_hf_config(armed)
        load_checkpoint(armed)
        change(armed / "config.json", model_type="own")
        with pytest.raises(ValueError, match="jrl never runs code of a checkpoint"):
            read_hf_config(armed)
        assert not target.exists()

    def test_a_tokenizer(self, armed, target, monkeypatch):
        """transformers would ask whether it may run the code where it is not told; here whoever is asked says yes."""
        monkeypatch.setattr("builtins.input", lambda *_: "y")
        (armed / "config.json").unlink()
        change(
            armed / "tokenizer_config.json",
            auto_map={"AutoTokenizer": [None, "own.Own"]},
            tokenizer_class="Own",
        )
        for read in (load_tokenizer, lambda path: with_chat_template(tiny_tokenizer(), path)):
            with contextlib.suppress(ValueError):  # refused, or read as the tokenizer that it also is
                read(armed)
            assert not target.exists()

    def test_a_configuration_cannot_ask_for_it(self, armed, target):
        with pytest.raises(ValueError, match="`trust_remote_code` must be false: jrl runs no code of"):
            load_tokenizer(armed, extra={"trust_remote_code": True})
        load_tokenizer(armed, extra={"trust_remote_code": False})
        assert not target.exists()

    @pytest.mark.parametrize(
        "attack",
        [
            "{{ ''.__class__.__mro__[1].__subclasses__() }}",
            "{{ cycler.__init__.__globals__.os.mkdir('TARGET') }}",
            "{{ self.__init__.__globals__.__builtins__.__import__('os').mkdir('TARGET') }}",
            "{% set x = messages.append(1) %}",
            "{% include '/etc/passwd' %}",
        ],
    )
    def test_a_chat_template(self, target, attack):
        tokenizer = tiny_tokenizer()
        tokenizer.chat_template = attack.replace("TARGET", str(target))
        with pytest.raises((ValueError, TypeError)):
            render_prompt(tokenizer, [{"role": "user", "content": "a"}])
        assert not target.exists()


OUTSIDE = [
    "../secret.safetensors",
    "/etc/secret.safetensors",
    "..",
    ".",
    "",
    "a/b.safetensors",
    "sub/../x",
]


class TestPaths:
    @pytest.mark.parametrize("shard", OUTSIDE)
    def test_shards_lie_beside_their_index(self, folder, shard):
        shutil.copy(folder / "model.safetensors", folder.parent / "secret.safetensors")
        (folder / "model.safetensors").unlink()
        change(folder / "model.safetensors.index.json", weight_map={"wte.weight": shard})
        with pytest.raises(ValueError, match="which is not the name of a file beside it"):
            load_checkpoint(folder)

    @pytest.fixture
    def checkpoint(self, tmp_path: Path) -> Path:
        made = tmp_path / "run" / "checkpoint_4"
        (made / "state").mkdir(parents=True)
        (made / "state" / "a").write_text("a")
        (made / "cursor.json").write_text("{}")
        write_manifest(made, {"step": 4})
        return made

    @pytest.mark.parametrize(
        "name", ["../secret", "/etc/hostname", "state/../../../secret", "state/./../cursor.json"]
    )
    def test_a_manifest_names_files_of_its_folder(self, checkpoint, name):
        (checkpoint.parents[1] / "secret").write_text("a")
        (checkpoint.parent / "secret").write_text("a")
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        entry = manifest["files"].pop("state/a")
        (checkpoint / "manifest.json").unlink()
        (checkpoint / "state" / "a").unlink()
        # As whoever made it would: the fingerprint fits.
        write_manifest(checkpoint, {"step": 4}, {})
        made = json.loads((checkpoint / "manifest.json").read_text())
        made["files"][name] = entry
        made.pop("sha256")
        made["sha256"] = _content_sha256(made)
        (checkpoint / "manifest.json").write_text(json.dumps(made))
        with pytest.raises(CheckpointError, match="lacks the file"):
            verify_manifest(checkpoint)

    @pytest.mark.parametrize("is_folder", [False, True])
    def test_links_lead_nowhere_else(self, checkpoint, is_folder):
        outside = checkpoint.parents[1] / "elsewhere"
        shutil.move(checkpoint / "state", outside)
        if is_folder:
            (checkpoint / "state").symlink_to(outside)
        else:
            (checkpoint / "state").mkdir()
            (checkpoint / "state" / "a").symlink_to(outside / "a")
        with pytest.raises(CheckpointError, match="is a link that leads out of the checkpoint"):
            verify_manifest(checkpoint)

    def test_links_within_are_fine(self, checkpoint):
        (checkpoint / "state" / "b").symlink_to("a")
        (checkpoint / "manifest.json").unlink()
        write_manifest(checkpoint, {"step": 4})
        verify_manifest(checkpoint)

    def test_the_base_that_an_adapter_names_is_read_as_a_model_and_nothing_else(
        self, tmp_path, folder, bomb, target
    ):
        (folder / "model.safetensors").unlink()
        (folder / "pytorch_model.bin").write_bytes(bomb)
        base = os.path.relpath(folder)
        change(tmp_path / "adapter_config.json", peft_type="LORA", r=2, base_model_name_or_path=base)
        found = read_adapter_folder(tmp_path).base_model
        assert found == base
        with pytest.raises(FileNotFoundError, match="a pickle, which can run code when it is read"):
            jrl.load_model(found)
        assert not target.exists()

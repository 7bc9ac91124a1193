# SPDX-License-Identifier: Apache-2.0
"""Code is named on the command line alone: no configuration, checkpoint or data set has anything imported."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest

import jrl
import jrl.trl.commands
from jrl.api import make_trainer
from jrl.cli import load_function, load_reward, main
from jrl.data.sources.named_sources import load_prompts
from jrl.sweep.plan import read_plan

MODULE = "jrl_test_foreign_code"


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A module in the working directory, which the command line may name; it is imported if `sys.modules` has it."""
    path = tmp_path / "work" / f"{MODULE}.py"
    path.parent.mkdir()
    path.write_text(
        "class Evil:\n    def __init__(self, *a, **k): pass\n\ndef reward(outputs):\n    return [0.0] * len(outputs)\n"
    )
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    return path


def was_imported() -> bool:
    return MODULE in sys.modules


class TestTheCommandLine:
    def test_its_flag_imports(self, module):
        assert load_reward(f"{MODULE}:reward")(["a"]) == [0.0]
        assert was_imported()

    @pytest.mark.parametrize("folder", ["model", "data", "checkpoint_4"])
    def test_from_its_own_import_path_alone(self, module, folder, monkeypatch):
        """A module that a model, data set or checkpoint brings along is not found."""
        brought = module.parent / folder
        brought.mkdir()
        module.rename(brought / module.name)
        with pytest.raises(ValueError, match=f"there is no module '{MODULE}'"):
            load_function(f"{MODULE}:reward")
        with pytest.raises((ValueError, ModuleNotFoundError)):
            load_function(f"{brought / MODULE}:reward")
        assert not was_imported()


NAME = f"{MODULE}:Evil"
NESTED = [
    {"train": {"trainer": NAME}},
    {"train": {"trainer": f"{MODULE}.Evil"}},
    {"train": {"pipeline": NAME}},
    {"train": {"tracker": NAME}},
    {"train": {"trainer_kwargs": {"reward_fn": f"{MODULE}:reward"}}},
    {"train": {"trainer_kwargs": {"optimizer": NAME}}},
    {"method": {"name": NAME}},
    {"optimizer": {"name": NAME}},
    {"scheduler": {"name": NAME}},
    {"train": {"reward_fn": f"{MODULE}:reward"}},
    {"reward": f"{MODULE}:reward"},
]


@pytest.mark.parametrize("entries", NESTED, ids=lambda entries: json.dumps(entries)[1:45])
def test_a_nested_configuration(entries, module, tmp_path):
    config = jrl.default_ppo_config().to_dict()
    for section, values in entries.items():
        config[section] = {**config.get(section, {}), **values} if isinstance(values, dict) else values
    path = tmp_path / "config.yaml"
    path.write_text(json.dumps(config))  # JSON is YAML
    with pytest.raises((ValueError, TypeError)):
        make_trainer(jrl.TRLConfig.load_yaml(path), reward_fn=len)
    assert not was_imported()


class TestAFlatConfiguration:
    @pytest.mark.parametrize("field", ["reward", "metric"])
    def test_it_names_no_function(self, field, module, tmp_path, capsys):
        path = tmp_path / "config.yaml"
        path.write_text(f"model_name_or_path: x\ndataset_name: y\n{field}: {MODULE}:reward\n")
        assert main(["ppo", "--config", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"`{field}` must not name a function in a file, got '{MODULE}:reward'" in error
        assert f"--{field} {MODULE}:reward" in error
        assert not was_imported()

    @pytest.mark.parametrize("field", ["reward", "prompts", "image_samples_hook"])
    def test_nor_does_one_of_ddpo(self, field, module, tmp_path, capsys):
        path = tmp_path / "config.yaml"
        path.write_text(f"pretrained_model: x\n{field}: {MODULE}:reward\n")
        assert main(["ddpo", "--config", str(path)]) == 2
        assert f"`{field}` must not name a function in a file" in capsys.readouterr().err
        assert not was_imported()

    def test_it_may_name_a_classifier(self, tmp_path, capsys):
        path = tmp_path / "config.yaml"
        path.write_text("dataset_name: y\nreward: someone/classifier\n")
        assert main(["ppo", "--config", str(path)]) == 2
        assert "`model_name_or_path` must be given" in capsys.readouterr().err

    @pytest.mark.parametrize(
        "variable",
        [
            "PYTHONPATH",
            "PYTHONSTARTUP",
            "LD_PRELOAD",
            "ld_preload",
            "PATH",
            "TPU_LIBRARY_PATH",
            "PJRT_NAMES_AND_LIBRARY_PATHS",
            "NCCL_NET_PLUGIN",
            "XLA_FLAGS",
            "HF_ENDPOINT",
            "WANDB_BASE_URL",
            "HTTPS_PROXY",
            "JAX_COMPILATION_CACHE_DIR",
            "WANDB__EXECUTABLE",
            "WANDB_API_KEY",
            "LIBTPU_INIT_ARGS",
            "JRL_DISTRIBUTED",
            "JRL_COORDINATOR_ADDRESS",
            "JAX_COORDINATOR_ADDRESS",
            "SLURM_STEP_NODELIST",
            "GIT_SSH_COMMAND",
            "wandb_project",
            "ANYTHING",
        ],
    )
    def test_it_sets_no_variable_that_might_load_code_or_name_a_host(
        self, variable, tmp_path, capsys, monkeypatch
    ):
        monkeypatch.delenv(variable, raising=False)
        path = tmp_path / "config.yaml"
        path.write_text(f"env: {{{variable}: {tmp_path}}}\nmodel_name_or_path: x\n")
        assert main(["sft", "--config", str(path)]) == 2
        error = capsys.readouterr().err
        assert f"`env` must not set {variable}" in error and f"export {variable}=" in error
        assert variable not in os.environ

    def test_it_may_set_others(self, tmp_path, monkeypatch, capsys):
        for variable in ("WANDB_PROJECT", "HF_HUB_OFFLINE", "TOKENIZERS_PARALLELISM", "JAX_LOG_COMPILES"):
            monkeypatch.setenv(variable, os.environ.get(variable, "0"))
            path = tmp_path / "config.yaml"
            path.write_text(f"env: {{{variable}: '1'}}\n")
            assert main(["sft", "--config", str(path)]) == 2
            assert "`model_name_or_path` must name a checkpoint" in capsys.readouterr().err
            assert os.environ[variable] == "1"


def test_a_sweep_names_no_code(module, tmp_path):
    path = tmp_path / "sweep.yaml"
    for entry in ("search_alg", "scheduler"):
        path.write_text(
            f"tune_config: {{metric: reward/mean, mode: max, {entry}: '{NAME}'}}\n"
            "optimizer.kwargs.lr: {strategy: uniform, values: [0.1, 0.2]}\n"
        )
        with pytest.raises(ValueError, match=entry):
            read_plan(path)
    assert not was_imported()


def test_nor_hosts_or_files(tmp_path):
    path = tmp_path / "sweep.yaml"
    path.write_text(
        "tune_config: {metric: reward/mean, mode: max, search_alg: {name: optuna, storage: 'mysql://elsewhere/x'}}\n"
        "optimizer.kwargs.lr: {strategy: uniform, values: [0.1, 0.2]}\n"
    )
    with pytest.raises(
        ValueError, match=r"`tune_config\.search_alg\.storage` must name no file, host or module"
    ):
        read_plan(path)


def test_records_are_data(module, tmp_path):
    path = tmp_path / "prompts.jsonl"
    record = {"prompt": "a", "reward_fn": f"{MODULE}:reward", "__class__": NAME}
    path.write_text(json.dumps(record))
    assert load_prompts(path) == [record]
    assert not was_imported()

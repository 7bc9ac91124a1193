# SPDX-License-Identifier: Apache-2.0
"""`import jrl` and the list of commands import nothing heavy; no order of imports changes what is read."""

from __future__ import annotations

import ast
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest

import jrl
from jrl import built_in
from jrl.trainers.config.method import entries
from jrl.trainers.config.registry import METHODS, TRAINERS

ROOT = Path(__file__).parents[1]
HEAVY = ("jax", "numpy", "flax", "optax", "orbax", "transformers", "datasets", "torch", "rich", "yaml")


def fresh(script: str, *words: str) -> str:
    """What a script of a process of its own prints."""
    found = subprocess.run(
        [sys.executable, "-c", script, *words],
        env={name: value for name, value in os.environ.items() if not name.startswith("TRANSFORMERS_")}
        | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return found.stdout.strip()


@pytest.mark.parametrize(
    "what",
    [
        "import jrl; dir(jrl)",
        "from jrl.cli import main; sys.argv = ['jrl', '--help']\ntry: main()\nexcept SystemExit: pass",
    ],
)
def test_nothing_heavy_is_imported(what: str) -> None:
    script = f"import sys\n{what}\nprint('heavy:', sorted(set({HEAVY}) & set(sys.modules)))"
    assert fresh(script).endswith("heavy: []")


def test_the_three_lists_of_names_are_one() -> None:
    """What checkers see, what is exported, and where each name is found."""
    tree = ast.parse(Path(jrl.__file__).read_text(encoding="utf-8"))
    (seen,) = [node for node in tree.body if isinstance(node, ast.If)]
    imports = [node for node in seen.body if isinstance(node, ast.ImportFrom)]
    by_checkers = {alias.name: node.module for node in imports for alias in node.names}
    modules = {name for name, home in by_checkers.items() if home == "jrl"}
    assert sorted(by_checkers) == sorted(jrl.__all__)
    assert {name: home for name, home in by_checkers.items() if name not in modules} == jrl._MODULE_OF


def test_every_name_is_found() -> None:
    assert set(jrl.__all__) <= set(dir(jrl))
    for name in jrl.__all__:
        value = getattr(jrl, name)
        assert value is getattr(sys.modules[jrl._MODULE_OF[name]], name) if name in jrl._MODULE_OF else value
    taken: dict[str, object] = {}
    exec("from jrl import *", taken)
    assert set(jrl.__all__) <= set(taken)


def test_a_name_that_is_none() -> None:
    with pytest.raises(AttributeError, match="module 'jrl' has no attribute 'trian'"):
        jrl.trian  # noqa: B018
    assert not hasattr(jrl, "__wrapped__")


def test_modules_are_found_without_an_import_of_their_own() -> None:
    assert fresh("import jrl; print(jrl.ops.gae.__module__, jrl.trainers.__name__)") == (
        "jrl.ops.returns jrl.trainers"
    )


@pytest.mark.slow
def test_objects_travel_between_processes(tmp_path: Path) -> None:
    (tmp_path / "config").write_bytes(pickle.dumps(jrl.default_dpo_config()))
    script = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).method.name)"
    assert fresh(script, str(tmp_path / "config")) == "DPOConfig"


def test_the_table_of_built_in_names_is_whole() -> None:
    assert {entry.config.__name__ for entry in entries().values()} == set(built_in.METHODS)
    for name, module in built_in.TRAINERS.items():
        assert TRAINERS[name.lower()].__module__ == module
    assert [name for name in built_in.METHODS if METHODS.find(name) is None] == []


ALL = ("DDPO", "DPO", "GRPO", "ILQL", "PPO", "RFT", "Reward", "SFT")


@pytest.mark.parametrize(
    "first",
    [
        "from jrl.trainers.config.trl_config import TRLConfig",
        pytest.param("from jrl.trainers.config import TRLConfig", marks=pytest.mark.slow),
        pytest.param("from jrl import TRLConfig", marks=pytest.mark.slow),
        pytest.param(
            "from jrl.trainers.ppo import PPOTrainer; from jrl import TRLConfig", marks=pytest.mark.slow
        ),
        pytest.param("from jrl.methods import PPO; from jrl import TRLConfig", marks=pytest.mark.slow),
        pytest.param(
            "from jrl.trlx.data.configs import ILQLConfig; from jrl import TRLConfig", marks=pytest.mark.slow
        ),
    ],
)
def test_a_configuration_is_read_whatever_was_imported_first(first: str) -> None:
    """By the names of every algorithm and trainer, in an older layout too."""
    script = f"""
import os, sys, warnings
{first}
from jrl.trainers.config.registry import get_method, get_trainer
warnings.simplefilter("ignore")
for name in {ALL}:
    assert get_method(name + "Config").__name__ == get_method(name.lower()).__name__ == name + "Config"
    assert get_trainer(("Online" if name == "GRPO" else name) + "Trainer")
old = TRLConfig.from_dict({{
    "model": {{"model_path": "m", "model_type": "AcceleratePPOModel", "num_layers_unfrozen": 2}},
    "train": {{"learning_rate_init": 0.125, "seq_length": 8, "epochs": 1, "total_steps": 1, "batch_size": 1,
              "lr_ramp_steps": 1, "lr_decay_steps": 1, "weight_decay": 0.0, "learning_rate_target": 0.125,
              "checkpoint_interval": 1, "eval_interval": 1, "pipeline": "PPOPipeline",
              "orchestrator": "PPOOrchestrator"}},
    "method": {{"name": "ppoconfig"}},
}})
print(old.optimizer.kwargs["lr"], os.environ["TRANSFORMERS_NO_ADVISORY_WARNINGS"])
"""
    assert fresh(script) == "0.125 1"


@pytest.mark.slow
def test_a_name_of_jrl_is_taken_before_anybody_looked_it_up() -> None:
    script = """
from dataclasses import dataclass
import jrl
jrl.PPOConfig
@jrl.register_method
@dataclass(kw_only=True)
class OwnConfig(jrl.OnlineConfig):
    name: str = "OwnConfig"
from jrl.trainers.config.registry import get_method
assert get_method("own") is OwnConfig
class PPOTrainer: pass
class PPOConfig(jrl.OnlineConfig): pass
for register, cls in ((jrl.register_trainer, PPOTrainer), (jrl.register_method, PPOConfig)):
    try: register(cls)
    except ValueError as error: print("belongs to" in str(error))
"""
    assert fresh(script) == "True\nTrue"

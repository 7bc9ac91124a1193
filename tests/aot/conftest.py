# SPDX-License-Identifier: Apache-2.0
"""Programs compiled for absent devices by `jrl plan --compile`, in a process and an environment of its own.

`JRL_AOT_PYTHON` names the Python of an environment with `jrl-post[plan-gpu]` or `jrl-post[plan-tpu]`, or both. Where
it is set, a compiler that is missing there is a failure, so that no step of CI passes by leaving everything out;
`-k h100` or `-k tpu` chooses. Without it such a test is skipped.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import jrl

ROOT = Path(__file__).resolve().parents[2]
PYTHON = os.environ.get("JRL_AOT_PYTHON", sys.executable)
Compile = Callable[..., dict[str, str]]


@pytest.fixture(scope="session")
def compile_for(tmp_path_factory: pytest.TempPathFactory) -> Compile:
    """`(architecture, target, mesh, programs, **sections) -> optimized HLO by program` of a PPO run."""

    def call(
        architecture: Any, target: str, mesh: str, programs: list[str], **sections: dict[str, Any]
    ) -> dict[str, str]:
        folder = tmp_path_factory.mktemp("aot")
        architecture.save_pretrained(folder / "model")
        kind = "seq2seq" if architecture.is_encoder_decoder else "causal"
        config = jrl.default_ppo_config().evolve(
            model={
                "model_path": str(folder / "model"),
                "num_layers_unfrozen": -1,
                "model_arch_type": kind,
            },
            method={"num_rollouts": 128, "chunk_size": 128, "gen_kwargs": {"max_new_tokens": 64}},
            train={"seq_length": 192, "batch_size": 32, "minibatch_size": 32},
        )
        return compile_recipe(config.evolve(**sections), folder, target, mesh, programs)

    return call


def compile_recipe(
    config: jrl.TRLConfig, folder: Path, target: str, mesh: str, programs: list[str]
) -> dict[str, str]:
    """Optimized HLO by program; recipe and executables are written into the folder."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    command = [PYTHON, "-m", "jrl", "plan", "--config", str(recipe), "--compile", target, "--mesh", mesh]
    command += ["--programs", *programs, "--save", str(folder / "saved")]
    # None of the tests' own flags: what is compiled is what a user's run would compile.
    plain = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    plain |= {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    found = subprocess.run(command, env=plain, capture_output=True, text=True, timeout=900, check=False)
    if "pip install 'jrl-post[plan-" in found.stderr and "JRL_AOT_PYTHON" not in os.environ:
        pytest.skip(found.stderr.strip().splitlines()[-1])
    assert found.returncode == 0, found.stderr[-3000:]
    assert "wrote no report" not in found.stderr, found.stderr[-3000:]
    saved = folder / "saved" / target.replace(":", "_")
    return {name: (saved / f"{name}.hlo.txt").read_text(encoding="utf-8") for name in programs}

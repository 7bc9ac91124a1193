# SPDX-License-Identifier: Apache-2.0
"""Runs of the worker script, each made once."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.processes.job import Job
from tests.trainers.runs import save_tiny_checkpoint

WORKER = Path(__file__).with_name("worker.py")
STEPS = {"ppo": 12, "grpo": 3, "rft": 3, "ilql": 3, "dpo": 3, "reward": 3, "sft": 3}
"""Optimizer steps of three iterations."""
LEARNING_RATE = 1e-3


@dataclass(frozen=True)
class Outcome:
    """What a job left behind.

    Attributes:
      results: What each process wrote.
      params: All that trained, by path, as process 0 has it.
      rollouts: Lines of the samples' log, of online algorithms.
    """

    results: list[dict[str, Any]]
    params: dict[str, np.ndarray]
    rollouts: list[dict[str, Any]]


Runs = Callable[..., Outcome]


def specify(
    folder: Path,
    checkpoint: str,
    algorithm: str,
    reward: str,
    sections: dict[str, Any],
    environment: str | None = None,
) -> Path:
    """The file that tells the worker what to do."""
    folder.mkdir(parents=True, exist_ok=True)
    sections = {**sections, "train": {"total_steps": STEPS[algorithm], **sections.get("train", {})}}
    file = folder / "specification.json"
    content = {
        "algorithm": algorithm,
        "checkpoint": checkpoint,
        "environment": environment,
        "folder": str(folder),
        "reward": reward,
        "sections": sections,
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def read_outcome(folder: Path, num_processes: int) -> Outcome:
    """What the processes of a job that ended well wrote."""
    results = [json.loads((folder / f"result_{k}.json").read_text()) for k in range(num_processes)]
    with np.load(folder / "params_0.npz") as found:
        params = dict(found)
    log = folder / "run" / "rollouts" / "rollouts.jsonl"
    lines = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return Outcome(results, params, lines)


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Tiny models by family."""
    folder = tmp_path_factory.mktemp("checkpoints")
    return {family: save_tiny_checkpoint(folder / family, family) for family in ("gpt2", "llama")}


@pytest.fixture(scope="session")
def run(checkpoints: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """`run(algorithm, num_processes, num_devices, family=, reward=, environment=, **sections)`: a job starts once."""
    known: dict[str, Outcome] = {}

    def outcome(
        algorithm: str,
        num_processes: int,
        num_devices: int,
        *,
        family: str = "gpt2",
        reward: str = "vowels",
        environment: str | None = None,
        **sections: Any,
    ) -> Outcome:
        name = json.dumps([algorithm, num_processes, num_devices, family, reward, environment, sections])
        if name not in known:
            folder = tmp_path_factory.mktemp(f"{algorithm}_{num_processes}x{num_devices}")
            file = specify(folder, checkpoints[family], algorithm, reward, sections, environment)
            job = Job([WORKER, file], folder / "logs", num_processes=num_processes, num_devices=num_devices)
            job.succeed(timeout=600.0)
            known[name] = read_outcome(folder, num_processes)
        return known[name]

    return outcome


def figures(record: dict[str, Any]) -> dict[str, float]:
    """The numbers of a record.

    DPO's accuracy counts the pairs with a positive margin. Before the first step policy and reference are one model and
    every margin is truly 0: what is counted then is the sign of rounding.
    """
    found = {name: value for name, value in record.items() if isinstance(value, int | float)}
    for name in [name for name in found if name.endswith("rewards/accuracies")]:
        if abs(found[name.replace("accuracies", "margins")]) < 1e-6:
            del found[name]
    return found


def words(record: dict[str, Any]) -> dict[str, Any]:
    """What else stands in it."""
    return {name: value for name, value in record.items() if not isinstance(value, int | float)}


def assert_same_run(got: Outcome, expected: Outcome) -> None:
    """Equal samples; figures to 1e-5; parameters to 0.05 of Adam's step, for each of the steps.

    A key's bias adds the same number to all scores of a query, which the softmax does not see: its gradient is truly
    zero, and what is computed is noise, of which Adam makes whole steps. They change no figure.
    """
    assert [row["output_tokens"] for row in got.rollouts] == [
        row["output_tokens"] for row in expected.rollouts
    ]
    reference = expected.results[0]
    for result in got.results:
        assert result["generated"] == reference["generated"]
        assert len(result["history"]) == len(reference["history"])
        for record, wanted in zip(result["history"], reference["history"], strict=True):
            assert words(record) == words(wanted)
            assert figures(record) == pytest.approx(figures(wanted), rel=1e-5, abs=1e-5, nan_ok=True)
    steps = max(record["step"] for record in reference["history"])
    assert got.params.keys() == expected.params.keys()
    for name, leaf in got.params.items():
        share = 2.0 if name.endswith("['k']['bias']") else 0.05
        bound = share * LEARNING_RATE * steps
        np.testing.assert_allclose(leaf, expected.params[name], rtol=0, atol=bound, err_msg=name)

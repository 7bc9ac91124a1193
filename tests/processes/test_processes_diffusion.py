# SPDX-License-Identifier: Apache-2.0
"""Diffusion models trained by real processes on this machine: to the bit what one process trains on the same mesh."""

import json
import shutil
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.processes.conftest import read_outcome
from tests.processes.job import Job

pytestmark = pytest.mark.slow
WORKER = Path(__file__).with_name("diffusion_worker.py")
EVALUATED = {
    # 3 do not divide: every device draws all of them, and the processes share them out.
    "method": {"eval_prompts": ["red square", "blue circle", "green line"]},
    "train": {"eval_interval": 2},
}
LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["to_q", "to_v"]}
HEARTBEAT = 20


@dataclass(frozen=True)
class Outcome:
    """What a job left behind: results of the processes, parameters, samples' log, images that the hook saw, folder."""

    results: list[dict[str, Any]]
    params: dict[str, np.ndarray]
    rollouts: list[dict[str, Any]]
    images: dict[str, np.ndarray]
    folder: Path


def start(folder: Path, algorithm: str, num_processes: int, num_devices: int = 1, **given: Any) -> Job:
    """A job of the worker."""
    folder.mkdir(parents=True, exist_ok=True)
    known = {"model": None, "reward": "brightness", "own_prompts": False, "sections": {}, "hurt": None}
    content = {**known, **given, "algorithm": algorithm, "folder": str(folder)}
    file = folder / "specification.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    return Job(
        [WORKER, file],
        folder / ("logs_hurt" if given.get("hurt") else "logs"),
        num_processes=num_processes,
        num_devices=num_devices,
        variables={"JRL_HEARTBEAT_TIMEOUT_SECONDS": str(HEARTBEAT if given.get("hurt") else 300)},
    )


def outcome_of(folder: Path, num_processes: int) -> Outcome:
    found = read_outcome(folder, num_processes)
    file = folder / "images_0.npz"
    images = {}
    if file.exists():
        with np.load(file) as arrays:
            images = dict(arrays)
    return Outcome(found.results, found.params, found.rollouts, images, folder)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """`run(algorithm, num_processes, num_devices, **specification)`: a job that ends well, started once."""
    known: dict[str, Outcome] = {}

    def outcome(algorithm: str, num_processes: int, num_devices: int, **given: Any) -> Outcome:
        name = json.dumps([algorithm, num_processes, num_devices, given])
        if name not in known:
            folder = tmp_path_factory.mktemp(f"{algorithm}_{num_processes}x{num_devices}")
            start(folder, algorithm, num_processes, num_devices, **given).succeed(timeout=600.0)
            known[name] = outcome_of(folder, num_processes)
        return known[name]

    return outcome


def assert_equal_bits(got: Outcome, expected: Outcome) -> None:
    """The same history but for clocks, in every process; samples, images and parameters to the bit."""
    for result in got.results:
        assert result["history"] == expected.results[0]["history"]
    assert got.rollouts == expected.rollouts and got.rollouts
    for name in ("params", "images"):
        arrays, wanted = vars(got)[name], vars(expected)[name]
        assert arrays.keys() == wanted.keys()
        for leaf, array in wanted.items():
            np.testing.assert_array_equal(arrays[leaf], array, err_msg=leaf)


def judged(outcome: Outcome) -> list[str]:
    """Prompts that any process judged, sorted."""
    return sorted(prompt for result in outcome.results for rows in result["rows_seen"] for prompt in rows)


@pytest.mark.parametrize("algorithm", ["ddpo", "flow_grpo"])
def test_two_processes_are_as_one(run, algorithm):
    """Prompts, images, rewards, ratios and parameters; each image is judged once, by the process that drew it."""
    got, alone = (run(algorithm, *layout, sections=EVALUATED) for layout in ((2, 1), (1, 2)))
    assert_equal_bits(got, alone)
    assert judged(got) == judged(alone)
    drawn = [[len(rows) for rows in result["rows_seen"] if len(rows) == 2] for result in got.results]
    assert len(drawn[0]) >= 8 and len(drawn[1]) >= 8
    ratios = [record.get("ddpo/pre_update_ratio_max_dev") for record in got.results[0]["history"]]
    assert max(x for x in ratios if x is not None) < 1e-5


def test_two_processes_follow_a_reward_as_one(run):
    got, alone = (run("reward_gradient", *layout, sections=EVALUATED) for layout in ((2, 1), (1, 2)))
    assert_equal_bits(got, alone)


def test_process_0_alone_writes(run):
    got, alone = (run("ddpo", *layout, sections=EVALUATED) for layout in ((2, 1), (1, 2)))
    assert not (got.folder / "images_1.npz").exists()  # nor is the hook called elsewhere

    def written(outcome: Outcome) -> dict[str, bytes]:
        paths = [path for name in ("run", "saved") for path in (outcome.folder / name).rglob("*")]
        ends = (".safetensors", ".png", ".jsonl")
        clocked = ("metrics.jsonl", "training.png")
        return {
            str(path.relative_to(outcome.folder)): path.read_bytes()
            for path in paths
            if path.suffix in ends and path.name not in clocked
        }

    assert written(got) == written(alone) and len(written(got)) >= 5


def test_two_processes_of_the_face_of_trl_are_as_one(run):
    """Its sizes are of one device; calls of the pipeline and what it saves count too."""
    got, alone = (run("trl", *layout) for layout in ((2, 1), (1, 2)))
    assert_equal_bits(got, alone)
    file = "saved/unet/diffusion_pytorch_model.safetensors"
    assert (got.folder / file).read_bytes() == (alone.folder / file).read_bytes()


def test_an_adapter_of_a_folder_whose_weights_are_split_over_processes(run, tmp_path_factory):
    """To 1e-5, for of two devices of one process the sums are done in another order."""
    folder = save_tiny_folder(tmp_path_factory.mktemp("folder") / "tiny")
    sections = {
        "model": {"peft_config": LORA},
        "method": {"sample_num_steps": 2},
        "train": {"mesh": {"data": 1, "fsdp": 2}, "epochs": 1},
    }
    got, alone = (run("ddpo", *layout, model=str(folder), sections=sections) for layout in ((2, 1), (1, 2)))
    for name, array in alone.images.items():
        np.testing.assert_allclose(got.images[name], array, rtol=0, atol=1e-5, err_msg=name)
    for name, array in alone.params.items():
        np.testing.assert_allclose(got.params[name], array, rtol=0, atol=1e-4, err_msg=name)
    assert (got.folder / "saved" / "pytorch_lora_weights.safetensors").exists()


def test_process_0_judges_all_images_where_it_is_asked_to(run):
    sections = {**EVALUATED, "train": {**EVALUATED["train"], "rewards_on": "main"}}
    got = run("ddpo", 2, 1, sections=sections)
    assert got.results[1]["rows_seen"] == []
    alone = run("ddpo", 1, 2, sections=EVALUATED)
    assert got.results[0]["rows_seen"] == alone.results[0]["rows_seen"]
    assert_equal_bits(got, alone)


@pytest.mark.parametrize("on_threads", [False, True])
def test_a_reward_that_computes_by_jax_runs_in_each_process_alone(run, on_threads):
    sections = {**EVALUATED, "method": {**EVALUATED["method"], "async_reward_computation": on_threads}}
    got, alone = (
        run("ddpo", *layout, reward="brightness_in_jax", sections=sections) for layout in ((2, 1), (1, 2))
    )
    assert judged(got) == judged(alone)
    for mine, wanted in zip(got.rollouts, alone.rollouts, strict=True):
        assert mine["prompt"] == wanted["prompt"]
        assert mine["reward"] == pytest.approx(wanted["reward"], abs=1e-6)


def test_images_that_fail_are_left_out_whichever_process_has_them(run):
    sections = {"train": {"reward_errors": "skip"}}
    got, alone = (
        run("ddpo", *layout, reward="fails_on_circles", sections=sections) for layout in ((2, 1), (1, 2))
    )
    assert_equal_bits(got, alone)
    missing = [row["reward"] is None for row in got.rollouts]
    assert missing == ["circle" in row["prompt"] for row in got.rollouts] and any(missing)


def test_a_reward_function_that_fails_in_one_process_ends_all_of_them(tmp_path):
    job = start(tmp_path, "ddpo", 2, reward="fails_in_process_1")
    assert job.wait(timeout=300.0) == [1, 1], job.output()
    for process in range(2):
        said = " ".join(job.output(process).split())
        assert "RewardError: Process 1 of 2 failed: RewardError: epoch 0, sampling batch 1:" in said, said
        assert "the judge is down" in said
    (kept,) = (tmp_path / "run" / "failed_rollouts").iterdir()
    assert kept.name == "epoch_0_sampling_batch_1_process_1"
    assert len(list(kept.glob("*.png"))) == 2


def test_processes_that_draw_other_prompts_are_refused(tmp_path):
    job = start(tmp_path, "ddpo", 2, own_prompts=True)
    assert job.wait(timeout=300.0) == [1, 1], job.output()
    for process in range(2):
        said = " ".join(job.output(process).split())
        assert "`prompt_function` must draw the same prompts in every process of a job" in said, said


def test_a_killed_job_goes_on_to_the_bit(run, tmp_path):
    """One process is killed in the middle of an epoch; a third job, of one process, goes on from there as well."""
    train = {"checkpoint_interval": 2, "keep_checkpoints": 10}
    whole = run("ddpo", 2, 1, sections={"train": train})
    folder = tmp_path / "job"
    sections = {"train": {**train, "resume_from_checkpoint": str(folder / "run")}}
    job = start(folder, "ddpo", 2, sections=sections, hurt={"process": 1, "call": 6})
    codes = job.wait(timeout=300.0)
    assert codes[1] == -signal.SIGKILL and codes[0] != 0, job.output()
    # That of step 4 may still have been on its way to the disk.
    assert (folder / "run" / "checkpoint_2" / "manifest.json").exists(), job.output()
    shutil.copytree(folder / "run", tmp_path / "alone" / "run")
    start(folder, "ddpo", 2, sections=sections).succeed(timeout=600.0)
    got = outcome_of(folder, 2)
    assert got.results[0]["history"] == whole.results[0]["history"]
    assert got.rollouts == whole.rollouts
    for name, leaf in whole.params.items():
        np.testing.assert_array_equal(got.params[name], leaf, err_msg=name)
    alone = {"train": {**train, "resume_from_checkpoint": str(tmp_path / "alone" / "run")}}
    start(tmp_path / "alone", "ddpo", 1, 2, sections=alone).succeed(timeout=600.0)
    for name, leaf in outcome_of(tmp_path / "alone", 1).params.items():
        np.testing.assert_array_equal(leaf, whole.params[name], err_msg=name)

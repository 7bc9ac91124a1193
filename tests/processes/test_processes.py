# SPDX-License-Identifier: Apache-2.0
"""Real processes on this machine: what they train together is what one process trains."""

import pytest

from tests.processes.conftest import assert_same_run

pytestmark = pytest.mark.slow
LAYOUTS = {
    "1x1": (1, 1, None),
    "2x2": (2, 2, None),
    "4x1": (4, 1, None),
    "4x1 fsdp": (4, 1, {"data": 1, "fsdp": 4}),
    "4x1 mixed": (4, 1, {"data": 2, "fsdp": 2}),
}


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "sft", "ilql", "dpo"])
def test_two_processes_are_as_one(run, algorithm):
    """The quick ones: `-k two`."""
    assert_same_run(run(algorithm, 2, 1), run(algorithm, 1, 2))


@pytest.mark.parametrize("algorithm", ["rft", "reward"])
def test_a_pair_of_processes_is_as_one(run, algorithm):
    assert_same_run(run(algorithm, 2, 1), run(algorithm, 1, 2))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("algorithm", ["ppo", "sft", "ilql", "dpo"])
def test_four_devices_in_any_processes(run, algorithm, layout):
    num_processes, num_devices, mesh = LAYOUTS[layout]
    sections = {} if mesh is None else {"train": {"mesh": mesh}}
    assert_same_run(run(algorithm, num_processes, num_devices, **sections), run(algorithm, 1, 4))


@pytest.mark.parametrize("algorithm", ["ppo", "dpo"])
def test_a_model_split_over_processes(run, algorithm):
    """Its tensor axis: every row lies on both processes, which share the rows out."""
    sections = {"family": "llama", "train": {"mesh": {"data": 1, "tensor": 2}}}
    assert_same_run(run(algorithm, 2, 1, **sections), run(algorithm, 1, 2, **sections))


def test_rows_that_do_not_divide(run):
    """7 rollouts in calls of 3, over two processes: every device computes all, and each process judges some."""
    sections = {"method": {"num_rollouts": 7, "chunk_size": 3}}
    got = run("ppo", 2, 1, **sections)
    assert_same_run(got, run("ppo", 1, 1, **sections))
    assert all(result["rows_seen"] for result in got.results)


def test_a_frozen_base_in_fewer_bits_and_an_adapter(run):
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"]}
    sections = {"model": {"peft_config": adapter, "frozen_dtype": "int8", "num_layers_unfrozen": -1}}
    sections["train"] = {"mesh": {"data": 1, "fsdp": 2}}
    assert_same_run(run("sft", 2, 1, **sections), run("sft", 1, 2, **sections))

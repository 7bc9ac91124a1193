# SPDX-License-Identifier: Apache-2.0
"""SIGKILL at random moments: what was lost comes again, and the run is the one that was never killed."""

import random
import time

import pytest

from tests.faults.jobs import assert_same_run, last_step, records, start

pytestmark = pytest.mark.slow
KILLS = {"ppo": 14, "sft": 12, "ilql": 12, "dpo": 12}
ONLINE = ("ppo", "ahead", "grpo", "rft", "ddpo")


def moments(algorithm, count):
    """(phase, how many times it has begun by then, seconds after that) of each kill; the same ones every time."""
    rng = random.Random(f"{algorithm} {count}")
    phases = ["update", "checkpoint", "run"] + ["rollout"] * (algorithm in ONLINE)
    for number in range(count):
        phase = phases[number % len(phases)]
        # The second checkpoint: by then the first one is whole, and the run gets on.
        times = {"run": 1, "checkpoint": 2}.get(phase) or rng.randint(1, 4)
        yield phase, times, rng.uniform(0, 3.0 if phase == "run" else 0.1)


def kill_again_and_again(algorithm, checkpoint, folder, whole_folder, steps, count):
    """The phases that were hit, the most steps that one kill cost, and how often the run resumed from a checkpoint."""
    hit, lost, resumed = [], 0, 0
    for phase, times, seconds in moments(algorithm, count):
        expected = last_step(folder)
        job = start(algorithm, checkpoint, folder, steps=steps, branch=True)
        job.wait_until_it(phase, times=times)
        time.sleep(seconds)
        assert job.process.poll() is None, f"it had ended before kill {len(hit) + 1}:\n{job.text}"
        said = job.kill()
        resumed += f"resumed at {expected}" in said
        assert not expected or phase == "run" or f"resumed at {expected}" in said, said
        half_written = list(folder.glob("checkpoint_*.tmp"))
        hit.append("checkpoint write" if half_written else phase)
        logged = [record["step"] for record in records(folder)]
        lost = max(lost, max(logged, default=0) - last_step(folder))
    assert (
        f"resumed at {last_step(folder)}"
        in start(algorithm, checkpoint, folder, steps=steps, branch=True).finish()
    )
    assert_same_run(folder, whole_folder)
    return hit, lost, resumed + 1


def report(algorithm, hit, lost, resumed):
    counts = {phase: hit.count(phase) for phase in sorted(set(hit))}
    print(
        f"{algorithm}: killed {len(hit)} times {counts}, resumed {resumed} times from a checkpoint; "
        f"at most {lost} logged steps were done again"
    )


@pytest.mark.parametrize(
    "algorithm", ["ppo", "ahead", "grpo", "rft", "sft", "ilql", "episodes", "dpo", "reward", "ddpo"]
)
def test_killed_three_times_it_is_the_run_that_never_was(algorithm, checkpoint, whole, tmp_path):
    whole_folder, steps = whole(algorithm)
    count = 4 if algorithm == "grpo" else 3  # the fourth is in the middle of an iteration's rounds
    report(
        algorithm, *kill_again_and_again(algorithm, checkpoint, tmp_path / "run", whole_folder, steps, count)
    )
    if algorithm == "grpo":
        asked = [record["group/asked"] for record in records(whole_folder) if "group/asked" in record]
        assert len(set(asked)) > 1, "the places in the stream were to depend on what came before"


@pytest.mark.parametrize(("algorithm", "count"), KILLS.items())
def test_fifty_kills_over_the_algorithms(algorithm, count, checkpoint, whole, tmp_path):
    assert sum(KILLS.values()) >= 50
    whole_folder, steps = whole(algorithm)
    hit, lost, resumed = kill_again_and_again(
        algorithm, checkpoint, tmp_path / "run", whole_folder, steps, count
    )
    report(algorithm, hit, lost, resumed)
    assert "checkpoint write" in hit
    assert (
        resumed > count // 2
    )  # the others were killed before their first checkpoint, or before they said so

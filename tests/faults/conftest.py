# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.faults.jobs import ROOT, Job, start
from tests.trainers.runs import save_tiny_checkpoint

STEPS = {
    "ppo": 160,
    "ahead": 160,
    "grpo": 80,
    "rft": 160,
    "sft": 400,
    "ilql": 400,
    "episodes": 400,
    "dpo": 400,
    "reward": 400,
    "ddpo": 160,
}


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session", autouse=True)
def _programs(tmp_path_factory):
    """What these processes compile is kept apart: one that is killed may leave half an entry behind."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path_factory.mktemp("programs")))
        patch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.1")
        patch.setenv("PYTHONPATH", str(ROOT), prepend=":")
        yield


@pytest.fixture(autouse=True)
def _no_job_outlives_its_test():
    yield
    while Job.all:
        job = Job.all.pop()
        if job.process.poll() is None:
            job.process.kill()
            job.process.wait()


@pytest.fixture(scope="session")
def whole(checkpoint, tmp_path_factory):
    """Makes an undisturbed run of an algorithm, once: `whole(algorithm) -> (folder, steps)`."""
    done = {}

    def make(algorithm):
        if algorithm not in done:
            folder = tmp_path_factory.mktemp("whole") / algorithm
            afresh = {"resume_from_checkpoint": None}
            start(algorithm, checkpoint, folder, steps=STEPS[algorithm], train=afresh, branch=True).finish()
            done[algorithm] = folder
        return done[algorithm], STEPS[algorithm]

    return make

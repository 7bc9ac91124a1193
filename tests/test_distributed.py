# SPDX-License-Identifier: Apache-2.0
"""How a process finds its job, and what one process alone says to itself; `tests/processes` has several."""

import numpy as np
import pytest

import jrl.distributed
from jrl.cli.joining import join_job
from jrl.distributed import HEARTBEAT_TIMEOUT_SECONDS, from_main, gather, join, on_main

ADDRESS = {
    "JRL_COORDINATOR_ADDRESS": "10.0.0.1:1234",
    "JRL_NUM_PROCESSES": "4",
    "JRL_PROCESS_ID": "3",
}


@pytest.fixture
def joined(monkeypatch):
    """Arguments of the calls that would join a job."""
    calls = []
    monkeypatch.setattr(
        jrl.distributed.jax.distributed, "initialize", lambda *args, **kw: calls.append((args, kw))
    )
    for name in ("JRL_DISTRIBUTED", "JRL_HEARTBEAT_TIMEOUT_SECONDS", *ADDRESS):
        monkeypatch.delenv(name, raising=False)
    return calls


class TestJoin:
    def test_without_the_variable_nothing_is_joined(self, joined, monkeypatch):
        for name, value in ADDRESS.items():
            monkeypatch.setenv(name, value)
        join()
        assert joined == []

    def test_the_environment_says_which_job(self, joined, monkeypatch):
        for name, value in (ADDRESS | {"JRL_DISTRIBUTED": "1", "JRL_HEARTBEAT_TIMEOUT_SECONDS": "7"}).items():
            monkeypatch.setenv(name, value)
        join()
        ((positional, named),) = joined
        assert positional == ("10.0.0.1:1234", 4, 3)
        assert named["heartbeat_timeout_seconds"] == named["shutdown_timeout_seconds"] == 7

    def test_a_scheduler_says_the_rest(self, joined, monkeypatch):
        monkeypatch.setenv("JRL_DISTRIBUTED", "1")
        join()
        ((positional, named),) = joined
        assert positional == (None, None, None)
        assert named["heartbeat_timeout_seconds"] == HEARTBEAT_TIMEOUT_SECONDS

    @pytest.mark.parametrize(
        ("name", "value", "message"),
        [
            ("JRL_DISTRIBUTED", "yes", r"`JRL_DISTRIBUTED` must be 1 \(join the job\) or 0, got 'yes'"),
            ("JRL_PROCESS_ID", "-1", "`JRL_PROCESS_ID` must be a whole number, got '-1'"),
        ],
    )
    def test_a_mistaken_variable_is_named(self, joined, monkeypatch, name, value, message):
        monkeypatch.setenv("JRL_DISTRIBUTED", "1")
        monkeypatch.setenv(name, value)
        with pytest.raises(ValueError, match=message):
            join()
        assert joined == []


class TestFlags:
    def test_they_join_and_are_taken_away(self, joined):
        words = ["--config", "a.yaml", "--num-processes", "2", "--process_id=1", "--train.seed", "3"]
        assert join_job([*words, "--coordinator-address", "host:1"]) == [
            "--config",
            "a.yaml",
            "--train.seed",
            "3",
        ]
        ((positional, named),) = joined
        assert positional == ("host:1", 2, 1)
        assert named["heartbeat_timeout_seconds"] == HEARTBEAT_TIMEOUT_SECONDS

    def test_a_scheduler_says_the_rest(self, joined):
        assert join_job(["--distributed", "--heartbeat-timeout-seconds", "9"]) == []
        ((positional, named),) = joined
        assert positional == (None, None, None)
        assert named["heartbeat_timeout_seconds"] == 9

    def test_without_them_the_environment_decides(self, joined):
        assert join_job(["--train.seed", "3", "--help"]) == ["--train.seed", "3", "--help"]
        assert joined == []


class TestOneProcess:
    def test_it_hears_what_it_says(self):
        (word,) = gather({"loss": float("inf")}, {"ids": np.arange(3)})
        assert word.plain == {"loss": float("inf")}
        np.testing.assert_array_equal(word.arrays["ids"], np.arange(3))
        assert from_main("x") == on_main(lambda: "x") == "x"

    def test_a_failure_stays_what_it_is(self):
        with pytest.raises(KeyError, match="missing"):
            gather(failure=KeyError("missing"))
        with pytest.raises(ZeroDivisionError):
            on_main(lambda: 1 / 0)

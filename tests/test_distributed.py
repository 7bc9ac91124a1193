# SPDX-License-Identifier: Apache-2.0
"""How a process finds its job, and what one process alone says to itself; `tests/processes` has several."""

import sys
import threading

import numpy as np
import pytest

import jrl.distributed
from jrl.cli import main, train
from jrl.cli.multihost import join_job
from jrl.distributed import HEARTBEAT_TIMEOUT_SECONDS, from_main, gather, initialize, join, on_main

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

    def test_a_flag_goes_before_a_variable_and_that_before_the_default(self, joined, monkeypatch):
        for name, value in (ADDRESS | {"JRL_DISTRIBUTED": "1", "JRL_HEARTBEAT_TIMEOUT_SECONDS": "7"}).items():
            monkeypatch.setenv(name, value)
        join_job(["--heartbeat-timeout-seconds", "20"])
        monkeypatch.setenv("JRL_DISTRIBUTED", "0")
        join_job(["--distributed", "--process-id", "0"])
        (first, named), (second, others) = joined
        assert first == ("10.0.0.1:1234", 4, 3) and named["heartbeat_timeout_seconds"] == 20
        assert second == ("10.0.0.1:1234", 4, 0) and others["heartbeat_timeout_seconds"] == 7

    @pytest.mark.parametrize("name", ["heartbeat_timeout_seconds", "num_processes"])
    def test_0_is_no_number_of_seconds_or_processes(self, joined, name):
        with pytest.raises(ValueError, match=f"`{name}` must be at least 1, got 0"):
            join_job(["--distributed", f"--{name}", "0"])
        assert joined == []


class Ended(Exception):
    """Stands for the end of the process."""


@pytest.fixture
def ending(monkeypatch):
    """Statuses with which the process would end, while it is one of a job; one that asks for its devices hangs."""
    statuses = []

    def end(status):
        statuses.append(status)
        raise Ended

    monkeypatch.setattr(jrl.distributed.os, "_exit", end)
    monkeypatch.setattr(jrl.distributed.jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jrl.distributed.jax, "process_count", lambda: pytest.fail("waits for all processes"))
    monkeypatch.setattr(jrl.distributed, "_MET", threading.Event())
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.delenv("JRL_DISTRIBUTED", raising=False)
    return statuses


class TestEnd:
    @pytest.mark.parametrize("enter", [initialize, join])
    def test_who_joined_by_hand_ends_on_an_error_too_and_asks_no_device(self, ending, capsys, enter):
        enter()
        with pytest.raises(Ended):
            sys.excepthook(FileNotFoundError, FileNotFoundError("no data"), None)
        assert ending == [1] and "no data" in capsys.readouterr().err

    def test_who_has_met_the_others_leaves_them_time_for_their_words(self, ending, monkeypatch):
        met = []
        monkeypatch.setattr(jrl.distributed, "meet", lambda name, *, seconds: met.append(name))
        jrl.distributed._MET.set()
        with pytest.raises(Ended):
            jrl.distributed.end_now(2)
        assert met == ["jrl_failed"] and ending == [2]

    @pytest.mark.parametrize(
        ("error", "status"), [(ValueError("no such flag"), 2), (KeyboardInterrupt(), 130)]
    )
    def test_a_command_of_a_job_does_not_wait_for_the_others(
        self, ending, monkeypatch, capsys, error, status
    ):
        def fails(flags, overrides):
            raise error

        monkeypatch.setattr(train, "train", fails)
        with pytest.raises(Ended):
            main(["sft", "--samples", "x"])
        assert ending == [status]
        assert capsys.readouterr().err == f"jrl sft: {str(error) or 'interrupted.'}\n"


@pytest.fixture
def peers(monkeypatch):
    """Makes this the first of two processes, the other of which says what `change` makes of its words."""
    shapes = []

    def start(change=lambda x: x):
        def allgather(x):
            shapes.append(x.shape)
            return np.stack([x, change(x)])

        monkeypatch.setattr(jrl.distributed, "_MET", threading.Event())
        monkeypatch.setattr(jrl.distributed.jax, "process_count", lambda: 2)
        monkeypatch.setattr(jrl.distributed.multihost_utils, "process_allgather", allgather)
        return shapes

    return start


class TestSeveral:
    def test_words_of_many_lengths_are_passed_in_few(self, peers):
        shapes = peers()
        for length in (1, 500, 3000, 5000, 7000):
            words = gather(length, {"ids": np.arange(length, dtype=np.uint8)})
            assert [word.plain for word in words] == [length] * 2
            assert all(word.arrays["ids"].size == length for word in words)
        assert set(shapes) == {(2,), (4096,), (8192,)}

    def test_a_word_too_long_is_refused_by_all(self, peers):
        peers(lambda x: np.array([1, 5], x.dtype) if x.shape == (2,) else x)
        with pytest.raises(ValueError, match=r"Process 1 of 2 has 2147483653 bytes .* at most 2147483648"):
            gather()


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

# SPDX-License-Identifier: Apache-2.0
import threading

import pytest

from jrl.trainers.loggers.guard import WAITING, GuardedTracker

DESCRIPTION = {"algorithm": "PPOTrainer"}


class Tracker:
    """Remembers what it is told; fails or stalls where it is asked to."""

    def __init__(self, *, fails_in=(), stalls_in=()):
        self.told, self._fails_in, self._stalls_in = [], fails_in, stalls_in
        self.go_on = threading.Event()

    def _hear(self, what, *arguments):
        if what in self._stalls_in:
            self.go_on.wait()
        if what in self._fails_in:
            raise ConnectionError(f"{what}: no route to host")
        self.told.append((what, *arguments))

    def start(self, description, *, total_steps, step):
        self._hear("start")

    def log(self, record, step):
        self._hear("log", step)

    def log_table(self, name, columns, rows, step):
        self._hear("log_table", step)

    def flush(self):
        self._hear("flush")

    def close(self):
        self._hear("close")


def tell(guarded):
    guarded.start(DESCRIPTION, total_steps=10, step=0)
    for step in range(3):
        guarded.log({"a": 1.0}, step)
    guarded.log_table("rollouts", ["a"], [[1]], 3)
    guarded.flush()
    guarded.close()


def test_everything_arrives_in_order():
    tracker = Tracker()
    tell(GuardedTracker(tracker, "wandb"))
    logs = [("log", 0), ("log", 1), ("log", 2)]
    assert tracker.told == [("start",), *logs, ("log_table", 3), ("flush",), ("close",)]


def test_one_that_cannot_begin_is_said_and_left_alone():
    tracker = Tracker(fails_in=["start"])
    with pytest.warns(UserWarning, match=r"wandb failed \(ConnectionError: start: no route.*goes on") as seen:
        tell(GuardedTracker(tracker, "wandb"))
    assert len(seen) == 1 and tracker.told == []


def test_one_that_fails_later_is_said_once_and_counted():
    tracker = Tracker(fails_in=["log"])
    with pytest.warns(UserWarning) as seen:
        tell(GuardedTracker(tracker, "wandb"))
    first, last = (str(warning.message) for warning in seen)
    assert "log: no route to host" in first and "missed 3 calls" in last
    assert tracker.told == [("start",), ("log_table", 3), ("flush",), ("close",)]


def test_one_that_never_answers_holds_nothing_up():
    tracker = Tracker(stalls_in=["log"])
    with pytest.warns(UserWarning, match=r"did not end within 0.01 s"):
        tell(GuardedTracker(tracker, "wandb", patience=0.01))
    tracker.go_on.set()


def test_one_that_is_too_slow_is_not_waited_for():
    tracker = Tracker(stalls_in=["log"])
    guarded = GuardedTracker(tracker, "wandb", patience=0.01)
    guarded.start(DESCRIPTION, total_steps=10, step=0)
    for step in range(WAITING + 1):
        guarded.log({}, step)
    with pytest.warns(UserWarning, match=f"{WAITING} calls wait for it"):
        guarded.log({}, WAITING + 1)
    with pytest.warns(UserWarning, match="did not end"):
        guarded.close()
    tracker.go_on.set()

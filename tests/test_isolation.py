# SPDX-License-Identifier: Apache-2.0
"""Real worker processes that hang, crash and eat memory: one row is lost, order is kept, and no process stays."""

from __future__ import annotations

import gc
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from jrl import isolation
from jrl.isolation import Isolated, IsolatedError, isolated
from jrl.rewards import number_reward
from jrl.rollout.rewards import RewardError, call_reward_fn
from jrl.rollout.text import Texts
from tests import verifiers_that_fail
from tests.verifiers_that_fail import obey

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def quick() -> Iterator[Isolated]:
    """Workers that are given up after a second."""
    found = isolated(obey, timeout=1.0, workers=2, memory=2**28)
    yield found
    found.close()


def is_there(process: int) -> bool:
    """False for a process that ended, and for a zombie."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def ends_within(process: int, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while is_there(process):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def children() -> list[str]:
    """Processes of this one, zombies included."""
    folder = Path(f"/proc/{os.getpid()}/task")
    return [child for task in folder.iterdir() for child in (task / "children").read_text().split()]


def test_rows_keep_their_order(quick: Isolated) -> None:
    outputs = ["sleep 0.2", *("x" * number for number in range(6))]
    assert quick(outputs=outputs, bonus=[10.0] * 7) == [19.0, *(10.0 + number for number in range(6))]
    assert quick(outputs=[], bonus=[]) == []


@pytest.mark.parametrize(
    ("deed", "said"),
    [
        ("hang", "took longer than 1 s, so its process was ended"),
        ("bomb", "took longer than 1 s"),
        ("deaf", "took longer than 1 s"),
        ("crash", "its process ended with status 3"),
        ("abort", "its process ended with status -6"),
        ("exit", "SystemExit"),
        ("raise", "KeyError: 'no such case'"),
        ("memory", "MemoryError"),
        ("two", "ValueError: must return one reward a sample, a list of 1, got [1.0, 2.0]"),
        ("nan", "ValueError: must return finite rewards"),
    ],
)
def test_one_row_is_lost_and_no_other(quick: Isolated, deed: str, said: str) -> None:
    before, lost, after, more = quick(outputs=["a", deed, "ab", "abc"])
    assert (before, after, more) == (1.0, 2.0, 3.0)
    assert isinstance(lost, IsolatedError) and said in str(lost)


@pytest.mark.parametrize("deed", ["forge", "forge a nonce", "twice"])
def test_a_forged_answer_is_none_and_shifts_no_row(deed: str) -> None:
    alone = isolated(obey, timeout=2.0)
    before, lost, *after = alone(outputs=["a", deed, "ab", "abc", "abcd"])
    assert (before, after) == (1.0, [2.0, 3.0, 4.0])
    assert isinstance(lost, IsolatedError) and "other than one answer to its question" in str(lost)
    assert alone(outputs=["abc", "a", "ab"]) == [3.0, 1.0, 2.0]
    alone.close()


def test_what_was_said_unasked_is_no_answer(tmp_path: Path) -> None:
    alone = isolated(obey, timeout=2.0)
    first, kept = alone(outputs=[f"pid {tmp_path / 'pid'}", "forge later"])
    assert kept == 11.0
    time.sleep(0.6)
    rewards = alone(outputs=["a", "ab", f"pid {tmp_path / 'pid'}"])
    assert rewards[:2] == [1.0, 2.0] and rewards[2] != first
    alone.close()


def test_a_fork_that_returns_shifts_no_row(tmp_path: Path) -> None:
    alone = isolated(obey, timeout=2.0)
    told = f"pid {tmp_path / 'pid'}"
    first, *rewards, last = alone(outputs=[told, "a", "fork", "ab", "fork", "abc", "abcde", told])
    assert rewards == [1.0, 4.0, 2.0, 4.0, 3.0, 5.0]
    assert first == last, "one process answers, the other ends"
    assert alone(outputs=["abc", "a", "ab"]) == [3.0, 1.0, 2.0]
    alone.close()


@pytest.mark.parametrize(
    ("deed", "reward"), [("print", 1.0), ("read", 0.0), ("none", None), ("tokens", [1.0, 2.0])]
)
def test_what_it_may_do(quick: Isolated, deed: str, reward: object) -> None:
    assert quick(outputs=[deed, "abc"]) == [reward, 3.0]


def test_workers_work_at_the_same_time() -> None:
    with_two = isolated(obey, timeout=5.0, workers=2)
    with_two(outputs=["a", "b"])
    started = time.perf_counter()
    with_two(outputs=["sleep 0.6", "sleep 0.6"])
    assert time.perf_counter() - started < 1.1
    with_two.close()


def test_a_worker_serves_until_it_is_lost(tmp_path: Path) -> None:
    alone = isolated(obey, timeout=0.5)
    asked = [f"pid {tmp_path / 'a'}"] * 2 + ["crash"] + [f"pid {tmp_path / 'a'}"] * 2
    first, second, _, third, fourth = alone(outputs=asked)
    assert first == second != third == fourth
    assert not is_there(int(first)) and is_there(int(third))
    os.kill(int(third), signal.SIGKILL)  # as the system does where memory is short
    assert ends_within(int(third), 5.0)
    assert alone(outputs=["abc"]) == [3.0], "a row is not lost to what happened before it"
    alone.close()


def test_what_a_worker_started_ends_with_it(tmp_path: Path) -> None:
    alone = isolated(obey, timeout=1.0)
    (lost,) = alone(outputs=[f"child {tmp_path / 'pids'}"])
    assert isinstance(lost, IsolatedError)
    worker, child = map(int, (tmp_path / "pids").read_text().split())
    assert not is_there(worker) and ends_within(child, 5.0)


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere its process group alone is ended, as the docs say"
)
@pytest.mark.parametrize("then", ["hang", "crash"])
def test_nor_does_what_went_into_a_session_of_its_own(tmp_path: Path, then: str) -> None:
    alone = isolated(obey, timeout=1.0)
    (lost,) = alone(outputs=[f"session {tmp_path / 'pids'} {then}"])
    assert isinstance(lost, IsolatedError)
    worker, child = map(int, (tmp_path / "pids").read_text().split())
    assert not is_there(worker) and ends_within(child, 5.0)
    alone.close()


@pytest.mark.skipif(
    sys.platform != "linux", reason="elsewhere its process group alone is ended, as the docs say"
)
def test_nor_does_what_a_row_that_is_not_lost_left(tmp_path: Path) -> None:
    alone = isolated(obey, timeout=5.0)
    alone(outputs=[f"session {tmp_path / 'pids'} none"])
    _, child = map(int, (tmp_path / "pids").read_text().split())
    assert is_there(child), "the test would prove nothing"
    alone.close()
    assert ends_within(child, 5.0)


def test_nobody_stays(tmp_path: Path) -> None:
    before = set(children())
    used = isolated(obey, timeout=0.5, workers=2)
    used(outputs=["a", "hang", "crash", "b"])
    assert set(children()) - before
    del used
    gc.collect()
    assert set(children()) == before


def test_a_closed_one_starts_anew() -> None:
    used = isolated(obey, timeout=0.5)
    assert used(outputs=["a"]) == [1.0]
    used.close()
    assert used(outputs=["ab"]) == [2.0]
    used.close()


def test_a_worker_is_ended_once(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []
    end = isolation._end

    def counts(*workers: isolation._Worker) -> None:
        ended.extend(id(worker) for worker in workers)
        end(*workers)

    monkeypatch.setattr(isolation, "_end", counts)
    used = isolated(obey, timeout=0.5)
    used(outputs=["hang", "a", "crash"])
    used(outputs=["a"])
    assert len(ended) == 2
    used.close()
    assert used(outputs=["ab"]) == [2.0]
    assert len(ended) == 3, "the two that were lost, and the one that was closed"
    used.close()


def test_closing_waits_for_rows_that_are_judged() -> None:
    used = isolated(obey, timeout=5.0, workers=2)
    used(outputs=["a", "b"])
    found: list[object] = []
    asks = threading.Thread(target=lambda: found.extend(used(outputs=["sleep 0.2"] * 20)))
    asks.start()
    time.sleep(0.1)
    started = time.perf_counter()
    closes = [threading.Thread(target=used.close) for _ in range(2)]
    for thread in closes:
        thread.start()
    for thread in closes:
        thread.join(10.0)
    assert time.perf_counter() - started < 1.0, "not for those behind them"
    asks.join(10.0)
    assert found == [9.0] * 20
    used.close()


SCRIPT = """
import importlib.util
import sys
from tests.verifiers_that_fail import obey

# By its file: without the seconds that jrl takes.
spec = importlib.util.spec_from_file_location("isolation", "jrl/isolation.py")
isolation = importlib.util.module_from_spec(spec)
spec.loader.exec_module(isolation)
judge = isolation.isolated(obey, timeout=1.0)
judge(outputs=["a"])
print("ready", flush=True)
judge(outputs=sys.argv[1:])
"""


def start(*outputs: str) -> subprocess.Popen[str]:
    found = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *outputs], cwd=ROOT, stdout=subprocess.PIPE, text=True
    )
    assert found.stdout is not None and found.stdout.readline() == "ready\n"
    return found


@pytest.mark.parametrize("deed", ["hang", "bomb"])
def test_a_worker_does_not_outlive_a_run_that_is_killed(tmp_path: Path, deed: str) -> None:
    told = tmp_path / "pid"
    with start(f"pid {told}", deed) as run:
        while not told.exists() or not told.read_text():
            time.sleep(0.02)
        worker = int(told.read_text())
        time.sleep(0.3)  # it is in the middle of the row behind it
        run.kill()
    assert is_there(worker), "the test would prove nothing"
    assert ends_within(worker, 6.0)


def test_nor_one_that_ends(tmp_path: Path) -> None:
    told = tmp_path / "pid"
    with start(f"pid {told}") as run:
        assert run.wait(timeout=30) == 0
    assert ends_within(int(told.read_text()), 5.0)


TEXTS = Texts(["a", "b"], ["p", "q"], ["ab", "crash"], [[1], [2]], np.array([1, 1]), np.array([False] * 2))


class TestAsRewardFunction:
    """Under the run's policy, with the function's own keywords."""

    def test_a_lost_row_is_a_failure_that_is_named(self) -> None:
        judge = isolated(verifiers_that_fail.obey_alone, timeout=1.0)
        with pytest.raises(
            RewardError, match=r"`reward_fn` failed: .* status 3. Sample 1 has the prompt 'q'"
        ):
            call_reward_fn(judge, TEXTS, tokenizer=object(), metadata={"of_no_use": [object()] * 2})
        found = call_reward_fn(judge, TEXTS, tokenizer=object(), metadata={}, skip_errors=True)
        assert found[0] == 2.0 and np.isnan(found[1])
        judge.close()

    def test_one_that_takes_everything_gets_no_tokenizer(self, quick: Isolated) -> None:
        bonus = {"bonus": [1.0, 1.0]}
        everything = {name: [0, 0] for name in ("samples", "prompts", "output_tokens")}
        assert quick(outputs=["a", "b"], tokenizer=object(), **everything, **bonus) == [2.0, 2.0]

    @pytest.mark.parametrize("lost", [None, 0.0, -1.0])
    def test_or_what_is_said(self, lost: float | None) -> None:
        judge = isolated(obey, timeout=0.5, lost=lost)
        assert judge(outputs=["ab", "crash"]) == [2.0, lost]
        judge.close()

    def test_a_verifier_of_jrl(self) -> None:
        judge = isolated(number_reward, timeout=5.0)
        assert judge(["42", "41"], np.array([42, 42])) == [1.0, 0.0]
        assert judge.__name__ == "number_reward"
        judge.close()


def nested() -> object:
    def inner(outputs: list[str]) -> list[float]:
        return [1.0]

    return inner


@pytest.mark.parametrize(
    ("function", "options", "message"),
    [
        (lambda outputs: [1.0], {}, "must be one that a worker can import"),
        (nested(), {}, "must be one that a worker can import"),
        (len, {}, "must be one that a worker can import"),
        (verifiers_that_fail.asks, {}, "must not be async"),
        (verifiers_that_fail.with_tokenizer, {}, "must not take `tokenizer`"),
        (obey, {"timeout": 0.0}, "`timeout` must be positive, got 0.0"),
        (obey, {"workers": 0}, "`workers` must be positive, got 0"),
        (obey, {"memory": -1}, "`memory` must be positive, got -1"),
        (obey, {"lost": "zero"}, "`lost` must be a number, None or 'error', got 'zero'"),
    ],
)
def test_what_could_not_work_is_refused(function: object, options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        isolated(function, **{"timeout": 1.0, **options})  # type: ignore[arg-type]


def test_a_limit_that_the_system_does_not_have(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    with pytest.raises(ValueError, match="`memory` must be None on darwin"):
        isolated(obey, timeout=1.0)
    isolated(obey, timeout=1.0, memory=None)


def test_columns_that_are_none(quick: Isolated) -> None:
    with pytest.raises(ValueError, match="must have one entry a row"):
        quick(outputs=["a", "b"], bonus=[1.0])
    with pytest.raises(ValueError, match="must hold what JSON does, got in row 1 of `bonus`: object"):
        quick(outputs=["a", "b"], bonus=[1.0, object()])
    assert isinstance(isolated(verifiers_that_fail.bare, timeout=0.5)(outputs=["a"])[0], IsolatedError)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((1, 2), r"row 1 of `table`: \(1, 2\), a tuple"),
        ([{"a": [(1, 2)]}], r"row 1 of `table`: \(1, 2\), a tuple"),
        ({1: "a"}, "row 1 of `table`: 1, a key that is no text"),
        ([{"a": {None: 1}}], "row 1 of `table`: None, a key that is no text"),
        (np.array([(1, 2), None], object), r"row 1 of `table`: \(1, 2\), a tuple"),
    ],
)
def test_what_json_would_change_is_refused(quick: Isolated, entry: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        quick(outputs=["a", "b"], table=[0, entry])


def test_two_threads_take_the_last_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(queue.SimpleQueue[object]):
        """Whose readers stand at the same place: each has seen an entry that one of them gets."""

        def empty(self) -> bool:
            found = super().empty()
            time.sleep(0.1)
            return found

    monkeypatch.setattr(queue, "SimpleQueue", Slow)
    judge = isolated(obey, timeout=5.0, workers=2)
    assert judge(outputs=["a"]) == [1.0]
    assert judge(outputs=["sleep 0.2", "sleep 0.2"]) == [9.0, 9.0]
    judge.close()


def test_a_module_that_cannot_be_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module = tmp_path / "only_here.py"
    module.write_text("def judge(outputs):\n    return [1.0]\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import only_here  # type: ignore[import-not-found]

    judge = isolated(only_here.judge, timeout=1.0)
    module.write_text("raise RuntimeError('needs a licence')")
    with pytest.raises(IsolatedError, match=r"'judge' of 'only_here' cannot be used .*needs a licence"):
        judge(outputs=["a"])

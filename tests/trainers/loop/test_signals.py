# SPDX-License-Identifier: Apache-2.0
import faulthandler
import multiprocessing
import os
import signal
import threading
import time
import warnings
from pathlib import Path

import pytest

from jrl.trainers.loop.signals import GracefulStop


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_only_sets_the_flag(number):
    before = signal.getsignal(number)
    with GracefulStop() as stop:
        assert not stop.requested
        signal.raise_signal(number)
        assert stop.requested
        assert stop.received == number.name
    assert signal.getsignal(number) is before


def test_a_second_interrupt_raises():
    with GracefulStop() as stop:
        signal.raise_signal(signal.SIGINT)
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGTERM)  # whoever stops a job may say so twice
        assert stop.received == "SIGINT"


def test_the_handlers_come_back_after_an_error():
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(RuntimeError), GracefulStop():
        raise RuntimeError
    assert signal.getsignal(signal.SIGTERM) is before


def test_outside_the_main_thread_it_does_nothing():
    seen = []

    def work():
        with GracefulStop() as stop:
            seen.append(stop.requested)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


UNLESS_USED = [signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU]


@pytest.mark.parametrize("number", UNLESS_USED)
class TestSignalsThatAProgramMayUse:
    @pytest.fixture(autouse=True)
    def _default(self, number):
        """As a program finds it that was started plainly; under nohup SIGHUP is ignored."""
        before = signal.signal(number, signal.SIG_DFL)
        yield
        signal.signal(number, before)

    def test_they_stop_a_run(self, number):
        with GracefulStop() as stop:
            signal.raise_signal(number)
            assert stop.received == number.name
        assert signal.getsignal(number) == signal.SIG_DFL

    def test_those_that_are_ignored_stay_ignored(self, number):
        before = signal.signal(number, signal.SIG_IGN)  # as nohup does
        try:
            with GracefulStop() as stop:
                signal.raise_signal(number)
                assert not stop.requested
        finally:
            signal.signal(number, before)

    def test_a_handler_of_the_program_is_called(self, number):
        called = []
        before = signal.signal(number, lambda *_: called.append(number))
        try:
            with GracefulStop() as stop:
                signal.raise_signal(number)
                assert called == [number] and not stop.requested
        finally:
            signal.signal(number, before)

    @pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="what C handles is seen on Linux only")
    def test_so_is_one_that_python_knows_nothing_of(self, number, tmp_path):
        with (tmp_path / "stacks").open("w") as file:
            faulthandler.register(number, file)
            try:
                with GracefulStop() as stop:
                    signal.raise_signal(number)
                    assert not stop.requested
            finally:
                faulthandler.unregister(number)
        assert "test_so_is_one_that_python" in (tmp_path / "stacks").read_text()


def test_ctrl_c_does_not_take_the_workers_of_a_pool():
    """A terminal's Ctrl-C reaches them too; their work belongs to the iteration that is finished."""
    with GracefulStop() as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that the child has not
        with multiprocessing.get_context("fork").Pool(1) as pool:
            (worker,) = pool.map(_pid, [0])
            waiting = pool.map_async(time.sleep, [0.3])
            os.kill(worker, signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
            assert waiting.get(timeout=30) == [None]
        assert stop.requested


def _pid(_):
    return os.getpid()


def test_a_forked_child_ends_at_a_signal():
    ready, tell = os.pipe()
    with GracefulStop() as stop, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of threads that the child has not
        child = os.fork()
        if not child:
            os.write(tell, b".")
            time.sleep(60)
            os._exit(0)
        os.read(ready, 1)
        os.kill(child, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
        signal.raise_signal(signal.SIGTERM)
        assert stop.requested

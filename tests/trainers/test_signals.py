# SPDX-License-Identifier: Apache-2.0
import signal
import threading

import pytest

from jrl.trainers.signals import GracefulStop


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

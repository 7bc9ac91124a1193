# SPDX-License-Identifier: Apache-2.0
"""trlX's logging: ranks, levels, handlers and formats."""

import io
import logging as standard

import pytest

from jrl.interop import arguments
from jrl.trlx import logging


@pytest.fixture
def written(monkeypatch):
    """What the package's loggers write, from a fresh start."""
    monkeypatch.setattr(logging, "_default_handler", None)
    root = standard.getLogger("jrl")
    before = root.handlers, root.level, root.propagate
    root.handlers = []
    logging.get_logger()
    stream = io.StringIO()
    logging.disable_default_handler()
    logging.add_handler(standard.StreamHandler(stream))
    yield stream
    root.handlers, root.propagate = before[0], before[2]
    root.setLevel(before[1])


class TestRanks:
    @pytest.mark.parametrize(
        ("rank", "ranks", "speaks"),
        [
            ("0", None, True),
            ("1", None, False),
            ("1", ["0", "1"], True),
            ("1", [], True),
            ("0", ["1"], False),
        ],
    )
    def test_who_speaks(self, written, monkeypatch, rank, ranks, speaks):
        monkeypatch.setenv("RANK", rank)
        logging.get_logger("jrl.somewhere").info("hello %s", "you", ranks=ranks)
        assert written.getvalue() == (f"[RANK {rank}] hello you\n" if speaks else "")

    def test_one_speaks_without_environment(self, written, monkeypatch):
        monkeypatch.delenv("RANK", raising=False)
        logging.get_logger().warning("once")
        assert written.getvalue() == "[RANK 0] once\n"


class TestLevels:
    def test_info_is_the_default_and_may_be_set(self, written):
        assert logging.get_verbosity() == logging.INFO
        logging.set_verbosity(logging.ERROR)
        logging.get_logger().warning("silent")
        assert logging.get_verbosity() == logging.ERROR and not written.getvalue()

    @pytest.mark.parametrize(("asked", "level"), [("ERROR", standard.ERROR), ("loud", standard.INFO)])
    def test_the_environment_decides_at_the_start(self, written, monkeypatch, asked, level):
        monkeypatch.setenv("TRLX_VERBOSITY", asked)
        monkeypatch.setattr(logging, "_default_handler", None)
        assert logging.get_verbosity() == level
        assert ("must be one of debug, info" in written.getvalue()) == (asked == "loud")

    def test_advice_may_be_silenced(self, written, monkeypatch):
        logging.get_logger().warning_advice("heed")
        monkeypatch.setenv("TRLX_NO_ADVISORY_WARNINGS", "1")
        logging.get_logger().warning_advice("ignored")
        assert written.getvalue() == "[RANK 0] heed\n"


class TestHandlers:
    def test_the_explicit_format_names_the_caller(self, written):
        logging.enable_explicit_format()
        logging.get_logger().info("here")
        logging.get_logger().warning_advice("and here")
        for line in written.getvalue().splitlines():
            assert "[test_logging.py:" in line and ":test_the_explicit_format_names_the_caller]" in line
        logging.reset_format()
        logging.get_logger().info("there")
        assert written.getvalue().endswith("\n[RANK 0] there\n")

    def test_propagation_and_the_default_handler_are_switched(self, written):
        root = standard.getLogger("jrl")
        logging.enable_propagation()
        assert root.propagate
        logging.disable_propagation()
        assert not root.propagate
        count = len(root.handlers)
        logging.enable_default_handler()
        assert len(root.handlers) == count + 1

    def test_a_handler_that_was_not_added_cannot_be_removed(self, written):
        handler = standard.NullHandler()
        with pytest.raises(ValueError, match="`handler` must be one of"):
            logging.remove_handler(handler)
        logging.add_handler(handler)
        logging.remove_handler(handler)


def test_progress_bars_are_accepted_and_said_once(monkeypatch):
    monkeypatch.setattr(arguments, "_told", set())
    with pytest.warns(UserWarning, match=r"`logging.disable_progress_bar\(\)` has no effect in jrl"):
        logging.disable_progress_bar()
    assert not logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    logging.enable_progress_bar()
    assert logging.is_progress_bar_enabled()

# SPDX-License-Identifier: Apache-2.0
"""Warnings of a command: jrl's are plain lines, others keep their place in the source."""

from __future__ import annotations

import warnings

import pytest

from jrl.cli.plain_warnings import plain_warnings
from jrl.trainers.checkpoints import resume


def shown(category, filename):
    return warnings.formatwarning("The run was stopped.\nIt begins again.", category, filename, 155)


def test_a_notice_of_jrl_is_a_plain_line():
    with plain_warnings():
        assert shown(UserWarning, resume.__file__) == "warning: The run was stopped. It begins again.\n"


@pytest.mark.parametrize(
    ("category", "filename"), [(UserWarning, "/home/me/my_reward.py"), (DeprecationWarning, resume.__file__)]
)
def test_other_warnings_keep_their_place(category, filename):
    before = shown(category, filename)
    with plain_warnings():
        assert shown(category, filename) == before
    assert f"{filename}:155" in before


def test_python_shows_them_as_before_afterwards():
    before = warnings.formatwarning
    with pytest.raises(ValueError, match="ended"), plain_warnings():
        raise ValueError("ended")
    assert warnings.formatwarning is before

# SPDX-License-Identifier: Apache-2.0
"""What the tests give to worker processes, in a module that takes them no time to import."""

import os


def with_process(record):
    """The record, and where it was."""
    return [record, os.getpid()]


class Exits(Exception):
    """An error that cannot travel between processes: its constructor takes two arguments."""

    def __init__(self, one, other):
        super().__init__(f"{one} {other}")


def exits(record):
    """Fails from the 600th record on."""
    if record >= 600:
        raise Exits("left", record)
    return record

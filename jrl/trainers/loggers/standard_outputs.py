# SPDX-License-Identifier: Apache-2.0
"""Standard outputs whose reader is gone: a closed connection must not end what only wanted to say something."""

from __future__ import annotations

import os
import select

_GONE = select.POLLERR | select.POLLHUP | select.POLLNVAL


def mute_lost() -> None:
    """Points standard output and standard error, where nobody reads them any more, to nowhere.

    A terminal that was hung up and a pipe without a reader refuse every later write; whoever prints would fail.
    """
    watched = select.poll()
    for descriptor in (1, 2):
        watched.register(descriptor, 0)
    lost = [descriptor for descriptor, events in watched.poll(0) if events & _GONE]
    if lost:
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for descriptor in lost:
            os.dup2(nowhere, descriptor)
        os.close(nowhere)

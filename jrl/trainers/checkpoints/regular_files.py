# SPDX-License-Identifier: Apache-2.0
"""Files that may be something else by now: a pipe in the place of one must not hang a run, nor another pass for it."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import IO


def open_file(path: Path, flags: int = os.O_RDONLY) -> int:
    """Descriptor of a regular file.

    Args:
      path: Of it, or of where it is to be made.
      flags: As of `os.open`.
    Raises:
      OSError: If it cannot be opened, or is no regular file: a pipe would be waited for, a device read for ever.
    """
    descriptor = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK, 0o666)
    if stat.S_ISREG(os.fstat(descriptor).st_mode):
        return descriptor
    os.close(descriptor)
    raise OSError(errno.EINVAL, "no regular file", str(path))


def open_binary(path: Path) -> IO[bytes]:
    """A regular file, to be read.

    Raises:
      OSError: As `open_file`.
    """
    return os.fdopen(open_file(path), "rb")


def read_text(path: Path) -> str:
    """Text of a regular file, UTF-8.

    Raises:
      OSError: As `open_file`.
      UnicodeDecodeError: If it is no UTF-8.
    """
    with open_binary(path) as file:
        return file.read().decode("utf-8")


def is_at(descriptor: int, path: Path) -> bool:
    """True where a path still leads to an open file, and where the disk does not say."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True

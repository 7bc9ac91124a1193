# SPDX-License-Identifier: Apache-2.0
"""A folder that is replaced as one: whoever looks, and whatever kills us, finds the old content or the new.

The new content is written into a hidden sibling, forced to the disk, and swapped with the old one: on Linux by one
`renameat2(RENAME_EXCHANGE)`, elsewhere by two renames, between which a crash leaves the old folder under another name
(`recover_folder` gives it back).
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)


@contextlib.contextmanager
def replace_folder(
    directory: str | os.PathLike[str], *, obsolete: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Gives an empty folder to write into, which becomes `directory` when the block ends without an error.

    Files of the old folder that were not written anew stay in it, by hard links: they cost no space.

    Args:
      directory: Made if missing.
      obsolete: Of which old files, by name, nothing stays.
    Raises:
      OSError: If the folder cannot be replaced; it is then as it was.
    """
    directory = Path(directory).resolve()
    recover_folder(directory)
    staging = directory.with_name(f".{directory.name}.saving")
    # Left by a save that was killed: never needed, whole or not.
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir(parents=True)
    try:
        yield staging
        if directory.exists():
            _carry_over(directory, staging, obsolete)
        for path in staging.rglob("*"):
            _sync(path)
        _sync(staging)
        _swap(staging, directory)
        _sync(directory.parent)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def recover_folder(directory: Path) -> None:
    """Undoes a swap by two renames that was killed between them."""
    aside = _aside(directory)
    if not directory.exists() and aside.is_dir():
        aside.rename(directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def _carry_over(old: Path, new: Path, obsolete: Callable[[str], bool]) -> None:
    shutil.copymode(old, new)
    for path in old.iterdir():
        target = new / path.name
        if target.exists() or obsolete(path.name):
            continue
        if path.is_symlink():
            target.symlink_to(os.readlink(path))
        elif path.is_dir():
            shutil.copytree(path, target, symlinks=True, copy_function=_link)
        else:
            _link(path, target)


def _link(source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)


def _sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, directory: Path) -> None:
    """Puts the new folder in the place of the old one, which lies at `staging` or nowhere afterwards."""
    if not directory.exists():
        staging.rename(directory)
        return
    here = _working_folder()
    try:
        if not _exchange(staging, directory):
            aside = _aside(directory)
            shutil.rmtree(aside, ignore_errors=True)
            directory.rename(aside)
            staging.rename(directory)
            shutil.rmtree(aside, ignore_errors=True)
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise OSError(
            errno.EBUSY,
            f"{directory} is a mount point, which cannot be replaced in one step; save into a folder inside it",
        ) from error
    if here is not None and here.is_relative_to(directory) and here.is_dir():
        # Else this process would go on in the old folder, which is about to go.
        os.chdir(here)


def _working_folder() -> Path | None:
    with contextlib.suppress(FileNotFoundError):  # someone removed it
        return Path.cwd()
    return None


def _exchange(one: Path, other: Path) -> bool:
    """Swaps two names in one step; False where the system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _RENAME_EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in _NOT_SUPPORTED:
        return False
    raise OSError(number, os.strerror(number), str(other))

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
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NOT_SUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EPERM)
_NOT_WRITABLE = (errno.EACCES, errno.EPERM, errno.EROFS)
# Inode, size and time of the last change: the same file, untouched.
_Identity = tuple[int, int, int]


@contextlib.contextmanager
def replace_folder(
    directory: str | os.PathLike[str], *, obsolete: Callable[[str], bool] = lambda name: False
) -> Iterator[Path]:
    """Gives an empty folder to write into, which becomes `directory` when the block ends without an error.

    Files of the old folder that were not written anew stay in it, by hard links: they cost no space; so they do in its
    folders. What others put into it meanwhile is moved over.

    Args:
      directory: Made if missing.
      obsolete: Which old files and folders go, by their path in the folder, parted by `/`. A folder that is emptied by
        that goes too.
    Raises:
      ValueError: If it is the working folder, or holds it.
      OSError: If the folder cannot be replaced; it is then as it was.
    """
    directory = Path(directory).resolve()
    _check_not_working_folder(directory)
    recover_folder(directory)
    staging = directory.with_name(f".{directory.name}.saving")
    # Left by a save that was killed: never needed, whole or not.
    shutil.rmtree(staging, ignore_errors=True)
    _make_staging(staging, directory)
    try:
        yield staging
        written = {path.relative_to(staging) for path in staging.rglob("*")}

        def is_dropped(path: Path) -> bool:
            return path in written or obsolete(path.as_posix())

        for path in staging.rglob("*"):
            _sync(path)
        carried: dict[Path, _Identity] = {}
        if directory.exists():
            _carry_over(directory, staging, Path(), is_dropped, carried)
        for folder, _, _ in os.walk(staging):
            _sync(Path(folder))
        old = _swap(staging, directory)
        _sync(directory.parent)
        if old is not None:
            _move_late_files(old, directory, carried, is_dropped)
            shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def recover_folder(directory: Path) -> None:
    """Undoes a swap by two renames that was killed between them."""
    aside = _aside(directory)
    if not directory.exists() and aside.is_dir():
        aside.rename(directory)


def _aside(directory: Path) -> Path:
    return directory.with_name(f".{directory.name}.replaced")


def _check_not_working_folder(directory: Path) -> None:
    """The shell that started this process would be left in the old folder, which goes."""
    try:
        here = Path.cwd()
    except FileNotFoundError:  # someone removed it
        return
    if here.is_relative_to(directory):
        raise ValueError(
            f"{directory} is the working folder (or holds it), which cannot be replaced in one step; save into a "
            "folder inside it."
        )


def _make_staging(staging: Path, directory: Path) -> None:
    try:
        staging.mkdir(parents=True)
    except OSError as error:
        if error.errno not in _NOT_WRITABLE:
            raise
        hint = "; save into a folder inside it" if directory.is_dir() else ""
        raise PermissionError(
            error.errno,
            f"{directory} cannot be written: the new folder is made beside the old one and swapped with it, so the "
            f"parent {directory.parent} must be writable{hint}",
        ) from error


def _carry_over(
    old: Path, new: Path, at: Path, is_dropped: Callable[[Path], bool], carried: dict[Path, _Identity]
) -> None:
    """Gives the new folder what stays of the old one.

    Args:
      old: The old folder.
      new: The new one.
      at: Of which folder in them, which both have.
      is_dropped: Whether what has this path in the folder goes.
      carried: Gets what each file was, and each folder that was looked into, by path; links are left out.
    """
    for source in (old / at).iterdir():
        path = at / source.name
        target = new / path
        dropped = is_dropped(path)
        if source.is_dir() and not source.is_symlink() and (target.is_dir() or not dropped):
            carried[path] = _identity(source)
            before = any(source.iterdir())
            target.mkdir(exist_ok=True)
            _carry_over(old, new, path, is_dropped, carried)
            if before and not any(target.iterdir()):
                target.rmdir()
        elif dropped:
            continue
        elif source.is_symlink():
            target.symlink_to(os.readlink(source))
        else:
            carried[path] = _identity(source)
            _link(source, target)
    shutil.copymode(old / at, new / at)


def _identity(path: Path) -> _Identity:
    found = path.lstat()
    return found.st_ino, found.st_size, found.st_mtime_ns


def _link(source: Path, target: Path) -> None:
    try:
        os.link(source, target)
    except OSError:  # a file system without hard links
        shutil.copy2(source, target)
        _sync(target)


def _move_late_files(
    old: Path, new: Path, carried: Mapping[Path, _Identity], is_dropped: Callable[[Path], bool]
) -> None:
    """Moves what others made, or put in the place of a file, after the old folder was carried over."""
    for folder, folders, files in os.walk(old):
        at = Path(folder).relative_to(old)
        links = [name for name in folders if Path(folder, name).is_symlink()]
        folders[:] = [name for name in folders if name not in links]
        for name in (*folders, *links, *files):
            source, path = Path(folder, name), at / name
            # A folder that was looked into is so again; one that is new goes over as a whole.
            if (name in folders and path in carried) or is_dropped(path):
                continue
            if carried.get(path) != _identity(source):
                (new / at).mkdir(parents=True, exist_ok=True)  # it may have been left out as empty
                source.replace(new / path)
        folders[:] = [name for name in folders if at / name in carried]


def _sync(path: Path) -> None:
    """Forces a file, or a folder's list of names, to the disk."""
    if path.is_symlink():
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _swap(staging: Path, directory: Path) -> Path | None:
    """Puts the new folder in the place of the old one; gives where that lies afterwards, None if there was none."""
    if not directory.exists():
        staging.rename(directory)
        return None
    try:
        if _exchange(staging, directory):
            return staging
        aside = _aside(directory)
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        staging.rename(directory)
        return aside
    except OSError as error:
        if error.errno != errno.EBUSY:
            raise
        raise OSError(
            errno.EBUSY,
            f"{directory} is a mount point, which cannot be replaced in one step; save into a folder inside it",
        ) from error


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

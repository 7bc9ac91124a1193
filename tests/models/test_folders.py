# SPDX-License-Identifier: Apache-2.0
"""A replaced folder is the old one or the new one, whatever happens on the way."""

import errno
import os
import re

import pytest

from jrl.models import folders
from jrl.models.folders import recover_folder, replace_folder


class Killed(BaseException):
    """Stands for a signal that nothing catches."""


def content(folder):
    return {
        str(path.relative_to(folder)): path.read_text()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }


def write(folder, text, names=("a", "b")):
    with replace_folder(folder, obsolete=lambda name: name == "b") as staging:
        for name in names:
            (staging / name).write_text(text)


@pytest.fixture(params=["exchange", "two renames"])
def swap(request, monkeypatch):
    """Both ways to swap: what Linux has, and what the rest has."""
    if request.param == "two renames":
        monkeypatch.setattr(folders, "_exchange", lambda one, other: False)
    return request.param


def test_a_new_folder_and_its_parents_appear(tmp_path, swap):
    write(tmp_path / "x" / "m", "new")
    assert content(tmp_path) == {"x/m/a": "new", "x/m/b": "new"}


def test_an_old_folder_is_replaced_and_strange_files_stay(tmp_path, swap):
    write(tmp_path / "m", "old")
    (tmp_path / "m" / "notes").mkdir(mode=0o750)
    (tmp_path / "m" / "notes" / "n").write_text("kept")
    (tmp_path / "m" / "link").symlink_to("notes/n")
    (tmp_path / "m").chmod(0o700)
    write(tmp_path / "m", "new", names=("a",))
    assert content(tmp_path) == {"m/a": "new", "m/notes/n": "kept", "m/link": "kept"}
    assert (tmp_path / "m" / "link").is_symlink() and (tmp_path / "m").stat().st_mode & 0o777 == 0o700
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


@pytest.mark.parametrize("heads", [False, True])
def test_of_a_folder_only_what_is_obsolete_or_written_goes(tmp_path, swap, monkeypatch, heads):
    for name in ("heads", "emptied", "empty"):
        (tmp_path / "m" / name).mkdir(parents=True)
    for name in ("heads/model.safetensors", "heads/notes", "emptied/model.safetensors"):
        (tmp_path / "m" / name).write_text("old")
    before_the_swap(monkeypatch, lambda folder: (folder / "emptied" / "late").write_text("late"))
    with replace_folder(tmp_path / "m", obsolete=lambda path: path.endswith("/model.safetensors")) as staging:
        if heads:
            (staging / "heads").mkdir()
            (staging / "heads" / "model.safetensors").write_text("new")
    new = {"heads/model.safetensors": "new"} if heads else {}
    assert content(tmp_path / "m") == {"heads/notes": "old", "emptied/late": "late", **new}
    assert (tmp_path / "m" / "empty").is_dir()


def test_without_hard_links_files_are_copied(tmp_path, monkeypatch):
    write(tmp_path / "m", "old")
    (tmp_path / "m" / "notes").write_text("kept")

    def refuse(source, target):
        raise OSError(errno.EOPNOTSUPP, "no links here")

    monkeypatch.setattr(os, "link", refuse)
    write(tmp_path / "m", "new")
    assert content(tmp_path / "m") == {"a": "new", "b": "new", "notes": "kept"}


def test_an_error_while_writing_leaves_the_old_folder(tmp_path):
    write(tmp_path / "m", "old")
    with pytest.raises(RuntimeError, match="disk"), replace_folder(tmp_path / "m") as staging:
        (staging / "a").write_text("half")
        raise RuntimeError("disk")
    assert content(tmp_path) == {"m/a": "old", "m/b": "old"}


class Fuse:
    """Counts steps, and from the n-th on lets none return."""

    def __init__(self, limit):
        self.limit, self.count = limit, 0

    def wrap(self, call):
        def step(*args, **kwargs):
            self.count += 1
            if self.count > self.limit:
                raise Killed
            return call(*args, **kwargs)

        return step


def test_killed_at_any_step_leaves_old_or_new(tmp_path, swap, monkeypatch):
    # Every change of the file system goes through one of these. Nothing cleans up: the fuse stays blown.
    steps = [(os, name) for name in ("rename", "link", "mkdir", "unlink", "rmdir")]
    steps += [(folders, "_exchange")] if swap == "exchange" else []
    monkeypatch.setattr(folders.shutil, "rmtree", rmtree_by_steps)
    outcomes = []
    while not outcomes or outcomes[-1] != "done":
        root = tmp_path / str(len(outcomes))
        root.mkdir()
        write(root / "m", "old")
        (root / "m" / "notes").write_text("kept")
        old = content(root / "m")
        fuse = Fuse(len(outcomes))
        with monkeypatch.context() as patched:
            for module, name in steps:
                patched.setattr(module, name, fuse.wrap(getattr(module, name)))
            try:
                write(root / "m", "new")
                outcomes.append("done")
            except Killed:
                outcomes.append("killed")
        recover_folder(root / "m")
        assert content(root / "m") in (old, {"a": "new", "b": "new", "notes": "kept"})
        # And the next save finds nothing in its way.
        write(root / "m", "newer")
        assert content(root) == {"m/a": "newer", "m/b": "newer", "m/notes": "kept"}
    assert len(outcomes) > 5


def rmtree_by_steps(path, ignore_errors=False):
    """As shutil's, by calls that the test can interrupt."""
    if not os.path.isdir(path):
        return
    for entry in list(os.scandir(path)):
        if entry.is_dir(follow_symlinks=False):
            rmtree_by_steps(entry.path)
        else:
            os.unlink(entry.path)
    os.rmdir(path)


@pytest.mark.parametrize("inside", ["", "notes"])
def test_the_working_folder_is_not_replaced(tmp_path, monkeypatch, inside):
    # The shell that started the process would stay behind in a folder that is gone.
    write(tmp_path / "m", "old")
    (tmp_path / "m" / "notes").mkdir()
    monkeypatch.chdir(tmp_path / "m" / inside)
    with pytest.raises(
        ValueError, match=r"m is the working folder \(or holds it\), .* folder inside it"
    ) as error:
        write(tmp_path / "m", "new")
    assert "\n" not in str(error.value) and content(tmp_path) == {"m/a": "old", "m/b": "old"}
    write("inside", "new")
    assert content(tmp_path / "m" / inside / "inside") == {"a": "new", "b": "new"}


def before_the_swap(monkeypatch, act):
    """Lets another process act between the carrying over and the swap."""
    real = folders._swap

    def swap(staging, directory):
        act(directory)
        return real(staging, directory)

    monkeypatch.setattr(folders, "_swap", swap)


def test_what_others_write_meanwhile_is_moved_over(tmp_path, swap, monkeypatch):
    write(tmp_path / "m", "old")
    (tmp_path / "m" / "logs").mkdir()
    for name in ("log", "logs/1", "logs/2"):
        (tmp_path / "m" / name).write_text("kept")

    def act(folder):
        (folder / "logs" / "3").write_text("late")
        (folder / "late" / "deep").mkdir(parents=True)
        (folder / "late" / "deep" / "x").write_text("late")
        (folder / "link").symlink_to("log.1")
        # As logs are rotated, and as editors save.
        (folder / "log").rename(folder / "log.1")
        (folder / "log").write_text("late")
        (folder / "logs" / "1").unlink()
        # Neither is wanted: one was written anew, the other is obsolete.
        (folder / "a").write_text("older")
        (folder / "b").write_text("obsolete")

    before_the_swap(monkeypatch, act)
    write(tmp_path / "m", "new", names=("a",))
    assert content(tmp_path) == {
        "m/a": "new",
        "m/log": "late",
        "m/log.1": "kept",
        "m/link": "kept",
        "m/logs/1": "kept",
        "m/logs/2": "kept",
        "m/logs/3": "late",
        "m/late/deep/x": "late",
    }
    assert [path.name for path in tmp_path.iterdir()] == ["m"]


def test_only_what_is_new_is_forced_to_the_disk(tmp_path, monkeypatch):
    write(tmp_path / "m", "old")
    (tmp_path / "m" / "notes").mkdir()
    (tmp_path / "m" / "notes" / "n").write_text("kept")
    # Opening it would wait for a writer for ever.
    os.mkfifo(tmp_path / "m" / "pipe")
    synced = []
    monkeypatch.setattr(folders, "_sync", lambda path: synced.append(path.name))
    write(tmp_path / "m", "new")
    assert sorted(synced) == [".m.saving", "a", "b", "notes", tmp_path.name]
    assert (tmp_path / "m" / "pipe").is_fifo()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EROFS])
def test_a_parent_that_is_not_writable_is_named(tmp_path, monkeypatch, number):
    write(tmp_path / "m", "old")
    mkdir = os.mkdir

    def refuse(path, *args, **kwargs):
        if str(path).endswith(".saving"):
            raise OSError(number, "refused", str(path))
        mkdir(path, *args, **kwargs)

    monkeypatch.setattr(os, "mkdir", refuse)
    expected = (
        f"{tmp_path / 'm'} cannot be written: the new folder is made beside the old one and swapped with it, so the "
        f"parent {tmp_path} must be writable; save into a folder inside it"
    )
    with pytest.raises(PermissionError, match=re.escape(expected)):
        write(tmp_path / "m", "new")
    assert content(tmp_path) == {"m/a": "old", "m/b": "old"}
    with pytest.raises(PermissionError, match=r"must be writable$"):
        write(tmp_path / "n", "new")


def test_a_link_to_a_folder_stays_a_link(tmp_path):
    write(tmp_path / "real", "old")
    (tmp_path / "m").symlink_to("real")
    write(tmp_path / "m", "new")
    assert (tmp_path / "m").is_symlink() and content(tmp_path / "real") == {"a": "new", "b": "new"}


def test_a_mount_point_is_named(tmp_path, monkeypatch):
    write(tmp_path / "m", "old")

    def busy(one, other):
        raise OSError(errno.EBUSY, "busy")

    monkeypatch.setattr(folders, "_exchange", busy)
    with pytest.raises(OSError, match="m is a mount point, which cannot be replaced in one step"):
        write(tmp_path / "m", "new")
    assert content(tmp_path) == {"m/a": "old", "m/b": "old"}


def test_the_swap_is_one_system_call_here(tmp_path):
    one, other = tmp_path / "one", tmp_path / "other"
    for folder in (one, other):
        folder.mkdir()
        (folder / "name").write_text(folder.name)
    assert folders._exchange(one, other)
    assert (one / "name").read_text() == "other" and (other / "name").read_text() == "one"
    with pytest.raises(FileNotFoundError):
        folders._exchange(one, tmp_path / "absent")

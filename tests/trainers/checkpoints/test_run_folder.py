# SPDX-License-Identifier: Apache-2.0
"""A run's folder and files under other people's hands: deleted, renamed, replaced, or something else than files."""

import errno
import json
import os
import shutil
import signal
import tracemalloc
import warnings
from dataclasses import replace

import pytest

import jrl
from jrl.trainers.checkpoints.checkpointer import Checkpointer
from jrl.trainers.checkpoints.manifest import CheckpointError, verify_manifest, write_manifest
from jrl.trainers.checkpoints.resume import LOCK, checkpoints_in, find_checkpoint
from jrl.trainers.checkpoints.run_folder import InUseError, lock, refuse_before_loading
from jrl.trainers.loggers.jsonl import JSONLLogger
from jrl.trainers.loggers.line_file import LineFile, read_lines


def steps_in(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def begin(folder, **others):
    return JSONLLogger(folder / "metrics.jsonl", folder / "rollouts", **{"keep_records": None, **others})


def test_a_folder_that_is_in_use_is_refused_before_anything_is_loaded(tmp_path):
    """Unless the run resumes or overwrites; an empty folder is left as it is."""
    train = jrl.default_ppo_config().train
    train = replace(train, checkpoint_dir=str(tmp_path / "run"))
    refuse_before_loading(train)
    assert not (tmp_path / "run").exists()
    (tmp_path / "run" / "checkpoint_4").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"holds checkpoints of an earlier run \(checkpoint_4\)"):
        refuse_before_loading(train)
    refuse_before_loading(replace(train, overwrite=True))
    refuse_before_loading(replace(train, resume_from_checkpoint=str(tmp_path / "elsewhere")))
    with lock(tmp_path / "run"), pytest.raises(InUseError, match="Another run is working"):
        refuse_before_loading(train)


@pytest.fixture
def told():
    return []


@pytest.fixture
def held(tmp_path, told):
    """A run's checkpoints, whose folder is locked."""
    checkpoints = Checkpointer(tmp_path / "run", keep=1, notify=told.append)
    yield checkpoints
    checkpoints.close()


class TestLines:
    def test_a_folder_that_is_deleted_comes_back_with_every_line(self, tmp_path):
        logger = begin(tmp_path / "run")
        logger.log({}, 1)
        logger.log_table("rollouts", ["output"], [["a"]], 1)
        shutil.rmtree(tmp_path / "run")
        logger.log({}, 2)
        with pytest.warns(UserWarning, match="was deleted, renamed or replaced") as seen:
            logger.flush()
        assert len(seen) == 2
        logger.log({}, 3)
        logger.log_table("rollouts", ["output"], [["b"]], 3)
        logger.close()
        assert steps_in(tmp_path / "run" / "metrics.jsonl") == [1, 2, 3]
        assert steps_in(tmp_path / "run" / "rollouts" / "rollouts.jsonl") == [1, 3]

    def test_so_does_one_that_is_renamed_at_the_end(self, tmp_path):
        logger = begin(tmp_path / "run")
        logger.log({}, 1)
        (tmp_path / "run").rename(tmp_path / "other")
        logger.log({}, 2)
        with pytest.warns(UserWarning, match="It is there again, with all its lines"):
            logger.close()
        assert steps_in(tmp_path / "run" / "metrics.jsonl") == [1, 2]

    def test_what_somebody_put_in_its_place_is_kept_aside(self, tmp_path):
        logger = begin(tmp_path)
        logger.log({}, 1)
        (tmp_path / "edited").write_text("theirs")
        (tmp_path / "edited").replace(tmp_path / "metrics.jsonl")
        with pytest.warns(UserWarning, match="replaced"):
            logger.close()
        assert steps_in(tmp_path / "metrics.jsonl") == [1]
        assert (tmp_path / "metrics.replaced").read_text() == "theirs"

    def test_where_they_cannot_be_put_back_that_is_said(self, tmp_path):
        logger = begin(tmp_path / "run")
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("in the way")
        with pytest.warns(UserWarning) as seen:
            logger.log({}, 1)
            logger.close()
        assert any("cannot be put back: its lines are lost" in str(entry.message) for entry in seen)

    @pytest.mark.parametrize("truncates", [True, False])
    def test_nothing_follows_half_a_line(self, tmp_path, monkeypatch, truncates):
        """Where the disk does not let go of the half (an append-only file), it ends, and readers leave it out."""
        file, write = LineFile(tmp_path / "lines"), os.write
        file.append(b'{"step": 1}\n')

        def half(descriptor, content):
            write(descriptor, content[:4])
            raise OSError(errno.ENOSPC, "No space left on device")

        def refuse(descriptor, size):
            raise OSError(errno.EPERM, "Operation not permitted")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="wait in memory") as seen:
            patch.setattr(os, "write", half)
            if not truncates:
                patch.setattr(os, "ftruncate", refuse)
            for step in (2, 3):
                file.append(b'{"step": %d}\n' % step)
        assert len(seen) == 1
        file.append(b'{"step": 4}\n')
        file.close()
        assert [found["step"] for _, found in read_lines(tmp_path / "lines")] == [1, 2, 3, 4]
        assert ((tmp_path / "lines").read_bytes().count(b"\n") == 4) == truncates

    def test_a_file_that_somebody_emptied_gets_no_zeros(self, tmp_path, monkeypatch):
        file, write = LineFile(tmp_path / "lines"), os.write
        file.append(b'{"step": 1}\n')
        os.truncate(tmp_path / "lines", 0)

        def half(descriptor, content):
            write(descriptor, content[:4])
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="wait in memory"):
            patch.setattr(os, "write", half)
            file.append(b'{"step": 2}\n')
        file.close()
        assert (tmp_path / "lines").read_bytes() == b'{"step": 2}\n'

    def test_what_a_crash_cut_short_is_ended_before_the_next_line(self, tmp_path):
        (tmp_path / "lines").write_bytes(b'{"step": 1}\n{"st')
        file = LineFile(tmp_path / "lines")
        file.append(b'{"step": 2}\n')
        file.close()
        assert [found["step"] for _, found in read_lines(tmp_path / "lines")] == [1, 2]

    def test_a_message_says_where_the_lines_are_and_comes_once(self, tmp_path, monkeypatch):
        file = LineFile(tmp_path / "run" / "lines")
        file.append(b'{"step": 1}\n')
        shutil.rmtree(tmp_path / "run")
        (tmp_path / "run").write_text("in the way")
        with pytest.warns(UserWarning) as seen:
            for step in (2, 3):
                file.keep()
                file.append(b'{"step": %d}\n' % step)
        [gone] = [str(entry.message) for entry in seen]
        assert "cannot be put back" in gone and "only in the file that the run holds open" in gone
        (tmp_path / "run").unlink()
        with pytest.warns(UserWarning, match="It is there again"):
            file.keep()

        def refuse(descriptor):
            raise OSError(errno.EIO, "Input/output error")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="cannot be forced to the disk"):
            patch.setattr(os, "fsync", refuse)
            file.sync()
        file.close()
        assert steps_in(tmp_path / "run" / "lines") == [1, 2, 3]

    def test_a_table_that_cannot_be_begun_waits(self, tmp_path, monkeypatch):
        logger = begin(tmp_path / "run")
        opened = os.open

        def full(path, flags, *others):
            if flags & os.O_CREAT:
                raise OSError(errno.ENOSPC, "No space left on device")
            return opened(path, flags, *others)

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="wait in memory"):
            patch.setattr(os, "open", full)
            logger.log_table("rollouts", ["output"], [["a"], ["b"]], 1)
        logger.close()
        assert steps_in(tmp_path / "run" / "rollouts" / "rollouts.jsonl") == [1, 1]

    def test_lines_that_wait_cost_one_write_each(self, tmp_path, monkeypatch):
        file, offered = LineFile(tmp_path / "lines"), []

        def full(descriptor, content):
            offered.append(len(content))
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as patch, pytest.warns(UserWarning, match="wait in memory"):
            patch.setattr(os, "write", full)
            for _ in range(500):
                file.append(b'{"step": 1}\n')
        assert sum(offered) == 500 * 12
        file.close()
        assert len(steps_in(tmp_path / "lines")) == 500

    def test_a_resume_holds_no_sample_in_memory(self, tmp_path):
        path = tmp_path / "rollouts" / "rollouts.jsonl"
        path.parent.mkdir()
        with path.open("w") as file:
            for step in range(2000):
                file.write(json.dumps({"step": step, "output": "x" * 2000}) + "\n")
        tracemalloc.start()
        try:
            logger = begin(tmp_path, keep_records=0)
            logger.start({}, total_steps=9, step=1500)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        logger.close()
        assert peak < 2**20 and steps_in(path) == list(range(1501))

    @pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
    def test_records_that_the_disk_cannot_read_on_end_there(self, number, tmp_path, monkeypatch):
        path = tmp_path / "metrics.jsonl"
        path.write_text('{"step": 1}\n{"step": 2}\n')

        class Bad:
            def __init__(self, file):
                self.file = file

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.file.close()

            def __iter__(self):
                yield next(self.file)
                raise OSError(number, os.strerror(number))

        opened = os.fdopen(os.open(path, os.O_RDONLY), "rb")
        monkeypatch.setattr("jrl.trainers.loggers.line_file.open_binary", lambda path: Bad(opened))
        with pytest.warns(UserWarning, match="cannot be read to its end"):
            assert [found["step"] for _, found in read_lines(path)] == [1]


class TestTheLock:
    def test_it_is_taken_again_where_it_was_deleted(self, held, told, tmp_path):
        held.keep_folder()
        assert not told
        (held.run_dir / LOCK).unlink()
        held.keep_folder()
        assert (
            len(told) == 1
            and "was deleted or renamed while the run worked there. It is there again" in told[0]
        )
        with pytest.raises(InUseError, match="Another run is working in"):
            lock(held.run_dir)

    @pytest.mark.parametrize("how", ["deleted", "renamed"])
    def test_so_is_the_folder(self, how, held, told, tmp_path):
        if how == "deleted":
            shutil.rmtree(held.run_dir)
        else:
            held.run_dir.rename(tmp_path / "other")
        held.keep_folder()
        assert len(told) == 1 and (held.run_dir / LOCK).exists()

    def test_a_folder_that_cannot_come_back_is_said_once(self, held, told):
        shutil.rmtree(held.run_dir)
        held.run_dir.write_text("in the way")
        held.keep_folder()
        held.keep_folder()
        assert len(told) == 1 and "Nothing can be written to the run's folder" in told[0]

    def test_another_run_keeps_what_it_took(self, held, tmp_path):
        (held.run_dir / LOCK).unlink()
        other = Checkpointer(tmp_path / "run", keep=1)
        with pytest.raises(
            InUseError, match=r"Another run is working in .*was deleted meanwhile.*run_displaced_\d+\."
        ):
            held.keep_folder()
        assert held.run_dir.parent == tmp_path and held.run_dir != other.run_dir
        other.keep_folder()
        held.keep_folder()
        other.close()

    def test_a_lock_that_is_deleted_while_it_is_taken_is_taken_anew(self, tmp_path, monkeypatch):
        import fcntl

        flock, calls = fcntl.flock, []

        def flock_and_delete(file, operation):
            flock(file, operation)
            calls.append(file)
            if len(calls) == 1:
                (tmp_path / LOCK).unlink()

        monkeypatch.setattr(fcntl, "flock", flock_and_delete)
        held = lock(tmp_path)
        assert len(calls) == 2 and os.path.samestat(os.fstat(held.fileno()), (tmp_path / LOCK).stat())
        held.close()

    def test_a_forked_child_does_not_keep_it(self, tmp_path):
        held = lock(tmp_path)
        ready, tell = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads that the child has not: it does nothing
            child = os.fork()
        if not child:
            os.write(tell, b".")
            signal.pause()
        try:
            os.read(ready, 1)
            held.close()
            lock(tmp_path).close()
        finally:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)

    def test_the_childs_end_leaves_it_to_its_parent(self, tmp_path):
        held = lock(tmp_path)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(InUseError):
            lock(tmp_path)
        held.close()


def pipe(path):
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def loop(path):
    path.unlink(missing_ok=True)
    path.symlink_to(path.name)


def device(path):
    path.unlink(missing_ok=True)
    path.symlink_to("/dev/zero")


class TestWhatIsNoFile:
    """None of these must hang."""

    @pytest.fixture
    def checkpoint(self, tmp_path):
        folder = tmp_path / "run" / "checkpoint_4"
        (folder / "state").mkdir(parents=True)
        (folder / "cursor.json").write_text("{}")
        (folder / "state" / "array").write_text("0")
        write_manifest(folder, {"step": 4, "best_score": None})
        shutil.copytree(folder, folder.with_name("checkpoint_2"))
        return folder

    @pytest.mark.parametrize("instead", [pipe, loop, device])
    @pytest.mark.parametrize("name", ["manifest.json", "cursor.json", "state/array", "surplus"])
    def test_in_a_checkpoint_it_is_noticed(self, name, instead, checkpoint, told):
        instead(checkpoint / name)
        if name == "surplus" and instead is not device:
            verify_manifest(checkpoint)  # nothing that anybody would read
            return
        with pytest.raises(CheckpointError, match="checkpoint_4"):
            verify_manifest(checkpoint)
        assert find_checkpoint(checkpoint.parent, told.append).name == "checkpoint_2" and len(told) == 1

    def test_nor_is_a_checkpoint_that_leads_to_itself(self, checkpoint, told):
        shutil.rmtree(checkpoint)
        loop(checkpoint)
        assert list(checkpoints_in(checkpoint.parent)) == [2, 4]
        assert find_checkpoint(checkpoint.parent, told.append).name == "checkpoint_2"
        assert "Too many levels of symbolic links" in told[0]

    @pytest.mark.parametrize("instead", [pipe, loop, device])
    def test_the_lock(self, instead, tmp_path):
        instead(tmp_path / LOCK)
        with pytest.raises(CheckpointError, match="Nothing can be written to the run's folder"):
            lock(tmp_path)

    @pytest.mark.parametrize("instead", [pipe, device])
    def test_the_records(self, instead, tmp_path):
        instead(tmp_path / "metrics.jsonl")
        with pytest.raises(OSError, match="no regular file"):
            begin(tmp_path, keep_records=3)
        begin(tmp_path).close()  # a fresh run replaces it
        assert (tmp_path / "metrics.jsonl").read_text() == ""

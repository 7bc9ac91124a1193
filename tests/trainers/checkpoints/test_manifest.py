# SPDX-License-Identifier: Apache-2.0
import errno
import json
import os
import shutil
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl.trainers.checkpoints.draft as draft_module
from jrl.trainers.checkpoints.checkpointer import DISK, PEER, _kind
from jrl.trainers.checkpoints.manifest import CheckpointError, fingerprint_files, tree_sha256, write_manifest
from jrl.trainers.checkpoints.retention import Retention
from jrl.trainers.checkpoints.run_folder import recover

TREE = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": np.ones(2, np.int32)}


def test_equal_trees_have_equal_fingerprints_wherever_they_lie():
    on_device = {"b": jnp.asarray(TREE["b"]), "a": {"kernel": jnp.asarray(TREE["a"]["kernel"])}}
    assert tree_sha256(TREE) == tree_sha256(on_device)


@pytest.mark.parametrize(
    "other",
    [
        {"a": {"kernel": TREE["a"]["kernel"].reshape(3, 2)}, "b": TREE["b"]},
        {"a": {"weight": TREE["a"]["kernel"]}, "b": TREE["b"]},
        {"a": {"kernel": TREE["a"]["kernel"]}, "b": TREE["b"].astype(np.uint32)},
        {"a": {"kernel": np.nextafter(TREE["a"]["kernel"], np.float32(9))}, "b": TREE["b"]},
        {"a": {"kernel": TREE["a"]["kernel"]}},
        {},
    ],
    ids=["shape", "name", "dtype", "bits", "missing", "empty"],
)
def test_any_difference_changes_it(other):
    assert tree_sha256(other) != tree_sha256(TREE)


class TestParts:
    """What another process has noted, process 0 must see before it declares a checkpoint whole."""

    NAME, TEXT = "state/ocdbt.process_1/d/values", "what process 1 wrote"

    @pytest.fixture
    def draft(self, tmp_path, monkeypatch):
        """Process 0's view of a checkpoint of two: the other one's note is there, its file not yet."""
        monkeypatch.setattr(jax, "process_count", lambda: 2)
        monkeypatch.setattr(draft_module, "finish_write", lambda path: None)
        aside = tmp_path / "checkpoint_1.tmp"
        file = aside / self.NAME
        file.parent.mkdir(parents=True)
        file.write_text(self.TEXT)
        note = {"failure": None, "files": fingerprint_files(aside, [file])}
        (aside / "process_1.json").write_text(json.dumps(note))
        file.unlink()
        return draft_module.Draft(tmp_path / "checkpoint_1")

    def test_a_file_that_shows_late_is_waited_for(self, draft, tmp_path):
        file = tmp_path / "checkpoint_1.tmp" / self.NAME
        file.write_text(self.TEXT[:3])  # and its end later still
        timer = threading.Timer(0.2, file.write_text, [self.TEXT])
        timer.start()
        known = draft._join_parts()
        assert file.read_text() == self.TEXT and list(known) == [self.NAME]
        timer.join()

    def test_one_that_never_shows_fails_the_checkpoint(self, draft, monkeypatch):
        monkeypatch.setattr(draft_module, "LATE_SECONDS", 0.2)
        with pytest.raises(
            draft_module.PartError, match=r"Process 1 wrote state/ocdbt.process_1/d/values in .*"
        ):
            draft._join_parts()

    def test_a_note_that_never_shows_is_late_too(self, draft, tmp_path, monkeypatch):
        monkeypatch.setattr(draft_module, "LATE_SECONDS", 0.1)
        (tmp_path / "checkpoint_1.tmp" / "process_1.json").unlink()
        with pytest.raises(draft_module.LateError, match="Process 1 could not write its part, nor say why"):
            draft._join_parts()

    def test_a_late_file_is_the_disks_fault_and_costs_one_checkpoint(self):
        assert _kind(draft_module.LateError("late")) == DISK
        assert _kind(draft_module.PartError("No space left on device")) == PEER

    @pytest.mark.parametrize("content", [None, "what"])
    def test_no_manifest_without_a_file_that_was_noted(self, tmp_path, content):
        file = tmp_path / "values"
        file.write_text(self.TEXT)
        known = fingerprint_files(tmp_path, [file])
        if content is None:
            file.unlink()
        else:
            file.write_text(content)
        with pytest.raises(CheckpointError, match="lacks values"):
            write_manifest(tmp_path, {"step": 1}, known)
        assert not (tmp_path / "manifest.json").exists()


class TestDeletion:
    @pytest.fixture
    def kept(self, tmp_path):
        """Two checkpoints of which the next `add` deletes the older one."""
        for step in (1, 2):
            (tmp_path / f"checkpoint_{step}").mkdir()
            write_manifest(tmp_path / f"checkpoint_{step}", {"step": step, "best_score": None})
        return Retention(tmp_path, keep=2)

    def add(self, kept, tmp_path, step):
        (tmp_path / f"checkpoint_{step}").mkdir()
        kept.add(step, tmp_path / f"checkpoint_{step}", None)

    def test_one_that_fails_leaves_the_run_alone_and_the_next_start_finishes_it(
        self, kept, tmp_path, monkeypatch
    ):
        def refuses(path, *args, **kwargs):
            raise OSError(errno.ENOTEMPTY, "Directory not empty", str(path))

        with monkeypatch.context() as patched:
            patched.setattr(os, "rmdir", refuses)  # as NFS does while somebody reads a file of it
            self.add(kept, tmp_path, 3)
            self.add(kept, tmp_path, 4)
            left = ["checkpoint_1.tmp", "checkpoint_2.tmp"]
            assert sorted(path.name for path in tmp_path.glob("*.tmp")) == left
            told = []
            recover(tmp_path, told.append)
            assert len(told) == 2 and all("cannot be removed" in text for text in told)
        told.clear()
        recover(tmp_path, told.append)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_3", "checkpoint_4"]
        assert len(told) == 2 and all("half-deleted" in text and "is removed" in text for text in told)

    def test_one_that_somebody_else_deleted_is_forgotten(self, kept, tmp_path):
        shutil.rmtree(tmp_path / "checkpoint_1")
        self.add(kept, tmp_path, 3)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_2", "checkpoint_3"]

    def test_one_that_cannot_be_renamed_is_tried_again(self, kept, tmp_path):
        (tmp_path / "checkpoint_1.tmp" / "in_the_way").mkdir(parents=True)
        self.add(kept, tmp_path, 3)
        assert (tmp_path / "checkpoint_1" / "manifest.json").exists()
        shutil.rmtree(tmp_path / "checkpoint_1.tmp")
        self.add(kept, tmp_path, 4)
        assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint_3", "checkpoint_4"]

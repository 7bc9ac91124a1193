# SPDX-License-Identifier: Apache-2.0
import os
import threading

import jax
import jax.numpy as jnp
import pytest

from jrl import placement as placing
from jrl.distributed import PeerError, Word
from jrl.mesh import make_mesh
from jrl.trainers.checkpoints import checkpointer as checkpoint
from jrl.trainers.checkpoints import draft
from jrl.trainers.checkpoints.manifest import CheckpointError
from jrl.trainers.checkpoints.run_folder import leave_sign, lock, see_sign
from jrl.trainers.loop import peers
from jrl.trainers.loop.peers import check_same, fail_together, peer_is_lost, say_end, start_vote

GLOO = "UNKNOWN: Gloo AllGather failed: Read error [127.0.0.1]:4242: Connection reset by peer"
DEAD = "ABORTED: barrier jrl_3 failed: task 1 sent no heartbeat"


@pytest.mark.parametrize(
    ("error", "lost"),
    [
        (ValueError(GLOO), True),
        (jax.errors.JaxRuntimeError(GLOO), True),
        (jax.errors.JaxRuntimeError(DEAD), True),
        (jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory"), False),
        (ValueError("mistaken flag: `heartbeat_timeout_seconds` is -1"), False),
        # The judge of one process, of which all were told: nobody is gone.
        (PeerError("Process 1 of 2 failed: ConnectionError: connection refused"), False),
        (ConnectionResetError("UNKNOWN: connection reset by peer"), False),
    ],
)
def test_the_runtimes_word_for_a_lost_process_is_known(error, lost):
    assert peer_is_lost(error) == lost


def test_the_last_words_name_cause_checkpoint_and_the_way_on(tmp_path, capfd):
    (tmp_path / "checkpoint_8").mkdir()
    (tmp_path / "checkpoint_12").mkdir()
    say_end(ValueError(GLOO), tmp_path)
    said = capfd.readouterr().err
    assert "Process 0 of 1 lost another process of the job" in said and "Connection reset by peer" in said
    assert f"from its last checkpoint, {tmp_path / 'checkpoint_12'}," in said
    assert f"train.resume_from_checkpoint: {tmp_path}`" in said
    say_end(OSError("mine"), tmp_path / "empty")
    said = capfd.readouterr().err
    assert "failed, and so the job ends (OSError: mine)" in said and "no checkpoint" in said


def told_by(monkeypatch, *words):
    """What each of several processes says, whoever asks."""
    monkeypatch.setattr(peers.jax, "process_count", lambda: len(words))
    monkeypatch.setattr(
        peers, "gather", lambda own: [Word(own, {}), *(Word(own | word, {}) for word in words[1:])]
    )


def test_processes_that_hold_the_same_go_on(monkeypatch):
    told_by(monkeypatch, {}, {})
    check_same({"train": {"seed": 1, "hook": object()}}, {"prompts": "a"}, 3)


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"data of `prompts`": "b"}, "differ: data of `prompts`"),
        (
            {"`train.seed`": "2", "number of optimizer steps": "4"},
            "differ: `train.seed`, number of optimizer steps",
        ),
    ],
)
def test_processes_that_differ_are_told_in_what(monkeypatch, other, named):
    told_by(monkeypatch, {}, {}, other)
    with pytest.raises(
        PeerError, match=rf"The 3 processes of the job .* these {named}\. Data taken from a set"
    ):
        check_same({"train": {"seed": 1}}, {"prompts": "a"}, 3)


def test_one_process_is_not_asked_whether_it_is_the_same(monkeypatch):
    monkeypatch.setattr(peers, "gather", lambda own: pytest.fail("asked"))
    check_same({}, {}, 3)


@pytest.mark.parametrize(("process", "waited"), [(0, 0), (1, 2)])
def test_who_wants_no_copy_waits_for_each_array(monkeypatch, process, waited):
    waits = []
    monkeypatch.setattr(placing.jax, "process_index", lambda: process)
    monkeypatch.setattr(placing.jax, "block_until_ready", waits.append)
    got = placing.fetch([jnp.ones(2), jnp.zeros(3)], everywhere=False)
    assert [leaf is None for leaf in got] == [process == 1] * 2
    assert len(waits) == waited


def test_one_process_always_fails_together():
    assert fail_together(ValueError(GLOO), "a_meeting")


@pytest.mark.parametrize("asked", [False, True])
def test_a_vote_counts_who_asks(asked):
    assert int(start_vote(make_mesh(), asked)) == asked


def test_a_folder_is_known_by_the_sign_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(draft, "LATE_SECONDS", 0.2)
    (tmp_path / "run.lock").write_text("the sign")
    assert see_sign(tmp_path, "the sign") is None
    assert "must share `train.checkpoint_dir`" in str(see_sign(tmp_path, "another"))
    assert "must share `train.checkpoint_dir`" in str(see_sign(tmp_path / "nowhere", "the sign"))


def test_the_sign_of_an_earlier_run_is_no_answer_yet(tmp_path):
    path = tmp_path / "run.lock"
    path.write_text("of the run before")
    timer = threading.Timer(0.3, path.write_text, ["the sign"])
    timer.start()
    assert see_sign(tmp_path, "the sign") is None
    timer.join()


def test_a_sign_is_forced_to_the_disk(tmp_path, monkeypatch):
    forced = []
    monkeypatch.setattr(os, "fsync", lambda file: forced.append(os.fstat(file).st_size))
    with lock(tmp_path) as held:
        assert forced == [] and len(leave_sign(held)) == 32
    assert forced == [32]


def test_a_folder_that_is_not_shared_is_refused_before_anything_is_read(tmp_path, monkeypatch):
    (tmp_path / "checkpoint_1").mkdir()
    with monkeypatch.context() as patched:
        patched.setattr(checkpoint, "see_sign", lambda run_dir, sign: CheckpointError("not shared"))
        with pytest.raises(CheckpointError, match="not shared"):
            checkpoint.Checkpointer(tmp_path, keep=1, overwrite=True)
    assert (tmp_path / "checkpoint_1").exists()
    checkpoint.Checkpointer(tmp_path, keep=1, overwrite=True).close()  # the lock was given back

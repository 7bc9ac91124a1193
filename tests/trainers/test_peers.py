# SPDX-License-Identifier: Apache-2.0
import jax
import pytest

from jrl.distributed import PeerError
from jrl.mesh import make_mesh
from jrl.trainers.peers import fail_together, peer_is_lost, say_end, start_vote
from jrl.trainers.run_folder import see_sign

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


def test_one_process_always_fails_together():
    assert fail_together(ValueError(GLOO), "a_meeting")


@pytest.mark.parametrize("asked", [False, True])
def test_a_vote_counts_who_asks(asked):
    assert int(start_vote(make_mesh(), asked)) == asked


def test_a_folder_is_known_by_the_sign_in_it(tmp_path):
    (tmp_path / "run.lock").write_text("the sign")
    assert see_sign(tmp_path, "the sign") is None
    assert "must share `train.checkpoint_dir`" in str(see_sign(tmp_path, "another"))

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import errno
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.trainers.checkpoints.checkpointer import Checkpointer, CheckpointError
from jrl.trainers.checkpoints.resume import check_config, checkpoints_in, plain
from tests.trainers.checkpoints.saves import CONFIG, FROZEN, make_state, save


def names(run_dir):
    return sorted(path.name for path in run_dir.iterdir() if path.name != "run.lock")


def restore(checkpoints, state=None, config=CONFIG, frozen=FROZEN):
    return checkpoints.restore(state or make_state(99), config=config, frozen_sha256=lambda: frozen)


def assert_equal_bits(a, b):
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


@pytest.fixture
def saved(tmp_path):
    """A run folder with checkpoints 1 and 2."""
    run_dir = tmp_path / "run"
    checkpoints = Checkpointer(run_dir, keep=2)
    save(checkpoints, 1)
    save(checkpoints, 2)
    checkpoints.close()
    return run_dir


class TestRoundTrip:
    def test_layout(self, saved):
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]
        expected = ["config.yaml", "cursor.json", "hf_model", "manifest.json", "state"]
        assert names(saved / "checkpoint_2") == expected

    def test_state_and_cursor_come_back_bit_for_bit(self, saved):
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        found = restore(checkpoints)
        checkpoints.close()
        assert (found.step, found.path.name, found.cursor["iteration"]) == (2, "checkpoint_2", 2)
        assert_equal_bits(found.state, make_state(2))

    def test_state_lands_where_its_counterpart_lies(self, saved):
        mesh = jax.make_mesh((1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
        wanted = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), make_state()
        )
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        found = restore(checkpoints, wanted)
        checkpoints.close()
        assert all(leaf.sharding == sharding for leaf in jax.tree.leaves(found.state))

    def test_a_state_donated_while_it_is_written_is_saved_as_it_was(self, tmp_path):
        state = jax.jit(lambda: make_state(5))()
        checkpoints = Checkpointer(tmp_path, keep=1)
        save(checkpoints, 1, state)
        overwrite = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0 - 1, tree), donate_argnums=0)
        jax.block_until_ready(overwrite(state))
        checkpoints.close()
        checkpoints = Checkpointer(tmp_path, keep=1, resume_from=tmp_path)
        assert_equal_bits(restore(checkpoints).state, make_state(5))
        checkpoints.close()

    def test_without_state_nothing_resumes(self, tmp_path):
        checkpoints = Checkpointer(tmp_path, keep=1)
        arguments = dict(config=CONFIG, cursor={"frozen_sha256": FROZEN}, best_score=None)
        checkpoints.save(1, None, write_model=lambda path: path.mkdir(), **arguments)
        checkpoints.close()
        assert "state" not in names(tmp_path / "checkpoint_1")
        checkpoints = Checkpointer(tmp_path, keep=1, resume_from=tmp_path)
        with pytest.raises(CheckpointError, match="save_optimizer"):
            restore(checkpoints)
        checkpoints.close()


class TestRetention:
    def test_newest_and_best_are_kept(self, tmp_path):
        checkpoints = Checkpointer(tmp_path, keep=2)
        for step, best in enumerate([None, 0.5, 2.0, 2.0, 2.0, 2.0]):
            save(checkpoints, step, best_score=best)
        checkpoints.wait()
        assert names(tmp_path) == ["checkpoint_2", "checkpoint_4", "checkpoint_5"]
        assert checkpoints.best == tmp_path / "checkpoint_2"
        save(checkpoints, 6, best_score=3.0)  # a new best one: the old one goes
        checkpoints.close()
        assert names(tmp_path) == ["checkpoint_5", "checkpoint_6"]

    def test_a_resumed_run_remembers_the_best_one(self, tmp_path):
        checkpoints = Checkpointer(tmp_path, keep=1)
        for step, best in enumerate([1.0, 1.0]):
            save(checkpoints, step, best_score=best)
        checkpoints.close()
        checkpoints = Checkpointer(tmp_path, keep=1, resume_from=tmp_path)
        save(checkpoints, 2, best_score=1.0)
        checkpoints.close()
        assert names(tmp_path) == ["checkpoint_0", "checkpoint_2"]

    def test_saving_a_step_again_replaces_it(self, saved):
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        save(checkpoints, 2, make_state(7))
        checkpoints.close()
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        assert_equal_bits(restore(checkpoints).state, make_state(7))
        checkpoints.close()

    def test_keep_must_be_positive(self, tmp_path):
        with pytest.raises(ValueError, match="keep_checkpoints"):
            Checkpointer(tmp_path, keep=0)


class TestWhole:
    @pytest.mark.parametrize(
        "pattern",
        ["state/d/*", "hf_model/*", "config.yaml", "cursor.json", "manifest.json", "state/_METADATA"],
    )
    def test_a_flipped_bit_anywhere_is_noticed(self, saved, pattern):
        victim = next((saved / "checkpoint_2").glob(pattern))
        content = bytearray(victim.read_bytes())
        content[len(content) // 2] ^= 1
        victim.write_bytes(content)
        with (
            pytest.warns(
                UserWarning, match=r"Not a whole checkpoint.*checkpoint_2.*Falling back to .*checkpoint_1"
            ),
            pytest.warns(UserWarning, match="kept as superseded_2"),
        ):
            checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
            assert restore(checkpoints).step == 1
            checkpoints.take_over()
            checkpoints.close()
        assert names(saved) == ["checkpoint_1", "superseded_2"]  # out of the way, but not deleted

    def test_every_bit_of_the_manifest_counts(self, saved):
        path = saved / "checkpoint_2" / "manifest.json"
        path.write_text(path.read_text().replace('"step": 2', '"step": 3'))
        with pytest.raises(CheckpointError, match=r"manifest\.json has changed"):
            Checkpointer(saved, keep=2, resume_from=saved / "checkpoint_2")

    @pytest.mark.parametrize("damage", ["missing", "surplus", "short", "no manifest"])
    def test_other_damage(self, saved, damage):
        folder = saved / "checkpoint_2"
        if damage == "missing":
            (folder / "hf_model" / "model.safetensors").unlink()
        elif damage == "surplus":
            (folder / "hf_model" / "other").write_text("")
        elif damage == "short":
            (folder / "hf_model" / "model.safetensors").write_bytes(b"")
        else:
            (folder / "manifest.json").unlink()
        with pytest.raises(CheckpointError, match="checkpoint_2"):
            Checkpointer(saved, keep=2, resume_from=folder)

    def test_all_damaged_is_an_error(self, saved):
        for path in checkpoints_in(saved).values():
            (path / "cursor.json").unlink()
        with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
            Checkpointer(saved, keep=2, resume_from=saved)

    def test_half_written_ones_are_removed_and_said(self, saved):
        shutil.copytree(saved / "checkpoint_2", saved / "checkpoint_3.tmp")
        with pytest.warns(
            UserWarning, match=r"checkpoint_3.tmp was left half-written.*checkpoint_1, checkpoint_2"
        ):
            checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        assert restore(checkpoints).step == 2
        checkpoints.close()

    def test_killed_between_the_two_renames_of_a_replacement(self, saved):
        (saved / "checkpoint_2").rename(saved / "checkpoint_2.replaced")
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        assert restore(checkpoints).step == 2
        checkpoints.close()


class TestResume:
    def test_a_folder_that_does_not_exist_is_a_fresh_run(self, tmp_path):
        with pytest.warns(UserWarning, match="does not exist: starting a fresh run"):
            checkpoints = Checkpointer(tmp_path / "run", keep=1, resume_from=tmp_path / "run")
        assert restore(checkpoints) is None
        checkpoints.close()
        # Killed before its first checkpoint, the same job starts once more.
        with pytest.warns(UserWarning, match="before its first checkpoint: starting a fresh run"):
            Checkpointer(tmp_path / "run", keep=1, resume_from=tmp_path / "run").close()

    def test_a_folder_without_checkpoints_is_an_error(self, tmp_path):
        (tmp_path / "model").mkdir()
        for _ in range(2):  # and stays one
            with pytest.raises(CheckpointError, match="exists but holds no checkpoint"):
                Checkpointer(tmp_path / "model", keep=1, resume_from=tmp_path / "model")

    def test_a_fresh_run_does_not_touch_an_earlier_one(self, saved):
        with pytest.raises(CheckpointError, match=r"train\.resume_from_checkpoint.*train\.overwrite"):
            Checkpointer(saved, keep=1)
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]

    def test_overwrite_deletes_the_earlier_run_once_all_is_checked(self, saved):
        checkpoints = Checkpointer(saved, keep=1, overwrite=True)
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]
        checkpoints.take_over()
        checkpoints.close()
        assert names(saved) == []

    def test_overwrite_deletes_nothing_when_resuming(self, saved):
        checkpoints = Checkpointer(saved, keep=1, overwrite=True, resume_from=saved)
        checkpoints.take_over()
        checkpoints.close()
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]

    def test_an_older_checkpoint_sets_newer_ones_aside_once_all_is_checked(self, saved):
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved / "checkpoint_1")
        assert restore(checkpoints).step == 1
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]
        with pytest.warns(UserWarning, match="checkpoint_2 is newer than checkpoint_1"):
            checkpoints.take_over()
        checkpoints.close()
        assert names(saved) == ["checkpoint_1", "superseded_2"]

    def test_another_runs_checkpoint_starts_a_folder_of_its_own(self, saved, tmp_path):
        checkpoints = Checkpointer(tmp_path / "other", keep=2, resume_from=saved)
        assert restore(checkpoints).step == 2
        checkpoints.close()
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]

    def test_two_runs_cannot_share_a_folder(self, saved):
        first = Checkpointer(saved, keep=2, resume_from=saved)
        with pytest.raises(CheckpointError, match="Another run is working"):
            Checkpointer(saved, keep=2, resume_from=saved)
        first.close()
        Checkpointer(saved, keep=2, resume_from=saved).close()

    def test_length_intervals_tracker_and_paths_may_change(self, saved):
        config = {"train": {**CONFIG["train"], "total_steps": 20, "checkpoint_dir": "x", "mesh": {"data": 1}}}
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        assert restore(checkpoints, config=CONFIG | config).step == 2
        checkpoints.close()

    def test_any_other_change_names_the_field(self, saved):
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        config = CONFIG | {"method": {"name": "PPOConfig", "gamma": 0.9}}
        with pytest.raises(CheckpointError, match=r"`method.gamma` was 1.0, is 0.9"):
            restore(checkpoints, config=config)
        checkpoints.close()

    def test_arrays_are_told_apart_by_their_content(self):
        mask = np.zeros((97, 97), bool)
        other = mask.copy()
        other[50, 50] = True  # where a print-out has dots
        saved, same, changed = (
            {"train": {"trainer_kwargs": {"logit_mask": x}}} for x in (mask, jnp.asarray(mask), other)
        )
        check_config(plain(saved), same)
        with pytest.raises(
            CheckpointError, match=r"was 'array of bool \(97, 97\), sha256 .*', is '"
        ) as caught:
            check_config(plain(saved), changed)
        assert len(str(caught.value).splitlines()) == 1
        assert plain({"a": np.float32(0.5), "b": np.int64(3)}) == {"a": 0.5, "b": 3}

    def test_other_frozen_parameters_are_refused(self, saved):
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        with pytest.raises(CheckpointError, match="other frozen parameters"):
            restore(checkpoints, frozen="another")
        checkpoints.close()

    def test_another_shape_names_the_array(self, saved):
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        with pytest.raises(
            CheckpointError, match=r"layers_0.kernel` is float32\[8, 3\] in .* but float32\[9, 3\]"
        ):
            restore(checkpoints, make_state(rows=9))
        state = make_state()
        with pytest.raises(
            CheckpointError, match=r"v_head.bias` is bfloat16\[5\] in .* but absent in this run"
        ):
            restore(checkpoints, state.replace(params=state.params | {"v_head": {"scale": jnp.ones(5)}}))
        checkpoints.close()

    def test_another_environment_is_said(self, saved, monkeypatch):
        monkeypatch.setenv("XLA_FLAGS", "--xla_other")
        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        with pytest.warns(UserWarning, match=r"exact in state, not in bits.*xla_flags.*--xla_other"):
            restore(checkpoints)
        checkpoints.close()


class TestFailure:
    def test_a_full_disk_is_told_and_costs_nothing_older(self, saved):
        def full(directory):
            raise OSError(errno.ENOSPC, "No space left on device")

        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        save(checkpoints, 3, write_model=full)
        with pytest.warns(
            UserWarning, match=r"Checkpoint 3 could not be written.*No space left.*kept: checkpoint_1"
        ):
            checkpoints.wait()
        assert checkpoints.last_failed
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]
        save(checkpoints, 4)
        checkpoints.close()
        assert not checkpoints.last_failed
        assert names(saved) == ["checkpoint_2", "checkpoint_4"]

    def test_a_mistake_in_the_program_is_raised(self, saved):
        def broken(directory):
            raise KeyError("lm_head")

        checkpoints = Checkpointer(saved, keep=2, resume_from=saved)
        save(checkpoints, 3, write_model=broken)
        with pytest.raises(KeyError, match="lm_head"):
            checkpoints.close()
        assert names(saved) == ["checkpoint_1", "checkpoint_2"]
        Checkpointer(saved, keep=2, resume_from=saved).close()  # the lock was given back


def test_a_checkpoint_from_before_there_were_groups_is_one_of_single_samples() -> None:
    saved = {"train": {"seed": 1}, "method": {"num_rollouts": 8}}
    check_config(saved, {"train": {"seed": 1}, "method": {"num_rollouts": 8, "num_generations": 1}})
    with pytest.raises(CheckpointError, match=r"`method.num_generations` was 1, is 2"):
        check_config(saved, {"train": {"seed": 1}, "method": {"num_rollouts": 8, "num_generations": 2}})


def test_a_checkpoint_from_before_rollouts_were_ahead_goes_on_as_it_was():
    saved = {"train": {"seed": 1}}
    check_config(saved, {"train": {"seed": 1, "rollouts_ahead": 0, "sampling_mesh": None}})
    with pytest.raises(CheckpointError, match=r"`train.rollouts_ahead` was 0, is 1"):
        check_config(saved, {"train": {"seed": 1, "rollouts_ahead": 1}})

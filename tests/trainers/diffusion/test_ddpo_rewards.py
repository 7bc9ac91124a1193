# SPDX-License-Identifier: Apache-2.0
"""Rewards of images: what a function may answer, and what is kept of the images that it fails on."""

import json
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jrl import default_ddpo_config
from jrl.rollout.rewards import RewardError
from jrl.trainers.diffusion.ddpo_gallery import Gallery
from jrl.trainers.diffusion.ddpo_rewards import ImageRewardCall, check_rewards
from jrl.trainers.diffusion.images import save_grid

PAIR = ("a cat", "a dog")


def batch():
    return [np.full((2, 3, 4, 4), 0.5, np.float32), PAIR, ({"number": 0}, {"number": 1})]


def call(answer, folder, **options):
    function = answer if callable(answer) else lambda *_: answer
    return ImageRewardCall(function, **{"skip_errors": False, "timeout": None, "failures": folder, **options})


@pytest.mark.parametrize(
    "rewards",
    [["1.5", "2"], np.array([1 + 1j, 2]), [[1.0, 2.0], [3.0]], [{}, {}], [b"1", b"2"], [None, "1.5"]],
    ids=str,
)
def test_only_real_numbers_are_rewards(rewards):
    with pytest.raises(RewardError, match="first: rewards must be numbers"):
        check_rewards(rewards, PAIR, "first")


@pytest.mark.parametrize(
    "missing", [10**400, -(10**400), 1e300, None, np.nan], ids=lambda value: str(value)[:8]
)
def test_a_reward_that_no_float_holds_is_missing(missing):
    with pytest.raises(RewardError, match="first: the reward must be finite"):
        check_rewards([1, missing], PAIR, "first")
    np.testing.assert_array_equal(check_rewards([1, missing], PAIR, "first", skip_errors=True), [1, np.nan])


@pytest.mark.parametrize(
    "answer", [(1, 2), (np.float32(1), np.float32(2)), (jnp.ones(()), jnp.float32(2)), (True, 2)]
)
def test_a_tuple_of_two_numbers_is_two_rewards(answer, tmp_path):
    rewards, found = call(answer, tmp_path)(batch(), "first")
    assert rewards.tolist() == [1, 2] and rewards.dtype == np.float32 and found == {}
    rewards, found = call(([3, 4], {"a": 1}), tmp_path)(batch(), "first")
    assert rewards.tolist() == [3, 4] and found == {"a": 1}


def fails(*_):
    raise ConnectionError("down")


def test_without_pillow_images_are_kept_as_arrays(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(RewardError, match="raised ConnectionError: down") as error:
        call(fails, tmp_path)(batch(), "epoch 3, sampling batch 0")
    folder = tmp_path / "epoch_3_sampling_batch_0"
    assert f"kept in {folder}" in error.value.__notes__[0]
    lines = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    assert [line["image"] for line in lines] == ["0000.npy", "0001.npy"]
    np.testing.assert_array_equal(np.load(folder / "0001.npy"), batch()[0][1])


def test_what_cannot_be_kept_does_not_hide_the_error(tmp_path):
    (tmp_path / "failed").write_text("a file, where a folder should be")
    with pytest.raises(RewardError, match="raised ConnectionError: down") as error:
        call(fails, tmp_path / "failed")(batch(), "first")
    assert "could not be kept" in error.value.__notes__[0]


def test_a_disk_that_refuses_a_grid_costs_the_grid(tmp_path):
    pytest.importorskip("PIL")
    (tmp_path / "rollouts").write_text("a file, where a folder should be")
    gallery = Gallery(default_ddpo_config().train, tmp_path)
    with pytest.warns(UserWarning, match=r"samples_000001\.png could not be written"):
        gallery.show("samples", batch()[0], PAIR, np.ones(2), 1)


def test_without_pillow_a_run_is_warned_at_once_and_draws_no_grid(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.warns(UserWarning, match=r"Pillow is not installed, .* pip install pillow"):
        gallery = Gallery(default_ddpo_config().train, tmp_path)
    gallery.show("samples", batch()[0], PAIR, np.ones(2), 1)
    assert not list(tmp_path.rglob("*.png"))
    with pytest.raises(ImportError, match="pip install pillow"):
        save_grid(Path("never.png"), batch()[0], PAIR)

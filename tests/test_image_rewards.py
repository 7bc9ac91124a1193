# SPDX-License-Identifier: Apache-2.0
"""Rewards of images: golden values, what they refuse, and that they need neither torch nor, but for JPEG, Pillow."""

from __future__ import annotations

import doctest
import io
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from jrl import image_rewards
from jrl.image_rewards import brightness, jpeg_compressibility, jpeg_incompressibility, target_colour

REWARDS = {
    "jpeg_compressibility": jpeg_compressibility,
    "jpeg_incompressibility": jpeg_incompressibility,
    "brightness": brightness,
    "target_colour": target_colour((0.2, 0.4, 0.6)),
}


def call(name: str, images: object) -> np.ndarray:
    """Rewards with prompts and metadata as a trainer hands them over."""
    count = len(images)  # type: ignore[arg-type]
    rewards, metadata = REWARDS[name](images, ("a cat",) * count, ({},) * count)
    assert metadata == {}
    return rewards


def grey(*levels: float, size: tuple[int, int] = (16, 16)) -> np.ndarray:
    """Images of one level of grey each."""
    return np.stack([np.full((3, *size), level, np.float32) for level in levels])


def noise(*, seed: int = 0, count: int = 2, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    """Images of independent uniform pixels."""
    return np.random.default_rng(seed).random((count, 3, *size), np.float32)


def test_examples_run() -> None:
    assert doctest.testmod(image_rewards).failed == 0


@pytest.mark.parametrize("name", REWARDS)
def test_one_float32_an_image(name: str) -> None:
    rewards = call(name, noise(count=3))
    assert rewards.shape == (3,) and rewards.dtype == np.float32 and np.isfinite(rewards).all()


@pytest.mark.parametrize("name", REWARDS)
def test_an_image_is_judged_by_itself(name: str) -> None:
    images = noise(count=3)
    np.testing.assert_array_equal(call(name, images)[1:2], call(name, images[1:2]))


@pytest.mark.parametrize("name", REWARDS)
def test_device_arrays_and_float64_are_images_too(name: str) -> None:
    images = noise()
    expected = call(name, images)
    np.testing.assert_allclose(call(name, jnp.asarray(images)), expected, rtol=1e-6)
    np.testing.assert_allclose(call(name, images.astype(np.float64)), expected, rtol=1e-6)


@pytest.mark.parametrize("name", REWARDS)
def test_no_images_are_no_rewards(name: str) -> None:
    assert call(name, np.zeros((0, 3, 8, 8), np.float32)).shape == (0,)


def test_brightness_is_the_mean_of_all_pixels() -> None:
    images = grey(0.0, 0.25, 1.0)
    images[1, 0] = 1.0  # (1 + 0.25 + 0.25) / 3
    images[2, :, 4:, :8] = 0.0  # three quarters of one half
    np.testing.assert_allclose(call("brightness", images), [0.0, 0.5, 0.625], atol=1e-7)


def test_distance_from_a_colour_is_squared() -> None:
    # (0.3² + 0.1² + 0.1²) / 3 from grey 0.5
    np.testing.assert_allclose(call("target_colour", grey(0.5)), [-0.11 / 3], rtol=1e-6)
    exact = np.broadcast_to(np.array([0.2, 0.4, 0.6], np.float32).reshape(1, 3, 1, 1), (1, 3, 4, 4))
    np.testing.assert_allclose(call("target_colour", exact), [0.0], atol=1e-12)


def test_jpeg_counts_the_bytes_of_the_file() -> None:
    images = noise()
    expected = []
    for image in images:
        file = io.BytesIO()
        pixels = np.clip(np.round(image.transpose(1, 2, 0) * 255), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(file, "JPEG", quality=95)
        expected.append(len(file.getvalue()) / 1000)
    np.testing.assert_allclose(call("jpeg_incompressibility", images), expected, rtol=1e-6)
    np.testing.assert_array_equal(
        call("jpeg_compressibility", images), -call("jpeg_incompressibility", images)
    )


def test_a_plain_image_weighs_less_than_noise() -> None:
    plain, rough = call("jpeg_incompressibility", np.concatenate([grey(0.5, size=(32, 32)), noise(count=1)]))
    assert 0.5 < plain < 0.8 < 1.5 < rough


def test_pixels_are_rounded_to_the_nearest_byte() -> None:
    images = noise()
    shifted = np.clip(np.rint(images * 255) + 0.4, 0, 255).astype(np.float32) / 255
    np.testing.assert_array_equal(call("jpeg_compressibility", images), call("jpeg_compressibility", shifted))


def test_a_rounding_error_beyond_the_range_is_clamped() -> None:
    images = grey(0.0, 1.0, size=(32, 32))
    outside = images + np.float32(5e-4) * np.array([-1, 1], np.float32).reshape(2, 1, 1, 1)
    np.testing.assert_array_equal(call("jpeg_compressibility", outside), call("jpeg_compressibility", images))


@pytest.mark.parametrize("name", REWARDS)
@pytest.mark.parametrize(
    ("images", "error", "message"),
    [
        (
            grey(0.5).transpose(0, 2, 3, 1),
            ValueError,
            r"shape \(B, 3, height, width\).*\(1, 16, 16, 3\).*last",
        ),
        (grey(0.5)[0], ValueError, r"shape \(B, 3, height, width\), got \(3, 16, 16\)"),
        (grey(0.5)[:, :1], ValueError, r"got \(1, 1, 16, 16\)"),
        (grey(128.0), ValueError, r"in \[0, 1\], got 128 to 128. Are they bytes"),
        (grey(-0.5), ValueError, r"got -0.5 to -0.5"),
        (grey(float("nan")), ValueError, r"got nan to nan"),
        (grey(128.0).astype(np.uint8), TypeError, r"floats in \[0, 1\], got uint8"),
    ],
)
def test_what_is_no_batch_of_images_is_refused(
    name: str, images: np.ndarray, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        call(name, images)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", REWARDS)
def test_prompts_of_another_batch_are_refused(name: str) -> None:
    with pytest.raises(ValueError, match=r"`prompts` must be as many as `images`, 2, got 1"):
        REWARDS[name](noise(), ("a",), ({},))


@pytest.mark.parametrize("rgb", [(1.0, 0.0), (255, 0, 0), (0.5, float("nan"), 0.5), (-0.1, 0, 0)])
def test_a_colour_is_three_numbers_in_range(rgb: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=r"`rgb` must be three numbers in \[0, 1\]"):
        target_colour(rgb)


def test_without_pillow_only_jpeg_fails_and_says_what_to_install() -> None:
    code = """
import importlib.util, sys
sys.modules["PIL"] = None  # an import of it fails
import numpy as np
spec = importlib.util.spec_from_file_location("image_rewards", sys.argv[1])
rewards = importlib.util.module_from_spec(spec)
spec.loader.exec_module(rewards)
assert not {"torch", "jax"} & set(sys.modules)
images, prompts = np.zeros((1, 3, 8, 8)), ("a",)
rewards.brightness(images, prompts, ({},))
try:
    rewards.jpeg_compressibility(images, prompts, ({},))
except ImportError as error:
    print(error)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(image_rewards.__file__)], capture_output=True, text=True, check=True
    )
    assert "pip install pillow" in done.stdout and len(done.stdout.splitlines()) == 1

# SPDX-License-Identifier: Apache-2.0
"""The parts of the shapes example: pictures, networks without weights, what a run leaves behind."""

import json

import numpy as np
import pytest
from rich.console import Console

from examples.shapes.networks import PixelShuffle, load_weights, read_words, save_weights
from examples.shapes.pictures import COLOURS, PROMPTS, draw
from examples.shapes.report import Outcome, draw_report, print_table

EVERY = np.arange(len(PROMPTS))


class TestPictures:
    def test_each_prompt_shows_its_colour_on_grey(self):
        images = draw(EVERY, size=32, rng=np.random.default_rng(0))
        assert images.shape == (8, 32, 32, 3) and images.dtype == np.float32
        assert images.min() >= 0 and images.max() <= 1
        for index, image in enumerate(images):
            colour = np.asarray(COLOURS[PROMPTS[index].split()[0]])
            inside = np.isclose(image, colour, atol=1e-6).all(axis=-1)
            grey = np.isclose(image, image[0, 0], atol=1e-6).all(axis=-1)
            assert np.ptp(image[0, 0]) == 0
            # The rest are smoothed edges, which are between both.
            assert 0.08 < inside.mean() < 0.5 and inside.mean() + grey.mean() > 0.8

    def test_circles_lack_the_corners_of_squares(self):
        rng = np.random.default_rng(0)
        for index, prompt in enumerate(PROMPTS):
            colour = np.asarray(COLOURS[prompt.split()[0]])
            for image in draw([index] * 8, size=32, rng=rng):
                inside = np.isclose(image, colour, atol=1e-6).all(axis=-1)
                rows, columns = np.flatnonzero(inside.any(1)), np.flatnonzero(inside.any(0))
                box = inside[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
                assert box.all() == ("square" in prompt)

    def test_the_generator_decides(self):
        first, again, other = (draw(EVERY, size=16, rng=np.random.default_rng(seed)) for seed in (0, 0, 1))
        np.testing.assert_array_equal(first, again)
        assert (first != other).any()


class TestPixelShuffle:
    @pytest.mark.parametrize("factor", [1, 2, 4])
    def test_decoding_is_the_inverse(self, factor):
        shuffle = PixelShuffle(factor)
        images = draw(EVERY, size=16, rng=np.random.default_rng(0))
        latents = shuffle.encode(images)
        assert latents.shape == (8, 16 // factor, 16 // factor, shuffle.channels)
        np.testing.assert_allclose(shuffle.decode({}, latents, dtype=np.float32), images, atol=1e-6)

    def test_a_latent_holds_one_square_of_pixels(self):
        images = np.zeros((1, 4, 4, 3), np.float32)
        images[0, 2:, :2] = 1.0
        latents = PixelShuffle(2).encode(images)
        np.testing.assert_array_equal(latents[0, 1, 0], np.ones(12))
        assert (np.delete(latents.reshape(4, 12), 2, axis=0) == -1).all()

    def test_images_are_clipped(self):
        images = PixelShuffle(1).decode({}, np.full((1, 2, 2, 3), 3.0, np.float32), dtype=np.float32)
        assert (np.asarray(images) == 1.0).all()


def test_words_are_numbered_and_filled_up():
    assert read_words(["red circle", "", "yellow square"]).tolist() == [[1, 5], [0, 0], [4, 6]]
    for text in ("purple circle", "red red circle"):
        with pytest.raises(ValueError, match=f"a colour and a shape, of red, .* got '{text}'"):
            read_words([text])


def test_weights_are_read_as_they_were_written(tmp_path):
    weights = {"unet": {"a": {"kernel": np.arange(6.0).reshape(2, 3)}}, "vae": {}, "text": {"b": np.ones(2)}}
    save_weights(tmp_path / "model.npz", weights)
    found = load_weights(tmp_path / "model.npz", weights)
    assert set(found) == set(weights)
    np.testing.assert_array_equal(found["unet"]["a"]["kernel"], weights["unet"]["a"]["kernel"])
    other = {**weights, "text": {"b": np.ones(3)}}
    with pytest.raises(ValueError, match="other weights than this model's"):
        load_weights(tmp_path / "model.npz", other)


def outcome(seed: int, rise: float) -> Outcome:
    rng = np.random.default_rng(seed)
    before = rng.normal(size=64)
    images = rng.random((4, 8, 16, 16, 3), np.float32)
    return Outcome(
        seed=seed,
        curve=np.linspace(0, rise, 10),
        before=before,
        after=before + rise + np.tile([-0.1, 0.1], 32),
        images_before=images,
        images_after=1 - images,
        seconds=12.0,
        processor_seconds=20.0,
        figures={"std_first_epoch": 1.0},
    )


def test_the_error_of_a_rise_is_that_of_paired_samples():
    found = outcome(0, 0.5)
    assert found.rise == pytest.approx(0.5)
    # 64 differences of ±0.1 about 0.5: deviation 0.1·√(64/63), divided by √64.
    assert found.standard_error == pytest.approx(0.1 * (64 / 63) ** 0.5 / 8)
    record = json.loads(json.dumps(found.record()))
    assert record["seed"] == 0 and record["rise"] == 0.5 and record["std_first_epoch"] == 1.0
    assert len(record["curve"]) == 10 and record["samples"] == 64


def test_the_table_has_a_line_for_each_seed_and_the_mean_over_them():
    console = Console(record=True, width=120)
    print_table(console, [outcome(0, 0.4), outcome(1, 0.6)], reward="brightness")
    text = console.export_text()
    assert "+0.4000" in text and "+0.6000" in text
    # Rises 0.4 and 0.6: deviation 0.1414 over √2.
    assert "mean rise over 2 seeds +0.5000, standard error over seeds 0.1000" in text


@pytest.mark.slow
def test_the_picture_is_written(tmp_path):
    draw_report(tmp_path / "report.png", [outcome(0, 0.4)], reward="brightness", samples_per_epoch=64)
    assert (tmp_path / "report.png").read_bytes().startswith(b"\x89PNG")

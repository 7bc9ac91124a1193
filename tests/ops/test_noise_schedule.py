# SPDX-License-Identifier: Apache-2.0
"""Noise schedules and the coefficients of DDIM's steps, against published and worked-out figures."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from jrl.ops.noise_schedule import SPACINGS, NoiseSchedule, denoising_steps, make_noise_schedule
from tests.diffusion_toy import SD_SCHEDULE

SD_PNDM = {
    "_class_name": "PNDMScheduler",
    "_diffusers_version": "0.6.0",
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "beta_start": 0.00085,
    "clip_sample": False,
    "num_train_timesteps": 1000,
    "set_alpha_to_one": False,
    "skip_prk_steps": True,
    "steps_offset": 1,
    "trained_betas": None,
}
CLASSIC = NoiseSchedule(beta_start=0.0001, beta_end=0.02, beta_schedule="linear")


def variance(schedule: NoiseSchedule, now: int, after: int) -> float:
    levels = schedule.alphas_cumprod
    return float((1 - levels[after]) / (1 - levels[now]) * (1 - levels[now] / levels[after]))


class TestGoldens:
    def test_levels_of_stable_diffusion(self) -> None:
        wanted = {
            0: 0.9991500,
            1: 0.9982960,
            21: 0.9803807,
            41: 0.9608728,
            501: 0.2749991,
            961: 0.0072817,
            981: 0.0057755,
            999: 0.0046601,
        }
        for timestep, level in wanted.items():
            assert SD_SCHEDULE.alphas_cumprod[timestep] == pytest.approx(level, abs=6e-8)

    @pytest.mark.parametrize(
        ("now", "after", "wanted"),
        [(420, 400, 0.14771), (980, 960, 0.32460), (487, 486, 0.00979), (999, 998, 0.02), (0, 0, 0.0)],
    )
    def test_variances_of_the_linear_schedule(self, now: int, after: int, wanted: float) -> None:
        assert variance(CLASSIC, now, after) == pytest.approx(wanted, abs=1e-5)

    def test_deviations_in_fifty_steps(self) -> None:
        steps = denoising_steps(SD_SCHEDULE, 50, 1.0)
        assert steps.timesteps.tolist() == list(range(981, 0, -20))
        wanted = {981: 0.454463, 961: 0.448282, 501: 0.294785, 41: 0.099887, 21: 0.039480, 1: 0.020648}
        for timestep, std in wanted.items():
            index = steps.timesteps.tolist().index(timestep)
            assert steps.std[index] == pytest.approx(std, abs=6e-7)
            # What one unit of the network's output moves the mean by, in deviations.
        c = steps.direction - steps.next_signal * steps.noise / steps.signal
        ratios = dict(zip(steps.timesteps.tolist(), (c / steps.std).tolist(), strict=True))
        for timestep, ratio in {
            981: -0.513,
            961: -0.504,
            501: -0.377,
            41: -1.017,
            21: -3.275,
            1: -1.003,
        }.items():
            assert ratios[timestep] == pytest.approx(ratio, abs=6e-4)

    def test_timesteps_in_five_steps(self) -> None:
        assert denoising_steps(SD_SCHEDULE, 5, 1.0).timesteps.tolist() == [801, 601, 401, 201, 1]


class TestSteps:
    def test_without_noise_there_is_no_deviation_and_all_else_stays(self) -> None:
        quiet, noisy = denoising_steps(SD_SCHEDULE, 10, 0.0), denoising_steps(SD_SCHEDULE, 10, 1.0)
        assert not quiet.std.any()
        np.testing.assert_array_equal(quiet.signal, noisy.signal)
        np.testing.assert_allclose(quiet.direction**2, noisy.direction**2 + noisy.std**2, rtol=1e-5)

    def test_signal_and_noise_share_the_variance(self) -> None:
        steps = denoising_steps(SD_SCHEDULE, 50, 0.7)
        np.testing.assert_allclose(steps.signal**2 + steps.noise**2, 1.0, rtol=1e-6)
        np.testing.assert_allclose(steps.next_signal**2 + steps.direction**2 + steps.std**2, 1.0, rtol=1e-6)
        assert all(x.dtype == np.float32 for x in steps[1:]) and steps.timesteps.dtype == np.int32

    def test_the_last_deviation_keeps_its_digits(self) -> None:
        single, double = (
            denoising_steps(SD_SCHEDULE, 50, 1.0, dtype=dtype) for dtype in (np.float32, np.float64)
        )
        np.testing.assert_allclose(single.std, double.std, rtol=6e-8)

    @pytest.mark.parametrize("spacing", ["trailing", "linspace"])
    def test_a_stride_that_misses_the_next_step_is_said_aloud(self, spacing: str) -> None:
        schedule = dataclasses.replace(SD_SCHEDULE, timestep_spacing=spacing)
        with pytest.warns(UserWarning, match="a step does not end where the next one begins"):
            denoising_steps(schedule, 30, 0.0)

    @pytest.mark.parametrize("spacing", sorted(SPACINGS))
    def test_every_number_of_steps_has_as_many_timesteps(self, spacing: str) -> None:
        for num_steps in range(1, 1000):
            timesteps = SPACINGS[spacing](1000, num_steps, 1)
            assert len(timesteps) == num_steps and timesteps.min() >= 0, num_steps
            assert np.all(np.diff(timesteps) < 0), num_steps

    def test_zero_terminal_snr_ends_in_pure_noise(self) -> None:
        schedule = dataclasses.replace(
            SD_SCHEDULE,
            prediction_type="v_prediction",
            rescale_betas_zero_snr=True,
            timestep_spacing="trailing",
        )
        assert schedule.alphas_cumprod[-1] == 0.0
        assert schedule.alphas_cumprod[0] == pytest.approx(SD_SCHEDULE.alphas_cumprod[0])
        steps = denoising_steps(schedule, 50, 1.0)
        assert steps.timesteps[0] == 999 and steps.signal[0] == 0.0 and steps.direction[0] == 0.0
        assert all(np.isfinite(x).all() for x in steps)


class TestConfigurations:
    def test_stable_diffusions_own_is_taken_without_a_word(self) -> None:
        assert make_noise_schedule(SD_PNDM) == SD_SCHEDULE

    def test_clipping_and_offset_are_repaired_aloud(self) -> None:
        config = {k: v for k, v in SD_PNDM.items() if k not in ("clip_sample", "steps_offset")}
        with pytest.warns(UserWarning) as caught:
            assert make_noise_schedule(config) == SD_SCHEDULE
        assert [str(w.message).split(":")[0] for w in caught] == [
            "the scheduler's configuration has nothing, which means 0 for `steps_offset`; 1 is used",
            "the scheduler's configuration has nothing, which means True for `clip_sample`; False is used",
        ]

    def test_given_betas_are_used(self) -> None:
        betas = [0.1, 0.2, 0.3, 0.4]
        config = {"trained_betas": betas, "clip_sample": False, "steps_offset": 1, "clip_sample_range": 1}
        schedule = make_noise_schedule(config)
        np.testing.assert_allclose(schedule.alphas_cumprod, [0.9, 0.72, 0.504, 0.3024])


class TestRefusals:
    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"beta_schedule": "sigmoid"}, r"`beta_schedule` must be one of .* got 'sigmoid'"),
            ({"prediction_type": "flow"}, r"`prediction_type` must be one of .* got 'flow'"),
            ({"timestep_spacing": "karras"}, r"`timestep_spacing` must be one of .* got 'karras'"),
            ({"rescale_betas_zero_snr": True}, "`rescale_betas_zero_snr` must be False with"),
            (
                {"trained_betas": (0.1,)},
                "`trained_betas` must have `num_train_timesteps` = 1000 entries, got 1",
            ),
            ({"num_train_timesteps": 0}, "`num_train_timesteps` must be at least 1, got 0"),
            ({"beta_start": -0.1, "beta_schedule": "linear"}, r"β must lie in \(0, 1\), got -0.1"),
        ],
    )
    def test_a_schedule_without_meaning(self, change: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(SD_SCHEDULE, **change)

    @pytest.mark.parametrize(
        ("name", "value", "kind"),
        [
            ("beta_start", "a", "float"),
            ("beta_end", True, "float"),
            ("num_train_timesteps", "1000", "int"),
            ("num_train_timesteps", False, "int"),
            ("clip_sample", 1, "bool"),
            ("prediction_type", None, "str"),
            ("trained_betas", ["a"], "float"),
            ("trained_betas", "0.1", "tuple"),
        ],
    )
    def test_a_value_of_another_kind(self, name: str, value: object, kind: str) -> None:
        with pytest.raises(ValueError, match=rf"must have {kind}.* for `{name}`, got "):
            make_noise_schedule(SD_PNDM | {name: value})

    @pytest.mark.parametrize(
        "name",
        ["FlowMatchEulerDiscreteScheduler", "EDMEulerScheduler", "EDMDPMSolverMultistepScheduler"],
    )
    def test_other_processes(self, name: str) -> None:
        with pytest.raises(ValueError, match=f"got '{name}'"):
            make_noise_schedule({"_class_name": name})

    def test_a_timestep_without_density(self) -> None:
        schedule = dataclasses.replace(SD_SCHEDULE, steps_offset=0)
        with pytest.raises(
            ValueError, match=r"a step has no noise and so no density, got 1.0. Set `steps_offset`"
        ):
            denoising_steps(schedule, 50, 1.0)
        assert denoising_steps(schedule, 50, 0.0).timesteps[-1] == 0

    @pytest.mark.parametrize(
        ("num_steps", "eta", "message"),
        [
            (0, 1.0, r"`num_steps` must be in 1..1000"),
            (1001, 1.0, r"`num_steps` must be in 1..1000"),
            (1000, 1.0, "puts timestep 1000 beyond the 1000 of training"),
            (50, -0.1, r"`eta` must be in \[0, 1\], got -0.1"),
            (50, 1.5, r"`eta` must be in \[0, 1\], got 1.5"),
        ],
    )
    def test_numbers_out_of_range(self, num_steps: int, eta: float, message: str) -> None:
        with pytest.raises(ValueError, match=message):
            denoising_steps(SD_SCHEDULE, num_steps, eta)

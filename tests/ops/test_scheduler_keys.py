# SPDX-License-Identifier: Apache-2.0
"""Keys of a scheduler's file: none is passed over in silence."""

from __future__ import annotations

from typing import Any

import pytest

from jrl.ops.flow_schedule import make_flow_schedule
from jrl.ops.noise_schedule import make_noise_schedule
from jrl.ops.scheduler_keys import FLOW_FIXED, NOISE_FIXED, NOISE_SILENT

PLAIN: dict[str, Any] = {
    **{"_class_name": "DDIMScheduler", "clip_sample": False},
    **{"set_alpha_to_one": False, "steps_offset": 1},
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"sigma_data": 0.5},
            "unknown key `sigma_data`, and what it asks for may not be implemented. Known: num_",
        ),
        (
            {"use_flow_sigmas": True},
            "`use_flow_sigmas` must be false or null, got True: it asks for the levels of",
        ),
        ({"use_flow_sigmas": 0}, "`use_flow_sigmas` must be false or null, got 0"),
        ({"variance_type": "learned_range"}, "got 'learned_range': the network predicts a variance, too"),
        (
            {"timestep_type": "continuous"},
            "`timestep_type` must be 'discrete', got 'continuous': the network is told",
        ),
        ({"set_alpha_to_one": None}, "`set_alpha_to_one` must be false or true, got None"),
    ],
)
def test_what_is_not_implemented_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_noise_schedule(PLAIN | change)


def test_a_last_step_without_density_is_repaired_aloud() -> None:
    with pytest.warns(UserWarning, match="has True for `set_alpha_to_one`; False is used"):
        schedule = make_noise_schedule(PLAIN | {"set_alpha_to_one": True})
    assert schedule == make_noise_schedule(PLAIN | {"set_alpha_to_one": False})
    unsaid = {name: value for name, value in PLAIN.items() if name != "set_alpha_to_one"}
    with pytest.warns(UserWarning, match="has nothing, which means True for `set_alpha_to_one`"):
        assert make_noise_schedule(unsaid | {"_class_name": "DDIMScheduler"}) == schedule


def test_another_sampler_changes_nothing() -> None:
    other = {"use_karras_sigmas": True, "solver_order": 3, "final_sigmas_type": "sigma_min"}
    assert make_noise_schedule(PLAIN | other) == make_noise_schedule(PLAIN)


@pytest.mark.parametrize("key", FLOW_FIXED)
def test_a_flow_has_one_value_of_each_fixed_key(key: str) -> None:
    assert make_flow_schedule({key: False}) == make_flow_schedule({})
    with pytest.raises(
        ValueError, match=f"`{key}` must be false or null, got True: nothing else is implemented"
    ):
        make_flow_schedule({key: True})


def test_every_silent_key_has_a_reason_and_is_nothing_else() -> None:
    assert all(NOISE_SILENT.values()) and not NOISE_SILENT.keys() & NOISE_FIXED.keys()

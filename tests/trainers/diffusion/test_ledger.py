# SPDX-License-Identifier: Apache-2.0
"""Every row D1 to D25 of `docs/migrating/from_trl.md`, what the classic DDPO trainers got wrong, has a test here."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import jrl

ROOT = Path(__file__).resolve().parents[3]
PAGE = ROOT / "docs" / "migrating" / "from_trl.md"
RUN, MODELS = (
    "tests/trainers/diffusion/test_train_ddpo.py",
    "tests/trainers/diffusion/test_train_ddpo_models.py",
)
FLAT, MESH = "tests/trl/test_ddpo.py", "tests/mesh/test_mesh_ddpo.py"
SHOWN = {
    1: f"{RUN}::test_threads_give_the_same_numbers_in_the_same_order",
    2: f"{RUN}::test_the_hook_sees_every_epoch",
    3: f"{FLAT}::test_the_pipeline_has_what_was_trained",
    4: f"{RUN}::test_two_epochs_and_two_are_four",
    5: "tests/cli/test_flat_ddpo.py::test_from_a_recipe_to_a_model",
    6: f"{MODELS}::test_other_precisions",
    7: f"{RUN}::test_a_large_network_at_an_adapters_rate_is_warned_of",
    8: f"{MESH}::test_lore_5_2_a_whole_update_agrees",
    9: f"{FLAT}::test_what_it_refuses_at_once",
    10: "tests/learners/test_ddpo.py::test_guidance_in_sampling_alone_is_said_aloud",
    11: "tests/trainers/loggers/test_watch.py::test_a_sick_run_of_each_algorithm_is_spoken_of",
    13: "tests/ops/test_noise_schedule.py::test_a_timestep_without_density",
    14: "tests/rollout/test_prompt_statistics.py::test_integer_rewards_are_not_truncated",
    15: f"{FLAT}::test_what_the_trainer_refuses",
    16: f"{FLAT}::test_what_it_becomes",
    17: f"{MODELS}::test_all_options_together",
    18: f"{MODELS}::test_all_options_together",
    19: f"{MODELS}::test_without_torch_and_diffusers",
    21: f"{MESH}::test_lore_5_2_a_whole_update_agrees",
    22: "tests/ops/test_ddim.py::test_lore_8_8_golden_steps",
    23: "tests/learners/test_ddpo_order.py::test_lore_8_8_fewer_steps_are_random_ones_of_those_allowed",
    24: f"{MODELS}::test_one_that_came_with_the_model_trains_on",
    25: f"{FLAT}::test_its_name_loses_nothing",
}


@pytest.mark.parametrize("row", range(1, 26))
def test_every_row_is_on_the_page_and_has_its_test(row):
    assert re.search(rf"\bD{row}\b", PAGE.read_text(encoding="utf-8"))
    here = f"test_d{row}_" in Path(__file__).read_text(encoding="utf-8")
    assert here != (row in SHOWN)


@pytest.mark.parametrize("row", SHOWN)
def test_what_is_shown_elsewhere_is_there(row):
    path, _, name = SHOWN[row].partition("::")
    found = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    assert name in {node.name for node in found if isinstance(node, ast.FunctionDef)}


def test_d12_the_rule_for_other_sizes_is_told():
    """ε ≈ 1e-4·√(16384/D), where the field is documented and on the method's page."""
    assert "√(16384/D)" in (ROOT / "docs" / "ddpo.md").read_text(encoding="utf-8")
    assert "√(16384/D)" in (ROOT / "jrl" / "learners" / "ddpo_config.py").read_text(encoding="utf-8")


def test_d20_the_default_model_is_one_that_there_is():
    path = jrl.default_ddpo_config().model.model_path
    assert path == "stable-diffusion-v1-5/stable-diffusion-v1-5"

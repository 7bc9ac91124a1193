# SPDX-License-Identifier: Apache-2.0
"""What a run is told of an adapter that it takes from its folder."""

import json
import warnings

import pytest

from jrl.models.adapters import LoraConfig
from jrl.trainers.config.sections import ModelConfig
from jrl.trainers.loading.adapters import plan_adapter


@pytest.fixture
def folder(tmp_path):
    values = {"peft_type": "LORA", "r": 2, "lora_dropout": 0.1, "base_model_name_or_path": "some/base"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(values))
    return str(tmp_path)


def test_what_an_adapter_folder_overrides_is_said(folder):
    with pytest.warns(UserWarning, match="`lora_dropout` is 0.1, but jrl trains without dropout"):
        plan = plan_adapter(ModelConfig(folder), tokenizer=None)
    assert plan.continues and plan.config == LoraConfig(r=2, lora_dropout=0.1)
    with (
        pytest.warns(UserWarning, match="`lora_dropout`"),
        pytest.warns(
            UserWarning, match="`model.num_layers_unfrozen` is 1, but `model.model_path` holds an adapter"
        ),
    ):
        plan_adapter(ModelConfig(folder, num_layers_unfrozen=1), tokenizer=None)


def test_a_fresh_adapter_does_not_speak_of_the_folders_own(folder):
    given = {"peft_type": "LORA", "r": 1}
    with pytest.warns(UserWarning) as said:
        plan = plan_adapter(ModelConfig(folder, peft_config=given), tokenizer=None)
    assert ["a fresh one is trained" in str(warning.message) for warning in said] == [True]
    assert not plan.continues
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan_adapter(ModelConfig("some/base", peft_config=given), tokenizer=None)

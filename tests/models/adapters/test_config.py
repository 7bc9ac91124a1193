# SPDX-License-Identifier: Apache-2.0
"""`peft_config`: what is read, what is passed over, what is refused."""

import re

import pytest

from jrl.models.adapters import LoraConfig, PrefixConfig, PromptConfig, read_adapter_config
from jrl.models.adapters.config import to_peft_dict


def test_the_dict_of_trlx_is_read():
    found = read_adapter_config(
        {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": 16,
            "lora_alpha": 32,
            "lora_dropout": 0.1,
            "bias": "none",
        }
        | {
            "target_modules": ["q_proj"],
            "layers_to_transform": 3,
            "fan_in_fan_out": False,
            "inference_mode": False,
        }
    )
    assert found == LoraConfig(
        r=16, lora_alpha=32, lora_dropout=0.1, target_modules=("q_proj",), layers_to_transform=(3,)
    )
    assert read_adapter_config({"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 4}) == PrefixConfig(4)
    assert read_adapter_config({"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}) == PromptConfig(4)


@pytest.mark.parametrize(
    "config", [LoraConfig(rank_pattern={"q": 2}, target_modules=("q",)), PrefixConfig(3), PromptConfig(2)]
)
def test_written_and_read_again(config):
    assert read_adapter_config(to_peft_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"peft_type": "ADALORA"},
            "`peft_type` must be one of LORA, PREFIX_TUNING, PROMPT_TUNING; got 'ADALORA'",
        ),
        ({"task_type": "SEQ_CLS"}, "`task_type` must be CAUSAL_LM or SEQ_2_SEQ_LM; got 'SEQ_CLS'"),
        ({"lora_alfa": 3}, "LORA has no key `lora_alfa`. Did you mean `lora_alpha`?"),
        ({"bias": "all"}, "`bias` must be off: jrl has no such feature; got 'all'"),
        ({"modules_to_save": ["lm_head"]}, "`modules_to_save` must be off"),
        ({"layer_replication": [[0, 2]]}, "`layer_replication` must be off"),
        ({"r": 0}, "`r` must be at least 1; got 0"),
        ({"rank_pattern": {"q": 0}}, "`r` must be at least 1; got 0"),
        ({"lora_dropout": 1.0}, "`lora_dropout` must be in [0, 1); got 1.0"),
        (
            {"init_lora_weights": "pissa"},
            "`init_lora_weights` must be true, false or \"gaussian\"; got 'pissa'",
        ),
        ({"peft_type": "PREFIX_TUNING", "r": 1}, "PREFIX_TUNING has no key `r`"),
        ({"peft_type": "PROMPT_TUNING"}, "PROMPT_TUNING needs `num_virtual_tokens`"),
        (
            {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2, "prompt_tuning_init": "TEXT"},
            "`prompt_tuning_init_text` must be given where `prompt_tuning_init` is TEXT",
        ),
    ],
)
def test_what_jrl_lacks_is_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_adapter_config({"peft_type": "LORA"} | changes)


def test_neither_dict_nor_config_object():
    with pytest.raises(ValueError, match="must be a dict of PEFT's keys or a PEFT config object"):
        read_adapter_config("LORA")

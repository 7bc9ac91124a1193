# SPDX-License-Identifier: Apache-2.0
"""`peft_config`: what is read, what is passed over, what is refused."""

import re
from dataclasses import fields

import pytest

from jrl.models.adapters import LoraConfig, PrefixConfig, PromptConfig, read_adapter_config
from jrl.models.adapters.config import KINDS, to_peft_dict
from jrl.models.adapters.field_types import TYPES


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
    "config",
    [
        LoraConfig(rank_pattern={"q": 2}, target_modules=("q",)),
        LoraConfig(modules_to_save=("norm",), trainable_token_indices=(5, 3)),
        LoraConfig(trainable_token_indices={"embed_tokens": (5,), "lm_head": (3, 4)}),
        LoraConfig(target_modules=(), trainable_token_indices=(5, 3)),
        LoraConfig(target_modules=(), trainable_token_indices={"embed_tokens": (5,), "lm_head": (5,)}),
        PrefixConfig(3),
        PromptConfig(2),
    ],
)
def test_written_and_read_again(config):
    assert read_adapter_config(to_peft_dict(config)) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"peft_type": "ADALORA"},
            "`peft_type` must be one of LORA, PREFIX_TUNING, PROMPT_TUNING, TRAINABLE_TOKENS; got 'ADALORA'",
        ),
        (
            {"task_type": "TOKEN_CLS"},
            "`task_type` must be CAUSAL_LM, SEQ_2_SEQ_LM or SEQ_CLS; got 'TOKEN_CLS'",
        ),
        ({"lora_alfa": 3}, "LORA has no key `lora_alfa`. Did you mean `lora_alpha`?"),
        ({"bias": "all"}, "`bias` must be off: jrl has no such feature; got 'all'"),
        ({"trainable_token_indices": [3, 3]}, "`trainable_token_indices` must be ids of tokens, each once"),
        (
            {"trainable_token_indices": {"lm_head": [-1]}},
            "must be ids of tokens, each once; got {'lm_head': (-1,)}",
        ),
        ({"trainable_token_indices": []}, "must be ids of tokens, each once; got ()"),
        ({"target_modules": [], "trainable_token_indices": [3]}, "under `peft_type: TRAINABLE_TOKENS`"),
        ({"peft_type": "TRAINABLE_TOKENS"}, "`token_indices` must be a list of integers; got None"),
        ({"peft_type": "TRAINABLE_TOKENS", "token_index": [3]}, "Did you mean `token_indices`?"),
        (
            {"peft_type": "TRAINABLE_TOKENS", "token_indices": [3], "target_modules": ".*embed"},
            "`target_modules` must be None, a name or a list of names under TRAINABLE_TOKENS",
        ),
        (
            {"peft_type": "TRAINABLE_TOKENS", "token_indices": [3], "init_weights": False},
            "`init_weights` must be true under TRAINABLE_TOKENS",
        ),
        ({"layer_replication": [[0, 2]]}, "`layer_replication` must be off"),
        ({"r": 0}, "`r` must be at least 1; got 0"),
        ({"rank_pattern": {"q": 0}}, "`r` must be at least 1; got 0"),
        ({"lora_dropout": 1.0}, "`lora_dropout` must be in [0, 1); got 1.0"),
        (
            {"init_lora_weights": "pissa"},
            "`init_lora_weights` must be true, false or \"gaussian\"; got 'pissa'",
        ),
        (
            {"revision": "v2"},
            "`revision` must be None or 'main': download that revision and name its folder; got 'v2'",
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


PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}
PROMPT = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 2}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"r": "2"}, "`r` must be an integer; got '2'"),
        ({"r": True}, "`r` must be an integer; got True"),
        ({"r": 2.0}, "`r` must be an integer; got 2.0"),
        ({"lora_alpha": "16"}, "`lora_alpha` must be a finite number; got '16'"),
        ({"lora_alpha": float("nan")}, "`lora_alpha` must be a finite number; got nan"),
        ({"lora_dropout": "none"}, "`lora_dropout` must be a finite number; got 'none'"),
        (
            {"trainable_token_indices": {"lm_head": ["3"]}},
            "`trainable_token_indices` must be a list of integers or a dict of texts to such lists",
        ),
        ({"target_modules": 3}, "`target_modules` must be a text or a list of texts; got 3"),
        ({"target_modules": ["q", 3]}, "`target_modules` must be a text or a list of texts; got ['q', 3]"),
        ({"target_modules": {"q", 3}}, "`target_modules` must be a text or a list of texts; got [3, 'q']"),
        ({"exclude_modules": {"q": 1}}, "`exclude_modules` must be a text or a list of texts; got {'q': 1}"),
        (
            {"layers_to_transform": ["1"]},
            "`layers_to_transform` must be an integer or a list of integers; got ['1']",
        ),
        (
            {"layers_to_transform": 1.5},
            "`layers_to_transform` must be an integer or a list of integers; got 1.5",
        ),
        ({"layers_pattern": [1]}, "`layers_pattern` must be a text or a list of texts; got [1]"),
        ({"rank_pattern": {"q": "2"}}, "`rank_pattern` must be a dict of texts to integers; got {'q': '2'}"),
        ({"rank_pattern": [2]}, "`rank_pattern` must be a dict of texts to integers; got [2]"),
        ({"alpha_pattern": {1: 2}}, "`alpha_pattern` must be a dict of texts to finite numbers; got {1: 2}"),
        ({"use_rslora": "false"}, "`use_rslora` must be true or false; got 'false'"),
        ({"use_dora": 1}, "`use_dora` must be true or false; got 1"),
        ({"init_lora_weights": 1}, "`init_lora_weights` must be true, false or a text; got 1"),
        (PREFIX | {"num_virtual_tokens": "2"}, "`num_virtual_tokens` must be an integer; got '2'"),
        (PREFIX | {"prefix_projection": "no"}, "`prefix_projection` must be true or false; got 'no'"),
        (PREFIX | {"encoder_hidden_size": 8.5}, "`encoder_hidden_size` must be an integer; got 8.5"),
        (PREFIX | {"encoder_hidden_size": 0}, "`encoder_hidden_size` must be at least 1; got 0"),
        (PREFIX | {"init_weights": True}, "`init_weights` must be a text; got True"),
        (PREFIX | {"init_weights": "ones"}, "`init_weights` must be None or \"zero\"; got 'ones'"),
        (PROMPT | {"num_virtual_tokens": [2]}, "`num_virtual_tokens` must be an integer; got [2]"),
        (PROMPT | {"prompt_tuning_init": 1}, "`prompt_tuning_init` must be a text; got 1"),
        (PROMPT | {"prompt_tuning_init_text": 7}, "`prompt_tuning_init_text` must be a text; got 7"),
    ],
)
def test_a_value_of_another_type_is_named(given, message):
    with pytest.raises(ValueError, match=re.escape(f"peft_config: {message}")):
        read_adapter_config({"peft_type": "LORA"} | given)


def test_every_field_has_its_type():
    names = {field.name for kind in KINDS.values() for field in fields(kind)}
    assert set(TYPES) == names - {"text_ids"}


@pytest.mark.parametrize("revision", [None, "main"])
def test_a_revision_that_is_the_only_one_is_passed_over(revision):
    assert read_adapter_config({"peft_type": "LORA", "revision": revision}) == LoraConfig()


def test_neither_dict_nor_config_object():
    with pytest.raises(ValueError, match="must be a dict of PEFT's keys or a PEFT config object"):
        read_adapter_config("LORA")

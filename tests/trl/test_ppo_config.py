# SPDX-License-Identifier: Apache-2.0
"""TRL's `PPOConfig`: order, defaults, checks, and what it stands for in jrl; and the handles of models."""

from __future__ import annotations

import dataclasses
import inspect

import jax
import numpy as np
import pytest

import jrl
from jrl.trl.handles import resolve_model
from jrl.trl.models import (
    AutoModelForCausalLM,
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    create_reference_model,
)
from jrl.trl.ppo_config import PPOConfig, native_config
from jrl.trl.ppo_data import list_columns
from tests.tiny import tiny_hf_config

# Order and defaults of TRL 0.7.1.
DEFAULTS = dict(
    task_name=None,
    model_name=None,
    steps=20000,
    learning_rate=1e-5,
    adap_kl_ctrl=True,
    init_kl_coef=0.2,
    kl_penalty="kl",
    target=6,
    horizon=10000,
    gamma=1,
    lam=0.95,
    cliprange=0.2,
    cliprange_value=0.2,
    vf_coef=0.1,
    batch_size=256,
    forward_batch_size=None,
    mini_batch_size=1,
    backward_batch_size=1,
    gradient_accumulation_steps=1,
    ppo_epochs=4,
    remove_unused_columns=True,
    log_with=None,
    tracker_kwargs={},
    accelerator_kwargs={},
    project_kwargs={},
    tracker_project_name="trl",
    max_grad_norm=None,
    seed=0,
    optimize_cuda_cache=False,
    early_stopping=False,
    target_kl=0.1,
    push_to_hub_if_best_kwargs={},
    compare_steps=1,
    ratio_threshold=10.0,
    use_score_scaling=False,
    use_score_norm=False,
    score_clip=None,
)


def native(config, model=None, shared=None):
    handle = resolve_model(tiny_hf_config() if model is None else model)
    return native_config(config, handle, "tokenizer", num_shared_layers=shared, run_dir="run")


class TestPPOConfig:
    def test_order_and_defaults_are_trls(self):
        positional = [
            name
            for name, parameter in inspect.signature(PPOConfig).parameters.items()
            if parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        ]
        assert positional == list(DEFAULTS)
        assert {name: getattr(PPOConfig(), name) for name in DEFAULTS} == DEFAULTS

    def test_what_follows_from_other_fields(self):
        config = PPOConfig(batch_size=12, mini_batch_size=2, gradient_accumulation_steps=3, steps=100)
        assert (config.backward_batch_size, config.total_ppo_epochs) == (6, 9)
        with pytest.warns(UserWarning, match="`forward_batch_size` is the old name"):
            assert PPOConfig(forward_batch_size=4).mini_batch_size == 4
        assert (
            PPOConfig(tracker_kwargs={"wandb": {"name": "a"}}).to_dict()["tracker_kwargs/wandb/name"] == "a"
        )

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            (dict(batch_size=10, mini_batch_size=4), "`batch_size` must be a multiple of `mini_batch_size`"),
            (dict(kl_penalty="k3"), "`kl_penalty` must be one of"),
            (dict(log_with="mlflow"), "`log_with` must be one of"),
            (dict(push_to_hub_if_best_kwargs={"private": True}), "must hold `repo_id`"),
        ],
    )
    def test_values_that_cannot_be_are_refused(self, fields, message):
        with pytest.raises(ValueError, match=message):
            PPOConfig(**fields)

    def test_a_name_with_the_separator_is_refused(self):
        with pytest.raises(ValueError, match="'a/b'"):
            PPOConfig(tracker_kwargs={"a/b": 1}).to_dict()


class TestNativeConfig:
    def test_defaults(self):
        found = native(PPOConfig())
        method, train = found.method, found.train
        assert (method.num_rollouts, train.batch_size, train.minibatch_size) == (256, 1, 1)
        assert (method.target, method.scale_reward, method.center_reward) == (6, "ignored", False)
        assert (method.cliprange_reward, method.cliprange_scaled_reward) == (None, None)
        assert (method.max_policy_kl, method.ratio_threshold) == (None, 10.0)
        assert found.optimizer.kwargs == {"lr": 1e-5, "betas": [0.9, 0.999], "eps": 1e-8}
        assert found.model.value_head == "linear"
        assert train.tracker is None

    def test_every_option(self):
        config = PPOConfig(
            adap_kl_ctrl=False,
            early_stopping=True,
            target_kl=0.2,
            use_score_scaling=True,
            use_score_norm=True,
            score_clip=3.0,
            whiten_rewards=True,
            kl_penalty="full",
            max_grad_norm=0.5,
            tracker_project_name="mine",
            project_kwargs={"logging_dir": "logs"},
            tracker_kwargs={"wandb": {"init_kwargs": {"name": "run"}}},
            train_kwargs={"remat": True},
        )
        found = native(config)
        assert found.method.target is None
        assert found.method.max_policy_kl == pytest.approx(0.3)
        assert (found.method.scale_reward, found.method.center_reward) == ("running", True)
        assert (found.method.cliprange_scaled_reward, found.method.whiten_rewards) == (3.0, True)
        assert found.method.kl_penalty == "full"
        train = found.train
        assert (train.max_grad_norm, train.project_name, train.run_name) == (0.5, "mine", "run")
        assert (train.logging_dir, train.remat) == ("logs", True)

    def test_norming_alone_does_nothing(self):
        assert native(PPOConfig(use_score_norm=True)).method.center_reward is False

    def test_shared_layers_leave_the_others_to_train(self):
        assert native(PPOConfig(), shared=None).model.num_layers_unfrozen == -1
        assert native(PPOConfig(), shared=0).model.num_layers_unfrozen == 2
        assert native(PPOConfig(), shared=1).model.num_layers_unfrozen == 1


class TestModels:
    def test_keywords_are_mapped_changed_or_said_to_have_no_effect(self):
        with pytest.warns(UserWarning, match="offload_folder"):
            model = AutoModelForCausalLM.from_pretrained(
                tiny_hf_config(),
                offload_folder="x",
                torch_dtype="auto",
                load_in_4bit=True,
                peft_config={"peft_type": "LORA", "r": 2},
            )
        assert (model.frozen_dtype, model.compute_dtype) == ("nf4", "float32")
        assert (
            AutoModelForCausalLM.from_pretrained(tiny_hf_config(), dtype="bfloat16").compute_dtype
            == "bfloat16"
        )
        quantised = AutoModelForCausalLM.from_pretrained(
            tiny_hf_config(), quantization_config={"load_in_8bit": True}
        )
        assert quantised.frozen_dtype == "int8"

    @pytest.mark.parametrize(
        ("name", "meant"),
        [("eager", "einsum"), ("sdpa", "auto"), ("flash_attention_2", "auto"), (None, "auto")],
    )
    def test_the_kernel_of_attention_can_be_declined(self, name, meant):
        model = AutoModelForCausalLM.from_pretrained(tiny_hf_config(), attn_implementation=name)
        assert model.attn_implementation == meant
        assert native(PPOConfig(), model).model.attn_implementation == meant

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (dict(load_in_8bit=True, load_in_4bit=True), "exclude each other"),
            (dict(v_head_init_strategy="xavier"), "`v_head_init_strategy` must be None or"),
            (dict(num_labels=3), "`num_labels` must be 1"),
            (dict(revision="main"), "`revision` is not supported"),
            (dict(reward_adapter="x"), "`reward_adapter` must be a folder"),
        ],
    )
    def test_what_cannot_be_honoured_is_refused(self, options, message):
        with pytest.raises(ValueError, match=message):
            AutoModelForCausalLM.from_pretrained(tiny_hf_config(), **options)

    def test_kinds_are_not_confused(self):
        with pytest.raises(ValueError, match="AutoModelForSeq2SeqLM"):
            AutoModelForCausalLM.from_pretrained(tiny_hf_config("t5"))
        with pytest.raises(ValueError, match="AutoModelForCausalLM "):
            AutoModelForSeq2SeqLM.from_pretrained(tiny_hf_config())
        with pytest.raises(ValueError, match="got list"):
            resolve_model([])
        with pytest.raises(ValueError, match="writes no text"):
            AutoModelForSequenceClassification.from_pretrained(tiny_hf_config()).generate([[5]])

    def test_a_loaded_model_becomes_a_folder_that_is_this_model(self):
        loaded = jrl.load_model(tiny_hf_config(), key=jax.random.key(3), quiet=True)
        handle = resolve_model(loaded)
        again = jrl.load_model(handle.source, quiet=True)[1]
        jax.tree.map(np.testing.assert_array_equal, again, loaded[1])
        assert handle.config.n_layer == 2

    def test_a_reference_remembers_how_much_is_shared(self):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config())
        reference = create_reference_model(model, 1)
        assert (reference.num_shared_layers, reference.source) == (1, model.source)
        assert create_reference_model(model).num_shared_layers is None
        with pytest.raises(ValueError, match=r"in \[0, 2\)"):
            create_reference_model(model, 2)
        assert dataclasses.replace(model) == model


def test_rows_that_are_tuples_are_one_list_a_place():
    assert list_columns([([1, 2], "a"), ([3], "b")]) == [[[1, 2], [3]], ["a", "b"]]

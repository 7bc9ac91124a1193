# SPDX-License-Identifier: Apache-2.0
"""Runs that train an adapter: what is in the state, what is written, and what a run continues from."""

import json
import sys

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from jrl.models.checkpoint import load_checkpoint
from jrl.models.policy import init_reference
from jrl.models.quantize import QuantizedKernel
from jrl.models.safetensors_io import TensorFiles
from jrl.trainers.checkpoints.checkpointer import tree_sha256
from tests.tiny import tiny_hf_config, tiny_prompts
from tests.trainers.runs import (
    PROMPTS,
    count_vowels,
    ppo_config,
    repeatable,
    save_tiny_checkpoint,
    sft_config,
)

LORA = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2, "lora_alpha": 8}
SAMPLES = ["the cat sat", ["a dog", " ran off"], "so it goes on and on", "rain"]


def ppo(checkpoint, folder, *, train=None, **model):
    model = {"peft_config": LORA, "num_layers_unfrozen": -1} | model
    config = ppo_config(checkpoint, folder, model=model, train=train or {})
    return jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)


def prepared(checkpoint, folder, peft_config, **model):
    """A trainer with its model loaded, that has not trained."""
    config = sft_config(checkpoint, folder, model={"peft_config": peft_config} | model)
    return prepare(samples=SAMPLES, eval_prompts=["the"], config=config)


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    return ppo(checkpoint, tmp_path_factory.mktemp("lora"))


def num_bytes(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def test_state_and_gradient_cover_adapters_and_value_head_alone(trained):
    assert set(trained.params) == {"lora", "v_head"}
    # r · (in + out) of c_attn in two layers, and the value head, in float32.
    adapters, head = 2 * 4 * 2 * (32 + 96), num_bytes(trained.params["v_head"])
    assert num_bytes(trained.params) == adapters + head
    moments = [leaf for leaf in jax.tree.leaves(trained.state.train.opt_state) if leaf.ndim]
    assert num_bytes(moments) == 2 * (adapters + head)

    def loss(params):
        inputs = tiny_prompts()
        trunk = trained.policy.trunk(trained.frozen, inputs)
        hidden = trained.policy.branch(params, trained.frozen, trunk, inputs, None)
        return hidden.policy.sum() + trained.policy.heads(params, hidden.value)["values"].sum()

    assert num_bytes(jax.eval_shape(jax.grad(loss), trained.params)) == adapters + head
    assert min(float(np.abs(module["B"]).max()) for module in trained.params["lora"].values()) > 0


def test_lore_3_6_the_base_is_the_reference_and_costs_nothing(trained):
    assert trained.ref_params == {}
    first = next(record for record in trained.history if "kl/per_token" in record)
    assert first["kl/per_token"] == 0.0


def test_lore_7_5_the_base_is_unchanged_to_the_bit(trained, checkpoint):
    before = load_checkpoint(checkpoint).params
    assert tree_sha256(trained.frozen) == tree_sha256(before)


def test_checkpoint_holds_the_adapter_in_the_layout_of_peft(trained, checkpoint):
    folder = trained.run_dir / "checkpoint_12" / "hf_model"
    config = json.loads((folder / "adapter_config.json").read_text())
    assert (config["peft_type"], config["r"], config["target_modules"]) == ("LORA", 2, ["c_attn"])
    assert config["base_model_name_or_path"] == checkpoint and config["fan_in_fan_out"] is True
    files = {file.name for file in folder.iterdir()}
    assert {"adapter_model.safetensors", "model.safetensors", "tokenizer.json"} <= files
    # The base model is 100 KB, the adapter and the head a tenth of it.
    assert sum(file.stat().st_size for file in folder.glob("*.safetensors")) < 15_000


def test_a_run_continues_from_an_adapter_folder(trained, tmp_path):
    folder = str(trained.save_pretrained(tmp_path / "adapter", heads=True))
    config = ppo_config(folder, tmp_path / "run", model={"num_layers_unfrozen": -1})
    again = prepare(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    jax.tree.map(np.testing.assert_array_equal, again.params, trained.params)
    jax.tree.map(np.testing.assert_array_equal, again.frozen, trained.frozen)


def test_a_run_with_a_rounded_base_continues_from_its_own_export(checkpoint, tmp_path):
    run = prepared(checkpoint, tmp_path / "run", LORA, frozen_dtype="nf4")
    folder = str(run.save_pretrained(tmp_path / "adapter"))
    again = prepared(checkpoint, tmp_path / "again", None, model_path=folder, frozen_dtype="nf4")
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)
    assert tree_sha256(again.frozen) == tree_sha256(run.frozen)


def test_a_fresh_adapter_on_an_adapter_folder_is_said(trained, tmp_path):
    folder = str(trained.save_pretrained(tmp_path / "adapter"))
    other = {"peft_type": "LORA", "r": 1, "target_modules": ["c_fc"]}
    with pytest.warns(UserWarning, match="holds an adapter: a fresh one is trained on the base model"):
        again = prepared(folder, tmp_path / "run", other)
    assert {name.rsplit(".", 1)[-1] for name in again.params["lora"]} == {"c_fc"}


def test_merged_export_is_a_plain_model_with_the_same_logits(trained, tmp_path):
    merged = load_checkpoint(trained.save_pretrained(tmp_path / "merged", merge_adapter=True))
    inputs = tiny_prompts()

    @jax.jit
    def logits(params, frozen):
        trunk = trained.policy.trunk(frozen, inputs)
        hidden = trained.policy.branch(params, frozen, trunk, inputs, None).policy
        return trained.policy.logits(params, frozen, hidden)[..., :97]

    ours = jax.jit(merged.model.logits)(merged.params, *inputs[:2])
    real = inputs.attention_mask
    np.testing.assert_allclose(ours[real], logits(trained.params, trained.frozen)[real], atol=1e-5)
    assert not np.allclose(ours[real], logits({}, trained.frozen)[real], atol=1e-3)


VIRTUAL = {
    "prefix": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2},
    "projected": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2, "prefix_projection": True}
    | {"encoder_hidden_size": 8},
    "prompt": {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 3, "prompt_tuning_init": "TEXT"}
    | {"prompt_tuning_init_text": "the cat"},
}


@pytest.fixture(
    scope="module",
    params=[
        # Without the projection there is less that could go wrong.
        pytest.param(name, marks=[pytest.mark.slow] if name == "prefix" else [])
        for name in VIRTUAL
    ],
)
def virtual(request, checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    model = {"peft_config": VIRTUAL[request.param]}
    sections = dict(optimizer={"kwargs": {"lr": 0.05}}, train={"total_steps": 8})
    config = sft_config(checkpoint, folder, model=model, **sections)
    return jrl.train(samples=SAMPLES, eval_prompts=["the"], config=config)


@pytest.mark.slow
def test_virtual_tokens_are_learned_and_continued(virtual, tmp_path):
    losses = [record["sft/loss"] for record in virtual.history if "sft/loss" in record]
    assert losses[-1] < losses[0]
    folder = str(virtual.save_pretrained(tmp_path / "adapter"))
    again = prepared(folder, tmp_path / "again", None)
    inputs = tiny_prompts(2, 6)

    def hidden(trainer):
        run = jax.jit(lambda params, frozen: trainer.policy.branch(params, frozen, None, inputs, None).policy)
        return run(trainer.params, trainer.frozen)[inputs.attention_mask]

    np.testing.assert_allclose(hidden(again), hidden(virtual), atol=1e-5)
    with pytest.raises(ValueError, match="virtual tokens: they are no part of any weight"):
        virtual.save_pretrained(tmp_path / "merged", merge_adapter=True)


def test_a_prompt_starts_as_its_text(checkpoint, tmp_path):
    run = prepared(checkpoint, tmp_path, VIRTUAL["prompt"])
    ids = run.tokenizer("the cat")["input_ids"][:3]
    np.testing.assert_array_equal(
        run.params["prompt"]["embedding"], run.frozen["embed"]["embedding"][np.array(ids)]
    )


def test_virtual_tokens_count_as_positions(checkpoint, tmp_path):
    with pytest.raises(
        ValueError, match=r"`train.seq_length` is 32 and 97 virtual tokens, but the model has 128"
    ):
        prepared(checkpoint, tmp_path, {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 97})


def test_what_a_peft_config_overrides_is_said(checkpoint, tmp_path):
    with pytest.warns(
        UserWarning, match=r"`model.num_layers_unfrozen` is 1, but `model.peft_config` is given"
    ):
        prepared(checkpoint, tmp_path, LORA, num_layers_unfrozen=1)
    with pytest.warns(UserWarning, match="`lora_dropout` is 0.1, but jrl trains without dropout"):
        prepared(checkpoint, tmp_path, LORA | {"lora_dropout": 0.1})


def test_a_peft_config_object_is_taken(checkpoint, tmp_path):
    class TheirConfig:
        def to_dict(self):
            return LORA | {"target_modules": {"c_fc", "c_attn"}}

    run = prepared(checkpoint, tmp_path, TheirConfig())
    assert len(run.params["lora"]) == 4
    assert run.config.model.peft_config["target_modules"] == ["c_attn", "c_fc"]


def test_a_rounded_base(checkpoint, tmp_path):
    run = prepared(checkpoint, tmp_path, LORA, frozen_dtype="nf4")
    kernel = run.frozen["layers_0"]["attn"]["q"]["kernel"]
    assert isinstance(kernel, QuantizedKernel) and kernel.values.dtype == np.uint8
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.params)} == {"float32"}
    exact = load_checkpoint(checkpoint).params
    # Half a byte a weight, four bytes a block of 32 of these narrow inputs, and two bytes of all the rest.
    assert num_bytes(run.frozen) < 0.45 * num_bytes(exact)
    with pytest.raises(
        ValueError, match=r"`merge_adapter` must be False where `model.frozen_dtype` is int8 or nf4"
    ):
        run.save_pretrained(tmp_path / "merged", merge_adapter=True)
    with pytest.raises(
        ValueError, match=r"`model.frozen_dtype` must be float32 or bfloat16 without `model.peft_config`"
    ):
        prepared(checkpoint, tmp_path, None, frozen_dtype="int8")


def test_a_frozen_trunk_in_bfloat16_is_bfloat16_in_an_export(checkpoint, tmp_path):
    run = prepared(checkpoint, tmp_path, None, frozen_dtype="bfloat16", num_layers_unfrozen=1)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.frozen)} == {"bfloat16"}
    assert {leaf.dtype.name for leaf in jax.tree.leaves(run.params)} == {"float32"}
    # The reference of what trains is as exact as what trains.
    assert {leaf.dtype.name for leaf in jax.tree.leaves(init_reference(run.params))} == {"float32"}
    files = TensorFiles(run.save_pretrained(tmp_path / "export"))
    dtypes = {name: files.info[name].dtype.name for name in files}
    assert dtypes["transformer.h.0.mlp.c_fc.weight"] == "bfloat16"
    assert dtypes["transformer.h.1.mlp.c_fc.weight"] == "float32"
    # Others load all of it in this, and must not round what was trained.
    assert json.loads((tmp_path / "export" / "config.json").read_text())["dtype"] == "float32"


def test_merging_without_an_adapter_is_refused(checkpoint, tmp_path):
    run = prepared(checkpoint, tmp_path, None)
    with pytest.raises(ValueError, match=r"`merge_adapter` must be False where no adapter trains"):
        run.save_pretrained(tmp_path / "merged", merge_adapter=True)


PREFIX = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}
LLAMA_LORA = LORA | {"target_modules": ["q_proj"]}
BEFORE_WEIGHTS = {
    "arch_type": ({"model": {"model_arch_type": "seq2seq"}}, "`model.model_arch_type` must be 'causal'"),
    "seq_length": ({"train": {"seq_length": 129}}, "`train.seq_length` is 129, but the model has 128"),
    "unfrozen": ({"model": {"num_layers_unfrozen": 3}}, "`num_layers_unfrozen` must be .* got 3"),
    "value_layers": (
        {"model": {"peft_config": PREFIX}, "method": {"num_value_layers_unfrozen": 1}},
        "`num_value_layers_unfrozen` must be 0 under prefix",
    ),
    "targets": ({"model": {"peft_config": LORA | {"target_modules": ["nothing"]}}}, "matches no module"),
    "int8": ({"model": {"frozen_dtype": "int8"}}, "float32 or bfloat16 without `model.peft_config`"),
    "bfloat16": ({"model": {"frozen_dtype": "bfloat16"}}, "all layers train and nothing is frozen"),
    "odd": (
        {"model": {"frozen_dtype": "nf4", "peft_config": LLAMA_LORA}},
        "nf4 packs pairs of inputs: .* got 63",
    ),
}


@pytest.fixture(scope="module")
def without_weights(checkpoint, tmp_path_factory):
    """A folder with a config.json alone: who looks for weights there fails in another way."""
    folder = tmp_path_factory.mktemp("config")
    # Widths that no other test has: what was traced before is not traced again.
    tiny_hf_config("llama", intermediate_size=63).save_pretrained(folder)
    return str(folder)


@pytest.mark.parametrize("name", BEFORE_WEIGHTS)
def test_what_does_not_fit_is_said_before_weights_are_read(checkpoint, without_weights, tmp_path, name):
    sections, message = BEFORE_WEIGHTS[name]
    config = ppo_config(
        checkpoint, tmp_path, model={"model_path": without_weights, "num_layers_unfrozen": -1}
    )
    with pytest.raises(ValueError, match=message):
        prepare(reward_fn=count_vowels, prompts=PROMPTS, config=config.evolve(**sections))


def test_value_layers_of_t5_are_refused_before_weights_are_read(checkpoint, tmp_path):
    tiny_hf_config("t5").save_pretrained(tmp_path / "config")
    model = {"model_path": str(tmp_path / "config"), "model_arch_type": "seq2seq"}
    config = ppo_config(checkpoint, tmp_path, model=model, method={"num_value_layers_unfrozen": 1})
    with pytest.raises(ValueError, match="`num_value_layers_unfrozen` must be 0 for a seq2seq model"):
        prepare(reward_fn=count_vowels, prompts=PROMPTS, config=config)


def test_missing_qwix_is_said_before_weights_are_read(checkpoint, without_weights, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "qwix", None)
    with pytest.raises(ImportError, match="need qwix: pip install qwix"):
        prepared(checkpoint, tmp_path, LLAMA_LORA, model_path=without_weights, frozen_dtype="int8")


def test_a_run_in_which_nothing_would_train_is_refused(checkpoint, without_weights, tmp_path):
    with pytest.raises(ValueError, match=r"`model.num_layers_unfrozen` must be .* nothing would train"):
        prepared(checkpoint, tmp_path, None, model_path=without_weights, num_layers_unfrozen=0)


BESIDE = LORA | {"modules_to_save": ["ln_f"], "trainable_token_indices": [5, 40]}


@pytest.mark.slow
def test_tokens_and_modules_train_beside_an_adapter(checkpoint, tmp_path):
    run = ppo(checkpoint, tmp_path / "run", peft_config=BESIDE)
    own, before = run.params["lora"], load_checkpoint(checkpoint).params
    assert own["transformer.wte"]["rows"].shape == (2, 32) and run.ref_params == {}
    assert next(record for record in run.history if "kl/per_token" in record)["kl/per_token"] == 0.0
    assert tree_sha256(run.frozen) == tree_sha256(before)
    assert np.abs(own["transformer.wte"]["rows"] - before["embed"]["embedding"][np.array([5, 40])]).max() > 0
    assert np.abs(own["transformer.ln_f"]["final_norm"]["scale"] - before["final_norm"]["scale"]).max() > 0

    folder = str(run.save_pretrained(tmp_path / "adapter", heads=True))
    again = prepared(checkpoint, tmp_path / "again", None, model_path=folder)
    jax.tree.map(np.testing.assert_array_equal, again.params["lora"], own)
    merged = load_checkpoint(run.save_pretrained(tmp_path / "merged", merge_adapter=True)).params
    np.testing.assert_array_equal(merged["final_norm"]["bias"], own["transformer.ln_f"]["final_norm"]["bias"])
    changed = np.flatnonzero((merged["embed"]["embedding"] != before["embed"]["embedding"]).any(axis=1))
    assert list(changed) == [5, 40]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "nf4", "beside"])
def test_resumed_equals_never_stopped_bit_for_bit(checkpoint, tmp_path, kind):
    model = {"peft_config": BESIDE} if kind == "beside" else {"frozen_dtype": kind}
    whole = ppo(checkpoint, tmp_path / "whole", **model)
    ppo(checkpoint, tmp_path / "part", train={"total_steps": 4}, **model)
    resumed = ppo(
        checkpoint, tmp_path / "part", train={"resume_from_checkpoint": str(tmp_path / "part")}, **model
    )
    jax.tree.map(np.testing.assert_array_equal, whole.state, resumed.state)
    expected = [record for record in repeatable(whole.history) if "iteration" in record]
    assert [record for record in repeatable(resumed.history) if "iteration" in record] == expected


@pytest.mark.slow
def test_t5_trains_an_adapter_and_continues_from_it(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "t5", "t5")
    model = {
        "model_path": checkpoint,
        "model_arch_type": "seq2seq",
        "peft_config": LORA | {"task_type": "SEQ_2_SEQ_LM"},
    }
    config = ppo_config(checkpoint, tmp_path / "run", model={"num_layers_unfrozen": -1} | model)
    run = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    assert set(run.params) == {"lora", "v_head"} and run.ref_params == {}
    folder = str(run.save_pretrained(tmp_path / "adapter", heads=True))
    assert (
        json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["task_type"] == "SEQ_2_SEQ_LM"
    )
    model = {"model_path": folder, "peft_config": None}
    again = prepare(reward_fn=count_vowels, prompts=PROMPTS, config=config.evolve(model=model))
    jax.tree.map(np.testing.assert_array_equal, again.params, run.params)

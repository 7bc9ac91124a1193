# SPDX-License-Identifier: Apache-2.0
"""Where the heads of a run go: nowhere in what is served, apart in checkpoints, inside where they are asked for."""

import jax
import numpy as np
import pytest

from jrl.api import prepare
from jrl.models.adapters.peft_format import load_heads
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.safetensors_io import TensorFiles
from tests.trainers.runs import PROMPTS, REWARDED, count_vowels, ilql_config, ppo_config, sft_config

LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"]}


@pytest.fixture(scope="module")
def runs(tmp_path_factory, checkpoint):
    folder = tmp_path_factory.mktemp("runs")
    online = {"reward_fn": count_vowels, "prompts": PROMPTS}
    rewarded = {"samples": [text for text, _ in REWARDED], "rewards": [reward for _, reward in REWARDED]}
    adapted = ppo_config(
        checkpoint, folder / "adapter", model={"num_layers_unfrozen": -1, "peft_config": LORA}
    )
    return {
        "ppo": prepare(config=ppo_config(checkpoint, folder / "ppo"), **online),
        "ilql": prepare(config=ilql_config(checkpoint, folder / "ilql"), **rewarded),
        "adapter": prepare(config=adapted, **online),
        "sft": prepare(config=sft_config(checkpoint, folder / "sft"), samples=["the cat"]),
    }


def served(folder):
    """Names of all tensors that a server finds, which reads every safetensors file of the folder itself."""
    return {name for file in folder.glob("*.safetensors") for name in TensorFiles(folder, file.stem)}


def heads_in(names):
    return {name for name in names if "v_head" in name or "q_heads" in name}


def same_heads(found, trainer):
    held = {name: value for name, value in trainer.exported_params.items() if "head" in name}
    assert held
    jax.tree.map(np.testing.assert_array_equal, {name: found[name] for name in held}, dict(held))


@pytest.mark.parametrize("name", ["ppo", "ilql", "adapter", "sft"])
def test_what_is_exported_has_no_heads(runs, tmp_path, name):
    folder = runs[name].save_pretrained(tmp_path / "model")
    assert not heads_in(served(folder)) and not (folder / "heads").exists()


@pytest.mark.parametrize(
    ("name", "heads"), [("ppo", "v_head"), ("ilql", "q_heads, target_q_heads, v_head"), ("adapter", "v_head")]
)
def test_the_card_says_which_heads_were_left_out(runs, tmp_path, name, heads):
    card = (runs[name].save_pretrained(tmp_path / "model") / "README.md").read_text().replace("\\", "")
    assert f"- left out: {heads}; save_pretrained(heads=True) writes them" in card
    for others in ("with", "checkpoint"):
        if others == "with":
            runs[name].save_pretrained(tmp_path / others, heads=True)
        else:
            runs[name].export_writer()(tmp_path / others)
        assert "left out" not in (tmp_path / others / "README.md").read_text()
    assert "left out" not in (runs["sft"].save_pretrained(tmp_path / "sft") / "README.md").read_text()


@pytest.mark.parametrize("name", ["ppo", "ilql"])
def test_a_model_in_a_checkpoint_can_be_served_and_keeps_its_heads(runs, tmp_path, name):
    folder = tmp_path / "hf_model"
    runs[name].export_writer()(folder)
    assert not heads_in(served(folder))
    same_heads(load_checkpoint(folder).params, runs[name])


@pytest.mark.parametrize("name", ["ppo", "ilql"])
def test_heads_that_are_asked_for_lie_where_trlx_and_trl_look(runs, tmp_path, name):
    folder = runs[name].save_pretrained(tmp_path / "model", heads=True)
    assert heads_in(served(folder)) and not (folder / "heads").exists()
    same_heads(load_checkpoint(folder).params, runs[name])


def test_an_adapter_keeps_its_heads_in_a_checkpoint_alone(runs, tmp_path):
    trainer = runs["adapter"]
    lm = trainer.lm
    sizes = {
        "width": lm.feature_width,
        "vocab_size": lm.vocab_size,
        "padded_vocab_size": lm.config.padded_vocab_size,
    }
    assert load_heads(trainer.save_pretrained(tmp_path / "model"), **sizes) == {}
    trainer.export_writer()(tmp_path / "hf_model")
    same_heads(load_heads(tmp_path / "hf_model", **sizes), trainer)


def test_a_folder_that_is_written_anew_keeps_no_old_heads(runs, tmp_path):
    runs["ppo"].export_writer()(tmp_path / "model")
    runs["ppo"].save_pretrained(tmp_path / "model")
    assert "v_head" not in load_checkpoint(tmp_path / "model").params


def test_heads_that_do_not_exist_cannot_be_asked_for(runs):
    with pytest.raises(ValueError, match="`heads` must be False for SFTTrainer"):
        runs["sft"].save_pretrained(heads=True)


def test_heads_apart_are_read_by_every_run_that_starts_there(runs, tmp_path):
    runs["ppo"].export_writer()(tmp_path / "start")
    head = jax.tree.map(lambda leaf: leaf + 1, load_checkpoint(tmp_path / "start").params["v_head"])
    loaded = load_checkpoint(tmp_path / "start")
    save_checkpoint(tmp_path / "start", loaded.model, {**loaded.params, "v_head": head}, heads="apart")
    runs["ppo"].tokenizer.save_pretrained(tmp_path / "start")
    config = ppo_config(str(tmp_path / "start"), tmp_path / "run")
    again = prepare(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    jax.tree.map(np.testing.assert_array_equal, dict(again.params["v_head"]), dict(head))

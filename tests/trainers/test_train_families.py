# SPDX-License-Identifier: Apache-2.0
"""One PPO iteration of every family, with a hydra reference and with LoRA, from a checkpoint on disk."""

import jax
import numpy as np
import pytest
from flax import traverse_util

import jrl
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.families import FAMILIES
from jrl.models.model import make_model
from tests.models.family_cases import CASES
from tests.tiny import tiny_hf_config, tiny_t5_tokenizer, tiny_tokenizer
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config

CONFIGS = {config.model_type: config for config in reversed(CASES.values())} | {"t5": tiny_hf_config("t5")}
TRAINED = {"hydra": {"num_layers_unfrozen": 1}, "lora": {"peft_config": {"peft_type": "LORA", "r": 2}}}
# The default tier has tests of their own for these (test_train_ppo.py, test_train_seq2seq.py, test_train_adapters.py).
QUICK = ("gpt2", "llama", "t5")


def checkpoint(folder, family):
    """A random checkpoint of a family, with its tokenizer."""
    model = make_model(CONFIGS[family])
    tokenizer = tiny_t5_tokenizer() if model.family.kind == "seq2seq" else tiny_tokenizer()
    save_checkpoint(folder, model, model.init(jax.random.key(0)), tokenizer=tokenizer)
    return str(folder)


def test_every_language_model_family_is_tried():
    assert set(CONFIGS) == {name for name, family in FAMILIES.items() if family.kind != "encoder"}


@pytest.mark.slow
@pytest.mark.parametrize("trained", TRAINED)
@pytest.mark.parametrize("family", CONFIGS)
def test_one_ppo_iteration(family, trained, tmp_path):
    path = checkpoint(tmp_path / "model", family)
    arch = {"model_arch_type": FAMILIES[family].kind}
    config = ppo_config(path, tmp_path / "run", model=arch | {"num_layers_unfrozen": -1} | TRAINED[trained])
    config = config.evolve(train={"total_steps": 4}, method={"ppo_epochs": 2})
    trainer = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)

    (record,) = [record for record in trainer.history if "ppo/ratio_max_dev_first_minibatch" in record]
    assert record["ppo/ratio_max_dev_first_minibatch"] < 1e-4
    # At the start policy and reference are one.
    assert abs(record["kl/per_sequence"]) < 1e-4
    assert record["optim/skipped_steps"] == 0

    # Only what trains has moved, and all of it is in reach of the gradient.
    before = traverse_util.flatten_dict(load_checkpoint(path).params, sep="/")
    frozen = traverse_util.flatten_dict(jax.device_get(trainer.frozen), sep="/")
    for name, leaf in frozen.items():
        np.testing.assert_array_equal(leaf, before[name], name)
    trained_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.params))
    frozen_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(trainer.frozen))
    assert trained_bytes > 0 and frozen_bytes > 0

    # What comes out is a checkpoint again.
    exported = trainer.save_pretrained(tmp_path / "out")
    assert (exported / ("adapter_config.json" if trained == "lora" else "config.json")).is_file()

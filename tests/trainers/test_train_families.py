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
from jrl.models.multimodal import TextLayout
from tests.models import multimodal_cases
from tests.models.family_training import CONFIGS
from tests.tiny import tiny_t5_tokenizer, tiny_tokenizer
from tests.trainers.runs import PROMPTS, ppo_config

pytestmark = pytest.mark.slow
TRAINED = {"hydra": {"num_layers_unfrozen": 1}, "lora": {"peft_config": {"peft_type": "LORA", "r": 2}}}
# gpt2 and t5 run with hydra, and gpt2 with LoRA, in test_train_{ppo,seq2seq,adapters}.py.


def score_ids(output_tokens, **others):
    """Differs from row to row whatever a random model writes."""
    return [sum(ids) % 7 / 7 for ids in output_tokens]


def checkpoint(folder, family):
    """A random checkpoint of a family."""
    model = make_model(CONFIGS[family])
    if model.family.is_multimodal:
        layout = TextLayout(*model.family.text_prefixes)
        eyes = {"vision_tower.scale": np.ones(3, np.float32)}
        multimodal_cases.write_checkpoint(folder, family, layout, eyes, scale=0.1)
    else:
        save_checkpoint(folder, model, model.init(jax.random.key(0)))
    # Apart from the config.json, beside which transformers makes it the family's tokenizer, with tokens of its own.
    tokenizer = tiny_t5_tokenizer() if model.family.kind == "seq2seq" else tiny_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    return str(folder)


@pytest.fixture(
    scope="module",
    params=[(family, trained) for family in CONFIGS for trained in TRAINED],
    ids=lambda param: "-".join(param),
)
def run(request, tmp_path_factory):
    """(path of the checkpoint, what trains, trainer after one iteration of two epochs)."""
    family, trained = request.param
    folder = tmp_path_factory.mktemp(family)
    path = checkpoint(folder / "model", family)
    model = {"model_arch_type": FAMILIES[family].kind, "num_layers_unfrozen": -1} | TRAINED[trained]
    config = ppo_config(path, folder / "run", model=model).evolve(
        tokenizer={"tokenizer_path": f"{path}/tokenizer"}, train={"total_steps": 4}
    )
    return path, trained, jrl.train(reward_fn=score_ids, prompts=PROMPTS, config=config)


def test_every_language_model_family_is_tried():
    tried = {name for name, family in FAMILIES.items() if family.kind != "encoder"}
    assert set(CONFIGS) == tried


def test_one_ppo_iteration(run, tmp_path):
    path, trained, trainer = run
    (record,) = [record for record in trainer.history if "ppo/ratio_max_dev_first_minibatch" in record]
    assert record["ppo/ratio_max_dev_first_minibatch"] < 1e-4
    # At the start policy and reference are one.
    assert abs(record["kl/per_sequence"]) < 1e-4
    assert (record["optim/skipped_steps"], record["step"]) == (0, 4)

    # What is frozen is what the checkpoint holds, to the bit; what trains has moved.
    before = traverse_util.flatten_dict(load_checkpoint(path).params, sep="/")
    for name, leaf in traverse_util.flatten_dict(jax.device_get(trainer.frozen), sep="/").items():
        np.testing.assert_array_equal(leaf, before[name], name)
    now = traverse_util.flatten_dict(jax.device_get(dict(trainer.params)), sep="/")
    moved = [name for name in now if name in before and (now[name] != before[name]).any()]
    if trained == "hydra":
        assert moved and {name.split("/")[0] for name in moved} <= {*trainer.ref_params}
    else:
        assert not moved and trainer.ref_params == {}
        assert all(np.any(leaf) for name, leaf in now.items() if name.startswith("lora/"))

    # What comes out is a checkpoint again.
    exported = trainer.save_pretrained(tmp_path / "out")
    assert (exported / ("adapter_config.json" if trained == "lora" else "config.json")).is_file()

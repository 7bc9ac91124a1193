# SPDX-License-Identifier: Apache-2.0
"""Model objects of torch where TRL's scripts give them: each trains as its own folder does."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from transformers import AutoConfig

from jrl.trl import (
    AutoModelForCausalLMWithValueHead,
    DPOConfig,
    DPOTrainer,
    PPOConfig,
    PPOTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
    resolve_model,
)
from tests.tiny import tiny_tokenizer

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings("ignore:The .* object.* is read, and does not train"),
]
PAIRS = [{"prompt": "a ", "chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]
FEW = {"max_steps": 2, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "report_to": "none"}


@pytest.fixture(scope="module")
def objects(checkpoint):
    """(a language model, a classifier) of torch with the weights of the folder."""
    pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

    return (
        AutoModelForCausalLM.from_pretrained(checkpoint),
        AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=1, pad_token_id=0),
    )


def losses(trainer):
    trainer.train()
    return [line["loss"] for line in trainer.state.log_history if "loss" in line]


def test_sft_learns_the_same_from_an_object(checkpoint, objects, tmp_path):
    texts = [{"text": f"{n} thin things"} for n in range(4)]
    found = [
        losses(
            SFTTrainer(
                model, args=SFTConfig(str(tmp_path / str(n)), logging_steps=1, **FEW), train_dataset=texts
            )
        )
        for n, model in enumerate((str(checkpoint), objects[0]))
    ]
    assert len(found[0]) == 2 and found[0] == found[1]


def test_dpo_takes_objects_as_policy_and_reference(checkpoint, objects, tmp_path):
    found = []
    for n, models in enumerate(((str(checkpoint), str(checkpoint)), (objects[0], objects[0]))):
        args = DPOConfig(str(tmp_path / str(n)), logging_steps=1, **FEW)
        found.append(
            losses(DPOTrainer(*models, args=args, train_dataset=PAIRS, processing_class=tiny_tokenizer()))
        )
    assert found[0] == found[1]


def test_a_classifier_object_is_a_reward_model(objects, tmp_path):
    args = RewardConfig(str(tmp_path), logging_steps=1, **FEW)
    trainer = RewardTrainer(objects[1], args=args, train_dataset=PAIRS, processing_class=tiny_tokenizer())
    head = np.asarray(trainer.native.params["score"]["kernel"])
    np.testing.assert_array_equal(head.ravel(), objects[1].score.weight.detach().numpy().ravel())
    assert np.isfinite(losses(trainer)).all()


def test_ppo_and_a_value_head_on_an_object(objects, checkpoint):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(objects[0])
    config = PPOConfig(batch_size=2, mini_batch_size=1, ppo_epochs=1, log_with=None)
    trainer = PPOTrainer(config, model, None, tiny_tokenizer())
    queries = [[5, 6, 7], [8, 9]]
    responses = trainer.generate(queries, return_prompt=False, max_new_tokens=3, do_sample=True)
    assert np.isfinite(trainer.step(queries, responses, [1.0, 0.0])["ppo/loss/total"])


@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_a_peft_object_trains_on(objects, checkpoint, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    inner = AutoModelForCausalLM.from_pretrained(checkpoint)
    adapted = peft.get_peft_model(
        inner, peft.LoraConfig(r=2, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
    )
    assert resolve_model(adapted).is_peft_model
    trainer = DPOTrainer(
        adapted, args=DPOConfig(str(tmp_path), **FEW), train_dataset=PAIRS, processing_class=tiny_tokenizer()
    )
    assert trainer.native.adapter is not None
    assert sum(leaf.size for leaf in jax.tree.leaves(trainer.native.params)) < 1000


def test_an_object_without_a_head_is_refused(objects):
    with pytest.raises(
        ValueError, match="`model` must have a head that writes text or scores it, got GPT2Model object"
    ):
        AutoModelForCausalLMWithValueHead.from_pretrained(objects[0].transformer)


def test_what_is_no_model_is_refused():
    torch = pytest.importorskip("torch")
    with pytest.raises(ValueError, match="a transformers model or config"):
        resolve_model(torch.nn.Linear(2, 2))


def test_half_precision_of_an_object_counts(checkpoint):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint)).to(torch.bfloat16)
    assert resolve_model(model).compute_dtype == "bfloat16"


def test_a_run_says_once_that_the_object_stays_as_it_is(objects, tmp_path):
    args = SFTConfig(str(tmp_path), **FEW)
    trainer = SFTTrainer(
        objects[0], args=args, train_dataset=[{"text": f"{n} thin things"} for n in range(4)]
    )
    with pytest.warns(UserWarning, match=r"does not train.*trainer\.save_model") as said:
        trainer.train()
    assert sum("does not train" in str(one.message) for one in said) == 1


@pytest.mark.parametrize("as_folder", [False, True])
def test_a_classifier_of_several_labels_gets_a_fresh_head(checkpoint, tmp_path, as_folder):
    from transformers import AutoModelForSequenceClassification as Theirs

    model = Theirs.from_pretrained(checkpoint, num_labels=2, pad_token_id=0)
    if as_folder:
        model.save_pretrained(tmp_path / "two")
        tiny_tokenizer().save_pretrained(tmp_path / "two")
        model = str(tmp_path / "two")
    pairs = [{"chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]
    with pytest.warns(UserWarning, match="scores 2 labels.*fresh head"):
        trainer = RewardTrainer(
            model,
            RewardConfig(str(tmp_path / "out"), **FEW),
            train_dataset=pairs,
            processing_class=tiny_tokenizer(),
        )
    assert trainer.model.get_parameter("score.weight").shape[0] == 1
    found = trainer.model.state_dict()["transformer.wte.weight"]
    theirs = Theirs.from_pretrained(checkpoint, num_labels=2).transformer.wte.weight.detach().numpy()
    np.testing.assert_array_equal(np.asarray(found), theirs)

# SPDX-License-Identifier: Apache-2.0
"""A reward model as a second adapter on the policy's base."""

from __future__ import annotations

import numpy as np
import pytest

from jrl.trl import AutoModelForCausalLMWithValueHead, PPOConfig, PPOTrainer
from tests.tiny import tiny_tokenizer

LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"]}


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("labels", [1, 2])
def test_scores_are_those_of_peft_whatever_the_policy_learns(checkpoint, tmp_path, labels):
    torch = pytest.importorskip("torch")
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForSequenceClassification

    base = AutoModelForSequenceClassification.from_pretrained(checkpoint, num_labels=labels, pad_token_id=0)
    config = peft.LoraConfig(
        task_type="SEQ_CLS", r=2, target_modules=["c_attn"], init_lora_weights=False, fan_in_fan_out=True
    )
    reward = peft.get_peft_model(base, config).eval()
    reward.save_pretrained(tmp_path)
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(checkpoint), peft_config={**LORA, "init_lora_weights": False}, reward_adapter=str(tmp_path)
    )
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 0, 0]])
    mask = torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0]])
    with torch.no_grad():
        inner = reward.base_model.model
        hidden = inner.transformer(ids, attention_mask=mask).last_hidden_state
        expected = inner.score(hidden)
    found = model.compute_reward_score(ids, attention_mask=mask)
    assert found.shape == (2, 4, labels)
    torch.testing.assert_close(found[mask == 1], expected[mask == 1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
def test_a_step_leaves_the_reward_as_it_is(checkpoint, tmp_path):
    from jrl.trl import RewardConfig, RewardTrainer

    pairs = [{"chosen": f"good {n}", "rejected": f"bad {n}"} for n in range(4)]
    args = RewardConfig(
        str(tmp_path / "run"),
        max_steps=1,
        per_device_train_batch_size=2,
        max_length=16,
        gradient_checkpointing=False,
    )
    judge = RewardTrainer(checkpoint, args, train_dataset=pairs, peft_config=LORA)
    judge.save_model(tmp_path / "reward")
    model = AutoModelForCausalLMWithValueHead.from_pretrained(
        str(checkpoint), peft_config=LORA, reward_adapter=str(tmp_path / "reward")
    )
    ids = [[5, 6, 7]]
    before = model.compute_reward_score(ids)
    trainer = PPOTrainer(
        PPOConfig(batch_size=2, mini_batch_size=2, learning_rate=0.1, log_with=None),
        model,
        None,
        tiny_tokenizer(),
    )
    trainer.step([[5, 6], [7, 8]], [[9, 10], [11, 12]], [1.0, -1.0])
    np.testing.assert_array_equal(trainer.model.compute_reward_score(ids), before)
    row = np.pad(np.asarray(ids), ((0, 0), (2, 0)))
    padded = trainer.model.compute_reward_score(row, attention_mask=row != 0)
    np.testing.assert_allclose(padded[:, -1], before[:, -1], rtol=1e-4, atol=1e-5)


def test_what_is_no_reward_adapter_is_refused(checkpoint, tmp_path):
    load = AutoModelForCausalLMWithValueHead.from_pretrained
    with pytest.raises(ValueError, match="`reward_adapter` must be a folder with a PEFT adapter"):
        load(str(checkpoint), peft_config=LORA, reward_adapter=str(tmp_path))
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(ValueError, match="`reward_adapter` must be None for a model without an adapter"):
        load(str(checkpoint), reward_adapter=str(tmp_path))
    with pytest.raises(ValueError, match="`compute_reward_score` needs a reward model"):
        load(str(checkpoint), peft_config=LORA).compute_reward_score([[5]])

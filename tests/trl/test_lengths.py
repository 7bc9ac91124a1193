# SPDX-License-Identifier: Apache-2.0
"""Rows beyond a model's positions: a lookup behind the end of the table is NaN, and no model was trained there."""

from __future__ import annotations

import numpy as np
import pytest

from jrl.trl import AutoModelForCausalLM, AutoModelForCausalLMWithValueHead, DPOConfig, DPOTrainer

LONG = [[5] * 129]
REFUSED = r"`tokens` must have rows of at most 128 tokens.*got 129"


@pytest.mark.parametrize("mask", [None, [[1] * 129]])
def test_a_model_does_not_read_them(checkpoint, mask):
    handle = AutoModelForCausalLM.from_pretrained(str(checkpoint))
    with pytest.raises(ValueError, match=REFUSED):
        handle(LONG, attention_mask=mask)


def test_a_reward_adapter_does_not_score_them(checkpoint):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(str(checkpoint))
    model.reward_adapter, model._reward = "given", object()  # it takes no head to count columns
    with pytest.raises(ValueError, match=REFUSED):
        model.compute_reward_score(LONG)


def test_dpo_does_not_measure_them(checkpoint, tmp_path):
    args = DPOConfig(str(tmp_path), max_steps=1, per_device_train_batch_size=1, max_length=16)
    rows = [{"prompt": "a", "chosen": " b", "rejected": " c"}]
    trainer = DPOTrainer(str(checkpoint), args=args, train_dataset=rows)
    row = {
        "input_ids": np.asarray(LONG),
        "attention_mask": np.ones((1, 129), int),
        "labels": np.asarray(LONG),
    }
    batch = {f"{side}_{name}": array for side in ("chosen", "rejected") for name, array in row.items()}
    for model in (trainer.model, None):
        with pytest.raises(ValueError, match=REFUSED):
            trainer.concatenated_forward(model, batch)
    with pytest.raises(ValueError, match=REFUSED):
        trainer.get_batch_metrics(trainer.model, batch)

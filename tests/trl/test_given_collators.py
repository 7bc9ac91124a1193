# SPDX-License-Identifier: Apache-2.0
"""A `data_collator` of the script's own decides what reward and DPO trainers learn from; no model is loaded here."""

from __future__ import annotations

import numpy as np
import pytest

from jrl.trl import (
    DPOConfig,
    DPODataCollatorWithPadding,
    DPOTrainer,
    RewardConfig,
    RewardDataCollatorWithPadding,
    RewardTrainer,
)
from tests.tiny import tiny_tokenizer

ROWS = [{"prompt": f"say {i}", "chosen": " good yes", "rejected": " bad"} for i in range(3)]


@pytest.fixture
def samples_of(monkeypatch, checkpoint, tmp_path):
    """The samples that a trainer would learn from."""
    monkeypatch.setattr("jrl.trl.models.ModelHandle.attach", lambda *_: None)

    def make(cls, collator=None, rows=ROWS, **fields):
        monkeypatch.setattr(cls, "_make_native", lambda *_: None)
        config = RewardConfig if cls is RewardTrainer else DPOConfig
        args = config(str(tmp_path), **({"max_length": 32, "gradient_checkpointing": False} | fields))
        trainer = cls(checkpoint, args=args, train_dataset=rows, data_collator=collator)
        return trainer._samples.rows, trainer

    return make


def test_trls_own_collators_change_nothing(samples_of):
    tokenizer = tiny_tokenizer()
    assert (
        samples_of(RewardTrainer, RewardDataCollatorWithPadding(tokenizer))[0] == samples_of(RewardTrainer)[0]
    )
    given = DPODataCollatorWithPadding(tokenizer, max_length=32)
    plain, rows = samples_of(DPOTrainer)[0], samples_of(DPOTrainer, given)[0]
    for row, expected in zip(rows, plain, strict=True):
        for side in ("chosen", "rejected"):
            found, wanted = getattr(row, side), getattr(expected, side)
            assert (found.prompt, found.tokens) == (wanted.prompt, wanted.tokens)


def stacked(features, pad_to=40):
    """As TRL 0.28 does it, with padding that must not be learned, and texts of their last three ids."""
    rows = [f["chosen_input_ids"][-3:] for f in features] + [f["rejected_input_ids"][-3:] for f in features]
    ids = np.array([row + [0] * (pad_to - len(row)) for row in rows])
    mask = np.array([[1] * len(row) + [0] * (pad_to - len(row)) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "margin": np.full(len(features), 0.5)}


def test_what_a_collator_of_ids_returns_is_what_a_reward_model_learns(samples_of):
    plain, (found, trainer) = samples_of(RewardTrainer)[0], samples_of(RewardTrainer, stacked)
    for row, expected in zip(found, plain, strict=True):
        assert (list(row.chosen), list(row.rejected)) == (
            list(expected.chosen[-3:]),
            list(expected.rejected[-3:]),
        )
        assert row.margin == 0.5
    assert trainer._collate(ROWS)["input_ids"].shape == (6, 40)


def completions(features):
    """As TRL 0.28 does it: prompt and completions apart; here without the last id of each."""
    found = {}
    for name, cut in (("prompt", None), ("chosen", -1), ("rejected", -1)):
        rows = [f[f"{name}_input_ids"][:cut] for f in features]
        width = max(map(len, rows))
        found[f"{name}_input_ids"] = [[0] * (width - len(row)) + row for row in rows]
        found[f"{name}_attention_mask"] = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return found


def labelled(features):
    """As TRL 0.7.1 does it, with the first id of every completion not learned."""
    found = {}
    for side in ("chosen", "rejected"):
        (feature,) = features
        prompt, rest = feature["prompt_input_ids"], feature[f"{side}_input_ids"]
        found[f"{side}_input_ids"] = np.array([[*prompt, *rest]])
        found[f"{side}_attention_mask"] = np.ones((1, len(prompt) + len(rest)), int)
        found[f"{side}_labels"] = np.array([[-100] * (len(prompt)) + rest])
        found[f"{side}_labels"][0, -1] = -100
    return found


def test_what_a_collator_returns_is_what_dpo_learns(samples_of):
    plain = samples_of(DPOTrainer)[0]
    for row, expected in zip(samples_of(DPOTrainer, completions)[0], plain, strict=True):
        assert row.chosen.prompt == expected.chosen.prompt
        assert row.chosen.tokens == expected.chosen.tokens[:-1]
        assert row.rejected.tokens == expected.rejected.tokens[:-1]
    for row, expected in zip(samples_of(DPOTrainer, labelled)[0], plain, strict=True):
        assert row.chosen.tokens == expected.chosen.tokens
        assert list(row.chosen.learned) == [True] * (len(expected.chosen.tokens) - 1) + [False]


@pytest.mark.parametrize("cls", [RewardTrainer, DPOTrainer])
def test_a_collator_without_the_columns_is_refused(cls, samples_of):
    with pytest.raises(ValueError, match=r"`data_collator` must return the columns of .*got \['ids'\]"):
        samples_of(cls, lambda features: {"ids": [[1]]})
    with pytest.raises(ValueError, match=r"`data_collator` must return the columns.*got list"):
        samples_of(cls, lambda features: features)

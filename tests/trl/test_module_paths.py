# SPDX-License-Identifier: Apache-2.0
"""TRL's module paths, small functions and collators, as its scripts import them."""

from __future__ import annotations

import copy
import importlib

import numpy as np
import pytest

import jrl.trl
from jrl.trl.module_paths import PATHS
from jrl.trl.rewards import accuracy_reward, get_soft_overlong_punishment, reasoning_accuracy_reward
from tests.tiny import tiny_tokenizer


def test_a_path_of_trl_has_the_names_of_jrl():
    from jrl.trl.extras.best_of_n_sampler import LengthSampler as other
    from jrl.trl.models.modeling_base import create_reference_model
    from jrl.trl.scripts.utils import DatasetConfig
    from jrl.trl.trainer.utils import LengthSampler

    assert LengthSampler is other is jrl.trl.LengthSampler
    assert create_reference_model is jrl.trl.create_reference_model
    assert DatasetConfig is jrl.trl.DatasetConfig
    for path in PATHS:
        module = importlib.import_module(f"jrl.trl.{path}")
        with pytest.raises(ImportError):
            importlib.import_module(f"jrl.trl.{path}.nowhere")
        with pytest.raises(AttributeError, match=rf"'jrl.trl.{path}' has no attribute 'Nothing'"):
            module.Nothing  # noqa: B018


def test_questions_about_packages():
    from jrl.trl.import_utils import is_no_such_package_available, is_numpy_available

    assert is_numpy_available() and not is_no_such_package_available()
    assert jrl.trl.is_numpy_available()


def test_the_collator_of_pairs_has_two_forms():
    from jrl.trl.trainer.dpo_trainer import DataCollatorForPreference
    from jrl.trl.trainer.reward_trainer import DataCollatorForPreference as OfRewards

    rows = [
        {"prompt_input_ids": [1, 2, 3], "chosen_input_ids": [4, 5], "rejected_input_ids": [6], "margin": 0.5},
        {
            "prompt_input_ids": [7, 8],
            "chosen_input_ids": [9],
            "rejected_input_ids": [11, 12, 13],
            "margin": 1,
        },
    ]
    batch = DataCollatorForPreference(pad_token_id=0, return_tensors="np")(rows)
    np.testing.assert_array_equal(batch["prompt_input_ids"], [[1, 2, 3], [0, 7, 8]])
    np.testing.assert_array_equal(batch["chosen_attention_mask"], [[1, 1], [1, 0]])
    np.testing.assert_array_equal(batch["rejected_input_ids"], [[6, 0, 0], [11, 12, 13]])
    batch = OfRewards(pad_token_id=0, pad_to_multiple_of=4, return_tensors="np")(rows)
    np.testing.assert_array_equal(
        batch["input_ids"], [[4, 5, 0, 0], [9, 0, 0, 0], [6, 0, 0, 0], [11, 12, 13, 0]]
    )
    np.testing.assert_array_equal(batch["margin"], [0.5, 1.0])


def test_the_collator_of_texts():
    from jrl.trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    rows = [
        {"input_ids": [1, 2, 3], "completion_mask": [0, 0, 1]},
        {"input_ids": [4, 5], "seq_lengths": [1, 1]},
    ]
    batch = DataCollatorForLanguageModeling(0, return_tensors="np")(rows)
    np.testing.assert_array_equal(batch["labels"], [[-100, -100, 3], [4, 5, -100]])
    free = DataCollatorForLanguageModeling(0, padding_free=True, pad_to_multiple_of=4, return_tensors="np")(
        rows
    )
    np.testing.assert_array_equal(free["position_ids"], [[0, 1, 2, 0, 0, 0, 0, 0]])
    np.testing.assert_array_equal(free["labels"], [[-100, -100, 3, -100, -100, -100, -100, -100]])


def test_a_collator_without_a_pad_token_says_so_only_where_it_pads():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.pad_token = None
    collator = jrl.trl.DataCollatorForCompletionOnlyLM([5], tokenizer=tokenizer, return_tensors="np")
    assert collator.torch_call([[4, 5, 6]])["labels"].tolist() == [[-100, -100, 6]]
    with pytest.raises(ValueError, match="`tokenizer` must have a pad token"):
        collator([[4, 5, 6], [4, 5]])


def test_collators_pad_on_the_tokenizers_side():
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.padding_side = "left"
    batch = jrl.trl.DataCollatorForCompletionOnlyLM([5], tokenizer=tokenizer, return_tensors="np")(
        [[4, 5, 6], [5, 6]]
    )
    np.testing.assert_array_equal(batch["attention_mask"], [[1, 1, 1], [0, 1, 1]])
    np.testing.assert_array_equal(batch["labels"], [[-100, -100, 6], [-100, -100, 6]])


def test_rewards_of_messages():
    messages = [[{"role": "assistant", "content": r"<think>\boxed{3}</think>\boxed{4}"}]]
    assert (
        accuracy_reward(messages, ["4"]) == reasoning_accuracy_reward(messages, ["4"], ["</think>"]) == [1.0]
    )
    assert get_soft_overlong_punishment(100, 20)([[1] * 80, [1] * 90, [1] * 101]) == [0.0, -0.5, -1.0]


def test_compute_accuracy_counts_a_tie_as_wrong():
    from jrl.trl.trainer import compute_accuracy

    scores = np.array([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0], [3.0, 2.0]])
    assert compute_accuracy((scores, np.zeros(4, int))) == {"accuracy": 0.5}


@pytest.mark.parity
def test_torch_comes_back_where_torch_went_in():
    torch = pytest.importorskip("torch")
    from jrl.trl.core import masked_mean, masked_whiten, pad_to_length, whiten

    values = torch.tensor([1.0, 2.0, 3.0])
    assert torch.equal(masked_mean(values, torch.tensor([0, 1, 1])), torch.tensor(2.5))
    assert pad_to_length(torch.tensor([[1, 2]]), 3, 0).tolist() == [[1, 2, 0]]
    for shift in (True, False):
        found = masked_whiten(values, torch.tensor([0, 1, 1]), shift_mean=shift)
        expected = masked_whiten(values.numpy(), np.array([0, 1, 1]), shift_mean=shift)
        np.testing.assert_allclose(found.numpy(), np.asarray(expected), rtol=1e-6)
    assert isinstance(whiten(values), torch.Tensor)

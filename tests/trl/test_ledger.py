# SPDX-License-Identifier: Apache-2.0
"""Every row B1 to B24 of TRL's known defects has its sound behaviour in `docs/migrating/from_trl.md`, and a test.

What is small is shown here. The rest is shown beside the code; `SHOWN` names the test, which must be there.
"""

from __future__ import annotations

import ast
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrl.trl
from jrl.interop import arguments
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.losses.reward_model import reward_model_loss
from jrl.trl.models import AutoModelForCausalLMWithValueHead, create_reference_model
from jrl.trl.ppo_stats import reward_stats
from tests.tiny import tiny_hf_config, tiny_policy, tiny_t5_tokenizer, tiny_tokenizer

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "migrating" / "from_trl.md"
SHOWN = {
    "B2": "tests/rollout/test_generate.py::test_lore_1_5_nothing_after_the_first_eos_counts_and_all_before_it_does",
    "B3": "tests/trl/test_ppo_parity.py::test_response_masks_leave_holes_whichever_side_is_padded",
    "B4": "tests/learners/test_ppo_options.py::test_minibatches_above_it_take_no_step",
    "B7": "tests/trl/test_ppo_step.py::test_the_folder_is_a_checkpoint_with_trls_value_head",
    "B8": "tests/trl/test_ppo_step.py::test_the_folder_is_a_checkpoint_with_trls_value_head",
    "B9": "tests/trl/test_reward.py::test_what_is_saved_is_a_reward_function",
    "B10": "tests/trl/test_environment.py::test_a_conversation_beyond_its_length_ends_truncated",
    "B11": "tests/trl/test_iterative_sft.py::test_label_texts_are_what_an_encoder_decoder_writes",
    "B13": "tests/trl/test_dpo.py::test_a_run",
    "B14": "tests/trl/test_dpo.py::test_an_adapter_has_its_base_as_reference",
    "B15": "tests/trainers/diffusion/test_train_ddpo.py::test_threads_give_the_same_numbers_in_the_same_order",
    "B16": "tests/models/test_scorer.py::test_the_misspelt_head_is_refused",
    "B18": "tests/learners/test_ppo_options.py::test_the_controller_and_the_metrics_see_the_penalty",
    "B20": "tests/trlx/test_ledger.py::test_d17_the_first_output_token_of_a_seq2seq_sample_is_an_action",
    "B21": "tests/learners/test_ppo_options.py::test_the_epochs_after_the_first_excess_are_left_out",
    "B23": "tests/learners/test_accumulate.py::test_rows_are_visited_once_and_padded_at_the_end",
    "B24": "tests/learners/test_optimizers.py::"
    "test_lore_7_4_the_rate_used_is_the_one_logged_and_counts_optimizer_steps",
}


@pytest.mark.parametrize("row", [f"B{number}" for number in range(1, 25)])
def test_every_row_is_on_the_page_and_has_its_test(row):
    assert re.search(rf"\b{row}\b", PAGE.read_text(encoding="utf-8"))
    here = f"test_{row.lower()}_" in Path(__file__).read_text(encoding="utf-8")
    assert here != (row in SHOWN)


@pytest.mark.parametrize("row", SHOWN)
def test_what_is_shown_elsewhere_is_there(row):
    path, _, name = SHOWN[row].partition("::")
    found = ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8")))
    assert name in {node.name for node in found if isinstance(node, ast.FunctionDef)}


def test_b1_every_gradient_is_clipped():
    optimizer = make_optimizer("sgd", {"lr": 1.0}, make_schedule("constant", {}), max_grad_norm=0.5)
    params = {"kernel": jnp.zeros(4)}
    state = optimizer.init(params)
    for size in (10.0, 20.0, 5.0):
        updates, state = optimizer.update({"kernel": jnp.full(4, size)}, state, params)
        assert float(optax.tree.norm(updates)) == pytest.approx(0.5)


def test_b5_the_deviation_is_of_all_scores():
    found = reward_stats([1.0, 2.0, np.array([2.0, 4.0])])  # the last is dense, and counts as its sum
    assert (found["env/reward_mean"], found["env/reward_std"]) == (
        3.0,
        pytest.approx(np.std([1, 2, 6], ddof=1)),
    )


def test_b6_shared_layers_exist_once():
    handle = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config())
    assert create_reference_model(handle, num_shared_layers=1).num_shared_layers == 1
    _, params, frozen, reference = tiny_policy(num_layers_unfrozen=1)
    assert "layers_0" in frozen and "layers_0" not in reference and "layers_1" in reference
    own = {id(leaf) for leaf in jax.tree.leaves(reference)}
    assert not own & {id(leaf) for leaf in jax.tree.leaves(params)}


def test_b12_a_margin_belongs_to_its_own_pair():
    pair = jnp.array([1.0, 0.5]), jnp.array([0.2, 0.7]), jnp.array([0.3, 0.0]), jnp.array([True, True])
    found = reward_model_loss(*pair, center_coef=0.0)
    assert float(found.loss_sum / found.weight) == pytest.approx(0.6361079, rel=1e-6)


def test_b17_the_value_head_has_no_dropout(monkeypatch):
    monkeypatch.setattr(arguments, "_told", set())  # another test may have been told
    with pytest.warns(UserWarning, match="the value head has no dropout"):
        AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config(), summary_dropout_prob=0.1)


def test_b19_bos_comes_once_and_only_where_there_is_one():
    row = {"prompt": "<eos>p", "chosen": "a", "rejected": "b"}  # EOS is BOS in this tokenizer
    for tokenizer, begins in ((tiny_tokenizer(), [1]), (tiny_t5_tokenizer(), [1])):
        ids = jrl.trl.DPODataCollatorWithPadding(tokenizer).tokenize(row)["prompt_input_ids"]
        assert ids[:1] == begins and ids.count(1) == 1
    plain = jrl.trl.DPODataCollatorWithPadding(tiny_tokenizer()).tokenize({**row, "prompt": "p"})
    assert None not in plain["prompt_input_ids"]


def test_b22_there_is_no_launcher_whose_options_could_be_lost():
    commands = ROOT / "jrl" / "cli"
    assert not [path for path in commands.glob("*.py") if "accelerate" in path.read_text(encoding="utf-8")]

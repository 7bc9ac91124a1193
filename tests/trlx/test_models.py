# SPDX-License-Identifier: Apache-2.0
"""trlX's models with heads standing alone, its heads, and the kind of array that a script works with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.trlx.models.modeling_ilql import (
    AutoModelForCausalLMWithILQLHeads,
    ILQLHeads,
    batched_index_select,
    topk_mask,
)
from jrl.trlx.models.modeling_ppo import (
    AutoModelForCausalLMWithHydraValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
)
from jrl.trlx.stores import ILQLRolloutStorage
from tests.tiny import tiny_hf_config


@pytest.fixture(autouse=True)
def _as_scripts_run():
    with jax.numpy_rank_promotion("allow"):
        yield


def test_heads_read_the_columns_that_they_are_asked_for():
    heads, rng = ILQLHeads(8, 11, two_qs=True, alpha=0.25), np.random.default_rng(0)
    heads.params = jax.tree.map(
        lambda x: x + jnp.asarray(rng.normal(size=x.shape), jnp.float32), heads.params
    )
    hidden, states, actions = (
        rng.normal(size=(2, 5, 8)),
        rng.integers(0, 5, (2, 4)),
        rng.integers(0, 5, (2, 3)),
    )
    q, targets, values = heads(hidden, states, actions)
    every_q, _, every_value = heads(hidden)
    assert len(q) == len(targets) == 2 and values.shape == (2, 4, 1)
    np.testing.assert_allclose(q[1], batched_index_select(every_q[1], actions, dim=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(values, batched_index_select(every_value, states, dim=1), rtol=1e-5, atol=1e-6)
    before = heads.params["target_q_heads"]["0"]["out"]["bias"]
    online = heads.params["q_heads"]["0"]["out"]["bias"]
    heads.sync_target_q_heads()
    after = heads.params["target_q_heads"]["0"]["out"]["bias"]
    np.testing.assert_allclose(after, 0.75 * before + 0.25 * online, rtol=1e-5, atol=1e-6)


def test_scores_outside_the_top_are_masked():
    scores = np.array([[1.0, 3.0, 2.0]])
    assert topk_mask(scores, 2).tolist() == [[-np.inf, 3, 2]]
    assert topk_mask(scores, 4) is scores


def test_what_a_class_does_not_take_is_refused():
    config = tiny_hf_config()
    with pytest.raises(ValueError, match="needs a seq2seq model, got a causal one"):
        AutoModelForSeq2SeqLMWithValueHead.from_config(config)
    with pytest.raises(ValueError, match=r"takes \[.*num_layers_unfrozen.*\], got `two_qs`"):
        AutoModelForCausalLMWithHydraValueHead.from_config(config, two_qs=True)
    with pytest.raises(ValueError, match="`peft_config` belongs to a trainer"):
        AutoModelForCausalLMWithHydraValueHead.from_config(config, peft_config={"peft_type": "LORA"})


@pytest.mark.slow
def test_a_model_answers_samples_and_comes_back_from_its_folder(tmp_path):
    ids = np.array([[3, 4, 5]])
    hydra = AutoModelForCausalLMWithHydraValueHead.from_config(tiny_hf_config(), num_layers_unfrozen=1)
    assert hydra.base_model.get_output_embeddings() == (hydra.config.n_embd, 97)
    found = hydra(ids)
    assert found.logits.shape == (1, 3, 97) and found.value.shape == (1, 3)
    np.testing.assert_array_equal(hydra.forward_hydra(ids).logits, found.logits)
    on_host = np.asarray(found.hidden_states)[0]
    np.testing.assert_array_equal(hydra.frozen_head.lm_head(on_host), found.logits[0])
    greedy = hydra.generate(ids, max_length=8)
    assert greedy.shape == (1, 8) and (greedy == hydra.generate(ids, max_length=8)).all()
    drawn = [hydra.generate(ids, do_sample=True, max_new_tokens=8).tolist() for _ in range(2)]
    assert drawn[0] != drawn[1]
    hydra.save_pretrained(tmp_path)
    again = AutoModelForCausalLMWithHydraValueHead.from_pretrained(tmp_path).state_dict()
    before = hydra.state_dict()
    assert before.keys() == again.keys() and "v_head.0.weight" in before
    for name, tensor in before.items():
        np.testing.assert_array_equal(tensor, again[name])
    ilql = AutoModelForCausalLMWithILQLHeads.from_pretrained(tmp_path, two_qs=False)
    with pytest.raises(ValueError, match="no reference model"):
        AutoModelForCausalLMWithILQLHeads(ilql.untrained).frozen_head  # noqa: B018  # it raises
    assert len(ilql(ids).qs) == 1 and ilql.generate(ids).shape == (1, 35)


@pytest.mark.slow
def test_a_row_of_a_seq2seq_model_goes_on_from_what_it_begins_with():
    model = AutoModelForSeq2SeqLMWithValueHead.from_config(tiny_hf_config("t5"))
    ids = [[3, 4, 5], [6, 7, 8]]
    whole = model.generate(ids, max_length=9, eos_token_id=96)
    assert whole.shape == (2, 9) and len({tuple(row) for row in whole.tolist()}) == 2
    found = model.generate(ids, decoder_input_ids=whole[:, :4], max_length=9, eos_token_id=96)
    np.testing.assert_array_equal(found, whole)
    with pytest.raises(ValueError, match="must have a row for each of 2 prompts"):
        model.generate(ids, decoder_input_ids=[[0]])
    with pytest.raises(ValueError, match="must be 1 everywhere"):
        model.generate(ids, decoder_input_ids=whole[:, :2], decoder_attention_mask=[[0, 1], [1, 1]])


@pytest.mark.parity
def test_torch_tensors_in_torch_tensors_out():
    import torch

    x, columns = torch.randn(2, 5, 3), torch.randint(0, 5, (2, 4))
    found = batched_index_select(x, columns)
    assert isinstance(found, torch.Tensor) and torch.equal(found[1], x[1, columns[1]])
    column = torch.randn(4, 2)
    store = ILQLRolloutStorage(column, column, column, column, column, column)
    (batch,) = store.create_loader(4)
    assert isinstance(batch.rewards, torch.Tensor) and batch.rewards.shape == (4, 2)

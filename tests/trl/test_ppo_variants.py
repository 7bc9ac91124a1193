# SPDX-License-Identifier: Apache-2.0
"""Step-by-step PPO with adapters, encoders, schedules, shared layers, other references; and a user's script."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from jrl.trl.models import (
    AutoModelForCausalLMWithValueHead,
    AutoModelForSeq2SeqLMWithValueHead,
    create_reference_model,
)
from jrl.trl.ppo import PPOConfig, PPOTrainer
from jrl.trl.ppo_data import make_loader
from tests.tiny import tiny_hf_config, tiny_lm, tiny_t5_tokenizer, tiny_tokenizer
from tests.trainers.runs import save_tiny_checkpoint

LORA = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["c_attn"]}
SIZES = dict(batch_size=4, mini_batch_size=2, ppo_epochs=1, learning_rate=1e-2)


def make(model=None, tokenizer=None, *, options=None, **arguments):
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config()) if model is None else model
    return PPOTrainer(
        PPOConfig(**(SIZES | (options or {}))), model, tokenizer=tokenizer or tiny_tokenizer(), **arguments
    )


def batch(seed=0):
    rng = np.random.default_rng(seed)
    queries = [rng.integers(2, 97, size) for size in (3, 5, 4, 6)]
    responses = [rng.integers(2, 97, size) for size in (6, 2, 5, 4)]
    return queries, responses, [1.0, -1.0, 0.5, 0.0]


def moved(before, after):
    return {
        jax.tree_util.keystr(path)
        for (path, a), b in zip(
            jax.tree_util.tree_leaves_with_path(jax.device_get(before)),
            jax.tree.leaves(jax.device_get(after)),
            strict=True,
        )
        if np.any(a != b)
    }


class TestConstruction:
    def test_arguments_of_the_wrong_kind_are_refused(self):
        config, model, tokenizer = PPOConfig(**SIZES), tiny_hf_config(), tiny_tokenizer()
        with pytest.raises(ValueError, match=r"`config` must be a jrl\.trl\.PPOConfig, got dict"):
            PPOTrainer({}, model, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="`tokenizer` must be a transformers tokenizer, got str"):
            PPOTrainer(config, model, tokenizer="gpt2")
        with pytest.raises(ValueError, match="`model` must be given"):
            PPOTrainer(config, None, tokenizer=tokenizer)
        with pytest.raises(ValueError, match="`lr_scheduler` must be a function"):
            PPOTrainer(config, model, tokenizer=tokenizer, lr_scheduler=0.1)
        with pytest.raises(ValueError, match="`lr_scheduler` must be traceable"):
            PPOTrainer(config, model, tokenizer=tokenizer, lr_scheduler=lambda step: float(step))
        with pytest.raises(ValueError, match="`lr_scheduler` must be None beside an optax"):
            PPOTrainer(
                config, model, tokenizer=tokenizer, optimizer=optax.sgd(0.1), lr_scheduler=lambda step: 0.1
            )
        with pytest.raises(ValueError, match=r"`num_shared_layers` must be in \[0, 2\)"):
            PPOTrainer(config, model, tokenizer=tokenizer, num_shared_layers=2)
        with pytest.raises(ValueError, match=r"at least `config\.batch_size` = 4 rows, got 1"):
            PPOTrainer(config, model, tokenizer=tokenizer, dataset=[{"query": "a"}])

    def test_the_loader_leaves_out_short_batches_and_unused_columns(self):
        datasets = pytest.importorskip("datasets")
        rows = [{"query": str(number), "input_ids": [number], "sentiment": 1} for number in range(10)]
        options = dict(batch_size=4, seed=0, remove_unused_columns=True)
        loader = make_loader(datasets.Dataset.from_list(rows), None, **options)
        batches = list(loader)
        assert len(batches) == len(loader) == 2
        assert set(batches[0]) == {"query", "input_ids"}
        assert [len(rows) for rows in batches[0].values()] == [4, 4]
        again = make_loader(rows, lambda rows: [row["query"] for row in rows], **options)
        # Lists keep their columns; the order is a function of the seed.
        assert next(iter(again)) == batches[0]["query"]

    def test_virtual_tokens_are_refused(self):
        adapter = {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config(), peft_config=adapter)
        with pytest.raises(ValueError, match="`peft_config` must be of LORA"):
            make(model)


@pytest.mark.slow
# The responses are random, and not the model's own.
@pytest.mark.filterwarnings("ignore:The mean KL per sequence")
class TestVariants:
    def test_an_adapter_trains_with_its_base_as_reference(self, tmp_path):
        base = save_tiny_checkpoint(tmp_path / "base")
        model = AutoModelForCausalLMWithValueHead.from_pretrained(base, peft_config=LORA, load_in_8bit=True)
        found = make(model)
        assert found.is_peft_model
        assert found.config.is_peft_model
        before = jax.device_get(found.native.params)
        for seed in range(2):
            stats = found.step(*batch(seed))
        changed = moved(before, found.native.params)
        assert changed
        assert all("v_head" in name or "lora" in name for name in changed)
        assert stats["objective/kl"] != 0
        found.save_pretrained(tmp_path / "adapter")
        assert {"adapter_config.json", "adapter_model.safetensors"} <= {
            p.name for p in (tmp_path / "adapter").iterdir()
        }
        again = make(
            AutoModelForCausalLMWithValueHead.from_pretrained(str(tmp_path / "adapter"), is_trainable=True)
        )
        jax.tree.map(
            np.testing.assert_array_equal,
            jax.device_get(again.native.params),
            jax.device_get(found.native.params),
        )

    def test_shared_layers_do_not_move(self):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config())
        found = make(model, ref_model=create_reference_model(model, num_shared_layers=1))
        frozen = jax.device_get(found.native.frozen)
        before = jax.device_get(found.native.params)
        found.step(*batch())
        assert not any("layers_0" in name for name in moved(before, found.native.params))
        assert moved(before, found.native.params)
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(found.native.frozen), frozen)

    def test_another_checkpoint_is_the_reference(self, tmp_path):
        first = save_tiny_checkpoint(tmp_path / "first")
        lm, params = tiny_lm(seed=1)
        from jrl.models.checkpoint import save_checkpoint

        save_checkpoint(tmp_path / "second", lm, params, tokenizer=tiny_tokenizer())
        model, reference = (
            AutoModelForCausalLMWithValueHead.from_pretrained(str(path))
            for path in (first, tmp_path / "second")
        )
        found = make(model, ref_model=reference)
        stats = found.step(*batch())
        assert abs(stats["objective/kl"]) > 0.1
        other = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config(vocab_size=130))
        with pytest.raises(ValueError, match="`ref_model` must have the architecture and vocabulary"):
            make(AutoModelForCausalLMWithValueHead.from_pretrained(first), ref_model=other)

    def test_an_encoder_reads_the_queries(self):
        model = AutoModelForSeq2SeqLMWithValueHead.from_pretrained(tiny_hf_config("t5"))
        found = make(model, tiny_t5_tokenizer())
        queries = batch()[0]
        rows = found.generate(queries, max_new_tokens=5, do_sample=True)
        assert all(row[0] == 0 for row in rows)
        before = jax.device_get(found.native.params)
        stats = found.step(queries, rows, batch()[2])
        assert moved(before, found.native.params)
        assert stats["tokens/responses_dist"].tolist() == [len(row) - 1 for row in rows]
        inputs = found.prepare_model_inputs(queries, rows)
        logprobs, _, _, masks = found.batched_forward_pass(found.ref_model, queries, rows, inputs)
        assert masks.sum(axis=1).tolist() == [len(row) - 1 for row in rows]
        np.testing.assert_allclose(
            np.where(masks, logprobs, 0)[:, : masks.shape[1]], stats["objective/ref_logprobs"], atol=1e-4
        )

    def test_a_schedule_counts_calls_of_step(self):
        found = make(lr_scheduler=optax.linear_schedule(1e-2, 0.0, 2), options={"ppo_epochs": 2})
        rates = [found.step(*batch(seed))["ppo/learning_rate"] for seed in range(2)]
        assert rates == pytest.approx([1e-2, 5e-3])
        assert found.history[-1]["optim/learning_rate"] == pytest.approx(5e-3)
        before = jax.device_get(found.native.params)
        found.step(*batch(3))
        assert not moved(before, found.native.params)

    def test_optax_and_clipping(self):
        found = make(optimizer=optax.sgd(1.0), options={"max_grad_norm": 1e-6})
        before = jax.device_get(found.native.params)
        for seed in range(2):  # every step is clipped, not the first alone
            found.step(*batch(seed))
        after = jax.device_get(found.native.params)
        steps = 2 * SIZES["batch_size"] / SIZES["mini_batch_size"]
        norm = np.sqrt(
            sum(
                np.sum((a - b) ** 2)
                for a, b in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
            )
        )
        assert 0 < norm <= steps * 1.01e-6

    def test_by_hand_one_minibatch_is_what_step_does(self):
        options = {"mini_batch_size": 4, "kl_penalty": "abs"}
        queries, responses, scores = batch()
        whole = make(options=options, optimizer="sgd")
        whole.step(queries, responses, scores)
        found = make(options=options, optimizer="sgd")
        inputs = found.prepare_model_inputs(queries, responses)
        logprobs, logits, values, masks = found.batched_forward_pass(
            found.model, queries, responses, inputs, return_logits=True
        )
        reference = found.batched_forward_pass(found.ref_model, queries, responses, inputs)[0]
        rewards, _ = found.compute_rewards(np.asarray(scores), logprobs, reference, masks)
        values, advantages, returns = found.compute_advantages(values, rewards, masks)
        policy, value, _ = found.loss(logprobs, values, logits, values, logprobs, masks, advantages, returns)
        stats = found.train_minibatch(
            logprobs, values, logprobs, logits, values, masks, advantages, returns, model_inputs=inputs
        )
        assert stats["loss/policy"] == pytest.approx(float(policy), abs=1e-5)
        assert found.config.vf_coef * stats["loss/value"] == pytest.approx(float(value), abs=1e-5)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
            found.native.params,
            whole.native.params,
        )

    def test_full_penalty_and_early_end(self):
        found = make(
            options={"kl_penalty": "full", "early_stopping": True, "target_kl": 1e-9, "ppo_epochs": 3}
        )
        found.step(*batch(0))
        stats = found.step(*batch(1))
        assert stats["objective/kl"] > 0
        assert len(stats["ppo/policy/ratio"]) < 3 * sum(len(row) for row in batch(1)[1])

    def test_a_value_head_is_drawn_where_asked_for(self):
        model = AutoModelForCausalLMWithValueHead.from_pretrained(
            tiny_hf_config(), v_head_init_strategy="normal", v_head_initializer_range=0.3
        )
        kernel = np.asarray(make(model).native.params["v_head"]["out"]["kernel"])
        assert 0.1 < kernel.std() < 0.6


SCRIPT = """
import sys
from datasets import Dataset
from transformers import AutoTokenizer
from jrl.trl import PPOTrainer, PPOConfig, AutoModelForCausalLMWithValueHead, create_reference_model
from jrl.trl.core import LengthSampler, set_seed

set_seed(0)
config = PPOConfig(
    model_name=sys.argv[1], learning_rate=1e-3, batch_size=4, mini_batch_size=2, ppo_epochs=2, log_with=None
)
tokenizer = AutoTokenizer.from_pretrained(config.model_name)
tokenizer.pad_token = tokenizer.eos_token
size = LengthSampler(2, 6)

def tokenize(sample):
    sample["input_ids"] = tokenizer.encode(sample["review"])[: size()]
    sample["query"] = tokenizer.decode(sample["input_ids"])
    return sample

dataset = Dataset.from_dict({"review": ["this film was great", "a dull film", "i liked it", "never again"] * 3})
dataset = dataset.map(tokenize, batched=False)

def collator(data):
    return dict((key, [d[key] for d in data]) for key in data[0])

model = AutoModelForCausalLMWithValueHead.from_pretrained(config.model_name)
ref_model = create_reference_model(model)
ppo_trainer = PPOTrainer(config, model, ref_model, tokenizer, dataset=dataset, data_collator=collator)
generation_kwargs = {
    "min_length": -1, "top_k": 0.0, "top_p": 1.0, "do_sample": True, "pad_token_id": tokenizer.eos_token_id
}
output_length_sampler = LengthSampler(4, 9)
for epoch, batch in enumerate(ppo_trainer.dataloader):
    query_tensors = batch["input_ids"]
    response_tensors = ppo_trainer.generate(
        query_tensors, return_prompt=False, length_sampler=output_length_sampler, **generation_kwargs
    )
    batch["response"] = [tokenizer.decode(r.squeeze()) for r in response_tensors]
    rewards = [float(sum(letter in "aeiou" for letter in text)) for text in batch["response"]]
    stats = ppo_trainer.step(query_tensors, response_tensors, rewards)
    ppo_trainer.log_stats(stats, batch, rewards)
    print(epoch, round(stats["objective/kl"], 3), round(stats["ppo/mean_scores"], 3))
model.save_pretrained(sys.argv[2])
tokenizer.save_pretrained(sys.argv[2])
print("steps", ppo_trainer.current_step)
"""


@pytest.mark.slow
def test_a_users_script_runs_with_other_imports(tmp_path):
    pytest.importorskip("datasets")
    base = save_tiny_checkpoint(tmp_path / "base")
    (tmp_path / "script.py").write_text(SCRIPT)
    root = Path(__file__).resolve().parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "JAX_PLATFORMS": "cpu", "HF_HUB_OFFLINE": "1"}
    found = subprocess.run(
        [sys.executable, str(tmp_path / "script.py"), base, str(tmp_path / "out")],
        capture_output=True,
        text=True,
        env=environment,
        timeout=600,
        check=False,
    )
    assert found.returncode == 0, found.stderr[-2000:]
    assert found.stdout.splitlines()[-1] == "steps 3"
    assert (tmp_path / "out" / "model.safetensors").is_file()

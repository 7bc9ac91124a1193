# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder through `jrl.train`, `load_model` and the command line: no algorithm knows that it is one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.cli import main
from tests.tiny import EOS_ID, PAD_ID, tiny_t5_tokenizer
from tests.trainers.runs import (
    PROMPTS,
    ppo_config,
    save_tiny_checkpoint,
    sft_config,
)

pytestmark = pytest.mark.slow

SEQ2SEQ = {"model_arch_type": "seq2seq"}
PAIRS = [["the cat", "sat"], ["a dog", "ran"], ["we", "wait"], ["rain", "falls"]]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """The tiny T5 on disk."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("t5"), "t5")


@pytest.fixture(scope="module")
def seen():
    """What the reward function of the run was called with."""
    return []


@pytest.fixture(scope="module")
def ppo(t5, seen, tmp_path_factory):
    """Two iterations of PPO with a hydra of one decoder layer."""

    def reward(samples, prompts, outputs, **others):
        seen.append((samples, prompts, outputs))
        # A fresh T5 hardly ever writes a vowel.
        return [sum(ord(letter) % 5 for letter in text) / 16 for text in outputs]

    config = ppo_config(t5, tmp_path_factory.mktemp("ppo"), model=SEQ2SEQ, train={"total_steps": 8})
    return jrl.train(config=config, reward_fn=reward, prompts=PROMPTS, eval_prompts=PROMPTS[:4])


@pytest.fixture(scope="module")
def written(ppo):
    """What the trained policy writes."""
    return ppo.generate(PROMPTS[:2], gen_kwargs={"do_sample": False})


@pytest.fixture(scope="module")
def sft(t5, tmp_path_factory):
    """Thirty steps of SFT on four pairs."""
    config = sft_config(
        t5, tmp_path_factory.mktemp("sft"), model=SEQ2SEQ, train={"total_steps": 30, "batch_size": 4}
    )
    return jrl.train(config=config.evolve(optimizer={"kwargs": {"lr": 1e-2}}), samples=PAIRS)


class TestPPO:
    def test_it_trains_the_upper_decoder_layer_only(self, ppo, t5):
        _, before = jrl.load_model(t5)
        assert set(ppo.params) == {"layers_1", "final_norm", "lm_head", "v_head"}
        jax.tree.map(np.testing.assert_array_equal, dict(ppo.frozen), {n: before[n] for n in ppo.frozen})
        moved = jax.tree.map(
            lambda a, b: float(jnp.abs(a - b).max()), ppo.params["layers_1"], before["layers_1"]
        )
        assert min(jax.tree.leaves(moved)) > 0

    def test_ratio_and_kl_start_where_they_must(self, ppo):
        first, second = (record for record in ppo.history if "iteration" in record)
        # 4 ulp of the largest |log-prob|, which stays below 64 nats.
        assert first["ppo/ratio_max_dev_first_minibatch"] <= 4 * 2.0**-18
        assert first["kl/per_token"] == pytest.approx(0.0, abs=1e-6) != second["kl/per_token"]

    def test_sampler_and_learner_agree(self, ppo):
        records = [record for record in ppo.history if "iteration" in record]
        assert max(record["sampler/max_difference"] for record in records) < 1e-4

    def test_the_reward_function_sees_outputs_of_their_own(self, seen):
        for samples, prompts, outputs in seen:
            assert set(prompts) <= set(PROMPTS)
            assert samples == [f"{p}<sep>{o}" for p, o in zip(prompts, outputs, strict=True)]

    def test_what_it_writes_comes_back_from_disk(self, ppo, written, tmp_path):
        model, params = jrl.load_model(ppo.save_pretrained(tmp_path / "saved", heads=True))
        assert model.lm.value_head == "mlp"
        tokenizer = tiny_t5_tokenizer()
        rows = [tokenizer(text)["input_ids"] for text in PROMPTS[:2]]
        width = max(map(len, rows))
        tokens = np.array([[PAD_ID] * (width - len(row)) + row for row in rows])
        mask = np.array([[False] * (width - len(row)) + [True] * len(row) for row in rows])
        found = model.generate(
            params, tokens, mask, jax.random.key(0), max_new_tokens=8, top_k=1, temperature=1e-3
        )
        texts = [
            tokenizer.decode([token for token in row if token not in (PAD_ID, EOS_ID)])
            for row in found.tolist()
        ]
        assert texts == written


class TestSFT:
    def test_it_learns_the_pairs(self, sft):
        losses = [record["sft/loss"] for record in sft.history if "sft/loss" in record]
        assert losses[-1] < 0.2 * losses[0]
        assert sft.generate([prompt for prompt, _ in PAIRS], gen_kwargs={"do_sample": False}) == [
            output for _, output in PAIRS
        ]

    def test_the_command_line_writes_what_it_learned(self, sft, tmp_path, capsys):
        sft.save_pretrained(tmp_path / "saved")
        flags = ["--max-new-tokens", "8", "--top-k", "1", "--prompt", "the cat", "--prompt", "rain"]
        assert main(["generate", "--model", str(tmp_path / "saved"), *flags]) == 0
        assert capsys.readouterr().out.splitlines() == ["sat", "falls"]


def test_the_architecture_must_be_the_one_announced(t5, tmp_path):
    with pytest.raises(ValueError, match="must be 'seq2seq' for a t5 model, got 'causal'"):
        jrl.train(config=sft_config(t5, tmp_path), samples=PAIRS)


def test_texts_and_dialogues_are_refused(sft):
    for sample in ("a text", ["a", "b", "c", "d"]):
        with pytest.raises(ValueError, match=r"sample 0 must be a pair \[prompt, output\]"):
            sft.add_samples([sample])


def test_logits_want_a_context(t5):
    model, params = jrl.load_model(t5)
    ids = jnp.array([[0, 5, 6]])
    context = jnp.array([[7, 8, EOS_ID]])
    assert jax.eval_shape(lambda: model.logits(params, ids, context_tokens=context)).shape == (1, 3, 97)
    with pytest.raises(ValueError, match="`context_tokens` must be given to a seq2seq model"):
        model.logits(params, ids)


def test_ppo_trains_adapters_alone(t5, tmp_path):
    lora = {"peft_type": "LORA", "task_type": "SEQ_2_SEQ_LM", "r": 2}
    config = ppo_config(
        t5,
        tmp_path,
        model=SEQ2SEQ | {"peft_config": lora, "num_layers_unfrozen": -1},
        train={"total_steps": 4},
    )
    trained = jrl.train(
        config=config,
        reward_fn=lambda outputs, **others: [
            sum(ord(letter) % 5 for letter in text) / 16 for text in outputs
        ],
        prompts=PROMPTS,
    )
    assert set(trained.params) == {"lora", "v_head"} and trained.ref_params == {}
    _, before = jrl.load_model(t5)
    jax.tree.map(np.testing.assert_array_equal, dict(trained.frozen), dict(before))
    moved = [float(jnp.abs(module["B"]).max()) for module in trained.params["lora"].values()]
    # Queries and values of two encoder layers, and twice of two decoder layers.
    assert len(moved) == 12 and min(moved) > 0

# SPDX-License-Identifier: Apache-2.0
import re
from typing import ClassVar

import jax
import numpy as np
import pytest

import jrl
from jrl.data.demonstrations.dialogue import DialogueSet
from jrl.data.demonstrations.pairs import PairSet
from jrl.data.sources.records import RecordStream
from jrl.data.tokenizer import load_tokenizer
from jrl.learners.sft import SFTConfig
from jrl.trainers.sft import SFTTrainer
from jrl.trainers.sft_data import make_samples
from tests.tiny import tiny_hf_config, tiny_t5_tokenizer, tiny_tokenizer
from tests.trainers.runs import repeatable, sft_config

SAMPLES = [
    "the cat sat",
    ["a dog", " ran off"],
    ["who", " me", "no", " you then"],
    "so it goes on and on",
    "rain",
]


def train(config):
    return jrl.train(samples=SAMPLES, eval_prompts=["the", "a"], config=config)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    return train(sft_config(checkpoint, tmp_path_factory.mktemp("whole")))


def test_loss_falls(whole):
    losses = [record["sft/loss"] for record in whole.history if "sft/loss" in record]
    assert np.mean(losses[-4:]) < 0.8 * losses[0]


@pytest.mark.slow
def test_resumed_equals_never_stopped_bit_for_bit(whole, checkpoint, tmp_path):
    train(sft_config(checkpoint, tmp_path, train={"total_steps": 3}))
    resumed = train(sft_config(checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path)}))
    for expected, got in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(expected, got)
    training = [record for record in repeatable(whole.history) if "iteration" in record]
    assert [record for record in repeatable(resumed.history) if "iteration" in record] == training


def test_generate_answers_texts(whole):
    outputs = whole.generate(["the", "a dog"], gen_kwargs={"max_new_tokens": 4})
    assert len(outputs) == 2 and all(isinstance(text, str) for text in outputs)
    assert outputs == whole.generate(["the", "a dog"], gen_kwargs={"max_new_tokens": 4})


def test_rewards_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="SFTTrainer learns from `samples`"):
        jrl.train(samples=["a"], rewards=[1.0], config=sft_config(checkpoint, tmp_path))


def test_reward_function_without_a_ppo_config_is_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="SFTTrainer learns from `samples`"):
        jrl.train(reward_fn=len, prompts=["a"], config=sft_config(checkpoint, tmp_path))


def test_nothing_to_train_on():
    with pytest.raises(ValueError, match="Nothing to train on"):
        jrl.train()


RECORDS = [
    {"prompt": "the cat", "completion": " sat"},
    {"text": "a dog ran off"},
    {"messages": [{"role": "user", "content": "who"}, {"role": "assistant", "content": "me"}]},
    {"text": "so it goes on and on"},
    {"text": "rain"},
]
TEMPLATE = "{% for m in messages %}{{ m['role'] + ' ' + m['content'] + eos_token }}{% endfor %}" + (
    "{% if add_generation_prompt %}{{ 'assistant ' }}{% endif %}"
)


@pytest.fixture(scope="module")
def packed(checkpoint, tmp_path_factory):
    """A run on packed records with every option on, and what compiled."""
    method = {
        "packing": True,
        "packing_strategy": "bfd_split",
        "neftune_noise_alpha": 5.0,
    }
    config = sft_config(checkpoint, tmp_path_factory.mktemp("packed"), method=method)
    trainer = SFTTrainer(config.evolve(train={"total_steps": 6, "eval_interval": 3}))
    trainer.tokenizer.chat_template = TEMPLATE
    trainer.add_samples(RECORDS)
    trainer.add_eval_samples(RECORDS)
    trainer.learn()
    return trainer


class TestPackedRun:
    def test_it_learns_and_compiles_once(self, packed):
        losses = [record["sft/loss"] for record in packed.history if "sft/loss" in record]
        assert len(losses) == 6 and np.isfinite(losses).all()
        assert packed.update._cache_size() == 1

    def test_what_is_watched(self, packed):
        held_out = [record for record in packed.history if "eval/sft/loss" in record]
        assert len(held_out) == 3
        # In batches of 4 rows of 32 tokens, whatever training's noise: the mean over all learned tokens.
        for name in ("eval/sft/loss", "eval/sft/entropy", "eval/sft/token_accuracy"):
            assert np.isfinite(held_out[-1][name])
        assert held_out[-1]["eval/sft/loss"] < held_out[0]["eval/sft/loss"]
        assert packed.evaluate()["eval/sft/loss"] == held_out[-1]["eval/sft/loss"]

    def test_it_says_how_full_the_rows_are(self, packed):
        text = packed.describe_data()["packing"]
        assert re.fullmatch(r"5 samples in \d rows, \d\d.\d% full, 0 tokens lost", text)


class TestSamples:
    """What becomes of what is given; nothing is trained."""

    OPTIONS: ClassVar = {"packing": False, "max_length": 32, "seed": 0, "decoder_start_token_id": None}

    def make(self, samples, tokenizer=None, method=None, **options):
        tokenizer = load_tokenizer(tiny_tokenizer()) if tokenizer is None else tokenizer
        return make_samples(samples, tokenizer, SFTConfig(**(method or {})), **self.OPTIONS | options)

    def test_old_samples_are_read_as_ever(self):
        found = self.make(SAMPLES)
        assert isinstance(found, DialogueSet)
        assert (
            found.rows == DialogueSet(SAMPLES, load_tokenizer(tiny_tokenizer()), max_length=32, seed=0).rows
        )

    def test_strategies_that_divide_cut_nothing(self):
        text = {"text": "x" * 70}
        with pytest.warns(UserWarning, match="cut on the right"):
            cut = self.make([text], packing=True, method={"packing_strategy": "bfd"})
        divided = [
            self.make([text], packing=True, method={"packing_strategy": s}) for s in ("bfd_split", "wrapped")
        ]
        assert [sum(map(sum, found.lengths)) for found in (cut, *divided)] == [32, 71, 71]
        assert (
            sum(map(sum, self.make(["x" * 70], packing=True, method={"packing_strategy": "wrapped"}).lengths))
            == 71
        )

    def test_streams(self):
        records = [{"text": letter * 6} for letter in "abcdefgh"]
        plain = self.make(RecordStream(records))
        assert plain.batch(0, 4).mask.sum() == 4 * 6
        packed = self.make(RecordStream(records), packing=True)
        batch = packed.batch(0, 2)
        assert batch.inputs.tokens.shape == (2, 32) and batch.inputs.segment_ids.max() == 4
        assert plain.sha256() != packed.sha256()

    def test_seq2seq(self):
        found = self.make([{"prompt": "a", "completion": "b"}], decoder_start_token_id=0)
        assert isinstance(found, PairSet)
        with pytest.raises(
            ValueError, match="row 0 must have the texts 'prompt' and 'completion' for a seq2seq model"
        ):
            self.make([{"text": "a"}], decoder_start_token_id=0)
        with pytest.raises(ValueError, match=r"`method.packing` must be False for a seq2seq model"):
            self.make([["a", "b"]], decoder_start_token_id=0, packing=True)

    def test_kinds_are_not_mixed(self):
        with pytest.raises(ValueError, match="row 0 is a dict, row 1 a str"):
            self.make([{"text": "a"}, "b"])
        with pytest.raises(ValueError, match="need samples that are mappings"):
            self.make(SAMPLES, method={"completion_only_loss": True})


def test_a_seq2seq_model_refuses_noise_before_its_weights_are_read(tmp_path):
    # A folder without weights.
    tiny_hf_config("t5").save_pretrained(tmp_path / "model")
    tiny_t5_tokenizer().save_pretrained(tmp_path / "model")
    options = {"model": {"model_arch_type": "seq2seq"}, "method": {"neftune_noise_alpha": 5.0}}
    with pytest.raises(ValueError, match="`neftune_noise_alpha` must be None for a seq2seq model"):
        SFTTrainer(sft_config(str(tmp_path / "model"), tmp_path, **options))


def test_rewards_do_not_fit_a_stream():
    with pytest.raises(ValueError, match="`rewards` need a list of `samples`"):
        jrl.train(samples=RecordStream([{"text": "a"}]), rewards=[1.0])


def test_a_model_folder_that_is_missing_is_not_blamed_on_the_tokenizer(tmp_path):
    config = jrl.default_sft_config().evolve(model={"model_path": str(tmp_path / "missing")})
    with pytest.raises(
        FileNotFoundError, match=r"`model\.model_path` must be a folder or .* there is no folder"
    ):
        jrl.train(samples=["a b"], config=config)

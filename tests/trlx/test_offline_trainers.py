# SPDX-License-Identifier: Apache-2.0
"""trlX's ILQL, SFT and RFT trainers, and the orchestrators of its first releases."""

import jax
import numpy as np
import pytest

import jrl
import jrl.trlx as trlx
from jrl.trlx.loader import stacked
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, sft_config

SAMPLES = [["ab", "cd"], ["xyz", "w"], ["so", "it goes"], ["we", "are one"]]
REWARDS = [0.0, 1.0, 2.0, 5.0]


def offline_config(checkpoint, run_dir, name, **method):
    """The SFT configuration under another trainer."""
    base = sft_config(checkpoint, run_dir, train={"total_steps": 2, "minibatch_size": None})
    default = {"ILQL": jrl.default_ilql_config, "RFT": jrl.default_rft_config}[name]()
    train = {**vars(base.train), "trainer": f"Accelerate{name}Trainer"}
    sections = {"model": {"model_path": checkpoint}, "tokenizer": {"tokenizer_path": checkpoint}}
    sampling = {"gen_kwargs": {"max_new_tokens": 8}}
    return default.evolve(
        **sections,
        train=train,
        scheduler={"name": "constant", "kwargs": {}},
        method={**sampling, **method},
    )


def cross_entropy(logits, labels):
    """Mean over labels that are not −100, in float64."""
    logits = np.asarray(logits, np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    learned = labels != -100
    picked = np.take_along_axis(logprobs, np.maximum(labels, 0)[..., None], axis=-1)[..., 0]
    return -picked[learned].mean()


class TestSFT:
    @pytest.fixture(scope="class")
    @staticmethod
    def trainer(checkpoint, tmp_path_factory):
        # A kernel that reads right-padded rows alone; trlX's batches are padded on either side.
        config = sft_config(checkpoint, tmp_path_factory.mktemp("sft"), model={"attn_implementation": "xla"})
        found = trlx.AccelerateSFTTrainer(config)
        found.make_experience(SAMPLES, 32)
        return found

    def test_the_loss_is_that_of_the_logits(self, trainer):
        (batch,) = trainer.create_train_dataloader()
        assert batch["attention_mask"][:, 0].min() == 0, "rows are padded on the left"
        logits = trainer.model(batch["input_ids"], batch["attention_mask"]).logits
        loss, stats = trainer.loss(batch)
        assert np.isfinite(loss)
        np.testing.assert_allclose(loss, cross_entropy(logits[:, :-1], batch["labels"][:, 1:]), rtol=1e-5)
        assert "sft/loss" in stats

    def test_labels_on_padding_are_not_learned(self, trainer):
        (batch,) = trainer.create_train_dataloader()
        mask = batch["attention_mask"].astype(bool)
        named = {"input_ids": batch["input_ids"], "attention_mask": batch["attention_mask"]}
        loss, _ = trainer.loss({**named, "labels": batch["input_ids"]})
        labels = np.where(mask[:, 1:] & mask[:, :-1], batch["input_ids"][:, 1:], -100)
        logits = trainer.model(**named).logits
        np.testing.assert_allclose(loss, cross_entropy(logits[:, :-1], labels), rtol=1e-5)

    def test_the_store_is_that_of_the_samples(self, trainer):
        assert isinstance(trainer.store, trlx.DialogStore) and len(trainer.store) == 4
        with pytest.warns(UserWarning, match="samples have more than 4 tokens"):
            trainer.make_experience(SAMPLES, 4)
        assert max(len(row["input_ids"]) for row in trainer.store.history) == 4
        trainer.make_experience(SAMPLES, 32)
        assert trainer.total_steps == 24

    def test_without_samples(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="no samples yet: `make_experience"):
            trlx.AccelerateSFTTrainer(sft_config(checkpoint, tmp_path)).learn()

    @pytest.mark.slow
    def test_pairs_of_a_seq2seq_model(self, t5_checkpoint, tmp_path):
        config = sft_config(t5_checkpoint, tmp_path, model={"model_arch_type": "seq2seq"})
        trainer = trlx.AccelerateSFTTrainer(config)
        trainer.make_experience(SAMPLES, 32)
        (batch,) = trainer.create_train_dataloader()
        rows = batch["decoder_input_ids"]
        logits = trainer.model(batch["input_ids"], batch["attention_mask"], decoder_input_ids=rows).logits
        expected = cross_entropy(logits[:, :-1], batch["labels"][:, 1:])
        np.testing.assert_allclose(trainer.loss(batch)[0], expected, rtol=1e-5)
        ids = trainer.tokenizer(["we", "ab"], return_tensors="np", padding=True)
        found = trainer.generate(**ids)
        assert (found[:, 0] == 0).all() and found.shape[1] <= 9
        assert trainer.decode(ids["input_ids"], found)[0][0].startswith("we<sep>")


class TestILQL:
    @pytest.fixture(scope="class")
    @staticmethod
    def trainer(checkpoint, tmp_path_factory):
        # A sync at every step: target heads that never moved would steer nowhere.
        sync = {"alpha": 0.5, "steps_for_target_q_sync": 1}
        config = offline_config(checkpoint, tmp_path_factory.mktemp("ilql"), "ILQL", **sync)
        found = trlx.AccelerateILQLTrainer(config)
        found.make_experience(SAMPLES, REWARDS, 32)
        (found.batch,) = found.store.create_loader(4)
        found.first_loss, found.first_stats = jax.device_get(found.loss(found.batch))
        found.learn()
        return found

    def test_the_loss_is_that_of_the_first_step(self, trainer):
        first = next(record for record in trainer.native.history if "ilql/loss" in record)
        np.testing.assert_allclose(trainer.first_loss, first["ilql/loss"], rtol=1e-5)
        np.testing.assert_allclose(trainer.first_stats["ilql/q_loss"], first["ilql/q_loss"], rtol=1e-5)

    def test_the_model_shows_its_heads(self, trainer):
        ids = trainer.batch.input_ids
        out = trainer.model(ids, trainer.batch.attention_mask)
        assert out.value.shape == ids.shape and len(out.qs) == len(out.target_qs) == 2
        assert out.qs[0].shape == (*ids.shape, 97) and not np.allclose(out.qs[0], out.target_qs[0])

    def test_every_tensor_has_its_name(self, trainer):
        found = trainer.model.state_dict()
        online, target = (found[f"ilql_heads.{kind}.1.2.bias"] for kind in ("q_heads", "target_q_heads"))
        heads = trainer.native.state.train.params["q_heads"], trainer.native.state.target_params
        for tensor, head in zip((online, target), heads, strict=True):
            np.testing.assert_array_equal(tensor, head["1"]["out"]["bias"][: len(tensor)])

    def test_generation_is_steered(self, trainer):
        ids = trainer.tokenizer(["we", "ab"], return_tensors="np")["input_ids"]
        weak, strong = (trainer.generate(ids, beta=beta, do_sample=False) for beta in (0.0, 1e6))
        assert (weak != strong).any()

    def test_counts_and_store(self, trainer):
        assert trainer.total_steps == trainer.iter_count == 2 and len(trainer.store) == 4
        assert trainer.store[0].dones[-1] == 0

    @pytest.mark.slow
    def test_a_seq2seq_store_has_the_loss_of_the_first_step(self, t5_checkpoint, tmp_path):
        config = offline_config(t5_checkpoint, tmp_path, "ILQL").evolve(model={"model_arch_type": "seq2seq"})
        trainer = trlx.AccelerateILQLTrainer(config)
        trainer.make_experience(SAMPLES, REWARDS)
        (batch,) = trainer.store.create_loader(4)
        assert isinstance(batch, trlx.ILQLSeq2SeqBatch) and (batch.decoder_input_ids[:, 0] == 0).all()
        assert (batch.actions_ixs[:, 0] == 0).all(), "the first output token is an action"
        loss = float(trainer.loss(batch)[0])
        trainer.learn()
        first = next(record for record in trainer.native.history if "ilql/loss" in record)
        np.testing.assert_allclose(loss, first["ilql/loss"], rtol=1e-5)


class TestRFT:
    @pytest.mark.slow
    def test_it_samples_scores_and_learns(self, checkpoint, tmp_path):
        config = offline_config(checkpoint, tmp_path, "RFT", n_generations_per_prompt=4)
        trainer = trlx.train(prompts=PROMPTS, reward_fn=count_vowels, config=config)
        assert type(trainer) is trlx.AccelerateRFTTrainer and trainer.iter_count == 2 == trainer.total_steps

    def test_it_needs_prompts_and_a_reward(self, checkpoint, tmp_path):
        trainer = trlx.AccelerateRFTTrainer(offline_config(checkpoint, tmp_path, "RFT"))
        with pytest.raises(ValueError, match="give it a `reward_fn`"):
            trainer.add_prompt_pipeline(trlx.PromptPipeline(["a"], 8, trainer.tokenizer))
        with pytest.raises(ValueError, match="no prompts yet"):
            trainer.learn()


class TestOrchestrators:
    @pytest.mark.slow
    def test_rollouts(self, checkpoint, tmp_path):
        model = trlx.AcceleratePPOModel(ppo_config(checkpoint, tmp_path))
        prompts = trlx.PromptPipeline(PROMPTS, model.tokenizer)
        orchestrator = trlx.PPOOrchestrator(model, prompts, count_vowels, chunk_size=4)
        assert (
            model.orch is orchestrator
            and orchestrator.chunk_size == 4
            and model.native.reward_fn.function is count_vowels
        )
        assert orchestrator.score(["aei"]) == [1.0]
        orchestrator.make_experience(8)
        assert len(model.store) == 8
        later = trlx.PPOOrchestrator(trainer=model, pipeline=prompts, reward_fn=16)
        assert later.chunk_size == 16 and model.reward_fn is count_vowels

    def test_samples(self):
        class Told:
            def make_experience(self, *arguments):
                self.arguments = arguments

        told = Told()
        trlx.OfflineOrchestrator(told, ":").make_experience(["a:b"], [1.0])
        assert told.arguments == ([["a:", "b"]], [1.0], 2048)

    def test_what_is_missing_is_named(self):
        with pytest.raises(ValueError, match="needs the trainer and a pipeline"):
            trlx.PPOOrchestrator()
        with pytest.raises(ValueError, match="needs the trainer"):
            trlx.OfflineOrchestrator()


def test_rows_of_other_lengths_are_stacked():
    assert stacked([[1], [2, 3]], fill=9, left=True).tolist() == [[9, 1], [2, 3]]

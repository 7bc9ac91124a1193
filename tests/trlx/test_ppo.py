# SPDX-License-Identifier: Apache-2.0
"""trlX's PPO trainer standing alone: pipelines in, experience, loss, generation, learning and files out."""

import dataclasses
import shutil

import jax
import numpy as np
import pytest

import jrl.trlx as trlx
from jrl.interop import arguments
from jrl.trainers.checkpoints.manifest import CheckpointError
from jrl.trainers.ppo import PPOTrainer
from jrl.trlx.loop import Position
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, repeatable


def alone(config, **others):
    """A trainer with its pipelines."""
    trainer = trlx.AcceleratePPOTrainer(config, reward_fn=count_vowels, **others)
    trainer.add_prompt_pipeline(trlx.PromptPipeline(PROMPTS, 24, trainer.tokenizer))
    trainer.add_eval_pipeline(trlx.PromptPipeline(PROMPTS[:2], 24, trainer.tokenizer))
    return trainer


def learning_config(checkpoint, run_dir):
    """Two iterations, through a kernel that reads right-padded rows alone; trlX's batches are padded on either side."""
    sections = {"train": {"total_steps": 8}, "model": {"attn_implementation": "xla"}}
    return ppo_config(checkpoint, run_dir, **sections)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("ppo") / "run"


@pytest.fixture(scope="module")
def prepared(checkpoint, run_dir):
    """Before learning, with the experience that learning begins with."""
    trainer = alone(learning_config(checkpoint, run_dir))
    trainer.make_experience(8)
    return trainer


@pytest.fixture(scope="module")
def batch(prepared):
    (found,) = prepared.store.create_loader(8, shuffle=False)
    return found


@pytest.fixture(scope="module")
def learned(prepared, batch):
    """After two iterations; what its callbacks saw stands in `told`."""
    trainer, told = prepared, {"log": [], "save": [], "eval": []}
    trainer.before = list(trainer.store.history)
    trainer.result = trainer.learn(
        log_fn=told["log"].append,
        save_fn=told["save"].append,
        eval_fn=lambda found: told["eval"].append(found.iter_count),
    )
    trainer.told = told
    return trainer


@pytest.fixture(scope="module")
def encoded(prepared):
    return prepared.tokenizer(["the cat", "we"], return_tensors="np", padding=True)


@pytest.fixture(scope="module")
def bare(checkpoint, tmp_path_factory):
    return trlx.AcceleratePPOTrainer(ppo_config(checkpoint, tmp_path_factory.mktemp("bare")))


class TestLoss:
    def test_the_first_ratio_is_one_and_rewards_are_whole(self, prepared, batch):
        loss, stats = prepared.loss(batch)
        assert abs(float(stats["ppo/ratio_mean"]) - 1) < 1e-6 and float(stats["ppo/approx_kl"]) < 1e-9
        assert np.isfinite(float(loss)) and batch.rewards.any()
        assert [len(row.rewards) for row in prepared.store] == batch.response_lengths.tolist()

    def test_more_padding_and_unknown_lengths_change_nothing(self, prepared, batch):
        pad = prepared.tokenizer.pad_token_id
        fills = {"response_tensors": pad, "logprobs": 0, "values": 0, "rewards": 0}
        wide = dataclasses.replace(
            batch,
            query_tensors=np.pad(batch.query_tensors, ((0, 0), (3, 0)), constant_values=pad),
            query_lengths=None,
            response_lengths=None,
            **{
                name: np.pad(vars(batch)[name], ((0, 0), (0, 2)), constant_values=fill)
                for name, fill in fills.items()
            },
        )
        np.testing.assert_allclose(prepared.loss(wide)[0], prepared.loss(batch)[0], rtol=1e-5)

    def test_the_side_of_the_queries_does_not_matter(self, prepared, batch, monkeypatch):
        expected, mask = prepared._sequences(batch)
        store = trlx.PPORolloutStorage(prepared.tokenizer.pad_token_id, "right")
        store.push(prepared.store.history)
        (other,) = store.create_loader(8, shuffle=False)
        assert (other.query_tensors != batch.query_tensors).any()
        monkeypatch.setattr(prepared, "_store", store)
        for lengths in (other.query_lengths, None):
            found, mask_of_other = prepared._sequences(dataclasses.replace(other, query_lengths=lengths))
            jax.tree.map(np.testing.assert_array_equal, found, expected)
            np.testing.assert_array_equal(mask_of_other, mask)

    def test_a_prompt_that_is_all_pad_token_is_read(self, prepared, batch):
        pad = prepared.tokenizer.pad_token_id
        rows = dataclasses.replace(batch, query_tensors=np.full((8, 2), pad, np.int32), query_lengths=None)
        assert prepared._sequences(rows)[0].inputs.attention_mask[:, :2].tolist() == [[False, True]] * 8
        told = dataclasses.replace(rows, query_lengths=np.full(8, 2, np.int32))
        assert prepared._sequences(told)[0].inputs.attention_mask[:, :2].all()


class TestGeneration:
    """Always two rows: every call of one length runs the program of the evaluations."""

    @pytest.mark.slow
    def test_ids_follow_the_given_columns(self, prepared, encoded, monkeypatch):
        found = prepared.generate(**encoded)
        width = encoded["input_ids"].shape[1]
        np.testing.assert_array_equal(found[:, :width], encoded["input_ids"])
        assert width < found.shape[1] <= width + 8
        assert prepared.generate_eval(**encoded, max_new_tokens=3).shape[1] <= width + 3
        monkeypatch.setattr(arguments, "_told", set())
        with pytest.warns(UserWarning, match="`generate: use_cache` has no effect"):
            assert prepared.generate(**encoded, max_length=width + 3, use_cache=True).shape[1] <= width + 3

    def test_calls_differ(self, prepared, encoded):
        assert (prepared.generate(**encoded) != prepared.generate(**encoded)).any()

    def test_samples_do_not_depend_on_the_side_of_the_padding(self, prepared):
        ids = prepared.tokenizer("rain")["input_ids"]
        left, right = ([0, 0, *ids], [0, 0, 1, 1, 1, 1]), ([*ids, 0, 0], [1, 1, 1, 1, 0, 0])
        found = [prepared.generate([row] * 2, [mask] * 2, do_sample=False) for row, mask in (left, right)]
        np.testing.assert_array_equal(found[0][:, 6:], found[1][:, 6:])

    def test_prompts_are_repeated(self, prepared):
        found = prepared.generate([[5, 6]], num_return_sequences=2)
        assert found[:, :2].tolist() == [[5, 6]] * 2 and (found[0] != found[1]).any()

    def test_unknown_arguments_and_long_prompts_are_errors(self, prepared):
        with pytest.raises(ValueError, match=r"`temprature` is not known.*Did you mean `temperature`"):
            prepared.generate([[5]], temprature=1.0)
        with pytest.raises(ValueError, match="after a prompt of 125 tokens, and the model has 128 positions"):
            prepared.generate([[5] * 125])
        with pytest.raises(ValueError, match="row 1 has no tokens"):
            prepared.generate([[5], [5]], [[1], [0]])

    def test_texts_end_at_the_first_stop(self, prepared, monkeypatch):
        monkeypatch.setattr(prepared, "stop_sequences", ["lo", "ll"])
        tokenizer = prepared.tokenizer
        prompt, output = (tokenizer(text)["input_ids"] for text in ("say ", "hello"))
        rows = [[*prompt, *output, 1], [*prompt, *output[:2], 1, 1, 1, 1]]
        found = prepared.decode([prompt, prompt], rows)
        assert found == (["say he", "say he"], ["say ", "say "], ["he", "he"])
        assert prepared.decode([prompt] * 2, rows, append_eos_token=True)[2] == ["he<eos>", "he<eos>"]
        cut = prepared.decode([prompt], [[*prompt, *output[:2]]], append_eos_token=True)
        assert cut[2] == ["he"]

    def test_sample_gives_texts(self, prepared):
        assert len(prepared.sample(["we"], 3, 2)) == 2


class TestLearning:
    def test_it_is_the_run_of_jrls_own_trainer(self, learned, checkpoint, tmp_path):
        native = PPOTrainer(learning_config(checkpoint, tmp_path), reward_fn=count_vowels)
        native.add_data(samples=None, rewards=None, prompts=PROMPTS, eval_prompts=PROMPTS[:2])
        native.learn()
        assert repeatable(native.history) == repeatable(learned.native.history)

    def test_callbacks_see_records_checkpoints_and_evaluations(self, learned):
        told = learned.told
        assert [record["step"] for record in told["log"]] == [4, 8] and "ppo/policy_loss" in told["log"][0]
        assert told["eval"] == [0, 8]
        (saved,) = told["save"]
        assert (
            saved["step"] == 8
            and saved["directory"].endswith("checkpoint_8")
            and saved["model"] is learned.model
        )

    def test_it_returns_the_last_evaluation(self, learned):
        assert learned.result == {
            name: value
            for name, value in learned.native.history[-1].items()
            if name not in ("step", "evaluation") and not name.startswith("sampling/")
        }
        assert "reward/mean" in learned.result

    def test_the_store_holds_the_last_rollouts(self, learned):
        assert len(learned.store) == 8
        assert not np.array_equal(learned.store[0].logprobs, learned.before[0].logprobs)

    def test_counts(self, learned):
        assert (learned.iter_count, learned.total_steps, learned.n_inner_epochs) == (8, 8, 2)
        assert (learned.mb_size, learned.num_mb, learned.max_length) == (2, 2, 32)
        assert learned.nth_evaluation >= 2 and learned.scheduler(3) == pytest.approx(1e-3)
        assert (
            learned.accelerator.is_main_process
            and learned.accelerator.unwrap_model(learned.model) is learned.model
        )


class TestModel:
    def test_the_reference_is_the_model_before(self, learned, checkpoint):
        ids = learned.tokenizer("the cat", return_tensors="np")["input_ids"]
        now, before = learned.model(ids), learned.model.forward_hydra(ids)
        assert now.logits.shape == (1, ids.shape[1], 97) and now.value.shape == ids.shape and now.qs is None
        first = trlx.AcceleratePPOTrainer(learned.config, reward_fn=count_vowels).model(ids)
        np.testing.assert_allclose(before.logits, first.logits, atol=1e-5)
        assert not np.allclose(now.logits, first.logits, atol=1e-3)

    def test_get_arch_loads_with_a_value_head(self, learned):
        assert "v_head" in learned.get_arch(learned.config).params


@pytest.mark.slow
class TestFiles:
    def test_a_loaded_checkpoint_is_where_the_run_was_and_goes_on(
        self, learned, checkpoint, run_dir, tmp_path
    ):
        shutil.copytree(run_dir, tmp_path / "run")
        trainer = alone(ppo_config(checkpoint, tmp_path / "run", train={"total_steps": 12}))
        trainer.make_experience(8)
        trainer.load()
        assert trainer.iter_count == 8 and len(trainer.store) == 0
        jax.tree.map(np.testing.assert_array_equal, trainer.params, learned.params)
        trainer.learn()
        steps = [record["step"] for record in trainer.native.history if "iteration" in record]
        assert steps == [4, 8, 12] and trainer.iter_count == 12

    def test_the_best_checkpoint_has_trlxs_name(self, learned):
        link = learned.native.run_dir / "best_checkpoint"
        assert link.is_symlink() and link.resolve().name == "checkpoint_8"

    def test_a_checkpoint_is_written_whenever_one_asks(self, learned, checkpoint, tmp_path):
        path = learned.save(str(tmp_path / "mine"))
        assert path.name == "checkpoint_8" and (path / "hf_model" / "model.safetensors").exists()
        other = alone(learned.config)
        other.load(str(tmp_path / "mine"))
        assert other.iter_count == 8

    def test_nothing_to_load_is_an_error(self, learned, tmp_path):
        with pytest.raises(ValueError, match="does not exist"):
            learned.load(str(tmp_path / "none"))

    def test_an_export_has_the_head_and_ignores_torchs_arguments(self, learned, tmp_path):
        with pytest.warns(UserWarning, match="`save_pretrained: safe_serialization` has no effect"):
            folder = learned.save_pretrained(str(tmp_path / "hf"), safe_serialization=True)
        assert {"config.json", "model.safetensors", "tokenizer.json"} <= {
            path.name for path in folder.iterdir()
        }
        with pytest.raises(TypeError, match="save_pretrained got an unknown argument 'colour'"):
            learned.save_pretrained(str(tmp_path), colour="red")


class TestErrors:
    def test_a_checkpoint_of_another_loop_or_without_its_rollouts(self, bare, monkeypatch):
        at = {"position": {"epochs": 1, "passes": 0, "batches": 2}}
        with pytest.raises(CheckpointError, match="got one with methods of its own in the loop"):
            bare._load_host_state(at)
        assert bare._host_state() == {}
        monkeypatch.setattr(bare, "_learns_here", lambda: True)
        with pytest.raises(CheckpointError, match="got one without methods of its own"):
            bare._load_host_state({})
        monkeypatch.setattr(bare, "position", Position(1, 0, 2))
        monkeypatch.setattr(bare.store, "history", ["strange"])
        with pytest.warns(UserWarning, match=r"it cannot hold \['str'\]"):
            found = bare._host_state()
        assert found == {**at, "num_made": 0, "rollouts": None}
        with pytest.raises(CheckpointError, match="does not hold the rollouts"):
            bare._load_host_state(found)

    def test_a_run_that_resumes_warns_of_callbacks_of_a_script(self, bare, monkeypatch):
        bare.begin_loop()
        monkeypatch.setattr(bare, "position", Position(1, 0, 2))
        bare.begin_loop()
        vars(bare)["post_epoch_callback"] = lambda: None
        try:
            with pytest.warns(
                UserWarning, match=r"in epoch 2: \['post_epoch_callback'\] are not called again"
            ):
                bare.begin_loop()
        finally:
            del vars(bare)["post_epoch_callback"]

    @pytest.mark.parametrize("mask", [None, "all"])
    def test_rows_beyond_the_table_of_positions(self, bare, mask):
        size = bare.native.lm.max_positions
        ids = np.full((1, size + 1), 3)
        mask = mask and np.ones_like(ids)
        for answer in (bare.model, bare.model.forward_hydra):
            with pytest.raises(ValueError, match=f"at most {size} tokens.*got {size + 1}: shorten"):
                answer(ids, mask)

    @pytest.mark.parametrize("act", [lambda t: t.learn(), lambda t: t.make_experience(4), lambda t: t.save()])
    def test_without_prompts(self, bare, act):
        with pytest.raises(ValueError, match="no prompts yet: `add_prompt_pipeline`"):
            act(bare)

    def test_without_reward_fn(self, bare):
        with pytest.raises(ValueError, match="give it a `reward_fn`"):
            bare.add_prompt_pipeline(trlx.PromptPipeline(["a"], 8, bare.tokenizer))


@pytest.mark.slow
def test_experience_of_further_calls_starts_from_other_prompts(checkpoint, tmp_path):
    trainer = alone(ppo_config(checkpoint, tmp_path))
    for _ in range(2):
        trainer.make_experience(8)
    starts = [tuple(row.query_tensor.tolist()) for row in trainer.store]
    assert len(starts) == 16 and starts[:8] != starts[8:]

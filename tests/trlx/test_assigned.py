# SPDX-License-Identifier: Apache-2.0
"""What a script sets on a trainer that is made: it is learned and read, or refused with the cure."""

import jax
import numpy as np
import pytest

import jrl.trlx as trlx
from jrl.trlx.trainer.accelerate_ilql_trainer import as_native
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, sft_config
from tests.trlx.test_offline_trainers import REWARDS, SAMPLES, offline_config


def own_store():
    """Two rewarded samples, one with a reward for each of its actions."""
    return trlx.ILQLRolloutStorage(
        [np.array([5, 6, 7, 8]), np.array([9, 10])],
        [np.ones(4, int), np.ones(2, int)],
        [np.array([0.5, -1.0]), np.array([2.0])],
        [np.array([1, 2, 3]), np.array([0, 1])],
        [np.array([1, 2]), np.array([0])],
        [np.array([1, 1, 0]), np.array([1, 0])],
    )


@pytest.fixture(scope="module")
def ilql(checkpoint, tmp_path_factory):
    return trlx.AccelerateILQLTrainer(offline_config(checkpoint, tmp_path_factory.mktemp("ilql"), "ILQL"))


@pytest.fixture(scope="module")
def sft(checkpoint, tmp_path_factory):
    return trlx.AccelerateSFTTrainer(sft_config(checkpoint, tmp_path_factory.mktemp("sft")))


@pytest.fixture
def ppo(checkpoint, tmp_path):
    trainer = trlx.AcceleratePPOTrainer(ppo_config(checkpoint, tmp_path), reward_fn=count_vowels)
    trainer.add_prompt_pipeline(trlx.PromptPipeline(PROMPTS, 24, trainer.tokenizer))
    return trainer


def earned(batch):
    """Ids, columns and reward of every action, without order."""
    found = zip(batch.inputs.tokens, batch.columns, batch.mask, batch.rewards, strict=True)
    return sorted(
        [
            (ids[column + 1], int(column), float(reward))
            for column, reward in zip(where[real], r[real], strict=True)
        ]
        for ids, where, real, r in found
        if real.any()
    )


class TestStore:
    def test_an_ilql_store_that_is_set_is_learned(self, ilql):
        ilql.make_experience(SAMPLES, REWARDS, 32)
        ilql.store = own_store()
        assert ilql.total_steps == 2
        (batch,) = ilql.store.create_loader(4)
        expected = as_native(batch)
        assert earned(ilql.native.samples.batch(0, 4)) == earned(jax.device_get(expected)) and earned(
            jax.device_get(expected)
        ) == [[(7, 1, 0.5), (8, 2, -1.0)], [(10, 0, 2.0)]]

    def test_what_is_pushed_is_learned_too_and_reading_changes_nothing(self, ilql):
        ilql.make_experience(SAMPLES, REWARDS, 32)
        before = ilql.native.data_sha256()
        assert len(ilql.store) == 4 and ilql.total_steps == 2 and ilql.native.data_sha256() == before
        ilql.push_to_store([own_store()[0]])
        assert ilql.total_steps == 2 and len(ilql.native.samples) == 5
        assert ilql.native.data_sha256() != before

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            (
                {"states_ixs": [np.array([0, 1, 3]), np.array([0, 1])]},
                "`states_ixs` of element 0 must be its",
            ),
            (
                {"actions_ixs": [np.array([1, 3]), np.array([0])]},
                "element 0 must have actions in rising columns",
            ),
            (
                {"dones": [np.array([0, 0, 0]), np.array([1, 0])]},
                "element 0 must have actions in rising columns",
            ),
        ],
    )
    def test_a_store_that_does_not_fit_is_named(self, ilql, change, message):
        store = own_store()
        ilql.store = trlx.ILQLRolloutStorage(**{**store._columns, **change})
        with pytest.raises(ValueError, match=message):
            ilql.learn()

    def test_an_sft_store_is_learned_as_its_labels_say(self, sft):
        messages = [trlx.DialogMessage(False, (5, 6)), trlx.DialogMessage(True, (7, 8))]
        sft.store = trlx.DialogStore([messages], sft.tokenizer)
        sft._require_data()
        batch = sft.native.samples.batch(0, 4)
        assert batch.inputs.tokens[0, :4].tolist() == [5, 6, 7, 8]
        assert np.flatnonzero(batch.mask[0]).tolist() == [1, 2] and batch.mask.sum() == 2
        sft.store = trlx.PromptPipeline(["abc"], 8, sft.tokenizer)
        sft._require_data()
        assert sft.native.samples.batch(0, 4).mask.sum() == 2
        sft.store = trlx.DialogStore([messages], sft.tokenizer)
        sft.store.history[0]["labels"] = np.array([-100, -100, 9, 8])
        with pytest.raises(ValueError, match="labels of element 0 must be its ids, or -100"):
            sft.learn()

    def test_a_store_of_ones_own_loader_is_refused(self, ilql, sft, ppo):
        class Mine(trlx.PPORolloutStorage):
            def create_loader(self, batch_size, shuffle):
                raise NotImplementedError

        for trainer in (ilql, sft, ppo):
            trainer.store = Mine(0)
            with pytest.raises(TypeError, match="Mine must not override `create_loader`"):
                trainer.learn()

    def test_rollouts_that_ppo_would_throw_away_are_refused(self, ppo):
        row = trlx.PPORLElement(np.array([5]), np.array([6, 7]), *[np.zeros(2, np.float32)] * 3)
        ppo.push_to_store([row])
        with pytest.raises(
            ValueError, match=r"rollouts that this run would not learn.*`make_experience\(8\)`"
        ):
            ppo.learn()
        ppo.store.clear_history()
        ppo._refuse_other_rollouts()
        ppo.store = trlx.PPORolloutStorage(0)
        ppo.store.push([row])
        with pytest.raises(ValueError, match="rollouts that this run would not learn"):
            ppo.learn()

    @pytest.mark.slow
    def test_further_experience_is_refused_and_the_first_is_not(self, ppo):
        ppo.make_experience(8)
        ppo._refuse_other_rollouts()
        assert len(ppo.store) == 8
        ppo._refuse_other_rollouts()
        ppo.make_experience(8)
        with pytest.raises(ValueError, match="rollouts that this run would not learn"):
            ppo.learn()

    @pytest.mark.slow
    def test_the_first_step_has_the_loss_of_the_store_that_was_set(self, checkpoint, tmp_path):
        trainer = trlx.AccelerateILQLTrainer(offline_config(checkpoint, tmp_path, "ILQL"))
        trainer.store = own_store()
        (batch,) = trainer.store.create_loader(2)
        loss = float(trainer.loss(batch)[0])
        trainer.learn()
        first = next(record for record in trainer.native.history if "ilql/loss" in record)
        np.testing.assert_allclose(loss, first["ilql/loss"], rtol=1e-5)


_EVERY = {
    "model": "Set `model`",
    "opt": "Set `optimizer`",
    "scheduler": "Set `scheduler`",
    "tokenizer": "Set `tokenizer`",
    "config": "constructor",
    "logit_mask": "constructor",
    "generate_kwargs": "Set `method.gen_kwargs`",
    "evaluate": "`metric_fn`",
    "eval_dataloader": "add_eval_pipeline",
    "mb_size": "minibatch_size",
    "n_inner_epochs": "ppo_epochs",
    "total_steps": "train.total_steps",
}


class TestAttributes:
    @pytest.mark.parametrize("name", _EVERY)
    def test_one_that_nothing_reads_is_refused(self, sft, name):
        with pytest.raises(AttributeError, match=rf"`{name}` must not be set on a trainer.*{_EVERY[name]}"):
            setattr(sft, name, lambda *_: None)

    @pytest.mark.parametrize(
        "name", ["ref_model", "kl_ctl", "running_moments", "generate", "prompt_iterator"]
    )
    def test_ppos_are_refused(self, ppo, name):
        with pytest.raises(AttributeError, match=f"AcceleratePPOTrainer: `{name}` must not be set"):
            setattr(ppo, name, None)

    def test_rfts_rounds_are_refused(self, checkpoint, tmp_path):
        trainer = trlx.AccelerateRFTTrainer(offline_config(checkpoint, tmp_path, "RFT"))
        with pytest.raises(AttributeError, match=r"`store` must not be set.*Rounds are sampled"):
            trainer.store = own_store()

    def test_functions_stops_and_prompts_that_are_set_are_read(self, ppo):
        pipeline = trlx.PromptPipeline(PROMPTS[:3], 24, ppo.tokenizer)
        told = []

        def other(outputs, **others):
            told.append(outputs)
            return [float(len(one)) for one in outputs]

        ppo.reward_fn = ppo.metric_fn = other
        ppo.stop_sequences, ppo.eval_pipeline = ["e"], pipeline
        ppo._hand_over()
        native = ppo.native
        assert native.reward_fn.function is native.metric_fn.function is other
        assert native.stop_sequences == ("e",) and len(native.eval_prompts) == 3

    def test_sampling_options_are_read_only(self, ppo):
        with pytest.raises(TypeError, match="does not support item assignment"):
            ppo.generate_kwargs["temperature"] = 0.5

    def test_a_loss_that_is_set_is_learned(self, sft, monkeypatch):
        assert not sft._learns_here()
        monkeypatch.setattr(sft, "loss", lambda batch: (0.0, {}), raising=True)
        assert sft._learns_here()

    def test_a_field_that_was_compiled_is_refused(self, checkpoint, tmp_path):
        trainer = trlx.AccelerateSFTTrainer(sft_config(checkpoint, tmp_path))
        trainer.make_experience(SAMPLES, 32)
        trainer.config.train.total_steps = 1
        trainer.config.train.batch_size = 2
        with pytest.raises(ValueError, match=r"`train.batch_size` was set to 2 on a trainer that is made"):
            trainer.learn()

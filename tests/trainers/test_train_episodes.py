# SPDX-License-Identifier: Apache-2.0
"""Recorded episodes through `jrl.train`: ILQL, Monte Carlo returns, cloning and filtered cloning."""

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from tests.trainers.runs import EPISODES, episodes_config, ilql_config, repeatable, sft_config


def train(config, samples=EPISODES, **options):
    return jrl.train(samples=samples, eval_prompts=["a?"], config=config, **options)


def training(trainer):
    return [record for record in repeatable(trainer.history) if "iteration" in record]


@pytest.fixture(scope="module")
def learned(checkpoint, tmp_path_factory):
    """24 steps of ILQL on turns that stand alone."""
    lr = {"kwargs": {"lr": 1e-2}}
    return train(episodes_config(checkpoint, tmp_path_factory.mktemp("ilql"), optimizer=lr))


def clone(checkpoint, folder, **method):
    """A trainer of outputs alone, that has not trained."""
    config = sft_config(checkpoint, folder, method=method)
    return prepare(samples=EPISODES, eval_prompts=["a?"], config=config)


class TestILQL:
    def test_it_learns_and_compiles_once(self, learned):
        records = training(learned)
        assert len(records) == 24 and learned.update._cache_size() == 1
        assert np.mean([one["ilql/loss"] for one in records[-4:]]) < 0.8 * records[0]["ilql/loss"]

    def test_every_turn_is_a_row_and_every_token_of_outputs_an_action(self, learned):
        assert learned.description()["samples"] == "8"
        assert sum(one["ilql/tokens"] for one in training(learned)[:2]) == 16.0

    def test_rewards_are_scaled_and_not_standardised(self, learned):
        """Fresh heads say 0, so the first loss of Q is the mean over actions of 2·(r/2)²."""
        first = training(learned)[0]
        batch = learned.samples.batch(0, 4)
        assert set(np.unique(batch.rewards)) <= {-0.5, 0.0, 0.25, 0.5, 1.0}
        assert first["ilql/q_loss"] == pytest.approx(
            2 * np.square(batch.rewards[batch.mask]).mean(), rel=1e-5
        )

    @pytest.mark.slow
    def test_monte_carlo_regresses_on_what_the_episode_returned(self, checkpoint, tmp_path):
        method = {"target": "mc", "gamma": 0.5}
        config = episodes_config(checkpoint, tmp_path, method=method, train={"total_steps": 1})
        trainer = train(config)
        batch = trainer.samples.batch(0, 4)
        # Two actions a turn, the second with the reward.
        last = batch.rewards[:, 1] + 0.5 * batch.returns_after
        returns = np.stack([0.5 * last, last], axis=1)
        assert training(trainer)[0]["ilql/q_loss"] == pytest.approx(2 * np.square(returns).mean(), rel=1e-5)
        assert np.any(batch.returns_after)

    @pytest.mark.slow
    def test_resumed_equals_never_stopped_bit_for_bit(self, learned, checkpoint, tmp_path):
        lr = {"kwargs": {"lr": 1e-2}}
        train(episodes_config(checkpoint, tmp_path, optimizer=lr, train={"total_steps": 10}))
        resume = {"resume_from_checkpoint": str(tmp_path)}
        resumed = train(episodes_config(checkpoint, tmp_path, optimizer=lr, train=resume))
        jax.tree.map(np.testing.assert_array_equal, resumed.state, learned.state)
        assert training(resumed) == training(learned)

    @pytest.mark.slow
    def test_resuming_with_another_end_is_refused(self, checkpoint, tmp_path):
        train(episodes_config(checkpoint, tmp_path, train={"total_steps": 2}))
        config = episodes_config(checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path)})
        ended = [episode | {"done": True} for episode in EPISODES]
        with pytest.raises(RuntimeError, match="was trained with others: `rewards`"):
            train(config, ended)


class TestCloning:
    def test_outputs_are_learned_and_nothing_else(self, checkpoint, tmp_path):
        trainer = clone(checkpoint, tmp_path)
        assert len(trainer.samples) == 4  # each episode fits into a row
        learned = {
            trainer.tokenizer.decode([t for t, flag in zip(*row, strict=True) if flag])
            for row in trainer.samples.rows
        }
        assert learned == {"upto", "nono", "so", "goupto"}

    @pytest.mark.slow
    def test_the_loss_falls(self, checkpoint, tmp_path):
        records = training(train(sft_config(checkpoint, tmp_path, optimizer={"kwargs": {"lr": 1e-2}})))
        assert records[0]["sft/tokens"] == 16.0 and records[-1]["sft/loss"] < 0.5 * records[0]["sft/loss"]

    def test_filtered_cloning_learns_the_best_episodes(self, checkpoint, tmp_path):
        trainer = clone(checkpoint, tmp_path, best_share=0.5, context_turns=0)
        decode = trainer.tokenizer.decode
        assert [decode(row.tokens) for row in trainer.samples.rows] == [
            "a?up",
            "b?to",
            "c?go",
            "a?up",
            "b?to",
        ]

    def test_rows_can_be_packed(self, checkpoint, tmp_path):
        trainer = clone(checkpoint, tmp_path, packing=True, context_turns=0)
        assert trainer.samples.num_samples == 8 and len(trainer.samples) < 8


class TestRefusals:
    @pytest.mark.parametrize(
        ("field", "value"), [("context_turns", 1), ("keep_prompt", True), ("reward_scale", 0.5)]
    )
    def test_options_of_episodes_do_nothing_for_whole_samples(self, field, value, checkpoint, tmp_path):
        config = ilql_config(checkpoint, tmp_path, method={field: value})
        with pytest.raises(ValueError, match=f"`method.{field}` is for samples that are episodes"):
            prepare(samples=["ab", "cd"], rewards=[0, 1], config=config)

    @pytest.mark.parametrize(
        ("field", "value"), [("context_turns", 1), ("keep_prompt", True), ("best_share", 0.5)]
    )
    def test_nor_do_those_of_cloning(self, field, value, checkpoint, tmp_path):
        config = sft_config(checkpoint, tmp_path, method={field: value})
        with pytest.raises(ValueError, match=f"`method.{field}` is for samples that are episodes"):
            prepare(samples=["ab", "cd"], config=config)

    def test_rewards_beside_episodes(self, checkpoint, tmp_path):
        with pytest.raises(ValueError, match="the turns of episodes bring their own"):
            train(episodes_config(checkpoint, tmp_path), rewards=[0.0] * len(EPISODES))

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("target", "sarsa", r"`method.target` must be one of \('td', 'mc'\)"),
            ("reward_scale", 0.0, "`method.reward_scale` must be positive"),
            ("context_turns", -1, "`method.context_turns` must be at least 0, or None"),
        ],
    )
    def test_values_out_of_range(self, field, value, message):
        with pytest.raises(ValueError, match=message):
            jrl.ILQLConfig(**{field: value})

    @pytest.mark.parametrize("share", [0.0, 1.5])
    def test_a_share_out_of_range(self, share):
        with pytest.raises(ValueError, match=r"`method.best_share` must be in \(0, 1\]"):
            jrl.SFTConfig(best_share=share)

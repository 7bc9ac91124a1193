# SPDX-License-Identifier: Apache-2.0
"""ILQL through `jrl.train`: what trains, how it samples, what is written, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

import jrl
from jrl.api import prepare
from jrl.models.checkpoint import load_checkpoint
from jrl.trainers.config.gen_kwargs import parse_gen_kwargs
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_tokenizer
from tests.trainers.runs import (
    REWARDED,
    ilql_config,
    ppo_config,
    repeatable,
    save_tiny_checkpoint,
    sft_config,
)

SAMPLES, REWARDS = [sample for sample, _ in REWARDED], [reward for _, reward in REWARDED]
BETAS = [0.0, 1.0, 100.0]
HEADS = {"v_head", "q_heads"}
SPECIAL = dict(eos_token_id=EOS_ID, pad_token_id=PAD_ID)


def train(config, samples=SAMPLES, rewards=REWARDS, **options):
    return jrl.train(samples=samples, rewards=rewards, eval_prompts=["the", "a"], config=config, **options)


def prepared(config, samples=SAMPLES, rewards=REWARDS):
    """A trainer with model and data, that has not trained."""
    return prepare(samples=samples, rewards=rewards, eval_prompts=["the"], config=config)


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """24 steps of the upper layer and the heads, evaluated at three betas."""
    config = ilql_config(
        checkpoint,
        tmp_path_factory.mktemp("whole"),
        model={"num_layers_unfrozen": 1},
        optimizer={"kwargs": {"lr": 1e-2}},
        train={"eval_interval": 12},
        method={"gen_kwargs": {"beta": BETAS}},
    )
    return train(config, metric_fn=lambda outputs: {"length": [float(len(text)) for text in outputs]})


@pytest.fixture(scope="module")
def saved(whole, tmp_path_factory):
    """What `save_pretrained` wrote of it."""
    return whole.save_pretrained(tmp_path_factory.mktemp("saved") / "model", heads=True)


def training(trainer):
    return [record for record in trainer.history if "iteration" in record]


class TestRun:
    def test_losses_fall(self, whole):
        records = training(whole)
        assert len(records) == 24
        for name in ("ilql/loss", "ilql/cql_loss", "ilql/awac_loss"):
            assert np.mean([record[name] for record in records[-4:]]) < 0.8 * records[0][name], name
        assert {"ilql/value_loss", "ilql/value_mean", "ilql/q_mean", "ilql/tokens"} <= records[0].keys()
        assert records[0]["perf/tokens_per_second"] > 0

    def test_fresh_heads_say_zero_and_target_heads_move_in_their_turn_only(self, whole):
        records = training(whole)
        assert (records[0]["ilql/value_mean"], records[0]["ilql/q_mean"]) == (0.0, 0.0)
        means = [record["ilql/target_q_mean"] for record in records]
        # Targets are those from before the step: they are the fresh ones in the steps 1, 2 and 3.
        assert means[:3] == [0.0, 0.0, 0.0] and all(mean != 0 for mean in means[3:])

    def test_every_evaluation_sweeps_beta(self, whole):
        evaluations = [record for record in whole.history if "evaluation" in record]
        assert [record["step"] for record in evaluations] == [0, 12, 24]
        for beta in BETAS:
            assert all(f"metrics/length@beta={beta}" in record for record in evaluations)

    def test_one_program_samples_at_every_beta(self, whole):
        assert len(whole.sampler._programs) == 1
        (program,) = whole.sampler._programs.values()
        assert program._cache_size() == 1

    def test_target_heads_steer(self, whole):
        # As in the run, so that nothing is compiled anew.
        greedy, strong = (whole.generate(["the", "a"], gen_kwargs={"beta": beta}) for beta in (0.0, 100.0))
        assert greedy != strong == whole.generate(["the", "a"], gen_kwargs={"beta": 100.0})
        differences = jax.tree.map(
            lambda one, two: float(jnp.abs(one - two).max()),
            whole.params["q_heads"],
            whole.state.target_params,
        )
        assert max(jax.tree.leaves(differences)) > 0

    def test_the_other_heads_are_read_neither_in_evaluations_nor_by_generate(self, whole, monkeypatch):
        def sampled():
            return whole.generate(["the", "a"], gen_kwargs={"beta": 100.0}), whole.run_evaluation(0).rows

        state, (texts, rows) = whole.state, sampled()
        opposite = {
            **state.train.params,
            "q_heads": jax.tree.map(jnp.negative, state.train.params["q_heads"]),
        }
        monkeypatch.setattr(whole, "state", state.replace(train=state.train.replace(params=opposite)))
        assert sampled() == (texts, rows)
        targets = jax.tree.map(jnp.negative, state.target_params)
        monkeypatch.setattr(whole, "state", state.replace(target_params=targets))
        other_texts, other_rows = sampled()
        assert other_texts != texts and other_rows != rows

    def test_one_program_learns(self, whole):
        assert whole.update._cache_size() == 1

    def test_the_trunk_is_frozen(self, whole, checkpoint):
        assert whole.params.keys() == {"layers_1", "final_norm", *HEADS}
        before = load_checkpoint(checkpoint).params
        jax.tree.map(np.testing.assert_array_equal, dict(whole.frozen), {n: before[n] for n in whole.frozen})
        moved = jax.tree.map(
            lambda one, two: float(jnp.abs(one - two).max()), whole.params["layers_1"], before["layers_1"]
        )
        assert min(jax.tree.leaves(moved)) > 0

    def test_description_counts_samples(self, whole):
        assert whole.description()["samples"] == "5"


class TestSavedModel:
    def test_heads_lie_under_the_names_of_trlx(self, saved):
        names = {name for name in load_file(saved / "model.safetensors") if name.startswith("ilql_heads.")}
        layers = [f"{layer}.{leaf}" for layer in (0, 2) for leaf in ("weight", "bias")]
        kinds = ["v_head", *(f"{kind}.{index}" for kind in ("q_heads", "target_q_heads") for index in (0, 1))]
        assert names == {f"ilql_heads.{kind}.{layer}" for kind in kinds for layer in layers}

    def test_it_comes_back_with_equal_values(self, whole, saved):
        loaded = load_checkpoint(saved)
        assert (loaded.model.value_head, loaded.model.num_q_heads) == ("mlp", 2)
        assert loaded.params.keys() == {*whole.params, *whole.frozen, "target_q_heads"}
        held = {name: loaded.params[name] for name in whole.exported_params}
        jax.tree.map(np.testing.assert_array_equal, held, dict(whole.exported_params))

    def test_a_run_continues_from_its_heads_and_targets(self, whole, saved, tmp_path):
        again = prepared(ilql_config(str(saved), tmp_path, model={"num_layers_unfrozen": 1}))
        jax.tree.map(np.testing.assert_array_equal, again.params, dict(whole.params))
        jax.tree.map(np.testing.assert_array_equal, again.state.target_params, whole.state.target_params)

    def test_another_number_of_q_heads_is_refused(self, saved, tmp_path):
        config = ilql_config(str(saved), tmp_path, method={"two_qs": False})
        with pytest.raises(
            ValueError, match=r"asks for 1 Q head\(s\), but .* holds 2: set `method.two_qs: true`"
        ):
            prepared(config)

    def test_other_algorithms_leave_its_heads_behind(self, saved, tmp_path):
        sft = prepare(samples=["ab"], config=sft_config(str(saved), tmp_path / "sft"))
        assert not HEADS & sft.params.keys() and sft.lm.num_q_heads == 0
        config = ppo_config(str(saved), tmp_path / "ppo", model={"num_layers_unfrozen": -1})
        ppo = prepare(reward_fn=len, prompts=["a"], config=config)
        assert "v_head" in ppo.params and not {"q_heads", "target_q_heads"} & ppo.params.keys()
        # A value of other rewards is no start: the critic is fresh.
        assert not ppo.params["v_head"]["out"]["kernel"].any()

    @pytest.mark.slow
    def test_the_notebook_samples_with_beta(self, whole, saved):
        model, params = jrl.load_model(saved)
        tokens = jnp.asarray([tiny_tokenizer()("the")["input_ids"]])
        mask = jnp.ones(tokens.shape, bool)

        def sample(**options):
            options |= {"max_new_tokens": 8, "eos_token_id": ()}
            return model.generate(params, tokens, mask, jax.random.key(0), **options)

        steered = sample(beta=100.0)
        assert not np.array_equal(sample(beta=0.0), steered)
        np.testing.assert_array_equal(sample(), sample(beta=0.0))
        # With other target heads the result is another: it is those that are read.
        params = {**params, "target_q_heads": jax.tree.map(jnp.negative, params["target_q_heads"])}
        assert not np.array_equal(sample(beta=100.0), steered)

    def test_beta_without_q_heads_is_refused(self, checkpoint):
        model, params = jrl.load_model(checkpoint)
        tokens = jnp.ones((1, 2), int)
        with pytest.raises(ValueError, match="`beta` weighs Q − V, and `params` hold no Q heads"):
            model.generate(params, tokens, tokens > 0, jax.random.key(0), max_new_tokens=2, beta=1.0)


class TestBeta:
    def test_it_is_1_where_nothing_is_said(self):
        settings, sweep = parse_gen_kwargs({"max_new_tokens": 4}, **SPECIAL, steers=True)
        assert (settings.beta, sweep) == (1.0, None) and float(settings.knobs.beta) == 1.0

    def test_null_reads_no_heads(self):
        settings, _ = parse_gen_kwargs({"max_new_tokens": 4, "beta": None}, **SPECIAL, steers=True)
        assert settings.beta is None and settings.knobs.beta is None

    @pytest.mark.parametrize("beta", [-1.0, float("nan"), float("inf")])
    def test_values_out_of_range_are_named(self, beta):
        with pytest.raises(ValueError, match=r"`gen_kwargs\.beta` must be at least 0 and finite"):
            parse_gen_kwargs({"max_new_tokens": 4, "beta": beta}, **SPECIAL, steers=True)

    def test_other_algorithms_refuse_it(self, checkpoint, tmp_path):
        config = sft_config(checkpoint, tmp_path, method={"gen_kwargs": {"beta": [1.0, 2.0]}})
        with pytest.raises(
            ValueError, match=r"gen_kwargs: `beta` steers by Q heads, which ILQL alone trains"
        ):
            prepare(samples=["a"], config=config)


class TestHeads:
    @pytest.mark.slow
    def test_an_adapter_trains_with_its_heads_and_its_folder_continues(self, checkpoint, tmp_path):
        lora = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": 2}
        config = ilql_config(
            checkpoint,
            tmp_path / "run",
            model={"peft_config": lora},
            train={"total_steps": 3},
            optimizer={"kwargs": {"lr": 1e-2}},
        )
        trained = train(config)
        assert trained.params.keys() == {"lora", *HEADS}
        folder = trained.save_pretrained(tmp_path / "adapter", heads=True)
        again = prepared(ilql_config(str(folder), tmp_path / "again"))
        jax.tree.map(np.testing.assert_array_equal, dict(again.params), dict(trained.params))
        jax.tree.map(np.testing.assert_array_equal, again.state.target_params, trained.state.target_params)

    def test_one_q_head(self, checkpoint, tmp_path):
        trained = prepared(ilql_config(checkpoint, tmp_path, method={"two_qs": False}))
        assert list(trained.params["q_heads"]) == ["0"] == list(trained.state.target_params)


class TestMask:
    @pytest.mark.slow
    def test_a_forbidden_transition_is_never_taken(self, checkpoint, tmp_path):
        # After any token only the next id may come: a chain, whatever the model thinks of it.
        forbidden = np.roll(np.eye(VOCAB_SIZE), 1, axis=1) == 0
        config = ilql_config(checkpoint, tmp_path, train={"trainer_kwargs": {"logit_mask": forbidden}})
        outputs = prepared(config).generate(["a", "n"], gen_kwargs={"beta": 5.0})
        assert outputs == ["bcdefghi", "opqrstuv"]


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """The tiny T5 after thirty steps on one prompt with a good answer and a more likely bad one."""
    checkpoint = save_tiny_checkpoint(tmp_path_factory.mktemp("t5") / "model", "t5")
    config = ilql_config(
        checkpoint,
        tmp_path_factory.mktemp("run"),
        model={"model_arch_type": "seq2seq"},
        optimizer={"kwargs": {"lr": 1e-2}},
        train={"total_steps": 30, "batch_size": 8},
        method={"gen_kwargs": {"max_new_tokens": 4, "do_sample": False}, "alpha": 1.0},
    )
    pairs = [["go", letter] for letter in "xyyyxyyy"]
    return train(config, samples=pairs, rewards=[1.0 if pair[1] == "x" else -1.0 for pair in pairs])


@pytest.mark.slow
class TestSeq2Seq:
    def test_the_first_output_token_is_learned_and_steered(self, t5):
        assert training(t5)[0]["ilql/tokens"] == 16  # eight answers and their EOS
        assert t5.generate(["go"], gen_kwargs={"beta": 0.0}) == ["y"]
        assert t5.generate(["go"], gen_kwargs={"beta": 100.0}) == ["x"]

    def test_evaluation_starts_from_the_samples_prompts(self, t5):
        trainer = prepare(samples=[["a", "b"], ["c", "d"]], rewards=[0, 1], config=t5.config)
        assert len(trainer.eval_prompts) == 2

    def test_a_longer_dialogue_is_refused(self, t5):
        with pytest.raises(ValueError, match=r"sample 0 must be a pair \[prompt, output\] .* seq2seq"):
            t5.add_samples([["a", "b", "c", "d"]], [1.0])

    def test_it_is_written_and_read(self, t5, tmp_path):
        loaded = load_checkpoint(t5.save_pretrained(tmp_path / "saved", heads=True))
        jax.tree.map(np.testing.assert_array_equal, loaded.params, dict(t5.exported_params))


@pytest.mark.slow
def test_resumed_equals_never_stopped_bit_for_bit(checkpoint, tmp_path):
    stopped, whole = tmp_path / "stopped", tmp_path / "whole"
    train(ilql_config(checkpoint, stopped, train={"total_steps": 10}))
    resumed = train(ilql_config(checkpoint, stopped, train={"resume_from_checkpoint": str(stopped)}))
    straight = train(ilql_config(checkpoint, whole))
    jax.tree.map(np.testing.assert_array_equal, resumed.state, straight.state)
    records = [
        [record for record in repeatable(run.history) if "iteration" in record] for run in (resumed, straight)
    ]
    assert records[0] == records[1]


@pytest.mark.slow
def test_resuming_with_other_rewards_is_refused(checkpoint, tmp_path):
    train(ilql_config(checkpoint, tmp_path, train={"total_steps": 3}))
    config = ilql_config(checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path)})
    with pytest.raises(RuntimeError, match="was trained with others: `rewards`"):
        train(config, rewards=[2 * reward for reward in REWARDS])


@pytest.mark.parametrize(
    "options",
    [
        dict(samples=["a"]),
        dict(reward_fn=len, prompts=["a"]),
        dict(samples=["a"], rewards=[1], prompts=["a"]),
    ],
)
def test_both_samples_and_rewards_are_needed(options, checkpoint, tmp_path):
    with pytest.raises(ValueError, match="ILQLTrainer learns from `samples` and `rewards`"):
        jrl.train(config=ilql_config(checkpoint, tmp_path), **options)

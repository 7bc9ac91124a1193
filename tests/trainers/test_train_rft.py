# SPDX-License-Identifier: Apache-2.0
import itertools
import json
import math
from dataclasses import replace
from types import SimpleNamespace

import jax
import numpy as np
import pytest

import jrl
from jrl.api import prepare
from jrl.data.selection import KeptSamples
from jrl.rollout.rewards import RewardError
from jrl.trainers.loop.hooks import Hooks
from jrl.trainers.loop.run import Run
from jrl.trainers.loop.stopwatch import Stopwatch
from tests.tiny import EOS_ID, tiny_tokenizer
from tests.trainers.runs import (
    PROMPTS,
    count_vowels,
    repeatable,
    rft_config,
    save_tiny_checkpoint,
)


def train(config, **arguments):
    defaults = dict(reward_fn=count_vowels, prompts=PROMPTS, eval_prompts=PROMPTS[:4])
    return jrl.train(config=config, **(defaults | arguments))


def prepared(config, **arguments):
    """A trainer with its data, before `learn`."""
    return prepare(config=config, **(dict(reward_fn=count_vowels, prompts=PROMPTS) | arguments))


def training(trainer):
    return [record for record in trainer.history if "iteration" in record]


def passes(trainer):
    """The records with which passes begin."""
    return [record for record in trainer.history if "rft/pass" in record]


def rollouts(trainer):
    lines = (trainer.run_dir / "rollouts" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def learned(batch):
    """Ids of each real row of a batch, and how many of them are learned."""
    inputs, _, mask = batch
    rows = zip(inputs.tokens, inputs.attention_mask, mask, strict=True)
    return [(tokens[real].tolist(), int(own.sum())) for tokens, real, own in rows if own.any()]


def sum_of_codes(outputs):
    """A reward for models that hardly ever write a vowel."""
    return [float(sum(map(ord, text)) % 7) for text in outputs]


def assert_same_run(got, expected):
    for a, b in zip(jax.tree.leaves(expected.state), jax.tree.leaves(got.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert repeatable(training(got)) == repeatable(training(expected))


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """Twelve optimizer steps, never interrupted: rounds of 24 samples, two passes of several steps after each.

    `batches` and `saved` are what each step learned from and what a checkpoint after it would hold.
    """
    trainer = prepared(rft_config(checkpoint, tmp_path_factory.mktemp("whole")), eval_prompts=PROMPTS[:4])
    trainer.batches, trainer.saved = [], [trainer.host_state()]
    next_batch, after = trainer.next_batch, Run.after

    def watched_batch():
        trainer.batches.append(next_batch())
        # The same again: a step is over when its update is on its way, not when its rows are read.
        return next_batch()

    def watched_after(run, *arguments):
        trainer.saved.append(trainer.host_state())
        after(run, *arguments)

    trainer.next_batch = watched_batch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "after", watched_after)
        trainer.learn()
    return trainer


SLOW = pytest.mark.slow


@pytest.fixture(scope="module", params=[pytest.param(3, marks=SLOW), pytest.param(5, marks=SLOW), 6])
def stopped(request, checkpoint, tmp_path_factory):
    """Folder of the same run, stopped where a round is used up, between its two passes, and amid the second one.

    It fails: what logs the step before gives up when the state has already taken this one.
    """
    folder = tmp_path_factory.mktemp("stopped")
    trainer = prepared(rft_config(checkpoint, folder), eval_prompts=PROMPTS[:4])

    def log(record):
        if record["step"] == request.param - 1:
            raise ConnectionError("no network")

    trainer.hooks = Hooks(log=log)
    with pytest.raises(ConnectionError):
        trainer.learn()
    assert [path.name for path in folder.glob("checkpoint_*")] == [f"checkpoint_{request.param}"]
    return folder


@pytest.fixture(scope="module")
def one_pass(checkpoint, tmp_path_factory):
    """A run of a single pass."""
    return train(rft_config(checkpoint, tmp_path_factory.mktemp("one_pass"), train={"epochs": 1}))


@pytest.fixture(scope="module")
def ready(checkpoint, tmp_path_factory):
    """A trainer that has not learned, for single rounds of sampling."""
    config = rft_config(checkpoint, tmp_path_factory.mktemp("ready"), train={"reward_errors": "skip"})
    prompts = [{"prompt": text, "topic": text.upper()} for text in PROMPTS]
    return prepared(config, prompts=prompts, eval_prompts=PROMPTS)


@pytest.fixture
def one_round(ready):
    """Samples a round under another reward function, or other fields of the collector."""

    def collect(reward_fn=count_vowels, **changes):
        inner = replace(ready.collect.collect, **changes.pop("inner", {}))
        rewards = replace(inner.rewards, reward_fn=reward_fn, **changes.pop("rewards", {}))
        collect = replace(ready.collect, collect=replace(inner, rewards=rewards), **changes)
        with jax.set_mesh(ready.mesh):
            return collect(ready.params, ready.frozen, 0, jax.random.key(0), stopwatch=Stopwatch())

    return collect


class TestRun:
    def test_a_round_comes_once_in_two_passes(self, whole):
        found = passes(whole)
        assert [record["rft/pass"] for record in found] == list(range(1, len(found) + 1)) and len(found) >= 4
        assert [record["rft/round"] for record in found[:4]] == [1, 1, 2, 2]
        assert ["completion/tokens" in record for record in found[:4]] == [True, False, True, False]
        assert [record["rft/percentile"] for record in found[:4]] == [0.5, 0.75, 0.5, 0.75]
        steps = {row["step"] for row in rollouts(whole)}
        assert steps == {record["step"] for record in found if record["rft/percentile"] == 0.5}

    def test_a_pass_takes_the_steps_that_its_samples_fill(self, whole):
        found = passes(whole)
        for record, following in itertools.pairwise(found):
            assert following["step"] - record["step"] == math.ceil(record["rft/kept"] / 4)

    def test_the_yield_is_reported(self, whole):
        first, second, *_ = passes(whole)
        of_round = [row for row in rollouts(whole) if row["step"] == first["step"]]
        assert len(of_round) == 24
        kept = [[row for row in of_round if row["passes"] > step] for step in (0, 1)]
        assert [first["rft/kept"], second["rft/kept"]] == [len(rows) for rows in kept]
        assert len(kept[1]) < len(kept[0]) < 24
        assert first["rft/kept_fraction"] == len(kept[0]) / 24
        assert first["rft/kept_score_mean"] == pytest.approx(np.mean([row["reward"] for row in kept[0]]))
        assert first["reward/mean"] == pytest.approx(np.mean([row["reward"] for row in of_round]))
        assert first["rft/kept_score_mean"] > first["reward/mean"]
        assert second["rft/threshold_mean"] > first["rft/threshold_mean"]
        assert first["rft/prompts_covered"] == len({row["prompt"] for row in kept[0]}) / len(PROMPTS)
        assert first["rft/empty_rounds"] == first["reward/failed"] == 0

    def test_lore_1_1_exactly_the_sampled_ids_of_kept_samples_are_learned(self, whole):
        first, second, *_ = passes(whole)
        of_round = [row for row in rollouts(whole) if row["step"] == first["step"]]
        encode = tiny_tokenizer().encode
        expected = sorted(
            (encode(row["prompt"]) + row["output_tokens"], len(row["output_tokens"]))
            for row in of_round
            if row["passes"] > 0
        )
        batches = whole.batches[first["step"] - 1 : second["step"] - 1]
        assert sorted(row for batch in batches for row in learned(batch)) == expected
        # No EOS is added behind a completion that the length limit cut.
        cut = [ids for ids, count in expected if count == 8 and ids[-1] != EOS_ID]
        assert cut

    def test_samples_of_a_prompt_differ_and_rounds_too(self, whole):
        first, _, third, *_ = passes(whole)
        texts = [
            [row["output"] for row in rollouts(whole) if row["step"] == record["step"]]
            for record in (first, third)
        ]
        assert len(set(texts[0][:4])) > 1 and texts[0] != texts[1]

    def test_the_untrained_model_is_evaluated_first(self, whole):
        assert whole.history[0]["step"] == 0 and "reward/mean" in whole.history[0]

    def test_one_program_for_every_round_and_pass(self, whole):
        counts = [record["perf/compilations"] for record in training(whole)]
        assert counts[-1] == counts[4] and whole.update._cache_size() <= 2


class TestResume:
    @pytest.mark.slow
    def test_resumed_equals_never_stopped_bit_for_bit(self, whole, checkpoint, stopped):
        config = rft_config(checkpoint, stopped, train={"resume_from_checkpoint": str(stopped)})
        assert_same_run(train(config), whole)

    def test_a_checkpoint_holds_the_samples_of_passes_to_come_and_no_others(self, whole):
        starts = [record["step"] for record in passes(whole)]
        nothing = {"steps_of_pass": None, "kept": None, "draws": whole.draws.state(), "caller": {}}
        assert whole.saved[0] == {"rounds": 0, "passes": 0, **nothing}
        used_up = {"rounds": 1, "passes": 2, **nothing}
        assert whole.saved[starts[2] - 1] == used_up
        between = whole.saved[starts[1] - 1]
        assert (between["passes"], between["steps_of_pass"]) == (1, None)
        first, second = (KeptSamples.from_plain(whole.saved[step]["kept"]) for step in (1, starts[1] - 1))
        assert len(first.groups) == passes(whole)[0]["rft/kept"]
        assert len(second.groups) == passes(whole)[1]["rft/kept"]
        assert json.loads(json.dumps(whole.saved)) == whole.saved

    def test_passes_that_are_over_are_not_begun_again(self, one_pass, capsys):
        steps = [record["step"] for record in training(one_pass)]
        assert len(passes(one_pass)) == 1
        assert steps[-1] == math.ceil(passes(one_pass)[0]["rft/kept"] / 4) < 12
        assert one_pass.history[-1]["step"] == steps[-1] and "evaluation" in one_pass.history[-1]
        resuming = {"resume_from_checkpoint": str(one_pass.run_dir)}
        again = train(one_pass.config.evolve(train=resuming))
        last_words = " ".join(capsys.readouterr().out.split())
        assert f"done: {steps[-1]} steps in" in last_words and "To go on" not in last_words
        assert "ended after 1 pass (train.epochs), train.total_steps 12 was not reached" in last_words
        assert [record["step"] for record in training(again)] == steps


class TestRound:
    def test_metadata_and_dense_rewards_reach_the_selection(self, one_round):
        calls = []

        def reward_fn(prompts, output_tokens, topic):
            calls.append(len(prompts))
            assert topic == [text.upper() for text in prompts]
            return [[1.0] * len(tokens) for tokens in output_tokens]

        found = one_round(reward_fn)
        assert calls == [8, 8, 8]
        assert found.metrics["reward/mean"] == found.metrics["completion/length_mean"]
        assert [row["reward"] for row in found.rows] == [len(row["output_tokens"]) for row in found.rows]

    def test_rows_that_fail_are_left_out(self, one_round):
        def reward_fn(prompts):
            return [math.nan if prompt == "rain" else 1.0 for prompt in prompts]

        found = one_round(reward_fn)
        assert found.metrics["reward/failed"] == 4 and found.metrics["reward/mean"] == 1.0
        assert found.metrics["reward/failed_fraction"] == 4 / 24
        failed = [row for row in found.rows if row["prompt"] == "rain"]
        assert [(row["reward"], row["passes"]) for row in failed] == [(None, 0)] * 4
        assert set(found.kept.groups.tolist()) == {0, 1, 2, 3, 5}

    def test_what_a_reward_function_fails_on_is_kept(self, one_round, ready):
        def reward_fn(outputs):
            raise KeyError("judge")

        with pytest.raises(RewardError, match="judge") as caught:
            one_round(reward_fn, rewards={"skip_errors": False})
        assert "failed_rollouts_round_000000_row_000000" in str(caught.value.__notes__)

    def test_a_cap_holds_for_every_prompt(self, one_round):
        found = one_round(max_samples_per_prompt=1, percentiles=np.zeros(1))
        kept = [row["prompt"] for row in found.rows if row["passes"]]
        assert 1 <= len(kept) == len(set(kept)) <= len(PROMPTS)

    def test_lore_9_1_samples_do_not_depend_on_the_calls_they_come_from(self, one_round, ready):
        threes, fours = one_round(), one_round(inner={"chunk_size": 7})
        assert threes.rows == fours.rows and len(fours.rows) == 24

    def test_a_round_without_a_score_is_said_and_followed_by_another(self, ready, monkeypatch):
        calls = []

        def reward_fn(outputs):
            calls.append(len(outputs))
            return [math.nan if len(calls) <= 3 else float(len(text)) for text in outputs]

        news = self.sample(
            ready,
            monkeypatch,
            reward_fn,
            warning="Round 0 keeps nothing: `reward_fn` failed on all of its 24",
        )
        assert news.metrics["rft/empty_rounds"] == 1 and len(calls) == 6 and ready.num_rounds == 2

    def test_three_rounds_without_a_score_stop_the_run(self, ready, monkeypatch):
        with pytest.raises(RewardError, match="failed on every sample of 3 rounds in a row"):
            self.sample(
                ready, monkeypatch, lambda outputs: [math.nan] * len(outputs), warning="Round . keeps nothing"
            )

    def test_a_round_that_stops_the_run_is_sampled_again_when_it_resumes(self, ready, monkeypatch):
        def collect(params, frozen, number, key, *, stopwatch):
            raise RewardError(f"round {number}")

        monkeypatch.setattr(ready, "collect", collect)
        run, before = SimpleNamespace(flush=lambda: None, stopwatch=Stopwatch()), ready.host_state()
        with pytest.raises(RewardError, match=f"round {before['rounds']}"):
            ready.begin_pass(run, jax.random.key(0))
        assert ready.host_state() == before

    @staticmethod
    def sample(ready, monkeypatch, reward_fn, *, warning):
        inner = ready.collect.collect
        inner = replace(inner, rewards=replace(inner.rewards, reward_fn=reward_fn))
        collect = replace(ready.collect, collect=inner)
        monkeypatch.setattr(ready, "collect", collect)
        monkeypatch.setattr(ready, "num_rounds", 0)
        run = SimpleNamespace(flush=lambda: None, stopwatch=Stopwatch())
        with pytest.warns(UserWarning, match=warning), jax.set_mesh(ready.mesh):
            return ready.sample(run, jax.random.key(0))


class TestData:
    def test_prompts_with_equal_ids_share_their_samples(self, checkpoint, tmp_path):
        trainer = prepared(rft_config(checkpoint, tmp_path), prompts=["we", "rain", "we"])
        assert trainer.collect.groups.tolist() == [0, 1, 0] and len(trainer.prompt_tokens) == 2

    def test_samples_and_rewards_are_refused(self, checkpoint, tmp_path):
        for arguments in ({"samples": ["a"]}, {"samples": ["a"], "rewards": [1.0]}):
            with pytest.raises(ValueError, match="RFTTrainer learns from its own samples"):
                prepared(rft_config(checkpoint, tmp_path), **arguments)

    @pytest.mark.parametrize(
        ("field", "value", "message"),
        [
            ("start_percentile", 1.5, r"in \[0, 1\]"),
            ("end_percentile", 0.1, "in .start_percentile = "),
            ("n_improve_steps", 0, "at least 1"),
            ("n_generations_per_prompt", 0, "at least 1"),
            ("max_samples_per_prompt", 0, "at least 1, or None"),
            ("chunk_size", 0, "at least 1, or None"),
        ],
    )
    def test_values_outside_their_range_are_refused(self, field, value, message):
        with pytest.raises(ValueError, match=f"`method.{field}` must be {message}"):
            jrl.RFTConfig(**{field: value})


@pytest.mark.slow
def test_it_raises_the_reward(checkpoint, tmp_path):
    """A longer run of the tiny model: the share of vowels goes up."""
    config = rft_config(checkpoint, tmp_path, method={"n_generations_per_prompt": 16, "chunk_size": 48})
    config = config.evolve(
        train={"total_steps": 60, "batch_size": 16, "minibatch_size": 16}, optimizer={"kwargs": {"lr": 3e-3}}
    )
    means = [record["reward/mean"] for record in passes(train(config)) if "reward/mean" in record]
    assert means[-1] > 2 * means[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["t5", "gpt2"])
def test_adapters_alone_train(checkpoint, tmp_path, family):
    lora = {"peft_type": "LORA", "r": 2}
    lora["task_type"] = "SEQ_2_SEQ_LM" if family == "t5" else "CAUSAL_LM"
    path = save_tiny_checkpoint(tmp_path / "model", "t5") if family == "t5" else checkpoint
    model = {"peft_config": lora, "model_arch_type": "seq2seq" if family == "t5" else "causal"}
    trained = train(
        rft_config(path, tmp_path / "run", model=model, train={"total_steps": 4}),
        reward_fn=sum_of_codes,
    )
    assert set(trained.params) == {"lora"}
    assert min(float(np.abs(module["B"]).max()) for module in trained.params["lora"].values()) > 0


@pytest.fixture(scope="module")
def t5(tmp_path_factory):
    """Three optimizer steps of the tiny T5 with a frozen lower layer."""
    path = save_tiny_checkpoint(tmp_path_factory.mktemp("t5"), "t5")
    model = {"model_arch_type": "seq2seq", "num_layers_unfrozen": 1}
    config = rft_config(path, tmp_path_factory.mktemp("run"), model=model, train={"total_steps": 3})
    trainer = prepared(config, reward_fn=sum_of_codes)
    trainer.batches = []
    next_batch = trainer.next_batch
    trainer.next_batch = lambda: trainer.batches.append(next_batch()) or trainer.batches[-1]
    trainer.learn()
    return trainer


@pytest.mark.slow
class TestSeq2seq:
    def test_the_encoder_reads_the_prompts_and_the_decoder_learns_the_completions(self, t5):
        first, *others = passes(t5)
        batches = t5.batches[: others[0]["step"] - 1 if others else None]
        of_round = [row for row in rollouts(t5) if row["step"] == first["step"] and row["passes"]]
        start = t5.lm.decoder_start_token_id
        rows = [row for batch in batches for row in learned(batch)]
        assert sorted(rows) == sorted(
            ([start, *row["output_tokens"]], len(row["output_tokens"])) for row in of_round
        )
        encode = tiny_tokenizer().encode
        contexts = {
            tuple(row[real].tolist())
            for batch in batches
            for row, real in zip(batch.inputs.context_tokens, batch.inputs.context_mask, strict=True)
        }
        assert contexts == {(*encode(row["prompt"]), EOS_ID) for row in of_round}

    def test_only_the_upper_layer_trains(self, t5):
        assert "layers_1" in t5.params and "layers_0" in t5.frozen

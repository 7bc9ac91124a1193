# SPDX-License-Identifier: Apache-2.0
"""What surrounds a loop: what a run leaves behind where it fails, what it keeps, what its configuration means."""

import json
import math
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl.data.sources.fingerprint import fingerprint
from jrl.distributed import PeerError
from jrl.rollout.rewards import RewardError
from jrl.trainers.checkpoints.checkpointer import Checkpointer, CheckpointError
from jrl.trainers.loggers.loggers import Loggers
from jrl.trainers.loop import run
from jrl.trainers.loop.hooks import Hooks
from jrl.trainers.loop.run import UnfinishedError
from jrl.trainers.loop.stopwatch import CompileCounter
from jrl.trainers.ppo import PPOTrainer
from tests.tiny import VOCAB_SIZE
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, repeatable

RATIO = "ppo/ratio_max_dev_first_minibatch"
FOREIGN = '{"prompt": "mine"}\n'


def ready(config, *, reward_fn=count_vowels, **others):
    """A trainer with its data, before `learn`."""
    trainer = PPOTrainer(config, reward_fn=reward_fn, **others)
    trainer.add_data(samples=None, rewards=None, prompts=PROMPTS, eval_prompts=PROMPTS[:2])
    return trainer


@pytest.fixture(scope="module")
def resumed(checkpoint, tmp_path_factory):
    """One iteration, then one more from its checkpoint; rollouts have a temperature of their own."""
    folder, told, endings = tmp_path_factory.mktemp("resumed"), [], []
    (folder / "data").mkdir()
    (folder / "data" / "prompts.jsonl").write_text(FOREIGN)
    flush, save = Loggers.flush, Checkpointer.save
    config = ppo_config(
        checkpoint,
        folder / "run",
        train={"total_steps": 4, "rollout_logging_dir": str(folder / "data")},
        method={"gen_experience_kwargs": {"max_new_tokens": 8, "temperature": 0.5}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Loggers, "flush", lambda self: (told.append("flush"), flush(self))[1])
        patch.setattr(run, "closing_sentence", lambda _, ending: endings.append(ending) or "over")
        patch.setattr(Checkpointer, "save", lambda *a, **k: (told.append("save"), save(*a, **k))[1])
        ready(config).learn()
        more = {"resume_from_checkpoint": str(folder / "run"), "total_steps": 8}
        trainer = ready(config.evolve(train=more))
        trainer.learn()
    trainer.told, trainer.endings = told, endings
    return trainer


def test_how_a_run_ended_is_known(resumed):
    begun, gone_on = resumed.endings
    assert (begun.first_step, begun.step, begun.last_step) == (0, 4, 4)
    assert (gone_on.first_step, gone_on.step, gone_on.last_step) == (4, 8, 8)
    assert gone_on.is_over and not gone_on.unsaved


class TestFailures:
    def test_a_refused_folder_gives_the_signals_back(self, checkpoint, tmp_path):
        (tmp_path / "checkpoint_4").mkdir()
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(CheckpointError, match="holds checkpoints of an earlier run"):
            ready(ppo_config(checkpoint, tmp_path)).learn()
        assert signal.getsignal(signal.SIGINT) is before

    def test_processes_that_differ_do_not_begin(self, checkpoint, tmp_path, monkeypatch):
        told = []

        def refuse(*facts):
            told.append(facts)
            raise PeerError("these differ")

        monkeypatch.setattr("jrl.trainers.loop.run.check_same", refuse)
        trainer = ready(ppo_config(checkpoint, tmp_path))
        with pytest.raises(PeerError, match="these differ"):
            trainer.learn()
        ((config, data_sha256, num_steps),) = told
        assert config == trainer.config.to_dict() and data_sha256 == trainer.data_sha256()
        assert num_steps > 0
        Checkpointer(tmp_path, keep=1).close()

    def test_a_tracker_that_fails_to_start_leaves_no_lock(self, checkpoint, tmp_path, monkeypatch):
        def start(self, description, *, total_steps, step):
            raise ConnectionError("no network")

        monkeypatch.setattr(Loggers, "start", start)
        before = signal.getsignal(signal.SIGINT)
        with pytest.raises(ConnectionError):
            ready(ppo_config(checkpoint, tmp_path)).learn()
        assert signal.getsignal(signal.SIGINT) is before
        Checkpointer(tmp_path, keep=1).close()

    def test_a_reward_that_fails_in_the_first_evaluation_is_kept_and_may_be_tried_again(
        self, checkpoint, tmp_path
    ):
        config = ppo_config(checkpoint, tmp_path)

        def broken(outputs):
            raise KeyError("judge")

        with pytest.raises(RewardError, match="the cat") as caught:
            ready(config, reward_fn=broken).learn()
        assert "failed_rollouts_evaluation_at_step_000000" in str(caught.value.__notes__)
        assert len(list((tmp_path / "failed_rollouts").glob("*.jsonl"))) == 1
        assert not list(tmp_path.glob("checkpoint_*"))  # nothing was learned, so nothing stands in the way
        Checkpointer(tmp_path, keep=1).close()


def test_what_a_function_does_to_its_tokenizer_is_not_exported(checkpoint, tmp_path):
    def spoil(tokenizer, outputs):
        tokenizer.add_tokens(["<spoilt>"])
        tokenizer.chat_template = "spoilt"
        tokenizer.padding_side = "left" if tokenizer.padding_side == "right" else "right"

    def reward_fn(tokenizer, outputs):
        spoil(tokenizer, outputs)
        return count_vowels(outputs)

    def metric_fn(tokenizer, outputs):
        spoil(tokenizer, outputs)
        return {}

    trainer = ready(ppo_config(checkpoint, tmp_path), reward_fn=reward_fn, metric_fn=metric_fn)
    before = trainer.tokenizer.padding_side, trainer.tokenizer.chat_template, len(trainer.tokenizer)
    found = trainer.run_evaluation(0)
    after = trainer.tokenizer.padding_side, trainer.tokenizer.chat_template, len(trainer.tokenizer)
    assert after == before and len(trainer.handed_tokenizer) == len(trainer.tokenizer) + 1
    template = before[1]
    assert found.sampling["chat_template_sha256"] == (template and fingerprint(template)[:16])
    exported = jrl.load_tokenizer(trainer.save_pretrained(tmp_path / "exported"))
    assert len(exported) == len(trainer.tokenizer) and exported.chat_template is None


def test_a_run_that_a_device_has_no_memory_for_says_what_helps(checkpoint, tmp_path):
    def update(*_):
        return jax.jit(lambda: jnp.zeros(1 << 50, jnp.int8))()

    trainer = ready(ppo_config(checkpoint, tmp_path))
    trainer.update = update
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED") as caught:
        trainer.learn()
    assert sum("train.minibatch_size" in note for note in caught.value.__notes__) == 1


class TestEvaluation:
    @pytest.mark.slow
    @pytest.mark.parametrize(("eval_prompts", "of"), [(None, "training"), (PROMPTS[:2], "evaluation")])
    def test_its_record_says_whose_prompts_it_was_on(self, checkpoint, tmp_path, eval_prompts, of):
        trainer = PPOTrainer(ppo_config(checkpoint, tmp_path), reward_fn=count_vowels)
        trainer.add_data(samples=None, rewards=None, prompts=PROMPTS, eval_prompts=eval_prompts)
        assert trainer.run_evaluation(0).sampling["prompts"] == of

    @pytest.mark.parametrize("fault", [KeyError("judge"), SystemExit(0)], ids=["raises", "exits"])
    def test_one_that_failed_comes_again(self, fault, checkpoint, tmp_path, resumed):
        calls = []

        def metric_fn(outputs):
            calls.append(outputs)
            if len(calls) == 2:
                raise fault
            return {}

        # The first of the two runs, whose evaluation fails after its last step.
        folder = str(tmp_path / "run")
        places = {"checkpoint_dir": folder, "resume_from_checkpoint": folder, "rollout_logging_dir": None}
        config = resumed.config.evolve(train=places | {"total_steps": 4})
        with pytest.warns(UserWarning, match="starting a fresh run"), pytest.raises(RewardError) as caught:
            ready(config, metric_fn=metric_fn).learn()
        assert "`metric_fn` raised" in str(caught.value) and "evaluation at step 4" in str(caught.value)
        again = ready(config, metric_fn=metric_fn)
        again.learn()
        assert repeatable(again.history) == repeatable(resumed.history)[: len(again.history)]
        assert calls[2] == calls[1] and again.history[-1]["evaluation"] == 1
        lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in lines] == [0, 4, 4]

    def test_a_callback_that_exits_does_not_end_a_run_as_if_it_were_done(self, checkpoint, tmp_path):
        trainer = ready(ppo_config(checkpoint, tmp_path, train={"total_steps": 4}))
        trainer.hooks = Hooks(log=lambda record: sys.exit(0))
        with pytest.raises(UnfinishedError, match=r"ended at step 4 of 4.* called sys\.exit\(0\)"):
            trainer.learn()
        assert list(tmp_path.glob("checkpoint_4"))

    def test_skip_holds_in_evaluations_too(self, checkpoint, tmp_path):
        def reward_fn(outputs):
            return [math.nan] + [1.0] * (len(outputs) - 1)

        config = ppo_config(checkpoint, tmp_path, train={"reward_errors": "skip"})
        found = ready(config, reward_fn=reward_fn).run_evaluation(0)
        assert found.metrics["reward/mean"] == 1.0 and found.metrics["reward/failed"] == 1

    def test_samples_of_one_prompt_are_averaged_before_the_error(self, checkpoint, tmp_path):
        config = ppo_config(checkpoint, tmp_path, train={"reward_errors": "skip"})
        trainer = ready(config, reward_fn=lambda outputs: [1.0, 3.0, 7.0, math.nan, math.nan, math.nan])
        trainer.add_eval_prompts([prompt for prompt in PROMPTS[:3] for _ in range(2)])
        found = trainer.run_evaluation(0)
        assert found.sampling["reward_means"] == [2.0, 7.0, None]
        # Their deviation is 5 / sqrt(2).
        assert found.metrics["reward/standard_error"] == pytest.approx(2.5)

    def test_a_metric_that_a_sample_has_not_is_in_no_mean(self, checkpoint, tmp_path):
        def metric_fn(outputs):
            return {"score": [math.nan, 3.0], "none": [math.nan, math.nan]}

        found = ready(ppo_config(checkpoint, tmp_path), metric_fn=metric_fn).run_evaluation(0)
        assert found.metrics["metrics/score"] == 3.0 and math.isnan(found.metrics["metrics/none"])

    def test_a_sweep_is_judged_by_its_first_value(self, checkpoint, tmp_path):
        method = {"gen_kwargs": {"max_new_tokens": 8, "temperature": [0.5, 1.0]}}
        found = ready(ppo_config(checkpoint, tmp_path, method=method)).run_evaluation(0)
        assert found.score == found.metrics["reward/mean@temperature=0.5"]
        assert "reward_means" not in found.sampling  # of which value?


class TestRolloutSettings:
    def test_lore_2_3_the_update_divides_by_the_temperature_of_the_rollouts(self, resumed):
        deviations = [record[RATIO] for record in resumed.history if RATIO in record]
        assert len(deviations) == 2 and max(deviations) <= 4 * 2.0**-20

    @pytest.mark.parametrize(
        "method",
        [
            {"gen_experience_kwargs": {"max_new_tokens": 32}},
            {"gen_kwargs": {"max_new_tokens": [8, 32]}},
        ],
    )
    def test_every_completion_must_fit_behind_its_prompt(self, checkpoint, tmp_path, method):
        with pytest.raises(ValueError, match=r"leaves no room for a prompt beside `max_new_tokens` \(32\)"):
            ready(ppo_config(checkpoint, tmp_path, method=method))

    @pytest.mark.parametrize("filters", [{"top_k": 5}, {}], ids=["top_k", "logit_mask"])
    def test_filters_of_the_rollouts_are_warned_of(self, checkpoint, tmp_path, filters):
        method = {"gen_experience_kwargs": {"max_new_tokens": 8} | filters}
        mask = None if filters else np.zeros((VOCAB_SIZE, VOCAB_SIZE), bool)
        with pytest.warns(UserWarning, match="Rollouts are filtered"):
            ready(ppo_config(checkpoint, tmp_path, method=method), logit_mask=mask)


def test_generate_drops_no_prompt(checkpoint, tmp_path):
    trainer = ready(ppo_config(checkpoint, tmp_path, train={"long_prompts": "drop"}))
    with pytest.raises(ValueError, match="prompt 0 has"):
        trainer.generate(["the cat " * 40, "we"])


def test_the_records_are_on_the_disk_before_the_checkpoint_that_counts_them(resumed):
    assert resumed.told == ["flush", "save", "flush", "save"]


def test_files_that_are_not_the_runs_stay_in_the_samples_folder(resumed):
    data = Path(resumed.config.train.rollout_logging_dir)
    assert (data / "prompts.jsonl").read_text() == FOREIGN
    steps = [json.loads(line)["step"] for line in (data / "rollouts.jsonl").read_text().splitlines()]
    assert steps == [4] * 8 + [8] * 8


def test_compilations_are_counted_only_while_entered():
    with CompileCounter() as counter:
        jax.jit(lambda x: x * 3.25)(1.0)
    counted = counter.count
    jax.jit(lambda x: x * 4.25)(1.0)
    assert counter.count == counted > 0


def test_float16_is_refused_because_nothing_scales_its_loss():
    with pytest.raises(ValueError, match="compute_dtype` must be float32 or bfloat16"):
        jrl.default_ppo_config().evolve(train={"compute_dtype": "float16"})


def test_changes_to_a_config_object_are_refused_not_ignored(checkpoint, tmp_path):
    lm = jrl.load_model(checkpoint)[0].lm
    config = ppo_config(checkpoint, tmp_path).evolve(
        model={"model_path": lm.hf_config, "model_extra_configs": {"n_layer": 3}}
    )
    with pytest.raises(ValueError, match=r"`model.model_path` is a config object: set \['n_layer'\]"):
        PPOTrainer(config, reward_fn=count_vowels)

# SPDX-License-Identifier: Apache-2.0
"""The chain's preferences, its account of what they led to, and a short run that is taken up again."""

import importlib
import json
import math
import shlex
from types import SimpleNamespace

import pytest
from rich.console import Console

from tests.examples.processes import EXAMPLES, finish, start

SMALL = shlex.split(
    "--num-reviews 300 --num-pairs 64 --num-eval-prompts 8 --sft.train.total_steps 60 --sft.train.batch_size 8 "
    "--reward.train.epochs 1 --reward.train.batch_size 4 --ppo.train.epochs 2 --ppo.train.batch_size 4 "
    "--ppo.method.num_rollouts 8 --ppo.method.chunk_size 8 --ppo.method.ppo_epochs 1 --ppo.train.eval_interval 2 "
    "--dpo.train.epochs 1 --dpo.train.batch_size 4 --dpo.train.eval_interval 2"
)


@pytest.fixture
def example(monkeypatch):
    """Imports a module as the script does."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module


@pytest.fixture
def preferences(example):
    return example("chain.preferences")


class Writer:
    """A policy that writes what it is told: row i of a call gets the i-th text; one of them does not end."""

    def __init__(self, outputs, unended=()):
        self.outputs, self.unended = outputs, unended
        self.tokenizer = SimpleNamespace(eos_token_id=0)

    def complete(self, prompts, *, seed, gen_kwargs):
        tokens = [[5, 5] if row in self.unended else [5, 0] for row in range(len(prompts))]
        return SimpleNamespace(prompts=prompts, outputs=self.outputs, output_tokens=tokens)


class TestPreferences:
    def test_the_judge_likes_praise_and_does_not_believe_gushing(self, preferences):
        plain = "a {} film that I saw on a rainy day in town with my brother"  # 14 words
        good, bad, gushing = preferences.true_scores(
            [plain.format("wonderful"), plain.format("terrible"), "a wonderful lovely superb film"]
        )
        assert good > 1.0 > -1.0 > bad and gushing < -10.0
        # Three of five words praise: 0.6 - 0.15 is too much.
        sentiment = preferences.vader(["a wonderful lovely superb film"])[0]
        assert gushing == pytest.approx(3.0 * sentiment - 80.0 * 0.45)
        assert preferences.praise_share("") == 0.0 and preferences.praise_share("Superb, superb!") == 1.0

    def test_pairs_are_of_one_prompt_and_both_end(self, preferences):
        outputs = [" is good", " is bad", " same", " cut", " is awful", " is great", " same", " done"]
        pairs = preferences.make_pairs(
            Writer(outputs, unended={3}), ["a", "b", "c", "d"], gen_kwargs={}, seed=0
        )
        assert [pair.prompt for pair in pairs] == ["a", "b"]  # c wrote the same twice, d did not end
        for pair in pairs:
            scores = preferences.true_scores([pair.prompt + pair.chosen, pair.prompt + pair.rejected])
            assert pair.gap == pytest.approx(scores[0] - scores[1])
            assert set(pair.record()) == {"prompt", "chosen", "rejected"}  # no word of the judge

    def test_labels_are_as_noisy_as_bradley_and_terry_say(self, preferences):
        words = " film that I saw on a rainy day"
        outputs = [f" fine{words}"] * 4000 + [words] * 4000
        pairs = preferences.make_pairs(Writer(outputs), ["a"] * 4000, gen_kwargs={}, seed=1)
        gap = abs(pairs[0].gap)
        share = sum(pair.chosen.startswith(" fine") for pair in pairs) / len(pairs)
        expected = 1 / (1 + math.exp(-gap))
        assert 0.5 < expected < 0.95 and share == pytest.approx(expected, abs=0.03)
        assert preferences.best_accuracy(pairs) == pytest.approx(expected)

    def test_accuracy_and_agreement(self, preferences):
        pairs = [preferences.Pair("p", "x", "y", gap) for gap in (1.0, 2.0, -1.0, -2.0)]
        assert preferences.accuracy(pairs, [1, 0, 0, 1], [0, 1, 1, 0]) == (0.5, 0.5)
        assert preferences.accuracy(pairs, [1, 1, 0, 0], [0, 0, 1, 1]) == (0.5, 1.0)

    def test_pairs_on_the_disk(self, preferences, tmp_path):
        pairs = [preferences.Pair("p", " x", " y", 0.25), preferences.Pair("q", "ä", "", -1.0)]
        preferences.save_pairs(tmp_path / "new" / "pairs.jsonl", pairs)
        assert preferences.read_pairs(tmp_path / "new" / "pairs.jsonl") == pairs


class TestReport:
    def test_it_shows_where_the_true_reward_turned(self, example, tmp_path):
        report = example("chain.report")
        verdicts = [
            report.Verdict("SFT", 0.1, 0.2, 0.0, 30.0, 0.4),
            report.Verdict("PPO", 5.1, -0.8, 20.0, 30.0, 0.1),
            report.Verdict("DPO", 1.1, 0.9, 3.0, 31.0, 0.3),
        ]
        history = [
            {"step": 0, "evaluation": 0, "metrics/learned": 0.1, "metrics/true": 0.2},
            {"step": 4, "iteration": 1, "reward/mean": 1.0},
            {"step": 4, "evaluation": 1, "metrics/learned": 2.0, "metrics/true": 1.5},
            {"step": 8, "evaluation": 2, "metrics/learned": 5.0, "metrics/true": -0.8},
        ]
        assert report.curve(history) == [(0, 0.1, 0.2), (4, 2.0, 1.5), (8, 5.0, -0.8)]
        console = Console(record=True, width=120)
        figures = {"accuracy": 0.8, "best": 0.85, "agreement": 0.9}
        found = report.report(
            console, tmp_path, verdicts, {"PPO": history}, figures, seconds={"sft": 1.0, "ppo": 2.5}
        )
        text = console.export_text()
        assert "+5.10 (+5.00)" in text and "-0.80 (-1.00)" in text and "20.00" in text
        assert "PPO: true reward +1.50 at best (step 4), -0.80 at the end (step 8)" in text
        assert "80.0% of the held-out pairs in order, 85.0% at best" in text and "s, curves in" in text
        assert found["best_true_reward"] == {"PPO": {"step": 4, "true": 1.5}}
        assert json.loads((tmp_path / "summary.json").read_text()) == found
        assert (tmp_path / "curves.png").stat().st_size > 5000

    def test_both_scores_are_metrics(self, example):
        metric_fn = example("chain.report").scores_of(lambda samples: [float(len(s)) for s in samples])
        found = metric_fn(samples=["a wonderful film"], prompts=["a"], outputs=[" wonderful film"])
        assert found["learned"] == [16.0] and found["true"] == example("chain.preferences").true_scores(
            ["a wonderful film"]
        )


class TestFlags:
    def test_every_flag_goes_to_its_stage(self, example):
        chain = example("rlhf_chain")
        flags, configs = chain.parse(
            shlex.split("--seed 3 --ppo.method.init_kl_coef 0.5 --dpo.method.beta=0.2")
        )
        assert (
            flags.seed == 3
            and configs["ppo"].method.init_kl_coef == 0.5
            and configs["dpo"].method.beta == 0.2
        )
        trainers = [config.train.trainer for config in configs.values()]
        assert trainers == ["SFTTrainer", "RewardTrainer", "PPOTrainer", "DPOTrainer"]

    def test_a_flag_without_a_stage(self, example, capsys):
        with pytest.raises(SystemExit):
            example("rlhf_chain").parse(["--train.seed", "3"])
        assert "--train.seed names no stage" in capsys.readouterr().err

    def test_a_stage_goes_on_where_it_was_stopped(self, example, tmp_path):
        module = example("rlhf_chain")
        chain = module.Chain(*module.parse(["--output-dir", str(tmp_path)]))
        assert chain.config("ppo", tmp_path / "m").train.resume_from_checkpoint is None
        (tmp_path / "ppo" / "checkpoint_4").mkdir(parents=True)
        found = chain.config("ppo", tmp_path / "m")
        assert found.train.resume_from_checkpoint == found.train.checkpoint_dir == str(tmp_path / "ppo")


@pytest.mark.slow
def test_it_runs_and_goes_on(tmp_path):
    folder = tmp_path / "run"
    program = [EXAMPLES / "rlhf_chain.py"]
    finish(start(*SMALL, "--output-dir", folder, cwd=tmp_path, program=program))
    summary = json.loads((folder / "summary.json").read_text())
    assert set(summary["policies"]) == {"SFT", "PPO", "DPO"}
    assert all(
        math.isfinite(value)
        for v in summary["policies"].values()
        for value in v.values()
        if value != v["name"]
    )
    assert summary["policies"]["SFT"]["kl"] == pytest.approx(0.0, abs=1e-6)
    for stage in ("sft", "reward", "ppo", "dpo"):
        assert (folder / f"{stage}_model" / "README.md").exists()
    assert (folder / "curves.png").stat().st_size > 5000
    # A second call with the same folder finds every stage done, and comes to the same account.
    output = finish(start(*SMALL, "--output-dir", folder, cwd=tmp_path, program=program))
    again = json.loads((folder / "summary.json").read_text())
    assert again["policies"] == summary["policies"], output

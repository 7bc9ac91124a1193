# SPDX-License-Identifier: Apache-2.0
"""The watch: what it says of sick runs, that it is silent over healthy ones, and that the documents say the same."""

from __future__ import annotations

import json
import math
import re
from itertools import groupby
from pathlib import Path
from statistics import NormalDist

import numpy as np
import pytest

import jrl
from jrl.rollout.text import Texts, variety
from jrl.trainers.loggers.watch import HEALTHY, RULES, Range, Rule, Test, Watch, find, rises, rules_table, say
from tests.trainers.runs import (
    PREFERENCES,
    PROMPTS,
    count_vowels,
    dpo_config,
    ppo_config,
    save_tiny_checkpoint,
    sft_config,
)

Test.__test__ = False
ROOT = Path(__file__).parents[3]
METRICS = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
ROWS = {
    name: cells[-2].strip()
    for line in METRICS.partition("## The watch")[0].split("\n")
    if line.startswith("| `")
    for cells in [re.split(r"(?<!\\)\|", line)]
    for name in re.findall(r"`([^`]+)`", cells[1])
}
LOW = Rule("low", (Test("a", below=1.0),), 3, "a cause", "a remedy")


def records(**metrics):
    """Training records with one value a step of each metric."""
    return [
        {"step": 4 * number, "iteration": number, **dict(zip(metrics, values, strict=True))}
        for number, values in enumerate(zip(*metrics.values(), strict=True), start=1)
    ]


def evaluated(*rewards, error=0.02, training=(), std=0.4):
    """Evaluations, one after each training record of these mean rewards; the first stands before all."""
    history = [{"step": 0, "evaluation": 0, "reward/mean": rewards[0], "reward/standard_error": error}]
    for number, reward in enumerate(rewards[1:], start=1):
        if training:
            mean = training[number - 1]
            history.append({"step": number, "iteration": number, "reward/mean": mean, "reward/std": std})
        figures = {"reward/mean": reward, "reward/standard_error": error}
        history.append({"step": number, "evaluation": number, **figures})
    return history


def names_of(findings):
    return [(found.step, found.value) for found in findings]


def names(history):
    return [(found.rule.name, found.step) for found in find(history)]


class TestFind:
    def test_a_thing_is_said_once_after_so_many_records_in_a_row(self):
        history = records(a=[0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0])
        (found,) = find(history, [LOW])
        assert (found.step, found.value, found.metric) == (24, 0, "a")
        assert found.record() == {
            "step": 24,
            "watch": "low",
            "metric": "a",
            "value": 0,
            "healthy": None,
            "cause": "a cause",
            "remedy": "a remedy",
        }
        assert say(found.record()) == "low: a is 0 at step 24. Likely cause: a cause. Remedy: a remedy."

    def test_records_without_the_metric_are_passed_over(self):
        history = records(a=[0, 0, 0])
        history.insert(1, {"step": 5, "iteration": 1, "b": 1.0})
        history.insert(2, {"step": 5, "evaluation": 0, "a": 5.0})
        assert [found.step for found in find(history, [LOW])] == [12]
        history.insert(2, {"step": 6, "iteration": 2, "a": math.nan})
        assert [found.step for found in find(history, [LOW])] == [12]

    @pytest.mark.parametrize(
        ("of", "bounds", "met"),
        [
            ("ratio", {"below": 0.5}, True),
            ("ratio", {"below": 0.1}, False),
            ("change", {"below": -5.0}, True),
            ("first", {"above": 5.0}, True),
            ("first", {"above": 11.0}, False),
            ("value", {"above": 1.0, "below": 3.0}, True),
        ],
    )
    def test_values_are_compared_with_the_first_ones(self, of, bounds, met):
        rule = Rule("r", (Test("a", of=of, **bounds),), 1, "", "")
        assert bool(find(records(a=[10.0, 10.0, 2.0]), [rule])[-1:]) == met

    def test_a_change_may_be_measured_in_another_metric(self):
        rule = Rule("r", (Test("a", above=1.0, of="change", per="b"),), 1, "", "")
        assert names_of(find(records(a=[0.0, 0.0, 3.0], b=[2.0, 2.0, 9.0]), [rule])) == [(12, 3.0)]
        assert find(records(a=[0.0, 0.0, 3.0], b=[4.0, 4.0, 9.0]), [rule]) == []
        assert find(records(a=[0.0, 0.0, 3.0], b=[0.0, 0.0, 0.0]), [rule]) == []  # no unit
        assert find(records(a=[0.0, 0.0, 3.0]), [rule]) == []
        assert str(rule.tests[0]) == "change of `a` above 1 times the first values of `b`"

    def test_there_is_no_ratio_to_nothing(self):
        assert (
            find(records(a=[0.0, 0.0, 9.0]), [Rule("r", (Test("a", above=2, of="ratio"),), 1, "", "")]) == []
        )

    def test_steps_are_those_of_an_iteration(self):
        rule = Rule("r", (Test("a", above=0), Test("steps", above=4)), 1, "", "")
        history = records(a=[1.0, 1.0])
        assert find(history, [rule]) == []
        history[1]["step"] = 9
        assert [found.step for found in find(history, [rule])] == [9]

    def test_a_resumed_watch_says_what_the_uninterrupted_one_would(self):
        history = records(
            **{"reward/std": [0.0] * 12, "reward/mean": [0.5] * 12, "ppo/entropy": [2.0] * 5 + [0.01] * 7}
        )
        whole, entries = Watch(), []
        for record in history:
            entries += [record, *(found.record() for found in whole.see(record))]
        assert len(entries) == len(history) + 2
        for cut in range(len(entries)):
            # As `metrics.jsonl` gives them back; a checkpoint counts findings among the records.
            kept = json.loads(json.dumps(entries[:cut]))
            again, rest = Watch(kept), []
            for record in history[sum("iteration" in entry for entry in kept) :]:
                rest += [record, *(found.record() for found in again.see(record))]
            missing = "watch" in entries[cut]  # cut between a record and its finding: said at the next record
            assert missing or kept + rest == entries
            assert [entry["watch"] for entry in kept + rest if "watch" in entry] == [
                entry["watch"] for entry in entries if "watch" in entry
            ]


class TestRules:
    def test_every_recipe_that_ships_is_left_alone(self):
        lines = (ROOT / "tests" / "golden" / "healthy_records.jsonl").read_text().splitlines()
        runs = groupby(map(json.loads, lines), key=lambda record: record["recipe"])
        found = {recipe: names(history) for recipe, history in runs}
        assert len(found) == 8 and not any(found.values()), found

    @pytest.mark.parametrize(
        ("expected", "metrics"),
        [
            ("large_kl", {"kl/per_sequence": [1, 20, 53, 53], "kl/per_token": [0.02, 0.4, 1.1, 1.1]}),
            # A Llama of 0.65M parameters at a KL weight of 0.001: half of its sentences were no English by then.
            (
                "large_kl",
                {
                    "kl/per_sequence": [0.0, 0.31, 5.8, 6.66, 7.86, 8.74],
                    "kl/per_token": [0.0, 0.017, 0.381, 0.515, 0.662, 0.708],
                    "ppo/entropy": [1.11, 1.06, 1.13, 1.02, 1.07, 1.13],
                },
            ),
            (
                "large_kl",
                {
                    "kl/per_sequence": [0, 6, 7, 8],
                    "kl/per_token": [0, 0.6, 0.7, 0.8],
                    "grpo/entropy": [1] * 4,
                },
            ),
            ("large_update", {"ppo/approx_kl": [0.01, 2.0, 3.0]}),
            ("clipped", {"ppo/clip_fraction": [0.3, 0.8, 0.9, 0.9], "ppo/approx_kl": [0.1] * 4}),
            ("nothing_clipped", {"ppo/clip_fraction": [0.0] * 12, "ppo/approx_kl": [1e-9] * 12}),
            ("skipped_steps", {"optim/skipped_steps": [0, 1]}),
            ("learning_rate", {"optim/learning_rate": [0.0, 10.0]}),
            ("diverging_loss", {"sft/loss": [2.0, 2.1, *[9.0] * 6]}),
            ("diverging_loss", {"dpo/loss": [0.69, 0.69, *[4.0] * 6]}),
            ("diverging_loss", {"reward_model/loss": [0.69, 0.69, *[4.0] * 6]}),
            ("diverging_loss", {"ilql/loss": [4.0, 4.0, *[90.0] * 9]}),
            ("awac_weights", {"ilql/awac_weight_max": [1.0, *[math.exp(20)] * 3]}),
            ("displaced", {"rewards/chosen": [-0.1] * 10, "rewards/margins": [0.2] * 10}),
            ("clipped_before_update", {"ddpo/pre_update_clip_fraction": [0.06]}),
            ("images_clipped", {"ddpo/clip_fraction": [0.2, *[0.99] * 3]}),
            ("empty_rounds", {"rft/empty_rounds": [1]}),
            ("failed_rewards", {"reward/failed_fraction": [0.0, 0.6]}),
            ("length_limit", {"completion/truncated_fraction": [0.1, 0.2, 1.0, 1.0, 1.0]}),
            ("truncated", {"group/truncated_fraction": [0.3] * 3}),
            ("empty_completions", {"completion/length_mean": [9.0, 8.0, 1.0, 1.0, 1.0]}),
            ("kl_coef_runs_away", {"kl/coef": [0.05, 0.05, 5.0, 50.0]}),
            (
                "flat_reward",
                {"reward/mean": [0.3, 0.5] * 20, "reward/std": [0.4] * 40, "kl/per_sequence": [0.1] * 40},
            ),
            (
                "flat_reward",
                {"reward/mean": [0.3] * 40, "reward/std": [0.4] * 40, "kl/per_sequence": [9.0] * 40},
            ),
            ("equal_groups", {"group/zero_std_fraction": [0.95] * 4}),
            ("entropy_collapse", {"grpo/entropy": [2.0, 2.0, *[0.01] * 4]}),
            ("large_update", {"grpo/approx_kl": [0.01, 2.0, 3.0]}),
            ("clipped", {"grpo/clip_fraction": [0.3, 0.8, 0.9, 0.9]}),
            (
                "diverging_values",
                {"ppo/value_loss": [1.0, 1.0, *[20.0] * 3], "ppo/explained_variance": [0.1, *[-0.1] * 4]},
            ),
            ("constant_reward", {"reward/std": [1, 1, 0, 0, 0, 0], "reward/mean": [0, 0, -1, -1, -1, -1]}),
        ],
    )
    def test_a_sick_run_of_each_algorithm_is_spoken_of(self, expected, metrics):
        assert expected in [name for name, _ in names(records(**metrics))]

    @pytest.mark.parametrize(
        "metrics",
        [
            {"kl/per_sequence": [0, 100, 100], "kl/per_token": [0, 0.05, 0.05]},  # long completions
            # The same Llama at a weight of 0.1: nine sentences of ten were English.
            {
                "kl/per_sequence": [0.0, 0.31, 3.62, 4.15, 4.15, 2.66],
                "kl/per_token": [0.0, 0.017, 0.292, 0.31, 0.31, 0.209],
                "ppo/entropy": [1.11, 1.06, 0.89, 0.89, 0.89, 0.86],
            },
            {  # far, and sharper: it has learned what the reference does not do
                "kl/per_sequence": [0.0, 1.5, 8.59, 8.59, 10.7, 10.1],
                "kl/per_token": [0.0, 0.3, 1.58, 1.58, 1.84, 1.95],
                "ppo/entropy": [0.78, 0.68, 0.47, 0.48, 0.48, 0.43],
            },
            {"reward/std": [0.5, 0.4, 0, 0, 0, 0, 0], "reward/mean": [0, 0.1, 1, 1, 1, 1, 1]},  # solved
            {"completion/truncated_fraction": [1.0] * 9},  # never an EOS, as trlX's sentiments
            {"completion/truncated_fraction": [1.0] * 9, "group/truncated_fraction": [1.0] * 9},
            {"completion/truncated_fraction": [0.09] * 9, "group/truncated_fraction": [0.09] * 9},
            {"completion/truncated_fraction": [0.3] * 9},  # nothing is compared, or a rule deals with it
            {"completion/distinct_across_prompts": [0.2] * 9, "completion/distinct_fraction": [0.1] * 9},
            {"kl/coef": [5.0] * 9},  # so fixed
            # Rises by more than half of its deviation, or has not had the time to.
            {"reward/mean": [0.3] * 2 + [0.6] * 60, "reward/std": [0.4] * 62, "kl/per_sequence": [0.1] * 62},
            {"reward/mean": [0.3] * 39, "reward/std": [0.4] * 39, "kl/per_sequence": [0.1] * 39},
            {"reward/mean": [0.3] * 2 + [0.4] * 60, "reward/std": [0.4] * 62, "kl/per_sequence": [9.0] * 62},
            {"ppo/value_loss": [1.0, 1.0, *[20.0] * 9], "ppo/explained_variance": [0.5] * 11},
            # Rises slowly and all the time, or is nearly solved and still rises.
            {
                "reward/mean": [0.3 + 0.0022 * i for i in range(90)],
                "reward/std": [0.47] * 90,
                "kl/per_sequence": [0.004 * i for i in range(90)],
            },
            {
                "reward/mean": [0.93 + 0.0005 * i for i in range(60)],
                "reward/std": [0.25] * 60,
                "kl/per_sequence": [3.0] * 60,
            },
            {"group/zero_std_fraction": [0.8] * 9},
            {"reward/failed_fraction": [0.5] * 9},
            {"optim/skipped_steps": [0, 1, 2], "ddpo/loss_scale": [4096.0, 2048.0, 1024.0]},
        ],
    )
    def test_what_is_meant_so_is_left_alone(self, metrics):
        assert names(records(**metrics)) == []

    @pytest.mark.parametrize(
        ("history", "step", "least", "cause"),
        [
            (
                evaluated(0.5, 0.51, 0.5, 0.4, 0.38, training=[0.5, 0.5, 0.7, 0.7]),
                4,
                0.5,
                "only the reward of",
            ),
            (evaluated(0.5, 0.4, 0.38, training=[0.5, 0.5]), 2, 0.5, "learning rate is too high"),
            (evaluated(0.5, 0.4, 0.38, training=[0.5, 0.2]), 2, 0.5, "learning rate is too high"),
            (
                evaluated(0.5, 0.4, 0.38),
                2,
                0.5,
                "learning rate is too high",
            ),  # offline: no reward of training
            # Better than the start, and falling: from the best on it is told.
            (
                evaluated(0.5, 0.9, 0.8, 0.75, 0.7, training=[0.5, 0.5, 0.9, 0.9]),
                4,
                0.9,
                "fall from their best",
            ),
        ],
    )
    def test_an_evaluation_reward_that_falls_is_told(self, history, step, least, cause):
        (found,) = find(history)
        assert (found.rule.name, found.step) == ("falling_evaluation", step) and cause in found.rule.cause
        said = say(found.record())
        assert f"eval/reward/mean is {found.value:.3g} (healthy: {least} or more) at step {step}. " in said
        assert "read the samples" in found.rule.remedy

    @pytest.mark.parametrize(
        "history",
        [
            evaluated(0.5, 0.47, 0.47, 0.47),  # within the error of the difference
            evaluated(0.5, 0.4, 0.6, 0.4, 0.6),  # not twice in a row
            evaluated(0.5, 0.9, 0.86, 0.86, 0.86, 0.86),  # a little below the best
            evaluated(0.5, 0.4, 0.3, error=0.0),  # nothing to compare with
        ],
    )
    def test_an_evaluation_reward_that_wavers_is_not(self, history):
        assert find(history) == []

    def test_a_fall_is_measured_prompt_by_prompt(self):
        """A small fall of every prompt is certain; one of another mean that some prompts make is not."""
        falls = evaluated(0.5, 0.48, 0.48)
        assert find(falls) == []  # a difference of 0.02 is within errors of 0.02
        for record, fall in zip(falls, (0, 0.02, 0.02), strict=True):
            record["sampling/reward_means"] = [i / 15 - fall * (1 + i % 2 / 9) for i in range(16)]
        assert names(falls) == [("falling_evaluation", 2)]
        wavers = evaluated(0.5, 0.4, 0.4)
        for record, noise in zip(wavers, (0, 1, -1), strict=True):
            record["sampling/reward_means"] = [0.5 - 0.1 * abs(noise) + noise * (-1) ** i for i in range(16)]
        assert find(wavers) == []

    def test_prompts_that_all_fall_alike_are_a_fall(self):
        history = evaluated(1.0, 0.0, 0.0, error=0.0)
        for record in history:
            record["sampling/reward_means"] = [record["reward/mean"]] * 8
        assert names(history) == [("falling_evaluation", 2)]
        same = [record | {"sampling/reward_means": [1.0] * 8, "reward/mean": 1.0} for record in history]
        assert find(same) == []

    def test_a_fall_begins_with_the_first_evaluation_that_has_an_error(self):
        """Records of older runs have none, nor has an evaluation with a single reward."""
        old = evaluated(0.9, 0.9, 0.5, 0.5, 0.5)
        for record in old[:2]:
            del record["reward/standard_error"]
        assert find(old) == []
        assert names([*old, *evaluated(0.4, 0.4)]) == [("falling_evaluation", 1)]
        del (single := evaluated(0.9, 0.5, 0.4, 0.4))[0]["reward/standard_error"]
        assert [found.least for found in find(single)] == [0.5]

    def test_a_resumed_watch_remembers_evaluations(self):
        history = evaluated(0.5, 0.9, 0.8, 0.75, 0.7, training=[0.5, 0.5, 0.9, 0.9])
        for record in history[::2]:
            record["sampling/reward_means"] = [record["reward/mean"] + i % 2 / 9 for i in range(16)]
        for cut in range(len(history)):
            first, again = Watch(), Watch()
            assert [found for record in history[:cut] for found in first.see(record)] == []
            again.load(json.loads(json.dumps(first.state())))
            assert len([found for record in history[cut:] for found in again.see(record)]) == 1

    def test_a_flat_reward_is_told_without_a_kl(self):
        """GRPO at beta 0 measures none."""
        flat = {
            "reward/mean": [0.3, 0.5] * 20,
            "reward/std": [0.4] * 40,
            "group/zero_std_fraction": [0.1] * 40,
        }
        assert names(records(**flat)) == [("flat_reward", 160)]
        assert names(records(**flat | {"kl/per_sequence": [1.0] * 40})) == []  # rules of a KL judge it
        rising = flat | {"reward/mean": [0.3 + 0.004 * i for i in range(40)]}
        assert names(records(**rising)) == []

    # Of a flat run a low beginning by chance looks like a rise: here 0.1 deviations are 1.6 errors of the first values.
    @pytest.mark.parametrize(("rise", "least", "most"), [(0.2, 0, 0), (0.0, 32, 40)], ids=["learned", "flat"])
    def test_a_plateau_after_learning_is_not_flat(self, rise, least, most):
        """Mean of 128 rewards of 0 or 1 from 0.6, which may rise within 20 iterations, and stays; 40 seeds."""
        share = 0.6 + rise * np.minimum(np.arange(150) / 20, 1)
        found = []
        for seed in range(40):
            means = np.random.default_rng(seed).binomial(128, share) / 128
            run = {"reward/mean": means, "reward/std": np.sqrt(means * (1 - means))}
            history = records(**run, **{"group/zero_std_fraction": [0.1] * 150})
            found.append("flat_reward" in [name for name, _ in names(history)])
        assert least <= sum(found) <= most, sum(found)

    def test_a_rise_is_more_than_noise(self):
        """Two halves of 20 values, whose noise of 0.1 gives their difference an error of 0.1 times sqrt(2 / 20)."""
        noise = np.random.default_rng(0).normal(0, 0.1, (4000, 40))
        steps = np.repeat([0.0, 1.0], 20)
        for errors in (0.0, 1.0, 3.0):
            found = np.mean([rises(list(row)) for row in noise + errors * 0.1 * math.sqrt(2 / 20) * steps])
            expected = 1 - NormalDist(errors).cdf(1.0)
            assert abs(found - expected) < 0.04
        assert not rises([0.3] * 40) and rises([0.3] * 20 + [0.4] * 20)

    def test_one_step_an_iteration_clips_nothing_by_definition(self):
        history = records(**{"ppo/clip_fraction": [0.0] * 20, "ppo/approx_kl": [0.0] * 20})
        assert names([record | {"step": record["iteration"]} for record in history]) == []


class TestVariety:
    def texts(self, *rows):
        prompts, tokens = zip(*rows, strict=True)
        return Texts([], list(prompts), [], [list(row) for row in tokens], None, None)

    def test_golden(self):
        # Three different completions of four; pairs: a-12, a-12 (again), b-12, b-33 -> 3; top: 1, 2 three times of 8.
        found = variety(
            self.texts(("a", [1, 2, 0]), ("a", [1, 2, 0]), ("b", [1, 2, 0]), ("b", [3, 3, 0])), [0]
        )
        assert found == {
            "completion/distinct_fraction": 2 / 4,
            "completion/distinct_across_prompts": 2 / 3,
            "completion/top_token_fraction": 3 / 8,
        }

    def test_completions_of_an_eos_alone(self):
        assert variety(self.texts(("a", [0]), ("b", [0])), [0])["completion/top_token_fraction"] == 0.0


class TestDocuments:
    @pytest.mark.parametrize("metric", HEALTHY)
    def test_the_range_of_the_documents_is_the_range_of_the_code(self, metric):
        assert re.split("[;,]| and", ROWS[metric])[0].strip() == str(HEALTHY[metric])

    def test_no_range_of_the_documents_is_missing_in_the_code(self):
        form = re.compile(r"(below|above) -?[\d.e-]+|[\d.e-]+ to [\d.e-]+|0$")
        ranges = {name for name, cell in ROWS.items() if form.match(cell)}
        assert ranges == set(HEALTHY)

    def test_the_rules_are_those_of_the_documents(self):
        assert rules_table() in METRICS

    def test_rules_read_metrics_that_are_documented(self):
        assert {test.metric for rule in RULES for test in rule.tests} - {"steps"} <= set(ROWS)

    @pytest.mark.parametrize(
        ("bounds", "text"),
        [((0, 0), "0"), ((None, 0.05), "below 0.05"), ((1, None), "above 1"), ((1, 2), "1 to 2")],
    )
    def test_how_a_range_is_written(self, bounds, text):
        assert str(Range(*bounds)) == text


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"))


def run(checkpoint, folder, reward, *, lr, steps, **train):
    config = ppo_config(checkpoint, folder).evolve(
        optimizer={"kwargs": {"lr": lr}},
        train={"total_steps": steps, "eval_interval": 0, "batch_size": 16, "minibatch_size": 16, **train},
        method={
            "num_rollouts": 64,
            "chunk_size": 64,
            "ppo_epochs": 1,
            "target": None,
            "init_kl_coef": 0.0,
            "scale_reward": None,
        },
    )
    return jrl.train(reward_fn=reward, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)


def count_e(outputs, **others):
    return [text.count("e") / max(len(text), 1) for text in outputs]


def constant(outputs, **others):
    return [0.5] * len(outputs)


@pytest.mark.slow
class TestRuns:
    """Real PPO, SFT and DPO of a tiny model."""

    @pytest.mark.parametrize(
        ("reward", "lr", "steps", "expected"),
        [
            (count_e, 3e-2, 160, {"one_token", "entropy_collapse", "same_completions", "large_kl"}),
            (constant, 1e-3, 24, {"constant_reward"}),
            (count_vowels, 10.0, 16, {"learning_rate", "one_token", "same_completions", "large_kl"}),
            (count_vowels, 1e-9, 48, {"nothing_clipped"}),
            (count_vowels, 1e-3, 100, set()),
        ],
        ids=["collapse", "constant", "lr 10", "still", "healthy"],
    )
    def test_ppo(self, checkpoint, tmp_path, capsys, reward, lr, steps, expected):
        trainer = run(checkpoint, tmp_path, reward, lr=lr, steps=steps)
        found = [record for record in trainer.history if "watch" in record]
        assert {record["watch"] for record in found} == expected and len(found) == len(expected)
        assert [record for record in read(tmp_path) if "watch" in record] == found
        shown = capsys.readouterr().out
        assert shown.count("warning: ") == len(found) and all(say(record) in shown for record in found)

    def test_a_resumed_run_says_it_once(self, checkpoint, tmp_path):
        whole = run(checkpoint, tmp_path / "whole", constant, lr=1e-3, steps=32, checkpoint_interval=4)
        run(checkpoint, tmp_path / "cut", constant, lr=1e-3, steps=20, checkpoint_interval=4)
        again = run(
            checkpoint,
            tmp_path / "cut",
            constant,
            lr=1e-3,
            steps=32,
            checkpoint_interval=4,
            resume_from_checkpoint=str(tmp_path / "cut"),
        )
        found = [[record for record in trainer.history if "watch" in record] for trainer in (whole, again)]
        assert found[0] == found[1] and len(found[0]) == 1

    def test_it_can_be_silenced(self, checkpoint, tmp_path):
        trainer = run(checkpoint, tmp_path, constant, lr=1e-3, steps=24, watch=False)
        assert not any("watch" in record for record in trainer.history)

    def test_sft_and_dpo(self, checkpoint, tmp_path):
        optimizer = {"kwargs": {"lr": 10.0}}
        for expected, config, data in (
            ("diverging_loss", sft_config(checkpoint, tmp_path / "sft", optimizer=optimizer), PROMPTS * 2),
            ("entropy_collapse", dpo_config(checkpoint, tmp_path / "dpo", optimizer=optimizer), PREFERENCES),
        ):
            trainer = jrl.train(samples=data, config=config)
            found = {record["watch"] for record in trainer.history if "watch" in record}
            assert {"learning_rate", expected} <= found


def read(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]

# SPDX-License-Identifier: Apache-2.0
"""Several reward functions in whole runs: their sum, GDPO, functions that do not apply, and what a run says of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import jrl
from jrl.rollout.rewards import RewardError
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config
from tests.trainers.test_train_grpo import grpo_config, updates


async def short(outputs: list[str]) -> list[float]:
    await asyncio.sleep(0)
    return [-float(len(text)) / 10 for text in outputs]


def of_animals(prompts: list[str], outputs: list[str]) -> list[float | None]:
    """Applies to every other prompt."""
    return [
        float("a" in text) if "a" in prompt else None for prompt, text in zip(prompts, outputs, strict=True)
    ]


def silent(outputs: list[str]) -> list[None]:
    return [None] * len(outputs)


FUNCTIONS = [count_vowels, short, of_animals]
WEIGHTS = [1.0, 0.5, 2.0]


def one_sum(prompts: list[str], outputs: list[str]) -> list[float]:
    """The same as one function."""
    columns = [count_vowels(outputs), asyncio.run(short(outputs)), of_animals(prompts, outputs)]
    return [
        sum(weight * score for weight, score in zip(WEIGHTS, scores, strict=True) if score is not None)
        for scores in zip(*columns, strict=True)
    ]


def run(config: jrl.TRLConfig, reward_fn: Any) -> jrl.Trainer:
    return jrl.train(reward_fn=reward_fn, prompts=PROMPTS, config=config)


def config_of(checkpoint: str, folder: Path, **method: Any) -> jrl.TRLConfig:
    sections = {"method": {"reward_weights": WEIGHTS, **method}, "train": {"total_steps": 2}}
    return grpo_config(checkpoint, folder, "dr_grpo", **sections)


def rollouts_of(trainer: jrl.Trainer) -> list[dict[str, Any]]:
    lines = (trainer.run_dir / "rollouts" / "rollouts.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.fixture(scope="module")
def summed(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> jrl.Trainer:
    return run(config_of(checkpoint, tmp_path_factory.mktemp("sum") / "run"), FUNCTIONS)


def test_a_weighted_sum_is_what_one_function_of_it_gives(
    summed: jrl.Trainer, checkpoint: str, tmp_path: Path
) -> None:
    alone = run(config_of(checkpoint, tmp_path, reward_weights=None), one_sum)
    jax.tree.map(np.testing.assert_array_equal, summed.state, alone.state)


def test_each_function_has_metrics_and_a_column(summed: jrl.Trainer) -> None:
    rows = rollouts_of(summed)[:8]
    record = updates(summed)[0]
    for name, function in (("count_vowels", count_vowels), ("of_animals", of_animals)):
        given = {"outputs": [row["output"] for row in rows], "prompts": [row["prompt"] for row in rows]}
        wanted = function(**given)
        assert [row[f"reward/{name}"] for row in rows] == wanted
        known = [score for score in wanted if score is not None]
        assert record[f"reward/{name}/not_applicable"] == len(wanted) - len(known)
        if known:
            assert record[f"reward/{name}/mean"] == pytest.approx(np.mean(known))
            assert record[f"reward/{name}/std"] == pytest.approx(np.std(known, ddof=1))
    assert record["reward/failed"] == 0
    evaluation = next(found for found in summed.history if "reward/mean" in found and found is not record)
    assert {"reward/short/mean", "reward/of_animals/not_applicable"} <= evaluation.keys()


def test_gdpo_learns_from_each_function(summed: jrl.Trainer, checkpoint: str, tmp_path: Path) -> None:
    found = run(config_of(checkpoint, tmp_path, multi_objective_aggregation="normalize_then_sum"), FUNCTIONS)
    assert updates(found)[0]["reward/mean"] == updates(summed)[0]["reward/mean"]
    assert updates(found)[0]["optim/grad_norm"] != updates(summed)[0]["optim/grad_norm"]


def test_a_row_of_which_no_function_speaks_leaves_its_group(checkpoint: str, tmp_path: Path) -> None:
    def every_other(outputs: list[str]) -> list[float | None]:
        return [None if row % 2 else float(sum(map(ord, text))) for row, text in enumerate(outputs)]

    found = run(config_of(checkpoint, tmp_path, reward_weights=None), [every_other, silent])
    assert [record["reward/failed"] for record in updates(found)] == [4, 4]
    assert [record["group/valid_mean"] for record in updates(found)] == [2, 2]


@pytest.mark.parametrize("functions", [silent, [silent, silent]])
def test_only_none_ends_the_run(functions: Any, checkpoint: str, tmp_path: Path) -> None:
    with pytest.raises(
        RewardError, match=r"No rollout .* has a reward.*or answered None.*that applies to every"
    ):
        run(config_of(checkpoint, tmp_path, reward_weights=None), functions)


def test_ppo_sums_them(checkpoint: str, tmp_path: Path) -> None:
    found = run(ppo_config(checkpoint, tmp_path, train={"total_steps": 4}), [count_vowels, short])
    rows = rollouts_of(found)
    wanted = [row["reward/count_vowels"] + row["reward/short"] for row in rows]
    assert len(rows) == 8 and [row["reward"] for row in rows] == pytest.approx(wanted)

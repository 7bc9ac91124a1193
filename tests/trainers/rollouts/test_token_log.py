# SPDX-License-Identifier: Apache-2.0
"""Tokens with their figures: which iterations are kept, what a row holds, and a real run's file."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

import jrl
from jrl.learners.online_tokens import TokenFigures
from jrl.trainers.rollouts.token_log import MOST_TOKENS, PER_DOUBLING, ROWS, is_kept, token_log
from tests.tiny import tiny_tokenizer
from tests.trainers.runs import PROMPTS, count_vowels, grpo_config, ppo_config


def figures(length: int = 4, **parts: np.ndarray | None) -> TokenFigures:
    """Two rows, of which the second is padding; the second token of the first is another's."""
    mask = np.ones((2, length), bool)
    mask[0, 1] = mask[1] = False
    numbers = np.tile(np.arange(length) + 0.123456, (2, 1))
    found = TokenFigures(
        prompt=np.tile(np.array([40, 41, 42]), (2, 1)),
        prompt_mask=np.array([[True, True, False]] * 2),
        reward=np.array([0.5, 0.0]),
        tokens=np.tile(np.arange(length) % 90 + 5, (2, 1)),
        mask=mask,
        logprobs=-numbers,
        advantages=numbers,
        kl=None,
        values=None,
    )
    return found._replace(**parts)


def test_a_row_names_what_there_is() -> None:
    tokenizer = tiny_tokenizer()
    (row,) = token_log(figures(), tokenizer)
    assert row["prompt"] == tokenizer.decode([40, 41]) and row["reward"] == 0.5
    assert row["ids"] == [5, 6, 7, 8] and "".join(row["tokens"]) == tokenizer.decode([5, 6, 7, 8])
    assert row["advantage"] == [0.1235, None, 2.123, 3.123]
    assert set(row) == {"prompt", "reward", "ids", "tokens", "advantage", "logprob"}
    (row,) = token_log(figures(kl=np.full((2, 4), 1 / 3), values=np.ones((2, 4))), tokenizer)
    assert row["kl"] == [0.3333, None, 0.3333, 0.3333] and row["value"] == [1.0, None, 1.0, 1.0]


def test_a_long_completion_is_cut() -> None:
    (row,) = token_log(figures(3 * MOST_TOKENS), tiny_tokenizer())
    assert {len(row[name]) for name in ("ids", "tokens", "advantage", "logprob")} == {MOST_TOKENS}


def test_a_run_of_any_length_keeps_few_iterations() -> None:
    kept = [number for number in range(100_000) if is_kept(number)]
    assert kept[: 2 * PER_DOUBLING] == list(range(2 * PER_DOUBLING))
    assert len(kept) < 16 * PER_DOUBLING
    assert all(later - one <= max(1, one // PER_DOUBLING) for one, later in pairwise(kept))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "names"),
    [(ppo_config, {"advantage", "kl", "value", "logprob"}), (grpo_config, {"advantage", "kl", "logprob"})],
)
def test_a_run_keeps_its_tokens_and_a_resumed_one_cuts_them_back(make, names, checkpoint, tmp_path: Path):
    config = make(checkpoint, tmp_path / "run")
    trainer = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    path = tmp_path / "run" / "rollouts" / "tokens.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record["step"] for record in trainer.history if "iteration" in record]
    assert [row["step"] for row in rows] == [step for step in steps for _ in range(ROWS)]
    samples = [json.loads(line) for line in (path.parent / "rollouts.jsonl").read_text().splitlines()]
    logged = {(row["step"], tuple(row["output_tokens"])): row["reward"] for row in samples}
    for row in rows:
        assert set(row) == {"step", "prompt", "reward", "ids", "tokens", *names}
        assert all(len(row[name]) == len(row["ids"]) for name in names)
        found = [
            reward
            for (step, ids), reward in logged.items()
            if step == row["step"] and list(ids) == row["ids"][: len(ids)]
        ]
        assert any(reward == pytest.approx(row["reward"], rel=1e-3) for reward in found)
    first = path.read_bytes()
    resumed = config.evolve(train={"resume_from_checkpoint": str(tmp_path / "run")})
    jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=resumed)
    assert path.read_bytes() == first

# SPDX-License-Identifier: Apache-2.0
"""The dense reward: as many numbers as tokens, in the right places."""

import importlib

import pytest

from examples.sentiment.rewards import vader
from tests.examples.processes import EXAMPLES

WORDS = ["terrible", "boring", "film", "wonderful", "great", "<eos>"]


class Words:
    """A tokenizer whose ids are places in `WORDS`."""

    def batch_decode(self, rows, skip_special_tokens):
        assert skip_special_tokens
        return [" ".join(WORDS[token] for token in row if token != 5) for row in rows]


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("ppo_dense_sentiment")


def test_halves_are_rewarded_where_they_end(example):
    tokens = [[0, 1, 2, 3, 4, 5], [3, 0, 5]]
    scorn, praise = vader(["terrible boring film", "wonderful great"])
    great, awful = vader(["wonderful", "terrible"])
    found = example.turnaround(output_tokens=tokens, tokenizer=Words())
    assert scorn < -0.5 < 0.5 < praise
    assert found[0] == pytest.approx([0, 0, -scorn, 0, 0, praise])
    assert found[1] == pytest.approx([-great, 0, awful])  # the shorter half comes first
    assert [len(row) for row in found] == [6, 3]


def test_a_single_token_is_a_second_half(example):
    assert example.turnaround(output_tokens=[[4], [5]], tokenizer=Words()) == [vader(["great"]), [0.0]]


def test_the_sparse_reward_is_the_sum_and_the_metrics_are_the_halves(example):
    tokens = [[0, 1, 3, 5], [3, 3, 0, 0]]
    metrics = example.half_sentiments(output_tokens=tokens, tokenizer=Words())
    differences = [b - a for a, b in zip(metrics["first_half"], metrics["second_half"], strict=True)]
    assert example.sparse_turnaround(output_tokens=tokens, tokenizer=Words()) == pytest.approx(differences)
    assert differences[0] > 0.5 > -0.5 > differences[1]

# SPDX-License-Identifier: Apache-2.0
"""The dialogues that come with the example, and the reward that is learned from them."""

import importlib
import json

import numpy as np
import pytest

from examples.dialogue.preference import NUM_FEATURES, Preference, features
from tests.examples.processes import EXAMPLES

RECORD = {
    "turns": ["How do I bake bread?", "Knead it.", "And then?"],
    "chosen": "Bake it.",
    "rejected": "No idea.",
}


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    return importlib.import_module("hh_dialogue")


@pytest.fixture(scope="module")
def records():
    lines = (EXAMPLES / "dialogue" / "dialogues.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


def test_the_bundled_files_are_what_the_grammars_write(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    for path, text in importlib.import_module("write_data").files().items():
        assert path.read_text(encoding="utf-8") == text, path.name


def test_every_dialogue_ends_with_a_request(records):
    assert len(records) == 800
    assert {len(record["turns"]) for record in records} == {1, 3}
    assert all(record["chosen"] != record["rejected"] for record in records)


def test_a_dialogue_as_text(example):
    prompt = "Human: How do I bake bread?\nAssistant: Knead it.\nHuman: And then?\nAssistant:"
    assert example.prompt_of(RECORD) == prompt
    messages = example.dialogue(RECORD, "rejected")
    assert "".join(messages) == f"{prompt} No idea."
    assert messages[1::2] == [" Knead it.\n", " No idea."]  # what is learned
    assert example.prompts_of([RECORD]) == [{"prompt": prompt, "original_output": "Bake it."}]


def test_ilql_learns_from_both_replies(example):
    found = example.offline([RECORD])
    prompt = example.prompt_of(RECORD)
    assert found == {"samples": [[prompt, " Bake it."], [prompt, " No idea."]], "rewards": [1.0, -1.0]}


def test_the_reward_is_the_margin_over_the_chosen_reply(example):
    def length(prompts, replies):
        return [float(len(reply)) for reply in replies]

    found = example.preference_metrics(length)(["p", "p"], ["four", "longer"], ["fives", "fives"])
    assert found == {"margin": [-1.0, 1.0], "preferred": [0.0, 1.0]}
    reward_fn = example.online([RECORD], length)["reward_fn"]
    assert reward_fn(prompts=["p"], outputs=["four"], original_output=["fives"]) == [-1.0]


def test_features_speak_of_the_last_request_and_the_reply():
    prompt = "Human: bread?\nAssistant: yes\nHuman: oven?\nAssistant:"
    (row,) = features([prompt], ["hot"])
    assert np.count_nonzero(row) == 2  # "hot", and "oven hot"; nothing of bread or yes
    assert np.linalg.norm(row) == pytest.approx(1.0)
    np.testing.assert_array_equal(row, features(["Human: oven?\nAssistant:"], ["Hot!"])[0])
    assert not features([prompt], [""]).any()


def test_training_descends_the_bradley_terry_loss():
    prompts, chosen, rejected = ["Human: a\nAssistant:"] * 3, ["b c", "d", "e"], ["f", "g b", "h"]
    difference = features(prompts, chosen) - features(prompts, rejected)
    weights = np.zeros(NUM_FEATURES)
    for _ in range(20):
        slope = -1.0 / (1.0 + np.exp(difference @ weights))  # d/dm −log σ(m)
        weights -= 2.0 * ((slope[:, None] * difference).mean(axis=0) + 0.01 * weights)
    found = Preference(prompts, chosen, rejected, num_steps=20, learning_rate=2.0, weight_decay=0.01)
    np.testing.assert_allclose(found(prompts, chosen), features(prompts, chosen) @ weights, atol=1e-5)


def test_it_tells_replies_to_new_requests_apart(example, records):
    train, heldout = records[:200], records[-100:]
    preference = Preference(*example.columns(train))
    assert preference.accuracy(*example.columns(heldout)) > 0.85
    prompts, chosen, _ = example.columns(heldout)
    elsewhere = chosen[1:] + chosen[:1]
    assert np.mean(preference(prompts, chosen)) > np.mean(preference(prompts, elsewhere)) + 0.5

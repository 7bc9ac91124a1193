# SPDX-License-Identifier: Apache-2.0
"""Rewards that `--reward` names once or several times."""

import pytest

from jrl import named_functions
from jrl.named_functions import load_rewards
from jrl.rewards import accuracy_reward, think_format_reward
from tests.trainers.runs import count_vowels

VOWELS, FORMAT = "tests.trainers.runs:count_vowels", "jrl.rewards:think_format_reward"


@pytest.fixture
def classifiers(monkeypatch):
    """What classifiers are asked for with, in the place of models."""
    asked = []

    def load(name, *, label, output, mesh):
        asked.append((name, label, output, mesh))
        return accuracy_reward

    monkeypatch.setattr(named_functions, "load_reward_model", load)
    return asked


def test_one_name_is_one_function():
    assert load_rewards([VOWELS]) is count_vowels


def test_several_names_are_a_list_in_their_order():
    assert load_rewards([FORMAT, VOWELS, FORMAT]) == [think_format_reward, count_vowels, think_format_reward]


def test_a_label_is_of_the_classifier_among_them(classifiers):
    found = load_rewards([VOWELS, "org/classifier"], label="1", output="logit", mesh="a mesh")
    assert found == [count_vowels, accuracy_reward]
    assert classifiers == [("org/classifier", "1", "logit", "a mesh")]


def test_without_one_each_has_its_default(classifiers):
    load_rewards(["org/a", "org/b"])
    assert [asked[:3] for asked in classifiers] == [
        ("org/a", None, "probability"),
        ("org/b", None, "probability"),
    ]


@pytest.mark.parametrize("names", [[VOWELS, FORMAT], ["org/a", "org/b"]])
def test_a_label_of_none_or_of_several_is_refused(names, classifiers):
    with pytest.raises(ValueError, match=r"a score of one classifier, but --reward names [02]: "):
        load_rewards(names, label="1")
    assert not classifiers


def test_each_must_be_there():
    with pytest.raises(ValueError, match="has no function 'vowels'"):
        load_rewards([FORMAT, "tests.trainers.runs:vowels"])

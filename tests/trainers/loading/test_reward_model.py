# SPDX-License-Identifier: Apache-2.0
"""A classifier as a reward: the right score of the right label, in order, compiled once a width."""

import threading

import jax
import numpy as np
import pytest

import jrl
from jrl.data.batching import pad_right
from jrl.mesh import make_mesh
from jrl.models.classifier import save_classifier
from jrl.trainers.loading.reward_model import find_label
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier
from tests.tiny import tiny_tokenizer
from tests.trainers.loading.reward_models import save_reward_model

TEXTS = ["good", "", "a longer text", "bad", "ok", "so it goes", "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_reward_model(tmp_path_factory.mktemp("reward") / "model")


@pytest.fixture(scope="module")
def reward(folder):
    return jrl.load_reward_model(folder, output="logit", batch_size=3)


def one_by_one(reward, texts):
    """Each text alone, without anything of `RewardModel.__call__`."""
    score = jax.jit(reward.classifier.scores)
    rows = [pad_right([reward.tokenizer(text)["input_ids"]], pad_token_id=0, width=16) for text in texts]
    return np.concatenate([score(reward.params, *row) for row in rows])


def test_rewards_are_the_label_s_scores_in_the_order_of_the_texts(reward):
    expected = one_by_one(reward, TEXTS)
    rewards = reward(samples=TEXTS)
    assert all(type(number) is float for number in rewards)
    np.testing.assert_allclose(rewards, expected[:, 2], atol=1e-5)
    assert np.std(rewards) > 0.05
    np.testing.assert_allclose(reward(samples=TEXTS[::-1]), rewards[::-1], atol=1e-5)
    assert reward(samples=[]) == []


def test_a_width_is_compiled_once(folder):
    reward = jrl.load_reward_model(folder, batch_size=2)
    reward(samples=["ab", "cd", "ef"])  # 4 tokens each: width 8, a full batch and one filled up
    assert reward._score._cache_size() == 1
    reward(samples=["abcdef", "", "x" * 30])  # 8, 2 and 32 tokens: widths 8 and 32
    assert reward._score._cache_size() == 2
    reward(samples=["y" * 27] * 5)
    assert reward._score._cache_size() == 2


def test_all_batches_are_sent_before_the_first_answer_is_fetched(reward, monkeypatch):
    events = []
    dispatch, device_get = type(reward)._dispatch, jax.device_get
    monkeypatch.setattr(
        type(reward), "_dispatch", lambda self, rows: events.append("s") or dispatch(self, rows)
    )
    monkeypatch.setattr(jax, "device_get", lambda tree: events.append("g") or device_get(tree))
    reward(samples=TEXTS)
    assert events == ["s", "s", "s", "g"]


def test_probability_is_the_softmax_over_the_labels(folder, reward):
    logits = one_by_one(reward, TEXTS[:3])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    for label, column in ((None, 2), ("Glad", 1), (0, 0)):
        chosen = jrl.load_reward_model(folder, label=label, batch_size=3)
        np.testing.assert_allclose(chosen(samples=TEXTS[:3]), shares[:, column], atol=1e-5)


def test_independent_labels_have_a_sigmoid_each(tmp_path):
    config = labelled(ENCODERS["distilbert"])
    config.problem_type = "multi_label_classification"
    folder = save_reward_model(tmp_path / "m", config)
    logits = jrl.load_reward_model(folder, output="logit", batch_size=3)(samples=TEXTS[:3])
    found = jrl.load_reward_model(folder, batch_size=3)(samples=TEXTS[:3])
    np.testing.assert_allclose(found, 1 / (1 + np.exp(-np.array(logits))), atol=1e-5)


def test_a_model_with_one_label_gives_its_logit(tmp_path):
    folder = save_reward_model(tmp_path / "m", labelled(ENCODERS["distilbert"], 1))
    reward = jrl.load_reward_model(folder, batch_size=3)
    np.testing.assert_allclose(reward(samples=TEXTS[:3]), one_by_one(reward, TEXTS[:3])[:, 0], atol=1e-5)


def test_a_decoder_with_a_score_head_is_read_at_its_last_token(tmp_path):
    model, params = random_classifier(labelled(DECODERS["gpt2"], 1))
    save_classifier(tmp_path / "m", model, params, tokenizer=tiny_tokenizer())
    reward = jrl.load_reward_model(tmp_path / "m", batch_size=4)
    rewards = reward(samples=["so it goes", "", "we"])
    expected = one_by_one(reward, ["so it goes", "we"])[:, 0]
    np.testing.assert_allclose([rewards[0], rewards[2]], expected, atol=1e-5)
    assert rewards[1] == 0.0  # this tokenizer adds nothing: there is no token to read


def test_long_texts_lose_the_end_that_the_tokenizer_says(tmp_path, folder, reward):
    long = "abcdefghijklmnopqrstuvwxyz" * 4
    np.testing.assert_allclose(reward(samples=[long]), reward(samples=[long[:46]]), atol=1e-5)
    short = jrl.load_reward_model(folder, output="logit", batch_size=3, max_length=10)
    np.testing.assert_allclose(short(samples=[long]), reward(samples=[long[:8]]), atol=1e-5)
    left = jrl.load_reward_model(
        save_reward_model(tmp_path / "m", truncation_side="left"), output="logit", batch_size=3
    )
    np.testing.assert_allclose(left(samples=[long]), reward(samples=[long[-46:]]), atol=1e-5)


@pytest.mark.parametrize(
    ("samples", "message"),
    [
        (["good", None], r"`samples\[1\]` must be a string, got NoneType"),
        ("good", "`samples` must be a list of texts, got one string"),
    ],
)
def test_what_is_no_text_is_refused(reward, samples, message):
    with pytest.raises(ValueError, match=message):
        reward(samples=samples)


def test_it_runs_under_a_foreign_mesh_and_in_a_thread(reward):
    expected = reward(samples=TEXTS)
    found = []
    with jax.set_mesh(make_mesh()):
        found.append(reward(samples=TEXTS))
        thread = threading.Thread(target=lambda: found.append(reward(samples=TEXTS)))
        thread.start()
        thread.join()
    assert found == [expected, expected]


@pytest.mark.parametrize(
    ("labels", "label", "number"),
    [
        (["NEGATIVE", "POSITIVE"], None, 1),
        (["positive", "negative"], None, 0),
        (["neg", "neu", "pos"], None, 2),
        (["LABEL_0", "LABEL_1"], None, 1),
        (["score"], None, 0),
        (["anger", "joy", "fear"], "JOY", 1),
        (["anger", "joy", "fear"], "2", 2),
        (["1", "0"], "0", 1),
        (["anger", "joy", "fear"], 0, 0),
    ],
)
def test_which_label_is_the_reward(labels, label, number):
    assert find_label(labels, label) == number


@pytest.mark.parametrize(
    ("labels", "label", "message"),
    [
        (
            ["anger", "joy", "fear"],
            None,
            r"`label` must say which .* \(0: anger, 1: joy, 2: fear\), got None",
        ),
        (["anger", "joy"], "hope", r"must be a label of this classifier \(0: anger, 1: joy\) .* got 'hope'"),
        (["anger", "joy"], 2, "got 2"),
        (["anger", "joy"], -1, "got -1"),
    ],
)
def test_a_label_that_is_not_there_is_named_with_those_there_are(labels, label, message):
    with pytest.raises(ValueError, match=message):
        find_label(labels, label)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"output": "log"}, "`output` must be one of probability, logit, got 'log'"),
        ({"batch_size": 0}, "`batch_size` must be at least 1, got 0"),
        ({"max_length": 49}, "`max_length` must be from 1 to the model's 48 positions, got 49"),
        ({"label": "gladder"}, r"a label of this classifier \(0: sad, 1: glad, 2: POSITIVE\)"),
    ],
)
def test_arguments_out_of_range_are_named(folder, options, message):
    with pytest.raises(ValueError, match=message):
        jrl.load_reward_model(folder, **options)

# SPDX-License-Identifier: Apache-2.0
"""The encoder reads in both directions, from the first real token, whatever the padding; its tables cover it."""

import functools

import jax
import numpy as np
import pytest
from flax.traverse_util import flatten_dict
from transformers import BertConfig, DistilBertConfig

from jrl.models.classifier import Classifier
from jrl.models.families import FAMILIES
from tests.models.classifier_cases import BERT, DISTILBERT, ENCODERS, labelled, random_classifier

LENGTHS = (9, 4, 1)


@functools.cache
def scorer(name):
    model, params = random_classifier(labelled(ENCODERS[name]))
    compiled = jax.jit(model.scores)
    return lambda tokens, mask: np.asarray(compiled(params, tokens, mask))


def rows(left, right, seed=0):
    """The same texts under any padding, which holds ids outside the vocabulary."""
    words = np.random.default_rng(seed).integers(2, 97, (len(LENGTHS), max(LENGTHS)))
    tokens = np.full((len(LENGTHS), left + max(LENGTHS) + right), 1000, np.int32)
    mask = np.zeros(tokens.shape, bool)
    for row, length in enumerate(LENGTHS):
        start = left + (max(LENGTHS) - length if left else 0)
        tokens[row, start : start + length] = words[row, :length]
        mask[row, start : start + length] = True
    return tokens, mask


def test_every_encoder_family_has_a_case():
    kinds = {family.model_type for family in FAMILIES.values() if family.kind == "encoder"}
    assert {config.model_type for config in ENCODERS.values()} == kinds


@pytest.mark.parametrize("name", ENCODERS)
def test_table_covers_the_parameter_tree_and_its_transforms_invert(name):
    model = Classifier.from_config(labelled(ENCODERS[name]))
    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)), sep="/")
    entries = model.entries()
    assert sorted(path for entry in entries for path in entry.paths) == sorted(shapes)
    assert len({entry.name for entry in entries}) == len(entries)
    for entry in entries:
        tensor = np.arange(np.prod(entry.shape), dtype=np.float32).reshape(entry.shape)
        parts = entry.transform.load(tensor, [shapes[path].shape for path in entry.paths])
        assert [part.shape for part in parts] == [shapes[path].shape for path in entry.paths], entry.name
        np.testing.assert_array_equal(entry.transform.save(parts, model.vocab_size), tensor, entry.name)


@pytest.mark.parametrize("name", ENCODERS)
def test_padding_of_either_side_changes_nothing(name):
    expected = scorer(name)(*rows(0, 7))
    for padding in ((7, 0), (3, 4)):
        np.testing.assert_allclose(scorer(name)(*rows(*padding)), expected, atol=1e-5)
    assert expected.shape == (3, 3) and expected.dtype == np.float32


@pytest.mark.parametrize("name", ["bert", "roberta", "distilbert"])
def test_every_token_and_its_place_count_but_no_padding(name):
    tokens, mask = rows(0, 0)
    before = scorer(name)(tokens, mask)
    np.testing.assert_allclose(scorer(name)(*rows(0, 7)), before, atol=1e-5)
    last, swapped = tokens.copy(), tokens.copy()
    last[:, 3] = 50  # the last token of row 1: a causal model that reads the first token would not see it
    swapped[:, [1, 2]] = tokens[:, [2, 1]]
    after_last, after_swap = scorer(name)(last, mask), scorer(name)(swapped, mask)
    assert (np.abs(after_last - before)[:2] > 1e-3).any(axis=1).all()
    assert (np.abs(after_swap - before)[:2] > 1e-3).any(axis=1).all()
    np.testing.assert_array_equal(after_last[2], before[2])  # a row of one token has neither


def test_roberta_counts_positions_from_the_pad_id():
    model = Classifier.from_config(ENCODERS["roberta"])
    assert (model.max_positions, model.config.body.position_offset) == (48, 2)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (BertConfig(**BERT, is_decoder=True), "bert: `is_decoder` must be False, got True"),
        (BertConfig(**BERT, add_cross_attention=True), "`add_cross_attention` must be False"),
        (
            BertConfig(**BERT, position_embedding_type="relative_key"),
            "bert: `position_embedding_type` must be 'absolute', got 'relative_key'",
        ),
        (
            DistilBertConfig(**DISTILBERT | {"activation": "mish"}),
            "distilbert: the activation must be one of",
        ),
    ],
)
def test_unsupported_options_are_named(config, message):
    with pytest.raises(ValueError, match=message):
        Classifier.from_config(config)


def test_fresh_parameters_pad_the_vocabulary_with_zeros():
    params = Classifier.from_config(ENCODERS["bert"]).init(jax.random.key(0))
    table = np.asarray(params["embed"]["embedding"])
    assert table[:97].any(axis=1).all() and not table[97:].any()


def test_dropout_rates_are_those_of_the_config():
    rates = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2}
    config = Classifier.from_config(BertConfig(**BERT | rates)).config
    body = config.body
    assert (body.embedding_dropout, body.residual_dropout, body.attention_dropout) == (0.1, 0.1, 0.2)
    assert config.head_dropout == 0.1
    assert Classifier.from_config(BertConfig(**BERT, classifier_dropout=0.3)).config.head_dropout == 0.3
    rates = {"dropout": 0.1, "attention_dropout": 0.2, "seq_classif_dropout": 0.3}
    config = Classifier.from_config(DistilBertConfig(**DISTILBERT | rates)).config
    assert (config.body.residual_dropout, config.body.attention_dropout, config.head_dropout) == (
        0.1,
        0.2,
        0.3,
    )

# SPDX-License-Identifier: Apache-2.0
"""Tiny transformers configs of classifiers: every encoder family and its variants; dropout off."""

from __future__ import annotations

import copy
from typing import Any

import jax
import numpy as np
from transformers import BertConfig, DistilBertConfig, RobertaConfig

from jrl.models.classifier import Classifier
from jrl.models.families import FAMILIES
from tests.models.case_fields import IDS
from tests.models.family_cases import CASES

LABELS = ("sad", "glad", "POSITIVE")

BERT: dict[str, Any] = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64)
BERT |= dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, max_position_embeddings=48)
BERT |= dict(initializer_range=0.1) | IDS
DISTILBERT: dict[str, Any] = dict(dim=32, n_layers=2, n_heads=4, hidden_dim=64, max_position_embeddings=48)
DISTILBERT |= dict(dropout=0.0, attention_dropout=0.0, seq_classif_dropout=0.0, initializer_range=0.1) | IDS

ENCODERS: dict[str, Any] = {
    "bert": BertConfig(**BERT),
    "bert-gelu_new": BertConfig(**BERT | {"hidden_act": "gelu_new", "layer_norm_eps": 1e-2}),
    "roberta": RobertaConfig(**BERT | {"max_position_embeddings": 50, "pad_token_id": 1, "eos_token_id": 2}),
    "distilbert": DistilBertConfig(**DISTILBERT),
    "distilbert-relu": DistilBertConfig(**DISTILBERT | {"activation": "relu", "sinusoidal_pos_embds": True}),
}
KNOWN = {family.model_type for family in FAMILIES.values() if family.kind == "causal"}
DECODERS = {name: config for name, config in CASES.items() if config.model_type in KNOWN}


def labelled(config: Any, num_labels: int = len(LABELS)) -> Any:
    """A copy of a transformers config, for a classifier with so many labels."""
    config = copy.deepcopy(config)
    if num_labels == len(LABELS):
        config.id2label = dict(enumerate(LABELS))
        config.label2id = {name: number for number, name in enumerate(LABELS)}
    else:
        config.num_labels = num_labels
    return config


def random_classifier(config: Any, seed: int = 0) -> tuple[Classifier, Any]:
    """A classifier all of whose parameters are random, norms and biases included. Nothing is compiled for it."""
    model = Classifier.from_config(config)
    rng = np.random.default_rng(seed)

    def draw(path: Any, shape: jax.ShapeDtypeStruct) -> np.ndarray:
        around = 1.0 if path[-1].key == "scale" else 0.0
        array = rng.normal(around, 0.15, shape.shape).astype(np.float32)
        if path[0].key == "embed":
            array[model.vocab_size :] = 0.0  # the padding of the vocabulary
        return array

    shapes = jax.eval_shape(model.init, jax.random.key(0))
    return model, jax.tree_util.tree_map_with_path(draw, shapes)

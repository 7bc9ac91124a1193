# SPDX-License-Identifier: Apache-2.0
"""A tiny DistilBERT classifier on disk, with a tokenizer that adds special tokens as BERT's does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jrl.models.classifier import save_classifier
from tests.models.classifier_cases import ENCODERS, labelled, random_classifier

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")


def tokenizer(**options: Any) -> PreTrainedTokenizerFast:
    """One id a character of printable ASCII up to "|", between [CLS] and [SEP]: 97 ids."""
    words = [*SPECIAL, *(chr(code) for code in range(32, 125))]
    made = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    names = dict(pad_token="[PAD]", unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]")
    return PreTrainedTokenizerFast(tokenizer_object=made, model_max_length=48, **names, **options)


def save_reward_model(folder: Path, config: Any = None, **tokenizer_options: Any) -> str:
    """A random classifier of three labels, the last of them POSITIVE."""
    model, params = random_classifier(labelled(ENCODERS["distilbert"]) if config is None else config)
    save_classifier(folder, model, params, tokenizer=tokenizer(**tokenizer_options))
    return str(folder)

# SPDX-License-Identifier: Apache-2.0
"""trlX's pipeline of prompts, and the stores of its offline methods."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.prompts import PromptSet
from jrl.interop import DataLoader, warn_ignored
from jrl.trlx.dialogue import tokenize_dialogue
from jrl.trlx.loader import padded, with_pad_token
from jrl.trlx.pipeline import BasePipeline
from jrl.trlx.registry import register_datapipeline
from jrl.trlx.stores import DialogMessage, DialogStore, ILQLRolloutStorage, ILQLSeq2SeqRolloutStorage

__all__ = [
    "DialogMessage",
    "DialogStore",
    "ILQLRolloutStorage",
    "ILQLSeq2SeqRolloutStorage",
    "PromptPipeline",
    "prompt_set_of",
    "tokenize_dialogue",
]

UNLIMITED = 1 << 30
"""Tokens of a prompt where the caller named no limit; a trainer cuts it to its own."""
_ROWS_AT_ONCE = 1024


@register_datapipeline
class PromptPipeline(BasePipeline):
    """Tokenised prompts with their metadata.

    Args:
      prompts: Texts, or dicts with the text under "prompt" and metadata under every other key. They are not changed.
      max_prompt_length: Most tokens of a prompt; longer ones are cut on the tokenizer's `truncation_side` and warned of
        once. Older scripts leave it out and give the tokenizer in its place.
      tokenizer: A transformers tokenizer.
      add_special_tokens: Whether prompts keep the special tokens that the tokenizer puts around a text, as an encoder
        reads them.

    Attributes:
      prompts: One dict a prompt: `input_ids`, `attention_mask` and the metadata.
      tokenizer: Pads batches, on its `padding_side`.

    Raises:
      ValueError: If there are no prompts, or one is not a text, has no tokens or lacks a key; the message names its
        index.
    """

    def __init__(
        self,
        prompts: Sequence[str] | Sequence[Mapping[str, Any]],
        max_prompt_length: Any = None,
        tokenizer: Any = None,
        add_special_tokens: bool = False,
    ) -> None:
        super().__init__()
        if tokenizer is None and not isinstance(max_prompt_length, int | None):
            max_prompt_length, tokenizer = None, max_prompt_length
        if tokenizer is None:
            raise ValueError("`tokenizer` is required: prompts are texts.")
        self.tokenizer = with_pad_token(tokenizer)
        found = PromptSet(
            prompts,
            self.tokenizer,
            max_length=UNLIMITED if max_prompt_length is None else max_prompt_length,
            seed=0,
            long_prompts="truncate",
            # Any start id makes the set read as an encoder does; the pipeline holds no decoder rows.
            decoder_start_token_id=0 if add_special_tokens else None,
            add_special_tokens=False,
        )
        self.prompts: list[dict[str, Any]] = []
        for start in range(0, len(found), _ROWS_AT_ONCE):
            indices = np.arange(start, min(start + _ROWS_AT_ONCE, len(found)))
            rows = found.rows(indices, width=found.width(indices))
            for number, ids in enumerate(rows.token_lists):
                metadata = {name: column[number] for name, column in rows.metadata.items()}
                self.prompts.append({"input_ids": ids, "attention_mask": [1] * len(ids), **metadata})

    def __getitem__(self, ix: int) -> dict[str, Any]:
        return self.prompts[ix]

    def __len__(self) -> int:
        return len(self.prompts)

    def create_loader(  # type: ignore[override]  # the seed's own signature departs from its base class
        self,
        batch_size: int,
        shuffle: bool = False,
        sampler: Iterable[int] | None = None,
        drop_last: bool = False,
    ) -> DataLoader:
        """Batches with `input_ids` and `attention_mask` as arrays (B P), and every metadata key as a list.

        Args:
          batch_size: Prompts of a batch.
          shuffle: Whether every pass has an order of its own.
          sampler: Yields indices instead.
          drop_last: Whether a short last batch is left out.
        """
        return DataLoader(
            self, batch_size, collate_fn=self._collate, shuffle=shuffle, sampler=sampler, drop_last=drop_last
        )

    def _collate(self, elements: list[dict[str, Any]]) -> Any:
        from transformers import BatchEncoding  # here, because it takes seconds where torch is installed

        arrays = padded(
            [element["input_ids"] for element in elements],
            pad_token_id=self.tokenizer.pad_token_id,
            padding_side=self.tokenizer.padding_side,
        )
        names = [name for name in elements[0] if name not in arrays]
        return BatchEncoding(arrays | {name: [element[name] for element in elements] for name in names})


def prompt_set_of(
    pipeline: Any, tokenizer: Any, *, max_length: int, seed: int, decoder_start_token_id: int | None
) -> PromptSet:
    """The prompts of a pipeline as the trainers read them.

    Args:
      pipeline: With a length, and by index a mapping of `input_ids` and metadata.
      tokenizer: The run's.
      max_length: Most tokens of a prompt; longer ones are cut and warned of.
      seed: Of the order.
      decoder_start_token_id: Of a seq2seq model.
    Raises:
      ValueError: If the pipeline is empty, or its elements do not all hold the same keys.
    """
    loader = getattr(type(pipeline), "create_loader", None)
    if loader is not None and not loader.__module__.startswith("jrl."):
        warn_ignored(
            f"{type(pipeline).__name__}.create_loader",
            "prompts are read by their numbers, and a run orders and batches them itself",
        )
    elements = [dict(pipeline[index]) for index in range(len(pipeline))]
    for index, element in enumerate(elements):
        if "input_ids" not in element or set(element) != set(elements[0]):
            raise ValueError(
                f"The pipeline's element {index} has the keys {sorted(element)}; all must have `input_ids` and the "
                f"same metadata as element 0, {sorted(elements[0])}."
            )
    names = [
        name for name in (elements[0] if elements else ()) if name not in ("input_ids", "attention_mask")
    ]
    return PromptSet.from_tokens(
        [_real_ids(element) for element in elements],
        {name: [element[name] for element in elements] for name in names},
        tokenizer,
        max_length=max_length,
        seed=seed,
        decoder_start_token_id=decoder_start_token_id,
    )


def _real_ids(element: Mapping[str, Any]) -> list[int]:
    """Ids of an element without its padding."""
    ids = np.asarray(element["input_ids"]).ravel()
    mask = np.asarray(element.get("attention_mask", np.ones_like(ids))).ravel().astype(bool)
    return [int(token) for token in ids[mask]]

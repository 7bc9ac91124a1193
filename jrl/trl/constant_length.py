# SPDX-License-Identifier: Apache-2.0
"""TRL's classic packed data set: texts one after another, cut into rows of one length."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jrl.data.tokenizer import tokenize

__all__ = ["ConstantLengthDataset"]


class ConstantLengthDataset:
    """Texts one after another, cut into rows of one length; nothing separates documents but their concat token.

    `SFTConfig(packing=True)` packs better: there nothing attends across documents. What is left behind the last whole
    row of a buffer begins the next one; only the end of the data is lost.

    Args:
      tokenizer: Of the texts.
      dataset: Rows.
      dataset_text_field: Their column of texts.
      formatting_func: Makes the text of a row; instead of the field.
      infinite: Whether the data begin anew at their end.
      seq_length: Ids of a row.
      num_of_sequences: Rows of a buffer, in which rows are shuffled.
      chars_per_token: Characters that are taken for a token when a buffer is filled.
      eos_token_id: Stands between documents where the tokenizer has no EOS.
      shuffle: Whether the rows of a buffer are shuffled.
      append_concat_token: Whether anything stands between documents.
      add_special_tokens: Whether the tokenizer adds its special tokens to each document.
    Raises:
      ValueError: If neither the field nor the function is given.
    """

    def __init__(
        self,
        tokenizer: Any,
        dataset: Any,
        dataset_text_field: str | None = None,
        formatting_func: Callable[[Any], str] | None = None,
        infinite: bool = False,
        seq_length: int = 1024,
        num_of_sequences: int = 1024,
        chars_per_token: float = 3.6,
        eos_token_id: int = 0,
        shuffle: bool = True,
        append_concat_token: bool = True,
        add_special_tokens: bool = True,
    ) -> None:
        if dataset_text_field is None and formatting_func is None:
            raise ValueError("ConstantLengthDataset needs `dataset_text_field` or `formatting_func`.")
        self.tokenizer, self.dataset, self.infinite = tokenizer, dataset, infinite
        self.seq_length, self.shuffle = seq_length, shuffle
        self.max_buffer_size = seq_length * chars_per_token * num_of_sequences
        known = tokenizer.eos_token_id
        self.concat_token_id = eos_token_id if known is None else known
        self.append_concat_token, self.add_special_tokens = append_concat_token, add_special_tokens
        self._text: Callable[[Any], str] = formatting_func or (lambda row: row[dataset_text_field])

    def __len__(self) -> int:
        """Rows of one pass, which is made for this."""
        return sum(len(rows) for rows in self._buffers())

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        """`input_ids` and `labels`, the same ids."""
        rng = np.random.default_rng(0)
        while True:
            empty = True
            for rows in self._buffers():
                empty = empty and not len(rows)
                order = rng.permutation(len(rows)) if self.shuffle else range(len(rows))
                for index in order:
                    yield {"input_ids": rows[index], "labels": rows[index].copy()}
            if not self.infinite or empty:
                return

    def _buffers(self) -> Iterator[np.ndarray]:
        """Yields whole rows (n seq_length) of one buffer after another, of one pass."""
        left: list[int] = []
        texts: list[str] = []
        size = 0
        for row in self.dataset:
            texts.append(self._text(row))
            size += len(texts[-1])
            if size >= self.max_buffer_size:
                rows, left = self._cut(left, texts)
                yield rows
                texts, size = [], 0
        yield self._cut(left, texts)[0]

    def _cut(self, left: list[int], texts: list[str]) -> tuple[np.ndarray, list[int]]:
        ids = list(left)
        for document in tokenize(self.tokenizer, texts, add_special_tokens=self.add_special_tokens):
            ids += [*document, self.concat_token_id] if self.append_concat_token else document
        whole = len(ids) // self.seq_length * self.seq_length
        return np.asarray(ids[:whole], np.int32).reshape(-1, self.seq_length), ids[whole:]

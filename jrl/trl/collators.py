# SPDX-License-Identifier: Apache-2.0
"""TRL's collators: batches as arrays, for looking at data and for loops of one's own.

jrl's trainers make their own batches, in which masks come from lengths. These here have TRL's names and columns.
`return_tensors="pt"`, the default, makes torch tensors where torch is loaded, NumPy arrays where it is not; "np" makes
NumPy arrays.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.batching import pad_left, pad_right
from jrl.data.demonstrations import completion_mask, places, template_ids
from jrl.data.preferences import ComparisonSet, PairRow, PreferenceFormat
from jrl.interop import as_torch, batch_as

__all__ = [
    "DPODataCollatorWithPadding",
    "DataCollatorForCompletionOnlyLM",
    "DataCollatorForLanguageModeling",
    "DataCollatorForPreference",
    "RewardDataCollatorForPreference",
    "RewardDataCollatorWithPadding",
]

Batch = dict[str, Any]
IGNORED = -100
"""Label of what is not learned."""


class RewardDataCollatorWithPadding:
    """Batches of comparisons: the chosen texts, and the rejected ones.

    Args:
      tokenizer: Pads, on its `padding_side`.
      padding: True; rows are padded to the longest.
      max_length: Of `padding="max_length"` in TRL; no effect.
      pad_to_multiple_of: The widths' divisor; None: 1.
      return_tensors: "pt" or "np", see above.
    """

    def __init__(
        self,
        tokenizer: Any,
        padding: bool | str = True,
        max_length: int | None = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str = "pt",
    ) -> None:
        self.tokenizer, self.padding, self.max_length = tokenizer, padding, max_length
        self.pad_to_multiple_of, self.return_tensors = pad_to_multiple_of, return_tensors

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Batch:
        """`input_ids_chosen`, `attention_mask_chosen` and the same of rejected (B L), `margin` (B) where rows have it.

        Args:
          features: Rows in any form that a reward model learns from: these columns, or `chosen` and `rejected` as texts
            or messages.
        """
        rows = ComparisonSet(list(features), self.tokenizer, max_length=2**30, seed=0).rows
        batch: Batch = {"return_loss": True}
        for side in ("chosen", "rejected"):
            ids = [list(row.chosen if side == "chosen" else row.rejected) for row in rows]
            tokens, mask = _padded(ids, self.tokenizer, self.pad_to_multiple_of)
            batch[f"input_ids_{side}"], batch[f"attention_mask_{side}"] = tokens, mask.astype(np.int32)
        if "margin" in features[0]:
            batch["margin"] = np.asarray([row.margin for row in rows], np.float32)
        return batch_as(batch, self.return_tensors)


class DPODataCollatorWithPadding:
    """Batches of pairs with their prompt, tokenised here.

    Args:
      tokenizer: Tokenises and pads.
      padding: True; rows are padded to the longest.
      max_length: Most tokens of prompt and completion; None: no limit.
      max_prompt_length: Most tokens of a prompt; None: no limit of its own.
      label_pad_token_id: Label of what is not learned.
      padding_value: Id of padding; None: the tokenizer's.
      truncation_mode: "keep_end" or "keep_start" of what is too long.
      is_encoder_decoder: No effect: rows of a decoder are made.
    """

    def __init__(
        self,
        tokenizer: Any,
        padding: bool | str = True,
        max_length: int | None = None,
        max_prompt_length: int | None = None,
        label_pad_token_id: int = -100,
        padding_value: int | None = 0,
        truncation_mode: str = "keep_end",
        is_encoder_decoder: bool = False,
    ) -> None:
        self.tokenizer, self.padding = tokenizer, padding
        self.max_length, self.max_prompt_length = max_length, max_prompt_length
        self.label_pad_token_id, self.padding_value = label_pad_token_id, padding_value
        self.truncation_mode, self.is_encoder_decoder = truncation_mode, is_encoder_decoder

    def tokenize(self, feature: Mapping[str, Any], row: int = 0) -> Batch:
        """Ids, masks and labels of one pair, unpadded, and its texts.

        Args:
          feature: `prompt`, `chosen` and `rejected`.
          row: Its number, for errors.
        Raises:
          ValueError: If the row is malformed, or nothing of it is left within the limits.
        """
        limits = PreferenceFormat(
            tokenizer=self.tokenizer,
            max_length=self.max_length or 2**30,
            max_prompt_length=self.max_prompt_length,
            truncation_mode=self.truncation_mode,
        )
        pair = limits.encode(feature, row)
        if pair is None:
            raise ValueError(
                f"row {row}: nothing of its completions is left within `max_length` {self.max_length}."
            )
        return self._columns(pair) | {
            name: feature[name] for name in ("prompt", "chosen", "rejected") if name in feature
        }

    def _columns(self, pair: PairRow) -> Batch:
        prompt = pair.chosen.prompt
        found: Batch = {"prompt_input_ids": prompt, "prompt_attention_mask": [1] * len(prompt)}
        for side, answer in (("chosen", pair.chosen), ("rejected", pair.rejected)):
            ids = [*answer.prompt, *answer.tokens]
            labels = [id_ if learned else self.label_pad_token_id
                      for id_, learned in zip(answer.tokens, answer.learned, strict=True)]  # fmt: skip
            found[f"{side}_input_ids"] = ids
            found[f"{side}_attention_mask"] = [1] * len(ids)
            found[f"{side}_labels"] = [self.label_pad_token_id] * len(answer.prompt) + labels
        return found

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Batch:
        """Arrays (B L) of ids, masks and labels of both completions (right-padded) and the prompt (left-padded)."""
        rows = [
            dict(row) if "chosen_labels" in row else self.tokenize(row, n) for n, row in enumerate(features)
        ]
        pad = self.tokenizer.pad_token_id if self.padding_value is None else self.padding_value
        batch: Batch = {}
        for name in rows[0]:
            columns = [row[name] for row in rows]
            if name.endswith(("_input_ids", "_attention_mask", "_labels")):
                fill = {"ids": pad, "mask": 0, "labels": self.label_pad_token_id}[name.rsplit("_", 1)[1]]
                batch[name] = _filled(columns, fill, left=name.startswith("prompt"))
            else:
                batch[name] = columns
        return batch


class DataCollatorForCompletionOnlyLM:
    """Batches in which answers alone have labels.

    Without an instruction template, everything up to the last response template is left out; with one, everything
    from each instruction to the response template behind it.

    Args:
      response_template: Text, or ids, before an answer.
      instruction_template: Text, or ids, before a question; None: one answer a row.
      mlm: False.
      ignore_index: Label of what is not learned.
      tokenizer: Required.
      pad_to_multiple_of: The widths' divisor; None: 1.
      return_tensors: "pt" or "np", see above.
    Raises:
      ValueError: Without a tokenizer, or with `mlm`.
    """

    def __init__(
        self,
        response_template: str | Sequence[int],
        instruction_template: str | Sequence[int] | None = None,
        *,
        mlm: bool = False,
        ignore_index: int = -100,
        tokenizer: Any = None,
        pad_to_multiple_of: int | None = None,
        return_tensors: str = "pt",
    ) -> None:
        if tokenizer is None or mlm:
            raise ValueError(
                "`tokenizer` must be given by name, and `mlm` must be False: next tokens are learned."
            )
        self.tokenizer, self.ignore_index, self.mlm = tokenizer, ignore_index, mlm
        self.response_template, self.instruction_template = response_template, instruction_template
        self.response_token_ids = template_ids(tokenizer, response_template)
        self.instruction_token_ids = (
            None if instruction_template is None else template_ids(tokenizer, instruction_template)
        )
        self.pad_to_multiple_of, self.return_tensors = pad_to_multiple_of, return_tensors

    def learned(self, ids: Sequence[int]) -> list[bool]:
        """Flags of the tokens: True on answers. All False, with a warning, where a template is not found."""
        if not places(ids, self.response_token_ids):
            self._warn_missing("response", self.response_template)
        elif self.instruction_token_ids is not None and not places(ids, self.instruction_token_ids):
            self._warn_missing("instruction", self.instruction_template)
        return completion_mask(ids, self.response_token_ids, self.instruction_token_ids)

    def _warn_missing(self, which: str, template: Any) -> None:
        warnings.warn(
            f"A row has no {which} template {template!r}, so nothing of it is learned. Does the tokenizer write it "
            "otherwise behind other text? Give its ids instead of the text.",
            stacklevel=4,
        )

    def __call__(self, examples: Sequence[Any]) -> Batch:
        """`input_ids`, `attention_mask` and `labels` (B L).

        Args:
          examples: Rows with `input_ids`, or the ids themselves.
        """
        rows = [list(row["input_ids"] if isinstance(row, Mapping) else row) for row in examples]
        tokens, mask = _padded(rows, self.tokenizer, self.pad_to_multiple_of)
        labels = [
            [id_ if flag else self.ignore_index for id_, flag in zip(row, self.learned(row), strict=True)]
            for row in rows
        ]
        left = self.tokenizer.padding_side == "left"
        batch = {
            "input_ids": tokens,
            "attention_mask": mask.astype(np.int32),
            "labels": _filled(labels, self.ignore_index, left=left, width=tokens.shape[1]),
        }
        return batch_as(batch, self.return_tensors)

    def torch_call(self, examples: Sequence[Any]) -> Batch:
        """Collates examples, under the name that transformers' collators have."""
        return self(examples)


class DataCollatorForPreference:
    """Batches of tokenised pairs: the prompt padded on the left, both completions on the right.

    Args:
      pad_token_id: Fills up ids.
      return_tensors: "pt" or "np", see above.
    """

    def __init__(self, pad_token_id: int, return_tensors: str = "pt") -> None:
        self.pad_token_id, self.return_tensors = pad_token_id, return_tensors

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """`prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids` (B L) with their `*_attention_mask`.

        Args:
          examples: Rows with these ids; `ref_chosen_logps`, `ref_rejected_logps` and arrays of one shape (such as
            `pixel_values`) are stacked.
        """
        batch: Batch = {}
        for name in examples[0]:
            column = [row[name] for row in examples]
            if name.endswith("_input_ids"):
                left, ones = name.startswith("prompt"), [[1] * len(ids) for ids in column]
                batch[name] = _filled(column, self.pad_token_id, left=left)
                batch[name.replace("input_ids", "attention_mask")] = _filled(ones, 0, left=left)
            elif np.issubdtype(np.asarray(column).dtype, np.number):
                batch[name] = np.asarray(column, np.float32)
        return batch_as(batch, self.return_tensors)

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates examples, under the name that transformers' collators have."""
        return self(examples)


class RewardDataCollatorForPreference:
    """Batches of tokenised comparisons: all chosen rows, then all rejected ones.

    Args:
      pad_token_id: Fills up ids, on the right.
      pad_to_multiple_of: The width's divisor; None: 1.
      return_tensors: "pt" or "np", see above.
    """

    def __init__(
        self, pad_token_id: int, pad_to_multiple_of: int | None = None, return_tensors: str = "pt"
    ) -> None:
        self.pad_token_id, self.pad_to_multiple_of = pad_token_id, pad_to_multiple_of
        self.return_tensors = return_tensors

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """`input_ids` and `attention_mask` (2B L), `margin` (B) where rows have it.

        Args:
          examples: Rows with `chosen_input_ids` and `rejected_input_ids`.
        """
        rows = [list(row[f"{side}_input_ids"]) for side in ("chosen", "rejected") for row in examples]
        width = _width(rows, self.pad_to_multiple_of)
        batch: Batch = {
            "input_ids": _filled(rows, self.pad_token_id, left=False, width=width),
            "attention_mask": _filled([[1] * len(ids) for ids in rows], 0, left=False, width=width),
        }
        if "margin" in examples[0]:
            batch["margin"] = np.asarray([row["margin"] for row in examples], np.float32)
        return batch_as(batch, self.return_tensors)

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates examples, under the name that transformers' collators have."""
        return self(examples)


class DataCollatorForLanguageModeling:
    """Batches of tokenised texts with labels: what `completion_mask` and `assistant_masks` leave out has label −100.

    Args:
      pad_token_id: Fills up ids, on the right.
      completion_only_loss: Whether a `completion_mask` counts.
      padding_free: One row without padding, with `position_ids` in place of a mask; a text's first token is no target.
      pad_to_multiple_of: The width's divisor; None: 1.
      return_tensors: "pt" or "np", see above.
    """

    def __init__(
        self,
        pad_token_id: int,
        completion_only_loss: bool = True,
        padding_free: bool = False,
        pad_to_multiple_of: int | None = None,
        return_tensors: str = "pt",
    ) -> None:
        self.pad_token_id, self.completion_only_loss = pad_token_id, completion_only_loss
        self.padding_free, self.pad_to_multiple_of = padding_free, pad_to_multiple_of
        self.return_tensors = return_tensors

    def __call__(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """`input_ids`, `labels` and `attention_mask` (B L), or without padding `position_ids` (1 L).

        Args:
          examples: Rows with `input_ids`, perhaps `seq_lengths` (of the texts packed into the row) and the masks.
        """
        rows = [list(row["input_ids"]) for row in examples]
        labels = [self._labels(row) for row in examples]
        if not self.padding_free:
            width = _width(rows, self.pad_to_multiple_of)
            masks = [[1] * len(ids) for ids in rows]
            filled = ((rows, self.pad_token_id), (masks, 0), (labels, IGNORED))
            arrays = [_filled(column, fill, left=False, width=width) for column, fill in filled]
            return batch_as(
                dict(zip(("input_ids", "attention_mask", "labels"), arrays, strict=True)), self.return_tensors
            )
        places_ = [place for row in examples for size in row.get("seq_lengths", [len(row["input_ids"])])
                   for place in range(size)]  # fmt: skip
        ids = [id_ for row in rows for id_ in row]
        learned = [
            IGNORED if place == 0 else label
            for place, label in zip(places_, (label for row in labels for label in row), strict=True)
        ]
        width = _width([ids], self.pad_to_multiple_of)
        columns = {
            "input_ids": (ids, self.pad_token_id),
            "position_ids": (places_, 0),
            "labels": (learned, IGNORED),
        }
        batch = {name: _filled([row], fill, left=False, width=width) for name, (row, fill) in columns.items()}
        return batch_as(batch, self.return_tensors)

    def torch_call(self, examples: Sequence[Mapping[str, Any]]) -> Batch:
        """Collates examples, under the name that transformers' collators have."""
        return self(examples)

    def _labels(self, row: Mapping[str, Any]) -> list[int]:
        """Ids that are learned, −100 elsewhere."""
        labels = list(row.get("labels", row["input_ids"]))
        masks = (["completion_mask"] if self.completion_only_loss else []) + ["assistant_masks"]
        for name in masks:
            if name in row:
                labels = [id_ if kept else IGNORED for id_, kept in zip(labels, row[name], strict=True)]
        return labels

    @staticmethod
    def get_position_ids_from_packed_seq_lengths(batch_seq_lengths: Sequence[Sequence[int]]) -> list[Any]:
        """Positions 0, 1, ... within the texts that are packed into each row."""
        return [as_torch(np.concatenate([np.arange(size) for size in sizes])) for sizes in batch_seq_lengths]


def _width(rows: Sequence[Sequence[int]], multiple: int | None) -> int:
    """The longest row, rounded up."""
    step = multiple or 1
    return -(-max(map(len, rows)) // step) * step


def _padded(rows: list[list[int]], tokenizer: Any, multiple: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask (B L), padded on the tokenizer's side."""
    pad, width = pad_left if tokenizer.padding_side == "left" else pad_right, _width(rows, multiple)
    fill = tokenizer.pad_token_id
    if fill is None and any(len(row) < width for row in rows):
        raise ValueError(
            "`tokenizer` must have a pad token for rows of several lengths, got None: set "
            "`tokenizer.pad_token = tokenizer.eos_token`."
        )
    tokens, mask = pad(rows, pad_token_id=fill or 0, width=width)
    return np.asarray(tokens), np.asarray(mask)


def _filled(rows: list[list[int]], fill: int, *, left: bool, width: int | None = None) -> np.ndarray:
    pad = pad_left if left else pad_right
    return np.asarray(pad(rows, pad_token_id=fill, width=width or max(map(len, rows)))[0])

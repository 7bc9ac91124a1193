# SPDX-License-Identifier: Apache-2.0
"""Rows from a script's `data_collator` for preferences, which jrl batches itself.

It is asked once for each row, before training: what it returns decides which ids a run learns from, and jrl pads and
shuffles them. A row is given with its own columns and with its ids under the names of TRL's data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.preferences import ComparisonFormat, TokenPair, check_preference, tokenize_pairs
from jrl.data.sources import RecordStream
from jrl.trl.own_losses import SIDES

Collator = Callable[[list[Any]], Any]


def comparison_features(records: Sequence[Any], rows: ComparisonFormat) -> list[dict[str, Any]]:
    """Rows with `input_ids_chosen`, `chosen_input_ids` and their like; pairs that cannot be learned are left out."""
    found = []
    for number, record in enumerate(records):
        row = rows.encode(record, number)
        if row is None:
            continue
        columns: dict[str, Any] = dict(record)
        for side, ids in zip(SIDES, (row.chosen, row.rejected), strict=True):
            columns |= {f"{side}_input_ids": list(ids), f"input_ids_{side}": list(ids)}
            columns[f"attention_mask_{side}"] = [1] * len(ids)
        found.append(columns)
    return found


def collated_comparisons(
    records: Sequence[Any], rows: ComparisonFormat, collator: Collator
) -> list[dict[str, Any]]:
    """Records of ids, as a reward model's data set takes them.

    Args:
      records: As given.
      rows: How they are tokenised.
      collator: Returns `input_ids_chosen`, `attention_mask_chosen` and the same of rejected, or `input_ids` and
        `attention_mask` with the chosen row over the rejected one; and perhaps `margin`.
    Raises:
      ValueError: If columns are missing.
    """
    found = []
    for feature in comparison_features(records, rows):
        batch = collator([feature])
        if "input_ids_chosen" in batch:
            pairs = [(f"input_ids_{side}", f"attention_mask_{side}", 0) for side in SIDES]
        else:
            pairs = [("input_ids", "attention_mask", place) for place in range(2)]
        chosen, rejected = (_real(batch, ids, mask, place) for ids, mask, place in pairs)
        margin = float(np.asarray(batch["margin"]).ravel()[0]) if "margin" in batch else 0.0
        found.append({"chosen_ids": chosen, "rejected_ids": rejected, "margin": margin})
    return found


def preference_features(records: Sequence[Any], tokenizer: Any) -> list[dict[str, Any]]:
    """Rows with `prompt_input_ids`, `chosen_input_ids` and `rejected_input_ids`, the completions without the prompt."""
    found = []
    for number, record in enumerate(records):
        pair = tokenize_pairs(tokenizer, [check_preference(record, row=number)], is_seq2seq=False)[0]
        found.append(
            dict(record)
            | {
                "prompt_input_ids": pair.prompt,
                "chosen_input_ids": pair.chosen,
                "rejected_input_ids": pair.rejected,
            }
        )
    return found


def collated_preferences(
    records: Sequence[Any], tokenizer: Any, collator: Collator, *, label_pad_token_id: int
) -> list[TokenPair]:
    """Pairs of ids, as DPO's data set takes them.

    Args:
      records: As given.
      tokenizer: Of the rows.
      collator: Returns `chosen_input_ids`, `chosen_attention_mask`, `chosen_labels` and the same of rejected, whole
        rows; or `prompt_input_ids`, `chosen_input_ids`, `rejected_input_ids` and their masks, prompt and completions.
      label_pad_token_id: Label of what is not learned.
    Raises:
      ValueError: If columns are missing, or the two rows have different prompts.
    """
    found = []
    for number, feature in enumerate(preference_features(records, tokenizer)):
        batch = collator([feature])
        ids = [_real(batch, f"{side}_input_ids", f"{side}_attention_mask", 0) for side in SIDES]
        if "chosen_labels" not in batch:
            prompt = _real(batch, "prompt_input_ids", "prompt_attention_mask", 0)
            found.append(TokenPair(prompt, ids[0], ids[1]))
            continue
        labels = [_real(batch, f"{side}_labels", f"{side}_attention_mask", 0) for side in SIDES]
        learned = [[label != label_pad_token_id for label in row] for row in labels]
        starts = [row.index(True) if True in row else len(row) for row in learned]
        prompts = [row[:start] for row, start in zip(ids, starts, strict=True)]
        if prompts[0] != prompts[1]:
            raise ValueError(
                f"`data_collator` must leave one prompt to both completions of row {number}, got "
                f"{len(prompts[0])} and {len(prompts[1])} ids before the first label."
            )
        rest = [row[start:] for row, start in zip(ids, starts, strict=True)]
        flags = [row[start:] for row, start in zip(learned, starts, strict=True)]
        found.append(TokenPair(prompts[0], rest[0], rest[1], flags[0], flags[1]))
    return found


def refuse_stream(records: Any) -> None:
    """Refuses a stream, whose rows nobody could ask the collator for beforehand.

    Raises:
      ValueError: If it is one.
    """
    if isinstance(records, RecordStream):
        raise ValueError("`data_collator` needs a list of rows here, got a stream.")


def _real(batch: Any, name: str, mask: str, row: int) -> list[int]:
    """A row of a column, without its padding."""
    missing = [column for column in (name, mask) if not isinstance(batch, Mapping) or column not in batch]
    if missing:
        got = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
        raise ValueError(
            f"`data_collator` must return the columns of TRL's collators, `{missing[0]}` is missing, got {got}. "
            "`jrl.trl` has collators to derive from."
        )
    ids, real = np.asarray(batch[name])[row], np.asarray(batch[mask])[row] != 0
    return [int(one) for one in ids[real]]

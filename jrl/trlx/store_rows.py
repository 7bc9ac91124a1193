# SPDX-License-Identifier: Apache-2.0
"""A store that a script filled, as jrl's trainers learn from it."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.demonstrations import IGNORED_LABEL, DialogueRow, RowSet
from jrl.data.offline import RewardedRows
from jrl.data.sources import fingerprint
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trlx.stores import BaseRolloutStore

_ACTING = ("input_ids", "rewards", "states_ixs", "actions_ixs", "dones")


def fingerprint_of(store: BaseRolloutStore) -> str:
    """Fingerprint of a store's elements."""
    return fingerprint(
        [
            {name: np.asarray(value).tolist() for name, value in _fields(store[index]).items()}
            for index in range(len(store))
        ]
    )


def plain_element(element: Any) -> dict[str, Any]:
    """An element's arrays as plain JSON, bit by bit."""
    arrays = {name: np.asarray(value) for name, value in _fields(element).items()}
    return {
        name: {
            "dtype": array.dtype.str,
            "shape": array.shape,
            "base64": base64.b64encode(array.tobytes()).decode(),
        }
        for name, array in arrays.items()
    }


def read_element(found: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The arrays that `plain_element` wrote."""
    return {
        name: np.frombuffer(base64.b64decode(one["base64"]), one["dtype"]).reshape(one["shape"]).copy()
        for name, one in found.items()
    }


def refuse_own_loader(store: BaseRolloutStore) -> None:
    """Refuses a store whose `create_loader` a script wrote.

    Raises:
      TypeError: Naming its class.
    """
    if not type(store).create_loader.__module__.startswith("jrl."):
        raise TypeError(
            f"`store`: {type(store).__name__} must not override `create_loader`: jrl makes the batches of this "
            "trainer, so it would change nothing. Derive the trainer from AccelerateRLTrainer and write `loss`."
        )


def learned_rows(store: BaseRolloutStore, trainer: PolicyTrainer) -> RowSet:
    """Rows of a store for supervised fine-tuning.

    Args:
      store: Mappings with `input_ids`, `attention_mask` and `labels`; where they have no labels, all ids are learned.
        Of a seq2seq model, with the decoder's rows as `decoder_input_ids`.
      trainer: Whose model learns.
    Raises:
      ValueError: If a label is neither the id in its place nor −100, or an element lacks a field.
    """
    rows, contexts = [], []
    for index, fields in _elements(store, ("input_ids",)):
        context, row, real = _tokens(fields, index, trainer)
        labels = np.asarray(fields.get("labels", row)).ravel()[real]
        learned = labels != IGNORED_LABEL
        if (labels[learned] != row[learned]).any():
            raise ValueError(
                f"`store`: labels of element {index} must be its ids, or {IGNORED_LABEL} where nothing is learned. To "
                "learn other labels, derive from AccelerateRLTrainer and write `loss`."
            )
        rows.append(DialogueRow(row.tolist(), learned.tolist()))
        contexts.append(context)
    return _row_set(rows, contexts, trainer)


def rewarded_rows(store: BaseRolloutStore, trainer: PolicyTrainer) -> RewardedRows:
    """Rewarded rows of a store for ILQL.

    Args:
      store: `ILQLElement`s, or `ILQLSeq2SeqElement`s of a seq2seq model.
      trainer: Whose model learns.
    Raises:
      ValueError: If an element has no action, lacks a field, or its states are not those before its actions and the
        last column.
    """
    rows, contexts, earned = [], [], []
    for index, fields in _elements(store, _ACTING):
        context, row, real = _tokens(fields, index, trainer)
        acts = np.asarray(fields["dones"]).ravel()[:-1].astype(bool)
        given, states = (np.asarray(fields[name]).ravel() for name in ("actions_ixs", "states_ixs"))
        place = np.cumsum(real) - 1
        actions = place[given[acts]]
        if not acts.any() or (np.diff(actions) <= 0).any() or actions[-1] + 1 >= len(row):
            raise ValueError(
                f"`store`: element {index} must have actions in rising columns, each with a token behind it, got "
                f"`actions_ixs` {given[acts].tolist()} in {len(row)} tokens."
            )
        if (states[:-1][acts] != given[acts]).any():
            raise ValueError(
                f"`store`: `states_ixs` of element {index} must be its `actions_ixs` and the last column: a value is "
                f"that of the state before an action. Got {states.tolist()} for {given.tolist()}."
            )
        learned = np.zeros(len(row), bool)
        learned[actions + 1] = True
        rows.append(DialogueRow(row.tolist(), learned.tolist()))
        contexts.append(context)
        earned.append(np.asarray(fields["rewards"], np.float32).ravel()[acts])
    return RewardedRows(_row_set(rows, contexts, trainer), earned, seed=trainer.config.train.seed)


def _elements(store: BaseRolloutStore, needed: Sequence[str]) -> list[tuple[int, dict[str, Any]]]:
    if not len(store):
        raise ValueError("`store` must hold something to learn from, got an empty one.")
    found = [(index, _fields(store[index])) for index in range(len(store))]
    for index, fields in found:
        if not set(needed) <= set(fields):
            raise ValueError(f"`store`: element {index} must have {list(needed)}, got {sorted(fields)}.")
    return found


def _fields(element: Any) -> dict[str, Any]:
    given = vars(element) if dataclasses.is_dataclass(element) else dict(element)
    return {name: value for name, value in given.items() if value is not None}


def _tokens(
    fields: dict[str, Any], index: int, trainer: PolicyTrainer
) -> tuple[list[int], np.ndarray, np.ndarray]:
    """(what an encoder reads, the row that is learned without its padding, which of its columns are real)."""
    ids = np.asarray(fields["input_ids"], np.int32).ravel()
    real = np.asarray(fields.get("attention_mask", np.ones_like(ids))).ravel().astype(bool)
    context, row = [], ids[real]
    if trainer.lm.decoder_start_token_id is not None:
        if "decoder_input_ids" not in fields:
            raise ValueError(
                f"`store`: element {index} must have `decoder_input_ids`: a seq2seq model learns what its decoder "
                "writes."
            )
        context, row = row.tolist(), np.asarray(fields["decoder_input_ids"], np.int32).ravel()
        real = np.ones(len(row), bool)
    longest = max(len(context), len(row))
    if longest > trainer.lm.max_positions:
        raise ValueError(
            f"`store`: element {index} has {longest} tokens, and the model has {trainer.lm.max_positions} positions."
        )
    return context, row, real


def _row_set(rows: list[DialogueRow], contexts: list[list[int]], trainer: PolicyTrainer) -> RowSet:
    return RowSet(
        rows,
        pad_token_id=trainer.tokenizer.pad_token_id,
        max_length=trainer.lm.max_positions,
        seed=trainer.config.train.seed,
        contexts=None if trainer.lm.decoder_start_token_id is None else contexts,
    )

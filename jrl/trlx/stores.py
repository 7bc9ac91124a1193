# SPDX-License-Identifier: Apache-2.0
"""trlX's stores: what is learned from, kept on the host as NumPy arrays, and made into batches."""

from __future__ import annotations

import abc
import json
import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jrl.data.demonstrations import IGNORED_LABEL
from jrl.interop import DataLoader, is_tensor
from jrl.trlx.data.ilql_types import ILQLBatch, ILQLElement, ILQLSeq2SeqBatch, ILQLSeq2SeqElement
from jrl.trlx.data.ppo_types import PPORLBatch, PPORLElement
from jrl.trlx.loader import padded, stacked, with_pad_token


class BaseRolloutStore(abc.ABC):
    """Elements to learn from.

    Args:
      capacity: Most elements kept, the newest; −1 keeps all.

    Attributes:
      history: The elements.
    """

    def __init__(self, capacity: int = -1) -> None:
        self.history: list[Any] = []
        self.capacity = capacity
        self._loaders = 0

    def push(self, exps: Iterable[Any]) -> None:
        """Appends elements."""
        self.history = [*self.history, *exps]
        if self.capacity >= 0:
            self.history = self.history[max(0, len(self.history) - self.capacity) :]

    def __getitem__(self, index: int) -> Any:
        return self.history[index]

    def __len__(self) -> int:
        return len(self.history)

    def _loader(
        self, batch_size: int, *, collate_fn: Callable[[list[Any]], Any], shuffle: bool
    ) -> DataLoader:
        """A loader whose order differs from that of the store's others."""
        self._loaders += 1
        return DataLoader(self, batch_size, collate_fn=collate_fn, shuffle=shuffle, seed=self._loaders)

    @abc.abstractmethod
    def create_loader(
        self, batch_size: int, shuffle: bool, prep_fn: Callable[..., Any] | None = None, num_workers: int = 0
    ) -> DataLoader:
        """Batches of the elements; arguments as in `BasePipeline.create_loader`."""


class PPORolloutStorage(BaseRolloutStore):
    """Rollouts.

    Args:
      pad_token_id: Fills queries and responses.
      padding_side: "left" or "right": where queries are filled; all else is filled on the right.
    Raises:
      ValueError: If the side is neither.
    """

    def __init__(self, pad_token_id: int, padding_side: str = "left") -> None:
        super().__init__()
        if padding_side not in ("left", "right"):
            raise ValueError(f'`padding_side` must be "left" or "right", got {padding_side!r}.')
        self.pad_token_id, self.padding_side = pad_token_id, padding_side

    def clear_history(self) -> None:
        """Forgets all rollouts."""
        self.history = []

    def export_history(self, location: str | os.PathLike[str], only_text: bool = True) -> Path:
        """Writes the rollouts as one JSON file, `epoch-<time>.json`, into a folder.

        Args:
          location: The folder; it must exist.
          only_text: Whether only `query_tensor` and `response_tensor` are written, as lists of ids.
        Returns:
          The file.
        Raises:
          ValueError: If there is no such folder.
        """
        folder = Path(location)
        if not folder.is_dir():
            raise ValueError(f"`location` must be a folder that exists, got {os.fspath(folder)!r}.")
        names = ("query_tensor", "response_tensor", "logprobs", "values", "rewards")[
            : 2 if only_text else None
        ]
        rows = [
            {name: np.asarray(vars(element)[name]).tolist() for name in names} for element in self.history
        ]
        path = folder / f"epoch-{time.time()}.json"
        path.write_text(json.dumps(rows), encoding="utf-8")
        return path

    def create_loader(  # type: ignore[override]  # the seed's own signature departs from its base class
        self, batch_size: int, shuffle: bool
    ) -> DataLoader:
        """Batches as `PPORLBatch`; `shuffle` gives every pass an order of its own."""
        return self._loader(batch_size, collate_fn=self._collate, shuffle=shuffle)

    def _collate(self, elements: list[PPORLElement]) -> PPORLBatch:
        left, pad = self.padding_side == "left", self.pad_token_id
        return PPORLBatch(
            stacked((element.query_tensor for element in elements), fill=pad, left=left),
            stacked((element.response_tensor for element in elements), fill=pad),
            stacked(element.logprobs for element in elements),
            stacked(element.values for element in elements),
            stacked(element.rewards for element in elements),
            np.asarray([len(element.query_tensor) for element in elements], np.int32),
            np.asarray([len(element.logprobs) for element in elements], np.int32),
        )


@dataclass
class DialogMessage:
    """A message of a dialogue.

    Attributes:
      is_output: Whether the model should have written it.
      tokens: Ids.
    """

    is_output: bool
    tokens: tuple[int, ...]


class DialogStore(BaseRolloutStore):
    """Dialogues to imitate: `labels` are the ids of outputs, and −100 on prompts and padding.

    Args:
      dialogs: Messages of each dialogue, as `tokenize_dialogue` returns them.
      tokenizer: Pads batches, on its `padding_side`.
    """

    def __init__(self, dialogs: Sequence[Sequence[DialogMessage]], tokenizer: Any) -> None:
        super().__init__()
        self.tokenizer = with_pad_token(tokenizer)
        for dialog in dialogs:
            ids = [token for message in dialog for token in message.tokens]
            learned = [message.is_output for message in dialog for _ in message.tokens]
            labels = [token if flag else IGNORED_LABEL for token, flag in zip(ids, learned, strict=True)]
            arrays = {"input_ids": ids, "attention_mask": [1] * len(ids), "labels": labels}
            self.history.append({name: np.asarray(row, np.int32) for name, row in arrays.items()})

    def create_loader(  # type: ignore[override]  # the seed's own signature departs from its base class
        self, batch_size: int, shuffle: bool = False
    ) -> DataLoader:
        """Batches with `input_ids`, `attention_mask` and `labels` (B L)."""
        return self._loader(batch_size, collate_fn=self._collate, shuffle=shuffle)

    def _collate(self, elements: list[dict[str, np.ndarray]]) -> Any:
        from transformers import BatchEncoding  # here, because it takes seconds where torch is installed

        side, pad = self.tokenizer.padding_side, self.tokenizer.pad_token_id
        arrays = padded(
            [element["input_ids"].tolist() for element in elements], pad_token_id=pad, padding_side=side
        )
        labels = stacked((element["labels"] for element in elements), fill=IGNORED_LABEL, left=side == "left")
        return BatchEncoding(arrays | {"labels": labels})


class PairStore(BaseRolloutStore):
    """Pairs to imitate, of a seq2seq model: what the encoder reads, and the decoder's rows with their `labels`.

    Args:
      contexts: Ids that the encoder reads.
      rows: The decoder's rows, the start id first; everything behind it is learned.
      pad_token_id: Fills both on the right.
    """

    def __init__(
        self, contexts: Sequence[Sequence[int]], rows: Sequence[Sequence[int]], pad_token_id: int
    ) -> None:
        super().__init__()
        self.pad_token_id = pad_token_id
        for context, row in zip(contexts, rows, strict=True):
            arrays = {
                "input_ids": context,
                "attention_mask": [1] * len(context),
                "decoder_input_ids": row,
                "labels": [IGNORED_LABEL, *row[1:]],
            }
            self.history.append({name: np.asarray(values, np.int32) for name, values in arrays.items()})

    def create_loader(  # type: ignore[override]  # as DialogStore
        self, batch_size: int, shuffle: bool = False
    ) -> DataLoader:
        """Batches with `input_ids`, `attention_mask` (B C), `decoder_input_ids` and `labels` (B L)."""
        return self._loader(batch_size, collate_fn=self._collate, shuffle=shuffle)

    def _collate(self, elements: list[dict[str, np.ndarray]]) -> Any:
        from transformers import BatchEncoding  # here, because it takes seconds where torch is installed

        fills = {"attention_mask": 0, "labels": IGNORED_LABEL}
        return BatchEncoding(
            {
                name: stacked((one[name] for one in elements), fill=fills.get(name, self.pad_token_id))
                for name in elements[0]
            }
        )


class _ColumnStore(BaseRolloutStore):
    """Elements kept column by column, as ILQL's constructors take them."""

    element: type
    batch: type

    def __init__(self, **columns: Sequence[Any]) -> None:
        super().__init__()
        lengths = {name: len(column) for name, column in columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"All columns must have one entry a sample, got {lengths}.")
        self._columns = columns
        for name, column in columns.items():
            setattr(self, name, column)

    def push(self, exps: Iterable[Any]) -> None:
        """Appends elements, column by column."""
        for element in exps:
            for name in self._columns:
                self._columns[name] = [*self._columns[name], vars(element)[name]]
                setattr(self, name, self._columns[name])

    def __getitem__(self, ix: int) -> Any:
        row = {name: column[ix] for name, column in self._columns.items()}
        return self.element(
            **{name: value if is_tensor(value) else np.asarray(value) for name, value in row.items()}
        )

    def __len__(self) -> int:
        return len(self._columns["input_ids"])

    def create_loader(  # type: ignore[override]  # the seed's own signature departs from its base class
        self, batch_size: int, shuffle: bool = True
    ) -> DataLoader:
        """Batches, by default in an order that every pass has of its own; the last one may be short."""
        return self._loader(batch_size, collate_fn=self._collate, shuffle=shuffle)

    def _collate(self, elements: list[Any]) -> Any:
        return self.batch(**{name: stacked(vars(one)[name] for one in elements) for name in self._columns})


class ILQLRolloutStorage(_ColumnStore):
    """Rewarded samples of a causal model; the arguments hold one array a sample, as `ILQLElement` describes them."""

    element, batch = ILQLElement, ILQLBatch

    def __init__(
        self,
        input_ids: Sequence[Any],
        attention_mask: Sequence[Any],
        rewards: Sequence[Any],
        states_ixs: Sequence[Any],
        actions_ixs: Sequence[Any],
        dones: Sequence[Any],
    ) -> None:
        super().__init__(
            input_ids=input_ids,
            attention_mask=attention_mask,
            rewards=rewards,
            states_ixs=states_ixs,
            actions_ixs=actions_ixs,
            dones=dones,
        )


class ILQLSeq2SeqRolloutStorage(_ColumnStore):
    """Rewarded samples of a seq2seq model, as `ILQLSeq2SeqElement` describes them."""

    element, batch = ILQLSeq2SeqElement, ILQLSeq2SeqBatch

    def __init__(
        self,
        input_ids: Sequence[Any],
        attention_mask: Sequence[Any],
        decoder_input_ids: Sequence[Any],
        rewards: Sequence[Any],
        states_ixs: Sequence[Any],
        actions_ixs: Sequence[Any],
        dones: Sequence[Any],
    ) -> None:
        super().__init__(
            input_ids=input_ids,
            attention_mask=attention_mask,
            decoder_input_ids=decoder_input_ids,
            rewards=rewards,
            states_ixs=states_ixs,
            actions_ixs=actions_ixs,
            dones=dones,
        )

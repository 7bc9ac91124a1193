# SPDX-License-Identifier: Apache-2.0
"""Data of a step-by-step PPO: batches of a data set, and samples of the model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from jrl.data.batching import bucket_length
from jrl.interop import DataLoader, sample_rows, warn_ignored
from jrl.models.model import LanguageModel
from jrl.trl.generation import as_row, read_generation_kwargs
from jrl.trl.ppo_config import PPOConfig
from jrl.trl.ppo_native import StepwisePPO
from jrl.typing import Params

_READ_COLUMNS = ("input_ids", "past_key_values", "attention_mask", "label", "query", "response")


def list_columns(rows: Sequence[Any]) -> dict[str, list[Any]] | list[list[Any]]:
    """Rows as one list a column, ragged ones too: the collator of TRL's examples. Of tuples: one list a place."""
    if not isinstance(rows[0], Mapping):
        return [list(column) for column in zip(*rows, strict=True)]
    return {name: [row[name] for row in rows] for name in rows[0]}


def make_loader(
    dataset: Any,
    data_collator: Callable[[list[Any]], Any] | None,
    *,
    batch_size: int,
    seed: int,
    remove_unused_columns: bool,
) -> DataLoader:
    """Shuffled batches of a data set; a last one that is short is left out.

    Args:
      dataset: A `datasets.Dataset`, or anything with a length and rows by index.
      data_collator: Makes a batch of a list of rows; None: `list_columns`.
      batch_size: Rows of a batch.
      seed: Of the orders.
      remove_unused_columns: Whether a `datasets.Dataset` keeps only what a model reads, and label, query and response.
    Raises:
      ValueError: If it has no length or no rows by index, or fewer rows than a batch.
    """
    if not (hasattr(dataset, "__len__") and hasattr(dataset, "__getitem__")):
        raise ValueError(
            f"`dataset` must have a length and rows by index, got {type(dataset).__name__}; a stream has neither."
        )
    if len(dataset) < batch_size:
        raise ValueError(
            f"`dataset` must have at least `config.batch_size` = {batch_size} rows, got {len(dataset)}."
        )
    names = getattr(dataset, "column_names", None)
    if remove_unused_columns and names is not None:
        dataset = dataset.remove_columns([name for name in names if name not in _READ_COLUMNS])
    return DataLoader(
        dataset,
        batch_size,
        collate_fn=data_collator or list_columns,
        shuffle=True,
        drop_last=True,
        seed=seed,
    )


def generate_many(
    native: StepwisePPO,
    params: Params,
    queries: Sequence[Any],
    length_sampler: Callable[[], int] | None,
    *,
    batch_size: int,
    return_prompt: bool,
    remove_padding: bool,
    kwargs: Mapping[str, Any],
) -> list[np.ndarray]:
    """Samples after each query, in order; see `PPOTrainer.generate`."""
    rows = [as_row(query, f"query_tensor[{number}]") for number, query in enumerate(queries)]
    size, found = min(batch_size, len(rows)), []
    for start in range(0, len(rows), size):
        chunk = rows[start : start + size]
        # A short last chunk is filled up with its first row: the same program, and the copies are dropped.
        filled = chunk + chunk[:1] * (size - len(chunk))
        written = _chunk(native, params, filled, length_sampler, kwargs)[: len(chunk)]
        if not remove_padding:
            longest = max(map(len, written))
            pad = native.tokenizer.pad_token_id
            written = [np.pad(row, (0, longest - len(row)), constant_values=pad) for row in written]
        found += [
            _joined(native.lm, query, row, return_prompt) for query, row in zip(chunk, written, strict=True)
        ]
    return found


def _chunk(
    native: StepwisePPO,
    params: Params,
    rows: list[list[int]],
    length_sampler: Callable[[], int] | None,
    kwargs: Mapping[str, Any],
) -> list[np.ndarray]:
    """Completions of one sampling call, at most as long as asked for."""
    values, tokenizer, lm = dict(kwargs), native.tokenizer, native.lm
    if length_sampler is not None:
        values["max_new_tokens"] = length_sampler()
    longest = max(map(len, rows)) if lm.decoder_start_token_id is None else 0
    settings = read_generation_kwargs(
        values,
        eos_token_id=native.eos_token_ids,
        pad_token_id=tokenizer.pad_token_id,
        vocab_size=lm.vocab_size,
        prompt_length=longest,
    )
    asked = settings.max_new_tokens
    # Lengths that are drawn anew for every call share a few programs: a row's tokens do not depend on the limit.
    room = max(min(bucket_length(asked), lm.max_positions - longest), asked)
    settings = type(settings)(**{**vars(settings), "max_new_tokens": room})
    key = native.draws.key()
    asks = native.sampler, lm, native.mesh, params, native.frozen
    written, lengths = sample_rows(*asks, rows, settings, key, name="query_tensor")
    return [row[: min(length, asked)] for row, length in zip(written, lengths, strict=True)]


def _joined(lm: LanguageModel, query: list[int], written: np.ndarray, return_prompt: bool) -> np.ndarray:
    """Row that `generate` returns: an encoder-decoder's begins with its start id."""
    if lm.decoder_start_token_id is not None:
        return np.concatenate([np.asarray([lm.decoder_start_token_id], np.int32), written])
    return np.concatenate([np.asarray(query, np.int32), written]) if return_prompt else written


class RolloutMethods:
    """The methods of `PPOTrainer` that feed a step.

    Attributes:
      config: TRL's.
      native: jrl's own trainer.
    """

    config: PPOConfig
    native: StepwisePPO

    def prepare_dataloader(
        self, dataset: Any, data_collator: Callable[[list[Any]], Any] | None = None
    ) -> DataLoader:
        """Shuffled batches of `batch_size` rows; a last one that is short is left out.

        Args:
          dataset: A `datasets.Dataset` or another sequence of rows.
          data_collator: Makes a batch of a list of rows; default: one list a column.
        """
        return make_loader(
            dataset,
            data_collator,
            batch_size=self.config.batch_size,
            seed=self.config.seed,
            remove_unused_columns=self.config.remove_unused_columns,
        )

    def generate(
        self,
        query_tensor: Any,
        length_sampler: Callable[[], int] | None = None,
        batch_size: int = 4,
        return_prompt: bool = True,
        generate_ref_response: bool = False,
        *,
        pad_to_multiple_of: int | None = None,
        remove_padding: bool = True,
        **generation_kwargs: Any,
    ) -> Any:
        """Samples after one query, or after a list of them.

        Args:
          query_tensor: Ids, 1-D, or a list of such.
          length_sampler: Draws `max_new_tokens`, once for every `batch_size` queries.
          batch_size: Queries of a sampling call.
          return_prompt: Whether the query stands before the answer; of an encoder-decoder it never does, and the answer
            begins with the start id.
          generate_ref_response: Whether to sample from the reference too.
          pad_to_multiple_of: No effect: widths are buckets of jrl's own.
          remove_padding: Whether rows end with their EOS; else they are padded to the longest of their call.
          **generation_kwargs: transformers' names; see `jrl.trl.generation`.
        Returns:
          Of one query an array (1, T), of a list a list of arrays; with `generate_ref_response` a pair of such.
        """
        if pad_to_multiple_of is not None:
            warn_ignored("generate: pad_to_multiple_of", "widths are buckets of jrl's own")
        several = isinstance(query_tensor, list | tuple) and (
            not query_tensor or np.ndim(query_tensor[0]) > 0
        )
        models = [self.native.params] + ([self.native.ref_params] if generate_ref_response else [])
        found = []
        for params in models:
            rows = generate_many(
                self.native,
                params,
                query_tensor if several else [query_tensor],
                length_sampler,
                batch_size=batch_size,
                return_prompt=return_prompt,
                remove_padding=remove_padding,
                kwargs=generation_kwargs,
            )
            found.append(rows if several else rows[0][None])
        return tuple(found) if generate_ref_response else found[0]

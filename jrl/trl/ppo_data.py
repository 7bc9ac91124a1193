# SPDX-License-Identifier: Apache-2.0
"""Data of a step-by-step PPO: batches of a data set, samples of the model, and a script's rows as arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.batching import bucket_length, pad_left, pad_right
from jrl.interop import DataLoader, sample_rows, warn_ignored
from jrl.models.model import LanguageModel
from jrl.trl.generation import as_row, read_generation_kwargs
from jrl.trl.ppo_config import PPOConfig
from jrl.trl.ppo_native import StepwisePPO
from jrl.typing import ModelInputs, Params, Sequences


class RolloutRows(NamedTuple):
    """Rows of one `step`, checked.

    Attributes:
      queries: Ids of each query.
      responses: Ids of each response; of an encoder-decoder without its start id.
      masks: False on response tokens that the policy did not choose, such as a tool's.
      rewards: Of each response token: a dense score as it was given, a scalar one on the last chosen token.
    """

    queries: list[list[int]]
    responses: list[list[int]]
    masks: list[np.ndarray]
    rewards: list[np.ndarray]


def read_rollouts(
    queries: Any,
    responses: Any,
    scores: Any,
    response_masks: Any,
    *,
    batch_size: int | None,
    decoder_start_token_id: int | None,
) -> RolloutRows:
    """Checks and normalises the arguments of `step`.

    Args:
      queries: List of 1-D arrays of ids.
      responses: The same.
      scores: One number a response, or a vector with one number a response token.
      response_masks: List of 0/1 arrays, one entry a response token; None: all were chosen.
      batch_size: How many of each there must be; None: any number.
      decoder_start_token_id: Of an encoder-decoder, whose responses may begin with it.
    Raises:
      ValueError: Naming the argument and the row.
    """
    given = {"queries": queries, "responses": responses, "scores": scores}
    given |= {} if response_masks is None else {"response_masks": response_masks}
    for name, column in given.items():
        if not isinstance(column, list | tuple):
            raise ValueError(f"`{name}` must be a list of arrays, got {type(column).__name__}.")
        wanted = len(queries) if batch_size is None else batch_size
        if len(column) != wanted:
            what = "as `queries`" if batch_size is None else "`config.batch_size`"
            raise ValueError(f"`{name}` must have {wanted} rows, {what}, got {len(column)}.")
    found = RolloutRows([], [], [], [])
    for row, (query, response, score) in enumerate(zip(queries, responses, scores, strict=True)):
        ids = as_row(response, f"responses[{row}]")
        mask = _mask(None if response_masks is None else response_masks[row], len(ids), row)
        reward = _reward(score, mask, row)
        if decoder_start_token_id is not None and ids[:1] == [decoder_start_token_id]:
            ids, mask, reward = ids[1:], mask[1:], reward[1:]
        if not mask.any():
            raise ValueError(f"`responses[{row}]` must hold a token that the policy chose, got none.")
        found.queries.append(as_row(query, f"queries[{row}]"))
        found.responses.append(ids)
        found.masks.append(mask)
        found.rewards.append(reward)
        if not found.queries[-1]:
            raise ValueError(f"`queries[{row}]` must hold a token to go on from, got none.")
    return found


def make_sequences(
    rollouts: RolloutRows, *, pad_token_id: int, decoder_start_token_id: int | None, max_positions: int
) -> Sequences:
    """Right-padded rows of few widths, NumPy, with the window of the responses.

    Raises:
      ValueError: If a row is longer than the model has positions.
    """
    width = bucket_length(max(map(len, rollouts.responses)))
    mask = _columns([list(mask) for mask in rollouts.masks], width).astype(bool)
    lengths = np.asarray([len(query) for query in rollouts.queries], np.int32)
    if decoder_start_token_id is not None:
        rows = [[decoder_start_token_id, *response] for response in rollouts.responses]
        context: Any = pad_right(
            rollouts.queries, pad_token_id=pad_token_id, width=bucket_length(int(lengths.max()))
        )
        starts: Any = np.zeros(len(rows), np.int32)
    else:
        rows = [[*pair[0], *pair[1]] for pair in zip(rollouts.queries, rollouts.responses, strict=True)]
        context, starts = (None, None), lengths - 1
    sizes = [len(row) for row in rows]
    if max(sizes) > max_positions:
        raise ValueError(
            f"`queries` and `responses`: row {int(np.argmax(sizes))} has {max(sizes)} tokens, and the model has "
            f"{max_positions} positions."
        )
    padded: Any = pad_right(
        rows, pad_token_id=pad_token_id, width=min(bucket_length(max(sizes)), max_positions)
    )
    inputs = ModelInputs(padded[0], padded[1], None, context[0], context[1])
    any_mask: Any = mask
    return Sequences(inputs, starts, any_mask)


def reward_columns(rollouts: RolloutRows, width: int) -> np.ndarray:
    """Rewards per token, float32 (B T); 0 behind each response."""
    return _columns([list(reward) for reward in rollouts.rewards], width).astype(np.float32)


def model_inputs(
    queries: Sequence[Any],
    responses: Sequence[Any],
    *,
    pad_token_id: int,
    padding_side: str,
    decoder_start_token_id: int | None,
) -> dict[str, np.ndarray]:
    """Inputs of a model from queries and responses, padded to the longest on the tokenizer's side.

    Returns:
      `input_ids` and `attention_mask` (1 on real tokens, told by the lengths), int32; of an encoder-decoder also
      `decoder_input_ids`, from the start id on, and `decoder_attention_mask`.
    """
    questions = [as_row(query, "queries") for query in queries]
    answers = [as_row(response, "responses") for response in responses]
    pad = pad_left if padding_side == "left" else pad_right
    if decoder_start_token_id is None:
        rows = [query + answer for query, answer in zip(questions, answers, strict=True)]
        tokens, mask = pad(rows, pad_token_id=pad_token_id)
        return {"input_ids": tokens, "attention_mask": mask.astype(np.int32)}
    answers = [
        row if row[:1] == [decoder_start_token_id] else [decoder_start_token_id, *row] for row in answers
    ]
    tokens, mask = pad(questions, pad_token_id=pad_token_id)
    found = {"input_ids": tokens, "attention_mask": mask.astype(np.int32)}
    tokens, mask = pad_right(answers, pad_token_id=pad_token_id)
    return found | {"decoder_input_ids": tokens, "decoder_attention_mask": mask.astype(np.int32)}


def action_columns(
    inputs: dict[str, np.ndarray], queries: Sequence[Any], responses: Sequence[Any], response_masks: Any
) -> np.ndarray:
    """Mask of the columns whose *next* token the policy chose, int32 (B, L − 1), whichever side is padded.

    Args:
      inputs: From `model_inputs`.
      queries: As given to it.
      responses: As given to it.
      response_masks: One entry a response token; None: all were chosen.
    """
    encoded = "decoder_input_ids" in inputs
    attention = inputs["decoder_attention_mask" if encoded else "attention_mask"]
    found = np.zeros(attention.shape, np.int32)
    for row, response in enumerate(responses):
        size = len(as_row(response))
        mask = _mask(None if response_masks is None else response_masks[row], size, row)
        first = int(attention[row].argmax())
        if not encoded:
            begin = first + len(as_row(queries[row]))
        else:
            begin = first + int(attention[row].sum()) - size
            if begin == 0:  # the response brought its start id, which nobody chose
                begin, mask = 1, mask[1:]
        found[row, begin : begin + len(mask)] = mask
    return found[:, 1:]


def spread(window: np.ndarray, rollouts: RolloutRows, *, encoded: bool) -> np.ndarray:
    """A window (B T) in the columns of whole rows (B, L − 1), L that of the longest; 0 outside the responses.

    Args:
      window: Index t speaks of response token t.
      rollouts: The rows.
      encoded: Whether an encoder reads the queries.
    """
    starts = [0 if encoded else len(query) - 1 for query in rollouts.queries]
    sizes = [len(response) for response in rollouts.responses]
    found = np.zeros((len(starts), max(a + b for a, b in zip(starts, sizes, strict=True))), window.dtype)
    for row, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        found[row, start : start + size] = window[row, :size]
    return found


def _mask(given: Any, size: int, row: int) -> np.ndarray:
    mask = np.ones(size, bool) if given is None else np.asarray(given) != 0
    if mask.shape != (size,):
        raise ValueError(
            f"`response_masks[{row}]` must have one entry a response token, {size}, got shape {mask.shape}."
        )
    return mask


def _reward(score: Any, mask: np.ndarray, row: int) -> np.ndarray:
    """Reward of each response token."""
    found = np.asarray(score, np.float32)
    if found.size == 1 and found.ndim <= 1:
        placed = np.zeros(mask.shape, np.float32)
        placed[np.flatnonzero(mask)[-1:]] = found.ravel()
        found = placed
    elif found.shape != mask.shape:
        raise ValueError(
            f"`scores[{row}]` must be one number, or one for each of the {len(mask)} response tokens, got shape "
            f"{found.shape}."
        )
    if not np.isfinite(found).all():
        raise ValueError(f"`scores[{row}]` must be finite, got {score!r}.")
    if found[~mask].any():
        raise ValueError(
            f"`scores[{row}]` must be 0 where `response_masks[{row}]` is: nobody chose that token."
        )
    return found


def _columns(rows: Sequence[Sequence[Any]], width: int) -> np.ndarray:
    found = np.zeros((len(rows), width), np.float32)
    for row, values in zip(found, rows, strict=True):
        row[: len(values)] = values
    return found


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

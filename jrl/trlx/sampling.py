# SPDX-License-Identifier: Apache-2.0
"""Ids in, ids out: trlX's `generate` and `decode` over the samplers of a trainer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jrl.data.batching import bucket_length, pad_left
from jrl.data.prompts import SEPARATOR
from jrl.rollout.text import decode_rows
from jrl.trainers.placing import place_rows
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trlx.ignored import warn_ignored
from jrl.typing import ModelInputs, PRNGKey

# What Hugging Face's `generate` takes beside the names that jrl samples with.
_IGNORED = {
    "use_cache": "the cache is always used",
    "synced_gpus": "one program runs on all devices",
    "return_dict_in_generate": "ids are returned",
    "logit_mask": "the trainer's own is used",
}


def generate_ids(
    trainer: PolicyTrainer, input_ids: Any, attention_mask: Any, gen_kwargs: Mapping[str, Any], key: PRNGKey
) -> Int[np.ndarray, "B L"]:
    """Prompts with what the policy writes after them.

    Args:
      trainer: Whose policy samples.
      input_ids: Prompts (B P), padded on either side; lists, NumPy or torch arrays.
      attention_mask: 1 on real tokens; None: all are.
      gen_kwargs: As `method.gen_kwargs`; `max_length` may stand for `max_new_tokens` and counts the prompt's columns,
        and `num_return_sequences` repeats every prompt.
      key: Of this call.
    Returns:
      The given columns and behind them the sampled ids, padded after each row's end up to the longest row; of a seq2seq
      model, the start id and the sampled ids.
    Raises:
      ValueError: If a prompt is empty, or there are more tokens than the model has positions.
    """
    values = dict(gen_kwargs)
    for name in _IGNORED.keys() & values.keys():
        del values[name]
        warn_ignored(f"generate: {name}", _IGNORED[name])
    tokens = np.atleast_2d(np.asarray(input_ids))
    mask = np.ones(tokens.shape, bool) if attention_mask is None else np.asarray(attention_mask).astype(bool)
    if mask.size != tokens.size:
        raise ValueError(
            f"`attention_mask` must have the shape of `input_ids`, {tokens.shape}, got {mask.shape}."
        )
    repeats = values.pop("num_return_sequences", 1)
    tokens, mask = (array.repeat(repeats, axis=0) for array in (tokens, mask.reshape(tokens.shape)))
    max_length = values.pop("max_length", None)
    if max_length is not None and "max_new_tokens" not in gen_kwargs:
        values["max_new_tokens"] = max_length - tokens.shape[1]
    settings, _ = trainer.parse_generation(values)
    rows = [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]
    longest, start = max(map(len, rows)), trainer.lm.decoder_start_token_id
    if not all(rows):
        raise ValueError(f"`input_ids`: row {[len(row) for row in rows].index(0)} has no tokens.")
    written = settings.max_new_tokens + (longest if start is None else 0)
    if written > trainer.lm.max_positions:
        raise ValueError(
            f"`max_new_tokens` is {settings.max_new_tokens} after a prompt of {longest} tokens, and the model has "
            f"{trainer.lm.max_positions} positions."
        )
    padded: Any = pad_left(rows, pad_token_id=settings.pad_token_id, width=bucket_length(longest))
    inputs = ModelInputs(*padded)
    if start is not None:
        begun: Any = np.full((len(rows), 1), start, np.int32)
        real: Any = np.ones(begun.shape, bool)
        inputs = ModelInputs(begun, real, None, *padded)
    with jax.set_mesh(trainer.mesh):
        placed = place_rows(trainer.mesh, inputs)
        row_ids = np.arange(len(rows))
        done = trainer.sampler(trainer.sampling_params, trainer.frozen, placed, row_ids, settings, key)
        sampled, lengths = jax.device_get((done.tokens, done.lengths))
    before = tokens.astype(np.int32) if start is None else np.full((len(rows), 1), start, np.int32)
    return np.concatenate([before, sampled[:, : int(lengths.max())]], axis=1)


def decode_samples(
    trainer: PolicyTrainer,
    prompts: Iterable[Any],
    samples: Iterable[Any],
    prompt_sizes: Sequence[int] | None,
    *,
    stop_sequences: Sequence[str],
    append_eos_token: bool,
) -> tuple[list[str], list[str], list[str]]:
    """Texts of what `generate_ids` returned: (samples, prompts, outputs).

    Args:
      trainer: Whose tokenizer decodes.
      prompts: Ids of each prompt.
      samples: Ids of each prompt with what follows it; of a seq2seq model, the decoder's row.
      prompt_sizes: Columns of each prompt; None: the width of the prompts.
      stop_sequences: Texts that end an output.
      append_eos_token: Whether EOS's text follows outputs that ended by themselves.
    """
    tokenizer, start = trainer.tokenizer, trainer.lm.decoder_start_token_id
    ends = trainer.settings.eos_token_id
    queries = [np.asarray(prompt).ravel().tolist() for prompt in prompts]
    sizes = (
        [len(query) for query in queries] if prompt_sizes is None else [int(size) for size in prompt_sizes]
    )
    queries = [query[:size] for query, size in zip(queries, sizes, strict=True)]
    rows = []
    for sample, size in zip(samples, sizes, strict=True):
        row = np.asarray(sample).ravel().tolist()
        if start is None:
            rows.append(row[size:])
        else:
            rows.append(row[1:] if row and row[0] == start else row)
    pad = tokenizer.pad_token_id
    lengths = [_length(row, ends, pad) for row in rows]
    width = max(map(len, rows), default=0)
    tokens = np.array([row + [pad] * (width - len(row)) for row in rows], np.int32).reshape(len(rows), width)
    texts = decode_rows(
        tokenizer,
        queries,
        tokens,
        np.asarray(lengths, np.int32),
        eos_token_ids=ends,
        stop_sequences=stop_sequences,
        separator=None if start is None else tokenizer.sep_token or SEPARATOR,
    )
    if not append_eos_token:
        return texts.samples, texts.prompts, texts.outputs
    ended = [
        stopped or (bool(row) and row[-1] in (*ends, pad))
        for row, stopped in zip(rows, texts.stopped, strict=True)
    ]
    tails = [tokenizer.eos_token if flag else "" for flag in ended]
    joined = [
        [text + tail for text, tail in zip(column, tails, strict=True)]
        for column in (texts.samples, texts.outputs)
    ]
    return joined[0], texts.prompts, joined[1]


def _length(row: Sequence[int], eos_token_ids: Sequence[int], pad_token_id: int) -> int:
    """Ids up to the first EOS, or, where there is none, without the padding behind them."""
    for place, token in enumerate(row):
        if token in eos_token_ids:
            return place + 1
    length = len(row)
    while length and row[length - 1] == pad_token_id:
        length -= 1
    return length

# SPDX-License-Identifier: Apache-2.0
"""Ids in, ids out: transformers' `generate` over the samplers of a trainer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jrl.data.batching import bucket_length, pad_left
from jrl.interop.arguments import warn_ignored
from jrl.interop.untrained import UntrainedModel
from jrl.models.model import LanguageModel
from jrl.placement import fetch, place_rows
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.typing import Frozen, ModelInputs, Params, PRNGKey

# What Hugging Face's `generate` takes beside the names that jrl samples with.
_IGNORED = {
    "use_cache": "the cache is always used",
    "synced_gpus": "one program runs on all devices",
    "return_dict_in_generate": "ids are returned",
    "logit_mask": "the trainer's own is used",
}


def generate_ids(
    trainer: PolicyTrainer | UntrainedModel,
    input_ids: Any,
    attention_mask: Any,
    gen_kwargs: Mapping[str, Any],
    key: PRNGKey,
    decoder_input_ids: Any = None,
) -> Int[np.ndarray, "B L"]:
    """Prompts with what the policy writes after them.

    Args:
      trainer: Whose policy samples.
      input_ids: Prompts (B P), padded on either side; lists, NumPy or torch arrays.
      attention_mask: 1 on real tokens; None: all are.
      gen_kwargs: As `method.gen_kwargs`; `max_length` may stand for `max_new_tokens` and counts the prompt's columns
        (of a seq2seq model what its rows begin with), and `num_return_sequences` repeats every prompt.
      key: Of this call.
      decoder_input_ids: What the rows of a seq2seq model begin with (B S), without padding; default: the start id.
    Returns:
      The given columns and behind them the sampled ids, padded after each row's end up to the longest row; of a seq2seq
      model, what its rows begin with and the sampled ids.
    Raises:
      ValueError: If a prompt is empty, there are more tokens than the model has positions, or `gen_kwargs` limit the
        turns of an episode.
    """
    values = dict(gen_kwargs)
    for name in ("max_turns", "max_turn_tokens"):
        if values.get(name) is not None:
            raise ValueError(
                f"generate: `{name}` must be left out, got {values[name]}: it limits the turns of an episode, and "
                "`generate` writes one completion a prompt, without an environment. `max_new_tokens` limits that."
            )
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
    rows = [row[real].tolist() for row, real in zip(tokens, mask, strict=True)]
    start = trainer.lm.decoder_start_token_id
    before = tokens.astype(np.int32)
    if start is not None:
        before = np.full((len(rows), 1), start, np.int32)
    if decoder_input_ids is not None:
        before = _decoder_rows(decoder_input_ids, trainer, count=len(rows) // repeats).repeat(repeats, axis=0)
    max_length = values.pop("max_length", None)
    if max_length is not None and "max_new_tokens" not in gen_kwargs:
        values["max_new_tokens"] = max_length - (tokens if start is None else before).shape[1]
    settings, _ = trainer.parse_generation(values)
    asks = trainer.sampler, trainer.lm, trainer.mesh, trainer.sampling_params, trainer.frozen
    sampled, lengths = sample_rows(*asks, rows, settings, key, begun=None if start is None else before)
    return np.concatenate([before, sampled[:, : int(lengths.max())]], axis=1)


def sample_rows(
    sampler: Sampler,
    lm: LanguageModel,
    mesh: jax.sharding.Mesh,
    params: Params,
    frozen: Frozen,
    rows: Sequence[Sequence[int]],
    settings: GenerationSettings,
    key: PRNGKey,
    *,
    begun: Int[np.ndarray, "B S"] | None = None,
    name: str = "input_ids",
) -> tuple[Int[np.ndarray, "B T"], Int[np.ndarray, "B"]]:
    """Samples a continuation of each prompt, EOS included: (ids, pad behind each row's end; their number).

    Row i draws with key and number i.

    Args:
      sampler: Compiled samplers.
      lm: Architecture.
      mesh: Where the arrays are.
      params: What samples.
      frozen: The rest of the model.
      rows: Prompts without padding.
      settings: How.
      key: Of this call.
      begun: What the rows of a seq2seq model begin with, without padding; None: the start id.
      name: Of the prompts, for errors.
    Raises:
      ValueError: If a prompt is empty, or there are more tokens than the model has positions.
    """
    longest, start = max(map(len, rows)), lm.decoder_start_token_id
    if not all(len(row) for row in rows):
        raise ValueError(f"`{name}`: row {[len(row) for row in rows].index(0)} has no tokens.")
    if start is not None and begun is None:
        begun = np.full((len(rows), 1), start, np.int32)
    if settings.max_new_tokens + (longest if begun is None else begun.shape[1] - 1) > lm.max_positions:
        raise ValueError(
            f"`max_new_tokens` is {settings.max_new_tokens} after a prompt of {longest} tokens, and the model has "
            f"{lm.max_positions} positions."
        )
    width = bucket_length(longest)
    if begun is None:
        width = min(width, lm.max_positions - settings.max_new_tokens)
    padded: Any = pad_left(rows, pad_token_id=settings.pad_token_id, width=width)
    decoder: Any = begun
    inputs = ModelInputs(*padded)
    if begun is not None:
        inputs = ModelInputs(decoder, np.ones(begun.shape, bool), None, *padded)  # type: ignore[arg-type]
    with jax.set_mesh(mesh):
        done = sampler(params, frozen, place_rows(mesh, inputs), np.arange(len(rows)), settings, key)
        found: tuple[np.ndarray, np.ndarray] = fetch((done.tokens, done.lengths))
    return found


def _decoder_rows(
    given: Any, trainer: PolicyTrainer | UntrainedModel, *, count: int
) -> Int[np.ndarray, "B S"]:
    rows = np.atleast_2d(np.asarray(given)).astype(np.int32)
    if trainer.lm.decoder_start_token_id is None:
        raise ValueError("`decoder_input_ids` are those of a seq2seq model, and this one is causal.")
    if rows.shape[0] != count or not rows.shape[1]:
        raise ValueError(
            f"`decoder_input_ids` must have a row for each of {count} prompts, got {rows.shape}."
        )
    return rows

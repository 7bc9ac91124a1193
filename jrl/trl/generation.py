# SPDX-License-Identifier: Apache-2.0
"""Sampling with the arguments of transformers' `generate`: ids in, ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jrl.data.batching import bucket_length, pad_left
from jrl.models.model import LanguageModel
from jrl.trainers.generation import GenerationSettings, Sampler, parse_gen_kwargs
from jrl.trainers.placing import fetch, place_rows
from jrl.trlx.ignored import warn_ignored
from jrl.typing import Frozen, ModelInputs, Params, PRNGKey

_IGNORED = {
    "output_scores": "ids are returned",
    "remove_invalid_values": "logits are finite",
    "return_dict_in_generate": "ids are returned",
    "synced_gpus": "one program runs on all devices",
    "use_cache": "the cache is always used",
}
_ONLY_AT = {
    "early_stopping": False,
    "length_penalty": 1.0,
    "no_repeat_ngram_size": 0,
    "num_beams": 1,
    "num_return_sequences": 1,
    "typical_p": 1.0,
}


def read_generation_kwargs(
    kwargs: Mapping[str, Any],
    *,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    vocab_size: int,
    prompt_length: int,
) -> GenerationSettings:
    """transformers' keyword arguments as settings of the sampler.

    As there, nothing is drawn unless `do_sample` is True. Unlike there `top_k` is off by default: what samples under a
    filter is not the policy that training counts.

    Args:
      kwargs: `max_new_tokens` or `max_length` (20 new tokens where neither stands, as there), `min_length` (−1 and 0
        are off), `min_new_tokens`, `do_sample`, `temperature`, `top_k`, `top_p`, `repetition_penalty`,
        `eos_token_id`, `pad_token_id`, `suppress_tokens`, and a `generation_config` that holds any of them.
      eos_token_id: Where the arguments do not say it. Ids outside the vocabulary end nothing.
      pad_token_id: Where the arguments do not say it.
      vocab_size: Of the model.
      prompt_length: Longest prompt, which `max_length` and `min_length` count; 0 for an encoder-decoder.
    Raises:
      ValueError: On an argument that jrl does not sample with.
    """
    config = kwargs.get("generation_config")
    values = {} if config is None else dict(config.to_diff_dict())
    values = {name: value for name, value in values.items() if name != "transformers_version"}
    values |= {name: value for name, value in kwargs.items() if name != "generation_config"}
    for name in _IGNORED.keys() & values.keys():
        del values[name]
        warn_ignored(f"generate: {name}", _IGNORED[name])
    for name in _ONLY_AT.keys() & values.keys():
        if values.pop(name) != _ONLY_AT[name]:
            raise ValueError(f"generate: `{name}` must be {_ONLY_AT[name]!r}: jrl draws one sample a prompt.")
    longest, shortest = values.pop("max_length", None), values.pop("min_length", None)
    if values.get("max_new_tokens") is None:
        values["max_new_tokens"] = 20 if longest is None else int(longest) - prompt_length
    values["max_new_tokens"] = int(values["max_new_tokens"])
    if shortest is not None and int(shortest) > 0 and "min_new_tokens" not in values:
        values["min_new_tokens"] = min(max(int(shortest) - prompt_length, 0), values["max_new_tokens"])
    values = {"do_sample": False} | values
    if "top_k" in values:
        values["top_k"] = int(values["top_k"] or 0)
    eos = values.pop("eos_token_id", eos_token_id)
    ends = [] if eos is None else [int(one) for one in (eos if isinstance(eos, Sequence) else [eos])]
    values["eos_token_id"] = [one for one in ends if 0 <= one < vocab_size]
    settings, _ = parse_gen_kwargs(values, eos_token_id=None, pad_token_id=pad_token_id)
    return settings


def sample_rows(
    sampler: Sampler,
    lm: LanguageModel,
    mesh: jax.sharding.Mesh,
    params: Params,
    frozen: Frozen,
    rows: Sequence[Sequence[int]],
    settings: GenerationSettings,
    key: PRNGKey,
) -> list[Int[np.ndarray, "T"]]:
    """What the model writes after each prompt, its EOS included and no padding; row i draws with key and number i.

    Raises:
      ValueError: If a prompt is empty, or prompt and completion are longer than the model has positions.
    """
    longest, start = max(map(len, rows)), lm.decoder_start_token_id
    if not all(len(row) for row in rows):
        raise ValueError(f"`query_tensor`: row {[len(row) for row in rows].index(0)} has no tokens.")
    written = settings.max_new_tokens + (longest if start is None else 0)
    if written > lm.max_positions:
        raise ValueError(
            f"`max_new_tokens` is {settings.max_new_tokens} after a prompt of {longest} tokens, and the model has "
            f"{lm.max_positions} positions."
        )
    width = bucket_length(longest)
    if start is None:
        width = min(width, lm.max_positions - settings.max_new_tokens)
    padded: Any = pad_left(rows, pad_token_id=settings.pad_token_id, width=width)
    inputs = ModelInputs(*padded)
    if start is not None:
        begun: Any = np.full((len(rows), 1), start, np.int32)
        real: Any = np.ones(begun.shape, bool)
        inputs = ModelInputs(begun, real, None, *padded)
    with jax.set_mesh(mesh):
        done = sampler(params, frozen, place_rows(mesh, inputs), np.arange(len(rows)), settings, key)
        tokens, lengths = fetch((done.tokens, done.lengths))
    return [row[:length] for row, length in zip(tokens, lengths, strict=True)]


def as_row(tokens: Any, name: str = "query_tensor") -> list[int]:
    """Ids of one text as a list, from a list or anything with `__array__`.

    Raises:
      ValueError: If they are not whole numbers in one dimension.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise ValueError(f"`{name}` must be a 1-D array of ids, got shape {array.shape} of {array.dtype}.")
    return [int(token) for token in array]

# SPDX-License-Identifier: Apache-2.0
"""Sampling with the arguments of transformers' `generate`: ids in, ids out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jrl.interop import warn_ignored
from jrl.rollout.sampler import GenerationSettings
from jrl.trainers.config import parse_gen_kwargs

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
            raise ValueError(
                f"generate: `{name}` must be {_ONLY_AT[name]!r}: jrl draws one sample a prompt and searches no beams. "
                "Repeat the prompt for several samples, or use `BestOfNSampler`."
            )
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


def as_row(tokens: Any, name: str = "query_tensor") -> list[int]:
    """Ids of one text as a list, from a list or anything with `__array__`.

    Raises:
      ValueError: If they are not whole numbers in one dimension.
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or array.size == 0):
        raise ValueError(f"`{name}` must be a 1-D array of ids, got shape {array.shape} of {array.dtype}.")
    return [int(token) for token in array]

# SPDX-License-Identifier: Apache-2.0
"""`gen_kwargs` of a configuration, checked once: how rollouts and evaluations sample."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from jrl.rollout.sampler import GenerationSettings
from jrl.suggestions import did_you_mean
from jrl.trainers.config.coercion import coerce, field_types

Sweep = tuple[str, tuple[Any, ...]]
"""Name of a generation argument, and the values that every evaluation runs through."""

_NEUTRAL: Mapping[str, Any] = {
    "num_beams": 1,
    "num_beam_groups": 1,
    "num_return_sequences": 1,
    "diversity_penalty": 0.0,
    "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
    "renormalize_logits": False,
}
"""transformers' arguments that jrl does not have, and the value at which they change nothing."""
_HOW_ALONE = ("use_cache", "synced_gpus", "return_dict_in_generate", "output_scores", "output_hidden_states")
"""transformers' arguments that change no sample."""


def known_values(gen_kwargs: Mapping[str, Any], *, where: str = "gen_kwargs") -> dict[str, Any]:
    """Entries that jrl samples with: without those of transformers that change no sample. No value is looked at.

    Args:
      gen_kwargs: The config's dictionary.
      where: Its name in messages.
    Raises:
      ValueError: On an unknown name, naming the closest, or on beam search.
    """
    known = sorted(field.name for field in fields(GenerationSettings))
    values = {name: value for name, value in gen_kwargs.items() if not _changes_nothing(name, value, where)}
    for name in values:
        if name not in known:
            hint = did_you_mean(name, known)
            raise ValueError(f"{where}: `{name}` is not known; jrl samples with {known}.{hint}")
    return values


def _changes_nothing(name: str, value: Any, where: str) -> bool:
    """True for an argument of transformers' `generate` that leaves every sample as it is.

    Raises:
      ValueError: On beam search.
    """
    if name == "num_beams" and value not in (None, 1):
        raise ValueError(
            f"{where}: `num_beams` must be 1, got {value!r}: a policy is sampled from, and jrl has no beam search. "
            "Leave it out; `do_sample: false` takes the likeliest token."
        )
    return name in _HOW_ALONE or (name in _NEUTRAL and value in (None, _NEUTRAL[name]))


def parse_gen_kwargs(
    gen_kwargs: Mapping[str, Any],
    *,
    eos_token_id: int | Sequence[int] | None,
    pad_token_id: int,
    steers: bool = False,
) -> tuple[GenerationSettings, Sweep | None]:
    """`gen_kwargs` of a config as settings, and the entry an evaluation sweeps over.

    A list (of scalars) makes a sweep: the returned settings hold its first element, which rollouts use.

    Args:
      gen_kwargs: The config's dictionary.
      eos_token_id: The tokenizer's and the checkpoint's; `gen_kwargs` may override them.
      pad_token_id: The tokenizer's; `gen_kwargs` may override it.
      steers: Whether the model has Q heads. Then `beta` is 1 where `gen_kwargs` say nothing of it; else it is refused.
    Returns:
      The settings, and (name, values) of the sweep or None.
    Raises:
      ValueError: On an unknown or missing key, a value out of range, an empty sweep, or more than one.
      TypeError: On a value of the wrong type.
    """
    values = known_values(gen_kwargs)
    if "max_new_tokens" not in values:
        raise ValueError(
            "gen_kwargs: `max_new_tokens` is required: it fixes the width of the completion window."
        )
    if steers:
        values = {"beta": 1.0} | values
    elif values.get("beta") is not None:
        raise ValueError(
            f"gen_kwargs: `beta` steers by Q heads, which ILQL alone trains, got {values['beta']!r}: leave it out."
        )
    lists = ("eos_token_id", "suppress_tokens")
    sweeps = [name for name, value in values.items() if isinstance(value, list | tuple) and name not in lists]
    if len(sweeps) > 1:
        raise ValueError(f"gen_kwargs: one entry may be a list (an evaluation sweep), got {sweeps}.")
    sweep = (sweeps[0], tuple(values[sweeps[0]])) if sweeps else None
    if sweep:
        if not sweep[1]:
            raise ValueError(f"gen_kwargs: `{sweep[0]}` is an empty list; a sweep needs at least one value.")
        sweep = sweep[0], tuple(_scalar(sweep[0], value) for value in sweep[1])
        values[sweep[0]] = sweep[1][0]
    values = {name: value if name in lists else _scalar(name, value) for name, value in values.items()}
    eos = values.pop("eos_token_id", eos_token_id)
    eos_ids = () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (int(eos),)
    settings = GenerationSettings(
        eos_token_id=eos_ids,
        pad_token_id=int(values.pop("pad_token_id", pad_token_id)),
        suppress_tokens=tuple(values.pop("suppress_tokens", ())),
        **values,
    )
    if sweep:  # every value is checked before the run starts, not when its turn comes
        for value in sweep[1]:
            replace(settings, **{sweep[0]: value})
    return settings, sweep


def _scalar(name: str, value: Any) -> Any:
    """An entry of `gen_kwargs` as the type that its field has."""
    return coerce(value, field_types(GenerationSettings)[name], f"gen_kwargs.{name}")

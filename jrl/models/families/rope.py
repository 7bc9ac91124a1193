# SPDX-License-Identifier: Apache-2.0
"""Transformers' `rope_parameters` → `jrl.models.config.Rope`.

Transformers moves the older `rope_theta` and `rope_scaling` of a config.json into `rope_parameters` when it reads the
file. The defaults below are those of its `modeling_rope_utils.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from jrl.models.config import (
    LinearRopeScaling,
    Llama3RopeScaling,
    LongRopeScaling,
    ProportionalRopeScaling,
    QueryGrowth,
    Rope,
    RopeScaling,
    YarnRopeScaling,
)


def read_rope(
    model_type: str,
    parameters: Mapping[str, Any],
    head_dim: int,
    *,
    partial: bool = False,
    interleaved: bool = False,
) -> Rope:
    """Maps `rope_parameters` of the types default, linear, dynamic, llama3 and yarn.

    Dynamic scaling changes nothing up to `max_position_embeddings`, and longer rows are refused (`check_length`).

    Args:
      model_type: Of the config.
      parameters: Of one layer.
      head_dim: H.
      partial: The torch model rotates the share `partial_rotary_factor` of a head; otherwise none may be set.
      interleaved: Neighbouring dimensions form a pair.
    Raises:
      ValueError: If the scaling is of another type, or lacks a positive number.
    """
    kind = _kind(model_type, parameters)
    if kind in ("default", "dynamic"):
        scaling = None
    elif kind in _SCALINGS:
        scaling = _SCALINGS[kind](model_type, parameters)
    else:
        raise ValueError(
            f"{model_type}: `rope_type` must be among default, dynamic, {', '.join(_SCALINGS)}; got {kind!r}: this "
            "scaling of rotary positions is not implemented for this family."
        )
    rope = _rope(model_type, parameters, scaling, head_dim, partial, interleaved)
    return replace(rope, is_bounded=kind == "dynamic")


def read_proportional_rope(model_type: str, parameters: Mapping[str, Any], head_dim: int) -> Rope:
    """Maps `rope_parameters` of the type proportional: all of a head sets the wavelengths, and a part of it turns.

    Raises:
      ValueError: If a number is not positive, or the share is above 1.
    """
    share = _optional(model_type, parameters, "partial_rotary_factor", 1.0)
    if share > 1:
        raise ValueError(f"{model_type}: `partial_rotary_factor` must be at most 1, got {share!r}.")
    scaling = ProportionalRopeScaling(
        int(share * head_dim // 2), _optional(model_type, parameters, "factor", 1.0)
    )
    return Rope(_number(model_type, parameters, "rope_theta"), scaling)


def without_truncate(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Parameters of one type of layers: torch looks for YaRN's `truncate` beside the types, and so never finds it."""
    return {name: value for name, value in parameters.items() if name != "truncate"}


def read_query_growth(model_type: str, parameters: Mapping[str, Any]) -> QueryGrowth:
    """Maps `llama_4_scaling_beta`, by which queries grow beyond `original_max_position_embeddings`.

    Raises:
      ValueError: If one of the two is no positive number.
    """
    rate, length = (
        _number(model_type, parameters, name)
        for name in ("llama_4_scaling_beta", "original_max_position_embeddings")
    )
    return QueryGrowth(rate, int(length))


def read_longrope(
    model_type: str,
    parameters: Mapping[str, Any],
    head_dim: int,
    max_positions: int,
    *,
    partial: bool = False,
) -> Rope:
    """Maps `rope_parameters` of the type longrope.

    The torch model takes the short factors for rows of up to `original_max_position_embeddings` tokens and other ones
    for longer rows. The short ones are taken here: the family's `max_positions` must be that original length.

    Args:
      model_type: Of the config.
      parameters: Of all layers.
      head_dim: H.
      max_positions: `max_position_embeddings` of the config: how far the context was stretched.
      partial: As in `read_rope`.
    Raises:
      ValueError: If the scaling is of another type, lacks a number, or has not one factor a pair of dimensions.
    """
    kind = _kind(model_type, parameters)
    if kind != "longrope":
        raise ValueError(f"{model_type}: `rope_type` must be longrope; got {kind!r}.")
    original = _number(model_type, parameters, "original_max_position_embeddings")
    stretch = _optional(model_type, parameters, "factor", max_positions / original)
    natural = math.sqrt(1 + math.log(stretch) / math.log(original)) if stretch > 1 else 1.0
    factors = parameters.get("short_factor") or ()
    if not isinstance(factors, list | tuple) or not all(_is_positive(factor) for factor in factors):
        raise ValueError(f"{model_type}: `short_factor` must be a list of positive finite numbers.")
    rope = _rope(
        model_type,
        parameters,
        LongRopeScaling(tuple(factors), _optional(model_type, parameters, "attention_factor", natural)),
        head_dim,
        partial,
        interleaved=False,
    )
    pairs = (rope.dim or head_dim) // 2
    if len(factors) != pairs:
        raise ValueError(
            f"{model_type}: `short_factor` must have {pairs} entries, one a pair of rotating dimensions; "
            f"got {len(factors)}."
        )
    return replace(rope, is_bounded=True)


def _rope(
    model_type: str,
    parameters: Mapping[str, Any],
    scaling: RopeScaling | None,
    head_dim: int,
    partial: bool,
    interleaved: bool,
) -> Rope:
    share = _optional(model_type, parameters, "partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise ValueError(
            f"{model_type}: `partial_rotary_factor` must be 1.0, got {share!r}: this family rotates whole heads."
        )
    dim = int(head_dim * share)
    theta = _number(model_type, parameters, "rope_theta")
    return Rope(theta, scaling, dim if dim != head_dim else None, interleaved)


def _linear(model_type: str, parameters: Mapping[str, Any]) -> LinearRopeScaling:
    return LinearRopeScaling(_number(model_type, parameters, "factor"))


def _llama3(model_type: str, parameters: Mapping[str, Any]) -> Llama3RopeScaling:
    names = ("factor", "low_freq_factor", "high_freq_factor")
    factor, low, high = (_number(model_type, parameters, name) for name in names)
    if high < low:
        raise ValueError(
            f"{model_type}: `high_freq_factor` must be at least `low_freq_factor`, {low}; got {high}."
        )
    original = _number(model_type, parameters, "original_max_position_embeddings")
    return Llama3RopeScaling(factor, low, high, int(original))


def _yarn(model_type: str, parameters: Mapping[str, Any]) -> YarnRopeScaling:
    factor = _number(model_type, parameters, "factor")

    def sharpening(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    # Either the paper's one value, or DeepSeek's ratio of two.
    natural = sharpening(1.0)
    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        above, below = (_number(model_type, parameters, name) for name in ("mscale", "mscale_all_dim"))
        natural = sharpening(above) / sharpening(below)
    return YarnRopeScaling(
        factor=factor,
        original_max_positions=int(_number(model_type, parameters, "original_max_position_embeddings")),
        beta_fast=_optional(model_type, parameters, "beta_fast", 32.0),
        beta_slow=_optional(model_type, parameters, "beta_slow", 1.0),
        attention_factor=_optional(model_type, parameters, "attention_factor", natural),
        # As in torch, where null is no truth.
        truncate=bool(parameters.get("truncate", True)),
    )


_SCALINGS: Mapping[str, Callable[[str, Mapping[str, Any]], RopeScaling]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}


def _kind(model_type: str, parameters: Mapping[str, Any]) -> str:
    if "rope_type" not in parameters:
        raise ValueError(
            f"{model_type}: `rope_parameters` must hold `rope_type`, got only {', '.join(parameters) or 'nothing'}: "
            "perhaps they differ from layer to layer, which this family does not know."
        )
    return str(parameters["rope_type"])


def _number(model_type: str, parameters: Mapping[str, Any], name: str) -> float:
    value = parameters.get(name)
    if not _is_positive(value):
        kind = parameters["rope_type"]
        raise ValueError(
            f"{model_type}: `{name}` of `rope_type` {kind!r} must be a positive finite number, got {value!r}."
        )
    return float(value)


def _optional(model_type: str, parameters: Mapping[str, Any], name: str, default: float) -> float:
    return default if parameters.get(name) is None else _number(model_type, parameters, name)


def _is_positive(value: Any) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < math.inf

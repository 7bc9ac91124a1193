# SPDX-License-Identifier: Apache-2.0
"""Exports of a run: a Hugging Face checkpoint of the whole model, or an adapter's folder."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from jrl.models.adapters.bind import Adapter
from jrl.models.adapters.lora import Lora
from jrl.models.checkpoint import save_checkpoint
from jrl.models.heads import HEADS, HeadsPlace
from jrl.models.model import LanguageModel
from jrl.models.policy import merge_params
from jrl.models.quantize import QuantizedKernel
from jrl.placement import fetch
from jrl.trainers.loading.adapters import adapter_writer
from jrl.typing import Frozen, Params


def model_writer(
    lm: LanguageModel,
    params: Params,
    frozen: Frozen,
    *,
    adapter: Adapter | None,
    base_model: Any,
    tokenizer: Any,
    merge_adapter: bool,
    heads: HeadsPlace,
) -> Callable[[Path], None]:
    """A function that writes the parameters as they are now: copied to the host here, written whenever called.

    All processes call this one; what it returns only process 0, which holds the copy.

    Args:
      lm: The model.
      params: What trains, and heads that a state holds beside.
      frozen: The rest.
      adapter: What trains beside the frozen model; None: parts of the model itself do.
      base_model: The model without its adapter, as `model_path` names it.
      tokenizer: Stored beside.
      merge_adapter: Writes the whole model, with the adapter in its weights.
      heads: Where heads go; beside an adapter they have a file of their own in any case.
    Raises:
      ValueError: If an adapter is to be merged where there is none, or one that is no part of any weight, or one into
        int8 or nf4 weights. Frozen bfloat16 weights are written as they are.
    """
    check_merge(adapter, merge_adapter=merge_adapter)
    if heads == "left_out":
        params = {name: value for name, value in params.items() if name not in HEADS}
    if adapter is not None and not merge_adapter:
        return adapter_writer(lm, adapter, params, base_model=base_model, tokenizer=tokenizer)
    host = whole_model(params, frozen, adapter)

    def write(directory: Path) -> None:
        save_checkpoint(directory, lm, host, tokenizer=tokenizer, heads=heads)

    return write


def check_merge(adapter: Adapter | None, *, merge_adapter: bool) -> None:
    """Refuses to merge where there is nothing to merge.

    Raises:
      ValueError: If an adapter is to be merged and there is none.
    """
    if adapter is None and merge_adapter:
        raise ValueError(
            "`merge_adapter` must be False where no adapter trains (`model.peft_config` is None): the whole model is "
            "what is written."
        )


def whole_model(params: Params, frozen: Frozen, adapter: Adapter | None) -> dict[str, Any]:
    """All parameters on the host of process 0, an adapter merged into them; all processes call it.

    Leaf by leaf: no device ever holds more than one whole array beyond its own. On the other processes None stands for
    each.

    Raises:
      ValueError: If the weights are int8 or nf4, or the adapter is no part of any weight.
    """
    leaves = jax.tree.leaves(frozen, is_leaf=lambda leaf: isinstance(leaf, QuantizedKernel))
    if any(isinstance(leaf, QuantizedKernel) for leaf in leaves):
        raise ValueError(
            "`merge_adapter` must be False where `model.frozen_dtype` is int8 or nf4: a model is never written from "
            "weights of so few bits. Load the adapter on the unrounded base and merge there."
        )
    whole = merge_params(params, frozen)
    if isinstance(adapter, Lora):
        whole = jax.jit(adapter.merge)(whole, params[adapter.name])
    elif adapter is not None:
        raise ValueError("`merge_adapter` must be False for virtual tokens: they are no part of any weight.")
    host: dict[str, Any] = fetch(whole, everywhere=False)
    return host

# SPDX-License-Identifier: Apache-2.0
"""The models of a planned run as shapes: the one that learns, and the reference that it is held against."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jrl.models.heads import HEADS
from jrl.models.model import LanguageModel
from jrl.models.policy import ADAPTERS, init_reference
from jrl.models.quantize import quantize_frozen
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.trainers.config.method import Footprint
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.adapters import plan_adapter
from jrl.trainers.loading.setup import COMPUTE_DTYPES, check_what_trains, compute_dtype, described_model
from jrl.typing import PolicyFns


@dataclass(frozen=True)
class ModelShapes:
    """A model as shapes, and where it is.

    Attributes:
      lm: The model.
      policy: As algorithms see it.
      keeping: The same, which keeps every activation; `policy` itself without remat.
      depth: Layers that a gradient passes.
      params: What trains.
      frozen: The rest.
      mesh: Where it would be.
      dtype: Of the computation.
    """

    lm: LanguageModel
    policy: PolicyFns
    keeping: PolicyFns
    depth: int
    params: Any
    frozen: Any
    mesh: AbstractMesh
    dtype: Any


def model_part(
    config: TRLConfig, mesh: AbstractMesh, footprint: Footprint, *, attends_as_configured: bool = False
) -> ModelShapes:
    """The model that a configuration trains.

    Args:
      config: The run's.
      mesh: Where it would be.
      footprint: Of the run: which heads the model has.
      attends_as_configured: Whether to take the kernel that `model.attn_implementation` finds for the mesh in force;
        False takes einsums, whose activations are counted from shapes.
    Raises:
      ValueError: If the model cannot be what the configuration asks for.
    """
    adapter = plan_adapter(config.model, None)
    check_what_trains(config, adapter, with_value_head=footprint.value_head)
    lm = described_model(config, adapter)
    value_head = config.model.value_head if footprint.value_head else None
    lm = replace(lm, value_head=value_head, num_q_heads=footprint.num_q_heads)
    split: dict[str, Any] = {"num_layers_unfrozen": config.model.num_layers_unfrozen}
    if adapter.config is not None:
        split["adapter"] = adapter.config
    dtype = COMPUTE_DTYPES[compute_dtype(config)]
    computed: dict[str, Any] = {"compute_dtype": dtype}
    if attends_as_configured:
        computed["attn_implementation"] = config.model.attn_implementation
    keeping = lm.policy(**computed, **split)
    policy = lm.policy(**computed, remat=True, **split) if config.train.remat else keeping
    shapes = _shapes(lm, split, config.model.frozen_dtype)
    return ModelShapes(lm, policy, keeping, _depth(lm, split), *shapes, mesh, dtype)


def kept_reference(part: ModelShapes, footprint: Footprint) -> Any:
    """Parameters that the reference has for itself during training, as shapes; {} where it has none."""
    if footprint.reference is None:
        return {}
    if footprint.reference == "whole":
        return part.params
    if footprint.reference == "branch":
        return jax.eval_shape(init_reference, part.params)
    own = model_part(footprint.reference, part.mesh, Footprint())
    return {**own.params, **own.frozen}


def _depth(lm: LanguageModel, split: dict[str, Any]) -> int:
    """Layers that a gradient passes: those that train, all under an adapter."""
    unfrozen: int = split["num_layers_unfrozen"]
    if "adapter" not in split and unfrozen != -1:
        return max(unfrozen, 1)
    return lm.config.num_layers + (
        lm.config.num_encoder_layers if isinstance(lm.config, Seq2SeqConfig) else 0
    )


def _shapes(lm: LanguageModel, split: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """(params, frozen) of a model as shapes, rounded as the run would round them."""

    def init(key: Any) -> Any:
        params = lm.init(key)
        if "adapter" in split:
            params = quantize_frozen(params, kind=kind, keep=(*HEADS, *ADAPTERS))
        params, frozen = lm.split_params(params, key=key, **split)
        return params, frozen if "adapter" in split else quantize_frozen(frozen, kind=kind)

    shapes: tuple[Any, Any] = jax.eval_shape(init, jax.eval_shape(partial(jax.random.key, 0)))
    return shapes

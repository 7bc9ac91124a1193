# SPDX-License-Identifier: Apache-2.0
"""From a config to arrays on the mesh: tokenizer, model, what trains, what is frozen, and the reference."""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jrl.data.tokenizer import check_vocabulary, load_tokenizer
from jrl.mesh import batch_sharding, make_mesh, replicated, tree_shardings
from jrl.models.adapters.bind import Adapter
from jrl.models.checkpoint import load_checkpoint
from jrl.models.heads import init_value_head
from jrl.models.model import LanguageModel, make_model
from jrl.models.policy import ADAPTERS, HEADS, init_reference
from jrl.models.quantize import quantize_frozen
from jrl.trainers.adapters import AdapterPlan, plan_adapter
from jrl.trainers.config import TRLConfig
from jrl.typing import Frozen, Params, PolicyFns

COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

INIT_STREAM, ADAPTER_STREAM = 0, 4


@dataclass(frozen=True)
class PolicyBundle:
    """One language model, ready to train.

    Attributes:
      lm: Architecture and checkpoint names.
      policy: The model as algorithms see it.
      params: Trainable arrays, on the mesh.
      frozen: The rest, on the mesh.
      tokenizer: The transformers tokenizer.
      adapter: What trains beside the frozen model; None where parts of the model itself do.
      base_model: The model without its adapter, as `model_path` names it.
      replicated: One line for every parameter dimension that the mesh does not divide.
    """

    lm: LanguageModel
    policy: PolicyFns
    params: Params
    frozen: Frozen
    tokenizer: Any
    adapter: Adapter | None
    base_model: Any
    replicated: list[str]

    def reference(self) -> Params:
        """A copy of what trains, to be kept as the frozen reference: it shares no buffer with the donated state."""
        return init_reference(self.params)


def mesh_of(config: TRLConfig) -> Mesh:
    """The mesh of `train.mesh`, or all devices on the data axis."""
    sizes = {"data": -1, "fsdp": 1, "tensor": 1} | (config.train.mesh or {})
    return make_mesh(sizes["data"], sizes["fsdp"], sizes["tensor"])


def load_policy(
    config: TRLConfig, mesh: Mesh, *, with_value_head: bool, num_value_layers_unfrozen: int = 0
) -> PolicyBundle:
    """Loads tokenizer and model, splits what trains from what does not, and places both.

    Args:
      config: The run's configuration.
      mesh: Where the arrays go.
      with_value_head: PPO needs a value head; a checkpoint that holds one keeps its own kind.
      num_value_layers_unfrozen: Blocks of the value function's own branch.
    Raises:
      ValueError: If tokenizer, context length and model do not fit each other.
    """
    tokenizer = load_tokenizer(
        config.tokenizer.tokenizer_path,
        padding_side=config.tokenizer.padding_side,
        truncation_side=config.tokenizer.truncation_side,
        extra=config.tokenizer.tokenizer_extra_configs,
    )
    plan = plan_adapter(config.model, tokenizer)
    lm, params = _model(config, mesh, config.model.value_head if with_value_head else None, plan)
    check_vocabulary(tokenizer, lm.vocab_size)
    if lm.family.kind != config.model.model_arch_type:
        raise ValueError(
            f"`model.model_arch_type` must be {lm.family.kind!r} for a {lm.family.model_type} model, got "
            f"{config.model.model_arch_type!r}."
        )
    if config.train.seq_length + plan.num_virtual_tokens > lm.max_positions:
        more = f" and {plan.num_virtual_tokens} virtual tokens" if plan.num_virtual_tokens else ""
        raise ValueError(
            f"`train.seq_length` is {config.train.seq_length}{more}, but the model has {lm.max_positions} "
            "positions; shorten `seq_length` (prompt + max_new_tokens) or bring a model with a longer context."
        )
    split: dict[str, Any] = {
        "num_layers_unfrozen": config.model.num_layers_unfrozen,
        "num_value_layers_unfrozen": num_value_layers_unfrozen,
        "adapter": plan.config,
    }
    policy = lm.policy(
        value_head=lm.value_head,
        compute_dtype=COMPUTE_DTYPES[config.train.compute_dtype],
        remat=config.train.remat,
        **split,
    )
    key = jax.random.fold_in(jax.random.key(config.train.seed), ADAPTER_STREAM)
    report = tree_shardings(mesh, params)[1]
    if plan.config is not None:
        # First, so that what starts as a copy or a norm of frozen weights is that of those which are used.
        params = quantize_frozen(params, config.model.frozen_dtype, keep=(*HEADS, *ADAPTERS))
    trainable, frozen = lm.split_params(params, key=key, **split)
    if plan.config is None:
        frozen = quantize_frozen(frozen, config.model.frozen_dtype)
    # What was not read with the model, a fresh adapter or one of a folder of its own, is not on the mesh yet.
    trainable = jax.device_put(trainable, tree_shardings(mesh, trainable)[0])
    return PolicyBundle(lm, policy, trainable, frozen, tokenizer, lm.bind(plan.config), plan.base, report)


def _model(
    config: TRLConfig, mesh: Mesh, wanted_head: str | None, plan: AdapterPlan
) -> tuple[LanguageModel, Params]:
    """The model and its whole parameter tree, with a value head exactly where one is wanted."""
    path = plan.base
    key = jax.random.fold_in(jax.random.key(config.train.seed), INIT_STREAM)
    if not isinstance(path, str | os.PathLike):
        if config.model.model_extra_configs:
            raise ValueError(
                "`model.model_extra_configs` changes the config of a checkpoint, and `model.model_path` is a config "
                f"object: set {sorted(config.model.model_extra_configs)} on that object."
            )
        lm = make_model(path, wanted_head)
        params = lm.init(key)
        shardings, _ = tree_shardings(mesh, params)
        return lm, jax.device_put(params, shardings)
    rounded = plan.config is not None and config.model.frozen_dtype != "float32"
    loaded = load_checkpoint(
        path,
        dtype=jnp.bfloat16 if rounded else jnp.float32,
        mesh=mesh,
        config_changes=config.model.model_extra_configs,
    )
    lm, params = _with_loaded(loaded.model, {**loaded.params, **plan.load(loaded.model)})
    if wanted_head is None:
        params.pop("v_head", None)
        return replace(lm, value_head=None), params
    if lm.value_head is None:
        head = init_value_head(wanted_head, lm.feature_width, key)
        params["v_head"] = jax.device_put(head, tree_shardings(mesh, {"v_head": head})[0]["v_head"])
        return replace(lm, value_head=wanted_head), params
    if lm.value_head != wanted_head:
        warnings.warn(
            f"`model.value_head` is {wanted_head!r}, but {path} holds a {lm.value_head!r} head: that one is used.",
            stacklevel=3,
        )
    return lm, params


def _with_loaded(lm: LanguageModel, params: dict[str, Any]) -> tuple[LanguageModel, dict[str, Any]]:
    """The model with the kind of value head that its parameters have."""
    if "v_head" not in params:
        return lm, params
    return replace(lm, value_head="mlp" if "hidden" in params["v_head"] else "linear"), params


def place_rows(mesh: Mesh, tree: Any) -> Any:
    """Host arrays with leading rows onto the mesh: split where the rows divide, whole on every device where not."""
    sharding = batch_sharding(mesh)
    parts = int(np.prod([mesh.shape[axis] for axis in ("data", "fsdp")]))

    def place(leaf: Any) -> jax.Array:
        return jax.device_put(leaf, sharding if leaf.shape[0] % parts == 0 else replicated(mesh))

    return jax.tree.map(place, tree)

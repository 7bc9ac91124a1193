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
from jrl.models.checkpoint import load_checkpoint
from jrl.models.heads import init_value_head
from jrl.models.model import CausalLM
from jrl.models.policy import init_reference, split_params
from jrl.trainers.config import TRLConfig
from jrl.typing import Frozen, Params, PolicyFns

COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16}

INIT_STREAM = 0


@dataclass(frozen=True)
class PolicyBundle:
    """One language model, ready to train.

    Attributes:
      lm: Architecture and checkpoint names.
      policy: The model as algorithms see it.
      params: Trainable arrays, on the mesh.
      frozen: The rest, on the mesh.
      tokenizer: The transformers tokenizer.
      replicated: One line for every parameter dimension that the mesh does not divide.
    """

    lm: CausalLM
    policy: PolicyFns
    params: Params
    frozen: Frozen
    tokenizer: Any
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
    lm, params = _model(config, mesh, config.model.value_head if with_value_head else None)
    check_vocabulary(tokenizer, lm.config.vocab_size)
    if config.train.seq_length > lm.config.max_positions:
        raise ValueError(
            f"`train.seq_length` is {config.train.seq_length}, but the model has {lm.config.max_positions} "
            "positions; shorten `seq_length` (prompt + max_new_tokens) or bring a model with a longer context."
        )
    num_layers_unfrozen = config.model.num_layers_unfrozen
    policy = lm.policy(
        num_layers_unfrozen=num_layers_unfrozen,
        num_value_layers_unfrozen=num_value_layers_unfrozen,
        value_head=lm.value_head,
        compute_dtype=COMPUTE_DTYPES[config.train.compute_dtype],
        remat=config.train.remat,
    )
    trainable, frozen = split_params(
        params,
        lm.config,
        num_layers_unfrozen=num_layers_unfrozen,
        num_value_layers_unfrozen=num_value_layers_unfrozen,
    )
    return PolicyBundle(lm, policy, trainable, frozen, tokenizer, tree_shardings(mesh, params)[1])


def _model(config: TRLConfig, mesh: Mesh, wanted_head: str | None) -> tuple[CausalLM, Params]:
    """The model and its whole parameter tree, with a value head exactly where one is wanted."""
    path = config.model.model_path
    key = jax.random.fold_in(jax.random.key(config.train.seed), INIT_STREAM)
    if not isinstance(path, str | os.PathLike):
        if config.model.model_extra_configs:
            raise ValueError(
                "`model.model_extra_configs` changes the config of a checkpoint, and `model.model_path` is a config "
                f"object: set {sorted(config.model.model_extra_configs)} on that object."
            )
        lm = CausalLM.from_config(path, value_head=wanted_head)
        params = lm.init(key)
        shardings, _ = tree_shardings(mesh, params)
        return lm, jax.device_put(params, shardings)
    loaded = load_checkpoint(path, mesh=mesh, config_changes=config.model.model_extra_configs)
    lm, params = loaded.model, dict(loaded.params)
    if wanted_head is None:
        params.pop("v_head", None)
        return replace(lm, value_head=None), params
    if lm.value_head is None:
        head = init_value_head(wanted_head, lm.config.width, key)
        params["v_head"] = jax.device_put(head, tree_shardings(mesh, {"v_head": head})[0]["v_head"])
        return replace(lm, value_head=wanted_head), params
    if lm.value_head != wanted_head:
        warnings.warn(
            f"`model.value_head` is {wanted_head!r}, but {path} holds a {lm.value_head!r} head: that one is used.",
            stacklevel=3,
        )
    return lm, params


def place_rows(mesh: Mesh, tree: Any) -> Any:
    """Host arrays with leading rows onto the mesh: split where the rows divide, whole on every device where not."""
    sharding = batch_sharding(mesh)
    parts = int(np.prod([mesh.shape[axis] for axis in ("data", "fsdp")]))

    def place(leaf: Any) -> jax.Array:
        return jax.device_put(leaf, sharding if leaf.shape[0] % parts == 0 else replicated(mesh))

    return jax.tree.map(place, tree)

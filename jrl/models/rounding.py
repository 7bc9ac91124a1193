# SPDX-License-Identifier: Apache-2.0
"""Kernels and adapters rounded before a loop over tokens, which would read the master weights anew for each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jrl.mesh import path_name
from jrl.models.layers import ROUNDED, TABLES
from jrl.typing import Params

# Not the router of experts, which computes in float32, nor tables, whose rows may be added up in float32.
_ROUNDED = re.compile(
    r"(^|/)(((attn|mamba)/\w+|cross/[qkvo])/kernel|(shared_)?mlp/(up|gate|down)/kernel|experts/(up|gate|down|latent_(down|up)/kernel)|lm_head/kernel|(layer_)?embed_(in|out)/kernel|input_(gate|out)/kernel)$"
)
# Not those of latent attention's `k_up` and `v_up`, which are added to their kernels in float32.
_PROJECTIONS = re.compile(r"(^|/)((attn|mamba)/(?![kv]_up)\w+|cross/[qkvo]|(shared_)?mlp/(up|gate|down))$")


def round_kernels(tree: Params, dtype: Any) -> Params:
    """Rounds kernels to the dtype in which products read them: results are the same to the bit.

    A table of tokens gets a copy, for a head that it is as well, and for lookups that round it at once.

    Under bfloat16 a step of decoding then moves half the bytes, and so does gathering them over `fsdp`.

    Args:
      tree: Float parameters of a decoder or T5; rounded kernels of fewer bits stay as they are.
      dtype: Of the computation.
    """
    if jnp.dtype(dtype).itemsize >= 4:
        return tree

    def rounded(path: Any, leaf: Any) -> Any:
        return leaf.astype(dtype) if _ROUNDED.search(path_name(path)) else leaf

    found: dict[str, Any] = dict(jax.tree_util.tree_map_with_path(rounded, dict(tree)))
    for name in found.keys() & set(TABLES):  # of table and copy only what is read is ever made
        found[name] = {**found[name], ROUNDED: found[name]["embedding"].astype(dtype)}
    return found


def round_adapters(tree: Mapping[str, Any], dtype: Any) -> dict[str, Any]:
    """Rounds A and B of projections to the dtype in which products read them: results are the same to the bit.

    All others stay: heads add up in float32, and a few that are read in this dtype are small.

    Args:
      tree: The collection "lora".
      dtype: Of the computation.
    """

    def rounded(path: Any, leaf: Any) -> Any:
        *module, name = path_name(path).split("/")
        is_read = name in ("a", "b") and _PROJECTIONS.search("/".join(module))
        return leaf.astype(dtype) if is_read else leaf

    return dict(jax.tree_util.tree_map_with_path(rounded, dict(tree)))

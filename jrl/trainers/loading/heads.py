# SPDX-License-Identifier: Apache-2.0
"""Heads of a run's model: those that its checkpoint brought, or fresh ones."""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jrl.mesh import place, tree_shardings
from jrl.models.heads import HEADS, heads_of, init_q_heads, init_value_head
from jrl.models.model import LanguageModel
from jrl.typing import Params, PRNGKey


class WantedHeads(NamedTuple):
    """Heads that an algorithm reads beside the logits.

    Attributes:
      value_head: Kind of value head where the checkpoint brings none; None: no values are read.
      num_q_heads: Q heads, with as many targets.
    """

    value_head: str | None
    num_q_heads: int = 0


def with_heads(
    lm: LanguageModel, params: Params, wanted: WantedHeads, *, mesh: Mesh, key: PRNGKey, path: Any
) -> tuple[LanguageModel, dict[str, Any]]:
    """The model with exactly the wanted heads.

    A checkpoint's heads are used where they are those of this algorithm: a value head that stands beside Q heads, and
    one that stands alone, estimate different rewards, so neither is taken for the other.

    Args:
      lm: The model.
      params: The whole tree, with the heads that the checkpoint holds.
      wanted: What this run reads.
      mesh: Where fresh heads go.
      key: Of fresh heads.
      path: The checkpoint, for messages.
    Raises:
      ValueError: If the checkpoint has Q heads in another number.
    """
    kind, num_q_heads = heads_of(params)
    params = dict(params)
    if wanted.value_head is None or bool(num_q_heads) != bool(wanted.num_q_heads):
        kind, num_q_heads = None, 0
        params = {name: value for name, value in params.items() if name not in HEADS}
    if num_q_heads != wanted.num_q_heads and num_q_heads:
        raise ValueError(
            f"`method.two_qs` asks for {wanted.num_q_heads} Q head(s), but {path} holds {num_q_heads}: set "
            f"`method.two_qs: {str(num_q_heads == 2).lower()}`."
        )
    fresh: dict[str, Any] = {}
    if kind is None and wanted.value_head is not None:
        fresh["v_head"] = init_value_head(wanted.value_head, lm.feature_width, key)
    elif kind != wanted.value_head:
        warnings.warn(
            f"`model.value_head` is {wanted.value_head!r}, but {path} holds a {kind!r} head: that one is used.",
            stacklevel=4,
        )
    if wanted.num_q_heads and not num_q_heads:
        sizes = lm.feature_width, lm.vocab_size, lm.config.padded_vocab_size
        fresh |= init_q_heads(wanted.num_q_heads, *sizes, jax.random.fold_in(key, 1))
    params |= place(fresh, tree_shardings(mesh, fresh)[0])
    kind, num_q_heads = heads_of(params)
    return replace(lm, value_head=kind, num_q_heads=num_q_heads), params

# SPDX-License-Identifier: Apache-2.0
"""trlX's models of ILQL, its heads and its configuration."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import optax

from jrl.interop import as_array, in_kind_of
from jrl.models.heads import init_q_heads, init_value_head, read_heads
from jrl.ops.alignment import states_at
from jrl.trlx.data.configs import ILQLConfig
from jrl.trlx.data.ilql_types import ILQLBatch
from jrl.trlx.models.modeling_base import PreTrainedModelWrapper

__all__ = [
    "AutoModelForCausalLMWithILQLHeads",
    "AutoModelForSeq2SeqLMWithILQLHeads",
    "ILQLBatch",
    "ILQLConfig",
    "ILQLHeads",
    "batched_index_select",
    "topk_mask",
]


class _WithILQLHeads(PreTrainedModelWrapper):
    options: ClassVar[Mapping[str, Any]] = {"two_qs": True, "alpha": 0.99}

    def sync_target_q_heads(self) -> None:
        """Moves the target heads towards the online ones by `alpha`."""
        params = self.untrained.params
        target = optax.incremental_update(params["q_heads"], params["target_q_heads"], self.given["alpha"])
        self.untrained.params = {**params, "target_q_heads": target}


class AutoModelForCausalLMWithILQLHeads(_WithILQLHeads):
    """A decoder with a value head, Q heads and their targets."""


class AutoModelForSeq2SeqLMWithILQLHeads(_WithILQLHeads):
    """An encoder-decoder with a value head, Q heads and their targets."""

    kind: ClassVar[str] = "seq2seq"


class ILQLHeads:
    """A value head and Q heads with their targets, over hidden states of any model; fresh ones say 0.

    Args:
      hidden_size: Width of the states.
      vocab_size: Number of actions.
      two_qs: Whether there are two Q heads, or one.
      alpha: Share of the online heads that a sync moves the target heads by.
      dtype: Of torch; heads are float32 in any case.

    Attributes:
      params: `v_head`, `q_heads` and `target_q_heads`, as a learner's state has them.
    """

    def __init__(
        self, hidden_size: int, vocab_size: int, two_qs: bool, alpha: float, dtype: Any = None
    ) -> None:
        del dtype
        self.hidden_size, self.vocab_size, self.two_qs, self.alpha = hidden_size, vocab_size, two_qs, alpha
        self.params: dict[str, Any] = _fresh(hidden_size, vocab_size, 2 if two_qs else 1)

    def __call__(self, hs: Any, states_ixs: Any = None, actions_ixs: Any = None) -> tuple[Any, Any, Any]:
        """(Q values, target Q values, values): tuples of (B T V), and (B S 1).

        Args:
          hs: Hidden states (B L D).
          states_ixs: Columns (B S) at which values are read; default: all.
          actions_ixs: Columns (B T) at which Q values are read; default: all.
        """
        columns = (None if x is None else as_array(x, jnp.int32) for x in (states_ixs, actions_ixs))
        found: tuple[Any, Any, Any] = in_kind_of(
            hs, _read(self.vocab_size, self.params, as_array(hs, jnp.float32), *columns)
        )
        return found

    def sync_target_q_heads(self) -> None:
        """Moves the target heads towards the online ones by `alpha`."""
        online, target = self.params["q_heads"], self.params["target_q_heads"]
        self.params["target_q_heads"] = optax.incremental_update(online, target, self.alpha)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _fresh(width: int, vocab_size: int, num_q_heads: int) -> dict[str, Any]:
    """Parameters of `ILQLHeads`, by one program."""
    return {
        "v_head": init_value_head("mlp", width, jax.random.key(0)),
        **init_q_heads(num_q_heads, width, vocab_size, vocab_size, jax.random.key(1)),
    }


@functools.partial(jax.jit, static_argnums=0)
def _read(vocab_size: int, params: Any, hidden: Any, states_ixs: Any, actions_ixs: Any) -> Any:
    """Values of `ILQLHeads`, computed in one program."""
    states = hidden if states_ixs is None else states_at(hidden, states_ixs)
    acting = hidden if actions_ixs is None else states_at(hidden, actions_ixs)
    read = functools.partial(read_heads, vocab_size, vocab_size)
    online, target = (
        read({"q_heads": params[name]}, acting)["q_values"] for name in ("q_heads", "target_q_heads")
    )
    values = read({"v_head": params["v_head"]}, states)["values"][..., None]
    return tuple(online), tuple(target), values


def batched_index_select(x: Any, idxs: Any, dim: int = 1) -> Any:
    """The vectors of x (B L D) at columns idxs (B T): (B T D); `dim` is 1."""
    if dim != 1:
        raise ValueError(f"`dim` must be 1, the columns, got {dim}.")
    return in_kind_of(x, states_at(as_array(x, None), as_array(idxs, jnp.int32)))


def topk_mask(xs: Any, k: int) -> Any:
    """Scores (B V) with −inf wherever k others of the row are larger; k above V leaves them."""
    x = as_array(xs, jnp.float32)
    if k > x.shape[-1]:
        return xs
    smallest = jax.lax.top_k(x, k)[0][:, -1:]
    return in_kind_of(xs, jnp.where(x < smallest, -jnp.inf, x))

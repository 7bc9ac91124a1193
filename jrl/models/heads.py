# SPDX-License-Identifier: Apache-2.0
"""Value and Q heads: read the last hidden states, answer in float32, and say 0 until they are trained.

In files they have the names of trlX (`v_head.0`, or `ilql_heads.v_head.0` beside Q heads) or, a linear value
head, of TRL (`v_head.summary`). trlX and TRL open a model's file that holds them, plain transformers passes over the
heads, and servers such as vLLM refuse such a file.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.mesh import constrain, constrain_rows
from jrl.models.families.base import Entry, linear, vector, vocabulary, vocabulary_vector
from jrl.models.layers import hide_padding
from jrl.ops.logprobs import take_targets

VALUE_HEADS = ("mlp", "linear")
HEADS = ("v_head", "q_heads", "target_q_heads")
"""Entries of a parameter tree that are heads; float32 always. Q heads are "0", "1", ... within theirs."""
HeadsPlace = Literal["left_out", "inside", "apart"]
"""Of heads in a folder that is written: nowhere; in the file of the model, where trlX and TRL look; or in a file of the
subfolder `heads`, where servers that know no heads do not."""
_Q_LAYERS = ("q_heads", "target_q_heads")


class Dense(nn.Module):
    """A float32 linear layer with bias."""

    features: int
    kernel_init: nn.initializers.Initializer

    @nn.compact
    def __call__(self, x: Float[Array, "*rows D"], wanted: Int[Array, "B T"] | None = None) -> Array:
        """(..., D) to (..., features), or with `wanted`, one feature of each of (B T D), to these alone, (B T).

        Args:
          x: Inputs.
          wanted: Features, at least 0; from `features` on there is none, which gives 0.
        """
        kernel = self.param("kernel", self.kernel_init, (x.shape[-1], self.features), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), jnp.float32)
        kernel, bias = kernel.astype(jnp.float32), bias.astype(jnp.float32)
        if wanted is None:
            return x @ kernel + bias.reshape((1,) * (x.ndim - 1) + (-1,))
        own = jnp.take(bias, wanted, mode="fill", fill_value=0)
        return jnp.sum(x * _columns(kernel, wanted), axis=-1) + own


def _columns(kernel: Float[Array, "D F"], ids: Int[Array, "B T"]) -> Float[Array, "B T D"]:
    """A column of a kernel for each id, at least 0; zeros for an id behind the last column.

    Over `fsdp` what is found moves, not the kernel: each device looks up its own part of the columns for all devices
    that share a copy of the kernel, as `jrl.models.layers.Table` does.
    """
    ids = constrain(ids, "replica", None)
    found = constrain(jnp.take(kernel, ids, axis=1, mode="fill", fill_value=0), "embed", "replica", None)
    found = constrain(jnp.moveaxis(found, 0, -1), "part of a replica", None, None)
    return constrain(found, "batch", None, None)


class ValueHead(nn.Module):
    """Value head: one number for each state.

    A fresh head is 0 everywhere: a critic that starts large and random dominates the first updates.

    Attributes:
      kind: "mlp" is D → 2D, ReLU, → 1; "linear" is D → 1.
    """

    kind: str

    @nn.compact
    def __call__(self, hidden: Float[Array, "*rows D"]) -> Float[Array, "*rows"]:
        """Values, float32 whatever the compute dtype."""
        x = hidden.astype(jnp.float32)
        if self.kind == "mlp":
            x = jax.nn.relu(Dense(2 * x.shape[-1], nn.initializers.lecun_normal(), name="hidden")(x))
        return Dense(1, nn.initializers.zeros_init(), name="out")(x).squeeze(-1)


class QHead(nn.Module):
    """Q head, one number for each action: D → 2D, ReLU, → V. As fresh as a value head.

    Attributes:
      vocab_size: Real entries of the vocabulary.
      padded_vocab_size: Columns of the result.
    """

    vocab_size: int
    padded_vocab_size: int

    @nn.compact
    def __call__(self, hidden: Float[Array, "*rows D"], actions: Int[Array, "B T"] | None = None) -> Array:
        """Values of all actions, or of one for each state, float32.

        Args:
          hidden: States.
          actions: One for each of the states (B T D), whose values alone are computed. One outside the vocabulary has
            the value 0.
        Returns:
          (..., V), −inf in the columns that only pad the vocabulary, as in the logits; with `actions`, (B, T).
        """
        x = hidden.astype(jnp.float32)
        x = jax.nn.relu(Dense(2 * x.shape[-1], nn.initializers.lecun_normal(), name="hidden")(x))
        # Whole like its input, else the gradient of all Q values would be gathered on every device.
        x = constrain_rows(x)
        out = Dense(self.padded_vocab_size, nn.initializers.zeros_init(), name="out")
        if actions is None:
            return hide_padding(out(x), self.vocab_size)
        is_real = (actions >= 0) & (actions < self.vocab_size)
        actions = jnp.where(is_real, actions, self.padded_vocab_size)
        # What is looked up is as wide as x, what is multiplied as wide as the vocabulary.
        if x.shape[-1] < self.padded_vocab_size:
            return out(x, actions)
        return take_targets(out(x), actions)


def read_heads(
    vocab_size: int,
    padded_vocab_size: int,
    params: Mapping[str, Any],
    hidden: Float[Array, "*rows D"],
    actions: Int[Array, "B T"] | None = None,
) -> dict[str, Array]:
    """`PolicyFns.heads` of every language model, its sizes bound first.

    What is read is told by `params` alone: Q values, as wide as logits, are computed only for who holds Q heads.

    Args:
      vocab_size: Real entries of the vocabulary.
      padded_vocab_size: Columns of the Q values.
      params: May hold `v_head` and `q_heads`; anything else is passed over.
      hidden: `Features.value`.
      actions: One for each of the states (B T D), of which alone Q values are wanted; None: of all.
    Returns:
      `"values"` (...,) of a value head, `"q_values"` (heads, ..., V) of Q heads; with `actions`, (heads, B, T).
    """
    kind, num_q_heads = heads_of(params)
    hidden = constrain_rows(hidden)  # as before the language-model head
    found: dict[str, Any] = {}
    if kind is not None:
        found["values"] = ValueHead(kind).apply({"params": params["v_head"]}, hidden)
    if num_q_heads:
        head, q_heads = QHead(vocab_size, padded_vocab_size), params["q_heads"]
        q_values: list[Any] = [
            head.apply({"params": q_heads[str(index)]}, hidden, actions) for index in range(num_q_heads)
        ]
        found["q_values"] = jnp.stack(q_values)
    return found


def init_value_head(kind: str, width: int, key: Array) -> dict[str, Any]:
    """Fresh parameters of a value head over hidden states of this width.

    Raises:
      ValueError: If there is no head of this kind.
    """
    if kind not in VALUE_HEADS:
        raise ValueError(f"`value_head` must be one of {', '.join(VALUE_HEADS)}, got {kind!r}.")
    return _init(kind, width, key)


@functools.partial(jax.jit, static_argnums=(0, 1))
def _init(kind: str, width: int, key: Array) -> dict[str, Any]:
    return dict(ValueHead(kind).init(key, jnp.zeros((1, width)))["params"])


def init_q_heads(
    count: int, width: int, vocab_size: int, padded_vocab_size: int, key: Array
) -> dict[str, dict[str, Any]]:
    """Fresh parameters of so many Q heads, and their targets: copies, which no buffer is shared with.

    Raises:
      ValueError: If `count` is not 1 or 2, as many as there are algorithms for.
    """
    if count not in (1, 2):
        raise ValueError(f"`num_q_heads` must be 1 or 2, got {count}.")
    head = QHead(vocab_size, padded_vocab_size)

    @jax.jit
    def init(key: Array) -> dict[str, Any]:
        keys = jax.random.split(key, count)
        return {str(i): dict(head.init(keys[i], jnp.zeros((1, width)))["params"]) for i in range(count)}

    heads = init(key)
    return {"q_heads": heads, "target_q_heads": jax.tree.map(jnp.copy, heads)}


def head_entries(value_head: str | None, num_q_heads: int, *, width: int, vocab_size: int) -> list[Entry]:
    """Every tensor of the heads, in the layout of the library that has such heads.

    Args:
      value_head: Its kind; None: there is none.
      num_q_heads: How many, with as many targets.
      width: Of what they read.
      vocab_size: Real entries of the vocabulary.
    """
    prefix = "ilql_heads." if num_q_heads else ""
    found = []
    if value_head == "mlp":
        found += _dense_entries(f"{prefix}v_head.0", "v_head/hidden", width, 2 * width)
        found += _dense_entries(f"{prefix}v_head.2", "v_head/out", 2 * width, 1)
    elif value_head == "linear":
        found += _dense_entries(f"{prefix}v_head.summary", "v_head/out", width, 1)
    for kind in _Q_LAYERS:
        for index in range(num_q_heads):
            name, path = f"{prefix}{kind}.{index}", f"{kind}/{index}"
            found += _dense_entries(f"{name}.0", f"{path}/hidden", width, 2 * width)
            out = (vocab_size, 2 * width)
            found += [
                Entry(f"{name}.2.weight", (f"{path}/out/kernel",), vocabulary(transposed=True), out),
                Entry(f"{name}.2.bias", (f"{path}/out/bias",), vocabulary_vector(), out[:1]),
            ]
    return found


def found_heads(names: Iterable[str]) -> tuple[str | None, int]:
    """Heads in a checkpoint with tensors of these names: (kind of the value head, number of Q heads)."""
    names = list(names)
    in_value_head = [name for name in names if re.match(r"(ilql_heads\.)?v_head\.", name)]
    value_head = "mlp" if in_value_head else None
    if any(".summary." in name for name in in_value_head):
        value_head = "linear"
    q_heads = [re.match(r"ilql_heads\.q_heads\.(\d+)\.", name) for name in names]
    return value_head, max((int(match[1]) + 1 for match in q_heads if match), default=0)


def heads_of(params: Mapping[str, Any]) -> tuple[str | None, int]:
    """Heads in a parameter tree, as `found_heads` has them."""
    value_head = None
    if "v_head" in params:
        value_head = "mlp" if "hidden" in params["v_head"] else "linear"
    return value_head, len(params.get("q_heads", {}))


def _dense_entries(name: str, path: str, size_in: int, size_out: int) -> list[Entry]:
    return [
        Entry(f"{name}.weight", (f"{path}/kernel",), linear(), (size_out, size_in)),
        Entry(f"{name}.bias", (f"{path}/bias",), vector(), (size_out,)),
    ]

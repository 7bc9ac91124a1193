# SPDX-License-Identifier: Apache-2.0
"""Writes `hlo_tpu_*.txt` and `hlo_gpu_*.txt`: small programs as the compilers of a TPU and of a GPU make them.

    python tests/golden/make_hlo.py tpu:v5e:2x4    # with jrl-post[plan-tpu]
    python tests/golden/make_hlo.py gpu:h100x8     # with jrl-post[plan-gpu]

Those here are of jax 0.10.2 with libtpu 0.0.42.1, and with jax-cuda12-plugin 0.10.2 and cuDNN 9.28.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jrl.mesh import make_mesh
from jrl.trainers.plan.targets import parse_target

LAYERS, WIDTH, VOCAB, ROWS, TOKENS, MICROBATCHES = 3, 256, 1024, 64, 24, 5
HEADS, HEAD_WIDTH, KEYS = 4, 64, 256
FEATURES, HIDDEN, POSITIONS = 768, 3072, 4096
SIZES = (2, 4, 1)


def sample(weights: jax.Array, table: jax.Array, rows: jax.Array) -> jax.Array:
    """A token loop that ends early, in it a loop over layers: weights are gathered once, the vocabulary is sorted."""
    whole, head = (lax.with_sharding_constraint(x, PartitionSpec()) for x in (weights, table))

    def token(state: tuple[Any, ...]) -> tuple[Any, ...]:
        step, rows, cache, done = state
        rows, _ = lax.scan(lambda rows, weight: (jnp.tanh(rows @ weight), None), rows, whole)
        cache = lax.dynamic_update_slice(cache, rows[:, None], (0, step, 0))
        scores = lax.dot_general(rows, head, (((1,), (1,)), ((), ())))
        best = lax.sort(scores, dimension=1)[:, -1]
        return step + 1, rows + cache.mean(axis=1), cache, done | (best > 9.0)

    def more(state: tuple[Any, ...]) -> jax.Array:
        return (state[0] < TOKENS) & ~jnp.all(state[3])

    cache = jnp.zeros((rows.shape[0], TOKENS, WIDTH), rows.dtype)
    return lax.while_loop(more, token, (jnp.int32(0), rows, cache, jnp.zeros(rows.shape[0], bool)))[2]


def update(weights: jax.Array, table: jax.Array, rows: jax.Array) -> jax.Array:
    """A loop over microbatches, in it loops over layers: every weight is gathered, and its gradient reduced."""

    def loss(weights: jax.Array, rows: jax.Array) -> jax.Array:
        def layer(rows: jax.Array, weight: jax.Array) -> tuple[jax.Array, None]:
            return jnp.tanh(rows @ lax.with_sharding_constraint(weight, PartitionSpec())), None

        rows, _ = lax.scan(layer, rows, weights)
        return jnp.square(rows).sum()

    def step(weights: jax.Array, rows: jax.Array) -> tuple[jax.Array, None]:
        grads = lax.with_sharding_constraint(jax.grad(loss)(weights, rows), PartitionSpec(None, "fsdp"))
        return weights - 1e-3 * grads, None

    return lax.scan(step, weights, rows)[0]


def feed_forward(rows: jax.Array, *kernels: jax.Array) -> jax.Array:
    """Products so large that a TPU gathers the kernels of the next while it computes one."""
    for up, down in zip(kernels[::2], kernels[1::2], strict=True):
        hidden = jnp.tanh(rows @ lax.with_sharding_constraint(up, PartitionSpec()))
        rows = rows + hidden @ lax.with_sharding_constraint(down, PartitionSpec())
    return rows


def attention(queries: jax.Array, keys: jax.Array, values: jax.Array) -> Any:
    """cuDNN's attention and its gradients."""

    def total(*arrays: jax.Array) -> jax.Array:
        out = jax.nn.dot_product_attention(*arrays, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    return jax.grad(total, argnums=(0, 1, 2))(queries, keys, values)


def arguments(mesh: Mesh, name: str) -> list[jax.ShapeDtypeStruct]:
    """What a program is given, split as jrl splits parameters and rows."""

    def array(shape: tuple[int, ...], *axes: Any, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*axes)))

    split = ("data", "fsdp")
    if name == "attention":
        return 3 * [array((ROWS, KEYS, HEADS, HEAD_WIDTH), split, dtype=jnp.bfloat16)]
    if name == "feed_forward":
        up = array((FEATURES, HIDDEN), "fsdp", dtype=jnp.bfloat16)
        down = array((HIDDEN, FEATURES), None, "fsdp", dtype=jnp.bfloat16)
        return [array((POSITIONS, FEATURES), split, dtype=jnp.bfloat16), *2 * [up, down]]
    rows = (
        array((ROWS, WIDTH), split) if name == "sample" else array((MICROBATCHES, ROWS, WIDTH), None, split)
    )
    return [array((LAYERS, WIDTH, WIDTH), None, "fsdp"), array((VOCAB, WIDTH), None, "fsdp"), rows]


PROGRAMS: dict[str, Callable[..., Any]] = {
    "sample": sample,
    "update": update,
    "feed_forward": feed_forward,
    "attention": attention,
}


def optimized(name: str, mesh: Mesh) -> str:
    """The optimized HLO of a program here, without its tables of source files."""
    with jax.set_mesh(mesh):
        text = jax.jit(PROGRAMS[name]).lower(*arguments(mesh, name)).compile().as_text()
    assert text is not None
    head, _, rest = text.partition("\nFileNames\n")
    return head + rest[rest.index("\n\n\n") :] if rest else head


def main(name: str) -> None:
    target = parse_target(name)
    mesh = make_mesh(*SIZES, devices=target.devices())
    own = {"tpu": "feed_forward", "gpu": "attention"}[target.platform]
    for program in ("sample", "update", own):
        path = Path(__file__).with_name(f"hlo_{target.platform}_{program}.txt")
        path.write_text(optimized(program, mesh), encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1])

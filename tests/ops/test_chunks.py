# SPDX-License-Identifier: Apache-2.0
"""Reads in chunks: the same results as at once, whatever the grid, for trees of any rank."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import AXES, logits_parts
from jrl.models.layers import hide_padding
from jrl.ops.chunks import map_positions, positions_of
from jrl.ops.logprobs import entropy_from_logits, kl_from_logits, logprobs_from_logits, take_targets
from jrl.ops.token_reads import read_tokens
from tests.jaxprs import equations, read_loop

SIZES = [(3, 7, 2), (3, 7, 6), (5, 2, 2), (4, 1, 1)]


def read(kernel: jax.Array, pair: dict[str, jax.Array], shift: jax.Array) -> dict[str, jax.Array]:
    """A number, and a number a head, of every position."""
    wide = pair["hidden"] @ kernel + jnp.broadcast_to(shift[..., None], (*shift.shape, kernel.shape[1]))
    largest = jax.nn.logsumexp(wide, axis=-1)
    return {"one": largest, "heads": jnp.stack([largest, 2 * largest + pair["offset"]], axis=-1)}


@pytest.mark.parametrize(("num_rows", "width", "positions"), SIZES)
def test_chunks_give_what_one_call_gives(num_rows: int, width: int, positions: int) -> None:
    """Values and gradients, those of closed-over parameters included, of reads that return several ranks."""
    rng = np.random.default_rng(0)
    kernel, hidden, offset, shift, weights = (
        jnp.asarray(rng.normal(size=size), jnp.float32)
        for size in ((4, 6), (num_rows, width, 4), (num_rows, width), (num_rows, width), (num_rows, width, 2))
    )

    def objective(kernel: jax.Array, hidden: jax.Array, *, positions: int) -> tuple[jax.Array, Any]:
        arrays = ({"hidden": hidden, "offset": offset}, shift)
        out = map_positions(partial(read, kernel), arrays, positions=positions)
        return jnp.sum(weights * out["heads"]), out

    value = jax.jit(jax.value_and_grad(objective, (0, 1), has_aux=True), static_argnames="positions")
    plain = value(kernel, hidden, positions=num_rows * width)
    chunked = value(kernel, hidden, positions=positions)
    assert chunked[0][1]["heads"].shape == (num_rows, width, 2)
    jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), chunked, plain)


@pytest.mark.parametrize(("num_rows", "width", "positions"), SIZES)
def test_no_call_gets_more_positions_than_allowed(num_rows: int, width: int, positions: int) -> None:
    seen = []

    def note(x: jax.Array) -> jax.Array:
        seen.append(x.shape)
        return x

    x = jax.ShapeDtypeStruct((num_rows, width, 2), jnp.float32)
    out = jax.eval_shape(lambda x: map_positions(note, (x,), positions=positions), x)
    assert out.shape == x.shape
    assert seen and all(rows * columns <= positions for rows, columns, _ in seen)


def test_every_wide_array_counts() -> None:
    # 10,000 bytes hold 25 float32 arrays over 100 tokens: 25 positions of one read, 5 of five.
    assert positions_of(10_000, vocab_size=100) == 25
    assert positions_of(10_000, vocab_size=100, num_reads=5) == 5
    assert positions_of(1, vocab_size=100) == 1, "one position at least"


@pytest.mark.parametrize(
    ("num_rows", "vocab_size", "parts"),
    [(8, 100, 8), (6, 100, 2), (8, 101, 4), (6, 101, 1)],
    ids=["both", "rows whole on every device", "vocabulary whole", "neither"],
)
def test_devices_count_where_they_split_the_logits(
    monkeypatch: pytest.MonkeyPatch, num_rows: int, vocab_size: int, parts: int
) -> None:
    mesh = jax.sharding.AbstractMesh((2, 2, 2), AXES)
    monkeypatch.setattr(jax.sharding, "get_abstract_mesh", lambda: mesh)
    found = logits_parts(num_rows, vocab_size)
    assert found == parts
    assert positions_of(10 * 4 * vocab_size, vocab_size=vocab_size, num_parts=found) == 10 * parts


@pytest.mark.parametrize("argument", ["chunk_bytes", "vocab_size", "num_reads", "num_parts"])
def test_sizes_must_be_positive(argument: str) -> None:
    sizes = dict(chunk_bytes=1000, vocab_size=10, num_reads=1, num_parts=1) | {argument: 0}
    with pytest.raises(ValueError, match=f"`{argument}` must be > 0, got 0"):
        positions_of(sizes.pop("chunk_bytes"), **sizes)


WIDE_READS: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "log-probabilities": logprobs_from_logits,
    "entropy": lambda logits, _: entropy_from_logits(logits),
    "KL": lambda logits, _: kl_from_logits(logits, 2 * logits),
    "a Q value": take_targets,
    "statistics": lambda logits, targets: sum(read_tokens(logits, targets)[:4], jnp.zeros(())),
    "padding": lambda logits, _: jnp.max(hide_padding(logits, logits.shape[-1] - 1), axis=-1),
}


@pytest.mark.parametrize("name", WIDE_READS)
def test_nothing_as_wide_as_a_piece_is_held_for_all_pieces(name: str) -> None:
    """The kernel is: it is smaller than a piece here. What a derivative takes out of a loop, each round would read."""
    hidden, kernel, targets = jnp.ones((3, 8, 4)), jnp.ones((4, 50)), jnp.zeros((3, 8), jnp.int32)

    def objective(kernel: jax.Array) -> jax.Array:
        def read(hidden: jax.Array, targets: jax.Array) -> jax.Array:
            return WIDE_READS[name](hidden @ kernel, targets)

        return map_positions(read, (hidden, targets), positions=6).sum()

    program = jax.make_jaxpr(jax.value_and_grad(objective))(kernel).jaxpr
    loops = [read_loop(each) for each in equations(program) if each.primitive.name == "scan"]
    held = [aval.size for loop in loops for aval in loop.held]
    assert kernel.size in held
    assert max(held) <= kernel.size

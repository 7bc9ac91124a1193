# SPDX-License-Identifier: Apache-2.0
"""Attention in blocks, where the scores of all rows and queries would take too much memory at once.

Rows are cut first: a block then multiplies matrices as large as before, only fewer of them. Queries are cut where a
single row of a device is still too large. A query sees all its keys in one softmax either way, so the result is that of
the whole, to rounding. The backward pass makes the scores of a block anew and holds one block.

Reference: none; memory is bounded by recomputation (Chen et al. 2016, arXiv:1604.06174).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain, constrain_rows, partition_spec
from jrl.typing import PRNGKey

MASKED_SCORE = float(np.finfo(np.float32).min)
"""Of a key that is not read: finite, so that the difference of two of them is 0, not NaN."""
SCORES_BYTES = 1 << 28
"""Most bytes of float32 scores that a device makes at once. The backward pass holds about three arrays of this size
together, under 1 GiB; a quarter of it is enough for the matrix products to be large, and GPT-2's usual batches fit."""


class Operands(NamedTuple):
    """Arrays that attention reads, of some rows and queries.

    Attributes:
      q: Queries.
      k: Keys, heads before positions, in one array or in several that follow each other.
      v: Values, likewise.
      mask: True where query q may read key s.
      bias: Added to the scores, the same for all rows where there is one alone; None: none.
      positions: Of the queries and of the keys, for ALiBi; None without it.
    """

    q: Float[Array, "B Q N H"]
    k: tuple[Float[Array, "B K S H"], ...]
    v: tuple[Float[Array, "B K S H"], ...]
    mask: Bool[Array, "B Q S"]
    bias: Float[Array, "1|B N Q S"] | None = None
    positions: tuple[Int[Array, "B Q"], Int[Array, "B S"]] | None = None

    @property
    def num_keys(self) -> int:
        """S, of all arrays together."""
        return sum(k.shape[2] for k in self.k)

    def first_keys(self, length: int) -> Operands:
        """Operands with all queries and the first keys."""

        def first(parts: tuple[Float[Array, "B K S H"], ...]) -> tuple[Float[Array, "B K S H"], ...]:
            starts = itertools.accumulate((part.shape[2] for part in parts), initial=0)
            return tuple(
                part if start + part.shape[2] <= length else part[:, :, : length - start]
                for start, part in zip(starts, parts, strict=False)
                if start < length
            )

        return self._replace(
            k=first(self.k),
            v=first(self.v),
            mask=self.mask[:, :, :length],
            bias=None if self.bias is None else self.bias[..., :length],
            positions=None if self.positions is None else (self.positions[0], self.positions[1][:, :length]),
        )


Attend = Callable[[Operands, PRNGKey | None], Float[Array, "B Q N H"]]
"""Attention of operands. The key is for dropout of the weights; None: none."""


@dataclass(frozen=True)
class ScoreBlocks:
    """Numbers of blocks into which rows and queries are cut.

    Attributes:
      devices: Parts into which the mesh in force splits the rows.
      rows: Blocks of the rows; they divide those of a device.
      queries: Blocks of the queries; the last one is padded where they do not divide.
    """

    devices: int
    rows: int
    queries: int

    @classmethod
    def fitting(cls, *, num_rows: int, num_queries: int, num_heads: int, num_keys: int) -> ScoreBlocks:
        """The fewest blocks whose scores fit into `SCORES_BYTES` of a device of the mesh in force.

        One query of one row is the least block there is, however many keys it reads. A step of decoding, with a single
        query in each row, is never cut: its scores are few beside the keys.
        """
        if num_queries == 1:
            return cls(1, 1, 1)
        mesh = jax.sharding.get_abstract_mesh()
        own_rows, own_heads = num_rows, num_heads
        if not mesh.empty:
            spec, _ = partition_spec(mesh, ("batch", "heads"), (num_rows, num_heads))
            own_rows, own_heads = NamedSharding(mesh, spec).shard_shape((num_rows, num_heads))
        query_bytes = 4 * own_heads * num_keys
        fitting_rows = SCORES_BYTES // (query_bytes * num_queries)
        counts = (count for count in range(1, own_rows + 1) if own_rows % count == 0)
        row_blocks = next((count for count in counts if own_rows // count <= fitting_rows), own_rows)
        fitting_queries = num_queries if fitting_rows else max(SCORES_BYTES // query_bytes, 1)
        return cls(num_rows // own_rows, row_blocks, -(-num_queries // fitting_queries))

    def attend(self, whole: Attend, operands: Operands, key: PRNGKey | None) -> Float[Array, "B Q N H"]:
        """`whole(operands, key)`, block by block; each block drops by a key of its own."""
        if self.rows == 1:
            return self._over_queries(whole, operands, key)

        # A block has rows of every device, as they lie there: cutting moves nothing.
        def split(x: Array) -> Array:
            x = x.reshape(self.devices, self.rows, -1, *x.shape[1:]).swapaxes(0, 1)
            return x.reshape(self.rows, -1, *x.shape[3:])

        def join(x: Array) -> Array:
            x = x.reshape(self.rows, self.devices, -1, *x.shape[2:]).swapaxes(0, 1)
            return x.reshape(-1, *x.shape[3:])

        is_shared = operands.bias is not None and operands.bias.shape[0] == 1
        own = operands._replace(bias=None) if is_shared else operands

        def one(block: Operands, key: PRNGKey | None) -> Float[Array, "b Q N H"]:
            block = _constrained(block)
            return self._over_queries(whole, block._replace(bias=operands.bias) if is_shared else block, key)

        return join(_map(one, jax.tree.map(split, own), key))

    def _over_queries(
        self, whole: Attend, operands: Operands, key: PRNGKey | None
    ) -> Float[Array, "B Q N H"]:
        if self.queries == 1:
            return whole(operands, key)
        num_queries = operands.q.shape[1]
        size = -(-num_queries // self.queries)

        def split(x: Array) -> Array:
            x = jnp.pad(x, [(0, 0), (0, size * self.queries - num_queries)] + [(0, 0)] * (x.ndim - 2))
            return x.reshape(x.shape[0], self.queries, size, *x.shape[2:]).swapaxes(0, 1)

        def join(x: Array) -> Array:
            x = x.swapaxes(0, 1)
            return x.reshape(x.shape[0], -1, *x.shape[3:])[:, :num_queries]

        q, _, _, mask, bias, positions = operands
        turned = None if bias is None else bias.swapaxes(1, 2)
        parts = (q, mask, turned, None if positions is None else positions[0])

        def one(parts: Any, key: PRNGKey | None) -> Float[Array, "B q N H"]:
            q, mask, turned, at = parts
            block = operands._replace(
                q=q,
                mask=mask,
                bias=None if turned is None else turned.swapaxes(1, 2),
                positions=None if positions is None else (at, positions[1]),
            )
            return whole(block, key)

        return join(_map(one, jax.tree.map(split, parts), key))


def _constrained(operands: Operands) -> Operands:
    """Pins a block to the mesh in force as all rows are."""
    q, k, v, mask, bias, positions = operands
    return Operands(
        q=constrain(q, "batch", None, "heads", None),
        k=tuple(constrain(part, "batch", "kv_heads", None, None) for part in k),
        v=tuple(constrain(part, "batch", "kv_heads", None, None) for part in v),
        mask=constrain_rows(mask),
        bias=None if bias is None else constrain(bias, "batch", "heads", None, None),
        positions=None if positions is None else jax.tree.map(constrain_rows, positions),
    )


def _map(
    attend: Callable[[Any, PRNGKey | None], Array], blocks: Any, key: PRNGKey | None
) -> Float[Array, "blocks ..."]:
    """`attend` of every block; the backward pass makes each anew."""
    count = jax.tree.leaves(blocks)[0].shape[0]
    keys = None if key is None else jax.random.split(key, count)
    # In a loop nothing else could be taken for what is made anew, which the default is there to prevent.
    again = jax.checkpoint(attend, prevent_cse=False)
    found: Array = jax.lax.map(lambda block: again(*block), (blocks, keys))
    return found

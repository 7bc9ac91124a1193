# SPDX-License-Identifier: Apache-2.0
"""Memory that a model takes on every device, from shapes alone: nothing is read and nothing allocated."""

from __future__ import annotations

import contextlib
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import Literal
from jax.sharding import AbstractMesh, Mesh

from jrl.mesh import partition_spec, platform, rows_of_device, tree_shardings
from jrl.models.adapters.config import AdapterConfig
from jrl.models.entries_io import flat_tree, parameter_targets
from jrl.models.heads import HEADS
from jrl.models.model import LanguageModel
from jrl.models.policy import ADAPTERS
from jrl.typing import Frozen, ModelInputs, Params, PolicyFns

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


@dataclass(frozen=True)
class Cost:
    """Memory of a model, its optimizer and its sampler; bytes are those of one device.

    Attributes:
      model_type: What it is.
      parameters: How many numbers, as its checkpoint counts them; `trainable` and `frozen` together.
      trainable: Of those that train, adapters included.
      frozen: Of those that do not.
      dtype: Of the parameters.
      parameter_bytes: Of all parameters.
      optimizer_bytes: Of the optimizer's state for those that train.
      cache_bytes: Of the cache: keys and values, or what a layer has in their place.
      rows: Rows that the cache is for.
      length: Tokens of each.
      num_devices: Devices of the mesh.
    """

    model_type: str
    parameters: int
    trainable: int
    frozen: int
    dtype: str
    parameter_bytes: int
    optimizer_bytes: int
    cache_bytes: int
    rows: int
    length: int
    num_devices: int

    def __str__(self) -> str:
        """Summary in one line."""
        devices = "the device" if self.num_devices == 1 else f"each of {self.num_devices} devices"
        return (
            f"{self.model_type}: {self.parameters:,} parameters ({self.dtype}), {self.trainable:,} train; on {devices} "
            f"parameters {format_bytes(self.parameter_bytes)}, optimizer {format_bytes(self.optimizer_bytes)}, cache "
            f"{format_bytes(self.cache_bytes)} for {self.rows:,} {'row' if self.rows == 1 else 'rows'} of "
            f"{self.length:,} tokens"
        )


def estimate_cost(
    model: LanguageModel,
    optimizer_init: Callable[[Params], Any],
    *,
    mesh: Mesh | AbstractMesh | None = None,
    dtype: Any = jnp.float32,
    compute_dtype: Any = jnp.float32,
    rows: int = 1,
    length: int = 1024,
    num_layers_unfrozen: int = -1,
    adapter: AdapterConfig | None = None,
) -> Cost:
    """The cost of holding, training and sampling from a model.

    Args:
      model: What it is; the heads it has count as trainable.
      optimizer_init: Makes the optimizer's state from the trainable parameters.
      mesh: Where it will be, of devices that are here or only imagined (`jax.sharding.AbstractMesh`); None: one
        device.
      dtype: Of the parameters; heads and adapters are float32 always.
      compute_dtype: Of the cache.
      rows: Rows sampled at once.
      length: Prompt and completion together; cut to the model's positions.
      num_layers_unfrozen: As in `make_policy`.
      adapter: What trains in the place of layers.
    """
    split: Any = {"num_layers_unfrozen": num_layers_unfrozen}
    if adapter is not None:
        split["adapter"] = adapter
    key = jax.eval_shape(lambda: jax.random.key(0))
    shapes = jax.eval_shape(lambda key: model.split_params(model.init(key), key=key, **split), key)
    trainable, frozen = (
        parameter_targets(tree, dtype=dtype, mesh=mesh, float32=(*HEADS, *ADAPTERS))[0] for tree in shapes
    )
    # Target heads are moved by syncs, not by the optimizer.
    stepped = {name: tree for name, tree in trainable.items() if name != "target_q_heads"}
    optimizer = jax.eval_shape(optimizer_init, stepped)
    places = None if mesh is None else tree_shardings(mesh, optimizer)[0]
    policy = model.policy(compute_dtype=compute_dtype, **split)
    length = min(length, model.max_positions)
    num_trainable, num_frozen = _count(model, trainable), _count(model, frozen)
    return Cost(
        model_type=model.family.model_type,
        parameters=num_trainable + num_frozen,
        trainable=num_trainable,
        frozen=num_frozen,
        dtype=str(np.dtype(dtype)),
        parameter_bytes=_bytes(trainable) + _bytes(frozen),
        optimizer_bytes=_bytes(optimizer, places),
        cache_bytes=cache_bytes(
            policy,
            trainable,
            frozen,
            mesh=mesh,
            rows=rows,
            length=length,
            has_context=model.family.kind == "seq2seq",
        ),
        rows=rows,
        length=length,
        num_devices=1 if mesh is None else mesh.size,
    )


def cache_bytes(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    *,
    mesh: Mesh | AbstractMesh | None,
    rows: int,
    length: int,
    has_context: bool,
) -> int:
    """Bytes of the cache of these shapes on one device; on a TPU, whose tiles are filled up, more for narrow heads.

    Args:
      policy: Whose cache it is.
      params: Arrays or shapes.
      frozen: Likewise.
      mesh: Where it will be; None: one device.
      rows: Rows sampled at once.
      length: Prompt and completion together.
      has_context: An encoder reads the prompt, of the same length.
    """

    def row(width: int) -> Any:
        return jax.ShapeDtypeStruct((rows, width), jnp.int32)  # type: ignore[no-untyped-call]

    if has_context:
        inputs = ModelInputs(row(1), row(1), context_tokens=row(length), context_mask=row(length))
    else:
        inputs = ModelInputs(row(length), row(length))
    # The number of cached heads is that of the mesh in force.
    with contextlib.nullcontext() if mesh is None else jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        has_tiles = (
            mesh is not None and mesh.abstract_mesh.abstract_device is not None and platform() == "tpu"
        )
        cache = jax.eval_shape(
            lambda params, frozen, inputs: policy.init_cache(params, frozen, inputs, length),
            params,
            frozen,
            inputs,
        )

    def size(leaf: Any) -> int:
        if mesh is None or leaf.shape[:1] != (rows,):
            return _size(leaf, leaf.shape)
        named: dict[int, list[str | None]] = {4: ["batch", "kv_heads", None, None], 3: ["batch", None, "mlp"]}
        axes = named.get(leaf.ndim, ["batch"] + [None] * (leaf.ndim - 1))
        spec, _ = partition_spec(mesh, axes, leaf.shape)
        own = jax.sharding.NamedSharding(mesh, spec).shard_shape(leaf.shape)
        return _size(leaf, in_tiles(own) if has_tiles and leaf.ndim == 4 else own)

    return sum(size(leaf) for leaf in jax.tree.leaves(cache))


def in_tiles(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Shape of an array as a TPU lays it out: its last two axes filled up to tiles of 8 x 128.

    https://openxla.org/xla/tiled_layout
    """
    if len(shape) < 2:
        return shape
    return (*shape[:-2], -(-shape[-2] // 8) * 8, -(-shape[-1] // 128) * 128)


def activation_bytes(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    *,
    mesh: Mesh | AbstractMesh,
    rows: int,
    length: int,
    split_sizes: tuple[int, ...],
    has_context: bool,
) -> int:
    """Bytes that the forward pass keeps for the backward pass, on one device, before any head.

    They are the residuals of `jax.vjp` that grow with the rows; those that are views of one another count once. The
    compiler may keep fewer of them.

    Args:
      policy: The model.
      params: What trains, arrays or shapes.
      frozen: Likewise.
      mesh: Where it will be.
      rows: Of a microbatch, over all devices.
      length: Tokens of a row.
      split_sizes: An array with an axis of one of these sizes counts as split over `tensor`: heads, width of the MLP.
      has_context: An encoder reads rows of the same length.
    """

    def residuals(count: int) -> Any:
        def row(dtype: Any) -> Any:
            return jax.ShapeDtypeStruct((count, length), dtype)  # type: ignore[no-untyped-call]

        context = (row(jnp.int32), row(jnp.bool_)) if has_context else (None, None)
        inputs = ModelInputs(row(jnp.int32), row(jnp.bool_), None, *context)

        def kept(params: Any, frozen: Any, inputs: ModelInputs) -> Any:
            trunk = policy.trunk(frozen, inputs)
            return jax.vjp(lambda p: policy.branch(p, frozen, trunk, inputs, None).policy, params)[1]

        return jax.make_jaxpr(kept)(params, frozen, inputs).jaxpr

    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        found = results_of_rows(residuals, rows)
    total = 0.0
    for (shape, dtype), count in found.items():
        # There may be as many rows or tokens as heads.
        sizes = Counter(shape) - Counter((rows, length) if rows in shape else (rows * length,))
        parts = mesh.shape["tensor"] if set(split_sizes) & set(sizes) else 1
        total += count * math.prod(shape) * dtype.itemsize / parts
    return int(total * rows_of_device(rows, mesh) / rows)


def results_of_rows(trace: Callable[[int], Any], num_rows: int) -> Counter[tuple[tuple[int, ...], Any]]:
    """Shapes and dtypes of a program's different results that grow with its rows, and how many there are of each.

    Args:
      trace: Number of rows → the program, as a jaxpr.
      num_rows: Of the run: by their number attention keeps its scores, or makes them anew. What 13 times as many
        keep as well does not grow with them. Few times as many would not tell: guidance makes two rows of one, and a
        token has a place at each of its experts.
    """
    found, other = (
        Counter((leaf.shape, leaf.dtype) for leaf in different_results(trace(count)))
        for count in (num_rows, 13 * num_rows)
    )
    return found - other


def different_results(jaxpr: Any) -> list[Any]:
    """Shapes of a program's results, without those that are its arguments or other results in another form."""
    found = dict[Any, Any]()
    sources = _sources(jaxpr, [None] * len(jaxpr.invars))
    for result, source in zip(jaxpr.outvars, sources, strict=True):
        if source is not None:
            found.setdefault(source, result.aval)
    return list(found.values())


def _sources(jaxpr: Any, arguments: Sequence[Any]) -> list[Any]:
    """The variable that each result of a program is or is a view of, looked for in called programs too.

    Args:
      jaxpr: The program.
      arguments: Sources of its arguments.
    """
    known = dict(zip(jaxpr.invars, arguments, strict=True))

    def source(variable: Any) -> Any:
        return None if isinstance(variable, Literal) else known.get(variable, variable)

    for equation in jaxpr.eqns:
        inputs = [source(variable) for variable in equation.invars]
        called = equation.params.get("jaxpr") if equation.primitive.name in _CALLS else None
        if called is not None:
            # Calls of one function share its program, and with it the names inside: each call's results are its own.
            own = dict[Any, Any]()
            for result, inner in zip(equation.outvars, _sources(called.jaxpr, inputs), strict=True):
                is_argument = inner is None or any(inner is one for one in inputs)
                known[result] = inner if is_argument else own.setdefault(inner, result)
        elif (
            equation.primitive.name in _VIEWS
            and equation.outvars[0].aval.size == equation.invars[0].aval.size
        ):
            known[equation.outvars[0]] = inputs[0]
    return [source(variable) for variable in jaxpr.outvars]


_CALLS = ("jit", "pjit")
_VIEWS = ("reshape", "squeeze", "expand_dims", "broadcast_in_dim", "transpose", "sharding_constraint", "name")
"""What moves no number, where it makes no more of them; a product reads a transposed operand as it lies."""


def device_bytes(tree: Any) -> int:
    """Bytes that the arrays of a tree take on one device of this host: the fullest."""
    total: dict[Any, int] = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            total[shard.device] = total.get(shard.device, 0) + shard.data.nbytes
    return max(total.values(), default=0)


def format_bytes(count: float) -> str:
    """Number of bytes for a reader, as in 1.5 GiB."""
    if count < 0:
        return f"-{format_bytes(-count)}"
    unit = 0
    while count >= 1024 and unit < len(_UNITS) - 1:
        count, unit = count / 1024, unit + 1
    return f"{count:.0f} {_UNITS[unit]}" if unit == 0 else f"{count:.1f} {_UNITS[unit]}"


def _count(model: LanguageModel, tree: Params) -> int:
    """Numbers of a tree, without those that only pad the vocabulary: as the checkpoint counts them."""
    stored: dict[str, int] = {}
    for entry in model.entries():
        for path in entry.paths:
            stored.setdefault(path, 0)
        stored[entry.paths[0]] += math.prod(entry.shape)
    return sum(stored.get(path, math.prod(leaf.shape)) for path, leaf in flat_tree(tree).items())


def _bytes(tree: Any, places: Any = None) -> int:
    """Bytes of shapes on one device, by the shardings that they have or are given."""
    leaves = jax.tree.leaves(tree)
    shardings = [leaf.sharding for leaf in leaves] if places is None else jax.tree.leaves(places)
    return sum(
        _size(leaf, leaf.shape if sharding is None else sharding.shard_shape(leaf.shape))
        for leaf, sharding in zip(leaves, shardings, strict=True)
    )


def _size(leaf: Any, shape: tuple[int, ...]) -> int:
    return math.prod(shape) * leaf.dtype.itemsize

# SPDX-License-Identifier: Apache-2.0
"""The device mesh and the one table that says which array dimension lives on which mesh axis.

Axes: `data` replicates parameters and splits rows, `fsdp` splits both, `tensor` splits heads, MLP width and
vocabulary. `expert` splits rows, and the experts of a mixture; a mesh has it where it is larger than 1. All are
`AxisType.Auto`: the compiler places the collectives, the table here places the arrays.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "fsdp", "tensor")
EXPERT = "expert"
"""Axis of a mixture's experts, between `fsdp` and `tensor`."""

LOGICAL_TO_MESH: dict[str, tuple[str, ...]] = {
    "batch": ("data", "fsdp", EXPERT),
    "replica": ("data",),
    "part of a replica": ("data", "fsdp"),
    "experts": (EXPERT,),
    "vocab": ("tensor",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "kv_heads": ("tensor",),
    "mlp": ("tensor",),
}

# Path suffix of a parameter (and so of its optimizer moments) -> logical names of its dimensions.
PARAMETER_AXES: tuple[tuple[str, tuple[str | None, ...]], ...] = (
    (r"embed/(embedding|rounded)$", ("vocab", "embed")),
    (r"position/embedding$", (None, "embed")),
    (r"relative_bias/embedding$", (None, "heads")),
    (r"lm_head/kernel$", ("embed", "vocab")),
    (r"lm_head/bias$", ("vocab",)),
    (r"(attn|cross|mamba)/q/kernel$", ("embed", "heads", None)),
    (r"(attn|cross)/q/bias$", ("heads", None)),
    (r"(attn|cross|mamba)/[kv]/kernel$", ("embed", "kv_heads", None)),
    (r"(attn|cross)/[kv]/bias$", ("kv_heads", None)),
    (r"(attn|cross|mamba)/o/kernel$", ("heads", None, "embed")),
    # Other mixers than attention. Short vectors that all heads are expanded from are whole on every device.
    (r"(attn|mamba)/gate/kernel$", ("embed", "heads", None)),
    (r"attn/gate/bias$", ("heads", None)),
    (r"attn/([qkv]|gate|decay)_up/kernel$", ("embed", "heads", None)),
    (r"attn/((q|kv|gate|decay)_down|k_rope)/kernel$", ("embed", None)),
    (r"(attn|mamba)/(rate|decay|step)/kernel$", ("embed", "heads")),
    (r"(attn|mamba)/[qkv]_taps$", ("heads", None, None)),
    (r"(attn|mamba)/[qkv]_taps_bias$", ("heads", None)),
    (r"(attn|mamba)/(log_rates|decay_bias|step_bias|skip)$", ("heads",)),
    (r"attn/decay_bias$", ("heads", None)),
    # Mixers of single channels.
    (r"attn/(before|after|x|v|gate|step_up)/kernel$", ("embed", "mlp")),
    (r"attn/(out|step_down)/kernel$", ("mlp", "embed")),
    (r"attn/([qk]/kernel|taps|v_taps)$", ("mlp", None)),
    (r"attn/v_taps_bias$", ("mlp",)),
    (r"attn/log_rates$", (None, "mlp")),
    (r"attn/sinks$", ("heads",)),
    (r"mlp/(up|gate)/kernel$", ("embed", "mlp")),
    (r"mlp/(up|gate)/bias$", ("mlp",)),
    (r"mlp/down/kernel$", ("mlp", "embed")),
    (r"input_gate/kernel$", ("embed", "mlp")),
    (r"input_out/kernel$", ("mlp", "embed")),
    (r"layer_embed_in/kernel$", ("embed", None, "mlp")),
    (r"experts/router/kernel$", ("embed", None)),
    (r"experts/latent_down/kernel$", ("embed", None)),
    (r"experts/latent_up/kernel$", (None, "embed")),
    (r"experts/(up|gate)$", ("experts", "embed", "mlp")),
    (r"experts/down$", ("experts", "mlp", "embed")),
    (r"experts/(up|gate)_bias$", ("experts", "mlp")),
    (r"experts/down_bias$", (None, "embed")),
    (r"v_head/hidden/kernel$", ("embed", "mlp")),
    (r"(q_heads|target_params)/\d/hidden/kernel$", ("embed", "mlp")),
    (r"(q_heads|target_params)/\d/out/kernel$", ("embed", "vocab")),
    (r"(q_heads|target_params)/\d/out/bias$", ("vocab",)),
    # Image networks: kernels of convolutions are (height, width, inputs, outputs). Inside a residual block the channels
    # between its two convolutions are split as the inside of an MLP is; between blocks they are whole.
    (r"conv1/kernel$", (None, None, "embed", "mlp")),
    (r"conv2/kernel$", (None, None, "mlp", "embed")),
    (r"conv_in/kernel$", (None, None, None, "embed")),
    (r"(conv_shortcut|samplers_0/conv|conv_out|proj_in|proj_out)/kernel$", (None, None, "embed", None)),
    # Transformers over an image's patches and a prompt's tokens.
    (r"single_transformer_blocks_\d+/proj_out/kernel$", ("mlp", "embed")),
    (r"single_transformer_blocks_\d+/proj_mlp/kernel$", ("embed", "mlp")),
    (r"attn/(to_[qkv]|add_[qkv]_proj)/kernel$", ("embed", "heads", None)),
    (r"attn/(to_out_0|to_add_out)/kernel$", ("heads", None, "embed")),
    (r"(ff|ff_context)/net_0/proj/kernel$", ("embed", "mlp")),
    (r"ff_context/net_2/kernel$", ("mlp", "embed")),
    (r"(norm1|norm1_context|norm|norm_out)/linear/kernel$", ("embed", None)),
    (r"context_embedder/kernel$", ("embed", None)),
    (r"(timestep|guidance|text)_embedder/linear_1/kernel$", ("embed", "mlp")),
    (r"(timestep|guidance|text)_embedder/linear_2/kernel$", ("mlp", "embed")),
    (r"(proj_in|proj_out)/kernel$", ("embed", None)),
    (r"(time|add)_embedding/linear_1/kernel$", ("embed", "mlp")),
    (r"(time|add)_embedding/linear_2/kernel$", ("mlp", "embed")),
    (r"time_emb_proj/kernel$", ("embed", "mlp")),
    (r"attn[12]/to_[qkv]/kernel$", ("embed", "heads", None)),
    (r"attn[12]/to_out_0/kernel$", ("heads", None, "embed")),
    (r"ff/net_0/proj/kernel$", ("embed", None, "mlp")),
    (r"ff/net_0/proj/bias$", (None, "mlp")),
    (r"ff/net_2/kernel$", ("mlp", "embed")),
)


def mesh_sizes(
    data: int, fsdp: int, tensor: int, expert: int = 1, *, num_devices: int
) -> tuple[int, int, int, int]:
    """Sizes of the axes data, fsdp, tensor and expert, with −1 replaced by what the others leave.

    Raises:
      ValueError: If the product of the sizes is not the number of devices.
    """
    sizes = [data, fsdp, tensor, expert]
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and num_devices % known == 0:
        sizes[sizes.index(-1)] = num_devices // known
    if -1 in sizes or math.prod(sizes) != num_devices:
        more = "" if expert == 1 else f", expert={expert}"
        raise ValueError(
            f"`mesh` must multiply to the number of devices, {num_devices}; got data={data}, fsdp={fsdp}, "
            f"tensor={tensor}{more}. At most one size may be -1 (the rest): `train.mesh: {{data: -1}}` takes all "
            "devices. Are there more than JAX sees? `jrl doctor` lists them."
        )
    return sizes[0], sizes[1], sizes[2], sizes[3]


def make_mesh(
    data: int = -1, fsdp: int = 1, tensor: int = 1, expert: int = 1, *, devices: Sequence[Any] | None = None
) -> Mesh:
    """The mesh over all devices, or over those given.

    Args:
      data: Size of the data axis; −1 takes what the others leave.
      fsdp: Size of the fully-sharded axis.
      tensor: Size of the tensor axis.
      expert: Size of the axis of experts.
      devices: Defaults to `jax.devices()`.
    Raises:
      ValueError: If the product of the sizes is not the number of devices.
    """
    devices = list(devices) if devices is not None else jax.devices()
    sizes, axes = _named_sizes(*mesh_sizes(data, fsdp, tensor, expert, num_devices=len(devices)))
    types = (AxisType.Auto,) * len(axes)
    try:
        return jax.make_mesh(sizes, axes, devices=devices, axis_types=types)
    except NotImplementedError:
        # A torus whose axes do not multiply to these, such as 2 x 8 on 4 x 4 chips of v6e: an axis of it is cut.
        split = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
        return Mesh(split, axes, axis_types=types)


@dataclass(frozen=True)
class AbsentDevice(AbstractDevice):
    """A kind of device that is only imagined.

    Attributes:
      compute_capability: Of an NVIDIA GPU, "9.0"; "" of others.
    """

    compute_capability: str


def abstract_mesh(
    data: int = -1,
    fsdp: int = 1,
    tensor: int = 1,
    expert: int = 1,
    *,
    num_devices: int,
    device: AbsentDevice | None = None,
) -> AbstractMesh:
    """A mesh of devices that are only imagined; the sizes are those of `make_mesh`.

    Args:
      data: Size of its axis; of one axis, -1 is what the others leave.
      fsdp: Likewise.
      tensor: Likewise.
      expert: Likewise.
      num_devices: In all.
      device: Their kind; None: any.
    Raises:
      ValueError: If the product of the sizes is not the number of devices.
    """
    sizes, axes = _named_sizes(*mesh_sizes(data, fsdp, tensor, expert, num_devices=num_devices))
    return AbstractMesh(sizes, axes, axis_types=(AxisType.Auto,) * len(axes), abstract_device=device)


def _named_sizes(data: int, fsdp: int, tensor: int, expert: int) -> tuple[tuple[int, ...], tuple[str, ...]]:
    """Sizes and names of the axes that a mesh has."""
    if expert == 1:
        return (data, fsdp, tensor), AXES
    return (data, fsdp, expert, tensor), (*AXES[:2], EXPERT, AXES[2])


def experts_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the experts of a mixture are split."""
    return 1 if mesh.empty else mesh.shape.get(EXPERT, 1)


def platform() -> str:
    """Platform of the mesh in force, else the one that JAX computes on by default: "cpu", "gpu" or "tpu".

    The devices of a mesh need not be here: a program may be compiled for others than the one that compiles it.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is None:
        return jax.default_backend()
    return {"cuda": "gpu", "rocm": "gpu"}.get(device.platform, device.platform)


def partition_spec(
    mesh: Mesh | AbstractMesh, logical: Sequence[str | None], shape: Sequence[int]
) -> tuple[PartitionSpec, list[str]]:
    """Mesh axes of an array's dimensions, and the logical names that had to be replicated.

    A dimension that the mesh axes do not divide is replicated: right, only larger, so it is reported and not refused.

    Raises:
      ValueError: If `expert` does not divide the experts: then the axis would do nothing.
    """
    spec: list[tuple[str, ...] | None] = []
    replicated = []
    for name, size in zip(logical, shape, strict=True):
        axes = _axes(mesh, name) if name else ()
        parts = math.prod(mesh.shape[axis] for axis in axes)
        if parts == 1:
            spec.append(None)
        elif size % parts and name == "experts":
            raise ValueError(
                f"`mesh` must have an `expert` axis that divides the model's {size} experts, got expert={parts}. Put "
                "the other devices on `data`, `fsdp` or `tensor`."
            )
        elif size % parts:
            spec.append(None)
            replicated.append(f"{name} ({size} over {parts})")
        else:
            spec.append(axes)
    return PartitionSpec(*spec), replicated


def parts_of(name: str, size: int) -> int:
    """Into how many parts the mesh in force splits a dimension of this logical name; 1 where there is none."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    parts = math.prod(mesh.shape[axis] for axis in _axes(mesh, name))
    return 1 if size % parts else parts


def _axes(mesh: Mesh | AbstractMesh, name: str) -> tuple[str, ...]:
    """The axes of a mesh that a logical name stands for."""
    return tuple(axis for axis in LOGICAL_TO_MESH[name] if axis in mesh.shape)


def path_name(path: tuple[Any, ...]) -> str:
    """A key path of `jax.tree_util` as "a/b/c"."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def tree_shardings(mesh: Mesh | AbstractMesh, tree: Any) -> tuple[Any, list[str]]:
    """Shardings of a whole tree of arrays or shapes: parameters, optimizer state, reference.

    Returns:
      A tree of `NamedSharding`, and one line for every dimension that was replicated because it does not divide.
    """
    report: list[str] = []

    def sharding(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        name, rounded = re.subn(
            r"(/kernel|/experts/(?:up|gate|down))/(values|scales)$", r"\1", path_name(path)
        )
        # A rounded kernel has one axis for its inputs; that behind attention had two, heads and their width.
        num_axes = np.ndim(leaf) + bool(rounded and name.endswith("/o/kernel"))
        for pattern, logical in PARAMETER_AXES:
            if len(logical) == num_axes and re.search(pattern, name):
                if rounded:
                    logical = _rounded_axes(logical, np.shape(leaf), is_stacked=not name.endswith("/kernel"))
                spec, replicated = partition_spec(mesh, logical, np.shape(leaf))
                report.extend(f"{name}: {what} is replicated" for what in replicated)
                return NamedSharding(mesh, spec)
        return NamedSharding(mesh, PartitionSpec())

    return jax.tree_util.tree_map_with_path(sharding, tree), report


def _rounded_axes(
    logical: tuple[str | None, ...], shape: Sequence[int], *, is_stacked: bool
) -> tuple[str | None, ...]:
    """Logical axes of a rounded kernel's array: a single one for all inputs, split as the first of them."""
    start = int(is_stacked)
    first = logical[start] if shape[start] > 1 else None
    num_outputs = len(shape) - start - 1
    return (*logical[:start], first, *logical[len(logical) - num_outputs :])


def rows_parts(mesh: Mesh | AbstractMesh) -> int:
    """Into how many parts the rows of a batch are split; 1 without a mesh, which is an empty one."""
    return 1 if mesh.empty else math.prod(mesh.shape[axis] for axis in _axes(mesh, "batch"))


def split_evenly(num_rows: int) -> int:
    """The least number of rows, not fewer than these, that the mesh in force divides."""
    parts = rows_parts(jax.sharding.get_abstract_mesh())
    return -(-num_rows // parts) * parts


def rows_of_device(num_rows: int, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Rows of a batch that one device computes: its part, or all where they do not divide.

    Args:
      num_rows: Of the batch.
      mesh: That splits it; None: the mesh in force, where there is one.
    """
    parts = rows_parts(jax.sharding.get_abstract_mesh() if mesh is None else mesh)
    return num_rows if num_rows % parts else num_rows // parts


def logits_parts(num_rows: int, vocab_size: int) -> int:
    """Parts into which the mesh in force splits logits of these rows, 1 where there is none.

    Args:
      num_rows: Of the whole batch; those that the mesh does not divide are whole on every device, and so are columns.
      vocab_size: Columns.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return 1
    spec, _ = partition_spec(mesh, ("batch", "vocab"), (num_rows, vocab_size))
    own = NamedSharding(mesh, spec).shard_shape((num_rows, vocab_size))
    return num_rows * vocab_size // math.prod(own)


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows split over the data, fsdp and expert axes, everything else whole."""
    return NamedSharding(mesh, PartitionSpec(_axes(mesh, "batch")))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding that holds the whole value on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *logical: str | None) -> jax.Array:
    """Pins an intermediate's dimensions to the mesh in force; without one, returns it untouched."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    spec, _ = partition_spec(mesh, logical, x.shape)
    return jax.lax.with_sharding_constraint(x, spec)


def constrain_rows(x: jax.Array) -> jax.Array:
    """Pins the first axis, the rows of a batch, to the mesh in force, and keeps everything else whole."""
    return constrain(x, "batch", *(None,) * (x.ndim - 1))


def constrain_rows_alone(x: jax.Array) -> jax.Array:
    """Pins the first axis, the rows of a batch, to the mesh in force, and leaves the others as they are split."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    rows = partition_spec(mesh, ("batch",), x.shape[:1])[0][0]
    others = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(rows, *others))


def is_split_over_fsdp() -> bool:
    """True where parameters are split over the `fsdp` axis of the mesh in force."""
    mesh = jax.sharding.get_abstract_mesh()
    return not mesh.empty and mesh.shape["fsdp"] > 1


def gather_fsdp(tree: Any) -> Any:
    """A tree of parameters whole over the `fsdp` axis and split over `tensor` alone, for a loop that reads them often.

    Inside a loop the compiler gathers a split parameter in every round: right where a round is a whole forward and
    backward pass, and ruinous where it is one token. Without a mesh in force, returns the tree untouched.
    """
    if not is_split_over_fsdp():
        return tree
    # Split first: else what makes a parameter, such as a rounding, is done after the gathering of what it is made from.
    return whole_over_fsdp(constrain_parameters(tree))


READ_LAST = ("lm_head", "v_head")
"""Entries of a parameter tree that read the last states, in kernels of their own.

Q heads are not among them: the loop over pieces of their values ends before layers have gradients anyway."""


def settle_heads(params: Any, states: Any) -> tuple[Any, Any]:
    """Ties heads to the states that they read, so that their gradients are split before those of layers are made.

    A kernel's gradient is whole over `fsdp` until it is scattered. With nothing to wait for, XLA for TPUs scatters
    those of heads behind the loop over layers: whole, they lie beside all that the layers' backward pass takes. XLA for
    GPUs scatters them at once, and would hold more if told to.

    Args:
      params: Parameters; heads among them are those in `READ_LAST`.
      states: Arrays that layers made, which the heads are to read.
    Returns:
      Both, with the same values; on other platforms, and where parameters are not split over `fsdp`, untouched.
    """
    heads = {name: params[name] for name in READ_LAST if name in params}
    if not heads or platform() != "tpu" or not is_split_over_fsdp():
        return params, states
    heads, states = jax.lax.optimization_barrier((heads, states))
    return {**params, **heads}, states


def constrain_parameters(tree: Any) -> Any:
    """Pins a tree of parameters to the mesh in force as they are split; without one, returns it untouched."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return tree
    shardings = tree_shardings(mesh, tree)[0]
    return jax.tree.map(lambda x, place: jax.lax.with_sharding_constraint(x, place.spec), tree, shardings)


def whole_over_fsdp(tree: Any) -> Any:
    """A tree of parameters that is whole over the `fsdp` axis where it is read: what is whole already stays as it is.

    Without a mesh in force, returns the tree untouched.
    """
    if not is_split_over_fsdp():
        return tree

    def whole(x: jax.Array, sharding: NamedSharding) -> jax.Array:
        split = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
        kept = [tuple(axis for axis in axes if axis != "fsdp") or None for axes in split]
        return jax.lax.with_sharding_constraint(x, PartitionSpec(*kept))

    return jax.tree.map(whole, tree, tree_shardings(jax.sharding.get_abstract_mesh(), tree)[0])


def place(tree: Any, shardings: Any) -> Any:
    """Arrays onto the mesh, which may reach over processes: each copies only the part of its own devices.

    Args:
      tree: NumPy arrays, or arrays on this process's devices: whole, and with equal values in all processes. Arrays
        that are on the mesh already move there.
      shardings: One for all, or a tree of them.
    """

    def put(leaf: Any, sharding: NamedSharding) -> jax.Array:
        spread = isinstance(leaf, jax.Array) and not leaf.is_fully_addressable
        if spread or sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    if isinstance(shardings, NamedSharding):
        return jax.tree.map(lambda leaf: put(leaf, shardings), tree)
    return jax.tree.map(put, tree, shardings)


def hold_split(tree: Any, round_value: Any) -> Any:
    """Ties a tree to a round of a loop, so that none of it is gathered before that round.

    The compiler moves out of a loop what does not change in it, and so would gather all parameters once, before a loop
    over microbatches, and hold them whole until its end: just what the `fsdp` axis is there to avoid.

    Args:
      tree: Parameters.
      round_value: Arrays that differ from round to round.
    """
    return hold_behind(tree, round_value)[0]


def hold_behind(tree: Any, results: Any) -> tuple[Any, Any]:
    """Ties parameters to results of others: read one after the other, and their gradients made in the other order.

    What follows must read the results that this returns. JAX ties gradients to each other where there are any: of
    results that nothing reads there are none, and the gradient of the parameters would keep nothing waiting.

    Args:
      tree: Parameters.
      results: Arrays to wait for, whose own gradients then wait for those of the parameters.
    Returns:
      Both, with the same values; where parameters are not split over `fsdp`, untouched.
    """
    if not is_split_over_fsdp():
        return tree, results
    held: tuple[Any, Any] = jax.lax.optimization_barrier((tree, results))
    return held

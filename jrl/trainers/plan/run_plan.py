# SPDX-License-Identifier: Apache-2.0
"""Memory and communication of a run on every device of a mesh, from shapes alone: no device need be here.

State, cache and activations are the shapes that JAX itself gives (`jax.eval_shape`), split as `jrl.mesh` splits them.
What the collectives send is arithmetic: docs/scaling.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jrl.mesh import path_name, rows_of_device, tree_shardings
from jrl.models.config import TransformerConfig
from jrl.models.cost import activation_bytes, cache_bytes, format_bytes
from jrl.models.layers import ROUNDED
from jrl.trainers.config.method import entries, footprint_of
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.plan.model_part import ModelShapes, kept_reference, model_part
from jrl.trainers.programs import optimizer_of

Bytes = dict[str, int]


@dataclass(frozen=True)
class RunPlan:
    """Memory and traffic of one device.

    Attributes:
      model: What it is of.
      mesh: Sizes of the axes.
      microbatches: Of one optimizer step.
      held: Bytes that lie there all the time.
      learning: Bytes that an optimizer step takes beside them.
      sampling: Bytes that a sampling call takes beside them; empty where the method does not sample.
      step_traffic: Bytes that an optimizer step sends, by axis and kind.
      token_traffic: Bytes that sampling sends: once a call, and for each token.
      score_traffic: Bytes that scoring sends: in PPO a call, which scores a chunk; in DPO an optimizer step, where the
        reference is asked in each.
    """

    model: str
    mesh: dict[str, int]
    microbatches: int
    held: Bytes
    learning: Bytes
    sampling: Bytes
    step_traffic: Bytes
    token_traffic: Bytes
    score_traffic: Bytes

    @property
    def total(self) -> int:
        """Bytes at the fuller of the two moments."""
        return sum(self.held.values()) + max(sum(self.learning.values()), sum(self.sampling.values()))

    def table(self, hbm_bytes: int | None = None) -> str:
        """Everything in lines; with the memory of a device, whether it fits."""
        axes = ", ".join(f"{axis}={size}" for axis, size in self.mesh.items())
        lines = [f"{self.model} on {axes}; a step has {self.microbatches} microbatches", ""]
        for title, found in (
            ("held on each device", self.held),
            ("and in an optimizer step", self.learning),
            ("or in a sampling call", self.sampling),
            ("sent by each device in an optimizer step", self.step_traffic),
            ("sent by each device in sampling", self.token_traffic),
            ("sent by each device in scoring", self.score_traffic),
        ):
            if found:
                lines.append(title)
                lines += [f"  {name:<44}{format_bytes(size):>12}" for name, size in found.items()]
        lines.append(f"{'memory of each device, at most':<46}{format_bytes(self.total):>12}")
        if hbm_bytes is not None:
            verdict = "fits" if self.total <= hbm_bytes else "does not fit"
            lines.append(f"{verdict} into {format_bytes(hbm_bytes)} ({self.total / hbm_bytes:.0%})")
        return "\n".join(lines)


def plan_run(config: TRLConfig, mesh: AbstractMesh) -> RunPlan:
    """The plan of a recipe; of its model only the config files are read.

    Args:
      config: The run's configuration; its own `train.mesh` is not looked at.
      mesh: Where it would run.
    Raises:
      ValueError: If the model cannot be what the configuration asks for, or the method is none that is planned.
    """
    config.validate()
    train, footprint = config.train, footprint_of(config)
    if footprint is None:
        planned = [entry.config.__name__ for entry in entries().values() if entry.recipe or entry.footprint]
        raise ValueError(
            f"`method.name` must be one of {planned} to be planned, got {type(config.method).__name__}: what else it "
            "holds is not known."
        )
    part = model_part(config, mesh, footprint)
    stepped = {name: tree for name, tree in part.params.items() if name != "target_q_heads"}
    everything = {**part.params, **part.frozen}
    reference = kept_reference(part, footprint)
    rows = train.rows_per_pass
    microbatches = -(-train.batch_size // rows)
    rows *= footprint.rows_per_sample
    vocabulary = part.lm.config.padded_vocab_size
    whole_logits = 4 * rows_of_device(rows, mesh) * train.seq_length * vocabulary // mesh.shape["tensor"]
    logits = min(train.logprob_chunk_bytes, whole_logits)
    chunk = footprint.sampling_rows
    whole = _bytes(everything, mesh, whole=True)
    gathered = whole - _bytes(everything, mesh)
    sampling, fetched, has_context = {}, 0, part.lm.family.kind == "seq2seq"
    if chunk:
        made, fetched = _sampled(part, everything)
        cache = cache_bytes(
            part.policy,
            part.params,
            part.frozen,
            mesh=mesh,
            rows=chunk,
            length=train.seq_length,
            has_context=has_context,
        )
        sampling = {"parameters, as sampling reads them": made, "cache": cache}
    step_traffic, token_traffic = _traffic(
        part,
        stepped,
        gathered,
        fetched,
        rows=rows,
        length=train.seq_length,
        chunk=chunk,
        remat=train.remat,
    )
    kept, recomputed = _activations(part, rows=rows, length=train.seq_length)
    score_traffic: Bytes = {}
    if footprint.scores == "rollouts":
        # Policy and reference share one pass of the frozen trunk. Under an adapter the reference has nothing of its
        # own, and reads all layers none the less.
        layers = part.lm.config.num_layers + (0 if footprint.reference is None else part.depth)
        read = [everything, reference]
        score_traffic = _score_traffic(part, read, layers, rows=chunk, length=train.seq_length)
    elif footprint.scores == "steps":
        read, layers = [{**part.frozen, **reference}], part.lm.config.num_layers
        found = _score_traffic(part, read, layers, rows=rows, length=train.seq_length)
        score_traffic = {name: microbatches * size for name, size in found.items()}
    if footprint.update_reads_reference:
        # The trunk's output is there already; under an adapter the frozen layers are the reference.
        found = _score_traffic(
            part, [reference or part.frozen], part.depth, rows=rows, length=train.seq_length
        )
        step_traffic |= {f"reference, {name}": size for name, size in found.items()}
    return RunPlan(
        model=f"{part.lm.family.model_type}, {_count(everything):,} parameters",
        mesh=dict(mesh.shape),
        microbatches=microbatches,
        held={
            "parameters that train": _bytes(part.params, mesh),
            "optimizer": _bytes(jax.eval_shape(optimizer_of(config).init, stepped), mesh),
            "frozen parameters": _bytes(part.frozen, mesh),
            "reference's own parameters": _bytes(reference, mesh),
        },
        learning={
            "gradients, a microbatch's and their sum": 2 * _bytes(stepped, mesh),
            "parameters of two layers, whole over fsdp": _two_layers(part),
            "activations of a microbatch": kept,
            "activations of the layer computed again": recomputed,
            "logits, their softmax and gradient": 3 * logits,
        },
        sampling=sampling,
        step_traffic={name: microbatches * size for name, size in step_traffic.items()},
        token_traffic=token_traffic if chunk else {},
        score_traffic=score_traffic,
    )


def _activations(part: ModelShapes, *, rows: int, length: int) -> tuple[int, int]:
    """(what is kept for the backward pass, what one layer adds while it is computed again)."""
    kept, everything = (
        activation_bytes(
            policy,
            part.params,
            part.frozen,
            mesh=part.mesh,
            rows=rows,
            length=length,
            split_sizes=_split_sizes(part),
            has_context=part.lm.family.kind == "seq2seq",
        )
        for policy in (part.policy, part.keeping)
    )
    return kept, (everything - kept) // part.depth


def _sampled(part: ModelShapes, everything: Any) -> tuple[int, int]:
    """(bytes of the parameters that a sampling call makes of those that lie there, bytes that it gathers over fsdp).

    Kernels are rounded to the dtype of the computation, then made whole over fsdp.
    """
    read = dict(jax.eval_shape(part.policy.rounded, everything))
    config = part.lm.config
    unread = {"embedding"} if config.rounds_embeddings else {ROUNDED} if "lm_head" in read else set()
    if ROUNDED in read["embed"]:
        read["embed"] = {name: leaf for name, leaf in read["embed"].items() if name not in unread}
    whole = _bytes(read, part.mesh, whole=True)
    if part.mesh.shape["fsdp"] > 1:
        return whole, whole - _bytes(read, part.mesh)
    lying = {path_name(path): leaf.dtype for path, leaf in jax.tree_util.tree_leaves_with_path(everything)}
    lying[f"embed/{ROUNDED}"] = lying["embed/embedding"]  # a table that is rounded already is its own copy
    made = jax.tree_util.tree_map_with_path(
        lambda path, leaf: leaf if lying.get(path_name(path)) != leaf.dtype else None, read
    )
    return _bytes(made, part.mesh), 0


def _traffic(
    part: ModelShapes,
    stepped: Any,
    gathered: int,
    fetched: int,
    *,
    rows: int,
    length: int,
    chunk: int,
    remat: bool,
) -> tuple[Bytes, Bytes]:
    """(of a microbatch, of sampling) in bytes that a device sends; see docs/scaling.md.

    Args:
      part: The model.
      stepped: What an optimizer moves.
      gathered: Bytes that a pass gathers over fsdp.
      fetched: Bytes that a sampling call does.
      rows: Of a microbatch.
      length: Of a row.
      chunk: Rows of a sampling call.
      remat: Whether a backward pass computes layers again.
    """
    data, tensor = part.mesh.shape["data"], part.mesh.shape["tensor"]
    grads = _bytes(stepped, part.mesh, whole=True) - _bytes(stepped, part.mesh)
    layers = part.lm.config.num_layers
    sums = (6 if remat else 4) * layers
    stream = _stream_bytes(part, rows=rows, length=length)
    token = 2 * layers * _ring(_stream_bytes(part, rows=chunk, length=1), tensor)
    return {
        "fsdp: parameters gathered, forward and backward": 2 * gathered,
        "fsdp: gradients scattered": grads,
        "data: gradients summed": _ring(_bytes(stepped, part.mesh), data),
        "tensor: activations summed": sums * _ring(stream, tensor),
    }, {
        "fsdp: parameters gathered, once a call": fetched,
        "tensor: activations summed, each token": token,
    }


def _split_sizes(part: ModelShapes) -> tuple[int, ...]:
    """Sizes of the axes that `tensor` splits: query heads, MLP width, and the heads that queries share, where whole
    ones fall to a device.
    """
    config, tensor = part.lm.config, part.mesh.shape["tensor"]
    sizes = (config.num_heads, config.mlp_width)
    if not isinstance(config, TransformerConfig) or tensor == 1 or config.num_kv_heads % tensor:
        return sizes
    return (*sizes, config.num_kv_heads)


def _score_traffic(part: ModelShapes, read: list[Any], layers: int, *, rows: int, length: int) -> Bytes:
    """Bytes sent by forward passes through `layers` layers that read these trees."""
    stream = _ring(_stream_bytes(part, rows=rows, length=length), part.mesh.shape["tensor"])
    return {
        "fsdp: parameters gathered": sum(
            _bytes(tree, part.mesh, whole=True) - _bytes(tree, part.mesh) for tree in read
        ),
        "tensor: activations summed": 2 * layers * stream,
    }


def _bytes(tree: Any, mesh: AbstractMesh, *, whole: bool = False) -> int:
    """Bytes of a tree on one device; `whole`: whole over fsdp, as a layer that is at work."""

    def size(leaf: Any, place: NamedSharding) -> int:
        if whole:
            kept = [None if "fsdp" in (axes or ()) else axes for axes in place.spec]
            place = NamedSharding(mesh, PartitionSpec(*kept))
        return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, tree_shardings(mesh, tree)[0])))


def _two_layers(part: ModelShapes) -> int:
    """The layer at work and the one that is fetched meanwhile; 0 where nothing is fetched."""
    if part.mesh.shape["fsdp"] == 1:
        return 0
    return 2 * max(_bytes(tree, part.mesh, whole=True) for tree in ({**part.params, **part.frozen}).values())


def _ring(size: int, devices: int) -> int:
    """Bytes that a device sends so that all have the sum: 2 (n − 1)/n of the array."""
    return 2 * size * (devices - 1) // devices


def _stream_bytes(part: ModelShapes, *, rows: int, length: int) -> int:
    """Bytes of the residual stream of a device's own rows."""
    own = rows_of_device(rows, part.mesh)
    return own * length * part.lm.feature_width * jnp.dtype(part.dtype).itemsize


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

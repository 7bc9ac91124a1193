# SPDX-License-Identifier: Apache-2.0
"""What a run will hold and send on every device of a mesh, from shapes alone: of devices that need not be here.

State, cache and activations are the shapes that JAX itself gives (`jax.eval_shape`), split as `jrl.mesh` splits them.
What the collectives send is arithmetic: docs/scaling.md derives it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.ppo_config import PPOConfig
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.rft import RFTConfig
from jrl.mesh import AXES, rows_parts, tree_shardings
from jrl.models.cost import activation_bytes, cache_bytes, format_bytes
from jrl.models.heads import HEADS
from jrl.models.model import LanguageModel
from jrl.models.policy import ADAPTERS, init_reference
from jrl.models.quantize import quantize_frozen
from jrl.trainers.adapters import plan_adapter
from jrl.trainers.config import TRLConfig
from jrl.trainers.setup import COMPUTE_DTYPES, check_what_trains, described_model
from jrl.typing import PolicyFns

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
    """

    model: str
    mesh: dict[str, int]
    microbatches: int
    held: Bytes
    learning: Bytes
    sampling: Bytes
    step_traffic: Bytes
    token_traffic: Bytes

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
        ):
            if found:
                lines.append(title)
                lines += [f"  {name:<44}{format_bytes(size):>12}" for name, size in found.items()]
        lines.append(f"{'memory of each device, at most':<46}{format_bytes(self.total):>12}")
        if hbm_bytes is not None:
            verdict = "fits" if self.total <= hbm_bytes else "does not fit"
            lines.append(f"{verdict} into {format_bytes(hbm_bytes)} ({self.total / hbm_bytes:.0%})")
        return "\n".join(lines)


def abstract_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, *, num_devices: int) -> AbstractMesh:
    """A mesh of devices that are only imagined; −1 for one axis is what the others leave.

    Raises:
      ValueError: If the sizes do not multiply to the number of devices.
    """
    sizes = [data, fsdp, tensor]
    known = math.prod(size for size in sizes if size != -1)
    if sizes.count(-1) == 1 and num_devices % known == 0:
        sizes[sizes.index(-1)] = num_devices // known
    if -1 in sizes or math.prod(sizes) != num_devices:
        raise ValueError(
            f"`mesh` must multiply to the number of devices, {num_devices}; got data={data}, fsdp={fsdp}, "
            f"tensor={tensor}. At most one size may be -1 (the rest)."
        )
    return AbstractMesh(tuple(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


@dataclass(frozen=True)
class Part:
    """A model as shapes, and where it is.

    Attributes:
      lm: The model.
      policy: As algorithms see it.
      params: What trains.
      frozen: The rest.
      mesh: Where it would be.
      dtype: Of the computation.
    """

    lm: LanguageModel
    policy: PolicyFns
    params: Any
    frozen: Any
    mesh: AbstractMesh
    dtype: Any


def plan_run(config: TRLConfig, mesh: AbstractMesh) -> RunPlan:
    """The plan of a recipe; of its model only the config files are read.

    Args:
      config: The run's configuration; its own `train.mesh` is not looked at.
      mesh: Where it would run.
    Raises:
      ValueError: If the model cannot be what the configuration asks for, or is a reward model.
    """
    config.validate()
    train, method = config.train, config.method
    part = _part(config, mesh)
    stepped = {name: tree for name, tree in part.params.items() if name != "target_q_heads"}
    everything = {**part.params, **part.frozen}
    reference = jax.eval_shape(init_reference, part.params) if isinstance(method, PPOConfig) else {}
    rows = min(train.minibatch_size or train.batch_size, train.batch_size)
    microbatches = -(-train.batch_size // rows)
    rows *= 2 if isinstance(method, DPOConfig) else 1
    vocabulary = part.lm.config.padded_vocab_size
    logits = min(train.logprob_chunk_bytes, 4 * rows * train.seq_length * vocabulary // mesh.size)
    chunk = (method.chunk_size or train.batch_size) if isinstance(method, PPOConfig | RFTConfig) else 0
    whole = _bytes(everything, mesh, whole=True)
    gathered = whole - _bytes(everything, mesh)
    sampling, has_context = {}, part.lm.family.kind == "seq2seq"
    if chunk:
        cache = cache_bytes(
            part.policy,
            part.params,
            part.frozen,
            mesh=mesh,
            rows=chunk,
            length=train.seq_length,
            has_context=has_context,
        )
        sampling = {"parameters, whole over fsdp": whole if gathered else 0, "cache": cache}
    step_traffic, token_traffic = _traffic(
        part, stepped, gathered, rows=rows, length=train.seq_length, chunk=chunk, remat=train.remat
    )
    return RunPlan(
        model=f"{part.lm.family.model_type}, {_count(everything):,} parameters",
        mesh=dict(mesh.shape),
        microbatches=microbatches,
        held={
            "parameters that train": _bytes(part.params, mesh),
            "optimizer": _bytes(jax.eval_shape(_optimizer(config).init, stepped), mesh),
            "frozen parameters": _bytes(part.frozen, mesh),
            "reference's own parameters": _bytes(reference, mesh),
        },
        learning={
            "gradients, a microbatch's and their sum": 2 * _bytes(stepped, mesh),
            "parameters of two layers, whole over fsdp": _two_layers(part),
            "activations of a microbatch": activation_bytes(
                part.policy,
                part.params,
                part.frozen,
                mesh=mesh,
                rows=rows,
                length=train.seq_length,
                split_sizes=(part.lm.config.num_heads, part.lm.config.mlp_width),
                has_context=has_context,
            ),
            "logits, their softmax and gradient": 3 * logits,
        },
        sampling=sampling,
        step_traffic={name: microbatches * size for name, size in step_traffic.items()},
        token_traffic=token_traffic if chunk else {},
    )


def _part(config: TRLConfig, mesh: AbstractMesh) -> Part:
    """The model of a configuration."""
    if isinstance(config.method, RewardConfig):
        raise ValueError("`method` must be one that trains a language model; a reward model is not planned.")
    has_value = isinstance(config.method, PPOConfig | ILQLConfig)
    adapter = plan_adapter(config.model, None)
    check_what_trains(config, adapter, with_value_head=has_value)
    lm = described_model(config, adapter)
    num_q_heads = (2 if config.method.two_qs else 1) if isinstance(config.method, ILQLConfig) else 0
    lm = replace(lm, value_head=config.model.value_head if has_value else None, num_q_heads=num_q_heads)
    split: dict[str, Any] = {"num_layers_unfrozen": config.model.num_layers_unfrozen}
    if adapter.config is not None:
        split["adapter"] = adapter.config
    dtype = COMPUTE_DTYPES[config.train.compute_dtype]
    policy = lm.policy(compute_dtype=dtype, remat=config.train.remat, **split)
    return Part(lm, policy, *_shapes(lm, split, config.model.frozen_dtype), mesh, dtype)


def _optimizer(config: TRLConfig) -> optax.GradientTransformation:
    schedule = make_schedule(config.scheduler.name, config.scheduler.kwargs)
    kwargs = config.optimizer.kwargs
    return make_optimizer(config.optimizer.name, kwargs, schedule, max_grad_norm=config.train.max_grad_norm)


def _traffic(
    part: Part, stepped: Any, gathered: int, *, rows: int, length: int, chunk: int, remat: bool
) -> tuple[Bytes, Bytes]:
    """(of a microbatch, of sampling) in bytes that a device sends; see docs/scaling.md."""
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
        "fsdp: parameters gathered, once a call": gathered,
        "tensor: activations summed, each token": token,
    }


def _shapes(lm: LanguageModel, split: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """(params, frozen) of a model as shapes, rounded as the run would round them."""

    def init(key: Any) -> Any:
        params = lm.init(key)
        if "adapter" in split:
            params = quantize_frozen(params, kind=kind, keep=(*HEADS, *ADAPTERS))
        params, frozen = lm.split_params(params, key=key, **split)
        return params, frozen if "adapter" in split else quantize_frozen(frozen, kind=kind)

    shapes: tuple[Any, Any] = jax.eval_shape(init, jax.eval_shape(partial(jax.random.key, 0)))
    return shapes


def _bytes(tree: Any, mesh: AbstractMesh, *, whole: bool = False) -> int:
    """Bytes of a tree on one device; `whole`: whole over fsdp, as a layer that is at work."""

    def size(leaf: Any, place: NamedSharding) -> int:
        if whole:
            kept = [None if "fsdp" in (axes or ()) else axes for axes in place.spec]
            place = NamedSharding(mesh, PartitionSpec(*kept))
        return math.prod(place.shard_shape(leaf.shape)) * leaf.dtype.itemsize

    return sum(jax.tree.leaves(jax.tree.map(size, tree, tree_shardings(mesh, tree)[0])))


def _two_layers(part: Part) -> int:
    """The layer at work and the one that is fetched meanwhile; 0 where nothing is fetched."""
    if part.mesh.shape["fsdp"] == 1:
        return 0
    return 2 * max(_bytes(tree, part.mesh, whole=True) for tree in ({**part.params, **part.frozen}).values())


def _ring(size: int, devices: int) -> int:
    """Bytes that a device sends so that all have the sum: 2 (n − 1)/n of the array."""
    return 2 * size * (devices - 1) // devices


def _stream_bytes(part: Part, *, rows: int, length: int) -> int:
    """Of the residual stream of a device's own rows."""
    own = -(-rows // rows_parts(part.mesh))
    return own * length * part.lm.feature_width * jnp.dtype(part.dtype).itemsize


def _count(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))

# SPDX-License-Identifier: Apache-2.0
"""Loads a run's model from its config: tokenizer, trainable and frozen arrays on the mesh, and the reference."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.data.tokenizer import check_vocabulary
from jrl.device_memory import noting_out_of_memory
from jrl.distributed import join
from jrl.learners.config import LanguageConfig, MethodConfig, OnlineConfig
from jrl.mesh import experts_parts, make_mesh, place, platform, tree_shardings
from jrl.models.adapters.bind import Adapter
from jrl.models.checkpoint import load_checkpoint, read_model
from jrl.models.entries_io import initial_shapes
from jrl.models.heads import HEADS
from jrl.models.hub import CONFIG_FILES, find_checkpoint, is_checkpoint
from jrl.models.model import LanguageModel, make_model
from jrl.models.multimodal import check_origin
from jrl.models.noise import EmbeddingNoise
from jrl.models.policy import ADAPTERS, init_reference
from jrl.models.quantize import quantize_frozen
from jrl.models.routing import check_expert_axis
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.adapters import AdapterPlan, plan_adapter
from jrl.trainers.loading.heads import WantedHeads, with_heads
from jrl.trainers.loading.tokenizers import load_run_tokenizer
from jrl.typing import Frozen, Params, PolicyFns

ComputeDtype = Literal["float32", "bfloat16", "float16"]
COMPUTE_DTYPES = {"float32": jnp.float32, "bfloat16": jnp.bfloat16, "float16": jnp.float16}

INIT_STREAM, ADAPTER_STREAM = 0, 4


def default_compute_dtype() -> Literal["float32", "bfloat16"]:
    """Dtype that a platform computes in unless told otherwise: bfloat16, but float32 on CPUs."""
    return "float32" if platform() == "cpu" else "bfloat16"


def compute_dtype(config: TRLConfig) -> ComputeDtype:
    """`train.compute_dtype` with "auto" decided by the mesh in force."""
    name = config.train.compute_dtype
    return default_compute_dtype() if name == "auto" else name


@dataclass(frozen=True)
class ModelBundle:
    """A model, ready to train.

    Attributes:
      params: Trainable arrays, on the mesh.
      frozen: The rest, on the mesh.
      tokenizer: The transformers tokenizer.
      adapter: What trains beside the frozen model; None where parts of the model itself do.
      base_model: The model without its adapter, as `model_path` names it.
      replicated: One line for every parameter dimension that the mesh does not divide.
    """

    params: Params
    frozen: Frozen
    tokenizer: Any
    adapter: Adapter | None
    base_model: Any
    replicated: list[str]

    def reference(self) -> Params:
        """A copy of what trains, to be kept as the frozen reference: it shares no buffer with the donated state."""
        return init_reference(self.params)


@dataclass(frozen=True)
class PolicyBundle(ModelBundle):
    """A language model, ready to train.

    Attributes:
      lm: Architecture and checkpoint names.
      policy: The model as algorithms see it, for rows that are padded on the right.
      lenient_policy: The same for rows that are padded anywhere, which only einsums can read.
    """

    lm: LanguageModel
    policy: PolicyFns
    lenient_policy: PolicyFns


def mesh_of(config: TRLConfig) -> Mesh:
    """The mesh of `train.mesh`, or all devices on the data axis; without those that sample and do nothing else.

    Raises:
      ValueError: If the sizes do not multiply to the devices that there are, or none is left to learn on.
    """
    join()  # before anything of JAX is computed
    sizes, devices = {"data": -1, "fsdp": 1, "tensor": 1} | (config.train.mesh or {}), jax.devices()
    own = config.train.sampling_mesh
    if own is not None:
        if math.prod(own.values()) >= len(devices):
            raise ValueError(
                f"`train.sampling_mesh` must leave a device to learn on, got {own}, and there are {len(devices)}."
            )
        devices = devices[: -math.prod(own.values())]
    return make_mesh(**sizes, devices=devices)


def sampling_mesh_of(config: TRLConfig) -> Mesh | None:
    """The mesh of `train.sampling_mesh`, on the last devices; None where all devices learn and sample in turn."""
    own = config.train.sampling_mesh
    if own is None:
        return None
    sizes = {"data": 1, "fsdp": 1, "tensor": 1} | own
    devices = jax.devices()[-math.prod(own.values()) :]
    return make_mesh(**sizes, devices=devices)


def reward_mesh(config: TRLConfig) -> Mesh:
    """Mesh of a reward model beside the policy: the run's; of several processes, this one's devices.

    Each process scores rows of its own, so that no program of a reward model may reach over processes.
    """
    mesh = mesh_of(config)
    return mesh if jax.process_count() == 1 else make_mesh(devices=jax.local_devices())


@noting_out_of_memory()
def load_policy(
    config: TRLConfig,
    mesh: Mesh,
    *,
    with_value_head: bool,
    num_value_layers_unfrozen: int = 0,
    num_q_heads: int = 0,
    noise: EmbeddingNoise | None = None,
) -> PolicyBundle:
    """Loads tokenizer and model, splits what trains from what does not, and places both.

    Args:
      config: The run's configuration.
      mesh: Where the arrays go.
      with_value_head: PPO and ILQL need a value head; a checkpoint that holds one keeps its own kind.
      num_value_layers_unfrozen: Blocks of the value function's own branch.
      num_q_heads: ILQL's Q heads, each with its target; the value head belongs to them.
      noise: On the embeddings in training.
    Raises:
      ValueError: If configuration, tokenizer and model do not fit each other. What the model's own config tells is
        checked before any weight is read.
    """
    tokenizer = load_run_tokenizer(config.model, config.tokenizer)
    plan = plan_adapter(config.model, tokenizer)
    options: dict[str, Any] = {
        "num_layers_unfrozen": config.model.num_layers_unfrozen,
        "num_value_layers_unfrozen": num_value_layers_unfrozen,
        "adapter": plan.config,
    }
    wanted = WantedHeads(config.model.value_head if with_value_head else None, num_q_heads)
    check_what_trains(config, plan, with_value_head=with_value_head)
    described = described_model(config, plan)
    check_vocabulary(tokenizer, described.vocab_size)
    check_expert_axis(described.config, experts_parts(mesh))
    computed: dict[str, Any] = options | {
        "compute_dtype": COMPUTE_DTYPES[compute_dtype(config)],
        "attn_implementation": config.model.attn_implementation,
        "remat": config.train.remat,
        "noise": noise,
        **router_options(config.method),
    }
    _check_model(config, plan, described, computed)
    lm, params = _load_model(config, mesh, wanted, plan, described)
    report = tree_shardings(mesh, params)[1]
    quantize = partial(quantize_frozen, kind=config.model.frozen_dtype, mesh=mesh)
    if plan.config is not None:
        # First, so that what starts as a copy or a norm of frozen weights is that of those which are used.
        params = quantize(params, keep=(*HEADS, *ADAPTERS))
    key = jax.random.fold_in(jax.random.key(config.train.seed), ADAPTER_STREAM)
    trainable, frozen = lm.split_params(params, key=key, **options)
    if plan.config is None:
        frozen = quantize(frozen)
    # What was not read with the model, a fresh adapter or one of a folder of its own, is not on the mesh yet.
    trainable = place(trainable, tree_shardings(mesh, trainable)[0])
    policies = lm.policy(**computed), lm.policy(**computed | {"attn_implementation": "einsum"})
    return PolicyBundle(trainable, frozen, tokenizer, lm.bind(plan.config), plan.base, report, lm, *policies)


def router_options(method: MethodConfig) -> dict[str, Any]:
    """Arguments of `jrl.models.policy.make_policy` by which an algorithm watches the routers of a mixture."""
    return {
        "routing_replay": isinstance(method, OnlineConfig) and method.routing_replay,
        "counts_experts": isinstance(method, LanguageConfig) and method.router_aux_loss_coef > 0,
    }


def described_model(config: TRLConfig, plan: AdapterPlan) -> LanguageModel:
    """The model that the config tells of, without heads: no weight is read, and none of the hub downloaded."""
    path, changes = plan.base, config.model.model_extra_configs
    if is_checkpoint(path):
        return read_model(find_checkpoint(path, files=CONFIG_FILES), changes)
    if changes:
        raise ValueError(
            "`model.model_extra_configs` changes the config of a checkpoint, and `model.model_path` is a config "
            f"object: set {sorted(changes)} on that object."
        )
    return make_model(path)


def _check_model(config: TRLConfig, plan: AdapterPlan, lm: LanguageModel, options: dict[str, Any]) -> None:
    """Checks that the run's options fit the model and these devices; `options` are those of `lm.policy`."""
    if lm.family.kind != config.model.model_arch_type:
        raise ValueError(
            f"`model.model_arch_type` must be {lm.family.kind!r} for a {lm.family.model_type} model, got "
            f"{config.model.model_arch_type!r}."
        )
    if lm.family.is_multimodal:
        check_origin(lm.place)
    if config.train.seq_length + plan.num_virtual_tokens > lm.max_positions:
        more = f" and {plan.num_virtual_tokens} virtual tokens" if plan.num_virtual_tokens else ""
        raise ValueError(
            f"`train.seq_length` is {config.train.seq_length}{more}, but the model has {lm.max_positions} "
            "positions; shorten `seq_length` (prompt + max_new_tokens) or bring a model with a longer context."
        )
    # Ranges, the adapter's targets and the rounding, tried on shapes.
    lm.policy(**options)
    shapes = initial_shapes(lm.init)
    jax.eval_shape(partial(quantize_frozen, kind=config.model.frozen_dtype), shapes)


def check_what_trains(config: TRLConfig, plan: AdapterPlan, *, with_value_head: bool) -> None:
    """Something must train, and something must be frozen where `frozen_dtype` asks for fewer bits.

    Args:
      config: The run's configuration.
      plan: What its `model` section says of an adapter.
      with_value_head: Whether a head trains with nothing else.
    Raises:
      ValueError: Naming the field of `model` that does not fit.
    """
    if plan.config is not None:
        return
    kind, num_layers = config.model.frozen_dtype, config.model.num_layers_unfrozen
    if kind in ("int8", "nf4"):
        raise ValueError(
            "`model.frozen_dtype` must be float32 or bfloat16 without `model.peft_config`: a whole model is never "
            f"written from weights of so few bits; got {kind!r}."
        )
    if num_layers == 0 and not with_value_head:
        raise ValueError(
            "`model.num_layers_unfrozen` must be -1 (all) or at least 1 where there is neither a value head nor an "
            "adapter, got 0: nothing would train."
        )
    if num_layers == -1 and kind != "float32":
        raise ValueError(
            f"`model.frozen_dtype` must be float32 where `model.num_layers_unfrozen` is -1 and `model.peft_config` is "
            f"None, got {kind!r}: all layers train and nothing is frozen."
        )


def _load_model(
    config: TRLConfig, mesh: Mesh, wanted: WantedHeads, plan: AdapterPlan, described: LanguageModel
) -> tuple[LanguageModel, Params]:
    """The model and its whole parameter tree, with exactly the heads that are wanted."""
    path = plan.base
    key = jax.random.fold_in(jax.random.key(config.train.seed), INIT_STREAM)
    if not is_checkpoint(path):
        lm = replace(described, value_head=wanted.value_head, num_q_heads=wanted.num_q_heads)
        params = lm.init(key)
        shardings, _ = tree_shardings(mesh, params)
        return lm, place(params, shardings)
    of_folder = plan.load(described)
    rounded = plan.config is not None and config.model.frozen_dtype != "float32"
    loaded = load_checkpoint(
        path,
        dtype=jnp.bfloat16 if rounded else jnp.float32,
        mesh=mesh,
        config_changes=config.model.model_extra_configs,
    )
    replaced = HEADS if any(name in of_folder for name in HEADS) else ()
    kept = {name: value for name, value in loaded.params.items() if name not in replaced}
    return with_heads(loaded.model, kept | of_folder, wanted, mesh=mesh, key=key, path=path)

# SPDX-License-Identifier: Apache-2.0
"""A recipe at the size of its model, by shapes alone: state, update and sampler are traced, nothing is computed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, AxisType
from transformers import AutoConfig, GPT2Config, T5Config

import jrl
from jrl.forward import Reader
from jrl.learners.dpo import init_dpo_state, make_dpo_update
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.ilql import ILQLConfig, init_ilql_state, make_ilql_update
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.ppo import PPOConfig
from jrl.learners.reward_model import make_reward_model_update
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.mesh import AXES, tree_shardings
from jrl.models.adapters.config import read_adapter_config
from jrl.models.classifier_adapter import bind_classifier
from jrl.models.classifier_start import describe_start
from jrl.models.cost import cache_bytes
from jrl.models.heads import HEADS
from jrl.models.model import LanguageModel, make_model
from jrl.models.policy import ADAPTERS
from jrl.models.quantize import quantize_frozen
from jrl.models.scorer import make_scorer, split_scorer
from jrl.trainers.loading.setup import COMPUTE_DTYPES, compute_dtype
from jrl.typing import (
    ComparisonBatch,
    ILQLBatch,
    ModelInputs,
    PreferenceBatch,
    Rollouts,
    Scored,
    Sequences,
)
from tests.learners.ppo_parts import ppo_state, ppo_update

REAL_CONFIGS = Path(__file__).parent / "models" / "real_configs"
# The models that recipes name -> the architecture, as its config.json has it. Where an example makes a smaller model of
# its own, the recipe is looked at with the one that it names.
ARCHITECTURES: dict[str, Callable[[], Any]] = {
    "CarperAI/randomwalks": lambda: GPT2Config(vocab_size=23, n_layer=6, n_embd=144, n_head=12),
    "google-t5/t5-small": lambda: T5Config(decoder_start_token_id=0),
} | {
    name: partial(AutoConfig.from_pretrained, REAL_CONFIGS / f"{file}.json")
    for name, file in {
        "gpt2": "gpt2",
        "lvwerra/gpt2-imdb": "gpt2",
        "EleutherAI/gpt-j-6b": "gpt-j-6b",
        "EleutherAI/gpt-neox-20b": "gpt-neox-20b",
        "NousResearch/Llama-2-7b-hf": "Llama-2-7b-hf",
        "lvwerra/t5-imdb": "t5-base",
        "facebook/opt-350m": "opt-350m",
    }.items()
}


@dataclass(frozen=True)
class AbstractRun:
    """What a trainer would build.

    Attributes:
      config: The recipe's.
      mesh: Its mesh, of devices that need not exist.
      params: Shapes of what trains.
      state: Of the learner's state.
      frozen: Of what does not train.
      batch: Of one update's batch.
      update: The learner's.
      cache: Bytes of one sampling call's cache on one device.
      trunk: Shapes of the frozen layers' output that travels in PPO's batch; None elsewhere.
      weights: Shapes of the whole model as it is read, before any of it is rounded.
    """

    config: jrl.TRLConfig
    mesh: AbstractMesh
    params: Any
    state: Any
    frozen: Any
    batch: Any
    update: Any
    cache: int
    trunk: Any
    weights: Any

    def trace(self) -> tuple[Any, Any]:
        """Shapes of the update's new state and metrics."""
        with jax.sharding.use_abstract_mesh(self.mesh):
            key = jax.eval_shape(lambda: jax.random.key(0))
            found: tuple[Any, Any] = jax.eval_shape(self.update, self.state, self.frozen, self.batch, key)
            return found

    def device_bytes(self) -> dict[str, int]:
        """Bytes on one device of what stays there through an iteration.

        Beside the state (parameters, moments, target heads) and what is frozen: PPO's reference, a copy of what
        trains, and the rollouts' way through the frozen layers; one gradient; the sampler's cache.
        """
        params = self._bytes(self.params)
        return {
            "state": self._bytes(self.state),
            "frozen": self._bytes(self.frozen),
            "reference": params if isinstance(self.config.method, PPOConfig) else 0,
            "gradient": params,
            "cache": self.cache,
            "rollouts": sum(
                math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(self.trunk)
            )
            // (self.mesh.shape["data"] * self.mesh.shape["fsdp"]),
        }

    def load_bytes(self) -> int:
        """Bytes on one device of the model as it is read."""
        return self._bytes(self.weights)

    def _bytes(self, tree: Any) -> int:
        shardings = jax.tree.leaves(tree_shardings(self.mesh, tree)[0])
        leaves = jax.tree.leaves(tree)
        return sum(
            math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
            for leaf, sharding in zip(leaves, shardings, strict=True)
        )


def recipe_mesh(config: jrl.TRLConfig) -> AbstractMesh:
    """The mesh that the recipe names, one device where it names none."""
    sizes = config.train.mesh or {"data": 1}
    return AbstractMesh(tuple(sizes.get(axis, 1) for axis in AXES), AXES, (AxisType.Auto,) * len(AXES))


def abstract_run(config: jrl.TRLConfig) -> AbstractRun:
    """What the trainer of a recipe would build, at the size of the model that the recipe names."""
    path = config.model.model_path
    hf_config = ARCHITECTURES[path]() if isinstance(path, str) else path
    method, mesh = config.method, recipe_mesh(config)
    if isinstance(method, RewardConfig):
        return _reward_run(config, hf_config, mesh)
    num_q_heads = (2 if method.two_qs else 1) if isinstance(method, ILQLConfig) else 0
    has_values = isinstance(method, PPOConfig | ILQLConfig)
    lm = replace(
        make_model(hf_config),
        value_head=config.model.value_head if has_values else None,
        num_q_heads=num_q_heads,
    )
    adapter = None if config.model.peft_config is None else read_adapter_config(config.model.peft_config)
    options: dict[str, Any] = {
        "num_layers_unfrozen": config.model.num_layers_unfrozen,
        "num_value_layers_unfrozen": vars(method).get("num_value_layers_unfrozen", 0),
        "adapter": adapter,
    }
    quantize = partial(quantize_frozen, kind=config.model.frozen_dtype)

    def split(key: Any) -> tuple[Any, Any]:
        params = lm.init(key)
        if adapter is not None:
            return lm.split_params(quantize(params, keep=(*HEADS, *ADAPTERS)), key=key, **options)
        trainable, frozen = lm.split_params(params, key=key, **options)
        return trainable, quantize(frozen)

    key = jax.eval_shape(lambda: jax.random.key(0))
    params, frozen = jax.eval_shape(split, key)
    read_in = jnp.bfloat16 if adapter is not None and config.model.frozen_dtype != "float32" else jnp.float32
    weights = jax.eval_shape(lambda key: jax.tree.map(lambda x: x.astype(read_in), lm.init(key)), key)
    dtype = COMPUTE_DTYPES[compute_dtype(config)]
    policy = lm.policy(compute_dtype=dtype, remat=config.train.remat, **options)
    init, update, batch = _learner(config, policy, lm)
    chunk = method.chunk_size if isinstance(method, PPOConfig) else config.train.batch_size
    cache = cache_bytes(
        policy,
        params,
        frozen,
        mesh=mesh,
        rows=chunk,
        length=config.train.seq_length,
        has_context=lm.family.kind == "seq2seq",
    )
    trunk = (
        jax.eval_shape(policy.trunk, frozen, batch.sequences.inputs) if isinstance(batch, Rollouts) else None
    )
    state = jax.eval_shape(init, params)
    return AbstractRun(config, mesh, params, state, frozen, batch, update, cache, trunk, weights)


def _reward_run(config: jrl.TRLConfig, hf_config: Any, mesh: AbstractMesh) -> AbstractRun:
    """Of a reward model: there is no sampler, and a row is a whole text."""
    train, section = config.train, config.model
    model = describe_start(hf_config)
    adapter = bind_classifier(
        model, None if section.peft_config is None else read_adapter_config(section.peft_config)
    )
    options: dict[str, Any] = {"num_layers_unfrozen": section.num_layers_unfrozen, "adapter": adapter}
    key = jax.eval_shape(lambda: jax.random.key(0))
    weights = jax.eval_shape(model.init, key)
    params, frozen = jax.eval_shape(lambda p, k: split_scorer(p, model, **options, key=k), weights, key)
    scorer = make_scorer(
        model, **options, compute_dtype=COMPUTE_DTYPES[compute_dtype(config)], remat=train.remat
    )
    optimizer, sizes = _optimizer(config), _sizes(config)
    update = make_reward_model_update(scorer, optimizer, config.method, **sizes)  # type: ignore[arg-type]
    shape = (train.batch_size, train.seq_length)
    texts = ModelInputs(jax.ShapeDtypeStruct(shape, jnp.int32), jax.ShapeDtypeStruct(shape, bool))
    rows = (train.batch_size,)
    valid, margins = jax.ShapeDtypeStruct(rows, bool), jax.ShapeDtypeStruct(rows, jnp.float32)
    batch = ComparisonBatch(texts, texts, valid, margins)
    state = jax.eval_shape(lambda p: init_train_state(p, optimizer), params)
    return AbstractRun(config, mesh, params, state, frozen, batch, update, 0, None, weights)


def _optimizer(config: jrl.TRLConfig) -> optax.GradientTransformation:
    return make_optimizer(
        config.optimizer.name,
        config.optimizer.kwargs,
        make_schedule(config.scheduler.name, config.scheduler.kwargs),
        max_grad_norm=config.train.max_grad_norm,
    )


def _sizes(config: jrl.TRLConfig) -> dict[str, int]:
    train = config.train
    return {"batch_size": train.batch_size, "minibatch_size": train.minibatch_size or train.batch_size}


def _learner(config: jrl.TRLConfig, policy: Any, lm: LanguageModel) -> tuple[Any, Any, Any]:
    """(init, update, batch) as the trainers make them."""
    train, method = config.train, config.method
    optimizer = _optimizer(config)
    sizes, chunk_bytes = _sizes(config), train.logprob_chunk_bytes
    reader = Reader(policy, chunk_bytes=chunk_bytes)
    if isinstance(method, PPOConfig):
        update = ppo_update(
            policy, optimizer, method, temperature=1.0, logprob_chunk_bytes=chunk_bytes, **sizes
        )
        rows, width = method.num_rollouts, method.gen_kwargs["max_new_tokens"]
        sequences = _sequences(lm, rows, train.seq_length, width)
        number = jax.ShapeDtypeStruct((rows, width), jnp.float32)
        batch: Any = Rollouts(sequences, Scored(number, number, number), number)
        return lambda params: ppo_state(params, optimizer, method), update, batch
    rows, width = train.batch_size, train.seq_length
    sequences = _sequences(lm, rows, width, width - 1)
    if isinstance(method, ILQLConfig):
        number = jax.ShapeDtypeStruct((rows, width - 1), jnp.float32)
        columns = jax.ShapeDtypeStruct((rows, width - 1), jnp.int32)
        batch = ILQLBatch(sequences.inputs, columns, sequences.mask, number)
        update = make_ilql_update(reader, optimizer, method, **sizes)
        return lambda params: init_ilql_state(params, optimizer), update, batch
    if isinstance(method, DPOConfig):
        numbers = jax.ShapeDtypeStruct((rows, width - 1), jnp.float32)
        valid = jax.ShapeDtypeStruct((rows,), bool)
        pairs = PreferenceBatch(sequences, sequences, valid, numbers, numbers)
        return (
            lambda params: init_dpo_state(params, optimizer),
            make_dpo_update(reader, optimizer, method, **sizes),
            pairs,
        )
    return (
        lambda params: init_train_state(params, optimizer),
        make_sft_update(reader, optimizer, **sizes),
        sequences,
    )


def _sequences(lm: LanguageModel, rows: int, length: int, window: int) -> Sequences:
    def array(width: int, dtype: Any) -> Any:
        return jax.ShapeDtypeStruct((rows, width), dtype)

    if lm.family.kind == "seq2seq":
        decoder = (array(window + 1, jnp.int32), array(window + 1, bool))
        inputs = ModelInputs(
            *decoder,
            context_tokens=array(length - window, jnp.int32),
            context_mask=array(length - window, bool),
        )
    else:
        inputs = ModelInputs(array(length, jnp.int32), array(length, bool))
    return Sequences(inputs, jax.ShapeDtypeStruct((rows,), jnp.int32), array(window, bool))

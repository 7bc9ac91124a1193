# SPDX-License-Identifier: Apache-2.0
"""Models to measure, of known shapes with random weights or from a checkpoint, and the sizes of a run."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

import jax
import jax.numpy as jnp
from transformers import GPT2Config, LlamaConfig, PretrainedConfig, Qwen2Config

from jrl.models.adapters.config import AdapterConfig, read_adapter_config
from jrl.models.checkpoint import load_checkpoint, read_model
from jrl.models.decode_attention import decodes_by_kernel
from jrl.models.fused_attention import AttnImplementation, choose_attention
from jrl.models.heads import init_value_head
from jrl.models.hub import find_folder
from jrl.models.model import CausalLM, make_model
from jrl.trainers.config.sections import TrainConfig
from jrl.typing import Frozen, Params, PolicyFns

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Shapes:
    """Sizes of a run.

    Attributes:
      rows: Rollouts of an iteration, rows sampled or scored at once, and rows (or pairs) of an SFT or DPO step.
      prompt: Tokens of a prompt.
      response: Tokens of a completion; every row has all of them.
      epochs: Passes of PPO over its rollouts.
      batch_size: Rollouts of one of PPO's optimizer steps.
      minibatch_size: Rows (or pairs) of one forward pass; divides `batch_size`.
      logprob_chunk_bytes: Most bytes of logits held at a time.
    """

    rows: int = 32
    prompt: int = 16
    response: int = 48
    epochs: int = 4
    batch_size: int = 8
    minibatch_size: int = 8
    logprob_chunk_bytes: int = TrainConfig.logprob_chunk_bytes

    @property
    def length(self) -> int:
        """Tokens of a row."""
        return self.prompt + self.response

    @property
    def step_minibatch_size(self) -> int:
        """Rows (or pairs) of one forward pass of an SFT or DPO step: as many as asked for, or all of them."""
        return self.minibatch_size if self.rows % self.minibatch_size == 0 else self.rows

    @property
    def ppo_steps(self) -> int:
        """Optimizer steps of a PPO iteration."""
        return self.epochs * -(-self.rows // self.batch_size)


@dataclass(frozen=True)
class Preset:
    """A model by name.

    Attributes:
      config: Makes its transformers config.
      shapes: What it is measured at unless said otherwise.
      compute_dtype: Likewise.
    """

    config: Callable[[], PretrainedConfig]
    shapes: Shapes
    compute_dtype: Dtype


def _gpt2(**sizes: Any) -> PretrainedConfig:
    return GPT2Config(
        **sizes, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0
    )


def _llama(**sizes: Any) -> PretrainedConfig:
    return LlamaConfig(
        **sizes, vocab_size=128_256, max_position_embeddings=8192, bos_token_id=0, eos_token_id=0
    )


_SMALL = Shapes()
_LARGE = Shapes(rows=64, prompt=128, response=256, batch_size=64, minibatch_size=16)

PRESETS: dict[str, Preset] = {
    # trlX's example and its recipe: 128 rollouts, batches of 100.
    "randomwalks": Preset(
        lambda: _gpt2(n_layer=6, n_embd=144, n_head=12, vocab_size=23, n_positions=1024),
        Shapes(rows=128, prompt=1, response=9, batch_size=100, minibatch_size=100),
        "float32",
    ),
    "gpt2-124m": Preset(
        lambda: _gpt2(n_layer=12, n_embd=768, n_head=12, vocab_size=50257, n_positions=1024),
        _SMALL,
        "float32",
    ),
    "qwen2-0.5b": Preset(
        lambda: Qwen2Config(
            hidden_size=896,
            intermediate_size=4864,
            num_hidden_layers=24,
            num_attention_heads=14,
            num_key_value_heads=2,
            vocab_size=151_936,
            max_position_embeddings=8192,
            tie_word_embeddings=True,
            bos_token_id=0,
            eos_token_id=0,
        ),
        replace(_LARGE, rows=1024, batch_size=256, minibatch_size=64),
        "bfloat16",
    ),
    "llama-1b": Preset(
        lambda: _llama(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=True,
        ),
        _LARGE,
        "bfloat16",
    ),
    "llama-8b": Preset(
        lambda: _llama(
            hidden_size=4096,
            intermediate_size=14336,
            num_hidden_layers=32,
            num_attention_heads=32,
            num_key_value_heads=8,
            tie_word_embeddings=False,
        ),
        _LARGE,
        "bfloat16",
    ),
}


@dataclass(frozen=True)
class Options:
    """Options of a model's training.

    Attributes:
      compute_dtype: "float32" or "bfloat16", of activations and matrix products.
      num_layers_unfrozen: Last layers that train; −1: all.
      lora_rank: Rank of an adapter on queries and values that trains instead; 0: none.
      frozen_dtype: "float32" or "bfloat16", of what does not train.
      remat: Whether layers are computed again in the backward pass.
      attn_implementation: How scoring and training attend, as `model.attn_implementation` of a run.
    """

    compute_dtype: Dtype = "float32"
    num_layers_unfrozen: int = -1
    lora_rank: int = 0
    frozen_dtype: Dtype = "float32"
    remat: bool = False
    attn_implementation: AttnImplementation = "auto"

    @property
    def peft_config(self) -> dict[str, Any] | None:
        """The adapter as a configuration names it."""
        if not self.lora_rank:
            return None
        return {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": self.lora_rank}

    @property
    def split(self) -> dict[str, Any]:
        """Arguments of `split_params` and `policy` that divide a model's parameters."""
        peft = self.peft_config
        adapter: AdapterConfig | None = None if peft is None else read_adapter_config(peft)
        return {"num_layers_unfrozen": self.num_layers_unfrozen, "adapter": adapter}


@dataclass(frozen=True)
class Subject:
    """A model that is to be measured; its arrays are made when a benchmark asks for them.

    Attributes:
      name: Preset or path.
      source: Transformers config of a model with random weights, or the folder of a checkpoint.
      lm: The architecture.
      options: How it trains.
    """

    name: str
    source: Any
    lm: CausalLM
    options: Options

    @property
    def policy(self) -> PolicyFns:
        """The model as algorithms see it."""
        return self.lm.policy(
            compute_dtype=jnp.dtype(self.options.compute_dtype),
            remat=self.options.remat,
            attn_implementation=self.options.attn_implementation,
            **self.options.split,
        )

    @property
    def attention(self) -> str:
        """Attention implementation of scoring and training on this process's devices."""
        options = self.options
        return choose_attention(options.attn_implementation, self.lm.config, jnp.dtype(options.compute_dtype))

    @property
    def decoding(self) -> str:
        """Attention implementation of a sampled token: "pallas", jrl's kernel, or "einsum"."""
        by_kernel = decodes_by_kernel(self.attention, self.lm.config, jnp.dtype(self.options.compute_dtype))
        return "pallas" if by_kernel else "einsum"

    @property
    def is_random(self) -> bool:
        """True where there are no weights to read."""
        return isinstance(self.source, PretrainedConfig)

    def load(self) -> tuple[Params, Frozen]:
        """Loads the model: trainable parameters, a value head included, and frozen ones."""
        params = dict(
            self.lm.init(jax.random.key(0)) if self.is_random else load_checkpoint(self.source).params
        )
        if "v_head" not in params:
            params["v_head"] = init_value_head("mlp", self.lm.feature_width, jax.random.key(1))
        trainable, frozen = self.lm.split_params(params, key=jax.random.key(2), **self.options.split)
        kind = jnp.dtype(self.options.frozen_dtype)
        return trainable, jax.tree.map(lambda leaf: leaf.astype(kind), frozen)

    def tokens(self, rows: int, width: int, *, seed: int) -> jax.Array:
        """Random ids, (rows, width)."""
        return jax.random.randint(jax.random.key(seed), (rows, width), 0, self.lm.vocab_size)


def find_subject(name: str | os.PathLike[str], options: Options | None = None) -> Subject:
    """A preset or a checkpoint, as something to measure; no weight is read.

    Args:
      name: A key of `PRESETS`, or the folder or hub id of a checkpoint.
      options: How it trains; None: all of it, in the preset's compute dtype (float32 for a checkpoint).
    Raises:
      ValueError: If the model is no decoder.
    """
    preset = PRESETS.get(str(name))
    options = options or Options(compute_dtype=preset.compute_dtype if preset else "float32")
    source: Any = preset.config() if preset else find_folder(name)
    lm = make_model(source) if preset else read_model(source)
    if not isinstance(lm, CausalLM):
        raise ValueError(f"`name` must be a decoder, got {lm.family.model_type}, which has an encoder too.")
    return Subject(str(name), source, lm, options)

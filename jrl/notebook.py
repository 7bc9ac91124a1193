# SPDX-License-Identifier: Apache-2.0
"""A model in a notebook: `load_model`, `estimate_cost`, `save_model`, and what can be done with it in between."""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Bool, Float, Int

from jrl.compilation import compiled, use_compilation_cache
from jrl.distributed import join
from jrl.mesh import place, tree_shardings
from jrl.models import cost
from jrl.models.adapters.config import plain_peft_config, read_adapter_config
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.peft_format import (
    AdapterFolder,
    is_adapter_folder,
    load_adapter,
    read_adapter_folder,
)
from jrl.models.checkpoint import MAX_SHARD_BYTES, load_checkpoint, read_model, save_checkpoint
from jrl.models.cost import Cost
from jrl.models.hub import CONFIG_FILES, find_checkpoint, is_checkpoint
from jrl.models.model import CausalLM, LanguageModel, make_model
from jrl.models.seq2seq_model import Seq2SeqLM
from jrl.rollout.generate import Generate, make_generate
from jrl.typing import Params, PRNGKey, SamplingKnobs


@dataclass(frozen=True)
class Model:
    """A language model without state: parameters are always an argument.

    Attributes:
      lm: Architecture and checkpoint names.
    """

    lm: LanguageModel

    def logits(
        self,
        params: Params,
        tokens: Int[Array, "B T"],
        attention_mask: Bool[Array, "B T"] | None = None,
        *,
        context_tokens: Int[Array, "B C"] | None = None,
        context_mask: Bool[Array, "B C"] | None = None,
    ) -> Float[Array, "B T V"]:
        """Next-token logits, float32, of left- or right-padded rows.

        Args:
          params: Of the model.
          tokens: Ids; of a seq2seq model, the decoder's, from its start id on.
          attention_mask: True on real ones; None: all.
          context_tokens: Ids that the encoder of a seq2seq model reads.
          context_mask: True on real ones; None: all.
        Raises:
          ValueError: If the context is missing, or there is no encoder to read it.
        """
        if isinstance(self.lm, Seq2SeqLM) and context_tokens is not None:
            return self.lm.logits(
                params, tokens, attention_mask, context_tokens=context_tokens, context_mask=context_mask
            )
        if isinstance(self.lm, CausalLM) and context_tokens is None:
            return self.lm.logits(params, tokens, attention_mask)
        raise ValueError(
            "`context_tokens` must be given to a seq2seq model, whose encoder reads them, and to no other; this is a "
            f"{self.lm.family.kind} model."
        )

    def generate(
        self,
        params: Params,
        tokens: Int[Array, "B P"],
        attention_mask: Bool[Array, "B P"],
        key: PRNGKey,
        *,
        max_new_tokens: int,
        temperature: float = 1.0,
        top_k: int = 0,
        top_p: float = 1.0,
        eos_token_id: int | Sequence[int] | None = None,
        pad_token_id: int | None = None,
        beta: float | None = None,
    ) -> Int[Array, "B T"]:
        """Samples `max_new_tokens` ids a row, pad after the end.

        Args:
          params: Of the model.
          tokens: Left-padded prompts; the encoder of a seq2seq model reads them.
          attention_mask: True on real tokens.
          key: Same key, same samples; row i depends on its number, not on its neighbours.
          max_new_tokens: Width of the result.
          temperature: > 0; traced under jit, as `top_p`.
          top_k: 0 keeps all.
          top_p: 1 keeps all.
          eos_token_id: Default: the checkpoint's, of generation_config.json or else config.json. Nothing else of
            generation_config.json is read.
          pad_token_id: Default: the checkpoint's, else the first EOS.
          beta: Weight of Q − V beside the log-probabilities, of a model that ILQL trained; traced as `temperature`.
            None: Q heads are not read.
        Raises:
          ValueError: If prompts and completions are longer together than the model has positions, or there is a `beta`
            and `params` hold no Q heads.
        """
        width, positions = np.shape(tokens)[1], self.lm.max_positions
        if width + max_new_tokens > positions:
            raise ValueError(
                f"`tokens` has {width} columns and `max_new_tokens` is {max_new_tokens}, but the model has {positions} "
                "positions: shorten one of them, or pad the prompts no further than to the longest."
            )
        eos: Any = (
            self.lm.eos_token_ids or self.lm.text_config.eos_token_id
            if eos_token_id is None
            else eos_token_id
        )
        eos_ids = () if eos is None else tuple(eos) if isinstance(eos, Sequence) else (int(eos),)
        pad = self.lm.text_config.pad_token_id if pad_token_id is None else pad_token_id
        generate = _generator(
            self.lm, max_new_tokens, eos_ids, pad if pad is not None else (eos_ids or (0,))[0], top_k
        )
        knobs = SamplingKnobs(jnp.asarray(temperature, jnp.float32))
        if not isinstance(top_p, int | float) or top_p != 1:
            knobs = knobs._replace(top_p=jnp.asarray(top_p, jnp.float32))
        if beta is not None:
            params, knobs = _steered(params), knobs._replace(beta=jnp.asarray(beta, jnp.float32))
        inputs = self.lm.prompt_inputs(jnp.asarray(tokens), jnp.asarray(attention_mask, bool))
        return generate(params, {}, inputs, jnp.arange(np.shape(tokens)[0]), knobs, key).tokens


def _steered(params: Params) -> Params:
    """The parameters with the target heads in place of the Q heads, as ILQL samples."""
    if "q_heads" not in params:
        raise ValueError(
            "`beta` weighs Q − V, and `params` hold no Q heads: was the model trained with ILQL?"
        )
    return {**params, "q_heads": params.get("target_q_heads", params["q_heads"])}


@functools.lru_cache(maxsize=32)
def _generator(
    lm: LanguageModel, max_new_tokens: int, eos_token_ids: tuple[int, ...], pad_token_id: int, top_k: int
) -> Generate:
    """A compiled sampler, kept: a loop in a notebook must not compile it anew on every call."""
    return compiled(
        make_generate(
            lm.policy(),
            max_new_tokens=max_new_tokens,
            eos_token_ids=eos_token_ids,
            pad_token_id=pad_token_id,
            top_k=top_k,
        )
    )


def load_model(
    path_or_id_or_config: Any,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | None = None,
    key: PRNGKey | None = None,
    quiet: bool = False,
) -> tuple[Model, Params]:
    """A model and its parameters from a checkpoint, or random ones from a transformers config object.

    Prints first what they will cost (`estimate_cost`), to stderr.

    A folder with an adapter gives its base model with the adapter in its weights (LoRA): in float32 the same function
    up to rounding, in bfloat16 not (docs/adapters.md).

    Args:
      path_or_id_or_config: Directory, hub id, or config object; also a directory with an adapter, or a transformers or
        PEFT model object of torch.
      dtype: Of the parameters; default float32.
      mesh: Where they go; default: the first device.
      key: Of the random parameters; required with a config object.
      quiet: Print nothing.
    """
    join()  # before anything of JAX is computed
    use_compilation_cache()
    lm = _describe(path_or_id_or_config)
    if not quiet:
        print(_cost(lm, dtype=dtype, mesh=mesh), file=sys.stderr)
    if is_adapter_folder(path_or_id_or_config):
        return _load_adapted(read_adapter_folder(path_or_id_or_config), dtype or jnp.float32, mesh)
    if is_checkpoint(path_or_id_or_config):
        loaded = load_checkpoint(path_or_id_or_config, dtype=dtype or jnp.float32, mesh=mesh)
        return Model(loaded.model), loaded.params
    if key is None:
        raise ValueError("`key` is required to initialise a model from a config object, got None.")
    params = jax.tree.map(lambda leaf: leaf.astype(dtype or jnp.float32), lm.init(key))
    return Model(lm), params if mesh is None else place(params, tree_shardings(mesh, params)[0])


def _load_adapted(found: AdapterFolder, dtype: Any, mesh: jax.sharding.Mesh | None) -> tuple[Model, Params]:
    """The base model of an adapter's folder with the adapter merged; the value head beside it is left there.

    Raises:
      ValueError: If the adapter is no part of any weight.
    """
    loaded = load_checkpoint(_base_of(found), dtype=dtype, mesh=mesh)
    adapter = loaded.model.bind(found.config)
    if not isinstance(adapter, Lora):
        raise ValueError(
            f"{found.folder} holds virtual tokens, which are no part of any weight: only a trainer samples with them "
            "(`model.model_path`)."
        )
    weights = load_adapter(found.folder, adapter)[adapter.name]
    merged = jax.jit(adapter.merge, donate_argnums=0)(loaded.params, weights)
    return Model(loaded.model), merged


def _base_of(found: AdapterFolder) -> Any:
    if found.base_model is None:
        raise ValueError(
            f"{found.folder} holds an adapter, but its adapter_config.json has no `base_model_name_or_path`: name the "
            "folder or hub id of the model it belongs to there."
        )
    return found.base_model


def estimate_cost(
    path_or_id_or_config: Any,
    *,
    dtype: Any = None,
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None,
    rows: int = 1,
    length: int = 1024,
    num_layers_unfrozen: int = -1,
    peft_config: Any = None,
) -> Cost:
    """Estimates a model's memory on every device, before a weight is read or an array made.

    Args:
      path_or_id_or_config: Directory, hub id (of which the configs are downloaded), or config object.
      dtype: Of the parameters; default float32.
      mesh: Where they will be; an `AbstractMesh` needs no devices; default: one device.
      rows: Rows sampled at once.
      length: Prompt and completion together.
      num_layers_unfrozen: As in `ModelConfig`.
      peft_config: As in `ModelConfig`.
    Returns:
      Numbers, which print as one line. The optimizer is AdamW; the heads of a checkpoint are not counted.
    """
    adapter = None if peft_config is None else read_adapter_config(plain_peft_config(peft_config))
    return _cost(
        _describe(path_or_id_or_config),
        dtype=dtype,
        mesh=mesh,
        rows=rows,
        length=length,
        num_layers_unfrozen=num_layers_unfrozen,
        adapter=adapter,
    )


def _cost(lm: LanguageModel, *, dtype: Any, **shapes: Any) -> Cost:
    return cost.estimate_cost(lm, optax.adamw(1e-3).init, dtype=dtype or jnp.float32, **shapes)


def _describe(path_or_id_or_config: Any) -> LanguageModel:
    """The model without its weights."""
    if is_adapter_folder(path_or_id_or_config):
        path_or_id_or_config = _base_of(read_adapter_folder(path_or_id_or_config))
    if is_checkpoint(path_or_id_or_config):
        return read_model(find_checkpoint(path_or_id_or_config, files=CONFIG_FILES))
    return make_model(path_or_id_or_config)


def save_model(
    directory: str | os.PathLike[str],
    model: Model,
    params: Params,
    tokenizer: Any = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Writes a Hugging Face checkpoint that transformers loads with equal logits.

    Args:
      directory: Made if missing.
      model: What the parameters belong to.
      params: The whole tree.
      tokenizer: Stored beside the model where given.
      max_shard_bytes: Larger models are split into several files.
    """
    save_checkpoint(directory, model.lm, params, tokenizer=tokenizer, max_shard_bytes=max_shard_bytes)

# SPDX-License-Identifier: Apache-2.0
"""Models as TRL's scripts name them: a handle says what to load, a trainer loads it once and answers through it.

`from_pretrained` reads the configuration alone. Weights are read by the trainer that gets the handle, or by the handle
itself where a script generates or saves before there is a trainer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

from jrl.interop import warn_ignored
from jrl.models.adapters import is_adapter_folder, plain_peft_config
from jrl.models.hub import is_checkpoint
from jrl.trl.handles import ModelHandle, create_reference_model, resolve_model
from jrl.trl.reward_adapter import check_reward_adapter

__all__ = [
    "AutoModelForCausalLM",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLM",
    "AutoModelForSeq2SeqLMWithValueHead",
    "AutoModelForSequenceClassification",
    "ModelHandle",
    "PreTrainedModelWrapper",
    "create_reference_model",
]

DROPOUT = "summary_dropout_prob"
_IGNORED = {
    "cache_dir": "the hub's own cache is used; HF_HOME moves it",
    "device_map": "the mesh places arrays (`train.mesh`)",
    "force_download": "the hub's own cache is used",
    "local_files_only": "HF_HUB_OFFLINE says so to the hub's client",
    "low_cpu_mem_usage": "tensors are read one by one in any case",
    "max_memory": "the mesh places arrays (`train.mesh`)",
    "offload_folder": "nothing is offloaded",
    DROPOUT: "the value head has no dropout: old and new values must be comparable",
    "token": "the hub's client knows its token",
    "trust_remote_code": "jrl runs no code of a checkpoint",
    "use_auth_token": "the hub's client knows its token",
    "use_cache": "sampling has a cache and training has none",
    "use_flash_attention_2": "the platform's kernel is used where it serves",
    "use_safetensors": "only safetensors are read",
}
_REFUSED = {
    "revision": "download the revision first and give its folder",
    "subfolder": "give the folder itself",
    "variant": "give a folder with plain safetensors",
}


class _AutoModel(ModelHandle):
    """Base of this module's classes: `from_pretrained`, with the arguments of theirs."""

    _kind: ClassVar[str]
    _has_value_head: ClassVar[bool] = False

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: Any,
        *,
        peft_config: Any = None,
        is_trainable: bool | None = None,
        load_in_8bit: bool = False,
        load_in_4bit: bool = False,
        quantization_config: Any = None,
        torch_dtype: Any = None,
        dtype: Any = None,
        attn_implementation: str | None = None,
        num_labels: int | None = None,
        reward_adapter: str | None = None,
        v_head_init_strategy: str | None = None,
        v_head_initializer_range: float = 0.2,
        **more: Any,
    ) -> Self:
        """Says what to load.

        Args:
          pretrained_model_name_or_path: Folder, hub id, transformers config (random weights), another handle, or a pair
            of `jrl.load_model`.
          peft_config: Of a fresh adapter: a dict with PEFT's keys or a PEFT object.
          is_trainable: Of the adapter in a folder; it trains in any case.
          load_in_8bit: The frozen matrices beside an adapter are kept in int8.
          load_in_4bit: The same in nf4.
          quantization_config: Of transformers, for its `load_in_8bit` and `load_in_4bit`.
          torch_dtype: "bfloat16" (or float16) computes in bfloat16; parameters that train stay float32.
          dtype: The same under its newer name.
          attn_implementation: "eager" attends by products with a mask; else by the platform's kernel, where it serves.
          num_labels: Of a classifier; 1.
          reward_adapter: Folder of a reward model's adapter on the same base, for `compute_reward_score`; the model
            must have an adapter of its own.
          v_head_init_strategy: None starts all values at 0, "normal" draws the head's weights.
          v_head_initializer_range: Standard deviation of "normal".
          **more: Fields of the model's config to change, and what transformers takes that has no effect here (said
            once).
        Raises:
          ValueError: On what cannot be honoured, or a field that the config does not have.
        """
        if is_trainable is False and is_adapter_folder(pretrained_model_name_or_path):
            warn_ignored("is_trainable", "the adapter of a folder that a trainer gets is what it trains")
        if num_labels not in (None, 1):
            raise ValueError(f"`num_labels` must be 1, one score a text, got {num_labels}.")
        if v_head_init_strategy not in (None, "normal"):
            raise ValueError(
                f'`v_head_init_strategy` must be None or "normal", got {v_head_init_strategy!r}.'
            )
        known = resolve_model(pretrained_model_name_or_path)
        changes = dict(known.model_extra_configs)
        for name, value in more.items():
            if name in _REFUSED:
                raise ValueError(f"from_pretrained: `{name}` is not supported: {_REFUSED[name]}.")
            if name in _IGNORED:
                warn_ignored(f"from_pretrained: {name}", _IGNORED[name])
            else:
                changes[name] = value
        if num_labels == 1 and cls._kind == "classifier" and is_checkpoint(known.source):
            changes["num_labels"] = 1  # a head of several is replaced by a fresh one
        in_8bit, in_4bit = _bits(load_in_8bit, load_in_4bit, quantization_config)
        wanted_dtype = str(torch_dtype if dtype is None else dtype)
        half = any(word in wanted_dtype for word in ("bfloat16", "float16", "half"))
        found = cls(
            known.source,
            peft_config=known.peft_config if peft_config is None else plain_peft_config(peft_config),
            frozen_dtype="nf4" if in_4bit else "int8" if in_8bit else known.frozen_dtype,
            compute_dtype="bfloat16" if half else known.compute_dtype,
            attn_implementation="einsum" if attn_implementation == "eager" else known.attn_implementation,
            model_extra_configs=changes,
            kind=cls._kind,
            with_value_head=cls._has_value_head,
            summary_dropout_prob=_head_dropout(known, more) if cls._has_value_head else 0.0,
            v_head_init_std=v_head_initializer_range if v_head_init_strategy == "normal" else 0.0,
            reward_adapter=known.reward_adapter
            if reward_adapter is None
            else check_reward_adapter(reward_adapter),
            _folder=known._folder,
            _links=known._links,
        )
        found._check()
        return found

    def _check(self) -> None:
        """The config must be readable, have the fields that were changed, and be of this class's kind."""
        seq2seq = self.is_encoder_decoder
        if self._kind != "classifier" and seq2seq != (self._kind == "seq2seq"):
            other = "AutoModelForSeq2SeqLM" if seq2seq else "AutoModelForCausalLM"
            raise ValueError(
                f"{type(self).__name__} must be given a {self._kind} model, got {self.config.model_type!r}: use "
                f"{other} (or its class with a value head)."
            )
        if self.reward_adapter is not None and not self.is_peft_model:
            raise ValueError(
                "`reward_adapter` must be None for a model without an adapter: they share its base."
            )


class AutoModelForCausalLM(_AutoModel):
    """A decoder."""

    _kind = "causal"


class AutoModelForSeq2SeqLM(_AutoModel):
    """An encoder-decoder."""

    _kind = "seq2seq"


class AutoModelForSequenceClassification(_AutoModel):
    """A model with one score a text; a language model gets a fresh score head."""

    _kind = "classifier"


PreTrainedModelWrapper = ModelHandle
"""TRL's name of what its classes with a value head share."""


class AutoModelForCausalLMWithValueHead(_AutoModel):
    """A decoder with a linear value head, which a checkpoint holds as `v_head.summary`."""

    _kind = "causal"
    _has_value_head = True


class AutoModelForSeq2SeqLMWithValueHead(_AutoModel):
    """An encoder-decoder with a linear value head on its decoder's states."""

    _kind = "seq2seq"
    _has_value_head = True


def _head_dropout(known: ModelHandle, more: Mapping[str, Any]) -> float:
    """The rate that the model's config names, else an argument."""
    rate = vars(known.config).get(DROPOUT, more.get(DROPOUT, 0.0))
    if rate:
        warn_ignored(f"from_pretrained: {DROPOUT}", _IGNORED[DROPOUT])
    return float(rate)


def _bits(load_in_8bit: bool, load_in_4bit: bool, quantization_config: Any) -> tuple[bool, bool]:
    """(8 bits, 4 bits) as the arguments or a quantisation config ask for."""
    if quantization_config is not None:
        given = (
            quantization_config if isinstance(quantization_config, Mapping) else quantization_config.to_dict()
        )
        load_in_8bit = load_in_8bit or bool(given.get("load_in_8bit"))
        load_in_4bit = load_in_4bit or bool(given.get("load_in_4bit"))
    if load_in_8bit and load_in_4bit:
        raise ValueError("`load_in_8bit` and `load_in_4bit` exclude each other, got both.")
    return load_in_8bit, load_in_4bit

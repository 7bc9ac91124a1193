# SPDX-License-Identifier: Apache-2.0
"""A sequence-to-sequence language model as a value, with the face of `CausalLM`. It holds no arrays."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import path_name
from jrl.models.adapters.config import AdapterConfig, LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.targets import bind_lora
from jrl.models.families import find_family
from jrl.models.families.base import Entry, Family
from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.seq2seq import init_encoder_decoder
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.models.seq2seq_policy import make_seq2seq_policy, split_seq2seq_params
from jrl.typing import ModelInputs, Params, PolicyFns, PRNGKey


@dataclass(frozen=True, eq=False)
class Seq2SeqLM:
    """An encoder-decoder of a known family.

    Attributes:
      hf_config: The transformers config it was made from: what `save_checkpoint` writes.
      family: The family's tables.
      config: The architecture as jrl sees it.
      value_head: Kind of the value head that its checkpoint came with; None where there is none.
      num_q_heads: Q heads that it came with.
      generation_config: Content of the generation_config.json that it came with; None where there is none.
    """

    hf_config: Any
    family: Family
    config: Seq2SeqConfig
    value_head: str | None = None
    num_q_heads: int = 0
    generation_config: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, hf_config: Any, *, value_head: str | None = None) -> Seq2SeqLM:
        """The model of a transformers config.

        Raises:
          ValueError: If the architecture, or an option of it, is not supported.
        """
        family = find_family(hf_config.model_type)
        config = family.read_config(hf_config)
        # transformers 5 calls every head tied. Other versions, and the file itself, need the truth.
        hf_config = copy.deepcopy(hf_config)
        hf_config.tie_word_embeddings = config.tie_embeddings
        return cls(hf_config, family, config, value_head)

    @property
    def vocab_size(self) -> int:
        """Real entries of the vocabulary."""
        return self.config.vocab_size

    @property
    def max_positions(self) -> int:
        """Longest row, in tokens: relative positions set no limit."""
        return sys.maxsize

    @property
    def feature_width(self) -> int:
        """Width of what the heads read."""
        return self.config.width

    @property
    def decoder_start_token_id(self) -> int:
        """First id of every decoder row."""
        return self.config.decoder_start_token_id

    def prompt_inputs(self, tokens: Int[Array, "B P"], attention_mask: Bool[Array, "B P"]) -> ModelInputs:
        """What the sampler goes on from: the encoder reads the prompts, the decoder its start id."""
        start = jnp.full((tokens.shape[0], 1), self.decoder_start_token_id, jnp.int32)
        return ModelInputs(start, jnp.ones(start.shape, bool), None, tokens, attention_mask)

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, with the heads that the model has."""
        model_key, head_key = jax.random.split(key)
        params = init_encoder_decoder(self.config, model_key)
        if self.value_head is not None:
            params["v_head"] = init_value_head(self.value_head, self.feature_width, head_key)
        if self.num_q_heads:
            sizes = self.feature_width, self.vocab_size, self.config.padded_vocab_size
            params |= init_q_heads(self.num_q_heads, *sizes, jax.random.fold_in(head_key, 1))
        return params

    def entries(self) -> list[Entry]:
        """Every tensor of its checkpoint, heads excepted."""
        return self.family.entries(self.config)

    def logits(
        self,
        params: Params,
        tokens: Int[Array, "B L"],
        attention_mask: Bool[Array, "B L"] | None = None,
        *,
        context_tokens: Int[Array, "B C"],
        context_mask: Bool[Array, "B C"] | None = None,
        compute_dtype: Any = jnp.float32,
    ) -> Float[Array, "B L V"]:
        """Float32 logits of the token after each decoder position, over the real vocabulary.

        Args:
          params: The whole model.
          tokens: Decoder ids, from the start id on; anything where padded.
          attention_mask: True on real decoder ids. None: no padding.
          context_tokens: Ids that the encoder reads.
          context_mask: True on real ones; padding may be left or right. None: no padding.
          compute_dtype: Of activations and matrix products.
        """

        def mask(ids: Array, given: Array | None) -> Array:
            return jnp.ones(ids.shape, bool) if given is None else jnp.asarray(given, bool)

        inputs = ModelInputs(
            tokens,
            mask(tokens, attention_mask),
            context_tokens=context_tokens,
            context_mask=mask(context_tokens, context_mask),
        )
        policy = self.policy(compute_dtype=compute_dtype)
        features = policy.branch(params, {}, None, inputs, None)
        return policy.logits(params, {}, features.policy)[..., : self.config.vocab_size]

    def policy(
        self,
        *,
        num_layers_unfrozen: int = -1,
        value_head: str | None = None,
        num_value_layers_unfrozen: int = 0,
        adapter: AdapterConfig | None = None,
        compute_dtype: Any = jnp.float32,
        remat: bool = False,
    ) -> PolicyFns:
        """This model as `PolicyFns`; the arguments are those of `make_policy`."""
        return make_seq2seq_policy(
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            value_head=value_head,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
            adapter=self.bind(adapter),
            compute_dtype=compute_dtype,
            remat=remat,
        )

    def split_params(
        self,
        params: Params,
        *,
        num_layers_unfrozen: int = -1,
        num_value_layers_unfrozen: int = 0,
        adapter: AdapterConfig | None = None,
        key: PRNGKey | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(trainable, frozen) for the policy of the same arguments; see `split_seq2seq_params`."""
        return split_seq2seq_params(
            params,
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
            adapter=self.bind(adapter),
            key=key,
        )

    def bind(self, adapter: AdapterConfig | None) -> Lora | None:
        """An adapter of this model; None where there is none.

        Raises:
          ValueError: If the configuration does not fit the model, or asks for virtual tokens.
        """
        if adapter is None:
            return None
        if not isinstance(adapter, LoraConfig):
            raise ValueError(
                "peft_config: `peft_type` must be LORA for a seq2seq model; prefix and prompt tuning are for decoders "
                f"alone. Got {type(adapter).__name__}."
            )
        leaves = jax.tree_util.tree_leaves_with_path(jax.eval_shape(self.init, jax.random.key(0)))
        shapes = {path_name(path): leaf.shape for path, leaf in leaves}
        return bind_lora(adapter, self.entries(), shapes, self.family.model_type)

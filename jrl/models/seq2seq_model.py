# SPDX-License-Identifier: Apache-2.0
"""A sequence-to-sequence language model as a value, with the face of `CausalLM`. It holds no arrays."""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.models.adapters.bind import bind_language_lora
from jrl.models.adapters.config import AdapterConfig, LoraConfig
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.targets import check_task
from jrl.models.families import find_family
from jrl.models.families.base import check_direction
from jrl.models.families.config_keys import read_all_keys
from jrl.models.language_model import BaseLM
from jrl.models.seq2seq import init_encoder_decoder
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.models.seq2seq_policy import make_seq2seq_policy, split_seq2seq_params
from jrl.typing import ModelInputs, Params


@dataclass(frozen=True, eq=False)
class Seq2SeqLM(BaseLM):
    """An encoder-decoder of a known family."""

    config: Seq2SeqConfig
    make_policy = staticmethod(make_seq2seq_policy)
    split_tree = staticmethod(split_seq2seq_params)
    init_body = staticmethod(init_encoder_decoder)

    @classmethod
    def from_config(cls, hf_config: Any, *, value_head: str | None = None) -> Seq2SeqLM:
        """The model of a transformers config.

        Raises:
          ValueError: If the architecture, or an option of it, is not supported.
        """
        family = find_family(hf_config.model_type)
        check_direction(hf_config)
        config = read_all_keys(family, hf_config)
        # transformers 5 calls every head tied. Other versions, and the file itself, need the truth.
        hf_config = copy.deepcopy(hf_config)
        hf_config.tie_word_embeddings = config.tie_embeddings
        return cls(hf_config, family, config, value_head)

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
        """Inputs from which the sampler goes on: the encoder reads the prompts, the decoder its start id."""
        start = jnp.full((tokens.shape[0], 1), self.decoder_start_token_id, jnp.int32)
        return ModelInputs(start, jnp.ones(start.shape, bool), None, tokens, attention_mask)

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
        check_task(adapter, self.family.model_type)
        return bind_language_lora(adapter, self.config, self.entries(), self.init, self.family.model_type)

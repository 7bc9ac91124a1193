# SPDX-License-Identifier: Apache-2.0
"""A causal language model as a value: what it is, how it starts, what it computes. It holds no arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.models.adapters.bind import Adapter, bind_adapter
from jrl.models.adapters.config import AdapterConfig
from jrl.models.attention import full_context
from jrl.models.config import TransformerConfig
from jrl.models.families import find_family
from jrl.models.families.base import check_direction
from jrl.models.families.config_keys import read_all_keys
from jrl.models.language_model import BaseLM
from jrl.models.policy import make_policy, split_params
from jrl.models.positions import check_length, token_positions
from jrl.models.seq2seq_model import Seq2SeqLM
from jrl.models.transformer import Decoder, init_decoder
from jrl.typing import ModelInputs, Params


@dataclass(frozen=True, eq=False)
class CausalLM(BaseLM):
    """A decoder of a known family."""

    config: TransformerConfig
    make_policy = staticmethod(make_policy)
    split_tree = staticmethod(split_params)
    init_body = staticmethod(init_decoder)

    @classmethod
    def from_config(cls, hf_config: Any, *, value_head: str | None = None) -> CausalLM:
        """The model of a transformers config.

        Raises:
          ValueError: If the architecture, or an option of it, is not supported.
        """
        family = find_family(hf_config.model_type)
        check_direction(family.text_config(hf_config))
        return cls(hf_config, family, read_all_keys(family, hf_config), value_head)

    @property
    def max_positions(self) -> int:
        """Longest row, in tokens."""
        return self.config.max_positions

    @property
    def feature_width(self) -> int:
        """Width of what the heads read."""
        return self.config.feature_width

    @property
    def decoder_start_token_id(self) -> int | None:
        """None: a decoder goes on from its prompt."""
        return None

    def prompt_inputs(self, tokens: Int[Array, "B P"], attention_mask: Bool[Array, "B P"]) -> ModelInputs:
        """Inputs from which the sampler goes on: the prompts."""
        return ModelInputs(tokens, attention_mask)

    def logits(
        self,
        params: Params,
        tokens: Int[Array, "B L"],
        attention_mask: Bool[Array, "B L"] | None = None,
        *,
        compute_dtype: Any = jnp.float32,
    ) -> Float[Array, "B L V"]:
        """Float32 logits of the token after each position, over the real vocabulary.

        Args:
          params: The whole model.
          tokens: Ids; anything where padded.
          attention_mask: True on real tokens; padding may be left or right. None: no padding.
          compute_dtype: Of activations and matrix products.
        Raises:
          ValueError: If a row is longer than the context of a model that knows no further positions.
        """
        mask = jnp.ones(tokens.shape, bool) if attention_mask is None else jnp.asarray(attention_mask, bool)
        positions = token_positions(mask)
        context = full_context(self.config, mask, positions)
        check_length(self.config, tokens.shape, attention_mask)
        decoder = Decoder(self.config, compute_dtype)
        # Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result.
        logits: Any = decoder.apply({"params": params}, jnp.where(mask, tokens, 0), positions, context)
        return logits[..., : self.config.vocab_size]

    def bind(self, adapter: AdapterConfig | None) -> Adapter | None:
        """An adapter of this model; None where there is none.

        Raises:
          ValueError: If the configuration does not fit the model.
        """
        if adapter is None:
            return None
        return bind_adapter(adapter, self.config, self.entries(), self.init, self.family.model_type)


LanguageModel = CausalLM | Seq2SeqLM


def make_model(hf_config: Any, value_head: str | None = None) -> LanguageModel:
    """The language model of a transformers config.

    Raises:
      ValueError: If the architecture, or an option of it, is not supported, or it is an encoder alone.
    """
    family = find_family(hf_config.model_type)
    if family.kind == "encoder":
        raise ValueError(
            f"`model_type` {family.model_type!r} is an encoder, which writes no text; it can score, as a reward model."
        )
    return (Seq2SeqLM if family.kind == "seq2seq" else CausalLM).from_config(hf_config, value_head=value_head)

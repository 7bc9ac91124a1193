# SPDX-License-Identifier: Apache-2.0
"""A causal language model as a value: what it is, how it starts, what it computes. It holds no arrays."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.models.adapters.bind import Adapter, bind_adapter
from jrl.models.adapters.config import AdapterConfig
from jrl.models.attention import full_context
from jrl.models.config import TransformerConfig
from jrl.models.families import find_family
from jrl.models.families.base import Entry, Family
from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.policy import make_policy, split_params
from jrl.models.positions import token_positions
from jrl.models.seq2seq_model import Seq2SeqLM
from jrl.models.transformer import Decoder, init_decoder
from jrl.typing import ModelInputs, Params, PolicyFns, PRNGKey


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A decoder of a known family.

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
    config: TransformerConfig
    value_head: str | None = None
    num_q_heads: int = 0
    generation_config: Mapping[str, Any] | None = None

    @classmethod
    def from_config(cls, hf_config: Any, *, value_head: str | None = None) -> CausalLM:
        """The model of a transformers config.

        Raises:
          ValueError: If the architecture, or an option of it, is not supported.
        """
        family = find_family(hf_config.model_type)
        return cls(hf_config, family, family.read_config(hf_config), value_head)

    @property
    def vocab_size(self) -> int:
        """Real entries of the vocabulary."""
        return self.config.vocab_size

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
        """What the sampler goes on from: the prompts."""
        return ModelInputs(tokens, attention_mask)

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, with the heads that the model has."""
        model_key, head_key = jax.random.split(key)
        params = init_decoder(self.config, model_key)
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
        compute_dtype: Any = jnp.float32,
    ) -> Float[Array, "B L V"]:
        """Float32 logits of the token after each position, over the real vocabulary.

        Args:
          params: The whole model.
          tokens: Ids; anything where padded.
          attention_mask: True on real tokens; padding may be left or right. None: no padding.
          compute_dtype: Of activations and matrix products.
        """
        mask = jnp.ones(tokens.shape, bool) if attention_mask is None else jnp.asarray(attention_mask, bool)
        positions = token_positions(mask)
        context = full_context(self.config, mask, positions)
        decoder = Decoder(self.config, compute_dtype)
        # Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result.
        logits: Any = decoder.apply({"params": params}, jnp.where(mask, tokens, 0), positions, context)
        return logits[..., : self.config.vocab_size]

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
        return make_policy(
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
        """(trainable, frozen) for the policy of the same arguments; see `jrl.models.policy.split_params`."""
        return split_params(
            params,
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
            adapter=self.bind(adapter),
            key=key,
        )

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

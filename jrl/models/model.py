# SPDX-License-Identifier: Apache-2.0
"""A causal language model as a value: what it is, how it starts, what it computes. It holds no arrays."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jrl.models.attention import full_context, token_positions
from jrl.models.config import TransformerConfig
from jrl.models.families import find_family
from jrl.models.families.base import Entry, Family
from jrl.models.heads import init_value_head
from jrl.models.policy import make_policy, split_params
from jrl.models.transformer import Decoder, init_decoder
from jrl.typing import Params, PolicyFns, PRNGKey


@dataclass(frozen=True, eq=False)
class CausalLM:
    """A decoder of a known family.

    Attributes:
      hf_config: The transformers config it was made from: what `save_checkpoint` writes.
      family: The family's tables.
      config: The architecture as jrl sees it.
      value_head: Kind of the value head that its checkpoint came with; None where there is none.
    """

    hf_config: Any
    family: Family
    config: TransformerConfig
    value_head: str | None = None

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

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, with a value head where the model has one."""
        model_key, head_key = jax.random.split(key)
        params = init_decoder(self.config, model_key)
        if self.value_head is not None:
            params["v_head"] = init_value_head(self.value_head, self.feature_width, head_key)
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
        compute_dtype: Any = jnp.float32,
        remat: bool = False,
    ) -> PolicyFns:
        """This model as `PolicyFns`; the arguments are those of `make_policy`."""
        return make_policy(
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            value_head=value_head,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
            compute_dtype=compute_dtype,
            remat=remat,
        )

    def split_params(
        self, params: Params, *, num_layers_unfrozen: int = -1, num_value_layers_unfrozen: int = 0
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """(trainable, frozen) for the policy of the same arguments; see `jrl.models.policy.split_params`."""
        return split_params(
            params,
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
        )

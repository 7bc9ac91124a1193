# SPDX-License-Identifier: Apache-2.0
"""Base of all language models, as values: architecture, initialisation, split into trained and frozen. No arrays."""

from __future__ import annotations

import abc
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import jax
import jax.numpy as jnp

from jrl.models.adapters.config import AdapterConfig
from jrl.models.families.base import Entry, Family
from jrl.models.fused_attention import AttnImplementation
from jrl.models.heads import init_q_heads, init_value_head
from jrl.models.noise import EmbeddingNoise
from jrl.typing import Params, PolicyFns, PRNGKey


@dataclass(frozen=True, eq=False)
class BaseLM(abc.ABC):
    """A language model of a known family. A kind of model names three functions, and what it reads.

    Attributes:
      hf_config: The transformers config it was made from: what `save_checkpoint` writes.
      family: The family's tables.
      config: The architecture as jrl sees it.
      value_head: Kind of the value head that its checkpoint came with; None where there is none.
      num_q_heads: Q heads that it came with.
      generation_config: Content of the generation_config.json that it came with; None where there is none.
      place: Of a multimodal model, the checkpoint that it is part of; None for others, and where it was made from a
        config.
    """

    hf_config: Any
    family: Family
    config: Any
    value_head: str | None = None
    num_q_heads: int = 0
    generation_config: Mapping[str, Any] | None = None
    place: Any = None

    make_policy: ClassVar[Callable[..., PolicyFns]]
    split_tree: ClassVar[Callable[..., tuple[dict[str, Any], dict[str, Any]]]]
    init_body: ClassVar[Callable[..., dict[str, Any]]]

    @property
    def vocab_size(self) -> int:
        """Real entries of the vocabulary."""
        return self.config.vocab_size

    @property
    def text_config(self) -> Any:
        """The part of `hf_config` that describes the text model: of most families, all of it."""
        return self.family.text_config(self.hf_config)

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Ids that end a row, as its checkpoint says: `eos_token_id` of generation_config.json, one or several.

        What that file merely repeats of config.json, and config.json itself, count where they are lists: one id there
        may be the default of its class, which says nothing of this model. Ids outside the vocabulary end nothing.
        """
        said, of_class = self.generation_config or {}, self.text_config.eos_token_id
        found = said.get("eos_token_id")
        if found is None or (said.get("_from_model_config") and found == of_class):
            found = of_class if isinstance(of_class, list | tuple) else []
        ids = found if isinstance(found, list | tuple) else [found]
        return tuple(dict.fromkeys(int(token) for token in ids if 0 <= token < self.vocab_size))

    @property
    @abc.abstractmethod
    def feature_width(self) -> int:
        """Width of what the heads read."""

    def init(self, key: PRNGKey) -> dict[str, Any]:
        """Fresh float32 parameters, with the heads that the model has."""
        model_key, head_key = jax.random.split(key)
        params = self.init_body(self.config, model_key)
        if self.value_head is not None:
            params["v_head"] = init_value_head(self.value_head, self.feature_width, head_key)
        if self.num_q_heads:
            sizes = self.feature_width, self.vocab_size, self.config.padded_vocab_size
            params |= init_q_heads(self.num_q_heads, *sizes, jax.random.fold_in(head_key, 1))
        return params

    def entries(self) -> list[Entry]:
        """Every tensor of its checkpoint, heads excepted."""
        return self.family.entries(self.config)

    def policy(
        self,
        *,
        num_layers_unfrozen: int = -1,
        num_value_layers_unfrozen: int = 0,
        adapter: AdapterConfig | None = None,
        compute_dtype: Any = jnp.float32,
        remat: bool = False,
        noise: EmbeddingNoise | None = None,
        attn_implementation: AttnImplementation = "einsum",
        share_layers: bool | None = None,
        routing_replay: bool = False,
        counts_experts: bool = False,
    ) -> PolicyFns:
        """This model as `PolicyFns`; the arguments are those of `make_policy`."""
        return self.make_policy(
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
            adapter=self.bind(adapter),
            compute_dtype=compute_dtype,
            remat=remat,
            noise=noise,
            attn_implementation=attn_implementation,
            share_layers=share_layers,
            routing_replay=routing_replay,
            counts_experts=counts_experts,
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
        return self.split_tree(
            params,
            self.config,
            num_layers_unfrozen=num_layers_unfrozen,
            num_value_layers_unfrozen=num_value_layers_unfrozen,
            adapter=self.bind(adapter),
            key=key,
        )

    @abc.abstractmethod
    def bind(self, adapter: AdapterConfig | None) -> Any:
        """An adapter of this model; None where there is none.

        Raises:
          ValueError: If the configuration does not fit the model.
        """

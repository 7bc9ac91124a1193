# SPDX-License-Identifier: Apache-2.0
"""An encoder-decoder as `PolicyFns`: what trains, what is frozen, and the cut between trunk and branch.

With `num_layers_unfrozen = k > 0` the last k decoder layers, the decoder's final norm and an untied head train; all
else is a frozen trunk, as in the causal policy. trlX freezes the final norm as well, and its branch of upper layers
reads no relative positions, because they live in its lowest layer; here both sides read them. LoRA overrides the
number: the whole model is frozen, and is the reference.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from jrl.models.adapters.lora import Lora
from jrl.models.cache import Column, LayerCache, cached_kv_heads, empty_buffers
from jrl.models.decoder_policy import LORA
from jrl.models.fused_attention import AttnImplementation, require_einsum
from jrl.models.heads import HEADS, read_heads
from jrl.models.noise import EmbeddingNoise
from jrl.models.products import loop_weights
from jrl.models.rounding import round_kernels
from jrl.models.seq2seq import EncoderDecoder, Rows
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.typing import Features, Frozen, ModelInputs, Params, PolicyFns, PRNGKey

Variables = Mapping[str, Any]


class Seq2SeqTrunk(NamedTuple):
    """Output of the frozen trunk, which the branch reads.

    Attributes:
      encoded: The encoder's output.
      hidden: The decoder's residual stream at the cut.
    """

    encoded: Float[Array, "B C D"]
    hidden: Float[Array, "B L D"]


class Seq2SeqCache(NamedTuple):
    """Everything `decode` remembers of the rows.

    Attributes:
      layers: Keys and values of the decoder's own tokens, one entry a layer.
      sources: Keys and values of the encoder's output, one entry a layer: written once.
      mask: True on columns that hold a real token.
      context_mask: True on the encoder's real tokens.
      column: The next column to write, the same in all rows.
    """

    layers: tuple[LayerCache, ...]
    sources: tuple[LayerCache, ...]
    mask: Bool[Array, "B S"]
    context_mask: Bool[Array, "B C"]
    column: Column


def make_seq2seq_policy(
    config: Seq2SeqConfig,
    *,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
    adapter: Lora | None = None,
    compute_dtype: Any = jnp.float32,
    remat: bool = False,
    noise: EmbeddingNoise | None = None,
    attn_implementation: AttnImplementation = "einsum",
    share_layers: bool | None = None,
    routing_replay: bool = False,
    counts_experts: bool = False,
) -> PolicyFns:
    """The functions by which algorithms know this model; the arguments are those of `make_policy`.

    Raises:
      ValueError: If a count is out of range, or for layers of the value function's own, noise, a kernel, or a record or
        load of experts.
    """
    for name, is_on in (("routing_replay", routing_replay), ("router_aux_loss_coef", counts_experts)):
        if is_on:
            raise ValueError(f"`{name}` must be off for a seq2seq model, which has no experts.")
    if noise is not None:
        raise ValueError(
            f"`neftune_noise_alpha` must be None for a seq2seq model, which embeds two rows, got {noise.alpha}."
        )
    require_einsum(attn_implementation, "a seq2seq model has a learned bias on the scores")
    cut = branch_start(config, num_layers_unfrozen, num_value_layers_unfrozen, adapter)
    model = EncoderDecoder(config, compute_dtype, remat, share_layers)
    policy = _Seq2SeqPolicy(config, model, cut, adapter)
    return PolicyFns(
        policy.trunk,
        policy.branch,
        policy.logits,
        partial(read_heads, config.vocab_size, config.padded_vocab_size),
        policy.init_cache,
        policy.decode,
        loop_weights if adapter is None else partial(adapter.loop_weights, dtype=compute_dtype),
        partial(round_kernels if adapter is None else adapter.rounded, dtype=compute_dtype),
    )


@dataclass(frozen=True)
class _Seq2SeqPolicy:
    """The parts of `PolicyFns`, as methods without state.

    Attributes:
      config: The architecture.
      model: Its module.
      cut: First decoder layer above the frozen trunk; None where there is no trunk.
      adapter: What trains beside the frozen model, and is at work where `params` holds it; None: parts of the model.
    """

    config: Seq2SeqConfig
    model: EncoderDecoder
    cut: int | None
    adapter: Lora | None

    def trunk(self, frozen: Frozen, inputs: ModelInputs) -> Seq2SeqTrunk | None:
        """The encoder's output, and the decoder's stream before layer `cut`."""
        if self.cut is None:
            return None
        variables = self._variables({}, frozen)
        encoded = self._encode(variables, inputs)
        x = self._run(variables, _visible(inputs.tokens, inputs.attention_mask), method="embed_tokens")
        return Seq2SeqTrunk(encoded, self._layers(variables, x, encoded, inputs, 0, self.cut))

    def branch(
        self,
        params: Params,
        frozen: Frozen,
        trunk: Seq2SeqTrunk | None,
        inputs: ModelInputs,
        dropout_key: PRNGKey | None,
    ) -> Features:
        """The decoder layers above the trunk."""
        variables = self._variables(params, frozen)
        # The two stacks share the modules of the embedding: one key for both would drop the same in both.
        encoder_key, key = (None, None) if dropout_key is None else jax.random.split(dropout_key)
        if trunk is None:
            encoded = self._encode(variables, inputs, encoder_key)
            tokens = _visible(inputs.tokens, inputs.attention_mask)
            x = self._run(variables, tokens, method="embed_tokens", dropout_key=key)
        else:
            encoded, x = jax.lax.stop_gradient(trunk)
        x = self._layers(variables, x, encoded, inputs, self.cut or 0, self.config.num_layers, key)
        hidden = self._run(variables, x, method="norm", dropout_key=key)
        return Features(hidden, hidden)

    def logits(
        self, params: Params, frozen: Frozen, hidden: Float[Array, "*rows D"]
    ) -> Float[Array, "*rows V"]:
        """The language-model head."""
        return self._run(self._variables(params, frozen), hidden, method="logits")

    def init_cache(self, params: Params, frozen: Frozen, prompts: ModelInputs, length: int) -> Seq2SeqCache:
        """Runs the encoder, and keeps of it what every decoder layer reads; the decoder's own buffers are empty."""
        config, rows = self.config, prompts.tokens.shape[0]
        variables = self._variables(params, frozen)
        encoded = self._encode(variables, prompts, is_whole=True)
        sources = self._run(variables, encoded, method="read_context")
        shape = (rows, cached_kv_heads(config.num_heads, config.num_heads), length, config.head_dim)
        return Seq2SeqCache(
            layers=tuple(empty_buffers(shape, 1, self.model.dtype) for _ in range(config.num_layers)),
            sources=sources,
            mask=jnp.zeros((rows, length), bool),
            context_mask=_context(prompts)[1],
            column=np.int32(0),
        )

    def decode(
        self, params: Params, frozen: Frozen, inputs: ModelInputs, cache: Seq2SeqCache
    ) -> tuple[Features, Seq2SeqCache]:
        """Appends the inputs to the cache."""
        variables, width = self._variables(params, frozen), inputs.tokens.shape[1]
        mask = jax.lax.dynamic_update_slice(cache.mask, inputs.attention_mask, (0, cache.column))
        queries = cache.column + jnp.arange(width)
        rows = Rows(_causal(queries, mask), queries, cache.context_mask, cache.column)
        visible = _visible(inputs.tokens, inputs.attention_mask)
        x = self._run(variables, visible, True, method="embed_tokens")
        count = self.config.num_layers
        x, layers = self._run(variables, x, cache.sources, rows, 0, count, cache.layers, method="run_layers")
        hidden = self._run(variables, x, method="norm")
        cache = cache._replace(layers=layers, mask=mask, column=cache.column + width)
        return Features(hidden, hidden), cache

    def _encode(
        self, variables: Variables, inputs: ModelInputs, key: PRNGKey | None = None, *, is_whole: bool = False
    ) -> Array:
        tokens, mask = _context(inputs)
        return self._run(variables, _visible(tokens, mask), mask, is_whole, method="encode", dropout_key=key)

    def _layers(
        self,
        variables: Variables,
        x: Array,
        encoded: Array,
        inputs: ModelInputs,
        start: int,
        stop: int,
        key: PRNGKey | None = None,
    ) -> Array:
        queries = jnp.arange(inputs.tokens.shape[1])
        rows = Rows(_causal(queries, inputs.attention_mask), queries, _context(inputs)[1])
        arguments = (x, encoded, rows, start, stop)
        return self._run(variables, *arguments, method="run_layers", dropout_key=key)[0]

    def _variables(self, params: Params, frozen: Frozen) -> Variables:
        """The whole model, of which the frozen part is constant, and the adapters that `params` holds."""
        own = {name: value for name, value in params.items() if name != LORA}
        variables = {"params": {**jax.lax.stop_gradient(dict(frozen)), **own}}
        if LORA in params:
            assert self.adapter is not None
            variables[LORA] = self.adapter.variables(params[LORA])
            variables["params"] = self.adapter.overlay(variables["params"], params[LORA])
        return variables

    def _run(self, variables: Variables, *args: Any, method: str, dropout_key: PRNGKey | None = None) -> Any:
        rngs = None if dropout_key is None else {"dropout": dropout_key}
        return self.model.apply(variables, *args, method=method, rngs=rngs)


def _context(inputs: ModelInputs) -> tuple[Int[Array, "B C"], Bool[Array, "B C"]]:
    """The encoder's tokens and their mask.

    Raises:
      ValueError: If it is missing, or the rows are packed.
    """
    if inputs.context_tokens is None or inputs.context_mask is None:
        raise ValueError(
            "`context_tokens` and `context_mask` must be given to a seq2seq model: its encoder reads the prompt, and "
            "`tokens` begins with the decoder's start id. Were these inputs made for a causal model?"
        )
    if inputs.segment_ids is not None:
        raise ValueError(
            "`segment_ids` must be None for a seq2seq model: the rows of one context are not packed."
        )
    return inputs.context_tokens, inputs.context_mask


def _visible(tokens: Int[Array, "B L"], mask: Bool[Array, "B L"]) -> Int[Array, "B L"]:
    """Padding may hold any id, even one outside the vocabulary: nothing of it may reach a result."""
    return jnp.where(mask, tokens, 0)


def _causal(queries: Int[Array, "Q"], mask: Bool[Array, "B S"]) -> Bool[Array, "B Q S"]:
    """Real keys that are no later than the query."""
    columns = jnp.arange(mask.shape[1])
    return (queries[None, :, None] >= columns[None, None, :]) & mask[:, None, :]


def branch_start(
    config: Seq2SeqConfig,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
    adapter: Lora | None = None,
) -> int | None:
    """Index of the first decoder layer above the frozen trunk; None where there is no trunk.

    There is none where the embedding trains, and where the encoder or the lowest decoder layer has an adapter.

    Raises:
      ValueError: If the count is out of range, or the value function shall have layers of its own.
    """
    if num_value_layers_unfrozen:
        raise ValueError(
            "`num_value_layers_unfrozen` must be 0 for a seq2seq model: its value head reads the policy's features; "
            f"got {num_value_layers_unfrozen}."
        )
    if not -1 <= num_layers_unfrozen <= config.num_layers:
        raise ValueError(
            f"`num_layers_unfrozen` must be -1 (all), 0 (only heads) or at most the {config.num_layers} decoder layers "
            f"of the model, got {num_layers_unfrozen}."
        )
    if adapter is not None:
        in_encoder = any(name.startswith("encoder_") for _, name in adapter.tops)
        return None if in_encoder else min(adapter.first_layer, config.num_layers) or None
    return None if num_layers_unfrozen == -1 else config.num_layers - num_layers_unfrozen


def split_seq2seq_params(
    params: Params,
    config: Seq2SeqConfig,
    *,
    num_layers_unfrozen: int,
    num_value_layers_unfrozen: int = 0,
    adapter: Lora | None = None,
    key: PRNGKey | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(trainable, frozen) of a whole model, disjoint in their keys; see `jrl.models.policy.split_params`."""
    branch_start(config, num_layers_unfrozen, num_value_layers_unfrozen, adapter)
    trained = {*HEADS, LORA}
    if adapter is None and num_layers_unfrozen == -1:
        trained = set(params)
    elif adapter is None and num_layers_unfrozen > 0:
        last = range(config.num_layers - num_layers_unfrozen, config.num_layers)
        trained |= {f"layers_{index}" for index in last} | {"final_norm", "lm_head"}
    trainable = {name: value for name, value in params.items() if name in trained}
    frozen = {name: value for name, value in params.items() if name not in trained}
    if adapter is not None and LORA not in params:
        if key is None:
            raise ValueError("`key` must be given to start a fresh adapter.")
        trainable[LORA] = jax.jit(adapter.init)(key, frozen)
    return trainable, frozen

# SPDX-License-Identifier: Apache-2.0
"""Causal attention with grouped key/value heads, windows, rotary positions or ALiBi, and an explicit cache.

Plain einsums with a float32 softmax: exact, and on a CPU as fast as fused forms. Padding may be on either
side. Whole rows may go through a kernel instead: `jrl.models.fused_attention`, `jrl.models.splash_attention`.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Bool, Float, Int

from jrl.mesh import constrain
from jrl.models.cache import (
    Column,
    LayerCache,
    LayerEntry,
    NewTokens,
    Places,
    attend_written,
    spread_kv_heads,
)
from jrl.models.config import LayerConfig, TransformerConfig
from jrl.models.decode_attention import KeySpans, attend_spans, key_spans
from jrl.models.fused_attention import (
    FusedRows,
    KernelImplementation,
    Turned,
    attend_fused,
    fused_rows,
    turned,
)
from jrl.models.layers import Norm, Projection
from jrl.models.positions import Rotation, alibi_slopes, rotate, rotations
from jrl.models.products import mix_values, score_keys
from jrl.models.recurrent_rows import RecurrentRows, recurrent_rows
from jrl.models.score_blocks import MASKED_SCORE, Operands, ScoreBlocks
from jrl.models.splash_attention import SplashRows, attend_splash, splash_rows
from jrl.typing import PRNGKey


class AttentionContext(NamedTuple):
    """Facts of the rows that every layer's attention reads, or what stands in its place.

    Attributes:
      masks: True where query q may read key s; one for each of `config.reaches`. None where a kernel knows it.
      rotations: One for each of `config.ropes`.
      positions: Of the queries and of the keys, for ALiBi; None without it.
      column: Where the cache takes the next keys; None without a cache.
      fused: Rows that go through one kernel; None: through einsums and `masks`.
      turned: How they differ from the rows that the cache takes; None: not at all.
      spans: What the newest token of each row reads of the cache by a kernel, for each of `config.reaches`; None: by
        einsums and `masks`.
      recurrent: Real tokens in the order of a recurrence; None where no layer has one.
      lent: Keys and values of earlier layers, by the number of the layer, for those that have none; None: no layer
        lends any.
    """

    masks: tuple[Bool[Array, "B Q S"], ...] | None
    rotations: tuple[Rotation, ...]
    positions: tuple[Int[Array, "B Q"], Int[Array, "B S"]] | None = None
    column: Column | Places | None = None
    fused: FusedRows | SplashRows | None = None
    turned: Turned | None = None
    spans: tuple[KeySpans, ...] | None = None
    recurrent: RecurrentRows | None = None
    lent: dict[int, LayerCache] | None = None

    @property
    def turns(self) -> tuple[Callable[[Array], Array], Callable[[Array], Array]]:
        """From the columns of the cache to those that layers read, and back."""
        if self.turned is None:
            return lambda x: x, lambda x: x
        return self.turned.turn, self.turned.turn_back

    def cached(self, new: LayerCache) -> LayerCache:
        """New keys and values in the columns of the cache."""
        _, turn_back = self.turns
        return jax.tree.map(lambda x: turn_back(x.swapaxes(1, 2)).swapaxes(1, 2), new)


def full_context(
    config: TransformerConfig,
    attention_mask: Bool[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None = None,
) -> AttentionContext:
    """Context of whole rows, scored in one pass: causal, real keys only, and inside a segment."""
    columns = jnp.arange(attention_mask.shape[1])
    mask = (columns[None, :, None] >= columns[None, None, :]) & attention_mask[:, None, :]
    if segment_ids is not None:
        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]
    recurrent = recurrent_rows(attention_mask, segment_ids) if config.is_recurrent else None
    return _context(config, mask, positions, positions)._replace(recurrent=recurrent)


def fused_context(
    config: TransformerConfig,
    attention_mask: Bool[Array, "B L"],
    positions: Int[Array, "B L"],
    segment_ids: Int[Array, "B L"] | None,
    implementation: KernelImplementation,
) -> AttentionContext:
    """Context of whole rows that go through one kernel. There is no mask.

    All but "splash" need padding on the right, and know no segments.
    """
    if implementation == "splash":
        rows: FusedRows | SplashRows = splash_rows(attention_mask, positions, segment_ids)
    else:
        assert segment_ids is None
        rows = fused_rows(attention_mask, implementation)
    recurrent = (
        recurrent_rows(attention_mask, segment_ids, is_right_padded=implementation != "splash")
        if config.is_recurrent
        else None
    )
    return AttentionContext(None, rotations(config, positions), fused=rows, recurrent=recurrent)


def cached_context(
    config: TransformerConfig, new: NewTokens, *, by_kernel: bool, attention: KernelImplementation | None
) -> AttentionContext:
    """Context of new tokens, which read all cached before them.

    Args:
      config: The decoder.
      new: The tokens.
      by_kernel: One token of each row reads the cache by a kernel.
      attention: The kernel that whole rows go through; None: einsums. The first tokens of a cache are whole rows. All
        kernels but "splash" read them `turned`.
    """
    cache, real, positions, column, _ = new
    if attention is not None and new.are_whole_rows and begins_by_kernel(config, attention):
        turns = None if attention == "splash" else turned(real)
        if turns is not None:
            real, positions = turns.turn(real), turns.turn(positions)
        return fused_context(config, real, positions, None, attention)._replace(column=column, turned=turns)
    queries = (
        column.columns if isinstance(column, Places) else (column + jnp.arange(positions.shape[1]))[None]
    )
    columns = jnp.arange(cache.mask.shape[1])
    mask = (queries[:, :, None] >= columns[None, None, :]) & cache.mask[:, None, :]
    recurrent = recurrent_rows(real) if config.is_recurrent else None
    context = _context(config, mask, positions, cache.key_positions)
    spans = None
    if by_kernel and positions.shape[1] == 1:
        assert context.masks is not None
        newest = jnp.broadcast_to(queries, positions.shape)[:, 0]
        spans = tuple(key_spans(mask, newest) for mask in context.masks)
    return context._replace(column=column, recurrent=recurrent, spans=spans)


def begins_by_kernel(config: TransformerConfig, attention: KernelImplementation) -> bool:
    """True where prompts may go through the kernel of whole rows: no layer reads another's cache, or turned rows."""
    lends = any(layer.lends_keys for layer in config.layers)
    return not lends and (attention == "splash" or not config.is_recurrent)


def _context(
    config: TransformerConfig,
    mask: Bool[Array, "B Q S"],
    positions: Int[Array, "B Q"],
    key_positions: Int[Array, "B S"],
) -> AttentionContext:
    own, keys = positions[:, :, None], key_positions[:, None, :]

    def within(window: int | None, chunk: int | None) -> Bool[Array, "B Q S"]:
        found = mask
        # A window or a chunk as wide as the row hides nothing.
        if window is not None and window < mask.shape[-1]:
            found &= own - keys < window
        if chunk is not None and chunk < mask.shape[-1]:
            found &= own // chunk == keys // chunk
        return found

    masks = tuple(within(*reach) for reach in config.reaches)
    return AttentionContext(
        masks, rotations(config, positions), (positions, key_positions) if config.alibi else None
    )


def residual_init_range(config: TransformerConfig) -> float:
    """Standard deviation of fresh kernels that write to the residual stream."""
    return config.init_range / math.sqrt(2 * config.num_layers if config.scale_residual_init else 1)


class Attention(nn.Module):
    """Causal self-attention of one block.

    Attributes:
      config: The decoder.
      layer: What is particular to this layer.
      dtype: Of the computation; scores and softmax are float32 always.
    """

    config: TransformerConfig
    layer: LayerConfig
    dtype: Any

    def setup(self) -> None:
        """Names the projections."""
        config = self.config

        self.q = self._project(config.num_heads)
        self.o = Projection(
            (config.num_heads, config.head_dim),
            (config.width,),
            config.attention_out_bias,
            residual_init_range(config),
            self.dtype,
        )
        self.normalises = config.qk_norm is not None and (config.qk_norm != "unit" or self.rotates)
        if self.normalises:
            self.q_norm = self._head_norm(config.num_heads)
        if self.layer.keys_of is None:
            self._name_keys_and_values()
        if config.attention_gate:
            self.gate = self._project(config.num_heads)
        if config.attention_sinks:
            init = nn.initializers.normal(config.init_range)
            self.sinks = self.param("sinks", init, (config.num_heads,), jnp.float32)
        self.dropout = nn.Dropout(config.attention_dropout)

    def _name_keys_and_values(self) -> None:
        config = self.config
        self.k = self._project(config.num_kv_heads)
        if not self.layer.keys_as_values:
            self.v = self._project(config.num_kv_heads)
        if self.normalises:
            self.k_norm = self._head_norm(config.num_kv_heads)
        if config.value_norm:
            self.v_norm = Norm("rms_no_scale", config.norm_epsilon, (config.head_dim,), self.dtype)

    def _project(self, num_heads: int) -> Projection:
        config = self.config
        return Projection(
            (config.width,), (num_heads, config.head_dim), config.qkv_bias, config.init_range, self.dtype
        )

    def __call__(
        self, x: Float[Array, "B Q D"], context: AttentionContext, cache: LayerEntry | None
    ) -> tuple[Float[Array, "B Q D"], LayerEntry | None]:
        """Output of attention, to be added to the residual stream, and the cache with the new keys and values.

        Without a cache a layer that lends its keys and values returns these in its place.
        """
        config, layer = self.config, self.layer
        q = self._placed(self.q(x), self.q_norm if self.normalises else None, context, grows=True)
        q = constrain(q, "batch", None, "heads", None)
        if layer.keys_of is None:
            assert cache is None or isinstance(cache, LayerCache)
            out, cache = self._attend(q, self._keys_and_values(x, context), cache, context)
        else:
            assert context.lent is not None
            out, _ = self._attend(q, None, context.lent[layer.keys_of], context)
        if config.attention_gate:
            out = out * jax.nn.sigmoid(self.gate(x))
        return self.o(constrain(out, "batch", None, "heads", None)), cache

    def _keys_and_values(self, x: Float[Array, "B Q D"], context: AttentionContext) -> LayerCache:
        k = self.k(x)
        v = k if self.layer.keys_as_values else self.v(x)
        if self.config.value_norm:
            v = self.v_norm(v)
        k = self._placed(k, self.k_norm if self.normalises else None, context, grows=False)
        num_heads = self.config.num_heads
        return LayerCache((spread_kv_heads(num_heads, k),), (spread_kv_heads(num_heads, v),))

    def _placed(
        self, x: Float[Array, "B Q N H"], norm: Norm | None, context: AttentionContext, *, grows: bool
    ) -> Float[Array, "B Q N H"]:
        """Queries or keys, normalised and rotated; queries may grow with their position."""
        config, rope = self.config, self.layer.rope
        if norm is not None and not config.qk_norm_last:
            x = norm(x)
        if rope is not None:
            rotation = context.rotations[config.ropes.index(rope)]
            if rope.rotates:
                x = rotate(x, rotation, interleaved=rope.interleaved)
            if grows and rotation.growth is not None:
                x = x * rotation.growth[:, :, None, None].astype(x.dtype)
        return norm(x) if norm is not None and config.qk_norm_last else x

    @property
    def rotates(self) -> bool:
        """True where queries and keys are rotated."""
        return self.layer.rope is not None and self.layer.rope.rotates

    def _head_norm(self, num_heads: int) -> Norm:
        """The norm of as many queries or keys of a token."""
        config = self.config
        each, together = (config.head_dim,), (num_heads, config.head_dim)
        if config.qk_norm == "own_head":
            return Norm("layer_no_bias", config.norm_epsilon, together, self.dtype, num_axes=1)
        if config.qk_norm == "unit":
            return Norm("rms_no_scale", config.norm_epsilon, each, self.dtype)
        shape = each if config.qk_norm == "head" else together
        return Norm(config.norm, config.norm_epsilon, shape, self.dtype)

    def _attend(
        self,
        q: Float[Array, "B Q N H"],
        new: LayerCache | None,
        cache: LayerCache | None,
        context: AttentionContext,
    ) -> tuple[Float[Array, "B Q N H"], LayerCache | None]:
        """What the queries read of new keys and values and of the cache, and the cache with the new ones in it.

        Without new ones the cache is lent, and has its layer's own.
        """
        if context.spans is not None:
            assert cache is not None
            spans = context.spans[self.config.reaches.index(self.layer.reach)]
            return attend_spans(q, new, cache, spans, scale=self.layer.attention_scale)
        if new is None:
            assert cache is not None
            return self._read(q, cache, context), cache
        if cache is None:
            return self._read(q, new, context), new if self.layer.lends_keys else None
        assert context.column is not None
        cache = cache.append(context.cached(new), context.column)
        return self._read(q, cache if context.fused is None else new, context), cache

    def _read(
        self, q: Float[Array, "B Q N H"], read: LayerCache, context: AttentionContext
    ) -> Float[Array, "B Q N H"]:
        config, layer = self.config, self.layer
        if context.fused is not None:
            (k,), (v,) = read
            scale, window = layer.attention_scale, layer.window
            if isinstance(context.fused, SplashRows):
                softcap = config.attention_softcap
                return attend_splash(q, k, v, context.fused, scale=scale, window=window, softcap=softcap)
            return attend_fused(q, k, v, context.fused, scale=scale, window=window)
        reach = config.reaches.index(layer.reach)
        assert context.masks is not None
        mask = context.masks[reach]
        operands = Operands(q, *read, mask, positions=context.positions)
        whole = functools.partial(
            attend,
            scale=layer.attention_scale,
            softcap=config.attention_softcap,
            dropout=weight_dropout(self.dropout),
            sinks=self.sinks if config.attention_sinks else None,
        )
        return whole(operands) if context.column is None else attend_written(whole, operands, context.column)


class WeightDropout(NamedTuple):
    """Dropout of the attention weights.

    Attributes:
      rate: Of weights that become 0.
      key: Which ones.
    """

    rate: float
    key: PRNGKey


def weight_dropout(dropout: nn.Dropout) -> WeightDropout | None:
    """Dropout as the module would draw it; None where it drops nothing."""
    if not dropout.rate or not dropout.has_rng("dropout"):
        return None
    return WeightDropout(dropout.rate, dropout.make_rng("dropout"))


def attend(
    operands: Operands,
    *,
    scale: float,
    softcap: float | None = None,
    dropout: WeightDropout | None = None,
    sinks: Float[Array, "N"] | None = None,
) -> Float[Array, "B Q N H"]:
    """Softmax attention in float32, N query heads over K key/value heads, in blocks where there are many scores.

    Args:
      operands: Queries, keys and values, and which may read which.
      scale: Multiplies the scores.
      softcap: Scores s become softcap · tanh(s / softcap); None: not.
      dropout: Of the weights; None: none. In blocks it drops others than at once.
      sinks: Of each head the score of a key whose value is 0 (Xiao et al. 2023, arXiv:2309.17453); None: there is none.
    """
    rows, queries, heads, _ = operands.q.shape
    blocks = ScoreBlocks.fitting(
        num_rows=rows, num_queries=queries, num_heads=heads, num_keys=operands.num_keys
    )

    def whole(operands: Operands, key: PRNGKey | None) -> Float[Array, "B Q N H"]:
        dropped = None if dropout is None or key is None else WeightDropout(dropout.rate, key)
        return _attend_at_once(operands, scale, softcap, dropped, sinks)

    return blocks.attend(whole, operands, None if dropout is None else dropout.key)


def _attend_at_once(
    operands: Operands,
    scale: float,
    softcap: float | None,
    dropout: WeightDropout | None,
    sinks: Float[Array, "N"] | None,
) -> Float[Array, "B Q N H"]:
    q, keys, values, mask, bias, positions = operands
    rows, queries, heads, head_dim = q.shape
    kv_heads = keys[0].shape[1]
    # All queries that read one key/value head form one matrix: the cache is multiplied as it lies.
    folded = (q * scale).astype(q.dtype).swapaxes(1, 2).reshape(rows, kv_heads, -1, head_dim)
    scores = _score_all(folded, keys)
    scores = scores.reshape(rows, heads, queries, -1)
    if softcap is not None:
        scores = softcap * jnp.tanh(scores / softcap)
    if positions is not None:
        distance = positions[0][:, :, None] - positions[1][:, None, :]
        slopes = jnp.asarray(alibi_slopes(heads))
        scores = scores + -slopes[None, :, None, None] * distance[:, None].astype(jnp.float32)
    if bias is not None:
        scores = scores + jnp.broadcast_to(bias, scores.shape)
    # A finite floor, not −inf: a row without any key (padding) averages garbage instead of making NaN.
    scores = jnp.where(mask[:, None], scores, MASKED_SCORE)
    if sinks is None:
        weights = jax.nn.softmax(scores, axis=-1)
    else:
        own = sinks.astype(scores.dtype)[None, :, None, None]
        largest = jax.lax.stop_gradient(jnp.maximum(scores.max(axis=-1, keepdims=True), own))
        weights = jnp.exp(scores - largest)
        weights = weights / (weights.sum(axis=-1, keepdims=True) + jnp.exp(own - largest))
    if dropout is not None:
        drop = nn.Dropout(dropout.rate, deterministic=False, parent=None)
        weights = jnp.asarray(drop.apply({}, weights, rng=dropout.key))
    weights = weights.astype(values[0].dtype).reshape(rows, kv_heads, -1, scores.shape[-1])
    stops = list(itertools.accumulate(v.shape[2] for v in values))
    parts = jnp.split(weights, stops[:-1], axis=-1) if len(values) > 1 else [weights]
    out = functools.reduce(jnp.add, map(mix_values, parts, values))
    return out.astype(q.dtype).reshape(rows, heads, queries, -1).swapaxes(1, 2)


def _score_all(
    folded: Float[Array, "B K M H"], keys: tuple[Float[Array, "B K S H"], ...]
) -> Float[Array, "B K M S"]:
    if len(keys) == 1:
        return score_keys(folded, keys[0])
    # Without the barriers XLA would make one product of those that share the queries, and for that join all keys.
    return jnp.concatenate([score_keys(*jax.lax.optimization_barrier((folded, k))) for k in keys], axis=-1)

# SPDX-License-Identifier: Apache-2.0
"""Description of a decoder: small and frozen, the target of every family's own config."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields, replace
from types import MappingProxyType
from typing import Any, ClassVar, Literal, cast

import numpy as np

VOCAB_MULTIPLE = 64
"""The vocabulary is padded to this on every mesh, so that one parameter tree fits all of them."""
LATER = MappingProxyType({"is_later": True})
"""Metadata of a field that checkpoints of older versions do not know: at its default `repr` leaves it out."""


class Described:
    """Base class of descriptions whose `repr` is part of the fingerprint by which a resumed run knows its model.

    A version that adds a field leaves the fingerprints of older runs as they are.
    """

    def __repr__(self) -> str:
        values = vars(self)
        shown = [
            f"{known.name}={values[known.name]!r}"
            for known in fields(cast(Any, self))
            if known.repr and not (known.metadata == LATER and values[known.name] == known.default)
        ]
        return f"{type(self).__qualname__}({', '.join(shown)})"


@dataclass(frozen=True)
class LinearRopeScaling:
    """Positions are divided by `factor` (Chen et al. 2023, arXiv:2306.15595)."""

    factor: float
    attention_factor: ClassVar[float] = 1.0

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies, (H/2,)."""
        return frequencies / self.factor


@dataclass(frozen=True)
class Llama3RopeScaling:
    """Long wavelengths are stretched by `factor`, short ones kept, those between interpolated (Llama 3.1).

    Attributes:
      factor: Stretch of wavelengths above `original_max_positions / low_freq_factor`.
      low_freq_factor: Sets where the stretched wavelengths begin.
      high_freq_factor: Sets where the untouched wavelengths end; at least `low_freq_factor`. Where the two are equal
        none is interpolated (Llama 4).
      original_max_positions: Context of the pre-training, in tokens.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int
    attention_factor: ClassVar[float] = 1.0

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies, (H/2,)."""
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        between = self.high_freq_factor - self.low_freq_factor
        above = turns - self.low_freq_factor
        smooth = np.clip(above / between, 0.0, 1.0) if between else (above >= 0).astype(turns.dtype)
        return (1 - smooth) * frequencies / self.factor + smooth * frequencies


@dataclass(frozen=True)
class YarnRopeScaling:
    """Wavelengths between two bounds are interpolated, and attention is sharpened (Peng et al. 2023, arXiv:2309.00071).

    Attributes:
      factor: Stretch of the longest wavelengths.
      original_max_positions: Context of the pre-training, in tokens.
      beta_fast: Turns over that context above which a wavelength is kept.
      beta_slow: Turns below which it is stretched in full.
      attention_factor: Multiplies cosines and sines, and so every score by its square.
      truncate: Whether the bounds are rounded to whole dimensions, outwards.
    """

    factor: float
    original_max_positions: int
    beta_fast: float
    beta_slow: float
    attention_factor: float
    truncate: bool = True

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies."""
        # The frequencies fall geometrically: the dimension at which one makes so many turns follows from any two.
        turns = self.original_max_positions * frequencies / (2 * math.pi)
        step = math.log(turns[0] / turns[-1]) / (len(turns) - 1)
        low = math.log(turns[0] / self.beta_fast) / step
        high = math.log(turns[0] / self.beta_slow) / step
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * len(turns) - 1)
        ramp = np.clip((np.arange(len(turns)) - low) / max(high - low, 0.001), 0.0, 1.0)
        return frequencies / self.factor * ramp + frequencies * (1 - ramp)


@dataclass(frozen=True)
class LongRopeScaling:
    """Every wavelength has a factor of its own (LongRoPE, Ding et al. 2024, arXiv:2402.13753).

    Attributes:
      factors: One a pair of dimensions.
      attention_factor: Multiplies cosines and sines.
    """

    factors: tuple[float, ...]
    attention_factor: float

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies."""
        return frequencies / np.asarray(self.factors)


@dataclass(frozen=True)
class ProportionalRopeScaling:
    """The longest wavelengths of a whole head become infinite: their pairs stand still (Gemma 4).

    Attributes:
      pairs: So many pairs turn, those of the shortest wavelengths.
      factor: Divides their positions.
    """

    pairs: int
    factor: float = 1.0
    attention_factor: ClassVar[float] = 1.0

    def scale(self, frequencies: np.ndarray) -> np.ndarray:
        """Rescales the inverse frequencies."""
        return np.where(np.arange(len(frequencies)) < self.pairs, frequencies / self.factor, 0.0)


RopeScaling = (
    LinearRopeScaling | Llama3RopeScaling | YarnRopeScaling | LongRopeScaling | ProportionalRopeScaling
)


@dataclass(frozen=True, repr=False)
class QueryGrowth(Described):
    """Queries grow with the position: q · (1 + rate · log(1 + ⌊(position + first) / length⌋)) (Llama 4, Ministral 3).

    Attributes:
      rate: Of the growth.
      length: Positions of one step, in tokens; up to here nothing changes.
      first: Number of a row's first position.
    """

    rate: float
    length: int
    first: int = field(default=0, metadata=LATER)


@dataclass(frozen=True, repr=False)
class Rope(Described):
    """Rotary positions (Su et al. 2021, arXiv:2104.09864).

    Attributes:
      theta: Base of the wavelengths.
      scaling: How the context was stretched after pre-training; None where it was not.
      dim: Leading dimensions of a head that rotate; None: all of them. 0: none, and only the queries' growth remains.
      interleaved: Neighbouring dimensions form a pair (GPT-J) rather than the two halves.
      is_bounded: Rows longer than the context turn by other angles (dynamic scaling, LongRoPE), or by none (GPT-J's
        table): jrl has the angles of the context alone.
      query_growth: Queries are sharpened far out; None: not.
    """

    theta: float
    scaling: RopeScaling | None = None
    dim: int | None = None
    interleaved: bool = False
    # No part of the fingerprint by which a resumed run knows its model: up to the context nothing depends on it.
    is_bounded: bool = field(default=False, repr=False)
    query_growth: QueryGrowth | None = field(default=None, metadata=LATER)

    @property
    def rotates(self) -> bool:
        """False where the position changes the length of queries alone."""
        return self.dim != 0

    def frequencies(self, head_dim: int) -> np.ndarray:
        """Radians a position for each pair of rotating dimensions, float32."""
        dim = head_dim if self.dim is None else self.dim
        if dim == 0:
            return np.zeros(0, np.float32)
        frequencies = 1.0 / self.theta ** (np.arange(0, dim, 2, dtype=np.float64) / dim)
        if self.scaling is not None:
            frequencies = self.scaling.scale(frequencies)
        return frequencies.astype(np.float32)


@dataclass(frozen=True)
class LatentAttention:
    """Attention whose keys and values are expanded from one short vector a token (DeepSeek-V2, arXiv:2405.04434).

    The cache holds that vector and one rotary key, which all heads share.

    Attributes:
      query_rank: Width that queries are expanded from; None: they are projected at once.
      rank: R, width that keys and values are expanded from.
      plain_dim: Dimensions of a query, and of a key, that do not rotate.
      rope_dim: Those that do, where the layer has rotary positions; their key is the one that all heads share.
      value_dim: Width of a head's values.
      norm_epsilon: Of the norms over both short vectors.
    """

    query_rank: int | None
    rank: int
    plain_dim: int
    rope_dim: int
    value_dim: int
    norm_epsilon: float = 1e-6


@dataclass(frozen=True, repr=False)
class GatedDelta(Described):
    """A linear recurrence with the gated delta rule (Yang et al. 2024, arXiv:2412.06464) in place of attention.

    Attributes:
      key_heads: Heads of queries and keys; divides `value_heads`, and each serves several of these in a row.
      value_heads: Heads of values, and states.
      key_dim: K, width of a query or key.
      value_dim: V, width of a value; a state is (K, V).
      taps: Tokens that the convolution before the recurrence reads, the newest included.
      rank: Width that decays and gates are expanded from. Every channel of a key then decays by itself, and gates are
        sigmoids (Kimi Delta Attention, Kimi team 2025, arXiv:2510.26692). None: a head decays as a whole, and gates are
        SiLU of one projection.
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    rank: int | None = field(default=None, metadata=LATER)


@dataclass(frozen=True)
class ShortConvolution:
    """A gated convolution over few tokens (LFM2) in place of attention.

    Attributes:
      taps: Tokens that it reads, the newest included.
    """

    taps: int


@dataclass(frozen=True)
class Mamba2:
    """The selective state space of Mamba-2 (Dao and Gu 2024, arXiv:2405.21060) in place of attention.

    Attributes:
      heads: Of values, and states.
      head_dim: V, width of a value.
      groups: Of queries and keys (the paper's C and B); divides `heads`, and each serves several of these in a row.
      state_dim: K, width of a query or key; a state is (K, V).
      taps: Tokens that the convolution before the recurrence reads, the newest included.
      taps_bias: That convolution has biases.
      step_limits: Least and largest step Δ.
      norm: An RMSNorm over each group's heads: of what is read, before the gate multiplies it, or after; None: none.
      gate_scale: Multiplies the gate's projection; the next four multiply theirs.
      value_scale: Of the values.
      key_scale: Of the keys.
      query_scale: Of the queries.
      step_scale: Of the steps.
      out_scale: Of what the layer adds.
    """

    heads: int
    head_dim: int
    groups: int
    state_dim: int
    taps: int
    taps_bias: bool = True
    step_limits: tuple[float, float] = (0.0, math.inf)
    norm: Literal["before_gate", "after_gate"] | None = "after_gate"
    gate_scale: float = 1.0
    value_scale: float = 1.0
    key_scale: float = 1.0
    query_scale: float = 1.0
    step_scale: float = 1.0
    out_scale: float = 1.0


@dataclass(frozen=True)
class Mamba1:
    """The selective scan of Mamba (Gu and Dao 2023, arXiv:2312.00752) in place of attention, with Jamba's three norms.

    Attributes:
      width: C, inner width: channels, each with a state of its own.
      state_dim: K, width of a query or key (the paper's C and B); all channels share them.
      step_rank: Width that the steps Δ are expanded from.
      taps: Tokens that the convolution before the recurrence reads, the newest included.
      taps_bias: That convolution has biases.
    """

    width: int
    state_dim: int
    step_rank: int
    taps: int
    taps_bias: bool = True


@dataclass(frozen=True)
class AttentionBesideMamba2:
    """Attention and a state space side by side: both read the layer's input, and what they add is summed (Falcon-H1).

    Attributes:
      mamba: The state space.
      attention_in_scale: Multiplies what attention reads.
      attention_out_scale: Multiplies what it adds.
    """

    mamba: Mamba2
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0


Mixer = LatentAttention | GatedDelta | ShortConvolution | Mamba1 | Mamba2 | AttentionBesideMamba2
"""What mixes the tokens of a row in the place of attention; see `jrl.models.mixers`."""


@dataclass(frozen=True)
class ClampedGlu:
    """Clamped gate of an expert: g · sigmoid(sharpness · g) · (u + 1), where g ≤ limit and |u| ≤ limit (gpt-oss).

    Attributes:
      sharpness: Of the sigmoid.
      limit: Of the outputs of gate and up.
    """

    sharpness: float
    limit: float


@dataclass(frozen=True, repr=False)
class Experts(Described):
    """A mixture of experts in place of the MLP: a router picks a few MLPs for every token.

    Attributes:
      count: E, number of experts.
      per_token: How many of them a token visits.
      width: Inner width of one expert.
      renormalize: The weights of the chosen experts are divided by their sum.
      scoring: Of the router's numbers: a softmax over all experts, or a sigmoid of each. With sigmoids, every expert
        has a bias that counts for the choice and not for the weight (DeepSeek-V3, arXiv:2412.19437).
      groups: Groups of neighbouring experts; a token visits only those with the best two experts together.
      groups_per_token: How many groups it may visit.
      scale: Multiplies the weights.
      shared_width: Inner width of an MLP that every token visits too; None: there is none.
      shared_gate: What that MLP adds is multiplied by the sigmoid of a linear map to one number.
      use_bias: Router and experts have biases.
      clamped_glu: Takes the place of act(gate(x)) · up(x); None: it does not.
      scale_inputs: A weight multiplies what an expert reads, not its answer. Sigmoids then have no bias (Llama 4).
      beside_mlp: The layer has its MLP, too. Each of the two reads the stream through a norm of its own and has one for
        what it adds (Gemma 4).
      scaled_router: The router reads the stream, normalised with a scale of its own and divided by √D, and an expert's
        weight is multiplied by a learned number (Gemma 4).
      gated: An expert is down(act(gate(x)) · up(x)) rather than down(act(up(x))) (Nemotron 3).
      latent_width: Experts read and answer vectors of this width: projections lead in and out; None: they read and
        answer those of the stream.
    """

    count: int
    per_token: int
    width: int
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"] = field(default="softmax", metadata=LATER)
    groups: int = field(default=1, metadata=LATER)
    groups_per_token: int = field(default=1, metadata=LATER)
    scale: float = field(default=1.0, metadata=LATER)
    shared_width: int | None = field(default=None, metadata=LATER)
    shared_gate: bool = field(default=False, metadata=LATER)
    use_bias: bool = field(default=False, metadata=LATER)
    clamped_glu: ClampedGlu | None = field(default=None, metadata=LATER)
    scale_inputs: bool = field(default=False, metadata=LATER)
    beside_mlp: bool = field(default=False, metadata=LATER)
    scaled_router: bool = field(default=False, metadata=LATER)
    gated: bool = field(default=True, metadata=LATER)
    latent_width: int | None = field(default=None, metadata=LATER)


@dataclass(frozen=True, repr=False)
class LayerConfig(Described):
    """Options that may differ from one layer to the next.

    Attributes:
      attention_scale: Multiplies the scores; usually head_dim ** -0.5.
      window: A query reads this many of the newest tokens, itself included; None: all.
      rope: Rotary positions; None where the layer has none.
      experts: Mixture of experts; None: one MLP.
      mixer: What mixes the tokens of a row; None: attention. Scale, window and rope are attention's alone, latent
        attention included.
      chunk: A row is cut into chunks of so many tokens, and a query reads its own chunk; None: it is not.
      only: The one sublayer that the block has: its mixer, or what feeds forward; None: it has both.
      head_dim: H of this layer's attention; None: the decoder's. Rotary positions then say how many dimensions rotate.
      num_kv_heads: K of this layer's attention; None: the decoder's.
      mlp_width: Inner width of this layer's MLP; None: the decoder's.
      keys_as_values: Values are what the keys are made from, before these are normalised and rotated.
      keys_of: Number of an earlier layer whose keys and values are read: this one has none. None: its own.
      lends_keys: Later layers read this one's keys and values.
    """

    attention_scale: float
    window: int | None = None
    rope: Rope | None = None
    experts: Experts | None = None
    mixer: Mixer | None = field(default=None, metadata=LATER)
    chunk: int | None = field(default=None, metadata=LATER)
    only: Literal["mixer", "feed_forward"] | None = field(default=None, metadata=LATER)
    head_dim: int | None = field(default=None, metadata=LATER)
    num_kv_heads: int | None = field(default=None, metadata=LATER)
    mlp_width: int | None = field(default=None, metadata=LATER)
    keys_as_values: bool = field(default=False, metadata=LATER)
    keys_of: int | None = field(default=None, metadata=LATER)
    lends_keys: bool = field(default=False, metadata=LATER)

    @property
    def reach(self) -> tuple[int | None, int | None]:
        """Window and chunk: which tokens of its own past a query reads."""
        return self.window, self.chunk

    @property
    def is_recurrent(self) -> bool:
        """True where a state sums up the tokens of a row, of any number, and cannot forget one."""
        return isinstance(self.mixer, GatedDelta | ShortConvolution | Mamba1 | Mamba2 | AttentionBesideMamba2)

    @property
    def has_keys_alone(self) -> bool:
        """True where the cache holds the layer's own keys and values, of the decoder's sizes, and nothing else."""
        attends = self.mixer is None and self.only != "feed_forward"
        return attends and (self.head_dim, self.num_kv_heads, self.keys_of) == (None, None, None)


@dataclass(frozen=True, repr=False)
class TransformerConfig(Described):
    """Description of a decoder. Hashable, so it can be a static argument.

    Attributes:
      vocab_size: Real entries of the vocabulary, before padding.
      width: D, size of the residual stream.
      layers: One entry a block.
      num_heads: N, query heads.
      num_kv_heads: K, key/value heads; divides `num_heads`.
      head_dim: H.
      mlp_width: Inner width of the MLP.
      max_positions: Longest context, in tokens.
      activation: Of the MLP.
      gated_mlp: The MLP is down(act(gate(x)) · up(x)) rather than down(act(up(x))).
      norm: Kind of the norms; see `jrl.models.layers.Norm`.
      norm_epsilon: Added to the variance.
      block: How the parts of a block are put together; see `jrl.models.blocks`.
      qkv_bias: q, k and v have a bias.
      attention_out_bias: o has a bias.
      mlp_bias: The MLP has biases.
      tie_embeddings: The head is the transposed embedding.
      learned_positions: A table of positions is added to the embedding.
      position_offset: Rows of that table before position 0 (OPT).
      alibi: Scores fall linearly with the distance, by head (Press et al. 2021, arXiv:2108.12409).
      attention_gate: What a head reads is multiplied by a sigmoid of the query's own token (Qwen3-Next).
      qk_norm: Queries and keys are normalised: each head for itself ("head"), with scales of its own and no bias
        ("own_head"), without a scale and only in layers that rotate ("unit"), or over all heads ("all_heads"); None:
        not.
      qk_norm_last: They are normalised after they are rotated, not before.
      value_norm: The values of each head are normalised, without a scale.
      attention_sinks: Each head has one more score, learned, whose value is 0: attention may read nothing.
      attention_softcap: Scores s become cap · tanh(s / cap); None: not.
      logit_softcap: The same for logits.
      logit_scale: Multiplies the logits; None: not.
      residual_scale: Multiplies what each sublayer adds to the stream; None: not.
      mlp_gate_scale: Multiplies the input of the MLP's activation, where it is gated; None: not.
      mlp_out_scale: Multiplies what the MLP adds; None: not.
      embedding_scale: Multiplies the embedding; None: not.
      embedding_norm: A norm follows the embedding.
      layer_input_width: P, width of what every layer reads of a token beside the stream: a row of a table, and a
        projection of the embedding (Gemma 3n). None: nothing.
      layer_input_rows: Rows of that table.
      stream_scale: The stream after a block is multiplied by a number of the checkpoint that never trains (Gemma 4).
      embedding_width: Width of embedding and head where it is not D: projections lead in and out.
      final_norm: A norm follows the last block.
      head_bias: The untied head has a bias.
      embedding_dropout: Rate after the embedding. All three act only where a dropout key is given.
      attention_dropout: Rate on the attention weights.
      residual_dropout: Rate on what each sublayer adds.
      init_range: Standard deviation of fresh weights.
      scale_residual_init: Fresh o and down kernels get `init_range / sqrt(2 · num_layers)` (GPT-2).
    """

    vocab_size: int
    width: int
    layers: tuple[LayerConfig, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_width: int
    max_positions: int
    activation: Literal["gelu", "gelu_tanh", "relu", "relu2", "silu"]
    gated_mlp: bool
    norm: Literal["layer", "layer_no_bias", "layer_plus_one", "rms", "rms_plus_one"]
    norm_epsilon: float
    qkv_bias: bool
    attention_out_bias: bool
    mlp_bias: bool
    tie_embeddings: bool
    block: Literal["pre_norm", "post_norm", "sandwich", "output_norm", "parallel", "parallel_two_norms"] = (
        "pre_norm"
    )
    learned_positions: bool = False
    position_offset: int = 0
    alibi: bool = False
    attention_gate: bool = field(default=False, metadata=LATER)
    qk_norm: Literal["head", "own_head", "unit", "all_heads"] | None = None
    qk_norm_last: bool = field(default=False, metadata=LATER)
    value_norm: bool = field(default=False, metadata=LATER)
    attention_sinks: bool = field(default=False, metadata=LATER)
    attention_softcap: float | None = None
    logit_softcap: float | None = None
    logit_scale: float | None = field(default=None, metadata=LATER)
    residual_scale: float | None = field(default=None, metadata=LATER)
    mlp_gate_scale: float | None = field(default=None, metadata=LATER)
    mlp_out_scale: float | None = field(default=None, metadata=LATER)
    embedding_scale: float | None = None
    embedding_norm: bool = False
    layer_input_width: int | None = field(default=None, metadata=LATER)
    layer_input_rows: int | None = field(default=None, metadata=LATER)
    stream_scale: bool = field(default=False, metadata=LATER)
    embedding_width: int | None = None
    final_norm: bool = True
    head_bias: bool = False
    embedding_dropout: float = 0.0
    attention_dropout: float = 0.0
    residual_dropout: float = 0.0
    init_range: float = 0.02
    scale_residual_init: bool = False

    def __post_init__(self) -> None:
        """Raises ValueError on sizes that do not fit together."""
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` must divide num_heads = {self.num_heads} (grouped-query attention), "
                f"got {self.num_kv_heads}."
            )
        if self.block != "pre_norm" and any(layer.only is not None for layer in self.layers):
            raise ValueError(
                f"`block` must be 'pre_norm' where a layer has one sublayer alone, got {self.block!r}."
            )
        for rope in self.ropes:
            dim = self.head_dim if rope.dim is None else rope.dim
            if rope.rotates and (dim < 2 or dim % 2):
                raise ValueError(
                    f"`head_dim`, or the part of it that rotates, must be even and at least 2, got {dim}: rotary "
                    "positions rotate pairs of dimensions."
                )
        if (self.layer_input_width is None) != (self.layer_input_rows is None):
            raise ValueError(
                "`layer_input_width` and `layer_input_rows` must be given together, or neither: they are the sizes of "
                f"one table; got {self.layer_input_width} and {self.layer_input_rows}."
            )
        reads_more = self.layer_input_width is not None or self.stream_scale
        if reads_more and self.block not in ("pre_norm", "sandwich", "output_norm"):
            raise ValueError(
                "`layer_input_width` and `stream_scale` must be unset where sublayers stand side by side, or norms on "
                f"the stream; got block = {self.block!r}."
            )
        for index, layer in enumerate(self.layers):
            self._check_layer(index, layer)

    def _check_layer(self, index: int, layer: LayerConfig) -> None:
        """Raises ValueError on sizes of a layer's own, or lent keys, that do not fit the rest."""
        num_kv_heads = layer.num_kv_heads or self.num_kv_heads
        if self.num_heads % num_kv_heads:
            raise ValueError(
                f"`num_kv_heads` of layer {index} must divide num_heads = {self.num_heads}, got {num_kv_heads}."
            )
        if layer.head_dim is not None and layer.rope is not None and layer.rope.dim is None:
            raise ValueError(
                f"`rope.dim` of layer {index} must be given: its heads are of a width of their own, {layer.head_dim}, "
                "and rotary positions are told apart by themselves alone."
            )
        own = layer.head_dim, layer.num_kv_heads, layer.keys_of, layer.keys_as_values, layer.lends_keys
        if layer.mixer is not None and own != (None, None, None, False, False):
            raise ValueError(
                f"`head_dim`, `num_kv_heads`, `keys_of`, `keys_as_values` and `lends_keys` of layer {index} must be "
                f"unset: they are attention's alone, and its mixer is {type(layer.mixer).__name__}."
            )
        if layer.keys_of is None:
            return
        source = self.layers[layer.keys_of] if 0 <= layer.keys_of < index else None
        sizes = layer.head_dim, layer.num_kv_heads
        if source is None or not source.lends_keys or sizes != (source.head_dim, source.num_kv_heads):
            raise ValueError(
                f"`keys_of` of layer {index} must be the number of an earlier layer that lends keys and values of the "
                f"same sizes, got {layer.keys_of}."
            )

    def for_layer(self, layer: LayerConfig) -> TransformerConfig:
        """The decoder with the sizes of one of its layers in the place of its own."""
        if (layer.head_dim, layer.num_kv_heads, layer.mlp_width) == (None, None, None):
            return self
        return replace(
            self,
            head_dim=layer.head_dim or self.head_dim,
            num_kv_heads=layer.num_kv_heads or self.num_kv_heads,
            mlp_width=layer.mlp_width or self.mlp_width,
        )

    @property
    def num_layers(self) -> int:
        """Number of blocks."""
        return len(self.layers)

    @property
    def reaches(self) -> tuple[tuple[int | None, int | None], ...]:
        """The different reaches of the layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.reach for layer in self.layers))

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The different rotary positions of the layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.rope for layer in self.layers if layer.rope is not None))

    @property
    def head_dims(self) -> tuple[int, ...]:
        """The different widths of heads of the layers, in order of appearance."""
        return tuple(dict.fromkeys(layer.head_dim or self.head_dim for layer in self.layers))

    @property
    def mlp_widths(self) -> tuple[int, ...]:
        """The different inner widths of the layers' MLPs, in order of appearance."""
        return tuple(dict.fromkeys(layer.mlp_width or self.mlp_width for layer in self.layers))

    @property
    def is_recurrent(self) -> bool:
        """True where some layer is; see `LayerConfig.is_recurrent`."""
        return any(layer.is_recurrent for layer in self.layers)

    @property
    def feature_width(self) -> int:
        """Width of what the heads read."""
        return self.embedding_width or self.width

    @property
    def rounds_embeddings(self) -> bool:
        """True where an embedding is rounded to the compute dtype before anything is done with it."""
        is_first_done = self.embedding_scale is not None or self.embedding_width is not None
        return is_first_done or not (self.learned_positions or self.embedding_norm)

    @property
    def padded_vocab_size(self) -> int:
        """`vocab_size` rounded up to a multiple of 64."""
        return -(-self.vocab_size // VOCAB_MULTIPLE) * VOCAB_MULTIPLE

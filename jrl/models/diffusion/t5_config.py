# SPDX-License-Identifier: Apache-2.0
"""Description of the encoder of a T5, read from the `config.json` of its folder."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

from jrl.models.diffusion.config_values import COUNT, POSITIVE, UNREAD, Kind, one_of, read_values, require
from jrl.models.seq2seq_config import Seq2SeqConfig

MODEL_TYPE, CLASS_NAME = "t5", "T5EncoderModel"
_WHAT = "T5 encoder"


class _FeedForward(NamedTuple):
    """Kind of feed-forward layer.

    Attributes:
      activation: jrl's name of its activation.
      stored: transformers'.
      is_gated: Whether a second linear map multiplies it.
    """

    activation: Literal["relu", "gelu_tanh"]
    stored: str
    is_gated: bool


_FEED_FORWARD: Mapping[str, _FeedForward] = {
    "relu": _FeedForward("relu", "relu", False),
    "gated-gelu": _FeedForward("gelu_tanh", "gelu_new", True),
}
_KINDS: Mapping[str, Kind] = {
    "vocab_size": COUNT,
    "d_model": COUNT,
    "d_kv": COUNT,
    "d_ff": COUNT,
    "num_layers": COUNT,
    "num_heads": COUNT,
    "relative_attention_num_buckets": COUNT,
    "relative_attention_max_distance": COUNT,
    "layer_norm_epsilon": POSITIVE,
    "feed_forward_proj": one_of(*_FEED_FORWARD),
}
_FIXED: Mapping[str, tuple[Any, ...]] = {"model_type": (MODEL_TYPE,), "is_decoder": (False,)}
# Of training, of the decoder and of its head.
_SILENT = UNREAD | {
    "classifier_dropout",
    "decoder_start_token_id",
    "dropout_rate",
    "eos_token_id",
    "initializer_factor",
    "num_decoder_layers",
    "output_past",
    "scale_decoder_outputs",
}
# What transformers derives from `feed_forward_proj`, and writes beside it.
_DERIVED = ("dense_act_fn", "is_gated_act")


@dataclass(frozen=True)
class T5EncoderConfig:
    """The encoder of a T5. Names and defaults are transformers'. Hashable.

    Attributes:
      vocab_size: Real entries of the vocabulary.
      d_model: D.
      d_kv: Width of a head.
      d_ff: Inner width of the feed-forward layers.
      num_layers: Of its blocks.
      num_heads: N; N times `d_kv` need not be D.
      relative_attention_num_buckets: Rows of the table of relative positions.
      relative_attention_max_distance: Distances from here on share the last bucket.
      layer_norm_epsilon: Of all norms.
      feed_forward_proj: "relu", or "gated-gelu".
    """

    vocab_size: int = 32128
    d_model: int = 512
    d_kv: int = 64
    d_ff: int = 2048
    num_layers: int = 6
    num_heads: int = 8
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    layer_norm_epsilon: float = 1e-6
    feed_forward_proj: str = "relu"

    def as_seq2seq(self) -> Seq2SeqConfig:
        """The encoder-decoder without decoder whose encoder this is."""
        kind = _FEED_FORWARD[self.feed_forward_proj]
        return Seq2SeqConfig(
            vocab_size=self.vocab_size,
            width=self.d_model,
            num_encoder_layers=self.num_layers,
            num_layers=0,
            num_heads=self.num_heads,
            head_dim=self.d_kv,
            mlp_width=self.d_ff,
            activation=kind.activation,
            gated_mlp=kind.is_gated,
            norm_epsilon=self.layer_norm_epsilon,
            tie_embeddings=True,
            logit_scale=None,
            num_buckets=self.relative_attention_num_buckets,
            max_distance=self.relative_attention_max_distance,
            decoder_start_token_id=0,
        )


def read_t5_config(values: Mapping[str, Any]) -> T5EncoderConfig:
    """The encoder that a `config.json` describes; keys that are missing have transformers' defaults.

    Raises:
      ValueError: If a key is unknown, or asks for what is not implemented; the message names it.
    """
    config = T5EncoderConfig(**read_values(_WHAT, values, _KINDS, _FIXED, {*_SILENT, *_DERIVED}))
    kind = _FEED_FORWARD[config.feed_forward_proj]
    for key, derived in zip(_DERIVED, (kind.stored, kind.is_gated), strict=True):
        got = values.get(key, derived)
        require(_WHAT, key, got == derived, f"{derived!r} with `feed_forward_proj` as it is", got)
    return config


def stored_t5_config(config: T5EncoderConfig) -> dict[str, Any]:
    """The `config.json` from which transformers builds the same encoder."""
    return {
        "architectures": [CLASS_NAME],
        "model_type": MODEL_TYPE,
        "dtype": "float32",
        "is_encoder_decoder": False,
        **asdict(config),
    }

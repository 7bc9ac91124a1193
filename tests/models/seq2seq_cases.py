# SPDX-License-Identifier: Apache-2.0
"""Tiny configs of every encoder-decoder family, and of each variant that changes what is computed."""

from transformers import MT5Config, UMT5Config

from tests.tiny import tiny_hf_config

RELU = dict(feed_forward_proj="relu", tie_word_embeddings=True)
SIZES = dict(vocab_size=97, d_model=32, d_kv=8, d_ff=64, num_layers=3, num_decoder_layers=2, num_heads=4)
# Few buckets: rows of tests reach the last one.
BUCKETS = dict(relative_attention_num_buckets=8, relative_attention_max_distance=20)
PLAIN = dict(dropout_rate=0.0, decoder_start_token_id=0)
CASES = {
    "t5": tiny_hf_config("t5", 3, num_decoder_layers=2, **RELU),
    "t5-1.1": tiny_hf_config("t5", 3, num_decoder_layers=2),
    "t5-wide-heads": tiny_hf_config("t5", d_kv=12, feed_forward_proj="gated-silu", initializer_factor=0.5),
    "mt5": MT5Config(**SIZES, **BUCKETS, **PLAIN),
    "umt5": UMT5Config(**SIZES, **BUCKETS, **PLAIN),
    "umt5-own-head": UMT5Config(**SIZES, **BUCKETS, **PLAIN, tie_word_embeddings=False),
}

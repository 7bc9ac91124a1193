# SPDX-License-Identifier: Apache-2.0
"""Host-side data: tokenizers, prompts, samples to imitate, and batches of them."""

from jrl.data.batching import bucket_length, pad_left, pad_right
from jrl.data.sources.named_sources import load_prompts, load_rewarded_samples, load_samples
from jrl.data.sources.records import RecordStream, read_records
from jrl.data.tokenizer import encode_prompts, load_tokenizer

__all__ = [
    "RecordStream",
    "bucket_length",
    "encode_prompts",
    "load_prompts",
    "load_rewarded_samples",
    "load_samples",
    "load_tokenizer",
    "pad_left",
    "pad_right",
    "read_records",
]

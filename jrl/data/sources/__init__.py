# SPDX-License-Identifier: Apache-2.0
"""Records from lists, files, data sets and streams."""

from jrl.data.sources.fingerprint import fingerprint
from jrl.data.sources.named_sources import load_prompts
from jrl.data.sources.records import RecordStream, dataset_loader, read_records
from jrl.data.sources.streams import StreamSet

__all__ = [
    "RecordStream",
    "StreamSet",
    "dataset_loader",
    "fingerprint",
    "load_prompts",
    "read_records",
]

# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of data: a resumed run must go on with what it began with."""

from __future__ import annotations

import hashlib
import json
from typing import Any


def fingerprint(*values: Any) -> str:
    """SHA-256 of plain values (texts, numbers, lists, dicts); of anything else, its `repr` is taken.

    Example:
      >>> fingerprint([1, 2], {"a": "b"}) == fingerprint([1, 2], {"a": "b"}) != fingerprint([2, 1], {"a": "b"})
      True
    """
    text = json.dumps(values, sort_keys=True, ensure_ascii=False, default=repr)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

# SPDX-License-Identifier: Apache-2.0
"""Which interpreter has the newest TRL: this one, where the `parity` extra is installed, or the one that is named."""

from __future__ import annotations

import importlib.util
import os
import sys

PYTHON: str | None = os.environ.get(
    "JRL_TRL_NEWEST_PYTHON", sys.executable if importlib.util.find_spec("trl") else None
)
WHY_NOT = "trl is not installed (pip install -e '.[parity]'), and JRL_TRL_NEWEST_PYTHON names no interpreter with it"

# SPDX-License-Identifier: Apache-2.0
"""Suggestions for unknown names: the closest known one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str], *, cutoff: float = 0.6) -> str:
    """A sentence that names the closest known name, a blank before it; empty where none is close.

    Args:
      name: What was written; capitals do not matter.
      known: Names that there are.
      cutoff: How alike two names must be, in [0, 1].

    Example:
      >>> did_you_mean("PpoConfg", ["ILQLConfig", "PPOConfig"])
      ' Did you mean `PPOConfig`?'
      >>> did_you_mean("colour", ["seed"])
      ''
    """
    spelled = {str(one).lower(): one for one in known}
    near = difflib.get_close_matches(str(name).lower(), spelled, n=1, cutoff=cutoff)
    return f" Did you mean `{spelled[near[0]]}`?" if near else ""

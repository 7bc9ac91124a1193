# SPDX-License-Identifier: Apache-2.0
"""transformers' `generate`: what it refuses before it looks at a model."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jrl.interop import generate_ids


@pytest.mark.parametrize("name", ["max_turns", "max_turn_tokens"])
def test_limits_of_turns_are_refused(name: str) -> None:
    untouched: Any = None
    with pytest.raises(ValueError, match=f"`{name}` must be left out, got 2: .*one completion a prompt"):
        generate_ids(untouched, [[5, 6]], None, {"max_new_tokens": 4, name: 2}, jax.random.key(0))

# SPDX-License-Identifier: Apache-2.0
"""Strict dtypes: nothing in the mathematics may widen or narrow a number by accident."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest


@pytest.fixture(autouse=True)
def strict_dtypes() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"):
        yield

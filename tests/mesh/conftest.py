# SPDX-License-Identifier: Apache-2.0
"""Eight virtual devices, and every program compiled afresh: a cached one repeats none of its warnings."""

from __future__ import annotations

from collections.abc import Iterator

import jax
import pytest

from jrl.mesh import make_mesh

MESHES = ((8, 1, 1), (2, 4, 1), (1, 2, 4))


@pytest.fixture(autouse=True, scope="module")
def compiled_afresh() -> Iterator[None]:
    """Turns the compilation cache off before the fixtures of a module run jrl, and says how to get eight devices."""
    if jax.device_count() != 8:
        pytest.fail("mesh tests need XLA_FLAGS=--xla_force_host_platform_device_count=8 before pytest starts")
    jax.config.update("jax_enable_compilation_cache", False)
    yield
    jax.config.update("jax_enable_compilation_cache", True)


@pytest.fixture(params=MESHES, ids=lambda sizes: "x".join(map(str, sizes)))
def mesh(request: pytest.FixtureRequest) -> jax.sharding.Mesh:
    """(data, fsdp, tensor) over all eight devices."""
    return make_mesh(*request.param)

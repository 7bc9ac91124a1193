# SPDX-License-Identifier: Apache-2.0
"""Layers that share a body compute on eight devices what layers one by one compute on one device."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from jrl.mesh import make_mesh, tree_shardings
from jrl.models import layer_loop
from tests.models.test_layer_loop import assert_close, objective, parts

pytestmark = pytest.mark.mesh


@pytest.mark.parametrize("name", ["gpt2", "gemma2", "mixtral", "t5", "lora", "hydra", "remat", "nf4_remat"])
def test_eight_devices_compute_the_same(name: str) -> None:
    _, params, frozen, _ = parts(name)

    def graded(share: bool, params: Any, frozen: Any) -> Any:
        run = jax.value_and_grad(objective(name, share), has_aux=True)
        return jax.device_get(jax.jit(run)(params, frozen, None))

    expected = graded(False, params, frozen)
    mesh = make_mesh(2, 2, 2)
    params, frozen = (jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))
    with jax.set_mesh(mesh):
        assert_close(graded(True, params, frozen), expected)


@pytest.mark.parametrize("name", ["lora", "hydra", "nf4_remat"])
def test_what_is_frozen_is_picked_on_eight_devices(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_loop, "platform", lambda: "tpu")
    test_eight_devices_compute_the_same(name)

# SPDX-License-Identifier: Apache-2.0
"""Where parameters are split over `fsdp`, each pass of an update gathers a layer's kernels for itself.

So it is on GPUs and TPUs; a CPU is told that it is a GPU.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import pytest

from jrl.mesh import make_mesh, path_name, tree_shardings
from jrl.models import layer_loop
from tests.mesh.hlo import collectives
from tests.models.test_layer_loop import MODELS, assert_close, objective, parts

pytestmark = pytest.mark.mesh


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_loop, "platform", lambda: "gpu")


def placed(name: str, mesh: Any) -> Any:
    _, params, frozen, _ = parts(name)
    return tuple(jax.device_put(tree, tree_shardings(mesh, tree)[0]) for tree in (params, frozen))


def graded(name: str, key: Any = None, **options: Any) -> Any:
    run = jax.value_and_grad(objective(name, False, **options), has_aux=True)
    return jax.jit(lambda params, frozen: run(params, frozen, key))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.usefixtures("on_gpu")
def test_the_gradient_is_that_of_one_device(name: str) -> None:
    _, params, frozen, _ = parts(name)
    expected = jax.device_get(graded(name)(params, frozen))
    mesh = make_mesh(2, 2, 2)
    with jax.set_mesh(mesh):
        assert_close(jax.device_get(graded(name)(*placed(name, mesh))), expected)


@pytest.mark.parametrize("name", ["gpt2", "t5", "hydra", "gemma4_lenders", "mixtral"])
@pytest.mark.usefixtures("on_gpu")
def test_each_pass_gathers_the_kernels_of_a_layer(name: str) -> None:
    """Those that its gradient reads again, of the layers that train."""
    mesh = make_mesh(1, 2, 1, devices=jax.devices()[:2])
    params, frozen = placed(name, mesh)
    with jax.set_mesh(mesh):
        found = collectives(graded(name).lower(params, frozen).compile().as_text(), mesh)
    gathers = Counter(array.shape for one in found if one.kind == "all-gather" for array in one.arrays)
    expected = Counter(2 * outputs(params) + outputs(frozen))
    assert expected and all(gathers[shape] == count for shape, count in expected.items())


def outputs(tree: Any) -> list[tuple[int, ...]]:
    """Shapes of the kernels out of attention, which no other parameters have."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return [leaf.shape for path, leaf in leaves if path_name(path).endswith("o/kernel")]

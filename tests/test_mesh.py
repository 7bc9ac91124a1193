# SPDX-License-Identifier: Apache-2.0
"""Meshes on chips that lie in a torus, and what a mesh ties together."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, PartitionSpec

from jrl.mesh import abstract_mesh, experts_parts, make_mesh, partition_spec, rows_parts, settle_heads


@dataclass(frozen=True)
class Chip:
    """A TPU's chip, as JAX describes it."""

    id: int
    coords: tuple[int, int, int]
    process_index: int
    core_on_chip: int = 0
    slice_index: int = 0
    platform: str = "tpu"
    device_kind: str = "TPU v6 lite"


@pytest.mark.parametrize("sizes", [(4, 4, 1), (2, 8, 1), (1, 8, 2)])
def test_axes_that_a_torus_has_not_are_cut_out_of_its_own(sizes: tuple[int, int, int]) -> None:
    """JAX refuses 8 on 4 x 4 chips of v6e, which it cuts of itself on v5e alone."""
    places = enumerate(itertools.product(range(4), range(4)))
    chips = [Chip(number, (x, y, 0), number // 4) for number, (y, x) in places]
    mesh = make_mesh(*sizes, devices=chips)
    assert mesh.devices.shape == sizes
    assert sorted(chip.id for chip in mesh.devices.flat) == list(range(16))


def test_a_mesh_has_an_axis_of_experts_where_it_is_asked_for() -> None:
    plain, split = abstract_mesh(num_devices=8), abstract_mesh(fsdp=2, expert=2, num_devices=8)
    assert dict(plain.shape) == {"data": 8, "fsdp": 1, "tensor": 1}
    assert dict(split.shape) == {"data": 2, "fsdp": 2, "expert": 2, "tensor": 1}
    assert (experts_parts(plain), experts_parts(split)) == (1, 2)
    assert rows_parts(plain) == rows_parts(split) == 8
    rows, _ = partition_spec(split, ("batch", None), (16, 3))
    kernels, _ = partition_spec(split, ("experts", "embed", "mlp"), (8, 32, 64))
    assert rows == PartitionSpec(("data", "fsdp", "expert"), None)
    assert kernels == PartitionSpec(("expert",), ("fsdp",), None)
    assert partition_spec(plain, ("experts", "embed", "mlp"), (5, 32, 64))[0] == PartitionSpec(
        None, None, None
    )


def test_sizes_and_experts_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="number of devices, 8; got data=-1, fsdp=1, tensor=1, expert=3"):
        abstract_mesh(expert=3, num_devices=8)
    with pytest.raises(ValueError, match="divides the model's 5 experts, got expert=2"):
        partition_spec(abstract_mesh(expert=2, num_devices=8), ("experts", None), (5, 32))


def test_the_gradients_of_heads_and_states_wait_for_each_other_on_tpus() -> None:
    """Else a head's gradient lies whole beside the layers' backward pass; see tests/aot for what that takes."""
    params = {"layers_0": jnp.ones(3), "lm_head": {"kernel": jnp.arange(6.0).reshape(3, 2)}}

    def loss(params: Any, states: Any) -> Any:
        settled, states = settle_heads(params, states * params["layers_0"][None])
        assert settled["layers_0"] is params["layers_0"]
        return jnp.sum((states @ settled["lm_head"]["kernel"]) ** 2)

    def num_barriers() -> int:
        return str(jax.make_jaxpr(jax.grad(loss))(params, jnp.ones((2, 3)))).count("optimization_barrier")

    def devices(fsdp: int, kind: str) -> Any:
        device = AbstractDevice(kind, num_cores=1, platform=kind)
        return abstract_mesh(fsdp=fsdp, num_devices=fsdp).update(abstract_device=device)

    for fsdp, kind, expected in ((4, "tpu", 2), (1, "tpu", 0), (4, "gpu", 0)):
        with jax.sharding.use_abstract_mesh(devices(fsdp, kind)):
            assert num_barriers() == expected, (fsdp, kind)
    assert num_barriers() == 0
    untied = {"embed": jnp.ones(2)}
    assert settle_heads(untied, params)[0] is untied

# SPDX-License-Identifier: Apache-2.0
"""Meshes on chips that lie in a torus."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import pytest

from jrl.mesh import make_mesh


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

# SPDX-License-Identifier: Apache-2.0
"""Which process answers for which rows. The devices are only imagined; `tests/processes` has real ones."""

from dataclasses import dataclass
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh

from jrl import placement as placing
from jrl.mesh import AXES
from jrl.placement import local_rows, own_rows


@dataclass(frozen=True)
class Device:
    id: int
    process_index: int
    platform: str = "cpu"
    device_kind: str = "cpu"


def mesh_of(processes, sizes):
    """Devices of these processes, in this order, on (data, fsdp, tensor)."""
    devices = np.array([Device(number, process) for number, process in enumerate(processes)])
    return Mesh(devices.reshape(sizes), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def shares(monkeypatch, processes, sizes, num_rows):
    """What each process answers for."""
    found = []
    for process in sorted(set(processes)):
        monkeypatch.setattr(placing.jax, "process_index", lambda process=process: process)
        found.append(own_rows(mesh_of(processes, sizes), num_rows).tolist())
    return found


@pytest.mark.parametrize(
    ("processes", "sizes", "num_rows", "expected"),
    [
        ([0, 0], (2, 1, 1), 4, [[0, 1, 2, 3]]),
        ([0, 0, 1, 1], (4, 1, 1), 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ([0, 0, 1, 1], (2, 2, 1), 8, [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Devices may lie in any order.
        ([1, 0, 1, 0], (4, 1, 1), 8, [[2, 3, 6, 7], [0, 1, 4, 5]]),
        # The model is split inside of each process: its devices hold the same rows.
        ([0, 0, 1, 1], (2, 1, 2), 4, [[0, 1], [2, 3]]),
        # Split over both: every row lies on both, and each takes half.
        ([0, 1], (1, 1, 2), 5, [[0, 1, 2], [3, 4]]),
        ([0, 1, 0, 1], (2, 1, 2), 4, [[0, 2], [1, 3]]),
        # Rows that do not divide lie everywhere.
        ([0, 0, 1, 1], (4, 1, 1), 7, [[0, 1, 2, 3], [4, 5, 6]]),
        ([0, 1, 2, 3], (4, 1, 1), 3, [[0], [1], [2], []]),
        ([0, 1], (2, 1, 1), 0, [[], []]),
    ],
)
def test_each_row_is_one_process(monkeypatch, processes, sizes, num_rows, expected):
    assert shares(monkeypatch, processes, sizes, num_rows) == expected


def test_rows_of_a_process_can_be_indices(monkeypatch):
    monkeypatch.setattr(placing.jax, "process_index", lambda: 3)
    rows = own_rows(mesh_of([0, 1, 2, 3], (4, 1, 1)), 3)
    assert rows.dtype == np.int64 and np.arange(3.0)[rows].shape == (0,)


def test_rows_of_an_array_that_is_all_here():
    x = jax.device_put(np.arange(12).reshape(4, 3))
    np.testing.assert_array_equal(local_rows(x, np.array([3, 1])), [[9, 10, 11], [3, 4, 5]])


def test_rows_of_an_array_of_several_processes_are_read_from_this_ones_devices():
    """Rows 2 to 5 of 8 are here, columns split over two devices, which do not come in order."""
    whole = np.arange(32, dtype=np.int32).reshape(8, 4)
    places = [(slice(2, 4), slice(2, 4)), (slice(4, 6), slice(0, 2)), (slice(2, 4), slice(0, 2))]
    places += [(slice(4, 6), slice(2, 4))]
    spread = SimpleNamespace(
        shape=whole.shape,
        dtype=whole.dtype,
        is_fully_addressable=False,
        is_fully_replicated=False,
        addressable_shards=[SimpleNamespace(index=place, data=whole[place]) for place in places],
    )
    rows = np.array([2, 5])
    found = local_rows(spread, rows)
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, whole[rows])


def test_rows_of_an_array_that_is_whole_in_every_process():
    class Replicated:
        is_fully_addressable, is_fully_replicated = False, True

        def __array__(self, dtype=None, copy=None):
            return np.arange(6)

    np.testing.assert_array_equal(local_rows(Replicated(), np.array([4, 0])), [4, 0])

# SPDX-License-Identifier: Apache-2.0
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.trainers.manifest import tree_sha256

TREE = {"a": {"kernel": np.arange(6, dtype=np.float32).reshape(2, 3)}, "b": np.ones(2, np.int32)}


def test_equal_trees_have_equal_fingerprints_wherever_they_lie():
    on_device = {"b": jnp.asarray(TREE["b"]), "a": {"kernel": jnp.asarray(TREE["a"]["kernel"])}}
    assert tree_sha256(TREE) == tree_sha256(on_device)


@pytest.mark.parametrize(
    "other",
    [
        {"a": {"kernel": TREE["a"]["kernel"].reshape(3, 2)}, "b": TREE["b"]},
        {"a": {"weight": TREE["a"]["kernel"]}, "b": TREE["b"]},
        {"a": {"kernel": TREE["a"]["kernel"]}, "b": TREE["b"].astype(np.uint32)},
        {"a": {"kernel": np.nextafter(TREE["a"]["kernel"], np.float32(9))}, "b": TREE["b"]},
        {"a": {"kernel": TREE["a"]["kernel"]}},
        {},
    ],
    ids=["shape", "name", "dtype", "bits", "missing", "empty"],
)
def test_any_difference_changes_it(other):
    assert tree_sha256(other) != tree_sha256(TREE)

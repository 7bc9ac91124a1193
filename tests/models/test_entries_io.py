# SPDX-License-Identifier: Apache-2.0
"""Between tensor files and parameters: stacked and fused tensors, coverage, and what the host holds meanwhile."""

import tracemalloc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from jrl.mesh import make_mesh
from jrl.models.entries_io import check_entries, entry_tensors, load_entries, parameter_targets
from jrl.models.families.base import Entry, conv1d, linear, table, vector, vocabulary
from jrl.models.safetensors_io import TensorFiles
from jrl.models.safetensors_write import write_tensors

NUM_EXPERTS, WIDTH, INNER, VOCAB, PADDED = 3, 8, 6, 10, 16
SHAPES = {
    "embed": {"embedding": (PADDED, WIDTH)},
    "attn": {"q": {"kernel": (WIDTH, 2, 4)}, "k": {"kernel": (WIDTH, 2, 4)}, "v": {"kernel": (WIDTH, 2, 4)}},
    "experts": {"up": (NUM_EXPERTS, WIDTH, INNER)},
    "norm": {"scale": (WIDTH,)},
}


def entries():
    """A fused tensor, a padded one, and one that holds a third of a stacked parameter, out of order."""
    return [
        Entry("wte", ("embed/embedding",), vocabulary(transposed=False), (VOCAB, WIDTH)),
        Entry("qkv", tuple(f"attn/{x}/kernel" for x in "qkv"), conv1d(), (WIDTH, 3 * WIDTH)),
        *(Entry(f"up.{i}", ("experts/up",), linear(), (INNER, WIDTH), i) for i in range(NUM_EXPERTS)),
        Entry("norm", ("norm/scale",), vector(), (WIDTH,)),
    ]


def structs(shapes):
    return jax.tree.map(
        lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )


def random_params(shapes=SHAPES):
    rng = np.random.default_rng(0)
    params = jax.tree.map(
        lambda s: rng.normal(size=s).astype(np.float32), shapes, is_leaf=lambda x: isinstance(x, tuple)
    )
    params["embed"]["embedding"][VOCAB:] = 0
    return params


def saved(folder, params):
    write_tensors(folder, entry_tensors(entries(), params, VOCAB), max_shard_bytes=500)
    return TensorFiles(folder)


def test_fused_and_stacked_tensors_there_and_back(tmp_path):
    params = random_params()
    files = saved(tmp_path, params)
    np.testing.assert_array_equal(files.read("up.1"), params["experts"]["up"][1].T)
    assert files.info["wte"].shape == (VOCAB, WIDTH)
    targets, replicated = parameter_targets(structs(SHAPES), dtype=jnp.float32)
    loaded = load_entries(files, entries(), targets)
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    assert replicated == []


def test_dtypes_and_places_are_those_asked_for(tmp_path):
    params = random_params()
    files = saved(tmp_path, params)
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    targets, _ = parameter_targets(structs(SHAPES), dtype=jnp.bfloat16, mesh=mesh, float32=("norm",))
    loaded = load_entries(files, entries(), targets)
    assert loaded["experts"]["up"].dtype == jnp.bfloat16 and loaded["norm"]["scale"].dtype == jnp.float32
    assert loaded["attn"]["q"]["kernel"].sharding.mesh == mesh
    np.testing.assert_array_equal(loaded["experts"]["up"], params["experts"]["up"].astype(jnp.bfloat16))


def test_a_parameter_owns_its_memory(tmp_path):
    # An array that shared the reader's buffer would change with it.
    save_file({"a": np.ones((64, 64), np.float32)}, tmp_path / "model.safetensors")
    buffers = []

    class Watched(TensorFiles):
        def read(self, name, dtype=None):
            buffers.append(super().read(name, dtype))
            return buffers[-1]

    target = {"a": jax.ShapeDtypeStruct((64, 64), jnp.float32)}
    params = load_entries(Watched(tmp_path), [Entry("a", ("a",), table(), (64, 64))], target)
    buffers[0][:] = 7
    assert float(params["a"].max()) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop(), "norm/scale"),
        (lambda found: found.append(found[0]), r"\[None, None\]"),
        (lambda found: found.pop(2), r"\[1, 2\]"),
        (lambda found: found.append(found[2]), r"\[0, 1, 2, 0\]"),
        (lambda found: found.append(Entry("q", ("attn/q/kernel",), linear(), (8, 8))), "covered twice"),
    ],
)
def test_a_table_that_does_not_cover_every_parameter_once_is_refused(tmp_path, change, message):
    files = saved(tmp_path, random_params())
    table_ = entries()
    change(table_)
    with pytest.raises(AssertionError, match=message):
        load_entries(files, table_, structs(SHAPES))


class TestCheckEntries:
    """What the files hold against what the table announces."""

    def check(self, folder, change):
        tensors = {"wte": np.ones((10, 8), np.float32), "norm": np.ones(8, np.float32)}
        change(tensors)
        save_file(tensors, folder / "model.safetensors")
        files = TensorFiles(folder)
        entries = [
            Entry("wte", ("embed",), table(), (10, 8)),
            Entry("norm", ("norm",), vector(), (8,)),
        ]
        names = {name: name for name in files}
        check_entries(files, entries, names, is_ignored=lambda name: name == "mask", what="tiny model")

    def test_all_is_well(self, tmp_path):
        self.check(tmp_path, lambda tensors: tensors.update(mask=np.ones(3, bool)))

    def test_missing(self, tmp_path):
        with pytest.raises(ValueError, match=f"{tmp_path}/model.safetensors: 1 tensor is missing: norm"):
            self.check(tmp_path, lambda tensors: tensors.pop("norm"))
        with pytest.raises(ValueError, match="safetensors: 2 tensors are missing: norm, wte"):
            self.check(tmp_path, lambda tensors: tensors.clear())

    def test_missing_in_several_files(self, tmp_path):
        files = saved(tmp_path, random_params())
        table_ = [*entries(), Entry("bias", ("norm/bias",), vector(), (WIDTH,))]
        names = {name: name for name in files}
        with pytest.raises(ValueError, match=r"/model.safetensors.index.json: 1 tensor is missing: bias"):
            check_entries(files, table_, names, is_ignored=lambda name: False, what="tiny model")

    def test_unknown(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"model.safetensors: 1 tensor has no place in a tiny model: bias"
        ):
            self.check(tmp_path, lambda tensors: tensors.update(bias=np.ones(3)))
        with pytest.raises(ValueError, match=r"2 tensors have no place in a tiny model: b, c"):
            self.check(tmp_path, lambda tensors: tensors.update(b=np.ones(3), c=np.ones(3)))

    def test_wrong_shape(self, tmp_path):
        with pytest.raises(
            ValueError, match=r"model.safetensors: norm must have shape \(8,\) by its config, got \(9,\)"
        ):
            self.check(tmp_path, lambda tensors: tensors.update(norm=np.ones(9, np.float32)))

    def test_integers(self, tmp_path):
        with pytest.raises(ValueError, match=r"norm must hold floating-point numbers, got int8. .*quantised"):
            self.check(tmp_path, lambda tensors: tensors.update(norm=np.ones(8, np.int8)))


class TestHostMemory:
    """At most 2.25 × the largest parameter, beside the parameters themselves."""

    SIZE = 1024  # 4 MiB a matrix

    def peak(self, folder, entries, shapes, tensors):
        save_file(tensors, folder / "model.safetensors")
        files = TensorFiles(folder)
        targets, _ = parameter_targets(structs(shapes), dtype=jnp.float32)
        jax.block_until_ready(jnp.zeros(()))
        tracemalloc.start()
        loaded = load_entries(files, entries, targets)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return loaded, peak / max(leaf.nbytes for leaf in jax.tree.leaves(loaded))

    def matrices(self, count):
        rng = np.random.default_rng(0)
        return {f"m.{i}": rng.normal(size=(self.SIZE,) * 2).astype(np.float32) for i in range(count)}

    def test_matrices(self, tmp_path):
        square = (self.SIZE,) * 2
        table_ = [Entry(f"m.{i}", (f"p/{i}",), linear(), square) for i in range(3)]
        tensors = self.matrices(3)
        loaded, peak = self.peak(tmp_path, table_, {"p": {str(i): square for i in range(3)}}, tensors)
        np.testing.assert_array_equal(loaded["p"]["1"], tensors["m.1"].T)
        assert 1 <= peak < 2.25

    def test_vocabulary(self, tmp_path):
        padded = (self.SIZE, self.SIZE + 64)
        table_ = [Entry("m.0", ("p/head",), vocabulary(transposed=True), (self.SIZE,) * 2)]
        _, peak = self.peak(tmp_path, table_, {"p": {"head": padded}}, self.matrices(1))
        assert 1 <= peak < 2.25

    def test_stacked(self, tmp_path):
        square = (self.SIZE,) * 2
        table_ = [Entry(f"m.{i}", ("p/up",), linear(), square, i) for i in range(4)]
        tensors = self.matrices(4)
        loaded, peak = self.peak(tmp_path, table_, {"p": {"up": (4, *square)}}, tensors)
        np.testing.assert_array_equal(loaded["p"]["up"][2], tensors["m.2"].T)
        assert 1 <= peak < 1.5

    def test_interleaved_stacks_come_one_after_the_other(self, tmp_path):
        # As mixtures of experts are listed: both matrices of expert 0, then both of expert 1, ...
        square = (self.SIZE,) * 2
        table_ = [
            Entry(f"m.{2 * i + j}", (f"p/{j}",), linear(), square, i) for i in range(3) for j in range(2)
        ]
        shapes = {"p": {"0": (3, *square), "1": (3, *square)}}
        assert self.peak(tmp_path, table_, shapes, self.matrices(6))[1] < 1.5

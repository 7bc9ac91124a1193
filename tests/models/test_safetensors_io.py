# SPDX-License-Identifier: Apache-2.0
"""Tensor files: what is read agrees with the format's own library, and what is damaged is named."""

import json
import os
import re
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from jrl.models.safetensors_io import INDEX_SUFFIX, TensorFiles, read_header
from jrl.models.safetensors_write import LazyTensor, write_tensors

RNG = np.random.default_rng(0)
# JSON that no parser follows to its bottom.
DEEP = b'{"weight_map":' * 100_000
KINDS = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "int8", "uint8", "bool")


def lazy(arrays):
    return {name: LazyTensor(a.dtype, a.shape, lambda a=a: a) for name, a in arrays.items()}


def of_kind(kind, shape=(3, 5)):
    dtype = np.dtype(getattr(ml_dtypes, kind, kind))
    return (RNG.normal(size=shape) * 3).astype(dtype)


def shard_files(folder):
    """Three tensors in three files with an index."""
    write_tensors(folder, lazy({name: of_kind("float32") for name in "abc"}), max_shard_bytes=60)
    return folder / f"model{INDEX_SUFFIX}"


def edit_header(file, change):
    """Rewrites the JSON of a file, the tensors' bytes untouched."""
    raw = file.read_bytes()
    length = int.from_bytes(raw[:8], "little")
    text = change(json.loads(raw[8 : 8 + length]))
    text = text if isinstance(text, bytes) else json.dumps(text).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])


@pytest.fixture
def one_file(tmp_path):
    save_file({"a": of_kind("float32"), "b": of_kind("float32", (4,))}, tmp_path / "model.safetensors")
    return tmp_path


def test_every_dtype_is_read_as_the_library_reads_it(tmp_path):
    arrays = {kind: of_kind(kind) for kind in KINDS} | {"scalar": np.float32(3), "empty": np.ones((0, 4))}
    save_file({name: np.asarray(a) for name, a in arrays.items()}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    for name, array in arrays.items():
        found = files.read(name)
        assert found.dtype == array.dtype and files.info[name].shape == array.shape
        np.testing.assert_array_equal(found, array)


def test_what_is_written_is_what_the_library_reads(tmp_path):
    arrays = {kind: of_kind(kind) for kind in KINDS}
    # A view that does not lie in memory as it reads, a scalar, and nothing.
    arrays |= {"view": of_kind("float32", (7, 4)).T, "scalar": np.array(2.0), "empty": np.ones((2, 0))}
    write_tensors(tmp_path, lazy(arrays), max_shard_bytes=10**6)
    found = load_file(tmp_path / "model.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    with safe_open(tmp_path / "model.safetensors", "numpy") as file:
        assert file.metadata() == {"format": "pt"}
        starts = [file.get_tensor(name).dtype.itemsize for name in file.offset_keys()]
    assert starts == sorted(starts, reverse=True), "wide elements first: each lies at a multiple of its size"


def test_the_files_own_dtype_need_not_be_that_of_the_result(one_file):
    expected = load_file(one_file / "model.safetensors")["a"].astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(TensorFiles(one_file).read("a", ml_dtypes.bfloat16), expected)


def test_host_memory_of_one_tensor(tmp_path):
    # 32 MiB in the file; pieces of 16 MiB are in flight. A mapped file or a cast of the whole would need more.
    array = np.ones((2048, 4096), np.float32)
    tracemalloc.start()
    write_tensors(tmp_path, lazy({"a": array.T}), max_shard_bytes=10**9)
    written = tracemalloc.get_traced_memory()[1]
    tracemalloc.reset_peak()
    TensorFiles(tmp_path).read("a", ml_dtypes.bfloat16)
    read = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert written < 0.6 * array.nbytes
    assert array.nbytes / 2 <= read < (0.5 + 0.65) * array.nbytes


@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_values_that_are_not_finite_are_named(tmp_path, kind, value):
    array = of_kind(kind)
    array[2, 4] = value
    save_file({"good": of_kind(kind), "bad": array}, tmp_path / "model.safetensors")
    files = TensorFiles(tmp_path)
    files.read("good", np.float32)
    for dtype in (None, np.float32):
        with pytest.raises(ValueError, match=r"model.safetensors: bad holds NaN or infinity"):
            files.read("bad", dtype)


def test_a_value_that_overflows_the_dtype_asked_for_is_named(tmp_path):
    save_file({"a": np.full(3, 1e6, np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"a holds NaN or infinity \(read as float16\)"):
        TensorFiles(tmp_path).read("a", np.float16)


@pytest.mark.parametrize("size", [0, 5, 60, -1])
def test_a_cut_off_file_is_named(one_file, size):
    file = one_file / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=rf"{re.escape(str(file))} is not a readable .*Is it cut off\?"):
        TensorFiles(one_file)


def test_a_file_that_is_cut_off_while_it_is_read_is_named(one_file):
    files = TensorFiles(one_file)
    os.truncate(one_file / "model.safetensors", (one_file / "model.safetensors").stat().st_size - 4)
    with pytest.raises(ValueError, match=r"file not fully covered\. Is it cut off"):
        files.read("b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda header: b"{nonsense", "invalid JSON in header: key must be a string"),
        (lambda header: [1], "invalid JSON in header"),
        (lambda header: DEEP, "invalid JSON in header: recursion limit exceeded"),
        (lambda header: header | {"a": 3}, "invalid type: integer `3`, expected struct TensorInfo"),
        (lambda header: header | {"a": header["a"] | {"dtype": "Q9"}}, "unknown variant `Q9`"),
        (lambda header: header | {"a": header["a"] | {"shape": [3, -5]}}, "invalid value: integer `-5`"),
        (
            lambda header: header | {"a": header["a"] | {"shape": [3, 6]}},
            "invalid shape, data type, or offset",
        ),
        (lambda header: header | {"b": header["b"] | {"data_offsets": [0, 16]}}, "invalid offset for tensor"),
        (lambda header: {"a": header["a"]}, "file not fully covered"),
        (lambda header: {"b": header["b"]}, "invalid offset for tensor `b`"),
        (
            lambda header: header | {"c": {"dtype": "U8", "shape": [99], "data_offsets": [76, 175]}},
            "file not fully covered",
        ),
    ],
)
def test_a_damaged_header_is_named(one_file, change, message):
    edit_header(one_file / "model.safetensors", change)
    with pytest.raises(
        ValueError, match=f"model.safetensors is not a readable safetensors file: .*{message}"
    ) as refused:
        TensorFiles(one_file)
    assert "\n" not in str(refused.value)


def test_numbers_that_numpy_lacks_are_named(one_file):
    edit_header(
        one_file / "model.safetensors",
        lambda header: header | {"a": header["a"] | {"dtype": "F8_E4M3", "shape": [60]}},
    )
    with pytest.raises(ValueError, match=r"model.safetensors: a is F8_E4M3, which NumPy has no numbers for"):
        TensorFiles(one_file)


def test_a_huge_header_length_allocates_nothing(one_file):
    file = one_file / "model.safetensors"
    file.write_bytes((2**62).to_bytes(8, "little") + file.read_bytes()[8:])
    with pytest.raises(ValueError, match="header too large"):
        TensorFiles(one_file)


def test_an_index_names_each_tensors_file(tmp_path):
    shard_files(tmp_path)
    files = TensorFiles(tmp_path)
    assert {name: info.path.name for name, info in files.info.items()} == {
        "a": "model-00001-of-00003.safetensors",
        "b": "model-00002-of-00003.safetensors",
        "c": "model-00003-of-00003.safetensors",
    }


def test_an_index_that_contradicts_its_files_is_named(tmp_path):
    index = shard_files(tmp_path)
    good = json.loads(index.read_text())["weight_map"]

    def refused(weight_map, kind=ValueError, message=""):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(kind, match=message):
            TensorFiles(tmp_path)

    refused(good | {"d": "a" * 5000}, message="which is not the name of a file beside it")
    refused(good | {"d": "a\0b"}, message="which is not the name of a file beside it")
    refused(
        good | {"d": "absent.safetensors"}, FileNotFoundError, r"absent\.safetensors is missing, though model"
    )
    refused(good | {"d": good["a"]}, message=r"model-00001-of-00003.safetensors holds no d, though model")
    refused(good | {"a": good["b"]}, message=r"model-00002-of-00003.safetensors holds no a, though model")
    refused(
        good | {"a": "../secret.safetensors"},
        message="'../secret.safetensors', which is not the name of a file",
    )
    refused(good | {"a": "/etc/passwd"}, message="which is not the name of a file beside it")
    for name in (3, None, ["a"], "", ".", ".."):
        refused(good | {"a": name}, message="(which is not the name of a file beside it|is malformed)")
    refused(["ab"], message="is malformed: expected JSON with a `weight_map`")
    refused(["a"], message="is malformed: expected JSON with a `weight_map`")
    index.write_bytes(DEEP)
    with pytest.raises(ValueError, match=r"index.json is malformed: .*RecursionError"):
        TensorFiles(tmp_path)
    index.write_text("{")
    with pytest.raises(ValueError, match=r"index.json is malformed"):
        TensorFiles(tmp_path)


def test_linked_files_are_read(tmp_path, one_file):
    # The hub's cache is made of links.
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / "model.safetensors").symlink_to(one_file / "model.safetensors")
    assert set(TensorFiles(tmp_path / "linked")) == {"a", "b"}


def test_a_git_lfs_pointer_is_called_one(tmp_path):
    path = tmp_path / "model.safetensors"
    path.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123456789\n")
    with pytest.raises(ValueError, match="git-lfs pointer, not the weights: run `git lfs pull`"):
        read_header(path)

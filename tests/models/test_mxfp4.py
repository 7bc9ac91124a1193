# SPDX-License-Identifier: Apache-2.0
"""Packed tensors of four bits: the numbers they stand for, and checkpoints that hold them."""

import json

import jax
import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.model import make_model
from jrl.models.mxfp4 import Mxfp4Tensors, expand
from jrl.models.safetensors_io import TensorFiles
from tests.models.family_cases_c import CASES

WIDE, NARROW = (5, 128, 1, 16), (5, 32, 2, 16)
"""Packed gate and up, and down, of gpt-oss with five experts of width 32 and inner width 64."""


def packed(shape, seed=0):
    rng = np.random.default_rng(seed)
    return rng.integers(0, 256, shape, dtype=np.uint8), rng.integers(118, 132, shape[:-1], dtype=np.uint8)


def test_golden():
    # 0x92 is 1.0 in the low half and −0.5 in the high one; an exponent of 130 is 2³.
    blocks = np.zeros((1, 1, 16), np.uint8)
    blocks[0, 0, :2] = 0x92, 0xF7
    found = expand(blocks, np.full((1, 1), 130, np.uint8), np.float32)
    assert found.shape == (32, 1) and found[:6, 0].tolist() == [8.0, -4.0, 48.0, -48.0, 0.0, 0.0]


def test_bfloat16_holds_them_exactly():
    blocks, scales = packed(NARROW)
    exact = expand(blocks, scales, np.float32)
    assert exact.shape == (5, 64, 32)
    np.testing.assert_array_equal(expand(blocks, scales, ml_dtypes.bfloat16).astype(np.float32), exact)


def test_parts_that_do_not_fit_are_refused(tmp_path):
    blocks, scales = packed(NARROW)
    save_file({"w_blocks": blocks, "w_scales": scales[:, 1:].copy()}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="w_blocks and w_scales must be bytes, one scale a block; got uint8"):
        Mxfp4Tensors(TensorFiles(tmp_path))


@pytest.mark.parametrize(
    ("byte", "scale"), [(0x77, 254), (0x22, 255), (0x00, 255)], ids=["overflow", "nan", "nan-of-0"]
)
def test_what_is_not_finite_is_refused(tmp_path, byte, scale):
    blocks, scales = packed(NARROW)
    blocks[3, 1, 0], scales[3, 1, 0] = byte, scale
    save_file({"w_blocks": blocks, "w_scales": scales}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=r"model\.safetensors: w holds NaN or infinity \(read as bfloat16\)"):
        Mxfp4Tensors(TensorFiles(tmp_path)).read("w")


def test_the_largest_finite_number_is_read():
    # 1.5 · 2^127, which bfloat16 holds.
    found = expand(np.full((1, 1, 16), 0x33, np.uint8), np.full((1, 1), 254, np.uint8), ml_dtypes.bfloat16)
    assert (found.astype(np.float64) == 1.5 * 2.0**127).all()


@pytest.fixture
def folder(tmp_path):
    """A gpt-oss checkpoint with packed experts, beside one that holds their numbers."""
    model_path, packed_path = tmp_path / "plain", tmp_path / "packed"
    model = make_model(CASES["gpt_oss"])
    rng = np.random.default_rng(2)
    shapes = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), shapes)
    save_checkpoint(model_path, model, params)
    tensors, stored = load_file(model_path / "model.safetensors"), {}
    for name in list(tensors):
        if name.endswith(("gate_up_proj", "down_proj")):
            blocks, scales = packed(WIDE if "gate_up" in name else NARROW, seed=len(stored))
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            tensors[name] = expand(blocks, scales, np.float32)
    save_file(tensors, model_path / "model.safetensors")
    packed_path.mkdir()
    save_file(
        {name: tensor for name, tensor in tensors.items() if f"{name}_blocks" not in stored} | stored,
        packed_path / "model.safetensors",
    )
    config = json.loads((model_path / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (packed_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_a_packed_checkpoint_is_read_and_written_expanded(folder):
    plain, read = load_checkpoint(folder / "plain"), load_checkpoint(folder / "packed")
    jax.tree.map(np.testing.assert_array_equal, plain.params, read.params)
    save_checkpoint(folder / "saved", read.model, read.params)
    assert "quantization_config" not in json.loads((folder / "saved" / "config.json").read_text())
    ours, theirs = (load_file(folder / name / "model.safetensors") for name in ("saved", "plain"))
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        np.testing.assert_array_equal(ours[name], tensor, name)


def test_other_methods_are_refused(folder):
    path = folder / "packed" / "config.json"
    config = json.loads(path.read_text()) | {"quantization_config": {"quant_method": "gptq"}}
    path.write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"the weights are quantised .*'gptq'"):
        load_checkpoint(folder / "packed")


@pytest.mark.parity
@pytest.mark.parametrize("shape", [WIDE, NARROW])
def test_transformers_expands_to_the_same_numbers(shape):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    blocks, scales = packed(shape)
    theirs = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.bfloat16)
    ours = expand(blocks, scales, ml_dtypes.bfloat16)
    assert tuple(theirs.shape) == ours.shape
    np.testing.assert_array_equal(theirs.float().numpy(), ours.astype(np.float32))

# SPDX-License-Identifier: Apache-2.0
"""The U-Net without an oracle at hand: a stored output of diffusers, its layers by hand, and its adapter."""

from __future__ import annotations

import math
import re
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import traverse_util

from jrl.mesh import abstract_mesh, path_name, tree_shardings
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion import transformer
from jrl.models.diffusion.layers import Conv, GroupNorm, sinusoids, upsample_nearest
from jrl.models.diffusion.transformer import attend, queries_at_once
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import UNetConfig
from jrl.models.layers import Projection, adapted_kernel
from tests.models.diffusion.test_unet_config import SD15, SD21

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "diffusion_unet.npz"
TINY = UNetConfig(
    block_out_channels=(4, 8),
    layers_per_block=1,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    cross_attention_dim=8,
    attention_head_dim=2,
    norm_num_groups=4,
)
R4 = LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian")


@pytest.fixture(scope="module")
def tiny() -> UNet:
    """U-Net C of the parity tests, whose shapes are found once."""
    unet = UNet(TINY)
    assert unet.shapes
    return unet


def flat(tree: Any) -> dict[str, Any]:
    return dict(traverse_util.flatten_dict(tree, sep="/"))


def test_golden_output(tiny: UNet) -> None:
    stored = np.load(GOLDEN)
    params = {}
    for entry in tiny.entries():
        (path,) = entry.paths
        shape = flat(tiny.shapes)[path].shape
        (params[path],) = entry.transform.load(stored[f"tensors/{entry.name}"], [shape])
    params = traverse_util.unflatten_dict(params, sep="/")
    data = [stored[name] for name in ("latents", "timesteps", "context")]
    apply = jax.jit(lambda params, *data: tiny.apply(params, None, *data, dtype=jnp.float32, remat=False))
    got = apply(params, *data)
    np.testing.assert_allclose(got, stored["output"], rtol=1e-5, atol=1e-5)


def test_every_parameter_has_its_tensor_and_a_place_on_the_mesh(tiny: UNet) -> None:
    shapes = flat(tiny.shapes)
    entries = tiny.entries()
    assert sorted(path for entry in entries for path in entry.paths) == sorted(shapes)
    assert all(
        math.prod(entry.shape) == math.prod(shapes[path].shape) for entry in entries for path in entry.paths
    )
    places, _ = tree_shardings(abstract_mesh(1, 2, 2, num_devices=4), tiny.shapes)
    for path, place in flat(places).items():
        if path.endswith("kernel"):
            assert "fsdp" in place.spec, path


def test_adapter_of_the_attentions(tiny: UNet) -> None:
    lora = tiny.bind_lora(R4)
    ends = [module.name.rsplit("attn", 1)[1] for module in lora.modules]
    # One block down, one in the middle, two up: of each both attentions.
    assert len(ends) == 32 and set(ends) == {
        f"{index}.{name}" for index in (1, 2) for name in ("to_q", "to_k", "to_v", "to_out.0")
    }
    adapters = jax.eval_shape(lora.init, jax.random.key(0), tiny.shapes)
    paths = {path.rsplit("/", 1)[0] for path in flat(jax.eval_shape(lora.variables, adapters))}
    assert all(f"{path}/kernel" in flat(tiny.shapes) for path in paths) and len(paths) == 32
    with pytest.raises(ValueError, match="matches conv_in, which is no linear map"):
        tiny.bind_lora(LoraConfig(target_modules=("conv_in",)))
    with pytest.raises(ValueError, match="matches no module of this UNet2DConditionModel"):
        tiny.bind_lora(LoraConfig(target_modules=("q_proj",)))
    with pytest.raises(ValueError, match="`modules_to_save` must be off for a UNet2DConditionModel"):
        tiny.bind_lora(LoraConfig(modules_to_save=("conv_in",)))


def test_the_low_rank_path_is_not_merged() -> None:
    """In bfloat16 an update far below 2^-8 of a weight still reaches the output; a fresh one changes no bit."""
    module = Projection((8,), (8,), True, 0.3, jnp.bfloat16)
    random = np.random.default_rng(0)
    x = random.standard_normal((64, 8)).astype(np.float32)
    kernel = np.where(random.random((8, 8)) < 0.5, -1.0, 1.0).astype(np.float32)
    params = {"kernel": kernel, "bias": np.zeros(8, np.float32)}
    leaf = {"a": np.ones((8, 1), np.float32), "b": np.zeros((1, 8), np.float32)}
    apply = jax.jit(module.apply)
    plain = apply({"params": params}, x)
    np.testing.assert_array_equal(apply({"params": params, "lora": leaf}, x), plain)
    leaf["b"] += 1e-3
    # ± 1 + 0.001 is ± 1 in bfloat16.
    merged = apply({"params": params | {"kernel": adapted_kernel(kernel, leaf)}}, x)
    np.testing.assert_array_equal(merged, plain)
    assert (apply({"params": params, "lora": leaf}, x) != plain).any(axis=0).all()


def test_chunks_of_queries_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the result nor its gradient; and the scores of no two chunks, 2 · 2 · 2 · 50 each, are kept together."""
    random = np.random.default_rng(0)
    q, k, v = (random.standard_normal((2, length, 2, 2)).astype(np.float32) for length in (7, 50, 50))

    def total(q: Any, k: Any, v: Any) -> Any:
        return (attend(q, k, v) * q).sum()

    def largest() -> int:
        text = str(jax.make_jaxpr(jax.grad(lambda *qkv: total(*qkv), (0, 1, 2)))(q, k, v))
        shapes = re.findall(r"f32\[([\d,]+)\]", text)
        return max(math.prod(int(size) for size in shape.split(",")) for shape in shapes)

    whole = jax.jit(jax.value_and_grad(total, (0, 1, 2)))(q, k, v)
    assert largest() == 2 * 2 * 7 * 50
    monkeypatch.setattr(transformer, "SCORES_BYTES", 3 * (2 * 2 * 50 * 4))
    monkeypatch.setattr(transformer, "LEAST_QUERIES", 1)  # 3 fit, so 7 = 2 + 2 + 2 + 1
    assert largest() < 2 * 2 * 2 * 2 * 50
    chunked = jax.jit(jax.value_and_grad(lambda *qkv: total(*qkv), (0, 1, 2)))(q, k, v)
    for got, wanted in zip(jax.tree.leaves(chunked), jax.tree.leaves(whole), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-5)


def test_a_chunk_is_what_fits_for_all_rows_and_heads() -> None:
    """Of 256 MiB: a query of 8 heads at 4096 places takes 128 KiB a row. A device has the rows that are its own."""
    assert [queries_at_once((rows, 4096, 8, 40), 4096) for rows in (1, 2, 3, 16, 1000)] == [
        2048,
        1024,
        512,
        128,
        64,
    ]
    assert queries_at_once((8, 1024, 8, 80), 1024) == 1024 and queries_at_once((8, 4096, 8, 40), 77) >= 4096
    with jax.sharding.use_abstract_mesh(abstract_mesh(2, 2, 2, num_devices=8)):
        assert queries_at_once((16, 4096, 8, 40), 4096) == queries_at_once((13, 4096, 8, 40), 4096) == 512


def test_the_output_is_not_rounded(tiny: UNet) -> None:
    """By the last convolution: guidance would multiply its error."""
    trace = jax.make_jaxpr(partial(tiny.apply, dtype=jnp.bfloat16, remat=False))
    data = np.zeros((1, 4, 4, 4), np.float32), np.zeros(1, np.int32), np.zeros((1, 3, 8), np.float32)
    equations = trace(tiny.shapes, None, *data).jaxpr.eqns
    made = [eqn.outvars[0].aval.dtype for eqn in equations if eqn.primitive.name == "conv_general_dilated"]
    assert made[-1] == jnp.float32 and set(made[:-1]) == {jnp.dtype(jnp.bfloat16)}


def test_scores_beyond_half_precision_are_finite() -> None:
    """q·k = 4 · 200² = 160000, above float16's 65504."""
    q, v = np.full((1, 2, 1, 4), 200.0, np.float16), np.ones((1, 2, 1, 4), np.float16)
    np.testing.assert_array_equal(jax.jit(attend)(q, q, v), v)


def test_group_norm() -> None:
    """Two groups of two channels; of one place [1, 3 | 5, 5] the means are 2 and 5, the variances 1 and 0."""
    module = GroupNorm(2, 3.0)
    x = jnp.array([1.0, 3.0, 5.0, 5.0]).reshape(1, 1, 1, 4)
    params = {"params": {"scale": jnp.array([1.0, 2.0, 1.0, 1.0]), "bias": jnp.array([0.0, 0.0, 0.0, 7.0])}}
    np.testing.assert_allclose(jax.jit(module.apply)(params, x)[0, 0, 0], [-0.5, 1.0, 0.0, 7.0], atol=1e-6)
    # E[x²] − E[x]² of values around 10⁴ would be off by units; half precision would overflow.
    noise = np.random.default_rng(0).integers(-8, 8, (1, 8, 8, 4)).astype(np.float32)
    params = {"params": {"scale": np.ones(4, np.float32), "bias": np.zeros(4, np.float32)}}
    apply = jax.jit(module.apply)
    np.testing.assert_allclose(apply(params, 3e4 + noise), apply(params, noise), atol=2e-3)
    assert jax.eval_shape(apply, params, noise.astype(jnp.bfloat16)).dtype == jnp.float32


def test_convolution_by_hand() -> None:
    """All ones: the sum of the window, 9 inside, 6 at an edge, 4 in a corner; stride 2 sees the even places."""
    x, params = (
        jnp.ones((1, 3, 4, 1)),
        {"params": {"kernel": jnp.ones((3, 3, 1, 1)), "bias": jnp.array([10.0])}},
    )
    got = Conv(1, 3, jnp.float32).apply(params, x)[0, :, :, 0]
    np.testing.assert_array_equal(got, 10 + np.array([[4, 6, 6, 4], [6, 9, 9, 6], [4, 6, 6, 4]]))
    got = Conv(1, 3, jnp.float32, stride=2).apply(params, x)[0, :, :, 0]
    np.testing.assert_array_equal(got, 10 + np.array([[4, 6], [4, 6]]))
    got = Conv(1, 3, jnp.float32, stride=2, padding=((0, 1), (0, 1))).apply(params, x)[0, :, :, 0]
    np.testing.assert_array_equal(got, 10 + np.array([[9, 6]]))


def test_upsampling() -> None:
    x = jnp.arange(4.0).reshape(1, 2, 2, 1)
    got = upsample_nearest(x)[0, :, :, 0]
    np.testing.assert_array_equal(got, [[0, 0, 1, 1], [0, 0, 1, 1], [2, 2, 3, 3], [2, 2, 3, 3]])
    np.testing.assert_array_equal(upsample_nearest(x, (3, 4))[0, :, :, 0], got[:3])


def test_sinusoids_are_float32_and_ordered() -> None:
    """Frequencies of width 4: 1 and 1/100."""
    times = np.array([998, 1000], np.int32)
    both = jax.jit(lambda t: [sinusoids(t, 4, cosine_first=first, freq_shift=0) for first in (True, False)])
    got, swapped = both(times)
    angles = np.array([[998, 9.98], [1000, 10.0]])
    np.testing.assert_allclose(got, np.concatenate([np.cos(angles), np.sin(angles)], axis=1), atol=1e-4)
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(swapped, np.asarray(got)[:, [2, 3, 0, 1]])


@pytest.mark.parametrize(
    ("latents", "context", "message"),
    [
        (
            (2, 4, 8, 8),
            (2, 5, 8),
            r"`latents` must have shape \(rows, height, width, 4\), got \(2, 4, 8, 8\)",
        ),
        ((2, 8, 8, 4), (2, 5, 7), r"`context` must have shape \(rows, positions, 8\), got \(2, 5, 7\)"),
    ],
)
def test_inputs_of_other_widths_are_refused(tiny: UNet, latents: Any, context: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        tiny.apply(
            {}, None, jnp.ones(latents), jnp.zeros(2), jnp.ones(context), dtype=jnp.float32, remat=False
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "count", "adapter"),
    [(SD15, 859_520_964, 797_184), (SD21, 865_910_724, 829_952)],
    ids=["1.5", "2.1"],
)
def test_real_sizes(config: UNetConfig, count: int, adapter: int) -> None:
    unet = UNet(config)
    leaves = jax.tree_util.tree_leaves_with_path(unet.shapes)
    assert len(leaves) == 686 and sum(math.prod(leaf.shape) for _, leaf in leaves) == count
    assert sorted(path for entry in unet.entries() for path in entry.paths) == sorted(
        path_name(path) for path, _ in leaves
    )
    lora = unet.bind_lora(R4)
    adapters = jax.tree.leaves(jax.eval_shape(lora.init, jax.random.key(0), unet.shapes))
    assert len(lora.modules) == 128 and len(adapters) == 256
    assert sum(math.prod(leaf.shape) for leaf in adapters) == adapter

# SPDX-License-Identifier: Apache-2.0
"""TPUs' splash kernel, interpreted, against einsums with a mask: same results, same gradients, and where it serves."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import fused_attention
from jrl.models.attention import attend
from jrl.models.config import LatentAttention
from jrl.models.fused_attention import choose_attention
from jrl.models.model import make_model
from jrl.models.positions import token_positions
from jrl.models.score_blocks import Operands
from jrl.models.splash_attention import attend_splash, block_size, splash_rows
from jrl.typing import ModelInputs
from tests.jaxprs import read_loop
from tests.models.family_cases import CASES
from tests.models.test_fused_attention import (
    assert_prompts_are_read_alike,
    assert_same,
    left_padded,
    results,
)
from tests.tiny import VOCAB_SIZE, tiny_lm

HEADS, KV_HEADS, WIDTH = 4, 2, 8


@pytest.fixture
def on_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Models believe that they compute on a TPU; the kernel itself is interpreted."""
    monkeypatch.setattr(fused_attention, "platform", lambda: "tpu")


def rows_of(length: int) -> tuple[np.ndarray, np.ndarray]:
    """(mask, segments): padding on the right, on the left, and three sequences with padding on both sides."""
    columns = np.arange(length)
    mask = np.stack([columns < length - 3, columns >= 4, (columns >= 1) & (columns < length - 2)])
    packed = np.searchsorted([length // 3, length // 2], columns, side="right")
    return mask, np.stack([0 * columns, 0 * columns, packed])


def compare(length: int, window: int | None, softcap: float | None) -> None:
    """Outputs at real tokens and the gradients of queries, keys and values: kernel against einsums."""
    rng = np.random.default_rng(length)
    mask, segments = map(jnp.asarray, rows_of(length))
    positions = token_positions(mask, segments)
    q, k, v, weights = (
        jnp.asarray(rng.normal(size=(3, *shape, WIDTH)), jnp.float32)
        for shape in ((length, HEADS), (KV_HEADS, length), (KV_HEADS, length), (length, HEADS))
    )

    def by_kernel(q: Any, k: Any, v: Any) -> Any:
        rows = splash_rows(mask, positions, segments)
        return attend_splash(q, k, v, rows, scale=0.4, window=window, softcap=softcap)

    def by_einsums(q: Any, k: Any, v: Any) -> Any:
        distance = positions[:, :, None] - positions[:, None, :]
        readable = jnp.tril(mask[:, None, :] & (segments[:, :, None] == segments[:, None, :]))
        readable &= distance < (length if window is None else window)
        return attend(Operands(q, (k,), (v,), readable), scale=0.4, softcap=softcap)

    def found(attention: Callable[..., Any]) -> Any:
        def total(*operands: Any) -> Any:
            out = jnp.where(mask[:, :, None, None], attention(*operands), 0)
            return jnp.sum(out * weights), out

        gradient, out = jax.jit(jax.grad(total, (0, 1, 2), has_aux=True))(q, k, v)
        return out, *gradient

    for kernel, einsum in zip(found(by_kernel), found(by_einsums), strict=True):
        np.testing.assert_allclose(kernel, einsum, atol=1e-5)


def test_a_kernel_and_einsums_give_the_same() -> None:
    """Padding on both sides, packed segments, grouped heads, a window and a cap, in rows that no block divides."""
    compare(11, 3, 2.0)


@pytest.mark.slow
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 5, 140])
@pytest.mark.parametrize("length", [1, 11, 128, 150, 600])
def test_at_every_length(length: int, window: int | None, softcap: float | None) -> None:
    """Of one block and of several, which have passes of their own for the gradients of queries."""
    compare(max(length, 8), window, softcap)


def both_sides(seed: int = 0) -> ModelInputs:
    """Rows with padding on the right, on the left, on both sides, and nowhere."""
    mask = np.stack([np.arange(11) < 8, np.arange(11) >= 3, abs(np.arange(11) - 5) < 4, np.ones(11, bool)])
    tokens = np.where(mask, np.random.default_rng(seed).integers(2, VOCAB_SIZE, size=mask.shape), 0)
    return ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))


@pytest.mark.usefixtures("on_tpu")
class TestModels:
    def test_of_windows_and_caps(self) -> None:
        """Gemma 2: every other layer has a window, all cap their scores."""
        lm = make_model(CASES["gemma2"])
        params = lm.init(jax.random.key(0))
        assert_same(*(results(lm, params, both_sides(), kind) for kind in ("einsum", "splash")))

    @pytest.mark.parametrize("name", ["gemma2", "llama", "falcon_h1"])
    def test_prompts_go_through_it(self, name: str) -> None:
        """Also under windows, caps, and beside a recurrence."""
        lm = make_model(CASES[name])
        assert_prompts_are_read_alike(lm, left_padded(), ("einsum", "splash"))

    @pytest.mark.slow
    @pytest.mark.parametrize("name", [name for name in CASES if name != "gemma2"])
    def test_of_every_family(self, name: str) -> None:
        lm = make_model(CASES[name])
        params = lm.init(jax.random.key(0))
        config = lm.config
        is_latent = any(isinstance(layer.mixer, LatentAttention) for layer in config.layers)
        if config.alibi or config.attention_sinks or is_latent or config.head_dim % 8:
            with pytest.raises(ValueError, match=r"ALiBi|sinks|latent attention|heads are a multiple of 8"):
                lm.policy(attn_implementation="splash")
        else:
            assert_same(*(results(lm, params, both_sides(), kind) for kind in ("einsum", "splash")))

    @pytest.mark.slow
    def test_bfloat16_is_as_near_to_float32_as_einsums_are(self) -> None:
        lm, params = tiny_lm("llama")
        exact = results(lm, params, both_sides(), "einsum")[0]
        low = (
            results(lm, params, both_sides(), kind, compute_dtype=jnp.bfloat16)[0]
            for kind in ("einsum", "splash")
        )
        far = [float(jnp.abs(found - exact).max()) for found in low]
        assert far[1] < 1.5 * far[0] + 1e-3, far

    def test_packed_rows_go_through_it(self) -> None:
        """No (L, L) mask is made, and none of the heads' scores, neither forward nor backward."""
        lm, params = tiny_lm("llama")
        inputs = both_sides()._replace(segment_ids=jnp.asarray([[0] * 5 + [1] * 6] * 4))

        def makes_square(implementation: Any) -> bool:
            policy = lm.policy(attn_implementation=implementation)
            run = jax.grad(lambda params: policy.branch(params, {}, None, inputs, None).policy.sum())
            return "11,11]" in str(jax.make_jaxpr(run)(params))

        assert makes_square("einsum") and not makes_square("splash")

    def test_a_shared_body_leaves_its_output_for_the_backward_pass(self) -> None:
        """And the logarithms of the softmax's sums, one a query: the kernel itself writes each 128 times."""
        lm, params = tiny_lm("llama")
        policy = lm.policy(attn_implementation="splash", share_layers=True)
        inputs = both_sides()

        def run(params: Any) -> Any:
            return policy.branch(params, {}, policy.trunk({}, inputs), inputs, None).policy.sum()

        loop = next(eqn for eqn in jax.make_jaxpr(jax.grad(run))(params).eqns if eqn.primitive.name == "scan")
        left = [aval.shape[1:] for aval in read_loop(loop).left]
        heads, width = lm.config.num_heads, lm.config.head_dim
        assert left.count((4, heads, 128, width)) == 1 and left.count((4, heads, 128)) == 1
        assert not any(shape[-2:] == (128, 128) for shape in left)


def test_a_row_with_a_gap_becomes_nan_under_a_window_alone() -> None:
    """Columns are what the kernel counts, and positions what a window means."""
    mask, segments = (jnp.asarray(found) for found in rows_of(11))
    mask = mask.at[0, 4].set(False)
    rows = splash_rows(mask, token_positions(mask, segments), segments)
    assert rows.is_unbroken.tolist() == [False, True, True]
    np.testing.assert_array_equal(rows.segments, np.where(mask, segments, -1))
    q = jnp.ones((3, 11, HEADS, WIDTH))
    k = q[:, :, :KV_HEADS].swapaxes(1, 2)
    for window, broken in ((None, False), (3, True)):
        out = attend_splash(q, k, k, rows, scale=1.0, window=window, softcap=None)
        assert np.isnan(out).all((1, 2, 3)).tolist() == [broken, False, False]
        assert np.isfinite(out[1:]).all()


@pytest.mark.parametrize(
    ("length", "size"),
    [
        (1, (128, 128)),
        (128, (128, 128)),
        (129, (256, 256)),
        (300, (384, 384)),
        (640, (384, 768)),
        (1024, (512, 1024)),
        (2100, (384, 2304)),
        (4096, (512, 4096)),
    ],
)
def test_blocks_pad_little_and_are_large(length: int, size: tuple[int, int]) -> None:
    assert block_size(length) == size


@pytest.mark.parametrize(
    ("changes", "dtype", "reason"),
    [
        ({}, jnp.bfloat16, None),
        ({}, jnp.float32, None),
        ({"attention_softcap": 50.0}, jnp.bfloat16, None),
        ({"head_dim": 256}, jnp.bfloat16, None),
        ({"head_dim": 264}, jnp.bfloat16, "at most 256 wide, and the model's are 264"),
        ({"head_dim": 12}, jnp.bfloat16, "a multiple of 8"),
        ({"alibi": True}, jnp.bfloat16, "ALiBi"),
        ({}, jnp.float16, "`train.compute_dtype` is float16"),
    ],
)
@pytest.mark.usefixtures("on_tpu")
def test_auto_is_the_kernel_exactly_where_it_serves(
    changes: dict[str, Any], dtype: Any, reason: str | None
) -> None:
    config = replace(tiny_lm("llama")[0].config, **changes)
    if reason is None:
        assert (
            choose_attention("auto", config, dtype) == choose_attention("splash", config, dtype) == "splash"
        )
    else:
        assert choose_attention("auto", config, dtype) == "einsum"
        with pytest.raises(ValueError, match=reason):
            choose_attention("splash", config, dtype)


def test_elsewhere_it_is_refused() -> None:
    config = tiny_lm("llama")[0].config
    with pytest.raises(ValueError, match=r"it needs a TPU, and the model computes on a (cpu|gpu)"):
        choose_attention("splash", config, jnp.bfloat16)

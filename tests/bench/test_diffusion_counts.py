# SPDX-License-Identifier: Apache-2.0
"""The formulas of `jrl.bench.diffusion_counts`: known figures of Stable Diffusion, and XLA's own count."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from jrl.bench.diffusion_counts import unet_counts
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import UNetConfig

SMALL = UNetConfig(
    in_channels=4,
    out_channels=4,
    down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
    up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    block_out_channels=(32, 64),
    layers_per_block=1,
    cross_attention_dim=64,
    attention_head_dim=4,
    norm_num_groups=8,
)
SMALL_XL = replace(
    SMALL,
    transformer_layers_per_block=(1, 3),
    addition_embed_type="text_time",
    addition_time_embed_dim=8,
    projection_class_embeddings_input_dim=64,
)
ROWS, EDGE, CONTEXT = 2, 9, 8
"""An odd edge: halves are rounded up on the way down."""


@pytest.mark.parametrize(
    ("cross_attention_dim", "edge", "giga"), [(768, 64, 401.637), (1024, 96, 1074.553)], ids=["1.5", "2.1"]
)
def test_stable_diffusion(cross_attention_dim: int, edge: int, giga: float) -> None:
    """Worked out by hand in the specification of the wing: 402 and 1,075 billion multiplications."""
    config = UNetConfig(cross_attention_dim=cross_attention_dim)
    found = unet_counts(config, latent_shape=(edge, edge), context_length=77)
    assert (found.weights + found.products) / 1e9 == pytest.approx(giga, abs=1e-3)
    assert found.forward == 2 * (found.weights + found.products)


def test_one_level_by_hand() -> None:
    config = UNetConfig(
        in_channels=1,
        out_channels=3,
        down_block_types=("DownBlock2D",),
        up_block_types=("UpBlock2D",),
        block_out_channels=(2,),
        layers_per_block=1,
        norm_num_groups=1,
        attention_head_dim=1,
        cross_attention_dim=5,
    )
    found = unet_counts(config, latent_shape=(2, 3), context_length=7)
    time = 2 * 8 + 8 * 8
    resnet = 6 * (9 * 2 * 2 + 9 * 2 * 2) + 8 * 2
    # Two blocks of the way up read a skip beside what comes from below, which takes a wider convolution and a shortcut.
    up = 6 * (9 * 4 * 2 + 9 * 2 * 2 + 4 * 2) + 8 * 2
    attention = 6 * (2 * 2 * 2 + 18 * 2 * 2) + 2 * 5 * 2 * 7
    edges = 6 * (9 * 1 * 2 + 9 * 2 * 3)
    assert found.weights == time + 3 * resnet + 2 * up + attention + edges
    assert found.products == 2 * 6 * (6 + 7) * 2


def test_stable_diffusion_xl_by_what_it_adds() -> None:
    """Two blocks more in the middle, where 5 x 5 places are 64 wide, and the map of the pooled prompt and the sizes."""
    found, plain = (
        unet_counts(config, latent_shape=(EDGE, EDGE), context_length=CONTEXT) for config in (SMALL_XL, SMALL)
    )
    block = 25 * 18 * 64 * 64 + 2 * 64 * 64 * CONTEXT
    assert found.weights - plain.weights == 2 * block + 64 * 128 + 128 * 128
    assert found.products - plain.products == 2 * 2 * 25 * (25 + CONTEXT) * 64


def test_training_everything_costs_another_product_of_each_weight() -> None:
    found = unet_counts(SMALL, latent_shape=(EDGE, EDGE), context_length=CONTEXT)
    assert found.backward(full=True) - found.backward(full=False) == 2 * found.weights
    assert found.backward(full=True) == 2 * found.forward


@pytest.mark.slow
@pytest.mark.parametrize("what", ["forward", "gradient"])
def test_operations_are_those_that_xla_counts(what: str) -> None:
    """XLA counts norms, softmax and activations too, and of a convolution not the padding it skips."""
    unet = UNet(SMALL)
    params = jax.eval_shape(unet.init, jax.random.key(0))
    inputs = (jnp.zeros((ROWS, EDGE, EDGE, 4)), jnp.zeros(ROWS, jnp.int32), jnp.zeros((ROWS, CONTEXT, 64)))

    def run(params, *inputs):
        return jnp.sum(unet.apply(params, None, *inputs, dtype=jnp.float32, remat=False))

    program = jax.jit(run if what == "forward" else jax.grad(run))
    counted = program.lower(params, *inputs).compile().cost_analysis()["flops"]
    counts = unet_counts(SMALL, latent_shape=(EDGE, EDGE), context_length=CONTEXT)
    ours = ROWS * (counts.forward if what == "forward" else counts.forward + counts.backward(full=True))
    assert 0.85 <= ours / counted <= 1.15

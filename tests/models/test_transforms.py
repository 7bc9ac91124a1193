# SPDX-License-Identifier: Apache-2.0
"""Forward mode and products with the Hessian of every kind of model, and of both sets of products."""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models import products
from jrl.models.adapters import LoraConfig
from jrl.models.diffusion.unet import UNet
from jrl.models.model import make_model
from jrl.models.quantize import quantize_frozen
from jrl.ops.logprobs import token_logprobs
from jrl.typing import ModelInputs, PolicyFns
from tests.models.classifier_cases import ENCODERS, labelled, random_classifier
from tests.models.diffusion.test_unet import TINY
from tests.models.family_cases import CASES
from tests.tiny import tiny_contexts, tiny_hf_config, tiny_prompts
from tests.transforms import assert_every_transform, assert_hessian_products, normals_like

Case = tuple[Callable[[Any], jax.Array], Any]


def shallow(name: str, num_layers: int = 1) -> Any:
    """The tiny model of this family, cut to so many layers."""
    if name == "t5":
        return make_model(tiny_hf_config("t5", num_layers))
    config = copy.deepcopy(CASES[name])
    config.num_hidden_layers = num_layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:num_layers]
    return make_model(config)


def mean_logprob(policy: PolicyFns, frozen: Any, inputs: ModelInputs) -> Callable[[Any], jax.Array]:
    """Mean log-probability and entropy of the rows' tokens, in chunks, as a function of what trains."""

    def read(params: Any) -> jax.Array:
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        found = token_logprobs(
            lambda h: policy.logits(params, frozen, h),
            hidden[:, :-1],
            inputs.tokens[:, 1:],
            temperature=0.7,
            chunk_bytes=4096,
            vocab_size=128,
            with_entropy=True,
        )
        return jnp.mean(found.logprobs + found.entropy)

    return read


def decoder(name: str, num_layers: int = 1) -> Case:
    lm = shallow(name, num_layers)
    inputs = tiny_contexts(2, 5, L=6) if name == "t5" else tiny_prompts(2, 6)
    params, frozen = lm.split_params(lm.init(jax.random.key(0)))
    return mean_logprob(lm.policy(), frozen, inputs), params


def adapted(name: str, bits: str = "float32") -> Case:
    lm = shallow(name)
    split: dict[str, Any] = {"adapter": LoraConfig(r=2, target_modules=("q_proj", "o_proj"))}
    whole = quantize_frozen(lm.init(jax.random.key(0)), bits)
    params, frozen = lm.split_params(whole, key=jax.random.key(1), **split)
    params = jax.tree.map(lambda x: x + 0.1, params)
    return mean_logprob(lm.policy(**split), frozen, tiny_prompts(2, 6)), params


def classifier() -> Case:
    model, params = random_classifier(labelled(ENCODERS["bert"]))
    tokens, mask, *_ = tiny_prompts(2, 6)
    return lambda params: jnp.sum(jax.nn.log_softmax(model.scores(params, tokens, mask))[:, 0]), params


def unet() -> Case:
    model = UNet(TINY)
    params = jax.tree.map(lambda x: 0.2 * x, normals_like(model.shapes, 0))
    latents, context = normals_like((jnp.zeros((1, 8, 8, 4)), jnp.zeros((1, 3, 8))), 1)

    def squares(params: Any) -> jax.Array:
        steps = jnp.array([7])
        return jnp.square(
            model.apply(params, None, latents, steps, context, dtype=jnp.float32, remat=True)
        ).mean()

    return squares, params


MODELS: dict[str, Callable[[], Case]] = {
    **{
        name: functools.partial(decoder, name)
        for name in ("gpt2", "llama", "gemma2", "bloom", "mixtral", "t5")
    },
    "lora": functools.partial(adapted, "llama"),
    "int8": functools.partial(adapted, "llama", "int8"),
    "nf4": functools.partial(adapted, "mixtral", "nf4"),
    "two layers": functools.partial(decoder, "gpt2", 2),
    "classifier": classifier,
    "unet": unet,
}


# What has a rule of its own: log-probabilities, the experts' products, the small matrices of attention, stacked layers.
DEFAULT = [("gpt2", "cpu"), ("mixtral", "cpu"), ("lora", "any other"), ("two layers", "any other")]


@pytest.mark.parametrize(
    ("name", "platform"),
    [
        pytest.param(*case, marks=() if case in DEFAULT else pytest.mark.slow)
        for case in itertools.product(MODELS, ("cpu", "any other"))
        if case != ("unet", "any other")  # it has one set of products alone
    ],
)
def test_models(name: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform != "cpu":
        monkeypatch.setattr(products, "products", lambda: products.PLAIN)
    if name in ("int8", "nf4"):
        pytest.importorskip("qwix")
    assert_hessian_products(*MODELS[name](), step=1e-2, rtol=0.02)


SIZES = jnp.array([3, 0, 5])
PRODUCTS: dict[str, tuple[Callable[..., jax.Array], tuple[tuple[int, ...], tuple[int, ...]]]] = {
    "contract": (lambda x, y: products.contract(x, y, 2, jnp.float32), ((2, 3, 2, 4), (2, 4, 5))),
    "multiply_table": (products.multiply_table, ((2, 3, 4), (7, 4))),
    "table first": (products.cpu.table_first, ((4, 3), (7, 3))),
    "score_keys": (products.score_keys, ((2, 3, 4, 5), (2, 3, 6, 5))),
    "mix_values": (products.mix_values, ((2, 3, 4, 6), (2, 3, 6, 5))),
    "grouped_dot": (lambda x, y: products.grouped_dot(x, y, SIZES), ((8, 4), (3, 4, 5))),
}


@pytest.mark.parametrize("platform", ["cpu", "any other"])
@pytest.mark.parametrize("name", PRODUCTS)
def test_products(name: str, platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if platform != "cpu":
        monkeypatch.setattr(products, "products", lambda: products.PLAIN)
    product, shapes = PRODUCTS[name]
    operands = normals_like([jnp.zeros(shape) for shape in shapes], 0)
    # JAX knows `ragged_dot` backwards once.
    known = (name, platform) != ("grouped_dot", "any other")
    assert_every_transform(lambda operands: jnp.sin(product(*operands)), operands, backwards_twice=known)


@pytest.mark.parametrize("name", ["score_keys", "mix_values", "grouped_dot"])
def test_tuned_products_over_a_batch(name: str) -> None:
    """`vmap` of product and gradient, over the second operand alone: row by row."""
    product, (left, right) = PRODUCTS[name]
    x, stack = normals_like((jnp.zeros(left), jnp.zeros((2, *right))), 0)
    both = jax.value_and_grad(lambda y, x: jnp.sin(product(x, y)).sum())
    together = jax.jit(jax.vmap(both, in_axes=(0, None)))(stack, x)
    alone = [jax.jit(both)(y, x) for y in stack]
    jax.tree.map(
        lambda found, *wanted: np.testing.assert_allclose(found, np.stack(wanted), rtol=1e-5, atol=1e-5),
        together,
        *alone,
    )

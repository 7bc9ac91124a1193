# SPDX-License-Identifier: Apache-2.0
"""A classifier as a scorer: the same score, whatever trains, wherever the padding stands; and what trains."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import path_name
from jrl.models.adapters.config import LoraConfig, PrefixConfig
from jrl.models.classifier_adapter import bind_classifier
from jrl.models.scorer import make_scorer, split_scorer
from jrl.typing import ModelInputs
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier

KINDS = (
    "gpt2",
    pytest.param("llama", marks=pytest.mark.slow),
    pytest.param("distilbert", marks=pytest.mark.slow),
    pytest.param("bert", marks=pytest.mark.slow),
)
LENGTHS = (7, 3, 1)


@functools.cache
def classifier(name: str, **changes: Any) -> Any:
    config = labelled((ENCODERS | DECODERS)[name], 1)
    config.update(changes)
    return random_classifier(config)


def rows(left: int = 0, right: int = 0, pad: int = 0) -> ModelInputs:
    """Ragged texts; padding of any id on the side that is named."""
    rng = np.random.default_rng(0)
    width = max(LENGTHS) + left + right
    tokens, mask = np.full((3, width), pad, np.int32), np.zeros((3, width), bool)
    for row, length in enumerate(LENGTHS):
        start = width - length if left else 0
        tokens[row, start : start + length] = rng.integers(3, 90, length)
        mask[row, start : start + length] = True
    return ModelInputs(jnp.asarray(tokens), jnp.asarray(mask))


def scored(
    name: str, inputs: ModelInputs, *, lora: LoraConfig | None = None, unfrozen: int = -1, **options: Any
):
    """Scores, and their gradient by the trainable parameters."""
    model, params = classifier(name)
    adapter = bind_classifier(model, lora)
    split = dict(num_layers_unfrozen=unfrozen, adapter=adapter)
    trainable, frozen = split_scorer(params, model, **split, key=jax.random.key(0))
    scorer = make_scorer(model, **split, **options)

    def total(trainable: Any) -> Any:
        scores = scorer(trainable, frozen, inputs, None)
        return (scores * jnp.array([1.0, -2.0, 0.5])).sum(), scores

    (_, scores), gradient = jax.jit(jax.value_and_grad(total, has_aux=True))(trainable)
    return np.asarray(scores), gradient, frozen


@pytest.mark.parametrize("name", KINDS)
def test_the_score_is_the_classifier_s_whatever_trains(name: str) -> None:
    model, params = classifier(name)
    inputs = rows(right=2)
    expected = np.asarray(jax.jit(model.scores)(params, *inputs[:2]))[:, 0]
    assert expected.std() > 0.02
    whole, gradient, frozen = scored(name, inputs)
    np.testing.assert_allclose(whole, expected, atol=1e-6)
    assert not frozen and gradient.keys() == params.keys()
    last, some, _ = scored(name, inputs, unfrozen=1, remat=True)
    np.testing.assert_allclose(last, expected, atol=1e-6)
    # The last layers have the gradient that they have where everything trains.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5),
        some,
        {name: gradient[name] for name in some},
    )


@pytest.mark.parametrize("name", ["llama", pytest.param("bert", marks=pytest.mark.slow)])
def test_lore_4_7_padding_on_either_side_changes_nothing(name: str) -> None:
    expected, gradient, _ = scored(name, rows(), unfrozen=1)
    for inputs in (rows(right=5, pad=1000), rows(left=5, pad=1000)):
        found, other, _ = scored(name, inputs, unfrozen=1)
        np.testing.assert_allclose(found, expected, atol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), other, gradient)


@pytest.mark.parametrize("name", ["gpt2", pytest.param("distilbert", marks=pytest.mark.slow)])
def test_what_trains(name: str) -> None:
    model, params = classifier(name)
    heads = {"score"} if name == "gpt2" else {"pooler", "classifier"}
    norm = {"final_norm"} if name == "gpt2" else set()
    last = f"layers_{model.body.num_layers - 1}"
    for unfrozen, expected in ((-1, set(params)), (1, heads | norm | {last}), (0, heads)):
        trainable, frozen = split_scorer(params, model, num_layers_unfrozen=unfrozen)
        assert trainable.keys() == expected and frozen.keys() == params.keys() - expected
    lora = bind_classifier(model, LoraConfig(r=2))
    trainable, frozen = split_scorer(
        params, model, num_layers_unfrozen=1, adapter=lora, key=jax.random.key(0)
    )
    assert trainable.keys() == heads | {"lora"} and frozen.keys() == params.keys() - heads


@pytest.mark.parametrize("name", ["gpt2", pytest.param("bert", marks=pytest.mark.slow)])
def test_a_fresh_adapter_changes_no_score_and_gets_a_gradient_with_the_head(name: str) -> None:
    inputs = rows(right=1)
    expected, _, _ = scored(name, inputs)
    found, gradient, _ = scored(name, inputs, lora=LoraConfig(r=2))
    np.testing.assert_allclose(found, expected, atol=1e-6)
    moving = {
        path_name(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient)
        if np.abs(leaf).max() > 0
    }
    # B starts at 0, so A waits for it.
    assert all(any(f"{name}/B" in path for path in moving) for name in gradient["lora"])
    assert {path.split("/")[0] for path in moving} == gradient.keys()


def test_scores_are_float32_under_bfloat16() -> None:
    expected, _, _ = scored("gpt2", rows())
    found, _, _ = scored("gpt2", rows(), compute_dtype=jnp.bfloat16)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=0.1)
    assert np.abs(found - expected).max() > 1e-6


@pytest.mark.parametrize("name", ["gpt2", pytest.param("distilbert", marks=pytest.mark.slow)])
def test_dropout_acts_where_a_key_is_given(name: str) -> None:
    rates = ("resid_pdrop", "dropout")
    model, params = classifier(name, **{rates[name == "distilbert"]: 0.5})
    trainable, frozen = split_scorer(params, model)
    scorer = jax.jit(make_scorer(model))
    inputs = rows()
    off = scorer(trainable, frozen, inputs, None)
    one, again, two = (scorer(trainable, frozen, inputs, jax.random.key(seed)) for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, again)
    assert np.abs(one - off).max() > 1e-3 and np.abs(one - two).max() > 1e-3
    np.testing.assert_array_equal(scorer(trainable, frozen, inputs, None), off)


def test_a_text_without_tokens_scores_nothing_under_a_decoder() -> None:
    inputs = rows()
    found, _, _ = scored("llama", inputs._replace(attention_mask=inputs.attention_mask.at[1].set(False)))
    assert found[1] == 0.0 and found[0] != 0.0


def test_several_labels_are_refused() -> None:
    model, _ = random_classifier(labelled(DECODERS["gpt2"]))
    with pytest.raises(ValueError, match=r"must have one label .* got 3: sad, glad, POSITIVE"):
        make_scorer(model)


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_layers_out_of_range_are_refused(name: str) -> None:
    model, _ = classifier(name)
    with pytest.raises(ValueError, match=r"at most the . layers of the model, got 9"):
        make_scorer(model, num_layers_unfrozen=9)


@pytest.mark.parametrize(
    ("adapter", "message"),
    [
        (PrefixConfig(2), "`peft_type` must be LORA for a gpt2 classifier, got PrefixConfig"),
        (
            LoraConfig(task_type="CAUSAL_LM"),
            "`task_type` must be SEQ_CLS for a gpt2 classifier, got 'CAUSAL_LM'",
        ),
        (LoraConfig(modules_to_save=("pooler",)), "nothing but the head, score, .* got pooler"),
        (LoraConfig(target_modules=("score",)), "`target_modules` .* matches no module"),
        (
            LoraConfig(trainable_token_indices=(3,)),
            "`trainable_token_indices` must be off for a gpt2 classifier",
        ),
    ],
)
def test_adapters_that_do_not_fit_are_refused(adapter: Any, message: str) -> None:
    model, _ = classifier("gpt2")
    with pytest.raises(ValueError, match=message):
        bind_classifier(model, adapter)


def test_the_misspelt_head_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"`modules_to_save` must name nothing but the head, score, .* got scores"
    ):
        bind_classifier(classifier("gpt2")[0], LoraConfig(modules_to_save=("scores",)))

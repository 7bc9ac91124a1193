# SPDX-License-Identifier: Apache-2.0
"""Against torch's row without padding: padding of 0, 1, 7 and 63, packing, and 64 decoded tokens."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.checkpoint import load_checkpoint
from jrl.typing import ModelInputs
from tests.models.family_cases_mixers import CASES

pytestmark = pytest.mark.parity
pytest.importorskip("torch", reason="needs the parity extra")

FAMILIES = (
    "qwen3_next",
    "qwen3_5_text",
    "qwen3_5_moe_text",
    "deepseek_v3",
    "glm4_moe_lite",
    "kimi_linear",
    "lfm2",
    "bamba",
    "falcon_h1",
    "granitemoehybrid",
    "jamba",
    "jamba-odd",
    "nemotron_h",
    "nemotron_h-odd",
)
PADS = (0, 1, 7, 63)
LENGTH, NEW_TOKENS = 70, 64
BOUND = 1e-5
"""Of the largest logit."""


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A torch model, what jrl reads of it, and its logits there: `read(inputs)`."""
    from tests.models.parity import perturbed

    folder = tmp_path_factory.mktemp(request.param)
    oracle = perturbed(CASES[request.param], 0)
    oracle.save_pretrained(folder)
    loaded = load_checkpoint(folder)
    return oracle, loaded, jrl_reader(loaded)


def ids(length: int) -> np.ndarray:
    return np.random.default_rng(0).integers(2, 97, length)


def torch_logits(oracle: Any, tokens: np.ndarray) -> np.ndarray:
    """Of one row without padding."""
    import torch

    with torch.no_grad():
        return oracle(torch.tensor(tokens)[None], use_cache=False).logits[0].numpy()


def jrl_reader(loaded: Any) -> Callable[[ModelInputs], np.ndarray]:
    policy = loaded.model.policy()

    @jax.jit
    def run(params: Any, inputs: ModelInputs) -> Any:
        features = policy.branch(params, {}, None, inputs, None).policy
        return policy.logits(params, {}, features)[..., :97]

    return lambda inputs: np.asarray(run(loaded.params, inputs))


def assert_near(found: np.ndarray, wanted: np.ndarray) -> None:
    assert np.abs(found - wanted).max() < BOUND * np.abs(wanted).max()


def padded(side: str) -> ModelInputs:
    """One row behind 0, 1, 7 and 63 pads, and as many columns for all; or all pads on its right."""
    columns = np.arange(LENGTH + max(PADS))[None] - np.array(PADS)[:, None] * (side == "left")
    mask = (columns >= 0) & (columns < LENGTH)
    tokens = np.where(mask, ids(LENGTH)[np.clip(columns, 0, LENGTH - 1)], 3)
    return ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))


@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_are_the_row(pair: Any, side: str) -> None:
    oracle, _, read = pair
    inputs, wanted = padded(side), torch_logits(oracle, ids(LENGTH))
    found = read(inputs)
    for row, mask in enumerate(np.asarray(inputs.attention_mask)):
        assert_near(found[row][mask], wanted)


def test_packed_rows_are_the_rows(pair: Any) -> None:
    oracle, _, read = pair
    sizes = (31, 1, 33, 5)
    segments = np.repeat(np.arange(1, 5), sizes)[None]
    inputs = ModelInputs(
        jnp.asarray(ids(LENGTH)[None], jnp.int32), jnp.ones((1, LENGTH), bool), jnp.asarray(segments)
    )
    (found,) = read(inputs)
    for stop, size in zip(np.cumsum(sizes), sizes, strict=True):
        assert_near(found[stop - size : stop], torch_logits(oracle, ids(LENGTH)[stop - size : stop]))


def test_64_decoded_tokens_are_the_row(pair: Any) -> None:
    oracle, loaded, _ = pair
    policy, total = loaded.model.policy(), LENGTH + NEW_TOKENS
    prompts = padded("left")
    tokens = prompts.tokens

    @jax.jit
    def run(params: Any) -> Any:
        cache = policy.init_cache(params, {}, prompts, tokens.shape[1] + NEW_TOKENS)
        _, cache = policy.decode(params, {}, prompts, cache)

        def step(cache: Any, token: Any) -> Any:
            new = ModelInputs(jnp.full((len(PADS), 1), token), jnp.ones((len(PADS), 1), bool))
            features, cache = policy.decode(params, {}, new, cache)
            return cache, policy.logits(params, {}, features.policy[:, 0])[..., :97]

        return jax.lax.scan(step, cache, jnp.asarray(ids(total)[LENGTH:], jnp.int32))[1]

    found, wanted = np.asarray(run(loaded.params)), torch_logits(oracle, ids(total))[LENGTH:]
    for row in range(len(PADS)):
        assert_near(found[:, row], wanted)


@pytest.mark.parametrize("case, key", [("falcon_h1", "time_step_limit"), ("nemotron_h", "time_step_min")])
def test_limits_of_steps_are_those_of_torchs_whole_rows(case: str, key: str, tmp_path: Any) -> None:
    """In torch its step of decoding ignores them, so greedy decoding is not compared."""
    from tests.models.parity import perturbed

    config = copy.deepcopy(CASES[case])
    setattr(config, key, (0.2, 0.9) if key == "time_step_limit" else 0.3)
    oracle = perturbed(config, 0)
    oracle.save_pretrained(tmp_path / "limited")
    inputs = ModelInputs(jnp.asarray(ids(LENGTH)[None], jnp.int32), jnp.ones((1, LENGTH), bool))
    (found,) = jrl_reader(load_checkpoint(tmp_path / "limited"))(inputs)
    assert_near(found, torch_logits(oracle, ids(LENGTH)))
    without = perturbed(CASES[case], 0)
    without.load_state_dict(oracle.state_dict())
    assert np.abs(torch_logits(without, ids(LENGTH)) - found).max() > 0.1

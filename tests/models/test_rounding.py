# SPDX-License-Identifier: Apache-2.0
"""Kernels that are rounded before a loop over tokens give what the master weights give."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import MixtralConfig

from jrl.mesh import path_name
from jrl.models.adapters.config import LoraConfig
from jrl.models.model import make_model
from jrl.rollout.generate import make_generate
from jrl.typing import Completions, PolicyFns
from jrl.typing.language import unrounded
from tests.models.family_cases_gemma4 import CASES as GEMMA4
from tests.rollout.programs import knobs
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_contexts, tiny_hf_config, tiny_prompts

MIXTRAL = MixtralConfig(
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=VOCAB_SIZE,
    max_position_embeddings=64,
    initializer_range=0.1,
    bos_token_id=EOS_ID,
    eos_token_id=EOS_ID,
)
LORA = LoraConfig(r=2, target_modules=("q_proj", "v_proj"))


def model(name: str, dtype: Any = jnp.bfloat16) -> tuple[PolicyFns, Any, Any]:
    family = name.removesuffix("-lora").removesuffix("-dora")
    known = {"mixtral": MIXTRAL, "gemma4": GEMMA4["gemma4_text"]}
    lm = make_model(known.get(family) or tiny_hf_config(family))
    split: dict[str, Any] = {"num_layers_unfrozen": -1}
    if family != name:
        split["adapter"] = dataclasses.replace(LORA, use_dora=name.endswith("dora"))
    params, frozen = lm.split_params(lm.init(jax.random.key(0)), key=jax.random.key(1), **split)
    return lm.policy(compute_dtype=dtype, **split), params, frozen


def sample(policy: PolicyFns, params: Any, frozen: Any, name: str) -> Completions:
    prompts = tiny_contexts(4) if name == "t5" else tiny_prompts(4)
    generate = jax.jit(make_generate(policy, max_new_tokens=6, eos_token_ids=(), pad_token_id=PAD_ID))
    found: Completions = generate(params, frozen, prompts, np.arange(4), knobs(), jax.random.key(2))
    return found


def dtypes(tree: Any) -> dict[str, str]:
    return {path_name(path): str(leaf.dtype) for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "gemma4", "t5", "llama-lora", "llama-dora"])
def test_samples_and_their_log_probabilities_are_the_same_to_the_bit(name: str) -> None:
    policy, params, frozen = model(name)
    wanted = sample(dataclasses.replace(policy, rounded=unrounded), params, frozen, name)
    found = sample(policy, params, frozen, name)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    kernels = {
        path: kind for path, kind in dtypes(policy.rounded({**frozen, **params})).items() if "kernel" in path
    }
    assert set(kernels.values()) == ({"float32"} if name == "llama-dora" else {"bfloat16"} | _routed(name))


def _routed(name: str) -> set[str]:
    """What stays float32: the router of experts."""
    return {"float32"} if name == "mixtral" else set()


def test_what_is_no_kernel_of_a_product_keeps_its_dtype() -> None:
    policy, params, frozen = model("mixtral")
    found = dtypes(policy.rounded({**frozen, **params}))
    kept = {path for path, kind in found.items() if kind == "float32"}
    assert found["embed/rounded"] == "bfloat16"
    assert {path.rsplit("/", 2)[-2] for path in kept} == {
        "attn_norm",
        "mlp_norm",
        "final_norm",
        "router",
        "embed",
    }


def test_a_table_that_is_looked_up_in_the_dtype_alone_is_read_as_its_rounded_copy() -> None:
    """Gemma 4's, of what layers read beside the stream, is the largest array of a small model."""
    policy, params, frozen = model("gemma4")
    found = policy.rounded({**frozen, **params})["layer_embed"]
    assert found["rounded"].dtype == jnp.bfloat16
    np.testing.assert_array_equal(found["rounded"], found["embedding"].astype(jnp.bfloat16))


def test_nothing_is_rounded_in_float32() -> None:
    policy, params, _ = model("gpt2", jnp.float32)
    jax.tree.map(np.testing.assert_array_equal, policy.rounded(params), params)
    assert set(dtypes(policy.rounded(params)).values()) == {"float32"}

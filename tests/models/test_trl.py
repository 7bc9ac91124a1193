# SPDX-License-Identifier: Apache-2.0
"""The real TRL opens a checkpoint with a linear value head and computes the same values.

Needs an environment of its own (TRL's newer releases have no value-head models, its older ones want
transformers 4): see tests/golden/make_trl_value_head.py, and name its interpreter in JRL_TRL_PYTHON.
"""

import os
import subprocess
from pathlib import Path

import jax
import numpy as np
import pytest

from jrl.models.checkpoint import save_checkpoint
from jrl.models.heads import init_value_head
from jrl.models.model import CausalLM
from jrl.typing import ModelInputs
from tests.tiny import VOCAB_SIZE, tiny_hf_config

pytestmark = [pytest.mark.parity, pytest.mark.slow]
SCRIPT = Path(__file__).parents[1] / "golden" / "make_trl_value_head.py"
PYTHON = os.environ.get("JRL_TRL_PYTHON")


@pytest.mark.skipif(PYTHON is None, reason="JRL_TRL_PYTHON names no interpreter with trl")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_trl_reads_a_linear_value_head(family, tmp_path):
    model = CausalLM.from_config(tiny_hf_config(family))
    params = model.init(jax.random.key(0))
    head = init_value_head("linear", 32, jax.random.key(1))
    params["v_head"] = jax.tree.map(lambda x: x + jax.random.normal(jax.random.key(2), x.shape), head)
    save_checkpoint(tmp_path / "m", model, params)
    tokens = np.random.default_rng(0).integers(2, VOCAB_SIZE, (3, 11)).astype(np.int32)
    np.save(tmp_path / "tokens.npy", tokens)
    subprocess.run(
        [PYTHON, SCRIPT, tmp_path / "m", tmp_path / "tokens.npy", tmp_path / "out.npz"], check=True
    )

    theirs = np.load(tmp_path / "out.npz")
    np.testing.assert_array_equal(theirs["summary_weight"], params["v_head"]["out"]["kernel"].T)
    policy = model.policy()
    inputs = {"tokens": tokens, "attention_mask": np.ones(tokens.shape, bool)}
    np.testing.assert_allclose(jax.jit(model.logits)(params, **inputs), theirs["logits"], atol=1e-4)
    values = jax.jit(lambda p: policy.heads(p, hidden_states(policy, p, inputs))["values"])(params)
    assert np.abs(theirs["values"]).max() > 1
    np.testing.assert_allclose(values, theirs["values"], atol=1e-4)


def hidden_states(policy, params, inputs):
    return policy.branch(params, {}, None, ModelInputs(**inputs), None).value

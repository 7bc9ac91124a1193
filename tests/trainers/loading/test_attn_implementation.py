# SPDX-License-Identifier: Apache-2.0
"""`model.attn_implementation` reaches the models that train, and is no reason to refuse a resume."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.mesh import make_mesh
from jrl.trainers.checkpoints.resume import check_config
from jrl.trainers.loading import setup
from jrl.trainers.loading.scorer import load_scorer
from jrl.trainers.loading.setup import load_policy
from jrl.typing import ModelInputs
from tests.trainers.runs import reward_config, sft_config

PADDED_LEFT = ModelInputs(jnp.asarray([[0, 5, 6], [5, 6, 7]]), jnp.asarray([[False, True, True], [True] * 3]))


def sections(implementation):
    return {"model": {"attn_implementation": implementation}}


@pytest.fixture
def mesh():
    return make_mesh(devices=jax.devices()[:1])


def test_of_a_policy_and_of_what_must_read_any_padding(checkpoint, tmp_path, mesh):
    bundle = load_policy(sft_config(checkpoint, tmp_path, **sections("xla")), mesh, with_value_head=False)

    def hidden(policy):
        return policy.branch(bundle.params, bundle.frozen, None, PADDED_LEFT, None).policy

    # Only a kernel answers with NaN.
    assert np.isnan(hidden(bundle.policy)[0]).all()
    assert np.isfinite(hidden(bundle.lenient_policy)).all()


def test_of_a_reward_model(checkpoint, tmp_path, mesh):
    def scores(implementation):
        config = reward_config(checkpoint, tmp_path, **sections(implementation))
        bundle = load_scorer(config, mesh, dropout=False)
        return bundle.scorer(bundle.params, bundle.frozen, PADDED_LEFT, None)

    assert np.isnan(scores("xla")).tolist() == [True, False]
    assert np.isfinite(scores("auto")).all() or jax.default_backend() == "gpu"


def test_what_does_not_serve_is_refused_before_weights_are_read(checkpoint, tmp_path, mesh):
    config = sft_config(checkpoint, tmp_path, **sections("cudnn"))  # which computes in float32
    with pytest.raises(ValueError, match=r"`model.attn_implementation` 'cudnn' does not serve here"):
        load_policy(config, mesh, with_value_head=False)


def test_virtual_tokens_are_refused_a_kernel_before_weights_are_read(checkpoint, tmp_path, mesh, monkeypatch):
    def read(*arguments):
        raise AssertionError("weights were read")

    monkeypatch.setattr(setup, "_load_model", read)
    config = sft_config(checkpoint, tmp_path, **sections("xla"))
    config.model.peft_config = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}
    with pytest.raises(ValueError, match="virtual tokens are read from a cache"):
        load_policy(config, mesh, with_value_head=False)


def test_a_run_resumes_with_another_one_and_from_before_there_was_the_field():
    check_config(
        {"model": {}, "train": {"seed": 1}}, {"model": {"attn_implementation": "auto"}, "train": {"seed": 1}}
    )
    check_config({"model": {"attn_implementation": "cudnn"}}, {"model": {"attn_implementation": "einsum"}})

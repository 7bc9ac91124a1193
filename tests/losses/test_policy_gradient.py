# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import KLTerm, Targets, clipped, policy_gradient_loss
from jrl.ops import kl_k3, sequence_ratio
from tests.losses.policy_gradient_cases import BATCH, CASES, WRITTEN, targets_of

# (dtype, relative tolerance); a gradient's is relative to its largest entry where it is smaller than a hundredth of it.
PRECISIONS = {"float32": 1e-5, "float64": 1e-10}


def test_every_case_is_written_in_parts():
    assert WRITTEN.keys() == CASES.keys() and len(CASES) == 39


@pytest.mark.parametrize("dtype", PRECISIONS)
@pytest.mark.parametrize("name", CASES)
def test_value_and_gradient_of_every_golden_case(name, dtype):
    wanted, written, tolerance = CASES[name], WRITTEN[name], PRECISIONS[dtype]
    with jax.enable_x64(dtype == "float64"):
        targets = targets_of(name, dtype)
        logprobs = jnp.asarray(np.where(written.mask, BATCH["logprobs"], np.nan), dtype)
        values = jnp.asarray(np.where(written.mask, BATCH["values"], np.nan), dtype)

        def loss(logprobs, values):
            given = {"values": values} if written.values else {}
            out = policy_gradient_loss(logprobs, targets, **written.parts, **given)
            return out.loss_sum / out.weight.astype(dtype)

        found, (gradient, gradient_values) = jax.value_and_grad(loss, (0, 1))(logprobs, values)
        close = {"rtol": tolerance, "atol": tolerance * 1e-2 * np.abs(wanted["grad"]).max()}
        assert found.dtype == dtype
        np.testing.assert_allclose(found, wanted["loss"], rtol=tolerance)
        np.testing.assert_allclose(gradient, wanted["grad"], **close)
        np.testing.assert_array_equal(gradient_values, np.zeros_like(gradient_values)) if not (
            written.values
        ) else np.testing.assert_allclose(gradient_values, wanted["grad_values"], **close)


def test_the_kl_term_takes_the_ratio_of_the_level_that_it_is_given():
    mask = jnp.array([[True, True, False]])
    logprobs, old, ref = (
        jnp.array([row]) for row in ([-1.0, -0.5, 0.0], [-0.7, -0.6, 0.0], [-0.4, -0.9, 0.0])
    )
    targets = Targets(old, None, jnp.zeros((1, 3)), None, mask, ref_logprobs=ref)
    of_row = KLTerm(1.0, kl_k3, off_policy=True, ratio=sequence_ratio)
    found = policy_gradient_loss(logprobs, targets, surrogate=clipped(clip_range=0.2), kl=of_row)
    wanted = np.exp((-0.3 + 0.1) / 2) * (np.expm1(0.6) - 0.6 + np.expm1(-0.4) + 0.4)
    np.testing.assert_allclose(found.loss_sum, wanted, rtol=1e-5)

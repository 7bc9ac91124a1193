# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import policy_gradient_loss
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

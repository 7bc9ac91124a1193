# SPDX-License-Identifier: Apache-2.0
"""Where a KL term's gradient points: one state, five actions, every expectation a sum."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.losses import KLTerm, Surrogate, Targets, policy_gradient_loss
from jrl.ops import kl_from_logits, kl_k1, kl_k2, kl_k3
from tests.exact.enumerable import GOLDEN

KL = GOLDEN["kl"]
FORMS = {"k1": kl_k1, "k2": kl_k2, "k3": kl_k3}
FULL = "full"
NOTHING = Surrogate(lambda ratio, logprobs, advantages: 0.0 * logprobs)


@pytest.fixture(autouse=True)
def _double():
    with jax.enable_x64(True):
        yield


def loss_and_gradient(name, *, off_policy, sampler):
    """jrl's loss and its ∇, with every action weighed by its probability under the sampler."""
    logits, ref = jnp.array(KL["logits"]), jax.nn.log_softmax(jnp.array(KL["ref_logits"]))
    old = jax.nn.log_softmax(jnp.array(sampler))[:, None]
    chances = jnp.exp(old)
    mask = jnp.ones((5, 1), bool)

    def loss(z):
        now = jax.nn.log_softmax(z)[:, None]
        # The shares make the mean over rows an expectation over actions.
        targets = Targets(old, None, 0.0 * old, None, mask, ref_logprobs=ref[:, None], shares=chances)
        whole = jnp.broadcast_to(kl_from_logits(z, ref), (5, 1)) if name == FULL else None
        kl = KLTerm(1.0, None if name == FULL else FORMS[name], off_policy)
        return policy_gradient_loss(now, targets, surrogate=NOTHING, kl=kl, full_kl=whole).loss_sum

    return jax.value_and_grad(loss)(logits)


def gradient_in_loss(name, *, off_policy=False):
    """∇ where the policy itself has sampled."""
    return np.asarray(loss_and_gradient(name, off_policy=off_policy, sampler=KL["logits"])[1])


def gradient_in_reward(name):
    """−∇ of REINFORCE with the detached estimate as a cost."""
    logits, ref = jnp.array(KL["logits"]), jax.nn.log_softmax(jnp.array(KL["ref_logits"]))
    now = jax.nn.log_softmax(logits)
    cost = jax.nn.softmax(logits) * FORMS[name](now, ref)
    return np.asarray(jax.grad(lambda z: jnp.sum(cost * jax.nn.log_softmax(z)))(logits))


REVERSE, FORWARD = np.array(KL["reverse_grad"]), np.array(KL["forward_grad"])


@pytest.mark.parametrize(
    ("found", "wanted"),
    [
        (lambda: gradient_in_loss("k1"), 0 * REVERSE),
        (lambda: gradient_in_loss("k2"), REVERSE),
        (lambda: gradient_in_loss("k3"), FORWARD),
        (lambda: gradient_in_loss(FULL), REVERSE),
        (lambda: gradient_in_loss("k1", off_policy=True), REVERSE),
        (lambda: gradient_in_loss("k3", off_policy=True), REVERSE),
        (lambda: gradient_in_reward("k1"), REVERSE),
        (lambda: gradient_in_reward("k3"), REVERSE - FORWARD),
    ],
    ids=["k1-loss", "k2-loss", "k3-loss", "full-loss", "ratio-k1", "ratio-k3", "k1-reward", "k3-reward"],
)
def test_the_direction_of_every_placement(found, wanted):
    np.testing.assert_allclose(found(), wanted, atol=1e-9)


@pytest.mark.parametrize("name", ["k1", "k3"])
def test_lore_3_5_off_policy_samples_need_the_ratio(name):
    sampler = [0.6, -0.7, 0.1, 0.5, -0.2]
    value, gradient = loss_and_gradient(name, off_policy=True, sampler=sampler)
    assert float(value) == pytest.approx(KL["reverse_kl"], abs=1e-9)
    np.testing.assert_allclose(gradient, REVERSE, atol=1e-9)
    value, gradient = loss_and_gradient(name, off_policy=False, sampler=sampler)
    assert abs(float(value) - KL["reverse_kl"]) > 1e-3
    assert np.abs(gradient - REVERSE).max() > 1e-3


def test_the_whole_divergence_needs_no_correction_for_another_sampler():
    value, gradient = loss_and_gradient(FULL, off_policy=False, sampler=[0.6, -0.7, 0.1, 0.5, -0.2])
    assert float(value) == pytest.approx(KL["reverse_kl"], abs=1e-9)
    np.testing.assert_allclose(gradient, REVERSE, atol=1e-9)


def test_what_is_refused_points_elsewhere():
    """k3 and k2 in the reward, and k2 with a ratio, are no gradient of the KL."""
    for found in (
        gradient_in_reward("k2"),
        gradient_in_reward("k3"),
        gradient_in_loss("k2", off_policy=True),
    ):
        assert np.abs(found - REVERSE).max() > 1e-3


def test_the_whole_divergence_in_the_reward_of_one_state_teaches_nothing():
    """KL(π ‖ π_ref) of the state does not depend on the action drawn: as its reward, it is a baseline."""
    logits = jnp.array(KL["logits"])
    gradient = jax.grad(lambda z: jnp.sum(jax.nn.softmax(logits) * KL["reverse_kl"] * jax.nn.log_softmax(z)))(
        logits
    )
    np.testing.assert_allclose(gradient, np.zeros(5), atol=1e-12)
    assert np.abs(REVERSE).max() > 0.1


def test_values():
    """E k1 = E k3 = KL; k2 is biased."""
    now, ref = (jax.nn.log_softmax(jnp.array(KL[name])) for name in ("logits", "ref_logits"))
    means = {name: float(jnp.sum(jnp.exp(now) * form(now, ref))) for name, form in FORMS.items()}
    assert means["k1"] == pytest.approx(KL["reverse_kl"], abs=1e-12)
    assert means["k3"] == pytest.approx(KL["reverse_kl"], abs=1e-12)
    assert means["k2"] == pytest.approx(0.360723, abs=1e-6)

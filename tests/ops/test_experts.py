# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import balance_loss, expert_load

E, K = 5, 2


def routed(rows: int, length: int, seed: int = 0):
    """Router scores, and the experts that they choose."""
    scores = 2 * jax.random.normal(jax.random.key(seed), (rows, length, E))
    return scores, jax.lax.top_k(scores, K)[1]


def summed(load):
    return jax.tree.map(lambda x: x.sum(axis=0), load)


@pytest.mark.parity
def test_equals_transformers_over_layers_and_real_tokens():
    torch = pytest.importorskip("torch")
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = [routed(3, 7, seed) for seed in range(2)]
    mask = jnp.arange(7)[None, :] < jnp.array([[7], [3], [1]])
    loads = [expert_load(jax.nn.softmax(scores, axis=-1), chosen, mask) for scores, chosen in layers]
    load = summed(jax.tree.map(jnp.add, *loads))
    gates = tuple(torch.tensor(np.asarray(scores).reshape(-1, E)) for scores, _ in layers)
    wanted = load_balancing_loss_func(gates, E, K, torch.tensor(np.asarray(mask)).long())
    np.testing.assert_allclose(balance_loss(load, load), float(wanted), atol=1e-6)


def test_is_the_number_of_visits_at_perfect_balance_and_grows_with_crowding():
    even = expert_load(
        jnp.full((1, E, E), 1 / E), jnp.arange(2 * E).reshape(1, E, 2) % E, jnp.ones((1, E), bool)
    )
    assert float(balance_loss(summed(even), summed(even))) == pytest.approx(K)
    one = jnp.zeros((1, E, E)).at[..., 0].set(1.0)
    crowded = summed(expert_load(one, jnp.zeros((1, E, 1), int), jnp.ones((1, E), bool)))
    assert float(balance_loss(crowded, crowded)) == pytest.approx(E)


def test_parts_add_up_to_the_whole():
    scores, chosen = routed(4, 6)
    mask = jnp.arange(6)[None, :] < jnp.array([[6], [2], [5], [0]])
    rows = expert_load(jax.nn.softmax(scores, axis=-1), chosen, mask)
    whole = summed(rows)
    parts = [balance_loss(jax.tree.map(lambda x, i=i: x[i], rows), whole) for i in range(4)]
    np.testing.assert_allclose(sum(parts), balance_loss(whole, whole), rtol=1e-6)
    assert float(parts[3]) == 0.0


def test_padding_that_is_no_number_counts_nothing():
    scores, chosen = routed(2, 4)
    mask = jnp.array([[True, True, False, False]] * 2)
    shares = jax.nn.softmax(scores, axis=-1)
    spoiled = expert_load(jnp.where(mask[..., None], shares, jnp.nan), chosen, mask)
    jax.tree.map(np.testing.assert_array_equal, spoiled, expert_load(shares, chosen, mask))


def test_gradients_pass_through_the_shares_alone():
    """d/ds of E·Σ f·P of one token: E·f times the softmax's own derivative."""
    scores = jnp.log(jnp.array([[[0.5, 0.3, 0.2]]]))

    def loss(scores):
        load = summed(
            expert_load(jax.nn.softmax(scores, axis=-1), jnp.array([[[0]]]), jnp.ones((1, 1), bool))
        )
        return balance_loss(load, load)

    # L = 3·p₀, so dL/ds = 3·p₀·(1[e = 0] − p).
    np.testing.assert_allclose(jax.grad(loss)(scores).ravel(), [0.75, -0.45, -0.3], atol=1e-6)


def test_without_a_token_there_is_no_loss():
    nothing = summed(expert_load(jnp.ones((1, 2, E)), jnp.zeros((1, 2, K), int), jnp.zeros((1, 2), bool)))
    assert float(balance_loss(nothing, nothing)) == 0.0

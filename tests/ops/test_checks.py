# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import jaxtyping
import pytest

from jrl.ops import clipped_surrogate, gae, place_scores, whiten
from jrl.ops.checks import check_batch, check_mask, check_positive, check_same_shape


@pytest.fixture
def annotations_off() -> Iterator[None]:
    """As for a user, who does not run jaxtyping's hook: the functions' own checks must speak."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


class TestCheckSameShape:
    def test_equal_shapes_pass(self):
        check_same_shape("values", jnp.zeros((2, 3)), "rewards", jnp.zeros((2, 3)))

    @pytest.mark.parametrize(
        ("shape", "hint"),
        [
            ((4, 16), "Is a bootstrap value or an unshifted column still attached?"),
            ((4, 14), "Was it shifted twice?"),
            ((4,), "does it need `place_scores` first?"),
            ((5, 15), r"\(5, 15\)\.$"),
        ],
    )
    def test_message_names_argument_expected_got_and_cause(self, shape, hint):
        expected = rf"`values` must have shape \(4, 15\) like `rewards`, got .*{hint}"
        with pytest.raises(ValueError, match=expected):
            check_same_shape("values", jnp.zeros(shape), "rewards", jnp.zeros((4, 15)))


class TestCheckMask:
    def test_numbers_are_refused(self):
        with pytest.raises(TypeError, match=r"`mask` must be bool, got int32\. Convert"):
            check_mask(jnp.ones((2, 3), jnp.int32))

    def test_every_array_is_compared_with_the_mask(self):
        with pytest.raises(ValueError, match=r"`values` must have shape \(2, 3\) like `mask`, got \(2, 4\)"):
            check_batch(jnp.ones((2, 3), bool), rewards=jnp.zeros((2, 3)), values=jnp.zeros((2, 4)))


class TestCheckPositive:
    @pytest.mark.parametrize("value", [0, -0.1, float("nan")])
    def test_refuses(self, value):
        with pytest.raises(ValueError, match="`clip_range` must be > 0"):
            check_positive("clip_range", value)

    def test_traced_scalars_pass(self):
        check_positive("clip_range", jnp.float32(-1))


@pytest.mark.usefixtures("annotations_off")
class TestPublicFunctionsCheck:
    def test_gae_with_a_bootstrap_value(self):
        with pytest.raises(ValueError, match=r"`values` must have shape .* Is a bootstrap value"):
            gae(jnp.zeros((1, 3)), jnp.zeros((1, 4)), jnp.ones((1, 3), bool), gamma=1.0, gae_lambda=1.0)

    def test_whiten_with_a_float_mask(self):
        with pytest.raises(TypeError, match="`mask` must be bool, got float32"):
            whiten(jnp.zeros((1, 3)), jnp.ones((1, 3)))

    def test_clipped_surrogate_with_sequence_advantages(self):
        with pytest.raises(ValueError, match=r"`advantages` must have shape .* One number a row"):
            clipped_surrogate(jnp.zeros((2, 3)), jnp.zeros((2, 3)), jnp.zeros(2), clip_range=0.2)

    def test_place_scores_with_too_many_scores(self):
        with pytest.raises(ValueError, match=r"`scores` must have shape \(2,\)"):
            place_scores(jnp.zeros(3), jnp.ones((2, 3), bool))

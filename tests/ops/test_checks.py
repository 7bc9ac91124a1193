# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Iterator

import jax.numpy as jnp
import jaxtyping
import pytest

from jrl.losses import bellman_targets, ddpo_loss, expectile_loss, implicit_rewards, reward_model_loss
from jrl.losses.dpo import pairs_from_logprobs
from jrl.ops import (
    clipped_surrogate,
    entropy_from_logits,
    gae,
    group_statistics,
    importance_ratio,
    kl_from_logits,
    kl_k1,
    logprobs_from_logits,
    place_scores,
    smallest_of_group,
    take_targets,
    whiten,
)
from jrl.ops.checks import check_batch, check_float, check_mask, check_positive, check_same_shape, check_share


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

    def test_the_mask_has_the_name_that_the_caller_gives_it(self):
        with pytest.raises(ValueError, match=r"`scores` must have shape \(2,\) like `valid`, got \(3,\)"):
            check_batch(jnp.ones(2, bool), name="valid", scores=jnp.zeros(3))
        with pytest.raises(TypeError, match="`valid` must be bool, got float32"):
            check_batch(jnp.ones(2), name="valid", scores=jnp.zeros(2))


class TestCheckFloat:
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
    def test_floats_pass(self, dtype):
        check_float("logits", jnp.zeros(2, dtype))

    @pytest.mark.parametrize(
        ("dtype", "hint"), [(jnp.int32, r"int32\. Are these token ids"), (jnp.bool_, "bool")]
    )
    def test_others_are_refused(self, dtype, hint):
        with pytest.raises(TypeError, match=f"`logits` must be of a float dtype, got {hint}"):
            check_float("logits", jnp.zeros(2, dtype))


class TestCheckPositive:
    @pytest.mark.parametrize("value", [0, -0.1, float("nan")])
    def test_refuses(self, value):
        with pytest.raises(ValueError, match="`clip_range` must be > 0"):
            check_positive("clip_range", value)

    def test_traced_scalars_pass(self):
        check_positive("clip_range", jnp.float32(-1))


class TestCheckShare:
    @pytest.mark.parametrize("value", [-0.1, 1.1, 7, float("nan")])
    def test_refuses(self, value):
        with pytest.raises(ValueError, match=r"`gamma` must be in \[0, 1\], got"):
            check_share("gamma", value)

    @pytest.mark.parametrize("value", [0, 1, 0.5, jnp.float32(7)])
    def test_its_ends_and_traced_scalars_pass(self, value):
        check_share("gamma", value)

    @pytest.mark.parametrize(
        ("argument", "call"),
        [
            ("gamma", lambda x, on: gae(x, x, on, gamma=2.0, gae_lambda=1.0)),
            ("gae_lambda", lambda x, on: gae(x, x, on, gamma=1.0, gae_lambda=-0.5)),
            ("gamma", lambda x, on: bellman_targets(x, x, on, gamma=2.0)),
            ("expectile", lambda x, on: expectile_loss(x, x, expectile=7.0)),
        ],
    )
    def test_functions_that_take_one(self, argument, call):
        with pytest.raises(ValueError, match=rf"`{argument}` must be in \[0, 1\], got"):
            call(jnp.zeros((1, 2)), jnp.ones((1, 2), bool))


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

    @pytest.mark.parametrize(
        "call",
        [
            lambda x: group_statistics(x, jnp.zeros(3, jnp.int32), jnp.ones(3, bool)),
            lambda x: smallest_of_group(x, jnp.zeros(3, jnp.int32), jnp.ones(3, bool), num_kept=1),
            lambda x: reward_model_loss(x, x, x, jnp.ones(3, bool), center_coef=0.0),
            lambda x: ddpo_loss(x, x, x, jnp.ones(3, bool), clip_range=0.1, advantage_clip=5.0),
            lambda x: ddpo_loss(
                *jnp.zeros((3, 3)), jnp.ones(3, bool), clip_range=0.1, advantage_clip=5.0, kl=x
            ),
        ],
    )
    def test_a_mask_called_valid_is_named_so(self, call):
        with pytest.raises(ValueError, match=r"must have shape \(3,\) like `valid`, got \(2,\)"):
            call(jnp.zeros(2))

    @pytest.mark.parametrize("position", [1, 2, 3])
    def test_pairs_are_not_broadcast(self, position):
        sums = [jnp.zeros(4) for _ in range(4)]
        sums[position] = jnp.zeros((4, 1))
        with pytest.raises(ValueError, match=r"_?\w+` must have shape \(4,\) like `chosen`, got \(4, 1\)"):
            pairs_from_logprobs(*sums)

    def test_implicit_rewards_are_not_broadcast(self):
        with pytest.raises(ValueError, match=r"`ref_logprobs` must have shape \(4,\) like `logprobs`, got"):
            implicit_rewards(jnp.zeros(4), jnp.zeros((4, 1)), beta=0.1)

    @pytest.mark.parametrize("function", [logprobs_from_logits, take_targets])
    def test_targets_are_not_broadcast(self, function):
        with pytest.raises(ValueError, match=r"`targets` must have shape \(2, 3\) like .*, got \(2, 1\)"):
            function(jnp.zeros((2, 3, 5)), jnp.zeros((2, 1), jnp.int32))

    def test_reference_logits_are_not_broadcast(self):
        with pytest.raises(ValueError, match=r"`ref_logits` must have shape \(2, 5\) like `logits`, got"):
            kl_from_logits(jnp.zeros((2, 5)), jnp.zeros((1, 5)))

    @pytest.mark.parametrize(
        ("argument", "call"),
        [
            ("logits", lambda ids: logprobs_from_logits(ids, ids[0])),
            ("logits", entropy_from_logits),
            ("logits", lambda ids: kl_from_logits(ids, jnp.zeros((2, 2)))),
            ("ref_logits", lambda ids: kl_from_logits(jnp.zeros((2, 2)), ids)),
            ("chosen", lambda ids: pairs_from_logprobs(ids[0], *jnp.zeros((3, 2)))),
            ("ref_rejected", lambda ids: pairs_from_logprobs(*jnp.zeros((3, 2)), ids[0])),
            ("logprobs", lambda ids: implicit_rewards(ids[0], jnp.zeros(2), beta=0.1)),
            ("logprobs", lambda ids: kl_k1(ids, jnp.zeros((2, 2)))),
            ("old_logprobs", lambda ids: importance_ratio(jnp.zeros((2, 2)), ids)),
        ],
    )
    def test_whole_numbers_are_no_logits(self, argument, call):
        with pytest.raises(TypeError, match=f"`{argument}` must be of a float dtype, got int32"):
            call(jnp.zeros((2, 2), jnp.int32))

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import inspect
import re
import types
import typing
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

import jrl.losses
import jrl.ops
from jrl.losses import (
    DIVERGENCES,
    bellman_targets,
    ddpo_loss,
    expectile_loss,
    implicit_rewards,
    reward_model_loss,
)
from jrl.losses.dpo import pairs_from_logprobs
from jrl.ops import (
    bounded_log_ratio,
    cispo_loss,
    clip_events,
    clipped_surrogate,
    decoupled_advantages,
    dppo_kl_loss,
    dppo_tv_loss,
    entropy_from_logits,
    gae,
    group_relative_advantages,
    group_statistics,
    group_token_shares,
    importance_ratio,
    kl_from_logits,
    kl_k1,
    leave_one_out_advantages,
    length_weighted_advantages,
    logprobs_from_logits,
    mean_scaled_advantages,
    place_scores,
    ratio_clip_events,
    smallest_of_group,
    sum_of_group,
    take_targets,
    token_mean,
    vespo_loss,
    whiten,
)
from jrl.ops.checks import (
    check_array,
    check_batch,
    check_float,
    check_integer,
    check_mask,
    check_positive,
    check_same_shape,
    check_share,
)
from jrl.ops.token_reads import read_tokens

ADVANTAGES = [
    group_relative_advantages,
    leave_one_out_advantages,
    mean_scaled_advantages,
    lambda scores, groups, valid: length_weighted_advantages(scores, scores, groups, valid),
]
VESPO = {"k_pos": 2.0, "lambda_pos": 3.0, "k_neg": 3.0, "lambda_neg": 2.0}


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


class TestCheckInteger:
    @pytest.mark.parametrize("dtype", [jnp.int32, jnp.int8, jnp.uint32])
    def test_whole_numbers_pass(self, dtype):
        check_integer("targets", jnp.zeros(2, dtype))

    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bool_])
    def test_others_are_refused(self, dtype):
        with pytest.raises(TypeError, match="`targets` must be of an integer dtype, got "):
            check_integer("targets", jnp.zeros(2, dtype))


@pytest.mark.usefixtures("annotations_off")
class TestCheckArray:
    @pytest.mark.parametrize("array", [jnp.zeros(2), np.zeros(2), np.float32(1)])
    def test_arrays_pass(self, array):
        check_array("values", array)

    @pytest.mark.parametrize(("value", "kind"), [([1.0], "list"), (1.0, "float"), (None, "NoneType")])
    @pytest.mark.parametrize(
        "check",
        [
            check_array,
            check_float,
            check_integer,
            lambda name, value: check_mask(value, name=name),
            lambda name, value: check_same_shape(name, value, "rewards", jnp.zeros(1)),
            lambda name, value: check_same_shape("rewards", jnp.zeros(1), name, value),
        ],
    )
    def test_others_are_refused_by_every_check(self, check, value, kind):
        with pytest.raises(TypeError, match=f"`values` must be an array, got {kind}"):
            check("values", value)


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

    @pytest.mark.parametrize(
        ("argument", "call"),
        [
            ("old_logprobs", bounded_log_ratio),
            ("advantages", lambda one, many: clip_events(one, one, many, clip_range=0.2)),
            ("old_logprobs", lambda one, many: clip_events(one, many, one, clip_range=0.2)),
            ("advantages", lambda one, many: ratio_clip_events(one, many, clip_range=0.2)),
            ("advantages", lambda one, many: vespo_loss(one, one, many, **VESPO)),
            ("advantages", lambda one, many: cispo_loss(one, one, many, clip_range_high=0.2)),
            ("advantages", lambda one, many: dppo_tv_loss(one, one, many, delta=0.15)),
            ("advantages", lambda one, many: dppo_kl_loss(one, one, many, delta=0.15)),
        ],
    )
    def test_a_column_is_not_broadcast(self, argument, call):
        with pytest.raises(ValueError, match=rf"`{argument}` must have shape \(2, 1\) like .*, got \(2, 3\)"):
            call(jnp.ones((2, 1)), jnp.ones((2, 3)))

    def test_one_ratio_is_not_broadcast_over_actions(self):
        with pytest.raises(
            ValueError, match=r"`ratio` must have shape \(2, 3\) like `logprobs`, got \(2, 1\)"
        ):
            vespo_loss(jnp.ones((2, 1)), jnp.ones((2, 3)), jnp.ones((2, 3)), **VESPO)

    @pytest.mark.parametrize("advantages", ADVANTAGES)
    def test_one_flag_is_not_broadcast_over_scores(self, advantages):
        with pytest.raises(ValueError, match=r"must have shape \(1,\) like `valid`, got \(3,\)"):
            advantages(jnp.ones(3), jnp.zeros(3, jnp.int32), jnp.ones(1, bool))

    @pytest.mark.parametrize("statistics", [*ADVANTAGES, group_statistics])
    def test_groups_are_whole_numbers(self, statistics):
        with pytest.raises(TypeError, match="`groups` must be of an integer dtype, got float32"):
            statistics(jnp.ones(3), jnp.zeros(3), jnp.ones(3, bool))

    def test_several_reward_functions_are_not_broadcast(self):
        scores, groups, valid = jnp.ones((3, 2)), jnp.zeros(3, jnp.int32), jnp.ones(3, bool)
        with pytest.raises(ValueError, match=r"`weights` must have shape \(2,\), .*, got \(1,\)"):
            decoupled_advantages(scores, jnp.ones(1), groups, valid)
        with pytest.raises(
            ValueError, match=r"`valid` must have shape \(3,\) like `scores\[:, 0\]`, got \(1,\)"
        ):
            decoupled_advantages(scores, jnp.ones(2), groups, jnp.ones(1, bool))
        with pytest.raises(TypeError, match="`groups` must be of an integer dtype"):
            decoupled_advantages(scores, jnp.ones(2), jnp.zeros(3), valid)

    def test_groups_of_other_rows_are_refused(self):
        with pytest.raises(ValueError, match=r"`groups` must have shape \(3,\) .*, got \(1,\)"):
            group_token_shares(jnp.ones((3, 2), bool), jnp.zeros(1, jnp.int32))
        with pytest.raises(ValueError, match=r"`x` must have shape \(1,\) like `groups`, got \(3,\)"):
            sum_of_group(jnp.ones(3), jnp.zeros(1, jnp.int32))

    @pytest.mark.parametrize("function", [logprobs_from_logits, take_targets, read_tokens])
    def test_targets_are_whole_numbers(self, function):
        with pytest.raises(TypeError, match="`targets` must be of an integer dtype, got float32"):
            function(jnp.zeros((2, 3)), jnp.zeros(2))

    @pytest.mark.parametrize(
        ("argument", "call"),
        [
            ("logprobs", lambda x: bounded_log_ratio(x, jnp.zeros(2))),
            ("old_logprobs", lambda x: importance_ratio(jnp.zeros(2), x)),
            ("targets", lambda x: logprobs_from_logits(jnp.zeros((2, 3)), x)),
            ("x", lambda x: take_targets(x, jnp.zeros(2, jnp.int32))),
            ("mask", lambda x: token_mean(jnp.zeros(2), x)),
            ("scores", lambda x: leave_one_out_advantages(x, jnp.zeros(2, jnp.int32), jnp.ones(2, bool))),
            ("groups", lambda x: leave_one_out_advantages(jnp.zeros(2), x, jnp.ones(2, bool))),
            ("valid", lambda x: leave_one_out_advantages(jnp.zeros(2), jnp.zeros(2, jnp.int32), x)),
            (
                "weights",
                lambda x: decoupled_advantages(
                    jnp.zeros((3, 2)), x, jnp.zeros(3, jnp.int32), jnp.ones(3, bool)
                ),
            ),
        ],
    )
    def test_a_list_is_no_array(self, argument, call):
        with pytest.raises(TypeError, match=f"`{argument}` must be an array, got list"):
            call([0.0, 1.0])

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


SIZES = {"B": 3, "N": 3, "T": 3, "L": 3, "V": 5, "D": 2, "F": 2, "Y": 2, "X": 2, "C": 2, "Q": 2, "1": 1}
SIZES |= {"E": 4, "M": 1, "P": 2, "S": 5, "k": 2}
SIZES |= {"*shape": 3, "*rows": 3}
ANY_DTYPE = {
    ("states_at", "hidden"): "a gather: trlX's `batched_index_select` takes it of ids, too",
    ("window_states", "hidden"): "the same gather",
    ("guided_output", "timesteps"): "whole numbers, or those of a flow",
    ("step_of_timesteps", "timesteps"): "the same",
    ("join", "completions.logprobs"): "moved to its columns, and not computed with",
    **{
        (ratio, "advantages"): "not read: there because `geometric_clipped_ratio` reads it"
        for ratio in ("token_ratio", "sequence_ratio", "sequence_token_ratio", "product_ratio")
    },
}
"""Arguments of public functions that are annotated as floats and may be whole numbers, and why."""
MADE_BY_JRL = {
    jrl.losses.Pairs: "`make_pairs` and `pairs_from_logprobs` look at what they make it of",
    jrl.ops.DenoisingSteps: "`denoising_steps` makes it",
    jrl.typing.ExpertLoad: "`expert_load` makes it",
    jrl.ops.RunningMoments: "`init_moments` and `update_moments` make it",
}
"""Tuples of arrays that nobody fills by hand, and so nobody looks at again."""
OPTIONS = {
    "terms": [("sigmoid", 1.0)],
    "divergence": DIVERGENCES["reverse_kl"],
    "ld_alpha": 0.5,
    "reference_free": False,
    "use_weighting": True,
    "schedule": jrl.ops.NoiseSchedule(clip_sample=False),
    "surrogate": jrl.losses.clipped(clip_range=0.2),
    "value_loss": jrl.losses.ValueLoss(clip_range=0.2, coef=0.5),
    "predict": lambda latents, timesteps, context: latents,
    "logits_fn": lambda hidden: hidden,
    "guidance_scale": 2.0,
    "max_length": 4,
    "vocab_size": 2,
}


def public_functions() -> dict[str, types.FunctionType]:
    return {
        name: function
        for room in (jrl.ops, jrl.losses)
        for name in room.__all__
        if inspect.isfunction(function := inspect.unwrap(getattr(room, name)))
    }


def array_kind(hint: typing.Any) -> typing.Any:
    """The array that an annotation speaks of, `| None` left aside; None where it speaks of none."""
    either = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    kinds = [x for x in either if hasattr(x, "dim_str")]
    return kinds[0] if kinds and int not in either else None


def speaks_of(kind: typing.Any, dtype: str) -> bool:
    return isinstance(kind.dtypes, list | tuple) and dtype in kind.dtypes


def made_of(kind: typing.Any) -> jax.Array:
    shape = tuple(SIZES[size] for size in kind.dim_str.split())
    dtype = next((x for x in ("bool", "int32") if speaks_of(kind, x)), "float32")
    return jnp.ones(shape, dtype)


def leaves(
    hints: dict[str, typing.Any], where: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], typing.Any]]:
    """(path, kind) of every array among arguments, those inside of named tuples included."""
    for name, hint in hints.items():
        if (kind := array_kind(hint)) is not None:
            yield (*where, name), kind
        elif inspect.isclass(hint) and hasattr(hint, "_fields"):
            yield from leaves(typing.get_type_hints(hint), (*where, name))


def call_with(function: types.FunctionType, arrays: dict[tuple[str, ...], jax.Array]) -> typing.Any:
    """Calls it with these arrays, and with some number wherever a number must be given."""

    def value(name: str, hint: typing.Any, where: tuple[str, ...]) -> typing.Any:
        if (*where, name) in arrays:
            return arrays[*where, name]
        if name in OPTIONS:
            return OPTIONS[name]
        if inspect.isclass(hint) and hasattr(hint, "_fields"):
            inner = typing.get_type_hints(hint)
            return hint(**{field: value(field, inner[field], (*where, name)) for field in hint._fields})
        return 1 if hint is int else 0.5

    hints = typing.get_type_hints(function)
    given = {
        name: value(name, hints[name], ())
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.default is parameter.empty or name in OPTIONS or any(path[0] == name for path in arrays)
    }
    return function(**given)


def floats_of(name: str, function: types.FunctionType) -> list[tuple[str, ...]]:
    hints = typing.get_type_hints(function)
    hints = {x: hint for x, hint in hints.items() if x != "return" and hint not in list(MADE_BY_JRL)}
    # A scalar is a number, and a whole number is one.
    return [path for path, kind in leaves(hints) if kind.dim_str and speaks_of(kind, "float32")]


FUNCTIONS = {name: function for name, function in public_functions().items() if floats_of(name, function)}


@pytest.mark.usefixtures("annotations_off")
class TestWholeNumbersAreNoFloats:
    def arrays(self, function: types.FunctionType) -> dict[tuple[str, ...], jax.Array]:
        hints = typing.get_type_hints(function)
        del hints["return"]
        return {path: made_of(kind) for path, kind in leaves(hints)}

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_each_array_by_itself(self, name):
        function = FUNCTIONS[name]
        given = self.arrays(function)
        jax.eval_shape(
            lambda arrays: call_with(function, arrays), given
        )  # the call is right but for the dtype
        silent = []
        for path in floats_of(name, function):
            wrong = {**given, path: given[path].astype(jnp.int32)}
            try:
                jax.eval_shape(lambda arrays: call_with(function, arrays), wrong)
            except TypeError as error:
                said = re.search(rf"`([\w.]+\.)?{path[-1]}` must be of a float dtype, got int32", str(error))
                silent += [] if said else [(path, str(error))]
            else:
                silent.append((path, "passed"))
        allowed = {argument for function, argument in ANY_DTYPE if function == name}
        assert {".".join(path) for path, _ in silent} == allowed, silent

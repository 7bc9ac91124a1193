# SPDX-License-Identifier: Apache-2.0
"""Every algorithm of the table against its golden value, refusals, and the update with groups."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.forward import Reader
from jrl.learners.credit import Credit, Scaling, rollout_metrics
from jrl.learners.groups import decoupled_scores, selection_metrics
from jrl.learners.grpo import grpo_policy_loss, grpo_recipe
from jrl.learners.grpo_algorithms import ALGORITHMS, algorithm, switches
from jrl.learners.grpo_config import GRPOConfig
from jrl.learners.guards import skip_nonfinite
from jrl.learners.online import init_online_state, make_online_update, shuffled_rows
from jrl.learners.recipe import Recipe
from jrl.methods.grpo import GRPO
from jrl.ops import decoupled_advantages, finalize, place_scores
from jrl.trl.group_method import GRPOMethod
from jrl.trl.group_method import grpo_recipe as trl_recipe
from jrl.typing import ModelInputs, Predictions, Rollouts, Scored, Sequences
from tests.learners.batches import CHUNK_BYTES, sgd
from tests.learners.tabular import tabular_batch, tabular_params, tabular_policy
from tests.losses.policy_gradient_cases import BATCH, CASES, GROUPS, MASK, advantages_of
from tests.losses.policy_gradient_cases import GOLDEN as EVERYTHING

LENGTH = {"gen_kwargs": {"max_new_tokens": 8}}
# Algorithm -> (golden case, fields in which the case differs from the table).
GOLDEN: dict[str, tuple[str, dict[str, Any]]] = {
    "grpo": ("grpo", {}),
    "dr_grpo": ("dr_grpo", {}),
    "dapo": ("dapo", {"drop_uniform_groups": False, "max_sampling_rounds": 1}),
    "bnpo": ("bnpo", {}),
    "gspo": ("gspo", {}),
    "gspo_token": ("gspo_token", {"epsilon": 0.1, "epsilon_high": 0.1}),
    "cispo": ("cispo", {}),
    "rloo": ("rloo", {}),
    "reinforce_pp": ("reinforce_pp", {}),
    "reinforce_pp_baseline": ("reinforce_pp_baseline", {"beta": 0.0}),
    "remax": ("remax", {"beta": 0.0}),
    "opo": ("opo", {}),
    "sapo": ("sapo", {}),
    "gmpo": ("gmpo", {}),
    "maxrl": ("maxrl", {}),
    "luspo": ("luspo", {"epsilon": 0.1, "epsilon_high": 0.1}),
    "vespo": ("vespo", {}),
    "dppo": ("dppo_tv", {}),
    "gfpo": ("gfpo", {"num_generations": 4, "num_kept": 2}),
}
# jrl divides by a deviation of ddof 0 and ε 1e-6, the golden cases by TRL's of ddof 1 and ε 1e-4.
OWN_ADVANTAGES = ("dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline", "remax", "opo", "maxrl")


def garbage(name: str) -> Any:
    return jnp.asarray(np.where(MASK, BATCH[name], np.nan), jnp.float32)


def golden_rollouts() -> Rollouts:
    mask = jnp.asarray(MASK)
    scores = jnp.asarray(BATCH["scores"], jnp.float32)
    inputs: Any = None  # no model reads them here
    return Rollouts(
        Sequences(inputs, jnp.zeros(12, jnp.int32), mask),
        Scored(garbage("old_logprobs"), garbage("ref_logprobs")),
        place_scores(scores, mask),
        garbage("sampler_logprobs"),
        jnp.asarray(GROUPS),
        jnp.repeat(jnp.asarray(BATCH["greedy_scores"], jnp.float32), 4),
    )


def objective(recipe: Recipe, rollouts: Rollouts) -> tuple[float, np.ndarray]:
    """Loss of an iteration's rollouts as one minibatch, and its gradient."""
    kept = recipe.selected(rollouts)
    mask = kept.sequences.mask
    rewards, _ = recipe.scaled_rewards(kept, recipe.scaling.init())
    coef = 0.0 if recipe.kl is None else recipe.kl.coef
    targets = recipe.targets(rewards, kept.scored, mask, coef, kept.groups, kept.sampler_logprobs)

    def loss(logprobs: jax.Array) -> jax.Array:
        out = recipe.loss(Predictions(logprobs, None, None, lambda: logprobs[..., None]), targets)
        return out.loss_sum / out.weight

    value, gradient = jax.value_and_grad(loss)(garbage("logprobs"))
    return float(value), np.asarray(gradient)


@pytest.mark.parametrize("case", ["gdpo", "gdpo_failed"])
def test_gdpo_is_its_golden_case(case: str) -> None:
    """TRL's deviations in the place of jrl's; a row of which no function spoke has no action."""
    name = "scores_two_functions" + case.removeprefix("gdpo")
    scores = np.asarray(BATCH[name], np.float32)
    mask = MASK & ~np.isnan(scores).all(axis=1)[:, None]
    weights = [1.0, 0.5]
    fields = {"multi_objective_aggregation": "normalize_then_sum", "reward_weights": weights}
    recipe = grpo_recipe(algorithm("grpo", **LENGTH, **fields))
    assert recipe.reward_weights == (1.0, 0.5)
    rollouts = golden_rollouts()
    rollouts = rollouts._replace(
        sequences=rollouts.sequences._replace(mask=jnp.asarray(mask)), scores_by_function=jnp.asarray(scores)
    )

    def advantages(recipe: Recipe) -> np.ndarray:
        rewards, _ = recipe.scaled_rewards(recipe.selected(rollouts), recipe.scaling.init())
        found = recipe.targets(rewards, rollouts.scored, rollouts.sequences.mask, 0.0, rollouts.groups)
        return np.asarray(found.advantages)

    as_trl = replace(recipe, aggregate=decoupled_scores((1.0, 0.5), ddof=1, epsilon=1e-4))
    wanted = np.where(mask, np.asarray(EVERYTHING["advantages"][case]["value"])[:, None], 0.0)
    np.testing.assert_allclose(advantages(as_trl), wanted, rtol=1e-5, atol=1e-6)
    own = decoupled_advantages(
        jnp.asarray(scores), jnp.asarray(weights), jnp.asarray(GROUPS), jnp.asarray(mask.any(axis=1))
    )
    np.testing.assert_allclose(advantages(recipe), np.where(mask, np.asarray(own)[:, None], 0.0), rtol=1e-6)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"reward_weights": []}, r"`method.reward_weights` must be a list of finite numbers.*got \[\]"),
        ({"reward_weights": [1.0, float("nan")]}, "must be a list of finite numbers"),
        ({"reward_weights": 2.0}, "must be a list of finite numbers.*got 2.0"),
        ({"reward_weights": ["1"]}, "must be a list of finite numbers"),
        ({"multi_objective_aggregation": "gdpo"}, "must be one of"),
        *(
            ({"multi_objective_aggregation": "normalize_then_sum"} | fields, f"`method.{field}` must be")
            for field, fields in {
                "estimator": {"estimator": "leave_one_out"},
                "missing_eos_penalty": {"missing_eos_penalty": 1.0},
                "overlong_buffer_len": {"overlong_buffer_len": 2},
                "reward_clip_range": {"reward_clip_range": 1.0},
                "kl_placement": {"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
                "drop_uniform_groups": {"drop_uniform_groups": True},
                "keep_by": {"num_kept": 2, "keep_by": "reward_per_token"},
            }.items()
        ),
    ],
)
def test_rewards_that_contradict_each_other(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**fields)


def test_an_aggregate_needs_the_scores_of_each_function() -> None:
    recipe = grpo_recipe(GRPOConfig(multi_objective_aggregation="normalize_then_sum"))
    with pytest.raises(ValueError, match="`scores_by_function` and `groups` of the rollouts must be there"):
        recipe.scaled_rewards(golden_rollouts(), recipe.scaling.init())
    with pytest.raises(ValueError, match="`aggregate` of a recipe must be None beside `scaling`"):
        replace(recipe, scaling=Scaling(clip_range=1.0))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_switches_are_of_their_algorithm_whatever_they_are_laid_over(name: str) -> None:
    for under in ALGORITHMS:
        size = ALGORITHMS[name].get("num_generations", 8)
        laid = {**vars(algorithm(under)), "num_generations": 8, **switches(name)}
        assert GRPOConfig(**laid) == algorithm(name, num_generations=size), under
    assert name not in GRPO.variants or GRPO.switches(name) == switches(name)


def test_the_golden_table_has_every_algorithm() -> None:
    assert GOLDEN.keys() == ALGORITHMS.keys()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_an_algorithm_is_its_golden_case(name: str) -> None:
    case, changes = GOLDEN[name]
    recipe, rollouts = grpo_recipe(algorithm(name, **LENGTH, **changes)), golden_rollouts()
    if name not in OWN_ADVANTAGES:
        fixed = jnp.asarray(advantages_of(CASES[case]["advantages"]), jnp.float32)
        recipe = replace(recipe, estimate=lambda *given: Credit(fixed, None))
    value, gradient = objective(recipe, rollouts)
    wanted = CASES[case]
    assert value == pytest.approx(wanted["loss"], rel=1e-5)
    largest = np.abs(wanted["grad"]).max()
    np.testing.assert_allclose(gradient, wanted["grad"], rtol=1e-5, atol=1e-6 * largest)


@pytest.mark.parametrize(
    ("mode", "clip", "case"),
    [
        ("token_truncate", (0.0, 1.5), "dapo_token_truncate"),
        ("token_mask", (0.0, 1.5), "dapo_token_mask"),
        ("token_mask", (0.5, 2.0), "dapo_icepop"),
        ("sequence_truncate", (0.0, 1.6), "dapo_sequence_truncate"),
        ("sequence_mask", (0.0, 1.6), "dapo_sequence_mask"),
    ],
)
def test_a_correction_is_its_golden_case(mode: str, clip: tuple[float, float], case: str) -> None:
    config = algorithm(
        "dapo",
        drop_uniform_groups=False,
        max_sampling_rounds=1,
        importance_sampling_mode=mode,
        importance_sampling_clip_min=clip[0],
        importance_sampling_clip_max=clip[1],
    )
    fixed = jnp.asarray(advantages_of("grpo_std1"), jnp.float32)
    recipe = replace(grpo_recipe(config), estimate=lambda *given: Credit(fixed, None))
    value, gradient = objective(recipe, golden_rollouts())
    assert value == pytest.approx(CASES[case]["loss"], rel=1e-5)
    np.testing.assert_allclose(gradient, CASES[case]["grad"], rtol=1e-5, atol=1e-6)


def test_the_papers_mean_over_each_prompts_tokens_is_its_golden_case() -> None:
    config = algorithm("dapo", drop_uniform_groups=False, max_sampling_rounds=1, reduction="group_token")
    fixed = jnp.asarray(advantages_of("grpo_std1"), jnp.float32)
    recipe = replace(grpo_recipe(config), estimate=lambda *given: Credit(fixed, None))
    assert objective(recipe, golden_rollouts())[0] == pytest.approx(
        CASES["dapo_group_mean"]["loss"], rel=1e-5
    )


class TestSelection:
    def test_a_failed_reward_leaves_row_and_denominator(self) -> None:
        """As if the row were not there: its group's mean is of the other three."""
        rollouts, recipe = golden_rollouts(), grpo_recipe(GRPOConfig(**LENGTH))
        failed = rollouts._replace(rewards=rollouts.rewards.at[9].set(jnp.nan))
        without = rollouts._replace(
            sequences=rollouts.sequences._replace(mask=rollouts.sequences.mask.at[9].set(False))
        )
        value, gradient = objective(recipe, failed)
        wanted, wanted_gradient = objective(recipe, without)
        assert value == wanted and np.isfinite(value)
        np.testing.assert_array_equal(gradient, wanted_gradient)

    def test_lore_4_17_dropped_groups_leave_the_denominators_and_are_counted(self) -> None:
        """The second of three groups has equal scores: a mean over tokens is then over the other two."""
        rollouts, recipe = golden_rollouts(), grpo_recipe(algorithm("dapo"))
        dropped = rollouts._replace(kept=jnp.asarray(np.arange(12) // 4 != 1))
        tokens, uniform = MASK.sum(), MASK[4:8].sum()
        value, gradient = objective(recipe, dropped)
        plain, plain_gradient = objective(recipe, rollouts)
        assert value == pytest.approx(plain * tokens / (tokens - uniform), rel=1e-6)
        np.testing.assert_allclose(gradient, plain_gradient * tokens / (tokens - uniform), rtol=1e-5)
        selected = recipe.selected(dropped)
        targets = recipe.targets(
            selected.rewards, selected.scored, selected.sequences.mask, 0.0, selected.groups
        )
        shown = finalize(recipe.watch(dropped, selected, targets))
        assert shown["rollout/kept_fraction"] == pytest.approx(2 / 3)

    def test_a_missing_log_probability_of_the_sampler_leaves_the_row(self) -> None:
        rollouts = golden_rollouts()
        assert rollouts.sampler_logprobs is not None
        broken = rollouts._replace(sampler_logprobs=rollouts.sampler_logprobs.at[3, 1].set(jnp.nan))
        recipe = grpo_recipe(algorithm("dapo", importance_sampling_mode="token_truncate"))
        found = recipe.selected(broken).sequences.mask
        np.testing.assert_array_equal(np.flatnonzero(~np.asarray(found).any(axis=1)), [3])

    def test_what_a_recipe_needs_must_be_there(self) -> None:
        rollouts = golden_rollouts()
        for config, missing in (
            (GRPOConfig(), "groups"),
            (algorithm("remax"), "greedy_scores"),
            (algorithm("cispo", importance_sampling_mode="token_mask"), "sampler_logprobs"),
            (algorithm("dapo", reduction="group_token"), "groups"),
        ):
            with pytest.raises(ValueError, match=f"`{missing}`"):
                objective(grpo_recipe(config), rollouts._replace(**{missing: None}))


class TestAnchor:
    def test_the_samplers_log_probabilities_may_be_the_old_ones(self) -> None:
        rollouts = golden_rollouts()
        recipe = grpo_recipe(algorithm("dapo", old_logprobs_from_sampler=True))
        assert rollouts.sampler_logprobs is not None
        swapped = rollouts._replace(scored=rollouts.scored._replace(logprobs=rollouts.sampler_logprobs))
        assert objective(recipe, rollouts)[0] == objective(grpo_recipe(algorithm("dapo")), swapped)[0]

    def test_where_sampler_and_policy_agree_every_correction_returns_the_bits_of_none(self) -> None:
        rollouts = golden_rollouts()
        same = rollouts._replace(sampler_logprobs=rollouts.scored.logprobs)
        plain, gradient = objective(grpo_recipe(algorithm("dapo")), same)
        for fields in (
            *(
                {"importance_sampling_mode": f"{level}_{form}"}
                for level, form in (
                    ("token", "truncate"),
                    ("token", "mask"),
                    ("sequence", "truncate"),
                    ("sequence", "mask"),
                    ("geometric", "mask"),
                )
            ),
            {"old_logprobs_from_sampler": True},
        ):
            found, found_gradient = objective(grpo_recipe(algorithm("dapo", **fields)), same)
            assert found == plain
            np.testing.assert_array_equal(found_gradient, gradient)

    def test_lore_6_3_a_correction_beside_the_samplers_anchor_is_refused(self) -> None:
        with pytest.raises(ValueError, match=r"`method\.old_logprobs_from_sampler` must be False beside"):
            GRPOConfig(old_logprobs_from_sampler=True, importance_sampling_mode="token_truncate")
        recipe = grpo_recipe(GRPOConfig(importance_sampling_mode="token_truncate"))
        with pytest.raises(ValueError, match="`old_logprobs_from_sampler` of a recipe must be False"):
            replace(recipe, old_logprobs_from_sampler=True)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"estimator": "group_relativ"}, r"`method.estimator` must be one of .* Did you mean `group_relative`\?"),
    ({"surrogate": "cliped"}, r"Did you mean `clipped`\?"),
    ({"importance_sampling_mode": "token_trunc"}, r"Did you mean `token_truncate`\?"),
    (
        {"num_generations": 1},
        "`method.num_generations` must be at least 2: `estimator: group_relative` compares",
    ),
    (
        {"num_rollouts": 100},
        "`method.num_generations` must be at least 1 and a divisor of `method.num_rollouts` = 100",
    ),
    ({"importance_sampling_level": "sequence", "reduction": "token"}, "`method.reduction` must be"),
    ({"importance_sampling_level": "sequence_token", "reduction": "group_token"}, "`method.reduction`"),
    ({"beta": 0.1, "kl_estimator": "k1"}, "the gradient of k1 is noise"),
    ({"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k3"}, '`method.kl_estimator` must be "k1" in'),
    ({"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k2"}, '`method.kl_estimator` must be "k1" in'),
    ({"beta": 0.1, "use_bias_correction_kl": True}, "`method.use_bias_correction_kl` must be False unless"),
    (
        {"beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1", "scale_rewards": "group"},
        "`method.scale_rewards` must be not",
    ),
    ({"surrogate": "reinforce", "num_iterations": 2}, "`method.num_iterations` must be 1 beside"),
    ({"surrogate": "plain"}, '`method.importance_sampling_level` must be "geometric" beside'),
    ({"surrogate": "vespo"}, '`method.importance_sampling_level` must be "product" beside'),
    (
        {"surrogate": "dppo_kl", "importance_sampling_level": "sequence"},
        '`method.importance_sampling_level` must be "token"',
    ),
    (
        {"estimator": "returns_to_go", "importance_sampling_level": "sequence"},
        '`method.importance_sampling_level` must be "token" or',
    ),
    ({"estimator": "returns_to_go", "off_policy_mask_threshold": 0.1}, "`method.off_policy_mask_threshold`"),
    (
        {
            "importance_sampling_mode": "token_mask",
            "gen_kwargs": {"max_new_tokens": 4, "top_p": 0.9},
        },
        '`method.importance_sampling_mode` must be "none" where rollouts are sampled with `top_p`',
    ),
    ({"delta": 1.2}, "`method.delta` must be above 1"),
    ({"dual_clip": 1.0}, "`method.dual_clip` must be above 1"),
    ({"num_kept": 1}, "`method.num_kept` must be in"),
    (
        {"estimator": "mean_scaled", "missing_eos_penalty": 1.0},
        "`method.missing_eos_penalty` must be None beside `estimator: mean_scaled`: scores may not fall below 0",
    ),
    (
        {"estimator": "mean_scaled", "beta": 0.1, "kl_placement": "reward", "kl_estimator": "k1"},
        '`method.kl_placement` must be "loss" beside `estimator: mean_scaled`',
    ),
]


@pytest.mark.parametrize(
    ("fields", "message"), REFUSED, ids=lambda x: "-".join(x) if isinstance(x, dict) else ""
)
def test_switches_that_do_not_fit_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        GRPOConfig(**fields)


def test_an_unknown_algorithm_is_refused_with_the_closest_one() -> None:
    with pytest.raises(ValueError, match=r"`name` must be one of .* got 'drgrpo'.* Did you mean `dr_grpo`\?"):
        algorithm("drgrpo")


PARAMS, FROZEN = tabular_params(seed=3)


@pytest.fixture(scope="module")
def batch() -> Rollouts:
    """Eight rows of two prompts, ragged; the groups are interleaved."""
    rollouts = tabular_batch(PARAMS, FROZEN, jax.random.key(7), num_rows=8)
    scores = jnp.array([1.0, 0.0, 0.5, 1.0, 0.0, 0.2, 0.9, 0.0])
    return rollouts._replace(
        rewards=place_scores(scores, rollouts.sequences.mask),
        groups=jnp.array([5, 2, 5, 2, 5, 2, 5, 2]),
        sampler_logprobs=rollouts.scored.logprobs + 0.1,
        greedy_scores=jnp.full(8, 0.4),
    )


def train(
    config: GRPOConfig, batch: Rollouts, *, minibatch_size: int, is_its_own_past: bool = False
) -> tuple[Any, dict[str, float]]:
    recipe, optimizer = grpo_recipe(config), sgd(lr=100.0)
    update = make_online_update(
        Reader(tabular_policy(), chunk_bytes=CHUNK_BYTES),
        optimizer,
        recipe,
        batch_size=8,
        minibatch_size=minibatch_size,
        is_its_own_past=is_its_own_past,
    )
    state = init_online_state(PARAMS, optimizer, recipe)
    state, metrics = jax.jit(update)(state, FROZEN, batch, jax.random.key(0))
    return state.train.params, finalize(metrics)


def moved(params: Any) -> np.ndarray:
    return np.asarray(params["table"]["kernel"] - PARAMS["table"]["kernel"])


REDUCTIONS = ["constant", "token", "sequence", "sequence_sum", "group_token"]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_lore_5_2_the_step_is_the_same_for_every_number_of_microbatches(
    reduction: str, batch: Rollouts
) -> None:
    """Ragged rows, groups split over microbatches: 1, 2, 4 and 8 of them."""
    config = algorithm("dapo", reduction=reduction, num_generations=4, num_rollouts=8, **LENGTH)
    whole, metrics = train(config, batch, minibatch_size=8)
    assert metrics["grpo/ratio_max_dev_first_minibatch"] < 1e-6
    assert np.abs(moved(whole)).max() > 1e-3
    for size in (4, 2, 1):
        cut, _ = train(config, batch, minibatch_size=size)
        np.testing.assert_allclose(moved(cut), moved(whole), atol=1e-6 * np.abs(moved(whole)).max() + 1e-8)


@pytest.mark.parametrize("name", ["dapo", "gspo", "cispo", "rloo", "gmpo", "sapo", "vespo", "dppo"])
def test_a_single_step_needs_no_scores_of_its_policy(name: str, batch: Rollouts) -> None:
    """What stands in their place is not read: NaN."""
    config = algorithm(name, beta=0.0, num_generations=4, num_rollouts=8, **LENGTH)
    assert grpo_recipe(config).is_its_own_past(1)
    scored, metrics = train(config, batch, minibatch_size=4)
    blank = batch._replace(scored=batch.scored._replace(logprobs=jnp.full_like(batch.rewards, jnp.nan)))
    own, own_metrics = train(config, blank, minibatch_size=4, is_its_own_past=True)
    np.testing.assert_allclose(moved(own), moved(scored), atol=1e-6 * np.abs(moved(scored)).max())
    assert own_metrics["grpo/ratio_max_dev_first_minibatch"] == 0
    assert {n: own_metrics[n] for n in metrics} == pytest.approx(metrics, rel=1e-5, abs=1e-6)


def test_a_single_step_says_how_far_the_sampler_was(batch: Rollouts) -> None:
    config = algorithm("dapo", num_generations=4, num_rollouts=8, **LENGTH)
    off = batch._replace(sampler_logprobs=batch.scored.logprobs - 0.25)
    _, metrics = train(config, off, minibatch_size=2, is_its_own_past=True)
    assert metrics["sampler/max_difference"] == pytest.approx(0.25, rel=1e-5)
    assert metrics["sampler/ratio"] == pytest.approx(np.exp(0.25), rel=1e-5)


def test_several_steps_have_a_past_that_is_not_their_own(batch: Rollouts) -> None:
    config = algorithm("dapo", num_generations=4, num_rollouts=8, num_iterations=2, **LENGTH)
    recipe = grpo_recipe(config)
    assert recipe.needs_scoring(2) and not recipe.is_its_own_past(2)
    with pytest.raises(
        ValueError, match="`is_its_own_past` must be False for several steps an iteration, got 2"
    ):
        train(config, batch, minibatch_size=8, is_its_own_past=True)


@pytest.mark.parametrize(
    "fields",
    [
        {"beta": 0.1},
        {"importance_sampling_mode": "token_truncate"},
        {"old_logprobs_from_sampler": True, "beta": 0.1},
    ],
)
def test_a_single_step_is_scored_where_somebody_else_reads_it(fields: dict[str, Any]) -> None:
    recipe = grpo_recipe(algorithm("grpo", **LENGTH, **fields))
    assert recipe.needs_scoring(1) and not recipe.is_its_own_past(1)


def test_who_believes_the_sampler_holds_a_single_step_against_it() -> None:
    recipe = grpo_recipe(algorithm("dapo", **LENGTH, old_logprobs_from_sampler=True))
    assert not recipe.needs_scoring(1) and not recipe.is_its_own_past(1)


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_a_microbatch_that_holds_nothing_changes_no_step(reduction: str, batch: Rollouts) -> None:
    """One of two groups is left out: microbatches of it alone weigh nothing, and the step is that of the other."""
    config = algorithm("dapo", reduction=reduction, num_generations=4, num_rollouts=8, **LENGTH)
    assert batch.groups is not None
    kept = batch._replace(kept=batch.groups == 5)
    whole, _ = train(config, kept, minibatch_size=8)
    alone = jax.tree.map(lambda x: x[::2], kept)
    for size in (4, 1):
        cut, _ = train(config, kept, minibatch_size=size)
        np.testing.assert_allclose(moved(cut), moved(whole), atol=1e-6 * np.abs(moved(whole)).max() + 1e-8)
    without, _ = train(config, alone, minibatch_size=4)
    np.testing.assert_allclose(moved(without), moved(whole), atol=1e-6 * np.abs(moved(whole)).max() + 1e-8)


@pytest.mark.parametrize("drop", [True, False])
def test_where_all_groups_are_uniform_no_step_is_taken(drop: bool, batch: Rollouts) -> None:
    uniform = batch._replace(rewards=jnp.where(batch.rewards != 0, 0.0, batch.rewards))
    if drop:
        uniform = uniform._replace(kept=jnp.zeros(8, bool))
    config = algorithm("dapo", num_generations=4, num_rollouts=8)
    params, metrics = train(config, uniform, minibatch_size=4)
    np.testing.assert_array_equal(moved(params), np.zeros((8, 8)))
    assert metrics["rollout/kept_fraction"] == (not drop) and metrics["optim/skipped_steps"] == 0


def test_the_record_shows_what_a_correction_weighs(batch: Rollouts) -> None:
    """A sampler that is 0.1 nats surer: every weight is e^−0.1."""
    config = algorithm("cispo", num_generations=4, num_rollouts=8, importance_sampling_mode="token_truncate")
    _, metrics = train(config, batch, minibatch_size=8)
    assert metrics["sampler/weight_max"] == pytest.approx(np.exp(-0.1), rel=1e-5)
    assert metrics["sampler/ess"] == pytest.approx(1.0) and metrics["sampler/dropped_fraction"] == 0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {
                "importance_sampling_mode": "token_truncate",
                "gen_kwargs": {"max_new_tokens": 4, "min_new_tokens": 2},
            },
            "none",
        ),
        (
            {"old_logprobs_from_sampler": True, "gen_kwargs": {"max_new_tokens": 4, "top_k": 2}},
            "False where rollouts",
        ),
        (
            {"off_policy_mask_threshold": 0.5, "gen_kwargs": {"max_new_tokens": 4, "top_p": [0.9, 1.0]}},
            "None where",
        ),
        ({"off_policy_mask_threshold": -1.0}, "positive, or None"),
        ({"entropy_coef": -1.0}, "at least 0"),
        ({"vespo_k_pos": -1.0}, "positive"),
        ({"max_sampling_rounds": 0}, "`method.max_sampling_rounds` must be at least 1"),
        ({"max_sampling_rounds": 3}, "must be 1 unless `drop_uniform_groups`"),
        ({"prompts_per_round": 32}, "must be None unless `drop_uniform_groups`"),
        (
            {"drop_uniform_groups": True, "prompts_per_round": 0},
            "`method.prompts_per_round` must be at least 1",
        ),
        (
            {"drop_uniform_groups": True, "prompts_per_round": 5, "max_sampling_rounds": 3},
            "`method.max_sampling_rounds` must be at least 4: an iteration learns from 16 prompts",
        ),
        (
            {"drop_uniform_groups": True, "max_sampling_rounds": 2, "estimator": "greedy"},
            "which has no groups",
        ),
        ({"mask_truncated_completions": True, "missing_eos_penalty": 1.0}, "whose rows it would leave out"),
        ({"overlong_buffer_len": 41}, r"in \[1, max_new_tokens\] = \[1, 40\], or None, got 41"),
        ({"overlong_buffer_len": 0}, "`method.overlong_buffer_len` must be in"),
        ({"overlong_penalty": 0.0}, "`method.overlong_penalty` must be positive"),
        ({"overlong_buffer_len": 4, "estimator": "mean_scaled"}, "which compares scores as they are"),
        (
            {"estimator": "returns_to_go", "num_generations": 1, "reduction": "group_token"},
            "where each prompt has one sample",
        ),
    ],
)
def test_what_a_reading_found_accepted_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        GRPOConfig(**fields)


def test_rollouts_decide_and_not_evaluations() -> None:
    """`gen_experience_kwargs` takes the place of `gen_kwargs`, and a sweep samples rollouts at its first value."""
    GRPOConfig(
        importance_sampling_mode="token_truncate",
        gen_kwargs={"max_new_tokens": 8, "top_k": 50},
        gen_experience_kwargs={"max_new_tokens": 8},
    )
    swept = GRPOConfig(gen_kwargs={"max_new_tokens": [2, 6], "top_p": [1.0, 0.9]})
    reduction = grpo_policy_loss(swept).reduction
    _, weight = reduction(jnp.ones((3, 2)), jnp.ones((3, 2), bool))
    assert float(weight) == 3 * 2


def test_metrics_are_of_all_rollouts_also_of_those_that_are_left_out() -> None:
    """Scores 1 1, 1 1, 1 0: the first two groups teach nothing, and are rollouts all the same."""
    recipe = grpo_recipe(algorithm("dapo", num_generations=2, num_rollouts=6))
    scores = jnp.array([1.0, 1, 1, 1, 1, 0])
    mask = jnp.ones((6, 1), bool)
    inputs = ModelInputs(jnp.zeros((6, 2), jnp.int32), jnp.ones((6, 2), bool))
    zeros = jnp.zeros((6, 1))
    rollouts = Rollouts(
        Sequences(inputs, jnp.zeros(6, jnp.int32), mask),
        Scored(zeros),
        scores[:, None],
        zeros,
        jnp.arange(6) // 2,
        kept=jnp.arange(6) >= 4,
    )
    kept = recipe.selected(rollouts)
    assert jnp.any(kept.sequences.mask, axis=1).tolist() == [False] * 4 + [True] * 2
    credit = Credit(zeros, None)
    found = finalize(
        rollout_metrics(rollouts, credit, kl_penalty=None, prefix="grpo", learned=kept.sequences.mask)
        | selection_metrics(rollouts, kept)
    )
    assert found["reward/mean"] == pytest.approx(5 / 6) and found["completion/length_mean"] == 1
    assert found["rollout/kept_fraction"] == pytest.approx(2 / 6)


EMPTY = jnp.array([1, 5, 9, 13])


def test_rows_without_actions_come_last_or_among_the_others() -> None:
    """In 64 orders each of the four steps has on average one of the four empty rows, where they are spread."""
    mask = jnp.ones((16, 3), bool).at[EMPTY].set(False)
    keys = jax.random.split(jax.random.key(0), 64)

    def empty_of_steps(spread: bool) -> np.ndarray:
        orders = jax.vmap(lambda key: shuffled_rows(mask, key, spread_empty=spread))(keys)
        assert jnp.array_equal(jnp.sort(orders, axis=1), jnp.tile(jnp.arange(16), (64, 1)))
        return np.asarray(jnp.isin(orders, EMPTY).reshape(64, 4, 4).sum(axis=2).mean(axis=0))

    assert empty_of_steps(False).tolist() == [0, 0, 0, 4]
    assert np.all(np.abs(empty_of_steps(True) - 1) < 0.3)
    full = jnp.ones((16, 3), bool)
    assert jnp.array_equal(shuffled_rows(full, keys[0]), shuffled_rows(full, keys[0], spread_empty=True))


def test_a_step_of_nothing_but_empty_rows_changes_nothing() -> None:
    """Though its loss counts them: AdamW would still move by its moments and its decay."""
    params, frozen = tabular_params(seed=0)
    batch = tabular_batch(params, frozen, jax.random.key(1), num_rows=8)
    mask = batch.sequences.mask.at[4:].set(False)
    batch = batch._replace(sequences=batch.sequences._replace(mask=mask), groups=jnp.arange(8) // 4)
    recipe = replace(trl_recipe(GRPOMethod(loss_type="grpo", num_generations=4)), spread_empty=False)
    optimizer = skip_nonfinite(optax.adamw(1e-2, weight_decay=0.1))
    update = make_online_update(
        Reader(tabular_policy(), chunk_bytes=CHUNK_BYTES), optimizer, recipe, batch_size=4, minibatch_size=2
    )
    state = init_online_state(params, optimizer, recipe)
    whole, _ = update(state, frozen, batch, jax.random.key(2))
    first, _ = update(state, frozen, batch, jax.random.key(2), jnp.int32(1))
    assert (int(whole.train.step), int(first.train.step)) == (2, 1)
    moved = jax.tree.map(lambda new, old: float(jnp.abs(new - old).max()), first.train.params, params)
    assert max(jax.tree.leaves(moved)) > 0
    jax.tree.map(np.testing.assert_array_equal, whole.train.params, first.train.params)
    jax.tree.map(np.testing.assert_array_equal, whole.train.opt_state, first.train.opt_state)

# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of reward models."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

LOSS = "jrl/losses/reward_model.py"
LEARNER = "jrl/learners/reward_model.py"
SCORER = "jrl/models/scorer.py"
LOSS_TESTS = "tests/losses/test_reward_model.py"
LEARNER_TESTS = "tests/learners/test_reward_model.py"

PATCHES = [
    Mutation(  # the logarithm of a probability that is 0 in float32
        rule="8.4",
        file=LOSS,
        old="jax.nn.softplus(rejected_scores - chosen_scores + margins)",
        new="-jnp.log(jax.nn.sigmoid(chosen_scores - rejected_scores - margins))",
        test=f"{LOSS_TESTS}::TestStability::test_lore_8_4_extreme_margins_are_finite",
    ),
    Mutation(  # the worse text is preferred
        rule="8.4",
        file=LOSS,
        old="jax.nn.softplus(rejected_scores - chosen_scores + margins)",
        new="jax.nn.softplus(chosen_scores - rejected_scores + margins)",
        test=f"{LOSS_TESTS}::TestIdentities::test_lore_8_4_swapping_the_pair_negates_the_margin",
    ),
    Mutation(  # a margin eases what it should ask for
        rule="8.4",
        file=LOSS,
        old="jax.nn.softplus(rejected_scores - chosen_scores + margins)",
        new="jax.nn.softplus(rejected_scores - chosen_scores - margins)",
        test=f"{LOSS_TESTS}::TestGolden::test_lore_8_4_two_pairs",
    ),
    Mutation(  # a tie is a success
        rule="8.4",
        file=LOSS,
        old='"reward_model/accuracy": mean_metric(chosen > rejected, valid)',
        new='"reward_model/accuracy": mean_metric(chosen >= rejected, valid)',
        test=f"{LOSS_TESTS}::TestIdentities::"
        "test_lore_8_4_a_zero_head_starts_at_ln_two_and_ties_are_no_success",
    ),
    Mutation(  # each score is pulled to the other instead of the sum to 0
        rule="8.4",
        file=LOSS,
        old="jnp.square(chosen_scores + rejected_scores)",
        new="jnp.square(chosen_scores - rejected_scores)",
        test=f"{LOSS_TESTS}::TestAgainstTRL::test_lore_8_4_values_and_gradients_of_trl_1_16",
    ),
    Mutation(  # the two texts of a pair change places
        rule="8.4",
        file=LEARNER,
        old="interleave(batch.chosen, batch.rejected)",
        new="interleave(batch.rejected, batch.chosen)",
        test=f"{LEARNER_TESTS}::test_lore_8_4_one_step_by_hand",
    ),
    Mutation(  # one half after the other, read as if pairs stood side by side
        rule="8.4",
        file="jrl/learners/forward.py",
        old="jnp.stack([x, y], axis=1)",
        new="jnp.stack([x, y], axis=0)",
        test=f"{LEARNER_TESTS}::test_lore_8_4_one_step_by_hand",
    ),
    Mutation(  # pairs that only fill the batch up count
        rule="8.4",
        file=LEARNER,
        old="taken._replace(valid=taken.valid & rows.valid)",
        new="taken._replace(valid=rows.valid)",
        test=f"{LEARNER_TESTS}::test_lore_8_4_one_step_by_hand",
    ),
    Mutation(  # the score is read at the last column
        rule="4.7",
        file="jrl/models/classifier.py",
        old="in_axes=(2, None), out_axes=1)(per_token, attention_mask)",
        new="in_axes=(2, None), out_axes=1)(per_token, jnp.ones_like(attention_mask))",
        test="tests/models/test_scorer.py::test_lore_4_7_padding_on_either_side_changes_nothing",
    ),
]

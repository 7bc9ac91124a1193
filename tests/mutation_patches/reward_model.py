# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of reward models."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # the logarithm of a probability that is 0 in float32
    Mutation("8.4", "jrl.ops.logistic.logistic_loss",
             "-jax.nn.log_sigmoid(logits)", "-jax.numpy.log(jax.nn.sigmoid(logits))",
             "tests/losses/test_reward_model.py::TestStability::test_lore_8_4_extreme_margins_are_finite"),
    # the worse text is preferred
    Mutation("8.4", "jrl.losses.reward_model.pairwise_loss",
             "chosen_scores - rejected_scores - margins", "rejected_scores - chosen_scores - margins",
             "tests/losses/test_reward_model.py::TestIdentities::test_lore_8_4_swapping_the_pair_negates_the_margin"),
    # a margin eases what it should ask for
    Mutation("8.4", "jrl.losses.reward_model.pairwise_loss",
             "chosen_scores - rejected_scores - margins", "chosen_scores - rejected_scores + margins",
             "tests/losses/test_reward_model.py::TestGolden::test_lore_8_4_two_pairs"),
    # a tie is a success
    Mutation("8.4", "jrl.losses.reward_model.reward_model_loss",
             "chosen > rejected", "chosen >= rejected",
             "tests/losses/test_reward_model.py::TestIdentities::"
             "test_lore_8_4_a_zero_head_starts_at_ln_two_and_ties_are_no_success"),
    # each score is pulled to the other instead of the sum to 0
    Mutation("8.4", "jrl.losses.reward_model.centering_loss",
             "chosen_scores + rejected_scores", "chosen_scores - rejected_scores",
             "tests/losses/test_reward_model.py::TestAgainstTRL::test_lore_8_4_values_and_gradients_of_trl_1_16"),
    # the two texts of a pair change places
    Mutation("8.4", "jrl.learners.reward_model.reward_model_objective",
             "interleave(batch.chosen, batch.rejected)", "interleave(batch.rejected, batch.chosen)",
             "tests/learners/test_reward_model.py::test_lore_8_4_one_step_by_hand"),
    # one half after the other, read as if pairs stood side by side
    Mutation("8.4", "jrl.learners.forward.interleave.both",
             "_(axis=1)", "_(axis=0)",
             "tests/learners/test_reward_model.py::test_lore_8_4_one_step_by_hand"),
    # pairs that only fill the batch up count
    Mutation("8.4", "jrl.learners.reward_model.make_reward_model_update.update.loss",
             "taken.valid & rows.valid", "rows.valid",
             "tests/learners/test_reward_model.py::test_lore_8_4_one_step_by_hand"),
    # the score is read at the last column
    Mutation("4.7", "jrl.models.classifier.read_scores",
             "jax.vmap(last_token_scores, in_axes=(2, None), out_axes=1)(per_token, attention_mask)",
             "jax.vmap(last_token_scores, in_axes=(2, None), out_axes=1)(per_token, jnp.ones_like(attention_mask))",
             "tests/models/test_scorer.py::test_lore_4_7_padding_on_either_side_changes_nothing"),
]

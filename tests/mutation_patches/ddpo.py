# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of DDPO."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # the density of all elements together: a ratio that no clip range fits
    Mutation("8.8", "jrl.ops.gaussian._mean_square",
             "jnp.mean", "jnp.sum",
             "tests/ops/test_gaussian.py::TestLogprob::test_lore_8_8_it_is_scipys_density_averaged_over_elements"),
    # the deviation's logarithm is forgotten
    Mutation("8.8", "jrl.ops.gaussian.gaussian_logprob",
             "-_mean_square(x - mean) / (2.0 * jnp.square(std)) - jnp.log(std)",
             "-_mean_square(x - mean) / (2.0 * jnp.square(std))",
             "tests/ops/test_gaussian.py::TestLogprob::test_lore_8_8_it_is_scipys_density_averaged_over_elements"),
    # the last step ends at noise 0, where there is no density
    Mutation("8.8", "jrl.ops.noise_schedule.denoising_steps",
             "noise_next / noise_now", "noise_next",
             "tests/ops/test_ddim.py::test_lore_8_8_golden_steps"),
    # the noise of a flow's SDE without the drift that keeps its marginals
    Mutation("8.8", "jrl.ops.flow_schedule.flow_steps",
             "after - rate * length / (2.0 * now)", "after",
             "tests/ops/test_flow_schedule.py::TestSteps::test_lore_8_8_they_are_the_published_ones"),
    # the learner guides otherwise than the sampler
    Mutation("8.8", "jrl.learners.ddpo_objective.guided_means",
             "config.sample_guidance_scale if config.train_cfg else 1.0", "1.0",
             "tests/rollout/test_diffuse.py::TestLogprobs::"
             "test_lore_8_8_the_learner_finds_the_samplers_log_probabilities"),
    # the learner reads the state after the step it is asked for
    Mutation("8.8", "jrl.learners.ddpo_objective.rows_of_batch",
             "take_rows(states, first)", "take_rows(states, first + 1)",
             "tests/rollout/test_diffuse.py::TestLogprobs::"
             "test_lore_8_8_the_learner_finds_the_samplers_log_probabilities"),
    # the action is differentiated
    Mutation("8.8", "jrl.ops.ddim.ddim_logprob",
             "gaussian_logprob(jax.lax.stop_gradient(next_latents), mean, std)",
             "gaussian_logprob(next_latents, jax.lax.stop_gradient(mean), std)",
             "tests/learners/test_ddpo.py::TestBandit::test_lore_8_8_the_gradient_is_the_noise_over_the_deviation"),
    # steps that are left out are trained all the same
    Mutation("8.8", "jrl.learners.ddpo_order.shuffled_order.one_pass",
             "candidates[chosen]", "chosen",
             "tests/learners/test_ddpo_order.py::TestOrder::"
             "test_lore_8_8_fewer_steps_are_random_ones_of_those_allowed"),
    # every prompt is judged by all
    Mutation("8.8", "jrl.rollout.prompt_statistics.prompt_advantages",
             "np.asarray(kept[key]) if is_tracked else values", "values",
             "tests/rollout/test_prompt_statistics.py::TestByPrompt::test_lore_8_8_statistics_are_kept_by_prompt"),
    # rounding makes an advantage of nothing
    Mutation("4.9", "jrl.rollout.prompt_statistics.group_advantages",
             "np.ptp(values[rows])", "True",
             "tests/rollout/test_prompt_statistics.py::TestGroups::"
             "test_lore_4_9_a_group_without_spread_has_advantage_zero"),
    # the deviation of all where that of the group is asked for
    Mutation("4.10", "jrl.rollout.prompt_statistics.group_advantages",
             "values[rows].std() if std == 'group' else values.std()", "values.std()",
             "tests/rollout/test_prompt_statistics.py::TestGroups::test_lore_4_10_which_deviation_divides"),
    # all rows draw the same noise
    Mutation("9.1", "jrl.rollout.diffuse.make_diffuse.diffuse.noise_at",
             "jax.vmap(lambda key: draw(jax.random.fold_in(key, step)))(step_keys)",
             "jax.random.normal(step_keys[0], (step_keys.shape[0], *latent_shape))",
             "tests/rollout/test_diffuse.py::TestRows::test_lore_9_1_a_sample_depends_on_its_own_keys_alone"),
    # a sample's steps follow from its place
    Mutation("9.1", "jrl.learners.ddpo_order.shuffled_order.one_pass",
             "jnp.arange(num_samples)", "-jnp.arange(-num_samples, 0)",
             "tests/learners/test_ddpo_order.py::TestOrder::"
             "test_lore_9_1_a_samples_steps_do_not_depend_on_how_many_there_are"),
    # the sum over a microbatch is divided at once
    Mutation("5.2", "jrl.losses.ddpo.ddpo_loss",
             "masked_sum(losses, valid)", "masked_sum(losses, valid) / weight",
             "tests/learners/test_ddpo.py::TestExactness::test_lore_5_2_microbatches_do_not_change_the_step"),
    # gradients flow into the old log-probabilities
    Mutation("5.6", "jrl.losses.ddpo.ddpo_loss",
             "jax.lax.stop_gradient(zero_masked(x, valid))", "zero_masked(x, valid)",
             "tests/losses/test_ddpo.py::TestGradient::test_lore_5_6_none_flows_into_old_log_probs_and_advantages"),
    # samples are judged by those of other prompts
    Mutation("4.13", "jrl.trainers.diffusion.ddpo_experience.Collector._advantages",
             "np.arange(len(rewards)) // method.sample_images_per_prompt",
             "np.arange(len(rewards)) % method.sample_images_per_prompt",
             "tests/trainers/diffusion/test_ddpo_experience.py::test_lore_4_13_samples_of_a_prompt_stay_together"),
    # prompts are drawn once an image
    Mutation("4.13", "jrl.trainers.diffusion.ddpo_prompts.draw_prompts",
             "[prompt for prompt in drawn for _ in range(images_per_prompt)]",
             "[prompt for _ in range(images_per_prompt) for prompt in drawn]",
             "tests/trainers/diffusion/test_ddpo_experience.py::test_lore_4_13_samples_of_a_prompt_stay_together"),
]

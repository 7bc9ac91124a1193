# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules of DDPO."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

GAUSSIAN = "jrl/ops/gaussian.py"
SCHEDULE = "jrl/ops/noise_schedule.py"
DDIM = "jrl/ops/ddim.py"
STATISTICS = "jrl/ops/prompt_statistics.py"
LOSS = "jrl/losses/ddpo.py"
SAMPLER = "jrl/rollout/diffuse.py"
OBJECTIVE = "jrl/learners/ddpo_objective.py"
ORDER = "jrl/learners/ddpo_order.py"
COLLECTOR = "jrl/trainers/ddpo_experience.py"
TOGETHER = "tests/trainers/test_ddpo_collecting.py::test_lore_4_13_samples_of_a_prompt_stay_together"

PATCHES = [
    Mutation(  # the density of all elements together: a ratio that no clip range fits
        rule="8.8",
        file=GAUSSIAN,
        old="    return jnp.mean(jnp.square(x), axis=tuple(range(1, x.ndim)))\n",
        new="    return jnp.sum(jnp.square(x), axis=tuple(range(1, x.ndim)))\n",
        test="tests/ops/test_gaussian.py::TestLogprob::"
        "test_lore_8_8_it_is_scipys_density_averaged_over_elements",
    ),
    Mutation(  # the deviation's logarithm is forgotten
        rule="8.8",
        file=GAUSSIAN,
        old=" - jnp.log(std) - _HALF_LOG_TWO_PI",
        new=" - _HALF_LOG_TWO_PI",
        test="tests/ops/test_gaussian.py::TestLogprob::"
        "test_lore_8_8_it_is_scipys_density_averaged_over_elements",
    ),
    Mutation(  # the last step ends at noise 0, where there is no density
        rule="8.8",
        file=SCHEDULE,
        old="    variance = noise_next / noise_now * -np.expm1(log_now - log_next)\n",
        new="    variance = noise_next * -np.expm1(log_now - log_next)\n",
        test="tests/ops/test_ddim.py::test_lore_8_8_golden_steps",
    ),
    Mutation(  # the learner guides otherwise than the sampler
        rule="8.8",
        file=OBJECTIVE,
        old="guidance_scale=config.sample_guidance_scale if config.train_cfg else 1.0,",
        new="guidance_scale=1.0,",
        test="tests/rollout/test_diffuse.py::TestLogprobs::"
        "test_lore_8_8_the_learner_finds_the_samplers_log_probabilities",
    ),
    Mutation(  # the learner reads the state after the step it is asked for
        rule="8.8",
        file=OBJECTIVE,
        old="        latents=take_rows(states, first),\n",
        new="        latents=take_rows(states, first + 1),\n",
        test="tests/rollout/test_diffuse.py::TestLogprobs::"
        "test_lore_8_8_the_learner_finds_the_samplers_log_probabilities",
    ),
    Mutation(  # the action is differentiated
        rule="8.8",
        file=DDIM,
        old="gaussian_logprob(jax.lax.stop_gradient(next_latents), mean, std)",
        new="gaussian_logprob(next_latents, jax.lax.stop_gradient(mean), std)",
        test="tests/learners/test_ddpo.py::TestBandit::"
        "test_lore_8_8_the_gradient_is_the_noise_over_the_deviation",
    ),
    Mutation(  # steps that are left out are trained all the same
        rule="8.8",
        file=ORDER,
        old="        return Order(samples.astype(jnp.int32), candidates[chosen])\n",
        new="        return Order(samples.astype(jnp.int32), chosen)\n",
        test="tests/learners/test_ddpo_order.py::TestOrder::"
        "test_lore_8_8_fewer_steps_are_random_ones_of_those_allowed",
    ),
    Mutation(  # every prompt is judged by all
        rule="8.8",
        file=STATISTICS,
        old="        among = np.asarray(kept[key]) if is_tracked else values\n",
        new="        among = values\n",
        test="tests/ops/test_prompt_statistics.py::TestByPrompt::test_lore_8_8_statistics_are_kept_by_prompt",
    ),
    Mutation(  # rounding makes an advantage of nothing
        rule="4.9",
        file=STATISTICS,
        old="        if np.ptp(values[rows]):\n",
        new="        if True:\n",
        test="tests/ops/test_prompt_statistics.py::TestGroups::"
        "test_lore_4_9_a_group_without_spread_has_advantage_zero",
    ),
    Mutation(  # the deviation of all where that of the group is asked for
        rule="4.10",
        file=STATISTICS,
        old='deviation = values[rows].std() if std == "group" else values.std()',
        new="deviation = values.std()",
        test="tests/ops/test_prompt_statistics.py::TestGroups::test_lore_4_10_which_deviation_divides",
    ),
    Mutation(  # all rows draw the same noise
        rule="9.1",
        file=SAMPLER,
        old="            return jax.vmap(lambda key: draw(jax.random.fold_in(key, step)))(step_keys)\n",
        new="            return jax.random.normal(step_keys[0], (step_keys.shape[0], *latent_shape))\n",
        test="tests/rollout/test_diffuse.py::TestRows::test_lore_9_1_a_sample_depends_on_its_own_keys_alone",
    ),
    Mutation(  # a sample's steps follow from its place
        rule="9.1",
        file=ORDER,
        old="jax.vmap(lambda sample: jax.random.fold_in(steps_key, sample))(jnp.arange(num_samples))",
        new="jax.vmap(lambda sample: jax.random.fold_in(steps_key, sample))(-jnp.arange(-num_samples, 0))",
        test="tests/learners/test_ddpo_order.py::TestOrder::"
        "test_lore_9_1_a_samples_steps_do_not_depend_on_how_many_there_are",
    ),
    Mutation(  # the sum over a microbatch is divided at once
        rule="5.2",
        file=LOSS,
        old="    return LossOut(masked_sum(losses, valid), weight, jax.lax.stop_gradient(metrics))\n",
        new="    return LossOut(masked_sum(losses, valid) / weight, weight, jax.lax.stop_gradient(metrics))\n",
        test="tests/learners/test_ddpo.py::TestExactness::test_lore_5_2_microbatches_do_not_change_the_step",
    ),
    Mutation(  # gradients flow into the old log-probabilities
        rule="5.6",
        file=LOSS,
        old="        jax.lax.stop_gradient(zero_masked(x, valid)) for x in (old_logprobs, advantages)\n",
        new="        zero_masked(x, valid) for x in (old_logprobs, advantages)\n",
        test="tests/losses/test_ddpo.py::TestGradient::"
        "test_lore_5_6_none_flows_into_old_log_probs_and_advantages",
    ),
    Mutation(  # samples are judged by those of other prompts
        rule="4.13",
        file=COLLECTOR,
        old="            groups = np.arange(len(rewards)) // method.sample_images_per_prompt\n",
        new="            groups = np.arange(len(rewards)) % method.sample_images_per_prompt\n",
        test=TOGETHER,
    ),
    Mutation(  # prompts are drawn once an image
        rule="4.13",
        file="jrl/trainers/ddpo_prompts.py",
        old="    return [prompt for prompt in drawn for _ in range(images_per_prompt)]\n",
        new="    return [prompt for _ in range(images_per_prompt) for prompt in drawn]\n",
        test=TOGETHER,
    ),
]

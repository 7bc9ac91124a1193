# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that sampling, scoring and their health figures hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

SAMPLING, HEALTH = "jrl/ops/sampling.py", "jrl/rollout/health.py"
GENERATE, SCORE = "jrl/rollout/generate.py", "jrl/rollout/score.py"
FORWARD = "jrl/ops/forward.py"
TEST_GENERATE, TEST_SCORE = "tests/rollout/test_generate.py", "tests/rollout/test_score.py"

PATCHES = [
    Mutation(
        rule="1.2",
        file="jrl/models/cache.py",
        old="arrived = jnp.cumsum(attention_mask.astype(jnp.int32), axis=1)",
        new="arrived = jnp.cumsum(jnp.ones_like(attention_mask, jnp.int32), axis=1)",
        test=f"{TEST_GENERATE}::TestIndependence::"
        "test_lore_1_2_samples_do_not_depend_on_left_padding_nor_on_the_chunk",
    ),
    Mutation(
        rule="1.3",
        file=GENERATE,
        old="lengths=loop.lengths + ~loop.done,",
        new="lengths=loop.lengths + (tokens != pad_token_id),",
        test=f"{TEST_GENERATE}::TestEnds::test_lore_1_3_pad_may_be_eos",
    ),
    Mutation(
        rule="1.4",
        file=GENERATE,
        old="lengths=loop.lengths + ~loop.done,",
        new="lengths=loop.lengths + ~(loop.done | ended),",
        test=f"{TEST_GENERATE}::TestEnds::test_lore_1_4_the_sampled_eos_is_an_action",
    ),
    Mutation(
        rule="1.5",
        file=GENERATE,
        old="done=loop.done | ended,",
        new="done=ended,",
        test=f"{TEST_GENERATE}::TestEnds::"
        "test_lore_1_5_nothing_after_the_first_eos_counts_and_all_before_it_does",
    ),
    Mutation(
        rule="1.8",
        file=GENERATE,
        old="return Completions(end.tokens, end.lengths, end.done, end.logprobs)",
        new="return Completions(end.tokens, end.lengths, end.lengths > 0, end.logprobs)",
        test=f"{TEST_GENERATE}::TestEnds::test_lore_1_8_a_row_cut_by_the_limit_is_not_terminated",
    ),
    Mutation(
        rule="2.1",
        file=SCORE,
        old="temperature=temperature,\n                chunk_bytes=logprob_chunk_bytes,\n            ).logprobs",
        new="temperature=1.0,\n                chunk_bytes=logprob_chunk_bytes,\n            ).logprobs",
        test=f"{TEST_SCORE}::test_lore_2_1_log_probabilities_are_divided_by_the_temperature",
    ),
    Mutation(
        rule="2.1",
        file=SAMPLING,
        old="return logits / temperature",
        new="return logits * temperature",
        test=f"{TEST_GENERATE}::TestAgreement::test_lore_2_1_sampler_and_learner_divide_by_the_temperature",
    ),
    Mutation(
        rule="2.2",
        file=GENERATE,
        old="    for process in processors:\n"
        "        logits = process(logits, context)\n"
        "    if row_keys is None:\n"
        "        return draw(logits, None)\n"
        "    step = context.num_sampled\n"
        "    uniform = jax.vmap(lambda row_key: jax.random.uniform(jax.random.fold_in(row_key, step)))(row_keys)\n"
        "    return draw(logits, uniform)\n",
        new="    raw = logits\n"
        "    for process in processors:\n"
        "        logits = process(logits, context)\n"
        "    if row_keys is None:\n"
        "        return draw(logits, None)\n"
        "    step = context.num_sampled\n"
        "    uniform = jax.vmap(lambda row_key: jax.random.uniform(jax.random.fold_in(row_key, step)))(row_keys)\n"
        "    tokens, _ = draw(logits, uniform)\n"
        "    return tokens, jax.nn.log_softmax(raw)[jnp.arange(tokens.size), tokens]\n",
        test=f"{TEST_GENERATE}::TestAgreement::test_lore_2_2_the_record_is_of_the_processed_distribution",
    ),
    Mutation(
        rule="2.3",
        file=SCORE,
        old="logprobs=logprobs(params, features.policy),",
        new="logprobs=logprobs(params, features.policy * 1.001),",
        test=f"{TEST_SCORE}::test_lore_2_3_the_first_ratio_is_one",
    ),
    Mutation(
        rule="2.7",
        file=GENERATE,
        old="jnp.ones_like(newest, dtype=bool)",
        new="jnp.zeros_like(newest, dtype=bool)",
        test=f"{TEST_GENERATE}::TestAgreement::test_lore_2_7_cached_decoding_equals_one_pass",
    ),
    Mutation(
        rule="2.8",
        file=SAMPLING,
        old="target = uniform[:, None] * sums[:, -1:]",
        new="target = uniform[:, None] * jnp.max(sums[:, -1:], axis=0, keepdims=True)",
        test="tests/ops/test_sampling.py::TestInverseCDF::"
        "test_lore_2_8_a_draw_does_not_depend_on_its_neighbours",
    ),
    Mutation(
        rule="2.10",
        file=HEALTH,
        old="difference = jnp.where(mask, logprobs - sampler_logprobs, 0.0)",
        new="difference = jnp.where(mask, jnp.mean(logprobs - sampler_logprobs), 0.0)",
        test="tests/rollout/test_health.py::TestFaults::"
        "test_lore_2_10_a_biased_sampler_alarms_but_its_record_is_honest",
    ),
    Mutation(
        rule="2.10",
        file=HEALTH,
        old="mean_metric(jnp.exp(bounded), mask)",
        new="mean_metric(jnp.exp(0.0 * bounded), mask)",
        test="tests/rollout/test_health.py::TestFaults::test_lore_2_10_a_false_record_moves_the_mean_ratio",
    ),
    Mutation(
        rule="3.6",
        file=SCORE,
        old="ref_logprobs=logprobs(ref_params, reference.policy),",
        new="ref_logprobs=logprobs(ref_params, reference.policy * 1.001),",
        test=f"{TEST_SCORE}::test_lore_3_6_a_copied_reference_has_exactly_zero_kl",
    ),
    Mutation(
        rule="3.7",
        file=FORWARD,
        old="    logits_fn = partial(policy.logits, params, frozen)\n    return token_logprobs(",
        new="    plain = partial(policy.logits, params, frozen)\n\n"
        "    def logits_fn(states):\n"
        "        logits = plain(states)\n"
        "        best = logits.max(-1, keepdims=True)\n"
        "        return jax.numpy.where(logits < best - 2.0, -jax.numpy.inf, logits)\n\n"
        "    return token_logprobs(",
        test=f"{TEST_SCORE}::test_lore_3_7_filtered_sampling_is_scored_unfiltered",
    ),
    Mutation(
        rule="9.1",
        file=GENERATE,
        old="jax.random.fold_in(key, row))(row_ids)",
        new="jax.random.fold_in(key, row))(jnp.arange(rows))",
        test=f"{TEST_GENERATE}::TestIndependence::test_lore_9_1_a_sample_belongs_to_key_and_row_number",
    ),
]

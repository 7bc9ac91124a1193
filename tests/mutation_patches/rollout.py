# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that sampling, scoring and their health figures hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    Mutation("1.2", "jrl.models.cache.cache_tokens",
             "attention_mask.astype(jnp.int32)", "jnp.ones_like(attention_mask, jnp.int32)",
             "tests/rollout/test_generate.py::TestIndependence::"
             "test_lore_1_2_samples_do_not_depend_on_left_padding_nor_on_the_chunk"),
    Mutation("1.3", "jrl.rollout.generate._append",
             "loop.lengths + ~rests", "loop.lengths + (tokens != pad_token_id)",
             "tests/rollout/test_generate.py::TestEnds::test_lore_1_3_pad_may_be_eos"),
    Mutation("1.4", "jrl.rollout.generate._append",
             "loop.lengths + ~rests", "loop.lengths + ~(rests | ended)",
             "tests/rollout/test_generate.py::TestEnds::test_lore_1_4_the_sampled_eos_is_an_action"),
    Mutation("1.5", "jrl.rollout.generate._append",
             "loop.done | ended", "ended",
             "tests/rollout/test_generate.py::TestEnds::"
             "test_lore_1_5_nothing_after_the_first_eos_counts_and_all_before_it_does"),
    Mutation("1.8", "jrl.rollout.generate._sampled",
             "end.done", "end.lengths > 0",
             "tests/rollout/test_generate.py::TestEnds::test_lore_1_8_a_row_cut_by_the_limit_is_not_terminated"),
    Mutation("2.1", "jrl.rollout.score.make_score.score",
             "_(temperature=temperature)", "_(temperature=1.0)",
             "tests/rollout/test_score.py::test_lore_2_1_log_probabilities_are_divided_by_the_temperature"),
    Mutation("2.1", "jrl.ops.sampling.apply_temperature",
             "logits / temperature", "logits * temperature",
             "tests/rollout/test_generate.py::TestAgreement::"
             "test_lore_2_1_sampler_and_learner_divide_by_the_temperature"),
    Mutation("2.2", "jrl.rollout.generate._draw",
             "for process in processors:\n"
             "    logits = process(logits, context)\n"
             "if row_keys is None:\n"
             "    return draw(logits, None)",
             "def draw(logits, uniform, raw=logits, draw=draw):\n"
             "    tokens, _ = draw(logits, uniform)\n"
             "    return tokens, jax.nn.log_softmax(raw)[jnp.arange(tokens.size), tokens]\n"
             "for process in processors:\n"
             "    logits = process(logits, context)",
             "tests/rollout/test_generate.py::TestAgreement::"
             "test_lore_2_2_the_record_is_of_the_processed_distribution"),
    Mutation("2.3", "jrl.rollout.score.make_score.score",
             "_(logprobs=now.logprobs)", "_(logprobs=now.logprobs * 1.001)",
             "tests/rollout/test_score.py::test_lore_2_3_the_first_ratio_is_one"),
    Mutation("2.7", "jrl.rollout.generate._sampled.next_token",
             "jnp.ones_like", "jnp.zeros_like",
             "tests/rollout/test_generate.py::TestAgreement::test_lore_2_7_cached_decoding_equals_one_pass"),
    Mutation("2.8", "jrl.ops.sampling._pass",
             "sums[:, -1:]", "jnp.max(sums[:, -1:], axis=0, keepdims=True)",
             "tests/ops/test_sampling.py::TestInverseCDF::test_lore_2_8_a_draw_does_not_depend_on_its_neighbours"),
    Mutation("2.10", "jrl.ops.sampler_agreement.sampler_agreement",
             "logprobs - sampler_logprobs", "jnp.mean(logprobs - sampler_logprobs)",
             "tests/ops/test_sampler_agreement.py::TestFaults::"
             "test_lore_2_10_a_biased_sampler_alarms_but_its_record_is_honest"),
    Mutation("2.10", "jrl.ops.sampler_agreement.sampler_agreement",
             "jnp.exp(bounded)", "jnp.exp(0.0 * bounded)",
             "tests/ops/test_sampler_agreement.py::TestFaults::test_lore_2_10_a_false_record_moves_the_mean_ratio"),
    Mutation("3.6", "jrl.rollout.score.make_score.score",
             "read(ref_params, frozen, sequences, trunk=trunk).logprobs",
             "read(ref_params, frozen, sequences, trunk=trunk).logprobs * 1.001",
             "tests/rollout/test_score.py::test_lore_3_6_a_copied_reference_has_exactly_zero_kl"),
    Mutation("3.7", "jrl.forward.window_logprobs",
             "logits_fn = partial(policy.logits, params, frozen)",
             "plain = partial(policy.logits, params, frozen)\ndef logits_fn(states):\n    logits = "
             "plain(states)\n    best = logits.max(-1, keepdims=True)\n    return "
             "jax.numpy.where(logits < best - 2.0, -jax.numpy.inf, logits)",
             "tests/rollout/test_score.py::test_lore_3_7_filtered_sampling_is_scored_unfiltered"),
    Mutation("9.1", "jrl.rollout.generate._sampled",
             "jax.vmap(lambda row: jax.random.fold_in(key, row))(row_ids)",
             "jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(rows))",
             "tests/rollout/test_generate.py::TestIndependence::test_lore_9_1_a_sample_belongs_to_key_and_row_number"),
]

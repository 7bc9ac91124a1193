# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that chat templates, packing and supervised fine-tuning keep."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    Mutation("1.4", "jrl.data.demonstrations.demonstration_set.DemonstrationFormat._tokenize_texts",
             "self.append_eos and ids[-1] != eos", "self.append_eos",
             "tests/data/demonstrations/test_demonstration_set.py::TestTexts::test_lore_1_4_eos_is_there_once"),
    Mutation("1.7", "jrl.data.demonstrations.demonstration_set.DemonstrationFormat._tokenize_texts",
             "0 if self.completion_only_loss is False else len(prompt)", "0",
             "tests/data/demonstrations/test_demonstration_set.py::TestTexts::"
             "test_lore_1_7_prompts_are_context_unless_asked"),
    Mutation("1.10", "jrl.data.chat.templates.render_prompt",
             "True", "False",
             "tests/data/chat/test_templates.py::TestLore::"
             "test_lore_1_10_the_sampled_prompt_begins_the_trained_dialogue"),
    Mutation("1.10", "jrl.data.chat.rendering.Chat.encode",
             "tokenize(self.tokenizer, texts)", "tokenize(self.tokenizer, texts, add_special_tokens=True)",
             "tests/data/chat/test_templates.py::TestLore::test_lore_1_10_there_is_one_bos"),
    Mutation("1.10", "jrl.data.chat.rendering.Chat.compared",
             "_(generation=True)", "_(generation=False)",
             "tests/data/chat/test_templates.py::TestLore::test_lore_1_10_the_generation_prefix_is_prompt"),
    Mutation("1.10", "jrl.data.chat.rendering.check_beginning",
             "len(part)", "0",
             "tests/data/chat/test_templates.py::TestLore::"
             "test_lore_1_10_a_template_that_changes_earlier_turns_is_refused"),
    Mutation("1.10", "jrl.data.seam.tokenize_split",
             "whole[:len(prompt)] != prompt or len(whole) == len(prompt)", "len(whole) == len(prompt)",
             "tests/data/demonstrations/test_demonstration_set.py::TestTexts::"
             "test_lore_1_10_the_prompts_ids_are_those_that_sampling_starts_from"),
    Mutation("1.11", "jrl.models.attention.full_context",
             "segment_ids[:, None, :]", "segment_ids[:, :, None]",
             "tests/data/demonstrations/test_packing.py::test_lore_1_11_packed_rows_compute_what_their_samples_would"),
    Mutation("1.11", "jrl.models.positions.token_positions",
             "jnp.maximum(counts - 1 - before, 0)", "jnp.maximum(counts - 1, 0) + 0 * before",
             "tests/data/demonstrations/test_packing.py::"
             "test_lore_1_11_packed_rows_compute_what_their_samples_would[learned positions]"),
    Mutation("1.11", "jrl.data.demonstrations.packing._joined",
             "[flag for sample, start, stop in pieces for flag in (False, *rows[sample].learned[start + 1:stop])]",
             "[flag for sample, start, stop in pieces for flag in rows[sample].learned[start:stop]]",
             "tests/data/demonstrations/test_packing.py::TestPackedSet::"
             "test_lore_1_11_the_first_token_of_a_sample_is_nobodys_target"),
    Mutation("1.13", "jrl.data.demonstrations.demonstration_set.DemonstrationFormat.cut",
             "cut([int(flag) for flag in learned], self.max_length, side)",
             "[int(flag) for flag in learned][-self.max_length:]",
             "tests/data/demonstrations/test_demonstration_set.py::TestLimits::"
             "test_lore_1_13_cut_after_masking_and_counted"),
    Mutation("2.6", "jrl.learners.sft.make_sft_update.key_of",
             "key if noise else None", "key",
             "tests/learners/test_sft.py::test_lore_2_6_nothing_is_drawn_unless_asked"),
    Mutation("5.2", "jrl.models.noise.EmbeddingNoise.__call__",
             "jax.vmap(lambda number: jax.random.fold_in(key, number))(sums)",
             "jax.vmap(lambda number: jax.random.fold_in(key, number))(jnp.arange(tokens.shape[0]))",
             "tests/models/test_noise.py::TestWhatItFollowsFrom::test_lore_5_2_a_row_keeps_its_noise_in_any_batch"),
    Mutation("7.7", "jrl.losses.sft.sft_loss",
             "jnp.where(mask, logprobs, 0.0)", "logprobs",
             "tests/losses/test_sft.py::TestDynamicFineTuning::test_lore_7_7_what_is_masked_may_be_anything"),
    Mutation("9.1", "jrl.data.demonstrations.packing.PackedSet.__init__",
             "_(seed=seed)", "_(seed=id(self))",
             "tests/data/demonstrations/test_packing.py::TestPackedSet::"
             "test_lore_9_1_passes_are_functions_of_the_seed"),
]

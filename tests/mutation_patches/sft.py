# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that chat templates, packing and supervised fine-tuning keep."""

from tests.mutation_patches.base import Mutation

CHAT = "jrl/data/chat.py"
RENDERING = "jrl/data/chat_rendering.py"
CHATS = "tests/data/test_chat.py::TestLore::"
PACKING = "jrl/data/packing.py"
PACKED = "tests/data/test_packing.py::test_lore_1_11_packed_rows_compute_what_their_samples_would"

PATCHES = [
    Mutation(
        rule="1.4",
        file="jrl/data/demonstrations.py",
        old="if self.append_eos and ids[-1] != eos:",
        new="if self.append_eos:",
        test="tests/data/test_demonstrations.py::TestTexts::test_lore_1_4_eos_is_there_once",
    ),
    Mutation(
        rule="1.7",
        file="jrl/data/demonstrations.py",
        old="(0 if self.completion_only_loss is False else len(prompt))",
        new="0",
        test="tests/data/test_demonstrations.py::TestTexts::test_lore_1_7_prompts_are_context_unless_asked",
    ),
    Mutation(
        rule="1.10",
        file=CHAT,
        old="    return chat.encode([chat.render(found, generation=True)])[0]",
        new="    return chat.encode([chat.render(found, generation=False)])[0]",
        test=CHATS + "test_lore_1_10_the_sampled_prompt_begins_the_trained_dialogue",
    ),
    Mutation(
        rule="1.10",
        file=RENDERING,
        old="        found = tokenize(self.tokenizer, texts)",
        new="        found = tokenize(self.tokenizer, texts, add_special_tokens=True)",
        test=CHATS + "test_lore_1_10_there_is_one_bos",
    ),
    Mutation(
        rule="1.10",
        file=RENDERING,
        old="            texts.append(self.render(messages[:number], generation=True))",
        new="            texts.append(self.render(messages[:number], generation=False))",
        test=CHATS + "test_lore_1_10_the_generation_prefix_is_prompt",
    ),
    Mutation(
        rule="1.10",
        file=RENDERING,
        old="    if at < len(part):",
        new="    if at < 0:",
        test=CHATS + "test_lore_1_10_a_template_that_changes_earlier_turns_is_refused",
    ),
    Mutation(
        rule="1.10",
        file="jrl/data/seam.py",
        old="        whole[: len(prompt)] != prompt or len(whole) == len(prompt)",
        new="        len(whole) == len(prompt)",
        test="tests/data/test_demonstrations.py::TestTexts::"
        "test_lore_1_10_the_prompts_ids_are_those_that_sampling_starts_from",
    ),
    Mutation(
        rule="1.11",
        file="jrl/models/attention.py",
        old="        mask &= segment_ids[:, :, None] == segment_ids[:, None, :]",
        new="        mask &= segment_ids[:, :, None] == segment_ids[:, :, None]",
        test=PACKED,
    ),
    Mutation(
        rule="1.11",
        file="jrl/models/positions.py",
        old="    return jnp.maximum(counts - 1 - before, 0)",
        new="    return jnp.maximum(counts - 1, 0) + 0 * before",
        test=PACKED + "[learned positions]",
    ),
    Mutation(
        rule="1.11",
        file=PACKING,
        old="for flag in (False, *rows[sample].learned[start + 1 : stop])",
        new="for flag in rows[sample].learned[start:stop]",
        test="tests/data/test_packing.py::TestPackedSet::test_lore_1_11_the_first_token_of_a_sample_is_nobodys_target",
    ),
    Mutation(
        rule="1.13",
        file="jrl/data/demonstrations.py",
        old="        flags = cut([int(flag) for flag in learned], self.max_length, side)",
        new="        flags = [int(flag) for flag in learned][-self.max_length :]",
        test="tests/data/test_demonstrations.py::TestLimits::test_lore_1_13_cut_after_masking_and_counted",
    ),
    Mutation(
        rule="2.6",
        file="jrl/learners/sft.py",
        old="        return key if noise else None",
        new="        return key",
        test="tests/learners/test_sft.py::test_lore_2_6_nothing_is_drawn_unless_asked",
    ),
    Mutation(
        rule="5.2",
        file="jrl/models/noise.py",
        old="lambda number: jax.random.fold_in(key, number))(sums)",
        new="lambda number: jax.random.fold_in(key, number))(jnp.arange(tokens.shape[0]))",
        test="tests/models/test_noise.py::TestWhatItFollowsFrom::test_lore_5_2_a_row_keeps_its_noise_in_any_batch",
    ),
    Mutation(
        rule="7.7",
        file="jrl/losses/sft.py",
        old="    losses = token_loss(jnp.where(mask, logprobs, 0.0))",
        new="    losses = token_loss(logprobs)",
        test="tests/losses/test_sft.py::TestDynamicFineTuning::test_lore_7_7_what_is_masked_may_be_anything",
    ),
    Mutation(
        rule="9.1",
        file=PACKING,
        old="            seed=seed,\n            num_truncated=samples.num_truncated,",
        new="            seed=id(self),\n            num_truncated=samples.num_truncated,",
        test="tests/data/test_packing.py::TestPackedSet::test_lore_9_1_passes_are_functions_of_the_seed",
    ),
]

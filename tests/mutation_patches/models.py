# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that `jrl.models` keeps."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    Mutation("1.2", "jrl.models.positions.token_positions",
             "attention_mask.astype(jnp.int32)", "jnp.ones_like(attention_mask, jnp.int32)",
             "tests/models/test_attention.py::test_lore_1_2_left_padding_keeps_positions"),
    Mutation("1.6", "jrl.models.attention.full_context",
             "columns[None, :, None]", "columns[None, :, None] + 1",
             "tests/models/test_transformer.py::test_lore_1_6_logits_at_t_read_tokens_up_to_t_and_score_t_plus_1"),
    Mutation("2.5", "jrl.models.products.plain._sum_of_products",
             "jnp.einsum(form, x, y, preferred_element_type=jnp.float32)",
             "jnp.einsum(form, x, y).astype(jnp.float32)",
             "tests/models/test_transformer.py::test_lore_2_5_head_accumulates_and_answers_in_float32"),
    Mutation("2.6", "jrl.models.decoder_policy.DecoderPolicy._rngs",
             "return None", "dropout_key = jax.random.key(0)",
             "tests/models/test_policy.py::test_lore_2_6_no_dropout_unless_a_key_asks_for_it"),
    Mutation("2.7", "jrl.models.cache.cache_tokens",
             "cache.positions[:, None]", "cache.column",
             "tests/models/test_policy.py::test_lore_2_7_cached_decode_equals_scoring"),
    Mutation("2.8", "jrl.models.layers.Norm.__call__",
             "jnp.square(x).mean(axis=axes, keepdims=True)", "jnp.square(x).mean(axis=(0, *axes), keepdims=True)",
             "tests/models/test_transformer.py::test_lore_2_8_a_row_does_not_depend_on_its_neighbours"),
    Mutation("2.9", "jrl.models.decoder_policy.DecoderPolicy._decode",
             "self._run(variables, last.x, method='norm')",
             "self._run(jax.tree.map(jnp.ones_like, variables), last.x, method='norm')",
             "tests/models/test_policy.py::test_lore_2_9_the_sampler_reads_every_parameter"),
    Mutation("2.12", "jrl.models.decoder_policy.DecoderPolicy._variables",
             "variables[LORA] = self.adapter.variables(params[LORA])",
             "variables['params'] = self.adapter.merge(variables['params'], params[LORA])",
             "tests/models/adapters/test_lora.py::"
             "test_lore_2_12_base_and_adapter_are_sampled_and_not_their_rounded_sum"),
    Mutation("3.6", "jrl.models.policy._copy",
             "jnp.array(x, copy=True)", "jnp.array(x, jnp.bfloat16).astype(x.dtype)",
             "tests/models/test_policy.py::test_lore_3_6_a_copied_reference_has_exactly_zero_kl"),
    Mutation("4.6", "jrl.models.heads.ValueHead.__call__",
             "nn.initializers.zeros_init", "nn.initializers.lecun_normal",
             "tests/models/test_heads.py::test_lore_4_6_a_fresh_critic_says_zero_and_can_learn"),
    Mutation("2.13", "jrl.models.products.plain.score_keys",
             "_(preferred_element_type=kind)", "_(precision='default', preferred_element_type=kind)",
             "tests/models/test_precision.py::test_lore_2_13_a_precision_that_is_asked_for_reaches_every_product"),
]

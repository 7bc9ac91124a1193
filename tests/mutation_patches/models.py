# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that `jrl.models` keeps."""

from tests.mutation_patches.base import Mutation

PATCHES = [
    Mutation(
        rule="1.2",
        file="jrl/models/positions.py",
        old="counts = jnp.cumsum(attention_mask.astype(jnp.int32), axis=1)",
        new="counts = jnp.cumsum(jnp.ones_like(attention_mask, jnp.int32), axis=1)",
        test="tests/models/test_attention.py::test_lore_1_2_left_padding_keeps_positions",
    ),
    Mutation(
        rule="1.6",
        file="jrl/models/attention.py",
        old="mask = (columns[None, :, None] >= columns[None, None, :]) & attention_mask[:, None, :]",
        new="mask = (columns[None, :, None] + 1 >= columns[None, None, :]) & attention_mask[:, None, :]",
        test="tests/models/test_transformer.py::test_lore_1_6_logits_at_t_read_tokens_up_to_t_and_score_t_plus_1",
    ),
    Mutation(
        rule="2.5",
        file="jrl/models/products.py",
        old='"...d,vd->...v", rows, table, preferred_element_type=jnp.float32)',
        new='"...d,vd->...v", rows, table).astype(jnp.float32)',
        test="tests/models/test_transformer.py::test_lore_2_5_head_accumulates_and_answers_in_float32",
    ),
    Mutation(
        rule="2.6",
        file="jrl/models/decoder_policy.py",
        old='            return None\n        return {"dropout": dropout_key}',
        new='            dropout_key = jax.random.key(0)\n        return {"dropout": dropout_key}',
        test="tests/models/test_policy.py::test_lore_2_6_no_dropout_unless_a_key_asks_for_it",
    ),
    Mutation(
        rule="2.7",
        file="jrl/models/cache.py",
        old="positions = jnp.maximum(cache.positions[:, None] + arrived - 1, 0)",
        new="positions = jnp.maximum(cache.column + arrived - 1, 0)",
        test="tests/models/test_policy.py::test_lore_2_7_cached_decode_equals_scoring",
    ),
    Mutation(
        rule="2.8",
        file="jrl/models/layers.py",
        old="x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=axes, keepdims=True) + self.epsilon)",
        new="x = x * jax.lax.rsqrt(jnp.square(x).mean(axis=(0, *axes), keepdims=True) + self.epsilon)",
        test="tests/models/test_transformer.py::test_lore_2_8_a_row_does_not_depend_on_its_neighbours",
    ),
    Mutation(
        rule="2.9",
        file="jrl/models/decoder_policy.py",
        old='value = hidden = self._run(variables, x, method="norm")',
        new='value = hidden = self._run(jax.tree.map(jnp.ones_like, variables), x, method="norm")',
        test="tests/models/test_policy.py::test_lore_2_9_the_sampler_reads_every_parameter",
    ),
    Mutation(
        rule="2.12",
        file="jrl/models/decoder_policy.py",
        old="variables[LORA] = self.adapter.variables(params[LORA])",
        new='variables["params"] = self.adapter.merge(variables["params"], params[LORA])',
        test="tests/models/adapters/test_lora.py::"
        "test_lore_2_12_base_and_adapter_are_sampled_and_not_their_rounded_sum",
    ),
    Mutation(
        rule="3.6",
        file="jrl/models/policy.py",
        old="return jax.tree.map(lambda x: jnp.array(x, copy=True), tree)",
        new="return jax.tree.map(lambda x: jnp.array(x, jnp.bfloat16).astype(x.dtype), tree)",
        test="tests/models/test_policy.py::test_lore_3_6_a_copied_reference_has_exactly_zero_kl",
    ),
    Mutation(
        rule="4.6",
        file="jrl/models/heads.py",
        old='return Dense(1, nn.initializers.zeros_init(), name="out")(x).squeeze(-1)',
        new='return Dense(1, nn.initializers.lecun_normal(), name="out")(x).squeeze(-1)',
        test="tests/models/test_heads.py::test_lore_4_6_a_fresh_critic_says_zero_and_can_learn",
    ),
    Mutation(
        rule="2.13",
        file="jrl/models/attention_products.py",
        old='jnp.einsum("bkmh,bksh->bkms", q, k, preferred_element_type=jnp.float32)',
        new='jnp.einsum("bkmh,bksh->bkms", q, k, precision="default", preferred_element_type=jnp.float32)',
        test="tests/models/test_precision.py::test_lore_2_13_a_precision_that_is_asked_for_reaches_every_product",
    ),
]

# SPDX-License-Identifier: Apache-2.0
"""The formulas of `jrl.bench.counts` against XLA's own count of the compiled programs.

XLA counts what the formulas leave out (norms, softmax, entropy, Adam's arithmetic), so it finds more: the bands say how
much more at these shapes, where width and vocabulary are small and the rest weighs much.
"""

from functools import cache

import jax
import jax.numpy as jnp
import pytest
from transformers import GPT2Config, LlamaConfig, MixtralConfig

from jrl.bench.counts import Counts, Phase, floor_seconds, total
from jrl.bench.measure import Machine
from jrl.bench.models import Options, Shapes, Subject
from jrl.bench.work import full_rows
from jrl.forward import Reader
from jrl.learners.sft import sft_objective
from jrl.models.model import make_model
from jrl.typing import ModelInputs
from tests.tiny import tiny_lm

SHAPES = Shapes(rows=4, prompt=16, response=16, epochs=1, batch_size=4, minibatch_size=4)


@cache
def subject(family: str = "gpt2", **options: int | str) -> Subject:
    ids = dict(vocab_size=512, bos_token_id=0, eos_token_id=0)
    if family == "gpt2":
        config = GPT2Config(n_embd=128, n_layer=3, n_head=4, n_positions=64, **ids)
    else:
        config_class = LlamaConfig if family == "llama" else MixtralConfig
        more = {} if family == "llama" else dict(num_local_experts=4, num_experts_per_tok=2)
        config = config_class(
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            **ids,
            **more,
        )
    return Subject(family, config, make_model(config), Options(**options))


@cache
def counted(what: str, family: str = "gpt2", **options: int | str) -> tuple[float, float]:
    """(operations, bytes) by XLA: of a decoding step, the forward pass of scoring, or a gradient."""
    model = subject(family, **options)
    params, frozen = jax.eval_shape(model.load)
    policy, rows = model.policy, full_rows(model, SHAPES, seed=0)
    if what == "decode":
        inputs = ModelInputs(jnp.zeros((SHAPES.rows, 1), jnp.int32), jnp.ones((SHAPES.rows, 1), bool))
        cache = jax.eval_shape(
            lambda p, f: policy.init_cache(p, f, inputs, SHAPES.length - 1), params, frozen
        )

        def run(params, frozen, cache):
            features, cache = policy.decode(params, frozen, inputs, cache)
            return policy.logits(params, frozen, features.policy[:, -1]), cache

        found = jax.jit(run).lower(params, frozen, cache).compile().cost_analysis()
    else:

        def loss(params, frozen):
            return sft_objective(Reader(policy, chunk_bytes=2**28), params, frozen, rows)[0]

        program = jax.jit(loss if what == "forward" else jax.value_and_grad(loss))
        found = program.lower(params, frozen).compile().cost_analysis()
    return found["flops"], found["bytes accessed"]


def formula(what: str, family: str = "gpt2", **options: int | str) -> Phase:
    counts = Counts(subject(family, **options))
    if what == "decode":
        return counts.decode(SHAPES)[1].times(1)
    trunk, trained, _ = counts.step(SHAPES, rows_per_item=1)
    return total((trunk, trained))


@pytest.mark.slow
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_decoding_step_has_the_operations_that_xla_counts(family: str) -> None:
    ours = formula("decode", family).flops / (SHAPES.response - 1)
    assert 0.80 <= ours / counted("decode", family)[0] <= 1.02


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"num_layers_unfrozen": 1}, {"lora_rank": 4}])
def test_a_gradient_has_the_operations_that_xla_counts(options: dict[str, int]) -> None:
    ours = formula("gradient", **options).flops
    assert 0.75 <= ours / counted("gradient", **options)[0] <= 1.05


@pytest.mark.slow
def test_grouped_heads_and_gates_are_counted() -> None:
    ours = formula("gradient", "llama").flops
    assert 0.75 <= ours / counted("gradient", "llama")[0] <= 1.05


def test_a_frozen_trunk_is_no_part_of_the_backward_pass() -> None:
    whole, last = formula("gradient").flops, formula("gradient", num_layers_unfrozen=1).flops
    layer = Counts(subject()).layers[0]
    tokens = SHAPES.rows * SHAPES.length
    attention = SHAPES.rows * 2 * Counts(subject()).attention(SHAPES.length, SHAPES.length)
    head = 2 * SHAPES.rows * SHAPES.response * 512 * 128  # the tied embedding is frozen then
    assert whole - last == pytest.approx(2 * (tokens * layer.backward + attention) + head)


def test_an_expert_counts_where_a_token_visits_it() -> None:
    (layer, *_) = Counts(subject("mixtral")).layers
    attention = 128 * (128 + 64 + 64 + 128)
    assert layer.size == attention + 128 * 4 + 2 * 3 * 128 * 256


@pytest.mark.slow
def test_bytes_are_a_lower_bound() -> None:
    """Of a decoding step, which reads little but weights and cache: at least a third of what XLA counts."""
    ours = formula("decode").num_bytes / (SHAPES.response - 1)
    assert 0.33 <= ours / counted("decode")[1] <= 1.0
    assert formula("gradient").num_bytes <= counted("gradient")[1]


def test_golden_decode_of_one_layer() -> None:
    """Width 4, one head, MLP 16, vocabulary 64: 4·(4·4) + 2·(4·16) = 192 weights a layer, 256 in the head."""
    config = GPT2Config(
        n_embd=4, n_layer=1, n_head=1, vocab_size=64, n_positions=8, bos_token_id=0, eos_token_id=0
    )
    counts = Counts(Subject("tiny", config, make_model(config), Options()))
    prefill, steps = counts.decode(Shapes(rows=2, prompt=3, response=4))
    # 2 rows of 3 tokens: 2·192·6 in matrices, 4·(6·3)·4 in attention over 3 columns, 2·256·2 in the head.
    assert prefill.flops == 2304 + 288 + 1024
    # 448 weights and 2·2·3·4 numbers of the cache, 4 bytes each.
    assert prefill.num_bytes == 4 * (448 + 48)
    # 3 further tokens, which see 4, 5 and 6 columns of 2·2·4 numbers: not 6 every time.
    assert steps.flops == 3 * (768 + 1024) + 4 * 2 * (4 + 5 + 6) * 4
    assert steps.num_bytes == 4 * (3 * 448 + 16 * (4 + 5 + 6))


def test_a_sample_of_one_token_needs_no_further_step() -> None:
    _, steps = Counts(subject()).decode(Shapes(rows=2, prompt=3, response=1))
    assert steps == Phase(0.0, 0.0)


def test_the_floor_is_the_longer_of_computing_and_moving_in_every_phase() -> None:
    machine = Machine(matrix_rate=10.0, bandwidth=5.0, peak_rate=None)
    assert floor_seconds((Phase(20, 5), Phase(10, 20)), machine) == 2 + 4


def test_layers_without_plain_attention_are_refused():
    hybrid = Subject("hybrid", None, tiny_lm("qwen3_5_text")[0], Options())
    with pytest.raises(ValueError, match="qwen3_5_text has layers of another kind"):
        Counts(hybrid)

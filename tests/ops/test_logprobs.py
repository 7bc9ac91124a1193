# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import re
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.ops import entropy_from_logits, logprobs, logprobs_from_logits, token_logprobs

VOCAB, WIDTH = 11, 5
PLAIN = 1 << 30


def head(kernel: jax.Array, hidden: jax.Array) -> jax.Array:
    """A head whose last column is vocabulary padding."""
    logits = hidden @ kernel
    padding = jnp.full((*logits.shape[:-1], 1), -jnp.inf)
    return jnp.concatenate([logits[..., :-1], padding], axis=-1)


def reference(logits: np.ndarray) -> np.ndarray:
    """Log-softmax in float64."""
    logits = np.asarray(logits, np.float64)
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


def problem(num_rows: int, width: int):
    rng = np.random.default_rng(0)
    kernel = jnp.asarray(rng.normal(size=(WIDTH, VOCAB)), jnp.float32)
    hidden = jnp.asarray(rng.normal(size=(num_rows, width, WIDTH)), jnp.float32)
    return kernel, hidden, jnp.asarray(rng.integers(0, VOCAB - 1, size=(num_rows, width)), jnp.int32)


def all_shapes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[int, ...]]:
    """Shapes of all values of a jaxpr, those inside loops, branches and calls included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for parameter in jax.tree.leaves(
            equation.params, is_leaf=lambda x: hasattr(x, "eqns") or hasattr(x, "jaxpr")
        ):
            inner = getattr(parameter, "jaxpr", parameter)
            if hasattr(inner, "eqns"):
                yield from all_shapes(inner)


class TestLogprobsFromLogits:
    def test_golden(self):
        # −log(1 + e⁻¹ + e⁻²) = −0.407606; −log 3 = −1.098612
        logits = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
        np.testing.assert_allclose(
            logprobs_from_logits(logits, jnp.array([2, 1])), [-0.407606, -1.098612], atol=1e-6
        )

    @pytest.mark.parametrize("size", [5.0, 20.0, 50.0])
    @pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
    def test_lore_2_4_log_softmax_is_float32(self, size, dtype):
        logits = jnp.asarray(np.random.default_rng(0).uniform(-size, size, (40, 30)), dtype)
        targets = jnp.arange(40, dtype=jnp.int32) % 30
        logprobs = logprobs_from_logits(logits, targets)
        assert logprobs.dtype == jnp.float32
        exact = reference(np.asarray(logits, np.float64))[np.arange(40), np.asarray(targets)]
        np.testing.assert_allclose(logprobs, exact, atol=1e-5)

    def test_excluded_tokens_carry_no_probability_and_no_gradient(self):
        logits = jnp.array([[0.5, -jnp.inf, 1.0, -jnp.inf]])
        value, gradient = jax.value_and_grad(lambda x: logprobs_from_logits(x, jnp.array([2]))[0])(logits)
        assert float(value) == pytest.approx(float(reference(np.array([0.5, 1.0]))[1]), abs=1e-6)
        # onehot − softmax: (−σ(−½), 0, 1 − σ(½), 0)
        np.testing.assert_allclose(gradient, [[-0.377541, 0.0, 0.377541, 0.0]], atol=1e-6)

    @pytest.mark.parametrize("outside", [-100, -1, 4])
    def test_an_id_outside_the_vocabulary_gives_0_and_no_gradient(self, outside):
        logits = jnp.array([[0.5, 3.0, 1.0, 2.0]] * 2)
        targets = jnp.array([outside, 1])
        value, gradient = jax.value_and_grad(lambda x: logprobs_from_logits(x, targets).sum())(logits)
        exact = reference(np.asarray(logits[1]))
        assert float(value) == pytest.approx(float(exact[1]), abs=1e-6)
        np.testing.assert_array_equal(gradient[0], np.zeros(4))
        np.testing.assert_allclose(gradient[1], np.eye(4)[1] - np.exp(exact), atol=1e-6)

    def test_lore_7_7_gradient_is_finite_beside_minus_infinity(self):
        logits = jnp.array([[0.5, -jnp.inf, 1.0], [-jnp.inf, -jnp.inf, 2.0]])
        targets, mask = jnp.array([1, 2]), jnp.array([False, True])

        def objective(logits):
            logprobs = logprobs_from_logits(logits, targets)
            return jnp.sum(jnp.where(mask, logprobs + entropy_from_logits(logits), 0.0))

        value, gradient = jax.value_and_grad(objective)(logits)
        assert float(value) == 0.0
        assert jnp.isfinite(gradient).all()

    def test_gradient_is_that_of_the_log_softmax(self):
        kernel, hidden, targets = problem(3, 4)
        logits, weights = 5 * head(kernel, hidden), jnp.arange(12.0).reshape(3, 4) - 6

        def derived(logits):
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), targets[..., None], axis=-1)
            return jnp.sum(weights * chosen[..., 0])

        gradient = jax.grad(lambda x: jnp.sum(weights * logprobs_from_logits(x, targets)))(logits)
        np.testing.assert_allclose(gradient, jax.grad(derived)(logits), atol=1e-5)

    def test_vmap_equals_loop(self):
        kernel, hidden, targets = problem(3, 4)
        logits = head(kernel, hidden)
        batched = logprobs_from_logits(logits, targets)
        np.testing.assert_allclose(jax.vmap(logprobs_from_logits)(logits, targets), batched, atol=1e-6)
        np.testing.assert_allclose(
            logprobs_from_logits(logits[1, 2], targets[1, 2]), batched[1, 2], atol=1e-6
        )

    def test_a_large_vocabulary_has_the_same_bits_in_the_order_of_a_cpu_and_of_others(self, monkeypatch):
        """A CPU reads the target before it subtracts the largest logit, others after it."""
        logits = 5 * jax.random.normal(jax.random.key(0), (4, 3, 9000))
        targets = jax.random.randint(jax.random.key(1), (4, 3), 0, 9000)
        logits = logits.at[0, 0, targets[0, 0]].set(-jnp.inf)
        targets = targets.at[1, 1].set(-100)
        on_cpu = logprobs_from_logits(logits, targets)
        monkeypatch.setattr(logprobs, "_take_and_shift", logprobs._shift_and_take)
        np.testing.assert_array_equal(logprobs_from_logits(logits, targets), on_cpu)
        assert on_cpu[0, 0] == -jnp.inf and on_cpu[1, 1] == 0
        whole, ids = reference(np.asarray(logits)), np.maximum(targets, 0)
        expected = np.take_along_axis(whole, ids[..., None], axis=-1).squeeze(-1)
        expected[1, 1] = 0
        np.testing.assert_allclose(on_cpu, expected, rtol=1e-6, atol=1e-6)

    @pytest.mark.parametrize(("platform", "passes"), [("cpu", 1), ("cuda", 2), ("tpu", 2)])
    def test_how_often_the_largest_logit_of_a_large_vocabulary_is_subtracted(self, platform, passes):
        """Once, for the sum, where XLA would not read the target inside of that loop."""
        logits, targets = jax.ShapeDtypeStruct((3, 9000), jnp.float32), jnp.zeros(3, jnp.int32)
        traced = jax.jit(logprobs_from_logits).trace(logits, targets)
        lowered = traced.lower(lowering_platforms=(platform,)).as_text()
        assert len(re.findall(r"stablehlo.subtract .*tensor<3x9000xf32>", lowered)) == passes


class TestEntropyFromLogits:
    def test_golden(self):
        logits = jnp.array([[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]])
        np.testing.assert_allclose(entropy_from_logits(logits), [0.832396, 1.098612], atol=1e-6)

    def test_lore_5_10_entropy_is_over_the_full_vocabulary_in_float32(self):
        logits = jnp.asarray(np.random.default_rng(1).normal(scale=4, size=(8, 30)), jnp.bfloat16)
        exact = reference(np.asarray(logits, np.float64))
        entropy = entropy_from_logits(logits)
        assert entropy.dtype == jnp.float32
        np.testing.assert_allclose(entropy, -(np.exp(exact) * exact).sum(-1), atol=1e-5)

    def test_gradient_is_that_of_the_entropy(self):
        # dH/dz_i = −p_i (log p_i + H), and 0 where p_i = 0
        logits = jnp.array([0.3, -jnp.inf, 1.2])
        gradient = jax.grad(lambda x: entropy_from_logits(x))(logits)
        logprobs = reference(np.array([0.3, 1.2]))
        probs = np.exp(logprobs)
        expected = -probs * (logprobs - (probs * logprobs).sum())
        np.testing.assert_allclose(gradient, [expected[0], 0.0, expected[1]], atol=1e-6)


class TestTokenLogprobs:
    @pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
    def test_lore_2_1_logits_are_divided_by_the_temperature(self, temperature):
        kernel, hidden, targets = problem(2, 3)
        out = token_logprobs(
            partial(head, kernel),
            hidden,
            targets,
            temperature=temperature,
            chunk_bytes=PLAIN,
            vocab_size=VOCAB,
            with_entropy=True,
        )
        exact = reference(np.asarray(head(kernel, hidden))[..., :-1] / temperature)
        chosen = np.take_along_axis(exact, np.asarray(targets)[..., None], axis=-1)[..., 0]
        np.testing.assert_allclose(out.logprobs, chosen, atol=1e-5)
        np.testing.assert_allclose(out.entropy, -(np.exp(exact) * exact).sum(-1), atol=1e-5)

    def test_lore_3_7_kl_reads_unfiltered_logits(self):
        """A token outside the reference's nucleus: the filtered KL is infinite, the one in use is not."""
        policy, ref = jnp.array([[[2.0, 1.0, 0.0]]]), jnp.array([[[0.0, 1.0, 9.0]]])
        targets = jnp.array([[0]])
        read = partial(
            token_logprobs, lambda logits: logits, temperature=1.0, chunk_bytes=PLAIN, vocab_size=3
        )
        kl = read(policy, targets).logprobs - read(ref, targets).logprobs
        exact = reference(np.array([2.0, 1.0, 0.0]))[0] - reference(np.array([0.0, 1.0, 9.0]))[0]
        assert float(kl[0, 0]) == pytest.approx(exact, abs=1e-5)

    @pytest.mark.parametrize(
        ("num_rows", "width", "positions"),
        [(3, 7, 1), (3, 7, 2), (3, 7, 5), (3, 7, 6), (5, 2, 2), (5, 2, 6), (4, 1, 1)],
    )
    def test_lore_5_11_chunks_equal_the_plain_path(self, num_rows, width, positions):
        """Values and gradients, for chunks that divide the window and chunks that leave a remainder."""
        kernel, hidden, targets = problem(num_rows, width)
        weights = jnp.asarray(np.random.default_rng(2).normal(size=(2, num_rows, width)), jnp.float32)

        def objective(kernel, hidden, *, chunk_bytes):
            out = token_logprobs(
                partial(head, kernel),
                hidden,
                targets,
                temperature=0.7,
                chunk_bytes=chunk_bytes,
                vocab_size=VOCAB,
                with_entropy=True,
            )
            return jnp.sum(weights[0] * out.logprobs + weights[1] * out.entropy), out

        value = jax.jit(
            jax.value_and_grad(objective, argnums=(0, 1), has_aux=True), static_argnames="chunk_bytes"
        )
        plain = value(kernel, hidden, chunk_bytes=PLAIN)
        chunked = value(kernel, hidden, chunk_bytes=4 * VOCAB * positions)
        jax.tree.map(partial(np.testing.assert_allclose, atol=1e-5), chunked, plain)

    def test_no_entropy_unless_asked(self):
        kernel, hidden, targets = problem(2, 3)
        for chunk_bytes in (PLAIN, 1):
            out = token_logprobs(
                partial(head, kernel),
                hidden,
                targets,
                temperature=1.0,
                chunk_bytes=chunk_bytes,
                vocab_size=VOCAB,
            )
            assert out.entropy is None

    @pytest.mark.parametrize(("num_rows", "width"), [(4, 64), (16, 16), (256, 1)])
    def test_no_array_of_all_logits_in_value_or_gradient(self, num_rows, width):
        """At B·T = 4 chunks, GPT-2's vocabulary: the point of the chunks."""
        vocab_size, hidden_width = 50257, 8
        limit = num_rows * width * vocab_size
        kernel = jax.ShapeDtypeStruct((hidden_width, vocab_size), jnp.float32)
        hidden = jax.ShapeDtypeStruct((num_rows, width, hidden_width), jnp.float32)
        targets = jnp.zeros((num_rows, width), jnp.int32)

        def objective(kernel, hidden, *, chunk_bytes):
            out = token_logprobs(
                lambda x: x @ kernel,
                hidden,
                targets,
                temperature=1.0,
                chunk_bytes=chunk_bytes,
                vocab_size=vocab_size,
                with_entropy=True,
            )
            return jnp.sum(out.logprobs) + jnp.sum(out.entropy)

        def largest(function, chunk_bytes):
            jaxpr = jax.make_jaxpr(partial(function, chunk_bytes=chunk_bytes))(kernel, hidden)
            return max(int(np.prod(shape)) for shape in all_shapes(jaxpr.jaxpr))

        for function in (objective, jax.grad(objective, argnums=(0, 1))):
            assert largest(function, chunk_bytes=limit) <= limit // 4
            assert largest(function, chunk_bytes=4 * limit) >= limit, "the plain path would show up"

    @pytest.mark.parametrize("argument", ["temperature", "chunk_bytes", "vocab_size"])
    def test_hyperparameters_must_be_positive(self, argument):
        kernel, hidden, targets = problem(1, 2)
        good = {"temperature": 1.0, "chunk_bytes": PLAIN, "vocab_size": VOCAB}
        with pytest.raises(ValueError, match=f"`{argument}` must be > 0, got 0"):
            token_logprobs(partial(head, kernel), hidden, targets, **{**good, argument: 0})

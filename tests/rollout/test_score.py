# SPDX-License-Identifier: Apache-2.0
"""The scoring pass: the window, the reference, exactness against the learner, and what is never computed."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.forward import window_features, window_logprobs
from jrl.models.config import VOCAB_MULTIPLE
from jrl.ops.kl import kl_k1
from jrl.ops.policy_gradient import importance_ratio
from jrl.rollout.score import make_score
from jrl.typing import Features, ModelInputs, PolicyFns, Sequences
from tests.rollout.programs import LONG, PLAIN, rescore, sample, scorer
from tests.tiny import VOCAB_SIZE, tiny_policy, tiny_prompts

FAMILIES = ["gpt2", "llama"]
PADDED_VOCAB = -(-VOCAB_SIZE // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@pytest.fixture(scope="module", params=FAMILIES)
def rollout(request: pytest.FixtureRequest) -> tuple:
    """(family, prompts, completions, sequences, scored) at temperature 0.7."""
    prompts = tiny_prompts()
    found = sample(request.param, prompts, max_new_tokens=LONG, temperature=0.7)
    return request.param, prompts, found, *rescore(request.param, prompts, found, temperature=0.7)


def full_logprobs(family: str, inputs: ModelInputs) -> np.ndarray:
    """log π of every token at every column, float64, temperature 1."""
    logits = np.float64(whole_logits(family)(inputs))[..., :VOCAB_SIZE]
    shifted = logits - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))


@functools.cache
def whole_logits(family: str):
    policy, params, frozen, _ = tiny_policy(family)

    @jax.jit
    def logits(inputs):
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        return policy.logits(params, frozen, hidden)

    return logits


def at_actions(logprobs: np.ndarray, sequences: Sequences) -> np.ndarray:
    """The window's figures, cut out row by row."""
    tokens, width = np.asarray(sequences.inputs.tokens), sequences.mask.shape[1]
    return np.stack(
        [
            [logprobs[row, start + t, tokens[row, start + t + 1]] for t in range(width)]
            for row, start in enumerate(sequences.starts.tolist())
        ]
    )


def test_lore_2_3_the_first_ratio_is_one(rollout):
    """Scored in one program, trained on in another, in microbatches of two: rounding is all that may differ."""
    family, _, _, sequences, scored = rollout
    policy, params, frozen, _ = tiny_policy(family)

    @jax.jit
    def learner(sequences):
        trunk = policy.trunk(frozen, sequences.inputs)
        features = window_features(policy, params, frozen, trunk, sequences)
        settings = dict(temperature=0.7, logprob_chunk_bytes=PLAIN, vocab_size=PADDED_VOCAB)
        return window_logprobs(
            policy, params, frozen, features.policy, sequences, with_entropy=True, **settings
        ).logprobs

    halves = [learner(jax.tree.map(lambda x, i=i: x[i : i + 2], sequences)) for i in (0, 2)]
    new = np.concatenate(halves)
    deviation = np.abs(np.asarray(importance_ratio(jnp.asarray(new), scored.logprobs)) - 1).max()
    ulp = np.spacing(np.abs(scored.logprobs).max())
    print(f"lore 2.3: max |ratio - 1|, {family}: {deviation:.2e} = {deviation / ulp:.1f} ulp")
    assert deviation <= 4 * ulp


def test_lore_3_6_a_copied_reference_has_exactly_zero_kl(rollout):
    *_, scored = rollout
    np.testing.assert_array_equal(kl_k1(scored.logprobs, scored.ref_logprobs), 0.0)


def test_lore_3_6_a_hydra_reference_too():
    prompts = tiny_prompts()
    _, scored = rescore("llama", prompts, sample("llama", prompts), unfrozen=1)
    np.testing.assert_array_equal(scored.logprobs, scored.ref_logprobs)


def test_lore_2_1_log_probabilities_are_divided_by_the_temperature(rollout):
    family, _, _, sequences, scored = rollout
    tempered = full_logprobs(family, sequences.inputs) / 0.7
    tempered -= np.log(np.exp(tempered).sum(-1, keepdims=True))
    np.testing.assert_allclose(scored.logprobs, at_actions(tempered, sequences), atol=1e-5)


def test_lore_3_7_filtered_sampling_is_scored_unfiltered():
    prompts = tiny_prompts()
    found = sample("gpt2", prompts, max_new_tokens=LONG, top_p=0.5)
    sequences, scored = rescore("gpt2", prompts, found)
    expected = at_actions(full_logprobs("gpt2", sequences.inputs), sequences)
    np.testing.assert_allclose(scored.logprobs, expected, atol=1e-5)
    # Against another policy, half of whose nucleus lies elsewhere, the KL is finite and the unfiltered one.
    policy, params, frozen, ref_params = tiny_policy("gpt2")
    other = jax.tree.map(lambda x: x * 0.5, ref_params)
    scored = scorer("gpt2")(params, frozen, other, sequences, np.float32(1.0))
    assert np.isfinite(scored.ref_logprobs).all()
    assert np.abs(kl_k1(scored.logprobs, scored.ref_logprobs)).max() > 0.1


def test_what_follows_a_completion_changes_nothing_before(rollout):
    family, _, _, sequences, scored = rollout
    _, params, frozen, ref_params = tiny_policy(family)
    garbage = np.where(np.arange(sequences.inputs.tokens.shape[1]) < 40, sequences.inputs.tokens, 50)
    changed = sequences._replace(inputs=sequences.inputs._replace(tokens=jnp.asarray(garbage, jnp.int32)))
    again = scorer(family)(params, frozen, ref_params, changed, np.float32(0.7))
    for row, start in enumerate(sequences.starts.tolist()):
        same = slice(0, 39 - start)
        np.testing.assert_array_equal(again.logprobs[row, same], scored.logprobs[row, same])
        np.testing.assert_array_equal(again.values[row, same], scored.values[row, same])


def test_values_are_of_the_state_before_the_action(rollout):
    family, _, _, sequences, _ = rollout
    policy, params, frozen, ref_params = tiny_policy(family)
    out = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params["v_head"]["out"])
    params = {**params, "v_head": {**params["v_head"], "out": out}}  # a fresh head is zero everywhere
    scored = scorer(family)(params, frozen, ref_params, sequences, np.float32(0.7))

    @jax.jit
    def everywhere(inputs):
        return policy.heads(params, policy.branch(params, frozen, None, inputs, None).value)["values"]

    columns = np.asarray(sequences.starts)[:, None] + np.arange(LONG)
    expected = np.take_along_axis(np.asarray(everywhere(sequences.inputs)), columns, axis=1)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(scored.values, expected, atol=1e-5)


def test_hydra_and_full_reference_agree_after_the_top_layer_has_moved():
    """What the reference says stays, and both ways of keeping it say the same."""
    prompts = tiny_prompts()
    found = sample("llama", prompts)
    sequences, before = rescore("llama", prompts, found, unfrozen=1)
    _, params, frozen, ref_params = tiny_policy("llama", 1)
    moved = {**params, "layers_1": jax.tree.map(lambda x: x * 1.1, params["layers_1"])}
    hydra = scorer("llama", 1)(moved, frozen, ref_params, sequences, np.float32(1.0))
    np.testing.assert_array_equal(hydra.ref_logprobs, before.ref_logprobs)
    assert np.abs(hydra.logprobs - before.logprobs).max() > 1e-3
    _, params, frozen, ref_params = tiny_policy("llama", -1)
    moved = {**params, "layers_1": jax.tree.map(lambda x: x * 1.1, params["layers_1"])}
    full = scorer("llama", -1)(moved, frozen, ref_params, sequences, np.float32(1.0))
    np.testing.assert_allclose(hydra.ref_logprobs, full.ref_logprobs, atol=1e-5)
    np.testing.assert_allclose(hydra.logprobs, full.logprobs, atol=1e-5)


class TestSize:
    """GPT-2's vocabulary, on the jaxpr alone."""

    VOCAB, ROWS, PROMPT, WIDTH = 50257, 4, 48, 16

    def shapes(self, chunk_bytes: int) -> list[tuple[int, ...]]:
        def branch(params, frozen, trunk, inputs, dropout_key):
            hidden = inputs.tokens[..., None] * params["embed"][None, None]
            return Features(hidden, hidden)

        policy = PolicyFns(
            trunk=lambda frozen, inputs: None,
            branch=branch,
            logits=lambda params, frozen, hidden: hidden @ params["head"],
            heads=lambda params, hidden: {"values": hidden.sum(-1)},
            init_cache=lambda batch, length: None,
            decode=lambda params, frozen, inputs, cache: (branch(params, frozen, None, inputs, None), cache),
        )
        params = {"embed": jnp.zeros(8), "head": jax.ShapeDtypeStruct((8, self.VOCAB), jnp.float32)}
        columns = self.PROMPT + self.WIDTH
        inputs = ModelInputs(jnp.ones((self.ROWS, columns), jnp.int32), jnp.ones((self.ROWS, columns), bool))
        starts = jnp.full(self.ROWS, self.PROMPT - 1)
        sequences = Sequences(inputs, starts, jnp.ones((self.ROWS, self.WIDTH), bool))
        score = make_score(policy, logprob_chunk_bytes=chunk_bytes)
        return list(all_shapes(jax.make_jaxpr(score)(params, {}, params, sequences, jnp.float32(1.0)).jaxpr))

    def test_logits_of_prompts_are_never_computed(self):
        shapes = self.shapes(chunk_bytes=1 << 40)
        assert (self.ROWS, self.WIDTH, self.VOCAB) in shapes, "the plain path holds the window's logits"
        assert max(np.prod(shape) for shape in shapes) == self.ROWS * self.WIDTH * self.VOCAB

    def test_four_chunks_never_hold_all_logits(self):
        whole = self.ROWS * self.WIDTH * self.VOCAB
        shapes = self.shapes(chunk_bytes=4 * whole // 4)
        assert max(np.prod(shape) for shape in shapes) <= whole // 4


def all_shapes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[int, ...]]:
    """Shapes of all values of a jaxpr, those inside loops, branches and calls included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from all_shapes(inner)

# SPDX-License-Identifier: Apache-2.0
"""The scoring pass: the window, the reference, exactness against the learner, and what is never computed."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import T5Config

from jrl.forward import window_features, window_logprobs
from jrl.models.adapters.config import LoraConfig
from jrl.models.config import VOCAB_MULTIPLE
from jrl.models.model import make_model
from jrl.ops.kl import kl_k1
from jrl.rollout.score import make_score
from jrl.typing import Features, ModelInputs, PolicyFns, Scored, Sequences
from tests.models.family_cases import CASES
from tests.rollout.programs import LONG, PLAIN, long_rollout, rescore, sample, scorer, window_logits
from tests.tiny import VOCAB_SIZE, tiny_hf_config, tiny_policy

FAMILIES = ["gpt2", "llama"]
PADDED_VOCAB = -(-VOCAB_SIZE // VOCAB_MULTIPLE) * VOCAB_MULTIPLE


@pytest.fixture(scope="module", params=FAMILIES)
def rollout(request: pytest.FixtureRequest) -> tuple[str, Sequences, Scored]:
    """64 tokens a row, scored at temperature 0.7 by a policy that is its own reference."""
    return request.param, *rescore(request.param, *long_rollout(request.param), temperature=0.7)


@pytest.fixture(scope="module")
def gpt2() -> tuple[Sequences, Scored]:
    return rescore("gpt2", *long_rollout("gpt2"), temperature=0.7)


def at_actions(logits: np.ndarray, sequences: Sequences) -> np.ndarray:
    """log π of each row's own tokens, read off one by one."""
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    tokens = np.asarray(sequences.inputs.tokens)
    return np.stack(
        [
            [logprobs[row, t, tokens[row, start + 1 + t]] for t in range(logprobs.shape[1])]
            for row, start in enumerate(sequences.starts.tolist())
        ]
    )


@pytest.fixture(scope="module")
def learner_logprobs(gpt2) -> np.ndarray:
    """What a learner computes of the same rows: a program of its own, in microbatches of two."""
    policy, params, frozen, _ = tiny_policy("gpt2")

    @jax.jit
    def learner(sequences):
        trunk = policy.trunk(frozen, sequences.inputs)
        hidden = window_features(policy, params, frozen, trunk, sequences).policy
        settings = dict(temperature=0.7, chunk_bytes=PLAIN)
        return window_logprobs(
            policy, params, frozen, hidden, sequences, with_entropy=True, **settings
        ).logprobs

    return np.concatenate([learner(jax.tree.map(lambda x, i=i: x[i : i + 2], gpt2[0])) for i in (0, 2)])


def test_lore_2_3_the_first_ratio_is_one(gpt2, learner_logprobs):
    """Scored in one program, trained on in another: rounding is all that may differ."""
    _, scored = gpt2
    deviation = np.abs(np.expm1(np.float64(learner_logprobs) - np.float64(scored.logprobs))).max()
    ulp = np.spacing(np.abs(np.asarray(scored.logprobs)).max())
    print(f"lore 2.3: max |ratio - 1|: {deviation:.2e}, {deviation / ulp:.1f} ulp of the largest logprob")
    assert deviation <= 4 * ulp


def test_lore_3_6_a_copied_reference_has_exactly_zero_kl(rollout):
    _, _, scored = rollout
    np.testing.assert_array_equal(kl_k1(scored.logprobs, scored.ref_logprobs), 0.0)


def test_lore_2_1_log_probabilities_are_divided_by_the_temperature(rollout):
    family, sequences, scored = rollout
    expected = at_actions(window_logits(family, sequences) / 0.7, sequences)
    np.testing.assert_allclose(scored.logprobs, expected, atol=1e-5)


def test_lore_3_7_filtered_sampling_is_scored_unfiltered():
    """By policy and reference: the KL is finite though each finds the other's tokens outside its nucleus."""
    prompts, _ = long_rollout("gpt2")
    found = sample("gpt2", prompts, top_p=0.5)
    sequences, scored = rescore("gpt2", prompts, found)
    expected = at_actions(window_logits("gpt2", sequences), sequences)
    np.testing.assert_allclose(scored.logprobs, expected, atol=1e-5)
    _, params, frozen, ref_params = tiny_policy("gpt2")
    scored = scorer("gpt2")(params, frozen, shrunk(ref_params), sequences, np.float32(1.0))
    assert np.isfinite(scored.ref_logprobs).all()
    assert np.abs(kl_k1(scored.logprobs, scored.ref_logprobs)).max() > 0.1


def shrunk(params):
    """Another policy: the embedding, and with it the tied head, at half its size."""
    embedding = jax.tree.map(lambda x: np.float32(0.5) * x, params["embed"])
    return params | {"embed": embedding}


def test_what_follows_a_completion_changes_nothing_before(gpt2):
    sequences, scored = gpt2
    _, params, frozen, ref_params = tiny_policy("gpt2")
    garbage = np.where(np.arange(sequences.inputs.tokens.shape[1]) < 40, sequences.inputs.tokens, 50)
    changed = sequences._replace(inputs=sequences.inputs._replace(tokens=np.int32(garbage)))
    again = scorer("gpt2")(params, frozen, ref_params, changed, np.float32(0.7))
    for row, start in enumerate(sequences.starts.tolist()):
        same = slice(0, 39 - start)
        np.testing.assert_array_equal(again.logprobs[row, same], scored.logprobs[row, same])
        np.testing.assert_array_equal(again.values[row, same], scored.values[row, same])


@pytest.fixture(scope="module")
def loud_critic():
    """Parameters whose value head is not zero everywhere, and its values at every column."""
    policy, params, frozen, _ = tiny_policy("gpt2")
    out = jax.tree.map(lambda x: np.ones(x.shape, x.dtype), params["v_head"]["out"])
    params = {**params, "v_head": {**params["v_head"], "out": out}}

    @jax.jit
    def everywhere(inputs):
        return policy.heads(params, policy.branch(params, frozen, None, inputs, None).value)["values"]

    return params, everywhere


def test_values_are_of_the_state_before_the_action(gpt2, loud_critic):
    sequences, _ = gpt2
    params, everywhere = loud_critic
    _, _, frozen, ref_params = tiny_policy("gpt2")
    scored = scorer("gpt2")(params, frozen, ref_params, sequences, np.float32(0.7))
    columns = np.asarray(sequences.starts)[:, None] + np.arange(LONG)
    expected = np.take_along_axis(np.asarray(everywhere(sequences.inputs)), columns, axis=1)
    assert np.ptp(expected) > 0.1
    np.testing.assert_allclose(scored.values, expected, atol=1e-5)


class TestHydra:
    """The reference of a policy whose last layer has moved, kept as a branch and kept whole."""

    @pytest.fixture(scope="class")
    @classmethod
    def scored(cls):
        found = {}
        sequences, found["before"] = rescore("llama", *long_rollout("llama"), unfrozen=1)
        for name, unfrozen in [("hydra", 1), ("full", -1)]:
            _, params, frozen, ref_params = tiny_policy("llama", unfrozen)
            moved = {**params, "layers_1": jax.tree.map(lambda x: np.float32(1.1) * x, params["layers_1"])}
            found[name] = scorer("llama", unfrozen)(moved, frozen, ref_params, sequences, np.float32(1.0))
        return found

    def test_lore_3_6_its_kl_is_exactly_zero_before(self, scored):
        np.testing.assert_array_equal(scored["before"].logprobs, scored["before"].ref_logprobs)

    def test_the_reference_stays_where_it_was(self, scored):
        np.testing.assert_array_equal(scored["hydra"].ref_logprobs, scored["before"].ref_logprobs)
        assert np.abs(np.asarray(scored["hydra"].logprobs - scored["before"].logprobs)).max() > 1e-3

    def test_branch_and_whole_reference_agree(self, scored):
        np.testing.assert_allclose(scored["hydra"].ref_logprobs, scored["full"].ref_logprobs, atol=1e-5)
        np.testing.assert_allclose(scored["hydra"].logprobs, scored["full"].logprobs, atol=1e-5)


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
            init_cache=lambda params, frozen, prompts, length: None,
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


HEADS = {
    "softcap": (CASES["gemma2"], None),
    "scaled": (T5Config(**tiny_hf_config("t5").to_dict() | {"tie_word_embeddings": True}), None),
    "adapter": (CASES["llama"], LoraConfig(r=2, target_modules=("lm_head",), use_dora=True)),
}


class TestSizeOfRealModels:
    """The rule of four chunks where the head is more than one product."""

    @pytest.mark.parametrize("kind", HEADS)
    def test_four_chunks_never_hold_all_logits(self, kind):
        rows, width, vocab = 8, 32, 4096
        config, adapter = HEADS[kind]
        config = copy.deepcopy(config)
        config.vocab_size = vocab
        lm = make_model(config, "mlp")
        split = {} if adapter is None else {"adapter": adapter}
        policy = lm.policy(**split)
        key = jax.random.key(0)
        params, frozen = jax.eval_shape(lambda key: lm.split_params(lm.init(key), key=key, **split), key)
        tokens, mask = jnp.ones((rows, width + 1), jnp.int32), jnp.ones((rows, width + 1), bool)
        context = (tokens, mask) if lm.family.kind == "seq2seq" else (None, None)
        inputs = ModelInputs(tokens, mask, None, *context)
        sequences = Sequences(inputs, jnp.zeros(rows, jnp.int32), mask[:, 1:])
        whole = rows * width * vocab
        score = make_score(policy, logprob_chunk_bytes=4 * whole // 4)
        reference = {name: leaf for name, leaf in params.items() if name not in ("v_head", "lora")}
        program = jax.make_jaxpr(score)(params, frozen, reference, sequences, jnp.float32(1.0))
        assert max(np.prod(shape) for shape in all_shapes(program.jaxpr)) <= whole // 4


def all_shapes(jaxpr: jax.extend.core.Jaxpr) -> Iterator[tuple[int, ...]]:
    """Shapes of all values of a jaxpr, those inside loops, branches and calls included."""
    for equation in jaxpr.eqns:
        for variable in equation.outvars:
            yield variable.aval.shape
        for inner in jax.extend.core.jaxprs_in_params(equation.params):
            yield from all_shapes(inner)

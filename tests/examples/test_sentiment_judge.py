# SPDX-License-Identifier: Apache-2.0
"""Variety and fluency of completions, by hand and on a model whose distribution is known."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.sentiment.judge import Checkpoint, distinct_2, judge
from jrl.models.checkpoint import save_checkpoint
from tests.tiny import EOS_ID, VOCAB_SIZE, tiny_lm, tiny_tokenizer

PROMPTS = ["the cat", "a dog is", "we"]
GEN_KWARGS = {"max_new_tokens": 6, "do_sample": True, "top_k": 0}


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([], 0.0),
        (["one"], 0.0),
        (["a b c"], 1.0),
        (["a b a b", "a b"], 0.5),  # (a b) (b a) (a b) | (a b): 2 distinct of 4; no bigram spans two texts
        (["a b", "a b", "a b", "c d"], 0.5),
    ],
)
def test_distinct_2(texts, expected):
    assert distinct_2(texts) == expected


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    lm, params = tiny_lm()
    folder = tmp_path_factory.mktemp("judge") / "model"
    # Logits that differ a lot would make every row end, or none.
    save_checkpoint(folder, lm, jax.tree.map(lambda leaf: 0.5 * leaf, params), tokenizer=tiny_tokenizer())
    return Checkpoint(folder)


@pytest.fixture(scope="module")
def texts(checkpoint):
    return checkpoint.complete(PROMPTS, seed=0, gen_kwargs=GEN_KWARGS, rows=2)


def test_completions(checkpoint, texts):
    assert texts.prompts == PROMPTS
    assert [len(tokens) for tokens in texts.output_tokens] == texts.lengths.tolist()
    assert all(EOS_ID not in tokens[:-1] for tokens in texts.output_tokens)
    assert all(tokens[-1] == EOS_ID or len(tokens) == 6 for tokens in texts.output_tokens)
    again = checkpoint.complete(PROMPTS, seed=0, gen_kwargs=GEN_KWARGS, rows=2)
    other = checkpoint.complete(PROMPTS, seed=1, gen_kwargs=GEN_KWARGS, rows=2)
    assert again.output_tokens == texts.output_tokens != other.output_tokens


def log_softmax(logits):
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True))


def test_perplexity_counts_the_sampled_tokens_and_no_others(checkpoint, texts):
    logits = jax.jit(checkpoint.model.logits)
    total = count = 0
    for prompt, tail in zip(texts.prompts, texts.output_tokens, strict=True):
        head = checkpoint.tokenizer(prompt, add_special_tokens=False)["input_ids"]
        # One width for all rows, one program: what is right of a token does not reach it.
        row = np.zeros((1, 16), np.int32)
        row[0, : len(head + tail)] = head + tail
        logprobs = log_softmax(np.asarray(logits(checkpoint.params, row))[0])
        total -= sum(logprobs[len(head) + i - 1, token] for i, token in enumerate(tail))
        count += len(tail)
    assert checkpoint.perplexity(texts, rows=2) == pytest.approx(np.exp(total / count), rel=1e-4)


def test_a_judge_that_knows_nothing_finds_every_token_equally_likely(checkpoint, texts, monkeypatch):
    monkeypatch.setattr(checkpoint, "params", jax.tree.map(jnp.zeros_like, checkpoint.params))
    judgement = judge(texts, lambda outputs, **others: [len(text) for text in outputs], checkpoint)
    assert judgement.perplexity == pytest.approx(VOCAB_SIZE, rel=1e-4)
    assert judgement.rewards == [len(text) for text in texts.outputs]
    assert judgement.reward == pytest.approx(np.mean(judgement.rewards))
    assert judgement.length == pytest.approx(np.mean([len(tokens) for tokens in texts.output_tokens]))
    assert judgement.distinct_2 == distinct_2(texts.outputs)

# SPDX-License-Identifier: Apache-2.0
"""Reward and metric functions under trlX's keywords, and rewards per token that were counted on the text."""

import functools

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from jrl.rollout.rewards import RewardError, call_metric_fn, call_reward_fn
from jrl.rollout.text import Texts
from jrl.trlx.functions import placed, reached, seed_metrics, seed_rewards

WORDS = ["<eos>", "a", "b", "c", "ab", "Ġ", "Ġc"]


@pytest.fixture(scope="module")
def tokenizer():
    """It merges "ab" and " c" wherever it tokenises; a policy may write the letters one by one."""
    vocab = {word: number for number, word in enumerate(WORDS)}
    made = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "c")]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


TEXTS = ["so it goes, isn't it? — «да», 日本語の文 🙂🙃 ", "über naïve cafés : 10 € ... we 've been there !"]


def byte_level():
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<eos>"], initial_alphabet=alphabet)
    made.train_from_iterator(TEXTS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>")


def unigram(decoder, **options):
    pieces = sorted({f"▁{word}" for text in TEXTS for word in text.split()} | set("▁abcdeiostu.,!'日🙂"))
    pieces = ["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    vocab = [(piece, -float(number)) for number, piece in enumerate(pieces)]
    made = Tokenizer(models.Unigram(vocab, unk_id=1, byte_fallback=True))
    made.pre_tokenizer, made.decoder = pre_tokenizers.Metaspace(), decoder
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<eos>", unk_token="<unk>", **options)


LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
KINDS = {
    "byte-level": byte_level,
    "byte fallback": lambda: unigram(LLAMA),
    "metaspace": lambda: unigram(decoders.Metaspace()),
    "cleaned": lambda: unigram(decoders.Metaspace(), clean_up_tokenization_spaces=True),
}


class Counting:
    """Counts the ids that are decoded."""

    def __init__(self, tokenizer):
        self.tokenizer, self.count = tokenizer, 0
        self.convert_ids_to_tokens = tokenizer.convert_ids_to_tokens

    def decode(self, ids, **options):
        self.count += len(ids)
        return self.tokenizer.decode(ids, **options)


def texts(*ids):
    tokens = {1: "a", 2: "b", 3: "c", 4: "ab", 5: " ", 6: " c", 0: ""}
    outputs = ["".join(tokens[one] for one in row) for row in ids]
    lengths = np.array([len(row) for row in ids], np.int32)
    rows = [list(row) for row in ids]
    return Texts(outputs, ["p"] * len(ids), outputs, rows, lengths, np.zeros(len(ids), bool))


@pytest.mark.parametrize(
    ("rewards", "ids", "expected"),
    [
        # As many as were sampled: as they are.
        ([1, 2, 3], [1, 2, 3], [1, 2, 3]),
        # "ab| c" was sampled as a, b, " ", c.
        ([1, 2], [1, 2, 5, 3], [0, 1, 0, 2]),
        # One for the EOS, which is no part of the text; and one for it where it was not sampled.
        ([1, 2], [1, 2, 5, 3, 0], [0, 1, 0, 2, 0]),
        ([1, 2, 4], [1, 2, 5, 3, 0], [0, 1, 0, 2, 4]),
        ([1, 2, 4], [1, 2, 5, 3], [0, 1, 0, 6]),
        # Not counted on this text: for the check of rewards to say.
        ([1, 2, 4, 8, 16, 32, 64], [1, 2], [1, 2, 4, 8, 16, 32, 64]),
        (0.5, [1, 2], 0.5),
    ],
)
def test_a_reward_goes_to_the_sampled_token_in_which_its_own_ends(tokenizer, rewards, ids, expected):
    found = placed(rewards, tokenizer.decode(ids, skip_special_tokens=True), ids, tokenizer)
    assert found == expected


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_reaches_what_decoding_every_prefix_says(kind):
    tokenizer, draw = KINDS[kind](), np.random.default_rng(7)
    written = tokenizer("".join(TEXTS) * 2, add_special_tokens=False)["input_ids"]
    for trial in range(16):
        ids = list(written) if trial % 2 else draw.integers(len(tokenizer), size=100).tolist()
        for place in draw.integers(len(ids), size=trial):  # what is written, with odd ids in between
            ids[place] = int(draw.integers(len(tokenizer)))
        expected = [
            len(tokenizer.decode(ids[: place + 1], skip_special_tokens=True)) for place in range(len(ids))
        ]
        assert reached(ids, tokenizer) == expected


@pytest.mark.parametrize("kind", ["byte-level", "byte fallback"])
def test_its_cost_grows_as_the_text_does(kind):
    tokenizer = Counting(KINDS[kind]())
    ids = tokenizer.tokenizer("".join(TEXTS) * 10, add_special_tokens=False)["input_ids"]
    reached(ids, tokenizer)
    assert tokenizer.count < 64 * len(ids)


def test_rewards_per_token_of_the_text_reach_the_run(tokenizer):
    def dense(samples, prompts, outputs, tokenizer, **others):
        assert set(others) == {"original"}
        return [[1.0] * len(tokenizer(output).input_ids) for output in outputs]

    found = texts([1, 2, 5, 3], [4, 0])
    keywords = {"tokenizer": tokenizer, "metadata": {"original": ["x", "y"]}}
    with pytest.raises(RewardError, match="counted on re-tokenised text"):
        call_reward_fn(
            lambda outputs, tokenizer: dense(0, 0, outputs, tokenizer, original=0), found, **keywords
        )
    first, second = call_reward_fn(seed_rewards(dense), found, **keywords)
    assert first.tolist() == [0, 1, 0, 1] and second.tolist() == [1, 0]


def test_keywords_caught_by_a_metric_are_those_of_trlx(tokenizer):
    def reward_fn(samples, prompts, outputs, original):
        return [float(len(output)) for output in outputs]

    keywords = {"tokenizer": tokenizer, "metadata": {"original": ["x"]}}
    metric = seed_metrics(lambda **kwargs: {"reward": reward_fn(**kwargs)})
    assert call_metric_fn(metric, texts([1, 2]), **keywords) == {"reward": [2.0]}
    named = seed_metrics(lambda output_tokens, **kwargs: {"n": [len(output_tokens[0])], "k": len(kwargs)})
    assert call_metric_fn(named, texts([1, 2]), **keywords) == {"n": [2.0], "k": 4.0}


def test_an_unknown_keyword_is_refused_as_everywhere(tokenizer):
    with pytest.raises(ValueError, match="`reward_fn` takes `labels`"):
        call_reward_fn(
            seed_rewards(lambda labels, **others: [0.0]), texts([1]), tokenizer=tokenizer, metadata={}
        )


def test_a_parameter_may_have_any_name(tokenizer):
    def dense(outputs, tokenizer, others=None):
        return [[1.0] * len(tokenizer(output).input_ids) for output in outputs]

    keywords = {"tokenizer": tokenizer, "metadata": {}}
    (found,) = call_reward_fn(seed_rewards(dense), texts([1, 2, 5, 3]), **keywords)
    assert found.tolist() == [0, 1, 0, 1]
    metric = seed_metrics(lambda outputs, others: {"n": [len(one) for one in others]})
    keywords["metadata"] = {"others": ["xyz"]}
    assert call_metric_fn(metric, texts([1]), **keywords) == {"n": [3.0]}


def test_what_is_no_function_stays_what_it_is():
    assert seed_rewards(None) is None and seed_metrics(None) is None


@pytest.mark.parametrize(("wrap", "role"), [(seed_rewards, "reward_fn"), (seed_metrics, "metric_fn")])
def test_a_function_that_must_be_awaited_is_refused(wrap, role):
    async def judge(samples, **others):
        return [0.0] * len(samples)

    class Judge:
        async def __call__(self, samples):
            return [0.0] * len(samples)

    for given in (judge, functools.partial(judge, tokenizer=None), Judge()):
        with pytest.raises(ValueError, match=f"`{role}` must be a function, got an async one"):
            wrap(given)

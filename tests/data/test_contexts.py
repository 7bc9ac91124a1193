# SPDX-License-Identifier: Apache-2.0
"""One rule for what stands before a completion: every algorithm trains on the context that the sampler reads."""

import copy

import numpy as np
import pytest
from tokenizers import normalizers
from tokenizers.processors import TemplateProcessing

from jrl.data.demonstrations.demonstration_set import DemonstrationFormat
from jrl.data.demonstrations.dialogue import DialogueSet
from jrl.data.demonstrations.pairs import PairSet
from jrl.data.offline import RewardedSet
from jrl.data.preferences.preference_format import PreferenceFormat
from jrl.data.prompts import PromptSet
from jrl.data.tokenizer import prompt_prefix, special_tokens_around, tokenize
from tests.tiny import EOS_ID, tiny_t5_tokenizer, tiny_tokenizer

BOS, SEP = "{", "}"  # of the vocabulary, so that a model of its size has rows for them


def tokenizer_with(template):
    """The tiny tokenizer with a BOS of its own and special tokens around every text."""
    tokenizer = copy.deepcopy(tiny_tokenizer())
    tokenizer.add_special_tokens({"bos_token": BOS, "sep_token": SEP})
    names = {BOS: tokenizer.bos_token_id, SEP: tokenizer.sep_token_id, "<eos>": EOS_ID}
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=template, special_tokens=list(names.items())
    )
    return tokenizer


TOKENIZERS = {
    "gpt2": tiny_tokenizer(),
    "llama": tokenizer_with(f"{BOS} $A"),
    "chatglm": tokenizer_with(f"{SEP} {BOS} $A"),
    "ends_with_eos": tokenizer_with("$A <eos>"),
    "both_ends": tokenizer_with(f"{BOS} $A <eos>"),
}
PREFIXES = {"llama": BOS, "chatglm": SEP + BOS, "both_ends": BOS}
PROMPT = "the cat"


def sampled(tokenizer, prompt=PROMPT, start=None, **options):
    found = PromptSet(
        [prompt],
        tokenizer,
        max_length=16,
        seed=0,
        long_prompts="error",
        decoder_start_token_id=start,
        **options,
    )
    return found.rows(np.array([0]), width=16).token_lists[0]


def contexts(tokenizer, prompt=PROMPT):
    """The ids before the first learned token, by what trains."""
    limits = {"max_length": 32, "seed": 0}
    sft = DemonstrationFormat(tokenizer=tokenizer, max_length=32).encode(
        {"prompt": prompt, "completion": " sat"}, 0
    )
    dpo = PreferenceFormat(tokenizer=tokenizer, max_length=32).encode(
        {"prompt": prompt, "chosen": " sat", "rejected": " ran"}, 0
    )
    rows = {
        "sft": sft,
        "sft, list": DialogueSet([[prompt, " sat"]], tokenizer, **limits).rows[0],
        "ilql": RewardedSet([[prompt, " sat"]], [1.0], tokenizer, **limits).rows[0],
    }
    found = {name: row.tokens[: row.learned.index(True)] for name, row in rows.items()}
    return found | {"dpo, chosen": dpo.chosen.prompt, "dpo, rejected": dpo.rejected.prompt}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_samples_have_the_context_that_the_sampler_reads(name):
    tokenizer = TOKENIZERS[name]
    expected = sampled(tokenizer)
    assert expected == tokenize(tokenizer, [PREFIXES.get(name, "") + PROMPT])[0]
    assert contexts(tokenizer) == dict.fromkeys(contexts(tokenizer), expected)


@pytest.mark.parametrize("name", PREFIXES)
def test_special_tokens_that_the_text_has_come_once(name):
    tokenizer = TOKENIZERS[name]
    templated = PREFIXES[name] + PROMPT
    assert sampled(tokenizer, templated) == sampled(tokenizer)
    assert contexts(tokenizer, templated) == contexts(tokenizer)


def test_an_encoder_reads_what_its_tokenizer_writes():
    tokenizer = tiny_t5_tokenizer()
    expected = sampled(tokenizer, start=0)
    assert expected == tokenizer(PROMPT)["input_ids"] and expected[-1] == EOS_ID
    pairs = {"max_length": 32, "seed": 0, "decoder_start_token_id": 0}
    dpo = PreferenceFormat(tokenizer=tokenizer, max_length=32, decoder_start_token_id=0).encode(
        {"prompt": PROMPT, "chosen": " sat", "rejected": " ran"}, 0
    )
    assert dpo.context == expected
    assert PairSet([[PROMPT, " sat"]], tokenizer, **pairs).pairs[0].context == expected
    assert RewardedSet([[PROMPT, " sat"]], [1.0], tokenizer, **pairs).contexts == [expected]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_cut_prompt_keeps_what_stands_before_it(side):
    tokenizer = copy.deepcopy(TOKENIZERS["llama"])
    tokenizer.truncation_side = side
    with pytest.warns(UserWarning, match=f"cut on the {side}"):
        found = PromptSet(["abcdef"], tokenizer, max_length=4, seed=0, long_prompts="truncate")
    kept = BOS + ("def" if side == "left" else "abc")
    assert found.rows(np.array([0]), width=4).token_lists[0] == tokenize(tokenizer, [kept])[0]
    with pytest.warns(UserWarning, match=f"cut on the {side}"):
        (row,) = DialogueSet([["abc", "def"]], tokenizer, max_length=6, seed=0).rows
    assert row.tokens[0] == tokenizer.bos_token_id and len(row.tokens) == 6


def test_a_prompt_may_be_the_start_of_a_document():
    assert sampled(TOKENIZERS["llama"], "") == prompt_prefix(TOKENIZERS["llama"])


def test_trlx_reads_the_text_alone():
    tokenizer = TOKENIZERS["llama"]
    bare = tokenize(tokenizer, [PROMPT])[0]
    assert sampled(tokenizer, add_special_tokens=False) == bare
    options = {"max_length": 32, "seed": 0, "add_special_tokens": False}
    for found in (
        DialogueSet([[PROMPT, " sat"]], tokenizer, **options),
        RewardedSet([[PROMPT, " sat"]], [1.0], tokenizer, **options),
    ):
        assert found.rows[0].tokens[: len(bare)] == bare
    plain = DemonstrationFormat(tokenizer=tokenizer, max_length=32, add_special_tokens=False)
    assert plain.encode({"prompt": PROMPT, "completion": " sat"}, 0).tokens[: len(bare)] == bare


def test_a_tokenizer_that_knows_no_latin_letter_tells_its_special_tokens_too():
    tokenizer = TOKENIZERS["both_ends"]
    digits = copy.deepcopy(tokenizer)
    digits.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    assert tokenize(digits, ["a"]) == [[]]
    assert special_tokens_around(digits) == ([tokenizer.bos_token_id], [EOS_ID])


def test_the_order_of_the_vocabulary_does_not_matter(monkeypatch):
    """It has none: a special token that comes first is no ordinary text."""
    tokenizer = copy.deepcopy(TOKENIZERS["both_ends"])
    tokenizer.backend_tokenizer.normalizer = normalizers.Replace("a", "")
    vocab = tokenizer.get_vocab()
    special_first = dict.fromkeys(tokenizer.all_special_tokens, -1)
    special_first |= {text: number for text, number in vocab.items() if text not in special_first}
    monkeypatch.setattr(tokenizer, "get_vocab", lambda: special_first)
    assert special_tokens_around(tokenizer) == ([tokenizer.bos_token_id], [EOS_ID])

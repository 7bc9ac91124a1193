# SPDX-License-Identifier: Apache-2.0
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from jrl.data.tokenizer import tokenize
from jrl.rollout.text import Texts, decode_rows
from tests.tiny import EOS_ID, PAD_ID, tiny_tokenizer


def ids(text):
    return tokenize(tiny_tokenizer(), [text])[0]


def decoded(rows, *, prompts=None, stop=(), tokenizer=None, eos=(EOS_ID,)):
    """`decode_rows` of ragged rows, padded with what must never be read."""
    lengths = np.array([len(row) for row in rows], np.int32)
    tokens = np.full((len(rows), max(lengths) + 2), ids("Z")[0], np.int32)
    for place, row in zip(tokens, rows, strict=True):
        place[: len(row)] = row
    prompts = prompts or [ids("ab")] * len(rows)
    return decode_rows(
        tokenizer or tiny_tokenizer(), prompts, tokens, lengths, eos_token_ids=eos, stop_sequences=stop
    )


class TestWithoutStops:
    def test_golden(self):
        found = decoded([[*ids(" cd "), EOS_ID], ids("efghi")], prompts=[ids("ab"), [EOS_ID]])
        assert found.prompts == ["ab", ""]
        assert found.outputs == [" cd ", "efghi"]
        assert found.samples == ["ab cd ", "efghi"]
        assert found.output_tokens == [[*ids(" cd "), EOS_ID], ids("efghi")]
        assert found.lengths.tolist() == [5, 5] and found.lengths.dtype == np.int32
        assert found.stopped.tolist() == [False, False]

    def test_lore_1_1_ids_stay_as_sampled_where_text_would_encode_otherwise(self):
        t, h, th = (tiny_tokenizer().convert_tokens_to_ids(token) for token in ("t", "h", "th"))
        found = decoded([[t, h, EOS_ID], [th, EOS_ID]], stop=("zz",))
        assert found.outputs == ["th", "th"]
        assert found.output_tokens == [[t, h, EOS_ID], [th, EOS_ID]]
        stopped = decoded([[t, h, *ids("zza")]], stop=("zz",))
        assert stopped.output_tokens == [[t, h, *ids("zz")]]

    @pytest.mark.parametrize("row", [[EOS_ID], [*ids("a"), EOS_ID], ids("abc")])
    def test_lore_1_5_everything_up_to_the_end_is_an_action_and_nothing_after(self, row):
        found = decoded([row, ids("abcdef")])
        assert found.output_tokens[0] == row and found.lengths[0] == len(row)
        assert "Z" not in found.samples[0]

    def test_lore_1_3_an_eos_that_pads_is_one_action(self):
        # pad = EOS = 1: the row is the sampled ids, by their length, with exactly one EOS.
        rows = np.array([[*ids("cd"), EOS_ID, EOS_ID, EOS_ID]])
        found = decode_rows(tiny_tokenizer(), [ids("a")], rows, np.array([3]), eos_token_ids=(EOS_ID,))
        assert found.output_tokens == [[*ids("cd"), EOS_ID]] and found.outputs == ["cd"]

    def test_lore_1_8_a_row_cut_by_the_limit_is_not_stopped_and_gets_no_eos(self):
        found = decoded([ids("abc")])
        assert not found.stopped[0] and EOS_ID not in found.output_tokens[0] and found.outputs == ["abc"]

    def test_an_eos_of_ones_own_has_no_text(self):
        assert decoded([ids("ab.")], eos=tuple(ids("."))).outputs == ["ab"]

    def test_no_rows(self):
        empty = decode_rows(
            tiny_tokenizer(), [], np.zeros((0, 4), np.int32), np.zeros(0, np.int32), eos_token_ids=()
        )
        assert empty.samples == [] and empty.lengths.shape == (0,)


class TestStops:
    def test_lore_1_9_ids_lengths_and_text_share_the_cut(self):
        found = decoded([[*ids("cd  Human: more"), EOS_ID]], stop=("Hum",))
        assert found.outputs == ["cd"] and found.samples == ["abcd"] and found.stopped[0]
        assert found.output_tokens == [ids("cd  Hum")] and found.lengths.tolist() == [7]

    def test_lore_1_9_a_stop_string_inside_a_token(self):
        th = tiny_tokenizer().convert_tokens_to_ids("th")
        found = decoded([[*ids("a"), th, *ids("bc")]], stop=("t",))
        assert found.outputs == ["a"]
        assert found.output_tokens == [[*ids("a"), th]] and found.lengths.tolist() == [2]

    def test_the_first_of_several_ends_the_row(self):
        found = decoded([ids("one; two. three")] * 2, stop=(".", ";", "three"))
        assert found.outputs == ["one", "one"] and found.lengths.tolist() == [4, 4]

    def test_the_string_that_is_complete_first_wins(self):
        # "bcde" begins first, but the row has ended at "cd" by the time it would be complete.
        found = decoded([ids("abcdef")], stop=("bcde", "cd"))
        assert found.outputs == ["ab"] and found.output_tokens == [ids("abcd")]

    def test_a_prompt_never_stops_a_row(self):
        found = decoded([ids("cd")], prompts=[ids("a.b")], stop=(".", "bc"))
        assert found.outputs == ["cd"] and not found.stopped[0]

    def test_a_stop_string_before_eos_drops_the_eos(self):
        found = decoded([[*ids("a."), EOS_ID]], stop=(".",))
        assert found.output_tokens == [ids("a.")] and found.stopped[0]

    def test_other_rows_stay(self):
        found = decoded([ids("a.b"), [*ids("c "), EOS_ID]], stop=(".",))
        assert found.outputs == ["a", "c "] and found.stopped.tolist() == [True, False]

    @pytest.mark.parametrize(
        ("stop", "message"), [(("",), "not empty"), ("ab", "list of texts"), (("<pad>",), "id 0")]
    )
    def test_bad_stop_strings(self, stop, message):
        with pytest.raises(ValueError, match=message):
            decoded([ids("a")], stop=stop)

    def test_the_text_of_eos_is_allowed(self):
        assert decoded([[*ids("a"), EOS_ID]], stop=("<eos>",)).outputs == ["a"]


def test_a_sentencepiece_completion_keeps_its_first_space():
    pieces = {"<pad>": 0, "<eos>": 1, "▁the": 2, "▁cat": 3, "s": 4}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    found = decoded([[3, 4, 1], [2, 3, 4]], prompts=[[2], [2]], tokenizer=tokenizer, stop=("s",))
    assert found.samples == ["the cat", "the the cat"]
    assert found.outputs == [" cat", " the cat"] and found.output_tokens == [[3, 4], [2, 3, 4]]


def test_a_prompt_that_ends_inside_a_character():
    pieces = {"<pad>": 0, "<eos>": 1, "<0xC3>": 2, "<0xA9>": 3, "a": 4}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[], byte_fallback=True))
    backend.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    found = decoded([[3, 4]], prompts=[[4, 2]], tokenizer=tokenizer)
    assert found.outputs[0].endswith("a") and found.output_tokens == [[3, 4]]


def test_concatenate():
    a, b = decoded([ids("a."), ids("b")], stop=(".",)), decoded([[*ids("c"), EOS_ID]])
    both = Texts.concatenate([a, b])
    assert both.outputs == ["a", "b", "c"] and both.samples == ["aba", "abb", "abc"]
    assert both.lengths.tolist() == [2, 1, 2] and both.stopped.tolist() == [True, False, False]
    assert both.output_tokens == [ids("a."), ids("b"), [*ids("c"), EOS_ID]]
    assert PAD_ID not in [token for row in both.output_tokens for token in row]


def test_with_a_separator_outputs_are_texts_of_their_own():
    pieces = {"<pad>": 0, "<eos>": 1, "▁the": 2, "▁cat": 3, "s": 4}
    backend = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    backend.decoder = decoders.Metaspace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, pad_token="<pad>", eos_token="<eos>")
    rows, prompts = [[3, 4, 1], [2, 3, 4]], [[2, 1], [2, 1]]
    lengths = np.array([3, 3])
    found = decode_rows(
        tokenizer,
        prompts,
        np.array(rows),
        lengths,
        eos_token_ids=(EOS_ID,),
        stop_sequences=("s",),
        separator="|",
    )
    assert found.outputs == ["cat", "the cat"] and found.samples == ["the|cat", "the|the cat"]
    assert found.output_tokens == [[3, 4], [2, 3, 4]] and found.stopped.all()

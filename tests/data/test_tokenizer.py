# SPDX-License-Identifier: Apache-2.0
import copy
import warnings

import pytest
from tokenizers.processors import TemplateProcessing

from jrl.data.tokenizer import check_vocabulary, cut, load_tokenizer, special_tokens_around, tokenize
from tests.tiny import EOS_ID, PAD_ID, VOCAB_SIZE, tiny_t5_tokenizer, tiny_tokenizer


def without(*names):
    tokenizer = copy.deepcopy(tiny_tokenizer())
    for name in names:
        setattr(tokenizer, name, None)
    return tokenizer


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer")
    tiny_tokenizer().save_pretrained(path)
    return path


class TestLoadTokenizer:
    def test_reads_a_directory(self, directory):
        tokenizer = load_tokenizer(directory, truncation_side="left")
        assert (tokenizer.padding_side, tokenizer.truncation_side) == ("left", "left")
        assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (EOS_ID, PAD_ID)
        assert tokenize(tokenizer, ["the cat"]) == tokenize(tiny_tokenizer(), ["the cat"])

    def test_extra_arguments_reach_transformers(self, directory):
        assert load_tokenizer(directory, extra={"eos_token": "a"}).eos_token == "a"

    def test_a_built_one_is_copied(self):
        built = without("pad_token")
        tokenizer = load_tokenizer(built, padding_side="right", truncation_side="left")
        assert tokenizer.pad_token_id == EOS_ID
        assert built.pad_token_id is None and built.truncation_side == "right"

    def test_eos_pads_without_a_warning(self):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert load_tokenizer(without("pad_token")).pad_token_id == EOS_ID

    def test_neither_eos_nor_pad(self):
        with pytest.raises(ValueError, match="neither an EOS nor a pad token"):
            load_tokenizer(without("pad_token", "eos_token"))

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_file_that_is_nested_without_end(self, tmp_path, name):
        tiny_tokenizer().save_pretrained(tmp_path)
        (tmp_path / name).write_text("[" * 100_000 + "]" * 100_000)
        with pytest.raises(ValueError, match="a JSON file of it is nested too deeply") as caught:
            load_tokenizer(tmp_path)
        assert "\n" not in str(caught.value)

    @pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
    def test_a_pointer_of_git_lfs_is_called_one(self, tmp_path, name):
        tiny_tokenizer().save_pretrained(tmp_path)
        (tmp_path / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 123\n")
        with pytest.raises(ValueError, match=f"{name} is a git-lfs pointer.*git lfs pull"):
            load_tokenizer(tmp_path)

    def test_a_malformed_file_is_one_line(self, tmp_path):
        tiny_tokenizer().save_pretrained(tmp_path)
        (tmp_path / "tokenizer.json").write_text('{"version": "1.0", "model": {"type": "BPE"}}')
        with pytest.raises(ValueError, match=r"no tokenizer could be loaded from .*: KeyError"):
            load_tokenizer(str(tmp_path))

    def test_a_folder_that_does_not_exist(self, tmp_path):
        with pytest.raises(ValueError, match=r"there is no folder '.*missing'"):
            load_tokenizer(str(tmp_path / "missing"))

    def test_a_folder_without_a_tokenizer(self, tmp_path):
        with pytest.raises(ValueError, match="no tokenizer could be loaded from"):
            load_tokenizer(tmp_path)

    def test_a_misspelt_side(self):
        with pytest.raises(ValueError, match='`truncation_side` must be "left" or "right", got \'up\''):
            load_tokenizer(tiny_tokenizer(), truncation_side="up")

    def test_extra_arguments_of_a_built_one_are_refused(self):
        with pytest.raises(ValueError, match="already built"):
            load_tokenizer(tiny_tokenizer(), extra={"eos_token": "a"})


class TestCheckVocabulary:
    def test_fits(self):
        check_vocabulary(tiny_tokenizer(), VOCAB_SIZE)

    def test_too_small_a_model(self):
        with pytest.raises(ValueError, match="ids up to 96, but the model's `vocab_size` is 96"):
            check_vocabulary(tiny_tokenizer(), VOCAB_SIZE - 1)

    def test_the_first_tokens_without_an_embedding_are_named_with_a_remedy(self):
        tokenizer = tiny_tokenizer()
        tokenizer.add_tokens([f"<new{i}>" for i in range(7)])
        with pytest.raises(ValueError, match="resize_token_embeddings") as caught:
            check_vocabulary(tokenizer, VOCAB_SIZE)
        assert "no embedding of '<new0>' (97), '<new1>' (98), '<new2>' (99)" in str(caught.value)
        assert "'<new4>' (101) and 2 more. Do `tokenizer.tokenizer_path`" in str(caught.value)


def test_special_tokens_are_read_but_not_added():
    assert tokenize(tiny_tokenizer(), ["<eos>", "a", ""]) == [
        [EOS_ID],
        [tiny_tokenizer()("a")["input_ids"][0]],
        [],
    ]


def test_cut_loses_the_named_side():
    assert cut([1, 2, 3], 2, "left") == [2, 3]
    assert cut([1, 2, 3], 2, "right") == [1, 2]
    assert cut([1, 2, 3], 3, "left") == [1, 2, 3]
    assert cut([1, 2, 3], 0, "left") == []


def test_special_tokens_around_a_text():
    assert special_tokens_around(tiny_tokenizer()) == ([], [])
    assert special_tokens_around(tiny_t5_tokenizer()) == ([], [EOS_ID])
    both = copy.deepcopy(tiny_tokenizer())
    both.backend_tokenizer.post_processor = TemplateProcessing(
        single="<pad> $A <eos> <eos>", special_tokens=[("<pad>", PAD_ID), ("<eos>", EOS_ID)]
    )
    assert special_tokens_around(both) == ([PAD_ID], [EOS_ID, EOS_ID])


def test_special_tokens_may_be_asked_for():
    bare, whole = (
        tokenize(tiny_t5_tokenizer(), ["ab"], add_special_tokens=special)[0] for special in (False, True)
    )
    assert whole == [*bare, EOS_ID]


@pytest.mark.parametrize(("text", "as_if"), [("the \ud800cat", "the \ufffdcat"), ("a\ud83d\ude00b", "a😀b")])
def test_a_lone_surrogate_is_read_as_the_replacement_character(text, as_if):
    tokenizer = tiny_tokenizer()
    assert tokenize(tokenizer, [text, "cat"]) == tokenize(tokenizer, [as_if, "cat"])

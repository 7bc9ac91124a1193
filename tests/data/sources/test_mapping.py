# SPDX-License-Identifier: Apache-2.0
import functools
import os
import sys
import threading
import time

import numpy as np
import pytest

from jrl.data.preferences.preference_records import check_preferences
from jrl.data.preferences.preference_set import PreferenceSet
from jrl.data.preferences.preference_tokens import tokenize_pairs
from jrl.data.sources import mapping
from jrl.data.sources.mapping import map_records, tokenizer_key
from jrl.data.tokenizer import load_tokenizer
from tests.data.sources.worker_functions import exits, with_process
from tests.tiny import tiny_tokenizer

MANY = list(range(1200))


def doubled(record):
    return 2 * record


def doubled_many(records):
    return [doubled(record) for record in records]


def picky(record, *, bad):
    if record == bad:
        raise KeyError("no such thing")
    return record


def picky_many(records, *, bad):
    return [picky(record, bad=bad) for record in records]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("JRL_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mapped"


def run(function, records=MANY, **options):
    return map_records(function, records, description="numbers", **options)


class TestOneProcess:
    @pytest.mark.parametrize("size", [0, 1, 499, 500, 501, 1200])
    def test_order_is_kept(self, size):
        expected = [2 * number for number in range(size)]
        assert run(doubled, range(size)) == expected
        assert run(doubled_many, range(size), batched=True) == expected

    @pytest.mark.parametrize(("function", "batched"), [(picky, False), (picky_many, True)])
    def test_errors_name_the_row(self, function, batched):
        with pytest.raises(ValueError, match="`numbers`: row 777: KeyError: 'no such thing'") as caught:
            run(functools.partial(function, bad=777), batched=batched)
        assert isinstance(caught.value.__cause__, KeyError)

    def test_no_workers_at_all(self):
        with pytest.raises(ValueError, match="`num_proc` must be at least 1 or None, got 0"):
            run(doubled, num_proc=0)

    def test_a_bar_is_drawn_on_a_terminal_only(self, monkeypatch, capsys):
        run(doubled)
        assert capsys.readouterr() == ("", "")
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
        run(doubled)
        assert "numbers" in capsys.readouterr().err


class TestWorkers:
    """Each starts an interpreter, so there are few."""

    @pytest.mark.slow
    def test_order_is_kept(self):
        found = run(with_process, num_proc=2)
        assert [record for record, _ in found] == MANY
        assert os.getpid() not in {process for _, process in found}

    @pytest.mark.slow
    def test_errors_name_the_row_whatever_their_kind(self):
        with pytest.raises(ValueError, match="`numbers`: row 600: Exits: left 600"):
            run(exits, num_proc=2)

    def test_what_cannot_be_imported_is_refused(self):
        with pytest.raises(ValueError, match=r"worker processes can import by its name.*top of a module"):
            run(lambda record: record, num_proc=2)

    @pytest.mark.slow
    def test_tokenizers_travel(self):
        # Fewer than are kept: both are made.
        tokenizer = load_tokenizer(tiny_tokenizer())
        tokenizer.chat_template = "{% for m in messages %}{{ m['content'] + '<eos>' }}{% endfor %}"
        user, good, bad = (
            {"role": role, "content": text}
            for role, text in (("user", "a"), ("assistant", "b"), ("assistant", "c"))
        )
        records = [{"prompt": "the " * (n % 5), "chosen": f"th{n}", "rejected": "oh"} for n in range(998)]
        records += [{"prompt": [user], "chosen": [good], "rejected": [bad]}]
        here, there = (
            PreferenceSet(records, tokenizer, max_length=64, seed=0, num_proc=workers)
            for workers in (None, 2)
        )
        assert here.rows == there.rows and here.sha256() == there.sha256()


class TestCache:
    def test_a_second_run_reads(self, cache, monkeypatch):
        first = run(with_process, cache_key="a")
        assert len(list(cache.iterdir())) == 1
        monkeypatch.setattr(mapping, "_map", lambda *_: pytest.fail("mapped again"))
        assert run(with_process, cache_key="a") == first

    @pytest.mark.parametrize(
        "change",
        [{"cache_key": "b"}, {"records": [*MANY[:-1], 0]}, {"records": MANY[:1100]}, {"function": picky}],
        ids=["key", "content", "length", "function"],
    )
    def test_anything_else_is_made_anew(self, cache, change):
        options = {"function": doubled, "records": MANY, "cache_key": "a"}
        run(**options)
        if change.get("function"):
            change = {"function": functools.partial(picky, bad=-1)}
        run(**(options | change))
        assert len(list(cache.iterdir())) == 2

    def test_the_source_of_jrls_functions_is_that_of_all_that_they_call(self):
        text = mapping._source(tokenize_pairs)
        assert (
            "def tokenize_pairs" in text
            and "def tokenize_split" in text
            and "def special_tokens_around" in text
        )
        assert "def tokenize_split" not in mapping._source(with_process)

    def test_a_changed_source_is_another_function(self, cache, monkeypatch):
        run(doubled, cache_key="a")
        monkeypatch.setattr(mapping, "_source", lambda function: "other text")
        run(doubled, cache_key="a")
        assert len(list(cache.iterdir())) == 2

    def test_long_arrays_are_told_apart(self, cache):
        for middle in (0, 1):
            rows = [np.arange(3000) for _ in range(1000)]
            rows[500][1500] = middle
            run(len, rows, cache_key="a")
        assert len(list(cache.iterdir())) == 2

    def test_only_many_records_under_a_key_are_kept(self, cache):
        run(doubled)
        run(doubled, MANY[:999], cache_key="a")
        assert not cache.exists()

    @pytest.mark.parametrize("damage", ["cut", "flip", "empty", "foreign"])
    def test_a_damaged_file_is_ignored_and_written_again(self, cache, damage):
        expected = run(doubled, cache_key="a")
        (path,) = cache.iterdir()
        content = path.read_bytes()
        path.write_bytes(
            {
                "cut": content[:-5],
                "flip": content[:-3] + b"7" + content[-2:],
                "empty": b"",
                "foreign": b"\x80\x04not json",
            }[damage]
        )
        assert run(doubled, cache_key="a") == expected
        assert path.read_bytes() == content

    def test_a_hit_looks_like_a_miss(self):
        def tuples(record):
            return (record, {"a": None}, 0.5, "ü")

        first = run(tuples, cache_key="a")
        assert first == run(tuples, cache_key="a") and first[3] == [3, {"a": None}, 0.5, "ü"]

    def test_values_must_be_plain(self):
        with pytest.raises(ValueError, match="values that are to be kept must be plain"):
            run(lambda record: {record}, cache_key="a")

    def test_a_folder_that_cannot_be_written_costs_a_warning(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("JRL_CACHE", str(tmp_path / "file"))
        with pytest.warns(UserWarning, match="cannot hold what was made of 1200 records"):
            assert run(doubled, cache_key="a")[:3] == [0, 2, 4]

    def test_runs_beside_each_other_leave_one_whole_file(self, cache):
        def slow(record):
            time.sleep(1e-5)
            return record

        found = []
        threads = [threading.Thread(target=lambda: found.append(run(slow, cache_key="a"))) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert found == [MANY] * 4
        assert [path.suffix for path in cache.iterdir()] == [".json"]

    def test_preferences_are_kept(self, cache, monkeypatch):
        tokenizer = load_tokenizer(tiny_tokenizer())
        records = [{"prompt": "the ", "chosen": f"th{n}", "rejected": "oh"} for n in range(1000)]
        first = PreferenceSet(records, tokenizer, max_length=64, seed=0)
        assert len(list(cache.iterdir())) == 1
        monkeypatch.setattr(mapping, "_map", lambda *_: pytest.fail("mapped again"))
        assert PreferenceSet(records, tokenizer, max_length=32, seed=1).rows == first.rows


class TestTokenizerKey:
    def test_it_holds_what_ids_depend_on(self):
        plain, chat, padded, split = (load_tokenizer(tiny_tokenizer()) for _ in range(4))
        split.split_special_tokens = True
        chat.chat_template = "{{ messages }}"
        padded.bos_token = "^"
        keys = [tokenizer_key(one) for one in (plain, chat, padded, split)]
        assert len(set(keys)) == 4 and tokenizer_key(load_tokenizer(plain)) == keys[0]

    def test_slow_tokenizers_have_none(self):
        assert tokenizer_key(object()) is None


def test_a_batched_function_gets_chunks():
    pairs = check_preferences([{"prompt": "a", "chosen": f"b{n}", "rejected": "c"} for n in range(7)])
    function = functools.partial(tokenize_pairs, tiny_tokenizer(), is_seq2seq=False)
    assert run(function, pairs, batched=True) == function(pairs)

# SPDX-License-Identifier: Apache-2.0
from io import StringIO

import numpy as np
from rich.console import Console

from jrl.trainers.loggers.token_rows import show_rows, token_rows, token_text
from jrl.typing import ComparisonBatch, ILQLBatch, ModelInputs, PreferenceBatch, Sequences
from tests.tiny import tiny_tokenizer

# A prompt of three tokens, an action, an observation, an action, and a column of padding.
TOKENS = np.asarray([[5, 6, 7, 8, 9, 10, 0], [5, 6, 8, 0, 0, 0, 0]])
REAL = np.asarray([[True] * 6 + [False], [True] * 3 + [False] * 4])
INPUTS = ModelInputs(TOKENS, REAL)
SEQUENCES = Sequences(INPUTS, np.asarray([2, 1]), np.asarray([[True, False, True], [True, False, False]]))
ROLES = ["prompt"] * 3 + ["action", "other", "action", "padding"]


def test_roles_of_a_sample():
    (row,) = token_rows(SEQUENCES, 0)
    assert (row.title, row.tokens, row.roles) == ("", TOKENS[0].tolist(), ROLES)
    assert row.tokens_of("action") == [8, 10]
    (short,) = token_rows(SEQUENCES, 1)
    assert short.roles == ["prompt"] * 2 + ["action"] + ["padding"] * 4


def test_an_encoder_s_context_is_prompt():
    context = np.asarray([[3, 4, 0]]), np.asarray([[True, True, False]])
    inputs = ModelInputs(np.asarray([[0, 8, 1]]), np.ones((1, 3), bool), None, *context)
    (row,) = token_rows(Sequences(inputs, np.asarray([0]), np.ones((1, 2), bool)), 0)
    assert row.tokens == [3, 4, 0, 0, 8, 1]
    assert row.roles == ["prompt", "prompt", "padding", "prompt", "action", "action"]


def test_columns_of_rewarded_samples_are_states_before_actions():
    mask = np.asarray([[True, True, False]])
    batch = ILQLBatch(ModelInputs(TOKENS[:1], REAL[:1]), np.asarray([[2, 4, 0]]), mask, np.zeros((1, 3)))
    assert token_rows(batch, 0)[0].roles == ROLES


def test_a_pair_has_two_rows():
    pair = PreferenceBatch(SEQUENCES, SEQUENCES, np.ones(2, bool), None, None)
    assert [row.title for row in token_rows(pair, 0)] == ["chosen", "rejected"]
    texts = ComparisonBatch(INPUTS, INPUTS, np.ones(2, bool), np.zeros(2))
    assert token_rows(texts, 1)[1].roles == ["text"] * 3 + ["padding"] * 4
    assert token_rows(object(), 0) == []


def shown(**options):
    out = StringIO()
    console = Console(file=out, width=80, **options)
    show_rows(console, token_rows(SEQUENCES, 0), tiny_tokenizer())
    return out.getvalue()


def test_a_row_reads_without_colour():
    lines = [" ".join(line.split()) for line in shown().splitlines()]
    texts = [tiny_tokenizer().decode([token]) for token in TOKENS[0]]
    assert lines[0] == f"prompt 3 {'|'.join(texts[:3])}"
    assert lines[1:4] == [f"action 1 {texts[3]}", f"other 1 {texts[4]}", f"action 1 {texts[5]}"]
    assert lines[4] == "padding 1 <pad>"
    assert "action: learned" in " ".join(lines[5:]) and "padding: ignored" in " ".join(lines[5:])


def test_roles_have_colours_on_a_terminal():
    assert "\x1b[36mprompt" in shown(force_terminal=True, color_system="standard")


def test_texts_of_tokens_are_one_line_and_keep_their_space():
    class Sentencepiece:
        def convert_ids_to_tokens(self, token):
            return ["▁the", "<0x0A>", "<0xE2>"][token]

        def decode(self, tokens):
            return ["the", "\n", "\ufffd"][tokens[0]]

    assert [token_text(Sentencepiece(), token) for token in range(3)] == [" the", "\\n", "<0xE2>"]

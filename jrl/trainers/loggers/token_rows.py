# SPDX-License-Identifier: Apache-2.0
"""Rows of a batch token by token, as the learner reads them: prompt, actions, what others wrote, padding."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from jrl.trainers.loggers.safe_text import for_terminal
from jrl.typing import ComparisonBatch, ILQLBatch, ModelInputs, PreferenceBatch, Sequences

STYLES = {"prompt": "cyan", "action": "bold green", "other": "yellow", "text": "bold green", "padding": "dim"}
"""Colour of each role on a terminal."""
LEGEND = (
    ("prompt", "read, not learned"),
    ("action", "learned"),
    ("other", "written by the environment or another speaker: read, not learned"),
    ("text", "scored as a whole"),
    ("padding", "ignored"),
)
"""Meaning of each role."""


class TokenRow(NamedTuple):
    """A row of a batch.

    Attributes:
      title: Which row it is, where a sample has several: "chosen", "rejected"; "" where it has one.
      tokens: Ids, padding included.
      roles: Of each token: a key of `STYLES`.
    """

    title: str
    tokens: list[int]
    roles: list[str]

    def tokens_of(self, role: str) -> list[int]:
        """Ids of one role, in order."""
        return [token for token, its in zip(self.tokens, self.roles, strict=True) if its == role]


def token_rows(batch: Any, index: int) -> list[TokenRow]:
    """Rows that a sample has in a batch.

    Args:
      batch: As an update reads it.
      index: Number of the sample.
    Returns:
      One row; two for a pair; none of a batch of another kind.
    """
    if isinstance(batch, PreferenceBatch):
        pair = {"chosen": batch.chosen, "rejected": batch.rejected}
        return [_sequence_row(sequences, index, title) for title, sequences in pair.items()]
    if isinstance(batch, ComparisonBatch):
        pair_of_texts = {"chosen": batch.chosen, "rejected": batch.rejected}
        return [_text_row(inputs, index, title) for title, inputs in pair_of_texts.items()]
    if isinstance(batch, ILQLBatch):
        columns = np.asarray(batch.columns)[index] + 1
        return [_row("", batch.inputs, index, columns[np.asarray(batch.mask)[index]])]
    return [_sequence_row(batch, index, "")] if isinstance(batch, Sequences) else []


def _sequence_row(sequences: Sequences, index: int, title: str) -> TokenRow:
    actions = np.asarray(sequences.starts)[index] + 1 + np.flatnonzero(np.asarray(sequences.mask)[index])
    return _row(title, sequences.inputs, index, actions)


def _row(title: str, inputs: ModelInputs, index: int, actions: np.ndarray) -> TokenRow:
    """A row whose actions stand in these columns; before the first one it is prompt."""
    tokens, real = np.asarray(inputs.tokens)[index], np.asarray(inputs.attention_mask)[index]
    first = int(actions[0]) if len(actions) else len(tokens)
    roles = ["prompt" if column < first else "other" for column in range(len(tokens))]
    for column in actions:
        roles[column] = "action"
    roles = [role if is_real else "padding" for role, is_real in zip(roles, real, strict=True)]
    found = TokenRow(title, [int(token) for token in tokens], roles)
    if inputs.context_tokens is None:
        return found
    assert inputs.context_mask is not None, "of every context"
    context = _text_row(ModelInputs(inputs.context_tokens, inputs.context_mask), index, title)
    read = ["prompt" if role == "text" else role for role in context.roles]
    return TokenRow(title, context.tokens + found.tokens, read + found.roles)


def _text_row(inputs: ModelInputs, index: int, title: str) -> TokenRow:
    tokens, real = np.asarray(inputs.tokens)[index], np.asarray(inputs.attention_mask)[index]
    return TokenRow(
        title, [int(token) for token in tokens], ["text" if is_real else "padding" for is_real in real]
    )


def show_rows(console: Console, rows: Sequence[TokenRow], tokenizer: Any) -> None:
    """Prints rows: a line for each stretch of one role, its tokens between bars, and a legend below.

    Args:
      console: Where to.
      rows: At least one.
      tokenizer: Gives the tokens' texts.
    """
    table = Table.grid(padding=(0, 2))
    table.add_column(no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        if row.title:
            table.add_row(Text(row.title, style="bold"), "", "")
        for role, tokens in _stretches(row):
            table.add_row(Text(role, style=STYLES[role]), str(len(tokens)), _line(role, tokens, tokenizer))
    console.print(table)
    used = {role for row in rows for role in row.roles}
    legend = Text("; ").join(
        [Text.assemble((role, STYLES[role]), f": {meaning}") for role, meaning in LEGEND if role in used]
    )
    console.print(legend)


def _stretches(row: TokenRow) -> Iterator[tuple[str, list[int]]]:
    pairs = zip(row.roles, row.tokens, strict=True)
    for role, stretch in groupby(pairs, key=lambda pair: pair[0]):
        yield role, [token for _, token in stretch]


def _line(role: str, tokens: Sequence[int], tokenizer: Any) -> Text:
    """Tokens between bars; of padding the first one says all."""
    shown = tokens[:1] if role == "padding" else tokens
    return Text("|", style="dim").join(
        [Text(token_text(tokenizer, token), style=STYLES[role]) for token in shown]
    )


def token_text(tokenizer: Any, token: int) -> str:
    """Text of a token on one line, its leading space kept; of a part of a character the vocabulary's spelling."""
    piece, text = str(tokenizer.convert_ids_to_tokens(token)), str(tokenizer.decode([token]))
    if piece.startswith("▁"):  # sentencepiece's space, which decoding one token alone drops
        text = " " + text.removeprefix(" ")
    if not text or "\ufffd" in text:
        text = piece
    return for_terminal(text).replace("\n", "\\n").replace("\t", "\\t")

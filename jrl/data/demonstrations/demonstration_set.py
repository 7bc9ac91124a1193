# SPDX-License-Identifier: Apache-2.0
"""Demonstrations as rows: ids of each record, and what of them is learned."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from jaxtyping import Bool

from jrl.data.chat.rendering import end_of_turn
from jrl.data.chat.templates import render_answer, render_dialogue
from jrl.data.demonstrations.demonstration_records import Demonstration, check_demonstration
from jrl.data.demonstrations.rows import DialogueRow, RowSet, learned_rows, rows_with_targets
from jrl.data.seam import tokenize_split
from jrl.data.sources.mapping import map_records, tokenizer_key
from jrl.data.tokenizer import check_ids, count_ids, cut, prompt_prefix
from jrl.ops.alignment import learned_targets
from jrl.typing import Sequences as Batch


@dataclass(frozen=True, kw_only=True)
class DemonstrationFormat:
    """Format of demonstrations: turns records into rows, and rows into a batch.

    A text ends with EOS, unless its tokens do; what a chat template writes is left as it is. `check_demonstration` says
    what columns mean; masks that a record brings hold in any case.

    Attributes:
      tokenizer: With an EOS token.
      max_length: Most tokens of a row, which loses the rest on the tokenizer's `truncation_side`; EOS is cut like any
        token. None: no limit.
      text_field: The column of texts.
      formatting_fn: The text of a record, whatever its columns; None: columns as above.
      completion_only_loss: Whether prompts are left out of the loss; None: where there are prompt and completion.
      assistant_only_loss: Whether only what assistants say is learned; both masks hold.
      append_eos: Whether EOS is appended to texts.
      add_special_tokens: Whether texts begin with what the tokenizer puts before ordinary text, once.
    """

    tokenizer: Any
    max_length: int | None
    text_field: str = "text"
    formatting_fn: Callable[[Mapping[str, Any]], str] | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    append_eos: bool = True
    add_special_tokens: bool = True

    def __post_init__(self) -> None:
        """Refuses what cannot be learned from."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("`tokenizer` must have an EOS token: a model learns where a text ends from it.")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(
                f"`max_length` must be at least 2 (a token and what follows it), got {self.max_length}."
            )
        if self.formatting_fn is not None and (self.completion_only_loss or self.assistant_only_loss):
            raise ValueError(
                "`completion_only_loss` and `assistant_only_loss` need the records' own columns; a `formatting_fn` "
                "makes one text, in which nothing tells prompt and completion apart."
            )

    @functools.cached_property
    def num_ids(self) -> int:
        """Ids that records may hold are below this."""
        return count_ids(self.tokenizer)

    def check(self, record: Any, row: int) -> Demonstration:
        """Checks a record and that it can be learned as the format asks, and returns its contents.

        Args:
          record: As in `check_demonstration`.
          row: Its number, for errors.
        Raises:
          ValueError: As there; also if it lacks what the format asks for.
        """
        found = check_demonstration(record, row, text_field=self.text_field, formatting_fn=self.formatting_fn)
        if found.tokens is not None:
            found = found._replace(tokens=check_ids(found.tokens, "input_ids", row, self.num_ids))
        if found.tokens is None and self.completion_only_loss and found.prompt is None:
            raise ValueError(
                f"`completion_only_loss` needs the columns 'prompt' and 'completion', row {row} has {sorted(record)}."
            )
        if found.tokens is None and self.assistant_only_loss and isinstance(found.text, str):
            raise ValueError(
                f"`assistant_only_loss` needs messages with roles, row {row} has texts in {sorted(record)}."
            )
        return found

    def tokenize(self, records: Sequence[Demonstration]) -> list[tuple[list[int], list[bool], bool]]:
        """Ids, what is learned of them, and whether a token would span the seam of prompt and completion.

        Args:
          records: Checked, uncut.
        Raises:
          ValueError: If messages cannot be rendered, or an assistant says nothing; the message does not name the row.
        """
        # One call for all texts: fast tokenizers work on many at once.
        plain = [i for i, one in enumerate(records) if one.tokens is None and isinstance(one.text, str)]
        found = dict(zip(plain, self._tokenize_texts([records[i] for i in plain]), strict=True))
        return [found[i] if i in found else self._row(one) for i, one in enumerate(records)]

    def cut(self, tokens: list[int], learned: list[bool]) -> DialogueRow:
        """A row within the limit: the mask was made before, so that its end is cut with the tokens'."""
        if self.max_length is None:
            return DialogueRow(list(tokens), list(learned))
        side = self.tokenizer.truncation_side
        flags = cut([int(flag) for flag in learned], self.max_length, side)
        return DialogueRow(cut(list(tokens), self.max_length, side), [bool(flag) for flag in flags])

    def encode(self, record: Any, row: int) -> DialogueRow | None:
        """The row of one record, number `row`; None if nothing of it is learned."""
        try:
            tokens, learned, _ = self.tokenize([self.check(record, row)])[0]
        except ValueError as error:
            raise ValueError(str(error) if f"row {row}" in str(error) else f"row {row}: {error}") from error
        found = self.cut(tokens, learned)
        return found if learned_targets(found.learned).any() else None

    def collate(self, rows: Sequence[DialogueRow], real: Bool[np.ndarray, "B"]) -> Batch:
        """Rows as one batch on the host; those that are not `real` are masked."""
        longest = max(len(row.tokens) for row in rows)
        return learned_rows(
            rows, real, pad_token_id=self.tokenizer.pad_token_id, max_length=self.max_length or longest
        )

    def _tokenize_texts(self, records: list[Demonstration]) -> list[tuple[list[int], list[bool], bool]]:
        if not records:
            return []
        tokenizer, eos = self.tokenizer, self.tokenizer.eos_token_id
        prefix = prompt_prefix(tokenizer, add_special_tokens=self.add_special_tokens)
        found = []
        prompts, texts = [str(one.prompt or "") for one in records], [str(one.text) for one in records]
        for record, (prompt, text, spanned) in zip(
            records, tokenize_split(tokenizer, prompts, texts), strict=True
        ):
            ids = [*prompt, *text]
            if not ids:
                raise ValueError("the text has no tokens.")
            if self.append_eos and ids[-1] != eos:
                ids.append(eos)
            begin = [] if ids[: len(prefix)] == prefix else prefix
            if record.prompt == "" and not prefix:
                # The model cannot write the first token of a row: it needs a state before it.
                begin = [eos if tokenizer.bos_token_id is None else tokenizer.bos_token_id]
            first = len(begin) + (0 if self.completion_only_loss is False else len(prompt))
            ids = [*begin, *ids]
            found.append((ids, [position >= first for position in range(len(ids))], spanned))
        return found

    def _row(self, record: Demonstration) -> tuple[list[int], list[bool], bool]:
        if record.tokens is not None:
            assert record.learned is not None
            return record.tokens, record.learned, False
        options: dict[str, Any] = {
            "tools": record.tools,
            "template_kwargs": record.template_kwargs,
            "with_mask": self.assistant_only_loss,
        }
        messages: Any = record.text
        if record.prompt is None:
            ids, mask = render_dialogue(self.tokenizer, messages, **options)
            learned = [True] * len(ids)
        else:
            prompt: Any = record.prompt
            ids, length, mask = render_answer(self.tokenizer, prompt, messages, **options)
            stop = end_of_turn(ids, length, self.tokenizer)
            first = 0 if self.completion_only_loss is False else length
            learned = [first <= position < stop for position in range(len(ids))]
        if mask is not None:
            if not any(mask):
                raise ValueError(
                    "no token is an assistant's, and `assistant_only_loss` learns nothing else: does the dialogue have "
                    "an assistant's message, and does the chat template mark it?"
                )
            learned = [flag and said for flag, said in zip(learned, mask, strict=True)]
        return ids, learned, False


class DemonstrationSet(RowSet):
    """Tokenised records and their batches.

    Rows of which nothing is learned, or nothing after truncation, are dropped and counted.

    Args:
      records: As `DemonstrationFormat` says. They are not changed.
      row_format: How they are read.
      seed: Of the order.
      num_proc: Worker processes that tokenise; None: none but this one.

    Attributes:
      num_spanned: Rows in which a token would span the seam of prompt and completion; they are warned of once.

    Raises:
      ValueError: If there are no records, one is malformed, or nothing is left to learn; the message names the row.
    """

    def __init__(
        self,
        records: Sequence[Any],
        row_format: DemonstrationFormat,
        *,
        seed: int,
        num_proc: int | None = None,
    ) -> None:
        if isinstance(records, str | Mapping) or not isinstance(records, Sequence):
            raise ValueError(f"`samples` must be a list of records, got a {type(records).__name__}.")
        if not records:
            raise ValueError("`samples` must hold at least one record, got none.")
        checked = [row_format.check(record, row) for row, record in enumerate(records)]
        tokenizer, limit = row_format.tokenizer, row_format.max_length
        flags = (
            row_format.completion_only_loss,
            row_format.assistant_only_loss,
            row_format.append_eos,
            row_format.add_special_tokens,
        )
        key = tokenizer_key(tokenizer)
        found = map_records(
            # The checks have called it, and a function of a script may not be sent to workers.
            functools.partial(DemonstrationFormat.tokenize, replace(row_format, formatting_fn=None)),
            checked,
            num_proc=num_proc,
            description="samples",
            cache_key=None if key is None else f"{key} {flags}",
            batched=True,
        )
        rows = [row_format.cut(tokens, learned) for tokens, learned, _ in found]
        longest = max(len(row.tokens) for row in rows)
        kept = rows_with_targets(rows, limit or longest)
        super().__init__(
            [rows[index] for index in kept],
            pad_token_id=tokenizer.pad_token_id,
            max_length=limit or longest,
            seed=seed,
            kept=kept,
            num_truncated=sum(
                len(row.tokens) < len(tokens) for row, (tokens, *_) in zip(rows, found, strict=True)
            ),
            num_dropped=len(rows) - len(kept),
        )
        self.num_spanned = sum(spanned for *_, spanned in found)
        self._warn(len(rows), limit, tokenizer.truncation_side)

    def _warn(self, num_rows: int, limit: int | None, side: str) -> None:
        if self.num_truncated:
            warnings.warn(
                f"{self.num_truncated} of {num_rows} samples have more than {limit} tokens and were cut on the {side}.",
                stacklevel=3,
            )
        if self.num_dropped:
            warnings.warn(
                f"{self.num_dropped} of {num_rows} samples hold nothing to learn from and were dropped.",
                stacklevel=3,
            )
        if self.num_spanned:
            warnings.warn(
                f"{self.num_spanned} of {num_rows} samples would have a token that spans prompt and completion; their "
                "completions are tokenised by themselves, as a sampler would write them. Does a space belong to the "
                "completion?",
                stacklevel=3,
            )

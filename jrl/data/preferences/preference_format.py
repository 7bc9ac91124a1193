# SPDX-License-Identifier: Apache-2.0
"""Pairs of completions within limits of length, and as the arrays that DPO reads."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool

from jrl.data.batching import bucket_length, pad_right
from jrl.data.preferences.preference_records import check_preference
from jrl.data.preferences.preference_tokens import TokenPair, tokenize_pairs
from jrl.data.tokenizer import cut, special_tokens_around
from jrl.typing import TRUNCATION_MODES, ModelInputs, PreferenceBatch, Sequences


class Answer(NamedTuple):
    """A prompt with one of its completions, as long as it may be.

    Attributes:
      prompt: Ids before the completion, at least one; the start id of a seq2seq model's decoder.
      tokens: Ids of the completion, at least one.
      learned: One flag a token of the completion: False on what a tool wrote.
    """

    prompt: list[int]
    tokens: list[int]
    learned: list[bool]


class PairRow(NamedTuple):
    """A tokenised pair of completions.

    Attributes:
      chosen: With the preferred completion.
      rejected: With the other one.
      context: What a seq2seq model's encoder reads; None for a causal model.
    """

    chosen: Answer
    rejected: Answer
    context: list[int] | None


@dataclass(frozen=True, kw_only=True)
class PreferenceFormat:
    """Format of preferences: turns preference records into rows, and rows into a batch.

    Attributes:
      tokenizer: With an EOS token.
      max_length: Most tokens of prompt and completion together, at least 2; of a seq2seq model, of either.
      max_prompt_length: Most tokens of a prompt, which keeps its end, and BOS before it; None: no limit of its own.
      max_completion_length: Most tokens of a completion, which keeps its start; None: no limit of its own.
      truncation_mode: "keep_start" or "keep_end" of prompt and completion as one sequence; a prompt of `max_length`
        tokens leaves no completion under the former, and its pair is dropped.
      decoder_start_token_id: First id of a seq2seq model's decoder rows; its encoder's prompts are cut on the
        tokenizer's `truncation_side`. None: a causal model.
    """

    tokenizer: Any
    max_length: int
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_start"
    decoder_start_token_id: int | None = None

    def __post_init__(self) -> None:
        """Refuses limits that leave nothing."""
        if self.tokenizer.eos_token_id is None:
            raise ValueError("`tokenizer` must have an EOS token: a model learns where a text ends from it.")
        if self.max_length < 2:
            raise ValueError(
                f"`max_length` must be at least 2 (a token and what follows it), got {self.max_length}."
            )
        for name, limit in (
            ("max_prompt_length", self.max_prompt_length),
            ("max_completion_length", self.max_completion_length),
        ):
            if limit is not None and limit < 1:
                raise ValueError(f"`{name}` must be at least 1 or None, got {limit}.")
        if self.truncation_mode not in TRUNCATION_MODES:
            raise ValueError(
                f"`truncation_mode` must be one of {TRUNCATION_MODES}, got {self.truncation_mode!r}."
            )

    def encode(self, record: Any, row: int) -> PairRow | None:
        """The row of one record, number `row`, or None if limits leave nothing of it, or nothing tells the two apart.

        Raises:
          ValueError: If it is malformed; the message names the row.
        """
        preference = check_preference(record, row=row)
        try:
            pair = tokenize_pairs(self.tokenizer, [preference], is_seq2seq=self.is_seq2seq)[0]
        except ValueError as error:
            raise ValueError(f"`samples`: row {row}: {error}") from error
        return self.cut(pair)[0]

    def cut(self, pair: TokenPair) -> tuple[PairRow | None, bool]:
        """The row of a pair within the limits, and whether something was cut for it.

        None if no completion is left, or nothing that tells the two apart.
        """
        context, prompt, cuts = self._prompt(pair.prompt)
        answers = []
        for ids, learned in (
            (pair.chosen, pair.chosen_learned),
            (pair.rejected, pair.rejected_learned),
        ):
            answer, is_cut = self._answer(prompt, ids, learned or [True] * len(ids))
            cuts |= is_cut
            answers.append(answer)
        chosen, rejected = answers
        if chosen is None or rejected is None or chosen == rejected:
            return None, cuts
        return PairRow(chosen, rejected, context), cuts

    def collate(
        self,
        rows: Sequence[PairRow],
        real: Bool[np.ndarray, "B"],
        references: Sequence[tuple[np.ndarray, np.ndarray]] | None = None,
    ) -> PreferenceBatch:
        """Rows as one batch on the host: NumPy arrays, right-padded, the same widths for both completions.

        Args:
          rows: The pairs.
          real: False on copies that only fill the batch up; nothing of them is learned.
          references: Log-probabilities of each row's two completions under the reference, one a token; None: zeros.
        """
        answers = [row.chosen for row in rows] + [row.rejected for row in rows]
        length = min(
            bucket_length(max(len(answer.prompt) + len(answer.tokens) for answer in answers)), self.max_length
        )
        window = min(bucket_length(max(len(answer.tokens) for answer in answers)), length - 1)
        contexts = [row.context for row in rows if row.context is not None]
        read: tuple[Any, Any] = (None, None)
        if contexts:
            width = min(bucket_length(max(map(len, contexts))), self.max_length)
            read = pad_right(contexts, pad_token_id=self.tokenizer.pad_token_id, width=width)
        halves, logprobs = [], []
        for side, half in enumerate(([row.chosen for row in rows], [row.rejected for row in rows])):
            sequences = self._sequences(half, real, length, window, read)
            values = [() if references is None else references[index][side] for index in range(len(rows))]
            halves.append(sequences)
            logprobs.append(_window_values(values, np.asarray(sequences.mask)))
        # NumPy stands where jax arrays are declared: whoever holds the mesh places them.
        valid: Any = real
        return PreferenceBatch(halves[0], halves[1], valid, logprobs[0], logprobs[1])

    @property
    def is_seq2seq(self) -> bool:
        """True where an encoder reads the prompt."""
        return self.decoder_start_token_id is not None

    @functools.cached_property
    def _around(self) -> tuple[list[int], list[int]]:
        return special_tokens_around(self.tokenizer)

    def _prompt(self, ids: list[int]) -> tuple[list[int] | None, list[int], bool]:
        """The encoder's tokens, the tokens before a completion, and whether the prompt was cut."""
        limit = self.max_prompt_length
        if self.decoder_start_token_id is not None:
            prefix, suffix = self._around
            text = ids[len(prefix) : len(ids) - len(suffix)]
            room = min(self.max_length, limit or self.max_length) - len(prefix) - len(suffix)
            kept = cut(text, max(room, 0), self.tokenizer.truncation_side)
            return [*prefix, *kept, *suffix], [self.decoder_start_token_id], len(kept) < len(text)
        if limit is None or len(ids) <= limit:
            return None, ids, False
        bos = ids[:1] if ids[0] == self.tokenizer.bos_token_id and limit > 1 else []
        return None, bos + cut(ids, limit - len(bos), "left"), True

    def _answer(self, prompt: list[int], ids: list[int], learned: list[bool]) -> tuple[Answer | None, bool]:
        """Prompt and completion within the limits, or None if nothing of the completion is left to learn."""
        kept = ids[: self.max_completion_length]
        if self.decoder_start_token_id is None:
            too_many = max(len(prompt) + len(kept) - self.max_length, 0)
        else:
            too_many = max(1 + len(kept) - self.max_length, 0)
        first, last = 0, len(kept)
        if too_many and self.truncation_mode == "keep_start":
            last -= too_many
        elif too_many and self.decoder_start_token_id is None:
            first = max(too_many - len(prompt), 0)
            prompt = prompt[too_many:]
        else:
            first = too_many
        if not prompt:
            # The first token of a row is nobody's target, so what is left of the completion starts after it.
            prompt, first = kept[first : first + 1], first + 1
        tokens, flags = kept[first:last] if last > first else [], learned[first:last] if last > first else []
        if not any(flags):
            return None, bool(ids)
        return Answer(prompt, tokens, flags), len(kept) < len(ids) or too_many > 0

    def _sequences(
        self, answers: Sequence[Answer], real: np.ndarray, length: int, window: int, read: tuple[Any, Any]
    ) -> Sequences:
        pad = self.tokenizer.pad_token_id
        arrays: Any = pad_right(
            [[*answer.prompt, *answer.tokens] for answer in answers], pad_token_id=pad, width=length
        )
        learned, _ = pad_right([answer.learned for answer in answers], pad_token_id=0, width=window)
        starts: Any = np.asarray([len(answer.prompt) - 1 for answer in answers], np.int32)
        mask: Any = learned.astype(bool) & real[:, None]
        inputs = ModelInputs(*arrays)._replace(context_tokens=read[0], context_mask=read[1])
        return Sequences(inputs, starts, mask)


def _window_values(rows: Sequence[Any], mask: np.ndarray) -> Any:
    """Values of rows as float32 at the window's positions, 0 where nothing is learned."""
    values = np.zeros(mask.shape, np.float32)
    for row, found in enumerate(rows):
        values[row, : len(found)] = found
    return np.where(mask, values, np.float32(0))

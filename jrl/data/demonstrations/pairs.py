# SPDX-License-Identifier: Apache-2.0
"""Demonstrations of a seq2seq model: the encoder reads the prompt, the decoder learns to write the output."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from jrl.data.demonstrations.rows import DialogueRow, RowSet
from jrl.data.tokenizer import cut, special_tokens_around, tokenize


class Pair(NamedTuple):
    """A sample of prompt and output for a seq2seq model.

    Attributes:
      context: Ids of the prompt, special tokens included.
      row: Start id, output and EOS; all but the start id are learned.
    """

    context: list[int]
    row: DialogueRow


class PairSet(RowSet):
    """Tokenised `[prompt, output]` pairs and their batches, with the face of `DialogueSet`.

    The prompt keeps the special tokens that its tokenizer puts around it; the decoder's row is the start id, the output
    and EOS. Either is cut on the tokenizer's `truncation_side` above `max_length`; EOS is cut like any token of the
    output, since a text without its end must not teach where to end, but the prompt keeps its special tokens.

    Args:
      samples: Lists of two texts. They are not changed.
      tokenizer: With an EOS token.
      max_length: Most tokens of a prompt, and of a decoder's row.
      seed: Of the order.
      decoder_start_token_id: First id of every decoder row.

    Samples of which something was cut are warned of once. None is dropped: a row is never left without its output.

    Raises:
      ValueError: If there are no samples, or one is not a pair of texts, or its prompt has no tokens; the message names
        its index.
    """

    def __init__(
        self,
        samples: Sequence[Sequence[str]],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        decoder_start_token_id: int,
    ) -> None:
        if tokenizer.eos_token_id is None:
            raise ValueError("`tokenizer` must have an EOS token: a model learns where a text ends from it.")
        prefix, suffix = special_tokens_around(tokenizer)
        room = max_length - len(prefix) - len(suffix)
        if min(max_length - 1, room) < 1:
            raise ValueError(
                f"`max_length` must leave room for a token beside the start id or the {len(prefix) + len(suffix)} "
                f"special tokens of a prompt, got {max_length}."
            )
        pairs = _pairs(samples)
        prompts, outputs = (tokenize(tokenizer, list(texts)) for texts in zip(*pairs, strict=True))
        contexts, rows, num_truncated = [], [], 0
        side = tokenizer.truncation_side
        for index, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
            if not prefix and not prompt and not suffix:
                raise ValueError(
                    f"`samples`: the prompt of sample {index} has no tokens for the encoder to read."
                )
            ended = (
                output
                if output and output[-1] == tokenizer.eos_token_id
                else [*output, tokenizer.eos_token_id]
            )
            kept = cut(ended, max_length - 1, side)
            num_truncated += len(prompt) > room or len(kept) < len(ended)
            contexts.append(prefix + cut(prompt, room, side) + suffix)
            rows.append(DialogueRow([decoder_start_token_id, *kept], [False] + [True] * len(kept)))
        super().__init__(
            rows,
            pad_token_id=tokenizer.pad_token_id,
            max_length=max_length,
            seed=seed,
            contexts=contexts,
            num_truncated=num_truncated,
        )
        if num_truncated:
            warnings.warn(
                f"{num_truncated} of {len(pairs)} samples have a prompt of more than {room} tokens, or an output "
                f"of more than {max_length - 2}, and were cut on the {side}.",
                stacklevel=2,
            )

    @property
    def pairs(self) -> list[Pair]:
        """Samples of the set."""
        assert self.contexts is not None
        return [Pair(context, row) for context, row in zip(self.contexts, self.rows, strict=True)]


def _pairs(samples: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """The samples, checked."""
    if isinstance(samples, str) or len(samples) == 0:
        raise ValueError(f"`samples` must be a list of [prompt, output] pairs, got {samples!r}.")
    for index, sample in enumerate(samples):
        is_pair = isinstance(sample, list | tuple) and len(sample) == 2
        if not is_pair or not all(isinstance(text, str) for text in sample):
            raise ValueError(
                f"`samples`: sample {index} must be a pair [prompt, output] of texts for a seq2seq model, whose "
                f"encoder reads the prompt and whose decoder learns the output; got {sample!r}."
            )
    return list(samples)

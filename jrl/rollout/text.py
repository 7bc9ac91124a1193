# SPDX-License-Identifier: Apache-2.0
"""Texts that reward functions read, from sampled ids. The ids stay what they are: nothing is re-encoded."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import numpy as np
from jaxtyping import Int


class Turn(TypedDict):
    """One turn of an episode, as logs and reward functions read it.

    Keys:
      output: Of the policy, without EOS and stop string.
      reward: The environment's for it.
      observation: The environment's answer.
      start: Place of its first token among the row's `output_tokens`.
      end: Place behind its last one.
    """

    output: str
    reward: float
    observation: str
    start: int
    end: int


@dataclass(frozen=True)
class Texts:
    """Completions as text, aligned with the ids that are trained on.

    Attributes:
      samples: Prompt and output together, with the separator between them where there is one.
      prompts: Prompts as the model saw them (after truncation), without special tokens.
      outputs: Completions without EOS and special tokens, cut before the stop string.
      output_tokens: Sampled ids up to the end of the row, the EOS or the token that completes the stop string
        included: one action each.
      lengths: Number of those ids, int32 (B,).
      stopped: True where a stop string ended the row, or its environment did, (B,).
      turns: Of episodes, the turns of each row; `outputs` and `output_tokens` are then all behind the prompt, what the
        environment wrote included. None: each row is one completion.
      failures: Of episodes, what the environment failed with in each row; None where it did not.
    """

    samples: list[str]
    prompts: list[str]
    outputs: list[str]
    output_tokens: list[list[int]]
    lengths: Int[np.ndarray, "B"]
    stopped: np.ndarray
    turns: list[list[Turn]] | None = None
    failures: list[str | None] | None = None

    def take(self, rows: Sequence[int] | Int[np.ndarray, "R"]) -> Texts:
        """Some of the rows, in the order given."""
        index = np.asarray(rows, np.int64)
        return Texts(
            samples=[self.samples[row] for row in index],
            prompts=[self.prompts[row] for row in index],
            outputs=[self.outputs[row] for row in index],
            output_tokens=[self.output_tokens[row] for row in index],
            lengths=self.lengths[index],
            stopped=self.stopped[index],
            turns=None if self.turns is None else [self.turns[row] for row in index],
            failures=None if self.failures is None else [self.failures[row] for row in index],
        )

    def sampled(self) -> list[list[int]]:
        """Ids of each row that the policy sampled: all of a completion, and of an episode those of its turns."""
        if self.turns is None:
            return self.output_tokens
        return [
            [token for turn in turns for token in row[turn["start"] : turn["end"]]]
            for row, turns in zip(self.output_tokens, self.turns, strict=True)
        ]

    def ended(self, eos_token_ids: Sequence[int]) -> np.ndarray:
        """False where a limit cut the row, and neither an EOS nor a stop string nor its environment ended it, (B,)."""
        if self.turns is not None:  # an EOS ends a turn, and not the episode
            return self.stopped
        last = [row[-1] for row in self.output_tokens]
        return np.isin(last, list(eos_token_ids)) | self.stopped

    @staticmethod
    def concatenate(parts: Sequence[Texts]) -> Texts:
        """The rows of all parts, in order; at least one part."""
        return Texts(
            samples=[text for part in parts for text in part.samples],
            prompts=[text for part in parts for text in part.prompts],
            outputs=[text for part in parts for text in part.outputs],
            output_tokens=[row for part in parts for row in part.output_tokens],
            lengths=np.concatenate([part.lengths for part in parts]),
            stopped=np.concatenate([part.stopped for part in parts]),
            turns=_joined([part.turns for part in parts]),
            failures=_joined([part.failures for part in parts]),
        )


def _joined(parts: Sequence[list[Any] | None]) -> list[Any] | None:
    """The rows of all parts, or None where they have none."""
    if any(part is None for part in parts):
        return None
    return [row for part in parts if part is not None for row in part]


def variety(texts: Texts, eos_token_ids: Sequence[int]) -> dict[str, float]:
    """Diversity of the completions, by metric; each is in [0, 1].

    Args:
      texts: At least one row.
      eos_token_ids: Not counted as tokens that repeat: every completion may end with one.
    """
    completions = [tuple(row) for row in texts.sampled()]
    pairs = set(zip(texts.prompts, completions, strict=True))
    counts = Counter(token for row in completions for token in row if token not in eos_token_ids)
    return {
        "completion/distinct_fraction": len(set(completions)) / len(completions),
        "completion/distinct_across_prompts": len(set(completions)) / len(pairs),
        "completion/top_token_fraction": max(counts.values(), default=0) / max(counts.total(), 1),
    }


def sample_rows(texts: Texts, scores: Sequence[float | None], **more: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of the samples' log, a dict for each sample: prompt, output, reward, further columns, tokens.

    Args:
      texts: What was written.
      scores: One a sample; None where the reward function failed.
      **more: Further columns by name.
    """
    return [
        {
            "prompt": texts.prompts[row],
            "output": texts.outputs[row],
            "reward": score if score is None else float(score),
            **{name: column[row] for name, column in more.items()},
            **episode_cells(texts, row),
            "output_tokens": [int(token) for token in texts.output_tokens[row]],
        }
        for row, score in enumerate(scores)
    ]


def episode_cells(texts: Texts, row: int) -> dict[str, Any]:
    """Entries of a log that an episode has beside text and ids: its turns, its end, its failure; none of a completion.

    Args:
      texts: The rows.
      row: Which one.
    """
    if texts.turns is None or texts.failures is None:
        return {}
    found = {"turns": texts.turns[row], "done": bool(texts.stopped[row])}
    return found | ({"failure": texts.failures[row]} if any(texts.failures) else {})


def decode_rows(
    tokenizer: Any,
    prompt_token_lists: Sequence[Sequence[int]],
    tokens: Int[np.ndarray, "B T"] | Sequence[Int[np.ndarray, "T"]],
    lengths: Int[np.ndarray, "B"],
    *,
    eos_token_ids: Sequence[int],
    stop_sequences: Sequence[str] = (),
    separator: str | None = None,
) -> Texts:
    """Decodes completions and ends them at the first stop string.

    A row ends with the token that completes a stop string: that token stays an action, so reward, mask and stored
    ids share one end. Its text ends before the stop string, trailing whitespace stripped.

    Args:
      tokenizer: A transformers tokenizer.
      prompt_token_lists: Prompt ids of each row, without padding.
      tokens: Sampled ids.
      lengths: Number of sampled ids of each row, the EOS included.
      eos_token_ids: Ids that end a row; their text is not part of an output.
      stop_sequences: Texts that end a row.
      separator: Stands between prompt and output in `samples`, and outputs are texts of their own: an encoder read the
        prompts. None: outputs go on from their prompts.
    Raises:
      ValueError: If a stop string is empty or a special token, whose text never shows in an output.
    """
    _check_stop_sequences(tokenizer, stop_sequences, eos_token_ids)
    rows = [[int(token) for token in row[:length]] for row, length in zip(tokens, lengths, strict=True)]
    eos = frozenset(int(token) for token in eos_token_ids)
    decode = _Decoder(tokenizer, prompt_token_lists, eos, continues=separator is None)
    outputs = decode.outputs(rows)
    stopped = np.zeros(len(rows), bool)
    for index, text in enumerate(outputs):
        if _first_stop(text, stop_sequences) is None:
            continue
        stopped[index] = True
        rows[index], outputs[index] = _end_at_stop(decode, index, rows[index], stop_sequences)
    return Texts(
        samples=[
            prompt + (separator or "") + output
            for prompt, output in zip(decode.prompts, outputs, strict=True)
        ],
        prompts=decode.prompts,
        outputs=outputs,
        output_tokens=rows,
        lengths=np.asarray([len(row) for row in rows], np.int32),
        stopped=stopped,
    )


class _Decoder:
    """Texts of completions, in the context of their prompts where they continue them."""

    def __init__(
        self,
        tokenizer: Any,
        prompt_token_lists: Sequence[Sequence[int]],
        eos_token_ids: frozenset[int],
        *,
        continues: bool,
    ) -> None:
        self._tokenizer, self._eos_token_ids, self._continues = tokenizer, eos_token_ids, continues
        self._prompt_rows = [list(row) for row in prompt_token_lists]
        self.prompts = self._decode(self._prompt_rows)

    def _decode(self, rows: list[list[int]]) -> list[str]:
        # Without the clean-up, which would move spaces: the text has to be that of the ids.
        found = self._tokenizer.batch_decode(
            rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return list(found) if rows else []

    def outputs(self, rows: list[list[int]], indices: Sequence[int] | None = None) -> list[str]:
        """Outputs of completions that stand behind the prompts of these rows; None: of all rows."""
        indices = range(len(rows)) if indices is None else indices
        rows = [row[:-1] if row and row[-1] in self._eos_token_ids else row for row in rows]
        if not self._continues:
            return self._decode(rows)
        # Behind its prompt: on its own, a sentencepiece completion would lose the space it begins with.
        together = self._decode([self._prompt_rows[i] + row for i, row in zip(indices, rows, strict=True)])
        return [
            # A prompt that ends inside a multi-byte character is no beginning of the joint text.
            both[len(self.prompts[i]) :] if both.startswith(self.prompts[i]) else self._decode([row])[0]
            for both, i, row in zip(together, indices, rows, strict=True)
        ]


def _first_stop(text: str, stop_sequences: Sequence[str]) -> int | None:
    """Place where the earliest stop string begins, or None."""
    return min((place for place in map(text.find, stop_sequences) if place >= 0), default=None)


def _end_at_stop(
    decode: _Decoder, index: int, row: list[int], stop_sequences: Sequence[str]
) -> tuple[list[int], str]:
    """The ids up to the token that completes the first stop string, and the text before it."""

    def holds_stop(count: int) -> bool:
        return _first_stop(decode.outputs([row[:count]], [index])[0], stop_sequences) is not None

    # More tokens never take a stop string away, so the first count that has one is found by halving.
    count = bisect.bisect_left(range(1, len(row) + 1), True, key=holds_stop) + 1
    text = decode.outputs([row[:count]], [index])[0]
    return row[:count], text[: _first_stop(text, stop_sequences)].rstrip()


def _check_stop_sequences(
    tokenizer: Any, stop_sequences: Sequence[str], eos_token_ids: Sequence[int]
) -> None:
    if isinstance(stop_sequences, str):
        raise ValueError(f"`stop_sequences` must be a list of texts, got the text {stop_sequences!r}.")
    for stop in stop_sequences:
        if not isinstance(stop, str) or not stop:
            raise ValueError(f"`stop_sequences` must hold texts that are not empty, got {stop!r}.")
        special = next((text for text in tokenizer.all_special_tokens if text in stop), None)
        if special is not None and tokenizer.convert_tokens_to_ids(special) not in eos_token_ids:
            raise ValueError(
                f"`stop_sequences`: {stop!r} holds the special token {special!r}, which outputs are shown without; "
                f"add its id {tokenizer.convert_tokens_to_ids(special)} to `gen_kwargs.eos_token_id` instead."
            )

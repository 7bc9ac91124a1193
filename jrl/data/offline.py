# SPDX-License-Identifier: Apache-2.0
"""Samples with a reward each, for offline reinforcement learning: which token is an action, and what it earns."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from jrl.data.batching import bucket_length
from jrl.data.demonstrations.dialogue import DialogueSet
from jrl.data.demonstrations.pairs import PairSet
from jrl.data.demonstrations.rows import DialogueRow, RowSet
from jrl.data.ordering import batch_rows
from jrl.data.sources.fingerprint import fingerprint
from jrl.ops.alignment import learned_targets
from jrl.ops.z_scores import z_scores
from jrl.typing import ILQLBatch


class RewardedRows:
    """Rows whose learned tokens are actions, what each action earned, and their batches.

    Args:
      samples: The rows, in an order of `seed`.
      earned: One array a row, one number an action.
      seed: Of the order.

    Attributes:
      rows: The samples; of a pair, the decoder's row.
      contexts: What the encoder reads for each; None for a causal model.
      earned: As given.
      num_truncated: Samples that were cut.
      num_dropped: Samples that were left out.
    """

    def __init__(self, samples: RowSet, earned: Sequence[Float[np.ndarray, "T"]], *, seed: int) -> None:
        self._samples, self._seed = samples, seed
        self.rows, self.contexts, self.earned = samples.rows, samples.contexts, earned
        self.num_truncated, self.num_dropped = samples.num_truncated, samples.num_dropped

    def __len__(self) -> int:
        return len(self.rows)

    def sha256(self) -> str:
        """Fingerprint of the tokens, of which are actions, and of their order."""
        return self._samples.sha256()

    def rewards_sha256(self) -> str:
        """Fingerprint of the rewards."""
        return fingerprint([row.tolist() for row in self.earned])

    def batch(self, step: int, batch_size: int) -> ILQLBatch:
        """The rows of optimizer step `step`, a pure function of (seed, step, batch_size).

        Every pass has an order of its own. The last batch of a pass is filled up with masked copies, so that every
        batch has `batch_size` rows and no sample comes twice in a pass.

        Args:
          step: At least 0.
          batch_size: Number of rows.
        Returns:
          NumPy arrays. Rows (batch_size, L) and windows of actions (batch_size, T), right-padded, have buckets of
          their own: there may be as many programs as pairs of the two occur.
        """
        indices, real = batch_rows(step, batch_size, size=len(self), seed=self._seed)
        sequences = self._samples.batch(step, batch_size)
        learned = np.asarray(sequences.mask)
        width = min(bucket_length(int(learned.sum(axis=1).max())), learned.shape[1])
        columns, mask = _compact(learned, width)
        earned = np.zeros(mask.shape, np.float32)
        for row, index in enumerate(indices[real]):
            earned[row, : len(self.earned[index])] = self.earned[index]
        # NumPy stands where jax arrays are declared: whoever holds the mesh places them.
        arrays: Any = (columns, mask, earned)
        return ILQLBatch(sequences.inputs, *arrays)


class RewardedSet(RewardedRows):
    """Tokenised samples, their standardised rewards, and their batches.

    Actions are the tokens of outputs, EOS included. In `[prompt, output, prompt, output, ...]` they are tokenised and
    cut as in `DialogueSet`; a text is the output of a prompt that holds nothing but BOS. A seq2seq model takes pairs,
    as in `PairSet`, and the first token of the output is an action like any other.

    Args:
      samples: Texts, and lists of an even number of texts; with a start id, pairs. They are not changed.
      rewards: One finite number a sample.
      tokenizer: With an EOS token.
      max_length: Most tokens of a sample; of a pair, of either part.
      seed: Of the order.
      decoder_start_token_id: First id of every decoder row of a seq2seq model; None: a causal model.
      add_special_tokens: As in `DialogueSet`.

    Attributes:
      rows: The samples that are in the set; of a pair, the decoder's row.
      contexts: What the encoder reads for each; None for a causal model.
      rewards: Of each row, standardised over those in the set.
      num_truncated: Samples that were cut; they are warned of once.
      num_dropped: Samples of which truncation left no action; they are left out.

    Further attributes are those of `RewardedRows`.

    Raises:
      ValueError: If there are no samples, one is malformed or an empty text, or no actions are left at all; if there
        are more or fewer rewards than samples, or one is not finite. The message names the index.
      TypeError: If a reward is no number.
    """

    def __init__(
        self,
        samples: Sequence[str | Sequence[str]],
        rewards: Sequence[float],
        tokenizer: Any,
        *,
        max_length: int,
        seed: int,
        decoder_start_token_id: int | None = None,
        add_special_tokens: bool = True,
    ) -> None:
        self._given = check_rewards(rewards, num_samples=len(samples))
        options: dict[str, int] = {"max_length": max_length, "seed": seed}
        found: DialogueSet | PairSet
        if decoder_start_token_id is None:
            found = DialogueSet(
                _after_bos(samples, tokenizer), tokenizer, add_special_tokens=add_special_tokens, **options
            )
        else:
            found = PairSet(samples, tokenizer, decoder_start_token_id=decoder_start_token_id, **options)
        self.rewards = standardized(self._given[found.kept])
        super().__init__(found, earned_at_end(found.rows, self.rewards), seed=seed)
        if len(self) > 1 and not self.rewards.any():
            warnings.warn(
                f"All {len(self)} rewards are {self._given[found.kept[0]]:g}: no sample is better than another, so "
                "only their likelihood is learned.",
                stacklevel=2,
            )

    def rewards_sha256(self) -> str:
        """Fingerprint of the rewards as they were given, those of dropped samples included."""
        return fingerprint(self._given.tolist())


def earned_at_end(
    rows: Sequence[DialogueRow], returns: Float[np.ndarray, "N"]
) -> list[Float[np.ndarray, "T"]]:
    """Rewards of the actions of each row: 0, but for the last one, which gets the row's return."""
    found = [np.zeros(int(learned_targets(row.learned).sum()), np.float32) for row in rows]
    for earned, value in zip(found, returns, strict=True):
        earned[-1] = value
    return found


def index_arrays(
    row: DialogueRow,
) -> tuple[Int[np.ndarray, "T"], Int[np.ndarray, "T+1"], Int[np.ndarray, "T+1"]]:
    """Columns of a row's actions and states, in trlX's layout.

    Args:
      row: A sample, its first token not learned.
    Returns:
      `actions_ixs`, the column of the state before each action; `states_ixs`, the same and the last column; `dones`, 1
      for every state but the last one, where it is 0: 1 means that the row goes on.
    Example:
      >>> row = DialogueRow([2, 4, 10, 9, 13, 21], [False, True, True, False, True, True])
      >>> actions, states, dones = index_arrays(row)
      >>> actions.tolist(), states.tolist(), dones.tolist()
      ([0, 1, 3, 4], [0, 1, 3, 4, 5], [1, 1, 1, 1, 0])
    """
    actions = np.flatnonzero(learned_targets(row.learned)).astype(np.int32)
    states = np.append(actions, np.int32(len(row.tokens) - 1))
    dones = np.append(np.ones_like(actions), np.int32(0))
    return actions, states, dones


def standardized(rewards: Float[np.ndarray, "N"]) -> Float[np.ndarray, "N"]:
    """(R − mean) / (s + ε) with the sample standard deviation s (ddof 1) and the ε of float64.

    A single reward, and rewards that are all equal, become 0: rounding is no preference.

    Example:
      >>> standardized(np.array([1.0, 3.0])).round(4).tolist()
      [-0.7071, 0.7071]
    """
    if np.ptp(rewards) == 0:
        return np.zeros_like(rewards)
    epsilon = float(np.finfo(np.float64).eps)
    return z_scores(rewards, mean=rewards.mean(), std=rewards.std(ddof=1), epsilon=epsilon)


def check_rewards(rewards: Sequence[float], *, num_samples: int) -> Float[np.ndarray, "N"]:
    """The rewards in float64.

    Args:
      rewards: Numbers, or arrays that hold one number each.
      num_samples: How many there must be.
    Raises:
      ValueError: If there are more or fewer, or one is not finite.
      TypeError: If one is no number.
    """
    if len(rewards) != num_samples:
        raise ValueError(
            f"`rewards` must have one entry a sample: got {len(rewards)} for {num_samples} samples."
        )
    found = [_number(reward, index) for index, reward in enumerate(rewards)]
    for index, reward in enumerate(found):
        if not math.isfinite(reward):
            raise ValueError(
                f"`rewards`: entry {index} must be finite, got {reward}. Did what scored the samples fail on it?"
            )
    return np.array(found, np.float64)


def _number(reward: Any, index: int) -> float:
    # A text that spells a number would pass `float` too.
    if not isinstance(reward, str | bytes):
        try:
            return float(reward)
        except (TypeError, ValueError):
            pass
    raise TypeError(f"`rewards`: entry {index} must be a number, got {reward!r}.")


def _compact(
    learned: Bool[np.ndarray, "B L"], width: int
) -> tuple[Int[np.ndarray, "B T"], Bool[np.ndarray, "B T"]]:
    """Columns that are True, first come first, and which of the `width` places they fill."""
    order = np.argsort(~learned, axis=1, kind="stable")[:, :width]
    mask = np.take_along_axis(learned, order, axis=1)
    return np.where(mask, order, 0).astype(np.int32), mask


def _after_bos(samples: Sequence[str | Sequence[str]], tokenizer: Any) -> Sequence[str | Sequence[str]]:
    """Texts as outputs of a prompt that is BOS alone; where a text holds its BOS already, it is not doubled."""
    if isinstance(samples, str):
        return samples  # refused, with a message of its own
    found: list[str | Sequence[str]] = []
    for index, sample in enumerate(samples):
        if not isinstance(sample, str):
            found.append(sample)
            continue
        bos = tokenizer.bos_token or tokenizer.eos_token or ""
        prompt = bos if sample.startswith(bos) else ""
        text = sample.removeprefix(prompt)
        if not text:
            raise ValueError(f"`samples`: sample {index} ({sample!r}) has no tokens.")
        # An output that comes first gets the BOS by itself.
        found.append([prompt, text])
    return found

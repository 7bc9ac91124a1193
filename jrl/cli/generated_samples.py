# SPDX-License-Identifier: Apache-2.0
"""Samples of many prompts as JSON lines, with their rewards: the format of a run's own samples."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.data.batching import pad_left
from jrl.data.prompts import PromptSet
from jrl.rollout.reward_columns import combined_rewards, reward_columns
from jrl.rollout.rewards import call_reward_fns
from jrl.rollout.text import Texts, decode_rows, sample_rows
from jrl.typing import Params

Complete = Callable[[Params, Any, Any, Any], Any]
"""Called with parameters, left-padded ids, their mask and a key: ids of completions, padded on the right."""


@dataclass(frozen=True)
class SampleWriter:
    """Completes prompts and judges the completions.

    Attributes:
      complete: Samples.
      tokenizer: Of the model.
      eos_token_ids: Ids that end a completion.
      rewards: Reward functions by name; {}: nothing is judged.
      batch_size: Prompts of a call.
    """

    complete: Complete
    tokenizer: Any
    eos_token_ids: Sequence[int]
    rewards: dict[str, Callable[..., Any]]
    batch_size: int

    def lines(self, params: Params, prompts: PromptSet, key: Any) -> Iterator[str]:
        """A JSON object for each prompt, in order: its metadata, `prompt`, `output`, `output_tokens`, and `reward`.

        Args:
          params: Of the model.
          prompts: Tokenised.
          key: Of the sampling; each call's is folded from it with the number of its first prompt.
        """
        everything = prompts.rows(np.arange(len(prompts)), width=prompts.width(np.arange(len(prompts))))
        width = max(map(len, everything.token_lists))
        for start in range(0, len(prompts), self.batch_size):
            numbers = np.arange(start, min(start + self.batch_size, len(prompts)))
            # The last call is as large as the others, so that nothing is compiled for it.
            asked = [everything.token_lists[min(start + i, len(prompts) - 1)] for i in range(self.batch_size)]
            tokens, mask = pad_left(asked, pad_token_id=self.tokenizer.pad_token_id, width=width)
            found = self.complete(
                params, jnp.asarray(tokens), jnp.asarray(mask), jax.random.fold_in(key, start)
            )
            ids = np.asarray(jax.device_get(found))[: len(numbers)]
            texts = decode_rows(
                self.tokenizer,
                asked[: len(numbers)],
                ids,
                self._lengths(ids),
                eos_token_ids=self.eos_token_ids,
                separator=prompts.separator,
            )
            metadata = prompts.metadata(numbers)
            for row, sample in enumerate(self._judged(texts, metadata)):
                told = {name: column[row] for name, column in metadata.items()} | sample
                yield json.dumps(told, ensure_ascii=False, default=str)

    def _lengths(self, ids: np.ndarray) -> np.ndarray:
        """Ids of each row up to its first EOS, that included."""
        is_end = np.isin(ids, list(self.eos_token_ids))
        return np.where(is_end.any(axis=1), is_end.argmax(axis=1) + 1, ids.shape[1]).astype(np.int32)

    def _judged(self, texts: Texts, metadata: dict[str, list[Any]]) -> list[dict[str, Any]]:
        """Samples of one call with their rewards; of rewards per token, their sums."""
        if not self.rewards:
            rows = sample_rows(texts, [None] * len(texts.outputs))
            return [{name: value for name, value in row.items() if name != "reward"} for row in rows]
        found = call_reward_fns(self.rewards, texts, tokenizer=self.tokenizer, metadata=metadata)
        sums = [math.fsum(np.atleast_1d(reward)) for reward in combined_rewards(found, (1.0,) * len(found))]
        cells = reward_columns(list(self.rewards), found).cells() if len(found) > 1 else {}
        return sample_rows(texts, [None if math.isnan(total) else total for total in sums], **cells)

# SPDX-License-Identifier: Apache-2.0
"""Prompts to texts: sampling chunk by chunk, each decoded while the device works on those behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrl.data.prompts import PromptBatch, PromptSet
from jrl.rollout.text import Texts, decode_rows
from jrl.trainers.generation import GenerationSettings, Sampler
from jrl.trainers.placing import place_rows
from jrl.typing import Completions, Frozen, Params, PRNGKey

AHEAD = 3
"""Sampling calls on their way at a time: enough to keep the device busy, and few enough for any number of rows."""


@dataclass(frozen=True)
class Completer:
    """Completes prompts of a set.

    Attributes:
      sampler: Compiled samplers.
      tokenizer: Decodes.
      stop_sequences: Texts that end a completion.
      mesh: Where rows go.
      chunk_size: Most rows of a sampling call.
    """

    sampler: Sampler
    tokenizer: Any
    stop_sequences: Sequence[str]
    mesh: jax.sharding.Mesh
    chunk_size: int

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> Texts:
        """One completion for each index.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          prompts: The set.
          indices: Of its prompts, at least one; a prompt may come several times.
          settings: How to sample.
          key: Of this call.
        """
        return Texts.concatenate(list(self.chunks(params, frozen, prompts, indices, settings, key)))

    def chunks(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> Iterator[Texts]:
        """The same completions chunk by chunk, in order: what the caller does with one overlaps with sampling the next.

        Row i samples with the key of number i, so the chunk size changes nothing. A last chunk that is short is filled
        up with rows from the front, which are dropped. The arguments are those of a call.
        """
        total = len(indices)
        chunk_size = min(self.chunk_size, total)
        width = prompts.width(indices)

        def dispatch(start: int) -> tuple[PromptBatch, Completions]:
            numbers = np.arange(start, start + chunk_size) % total
            batch = prompts.rows(indices[numbers], width=width)
            inputs = place_rows(self.mesh, batch.inputs)
            return batch, self.sampler(params, frozen, inputs, numbers, settings, key)

        starts = range(0, total, chunk_size)
        ahead = deque(map(dispatch, starts[:AHEAD]))
        for number, start in enumerate(starts):
            batch, completions = ahead.popleft()
            tokens, lengths = jax.device_get((completions.tokens, completions.lengths))
            ahead.extend(map(dispatch, starts[number + AHEAD : number + AHEAD + 1]))
            count = min(chunk_size, total - start)
            yield decode_rows(
                self.tokenizer,
                batch.token_lists[:count],
                tokens[:count],
                lengths[:count],
                eos_token_ids=settings.eos_token_id,
                stop_sequences=self.stop_sequences,
                separator=prompts.separator,
            )

# SPDX-License-Identifier: Apache-2.0
"""Prompts to texts: sampling chunk by chunk, each decoded while the device works on those behind it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from jrl.data.prompts import PromptBatch, PromptSet
from jrl.rollout.text import Texts, decode_rows
from jrl.trainers.generation import GenerationSettings, Sampler
from jrl.trainers.placing import local_rows, own_rows, place_rows
from jrl.trainers.sharing import Part, all_texts, to_main
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
      on_main: Whether all rows go to process 0; else each process keeps its own.
    """

    sampler: Sampler
    tokenizer: Any
    stop_sequences: Sequence[str]
    mesh: jax.sharding.Mesh
    chunk_size: int
    on_main: bool = False

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> Texts:
        """One completion for each index, all of them in every process.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          prompts: The set.
          indices: Of its prompts, at least one; a prompt may come several times.
          settings: How to sample.
          key: Of this call.
        """
        return all_texts(list(self.chunks(params, frozen, prompts, indices, settings, key)))

    def chunks(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> Iterator[Part]:
        """This process's completions chunk by chunk: what the caller does with one overlaps with sampling the next.

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

        starts = deque(range(0, total, chunk_size))
        own = own_rows(self.mesh, chunk_size)
        # What goes to process 0 would queue behind the calls that are on their way.
        ahead = deque(_dispatched(dispatch, starts, 1 if self.on_main else AHEAD))
        while ahead:
            start, batch, completions = ahead.popleft()
            rows = own[own < total - start]
            tokens, lengths = local_rows(completions.tokens, rows), local_rows(completions.lengths, rows)
            if not self.on_main:
                ahead.extend(_dispatched(dispatch, starts, 1))
            texts = decode_rows(
                self.tokenizer,
                [batch.token_lists[row] for row in rows],
                tokens,
                lengths,
                eos_token_ids=settings.eos_token_id,
                stop_sequences=self.stop_sequences,
                separator=prompts.separator,
            )
            part = Part(start + rows, texts)
            if self.on_main:
                part = to_main(part)
                ahead.extend(_dispatched(dispatch, starts, 1))
            yield part


def _dispatched(
    dispatch: Callable[[int], tuple[PromptBatch, Completions]], starts: deque[int], most: int
) -> Iterator[tuple[int, PromptBatch, Completions]]:
    """Sends the next calls to the device, and takes them off the list of those to come."""
    for _ in range(min(most, len(starts))):
        start = starts.popleft()
        yield start, *dispatch(start)

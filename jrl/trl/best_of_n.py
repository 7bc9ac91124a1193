# SPDX-License-Identifier: Apache-2.0
"""TRL's best-of-n sampler: n completions a prompt, of which the best by a score are kept."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jrl.interop import set_seed
from jrl.trl.models import ModelHandle

__all__ = ["BestOfNSampler"]


class BestOfNSampler:
    """Samples several texts a prompt and keeps the best.

    Args:
      model: Who writes.
      tokenizer: Of the model.
      queries_to_scores: Texts, prompts included → one score each.
      length_sampler: Gives the new tokens of each prompt's texts.
      sample_size: Texts a prompt.
      seed: Of the sampler; None: it goes on.
      n_candidates: Texts that are kept.
      generation_config: transformers' configuration of sampling.
    Raises:
      ValueError: If more texts are to be kept than written.
    """

    def __init__(
        self,
        model: ModelHandle,
        tokenizer: Any,
        queries_to_scores: Callable[[list[str]], Sequence[float]],
        length_sampler: Callable[[], int],
        sample_size: int = 4,
        seed: int | None = None,
        n_candidates: int = 1,
        generation_config: Any = None,
    ) -> None:
        if n_candidates > sample_size:
            raise ValueError(
                f"`n_candidates` must be at most `sample_size` {sample_size}, got {n_candidates}."
            )
        if seed is not None:
            set_seed(seed)
        self.model, self.tokenizer, self.queries_to_scores = model, tokenizer, queries_to_scores
        self.length_sampler, self.sample_size, self.n_candidates = length_sampler, sample_size, n_candidates
        self.gen_config = generation_config

    def generate(
        self,
        tokenized_query: Any,
        skip_special_tokens: bool = True,
        device: Any = None,
        **generation_kwargs: Any,
    ) -> list[list[str]]:
        """The best texts of every prompt, best first.

        Args:
          tokenized_query: Ids of one prompt, or a list of such.
          skip_special_tokens: Whether texts are without them.
          device: No effect: the mesh places arrays.
          **generation_kwargs: Of `model.generate`, beside the configuration.
        """
        del device
        one = np.ndim(tokenized_query[0]) == 0
        found = []
        for query in [tokenized_query] if one else tokenized_query:
            rows = np.tile(np.asarray(query, np.int64).reshape(1, -1), (self.sample_size, 1))
            options = {"max_new_tokens": self.length_sampler(), "generation_config": self.gen_config}
            written = np.asarray(self.model.generate(rows, **options, **generation_kwargs))
            texts = self.tokenizer.batch_decode(written, skip_special_tokens=skip_special_tokens)
            order = np.argsort(-np.asarray(self.queries_to_scores(texts), float), kind="stable")
            found.append([texts[place] for place in order[: self.n_candidates]])
        return found

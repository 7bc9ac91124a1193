# SPDX-License-Identifier: Apache-2.0
"""trlX's ILQL trainer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any, cast

import jax.numpy as jnp

from jrl.data.offline import RewardedRows
from jrl.interop import as_array
from jrl.learners.accumulate import Loss
from jrl.learners.ilql import ILQLState, ilql_objective
from jrl.trainers.ilql import ILQLTrainer
from jrl.trainers.rollouts import document_start
from jrl.trlx.data.ilql_types import ILQLBatch, ILQLSeq2SeqBatch
from jrl.trlx.dialogue import ilql_seq2seq_store, ilql_store, make_experience
from jrl.trlx.offline import OfflineRLTrainer
from jrl.trlx.refusals import ILQL
from jrl.trlx.registry import register_trainer
from jrl.trlx.store_rows import rewarded_rows
from jrl.trlx.stores import BaseRolloutStore
from jrl.typing import Frozen, ModelInputs, Params
from jrl.typing import ILQLBatch as NativeBatch

__all__ = ["AccelerateILQLTrainer", "as_native", "make_experience", "seq2seq_pairs"]


@register_trainer
class AccelerateILQLTrainer(OfflineRLTrainer):
    """Implicit language Q-learning on samples with a reward each, or on the store that a script brings."""

    native_class = ILQLTrainer
    REFUSED = ILQL
    with_value_head = True

    @property
    def native_ilql(self) -> ILQLTrainer:
        """jrl's own trainer."""
        return cast(ILQLTrainer, self.native)

    def make_experience(
        self, samples: Sequence[Any], rewards: Sequence[float], max_length: int = 2048
    ) -> None:
        """Sets what is learned from.

        Args:
          samples: Texts, `[prompt, output]` pairs, or longer dialogues; of a seq2seq model, pairs.
          rewards: One a sample.
          max_length: Most tokens of a sample.
        """
        if self.native.lm.decoder_start_token_id is None:
            self._add_samples(samples, rewards, max_length)
        else:
            self.make_experience_seq2seq(samples, rewards, max_length)

    def make_experience_seq2seq(
        self, samples: Sequence[Any], rewards: Sequence[float], max_length: int = 2048
    ) -> None:
        """Fills the store with a seq2seq model's samples; `make_experience` calls it."""
        self._add_samples(seq2seq_pairs(samples, self.native_ilql), rewards, max_length)

    def _add_samples(self, samples: Sequence[Any], rewards: Sequence[float], max_length: int) -> None:
        self.native_ilql.add_samples(samples, rewards, max_length=max_length)
        self.store = None

    def loss(self, batch: ILQLBatch | ILQLSeq2SeqBatch) -> tuple[Any, dict[str, Any]]:
        """The sum of the Q, value, conservative and likelihood losses of a batch from the store.

        Returns:
          The mean over actions, and the metrics of the learner.
        """
        state: ILQLState = self.native_ilql.state
        return self._compiled_loss(self.model.params, self.model.frozen, state.target_params, batch)

    def _loss_of(
        self, params: Params, frozen: Frozen, targets: Params, batch: ILQLBatch | ILQLSeq2SeqBatch
    ) -> Loss:
        method, native = self.native_ilql.method, self.native
        objective = method.own_objective() or partial(ilql_objective, config=method)
        reader = replace(native.reader, policy=native.lenient_policy)
        out: Loss = objective(reader, params, frozen, targets, as_native(batch))
        return out

    def _store_of(self, samples: RewardedRows) -> BaseRolloutStore:
        if samples.contexts is None:
            return ilql_store(samples.rows, samples.earned)
        return ilql_seq2seq_store(samples.contexts, samples.rows, samples.earned)

    def _samples_of(self, store: BaseRolloutStore) -> RewardedRows:
        return rewarded_rows(store, self.native)


def seq2seq_pairs(samples: Sequence[Any], native: ILQLTrainer) -> Sequence[Any]:
    """Samples as trlX reads them: a text alone is what a seq2seq model's decoder writes after an empty document.

    Args:
      samples: As they were given; those of a causal model are returned as they are.
      native: Whose model it is.
    """
    if native.lm.decoder_start_token_id is None:
        return samples
    start = document_start(native.tokenizer)
    return [[start, sample] if isinstance(sample, str) else sample for sample in samples]


def as_native(batch: ILQLBatch | ILQLSeq2SeqBatch) -> NativeBatch:
    """A batch of the store as the learner reads it.

    `states_ixs` are not read: they are the columns of the actions and the last one, which ends the row.
    """
    tokens, mask = as_array(batch.input_ids, jnp.int32), as_array(batch.attention_mask, bool)
    inputs = ModelInputs(tokens, mask)
    acts = as_array(batch.dones, bool)[:, :-1]
    columns = as_array(batch.actions_ixs, jnp.int32)
    if isinstance(batch, ILQLSeq2SeqBatch):
        rows = as_array(batch.decoder_input_ids, jnp.int32)
        # The last action's token is the last real column.
        last = jnp.max(jnp.where(acts, columns, -1), axis=1) + 1
        real = jnp.arange(rows.shape[1], dtype=jnp.int32)[None, :] <= last[:, None]
        inputs = ModelInputs(rows, real, None, tokens, mask)
    return NativeBatch(inputs, columns, acts, as_array(batch.rewards, jnp.float32))

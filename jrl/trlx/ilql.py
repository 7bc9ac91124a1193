# SPDX-License-Identifier: Apache-2.0
"""trlX's ILQL trainer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import jax.numpy as jnp

from jrl.learners.accumulate import Loss
from jrl.learners.ilql import ILQLState, ilql_objective
from jrl.trainers.ilql import ILQLTrainer
from jrl.trlx.accelerate import AccelerateRLTrainer
from jrl.trlx.dialogue import ilql_seq2seq_store, ilql_store
from jrl.trlx.elements import ILQLBatch, ILQLSeq2SeqBatch
from jrl.trlx.model import as_array
from jrl.trlx.registry import register_trainer
from jrl.typing import Frozen, ModelInputs, Params
from jrl.typing import ILQLBatch as NativeBatch


@register_trainer
class AccelerateILQLTrainer(AccelerateRLTrainer):
    """Implicit language Q-learning on samples with a reward each."""

    native_class = ILQLTrainer
    may_loop = False
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
        self.native_ilql.add_samples(samples, rewards, max_length=max_length)
        self.store = None

    def make_experience_seq2seq(
        self, samples: Sequence[Any], rewards: Sequence[float], max_length: int = 2048
    ) -> None:
        """The same: the model decides what samples become."""
        self.make_experience(samples, rewards, max_length)

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
        out: Loss = ilql_objective(
            self.native.lenient_policy,
            params,
            frozen,
            targets,
            as_native(batch),
            config=self.native_ilql.method,
            logprob_chunk_bytes=self.config.train.logprob_chunk_bytes,
        )
        return out

    def _fill_store(self) -> None:
        if self._store is not None or "samples" not in vars(self.native):
            return
        samples = self.native_ilql.samples
        if samples.contexts is None:
            self._store = ilql_store(samples.rows, samples.rewards)
        else:
            self._store = ilql_seq2seq_store(samples.contexts, samples.rows, samples.rewards)

    def _require_data(self) -> None:
        if "samples" not in vars(self.native):
            raise ValueError(
                "AccelerateILQLTrainer has no samples yet: `make_experience(samples, rewards)` sets them."
            )

    def _total_steps(self) -> int:
        return self.native_ilql.num_iterations


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

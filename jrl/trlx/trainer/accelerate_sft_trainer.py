# SPDX-License-Identifier: Apache-2.0
"""trlX's trainer of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, cast

import jax.numpy as jnp

from jrl.data.demonstrations import IGNORED_LABEL, PackedSet, RowSet
from jrl.interop import as_array
from jrl.learners.accumulate import Loss
from jrl.learners.sft import sft_objective
from jrl.ops.alignment import next_predictions, next_tokens
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.sft import SFTTrainer
from jrl.trlx.data.configs import SFTConfig
from jrl.trlx.dialogue import messages_of
from jrl.trlx.loop import as_pytree
from jrl.trlx.offline import OfflineRLTrainer
from jrl.trlx.refusals import NATIVE
from jrl.trlx.registry import register_trainer
from jrl.trlx.store_rows import learned_rows
from jrl.trlx.stores import BaseRolloutStore, DialogStore, PairStore
from jrl.typing import Frozen, ModelInputs, Params
from jrl.typing import Sequences as Rows

__all__ = ["AccelerateSFTTrainer", "SFTConfig"]


@register_trainer
class AccelerateSFTTrainer(OfflineRLTrainer):
    """Supervised fine-tuning on texts, prompt-output pairs and dialogues; of seq2seq models, on pairs.

    A store that a script brings is learned in their place.
    """

    native_class: ClassVar[type[PolicyTrainer] | None] = SFTTrainer
    REFUSED = NATIVE

    @property
    def native_sft(self) -> SFTTrainer:
        """jrl's own trainer."""
        return cast(SFTTrainer, self.native)

    def make_experience(self, samples: Sequence[Any], seq_length: int) -> None:
        """Sets what is learned.

        Args:
          samples: Texts, `[prompt, output]` pairs, or longer dialogues.
          seq_length: Most tokens of a sample.
        """
        self.native_sft.add_samples(samples, max_length=seq_length)
        self.store = None

    def loss(self, batch: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
        """Mean negative log-likelihood of the labels that are not −100 and stand on real tokens behind real tokens.

        Args:
          batch: `input_ids`, `attention_mask` and `labels` (B L); of a seq2seq model, the decoder's row with its start
            id as `decoder_input_ids`, and labels of that row.
        """
        return self._compiled_loss(self.model.params, self.model.frozen, None, as_pytree(batch))

    def _loss_of(self, params: Params, frozen: Frozen, targets: None, batch: Mapping[str, Any]) -> Loss:
        tokens = as_array(batch["input_ids"], jnp.int32)
        mask = as_array(batch["attention_mask"], bool)
        learned = as_array(batch["labels"], jnp.int32) != IGNORED_LABEL
        inputs = ModelInputs(tokens, mask)
        if self.native.lm.decoder_start_token_id is not None:
            rows = as_array(batch["decoder_input_ids"], jnp.int32)
            # A row is its start id and what is learned; behind that there is padding alone.
            inputs = ModelInputs(rows, learned.at[:, 0].set(True), None, tokens, mask)
            acts = next_tokens(learned)
        else:
            # Position t speaks of the label in the next column; padding on either side neither speaks nor is spoken of.
            acts = next_tokens(learned) & next_tokens(mask) & next_predictions(mask)
        sequences = Rows(inputs, jnp.zeros(tokens.shape[0], jnp.int32), acts)
        reader = replace(self.native.reader, policy=self.native.lenient_policy)
        return sft_objective(reader, params, frozen, sequences)

    def _store_of(self, samples: Any) -> BaseRolloutStore:
        if not isinstance(samples, RowSet) or isinstance(samples, PackedSet):
            raise ValueError(
                "`store` must be made of texts and dialogues, got samples that are packed or streamed."
            )
        if samples.contexts is not None:
            return PairStore(
                samples.contexts, [row.tokens for row in samples.rows], self.tokenizer.pad_token_id
            )
        return DialogStore([messages_of(row) for row in samples.rows], self.tokenizer)

    def _samples_of(self, store: BaseRolloutStore) -> RowSet:
        return learned_rows(store, self.native)

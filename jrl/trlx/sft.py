# SPDX-License-Identifier: Apache-2.0
"""trlX's trainer of supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, cast

import jax.numpy as jnp

from jrl.data.dialogue import DialogueSet
from jrl.data.pairs import PairSet
from jrl.learners.accumulate import Loss
from jrl.learners.sft import sft_objective
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trainers.sft import SFTTrainer
from jrl.trlx.accelerate import AccelerateRLTrainer
from jrl.trlx.dialogue import messages_of
from jrl.trlx.loop import as_pytree
from jrl.trlx.model import as_array
from jrl.trlx.registry import register_trainer
from jrl.trlx.stores import IGNORED_LABEL, DialogStore, PairStore
from jrl.typing import Frozen, ModelInputs, Params
from jrl.typing import Sequences as Rows


@register_trainer
class AccelerateSFTTrainer(AccelerateRLTrainer):
    """Supervised fine-tuning on texts, prompt-output pairs and dialogues; of seq2seq models, on pairs."""

    native_class: ClassVar[type[PolicyTrainer] | None] = SFTTrainer

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
        """Mean negative log-likelihood of the labels that are not −100.

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
        # Position t speaks of the label in the next column, wherever the padding is.
        sequences = Rows(inputs, jnp.zeros(tokens.shape[0], jnp.int32), learned[:, 1:])
        chunk_bytes = self.config.train.logprob_chunk_bytes
        policy = self.native.lenient_policy
        return sft_objective(policy, params, frozen, sequences, logprob_chunk_bytes=chunk_bytes)

    def _fill_store(self) -> None:
        if self._store is not None or "samples" not in vars(self.native):
            return
        samples = self.native_sft.samples
        if isinstance(samples, PairSet):
            rows = [pair.row.tokens for pair in samples.pairs]
            contexts = [pair.context for pair in samples.pairs]
            self._store = PairStore(contexts, rows, self.tokenizer.pad_token_id)
        else:
            assert isinstance(samples, DialogueSet), "trlX's samples are texts and lists of texts"
            self._store = DialogStore([messages_of(row) for row in samples.rows], self.tokenizer)

    def _require_data(self) -> None:
        if "samples" not in vars(self.native):
            raise ValueError(
                "AccelerateSFTTrainer has no samples yet: `make_experience(samples, seq_length)` sets them."
            )

    def _total_steps(self) -> int:
        return self.native_sft.num_iterations

# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning on strings, prompt-output pairs and dialogues."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jrl.data.dialogue import DialogueSet
from jrl.data.pairs import PairSet
from jrl.learners.sft import make_sft_update
from jrl.learners.state import TrainState, init_train_state
from jrl.trainers.offline import OfflineTrainer
from jrl.trainers.registry import register_trainer
from jrl.typing import Params


@register_trainer("SFTTrainer")
class SFTTrainer(OfflineTrainer):
    """Next-token training. `state` is a `TrainState`; one iteration is one optimizer step."""

    state: TrainState
    samples: DialogueSet | PairSet
    tokens_metric = "sft/tokens"

    def build(self, params: Params, make_reference: Callable[[], Params]) -> None:
        """No reference is made: nothing is compared."""
        del make_reference
        train = self.config.train
        optimizer = self.make_optimizer()
        update = make_sft_update(
            self.policy,
            optimizer,
            batch_size=train.batch_size,
            minibatch_size=train.minibatch_size or train.batch_size,
            logprob_chunk_bytes=train.logprob_chunk_bytes,
        )
        self.compile_learner(lambda p: init_train_state(p, optimizer), update, params)

    def add_data(
        self,
        *,
        samples: Sequence[Any] | None,
        rewards: Sequence[float] | None,
        prompts: Sequence[Any] | None,
        eval_prompts: Sequence[Any] | None,
    ) -> None:
        """Takes samples. Evaluation starts from the BOS text (seq2seq: from samples' prompts) by default."""
        if samples is None or rewards is not None or prompts is not None:
            raise ValueError(
                "SFTTrainer learns from `samples`: give those, and neither `rewards` nor `prompts`."
            )
        self.add_samples(samples)
        self.add_default_eval_prompts(samples, eval_prompts)

    def add_samples(self, samples: Sequence[Any], *, max_length: int | None = None) -> None:
        """Sets what is learned: strings, [prompt, output] pairs, or longer dialogues; for seq2seq models, pairs.

        Args:
          samples: Left untouched.
          max_length: Most tokens of a sample; default: `train.seq_length`.
        """
        train, start = self.config.train, self.lm.decoder_start_token_id
        options: dict[str, int] = {"max_length": max_length or train.seq_length, "seed": train.seed}
        if start is None:
            self.samples = DialogueSet(samples, self.tokenizer, **options)
        else:
            self.samples = PairSet(samples, self.tokenizer, decoder_start_token_id=start, **options)

    @property
    def params(self) -> Params:
        """Trainable parameters."""
        return self.state.params

    def optimizer_steps(self) -> jax.Array:
        """The state's step counter."""
        return self.state.step

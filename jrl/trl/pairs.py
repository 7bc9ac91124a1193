# SPDX-License-Identifier: Apache-2.0
"""TRL's methods of DPO for loops of one's own: forward passes, losses and samples of a collator's batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np

from jrl.data.batching import pad_right
from jrl.learners.dpo import configured_loss
from jrl.losses.dpo import DIVERGENCES, LOSSES, Completion, Pairs, completion_logprobs, implicit_rewards
from jrl.ops.logprobs import logprobs_from_logits
from jrl.ops.metrics import finalize
from jrl.ops.token_reads import read_tokens
from jrl.trainers.dpo import DPOTrainer as Native
from jrl.trl.collators import Batch, DPODataCollatorWithPadding
from jrl.trl.configs import DPOConfig
from jrl.trl.models import ModelHandle
from jrl.trl.saving import FlatTrainer
from jrl.trlx.model import ModelOutput, TrainedModel

_SIDES = ("chosen", "rejected")
_FIGURES = ("rewards/", "logps/", "logits/")
"""How the metrics of a batch begin that TRL has, too."""


class PairTrainer(FlatTrainer):
    """What `DPOTrainer` can do with a batch of pairs.

    Attributes:
      ref_model: The reference's handle; None: the policy as it starts, or without its adapter.
    """

    ref_model: ModelHandle | None = None
    _stored: dict[str, dict[str, list[float]]]

    @property
    def flat(self) -> DPOConfig:
        """The configuration with the constructor's arguments."""
        return cast(DPOConfig, self.config)

    @property
    def native_dpo(self) -> Native:
        """jrl's own trainer."""
        return cast(Native, self.native)

    @property
    def beta(self) -> float:
        """β of the implicit reward."""
        return self.flat.beta

    @property
    def loss_type(self) -> list[str]:
        """Names of the losses."""
        return self.flat.loss_type

    @property
    def label_pad_token_id(self) -> int:
        """Label of what is not learned, in the collator's batches."""
        return self.flat.label_pad_token_id

    @property
    def padding_value(self) -> int:
        """Id of padding in the collator's batches."""
        given = self.flat.padding_value
        return int(self.tokenizer.pad_token_id if given is None else given)

    @property
    def max_prompt_length(self) -> int | None:
        """Most tokens of a prompt; None: no limit of its own."""
        return self.flat.max_prompt_length

    @property
    def truncation_mode(self) -> str:
        """The end of a long row that is kept."""
        return self.flat.truncation_mode

    def tokenize_row(self, feature: Mapping[str, Any], model: Any = None) -> Batch:
        """Ids, masks and labels of one row.

        Args:
          feature: `prompt`, `chosen` and `rejected`.
          model: Of encoder-decoders in TRL; no effect.
        """
        del model
        return DPODataCollatorWithPadding(
            self.tokenizer,
            max_length=self.max_length,
            max_prompt_length=self.flat.max_prompt_length,
            label_pad_token_id=self.label_pad_token_id,
            truncation_mode=self.flat.truncation_mode,
        ).tokenize(feature)

    def concatenated_inputs(self, batch: Batch) -> Batch:
        """Chosen rows over rejected ones, in arrays (2B L) of one width.

        Args:
          batch: Of the collator.
        Returns:
          `concatenated_input_ids`, `concatenated_attention_mask`, `concatenated_labels`.
        """
        fills = {
            "input_ids": self.padding_value,
            "attention_mask": 0,
            "labels": self.label_pad_token_id,
        }
        found = {}
        for name, fill in fills.items():
            halves = [np.asarray(batch[f"{side}_{name}"]) for side in _SIDES]
            width = max(half.shape[1] for half in halves)
            padded = [pad_right(half.tolist(), pad_token_id=fill, width=width)[0] for half in halves]
            found[f"concatenated_{name}"] = np.concatenate([np.asarray(half) for half in padded])
        return found

    def concatenated_forward(
        self, model: Any, batch: Batch
    ) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
        """Log-probabilities of the completions, and logits.

        Args:
          model: The trainer's `model`; its `ref_model`, or None, is the reference.
          batch: Of the collator.
        Returns:
          Sums over the completions' tokens (B), chosen and rejected; logits (B L V), likewise.
        """
        rows, labels, mask = self._rows(batch)
        output = self._output(model, *rows)
        totals = completion_logprobs(logprobs_from_logits(output.logits[:, :-1], labels), mask)
        half = len(totals) // 2
        return totals[:half], totals[half:], output.logits[:half], output.logits[half:]

    def _rows(self, batch: Batch) -> tuple[tuple[np.ndarray, np.ndarray], jax.Array, jax.Array]:
        """(ids and mask of both sides, one over the other), the token after each column, and which are learned."""
        rows = self.concatenated_inputs(batch)
        labels = rows["concatenated_labels"][:, 1:]
        mask = labels != self.label_pad_token_id
        inputs = rows["concatenated_input_ids"], rows["concatenated_attention_mask"]
        return inputs, jnp.asarray(np.where(mask, labels, 0)), jnp.asarray(mask)

    @cached_property
    def _answers(self) -> TrainedModel:
        """One for all calls: it compiles once a shape."""
        return TrainedModel(self.native_dpo)

    def _output(self, model: Any, ids: Any, mask: Any) -> ModelOutput:
        """A forward pass of the policy, or of the reference."""
        answers = self._answers
        if model is self.model:
            return answers(ids, mask)
        reference = self.native_dpo.reference
        if reference is None:
            raise ValueError("The reference was let go of when it had scored the data: ask before `train`.")
        with answers.bound(reference.params(), reference.frozen):
            return answers(ids, mask)

    def compute_reference_log_probs(self, padded_batch: Batch) -> tuple[jax.Array, jax.Array]:
        """Sums (B) of the reference's log-probabilities, chosen and rejected.

        Args:
          padded_batch: Of the collator.
        """
        chosen, rejected, _, _ = self.concatenated_forward(self.ref_model, padded_batch)
        return chosen, rejected

    def dpo_loss(
        self,
        policy_chosen_logps: Any,
        policy_rejected_logps: Any,
        reference_chosen_logps: Any,
        reference_rejected_logps: Any,
        reference_free: bool | None = None,
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The configured losses of sums of log-probabilities.

        Losses that divide by lengths take the sums as they are: give means where means are wanted.

        Args:
          policy_chosen_logps: log π(y⁺|x) (B), in nats.
          policy_rejected_logps: log π(y⁻|x).
          reference_chosen_logps: log π_ref(y⁺|x).
          reference_rejected_logps: log π_ref(y⁻|x).
          reference_free: Default: the configuration's.
        Returns:
          Losses (B), and the rewards of chosen and rejected.
        """
        config, method = self.flat, self.native_dpo.method
        policy = [jnp.asarray(x, jnp.float32) for x in (policy_chosen_logps, policy_rejected_logps)]
        real = [jnp.asarray(x, jnp.float32) for x in (reference_chosen_logps, reference_rejected_logps)]
        free = config.reference_free if reference_free is None else reference_free
        reference = [jnp.zeros_like(x) for x in real] if free else real
        divergence, one = DIVERGENCES[config.f_divergence_type], jnp.ones_like(policy[0])
        scores = [
            divergence(now - ref, alpha=config.f_alpha_divergence_coef)
            for now, ref in zip(policy, reference, strict=True)
        ]
        pairs = Pairs(
            chosen=policy[0],
            rejected=policy[1],
            ref_chosen=reference[0],
            ref_rejected=reference[1],
            chosen_scores=scores[0],
            rejected_scores=scores[1],
            chosen_lengths=one,
            rejected_lengths=one,
            chosen_nll=-policy[0],
            pairs_per_token=jnp.float32(1.0),
            valid=one > 0,
        )
        settings = {name: vars(config)[name] for name in ("beta", "label_smoothing", "discopop_tau")}
        losses = sum(
            (w * LOSSES[name](pairs, settings) for name, w in method.terms), start=jnp.zeros_like(one)
        )
        rewards = [
            implicit_rewards(now, ref, beta=config.beta) for now, ref in zip(policy, real, strict=True)
        ]
        return losses, rewards[0], rewards[1]

    def get_batch_metrics(
        self, model: Any, batch: Batch, train_eval: Literal["train", "eval"] = "train"
    ) -> tuple[jax.Array, dict[str, float]]:
        """Mean loss of a batch, by every option of the configuration, and its metrics.

        Args:
          model: As for `concatenated_forward`.
          batch: Of the collator.
          train_eval: "eval" puts `eval_` before the names.
        """
        rows, labels, mask = self._rows(batch)
        logits, reference = (self._output(one, *rows).logits[:, :-1] for one in (model, self.ref_model))
        whole = Completion(
            ref_logprobs=logprobs_from_logits(reference, labels),
            mask=mask,
            **read_tokens(logits, labels)._asdict(),
        )
        half = len(labels) // 2
        chosen, rejected = (
            jax.tree.map(lambda x, p=part: x[p], whole) for part in (slice(half), slice(half, None))
        )
        out = configured_loss(self.native_dpo.method)(chosen, rejected, jnp.ones(half, bool))
        prefix = "eval_" if train_eval == "eval" else ""
        figures = finalize(out.metrics)
        return out.loss_sum / out.weight, {
            f"{prefix}{name}": value for name, value in figures.items() if name.startswith(_FIGURES)
        }

    get_batch_loss_metrics = get_batch_metrics

    def get_batch_samples(self, model: Any, batch: Batch) -> tuple[list[str], list[str]]:
        """What policy and reference write after the prompts of a batch.

        Args:
          model: The trainer's `model`.
          batch: Of the collator, with `prompt`.
        Returns:
          Prompts with completions, of the policy and of the reference.
        """
        del model
        prompts = list(batch["prompt"])
        native = self.native_dpo
        room = {"max_new_tokens": max(self.max_length - np.asarray(batch["prompt_input_ids"]).shape[1], 1)}
        written = native.generate(prompts, gen_kwargs=room)
        if native.reference is None:
            raise ValueError("The reference was let go of when it had scored the data: ask before `train`.")
        now = native.state
        try:
            native.state = replace(now, train=replace(now.train, params=native.reference.params()))
            of_reference = native.generate(prompts, gen_kwargs=room)
        finally:
            native.state = now
        return (
            [prompt + text for prompt, text in zip(prompts, written, strict=True)],
            [prompt + text for prompt, text in zip(prompts, of_reference, strict=True)],
        )

    def store_metrics(
        self, metrics: Mapping[str, float], train_eval: Literal["train", "eval"] = "train"
    ) -> None:
        """Keeps figures until `log` is called, which adds their means to its line.

        Args:
          metrics: Name → number.
          train_eval: Which kind of line they belong to; an evaluation's is told by a loss that begins with `eval_`.
        """
        for name, value in metrics.items():
            self._stored[train_eval][name].append(float(value))

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """One line more in `state.log_history`, with the means of what was stored.

        Args:
          logs: Name → number.
          start_time: Of transformers; no effect.
        """
        kind = "eval" if any(name.startswith("eval_") for name in logs) else "train"
        means = {name: float(np.mean(values)) for name, values in self._stored.pop(kind, {}).items()}
        super().log(logs | means, start_time)

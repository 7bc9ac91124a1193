# SPDX-License-Identifier: Apache-2.0
"""Losses that a subclass of a trainer of TRL's shape computes its own way, as what jrl's learners minimise.

`compute_loss(model, inputs)` and `dpo_loss(...)` are called while the update is traced, with jax arrays; what comes out
is differentiated. A loss is a mean over its minibatch, which holds whole rows of the data and no padding among them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from jrl.data.demonstrations import IGNORED_LABEL
from jrl.interop import checked_array, checked_scalar, traced, warn_ignored
from jrl.learners.accumulate import Loss
from jrl.learners.dpo import PairsLoss, configured_loss
from jrl.learners.dpo_config import DPOConfig
from jrl.losses.dpo import Completion, completion_logprobs
from jrl.losses.sft import TokenLoss, nll, sft_loss
from jrl.ops.alignment import next_predictions, next_tokens
from jrl.ops.logprobs import logprobs_from_logits
from jrl.ops.metrics import mean_metric
from jrl.ops.reductions import LossOut, loss_of_mean
from jrl.typing import ComparisonBatch, Metrics, Sequences

SIDES = ("chosen", "rejected")
_OPTIONS = ("output_attentions", "output_hidden_states", "return_dict", "return_loss", "use_cache")


@dataclass(frozen=True)
class TracedOutput:
    """Output of a model inside a loss: read by attribute, by name, or by place, as transformers' outputs.

    Attributes:
      logits: (B, L, V) of a language model, (B, 1) of a classifier.
      loss: Mean over the labels that are not −100; None without labels.
    """

    logits: Array
    loss: Array | None = None

    def __getitem__(self, key: str | int) -> Array:
        """Output by name, or by place among those there are, the loss first."""
        found: Mapping[str, Array] = {"logits": self.logits}
        if self.loss is not None:
            found = {"loss": self.loss, "logits": self.logits}
        return found[key] if isinstance(key, str) else list(found.values())[key]


class TracedModel:
    """The model inside a loss: its parameters are those that the loss is differentiated by.

    Args:
      logits: (ids, mask) → logits.
      handle: The trainer's, which knows everything else of the model.
      with_labels: Whether `labels` mean tokens to predict.
      beside: Further names of the inputs of a loss, which may be unpacked into the call as a whole.
    """

    training = True

    def __init__(
        self,
        logits: Callable[[Array, Array], Array],
        handle: Any,
        *,
        with_labels: bool,
        beside: Collection[str] = (),
    ) -> None:
        self._logits, self._handle, self._with_labels = logits, handle, with_labels
        self._known = {*_OPTIONS, *beside}

    @property
    def config(self) -> Any:
        """The transformers config."""
        return self._handle.config

    def __call__(
        self, input_ids: Any, attention_mask: Any = None, labels: Any = None, **options: Any
    ) -> TracedOutput:
        """A forward pass without dropout.

        Args:
          input_ids: Ids (B L).
          attention_mask: 1 on real tokens; default: all are.
          labels: Of a language model: ids, −100 where nothing is to be predicted.
          **options: Of transformers, without effect: `use_cache`, `return_dict` and their like.
        Raises:
          TypeError: On an argument that the model has no use for.
        """
        unknown = options.keys() - self._known
        if unknown:
            raise TypeError(
                f"the model inside `compute_loss` takes `input_ids`, `attention_mask` and `labels`, got "
                f"{sorted(unknown)}."
            )
        for name in ("output_attentions", "output_hidden_states"):
            if options.get(name):
                warn_ignored(f"model({name}=)", "the answer holds logits and loss")
        ids = jnp.asarray(input_ids, jnp.int32)
        mask = jnp.ones(ids.shape, bool) if attention_mask is None else jnp.asarray(attention_mask) != 0
        logits = self._logits(ids, mask)
        if labels is None:
            return TracedOutput(logits)
        if not self._with_labels:
            raise TypeError("the model inside `compute_loss` is a classifier and takes no `labels`.")
        return TracedOutput(logits, token_loss_of(logits, jnp.asarray(labels), nll))


def token_loss_of(logits: Array, labels: Array, token_loss: TokenLoss) -> Array:
    """Mean loss of the labels (B L) that are not −100, each predicted by the column before it."""
    targets = next_tokens(labels)
    real = targets != IGNORED_LABEL
    logprobs = logprobs_from_logits(next_predictions(logits), jnp.where(real, targets, 0))
    return sft_loss(logprobs, real, token_loss=token_loss).mean


def own_objective(
    owner: Any,
    model: TracedModel,
    inputs: dict[str, Any],
    weights: Bool[Array, "..."],
    loss_name: str,
    own: Any,
) -> Loss:
    """`owner.compute_loss` of one microbatch: (sum, weight, metrics).

    Args:
      owner: The trainer; inside the call its `model` is the traced one.
      model: What the loss calls.
      inputs: As TRL's collator makes them.
      weights: True on what the loss is a mean over: pairs, or learned tokens.
      loss_name: Of the loss among the metrics.
      own: (sum, weight, metrics) of jrl's own objective, of which the metrics beside the loss are shown.
    """
    name = f"{type(owner).__name__}.compute_loss"
    before, owner.model = owner.model, model
    try:
        found = traced(name, owner.compute_loss, model, inputs)
    finally:
        owner.model = before
    loss = checked_scalar(name, "the loss", found[0] if isinstance(found, tuple) else found)
    out = loss_of_mean(loss, {loss_name: loss}, weights)
    watched = {key: value for key, value in jax.lax.stop_gradient(own).metrics.items() if key != loss_name}
    return out._replace(metrics=watched | out.metrics)


def comparison_inputs(batch: ComparisonBatch) -> dict[str, Any]:
    """Pairs under the names of TRL 0.7.1 (one array a side) and of 0.28 (chosen over rejected)."""
    halves = {"chosen": batch.chosen, "rejected": batch.rejected}
    found: dict[str, Any] = {}
    for side, rows in halves.items():
        found[f"input_ids_{side}"] = rows.tokens
        found[f"attention_mask_{side}"] = rows.attention_mask.astype(jnp.int32)
    for name in ("input_ids", "attention_mask"):
        found[name] = jnp.concatenate([found[f"{name}_{side}"] for side in SIDES])
    return found | {"margin": batch.margins}


def token_inputs(batch: Sequences) -> dict[str, Any]:
    """Rows with `input_ids`, `attention_mask` and `labels` (B L), −100 where nothing is learned."""
    tokens, mask = batch.inputs.tokens, batch.inputs.attention_mask
    places = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :] - batch.starts[:, None] - 1
    inside = (places >= 0) & (places < batch.mask.shape[1])
    learned = jnp.take_along_axis(batch.mask, jnp.clip(places, 0, batch.mask.shape[1] - 1), axis=1) & inside
    return {
        "input_ids": tokens,
        "attention_mask": mask.astype(jnp.int32),
        "labels": jnp.where(learned, tokens, IGNORED_LABEL),
    }


def refuse_options(owner: Any, **options: Any) -> None:
    """Refuses what jrl's own loss alone does.

    Raises:
      ValueError: Naming the option that is set.
    """
    for name, value in options.items():
        if value:
            raise ValueError(
                f"`{name}` must not be set where `{type(owner).__name__}.compute_loss` is overridden, got {value!r}: "
                "it belongs to the configured loss."
            )


def own_pair_loss(owner: Any, method: Callable[[], DPOConfig]) -> PairsLoss:
    """`owner.dpo_loss` as the loss of a minibatch of pairs; metrics are jrl's, with the rewards that it returns."""
    name = f"{type(owner).__name__}.dpo_loss"

    def loss(
        chosen: Completion, rejected: Completion, valid: Array, *, pairs_per_token: Array | None = None
    ) -> LossOut:
        sides = [side._replace(mask=side.mask & valid[:, None]) for side in (chosen, rejected)]
        now = [completion_logprobs(side.logprobs, side.mask) for side in sides]
        reference = [completion_logprobs(side.ref_logprobs, side.mask) for side in sides]
        found = traced(name, owner.dpo_loss, *now, *jax.lax.stop_gradient(reference))
        if not isinstance(found, tuple | list) or len(found) != 3:
            raise ValueError(f"`{name}` must return (losses, chosen rewards, rejected rewards).")
        whats = ("losses", "chosen rewards", "rejected rewards")
        losses, good, bad = (
            checked_array(name, what, x, valid) for what, x in zip(whats, found, strict=True)
        )
        watched = configured_loss(method())(
            *jax.lax.stop_gradient((chosen, rejected)), valid, pairs_per_token=pairs_per_token
        )
        metrics: Metrics = watched.metrics | {
            "dpo/loss": mean_metric(losses, valid),
            "rewards/chosen": mean_metric(good, valid),
            "rewards/rejected": mean_metric(bad, valid),
            "rewards/margins": mean_metric(good - bad, valid),
            "rewards/accuracies": mean_metric(good > bad, valid),
        }
        losses = jnp.where(valid, losses, 0.0)
        weight = jnp.sum(valid, dtype=jnp.float32)
        return LossOut(jnp.sum(losses), weight, jax.lax.stop_gradient(metrics))

    return loss

# SPDX-License-Identifier: Apache-2.0
"""The parts of `PPOTrainer.step` one by one, for scripts with a loop of their own: `jrl.ops` on whole rows.

Arrays are (B, L − 1): column t speaks of the token after column t. They may be traced, so `jax.grad` goes through.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.batching import bucket_length
from jrl.forward import Reader
from jrl.interop import as_array
from jrl.learners.accumulate import Loss, Rows, accumulate, layout_rows, optimizer_step, take_rows
from jrl.learners.credit import KL_PENALTIES, generalized_advantages
from jrl.learners.forward import mask_rows
from jrl.learners.online import online_objective
from jrl.learners.ppo import PPOConfig as NativePPOConfig
from jrl.learners.ppo import ppo_policy_loss
from jrl.learners.state import TrainState
from jrl.losses.policy_gradient import Targets
from jrl.ops.logprobs import entropy_from_logits, kl_from_logits
from jrl.ops.masking import at_least_float32, masked_mean, masked_variance, zero_masked
from jrl.ops.policy_gradient import importance_ratio
from jrl.ops.rewards import place_scores
from jrl.placement import place_rows
from jrl.trl.module_surface import check_rows
from jrl.trl.ppo_config import PPOConfig
from jrl.trl.ppo_data import action_columns, model_inputs
from jrl.trl.ppo_native import KLControl, StepwisePPO
from jrl.trl.ppo_stats import OF_UPDATE, train_stats
from jrl.typing import Frozen, Metrics, ModelInputs, Params, Predictions, Scored, Sequences


def kl_penalty(logprobs: Any, ref_logprobs: Any, kind: str) -> Float[Array, "B L"]:
    """Distance from the reference at every column.

    Args:
      logprobs: Of the tokens (B, L − 1); for "full" of the whole vocabulary (B, L − 1, V).
      ref_logprobs: The reference's.
      kind: "kl", "abs", "mse" or "full".
    """
    ours, theirs = at_least_float32(as_array(logprobs)), at_least_float32(as_array(ref_logprobs))
    if kind == "full":
        return kl_from_logits(ours, theirs)
    return KL_PENALTIES[kind](Scored(ours, theirs, ours))


def token_rewards(
    scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any, *, kl_coef: float, kind: str
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """(rewards, rewards without the scores, KL), each at every column, masked or not.

    Args:
      scores: One a row, or dense ones (B, L − 1).
      logprobs: See `kl_penalty`.
      ref_logprobs: The same.
      masks: Not 0 on actions; a row's score goes to the last of them.
      kl_coef: Weight of the penalty.
      kind: Of the penalty.
    """
    mask = as_array(masks) != 0
    kl = kl_penalty(logprobs, ref_logprobs, kind)
    given = at_least_float32(as_array(scores))
    placed = place_scores(given, mask) if given.ndim == 1 else zero_masked(given, mask)
    non_score = -kl_coef * kl
    return non_score + placed, non_score, kl


def advantages_and_returns(
    values: Any, rewards: Any, mask: Any, *, gamma: float, lam: float, whiten_rewards: bool
) -> tuple[Float[Array, "B L"], Float[Array, "B L"], Float[Array, "B L"]]:
    """(values, whitened advantages, returns), all 0 where the mask is."""
    real = as_array(mask) != 0
    old, earned = zero_masked(as_array(values), real), zero_masked(as_array(rewards), real)
    estimate = generalized_advantages(gamma=gamma, gae_lambda=lam, whiten_rewards=whiten_rewards)
    credit = estimate(earned, old, real, None)
    assert credit.returns is not None, "GAE has returns"
    return old, credit.advantages, credit.returns


def minibatch_loss(
    old_logprobs: Any,
    values: Any,
    logits: Any,
    vpreds: Any,
    logprobs: Any,
    mask: Any,
    advantages: Any,
    returns: Any,
    config: NativePPOConfig,
) -> tuple[Float[Array, ""], Float[Array, ""], dict[str, Array]]:
    """(policy loss, weighed value loss, statistics) of one minibatch; arguments as `PPOTrainer.loss`."""
    real = as_array(mask) != 0
    old, old_values, new_values, new, earned, returned = (
        zero_masked(as_array(x), real) for x in (old_logprobs, values, vpreds, logprobs, advantages, returns)
    )
    now = Predictions(new, new_values, entropy_from_logits(as_array(logits)), lambda: as_array(logits))
    targets = Targets(old, old_values, earned, returned, real)
    found = ppo_policy_loss(config)(now, targets)
    # The objective is one sum. Its policy part is the same objective without the value loss.
    policy_loss = ppo_policy_loss(replace(config, vf_coef=0.0))(now, targets).mean
    total = found.mean
    stats = {ours: _mean(found.metrics[name]) for ours, name in OF_UPDATE.items()} | {
        "loss/total": total,
        "policy/advantages": earned,
        "policy/advantages_mean": masked_mean(earned, real),
        "policy/ratio": importance_ratio(new, old),
        "returns/mean": masked_mean(returned, real),
        "returns/var": masked_variance(returned, real),
        "val/mean": masked_mean(old_values, real),
        "val/var": masked_variance(old_values, real),
    }
    return policy_loss, total - policy_loss, jax.lax.stop_gradient(stats)


def _mean(metric: Any) -> Float[Array, ""]:
    """Value of a metric of a minibatch; 0 where nothing counts."""
    return metric.total / jnp.maximum(metric.weight, 1.0)


_Inputs = dict[str, np.ndarray]


class ManualSteps:
    """Steps of `step` for whole rows (B, L − 1): column t speaks of the token after column t.

    `compute_rewards`, `compute_advantages` and `loss` take and return arrays of any width, traced ones too: `step` asks
    a subclass that overrides them, and these are what its `super()` answers.

    Attributes:
      config: TRL's.
      native: jrl's own trainer.
      kl_ctl: Its `value` is the KL coefficient.
      ref_model: The reference; whatever else is given as a model means the policy.
    """

    config: PPOConfig
    native: StepwisePPO
    kl_ctl: KLControl
    ref_model: Any

    def prepare_model_inputs(self, queries: Sequence[Any], responses: Sequence[Any]) -> _Inputs:
        """Queries and responses as a model reads them, padded to the longest on the tokenizer's side."""
        tokenizer = self.native.tokenizer
        return model_inputs(
            queries,
            responses,
            pad_token_id=tokenizer.pad_token_id,
            padding_side=tokenizer.padding_side,
            decoder_start_token_id=self.native.lm.decoder_start_token_id,
        )

    def batched_forward_pass(
        self,
        model: Any,
        queries: Sequence[Any],
        responses: Sequence[Any],
        model_inputs: _Inputs,
        return_logits: bool = False,
        response_masks: Sequence[Any] | None = None,
    ) -> tuple[np.ndarray, np.ndarray | None, np.ndarray, np.ndarray]:
        """Log-probabilities, logits, values and action masks of whole rows.

        Args:
          model: `trainer.model` or `trainer.ref_model`.
          queries: Ids, one array a row.
          responses: Ids, one array a row.
          model_inputs: From `prepare_model_inputs`.
          return_logits: Whether to return logits (B, L − 1, V), which may be large.
          response_masks: One entry a response token, 0 on those that the policy did not choose.
        Returns:
          (log-probabilities, logits or None, values, masks). At mask 0 the figures are of prompt or padding; the
          reference has the values 0.
        """
        native = self.native
        params = native.ref_params if model is self.ref_model else native.params
        sequences, width = self._rows(model_inputs)
        with jax.set_mesh(native.mesh):
            placed = place_rows(native.mesh, sequences)
            found = _forward(native)(params, native.frozen, placed, return_logits)
        logprobs, logits, values = (None if x is None else np.asarray(x)[:, :width] for x in found)
        masks = action_columns(model_inputs, queries, responses, response_masks)
        assert logprobs is not None
        assert values is not None
        return logprobs, logits, values, masks

    def compute_rewards(
        self, scores: Any, logprobs: Any, ref_logprobs: Any, masks: Any
    ) -> tuple[jax.Array, jax.Array]:
        """Per-token rewards, and the same without the scores: minus the weighed KL penalty, at every column.

        Args:
          scores: One number a row, or dense ones like `masks`.
          logprobs: Under the policy; with `kl_penalty="full"` of the whole vocabulary.
          ref_logprobs: Under the reference.
          masks: 1 on actions; a row's score goes to the last of them.
        """
        rewards, non_score, _ = token_rewards(
            scores,
            logprobs,
            ref_logprobs,
            masks,
            kl_coef=self.kl_ctl.value,
            kind=self.config.kl_penalty,
        )
        return rewards, non_score

    def compute_advantages(
        self, values: Any, rewards: Any, mask: Any
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(values, whitened advantages, returns), 0 outside the mask. A hole in the mask costs no credit."""
        config = self.config
        return advantages_and_returns(
            values,
            rewards,
            mask,
            gamma=config.gamma,
            lam=config.lam,
            whiten_rewards=config.whiten_rewards,
        )

    def loss(
        self,
        old_logprobs: Any,
        values: Any,
        logits: Any,
        vpreds: Any,
        logprobs: Any,
        mask: Any,
        advantages: Any,
        returns: Any,
    ) -> tuple[Any, Any, dict[str, Any]]:
        """Policy loss, weighed value loss and flat statistics of a minibatch; jax arrays, so that a gradient exists.

        Args:
          old_logprobs: From before the first epoch.
          values: From before the first epoch.
          logits: Of now, (B, L − 1, V); for the entropy alone.
          vpreds: Values of now.
          logprobs: Of now.
          mask: 1 on actions.
          advantages: Whitened.
          returns: What values should be.
        """
        method = self.native.method
        return minibatch_loss(
            old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns, method
        )

    def train_minibatch(
        self,
        old_logprobs: Any,
        values: Any,
        logprobs: Any,
        logits: Any,
        vpreds: Any,
        mask: Any,
        advantages: Any,
        returns: Any,
        model_inputs: _Inputs | None = None,
    ) -> dict[str, Any]:
        """Takes an optimizer step on these rows, in forward passes of `mini_batch_size`.

        Arrays remember no graph: the forward pass is done again here, from `model_inputs`, and so `logprobs`, `logits`
        and `vpreds` are not read.

        Args:
          old_logprobs: From before the first epoch.
          values: From before the first epoch.
          logprobs: Not read.
          logits: Not read.
          vpreds: Not read.
          mask: 1 on actions.
          advantages: Whitened.
          returns: What values should be.
          model_inputs: From `prepare_model_inputs`, of the same rows.
        Returns:
          Statistics as `loss` names them.
        Raises:
          ValueError: If `model_inputs` are missing.
        """
        del logprobs, logits, vpreds
        if model_inputs is None:
            raise ValueError(
                "`model_inputs` must be given to `train_minibatch` (from `prepare_model_inputs`), got None: arrays "
                "hold no graph to go back through."
            )
        native = self.native
        sequences, width = self._rows(model_inputs)
        columns = [np.asarray(x, np.float32) for x in (old_logprobs, values, advantages, returns)]
        total = sequences.mask.shape[1]
        padded: list[Any] = [np.pad(x, ((0, 0), (0, total - width))) for x in columns]
        real: Any = np.pad(np.asarray(mask) != 0, ((0, 0), (0, total - width)))
        targets = Targets(padded[0], padded[1], padded[2], padded[3], real)
        with jax.set_mesh(native.mesh):
            rows = place_rows(native.mesh, (sequences._replace(mask=real), targets))
            state, metrics = _step(native)(native.state.train, native.frozen, *rows)
        native.state = replace(native.state, train=state)
        found = train_stats(metrics, targets, real, vf_coef=self.config.vf_coef)
        return {name: value[0] for name, value in found.items()}

    def _rows(self, inputs: _Inputs) -> tuple[Sequences, int]:
        """The rows with a window over all of their columns, padded to a width of few, and the true width − 1."""
        encoded = "decoder_input_ids" in inputs
        prefix = "decoder_" if encoded else ""
        tokens, mask = (
            np.asarray(inputs[name]) for name in (f"{prefix}input_ids", f"{prefix}attention_mask")
        )
        check_rows(self.native.lm, tokens, mask)
        width = tokens.shape[1]
        extra = ((0, 0), (0, max(min(bucket_length(width), self.native.lm.max_positions) - width, 0)))
        context: Any = (None, None)
        if encoded:
            context = inputs["input_ids"].astype(np.int32), inputs["attention_mask"] != 0
        padded: Any = np.pad(tokens, extra).astype(np.int32), np.pad(mask != 0, extra)
        starts: Any = np.zeros(len(tokens), np.int32)
        window: Any = np.ones((len(tokens), padded[0].shape[1] - 1), bool)
        rows = ModelInputs(padded[0], padded[1], None, context[0], context[1])
        return Sequences(rows, starts, window), width - 1


def _forward(native: StepwisePPO) -> Any:
    """The compiled forward pass of a trainer, made once."""
    if native.forward is None:
        native.forward = jax.jit(
            partial(_whole_rows, native), static_argnums=3, compiler_options=COMPILER_OPTIONS
        )
    return native.forward


def _whole_rows(
    native: StepwisePPO, params: Params, frozen: Frozen, sequences: Sequences, with_logits: bool
) -> tuple[Any, Any, Any]:
    policy = native.lenient_policy
    trunk = policy.trunk(frozen, sequences.inputs)
    read = Reader(policy, chunk_bytes=native.config.train.logprob_chunk_bytes)
    now = read(params, frozen, sequences, trunk=trunk)
    logits = now.logits()[..., : native.lm.vocab_size] if with_logits else None
    # A reference has no value head.
    values = jnp.zeros_like(now.logprobs) if now.values is None else now.values
    return now.logprobs, logits, values


def _step(native: StepwisePPO) -> Any:
    """The compiled optimizer step of a trainer, made once."""
    if native.single_step is None:
        native.single_step = jax.jit(partial(_one_step, native), compiler_options=COMPILER_OPTIONS)
    return native.single_step


def _one_step(
    native: StepwisePPO, state: TrainState, frozen: Frozen, sequences: Sequences, targets: Targets
) -> tuple[TrainState, Metrics]:
    policy, train = native.lenient_policy, native.config.train
    count = sequences.starts.shape[0]
    rows = min(train.rows_per_pass, count)
    batch = -(-count // rows) * rows
    laid_out = layout_rows(jnp.arange(count), batch_size=batch, minibatch_size=rows)
    microbatches = Rows(*(x[0] for x in laid_out))

    def objective(params: Params, rows: Rows) -> Loss:
        taken, wanted = take_rows((sequences, targets), rows.ids)
        taken = mask_rows(taken, rows.valid)
        return online_objective(
            Reader(policy, chunk_bytes=train.logprob_chunk_bytes),
            params,
            frozen,
            taken,
            wanted,
            loss=native.recipe.loss,
            prefix=native.recipe.prefix,
            trunk=policy.trunk(frozen, taken.inputs),
            keep_ratios=True,
        )

    return optimizer_step(state, native.optimizer, accumulate(objective, state.params, microbatches))

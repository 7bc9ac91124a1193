# SPDX-License-Identifier: Apache-2.0
"""Direct preference optimisation.

Reference: Rafailov et al. 2023, arXiv:2305.18290; a reference that follows the policy: Gorbatovski et al. 2024
(TR-DPO), arXiv:2404.09656.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from jrl.forward import Reader
from jrl.learners.accumulate import (
    Loss,
    Rows,
    accumulate,
    batch_in_order,
    microbatch_key,
    optimizer_step,
    split_rows,
    take_rows,
)
from jrl.learners.balance import balanced, load_metric
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.forward import interleave, map_rows, separate
from jrl.learners.state import TrainState, init_train_state
from jrl.losses.dpo import DIVERGENCES, LOSSES, Completion, dpo_loss
from jrl.losses.dpo_pairs import pairs_per_chosen_token
from jrl.mesh import hold_split
from jrl.ops.masking import zero_masked
from jrl.ops.reductions import LossOut
from jrl.ops.token_reads import read_tokens
from jrl.typing import Frozen, Mean, Metrics, Params, PreferenceBatch, PRNGKey, Update


@struct.dataclass
class DPOState:
    """All that DPO carries from one step to the next.

    Attributes:
      train: Parameters and optimizer.
      ref_params: The reference's own parameters where it follows the policy; None where it stands still.
    """

    train: TrainState
    ref_params: Params | None


def init_dpo_state(
    params: Params, optimizer: optax.GradientTransformation, ref_params: Params | None = None
) -> DPOState:
    """State before the first step.

    Args:
      params: What trains.
      optimizer: From `make_optimizer`.
      ref_params: Of a reference that is to follow the policy: part of the tree of `params`, in buffers of its own.
    """
    return DPOState(train=init_train_state(params, optimizer), ref_params=ref_params)


def reference_logprobs(
    reader: Reader,
    params: Params,
    frozen: Frozen,
    batch: PreferenceBatch,
    *,
    minibatch_size: int,
) -> tuple[Float[Array, "B T"], Float[Array, "B T"]]:
    """Log-probabilities of both completions under the reference: log π_ref per token, 0 at mask 0.

    Args:
      reader: The reference, at temperature 1.
      params: Its own parameters: empty where the frozen model alone is the reference.
      frozen: The rest.
      batch: Of which the reference's log-probabilities are not read.
      minibatch_size: Pairs in one forward pass.
    """

    def score(ids: Array) -> tuple[Array, Array]:
        sequences = interleave(*take_rows((batch.chosen, batch.rejected), ids))
        found = reader(params, frozen, sequences)
        return separate(zero_masked(found.logprobs, sequences.mask))

    return map_rows(score, batch.valid.shape[0], minibatch_size=minibatch_size)


PairsLoss = Callable[..., LossOut]
"""(chosen, rejected, valid, *, pairs_per_token) → (sum, weight, metrics), as `jrl.losses.dpo.dpo_loss`."""


def configured_loss(config: DPOConfig) -> PairsLoss:
    """`jrl.losses.dpo.dpo_loss` with all options that the configuration has."""
    return partial(
        dpo_loss,
        terms=config.terms,
        beta=config.beta,
        label_smoothing=config.label_smoothing,
        discopop_tau=config.discopop_tau,
        divergence=DIVERGENCES[config.f_divergence_type],
        alpha=config.f_alpha_divergence_coef,
        reference_free=config.reference_free,
        ld_alpha=config.ld_alpha,
        use_weighting=config.use_weighting,
    )


def dpo_objective(
    reader: Reader,
    params: Params,
    frozen: Frozen,
    batch: PreferenceBatch,
    *,
    config: DPOConfig,
    pairs_per_token: Float[Array, ""] | None = None,
    dropout_key: PRNGKey | None = None,
    loss: PairsLoss | None = None,
    with_load: bool = False,
) -> LossOut:
    """The loss of a batch of pairs, to be differentiated with respect to `params`.

    Args:
      reader: The model.
      params: Its trainable parameters.
      frozen: The rest.
      batch: Pairs, with the reference's log-probabilities.
      config: Of the method.
      pairs_per_token: Of the optimizer batch of which these rows are a part; None: they are the whole.
      dropout_key: None: the pass is deterministic.
      loss: None: the configured one.
      with_load: Whether the metrics hold the load of the experts, for `accumulate`.
    Returns:
      The sum over pairs, their number, and the metrics; see `jrl.losses.dpo.dpo_loss`.
    """
    sequences = interleave(batch.chosen, batch.rejected)
    found, load = reader.read(read_tokens, params, frozen, sequences, dropout_key=dropout_key)
    chosen, rejected = separate(found)
    out = (loss or configured_loss(config))(
        Completion(ref_logprobs=batch.ref_chosen_logprobs, mask=batch.chosen.mask, **chosen._asdict()),
        Completion(ref_logprobs=batch.ref_rejected_logprobs, mask=batch.rejected.mask, **rejected._asdict()),
        batch.valid,
        pairs_per_token=pairs_per_token,
    )
    if not with_load:
        return out
    counted = sequences.mask & jnp.repeat(batch.valid, 2)[:, None]
    return out._replace(metrics=out.metrics | load_metric(load, counted))


def make_dpo_update(
    reader: Reader,
    optimizer: optax.GradientTransformation,
    config: DPOConfig,
    *,
    batch_size: int,
    minibatch_size: int,
    loss: PairsLoss | None = None,
) -> Update:
    """Builds DPO's update: an optimizer step on a batch of pairs, with the moves of a synced reference.

        ref ← α·θ + (1 − α)·ref    after step n, if n is a multiple of `ref_model_sync_steps`

    Losses are averaged over the pairs of the whole optimizer batch, `sft` over its chosen tokens.

    Args:
      reader: The model.
      optimizer: From `make_optimizer`.
      config: Of the method.
      batch_size: Pairs of an optimizer step, over all devices.
      minibatch_size: Pairs in one forward pass, which reads two rows of each; must divide `batch_size`.
      loss: Of a minibatch; None: the configured one.
    Returns:
      `(DPOState, frozen, PreferenceBatch, key) -> (DPOState, metrics)`; one compiled call. The batch holds at most
      `batch_size` pairs; the key is used for dropout, where that is on.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`, or splits it under a loss that compares the pairs of
        a batch; on a call, if the batch has more rows.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    whole = [name for name in config.loss_type if loss is None and LOSSES[name].whole_batch]
    if whole and minibatch_size < batch_size:
        raise ValueError(
            f"`minibatch_size` must be `batch_size` = {batch_size} with the loss {whole[0]!r}, which compares all "
            f"pairs of an optimizer batch, got {minibatch_size}."
        )

    def update(
        state: DPOState, frozen: Frozen, batch: PreferenceBatch, key: PRNGKey
    ) -> tuple[DPOState, Metrics]:
        num_rows = batch.valid.shape[0]
        microbatches = batch_in_order(num_rows, batch_size=batch_size, minibatch_size=minibatch_size)
        pairs_per_token = pairs_per_chosen_token(batch.chosen.mask, batch.valid)

        def objective(params: Params, rows: Rows) -> Loss:
            taken = take_rows(batch, rows.ids)
            return dpo_objective(
                reader,
                params,
                hold_split(frozen, rows),
                taken._replace(valid=taken.valid & rows.valid),
                config=config,
                pairs_per_token=pairs_per_token,
                dropout_key=None if config.disable_dropout else microbatch_key(key, rows),
                loss=loss,
                with_load=config.router_aux_loss_coef > 0,
            )

        params, coef = state.train.params, config.router_aux_loss_coef
        whole = balanced(objective, params, microbatches, coef=coef)
        train, metrics = optimizer_step(state.train, optimizer, accumulate(whole, params, *microbatches))
        if state.ref_params is None:
            return DPOState(train=train, ref_params=None), metrics
        due = train.step % config.ref_model_sync_steps == 0
        ref_params = jax.lax.cond(
            due,
            lambda now, ref: optax.incremental_update(now, ref, config.ref_model_mixup_alpha),
            lambda now, ref: ref,
            {name: train.params[name] for name in state.ref_params},
            state.ref_params,
        )
        metrics["dpo/ref_sync"] = Mean(due.astype(jnp.float32), jnp.ones((), jnp.float32))
        return DPOState(train=train, ref_params=ref_params), metrics

    return update

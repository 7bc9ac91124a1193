# SPDX-License-Identifier: Apache-2.0
"""A reward model from pairs of texts: one optimizer step on a batch of comparisons."""

from __future__ import annotations

import optax

from jrl.learners.accumulate import (
    Loss,
    OwnObjective,
    Rows,
    accumulate,
    batch_in_order,
    microbatch_key,
    optimizer_step,
    split_rows,
    take_rows,
)
from jrl.learners.forward import interleave, separate
from jrl.learners.reward_model_config import RewardConfig
from jrl.learners.state import TrainState
from jrl.losses.reward_model import reward_model_loss
from jrl.mesh import hold_split
from jrl.typing import ComparisonBatch, Frozen, Metrics, Params, PRNGKey, Scorer, Update


def reward_model_objective(
    scorer: Scorer,
    params: Params,
    frozen: Frozen,
    batch: ComparisonBatch,
    *,
    center_coef: float,
    dropout_key: PRNGKey | None = None,
) -> Loss:
    """The loss of some comparisons, to be differentiated with respect to `params`: (sum, weight, metrics).

    Both halves go through the model in one pass.

    Args:
      scorer: The model.
      params: Its trainable parameters.
      frozen: The rest.
      batch: Comparisons.
      center_coef: Weight of the centering term.
      dropout_key: None: the pass is deterministic.
    """
    rows = interleave(batch.chosen, batch.rejected)
    chosen, rejected = separate(scorer(params, frozen, rows, dropout_key))
    return reward_model_loss(chosen, rejected, batch.margins, batch.valid, center_coef=center_coef)


def make_reward_model_update(
    scorer: Scorer,
    optimizer: optax.GradientTransformation,
    config: RewardConfig,
    *,
    batch_size: int,
    minibatch_size: int,
    objective: OwnObjective[ComparisonBatch] | None = None,
) -> Update:
    """Builds the reward model's update: an optimizer step on a batch of comparisons.

        ℓ = Σ_pairs [ −log σ(r⁺ − r⁻ − m) + c·(r⁺ + r⁻)² ] / number of pairs, over the whole optimizer batch

    Args:
      scorer: The model.
      optimizer: From `make_optimizer`.
      config: Its centering coefficient and whether dropout is off are read.
      batch_size: Pairs of an optimizer step, over all devices.
      minibatch_size: Pairs in one forward pass; must divide `batch_size`.
      objective: What is minimised instead; it gets no padding, so every pair of a batch must be valid.
    Returns:
      `(TrainState, frozen, ComparisonBatch, key) -> (TrainState, metrics)`; one compiled call. The batch holds at most
      `batch_size` pairs; the key is that of dropout, where there is any.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`; on a call, if the batch has more pairs.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    center_coef = config.center_rewards_coefficient or 0.0
    has_dropout = not config.disable_dropout

    def update(
        state: TrainState, frozen: Frozen, batch: ComparisonBatch, key: PRNGKey
    ) -> tuple[TrainState, Metrics]:
        num_rows = batch.valid.shape[0]
        microbatches = batch_in_order(
            num_rows,
            batch_size=batch_size,
            minibatch_size=minibatch_size,
            unit="pairs",
            padded=objective is None,
        )

        def loss(params: Params, rows: Rows) -> Loss:
            taken = take_rows(batch, rows.ids)
            if objective is not None:
                return objective(params, hold_split(frozen, rows), taken)
            return reward_model_objective(
                scorer,
                params,
                hold_split(frozen, rows),
                taken._replace(valid=taken.valid & rows.valid),
                center_coef=center_coef,
                dropout_key=microbatch_key(key, rows) if has_dropout else None,
            )

        return optimizer_step(state, optimizer, accumulate(loss, state.params, *microbatches))

    return update

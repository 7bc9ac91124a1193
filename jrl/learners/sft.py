# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax

from jrl.learners.accumulate import Loss, Rows, layout_rows, optimizer_step, split_rows, take_rows
from jrl.learners.config import MethodConfig
from jrl.learners.forward import mask_rows
from jrl.learners.state import TrainState
from jrl.losses.sft import sft_loss
from jrl.ops.forward import window_features, window_logprobs
from jrl.typing import Frozen, Metrics, Params, PolicyFns, PRNGKey, Sequences, Update


@dataclass(kw_only=True)
class SFTConfig(MethodConfig):
    """Supervised fine-tuning on demonstrated completions; `gen_kwargs` is how evaluation samples."""

    name: str = "SFTConfig"


def sft_objective(
    policy: PolicyFns, params: Params, frozen: Frozen, sequences: Sequences, *, logprob_chunk_bytes: int
) -> Loss:
    """Maximum likelihood of the targets, to be differentiated with respect to `params`: (sum, weight, metrics).

    Args:
      policy: The model.
      params: Its trainable parameters.
      frozen: The rest.
      sequences: Rows, and the mask of what is learned.
      logprob_chunk_bytes: Most bytes of logits held at a time.
    """
    trunk = policy.trunk(frozen, sequences.inputs)
    features = window_features(policy, params, frozen, trunk, sequences)
    scored = window_logprobs(
        policy,
        params,
        frozen,
        features.policy,
        sequences,
        temperature=1.0,
        chunk_bytes=logprob_chunk_bytes,
        with_entropy=False,
    )
    return sft_loss(scored.logprobs, sequences.mask)


def make_sft_update(
    policy: PolicyFns,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    minibatch_size: int,
    logprob_chunk_bytes: int,
) -> Update:
    """One optimizer step of maximum likelihood on the batch's targets.

        ℓ = −Σ_t m_t log π(a_t | s_t) / Σ_t m_t,  the sums over the whole optimizer batch

    Dropout is off, as everywhere in jrl: the model that is evaluated is the model that is trained.

    Args:
      policy: The model.
      optimizer: From `make_optimizer`.
      batch_size: Rows of an optimizer step, over all devices.
      minibatch_size: Rows in one forward pass; must divide `batch_size`.
      logprob_chunk_bytes: Most bytes of logits held at a time.
    Returns:
      `(TrainState, frozen, Sequences, key) -> (TrainState, metrics)`; one compiled call. The batch holds at most
      `batch_size` rows; the key is not used, since nothing is drawn.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`; on a call, if the batch has more rows.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)

    def update(
        state: TrainState, frozen: Frozen, batch: Sequences, key: PRNGKey
    ) -> tuple[TrainState, Metrics]:
        del key
        num_rows = batch.mask.shape[0]
        if num_rows > batch_size:
            raise ValueError(f"`batch` must have at most `batch_size` = {batch_size} rows, got {num_rows}.")

        def objective(params: Params, rows: Rows) -> Loss:
            sequences = mask_rows(take_rows(batch, rows.ids), rows.valid)
            return sft_objective(policy, params, frozen, sequences, logprob_chunk_bytes=logprob_chunk_bytes)

        order = jnp.arange(num_rows, dtype=jnp.int32)
        layout = layout_rows(order, batch_size=batch_size, minibatch_size=minibatch_size)
        return optimizer_step(state, optimizer, objective, jax.tree.map(lambda x: x[0], layout))

    return update

# SPDX-License-Identifier: Apache-2.0
"""Supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass

import optax
from jaxtyping import Array, Float, Int

from jrl.forward import Reader
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
from jrl.learners.balance import balanced, load_metric
from jrl.learners.config import LanguageConfig, check_fields
from jrl.learners.forward import mask_rows
from jrl.learners.state import TrainState
from jrl.losses.sft import LOSSES, TokenLoss, nll, sft_loss
from jrl.mesh import hold_split
from jrl.ops.metrics import mean_metric
from jrl.ops.token_reads import read_tokens
from jrl.typing import Frozen, Metrics, Params, PRNGKey, Sequences, Update

PACKING_STRATEGIES = ("bfd", "bfd_split", "wrapped")


@dataclass(kw_only=True)
class SFTConfig(LanguageConfig):
    """Supervised fine-tuning on demonstrated completions; `gen_kwargs` is how evaluation samples.

    Attributes:
      loss_type: "nll", or "dft", which weighs each token's by its own probability (Wu et al. 2025, arXiv:2508.05629).
      packing: Whether several samples share a row of `train.seq_length` tokens; nothing attends across them.
      packing_strategy: "bfd" (best fit, longest first; longer samples are cut), "bfd_split" (the same, longer samples
        are continued in a row of their own) or "wrapped" (one after the other, cut wherever a row is full).
      eval_packing: The same for the evaluation samples; None: as `packing`.
      completion_only_loss: Whether prompts are left out of the loss; None: where samples have prompt and completion.
      assistant_only_loss: Whether only what assistants say is learned; needs messages and a template that marks it.
      neftune_noise_alpha: α of uniform noise on the embeddings in training (Jain et al. 2023, arXiv:2310.05914); None:
        none.
      disable_dropout: Whether the forward pass is deterministic in training, NEFTune's noise apart.
      best_share: Share of episodes that is learned, those of highest return: below 1 it is filtered cloning.
      context_turns: Most turns of an episode before the one that is learned; None: as many as fit.
      keep_prompt: Whether rows that begin later than their episode begin with its prompt all the same.
    """

    name: str = "SFTConfig"
    loss_type: str = "nll"
    packing: bool = False
    packing_strategy: str = "bfd"
    eval_packing: bool | None = None
    completion_only_loss: bool | None = None
    assistant_only_loss: bool = False
    neftune_noise_alpha: float | None = None
    disable_dropout: bool = True
    best_share: float = 1.0
    context_turns: int | None = None
    keep_prompt: bool = False

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        alpha = self.neftune_noise_alpha
        check_fields(
            self,
            ("loss_type", self.loss_type in LOSSES, f"one of {tuple(LOSSES)}"),
            ("packing_strategy", self.packing_strategy in PACKING_STRATEGIES, f"one of {PACKING_STRATEGIES}"),
            ("neftune_noise_alpha", alpha is None or alpha > 0, "positive, or None"),
            ("best_share", 0 < self.best_share <= 1, "in (0, 1]"),
            ("context_turns", self.context_turns is None or self.context_turns >= 0, "at least 0, or None"),
        )


def sft_objective(
    reader: Reader,
    params: Params,
    frozen: Frozen,
    sequences: Sequences,
    *,
    token_loss: TokenLoss = nll,
    dropout_key: PRNGKey | None = None,
    with_load: bool = False,
) -> Loss:
    """The loss of the targets, to be differentiated with respect to `params`: (sum, weight, metrics).

    Args:
      reader: The model.
      params: Its trainable parameters.
      frozen: The rest.
      sequences: Rows, and the mask of what is learned.
      token_loss: One of `jrl.losses.sft.LOSSES`.
      dropout_key: None: the pass is deterministic.
      with_load: Whether the metrics hold the load of the experts, for `accumulate`.
    """

    def read(logits: Float[Array, "b t V"], actions: Int[Array, "b t"]) -> tuple[Array, Array, Array]:
        found = read_tokens(logits, actions)
        return found.logprobs, found.entropy, found.is_top

    found, load = reader.read(read, params, frozen, sequences, dropout_key=dropout_key)
    logprobs, entropy, is_top = found
    out = sft_loss(logprobs, sequences.mask, token_loss=token_loss)
    watched: Metrics = {
        "sft/entropy": mean_metric(entropy, sequences.mask),
        "sft/token_accuracy": mean_metric(is_top, sequences.mask),
    }
    if with_load:
        watched |= load_metric(load, sequences.mask)
    return out._replace(metrics=out.metrics | watched)


def make_sft_update(
    reader: Reader,
    optimizer: optax.GradientTransformation,
    *,
    batch_size: int,
    minibatch_size: int,
    token_loss: TokenLoss = nll,
    dropout: bool = False,
    noise: bool = False,
    objective: OwnObjective[Sequences] | None = None,
    balance_coef: float = 0.0,
) -> Update:
    """Builds the supervised update: an optimizer step of maximum likelihood on the batch's targets.

        L = Σ_t m_t ℓ_t / Σ_t m_t,  the sums over the whole optimizer batch

    By default nothing is drawn: the model that is evaluated is the model that is trained.

    Args:
      reader: The model.
      optimizer: From `make_optimizer`.
      batch_size: Rows of an optimizer step, over all devices.
      minibatch_size: Rows in one forward pass; must divide `batch_size`.
      token_loss: ℓ, one of `jrl.losses.sft.LOSSES`.
      dropout: Whether the model's dropout is on; its masks then depend on how a batch is cut into microbatches.
      noise: Whether the policy puts noise on its embeddings; a row's does not depend on that.
      objective: What is minimised instead; it gets no padding, so every row of a batch must have targets.
      balance_coef: Weight of the loss that balances experts, for a policy that counts them.
    Returns:
      `(TrainState, frozen, Sequences, key) -> (TrainState, metrics)`; one compiled call. The batch holds at most
      `batch_size` rows; the key is used for dropout and noise alone.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`; on a call, if the batch has more rows.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)

    def key_of(key: PRNGKey, rows: Rows) -> PRNGKey | None:
        if dropout:
            return microbatch_key(key, rows)
        return key if noise else None

    def update(
        state: TrainState, frozen: Frozen, batch: Sequences, key: PRNGKey
    ) -> tuple[TrainState, Metrics]:
        num_rows = batch.mask.shape[0]
        microbatches = batch_in_order(
            num_rows,
            batch_size=batch_size,
            minibatch_size=minibatch_size,
            padded=objective is None,
        )

        def loss(params: Params, rows: Rows) -> Loss:
            if objective is not None:
                return objective(params, hold_split(frozen, rows), take_rows(batch, rows.ids))
            return sft_objective(
                reader,
                params,
                hold_split(frozen, rows),
                mask_rows(take_rows(batch, rows.ids), rows.valid),
                token_loss=token_loss,
                dropout_key=key_of(key, rows),
                with_load=balance_coef > 0,
            )

        whole = balanced(loss, state.params, microbatches, coef=balance_coef)
        return optimizer_step(state, optimizer, accumulate(whole, state.params, *microbatches))

    return update

# SPDX-License-Identifier: Apache-2.0
"""Sections of trlX v0.2, with their constructors; `TRLConfig` translates them into the present six sections."""

from __future__ import annotations

from jrl.trlx.signatures import OldSection, takes

PPO_ARGUMENTS = (
    "name",
    "ppo_epochs",
    "num_rollouts",
    "chunk_size",
    "init_kl_coef",
    "target",
    "horizon",
    "gamma",
    "lam",
    "cliprange",
    "cliprange_value",
    "vf_coef",
)
"""What PPO's constructor begins with in every release."""


@takes("model_path", "tokenizer_path", "model_type", num_layers_unfrozen=-1)
class OldModelConfig(OldSection):
    """Model, tokenizer and algorithm in one section."""


@takes(
    "total_steps",
    "seq_length",
    "epochs",
    "batch_size",
    "lr_ramp_steps",
    "lr_decay_steps",
    "weight_decay",
    "learning_rate_init",
    "learning_rate_target",
    "opt_betas",
    "checkpoint_interval",
    "eval_interval",
    "pipeline",
    "orchestrator",
    checkpoint_dir="ckpts",
    project_name="trlx",
    seed=1000,
)
class OldTrainConfig(OldSection):
    """The run with its optimizer and learning rates."""


@takes(*PPO_ARGUMENTS, "gen_kwargs")
class OldPPOConfig(OldSection):
    """PPO before scores were scaled or clipped."""


@takes(
    "name",
    "tau",
    "gamma",
    "cql_scale",
    "awac_scale",
    "alpha",
    "steps_for_target_q_sync",
    "betas",
    "two_qs",
)
class OldILQLConfig(OldSection):
    """ILQL before it had `gen_kwargs`: `betas` weigh Q − V in sampling."""

# SPDX-License-Identifier: Apache-2.0
"""DPO's section of a configuration."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from jrl.learners.config import LanguageConfig, check_fields
from jrl.losses.dpo import DIVERGENCES, LOSSES
from jrl.typing import TRUNCATION_MODES


@dataclass(kw_only=True)
class DPOConfig(LanguageConfig):
    """Direct preference optimisation; `gen_kwargs` is how evaluation samples where it is given prompts.

    Attributes:
      beta: β of the implicit reward β·log(π/π_ref); the larger, the closer the policy stays to the reference.
      loss_type: Names of `jrl.losses.dpo.LOSSES`; several are added up.
      loss_weights: Their weights; None: 1 each.
      label_smoothing: ε, the share of pairs taken to be labelled the wrong way round, in [0, 0.5).
      reference_free: Takes the reference to be uniform in the losses; metrics keep the real one.
      f_divergence_type: What the log-ratios become before the losses; a name of `jrl.losses.dpo.DIVERGENCES`.
      f_alpha_divergence_coef: α of the α-divergence, not 1.
      ld_alpha: Weight, in [0, 1], of the tokens of a completion beyond the length of the shorter one of its pair
        (LD-DPO); None: 1.
      use_weighting: Weighs each pair by how likely its completions are under the policy (WPO).
      discopop_tau: Temperature of the discovered loss.
      precompute_ref_log_probs: Whether the reference scores the data once, before training; None: where it is frozen.
      precompute_ref_batch_size: Pairs of one such scoring call; None: `train.batch_size`.
      ref_model_path: Directory or hub id of a reference of its own; None: the policy as it starts, without its
        adapter where it has one.
      sync_ref_model: Moves the reference towards the policy as training goes on (TR-DPO).
      ref_model_mixup_alpha: α of ref ← α·policy + (1 − α)·ref.
      ref_model_sync_steps: Optimizer steps between two such moves.
      max_prompt_length: Most tokens of a prompt; None: no limit of its own.
      max_completion_length: Most tokens of a completion; None: no limit of its own.
      truncation_mode: Which end of a pair over `train.seq_length` is kept.
      disable_dropout: Whether the policy's forward pass is deterministic in training; the reference's always is.
    """

    name: str = "DPOConfig"
    beta: float = 0.1
    loss_type: list[str] = field(default_factory=lambda: ["sigmoid"])
    loss_weights: list[float] | None = None
    label_smoothing: float = 0.0
    reference_free: bool = False
    f_divergence_type: str = "reverse_kl"
    f_alpha_divergence_coef: float = 0.5
    ld_alpha: float | None = None
    use_weighting: bool = False
    discopop_tau: float = 0.05
    precompute_ref_log_probs: bool | None = None
    precompute_ref_batch_size: int | None = None
    ref_model_path: Any = None
    sync_ref_model: bool = False
    ref_model_mixup_alpha: float = 0.6
    ref_model_sync_steps: int = 512
    max_prompt_length: int | None = None
    max_completion_length: int | None = None
    truncation_mode: str = "keep_start"
    disable_dropout: bool = True

    @property
    def terms(self) -> list[tuple[str, float]]:
        """(name, weight) of each loss."""
        weights = self.loss_weights if self.loss_weights is not None else [1.0] * len(self.loss_type)
        return list(zip(self.loss_type, weights, strict=True))

    @property
    def asks_reference(self) -> bool:
        """True where every step asks the reference; else it is asked once, before training, and then freed."""
        asked = self.precompute_ref_log_probs
        return self.sync_ref_model if asked is None else not asked

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        weights = self.loss_weights
        known = [LOSSES[name] for name in self.loss_type if name in LOSSES]
        check_fields(
            self,
            ("beta", self.beta > 0, "positive"),
            (
                "loss_type",
                bool(self.loss_type) and set(self.loss_type) <= set(LOSSES),
                f"a list of names among {sorted(LOSSES)}",
            ),
            (
                "loss_weights",
                weights is None or len(weights) == len(self.loss_type),
                f"one number for each of {self.loss_type}, or None",
            ),
            ("label_smoothing", 0 <= self.label_smoothing < 0.5, "in [0, 0.5)"),
            (
                "label_smoothing",
                self.label_smoothing > 0 or "exo_pair" not in self.loss_type,
                "above 0 with the loss 'exo_pair' (its paper takes 0.001)",
            ),
            (
                "use_weighting",
                not (self.use_weighting and any(loss.whole_batch for loss in known)),
                "False with losses that compare the pairs of a batch: they leave no pair's own to weigh",
            ),
            (
                "f_divergence_type",
                self.f_divergence_type in DIVERGENCES,
                f"one of {sorted(DIVERGENCES)}",
            ),
            (
                "f_divergence_type",
                self.f_divergence_type == "reverse_kl" or all(loss.takes_divergence for loss in known),
                f"'reverse_kl' with {self.loss_type}: only losses of the difference of both scores have other forms",
            ),
            ("f_alpha_divergence_coef", self.f_alpha_divergence_coef != 1, "other than 1"),
            ("ld_alpha", self.ld_alpha is None or 0 <= self.ld_alpha <= 1, "in [0, 1], or None"),
            ("discopop_tau", self.discopop_tau > 0, "positive"),
            ("ref_model_mixup_alpha", 0 <= self.ref_model_mixup_alpha <= 1, "in [0, 1]"),
            ("ref_model_sync_steps", self.ref_model_sync_steps >= 1, "at least 1"),
            ("truncation_mode", self.truncation_mode in TRUNCATION_MODES, f"one of {TRUNCATION_MODES}"),
            (
                "precompute_ref_log_probs",
                not (self.precompute_ref_log_probs and self.sync_ref_model),
                "False or None where `sync_ref_model` moves the reference",
            ),
        )
        for name, value in (
            ("max_prompt_length", self.max_prompt_length),
            ("max_completion_length", self.max_completion_length),
            ("precompute_ref_batch_size", self.precompute_ref_batch_size),
        ):
            check_fields(self, (name, value is None or value >= 1, "at least 1, or None"))

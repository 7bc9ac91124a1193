# SPDX-License-Identifier: Apache-2.0
"""The mathematics: pure functions of arrays, callable from a notebook with nothing else of jrl."""

from jrl.ops.alignment import (
    join,
    length_mask,
    states_at,
    targets_at,
    window_columns,
    window_states,
    window_targets,
)
from jrl.ops.chunks import map_positions, positions_of
from jrl.ops.ddim import DDIMStep, ddim_logprob, ddim_mean, ddim_step, step_of_timesteps, steps_of_rows
from jrl.ops.denoising import guided_output
from jrl.ops.gaussian import gaussian_kl, gaussian_logprob
from jrl.ops.kl import adaptive_kl_coef, kl_k1, kl_k2, kl_k3, kl_k3_straight_through, off_policy_kl
from jrl.ops.logprobs import (
    TokenLogprobs,
    entropy_from_logits,
    kl_from_logits,
    logprobs_from_logits,
    take_targets,
    token_logprobs,
)
from jrl.ops.masking import at_least_float32, masked_mean, masked_sum, masked_variance, whiten, zero_masked
from jrl.ops.metrics import finalize, max_metric, mean_metric, merge_metrics, min_metric, reduce_metrics
from jrl.ops.moments import RunningMoments, init_moments, moments_std, update_moments
from jrl.ops.noise_schedule import DenoisingSteps, NoiseSchedule, denoising_steps, make_noise_schedule
from jrl.ops.pass_rates import pass_at_k
from jrl.ops.policy_gradient import (
    ClipEvents,
    clip_events,
    clipped_ratio_loss,
    clipped_surrogate,
    clipped_value_loss,
    importance_ratio,
    reinforce_loss,
    value_clip_events,
)
from jrl.ops.prompt_statistics import global_advantages, group_advantages, prompt_advantages, prompt_stats
from jrl.ops.reductions import LossOut, constant_mean, sequence_mean, token_mean
from jrl.ops.returns import gae
from jrl.ops.rewards import (
    calibrate_scores,
    clip_scores,
    last_token_scores,
    missing_eos_penalty,
    penalize_kl,
    place_scores,
)

__all__ = [
    "ClipEvents",
    "DDIMStep",
    "DenoisingSteps",
    "LossOut",
    "NoiseSchedule",
    "RunningMoments",
    "TokenLogprobs",
    "adaptive_kl_coef",
    "at_least_float32",
    "calibrate_scores",
    "clip_events",
    "clip_scores",
    "clipped_ratio_loss",
    "clipped_surrogate",
    "clipped_value_loss",
    "constant_mean",
    "ddim_logprob",
    "ddim_mean",
    "ddim_step",
    "denoising_steps",
    "entropy_from_logits",
    "finalize",
    "gae",
    "gaussian_kl",
    "gaussian_logprob",
    "global_advantages",
    "group_advantages",
    "guided_output",
    "importance_ratio",
    "init_moments",
    "join",
    "kl_from_logits",
    "kl_k1",
    "kl_k2",
    "kl_k3",
    "kl_k3_straight_through",
    "last_token_scores",
    "length_mask",
    "logprobs_from_logits",
    "make_noise_schedule",
    "map_positions",
    "masked_mean",
    "masked_sum",
    "masked_variance",
    "max_metric",
    "mean_metric",
    "merge_metrics",
    "min_metric",
    "missing_eos_penalty",
    "moments_std",
    "off_policy_kl",
    "pass_at_k",
    "penalize_kl",
    "place_scores",
    "positions_of",
    "prompt_advantages",
    "prompt_stats",
    "reduce_metrics",
    "reinforce_loss",
    "sequence_mean",
    "states_at",
    "step_of_timesteps",
    "steps_of_rows",
    "take_targets",
    "targets_at",
    "token_logprobs",
    "token_mean",
    "update_moments",
    "value_clip_events",
    "whiten",
    "window_columns",
    "window_states",
    "window_targets",
    "zero_masked",
]

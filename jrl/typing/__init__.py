# SPDX-License-Identifier: Apache-2.0
"""Shape letters, batch types and the contracts that every algorithm is written against.

Letters, used in every signature: **B** sequence (row), **L** position of a whole sequence, **T** position of the
completion window, **V** vocabulary, **D** width, **N** heads, **K** key/value heads, **H** head width, **P** prompt
position, **C** position of a seq2seq encoder's input. Of images: **T** step of denoising, **Y X C** height, width and
channels of latents, always in this order, **Z W** height and width of images, **Q** position of a prompt's embedding.

An algorithm knows a model only as `PolicyFns` or `DenoiserFns`. What a model stores where (hydra branch, adapters,
encoder) stays behind those functions, so a new kind of model changes no algorithm and a new algorithm changes no model.
"""

from __future__ import annotations

from jrl.typing.basic import (
    TRUNCATION_MODES,
    Frozen,
    Kept,
    Max,
    Mean,
    Metrics,
    Min,
    Params,
    PRNGKey,
    Update,
)
from jrl.typing.diffusion import (
    DDPOBatch,
    DenoiserFns,
    DifferentiableReward,
    RewardGradientBatch,
    Trajectories,
)
from jrl.typing.language import (
    Cache,
    ComparisonBatch,
    Completions,
    ExpertLoad,
    Features,
    Heads,
    ILQLBatch,
    ModelInputs,
    PolicyFns,
    Predictions,
    PreferenceBatch,
    RewardFn,
    Rollouts,
    SamplingKnobs,
    SamplingRules,
    Scored,
    Scorer,
    Sequences,
    Trunk,
)

__all__ = [
    "TRUNCATION_MODES",
    "Cache",
    "ComparisonBatch",
    "Completions",
    "DDPOBatch",
    "DenoiserFns",
    "DifferentiableReward",
    "ExpertLoad",
    "Features",
    "Frozen",
    "Heads",
    "ILQLBatch",
    "Kept",
    "Max",
    "Mean",
    "Metrics",
    "Min",
    "ModelInputs",
    "PRNGKey",
    "Params",
    "PolicyFns",
    "Predictions",
    "PreferenceBatch",
    "RewardFn",
    "RewardGradientBatch",
    "Rollouts",
    "SamplingKnobs",
    "SamplingRules",
    "Scored",
    "Scorer",
    "Sequences",
    "Trajectories",
    "Trunk",
    "Update",
]

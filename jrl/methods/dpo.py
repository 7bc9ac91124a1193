# SPDX-License-Identifier: Apache-2.0
"""DPO's entry in the table of methods."""

from __future__ import annotations

from collections.abc import Mapping

from jrl.learners.dpo_config import DPOConfig
from jrl.trainers.config.defaults import default_config
from jrl.trainers.config.method import Footprint, Method
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.dpo_reference import reference_config

_LOSSES: Mapping[str, str] = {
    "hinge": "zhao2023slic",
    "ipo": "azar2023general",
    "kto_pair": "ethayarajh2024kto",
    "exo_pair": "ji2024towards",
    "nca_pair": "chen2024noise",
    "robust": "chowdhury2024provably",
    "bco_pair": "jung2024binary",
    "sppo_hard": "wu2024self",
    "aot": "melnyk2024distributional",
    "aot_unpaired": "melnyk2024distributional",
    "apo_zero": "doosterlinck2024anchored",
    "apo_down": "doosterlinck2024anchored",
    "discopop": "lu2024discovering",
    "sigmoid_norm": "meng2024simpo",
}
"""The paper of each `loss_type` that has one of its own."""


def default_dpo_config() -> TRLConfig:
    """DPO of GPT-2, all layers, at TRL's learning rate."""
    return default_config(DPOConfig(), trainer="DPOTrainer", lr=1e-6, batch_size=8)


def _papers(method: DPOConfig) -> list[str]:
    found = ["rafailov2023direct", *(_LOSSES[name] for name in method.loss_type if name in _LOSSES)]
    options = {
        "mitchell2023note": method.label_smoothing > 0 and "sigmoid" in method.loss_type,
        "wang2023beyond": method.f_divergence_type != "reverse_kl",
        "liu2024length": method.ld_alpha is not None,
        "zhou2024wpo": method.use_weighting,
        "gorbatovski2024learn": method.sync_ref_model,
    }
    return found + [paper for paper, applies in options.items() if applies]


def _footprint(config: TRLConfig) -> Footprint:
    method = config.method
    assert isinstance(method, DPOConfig), "the entry's own"
    found = Footprint(rows_per_sample=2)
    if not method.asks_reference:
        return found
    if method.sync_ref_model:
        return found._replace(reference="whole", scores="steps")
    if method.ref_model_path is not None:
        return found._replace(reference=reference_config(config, method.ref_model_path), scores="steps")
    return found._replace(reference="branch", scores="steps")


DPO = Method(
    name="dpo",
    config=DPOConfig,
    default=default_dpo_config,
    title="direct preference optimisation (DPO)",
    summary="direct preference optimisation; --help lists TRL's flat fields",
    tags=("dpo", "preference-optimization"),
    papers=_papers,
    data="pairs",
    footprint=_footprint,
    headlines={
        "dpo/loss": "loss",
        "rewards/accuracies": "accuracy",
        "rewards/margins": "margin",
        "dpo/entropy": "entropy",
    },
    own_tokens=True,
)

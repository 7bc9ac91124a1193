# SPDX-License-Identifier: Apache-2.0
"""trlX's models of PPO, its configuration and its KL controllers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from jrl.interop import AdaptiveKLController, FixedKLController
from jrl.trlx.data.configs import PPOConfig
from jrl.trlx.models.modeling_base import PreTrainedModelWrapper

__all__ = [
    "AdaptiveKLController",
    "AutoModelForCausalLMWithHydraValueHead",
    "AutoModelForCausalLMWithValueHead",
    "AutoModelForSeq2SeqLMWithHydraValueHead",
    "AutoModelForSeq2SeqLMWithValueHead",
    "FixedKLController",
    "PPOConfig",
]


class AutoModelForCausalLMWithValueHead(PreTrainedModelWrapper):
    """A decoder with a value head."""

    options: ClassVar[Mapping[str, Any]] = {"num_value_layers_unfrozen": 0}


class AutoModelForCausalLMWithHydraValueHead(PreTrainedModelWrapper):
    """A causal model with a value head and a frozen copy of its upper layers, which `forward_hydra` runs."""

    options: ClassVar[Mapping[str, Any]] = {"num_layers_unfrozen": -1, "num_value_layers_unfrozen": 0}


class AutoModelForSeq2SeqLMWithValueHead(PreTrainedModelWrapper):
    """An encoder-decoder with a value head."""

    kind: ClassVar[str] = "seq2seq"
    options: ClassVar[Mapping[str, Any]] = {"num_value_layers_unfrozen": 0}


class AutoModelForSeq2SeqLMWithHydraValueHead(PreTrainedModelWrapper):
    """A seq2seq model with a value head and a frozen copy of its upper decoder layers, which `forward_hydra` runs."""

    kind: ClassVar[str] = "seq2seq"
    options: ClassVar[Mapping[str, Any]] = {"num_layers_unfrozen": -1, "num_value_layers_unfrozen": 0}

# SPDX-License-Identifier: Apache-2.0
"""Adapters: what trains beside a frozen base model, configured and stored as PEFT does."""

from jrl.models.adapters.config import (
    AdapterConfig,
    LoraConfig,
    PrefixConfig,
    PromptConfig,
    read_adapter_config,
)

__all__ = ["AdapterConfig", "LoraConfig", "PrefixConfig", "PromptConfig", "read_adapter_config"]

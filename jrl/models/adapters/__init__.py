# SPDX-License-Identifier: Apache-2.0
"""Adapters: what trains beside a frozen base model, configured and stored as PEFT does."""

from jrl.models.adapters.bind import Adapter
from jrl.models.adapters.config import (
    AdapterConfig,
    LoraConfig,
    PrefixConfig,
    PromptConfig,
    plain_peft_config,
    read_adapter_config,
)
from jrl.models.adapters.lora import Lora
from jrl.models.adapters.peft_format import adapter_entries, is_adapter_folder, read_adapter_folder

__all__ = [
    "Adapter",
    "AdapterConfig",
    "Lora",
    "LoraConfig",
    "PrefixConfig",
    "PromptConfig",
    "adapter_entries",
    "is_adapter_folder",
    "plain_peft_config",
    "read_adapter_config",
    "read_adapter_folder",
]

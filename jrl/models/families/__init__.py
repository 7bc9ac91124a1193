# SPDX-License-Identifier: Apache-2.0
"""One file per Hugging Face `model_type`: its config mapping and its table of tensors, nothing else."""

from __future__ import annotations

from types import MappingProxyType

from jrl.models.families import gpt2, llama
from jrl.models.families.base import Family

FAMILIES = MappingProxyType({family.model_type: family for family in (gpt2.FAMILY, llama.FAMILY)})


def find_family(model_type: str) -> Family:
    """The family of a `model_type`.

    Raises:
      ValueError: If there is none; the message lists those there are.
    """
    if model_type not in FAMILIES:
        raise ValueError(
            f"`model_type` {model_type!r} is not supported; supported are: {', '.join(sorted(FAMILIES))}."
        )
    return FAMILIES[model_type]

# SPDX-License-Identifier: Apache-2.0
"""Environments of other packages, and tools, for `jrl.train(environment=...)`."""

from jrl.environments.tool_use import Tools

__all__ = [
    "Tools",
]

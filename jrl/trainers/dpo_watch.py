# SPDX-License-Identifier: Apache-2.0
"""Watches a DPO run for the degenerate case in which the margin grows while the chosen completions become unlikely."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

PATIENCE = 10
"""Records in a row before anything is said: single batches differ."""


class DisplacementWatch:
    """Says once that the policy leaves the chosen completions, too, only more slowly than the rejected ones.

    The loss sees nothing but the margin; where two completions share most of what they are, pushing one down takes the
    other along, and the probability goes to texts that nobody has seen (Razin et al. 2024, arXiv:2410.08847).

    Attributes:
      warned: Whether it was said.
    """

    def __init__(self) -> None:
        self.warned = False
        self._in_a_row = 0

    def see(self, record: Mapping[str, Any]) -> None:
        """Takes a training record; those without rewards say nothing."""
        if "rewards/margins" not in record:
            return
        chosen, margin = record["rewards/chosen"], record["rewards/margins"]
        self._in_a_row = self._in_a_row + 1 if chosen < 0 < margin else 0
        if self._in_a_row < PATIENCE or self.warned:
            return
        self.warned = True
        warnings.warn(
            f"For {PATIENCE} records the margin has been positive ({margin:.3g} now) while chosen completions became "
            f"less likely than under the reference (`rewards/chosen` {chosen:.3g}, `logps/chosen` "
            f"{record['logps/chosen']:.4g}): the policy leaves both. Likely remedies: a larger `method.beta`, a lower "
            "learning rate, 'sft' beside the loss, or pairs that differ more.",
            stacklevel=2,
        )

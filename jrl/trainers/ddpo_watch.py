# SPDX-License-Identifier: Apache-2.0
"""What a DDPO run warns of: rates that have turned networks black, and ratios that rounding decides."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jrl.typing import Params

LARGE, HIGHEST_RATE = 10**8, 5e-5
"""Weights of a network that trains as a whole, and the rate above which it is warned of."""
MOST_CLIPPED = 0.05
"""Share of ratios outside the clip before any update, above which a run is warned."""
_CLIPPED = "ddpo/pre_update_clip_fraction"


def warn_of_rate(rate: float, params: Params) -> None:
    """Warns of an adapter's rate where all of a large network trains: images have gone black of it.

    Args:
      rate: Learning rate.
      params: The network's.
    """
    size = sum(leaf.size for leaf in jax.tree.leaves(params))
    if size > LARGE and rate > HIGHEST_RATE:
        warnings.warn(
            f"`optimizer.kwargs.lr` is {rate:g}, and all of a network of {size:,} weights trains: that rate is an "
            "adapter's. Take about 1e-5, or set `model.peft_config`.",
            stacklevel=2,
        )


class ClippingWatch:
    """Warns once where ratios leave the clip before anything was learned: rounding then decides what is trained.

    Args:
      clip_range: ε.
    """

    def __init__(self, clip_range: float) -> None:
        self._clip_range, self._told = clip_range, False

    def look(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Looks at the last epoch.

        Args:
          history: Records of the run; those of evaluations, which may stand behind an epoch's, are passed over.
        """
        clipped = next((record[_CLIPPED] for record in reversed(history) if _CLIPPED in record), 0.0)
        if self._told or clipped <= MOST_CLIPPED:
            return
        self._told = True
        warnings.warn(
            f"{clipped:.0%} of the ratios leave 1 ± `train_clip_range` = {self._clip_range:g} before any update, so "
            "rounding decides what is clipped. Sample and train at equal batch sizes, compute in float32, take a wider "
            "range, or set `old_log_probs` to recompute.",
            stacklevel=2,
        )

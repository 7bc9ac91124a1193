# SPDX-License-Identifier: Apache-2.0
"""Draws the weight that each estimator gives to a prompt, over its solve rate: computed from all 2^8 groups.

python tests/exact/plot_weights.py docs/exact_weights.png
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import matplotlib
import numpy as np

sys.path.insert(0, str(Path(__file__).parents[2]))

from jrl.ops import (
    group_relative_advantages,
    leave_one_out_advantages,
    mean_scaled_advantages,
)
from tests.exact.enumerable import enumerated, weight_of

SIZE = 8
ESTIMATORS = {
    "RLOO": leave_one_out_advantages,
    "Dr. GRPO": group_relative_advantages,
    "GRPO": partial(group_relative_advantages, scale="group"),
    "MaxRL": mean_scaled_advantages,
}


def main(path: str) -> None:
    matplotlib.use("Agg")
    from matplotlib import pyplot

    chances = np.linspace(0.005, 0.995, 199)
    figure, axes = pyplot.subplots(figsize=(6, 4))
    for name, estimator in ESTIMATORS.items():
        advantages = enumerated(estimator, SIZE)
        axes.plot(chances, [weight_of(advantages, p)[0] for p in chances], label=name)
    axes.set_xlabel("chance p that a sample of the prompt is right")
    axes.set_ylabel(f"weight of the prompt's gradient, {SIZE} samples")
    axes.set_yscale("log")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=100)


if __name__ == "__main__":
    main(sys.argv[1])

# SPDX-License-Identifier: Apache-2.0
"""pass@k: the chance that k samples of a prompt hold a correct one, estimated from n ≥ k samples of it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int


def pass_at_k(num_correct: Int[Array, "B"], *, num_samples: int, k: int) -> Float[Array, "B"]:
    """Unbiased pass@k of each prompt; the benchmark's figure is the mean over prompts.

        pass@k = 1 − C(n − c, k) / C(n, k)

    The share of k-subsets of the n samples that hold a correct one. "Any of the first k" has the same mean and more
    spread; "any of n" and 1 − (1 − c/n)^k are both biased for n > k.

    Args:
      num_correct: c, correct samples of each prompt, in [0, n].
      num_samples: n, samples of each prompt.
      k: In [1, n].
    Returns:
      float32 in [0, 1]: c/n at k = 1, and whether c > 0 at k = n.
    Raises:
      ValueError: If k is not in [1, n], or a count not in [0, n]. Compiled code cannot look at counts: inside `jax.jit`
        a wrong one goes unnoticed. Outside, looking waits for what the device still computes.
    Example:
      >>> [round(float(x), 4) for x in pass_at_k(jnp.array([0, 1, 2, 5]), num_samples=5, k=2)]
      [0.0, 0.4, 0.7, 1.0]

    Reference: Chen et al. 2021, arXiv:2107.03374, eq. 1.
    """
    if not 1 <= k <= num_samples:
        raise ValueError(
            f"`k` must be in [1, num_samples] = [1, {num_samples}], got {k}. Fewer samples than k say nothing of "
            "pass@k: draw more of each prompt."
        )
    if not isinstance(num_correct, jax.core.Tracer):
        _check_counts(np.asarray(num_correct), num_samples)
    # The quotient of binomials as a product of k factors below 1: the binomials themselves overflow at n = 200.
    drawn = jnp.arange(k)[None, :]
    wrong_left = jnp.maximum(num_samples - num_correct[:, None] - drawn, 0)
    all_wrong = jnp.prod(wrong_left.astype(jnp.float32) / (num_samples - drawn).astype(jnp.float32), axis=1)
    return 1.0 - all_wrong


def _check_counts(num_correct: Int[np.ndarray, "B"], num_samples: int) -> None:
    """Raises ValueError unless every count is in [0, num_samples]."""
    outside = num_correct[(num_correct < 0) | (num_correct > num_samples)]
    if outside.size:
        raise ValueError(
            f"`num_correct` must be in [0, num_samples] = [0, {num_samples}], got {outside[0]}. Are these the counts "
            "of groups of `num_samples` samples each?"
        )

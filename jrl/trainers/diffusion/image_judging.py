# SPDX-License-Identifier: Apache-2.0
"""Judging of images by the processes of a job: each calls the reward function on some, and all learn every reward.

Every process has all images on its host, for a sampling call leaves them whole on every device. So nothing but rewards
goes from host to host, once at the end: what goes there queues on the devices behind the work that they already have.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jrl.data.sources.fingerprint import fingerprint
from jrl.distributed import PeerError, Word, gather, is_main
from jrl.placement import own_rows
from jrl.rollout.rewards import RewardError
from jrl.trainers.diffusion.ddpo_rewards import Answers, AwaitedBatches, check_rewards
from jrl.trainers.diffusion.images import ImageError

ComputeRewards = Callable[[Sequence[list[Any]], bool], Answers]
"""(sampling batches, whether on threads) → reward vectors and metadata."""
OwnImages = Callable[[int], np.ndarray]
"""Images of a sampling call → the numbers of those that this process judges, ascending."""


def own_images(mesh: Mesh, num_images: int, *, on_main: bool) -> np.ndarray:
    """Numbers of the images of a sampling call that this process judges: each image is one process's.

    Args:
      mesh: Of the run.
      num_images: Of the call, over all devices.
      on_main: Whether process 0 judges all of them; else each process those that its devices sampled.
    """
    return np.arange(num_images if is_main() else 0) if on_main else own_rows(mesh, num_images)


class _OwnBatches(AwaitedBatches):
    """This process's images of sampling batches; asking for a batch waits for it.

    Args:
      batches: With all images.
      rows: Of each batch, which images are this process's.
    """

    def __init__(self, batches: Sequence[list[Any]], rows: Sequence[np.ndarray]) -> None:
        self._batches, self._rows = batches, rows

    def __len__(self) -> int:
        return len(self._rows)

    def batch(self, number: int) -> list[Any]:
        """Waits for a batch, and takes this process's images of it."""
        (images, *others), rows = self._batches[number], self._rows[number]
        return [images[rows], *(tuple(other[row] for row in rows) for other in others)]


def judge_images(
    compute_rewards: ComputeRewards,
    batches: Sequence[list[Any]],
    is_async: bool,
    *,
    counts: Sequence[int],
    own: np.ndarray,
    name_batch: Callable[[int], str],
    skip_errors: bool,
) -> tuple[list[np.ndarray], list[Any]]:
    """Rewards of every image, in every process; all must call it.

    A failure in one process fails all: the others learn of it in the end, and until then sample what they would have.

    Args:
      compute_rewards: Of a trainer; it gets this process's images alone.
      batches: [images, prompts, metadata] of each sampling batch; one that is asked for is waited for.
      is_async: Whether the reward function is called on threads.
      counts: Images of each batch: those of a call, or fewer in the last one.
      own: Numbers of this process's images within a call.
      name_batch: What messages call a batch, by its number.
      skip_errors: Whether rewards may be missing.
    Returns:
      (float32 rewards of each batch, NaN where one is missing; what the reward function said beside those of this
      process, {} where it judged none).
    Raises:
      RewardError: If the reward function fails, or processes draw different prompts.
    """

    def judged(mine: Sequence[list[Any]]) -> tuple[list[np.ndarray], list[Any]]:
        return _checked(compute_rewards(mine, is_async), mine, name_batch, skip_errors=skip_errors)

    if jax.process_count() == 1:
        return judged(batches)
    shares = [own[own < count] for count in counts]
    shares = shares[: sum(len(rows) > 0 for rows in shares)]  # the last may be too short for all processes
    vectors, found, failure = list[np.ndarray](), list[Any](), None
    try:
        if shares:
            vectors, found = judged(_OwnBatches(batches, shares))
    except ImageError:
        raise  # all processes have the same images
    except Exception as error:  # user code: anything may come
        failure = error
    batches[-1]  # whatever happened: the others have sampled all
    told = {"rewards": vectors, "rows": shares}
    arrays = {f"{name} {number}": array for name, parts in told.items() for number, array in enumerate(parts)}
    try:
        words = gather(fingerprint([list(batch[1]) for batch in batches]), arrays, failure=failure)
    except PeerError as error:
        raise RewardError(str(error)) from error
    if len({word.plain for word in words}) > 1:
        raise RewardError(
            "`prompt_function` must draw the same prompts in every process of a job, and they differ: it may draw from "
            "`random` and `numpy.random` alone, and from the same prompts."
        )
    return [_joined(words, *entry) for entry in enumerate(counts)], found + [{}] * (len(counts) - len(found))


def _joined(words: Sequence[Word], number: int, count: int) -> np.ndarray:
    """Rewards of a batch from what each process says of its part."""
    whole = np.full(count, np.nan, np.float32)
    for word in words:
        if f"rows {number}" in word.arrays:
            whole[word.arrays[f"rows {number}"]] = word.arrays[f"rewards {number}"]
    return whole


def _checked(
    answers: Any,
    batches: Sequence[list[Any]],
    name_batch: Callable[[int], str],
    *,
    skip_errors: bool,
) -> tuple[list[np.ndarray], list[Any]]:
    """Checks the return value of any `compute_rewards`: a vector and an entry of metadata for each batch."""
    if not isinstance(answers, tuple | list) or len(answers) != 2:
        raise RewardError(
            f"`compute_rewards` must return (reward vectors, reward metadata), got {type(answers).__name__}."
        )
    vectors, found = (list(part) for part in answers)
    if not len(vectors) == len(found) == len(batches):
        raise RewardError(
            f"`compute_rewards` must return one entry a sampling batch, got {len(vectors)} and {len(found)} for "
            f"{len(batches)}."
        )
    checked = [
        check_rewards(vector, batches[number][1], name_batch(number), skip_errors=skip_errors)
        for number, vector in enumerate(vectors)
    ]
    return checked, found

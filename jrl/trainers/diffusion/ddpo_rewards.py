# SPDX-License-Identifier: Apache-2.0
"""The user's reward function on images: called in order or beside the device, checked, and what it failed on kept."""

from __future__ import annotations

import abc
import json
import logging
import math
import numbers
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, overload

import jax
import numpy as np
from jaxtyping import Float

from jrl.placement import local_computation
from jrl.rollout.rewards import FAILURES, RewardError, call_within
from jrl.trainers.diffusion.images import save_image

RewardFunction = Callable[[np.ndarray, tuple[str, ...], tuple[Any, ...]], Any]
Answers = tuple[tuple[np.ndarray, ...], tuple[Any, ...]]
"""(reward vectors, reward metadata), one entry a sampling batch."""

_logger = logging.getLogger(__name__)


class AwaitedBatches(Sequence[list[Any]], abc.ABC):
    """Sampling batches, [images, prompts, metadata] each, that are there when they are asked for."""

    @abc.abstractmethod
    def batch(self, number: int) -> list[Any]:
        """Waits for a batch; its number is one of those that there are."""

    @overload
    def __getitem__(self, index: int) -> list[Any]: ...
    @overload
    def __getitem__(self, index: slice) -> list[list[Any]]: ...
    def __getitem__(self, index: int | slice) -> list[Any] | list[list[Any]]:
        if isinstance(index, slice):
            return [self.batch(number) for number in range(*index.indices(len(self)))]
        return self.batch(range(len(self))[index])


@dataclass(frozen=True)
class ImageRewardCall:
    """Calls a reward function; what it fails on is kept on the disk before the run stops.

    Attributes:
      reward_function: The user's: (images, prompts, metadata) → (rewards, reward metadata), or rewards alone.
      skip_errors: Whether images whose reward fails become NaN; otherwise the first such batch stops the run.
      timeout: Seconds that one call may take; None waits for ever.
      failures: Folder of the images that it failed on.
    """

    reward_function: RewardFunction
    skip_errors: bool
    timeout: float | None
    failures: Path

    def __call__(self, batch: Sequence[Any], where: str) -> tuple[np.ndarray, Any]:
        """(rewards, float32 and one an image; the function's metadata) of one sampling batch.

        Args:
          batch: [images (B 3 Y X) in [0, 1], prompts, metadata].
          where: Says which batch it is, as in "epoch 3, sampling batch 0".
        Raises:
          RewardError: If the function fails and errors are not skipped; the images are on disk by then.
        """
        images, prompts, metadata = batch
        try:
            return self._call(images, prompts, metadata, where)
        except RewardError as error:
            if self.skip_errors:
                _logger.warning("The images of a batch are left out: %s", error)
                return np.full(len(prompts), np.nan, np.float32), {}
            error.add_note(self._kept(batch, where))
            raise

    def _call(
        self, images: np.ndarray, prompts: tuple[str, ...], metadata: tuple[Any, ...], where: str
    ) -> tuple[np.ndarray, Any]:
        try:
            call = partial(self.reward_function, images, prompts, metadata)
            with local_computation():
                answer = call_within(call, {}, self.timeout, name="reward_function")
        except RewardError as error:
            raise RewardError(f"{where}: {error}") from error
        except FAILURES as error:
            raise RewardError(
                f"{where}: `reward_function` raised {type(error).__name__}: {error}."
            ) from error
        # A tuple of two numbers holds the rewards of two images.
        is_pair = isinstance(answer, tuple) and len(answer) == 2 and not all(map(_is_number, answer))
        rewards, found = answer if is_pair else (answer, {})
        return check_rewards(rewards, prompts, where, skip_errors=self.skip_errors), found

    def _kept(self, batch: Sequence[Any], where: str) -> str:
        """Says where the images are kept; where they cannot be written, why: that must not hide the first error."""
        try:
            return f"The images of this call are kept in {self._keep(batch, where)}."
        except Exception as error:  # a full disk, or what metadata holds: anything may come
            return f"The images of this call could not be kept: {error}."

    def _keep(self, batch: Sequence[Any], where: str) -> Path:
        """Writes images, prompts and metadata."""
        images, prompts, metadata = batch
        process = f" process {jax.process_index()}" if jax.process_count() > 1 else ""
        folder = self.failures / f"{where}{process}".replace(",", "").replace(" ", "_")
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
            for number, image in enumerate(images):
                record = {
                    "image": save_image(folder / f"{number:04d}", image),
                    "prompt": prompts[number],
                    "metadata": metadata[number],
                }
                file.write(json.dumps(record, ensure_ascii=False, default=str) + "\n")
        return folder


def judge(
    call: Callable[[Sequence[Any], str], tuple[np.ndarray, Any]],
    batches: Iterable[Sequence[Any]],
    where: Callable[[int], str],
    *,
    workers: int | None,
) -> Answers:
    """Rewards of all sampling batches, in order.

    Args:
      call: Such as an `ImageRewardCall`.
      batches: Sampling batches; the next may be waited for while the last is judged.
      where: Number of a batch → what messages call it.
      workers: Threads; each batch is handed to one as soon as it is there. None: one call after another, here.
    Raises:
      RewardError: Of the first batch that failed.
    """
    if workers is None:
        found = [call(batch, where(number)) for number, batch in enumerate(batches)]
    else:
        pool = ThreadPoolExecutor(workers, thread_name_prefix="reward_function")
        try:
            futures = [pool.submit(call, batch, where(number)) for number, batch in enumerate(batches)]
            found = [future.result() for future in futures]
        finally:
            pool.shutdown(cancel_futures=True)
    return tuple(rewards for rewards, _ in found), tuple(metadata for _, metadata in found)


def check_rewards(
    rewards: Any, prompts: Sequence[str], where: str, *, skip_errors: bool = False
) -> Float[np.ndarray, "B"]:
    """A batch's rewards as float32.

    Args:
      rewards: List or array of any library, (B,) or (B, 1).
      prompts: Of the batch, for messages.
      where: What messages call the batch.
      skip_errors: Whether rewards that are not finite become NaN.
    Raises:
      RewardError: If these are not one finite number an image.
    """
    plain = rewards.tolist() if hasattr(rewards, "tolist") else rewards
    if not isinstance(plain, list | tuple):
        raise RewardError(
            f"{where}: `reward_function` must return (rewards, metadata) with one reward an image, got "
            f"{type(rewards).__name__}."
        )
    if len(plain) != len(prompts):
        raise RewardError(
            f"{where}: `reward_function` must return one reward an image, got {len(plain)} for {len(prompts)} images. "
            "Did it average or drop any?"
        )
    try:
        found = _as_floats([row.tolist() if hasattr(row, "tolist") else row for row in plain])
    except (TypeError, ValueError) as error:
        raise RewardError(f"{where}: rewards must be numbers, got {rewards!r:.80}.") from error
    if found.shape not in ((len(prompts),), (len(prompts), 1)):
        raise RewardError(
            f"{where}: `reward_function` must return one reward an image, got the shape {found.shape}."
        )
    found = found.reshape(len(prompts))
    bad = np.flatnonzero(~np.isfinite(found))
    if len(bad) and not skip_errors:
        raise RewardError(
            f"{where}: the reward must be finite, got {found[bad[0]]}.",
            index=int(bad[0]),
            prompt=prompts[bad[0]],
        )
    return np.where(np.isfinite(found), found, np.float32(math.nan))


def _as_floats(rows: list[Any]) -> np.ndarray:
    """Numbers, or lists of them, as float32; None is NaN, and what is too large is infinite.

    Raises:
      TypeError: On a text, a complex number, or anything else that is no number.
      ValueError: If the lists differ in length.
    """
    found = np.asarray(rows)
    if found.dtype.kind == "O":  # None, or integers beyond 64 bits
        found = np.reshape([_as_float(entry) for entry in found.flat], found.shape)
    if found.dtype.kind not in "biuf":
        raise TypeError(f"{found.dtype} is no type of rewards")
    with np.errstate(over="ignore"):
        return found.astype(np.float32)


def _as_float(entry: Any) -> float:
    if entry is None:
        return math.nan
    if not _is_number(entry):
        raise TypeError(f"{type(entry).__name__} is no number")
    try:
        return float(entry)
    except OverflowError:
        return math.inf


def _is_number(value: Any) -> bool:
    """True for a real number, of Python or of any library."""
    is_scalar = hasattr(value, "tolist") and np.ndim(value) == 0
    return isinstance(value.tolist() if is_scalar else value, numbers.Real)


class Waiting:
    """Seconds spent in one kind of waiting, so that they can be told from the work around it."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __enter__(self) -> None:
        """Starts the clock."""
        self._began = time.perf_counter()

    def __exit__(self, *error: object) -> None:
        """Adds what went by."""
        self.seconds += time.perf_counter() - self._began

# SPDX-License-Identifier: Apache-2.0
"""Collects samples: the device works on the calls ahead while the host decodes, judges and gathers those behind.

`overlap` is the pipeline by itself, of whatever is sampled. `Collector` is the one for text, for rollouts and
evaluations alike: sampling calls are dispatched ahead, a hook follows each of them on the device, every process decodes
and judges the rows on its own devices, and in the end all of it comes together in every process.

What is random of a row depends on the key and the row's number alone, never on the order of arrival.
"""

from __future__ import annotations

import contextvars
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any, NamedTuple, TypeVar

import jax
import numpy as np

from jrl.data.prompts import PromptBatch, PromptSet
from jrl.placement import local_rows, own_rows, place_rows
from jrl.rollout.gathering import AsArray, Judging, Part, all_texts, to_main, totals
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.reward_columns import RewardColumns
from jrl.rollout.sampler import GenerationSettings, Sampler
from jrl.rollout.text import Texts, decode_rows
from jrl.typing import Completions, Frozen, ModelInputs, Params, PRNGKey

AHEAD = 3
"""Sampling calls on their way at a time: enough to keep the device busy, and few enough for any number of rows."""

Sent = TypeVar("Sent")
Got = TypeVar("Got")
Done = TypeVar("Done")
Clock = Callable[[str], AbstractContextManager[Any]]
"""Measures what happens inside, under a name."""


def overlap(
    dispatch: Callable[[int], Sent],
    receive: Callable[[int, Sent], Got],
    finish: Callable[[int, Sent, Got], Done],
    count: int,
    *,
    ahead: int = AHEAD,
    hold_back: bool = False,
    meanwhile: Callable[[], None] = lambda: None,
) -> Iterator[Done]:
    """Results of calls, in order, while later calls are on their way.

    Args:
      dispatch: Sends a call, by its number, to the device; waits for nothing.
      receive: Waits for what a call gives; the next call is sent right after.
      finish: Makes the result of it, on the host.
      count: Number of calls.
      ahead: Calls on their way at a time.
      hold_back: The next call is sent after `finish` instead: what that sends from host to host would queue on the
        device behind the call.
      meanwhile: Called once the first calls are on their way: the host is free then.
    """
    numbers = iter(range(count))
    on_their_way: deque[tuple[int, Sent]] = deque()

    def send(most: int) -> None:
        on_their_way.extend((number, dispatch(number)) for number in islice(numbers, most))

    send(1 if hold_back else ahead)
    meanwhile()
    while on_their_way:
        number, sent = on_their_way.popleft()
        got = receive(number, sent)
        if not hold_back:
            send(1)
        done = finish(number, sent, got)
        if hold_back:
            send(1)
        del sent, got  # what is on the device is not kept for as long as the caller works on the result
        yield done


class Sending:
    """Sends programs to the devices, one after the other, while the host goes on.

    JAX sends a program to a TPU or a CPU and returns. To a GPU the calling thread itself starts each kernel, and after
    every round of a loop over tokens it waits to hear whether there is another: it is held for as long as the program
    runs. So a thread of its own does that for a GPU. Of several devices each must get the programs in the same order,
    whoever sends them: there the calling thread sends.

    The thread has the mesh, the default device and the precision of products of the thread that made it, and no other
    setting of JAX's that is a thread's own.

    Args:
      mesh: Where the programs run.
    """

    def __init__(self, mesh: jax.sharding.Mesh) -> None:
        self._thread = ThreadPoolExecutor(1, "sending") if sending_holds_the_host(mesh) else None
        self._mesh, self._context = mesh, contextvars.copy_context()
        self._device: Any = jax.config.jax_default_device  # type: ignore[attr-defined]
        self._precision: Any = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
        self._error: BaseException | None = None

    def __call__(self, program: Callable[[], Sent]) -> Callable[[], Sent]:
        """Sends a program behind those before it.

        Returns:
          A function that waits until the program is sent, and gives its result.
        """
        if self._thread is None:
            return given(program())
        return self._thread.submit(self._context.run, self._send, program).result

    def check(self) -> None:
        """Raises what a program failed with, if one did by now."""
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Waits until what is being sent is on its way, and drops what is behind it."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _send(self, program: Callable[[], Sent]) -> Sent:
        device, precision = jax.default_device(self._device), jax.default_matmul_precision(self._precision)
        try:
            with jax.set_mesh(self._mesh), device, precision:
                return program()
        except BaseException as error:
            self._error = self._error or error
            raise


def given(value: Sent) -> Callable[[], Sent]:
    """A function without arguments that gives this value."""
    return lambda: value


def sending_holds_the_host(mesh: jax.sharding.Mesh) -> bool:
    """True where a thread that sends a program is held until it ends, and may leave that to another."""
    return mesh.size == 1 and mesh.devices.flat[0].platform == "gpu" and jax.process_count() == 1


@dataclass(frozen=True)
class Call:
    """A sampling call and its results.

    Attributes:
      batch: The prompts, on the host, each once.
      count: Rows that are real; the others fill the call up.
      sampled: Waits until sampling is sent, and gives what is sampled, on the device.
      followed: The same of what the hook makes of it; it gives None without a hook.
    """

    batch: PromptBatch
    count: int
    sampled: Callable[[], Completions]
    followed: Callable[[], Any]

    @property
    def completions(self) -> Completions:
        """The samples, on the device; waits until sampling is sent."""
        return self.sampled()


Follow = Callable[[ModelInputs, Completions], Any]
"""(prompts on the mesh, completions) → what else is dispatched behind a sampling call, such as scoring."""


class Collected(NamedTuple):
    """All samples of one collection, in order and in every process.

    Attributes:
      texts: What was written.
      rewards: What `as_array` made of the rewards, one row a sample; None without a reward function.
      columns: What each reward function said of them; None likewise.
      calls: With the device's side, where a hook followed them; else none is kept.
    """

    texts: Texts
    rewards: np.ndarray | None
    columns: RewardColumns | None
    calls: list[Call]


@dataclass(frozen=True)
class Collector:
    """Completes prompts of a set, and judges what was written.

    Attributes:
      sampler: Compiled samplers.
      tokenizer: Decodes.
      stop_sequences: Texts that end a completion.
      mesh: Where rows go.
      chunk_size: Most rows of a sampling call, global.
      rewards: The user's reward function; None: nothing is judged.
      as_array: What is kept of rewards, one row a sample.
      num_generations: Samples of each prompt, which come one after another and share one pass over it.
      on_main: Whether process 0 decodes and judges all rows; else each process its own.
      ahead: Sampling calls on their way at a time.
    """

    sampler: Sampler
    tokenizer: Any
    stop_sequences: Sequence[str]
    mesh: jax.sharding.Mesh
    chunk_size: int
    rewards: RewardCall | None = None
    as_array: AsArray = totals
    num_generations: int = 1
    on_main: bool = False
    ahead: int = AHEAD

    def __call__(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
        *,
        label: str,
        first: int = 0,
        width: int | None = None,
        follow: Follow | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        clock: Clock = lambda name: nullcontext(),
    ) -> Collected:
        """Samples once for each index; the reward function judges a call's samples while the next ones are drawn.

        Args:
          params: Trainable parameters.
          frozen: The rest.
          prompts: The set.
          indices: Of its prompts, one a sample; `num_generations` equal ones in a row.
          settings: How to sample.
          key: Of this collection. Sample i is drawn with key and `first` + i alone, whatever the chunk size.
          label: Names the file that keeps what the reward function failed on.
          first: Number of the first sample, where several collections have one key.
          width: Columns of the prompts; None: as many as these need.
          follow: What is dispatched behind each sampling call.
          meanwhile: Called once the first call is on its way.
          clock: Measures `rollout` (waiting for samples), `decode` and `reward`.
        Raises:
          RewardError: If the reward function fails and errors are not skipped; the samples are on disk by then.
        """
        judging, calls, row = Judging(self.rewards, self.as_array), list[Call](), 0
        parts = self.parts(
            params,
            frozen,
            prompts,
            indices,
            settings,
            key,
            first=first,
            width=width,
            follow=follow,
            meanwhile=meanwhile,
            clock=clock,
        )
        with closing(parts):  # also where rewards fail: what is being sent is waited for
            for call, part in parts:
                if follow is not None:
                    calls.append(call)
                metadata = prompts.metadata(indices[part.numbers])
                with clock("reward"):
                    judging.add(part, metadata, label=f"{label}_row_{row:06d}")
                row += self._rows_of_call(len(indices))
        with clock("reward"):
            return Collected(*judging.together(), calls)

    def texts(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
    ) -> Texts:
        """Samples a completion for each index, all of them in every process, unjudged. Arguments as of a call."""
        found = self.parts(params, frozen, prompts, indices, settings, key)
        return all_texts([part for _, part in found])

    def parts(
        self,
        params: Params,
        frozen: Frozen,
        prompts: PromptSet,
        indices: np.ndarray,
        settings: GenerationSettings,
        key: PRNGKey,
        *,
        first: int = 0,
        width: int | None = None,
        follow: Follow | None = None,
        meanwhile: Callable[[], None] = lambda: None,
        clock: Clock = lambda name: nullcontext(),
    ) -> Generator[tuple[Call, Part]]:
        """This process's completions call by call. Arguments as of a call.

        A last call that is short is filled up with rows from the front, which are dropped: same program.
        """
        total, rows_of_call = len(indices), self._rows_of_call(len(indices))
        columns = prompts.width(indices) if width is None else width
        own = own_rows(self.mesh, rows_of_call)
        send = Sending(self.mesh)

        def dispatch(number: int) -> Call:
            start = number * rows_of_call
            numbers = np.arange(start, start + rows_of_call) % total
            batch = prompts.rows(indices[numbers[:: self.num_generations]], width=columns)
            inputs = place_rows(self.mesh, batch.inputs)
            sampled = send(lambda: self.sampler(params, frozen, inputs, first + numbers, settings, key))
            followed = send(lambda: None if follow is None else follow(inputs, sampled()))
            return Call(batch, min(rows_of_call, total - start), sampled, followed)

        def receive(number: int, call: Call) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
            rows = own[own < call.count]
            with clock("rollout"):
                tokens = local_rows(call.completions.tokens, rows)
                return rows, tokens, local_rows(call.completions.lengths, rows)

        def finish(
            number: int, call: Call, got: tuple[np.ndarray, np.ndarray, np.ndarray]
        ) -> tuple[Call, Part]:
            rows, tokens, lengths = got
            with clock("decode"):
                written = [call.batch.token_lists[row // self.num_generations] for row in rows]
                texts = self._decoded(written, tokens, lengths, settings, prompts.separator)
                part = Part(number * rows_of_call + rows, texts)
                send.check()  # before rewards are paid for
                return call, to_main(part) if self.on_main else part

        try:
            yield from overlap(
                dispatch,
                receive,
                finish,
                -(-total // rows_of_call),
                ahead=self.ahead,
                hold_back=self.on_main,
                meanwhile=meanwhile,
            )
            with clock("rollout"):  # whoever comes next sends behind all of it
                send(lambda: None)()
            send.check()
        finally:
            send.close()

    def _decoded(
        self,
        prompts: list[list[int]],
        tokens: np.ndarray,
        lengths: np.ndarray,
        settings: GenerationSettings,
        separator: str | None,
    ) -> Texts:
        """Texts of completions behind their prompts, cut at the first stop sequence."""
        return decode_rows(
            self.tokenizer,
            prompts,
            tokens,
            lengths,
            eos_token_ids=settings.eos_token_id,
            stop_sequences=self.stop_sequences,
            separator=separator,
        )

    def _rows_of_call(self, total: int) -> int:
        return min(self.chunk_size, total)

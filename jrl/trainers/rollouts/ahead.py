# SPDX-License-Identifier: Apache-2.0
"""Rollouts ahead of their turn: which policy samples which iteration, and on which devices."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.mesh import place, tree_shardings
from jrl.placement import DISPATCH, rows_sharding
from jrl.rollout.ahead import Collect, RolloutsAhead
from jrl.rollout.experience import Experience
from jrl.trainers.loop.run import Run
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.typing import Params


class Policies:
    """The policies that sampled, or are to sample, the iterations that come next: copies that nobody donates.

    Args:
      ahead: Iterations that are collected ahead.
      mesh: Devices that sample and do nothing else; None: they learn, too.
    """

    def __init__(self, ahead: int, mesh: Mesh | None) -> None:
        self._ahead, self._mesh = ahead, mesh
        self._copy: Callable[[Params], Params] | None = None
        self._next = 0  # the first iteration that is not learned from
        self._kept: dict[int, Params] = {}  # by the number of updates before

    def begin(self, iteration: int, restored: Sequence[Params]) -> None:
        """Forgets what an earlier run kept.

        Args:
          iteration: The first that is not learned from.
          restored: As `of_next` gave them; none in a fresh run.
        """
        self._next = iteration
        self._kept = dict(zip(self._samplers(), restored, strict=False))

    def move(self, tree: Any) -> Any:
        """Weights to where they sample; on the learner's own devices they stay what they are."""
        return tree if self._mesh is None else place(tree, tree_shardings(self._mesh, tree)[0])

    def add(self, iteration: int, params: Params) -> Params:
        """Keeps the policy before an iteration's update; returns the copy."""
        with DISPATCH:
            copied = self._copied(params) if self._mesh is None else self.move(params)
        self._kept[iteration] = copied
        return copied

    def done(self, iteration: int) -> None:
        """Drops what no later iteration than this one is sampled by."""
        self._next = iteration + 1
        oldest = self._samplers()[0]
        self._kept = {number: params for number, params in self._kept.items() if number >= oldest}

    def _samplers(self) -> list[int]:
        """Which policies sample the next iterations, those excepted that one not made yet will sample."""
        return [max(0, self._next + number - self._ahead) for number in range(self._ahead)]

    def _copied(self, params: Params) -> Params:
        """A copy in the same places, by one program: one a leaf would keep the threads of a CPU waiting."""
        if self._copy is None:
            places = jax.tree.map(lambda leaf: leaf.sharding, params)
            self._copy = jax.jit(partial(jax.tree.map, jnp.copy), out_shardings=places)
        copied: Params = self._copy(params)
        return copied

    def of_next(self, params: Params) -> tuple[Params, ...]:
        """The policies of the next iterations that are on their way.

        Args:
          params: Stands for them before there are any: shapes and places are the same.
        """
        if not self._kept:
            return (self.move(params),) * self._ahead
        return tuple(self._kept[number] for number in self._samplers())


class Ahead:
    """The rollouts of a run, some iterations ahead of its updates.

    Args:
      run: The run.
      count: Iterations ahead.
      policies: Of a run that is resumed those of the iterations that were on their way; else none.
      collect: Collects one iteration.
      mesh: Where the run learns.
      sampling_mesh: Where it samples.
      in_turn: As `RolloutsAhead` takes it.
    """

    def __init__(
        self,
        run: Run,
        count: int,
        policies: Policies,
        collect: Collect,
        *,
        mesh: Mesh,
        sampling_mesh: Mesh,
        in_turn: bool,
    ) -> None:
        self._run, self._count, self._policies = run, count, policies
        self._mesh, self._is_apart = mesh, sampling_mesh is not mesh
        self._rollouts = RolloutsAhead(collect, sampling_mesh, in_turn=in_turn)
        self._stopwatches: dict[int, Stopwatch] = {}
        self._num_begun = 0

    def begin(self, iteration: int, restored: Sequence[Params], first_prompt: int | None) -> None:
        """Begins what was on its way when the checkpoint was written that the run goes on from.

        Args:
          iteration: The first that is not learned from.
          restored: Policies of it and of those behind it; none in a fresh run.
          first_prompt: Place in the stream of prompts at which it begins; None: as its number says.
        """
        self._policies.begin(iteration, restored)
        self._num_begun = iteration
        for params in restored:
            self._start(params, first_prompt)

    def __call__(self, iteration: int, params: Params, first_prompt: int | None) -> Experience:
        """Waits for the rollouts of an iteration, once those have begun that its policy is to sample.

        Args:
          iteration: Its number.
          params: Of the policy before its update.
          first_prompt: As for `begin`.
        """
        copied = self._policies.add(iteration, params)
        # The first policy samples all iterations up to the one that is the first to be behind by so many.
        while self._num_begun <= iteration + self._count:
            self._start(copied, first_prompt)
        self._run.flush()
        with self._run.stopwatch("ahead"):
            found = self._rollouts.take(iteration)
        self._run.stopwatch.merge(self._stopwatches.pop(iteration))
        if not self._is_apart:
            return found
        with DISPATCH:
            moved = place(found.rollouts, rows_sharding(self._mesh, len(found.rollouts.rewards)))
        return replace(found, rollouts=moved)

    def close(self) -> None:
        """Gives up what is on its way."""
        self._rollouts.close()

    def _start(self, params: Params, first_prompt: int | None) -> None:
        """Begins the iteration behind those that have begun, unless the run ends before it."""
        number = self._num_begun
        self._num_begun += 1
        if number < self._run.num_iterations:
            stopwatch = self._stopwatches[number] = Stopwatch()
            self._rollouts.start(number, params, first_prompt, stopwatch)

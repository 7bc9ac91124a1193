# SPDX-License-Identifier: Apache-2.0
"""`--dry-run`: one tiny iteration with the user's model, data and reward function, shown and thrown away."""

from __future__ import annotations

import argparse
import math
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from rich.text import Text

from jrl.cli.summary import Work
from jrl.device_memory import GPU_SHARE, gpu_advice, is_worth_more, usable_bytes
from jrl.mesh import abstract_mesh, rows_parts
from jrl.trainers.base import Trainer
from jrl.trainers.checkpoints.resume import checkpoints_in
from jrl.trainers.config.method import footprint_of
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.diffusion.ddpo_gallery import GRIDS
from jrl.trainers.loading.setup import mesh_of
from jrl.trainers.loggers.console import headlines
from jrl.trainers.loggers.safe_text import one_line
from jrl.trainers.loggers.token_rows import show_rows, token_rows
from jrl.trainers.loggers.trackers import check_tracker
from jrl.trainers.loop.stopwatch import CompileCounter
from jrl.trainers.plan.run_plan import plan_run
from jrl.trainers.rollouts.rehearsal import Rehearsal

_FEWEST = 2
"""Rows of the iteration, where neither groups nor the mesh ask for more."""
# Fields of methods that make an iteration long, and their shortest values.
_SHORTEST: Mapping[str, Any] = {
    "rollout_slots": None,
    "ppo_epochs": 1,
    "num_iterations": 1,
    "max_sampling_rounds": 1,
    "prompts_per_round": None,
    "n_generations_per_prompt": _FEWEST,
    "n_improve_steps": 1,
    "precompute_ref_log_probs": False,
}


def add_dry_run_flag(command: argparse.ArgumentParser) -> None:
    """The flag of a command that trains."""
    command.add_argument(
        "--dry-run",
        action="store_true",
        help="try one tiny iteration: model, data and reward, the tokens of a sample, memory; then stop",
    )


def smallest(config: TRLConfig, run_dir: str) -> TRLConfig:
    """The configuration with iterations as small as its groups and its mesh allow; lengths stay.

    Args:
      config: The user's.
      run_dir: Folder in the place of the run's.
    Raises:
      ValueError: If devices sample apart from those that learn.
    """
    if config.train.sampling_mesh is not None:
        raise ValueError(
            "--dry-run needs `train.sampling_mesh: null`: one iteration alone has nothing to collect ahead, got "
            f"{config.train.sampling_mesh}."
        )
    method = vars(config.method)
    rows = math.lcm(method.get("num_generations", 1), rows_parts(mesh_of(config)))
    rows *= math.ceil(_FEWEST / rows)
    sizes: dict[str, Any] = {name: rows for name in ("num_rollouts", "chunk_size") if name in method}
    if "eval_prompts" in method:
        sizes["eval_prompts"] = method["eval_prompts"][:_FEWEST]
    shortest = {name: value for name, value in _SHORTEST.items() if name in method}
    return config.evolve(
        method=shortest | sizes,
        train={
            "batch_size": rows,
            "minibatch_size": None,
            "rollouts_ahead": 0,
            "checkpoint_dir": run_dir,
            "rollout_logging_dir": None,
            "resume_from_checkpoint": None,
            "tracker": None,
        },
    )


def check_run(config: TRLConfig) -> None:
    """Checks what the tiny iteration leaves out and the run needs: its tracker, and its folders.

    Args:
      config: The user's.
    Raises:
      MissingTrackerError: If the tracker's package is not installed.
      ValueError: If a field is out of range, a folder cannot be written, or there are several processes.
    """
    if jax.process_count() > 1:
        raise ValueError(
            f"--dry-run must run as one process, got {jax.process_count()}: each would try an iteration of its own. "
            "Leave out what makes this one a process of a job."
        )
    config.validate()
    check_tracker(config.train.tracker)
    for field in ("checkpoint_dir", "rollout_logging_dir", "logging_dir"):
        named = vars(config.train)[field]
        if named is not None:
            _check_folder(f"train.{field}", Path(named).absolute())


def _check_folder(field: str, folder: Path) -> None:
    """Checks, and makes nothing.

    Raises:
      ValueError: If the folder is none, or nothing can be written there.
    """
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
        reason = "is no folder" if not there.is_dir() else "cannot be written"
        raise ValueError(f"`{field}` must be a folder to write to, got {folder}: {there} {reason}.")


def dry_run(name: str, config: TRLConfig, make: Callable[[TRLConfig], Trainer]) -> Work:
    """Loads model and data at once; the iteration is made and shown when the result is called.

    Args:
      name: Of the command.
      config: The user's configuration.
      make: Makes the trainer of a configuration, its data added.
    Raises:
      ValueError: As `check_run` and `make` do; so does MissingTrackerError.
    """
    check_run(config)
    began = time.perf_counter()
    with CompileCounter() as compilations, _folder() as folder:
        trainer = make(smallest(config, folder))
    loaded = time.perf_counter() - began

    def work() -> int:
        console = Console()
        with compilations, _folder(trainer.run_dir):
            began = time.perf_counter()
            _say(console, f"jrl {name} --dry-run: compiles, evaluates and makes one iteration ...")
            trainer.evaluate()
            found = trainer.rehearse()
            taken = time.perf_counter() - began
        _show(console, trainer, found)
        refusal = _show_memory(console, config, trainer)
        seconds = compilations.seconds
        _say(
            console,
            f"\ntime: {loaded:.1f} s to load, {taken:.1f} s for evaluation and iteration; {seconds:.1f} s of them to "
            f"compile {compilations.count} programs of tiny batches (the run compiles its own)",
        )
        _say(console, _verdict(name, config) if refusal is None else f"the run would be refused: {refusal}")
        return int(refusal is not None)

    return work


@contextmanager
def _folder(path: Path | None = None) -> Iterator[str]:
    """A folder in the place of the run's, which goes unless completions that a reward function failed on are in it."""
    folder = Path(tempfile.mkdtemp(prefix="jrl_dry_run_")) if path is None else path
    try:
        yield str(folder)
    finally:
        shutil.rmtree(folder / GRIDS, ignore_errors=True)
        with suppress(OSError):
            folder.rmdir()


def _show(console: Console, trainer: Trainer, found: Rehearsal) -> None:
    """The first sample, token by token, what it earned, and the headline metrics."""
    rows = token_rows(found.batch, 0)
    if rows:
        console.print(Text("\none sample, as the learner reads it:", style="bold"))
        show_rows(console, rows, trainer.tokenizer)
    actions = [] if not rows else rows[0].tokens_of("action")
    for row in [row for row in found.rows if row.get("output_tokens", [])[: len(actions)] == actions][:1]:
        reward = row["reward"]
        said = "none: the function failed or does not apply" if reward is None else f"{reward:+.4g}"
        if "output" in row:
            _say(console, f"its text: {one_line(str(row['output']))!r:.400}")
        else:
            console.print(Text("\none image:", style="bold"))
            _say(console, f"its prompt: {one_line(str(row['prompt']))!r:.400}")
        _say(console, f"its reward: {said}")
    rewards = [row["reward"] for row in found.rows if row["reward"] is not None]
    if len(rewards) > 1 and len(set(rewards)) == 1:
        same = f"warning: all {len(rewards)} samples got the same reward, {rewards[0]:.4g}"
        console.print(Text(same, style="yellow"))
    _say(console, f"\nmetrics: {', '.join(headlines(found.metrics))}")


def _show_memory(console: Console, config: TRLConfig, trainer: Trainer) -> str | None:
    """What `jrl plan` says of the run as it is configured, on this mesh; returns why it refuses it, or None."""
    console.print(Text("\nmemory of the run as configured (`jrl plan`):", style="bold"))
    sizes = dict(trainer.mesh.shape)
    planned = config.evolve(train={"compute_dtype": trainer.config.train.compute_dtype})
    try:
        plan = plan_run(planned, abstract_mesh(**sizes, num_devices=trainer.mesh.size))
    except ValueError as error:
        _say(console, f"not planned: {error}")
        return (
            None if footprint_of(planned) is None else str(error)
        )  # of a method of the user's own there is no plan
    usable = usable_bytes()
    console.print(Text(plan.table(usable)), soft_wrap=True)
    if usable is not None and (found := gpu_advice()) and is_worth_more(plan.total, int(usable / GPU_SHARE)):
        _say(console, found)
    return None


def _say(console: Console, text: str) -> None:
    console.print(Text(text), soft_wrap=True)


def _verdict(name: str, config: TRLConfig) -> str:
    """What the user may do next."""
    run_dir, train = Path(config.train.checkpoint_dir), config.train
    if checkpoints_in(run_dir) and not train.overwrite and train.resume_from_checkpoint is None:
        return (
            f"model, data and reward work together, but {run_dir} holds checkpoints: the run would stop. Name another "
            "`train.checkpoint_dir`, or resume (`train.resume_from_checkpoint`), or set `train.overwrite`."
        )
    return f"model and data work together; nothing was saved. `jrl {name}` without --dry-run trains, in {run_dir}."

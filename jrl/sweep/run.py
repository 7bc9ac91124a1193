# SPDX-License-Identifier: Apache-2.0
"""A sweep carried out by Ray Tune. Ray is an extra, so this module is imported only when a sweep is asked for."""

from __future__ import annotations

import functools
import inspect
import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

# Read while Ray is imported or started: relative paths of a script mean what they mean without a sweep, nothing is
# sent anywhere, each trial writes one log of its reports instead of four, and the lines below are all that is printed.
os.environ.setdefault("RAY_CHDIR_TO_TRIAL_DIR", "0")
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("TUNE_DISABLE_AUTO_CALLBACK_LOGGERS", "1")
os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")

try:
    import matplotlib as _matplotlib  # noqa: F401  # to be missed now, not when all trials have run
    import ray
    from ray import tune
    from ray.tune.logger import JsonLoggerCallback
    from ray.tune.schedulers import (
        AsyncHyperBandScheduler,
        FIFOScheduler,
        HyperBandForBOHB,
        HyperBandScheduler,
        MedianStoppingRule,
    )
    from ray.tune.search import SEARCH_ALG_IMPORT
except ImportError as error:
    raise ValueError(
        f"sweeps need Ray Tune and matplotlib: pip install 'ray[tune]' matplotlib ({error})."
    ) from error

from jrl.sweep.plan import TIME, SweepError, SweepPlan, check_arguments
from jrl.sweep.results import Status, TrialResult, format_value, make_table, ranked, write_results
from jrl.sweep.trial import FAILURE, FINISHED, first_line, plain, run_trial
from jrl.trainers.loggers.safe_text import for_terminal

SCHEDULERS_OF_RAY: dict[str, Any] = {
    "fifo": FIFOScheduler,
    "asynchyperband": AsyncHyperBandScheduler,
    "hyperband": HyperBandScheduler,
    "hb_bohb": HyperBandForBOHB,
    "medianstopping": MedianStoppingRule,
}
_SEEDS = ("random_state", "seed", "random_state_seed")
_OBJECT_STORE_BYTES = 128 * 2**20  # trials exchange numbers only


def prepare_sweep(
    plan: SweepPlan,
    script: Path,
    folder: Path,
    *,
    num_cpus: float | None = None,
    num_gpus: float | None = None,
    address: str | None = None,
) -> Callable[[], list[TrialResult]]:
    """Checks what can be checked before Ray is started.

    Args:
      plan: From `read_plan`.
      script: With `main(hparams)`.
      folder: Trials and results go there.
      num_cpus: Of each trial; None: its share of all.
      num_gpus: Of each trial; None: one where there are any.
      address: Of a Ray cluster; None: a Ray of this machine alone, for this sweep.
    Returns:
      A function that carries the sweep out, writes and prints the results, and returns them best first.
    Raises:
      ValueError: If searcher or scheduler cannot be made of what the plan says or need a library that is missing, or if
        the folder holds another sweep.
    """
    if any(folder.glob("trial_*")):
        raise ValueError(f"{folder} holds the trials of an earlier sweep: give another --output-dir.")
    space = {name: parameter.domain(tune) for name, parameter in plan.parameters.items()}
    searcher = make_searcher(plan, space)
    scheduler = make_scheduler(plan)

    def work() -> list[TrialResult]:
        folder.mkdir(parents=True, exist_ok=True)
        # A failed trial is one line of `Progress`; its traceback lies in its folder.
        logging.getLogger("ray.tune").setLevel(logging.CRITICAL)
        started = not ray.is_initialized()
        try:
            if started:
                local: dict[str, Any] = {
                    "include_dashboard": False,
                    "object_store_memory": _OBJECT_STORE_BYTES,
                }
                ray.init(
                    address, log_to_driver=False, logging_level=logging.ERROR, **({} if address else local)
                )
            resources = trial_resources(ray.cluster_resources(), num_cpus=num_cpus, num_gpus=num_gpus)
            print(
                f"{plan.num_trials} trials of {script}, {plan.search_alg.name} and {plan.scheduler.name}, "
                f"{resources['cpu']:g} CPUs and {resources['gpu']:g} GPUs each, in {folder}",
                flush=True,
            )
            grid = _tuner(plan, script, folder, space, searcher, scheduler, resources).fit()
        except (ValueError, RuntimeError, ConnectionError, ray.exceptions.RayError) as error:
            raise SweepError(first_line(error)) from error
        finally:
            if started:
                ray.shutdown()
        results = ranked([_result(grid[index], plan) for index in range(len(grid))], plan.mode)
        waiting = sum(result.status == "waiting" for result in results)
        if waiting:
            print(f"The sweep ended early: {waiting} of {len(results)} trials had not begun.", flush=True)
        write_results(folder, plan, results)
        Console().print(make_table(plan, results))
        return results

    return work


def make_searcher(plan: SweepPlan, space: Mapping[str, Any]) -> Any:
    """Ray's searcher of a plan, seeded.

    Raises:
      ValueError: If its library is missing, it has no such argument, or it cannot search this space.
    """
    name, arguments = plan.search_alg.name, plan.search_alg.arguments
    try:
        cls: Any = SEARCH_ALG_IMPORT[name]()
        check_arguments(plan.search_alg, cls, ("space", "metric", "mode", *_SEEDS), where="search_alg")
        seeds = {key: plan.seed for key in _SEEDS if key in _parameters(cls)}
        searcher = cls(**seeds, **arguments)
        if name != "random":
            cls.convert_search_space(dict(space))
    except (ImportError, AssertionError) as error:
        raise ValueError(
            f"`tune_config.search_alg`: {name} needs a library that is not there: {first_line(error)}"
        ) from error
    except (ValueError, NotImplementedError, TypeError) as error:
        raise ValueError(f"`tune_config.search_alg`: {first_line(error)}") from error
    return searcher


def make_scheduler(plan: SweepPlan) -> Any:
    """Ray's scheduler of a plan; its time is the number of evaluations, unless the plan says otherwise.

    Raises:
      ValueError: If it has no such argument, or refuses its value.
    """
    cls = SCHEDULERS_OF_RAY[plan.scheduler.name]
    check_arguments(plan.scheduler, cls, ("metric", "mode"), where="scheduler")
    known = _parameters(cls)
    defaults: dict[str, Any] = {"time_attr": TIME} if "time_attr" in known else {}
    if plan.scheduler.name == "medianstopping":
        defaults["grace_period"] = 1  # Ray's default counts seconds
    try:
        return cls(**{**defaults, **plan.scheduler.arguments})
    except (AssertionError, ValueError, TypeError) as error:
        raise ValueError(
            f"`tune_config.scheduler`: {plan.scheduler.name} refuses {plan.scheduler.arguments}: {first_line(error)}"
        ) from error


def trial_resources(
    cluster: Mapping[str, float], *, num_cpus: float | None, num_gpus: float | None
) -> dict[str, float]:
    """CPUs and GPUs of each trial.

    Args:
      cluster: What there is in all.
      num_cpus: What was asked for; None: the trial's share of all, at least one.
      num_gpus: What was asked for; None: one where there are any.
    Raises:
      ValueError: If a trial asks for more than there is: it would wait for ever.
    """
    cpus, gpus = cluster.get("CPU", 0.0), cluster.get("GPU", 0.0)
    gpu = min(1.0, gpus) if num_gpus is None else num_gpus
    together = max(1, int(gpus / gpu)) if gpu > 0 else 1
    cpu = max(1.0, float(math.floor(cpus / together))) if num_cpus is None else num_cpus
    for flag, asked, there in (("--num-cpus", cpu, cpus), ("--num-gpus", gpu, gpus)):
        if not 0 <= asked <= there:
            raise ValueError(
                f"{flag} must be at least 0 and at most {there:g}, all that Ray has, got {asked:g}."
            )
    return {"cpu": cpu, "gpu": gpu}


class Progress(tune.Callback):  # type: ignore[misc]
    """Prints a line for each trial that begins, reports, ends or fails.

    Args:
      plan: What is searched.
    """

    def __init__(self, plan: SweepPlan) -> None:
        self._plan, self._numbers = plan, dict[str, int]()

    def on_trial_start(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Ray."""
        values = "  ".join(f"{name} {format_value(trial.config[name])}" for name in self._plan.parameters)
        self._numbers.setdefault(trial.trial_id, len(self._numbers) + 1)
        self._say(trial, values)

    def on_trial_result(
        self, iteration: int, trials: list[Any], trial: Any, result: dict[str, Any], **info: Any
    ) -> None:
        """Called by Ray."""
        metric = self._plan.metric
        self._say(trial, f"step {result.get('step')}  {metric} {format_value(result.get(metric))}")

    def on_trial_error(self, iteration: int, trials: list[Any], trial: Any, **info: Any) -> None:
        """Called by Ray."""
        self._say(trial, f"failed, see {trial.path}")

    def _say(self, trial: Any, text: str) -> None:
        number = self._numbers.get(trial.trial_id, 0)
        # Not a console of rich: Ray pickles its callbacks.
        print(f"trial {number}/{self._plan.num_trials} {trial.trial_id}  {for_terminal(text)}", flush=True)


def _tuner(
    plan: SweepPlan,
    script: Path,
    folder: Path,
    space: Mapping[str, Any],
    searcher: Any,
    scheduler: Any,
    resources: Mapping[str, float],
) -> tune.Tuner:
    names = {
        "train.project_name": f"sweep_{script.stem}",
        "train.group_name": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }
    trainable = functools.partial(
        _trainable,
        script=str(script.resolve()),
        metric=plan.metric,
        fixed=names | plan.fixed,  # not in the space: some searchers forget what is no draw of theirs
        gpus=resources["gpu"],
    )
    return tune.Tuner(
        tune.with_resources(trainable, {kind: count for kind, count in resources.items() if count}),
        param_space=dict(space),
        tune_config=tune.TuneConfig(
            metric=plan.metric,
            mode=plan.mode,
            search_alg=searcher,
            scheduler=scheduler,
            num_samples=plan.num_samples,
            max_concurrent_trials=plan.max_concurrent_trials,
            time_budget_s=plan.time_budget_s,
            trial_dirname_creator=lambda trial: f"trial_{trial.trial_id}",
        ),
        run_config=tune.RunConfig(
            name=folder.resolve().name,
            storage_path=str(folder.resolve().parent),
            callbacks=[JsonLoggerCallback(), Progress(plan)],
            log_to_file=True,
            sync_config=tune.SyncConfig(sync_artifacts=True),
            verbose=0,
        ),
    )


def _trainable(
    values: dict[str, Any], *, script: str, metric: str, fixed: dict[str, Any], gpus: float
) -> None:
    """Runs a trial, in a process of Ray's own."""
    if 0 < gpus < 1:
        # Several trials share a GPU: none may take it whole. Nothing of jax has touched a device yet.
        os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    folder = Path(tune.get_context().get_trial_dir())
    config: Any = jax.config  # its attributes are made at run time
    if config.jax_compilation_cache_dir is None:
        # Trials compile many equal programs.
        config.update("jax_compilation_cache_dir", str(folder.parent / "jax_cache"))
    drawn = {name: plain(value) for name, value in values.items()}
    run_trial({**fixed, **drawn}, script=script, metric=metric, folder=folder, report=tune.report)


def _result(found: Any, plan: SweepPlan) -> TrialResult:
    """A trial from what Ray kept of it; reports that a restarted trial made twice count once."""
    frame = found.metrics_dataframe
    curve: dict[int, float] = {}
    if frame is not None and {"step", plan.metric} <= set(frame.columns):
        curve = {int(s): float(m) for s, m in zip(frame["step"], frame[plan.metric], strict=True)}
    folder = Path(found.path)
    failed = found.error is not None
    failure = folder / FAILURE
    error = None
    if failed:  # what the script raised, or, where its process died, what Ray knows of that
        error = failure.read_text(encoding="utf-8").strip() if failure.exists() else first_line(found.error)
    status: Status = "stopped" if found.config else "waiting"
    if failed or (folder / FINISHED).exists():
        status = "failed" if failed else "done"
    return TrialResult(
        trial=folder.name.removeprefix("trial_"),
        values={
            name: plain(value) for name, value in (found.config or {}).items() if name in plan.parameters
        },
        status=status,
        curve=dict(sorted(curve.items())),
        seconds=float((found.metrics or {}).get("time_total_s", 0.0)),
        folder=str(folder),
        error=error,
    )


def _parameters(cls: Any) -> list[str]:
    return list(inspect.signature(cls).parameters)

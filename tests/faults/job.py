# SPDX-License-Identifier: Apache-2.0
"""A run in a process of its own, for tests that hurt it: `job.py OPTIONS`, one JSON object (see `jobs.start`).

It says what it begins: `begins run`, `begins rollout`, `begins update`, `begins checkpoint`.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jrl
from jrl.trainers.base import Trainer
from jrl.trainers.loop.hooks import Hooks, watch
from tests.faults import injected
from tests.trainers.diffusion import runs as diffusion_runs
from tests.trainers.runs import (
    COMPARISONS,
    EPISODES,
    PREFERENCES,
    PROMPTS,
    REWARDED,
    count_vowels,
    dpo_config,
    dynamic_config,
    episodes_config,
    ilql_config,
    odd_vowels,
    ppo_config,
    reward_config,
    rft_config,
    sft_config,
)

DEMONSTRATIONS = ["the cat sat", "a dog ran", "so it goes", "rain again", "one more", "we go on"]
CONFIGS = {
    "ppo": ppo_config,
    "grpo": dynamic_config,
    "rft": rft_config,
    "sft": sft_config,
    "ilql": ilql_config,
    "episodes": episodes_config,
    "dpo": dpo_config,
    "reward": reward_config,
}


def ahead_config(checkpoint: str, run_dir: Path, **sections: Any) -> jrl.TRLConfig:
    """PPO whose rollouts are two iterations ahead."""
    return ppo_config(checkpoint, run_dir, **sections).evolve(train={"rollouts_ahead": 2})


CONFIGS["ahead"] = ahead_config


def say(what: str) -> None:
    """One line of the log, at once."""
    print(what, flush=True)


def announced(reward_fn: Callable[..., Any]) -> Callable[..., Any]:
    """A reward function that says when it is called: a rollout is then in progress."""

    def call(outputs: list[str], **others: Any) -> Any:
        say("begins rollout")
        return reward_fn(outputs, **others)

    return call


def announce_updates() -> None:
    """Every trainer made from now on says when it dispatches an update."""
    compile_learner = Trainer.compile_learner

    def compile_and_announce(trainer: Trainer, *arguments: Any) -> None:
        compile_learner(trainer, *arguments)
        update = trainer.update

        def announcing(*call: Any) -> Any:
            say("begins update")
            return update(*call)

        trainer.update = announcing

    Trainer.compile_learner = compile_and_announce


def measure(outputs: list[str], **others: Any) -> dict[str, list[float]]:
    """A metric function."""
    return {"vowels": count_vowels(outputs, **others)}


def data_of(algorithm: str, reward_fn: Callable[..., Any]) -> dict[str, Any]:
    """What `jrl.train` is given beside the configuration and the metrics."""
    if algorithm in ("ppo", "ahead", "grpo", "rft"):
        return {"reward_fn": announced(reward_fn), "prompts": PROMPTS, "eval_prompts": PROMPTS[:2]}
    if algorithm == "ilql":
        samples, rewards = zip(*REWARDED, strict=True)
        return {"samples": list(samples), "rewards": list(rewards), "eval_prompts": ["the"]}
    if algorithm == "episodes":
        return {"samples": EPISODES, "eval_prompts": ["a?"]}
    if algorithm == "reward":
        return {"samples": COMPARISONS}
    samples = PREFERENCES if algorithm == "dpo" else DEMONSTRATIONS
    return {"samples": samples, "eval_prompts": ["the"]}


def config_of(algorithm: str, checkpoint: str, folder: str, train: dict[str, Any]) -> jrl.TRLConfig:
    """Saves often and resumes from its own folder, unless `train` says otherwise."""
    # A step of the others takes a tenth of the time of one that samples: a save must not always be in progress.
    interval = 12 if algorithm in ("ppo", "ahead", "grpo", "rft", "ddpo") else 40
    usual = {"epochs": 1000, "checkpoint_interval": interval, "eval_interval": 1000}
    usual |= {"resume_from_checkpoint": folder}
    method = {"sync_ref_model": True, "ref_model_sync_steps": 3} if algorithm == "dpo" else {}
    if algorithm == "ddpo":
        method = {"eval_prompts": list(diffusion_runs.PROMPTS)}
        return diffusion_runs.ddpo_config(Path(folder), train=usual | train, method=method)
    return CONFIGS[algorithm](checkpoint, Path(folder), train=usual | train, method=method)


def run(algorithm: str, config: jrl.TRLConfig, options: dict[str, Any]) -> None:
    """Trains; images are judged by their brightness, texts by their vowels."""

    def function(name: str, healthy: Callable[..., Any]) -> Callable[..., Any]:
        if options.get("forks"):
            healthy = injected.forking(healthy)
        return injected.failing(healthy, **options[name]) if name in options else healthy

    if algorithm != "ddpo":
        reward_fn = odd_vowels if algorithm == "grpo" else count_vowels
        metric_fn = function("metric", measure) if "metric" in options else None
        data = data_of(algorithm, function("reward", reward_fn))
        jrl.train(config=config, metric_fn=metric_fn, **data)
        return

    def brightness(*batch: Any) -> Any:
        say("begins rollout")
        return diffusion_runs.brightness(*batch)

    diffusion_runs.trainer_of(config, reward=function("reward", brightness)).learn()


def main(options: dict[str, Any]) -> None:
    """Trains, with whatever the options hurt."""
    warnings.simplefilter("always")
    algorithm, folder = options["algorithm"], options["folder"]
    config = config_of(algorithm, options["checkpoint"], folder, options["train"])
    announce_updates()
    disk = injected.Disk(**options["disk"]) if "disk" in options else None
    hooks = Hooks(
        log=lambda record: None if disk is None else disk.heard(record["step"]),
        save=lambda _: say("begins checkpoint"),
    )
    with watch(hooks), injected.poisoned(options.get("poison", {})):
        say("begins run")
        try:
            run(algorithm, config, options)
        finally:
            if disk is not None:
                disk.copy(Path(folder))
    say("ended in order")


def main_logged(options: dict[str, Any], environment: dict[str, str], log: str) -> None:
    """The same with further environment variables, and with both outputs in a file."""
    os.environ.update(environment)
    file = os.open(log, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    main(options)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))

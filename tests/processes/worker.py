# SPDX-License-Identifier: Apache-2.0
"""A tiny run as one process of a job: `worker.py SPECIFICATION`, a JSON file.

It holds `algorithm`, `checkpoint`, `folder` (of the run and of what this writes), `sections` that replace fields of
the configuration, `reward`, the name of a function below, and `environment`, of a class below. In the end each writes:
`result_<process>.json` with the history and some text, and `params_<process>.npz` with all that trained.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrl
from jrl.api import prepare
from jrl.placement import fetch
from tests.trainers import runs

ROWS_SEEN: list[list[str]] = []
"""Prompts of every call of the reward function in this process."""

WORLDS: list[list[Any]] = []
"""Prompt and seed of every world of this process."""


def vowels(outputs: list[str], prompts: list[str], **others: Any) -> list[float]:
    """Share of vowels."""
    ROWS_SEEN.append(list(prompts))
    return runs.count_vowels(outputs, **others)


def vowels_in_jax(outputs: list[str], prompts: list[str]) -> jax.Array:
    """The same on this process's device, whatever the others do: the number of its rows may differ from theirs."""
    return 1.0 * jnp.asarray(vowels(outputs, prompts))


def fails_in_process_1(outputs: list[str], prompts: list[str], **others: Any) -> list[float]:
    """The same, and an error in the second process once there were two good calls."""
    if jax.process_index() == 1 and len(ROWS_SEEN) >= 2:
        raise OSError("the judge is down")
    return vowels(outputs, prompts, **others)


def fails_on_dogs(outputs: list[str], prompts: list[str], **others: Any) -> list[float]:
    """The same, and an error on one prompt."""
    if any("dog" in prompt for prompt in prompts):
        raise OSError("no dogs")
    return vowels(outputs, prompts, **others)


async def short_or_silent(outputs: list[str], prompts: list[str]) -> list[float | None]:
    """Applies to all prompts but one."""
    await asyncio.sleep(0)
    return [
        None if "dog" in prompt else -len(text) / 10 for prompt, text in zip(prompts, outputs, strict=True)
    ]


def even_or_silent(outputs: list[str]) -> list[float | None]:
    """Applies to some samples of a prompt: those with an even number of letters."""
    return [None if len(text) % 2 else len(text) / 10 for text in outputs]


class Parrot:
    """Repeats a turn's letters, twice at most, and likes vowels; what it says depends on its seed."""

    def reset(self, prompt: str, seed: int) -> str:
        WORLDS.append([prompt, seed])
        self.most = 1 + seed % 2
        return " so" if seed % 3 else ""

    def step(self, text: str, turn: int) -> tuple[str, float, bool]:
        return f" {text[:2]}", runs.count_vowels([text])[0], turn == self.most


class Moody(Parrot):
    """The same, and fails in its second turn where its seed is odd."""

    def step(self, text: str, turn: int) -> tuple[str, float, bool]:
        if self.most == 2 and turn == 1:
            raise OSError("no more words")
        return super().step(text, turn)


class Computing(Parrot):
    """The same by JAX; fails where devices of other processes would take part, whose worlds ask for other programs."""

    def step(self, text: str, turn: int) -> tuple[str, float, bool]:
        said, reward, done = super().step(text, turn)
        number = 1.0 * jnp.asarray(reward)
        assert number.is_fully_addressable
        return said, float(number), done


def letters(outputs: list[str]) -> dict[str, Any]:
    """A metric of JAX's that says in which process it ran, on devices of how many, and on how many rows."""
    numbers = 1.0 * jnp.asarray([float(len(text)) for text in outputs])
    return {
        "letters": np.asarray(numbers).tolist(),
        "process": float(jax.process_index()),
        "computed_in": float(len({device.process_index for device in numbers.sharding.device_set})),
    }


REWARDS: dict[str, Any] = {
    "several": [vowels, short_or_silent],
    "partly_silent": [vowels, even_or_silent],
    **{
        function.__name__: function for function in (vowels, vowels_in_jax, fails_in_process_1, fails_on_dogs)
    },
}
ENVIRONMENTS: dict[str, Any] = {world.__name__: world for world in (Parrot, Moody, Computing)}
TEXTS = ["the cat sat", "a dog ran", "so it goes", "rain again", "one more", "we go on"]


def make_trainer(algorithm: str, config: jrl.TRLConfig, reward: str, environment: str | None) -> Any:
    """The trainer with its data."""
    if environment is not None:
        return prepare(
            config=config,
            environment=ENVIRONMENTS[environment],
            prompts=runs.PROMPTS,
            eval_prompts=runs.PROMPTS[:3],
        )
    if algorithm in ("ppo", "grpo", "rft"):
        return prepare(
            config=config,
            reward_fn=REWARDS[reward],
            metric_fn=letters,
            prompts=runs.PROMPTS,
            eval_prompts=runs.PROMPTS[:3],
        )
    if algorithm == "ilql":
        samples, rewards = zip(*runs.REWARDED, strict=True)
        return prepare(config=config, samples=list(samples), rewards=list(rewards), eval_prompts=["the"])
    if algorithm == "dpo":
        trainer = prepare(config=config, samples=runs.PREFERENCES, eval_prompts=["the"])
        trainer.add_eval_samples(runs.PREFERENCES[:3])
        return trainer
    if algorithm == "reward":
        return prepare(config=config, samples=runs.COMPARISONS)
    return prepare(config=config, samples=TEXTS, eval_prompts=["the", "rain"])


def main(specification: dict[str, Any]) -> None:
    """Trains, and writes what came of it."""
    algorithm, folder = specification["algorithm"], Path(specification["folder"])
    make_config = {
        "ppo": runs.ppo_config,
        "grpo": runs.dynamic_config,
        "rft": runs.rft_config,
        "ilql": runs.ilql_config,
        "dpo": runs.dpo_config,
        "reward": runs.reward_config,
        "sft": runs.sft_config,
    }[algorithm]
    config = make_config(specification["checkpoint"], folder / "run", **specification["sections"])
    reward, environment = specification.get("reward", "vowels"), specification.get("environment")
    trainer = make_trainer(algorithm, config, reward, environment)
    trainer.learn()
    process = jax.process_index()
    result = {
        "history": runs.repeatable(trainer.history),
        "rows_seen": ROWS_SEEN,
        "worlds": WORLDS,
        # Of a world that fails there is no text: it would be an error.
        "generated": []
        if algorithm == "reward" or environment == "Moody"
        else trainer.generate(["the", "a dog", "we"]),
    }
    (folder / f"result_{process}.json").write_text(json.dumps(result), encoding="utf-8")
    leaves = jax.tree_util.tree_flatten_with_path(fetch(trainer.params))[0]
    np.savez(folder / f"params_{process}.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

# SPDX-License-Identifier: Apache-2.0
"""Learns a world of several turns, from recorded episodes or by playing, and plays it.

A GPT-2 of 2 layers with random weights learns. Every evaluation plays an episode from each start, with the likeliest
actions and with sampled ones. The last line that is printed holds the figures of the run; `--results` adds it to a
file. Other flags override the recipe (`--train.total_steps 100`); with `--clone.` in front, that of the stage that
clones recorded episodes before an online algorithm plays.
"""

from __future__ import annotations

import argparse
import itertools
import json
import tempfile
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import GPT2Config, PreTrainedTokenizerFast

import jrl

from ..stages import MAIN, RECIPES, split_by_stage
from .play import play, remembered
from .task import Algorithm, Task, World

ARCHITECTURE = dict(
    n_layer=2, n_embd=64, n_head=4, initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
CLONE = "clone"
END = ("\n",)
"""Ends an action."""
ONLINE = {"PPOTrainer": jrl.PPOTrainer, "OnlineTrainer": jrl.OnlineTrainer}
OFFLINE = {"ILQLTrainer": jrl.ILQLTrainer, "SFTTrainer": jrl.SFTTrainer}
ROUNDS = 4
"""Episodes from each start whose mean is the sampled figure of a run."""


def flags_of(algorithms: Mapping[str, Algorithm], *, run: str, doc: str | None) -> argparse.ArgumentParser:
    """The flags of every world.

    Args:
      algorithms: By name; the first is the default.
      run: Run folders are `runs/<run>/<date>`.
      doc: Docstring of the program.
    """
    top = argparse.ArgumentParser(description=(doc or "").partition("\n")[0], allow_abbrev=False)
    top.add_argument("--algorithm", choices=list(algorithms), default=next(iter(algorithms)))
    top.add_argument("--seed", type=int, default=0, help="of weights, data order and samples")
    top.add_argument(
        "--episodes", type=int, default=1000, help="recorded ones to learn from; the same ones for every seed"
    )
    top.add_argument("--output-dir", default=time.strftime(f"runs/{run}/%Y%m%d-%H%M%S"), help="run folder")
    top.add_argument("--results", type=Path, help="file to which a line of JSON is added")
    return top


def learn(
    task: Task, algorithms: Mapping[str, Algorithm], flags: argparse.Namespace, overrides: Sequence[str]
) -> int:
    """Trains one algorithm with one seed; prints and keeps a line of figures.

    Args:
      task: The world.
      algorithms: By name.
      flags: Of `flags_of`.
      overrides: Of the recipe.
    Returns:
      The exit status.
    """
    began, folder, algorithm = time.perf_counter(), Path(flags.output_dir), algorithms[flags.algorithm]
    tokenizer = task.tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    learner = offline if algorithm.clone is None else online
    found, history = learner(task, algorithm, tokenizer, flags, split_by_stage(overrides, [CLONE]))
    if found is None:
        return 0
    sampled = "metrics/sampled" if algorithm.clone is None else "reward/mean"
    curve = {
        record["step"]: [round(record[name], 3) for name in ("metrics/greedy", sampled)]
        for record in history
        if "metrics/greedy" in record
    }
    line = {
        "algorithm": flags.algorithm,
        **task.labels,
        "seed": flags.seed,
        **{name: round(value, 3) for name, value in found.items()},
        "curve": curve,
        "seconds": round(time.perf_counter() - began, 1),
    }
    print(json.dumps(line))
    if flags.results is not None:
        flags.results.parent.mkdir(parents=True, exist_ok=True)
        with flags.results.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
    return 0


Learned = tuple[dict[str, float] | None, Sequence[Mapping[str, Any]]]
"""Mean returns of a run, None where it was stopped, and the records of its trainer."""


def offline(
    task: Task,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerFast,
    flags: argparse.Namespace,
    overrides: Mapping[str, Sequence[str]],
) -> Learned:
    """Learns from recorded episodes."""
    folder = Path(flags.output_dir)
    config = configured(algorithm.recipe, algorithm.changes, folder / "run", flags.seed).evolve(
        method={"context_turns": task.context_turns},
        train={"seq_length": task.row_tokens},
        tokenizer={"tokenizer_path": str(folder / "tokenizer")},
    )
    config = jrl.apply_overrides(config, overrides[MAIN])
    config = config.evolve(model={"model_path": architecture(tokenizer, config.train.seq_length)})
    player = partial(offline_returns, task=task, context_turns=config.method.context_turns)

    def played(outputs: Sequence[str]) -> dict[str, float]:
        """Mean returns of the policy as it is; what an evaluation wrote is not looked at."""
        del outputs
        return player(trainer, seed=1000 * len(trainer.history), rounds=1)

    trainer = OFFLINE[config.train.trainer](config, metric_fn=played, stop_sequences=END)
    records = [task.record(index) for index in range(flags.episodes)]
    first = [task.world.reset(start)[1] for start in task.starts]
    trainer.add_data(samples=records, rewards=None, prompts=None, eval_prompts=first)
    trainer.learn()
    if trainer.interrupted:
        return None, []
    return player(trainer, seed=0, rounds=ROUNDS), trainer.history


def online(
    task: Task,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerFast,
    flags: argparse.Namespace,
    overrides: Mapping[str, Sequence[str]],
) -> Learned:
    """Clones recorded episodes, then learns by playing; a player remembers its whole episode."""
    folder = Path(flags.output_dir)
    config = configured(algorithm.recipe, algorithm.changes, folder / "run", flags.seed)
    config = jrl.apply_overrides(config, overrides[MAIN])
    prompts = [{"prompt": task.world.reset(start)[1], "start": start} for start in task.starts]
    first = cloned(task, algorithm, tokenizer, flags, overrides[CLONE], positions=config.train.seq_length)
    if first is None:
        return None, []

    def played(outputs: Sequence[str]) -> dict[str, float]:
        """Mean return of the likeliest actions; the evaluation itself plays sampled ones."""
        del outputs
        return {"greedy": online_return(trainer, prompts, do_sample=False)}

    config = config.evolve(model={"model_path": str(first)})
    trainer = ONLINE[config.train.trainer](
        config, environment=environment(task.world), metric_fn=played, stop_sequences=END
    )
    count = config.method.num_rollouts // config.method.num_generations
    trainer.add_data(
        samples=None, rewards=None, prompts=prompts * -(-count // len(prompts)), eval_prompts=prompts
    )
    trainer.learn()
    if trainer.interrupted:
        return None, []
    greedy = online_return(trainer, prompts, do_sample=False)
    sampled = online_return(trainer, prompts * ROUNDS, do_sample=True)
    return {"greedy": greedy, "sampled": sampled}, trainer.history


def cloned(
    task: Task,
    algorithm: Algorithm,
    tokenizer: PreTrainedTokenizerFast,
    flags: argparse.Namespace,
    overrides: Sequence[str],
    *,
    positions: int,
) -> Path | None:
    """Folder of a model that clones recorded episodes; None if the process was asked to stop.

    Args:
      task: The world.
      algorithm: Its `clone` says how.
      tokenizer: Of the model.
      flags: Of the run.
      overrides: Of the recipe.
      positions: Most tokens that the model can read.
    """
    assert algorithm.clone is not None, "it is learned online"
    folder = Path(flags.output_dir)
    recipe, changes = algorithm.clone
    config = configured(recipe, changes, folder / CLONE, flags.seed)
    model, params = jrl.load_model(architecture(tokenizer, positions), key=jax.random.key(flags.seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=[task.record(index) for index in range(flags.episodes)],
        eval_prompts=[task.world.reset(task.starts[0])[1]],
        config=jrl.apply_overrides(config, overrides),
    )
    return None if trainer.interrupted else Path(trainer.save_pretrained(folder / "cloned"))


def configured(recipe: str, changes: Mapping[str, Any], folder: Path, seed: int) -> jrl.TRLConfig:
    """A recipe with what an algorithm changes in it."""
    config = jrl.TRLConfig.load_yaml(RECIPES / f"{recipe}.yaml").evolve(**changes)
    return config.evolve(train={"seed": seed, "checkpoint_dir": str(folder)})


def architecture(tokenizer: PreTrainedTokenizerFast, positions: int) -> GPT2Config:
    """The small GPT-2 of all runs."""
    return GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=positions,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **ARCHITECTURE,
    )


def environment(world: World) -> type:
    """The world as an environment of `jrl.train`; a prompt's metadata holds its `start`."""

    class Environment:
        """An episode."""

        def reset(self, start: Any) -> None:
            """Begins; the first observation is the prompt."""
            self._state, _ = world.reset(start)

        def step(self, text: str) -> tuple[str, float, bool]:
            """Answers an action."""
            self._state, observation, reward, done = world.step(self._state, text)
            return observation, reward, done

    return Environment


def offline_returns(
    trainer: Any, *, task: Task, context_turns: int | None, seed: int, rounds: int
) -> dict[str, float]:
    """Mean return over the starts, of the likeliest actions and of sampled ones.

    Args:
      trainer: Its sampler answers.
      task: The world.
      context_turns: As in training.
      seed: Of the first samples; each further call takes the next one.
      rounds: Sampled episodes from each start.
    """
    seeds = itertools.count(seed)
    likeliest = partial(trainer.generate, gen_kwargs={"do_sample": False})

    def sample(contexts: Sequence[str]) -> list[str]:
        return trainer.generate(contexts, seed=next(seeds))

    played = partial(play, task.world, task.starts, context_turns=context_turns)
    greedy = played(remembered(likeliest))
    sampled = [played(sample) for _ in range(rounds)]
    return {"greedy": float(greedy.mean()), "sampled": float(np.mean(sampled))}


def online_return(trainer: Any, prompts: Sequence[Mapping[str, Any]], *, do_sample: bool) -> float:
    """Mean return of an episode from each prompt.

    Args:
      trainer: Plays, with the limits of `method.gen_kwargs`, which hold the longest episode.
      prompts: With their starts.
      do_sample: Whether actions are sampled; otherwise they are the likeliest.
    Raises:
      ValueError: If a limit cut an episode.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "episodes.jsonl"
        trainer.record_episodes(prompts, path, gen_kwargs={"do_sample": do_sample})
        episodes = jrl.read_records(path)
    if not all(episode["done"] for episode in episodes):
        raise ValueError("`method.gen_kwargs` must hold the longest episode, and cut one.")
    return float(np.mean([sum(turn["reward"] for turn in episode["turns"]) for episode in episodes]))

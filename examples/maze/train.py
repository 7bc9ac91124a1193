# SPDX-License-Identifier: Apache-2.0
"""Learns the maze from recorded episodes of a poor player, and plays it.

    python -m examples.maze.train --algorithm ilql --observed fully --seed 0

A GPT-2 of 2 layers with random weights reads episodes that return -83 on average. `--algorithm` is ilql, mc (Q learns
the returns of the data), cloning or filtered (cloning of the best tenth). Every evaluation plays an episode from each
of the 25 starts, with the likeliest moves and with sampled ones. The last line that is printed holds the figures of the
run; `--results` adds it to a file. Other flags override the recipe (`--train.total_steps 100`).
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import GPT2Config

import jrl

from .data import Turn, episode
from .maze import STARTS, SUCCESS, Maze
from .play import play, remembered
from .tokenizer import clause_tokenizer

RECIPES = Path(__file__).resolve().parents[2] / "configs"
ARCHITECTURE = dict(
    n_layer=2, n_embd=64, n_head=4, initializer_range=0.1, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
)
SHORT = {"train": {"total_steps": 1500}, "scheduler": {"kwargs": {"T_max": 1500}}}
ALGORITHMS: dict[str, tuple[str, dict[str, Any]]] = {
    "ilql": ("ilql_maze", {}),
    "mc": ("ilql_maze", SHORT | {"method": {"target": "mc"}}),  # nothing has to spread from turn to turn
    "cloning": ("sft_maze", {}),
    "filtered": ("sft_maze", {"method": {"best_share": 0.1}}),
}
"""Recipe of each algorithm, and what it changes in it."""
TRAINERS = {"ilql_maze": jrl.ILQLTrainer, "sft_maze": jrl.SFTTrainer}
MEMORY = {"fully": (0, 9), "partly": (2, 15)}
"""Turns that a player remembers, and the tokens of the longest row with them."""
ROUNDS = 4
"""Episodes from each start whose mean is the sampled figure of a run."""


def main(argv: Sequence[str] | None = None) -> int:
    """Trains one algorithm with one seed."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("--algorithm", choices=list(ALGORITHMS), default="ilql")
    top.add_argument("--observed", choices=list(MEMORY), default="fully")
    top.add_argument("--seed", type=int, default=0, help="of weights, data order and samples")
    top.add_argument("--episodes", type=int, default=1000, help="to learn from; the same ones for every seed")
    top.add_argument("--output-dir", default=time.strftime("runs/maze/%Y%m%d-%H%M%S"), help="run folder")
    top.add_argument("--results", type=Path, help="file to which a line of JSON is added")
    flags, overrides = top.parse_known_args(argv)
    began, folder = time.perf_counter(), Path(flags.output_dir)
    maze, (context_turns, seq_length) = Maze(shows_position=flags.observed == "fully"), MEMORY[flags.observed]

    tokenizer = clause_tokenizer()
    tokenizer.save_pretrained(folder / "tokenizer")
    recipe, changes = ALGORITHMS[flags.algorithm]
    config = jrl.TRLConfig.load_yaml(RECIPES / f"{recipe}.yaml").evolve(**changes)
    config = config.evolve(
        method={"context_turns": context_turns},
        train={"seq_length": seq_length, "seed": flags.seed, "checkpoint_dir": str(folder)},
        tokenizer={"tokenizer_path": str(folder / "tokenizer")},
    )
    config = jrl.apply_overrides(config, overrides)
    architecture = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=config.train.seq_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        **ARCHITECTURE,
    )
    config = config.evolve(model={"model_path": architecture})
    context_turns = config.method.context_turns

    def played(outputs: Sequence[str]) -> dict[str, float]:
        """Mean returns of the policy as it is; what an evaluation wrote is not looked at."""
        del outputs
        return returns(trainer, maze, context_turns=context_turns, seed=1000 * len(trainer.history), rounds=1)

    trainer = TRAINERS[recipe](config, metric_fn=played)
    records = [record(episode(maze, 0, index)) for index in range(flags.episodes)]
    first = [maze.reset(start)[1] for start in STARTS]
    trainer.add_data(samples=records, rewards=None, prompts=None, eval_prompts=first)
    trainer.learn()
    if trainer.interrupted:
        return 0
    found = returns(trainer, maze, context_turns=context_turns, seed=0, rounds=ROUNDS)
    curve = {
        record["step"]: [round(record[f"metrics/{name}"], 3) for name in ("greedy", "sampled")]
        for record in trainer.history
        if "metrics/greedy" in record
    }
    line = {
        "algorithm": flags.algorithm,
        "observed": flags.observed,
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


def record(turns: Sequence[Turn]) -> dict[str, Any]:
    """A recorded episode in jrl's form, in which an observation is the answer to the turn before it.

    The limit of moves is no end of the maze. So an episode that did not reach the goal is not `done`, and what was said
    behind its last move, answered by a failure whatever it is, is left out.
    """
    done = turns[-1].reward == 0
    answers = [turn.observation for turn in turns[1:]] + [SUCCESS] * done
    return {
        "prompt": turns[0].observation,
        "turns": [
            {"output": turn.action, "reward": turn.reward, "observation": answer}
            for turn, answer in zip(turns, answers, strict=False)
        ],
        "done": done,
    }


def returns(trainer: Any, maze: Maze, *, context_turns: int, seed: int, rounds: int) -> dict[str, float]:
    """Mean return over the starts, of the likeliest moves and of sampled ones.

    Args:
      trainer: Its sampler answers.
      maze: The world.
      context_turns: As in training.
      seed: Of the first samples; each further call takes the next one.
      rounds: Sampled episodes from each start.
    """
    seeds = itertools.count(seed)
    likeliest = partial(trainer.generate, gen_kwargs={"do_sample": False})

    def sample(contexts: Sequence[str]) -> list[str]:
        return trainer.generate(contexts, seed=next(seeds))

    greedy = play(maze, remembered(likeliest), context_turns=context_turns)
    sampled = [play(maze, sample, context_turns=context_turns) for _ in range(rounds)]
    return {"greedy": float(greedy.mean()), "sampled": float(np.mean(sampled))}


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""Memory of a process over 10,000 episodes, some of which fail or answer with 10 MB of text.

    python benchmarks/episode_memory.py [--episodes 10000]

PPO of a random GPT-2 of 2 layers plays five moves an episode in the maze of examples/maze. One world in 100 raises in
its third turn, and one in 100 answers with 10 MB. Prints a line of JSON: MiB that the process holds (resident, all of
its threads) at the beginning of an iteration, by the number of episodes before it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import jax

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT)]

import jrl  # noqa: E402
from examples.maze.maze import STARTS, Maze  # noqa: E402
from examples.maze.tokenizer import clause_tokenizer  # noqa: E402
from examples.worlds.train import END, RECIPES, architecture  # noqa: E402

AN_ITERATION, TURNS, HUGE = 500, 5, 10_000_000
GENERATION = {"max_new_tokens": 9 * TURNS, "max_turns": TURNS, "max_turn_tokens": 1, "do_sample": True}


def resident() -> float:
    """MiB of memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * 4096 / 2**20


class World:
    """The maze, whose every hundredth episode raises and whose every hundredth answers too much."""

    begun: ClassVar[int] = 0
    held: ClassVar[dict[int, float]] = {}

    def reset(self, start: Any) -> None:
        """Begins; the first observation is the prompt."""
        if World.begun % AN_ITERATION == 0:
            World.held[World.begun] = round(resident(), 1)
        self.number, World.begun = World.begun, World.begun + 1
        self.state, _ = Maze(shows_position=True).reset(start)

    def step(self, text: str, turn: int) -> tuple[str, float, bool]:
        """Answers a move."""
        if turn == 2 and self.number % 100 == 17:
            raise RuntimeError("the lamp went out")
        if turn == 2 and self.number % 100 == 42:
            return "x" * HUGE, -1.0, False
        self.state, observation, reward, done = Maze(shows_position=True).step(self.state, text)
        return observation, reward, done


def main() -> int:
    """Plays and prints."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0], allow_abbrev=False)
    top.add_argument("--episodes", type=int, default=10_000)
    count = top.parse_args().episodes
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = clause_tokenizer()
        model, params = jrl.load_model(architecture(tokenizer, 128), key=jax.random.key(0))
        jrl.save_model(f"{folder}/model", model, params, tokenizer)
        config = jrl.TRLConfig.load_yaml(RECIPES / "ppo_maze.yaml").evolve(
            model={"model_path": f"{folder}/model"},
            method={
                "num_rollouts": AN_ITERATION,
                "chunk_size": AN_ITERATION // 5,
                "ppo_epochs": 1,
                "gen_kwargs": GENERATION,
                "gen_experience_kwargs": GENERATION,
            },
            train={
                "seq_length": 64,
                "batch_size": 50,
                "total_steps": 10**6,
                "epochs": count // AN_ITERATION,
                "eval_interval": 10**6,
                "reward_errors": "skip",
                "checkpoint_dir": f"{folder}/run",
            },
        )
        prompts = [{"prompt": Maze(shows_position=True).reset(start)[1], "start": start} for start in STARTS]
        jrl.train(environment=World, prompts=prompts * 20, config=config, stop_sequences=END)
    World.held[World.begun] = round(resident(), 1)
    print(json.dumps({"benchmark": "episode_memory", "resident_mib": World.held}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())

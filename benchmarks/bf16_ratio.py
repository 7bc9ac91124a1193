# SPDX-License-Identifier: Apache-2.0
"""How far sampling, scoring and PPO's update agree on a token's probability, with XLA's excess precision and without.

    python benchmarks/bf16_ratio.py [--rounds 4] [--model llama]

Two small models with random weights (GPT-2's blocks and Llama's) in float32 and bfloat16. An iteration is one optimizer
step over 32 rollouts in minibatches of 8, so every ratio is taken before anything has changed: it is 1 where scoring
and update compute the same. The rounds of both settings alternate, so that their times may be compared. Prints one JSON
line a case and setting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jax
import numpy as np
from transformers import GPT2Config, LlamaConfig

import jrl
from jrl.bench.measure import hardware, versions
from jrl.bench.ppo_iteration import _words
from jrl.compilation import COMPILER_OPTIONS
from jrl.data.prompts import PromptSet
from jrl.learners.ppo import RATIOS
from jrl.ops.metrics import finalize
from jrl.trainers.loop.stopwatch import Stopwatch
from jrl.trainers.ppo import PPOTrainer

ROWS, PROMPT, RESPONSE, MINIBATCH, VOCAB = 32, 16, 32, 8, 512
IDS = dict(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, pad_token_id=0, initializer_range=0.06)
MODELS = {
    "gpt2": GPT2Config(n_layer=4, n_embd=192, n_head=6, n_positions=128, **IDS),
    "llama": LlamaConfig(
        hidden_size=192,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=6,
        num_key_value_heads=2,
        max_position_embeddings=128,
        **IDS,
    ),
}


class Measured:
    """A PPO trainer whose iterations are timed and whose ratios are kept.

    Args:
      model: Key of `MODELS`.
      compute_dtype: As `train.compute_dtype`.
      excess: Whether XLA may leave out roundings, as it does by default.
    """

    def __init__(self, model: str, compute_dtype: str, *, excess: bool) -> None:
        self.case = {"model": model, "compute_dtype": compute_dtype, "excess_precision": excess}
        self.excess, self.figures, self.number = excess, [], 0
        with tempfile.TemporaryDirectory() as folder:
            config = jrl.default_ppo_config().evolve(
                model={"model_path": MODELS[model], "num_layers_unfrozen": -1},
                tokenizer={"tokenizer_path": str(_words(VOCAB, Path(folder)))},
                optimizer={"kwargs": {"lr": 1e-6}},
                scheduler={"name": "constant", "kwargs": {}},
                method={
                    "num_rollouts": ROWS,
                    "chunk_size": ROWS,
                    "ppo_epochs": 1,
                    "gen_kwargs": {"max_new_tokens": RESPONSE, "eos_token_id": []},
                },
                train={
                    "seq_length": PROMPT + RESPONSE,
                    "batch_size": ROWS,
                    "minibatch_size": MINIBATCH,
                    "compute_dtype": compute_dtype,
                    "checkpoint_dir": f"{folder}/run",
                    "tracker": None,
                },
            )
            with_option(excess)
            self.trainer = PPOTrainer(config, reward_fn=letters)
        rng = np.random.default_rng(0)
        rows = rng.integers(1, VOCAB, (4 * ROWS, PROMPT)).tolist()
        prompts = PromptSet.from_tokens(rows, {}, self.trainer.tokenizer, max_length=PROMPT, seed=0)
        self.trainer.add_prompt_set(prompts, letters)

    def iterate(self) -> None:
        """One iteration; the first is not timed."""
        with_option(self.excess)
        trainer = self.trainer
        with jax.set_mesh(trainer.mesh):
            rollout_key, update_key = trainer.keys(self.number)
            started = time.perf_counter()
            experience = trainer.collect(
                trainer.params,
                trainer.frozen,
                trainer.ref_params,
                self.number,
                rollout_key,
                while_sampling=lambda: None,
                stopwatch=Stopwatch(),
            )
            jax.block_until_ready(experience.batch)
            collected = time.perf_counter()
            trainer.state, metrics = trainer.update(
                trainer.state, trainer.frozen, experience.batch, update_key
            )
            jax.block_until_ready(metrics)
            done = time.perf_counter()
        ratios = np.asarray(metrics.pop(RATIOS).rows)
        ratios = ratios[ratios >= 0]
        agreement = {name: float(value) for name, value in finalize(experience.agreement).items()}
        self.number += 1
        self.figures.append(
            {
                "ratio_max_dev": float(np.abs(ratios - 1).max()),
                "ratio_exactly_1": float((ratios == 1).mean()),
                "sampler_max_difference": agreement["sampler/max_difference"],
                "sampler_kl_k3": agreement["sampler/kl_k3"],
                "seconds_collect": collected - started,
                "seconds_update": done - collected,
            }
        )

    def line(self) -> dict[str, Any]:
        """The result: the worst deviation, the mean share, the median time."""

        def over(name: str, reduce: Any, start: int = 0) -> float:
            return float(f"{reduce([found[name] for found in self.figures[start:]]):.4g}")

        return {
            "benchmark": "bf16_ratio",
            **self.case,
            "ratio_max_dev": over("ratio_max_dev", max),
            "ratio_exactly_1": over("ratio_exactly_1", statistics.mean),
            "sampler_max_difference": over("sampler_max_difference", max),
            "sampler_kl_k3": over("sampler_kl_k3", max),
            "seconds_collect": over("seconds_collect", statistics.median, 1),
            "seconds_update": over("seconds_update", statistics.median, 1),
            "rounds": len(self.figures),
            "hardware": hardware(),
            "versions": versions(),
            "date": datetime.now(UTC).date().isoformat(),
        }


def with_option(excess: bool) -> None:
    """Lets programs that are compiled from here on leave out roundings, or not."""
    COMPILER_OPTIONS["xla_allow_excess_precision"] = excess


def letters(outputs: list[str]) -> list[float]:
    """A reward that costs nothing."""
    return [float(len(output)) for output in outputs]


def main() -> None:
    """Runs all cases."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=4, help="iterations of each case and setting")
    parser.add_argument("--model", choices=MODELS, help="default: both")
    arguments = parser.parse_args()
    rounds, names = arguments.rounds, [arguments.model] if arguments.model else list(MODELS)
    PPOTrainer.keep_ratios = True
    for model in names:
        for compute_dtype in ("float32", "bfloat16"):
            both = [Measured(model, compute_dtype, excess=excess) for excess in (True, False)]
            for _ in range(rounds):
                for measured in both:
                    measured.iterate()
            for measured in both:
                print(json.dumps(measured.line()), flush=True)


if __name__ == "__main__":
    main()

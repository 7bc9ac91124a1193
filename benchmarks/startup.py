# SPDX-License-Identifier: Apache-2.0
"""Seconds from the start of a process to its first rollout: PPO on random walks, compilation cache empty and full.

    python benchmarks/startup.py [--rounds 5]

Every measurement is a process of its own, from just before it is started to the moment that the sampler of the first
training rollout has been dispatched; the evaluation that comes before it is part of that. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
EXAMPLE = ROOT / "examples" / "randomwalks"
# What `ppo_randomwalks.py` does after its pre-training, for one iteration.
WORKER = """
import json, sys, time
began, model, folder, recipe = float(sys.argv[1]), *sys.argv[2:]
marks = {}

def mark(name):
    marks.setdefault(name, time.time() - began)

mark("interpreter")
import jrl
mark("import_jrl")
from jrl.api import prepare
from curves import GRAPH_SEED, SAMPLES_PER_START
from randomwalks import make_randomwalks
task = make_randomwalks(seed=GRAPH_SEED)
config = jrl.TRLConfig.load_yaml(recipe).evolve(
    train={"checkpoint_dir": folder, "epochs": 1})
trainer = prepare(model_path=model, reward_fn=task.reward_fn, prompts=task.eval_prompts,
                  eval_prompts=task.eval_prompts * SAMPLES_PER_START, metric_fn=task.metric_fn, config=config)
mark("trainer")
collect = trainer.collect

def marked(*arguments, while_sampling, **named):
    def dispatched():
        mark("first_rollout")
        while_sampling()
    return collect(*arguments, while_sampling=dispatched, **named)

trainer.collect = marked
trainer.learn()
mark("one_iteration")
print(json.dumps(marks))
"""


def start(model: Path, folder: Path, cache: Path) -> dict[str, float]:
    """One process; its marks in seconds."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {
        "JRL_COMPILATION_CACHE": str(cache),
        "PYTHONPATH": os.pathsep.join([str(ROOT), str(EXAMPLE)]),
        "JAX_PLATFORMS": os.environ.get("JAX_PLATFORMS", ""),
    }
    command = [sys.executable, "-c", WORKER, str(time.time()), str(model), str(folder)]
    command.append(str(ROOT / "configs" / "ppo_randomwalks.yaml"))
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def write_model(folder: Path) -> Path:
    """The example's model with random weights, and its tokenizer."""
    sys.path[:0] = [str(ROOT), str(EXAMPLE)]
    import jax
    from curves import GRAPH_SEED
    from pretrain import architecture_for, letter_tokenizer
    from randomwalks import make_randomwalks

    import jrl
    from jrl.bench.measure import hardware

    tokenizer = letter_tokenizer(make_randomwalks(seed=GRAPH_SEED).letters)
    model, params = jrl.load_model(architecture_for(tokenizer), key=jax.random.key(0), quiet=True)
    jrl.save_model(folder, model, params, tokenizer)
    print(hardware(), file=sys.stderr)
    return folder


def main() -> None:
    """Measures cold once and warm several times."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--rounds", type=int, default=5, help="starts with a full cache")
    rounds = flags.parse_args().rounds
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent)
        # In a process of its own kind: what this one imports or compiles must not help the others.
        model = write_model(folder / "model")
        cold = start(model, folder / "run_0", folder / "cache")
        warm = [start(model, folder / f"run_{number + 1}", folder / "cache") for number in range(rounds)]
        cached = sum(file.stat().st_size for file in (folder / "cache").rglob("*") if file.is_file())
    from jrl.bench.measure import hardware, versions

    record = {
        "benchmark": "startup",
        "model": "randomwalks",
        "rounds": rounds,
        "seconds": round(statistics.median(marks["first_rollout"] for marks in warm), 2),
        "seconds_cold": round(cold["first_rollout"], 2),
        "marks_warm": {name: round(statistics.median(marks[name] for marks in warm), 2) for name in warm[0]},
        "marks_cold": {name: round(value, 2) for name, value in cold.items()},
        "all_seconds": [round(marks["first_rollout"], 2) for marks in warm],
        "cache_bytes": cached,
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }
    print(json.dumps(record))


if __name__ == "__main__":
    main()

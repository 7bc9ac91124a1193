# SPDX-License-Identifier: Apache-2.0
"""Optimizer steps a second of PPO on random walks, rollouts included: trlX's example and recipe, run by `jrl.train`.

    python benchmarks/randomwalks.py [--iterations 12]

An iteration is 128 rollouts and 8 optimizer steps, with its logs, without evaluations; the first two are left out. The
weights are random, so that nearly every completion has all of its 9 tokens. trlX v0.7.0 took 5.4 steps a second on the
machine that its figure was recorded on; it is in no package registry, so the ratio is one of two runs on two days.
Prints one JSON line.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import statistics
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from startup import ROOT, write_model

TRLX_STEPS_PER_SECOND = 5.4
LEFT_OUT = 2


def main() -> None:
    """Trains, and reads the times that the run itself recorded."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    flags.add_argument("--iterations", type=int, default=12, help="of 8 optimizer steps each")
    iterations = flags.parse_args().iterations
    with tempfile.TemporaryDirectory() as parent:
        model = write_model(Path(parent) / "model")
        # The example's modules, whose folder `write_model` has put before this one.
        from curves import GRAPH_SEED
        from randomwalks import make_randomwalks

        import jrl
        from jrl.bench.measure import hardware, versions

        task = make_randomwalks(seed=GRAPH_SEED)
        config = jrl.TRLConfig.load_yaml(ROOT / "configs" / "ppo_randomwalks.yaml").evolve(
            train={"checkpoint_dir": f"{parent}/run", "epochs": iterations, "eval_interval": 0},
        )
        with contextlib.redirect_stdout(io.StringIO()):  # the run's own tables
            trainer = jrl.train(
                model_path=str(model),
                reward_fn=task.reward_fn,
                prompts=task.eval_prompts,
                eval_prompts=task.eval_prompts,
                metric_fn=task.metric_fn,
                config=config,
            )
        records = [record for record in trainer.history if "time/iteration" in record][LEFT_OUT:]
    names = ("iteration", "rollout", "decode", "reward", "update")
    seconds = {name: statistics.median(record[f"time/{name}"] for record in records) for name in names}
    steps = trainer.steps_per_iteration / seconds["iteration"]
    print(
        json.dumps(
            {
                "benchmark": "randomwalks",
                "rounds": len(records),
                "steps_per_second": round(steps, 2),
                "ratio_to_trlx": round(steps / TRLX_STEPS_PER_SECOND, 2),
                "trlx_steps_per_second": TRLX_STEPS_PER_SECOND,
                "seconds": round(seconds["iteration"], 4),
                "all_seconds": [round(record["time/iteration"], 4) for record in records],
                **{f"seconds_{name}": round(seconds[name], 4) for name in names[1:]},
                "compilations": records[-1]["perf/compilations"],
                "hardware": hardware(),
                "versions": versions(),
                "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            }
        )
    )


if __name__ == "__main__":
    main()

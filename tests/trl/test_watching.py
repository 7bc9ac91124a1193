# SPDX-License-Identifier: Apache-2.0
"""What a resumed run knows of its past: the records that its folder holds, taken in before the first new one."""

from __future__ import annotations

from jrl.trl.configs import RewardConfig
from jrl.trl.watching import Watcher

NAMES = {"reward_model/loss": "loss"}


def records():
    """Four steps, and an evaluation behind every other one; the first evaluation is the best."""
    found = []
    for step in range(1, 5):
        found.append({"step": step, "iteration": step, "reward_model/loss": float(step), "tokens": 10.0})
        if step % 2 == 0:
            found.append({"step": step, "evaluation": step // 2, "eval/reward_model/loss": float(step)})
    return found


def watched(folder, *, resumed_at):
    """The watcher of a run that goes on behind record `resumed_at`."""
    args = RewardConfig(
        output_dir=str(folder), logging_steps=1, load_best_model_at_end=True, eval_strategy="epoch"
    )
    watcher, history = Watcher(args, [], NAMES, "tokens"), records()[:resumed_at]
    watcher.begin(max_steps=4, per_pass=2, batch_size=1, records=lambda: history)
    for record in records()[resumed_at:]:
        history.append(record)
        if "iteration" in record:
            watcher.record(record)
        else:
            watcher.evaluated({"eval_loss": record["eval/reward_model/loss"]})
    watcher.end({})
    return watcher


def test_a_resumed_run_has_the_log_and_the_best_evaluation_of_the_whole(tmp_path):
    whole = watched(tmp_path, resumed_at=0)
    assert whole.state.best_metric == 2.0 and whole.state.best_global_step == 2 and whole.resumed_at == 0
    for resumed_at, steps in ((3, 2), (4, 3), (6, 4)):
        resumed = watched(tmp_path, resumed_at=resumed_at)
        assert resumed.state.log_history == whole.state.log_history
        assert resumed.state.best_metric == 2.0 and resumed.state.best_global_step == 2
        assert resumed.resumed_at == steps

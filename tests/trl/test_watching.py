# SPDX-License-Identifier: Apache-2.0
"""What a resumed run knows of its past: the records that its folder holds, taken in before the first new one."""

from __future__ import annotations

import warnings

import jax
import pytest
from transformers import DefaultFlowCallback, ProgressCallback, TrainerCallback

from jrl.trl.configs import RewardConfig
from jrl.trl.run_state import Watcher

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


def test_what_a_watch_finds_at_the_first_step_counts_no_step_twice(tmp_path):
    watcher, history = (
        Watcher(RewardConfig(output_dir=str(tmp_path), logging_steps=1), [], NAMES, "tokens"),
        [],
    )
    watcher.begin(max_steps=1, per_pass=1, batch_size=1, records=lambda: history)
    history += [records()[0], {"step": 1, "warning": "learning_rate", "value": 1.0}]
    watcher.record(history[0])
    assert [line["loss"] for line in watcher.state.log_history] == [1.0]
    assert watcher.resumed_at == 0 and watcher.state.log_history[0]["num_tokens"] == 10.0


class Wants(TrainerCallback):
    """Asks for what a run does not do by a callback's word, and keeps which process it is told of."""

    def on_step_end(self, args, state, control, **given):
        self.process = state.is_world_process_zero, state.is_local_process_zero
        control.should_save = control.should_evaluate = control.should_epoch_stop = True

    def on_pre_optimizer_step(self, args, state, control, **given):
        raise AssertionError("nothing calls it")


def two_steps(folder, callbacks):
    """The watcher of a run of two steps."""
    watcher = Watcher(RewardConfig(output_dir=str(folder)), callbacks, NAMES, "tokens")
    watcher.begin(max_steps=2, per_pass=2, batch_size=1, records=lambda: [])
    for step in (1, 2):
        watcher.record({"step": step, "iteration": step, "reward_model/loss": 1.0})
    return watcher


def test_what_a_callback_asks_for_in_vain_is_said_once_and_not_left_standing(tmp_path):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        watcher = two_steps(tmp_path, [Wants])
    found = [str(one.message) for one in caught]
    assert [text.split(":")[0] for text in found] == [
        "`Wants.on_pre_optimizer_step` is never called",
        "`Wants` set `control.should_epoch_stop`",
        "`Wants` set `control.should_evaluate`",
        "`Wants` set `control.should_save`",
    ]
    assert not any("\n" in text for text in found)
    control = watcher.control
    assert not (control.should_save or control.should_evaluate or control.should_epoch_stop)


def test_transformers_own_callbacks_are_not_warned_of(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        watcher = two_steps(tmp_path, [DefaultFlowCallback, ProgressCallback])
    assert not watcher.control.should_save


@pytest.mark.parametrize("process", [0, 1])
@pytest.mark.filterwarnings("ignore:`Wants")
def test_callbacks_know_which_process_they_run_in(tmp_path, monkeypatch, process):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    wants = Wants()
    watcher = two_steps(tmp_path, [wants])
    assert wants.process == (process == 0, process == 0)
    assert watcher.state.is_world_process_zero == (process == 0)

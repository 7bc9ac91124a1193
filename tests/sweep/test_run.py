# SPDX-License-Identifier: Apache-2.0
import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jrl.cli import main
from jrl.sweep.plan import parse_plan, read_plan
from jrl.sweep.results import PLOT, RESULTS, TrialResult, make_table, plot, ranked, write_results
from jrl.sweep.space import STRATEGIES, parse_parameter
from jrl.sweep.trial import FAILURE, FINISHED, Reporter, load_main, plain, run_trial
from jrl.trainers.loop.hooks import Hooks, current_hooks, watch
from tests.trainers.runs import save_tiny_checkpoint

ROOT = Path(__file__).parents[2]
LR = {"strategy": "loguniform", "values": [1e-5, 1e-2]}
TUNE = {"metric": "reward/mean", "mode": "max"}


def plan_of(settings=None, **entries):
    return parse_plan(TUNE | (settings or {}), entries or {"optimizer.kwargs.lr": LR})


class TestPlan:
    def test_a_file_of_trlx(self, tmp_path):
        (tmp_path / "sweep.yml").write_text(
            "tune_config:\n  mode: max\n  metric: reward/mean\n  search_alg: random\n  scheduler: fifo\n"
            "  num_samples: 32\noptimizer.kwargs.lr:\n  strategy: loguniform\n  values: [1e-6, 1e-3]\n"
            "method.target:\n  strategy: choice\n  values: [null, 1]\n"
        )
        plan = read_plan(tmp_path / "sweep.yml")
        assert (plan.metric, plan.mode, plan.num_samples, plan.num_trials) == ("reward/mean", "max", 32, 32)
        assert plan.parameters["optimizer.kwargs.lr"].values == (1e-6, 1e-3)  # YAML 1.1 takes these for texts
        assert plan.parameters["method.target"].values == (None, 1)
        assert (plan.search_alg.name, plan.scheduler.name, plan.fixed) == ("random", "fifo", {})

    def test_plain_values_are_the_same_for_all_trials(self):
        plan = plan_of(**{"optimizer.kwargs.lr": LR, "train.seed": 3, "method.gen_kwargs": {"top_k": 5}})
        assert plan.fixed == {"train.seed": 3, "method.gen_kwargs": {"top_k": 5}}

    def test_a_grid_is_walked_once_a_sample(self):
        grid = {"strategy": "grid", "values": [1, 2, 3]}
        plan = plan_of(
            {"num_samples": 2}, **{"train.seed": grid, "train.epochs": dict(grid, strategy="grid_search")}
        )
        assert plan.num_trials == 18

    @pytest.mark.parametrize(
        ("given", "found"), [("asha", "asynchyperband"), ("HyperBandForBOHB", "hb_bohb"), (None, "fifo")]
    )
    def test_scheduler_names(self, given, found):
        searcher = {"search_alg": "bohb"} if found == "hb_bohb" else {}
        assert plan_of({"scheduler": given, **searcher}).scheduler.name == found

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"metric": None}, "`tune_config.metric` is required and must be a text, got None"),
            ({"mode": "best"}, '`tune_config.mode` must be "max" or "min", got \'best\''),
            ({"num_sample": 3}, "unknown field `tune_config.num_sample`.*Did you mean `num_samples`"),
            ({"num_samples": 0}, "`tune_config.num_samples` must be a whole number of at least 1, got 0"),
            (
                {"num_samples": None},
                "`tune_config.num_samples` must be a whole number of at least 1, got None",
            ),
            (
                {"time_budget_s": "long"},
                "`tune_config.time_budget_s` must be a number of at least 1, got 'long'",
            ),
            (
                {"search_alg": "randm"},
                "`tune_config.search_alg` must be one of random, .*Did you mean `random`",
            ),
            ({"scheduler": "hyperbnd"}, "`tune_config.scheduler` must be one of fifo, .*`hyperband`"),
            ({"scheduler": "pbt"}, "`tune_config.scheduler` must be one of .*got 'pbt'"),
            ({"scheduler": {"max_t": 3}}, "`tune_config.scheduler` must be one of .*got {'max_t': 3}"),
            ({"search_alg": "bohb"}, "only work together, got 'bohb' and 'fifo'"),
            ({"scheduler": "hyperbandforbohb"}, "only work together, got 'random' and 'hb_bohb'"),
            ({"search_alg": "bayesopt"}, "`optimizer.kwargs.lr`: bayesopt searches `uniform` intervals only"),
        ],
    )
    def test_settings_that_are_wrong(self, settings, message):
        with pytest.raises(ValueError, match=message):
            plan_of(settings)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("rate", "`rate` must be a dotted name in one of the sections"),
            ("optimiser.kwargs.lr", "`optimiser.kwargs.lr` must be a dotted name.*Did you mean `optimizer`"),
            ("train.total_step", "`train` has no field `total_step`.*Did you mean `total_steps`"),
            ("method.cliprnge", "`method` has no field `cliprnge`.*Did you mean `cliprange`"),
        ],
    )
    def test_names_that_no_configuration_has(self, name, message):
        with pytest.raises(ValueError, match=message):
            plan_of(**{name: LR})

    def test_nothing_to_search(self):
        with pytest.raises(ValueError, match="there is nothing to search"):
            plan_of(**{"train.seed": 3})

    def test_a_grid_needs_the_random_searcher(self):
        with pytest.raises(ValueError, match="only `search_alg: random` walks a grid, got 'optuna'"):
            plan_of({"search_alg": "optuna"}, **{"train.seed": {"strategy": "grid", "values": [1]}})

    def test_errors_of_a_file_name_it(self, tmp_path):
        bare = {
            name: {"strategy": "choice", "values": [1, 2]} for name in ("lr_init", "init_kl_coef", "alpha")
        }
        (tmp_path / "old.yml").write_text(json.dumps({"tune_config": TUNE, **bare}))
        with pytest.warns(UserWarning, match=r"`\w+` is `[\w.]+` now"):
            found = read_plan(tmp_path / "old.yml").parameters
        assert list(found) == ["optimizer.kwargs.lr", "method.init_kl_coef", "method.alpha"]
        (tmp_path / "sweep.yaml").write_text("optimizer.kwargs.lr: 3\n")
        with pytest.raises(ValueError, match=r"sweep\.yaml must hold `tune_config`"):
            read_plan(tmp_path / "sweep.yaml")
        with pytest.raises(FileNotFoundError, match=r"there is no file nowhere\.yaml"):
            read_plan("nowhere.yaml")


# Strategy -> values, and what every draw must be.
DRAWS = {
    "uniform": ([2.0, 3.0], lambda x: 2 <= x <= 3),
    "quniform": ([0.0, 1.0, 0.25], lambda x: x in (0, 0.25, 0.5, 0.75, 1)),
    "loguniform": ([1e-4, 1.0], lambda x: 1e-4 <= x <= 1),
    "qloguniform": ([0.5, 8.0, 0.5, 10], lambda x: 0.5 <= x <= 8 and x % 0.5 == 0),
    "randn": ([5.0, 0.01], lambda x: 4 < x < 6),
    "qrandn": ([5.0, 1.0, 0.5], lambda x: x % 0.5 == 0),
    "randint": ([2, 5], lambda x: x in (2, 3, 4)),
    "qrandint": ([2, 8, 2], lambda x: x in (2, 4, 6, 8)),
    "lograndint": ([1, 100, 10], lambda x: 1 <= x < 100 and x == int(x)),
    "qlograndint": ([2, 100, 2, 10], lambda x: 2 <= x <= 100 and x % 2 == 0),
    "choice": (["a", None], lambda x: x in ("a", None)),
}


class TestSpace:
    @pytest.mark.parametrize("strategy", DRAWS)
    def test_draws(self, strategy):
        tune = pytest.importorskip("ray.tune", reason="needs the sweep extra")
        values, holds = DRAWS[strategy]
        domain = parse_parameter("train.seed", {"strategy": strategy, "values": values}).domain(tune)
        draws = domain.sample(size=200)
        assert all(holds(draw) for draw in draws) and len(set(draws)) > 1

    def test_half_of_the_loguniform_draws_lie_below_the_geometric_mean(self):
        tune = pytest.importorskip("ray.tune", reason="needs the sweep extra")
        draws = (
            parse_parameter("train.seed", {"strategy": "loguniform", "values": [1e-4, 1.0]})
            .domain(tune)
            .sample(size=2000)
        )
        assert sum(draw < 1e-2 for draw in draws) / 2000 == pytest.approx(0.5, abs=0.05)

    def test_a_grid_holds_every_value(self):
        tune = pytest.importorskip("ray.tune", reason="needs the sweep extra")
        for strategy in ("grid", "grid_search"):
            parameter = parse_parameter("train.seed", {"strategy": strategy, "values": [1, 2]})
            assert parameter.is_grid and parameter.domain(tune) == {"grid_search": [1, 2]}

    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_wrong_counts(self, strategy):
        values, rule = DRAWS[strategy][0], STRATEGIES[strategy]
        most = len(rule.arguments)
        for wrong in (values[:1], [*values, 1, 1]):
            with pytest.raises(
                ValueError, match=rf"`train.seed`: {strategy} takes .*{most} values .*got {len(wrong)}"
            ):
                parse_parameter("train.seed", {"strategy": strategy, "values": wrong})

    @pytest.mark.parametrize(
        ("entry", "message"),
        [
            (
                {"strategy": "unifrm", "values": [0, 1]},
                "must be one of .*got 'unifrm'.*Did you mean `uniform`",
            ),
            ({"strategy": "uniform"}, "must have `strategy` and `values`"),
            ({"strategy": "uniform", "values": 3}, "`values` must be a list, got 3"),
            ({"strategy": "choice", "values": []}, "choice needs at least one value"),
            (
                {"strategy": "uniform", "values": [1, 0]},
                "the first value of uniform must be below the second",
            ),
            (
                {"strategy": "uniform", "values": ["a", 1]},
                "uniform takes finite numbers, got 'a' for its lower",
            ),
            ({"strategy": "uniform", "values": [0, math.inf]}, "finite numbers, got inf for its upper"),
            ({"strategy": "uniform", "values": [False, True]}, "finite numbers, got False for its lower"),
            ({"strategy": "randint", "values": [0, 1.5]}, "whole numbers, got 1.5 for its upper"),
            ({"strategy": "loguniform", "values": [0, 1]}, "loguniform needs a positive lower, got 0"),
            ({"strategy": "loguniform", "values": [0.1, 1, 1]}, "loguniform needs a base above 1, got 1"),
            ({"strategy": "quniform", "values": [0, 1, 0]}, "quniform needs a positive step, got 0"),
            ({"strategy": "randn", "values": [0, 0]}, "randn needs a positive deviation, got 0"),
        ],
    )
    def test_values_that_are_wrong(self, entry, message):
        with pytest.raises(ValueError, match=message):
            parse_parameter("train.seed", entry)


class TestReporter:
    def test_an_evaluation_is_reported_with_the_training_record_before_it(self):
        reports = []
        reporter = Reporter("reward/mean", reports.append)
        reporter.evaluate(
            {"step": 0, "evaluation": 0, "reward/mean": 0.1}
        )  # says nothing of the hyperparameters
        reporter.log({"step": 4, "iteration": 1, "reward/mean": 0.2, "ppo/loss": 3.0})
        reporter.evaluate({"step": 4, "evaluation": 1, "reward/mean": 0.3, "note": "text"})
        assert reports == [{"step": 4, "iteration": 1, "evaluation": 1, "ppo/loss": 3.0, "reward/mean": 0.3}]
        reporter.finish()

    def test_a_metric_of_training_counts(self):
        reports = []
        reporter = Reporter("sft/loss", reports.append)
        reporter.log({"step": 4, "sft/loss": 3.0})
        reporter.evaluate({"step": 4, "evaluation": 1})
        assert [report["sft/loss"] for report in reports] == [3.0]

    def test_a_metric_that_no_evaluation_has(self):
        reporter = Reporter("reward/meen", pytest.fail)
        with pytest.raises(ValueError, match="`reward/meen`: there was none after the first step"):
            reporter.finish()
        reporter.evaluate({"step": 4, "evaluation": 1, "reward/mean": 0.3})
        with pytest.raises(
            ValueError, match=r"`reward/meen`: they had \['evaluation', 'reward/mean', 'step'\]"
        ):
            reporter.finish()


SCRIPT = """
import json
from pathlib import Path
from beside import PENALTY
from jrl.trainers.loop.hooks import current_hooks

def main(hparams):
    Path("seen.json").write_text(json.dumps(hparams))
    if hparams.get("train.seed") == 13:
        raise RuntimeError("bad luck\\nwith 13")
    for step in (0, 4, 8):
        current_hooks().evaluate({"step": step, "evaluation": step // 4, "reward/mean": step - PENALTY})
"""


class TestTrial:
    @pytest.fixture
    def script(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "path", list(sys.path))
        (tmp_path / "beside.py").write_text("PENALTY = 0.5\n")
        (tmp_path / "script.py").write_text(SCRIPT)
        (tmp_path / "trial").mkdir()
        return str(tmp_path / "script.py")

    def run(self, script, tmp_path, **values):
        reports = []
        run_trial(
            values, script=script, metric="reward/mean", folder=tmp_path / "trial", report=reports.append
        )
        return reports, json.loads((tmp_path / "seen.json").read_text())

    def test_the_script_gets_its_values_and_is_watched(self, script, tmp_path):
        reports, seen = self.run(script, tmp_path, **{"optimizer.kwargs.lr": 0.1})
        assert [(report["step"], report["reward/mean"]) for report in reports] == [(4, 3.5), (8, 7.5)]
        run = str(tmp_path / "trial" / "run")
        assert seen == {"optimizer.kwargs.lr": 0.1, "train.checkpoint_dir": run, "train.overwrite": True}
        assert (tmp_path / "trial" / FINISHED).exists()

    def test_a_trial_that_was_paused_resumes_its_run(self, script, tmp_path):
        (tmp_path / "trial" / "run" / "checkpoint_4").mkdir(parents=True)
        _, seen = self.run(script, tmp_path)
        assert seen["train.resume_from_checkpoint"] == seen["train.checkpoint_dir"]
        assert "train.overwrite" not in seen

    def test_what_is_swept_wins(self, script, tmp_path):
        _, seen = self.run(script, tmp_path, **{"train.checkpoint_dir": "mine"})
        assert seen["train.checkpoint_dir"] == "mine"

    def test_a_failure_leaves_one_line(self, script, tmp_path):
        with pytest.raises(RuntimeError, match="bad luck"):
            self.run(script, tmp_path, **{"train.seed": 13})
        assert (tmp_path / "trial" / FAILURE).read_text() == "RuntimeError: bad luck\n"
        assert not (tmp_path / "trial" / FINISHED).exists()

    def test_scripts_without_main(self, script, tmp_path):
        for text in ("main = 3\n", "def main(): pass\n", "def run(hparams): pass\n"):
            (tmp_path / "bad.py").write_text(text)
            with pytest.raises(ValueError, match=r"bad.py must have a function `main\(hparams\)`"):
                load_main(tmp_path / "bad.py")
        with pytest.raises(FileNotFoundError, match=r"there is no script nowhere\.py"):
            load_main("nowhere.py")


def test_numbers_of_numpy_become_plain():
    found = [plain(value) for value in (np.float64(0.5), np.int64(3), np.bool_(True), "text", None)]
    assert found == [0.5, 3, True, "text", None]
    assert [type(value) for value in found[:3]] == [float, int, bool]


def test_hooks_hold_only_inside_watch():
    outside, hooks = current_hooks(), Hooks(log=print)
    with pytest.raises(RuntimeError), watch(hooks):
        assert current_hooks() is hooks
        raise RuntimeError
    assert current_hooks() is outside


def result(trial, curve, *, lr=0.1, seed=1, **fields):
    values = {"optimizer.kwargs.lr": lr, "train.seed": seed}
    return TrialResult(
        trial, values, fields.pop("status", "done"), curve, 3.0, f"runs/trial_{trial}", **fields
    )


class TestResults:
    PLAN = plan_of(**{"optimizer.kwargs.lr": LR, "train.seed": {"strategy": "choice", "values": [1, 2]}})
    RESULTS = (
        result("a", {4: 0.9, 8: 0.2}),
        result("b", {}, status="failed", error="ValueError: no"),
        result("c", {4: 0.3}, lr=1e-3, seed=2, status="stopped"),
        result("d", {4: math.nan}),
    )

    def test_the_last_metric_ranks_and_nan_comes_last(self):
        assert [found.trial for found in ranked(self.RESULTS, "max")] == ["c", "a", "b", "d"]
        assert [found.trial for found in ranked(self.RESULTS, "min")] == ["a", "c", "b", "d"]
        a, b, *_ = self.RESULTS
        assert (a.last, a.last_step, a.best("max"), a.best("min")) == (0.2, 8, 0.9, 0.2)
        assert math.isnan(b.last) and math.isnan(b.best("max")) and b.last_step == 0

    def test_files(self, tmp_path):
        write_results(tmp_path, self.PLAN, ranked(self.RESULTS, "max"))
        lines = [json.loads(line) for line in (tmp_path / RESULTS).read_text().splitlines()]
        assert [(line["rank"], line["trial"]) for line in lines] == [(1, "c"), (2, "a"), (3, "b"), (4, "d")]
        assert lines[0]["values"] == {"optimizer.kwargs.lr": 1e-3, "train.seed": 2}
        assert lines[1]["curve"] == {"4": 0.9, "8": 0.2} and lines[1]["best"] == 0.9
        assert lines[2]["error"] == "ValueError: no" and lines[2]["last"] is None
        assert (tmp_path / PLOT).read_bytes().startswith(b"\x89PNG")

    def test_a_plot_of_nothing(self, tmp_path):
        plot(tmp_path / "empty.png", self.PLAN, self.RESULTS[1:2])
        assert (tmp_path / "empty.png").exists()

    def test_table(self):
        table = make_table(self.PLAN, ranked(self.RESULTS, "max"), rows=3)
        assert [column.header for column in table.columns][:4] == ["trial", "lr", "seed", "last"]
        assert table.row_count == 3

    def test_a_trial_that_had_not_begun_shows_nothing(self):
        waiting = TrialResult("e", {}, "waiting", {}, 0.0, "runs/trial_e")
        table = make_table(self.PLAN, [waiting])
        assert [str(next(iter(column.cells))) for column in table.columns] == ["e", *[""] * 5, "0", "waiting"]

    def test_an_error_is_shown_and_not_obeyed(self):
        failed = TrialResult("f", {}, "failed", {}, 0.0, "runs/trial_f", error="[/bold] \x1b[2J")
        table = make_table(self.PLAN, [failed])
        assert str(next(iter(table.columns[-1].cells))) == r"failed: [/bold] \x1b[2J"
        Console(file=io.StringIO()).print(table)


class TestRay:
    @pytest.fixture(autouse=True)
    def ray(self):
        pytest.importorskip("ray.tune", reason="needs the sweep extra")

    def test_time_is_counted_in_evaluations(self):
        from jrl.sweep.run import make_scheduler

        for name in ("asha", "hyperband", "medianstopping"):
            assert make_scheduler(plan_of({"scheduler": name}))._time_attr == "evaluation"
        given = {"name": "asha", "time_attr": "step", "max_t": 200}
        assert make_scheduler(plan_of({"scheduler": given}))._time_attr == "step"

    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"scheduler": {"name": "asha", "max_steps": 3}}, "asynchyperband has no argument `max_steps`"),
            ({"scheduler": {"name": "asha", "max_t": 0}}, r"asynchyperband refuses {'max_t': 0}"),
        ],
    )
    def test_schedulers_that_are_wrong(self, settings, message):
        from jrl.sweep.run import make_scheduler

        with pytest.raises(ValueError, match=message):
            make_scheduler(plan_of(settings))

    def test_searchers(self):
        from jrl.sweep.run import make_searcher

        with pytest.raises(ValueError, match="random has no argument `patience`"):
            make_searcher(plan_of({"search_alg": {"name": "random", "patience": 3}}), {})
        with pytest.raises(
            ValueError, match=r"`tune_config\.search_alg`: zoopt needs a library that is not there"
        ):
            make_searcher(plan_of({"search_alg": "zoopt"}), {})

    def test_resources(self):
        from jrl.sweep.run import trial_resources

        none = dict(num_cpus=None, num_gpus=None)
        assert trial_resources({"CPU": 8}, **none) == {"cpu": 8, "gpu": 0}  # one after another
        assert trial_resources({"CPU": 64, "GPU": 8}, **none) == {"cpu": 8, "gpu": 1}
        assert trial_resources({"CPU": 64, "GPU": 8}, num_cpus=None, num_gpus=4) == {"cpu": 32, "gpu": 4}
        assert trial_resources({"CPU": 64, "GPU": 1}, num_cpus=2, num_gpus=0.5) == {"cpu": 2, "gpu": 0.5}
        with pytest.raises(ValueError, match=r"--num-gpus must be at least 0 and at most 0, .* got 1"):
            trial_resources({"CPU": 8}, num_cpus=None, num_gpus=1)


class TestCommand:
    @pytest.fixture
    def sweep(self, tmp_path):
        (tmp_path / "script.py").write_text(SCRIPT)
        (tmp_path / "beside.py").write_text("PENALTY = 0.5\n")
        (tmp_path / "sweep.yaml").write_text(json.dumps({"tune_config": TUNE, "optimizer.kwargs.lr": LR}))
        return ["sweep", str(tmp_path / "script.py"), "--config", str(tmp_path / "sweep.yaml")]

    def test_mistakes_are_one_line_and_status_2(self, sweep, tmp_path, capsys):
        for arguments, message in (
            ([*sweep, "--train.seed", "3"], "unknown flags ['--train.seed', '3']"),
            (["sweep", "nowhere.py", *sweep[2:]], "there is no script nowhere.py"),
            ([*sweep[:2], "--config", "nowhere.yaml"], "there is no file nowhere.yaml"),
        ):
            assert main(arguments) == 2
            error = capsys.readouterr().err
            assert error.startswith("jrl sweep: ") and message in error and error.count("\n") == 1

    def test_a_folder_with_trials_is_refused(self, sweep, tmp_path, capsys):
        pytest.importorskip("ray.tune", reason="needs the sweep extra")
        (tmp_path / "out" / "trial_1").mkdir(parents=True)
        assert main([*sweep, "--output-dir", str(tmp_path / "out")]) == 2
        assert "holds the trials of an earlier sweep" in capsys.readouterr().err

    def test_a_missing_extra_says_what_to_install(self, sweep, capsys, monkeypatch):
        monkeypatch.delitem(sys.modules, "jrl.sweep.run", raising=False)
        monkeypatch.setitem(sys.modules, "ray", None)
        assert main(sweep) == 2
        error = capsys.readouterr().err
        assert "pip install 'ray[tune]' matplotlib" in error and error.count("\n") == 1


@pytest.mark.slow
def test_a_sweep_end_to_end(tmp_path):
    """Two trials of PPO on a tiny model, each in a process of its own; one of them cannot work."""
    pytest.importorskip("ray.tune", reason="needs the sweep extra")
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    (tmp_path / "script.py").write_text(
        "import jrl\n"
        "from tests.trainers.runs import PROMPTS, count_vowels, ppo_config\n"
        "def main(hparams):\n"
        f"    config = ppo_config({checkpoint!r}, 'unused', train=dict(eval_interval=4))\n"
        "    config = jrl.TRLConfig.update(config, hparams)\n"
        "    jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)\n"
    )
    sizes = {"strategy": "grid", "values": [4, 3]}  # 3 is no multiple of the microbatch
    content = {"tune_config": TUNE, "train.batch_size": sizes, "train.checkpoint_interval": 0}
    (tmp_path / "sweep.yaml").write_text(json.dumps(content))
    # Ray starts processes, and this one has used JAX.
    ran = subprocess.run(
        [sys.executable, "-m", "jrl", "sweep", "script.py", "--config", "sweep.yaml", "--output-dir", "out"],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    assert "trial 1/2" in ran.stdout and "reward/mean, max: 2 trials" in ran.stdout
    done, failed = [json.loads(line) for line in (tmp_path / "out" / RESULTS).read_text().splitlines()]
    assert done["status"] == "done" and list(done["curve"]) == ["4", "8", "12"]
    assert done["values"] == {"train.batch_size": 4}
    metrics = (tmp_path / done["folder"] / "run" / "metrics.jsonl").read_text()
    records = [json.loads(line) for line in metrics.splitlines()]
    evaluations = [record for record in records if "evaluation" in record and record["step"]]
    assert [record["reward/mean"] for record in evaluations] == list(done["curve"].values())
    assert failed["status"] == "failed" and "`train.minibatch_size` must be a divisor" in failed["error"]
    assert (tmp_path / "out" / PLOT).exists() and not (tmp_path / "unused").exists()
    assert "optimizer steps" in (Path(done["folder"]) / "stdout").read_text()

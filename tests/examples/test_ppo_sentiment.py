# SPDX-License-Identifier: Apache-2.0
"""The main job at toy size, in processes of its own: with its own parts, with somebody else's, and interrupted."""

import importlib
import json
import shlex
import signal
import time
from pathlib import Path

import jax
import pytest
from rich.console import Console

import jrl
from examples.sentiment.corpus import make_reviews
from examples.sentiment.pretrain import gpt2_config
from examples.sentiment.tokenizer import train_tokenizer
from tests.examples import processes
from tests.examples.processes import EXAMPLES, ROOT, finish
from tests.trainers.loading.reward_models import save_reward_model

SCRIPT = EXAMPLES / "ppo_sentiment.py"
FIGURES = {"reward_before", "reward_after", "kl_per_sequence", "tokens_per_second", "seconds"}
FILES = {"summary.json", "completions.jsonl", "curves.png", "policy", "ppo"}
SMALL_PPO = shlex.split(
    "--num-eval-prompts 8 --train.epochs 2 --train.batch_size 4 --method.num_rollouts 8 --method.chunk_size 8 "
    "--method.ppo_epochs 1 --method.gen_kwargs.max_new_tokens 8"
)
SMALL_SFT = shlex.split("--num-reviews 300 --sft.train.total_steps 6 --sft.train.batch_size 4")


@pytest.fixture
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("ppo_sentiment")


def start(*flags, cwd, program=(SCRIPT,)):
    return processes.start(*flags, cwd=cwd, program=program)


def check_folder(folder, output, *, num_prompts):
    assert FILES.issubset(path.name for path in folder.iterdir())
    summary = json.loads((folder / "summary.json").read_text())
    assert FIGURES.issubset(summary)
    assert len((folder / "completions.jsonl").read_text().splitlines()) == num_prompts
    assert (folder / "curves.png").stat().st_size > 5000
    assert f"reward {summary['reward_before']:+.3f} -> {summary['reward_after']:+.3f}" in output
    return summary


def test_every_flag_goes_to_its_stage(example):
    line = "--seed 3 --sft.train.total_steps 5 --train.epochs=2 --sft.train.save_best --model.num_layers_unfrozen -1"
    flags, ppo, sft = example.parse(line.split())
    assert flags.seed == 3 and flags.model is None
    assert ppo == ["--train.epochs=2", "--model.num_layers_unfrozen", "-1"]
    assert sft == ["--train.total_steps", "5", "--train.save_best"]


def test_without_flags_the_recipes_are_those_of_the_repository(example):
    flags, ppo, sft = example.parse([])
    assert ppo == sft == [] and flags.reward == "vader" and flags.dataset is None
    assert flags.reward_label is None and flags.reward_output is None
    names = {Path(flags.config).name: "PPOTrainer", Path(flags.sft_config).name: "SFTTrainer"}
    assert names == {"ppo_sentiment.yaml": "PPOTrainer", "sft_sentiment.yaml": "SFTTrainer"}
    for path, trainer in ((flags.config, "PPOTrainer"), (flags.sft_config, "SFTTrainer")):
        assert jrl.TRLConfig.load_yaml(path).train.trainer == trainer


def test_the_hint_to_resume_keeps_the_flags(example):
    console = Console(record=True, width=40)
    given = ["--seed", "3", "--output-dir", "x", "--method.target", "4"]
    resume = ("--train.resume_from_checkpoint", "a b/ppo")
    assert example.stopped(console, given, Path("a b"), *resume) == 0
    words = shlex.split(console.export_text().splitlines()[-1])
    flags, ppo, sft = example.parse(words[2:])
    assert (flags.seed, flags.output_dir, sft) == (3, "a b", [])
    assert ppo == ["--method.target", "4", *resume]


@pytest.mark.slow
def test_its_own_parts(tmp_path):
    folder = tmp_path / "run"
    output = finish(start("--seed", 1, "--output-dir", folder, *SMALL_SFT, *SMALL_PPO, cwd=tmp_path))
    check_folder(folder, output, num_prompts=8)
    assert {"initial", "sft", "sft_model"} <= {path.name for path in folder.iterdir()}


@pytest.fixture(scope="module")
def real_parts(tmp_path_factory):
    """A folder with a GPT-2 as the hub has them (its tokenizer, without a pad token, elsewhere), data and reward."""
    folder = tmp_path_factory.mktemp("real")
    reviews = make_reviews(300, seed=5)
    tokenizer = train_tokenizer(reviews, vocab_size=600, max_length=128)
    model, params = jrl.load_model(gpt2_config(tokenizer, 128), key=jax.random.key(0))
    jrl.save_model(folder / "model", model, params)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(folder / "tokenizer")
    records = (json.dumps({"text": review, "label": 1}) + "\n" for review in reviews)
    (folder / "reviews.jsonl").write_text("".join(records))
    reward = "def shortness(outputs, **others):\n    return [1.0 / (1.0 + len(text)) for text in outputs]\n"
    (folder / "my_rewards.py").write_text(reward)
    flags = "--model model --tokenizer tokenizer --dataset reviews.jsonl --reward my_rewards:shortness"
    shrink = [*SMALL_PPO, "--train.seq_length", "64", "--model.num_layers_unfrozen", "1"]
    return folder, ["--config", str(ROOT / "configs" / "ppo_imdb.yaml"), *flags.split(), *shrink]


@pytest.mark.slow
def test_the_recipe_of_trlx_on_a_local_checkpoint(real_parts):
    cwd, flags = real_parts
    output = finish(start(*flags, "--output-dir", "run", cwd=cwd))
    summary = check_folder(cwd / "run", output, num_prompts=8)
    assert 0 < summary["reward_before"] < 1  # the reward that was named, not VADER's
    assert not (cwd / "run" / "sft").exists()
    assert jrl.load_model(str(cwd / "run" / "policy"))[0].lm.hf_config.n_positions == 128


@pytest.fixture(scope="module")
def classifier(tmp_path_factory):
    """A DistilBERT with three labels, written by jrl."""
    return save_reward_model(tmp_path_factory.mktemp("classifier") / "model")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vader", {"label": "glad"}, "choose a score of a classifier, but --reward is 'vader'"),
        ("my_rewards:positive", {"output": "logit"}, "but --reward is 'my_rewards:positive'"),
        ("politeness", {}, "expected `module:function`"),
        ("./nowhere", {}, "there is no folder './nowhere'"),
    ],
)
def test_a_reward_that_is_not_there_is_named(example, name, options, message):
    with pytest.raises((ValueError, FileNotFoundError), match=message):
        example.reward_named(name, **options)


def test_a_folder_is_a_classifier(example, classifier):
    reward = example.reward_named(classifier, label="glad", output="logit")
    assert (reward.label, reward.output) == (1, "logit")
    assert example.reward_named(classifier).output == "probability"


@pytest.mark.slow
def test_a_classifier_steers_it_and_torch_is_not_there(real_parts, classifier, tmp_path):
    cwd, flags = real_parts
    flags = [*flags[: flags.index("--reward")], *flags[flags.index("--reward") + 2 :]]
    choice = ["--reward", classifier, "--reward-label", "glad", "--output-dir", str(tmp_path / "run")]
    without_torch = f"import runpy, sys; sys.modules['torch'] = None; sys.argv[0] = {str(SCRIPT)!r}; "
    without_torch += f"sys.path.insert(0, {str(SCRIPT.parent)!r}); "
    without_torch += f"runpy.run_path({str(SCRIPT)!r}, run_name='__main__')"
    process = start(*flags, *choice, cwd=cwd, program=["-c", without_torch])
    summary = check_folder(tmp_path / "run", finish(process), num_prompts=8)
    rows = [json.loads(line) for line in (tmp_path / "run" / "completions.jsonl").read_text().splitlines()]
    glad = jrl.load_reward_model(classifier, label=1)
    samples = [row["prompt"] + row["before"] for row in rows]
    assert glad(samples=samples) == pytest.approx([row["reward_before"] for row in rows], abs=1e-4)
    assert 0 < summary["reward_before"] < 1


@pytest.mark.slow
def test_after_ctrl_c_the_printed_command_goes_on(real_parts):
    cwd, flags = real_parts
    process = start(*flags, "--output-dir", "stopped", "--train.epochs", 400, cwd=cwd)
    metrics = cwd / "stopped" / "ppo" / "metrics.jsonl"
    end = time.monotonic() + 300
    while not (metrics.exists() and metrics.read_text().count("\n") > 4):
        assert process.poll() is None and time.monotonic() < end
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    words = shlex.split(finish(process).splitlines()[-1])
    assert not (cwd / "stopped" / "summary.json").exists()
    stopped_at = json.loads(metrics.read_text().splitlines()[-1])["step"]
    assert words[:2] == ["python", str(SCRIPT)]
    total = stopped_at + 4
    output = finish(start(*words[2:], "--train.total_steps", total, cwd=cwd))
    assert f"resumed at {stopped_at}" in output
    check_folder(cwd / "stopped", output, num_prompts=8)

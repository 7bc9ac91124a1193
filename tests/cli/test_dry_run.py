# SPDX-License-Identifier: Apache-2.0
import json
import re
import sys
import tempfile
from pathlib import Path

import pytest

import jrl
from jrl.cli import main
from jrl.cli.dry_run import check_run, smallest
from jrl.learners.grpo_algorithms import ALGORITHMS, algorithm
from tests.models.diffusion.tiny_folder import save_tiny_folder
from tests.trainers.runs import PROMPTS, count_vowels, save_tiny_checkpoint

SHORT = ["--train.seq_length", "24", "--method.gen_kwargs", "{max_new_tokens: 4}"]
ONLINE = ["--reward", f"{count_vowels.__module__}:count_vowels", "--prompts"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dry_run")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS))
    pair = {"chosen": " yes it is", "rejected": " no"}
    records = [{"prompt": prompt, "output": " yes", "reward": i % 2} for i, prompt in enumerate(PROMPTS)]
    (folder / "rewarded.jsonl").write_text("\n".join(map(json.dumps, records)))
    pairs = [{"prompt": prompt, **pair} for prompt in PROMPTS]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    save_tiny_checkpoint(folder / "tiny")
    return folder


@pytest.mark.parametrize("name", ["ppo", *ALGORITHMS])
def test_every_algorithm_has_a_tiny_iteration(name):
    """Groups and selections stay what they are; nothing that the user set is out of range afterwards."""
    method = jrl.PPOConfig(ppo_epochs=3, rollout_slots=8) if name == "ppo" else algorithm(name)
    config = smallest(jrl.default_config(method), "elsewhere")
    assert config.method.num_rollouts == max(2, method.num_generations)
    assert config.method.num_generations == method.num_generations
    assert config.train.batch_size == config.method.chunk_size == config.method.num_rollouts
    assert config.train.checkpoint_dir == "elsewhere"
    assert config.method.gen_kwargs == method.gen_kwargs


def test_devices_that_only_sample_are_refused():
    config = jrl.default_ppo_config().evolve(train={"rollouts_ahead": 1, "sampling_mesh": {"data": 1}})
    with pytest.raises(ValueError, match=r"--dry-run needs `train.sampling_mesh: null`"):
        smallest(config, "elsewhere")


def folders():
    return set(Path(tempfile.gettempdir()).glob("jrl_dry_run_*"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ppo", "dapo", "rft", "sft", "ilql", "dpo", "reward"])
def test_end_to_end(name, files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    data = {"sft": "rewarded", "ilql": "rewarded", "dpo": "pairs", "reward": "pairs"}
    words = [*ONLINE, str(files / "prompts.txt")]
    if name in data:
        words = ["--samples", str(files / f"{data[name]}.jsonl")]
    before = folders()
    model = ["--model.model_path", str(files / "tiny")]
    assert main([name, *words, *model, *SHORT, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert list(tmp_path.iterdir()) == [] and folders() == before
    assert re.search(r"\n(action|text) +\d+ ", said)
    assert "memory of each device, at" in said and re.search(r"compile \d+ programs", said)
    assert "without --dry-run trains, in ckpts" in said
    assert ("its reward: +" in said) == (name not in data)


@pytest.mark.slow
def test_a_reward_gradient_end_to_end(tmp_path, monkeypatch, capsys):
    """An image, what it earned, and the plan; no grid of images is left."""
    folder = save_tiny_folder(tmp_path / "tiny")
    work = tmp_path / "work"
    work.mkdir()
    monkeypatch.chdir(work)
    module = tmp_path / "modules" / "bright_images.py"
    module.parent.mkdir()
    module.write_text("def bright(images):\n    return images.mean(axis=(1, 2, 3))\n")
    monkeypatch.syspath_prepend(str(module.parent))
    (tmp_path / "prompts.txt").write_text("a red cat\na blue dog\n")
    before = folders()
    words = ["--reward", "bright_images:bright", "--prompts", str(tmp_path / "prompts.txt"), "--dry-run"]
    words += ["--model.model_path", str(folder), "--method.sample_num_steps", "2"]
    words += ["--method.eval_prompts", "[a cat, a dog, a fox]"]
    assert main(["reward_gradient", *words]) == 0
    said = capsys.readouterr().out
    assert list(work.iterdir()) == [] and folders() == before
    assert "one image:" in said and "its prompt: 'a " in said and "its reward: +" in said
    assert "activations of a microbatch" in said and "without --dry-run trains" in said


@pytest.mark.slow
def test_a_reward_that_fails_is_one_line_and_its_completions_are_kept(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "failing_reward.py").write_text("def score(outputs):\n    return [1.0]\n")
    words = ["--reward", "failing_reward:score", "--prompts", str(files / "prompts.txt")]
    assert main(["ppo", *words, "--model.model_path", str(files / "tiny"), *SHORT, "--dry-run"]) == 2
    error = capsys.readouterr().err
    kept = re.search(r"kept in (\S+\.jsonl)", error)
    assert error.startswith("jrl ppo: `reward_fn`") and kept and Path(kept[1]).is_file()


@pytest.mark.slow
def test_a_folder_with_checkpoints_is_told_before_the_run_is(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ckpts" / "checkpoint_4").mkdir(parents=True)
    words = ["--samples", str(files / "rewarded.jsonl"), "--model.model_path", str(files / "tiny"), *SHORT]
    assert main(["sft", *words, "--dry-run"]) == 0
    assert "ckpts holds checkpoints: the run would stop" in capsys.readouterr().out


def test_flat_fields_have_no_dry_run(files, capsys):
    assert main(["dpo", "--dataset_name", str(files / "pairs.jsonl"), "--dry-run"]) == 2
    assert "--dry-run must go with a nested configuration" in capsys.readouterr().err


class TestChecksOfTheRun:
    """What the tiny iteration leaves out is checked of the user's own configuration."""

    @pytest.mark.parametrize("field", ["checkpoint_dir", "rollout_logging_dir", "logging_dir"])
    def test_a_folder_that_is_none(self, tmp_path, field):
        (tmp_path / "file").write_text("")
        config = jrl.default_ppo_config().evolve(train={"checkpoint_dir": str(tmp_path / "run")})
        check_run(config)
        for name in ("file", "file/below"):
            with pytest.raises(ValueError, match=rf"`train.{field}` must be a folder .* is no folder"):
                check_run(config.evolve(train={field: str(tmp_path / name)}))
        assert [path.name for path in tmp_path.iterdir()] == ["file"]

    def test_a_tracker_that_is_not_installed(self, files, monkeypatch, capsys):
        monkeypatch.setitem(sys.modules, "wandb", None)
        words = ["--samples", str(files / "rewarded.jsonl"), "--train.tracker", "wandb", "--dry-run"]
        assert main(["sft", *words, "--model.model_path", str(files / "tiny"), *SHORT]) == 2
        assert "needs the package wandb" in capsys.readouterr().err

    def test_several_processes(self, monkeypatch):
        monkeypatch.setattr("jax.process_count", lambda: 2)
        with pytest.raises(ValueError, match="--dry-run must run as one process, got 2"):
            check_run(jrl.default_ppo_config())


@pytest.mark.slow
def test_a_run_that_the_plan_refuses_is_refused(files, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    t5 = save_tiny_checkpoint(tmp_path / "t5", "t5")
    words = [*ONLINE, str(files / "prompts.txt"), "--model.model_path", str(t5)]
    words += ["--model.model_arch_type", "seq2seq", "--model.num_layers_unfrozen", "-1"]
    assert main(["ppo", *words, *SHORT, "--method.rollout_slots", "2", "--dry-run"]) == 1
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        "the run would be refused: `method.rollout_slots` must be null for a seq2seq model"
    )

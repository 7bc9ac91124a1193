# SPDX-License-Identifier: Apache-2.0
"""`jrl ddpo`: help, runs, and mistakes in one line."""

import json

import pytest

import jrl.trl.commands
from jrl.cli import main, run
from jrl.rollout.rewards import RewardError
from jrl.trainers.checkpoints.resume import checkpoints_in
from jrl.trainers.diffusion.images import ImageError
from tests.models.diffusion.tiny_folder import save_tiny_folder

FEW = {
    "num_epochs": 1,
    "sample_batch_size": 2,
    "sample_num_batches_per_epoch": 1,
    "sample_num_steps": 2,
    "train_batch_size": 2,
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """(prompts, recipe)."""
    folder = tmp_path_factory.mktemp("ddpo")
    (folder / "prompts.txt").write_text("a cat\na dog\n")
    recipe = {**FEW, "reward": "brightness", "prompts": str(folder / "prompts.txt")}
    (folder / "recipe.yaml").write_text(json.dumps(recipe))  # JSON is YAML
    return str(folder / "prompts.txt"), str(folder / "recipe.yaml")


def test_a_person_can_read_its_help(capsys):
    with pytest.raises(SystemExit) as done:
        main(["ddpo", "--help"])
    text = capsys.readouterr().out
    assert done.value.code == 0
    places = [text.index(title) for title in ("\nmodel, prompts and reward:", "\nDDPOConfig:")]
    assert places == sorted(places)
    for shown in (
        "--pretrained_model",
        "jpeg_compressibility",
        "--sample_num_steps",
        "[50]",
        "--eval_prompts",
    ):
        assert shown in text
    assert "--dataset_name" not in text and "--num_processes" not in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "`pretrained_model` must be given, got None."),
        (["--pretrained_model", "x"], "`reward` must be given, got None."),
        (["--pretrained_model", "x", "--reward", "brightness"], "`prompts` must be given, got None."),
        (["--pretrained_model", "x", "--reward", "beauty", "--prompts", "p"], "expected `module:function`"),
        (
            ["--sample_num_step", "3"],
            "there is no field for '--sample_num_step'. Did you mean `--sample_num_steps`?",
        ),
        (["--train_use_8bit_adam", "true"], "`train_use_8bit_adam` must be False: train an adapter"),
        (["--sample_batch_size", "3", "--train_batch_size", "2"], "`sample_batch_size` must be divisible by"),
        (["--config", "nowhere.yaml"], "nowhere.yaml"),
        (["--mesh", "{data"], "`mesh` must be JSON"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(words, message, capsys):
    assert main(["ddpo", *words]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("jrl ddpo: ")


def test_files_that_are_not_there_are_named(files, capsys):
    prompts, _ = files
    given = ["ddpo", "--reward", "brightness"]
    assert main([*given, "--pretrained_model", "x", "--prompts", "nowhere.txt"]) == 2
    assert "nowhere.txt" in capsys.readouterr().err
    assert main([*given, "--pretrained_model", "./nowhere", "--prompts", prompts]) == 2
    assert "nowhere" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (RewardError("epoch 0: `reward_function` raised\n two lines."), "raised two lines. Images are kept."),
        (ImageError("The model's images must lie in [0, 1]"), "must lie in [0, 1] Images are kept."),
    ],
)
def test_what_stops_a_run_is_one_line_too(error, line, monkeypatch, capsys):
    error.add_note("Images are kept.")

    def work():
        raise error

    monkeypatch.setattr(run, "_understand", lambda name, words: work)
    assert main(["ddpo"]) == 2
    said = capsys.readouterr().err
    assert line in said and said.count("\n") == 1 and said.startswith("jrl ddpo: ")


def test_the_line_says_where_a_function_of_the_user_raised(monkeypatch, capsys):
    def work():
        try:
            int("three")
        except ValueError as error:
            raise RewardError("the reward function raised.") from error

    monkeypatch.setattr(run, "_understand", lambda name, words: work)
    assert main(["ddpo"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and f"Raised at {__file__}:" in said


@pytest.mark.slow
def test_from_a_recipe_to_a_model(files, tmp_path, capsys):
    _, recipe = files
    model = str(save_tiny_folder(tmp_path / "model"))
    run = tmp_path / "run"
    words = ["ddpo", "--config", recipe, "--pretrained_model", model, "--logdir", str(run)]
    assert main([*words, "--epochs", "2"]) == 0
    assert f"model and model card: {run / 'hf_model'}" in capsys.readouterr().out
    assert (run / "hf_model" / "pytorch_lora_weights.safetensors").is_file()
    assert "2 optimizer steps" in (run / "hf_model" / "README.md").read_text()
    assert list(checkpoints_in(run)) == [1, 2]
    assert main(words) == 2  # there is a run in the folder
    assert "overwrite" in capsys.readouterr().err
    assert main([*words, "--epochs", "3", "--resume_from", str(run)]) == 0
    assert list(checkpoints_in(run)) == [1, 2, 3]


def test_rewards_of_files_are_jrls_own():
    assert set(jrl.image_rewards.BY_NAME) <= set(jrl.image_rewards.__all__)

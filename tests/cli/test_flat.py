# SPDX-License-Identifier: Apache-2.0
"""`jrl reward|dpo|sft` with TRL's flat fields: which layout a command has, help, runs, and mistakes in one line."""

import json

import pytest

import jrl.trl.commands  # noqa: F401 — so that no test is charged for what it imports
from jrl.cli import main
from jrl.cli.flat import wants_flat
from jrl.trainers.loading.reward_model import load_reward_model
from tests.trainers.runs import save_tiny_checkpoint

ROWS = [
    {"prompt": "the cat", "chosen": f" sat {word}", "rejected": f" ran {word}"}
    for word in ("on it", "away", "down", "still", "in", "out", "up", "by")
]
FEW = [
    "--max_length",
    "32",
    "--max_steps",
    "2",
    "--per_device_train_batch_size",
    "4",
    "--learning_rate",
    "1e-3",
]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A tiny checkpoint and a file of pairs."""
    folder = tmp_path_factory.mktemp("flat")
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, ROWS)))
    return save_tiny_checkpoint(folder / "tiny"), str(folder / "pairs.jsonl")


class TestLayout:
    @pytest.mark.parametrize(
        ("command", "words", "flat"),
        [
            ("dpo", [], True),
            ("reward", ["--help"], True),
            ("dpo", ["--samples", "x.jsonl"], False),
            ("sft", ["--samples", "x.jsonl"], False),
            ("sft", ["--help"], False),
            ("sft", ["--dataset_name=x"], True),
            ("sft", ["--model-name-or-path", "x"], True),
            ("ilql", ["--dataset_name", "x"], False),
            ("generate", ["--model", "x"], False),
            ("ppo", ["--reward", "x", "--prompts", "y"], False),
            ("ppo", ["--dataset_name", "x"], True),
        ],
    )
    def test_without_a_file_the_flags_tell(self, command, words, flat):
        assert wants_flat(command, words) is flat

    @pytest.mark.parametrize(
        ("text", "flat"),
        [("learning_rate: 1e-4\n", True), ("train: {seed: 1}\n", False), ("method: {}\nbeta: 1\n", False)],
    )
    def test_a_file_decides(self, tmp_path, text, flat):
        path = tmp_path / "c.yaml"
        path.write_text(text)
        for command in ("sft", "dpo", "reward"):
            assert wants_flat(command, ["--config", str(path)]) is flat
            assert wants_flat(command, ["--x", "1", f"--config={path}"]) is flat


class TestHelp:
    def test_a_person_can_read_it(self, capsys):
        with pytest.raises(SystemExit) as done:
            main(["dpo", "--help"])
        text = capsys.readouterr().out
        assert done.value.code == 0 and text.count("\n") < 100
        places = [
            text.index(title) for title in ("\ndata:", "\nmodel and adapter:", "\nDPOConfig:", "\nthe run:")
        ]
        assert places == sorted(places)
        assert "--beta BETA" in text and "[0.1]" in text and "--loss_type" in text and "[sigmoid]" in text
        assert "--deepspeed" not in text and "--use-peft" not in text and "--help-all lists" in text

    def test_all_fields_are_there_if_asked_for(self, capsys):
        with pytest.raises(SystemExit):
            main(["reward", "--help-all"])
        text = capsys.readouterr().out
        assert "--deepspeed" in text and "refused: parameters are placed by the mesh" in text
        assert "--help-all lists" not in text

    def test_of_both_layouts_of_sft(self, capsys, tmp_path):
        (tmp_path / "flat.yaml").write_text("packing: true\n")
        with pytest.raises(SystemExit):
            main(["sft", "--config", str(tmp_path / "flat.yaml"), "--help"])
        assert "--packing_strategy" in capsys.readouterr().out
        with pytest.raises(SystemExit):
            main(["sft", "--help"])
        assert "--samples" in capsys.readouterr().out


class TestMistakes:
    """One line on stderr and status 2, before any model is read."""

    @pytest.fixture(autouse=True)
    def no_model(self, monkeypatch):
        def loaded(*_, **__):
            raise AssertionError("a model was read")

        monkeypatch.setattr("jrl.models.checkpoint.load_checkpoint", loaded)

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--dataset_name", "{pairs}"], "`model_name_or_path` must name a checkpoint"),
            (["--model_name_or_path", "{model}"], "`dataset_name` must name a data set or file"),
            (["--bta", "1"], "there is no field for '--bta'. Did you mean `--beta`?"),
            (
                ["--model_name_or_path", "{model}", "--dataset_name", "none.jsonl"],
                "there is no file none.jsonl",
            ),
            (["--model_name_or_path", "/none", "--dataset_name", "{pairs}"], "/none"),
            (
                ["--model_name_or_path", "{model}", "--dataset_name", "{pairs}", "--eval_strategy", "steps"],
                "must be a data set with splits",
            ),
            (
                ["--loss_type", "sigmod", "--model_name_or_path", "{model}", "--dataset_name", "{pairs}"],
                "sigmod",
            ),
            (["--load_in_8bit", "--load_in_4bit"], "must not both be true"),
            (["--config", "none.yaml"], "there is no file none.yaml"),
        ],
    )
    def test_in_the_flags(self, files, capsys, words, message):
        model, pairs = files
        assert main(["dpo", *(word.format(model=model, pairs=pairs) for word in words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("jrl dpo: ") and message in error and error.count("\n") == 1

    @pytest.mark.parametrize(
        ("words", "message"),
        [
            (["--model_name_or_path", "{model}"], "`reward` must be given"),
            (["--model_name_or_path", "{model}", "--reward", "nowhere:f"], "there is no module 'nowhere'"),
            (["--reward", "x:y"], "`model_name_or_path` must be given"),
            (
                ["--dataset_config", "c", "--model_name_or_path", "{model}", "--reward", "x:y"],
                "`dataset_config` must",
            ),
            (["--cliprang", "1"], "Did you mean `--cliprange`?"),
            (["--batch_size", "3", "--mini_batch_size", "2"], "must be a multiple of `mini_batch_size`"),
        ],
    )
    def test_in_the_flags_of_ppo(self, files, capsys, words, message):
        model, pairs = files
        assert main(["ppo", "--dataset_name", pairs, *(word.format(model=model) for word in words)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("jrl ppo: ") and message in error and error.count("\n") == 1

    def test_in_the_file(self, tmp_path, capsys):
        path = tmp_path / "c.yaml"
        for text, message in (
            ("bta: 1\n", "c.yaml: there is no field `bta`. Did you mean `beta`?"),
            ("- beta\n", "c.yaml must hold a mapping of fields, got list"),
            ("beta: 1\nseed: 2\nbeta: 3\n", "`beta` stands in line 1 and again in line 3"),
        ):
            path.write_text(text)
            assert main(["dpo", "--config", str(path)]) == 2
            error = capsys.readouterr().err
            assert message in error and error.count("\n") == 1

    def test_in_the_data(self, files, tmp_path, capsys):
        (tmp_path / "bad.jsonl").write_text(json.dumps({"prompt": "a", "chosen": "b"}))
        assert (
            main(["dpo", "--model_name_or_path", files[0], "--dataset_name", str(tmp_path / "bad.jsonl")])
            == 2
        )
        error = capsys.readouterr().err
        assert "rejected" in error and "'chosen', 'prompt'" in error and error.count("\n") == 1


def test_env_says_what_is_installed(capsys):
    assert main(["env"]) == 0
    text = capsys.readouterr().out
    assert "- jax: " in text and "- devices: 1 x cpu (cpu)" in text
    assert main(["env", "--more"]) == 2


@pytest.mark.slow
@pytest.mark.parametrize("command", ["reward", "dpo", "sft"])
def test_a_run_from_file_and_flags(files, tmp_path, capsys, command):
    model, pairs = files
    if command == "sft":
        pairs = str(tmp_path / "texts.jsonl")
        (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": row["chosen"]}) for row in ROWS))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"datasets: [{{path: '{pairs}'}}]\ntest_split_size: 2\neval_strategy: steps\neval_steps: 1\n"
        f"model_name_or_path: {model}\nuse_peft: true\nlora_r: 2\nlora_dropout: 0.0\nseed: 3\n"
    )
    folder = tmp_path / "run"
    assert main([command, "--config", str(recipe), *FEW, "--output_dir", str(folder), "--seed", "4"]) == 0
    assert f"model and model card: {folder}" in capsys.readouterr().out
    card = (folder / "README.md").read_text()
    assert "library_name: peft" in card and pairs.rpartition("/")[2] in card
    assert str(tmp_path) not in card
    records = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any(name.startswith("eval/") for record in records for name in record)
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == 2
    if command == "reward":
        assert len(load_reward_model(folder)(samples=["the cat sat"])) == 1


@pytest.mark.slow
def test_ppo_from_a_flat_file(files, tmp_path, capsys):
    model, pairs = files
    recipe = tmp_path / "ppo.yaml"
    recipe.write_text("batch_size: 8\nmini_batch_size: 4\nppo_epochs: 1\nsteps: 16\ninit_kl_coef: 0.05\n")
    words = [
        *("--config", str(recipe), "--model_name_or_path", model, "--dataset_name", pairs),
        *("--reward", "tests.trainers.runs:count_vowels", "--max_length", "32", "--max_new_tokens", "4"),
        *("--output_dir", str(tmp_path / "run")),
    ]
    assert main(["ppo", *words]) == 0
    assert "model and model card" in capsys.readouterr().out
    assert "| `method.init_kl_coef` | `0.05` |" in (tmp_path / "run" / "README.md").read_text()
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 4  # 16 samples in two iterations of two optimizer steps


@pytest.mark.slow
@pytest.mark.parametrize("command", ["reward", "dpo"])
def test_a_run_of_six_sections(files, tmp_path, command):
    model, pairs = files
    words = [
        *("--samples", pairs, "--model.model_path", model, "--tokenizer.tokenizer_path", model),
        *("--train.seq_length", "32", "--train.total_steps", "2", "--train.batch_size", "4"),
        *("--train.checkpoint_dir", str(tmp_path), "--train.eval_interval", "0"),
        *("--method.gen_kwargs.max_new_tokens", "4"),
    ]
    assert main([command, *words]) == 0
    assert (tmp_path / "checkpoint_2" / "hf_model" / "README.md").exists()

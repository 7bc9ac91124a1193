# SPDX-License-Identifier: Apache-2.0
import json
import shutil

import pytest
import yaml

import jrl
from jrl.cli import main, train
from jrl.cli.generate import model_folder
from jrl.learners.grpo_algorithms import ALGORITHMS, algorithm
from jrl.methods.grpo import GRPO
from jrl.trainers.checkpoints.checkpointer import Checkpointer, CheckpointError
from jrl.trainers.loading.reward_model import load_reward_model
from tests.trainers.loading.reward_models import save_reward_model
from tests.trainers.runs import EPISODES, PROMPTS, count_vowels, save_tiny_checkpoint

TINY = [
    *("--optimizer.kwargs.lr", "1e-3", "--scheduler.name", "constant"),
    *("--train.seq_length", "16", "--train.total_steps", "2", "--train.batch_size", "4"),
    *("--train.eval_interval", "0", "--method.gen_kwargs.max_new_tokens", "4"),
]
PPO = ["--method.num_rollouts", "4", "--method.chunk_size", "4", "--method.ppo_epochs", "1"]
ONE_STEP = ["--train.total_steps", "1", "--train.epochs", "1"]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return save_tiny_checkpoint(folder / "tiny"), str(folder / "prompts.txt")


def paths(checkpoint, run_dir):
    return [
        *("--model.model_path", checkpoint, "--tokenizer.tokenizer_path", checkpoint),
        *("--model.num_layers_unfrozen", "1", "--train.checkpoint_dir", str(run_dir)),
    ]


@pytest.mark.slow
def test_ppo_end_to_end(files, tmp_path):
    checkpoint, prompts = files
    reward = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", prompts]
    assert main(["ppo", *reward, *paths(checkpoint, tmp_path), *TINY, *PPO]) == 0
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert records[-1]["step"] == 2
    assert (tmp_path / "checkpoint_2" / "hf_model" / "config.json").exists()


@pytest.mark.slow
def test_ppo_against_a_classifier(files, tmp_path):
    checkpoint, prompts = files
    classifier = save_reward_model(tmp_path / "classifier")
    reward = ["--reward", classifier, "--reward-output", "logit", "--prompts", prompts]
    assert main(["ppo", *reward, *paths(checkpoint, tmp_path / "run"), *TINY, *PPO]) == 0
    lines = (tmp_path / "run" / "rollouts" / "rollouts.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    expected = load_reward_model(classifier, output="logit")(
        samples=[row["prompt"] + row["output"] for row in rows]
    )
    assert [row["reward"] for row in rows] == pytest.approx(expected, abs=1e-4)


def test_a_published_algorithm_has_a_command_that_sets_its_switches(files, tmp_path, capsys):
    checkpoint, prompts = files
    reward = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", prompts]
    small = ["--method.num_rollouts", "4", "--method.chunk_size", "4", "--method.num_generations", "2"]
    recipe = ["--config", "grpo_randomwalks", "--method.gen_kwargs", "{max_new_tokens: 4}"]
    limits = ["--train.seq_length", "16", "--train.total_steps", "1", "--train.batch_size", "4"]
    limits += ["--train.eval_interval", "0", "--optimizer.kwargs.lr", "1e-3"]
    assert main(["rloo", *reward, *recipe, *paths(checkpoint, tmp_path), *limits, *small]) == 0
    said = capsys.readouterr().out
    assert "`jrl rloo` sets" in said and "estimator 'leave_one_out'" in said
    assert "the recipe had" in said and "estimator 'group_relative'" in said
    method = yaml.safe_load((tmp_path / "checkpoint_1" / "config.yaml").read_text())["method"]
    assert (method["estimator"], method["reduction"]) == ("leave_one_out", "token")
    assert method["num_generations"] == 2  # a flag comes behind the algorithm's own number


class _Prepared:
    unsaved = False

    def learn(self):
        pass


def prepared(monkeypatch):
    """Sections of the runs that commands prepare, none of which is run."""
    found = []
    monkeypatch.setattr(train, "prepare", lambda **given: found.append(given["config"].method) or _Prepared())
    return found


@pytest.mark.parametrize("name", GRPO.variants)
def test_the_named_algorithm_runs_whatever_recipe_it_is_laid_over(files, tmp_path, monkeypatch, name):
    """None of the published algorithms shows through; sizes, and what no algorithm sets, are the recipe's."""
    found = prepared(monkeypatch)
    own = {"num_rollouts": 48, "chunk_size": 48, "entropy_coef": 0.25}
    for under in ALGORITHMS:
        laid = jrl.default_config(algorithm(under, **own))
        size = ALGORITHMS[name].get("num_generations", laid.method.num_generations)
        # A recipe that compares no samples has one of each prompt: a flag mends that.
        size = 4 if size == 1 and algorithm(name).num_generations > 1 else size
        recipe = tmp_path / f"{under}.yaml"
        recipe.write_text(yaml.safe_dump(laid.to_dict()))
        words = [name, "--reward", "tests.trainers.runs:count_vowels", "--prompts", files[1]]
        assert main([*words, "--config", str(recipe), f"--method.num_generations={size}"]) == 0
        wanted = algorithm(name, **own, num_generations=size, gen_kwargs=laid.method.gen_kwargs)
        assert found.pop() == wanted, under


def test_flags_mend_a_recipe_that_the_algorithm_does_not_fit(files, tmp_path, monkeypatch, capsys):
    """24 rollouts are no groups of MaxRL's 16."""
    found = prepared(monkeypatch)
    recipe = tmp_path / "dapo.yaml"
    laid = jrl.default_config(algorithm("dapo", num_rollouts=24, chunk_size=24))
    recipe.write_text(yaml.safe_dump(laid.to_dict()))
    words = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", files[1], "--config", str(recipe)]
    assert main(["maxrl", *words]) == 2
    assert "`method.num_generations` must be" in capsys.readouterr().err
    assert main(["maxrl", *words, "--method.chunk_size", "32", "--method.num_rollouts", "32"]) == 0
    assert (found[0].estimator, found[0].num_generations, found[0].num_rollouts) == ("mean_scaled", 16, 32)
    assert main(["grpo", *words]) == 0 and found[1] == laid.method  # no algorithm of the table


def test_a_recipe_of_another_algorithm_is_refused(files, capsys):
    reward = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", files[1]]
    for command in ("grpo", "dapo"):
        assert main([command, *reward, "--config", "ppo_randomwalks"]) == 2
        error = capsys.readouterr().err
        assert "must be a recipe with `method.name: GRPOConfig`, got 'PPOConfig'" in error


@pytest.mark.slow
def test_ilql_end_to_end(files, tmp_path):
    checkpoint, prompts = files
    lines = [{"prompt": prompt, "output": " yes", "reward": i % 2} for i, prompt in enumerate(PROMPTS)]
    (tmp_path / "rewarded.jsonl").write_text("\n".join(json.dumps(line) for line in lines))
    data = ["--samples", str(tmp_path / "rewarded.jsonl"), "--eval-prompts", prompts]
    assert main(["ilql", *data, *paths(checkpoint, tmp_path / "run"), *TINY, *ONE_STEP]) == 0
    assert (tmp_path / "run" / "checkpoint_1" / "hf_model" / "config.json").exists()


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ilql", "sft"])
def test_episodes_are_read_by_their_turns(algorithm, files, tmp_path):
    checkpoint, prompts = files
    (tmp_path / "episodes.jsonl").write_text("\n".join(map(json.dumps, EPISODES)))
    data = ["--samples", str(tmp_path / "episodes.jsonl"), "--eval-prompts", prompts]
    assert main([algorithm, *data, *paths(checkpoint, tmp_path / "run"), *TINY, *ONE_STEP]) == 0
    assert (tmp_path / "run" / "checkpoint_1" / "hf_model" / "config.json").exists()


@pytest.mark.slow
def test_rft_end_to_end(files, tmp_path):
    checkpoint, prompts = files
    reward = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", prompts]
    generations = ["--method.n_generations_per_prompt", "4"]
    assert main(["rft", *reward, *paths(checkpoint, tmp_path), *TINY, *ONE_STEP, *generations]) == 0
    assert list(tmp_path.glob("checkpoint_*/hf_model/config.json"))


def test_ilql_needs_rewards(files, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('"only a text"\n')
    assert main(["ilql", "--samples", str(tmp_path / "texts.jsonl")]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jrl ilql: ") and "needs one of the columns" in error and error.count("\n") == 1


def test_a_folder_in_use_is_one_line_and_status_2(files, tmp_path, capsys):
    checkpoint, prompts = files
    (tmp_path / "checkpoint_4").mkdir()
    reward = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", prompts]
    assert main(["ppo", *reward, *paths(checkpoint, tmp_path), *TINY, *PPO]) == 2
    said = capsys.readouterr()
    assert "holds checkpoints of an earlier run" in said.err
    assert "loading" not in said.out, "nothing is loaded before the folder is looked at"


def test_the_help_of_generate_has_every_default(capsys):
    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for default in ("completion; default: 40", "more often; default: 1.0", "default: 0, which is all"):
        assert default in said


def test_generate_prints_prompts_with_their_completions(files, capsys):
    assert main(["generate", "--model", files[0], "--prompt", "the cat", "--max-new-tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the cat")


def test_generate_refuses_a_prompt_without_tokens(files, capsys):
    assert main(["generate", "--model", files[0], "--prompt", ""]) == 2
    assert "a --prompt has no tokens" in capsys.readouterr().err


def test_generate_steers_only_where_there_are_q_heads(files, capsys):
    assert main(["generate", "--model", files[0], "--prompt", "the cat", "--beta", "1"]) == 2
    assert "holds no Q heads" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--max-new-tokens", "0"], "--max-new-tokens must be at least 1, got 0"),
        (["--temperature", "-1"], "--temperature must be positive, got -1.0"),
        (["--top-p", "2"], "--top-p must be above 0 and at most 1, got 2.0"),
        (["--top-k", "-1"], "--top-k must be at least 0"),
        (["--seed", "-1"], "--seed must be at least 0"),
    ],
)
def test_generate_refuses_numbers_out_of_range(capsys, arguments, message):
    assert main(["generate", "--model", "/nowhere", "--prompt", "a", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"jrl generate: {message}") and error.count("\n") == 1


def test_generate_refuses_more_tokens_than_the_model_has_positions(files, capsys):
    assert main(["generate", "--model", files[0], "--prompt", "the cat", "--max-new-tokens", "128"]) == 2
    assert "the model has 128 positions" in capsys.readouterr().err


def test_files_that_are_no_recipe_are_named(tmp_path, capsys):
    for name, content in (("broken.yaml", b"a: ["), ("bytes.yaml", b"\xff\xfe")):
        (tmp_path / name).write_bytes(content)
    for command in (["sft", "--samples", "x"], ["sweep", "x.py"]):
        for name in ("broken.yaml", "bytes.yaml", ".", "nowhere.yaml"):
            assert main([*command, "--config", str(tmp_path / name)]) == 2
            error = capsys.readouterr().err
            assert str(tmp_path / name) in error and error.count("\n") == 1


def test_an_interruption_while_reading_is_one_line(monkeypatch, capsys):
    def interrupted(flags, overrides):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "train", interrupted)
    assert main(["sft", "--samples", "x"]) == 130
    assert capsys.readouterr().err == "jrl sft: interrupted.\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--method.clip_range", "0.1"], "Did you mean `method.cliprange`"),
        (["--train.total_steps", "many"], "`train.total_steps` must be int"),
        (["--reward", "tests.trainers.runs:vowels"], "has no function 'vowels'"),
        (["--reward-label", "1"], "choose a score of a classifier, but --reward is 'tests.trainers.runs"),
        (["--reward", "no/folder/here"], "there is no folder 'no/folder/here'"),
        (["--reward", "jrl.rewards:think_format_reward", "--reward-label", "1"], "of one classifier, but"),
        (["--prompts", "nowhere.txt"], "nowhere.txt"),
        (
            ["--model.model_path", "/tmp", "--tokenizer.tokenizer_path", "/nowhere"],
            "there is no folder '/nowhere' to load a tokenizer from",
        ),
    ],
)
def test_a_mistake_in_the_flags_is_one_line_and_status_2(files, capsys, arguments, message):
    reward = ["--reward", "tests.trainers.runs:count_vowels", "--prompts", files[1]]
    assert main(["ppo", *reward, *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("jrl ppo: ") and message in error and error.count("\n") == 1


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    """A run of two checkpoints."""
    folder = tmp_path_factory.mktemp("run")
    writer = Checkpointer(folder, keep=2)
    for step in (4, 8):
        writer.save(step, None, write_model=save_tiny_checkpoint, config={}, cursor={}, best_score=None)
    writer.close()
    return folder


def test_generate_reads_the_newest_whole_checkpoint_of_a_run_and_says_so(run_folder, tmp_path, capsys):
    assert model_folder(str(run_folder)) == str(run_folder / "checkpoint_8" / "hf_model")
    assert f"{run_folder} is no model itself; this is {run_folder}/checkpoint_8" in capsys.readouterr().err
    damaged = shutil.copytree(run_folder, tmp_path / "damaged")
    (damaged / "checkpoint_8" / "hf_model" / "config.json").write_text("{}")
    assert model_folder(str(damaged)) == str(damaged / "checkpoint_4" / "hf_model")
    assert "Not a whole checkpoint" in capsys.readouterr().err
    shutil.rmtree(damaged / "checkpoint_4")
    with pytest.raises(CheckpointError, match="is whole"):
        model_folder(str(damaged))


def test_generate_takes_the_best_checkpoint_of_a_run_where_one_has_a_score(tmp_path, capsys):
    writer = Checkpointer(tmp_path, keep=2)
    for step, score in ((4, 0.7), (8, 0.7)):  # of the run's best evaluation so far, which was at step 4
        writer.save(step, None, write_model=save_tiny_checkpoint, config={}, cursor={}, best_score=score)
    writer.close()
    assert model_folder(str(tmp_path)) == str(tmp_path / "checkpoint_4" / "hf_model")
    assert "its best checkpoint of 2; --newest takes the newest one" in capsys.readouterr().err
    assert model_folder(str(tmp_path), newest=True) == str(tmp_path / "checkpoint_8" / "hf_model")
    assert "its newest checkpoint" in capsys.readouterr().err
    (tmp_path / "checkpoint_4" / "hf_model" / "config.json").write_text("{}")
    assert model_folder(str(tmp_path)) == str(tmp_path / "checkpoint_8" / "hf_model")
    assert "The best checkpoint is not whole" in capsys.readouterr().err


def test_generate_writes_the_samples_of_a_file_with_their_rewards(files, tmp_path, capsys):
    """As a run's own samples are written; a small last call changes no sample before it."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(
        "".join(json.dumps({"prompt": text, "number": i}) + "\n" for i, text in enumerate(PROMPTS))
    )
    words = [
        "generate",
        "--model",
        files[0],
        "--prompts",
        str(prompts),
        "--max-new-tokens",
        "4",
        "--batch-size",
        "4",
    ]
    assert main([*words, "--reward", "tests.trainers.runs:count_vowels"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(row["number"], row["prompt"]) for row in rows] == list(enumerate(PROMPTS))
    assert [row["reward"] for row in rows] == count_vowels([row["output"] for row in rows])
    assert all(1 <= len(row["output_tokens"]) <= 4 for row in rows)
    assert main([*words, "--top-k", "1"]) == 0
    greedy = capsys.readouterr().out
    assert main([*words, "--top-k", "1", "--seed", "5"]) == 0
    assert capsys.readouterr().out == greedy and "reward" not in greedy


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--prompt", "a", "--reward", "m:f"],
            "--reward judges the samples of --prompts, but --prompt is given",
        ),
        (["--prompts", "p.txt", "--reward-label", "x"], "--reward-label chooses a score of --reward"),
        (["--prompts", "p.txt", "--batch-size", "0"], "--batch-size must be at least 1, got 0"),
    ],
)
def test_generate_refuses_flags_that_do_not_fit(capsys, words, message):
    assert main(["generate", "--model", "/nowhere", *words]) == 2
    assert message in capsys.readouterr().err


def test_generate_takes_a_checkpoint_for_its_model_and_leaves_other_paths(run_folder, files, capsys):
    one = run_folder / "checkpoint_4"
    assert model_folder(str(one)) == str(one / "hf_model")
    assert "is no model itself" in capsys.readouterr().err
    for path in (files[0], "gpt2", str(one / "hf_model")):
        assert model_folder(path) == path
    assert capsys.readouterr().err == ""

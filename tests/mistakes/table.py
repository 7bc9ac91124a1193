# SPDX-License-Identifier: Apache-2.0
"""Mistakes that users make, each made for real, with the parts that its message must have."""

from __future__ import annotations

import contextlib
import functools
import io
import json
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jrl
from jrl.api import prepare
from jrl.cli import main
from tests.tiny import tiny_tokenizer
from tests.trainers.runs import PROMPTS, count_vowels, save_tiny_checkpoint

SMALL: dict[str, Any] = {
    "train": {"seq_length": 24, "batch_size": 2, "total_steps": 2, "eval_interval": 0},
    "method": {"num_rollouts": 2, "chunk_size": 2, "gen_kwargs": {"max_new_tokens": 4}},
}


@dataclass(frozen=True)
class Place:
    """Files of a user: `tiny` and `t5` (checkpoints), `prompts.txt`, and whatever a mistake needs."""

    folder: Path

    def __truediv__(self, name: str) -> str:
        return str(self.folder / name)

    @functools.cached_property
    def model(self) -> str:
        return save_tiny_checkpoint(self.folder / "tiny")

    @functools.cached_property
    def t5(self) -> str:
        return save_tiny_checkpoint(self.folder / "t5", "t5")

    @functools.cached_property
    def prompts(self) -> str:
        return self.write("prompts.txt", "\n".join(PROMPTS))

    def write(self, name: str, text: str) -> str:
        """Writes a file and gives its path."""
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    def lines(self, name: str, *records: Any) -> str:
        """Writes JSON lines and gives their path."""
        return self.write(name, "\n".join(map(json.dumps, records)))

    def config(self, **sections: dict[str, Any]) -> jrl.TRLConfig:
        """A small PPO run with the tiny model."""
        model = {"model_path": self.model}
        run = {"checkpoint_dir": self / "run"}
        return (
            jrl.default_ppo_config().evolve(model=model).evolve(**SMALL).evolve(train=run).evolve(**sections)
        )

    @functools.cached_property
    def trainer(self) -> jrl.PPOTrainer:
        """One trainer for all reward functions: what it samples with is compiled once."""
        found = prepare(config=self.config(), reward_fn=count_vowels, prompts=PROMPTS)
        assert isinstance(found, jrl.PPOTrainer)
        return found


Make = Callable[[Place], Any]


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the parts of its message.

    Attributes:
      name: What the user did.
      make: Does it; raises, or gives the words of a command.
      argument: What of the message names what is mistaken.
      expected: What it should be.
      got: What it is.
      remedy: What to do, or the likely cause.
    """

    name: str
    make: Make
    argument: str
    expected: str
    got: str
    remedy: str

    def message(self, place: Place) -> str:
        """The message that the user reads."""
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                words = self.make(place)
                if isinstance(words, list):
                    return _said_by(words)
        except Exception as error:
            return "\n".join([str(error), *getattr(error, "__notes__", ())])
        raise AssertionError(f"{self.name}: nothing was refused")


def _said_by(words: Sequence[str]) -> str:
    """Standard error of a command that must fail."""
    said = io.StringIO()
    with contextlib.redirect_stderr(said), contextlib.redirect_stdout(io.StringIO()):
        try:
            status = main(words)
        except SystemExit as error:  # argparse's way
            status = int(error.code or 0)
    assert status == 2, f"status {status}: {said.getvalue()}"
    return said.getvalue().strip()


def command(name: str, *more: str | Callable[[Place], list[str]], reward: str = "") -> Make:
    """An online command with the small model, a reward and prompts, and further words, which win."""

    def make(place: Place) -> list[str]:
        words = [
            name,
            "--reward",
            reward or f"{count_vowels.__module__}:count_vowels",
            "--prompts",
            place.prompts,
        ]
        words += ["--model.model_path", place.model, "--train.checkpoint_dir", place / "run"]
        words += ["--train.seq_length", "24", "--method.gen_kwargs", "{max_new_tokens: 4}"]
        for part in more:
            words += part(place) if callable(part) else [part]
        return words

    return make


def words(*of: str | Callable[[Place], str]) -> Make:
    """A whole command."""
    return lambda place: [word(place) if callable(word) else word for word in of]


def judged(reward_fn: Any) -> Make:
    """An evaluation whose completions a reward function judges."""

    def make(place: Place) -> None:
        place.trainer.reward_fn = reward_fn
        place.trainer.evaluate()

    return make


def trains(**given: Any) -> Make:
    """A call of `jrl.train` with the small configuration, prompts and a reward; what is given wins."""

    def make(place: Place) -> None:
        found = {"config": place.config(), "reward_fn": count_vowels, "prompts": PROMPTS} | given
        found = {
            name: value(place) if name == "config" and callable(value) else value
            for name, value in found.items()
        }
        jrl.train(**found)

    return make


def in_folder(name: str, file: str) -> Callable[[Place], list[str]]:
    """Words that name a folder as a flag's value, once a file lies in it."""

    def make(place: Place) -> list[str]:
        flag, _, folder = name.partition("=")
        place.write(f"{folder}/{file}", "{}")
        return [flag, place / folder]

    return make


def _bin_checkpoint(place: Place) -> list[str]:
    folder = Path(save_tiny_checkpoint(place.folder / "pickled"))
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    return ["--model.model_path", str(folder)]


def _without_tokenizer(place: Place) -> list[str]:
    folder = Path(save_tiny_checkpoint(place.folder / "bare"))
    for path in [*folder.glob("token*"), *folder.glob("special*")]:
        path.unlink()
    return ["--model.model_path", str(folder)]


def _padless(place: Place) -> None:
    folder = place.folder / "padless"
    save_tiny_checkpoint(folder)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token = None
    tokenizer.save_pretrained(folder)
    jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=place.config(model={"model_path": str(folder)}))


def _report_of(place: Place) -> list[str]:
    (place.folder / "empty").mkdir(exist_ok=True)
    return ["report", place / "empty"]


def no_return(outputs: Sequence[str]) -> None:
    [len(text) for text in outputs]


class Echo:
    """An environment of one turn."""

    def reset(self, prompt: str) -> str:
        return prompt

    def step(self, output: str) -> tuple[str, float, bool]:
        return "", 1.0, True


def _raises(outputs: Sequence[str]) -> list[float]:
    return [1 / (len(text) - len(text)) for text in outputs]


def _file(flag: str, name: str, text: str) -> Callable[[Place], list[str]]:
    """Words that name a file with this text."""
    return lambda place: [flag, place.write(name, text)]


def _records(flag: str, name: str, *records: Any) -> Callable[[Place], list[str]]:
    return lambda place: [flag, place.lines(name, *records)]


def _offline(name: str, *records: Any) -> Make:
    """An offline command on these records."""

    def make(place: Place) -> list[str]:
        flags = ["--model.model_path", place.model, "--train.seq_length", "24"]
        return [name, *flags, "--samples", place.lines(f"{name}.jsonl", *records)]

    return make


COLUMNS = "'prompt', 'text', 'query'"

MISTAKES: tuple[Mistake, ...] = (
    # Names.
    Mistake(
        "a model folder that is not there",
        command("ppo", "--model.model_path", "./models/gtp2"),
        "`model.model_path`",
        "must be a folder or a name on the hub",
        "'./models/gtp2'",
        "A name on the hub is written without `./` before it",
    ),
    Mistake(
        "a field that is misspelled",
        command("ppo", "--method.clip_range", "0.1"),
        "--method.clip_range",
        "field in PPOConfig",
        "Unknown flag",
        "Did you mean `method.cliprange`?",
    ),
    Mistake(
        "a section that is misspelled",
        command("ppo", "--trian.seed", "3"),
        "--trian.seed",
        "the sections are ['method'",
        "Unknown flag",
        "Did you mean `train`?",
    ),
    Mistake(
        "TRL's name of a field in a nested configuration",
        command("ppo", "--learning_rate", "1e-4"),
        "--learning_rate",
        "the sections are ['method'",
        "Unknown flag",
        "Did you mean `optimizer.kwargs.lr`?",
    ),
    Mistake(
        "a field without its section",
        command("ppo", "--batch_size", "8"),
        "--batch_size",
        "the sections are ['method'",
        "Unknown flag",
        "Did you mean `train.batch_size`?",
    ),
    Mistake(
        "a word in the place of a number",
        command("ppo", "--train.total_steps", "many"),
        "`train.total_steps`",
        "must be int",
        "got 'many' (str)",
        "a value such as 3",
    ),
    Mistake(
        "a command that is misspelled",
        words("pop", "--reward", "x:y"),
        "command",
        "(choose from ppo, grpo, ",
        "invalid choice: 'pop'",
        "Did you mean `ppo`?",
    ),
    Mistake(
        "a command without its reward",
        words("ppo", "--prompts", lambda place: place.prompts),
        "`--reward`",
        "a function as `module:function`, or the folder of a classifier",
        "got none",
        "Example: `--reward my_rewards:score`",
    ),
    Mistake(
        "a recipe that is not there",
        command("ppo", "--config", "ppo_imbd"),
        "ppo_imbd",
        "recipe of this name",
        "there is no file ppo_imbd",
        "Did you mean `ppo_imdb`?",
    ),
    Mistake(
        "a recipe of another algorithm",
        command("grpo", "--config", "ppo_randomwalks"),
        "`--config`",
        "must be a recipe with `method.name: GRPOConfig`",
        "got 'PPOConfig'",
        "Run it by `jrl ppo`, or write one by `jrl config grpo > run.yaml`",
    ),
    Mistake(
        "a recipe indented by tabs",
        command("ppo", _file("--config", "tabs.yaml", "method:\n\tname: PPOConfig\n")),
        "tabs.yaml",
        "indented by spaces",
        "line 2, column 1",
        "put spaces (`  `) there",
    ),
    Mistake(
        "a recipe with an unknown field",
        command("ppo", _file("--config", "field.yaml", "method: {name: PPOConfig, clip_range: 0.1}\n")),
        "`method.clip_range`",
        "of PPOConfig",
        "Unknown field",
        "Did you mean `cliprange`?",
    ),
    Mistake(
        "a trainer that is misspelled",
        trains(config=lambda place: place.config(train={"trainer": "PPOTrianer"})),
        "`train.trainer`",
        "must be one of",
        "got 'PPOTrianer'",
        "Did you mean `PPOTrainer`?",
    ),
    # Data.
    Mistake(
        "a prompt file that is not there",
        command("ppo", "--prompts", "promts.jsonl"),
        "--prompts",
        "there is no file",
        "promts.jsonl",
        "Give its path from there, as in `data/promts.jsonl`",
    ),
    Mistake(
        "plain text in a .jsonl file",
        command("ppo", _file("--prompts", "text.jsonl", "Tell me a story\nAnother\n")),
        "--prompts",
        "is not JSON",
        "line 1",
        "one prompt a line, is named .txt",
    ),
    Mistake(
        "prompts under another column",
        command("ppo", _records("--prompts", "columns.jsonl", {"question": "why?"})),
        "--prompts",
        COLUMNS,
        "found ['question']",
        "Rename the column of the prompts to 'prompt'",
    ),
    Mistake(
        "a .csv file without its head",
        command("ppo", _file("--prompts", "headless.csv", "Tell me a story\nAnother\n")),
        "--prompts",
        COLUMNS,
        "found ['Tell me a story']",
        "Rename the column of the prompts to 'prompt'. The first line of a .csv file names its columns",
    ),
    Mistake(
        "an empty file",
        command("ppo", _file("--prompts", "empty.jsonl", "")),
        "--prompts",
        "at least one must be there",
        "holds no records",
        'such as {"prompt": "The film was"}',
    ),
    Mistake(
        "prompts that are too long",
        command("ppo", "--train.long_prompts", "error", _file("--prompts", "long.txt", "a" * 60)),
        "`prompts`",
        "there is room for 20",
        "prompt 0 has 60 tokens",
        "Set `train.long_prompts: truncate` or `drop`, or raise `train.seq_length` by 40",
    ),
    Mistake(
        "samples under other columns",
        _offline("sft", {"question": "a", "answer": "b"}),
        "--samples",
        '"prompt" with one of',
        "found ['answer', 'question']",
        "Rename them to 'prompt' and 'completion'",
    ),
    Mistake(
        "samples without rewards",
        _offline("ilql", {"prompt": "a", "output": "b"}),
        "--samples",
        "'reward', 'score', 'label'",
        "found ['output', 'prompt']",
        "Rename yours to 'reward', or add it",
    ),
    Mistake(
        "pairs without the rejected completion",
        _offline("dpo", {"prompt": "a", "chosen": "b"}),
        "`samples`",
        "needs the column 'rejected'",
        "it has ['chosen', 'prompt']",
        '{"prompt": "2 + 2 =", "chosen": " 4", "rejected": " 5"}',
    ),
    Mistake(
        "one prompt in the place of a list",
        trains(prompts="Tell me a story"),
        "`prompts`",
        "must be a list",
        "got a single str",
        "put it in a list, `prompts=['Tell me a story']`",
    ),
    Mistake(
        "a file of prompts that is not there",
        trains(prompts="prompts.jsonl"),
        "prompts.jsonl",
        "there is no file",
        "seen from",
        "A single prompt goes into a list: `prompts=['prompts.jsonl']`",
    ),
    Mistake(
        "mappings without a prompt",
        trains(prompts=[{"question": "why?"}]),
        "`prompts`",
        'no key "prompt"',
        "it has ['question']",
        "rename the one that holds the text to `prompt`",
    ),
    Mistake(
        "a prompt that is missing",
        trains(prompts=["a", None]),
        "`prompts`: prompt 1",
        "must be a text",
        "got NoneType",
        "Leave it out, as by `prompts = [prompt for prompt in prompts if isinstance(prompt, str)]`",
    ),
    Mistake(
        "a chat, and a tokenizer without a template",
        trains(prompts=[[{"role": "user", "content": "hi"}]]),
        "`messages` of row 0",
        "need a chat template",
        "the tokenizer has none",
        "set `tokenizer.tokenizer_path` to the tokenizer of a chat model",
    ),
    Mistake(
        "fewer rewards than samples",
        trains(reward_fn=None, prompts=None, samples=["a", "b"], rewards=[1.0]),
        "`rewards`",
        "one entry a sample",
        "got 1 for 2 samples",
        "Compare `len(samples)` and `len(rewards)`",
    ),
    Mistake(
        "samples for an online algorithm",
        trains(reward_fn=None, prompts=None, samples=["a", "b"]),
        "`samples`",
        "give `reward_fn` or `environment`, and `prompts`",
        "got `samples`",
        "jrl.default_sft_config()",
    ),
    Mistake(
        "prompts without anything that judges",
        trains(reward_fn=None, config=None),
        "`reward_fn`",
        "give `reward_fn` or `environment` (online)",
        "got none of them",
        "or `samples` (offline)",
    ),
    # Models.
    Mistake(
        "a checkpoint of pickles",
        command("ppo", _bin_checkpoint),
        "pickled",
        "safetensors",
        "holds pytorch_model.bin, a pickle",
        "Convert it once, where torch is: python -c",
    ),
    Mistake(
        "a checkpoint without its tokenizer",
        command("ppo", _without_tokenizer),
        "`tokenizer_path`",
        "tokenizer.json or the like",
        "has no vocabulary",
        "Set `tokenizer.tokenizer_path` to the folder that holds them",
    ),
    Mistake(
        "a tokenizer that can neither pad nor end",
        _padless,
        "The tokenizer",
        "an EOS nor a pad token",
        "padless has neither",
        "`tokenizer.tokenizer_extra_configs: {eos_token: TOKEN}`",
    ),
    Mistake(
        "more layers than the model has",
        command("ppo", "--model.num_layers_unfrozen", "99"),
        "`num_layers_unfrozen`",
        "at most the 2 layers of the model",
        "got 99",
        "-1 (all), 0 (only heads)",
    ),
    Mistake(
        "rows that are longer than the model's positions",
        command("ppo", "--train.seq_length", "4096"),
        "`train.seq_length`",
        "the model has 128 positions",
        "is 4096",
        "shorten `seq_length`",
    ),
    Mistake(
        "a T5 that is called causal",
        trains(config=lambda place: place.config(model={"model_path": place.t5})),
        "`model.model_arch_type`",
        "for a t5 model",
        "got 'causal'",
        "must be 'seq2seq'",
    ),
    Mistake(
        "a T5 in an environment",
        trains(
            reward_fn=None,
            environment=Echo,
            config=lambda place: place.config(model={"model_path": place.t5, "model_arch_type": "seq2seq"}),
        ),
        "`environment`",
        "need a causal language model",
        "got an encoder-decoder",
        "Set `model.model_path` to a decoder, such as gpt2, and `model.model_arch_type: causal`",
    ),
    Mistake(
        "an adapter that is not known",
        command("ppo", "--model.peft_config", "{peft_type: IA3}"),
        "`peft_type`",
        "must be one of LORA",
        "got 'IA3'",
        "PREFIX_TUNING, PROMPT_TUNING",
    ),
    Mistake(
        "a model to complete with that is not there",
        words("generate", "--model", "./runs/nowhere", "--prompt", "a"),
        "--model",
        "must be a folder or a name on the hub",
        "'./runs/nowhere'",
        "A name on the hub is written without `./` before it",
    ),
    # Numbers that do not fit each other.
    Mistake(
        "a microbatch that does not divide",
        command("ppo", "--train.batch_size", "32", "--train.minibatch_size", "5"),
        "`train.minibatch_size`",
        "a divisor of `train.batch_size` = 32",
        "got 5",
        "or null",
    ),
    Mistake(
        "groups that do not divide",
        command("grpo", "--method.num_rollouts", "10", "--method.num_generations", "4"),
        "`method.num_generations`",
        "a divisor of `method.num_rollouts` = 10",
        "got 4",
        "(2 or 5 would fit)",
    ),
    Mistake(
        "no room for a prompt",
        command("ppo", "--method.gen_kwargs", "{max_new_tokens: 24}"),
        "`train.seq_length` (24)",
        "room for a prompt",
        "`max_new_tokens` (24)",
        "lower `method.gen_kwargs.max_new_tokens`",
    ),
    Mistake(
        "a mesh that does not fit",
        command("ppo", "--train.mesh", "{data: 3}"),
        "`mesh`",
        "must multiply to the number of devices, 1",
        "got data=3",
        "`train.mesh: {data: -1}` takes all devices",
    ),
    Mistake(
        "an axis that no mesh has",
        command("ppo", "--train.mesh", "{model: 2}"),
        "`train.mesh`",
        "of the axes ['data', 'expert', 'fsdp', 'tensor']",
        "got {'model': 2}",
        "as in `{data: -1, tensor: 2}`, or null",
    ),
    Mistake(
        "an optimizer that is not known",
        command("ppo", "--optimizer.name", "adamw8"),
        "optimizer",
        "known are adafactor",
        "'adamw8'",
        "Did you mean `adamw`?",
    ),
    Mistake(
        "an argument that the optimizer does not take",
        command("ppo", "--optimizer.kwargs.learning_rate", "1e-4"),
        "optimizer 'adamw'",
        "it takes ['lr'",
        "unknown argument `learning_rate`",
        "Did you mean `lr`?",
    ),
    Mistake(
        "a schedule that is not known",
        command("ppo", "--scheduler.name", "cosine"),
        "scheduler",
        "known are constant",
        "'cosine'",
        "Did you mean `warmup_cosine`?",
    ),
    Mistake(
        "an argument that sampling does not take",
        command("ppo", "--method.gen_kwargs.max_tokens", "10"),
        "method.gen_kwargs",
        "jrl samples with",
        "`max_tokens` is not known",
        "Did you mean `max_new_tokens`?",
    ),
    Mistake(
        "a temperature of 0",
        command("ppo", "--method.gen_kwargs.temperature", "0"),
        "`gen_kwargs.temperature`",
        "must be positive",
        "got 0.0",
        "greedy is do_sample: false",
    ),
    # Folders and packages.
    Mistake(
        "a folder that holds another run",
        command("ppo", in_folder("--train.checkpoint_dir=used", "checkpoint_4/x")),
        "used",
        "to another folder",
        "holds checkpoints of an earlier run",
        "`train.overwrite: true`",
    ),
    Mistake(
        "resuming from nothing",
        command("ppo", in_folder("--train.resume_from_checkpoint=no_run", "note.txt")),
        "`train.resume_from_checkpoint`",
        "a folder checkpoint_<step>",
        "holds no checkpoint",
        "Set it to the `train.checkpoint_dir` of the run, or to null",
    ),
    Mistake(
        "a report of a folder without a run",
        _report_of,
        "`run`",
        "must be the folder of a run",
        "/empty has none",
        "`train.checkpoint_dir`",
    ),
    Mistake(
        "a tracker that is not known",
        command("ppo", "--train.tracker", "mlflow"),
        "`train.tracker`",
        "must be one of",
        "got 'mlflow'",
        "['tensorboard', 'wandb']",
    ),
    # Functions.
    Mistake(
        "a module that is not there",
        command("ppo", reward="my_rewrads:politeness"),
        "'my_rewrads:politeness'",
        "neither installed nor as my_rewrads.py in /",
        "there is no module 'my_rewrads'",
        "call `jrl` in the folder where the file lies",
    ),
    Mistake(
        "a function that is not there",
        command("ppo", reward=f"{count_vowels.__module__}:vowels"),
        "'vowels'",
        "it has ['count_vowels'",
        "has no function",
        "Did you mean `odd_vowels`?",
    ),
    Mistake(
        "a function without its module",
        command("ppo", reward="count_vowels"),
        "module:function",
        "expected `module:function`",
        "got 'count_vowels'",
        "Write `my_rewards:count_vowels`",
    ),
    Mistake(
        "a name in the place of a function",
        trains(reward_fn="accuracy"),
        "`reward_fn`",
        "must be a function or a list of functions",
        "got str 'accuracy'",
        "give the function itself, as in `reward_fn=my_reward`",
    ),
    Mistake(
        "a reward function that takes something else",
        judged(lambda texts: [1.0 for _ in texts]),
        "`reward_fn`",
        "there are ['output_tokens', 'outputs'",
        "takes `texts`",
        "Did you mean `outputs`?",
    ),
    Mistake(
        "a reward function that returns too few",
        judged(lambda outputs: [1.0]),
        "`reward_fn`",
        "one reward a sample",
        "got 1 for 2 samples",
        "`outputs` has the completions, one reward each",
    ),
    Mistake(
        "a reward function that returns nothing",
        judged(no_return),
        "`reward_fn`",
        "one reward a sample, a list of 2",
        "got NoneType",
        "Is there no `return`?",
    ),
    Mistake(
        "a reward function that returns texts",
        judged(lambda outputs: ["good" for _ in outputs]),
        "`reward_fn`",
        "must be a number",
        "got 'good'",
        "Return a score, such as 1.0 for a good sample",
    ),
    Mistake(
        "a reward that is no number",
        judged(lambda outputs: [float("nan") for _ in outputs]),
        "`reward_fn`",
        "must be finite",
        "got nan",
        "`train.reward_errors: skip`",
    ),
    Mistake(
        "rewards of another length than their tokens",
        judged(lambda outputs: [[1.0] * 9 for _ in outputs]),
        "`reward_fn`",
        "must match len(output_tokens[0])",
        "got 9 for",
        "return one a token of `output_tokens[0]`",
    ),
    Mistake(
        "a reward function that raises",
        judged(_raises),
        "`reward_fn`",
        "raised ZeroDivisionError",
        "division by zero",
        "set `train.reward_errors: skip`",
    ),
    Mistake(
        "one stop sequence in the place of a list",
        trains(stop_sequences="\n"),
        "`stop_sequences`",
        "must be a list of texts",
        "got the text '\\n' alone",
        "put it in a list, `['\\n']`",
    ),
    Mistake(
        "a mapping in the place of a configuration",
        trains(config={"train": {"seed": 3}}),
        "`config`",
        "must be a TRLConfig",
        "got dict",
        "`jrl.default_ppo_config().evolve(train={'seed': 3})`",
    ),
)
"""All of them; `python -m tests.mistakes` prints what a user reads."""

# SPDX-License-Identifier: Apache-2.0
"""`tools` and `environment_factory` of `jrl.trl.GRPOTrainer`: a tiny model that writes calls, and TRL's own loop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jrl.trl import GRPOConfig, GRPOTrainer
from tests.environments.chat_models import TEMPLATE, chat_tokenizer, save_chat_model

CALLS = (
    '{"name": "add", "arguments": {"a": 1, "b": 2}}',
    '{"name": "add", "arguments": {"a": 1}}',
    '{"name": "later", "arguments": {"text": "x"}}',
    '{"name": "nothing", "arguments": {}}',
    '{"name": "add", "arguments": [1',
)
ANSWERS = ("three", "five")
ROWS = [
    {"prompt": [{"role": "user", "content": f"{number} and 2?"}], "number": number} for number in range(4)
]
pytestmark = pytest.mark.filterwarnings("ignore:Rollouts are filtered", "ignore:.*no prompt has two samples")


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


async def later(text: str) -> str:
    """Says a text later.

    Args:
        text: What to say.
    """
    return f"{text}, later"


class Counter:
    """Counts, from the number of its row."""

    def reset(self, number: int, **columns: Any) -> str:
        self.count = number
        return f" Begin at {number}."

    def up(self, by: int) -> str:
        """Counts up.

        Args:
            by: How far.
        """
        self.count += by
        return f"at {self.count}"

    def get_reward(self) -> float:
        return float(self.count)


def args(folder: Path, **given: Any) -> GRPOConfig:
    return GRPOConfig(
        str(folder),
        **{
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 400,
            "learning_rate": 1e-2,
            "max_steps": 2,
            "logging_steps": 1,
            "save_strategy": "no",
            "gradient_checkpointing": False,
            "max_tool_calling_iterations": 3,
            "temperature": 5.0,  # all that may be written is
            **given,
        },
    )


def logged(trainer: GRPOTrainer) -> list[dict[str, Any]]:
    with (trainer.native.run_dir / "rollouts" / "rollouts.jsonl").open(encoding="utf-8") as file:
        return [json.loads(line) for line in file]


class Seen:
    """A reward function that remembers what it was given."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Any]] = []

    def __call__(self, completions: Any, **given: Any) -> list[float]:
        self.calls.append({"completions": completions, **given})
        return [float(len(messages)) for messages in completions]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_chat_model(tmp_path_factory.mktemp("chat"), chat_tokenizer([*CALLS, *ANSWERS]))


def test_episodes_with_tools(model, tmp_path, writes):
    writes(CALLS[:4], ANSWERS[:1])
    seen = Seen()
    trainer = GRPOTrainer(model, seen, args(tmp_path), train_dataset=ROWS, tools=[add, later])
    assert trainer.train().global_step == 2
    said = {
        m["content"] for call in seen.calls for c in call["completions"] for m in c if m["role"] == "tool"
    }
    assert {"3", "x, later", "{'error': 'Tool nothing not found.'}"} < said
    assert any("missing 1 required positional argument: 'b'" in text for text in said)
    for call in seen.calls:
        assert "environments" not in call
        for messages, ids in zip(call["completions"], call["completion_ids"], strict=True):
            assert messages[0]["role"] == "assistant" and len(ids) <= 400
            assert sum(m["role"] == "assistant" for m in messages) <= 4, (
                "three answers of tools, and a last turn"
            )
    (line, _) = [line for line in trainer.state.log_history if "tools/call_frequency" in line]
    assert 0 < line["tools/failure_frequency"] < 1 and line["tools/call_frequency"] > 0
    rows = logged(trainer)
    assert {row["done"] for row in rows} == {True, False} and {len(row["turns"]) for row in rows} > {1}
    for row, messages in zip(rows, [c for call in seen.calls for c in call["completions"]], strict=True):
        full = row["turns"][-1]["end"] == len(row["output_tokens"])
        assert full and messages[-1]["role"] == "assistant", (
            "what the policy had no room to read is no message"
        )


def test_methods_of_an_object_are_tools_and_it_rewards_itself(model, tmp_path, writes):
    writes(('{"name": "add", "arguments": {"a": 1, "b": 2}}',), ANSWERS)
    with pytest.raises(ValueError, match="`reward_funcs` must hold"):
        GRPOTrainer(model, None, args(tmp_path), train_dataset=ROWS, tools=[add])
    seen = Seen()
    trainer = GRPOTrainer(
        model,
        seen,
        args(tmp_path, reward_weights=[0.0]),
        train_dataset=ROWS,
        eval_dataset=ROWS[:2],
        environment_factory=Counter,
        tools=[add],
    )
    assert trainer.reward_func_names == ["Seen", "Counter"]
    trainer.train()
    assert "eval_rewards/Counter/mean" in trainer.evaluate()
    for call in seen.calls:
        for prompt, number in zip(call["prompts"], call["number"], strict=True):
            assert prompt[-1]["content"] == f"{number} and 2? Begin at {number}."
        assert [made.count for made in call["environments"]] == call["number"]
    for row in logged(trainer):
        assert row["reward"] == row["reward/Counter"], "the weight of the other one is 0"


# Beside TRL itself.


class Generated(Exception):
    """TRL's loop is through."""


def loop_of_trl(trainer: Any, inputs: list[Any], turns: list[list[list[int]]]) -> Any:
    """What TRL's own loop makes of turns that were sampled before.

    Args:
      trainer: TRL's.
      inputs: The row of each completion.
      turns: Ids of the turns of each completion.
    """
    left, known = [list(row) for row in turns], list[list[int]]()
    generate, found = trainer._generate, []

    def next_turns(prompt_ids: Any, *rest: Any, **options: Any) -> Any:
        del rest, options
        if not known:
            known.extend([] for _ in turns)
            rows = list(range(len(turns)))
        else:  # a row is known by all that stands before its turn; rows keep their order
            rows = []
            for ids in prompt_ids:
                fits = (row for row, has in enumerate(known) if left[row] and ids[: len(has)] == has)
                rows.append(next(row for row in fits if row not in rows))
        said = [left[row].pop(0) for row in rows]
        for row, ids, turn in zip(rows, prompt_ids, said, strict=True):
            known[row] = [*ids, *turn]
        return said, [[0.0] * len(turn) for turn in said]

    def kept(prompts: Any) -> Any:
        found.append(generate(prompts))
        raise Generated

    trainer._generate_single_turn, trainer._generate = next_turns, kept
    with pytest.raises(Generated):
        trainer._generate_and_score_completions(inputs)
    assert not any(left), "TRL's loop asked for every turn"
    return found[0]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("template", "factory"),
    [("own", None), ("qwen2_5", Counter), ("qwen3", None), ("qwen3_instruct_2507", Counter)],
)
def test_calls_messages_ids_and_mask_are_those_of_trl(template, factory, tmp_path, writes, monkeypatch):
    trl = pytest.importorskip("trl")
    monkeypatch.setenv("TRL_EXPERIMENTAL_SILENCE", "1")
    folder = Path(trl.__file__).parent / "chat_templates"
    text = TEMPLATE if template == "own" else (folder / f"{template}.jinja").read_text(encoding="utf-8")
    up = '{"name": "up", "arguments": {"by": 3}}'
    calls = (*CALLS[:2], CALLS[3], CALLS[4], up if factory else CALLS[3])
    tokenizer = chat_tokenizer([*CALLS, *ANSWERS, up], text)
    model = save_chat_model(tmp_path / "model", tokenizer)
    writes(calls, ANSWERS[:1])
    seen = Seen()
    own = args(tmp_path / "jrl", per_device_train_batch_size=32, max_steps=1, max_completion_length=700)
    given = {"train_dataset": ROWS, "tools": [add], "environment_factory": factory}
    trainer = GRPOTrainer(model, seen, own, **given)
    trainer.train()
    numbers, rows = seen.calls[0]["number"], logged(trainer)
    turns = [[row["output_tokens"][turn["start"] : turn["end"]] for turn in row["turns"]] for row in rows]

    if template == "own":  # TRL knows templates by their text; this one says by itself how it is read
        tokenizer.response_template = dict(trainer.episodes.kits[None].format.template)
    config = {name: vars(own)[name] for name in ("num_generations", "max_completion_length", "max_steps")}
    theirs = trl.GRPOTrainer(
        model=model,
        reward_funcs=lambda completions, **rest: [0.0] * len(completions),
        args=trl.GRPOConfig(
            str(tmp_path / "trl"),
            use_cpu=True,
            bf16=False,
            report_to="none",
            per_device_train_batch_size=32,
            max_tool_calling_iterations=3,
            **config,
        ),
        train_dataset=datasets_of(ROWS),
        processing_class=tokenizer,
        tools=[add],
        environment_factory=factory,
    )
    prompt_ids, ids, mask, messages, *_ = loop_of_trl(theirs, [ROWS[number] for number in numbers], turns)

    prompts = trainer.native.prompts
    every = prompts.rows(np.arange(len(ROWS)), width=1024)
    by_number = {
        row["number"]: encoded
        for row, encoded in zip(every.metadata["record"], every.token_lists, strict=True)
    }
    assert prompt_ids == [by_number[number] for number in numbers]
    assert ids == [row["output_tokens"] for row in rows]
    assert mask == [mask_of(row) for row in rows]
    assert messages == seen.calls[0]["completions"]
    assert {len(row["turns"]) for row in rows} >= {1, 2}
    assert sum(not all(row) for row in mask) >= 4, "episodes with answers of tools"


def datasets_of(rows: list[Any]) -> Any:
    return pytest.importorskip("datasets").Dataset.from_list(rows)


def mask_of(row: dict[str, Any]) -> list[int]:
    found = [0] * len(row["output_tokens"])
    for turn in row["turns"]:
        found[turn["start"] : turn["end"]] = [1] * (turn["end"] - turn["start"])
    return found

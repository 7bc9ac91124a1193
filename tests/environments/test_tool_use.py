# SPDX-License-Identifier: Apache-2.0
"""Tools as an environment of `jrl.train`: calls and answers turn by turn, an iteration of GRPO, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import jrl
from jrl.environments import Tools
from jrl.rollout.environments import EnvironmentFailure, World
from tests.environments.chat_models import TEMPLATE, chat_tokenizer, only, save_chat_model
from tests.trainers.runs import grpo_config

CALLS = ('{"name": "add", "arguments": {"a": 1, "b": 2}}', '{"name": "add", "arguments": {"a": 1}}')
BETWEEN = "\n<|im_start|>user\n<tool_response>\n{}\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
LLAMA = """{%- for m in messages -%}<|start_header_id|>{{ m.role }}<|end_header_id|>

{% if m.tool_calls %}{"name": "{{ m.tool_calls[0].function.name }}", "parameters": \
{{ m.tool_calls[0].function.arguments | tojson }}}{% else %}{{ m.content }}{% endif %}<|eot_id|>{% endfor -%}
{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>

{% endif %}"""


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: One.
        b: The other.
    """
    return a + b


class Purse:
    """Coins, of which there are so many at first."""

    def reset(self, coins: int) -> str:
        self.coins = coins
        return f" You have {coins}."

    def earn(self, number: int) -> str:
        """Earns coins.

        Args:
            number: Of them.
        """
        self.coins += number
        return str(self.coins)

    def get_reward(self) -> float:
        return float(self.coins)


class Till(Purse):
    def look(self) -> str:
        """Says how many there are."""
        return str(self.coins)


def tools(*functions: Any, template: str = TEMPLATE, **options: Any) -> Tools:
    return Tools(functions, chat_tokenizer([*CALLS, "three"], template), **options)


def play(made: Tools, row: dict[str, Any], turns: list[str]) -> list[Any]:
    (prompt,) = made.prompts([row])
    metadata = {name: value for name, value in prompt.items() if name != "prompt"}
    world = World(made, prompt["prompt"], metadata, 0)
    return [world.step(text, made.tokenizer(text, add_special_tokens=False)["input_ids"]) for text in turns]


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def test_a_prompt_tells_of_the_tools():
    (prompt,) = tools(add).prompts([{"prompt": "1+2?", "level": 3}])
    assert '"name": "add"' in prompt["prompt"] and '"description": "The other."' in prompt["prompt"]
    assert prompt["prompt"].endswith("<|im_start|>user\n1+2?<|im_end|>\n<|im_start|>assistant\n")
    assert prompt["level"] == 3


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (call("add", a=1, b=2) + "<|im_end|>", BETWEEN.format("3")),
        ("I ask. " + call("add", a=1, b=2), "<|im_end|>" + BETWEEN.format("3")),
        (call("sub") + "<|im_end|>", BETWEEN.format("{'error': 'Tool sub not found.'}")),
    ],
)
def test_a_call_is_answered(text, said):
    (answer,) = play(tools(add), {"prompt": "?"}, [text])
    assert answer == (said, 0.0, False)


def test_two_calls_of_a_turn_are_answered_in_their_order():
    async def slow(text: str) -> str:
        """Says it again.

        Args:
            text: What to say.
        """
        return text

    turn = call("slow", text="a") + call("add", a=1, b=2) + call("slow", text="b") + "<|im_end|>"
    (answer,) = play(tools(add, slow), {"prompt": "?"}, [turn])
    places = [answer.observation.index(f"\n{said}\n") for said in ("a", "3", "b")]
    assert places == sorted(places) and answer.observation.count("<tool_response>") == 3


@pytest.mark.parametrize(
    ("text", "done"),
    [
        ("three<|im_end|>", True),
        ("thr", False),
        ('<tool_call>{"name": "add", "argu</tool_call><|im_end|>', True),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call><|im_end|>', True),
        ('<tool_call>{"arguments": {}}</tool_call><|im_end|>', True),
    ],
)
def test_a_turn_without_a_call_ends_the_episode_unless_a_limit_cut_it(text, done):
    assert play(tools(add), {"prompt": "?"}, [text]) == [("", 0.0, done)]


def test_calls_beyond_the_limit_are_not_answered():
    turn = call("add", a=1, b=2) + "<|im_end|>"
    found = play(tools(add, max_rounds=1), {"prompt": "?"}, [turn, turn])
    assert [answer.done for answer in found] == [False, True] and found[1].observation == ""


def test_the_format_of_llama_is_found_too():
    made = tools(add, template=LLAMA)
    text = '{"name": "add", "parameters": {"a": 1, "b": 2}}<|eot_id|>'
    (answer,) = play(made, {"prompt": "?"}, [text])
    assert "<|start_header_id|>tool<|end_header_id|>\n\n3<|eot_id|>" in answer.observation


def test_an_object_holds_what_its_tools_change_and_rewards_as_it_goes():
    made = tools(add, factory=Purse)
    (prompt,) = made.prompts([{"prompt": "Go.", "coins": 2}])
    assert "Go. You have 2." in prompt["prompt"]
    turns = [call("earn", number=3) + "<|im_end|>", call("add", a=1, b=1) + "<|im_end|>", "three<|im_end|>"]
    found = play(made, {"prompt": "Go.", "coins": 2}, turns)
    assert [answer.reward for answer in found] == [5.0, 0.0, 0.0] and "\n5\n" in found[0].observation


def test_several_kinds_of_objects_are_chosen_by_the_row():
    made = tools(factory={"purse": Purse, "other": Till})
    texts = [
        made.prompts([{"prompt": "?", "coins": 1, "environment": name}])[0]["prompt"]
        for name in ("purse", "other")
    ]
    assert texts[0] != texts[1]
    with pytest.raises(ValueError, match=r"must be one of .*'purse'.*, got 'pouch'"):
        made.prompts([{"prompt": "?", "coins": 1, "environment": "pouch"}])


def test_chance_in_reset_fails_the_episode():
    said = iter(range(9))
    moody = type("Moody", (Purse,), {"reset": lambda self: f" {next(said)}"})
    with pytest.raises(EnvironmentFailure, match="must be a function of the row"):
        play(tools(factory=moody), {"prompt": "?"}, [])


def undescribed(a):
    return a


@pytest.mark.parametrize(
    ("functions", "options", "message"),
    [
        ((), {}, "must hold at least one tool"),
        ((undescribed,), {}, "docstring and type hints"),
        ((3,), {}, r"`functions\[0\]` must be a function, got int"),
        ((add, add), {}, r"names of their own, got \['add'\]"),
        ((add,), {"max_rounds": -1}, "`max_rounds` must be at least 0"),
        ((add,), {"template": "{{ messages[0].content }}"}, "leaves out calls of tools"),
        ((add,), {"template": LLAMA.replace('{"name"', '{"call"')}, "a format that is none of"),
        ((add,), {"template": TEMPLATE.replace("'<tool_response>", "'' if 1 else '")}, 'of the role "tool"'),
    ],
)
def test_what_cannot_be_had_is_refused(functions, options, message):
    with pytest.raises(ValueError, match=message):
        tools(*functions, **options)


def test_prompts_are_of_tools_and_images_are_no_answers():
    with pytest.raises(EnvironmentFailure, match=r"must come from `Tools\.prompts"):
        World(tools(add), "?", {}, 0)

    def draw() -> list:
        """Draws."""
        return [{"type": "image", "image": None}]

    with pytest.raises(EnvironmentFailure, match="must answer in text"):
        play(tools(draw), {"prompt": "?"}, [call("draw") + "<|im_end|>"])


@pytest.mark.filterwarnings("ignore:Rollouts are filtered", "ignore:.*no prompt has two samples")
def test_an_iteration_of_grpo(tmp_path):
    tokenizer = chat_tokenizer([*CALLS, "three"])
    model = save_chat_model(tmp_path / "model", tokenizer)
    made = Tools([add], tokenizer, max_rounds=2)
    config = grpo_config(model, tmp_path / "run", train={"seq_length": 640, "total_steps": 1}).evolve(
        method={"gen_kwargs": {"max_new_tokens": 200, "do_sample": True}},
        train={"trainer_kwargs": {"logit_mask": only(tokenizer, CALLS, ["three"])}},
    )
    trainer = jrl.train(
        environment=made,
        prompts=made.prompts([{"prompt": f"{n}+2?"} for n in range(4)]),
        reward_fn=lambda outputs: [float("three" in text) for text in outputs],
        config=config,
    )
    with (Path(trainer.run_dir) / "rollouts" / "rollouts.jsonl").open(encoding="utf-8") as file:
        rows = [json.loads(line) for line in file]
    assert any("<tool_response>\n3\n" in turn["observation"] for row in rows for turn in row["turns"])

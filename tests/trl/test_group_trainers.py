# SPDX-License-Identifier: Apache-2.0
"""GRPO and RLOO by scripts of TRL's shape: tiny runs, what reward functions get, sizes, and what is refused."""

from __future__ import annotations

import asyncio
import json
import warnings
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jrl.learners.groups import group_credit
from jrl.trainers.loading.reward_model import load_reward_model
from jrl.trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer
from jrl.trl.group_native import encode_rows
from jrl.trl.group_rewards import Given, script_rewards
from tests.tiny import tiny_tokenizer
from tests.trainers.loading.reward_models import save_reward_model

ROWS = [{"prompt": f"tell {i} ", "letter": "aeiou"[i % 5], "number": i} for i in range(8)]
TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
FIELDS = json.loads((Path(__file__).parents[1] / "golden" / "trl_group_configs.json").read_text())


def chat_tokenizer():
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def share_of_vowels(completions, **others):
    del others
    return [sum(letter in "aeiou" for letter in text) / max(len(text), 1) for text in completions]


def options(folder, **given):
    """2 prompts with 4 completions each a set of rollouts, an optimizer step on all of them."""
    return {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_completion_length": 6,
        "learning_rate": 1e-2,
        "max_steps": 2,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "save_strategy": "no",
        **given,
    }


class Calls:
    """A reward function that remembers what it was given."""

    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def __call__(self, completions, **given):
        self.seen.append({"completions": completions, "step": given["trainer_state"].global_step, **given})
        given["log_metric"]("half", 0.5)
        given["log_extra"]("row", [f"row {number}" for number in given["number"]])
        return [None if place % 4 == 0 else float(len(text)) for place, text in enumerate(completions)]


@pytest.fixture(scope="module")
def trained(checkpoint, tmp_path_factory):
    calls = Calls()
    args = GRPOConfig(
        **options(tmp_path_factory.mktemp("grpo"), beta=0.01, reward_weights=[1.0, 0.5], scale_rewards=False),
        eval_strategy="steps",
        eval_steps=2,
    )
    trainer = GRPOTrainer(
        str(checkpoint),
        reward_funcs=[share_of_vowels, calls],
        args=args,
        train_dataset=ROWS,
        eval_dataset=ROWS[:3],
    )
    return trainer, trainer.train(), calls


def test_a_run(trained):
    trainer, output, _ = trained
    assert output.global_step == trainer.state.global_step == 2 and np.isfinite(output.training_loss)
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert len(lines) == 2 and lines[0]["num_tokens"] < lines[1]["num_tokens"]
    assert {
        "loss",
        "reward",
        "reward_std",
        "frac_reward_zero_std",
        "rewards/share_of_vowels/mean",
        "rewards/Calls/std",
        "completions/mean_length",
        "completions/clipped_ratio",
        "clip_ratio/low_mean",
        "clip_ratio/high_mean",
        "clip_ratio/region_mean",
        "entropy",
        "kl",
        "half",
    } <= lines[0].keys()
    assert lines[0]["half"] == 0.5
    assert trainer.reward_func_names == ["share_of_vowels", "Calls"]


def test_reward_functions_get_what_those_of_trl_get(trained):
    trainer, _, calls = trained
    first = calls.seen[0]
    assert first.keys() == {
        "step", "completions", "prompts", "completion_ids", "letter", "number",
        "trainer_state", "log_extra", "log_metric",
    }  # fmt: skip
    assert len(first["prompts"]) == 8 and first["prompts"][0] == first["prompts"][3] != first["prompts"][4]
    by_prompt = {row["prompt"]: row for row in ROWS}
    assert [by_prompt[prompt]["letter"] for prompt in first["prompts"]] == first["letter"]
    assert all(len(ids) <= 6 for ids in first["completion_ids"])
    assert [
        trainer.tokenizer.decode(ids, skip_special_tokens=True) for ids in first["completion_ids"]
    ] == first["completions"]
    assert [call["step"] for call in calls.seen[:2]] == [0, 1]


def test_the_weighted_sum_is_the_reward_and_none_is_left_out_of_it(trained):
    trainer, _, _ = trained
    with (trainer.native.run_dir / "rollouts" / "rollouts.jsonl").open() as file:
        rows = [json.loads(line) for line in file][:8]
    assert rows[0]["row"].startswith("row ")
    for place, row in enumerate(rows):
        vowels, length = share_of_vowels([row["output"]])[0], len(row["output"])
        assert row["reward"] == pytest.approx(vowels + (0 if place % 4 == 0 else 0.5 * length), abs=1e-6)


def test_evaluations_are_of_as_many_completions(trained):
    trainer, _, calls = trained
    found = trainer.evaluate()
    assert {
        "eval_reward",
        "eval_rewards/Calls/mean",
        "eval_completions/mean_length",
        "eval_half",
    } <= found.keys()
    assert len(calls.seen[-1]["prompts"]) == 3 * 4
    in_run = [line for line in trainer.state.log_history if "eval_reward" in line]
    assert in_run[0]["step"] == 2 and in_run[0]["eval_reward"] == found["eval_reward"]
    assert {"test_reward"} <= trainer.evaluate(ROWS[:2], metric_key_prefix="test").keys()
    with pytest.raises(ValueError, match="`ignore_keys` must be None"):
        trainer.evaluate(ignore_keys=["x"])


def test_the_model_is_saved_as_trls_is(trained, tmp_path):
    trainer, _, _ = trained
    trainer.save_model(str(tmp_path / "model"))
    assert (tmp_path / "model" / "model.safetensors").exists()
    assert "trained by GRPOMethod" in (tmp_path / "model" / "README.md").read_text()
    assert trainer.model.model_tags == ["trl", "grpo"]


@pytest.mark.slow
def test_rloo_on_messages_learns_without_retokenising(checkpoint, tmp_path):
    seen = []

    async def of_messages(prompts, completions, completion_ids, **others):
        await asyncio.sleep(0)
        seen.append((prompts, completions, completion_ids))
        return share_of_vowels([messages[0]["content"] for messages in completions])

    rows = [{"prompt": [{"role": "user", "content": f"say {i}"}]} for i in range(8)]
    args = RLOOConfig(**options(tmp_path, max_steps=3, normalize_advantages=True, reward_clip_range=(-1, 1)))
    trainer = RLOOTrainer(
        str(checkpoint), of_messages, args, train_dataset=rows, processing_class=chat_tokenizer()
    )
    trainer.train()
    prompts, completions, ids = seen[0]
    assert prompts[0] in [row["prompt"] for row in rows]
    assert completions[0][0]["role"] == "assistant"
    decoded = [trainer.tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    assert decoded == [messages[0]["content"] for messages in completions]
    lines = [line for line in trainer.state.log_history if "reward" in line]
    assert len(lines) == 3 and "kl" in lines[0] and lines[0]["loss"] != lines[1]["loss"]


def test_prompts_are_rendered_by_the_template_and_texts_are_not():
    tokenizer = chat_tokenizer()
    message = [{"role": "user", "content": "hi"}]
    ids, rows = encode_rows([{"prompt": message, "x": 1}, {"prompt": "hi", "x": 2}], tokenizer, {})
    assert tokenizer.decode(ids[0]) == "<user>hi<assistant>" and tokenizer.decode(ids[1]) == "hi"
    assert [row["x"] for row in rows] == [1, 2]


@pytest.mark.slow
def test_a_resumed_run_is_the_run(checkpoint, tmp_path):
    def run(folder, steps, resume=None):
        given = options(tmp_path / folder, max_steps=4, save_strategy="steps", save_steps=2, beta=0.01)
        given |= {
            "steps_per_generation": 2,
            "per_device_train_batch_size": 4,
            "lr_scheduler_type": "constant",
        }
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trainer = GRPOTrainer(str(checkpoint), share_of_vowels, GRPOConfig(**given), ROWS)
            trainer.native.config.train.total_steps = steps
            trainer.train(resume_from_checkpoint=resume)
        return trainer

    whole = run("whole", 4)
    run("parts", 2)
    parts = run("parts", 4, resume=True)
    lines = [[line["reward"] for line in one.state.log_history if "reward" in line] for one in (whole, parts)]
    assert lines[0] == lines[1] and len(lines[0]) == 2
    for left, right in zip(
        *(sorted(one.native.params.items(), key=str) for one in (whole, parts)), strict=True
    ):
        np.testing.assert_array_equal(
            *(np.concatenate([np.ravel(x) for x in _leaves(side[1])]) for side in (left, right))
        )


def _leaves(tree):
    return [leaf for key in sorted(tree) for leaf in _leaves(tree[key])] if isinstance(tree, dict) else [tree]


def length(completions, **others):
    del others
    return [float(len(text)) for text in completions]


def of_the_best(folder, metric, *, sets=ROWS[:2], functions=(share_of_vowels, length), **given):
    """A run's arguments whose best evaluation is told by this metric."""
    every = {"save_strategy": "steps", "save_steps": 1, "eval_strategy": "steps", "eval_steps": 1}
    args = GRPOConfig(
        **options(folder, **every, load_best_model_at_end=True, metric_for_best_model=metric, **given)
    )
    return {
        "reward_funcs": list(functions),
        "args": args,
        "train_dataset": ROWS,
        "eval_dataset": sets,
    }


def test_columns_of_a_script_take_the_place_of_none_of_jrls(checkpoint, tmp_path):
    def logs(completions, log_extra, **others):
        log_extra("reward", ["mine"] * len(completions))
        log_extra("half", ["x"] * (len(completions) // 2))
        log_extra("place", list(range(len(completions))))
        return share_of_vowels(completions)

    trainer = GRPOTrainer(str(checkpoint), logs, GRPOConfig(**options(tmp_path, max_steps=2)), ROWS)
    with pytest.warns(UserWarning) as caught:
        trainer.train()
    said = [str(warning.message) for warning in caught if "log_extra" in str(warning.message)]
    assert len(said) == 2, "once a run, of two iterations"
    assert "the column 'reward' has the name of one of jrl's own, and is `log_extra/reward` in" in said[0]
    assert "the column 'half' has 4 values for 8 completions, and is left out" in said[1]
    with (trainer.native.run_dir / "rollouts" / "rollouts.jsonl").open() as file:
        rows = [json.loads(line) for line in file]
    assert len(rows) == 16 and [row["place"] for row in rows] == [*range(8), *range(8)]
    for row in rows:
        assert row["log_extra/reward"] == "mine" and "half" not in row
        assert row["reward"] == pytest.approx(share_of_vowels([row["output"]])[0])


def test_figures_of_a_script_take_the_place_of_none_of_jrls(checkpoint, tmp_path):
    """In jrl's records, in lines of the log and in evaluations; those of the update are as safe as the rollouts'."""
    clashing = ["reward", "loss", "num_tokens", "step", "reward/mean", "grpo/policy_loss"]

    def logs(completions, log_metric, **others):
        for name in ["half", *clashing]:
            log_metric(name, -7.0)
        return share_of_vowels(completions)

    args = GRPOConfig(**options(tmp_path, max_steps=2))
    trainer = GRPOTrainer(str(checkpoint), logs, args, ROWS, eval_dataset=ROWS[:3])
    with pytest.warns(UserWarning) as caught:
        trainer.train()
        found = trainer.evaluate()
    said = [str(warning.message) for warning in caught if "log_metric" in str(warning.message)]
    assert len(said) == len(clashing), "once a name, of two iterations and an evaluation"
    assert all(f"is `log_metric/{name}` in" in text for name, text in zip(clashing, said, strict=True))
    records = [record for record in trainer.native.history if "iteration" in record]
    lines = [line for line in trainer.state.log_history if "entropy" in line]
    for number, (record, line) in enumerate(zip(records, lines, strict=True), start=1):
        assert (
            record["log_metric/half"] == line["half"] == -7
            and "half" not in record
            and record["step"] == number
        )
        assert (
            record["reward/mean"] == line["reward"] >= 0 and line["num_tokens"] > 0 and line["step"] == number
        )
        assert record["grpo/policy_loss"] == line["loss"] != -7
        assert {record[f"log_metric/{name}"] for name in clashing} == {-7}
        assert {line[f"log_metric/{name}"] for name in clashing} == {-7}
    assert found["eval_half"] == found["eval_log_metric/reward"] == -7 and found["eval_reward"] >= 0


def test_the_best_model_is_told_by_what_evaluations_have(checkpoint, tmp_path):
    metric = "eval_b_rewards/length/mean"
    trainer = GRPOTrainer(
        str(checkpoint), **of_the_best(tmp_path, metric, sets={"a": ROWS[:1], "b": ROWS[:2]})
    )
    trainer.train()
    found = [line[metric] for line in trainer.state.log_history if metric in line]
    assert len(found) == 2 and trainer.state.best_metric == max(found) > 0
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint_{found.index(max(found)) + 1}")


def test_an_evaluation_without_the_metric_is_not_the_best(checkpoint, tmp_path):
    def silent(completions, **others):
        return [None for _ in completions]

    given = of_the_best(tmp_path, "rewards/silent/mean", functions=(share_of_vowels, silent), max_steps=1)
    trainer = GRPOTrainer(str(checkpoint), **given)
    trainer.train()
    assert trainer.state.best_metric is None and trainer.state.best_model_checkpoint is None


@pytest.mark.parametrize(
    ("metric", "given", "names"),
    [
        (
            None,
            {},
            r"\['completions/mean_length', 'reward', 'rewards/length/mean', .*got 'loss': .* has no loss",
        ),
        ("eval_entropy", {}, "'rewards/share_of_vowels/std'.*got 'eval_entropy'"),
        ("rewards/length/mean", {"functions": (length,)}, r"\['completions/mean_length', 'reward'\], got"),
        (
            "reward",
            {"sets": {"a": ROWS[:1], "b": ROWS}},
            r"\['a_completions/mean_length', 'a_reward', .*'b_reward'",
        ),
    ],
)
def test_a_metric_that_no_evaluation_has_is_refused_before_the_run(
    checkpoint, tmp_path, metric, given, names
):
    with pytest.raises(ValueError, match=f"`metric_for_best_model` must be one of .*{names}"):
        GRPOTrainer(str(checkpoint), **of_the_best(tmp_path, metric, **given))


# What a configuration becomes.


@pytest.fixture
def native_of(monkeypatch, checkpoint, tmp_path):
    """The six sections of a trainer's run; no model is loaded."""
    monkeypatch.setattr("jrl.trl.models.ModelHandle.attach", lambda *_: None)

    def make(trainer=GRPOTrainer, config=GRPOConfig, rows=ROWS, **given):
        found = {}

        def remember(self, handle, given):
            found["config"] = self._native_config(handle, given_optimizer=False)

        monkeypatch.setattr(trainer, "_make_native", remember)
        trainer(str(checkpoint), share_of_vowels, config(**options(tmp_path, **given)), rows)
        return found["config"]

    return make


def test_sizes_follow_from_those_of_trl(native_of):
    """64 prompts in sets of 4: 16 sets a pass, each of 2 optimizer steps, twice over."""
    rows = [{"prompt": f"{number}"} for number in range(64)]
    given = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4, "steps_per_generation": 8}
    found = native_of(rows=rows, **given, num_iterations=2, max_steps=-1, num_train_epochs=2)
    assert (found.train.minibatch_size, found.train.batch_size, found.method.num_rollouts) == (2, 8, 16)
    assert found.train.total_steps == 2 * 16 * 2 * 2 and found.train.epochs == 2 * 16
    assert found.train.seq_length == 2 + 6
    again = native_of(rows=rows, **{**given, "steps_per_generation": None, "generation_batch_size": 16})
    assert again.method.num_rollouts == 16


def test_fields_of_the_method_are_those_of_trl(native_of):
    given = {
        "loss_type": "cispo",
        "epsilon_high": 5.0,
        "temperature": 0.7,
        "top_k": 3,
        "scale_rewards": False,
    }
    found = native_of(
        **given, generation_kwargs={"min_new_tokens": 2}, multi_objective_aggregation="normalize_then_sum"
    )
    method = found.method
    assert (method.loss_type, method.epsilon_high, method.scale_rewards) == ("cispo", 5.0, "none")
    assert method.multi_objective_aggregation == "normalize_then_sum"
    assert method.gen_kwargs == {
        "max_new_tokens": 6, "do_sample": True, "temperature": 0.7, "top_p": 1.0, "top_k": 3,
        "repetition_penalty": 1.0, "min_new_tokens": 2,
    }  # fmt: skip
    rloo = native_of(RLOOTrainer, RLOOConfig, reward_clip_range=(-2, 2), normalize_advantages=True).method
    assert (rloo.reward_clip, rloo.normalize_advantages, rloo.beta) == (2, True, 0.05)


def test_several_functions_are_normalised_one_by_one_where_that_is_asked_for():
    from jrl.trl.group_method import GRPOMethod, grpo_recipe

    decoupled = grpo_recipe(
        GRPOMethod(multi_objective_aggregation="normalize_then_sum", reward_weights=[1, 2])
    )
    assert decoupled.aggregate is not None and decoupled.reward_weights == (1, 2)
    assert grpo_recipe(GRPOMethod()).aggregate is None
    assert grpo_recipe(GRPOMethod()).estimate.__qualname__ == group_credit(min).__qualname__


@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_fields_and_defaults_are_those_of_trl(config):
    """`tests/golden/trl_group_configs.json` was written from TRL 1.16; transformers' own fields are its own."""
    found = {entry.name: entry.default for entry in fields(config)}
    wanted = FIELDS[config.__name__]
    assert {name: found.get(name, "missing") for name in wanted} == wanted


@pytest.mark.parity
@pytest.mark.parametrize("config", [GRPOConfig, RLOOConfig])
def test_fields_and_defaults_are_those_of_the_trl_that_is_installed(config):
    theirs = getattr(pytest.importorskip("trl"), config.__name__)
    ours = {entry.name: entry.default for entry in fields(config)}
    wanted = {entry.name: entry.default for entry in fields(theirs) if entry.name in FIELDS[config.__name__]}
    assert wanted == FIELDS[config.__name__], "the stored list is of another TRL"
    assert not [entry.name for entry in fields(theirs) if entry.name not in ours]
    for name in ("logging_steps", "gradient_checkpointing", "bf16"):
        assert ours[name] == next(entry.default for entry in fields(theirs) if entry.name == name)


# What is refused.


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"use_vllm": True}, "`use_vllm` must be left at its default"),
        ({"top_entropy_quantile": 0.2}, "`top_entropy_quantile` must be left"),
        ({"use_adaptive_entropy": True}, "`use_adaptive_entropy` must be left"),
        ({"sync_ref_model": True}, "`sync_ref_model` must be left"),
        ({"min_p": 0.1}, "`min_p` must be left"),
        ({"max_tool_calling_iterations": 3}, "`max_tool_calling_iterations` must be None without `tools`"),
        ({"generation_batch_size": 12}, "`generation_batch_size` must make sets .* multiple of 8"),
        (
            {"steps_per_generation": 1, "gradient_accumulation_steps": 2},
            "`steps_per_generation` must make sets",
        ),
        ({"num_generations": 3}, "`num_generations` must divide the 8 completions"),
        ({"loss_type": "ppo"}, "`method.loss_type` must be one of"),
        ({"max_completion_length": 500}, "within the model's 128 positions"),
    ],
)
def test_fields_that_cannot_be_had_are_refused_by_name(native_of, given, message):
    with pytest.raises(ValueError, match=message):
        native_of(**given)


@pytest.mark.parametrize(
    ("config", "given", "message"),
    [
        (GRPOConfig, {"generation_batch_size": 8, "steps_per_generation": 1}, "must not both be given"),
        (GRPOConfig, {"num_generations": 1}, "`num_generations` must be at least 2"),
        (GRPOConfig, {"max_completion_length": None}, "`max_completion_length` must be at least 1"),
        (RLOOConfig, {"num_generations_eval": 0}, "`num_generations_eval` must be at least 1"),
        (RLOOConfig, {"reward_clip_range": (-1, 2)}, r"`reward_clip_range` must be \(-c, c\)"),
    ],
)
def test_a_configuration_refuses_what_it_can_tell_alone(config, given, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        config(**options(tmp_path, **given))


def test_rollouts_of_a_script_are_refused(checkpoint):
    with pytest.raises(ValueError, match="`rollout_func` must be None"):
        GRPOTrainer(str(checkpoint), share_of_vowels, train_dataset=ROWS, rollout_func=print)


def test_tools_need_a_template_that_calls_them(checkpoint):
    def echo(text: str) -> str:
        """Says it again.

        Args:
            text: What to say.
        """
        return text

    for tokenizer, message in (
        (chat_tokenizer(), "leaves out calls of tools"),
        (None, "need a chat template"),
    ):
        with pytest.raises(ValueError, match=message):
            GRPOTrainer(
                str(checkpoint),
                share_of_vowels,
                train_dataset=ROWS,
                tools=[echo],
                processing_class=tokenizer,
            )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"question": "a"}], "`train_dataset`: row 0 must have a `prompt`"),
        ([{"prompt": "a"}, {"prompt": "b", "x": 1}], r"row 1 has the columns \['prompt', 'x'\]"),
        ([{"prompt": 3}], "must be a text or a list of messages, got int"),
        (iter([{"prompt": "a"}]), "must be a list of rows, got a stream"),
        ([{"prompt": [{"role": "assistant", "content": "x"}]}], "must not end with an assistant's message"),
    ],
)
def test_rows_that_are_no_prompts_are_refused(native_of, rows, message):
    with pytest.raises(ValueError, match=message):
        native_of(rows=rows)


def test_an_override_that_nothing_would_call_is_refused(checkpoint):
    class Own(GRPOTrainer):
        def _compute_loss(self, model, inputs):
            return 0.0

    with pytest.raises(TypeError, match="loss_type"):
        Own(str(checkpoint), share_of_vowels, train_dataset=ROWS)


# Reward functions by themselves.


def given(columns=None, figures=None):
    return Given(lambda: "state", lambda *named: columns.append(named), lambda *named: figures.append(named))


@pytest.mark.parametrize("nothing", [None, [], [None]])
def test_a_reward_function_is_needed(nothing):
    with pytest.raises(ValueError, match="must hold at least one reward function"):
        script_rewards(nothing, None, given(), template_kwargs={})


def test_tokenizers_are_one_each():
    with pytest.raises(ValueError, match="one entry for each of 2 reward functions, got 1"):
        script_rewards([share_of_vowels] * 2, [None], given(), template_kwargs={})
    with pytest.raises(
        ValueError, match=r"`reward_funcs\[0\]` must be a function, a model's name or a model, got int"
    ):
        script_rewards([3], None, given(), template_kwargs={})


def test_a_classifier_scores_prompt_and_completion(tmp_path):
    folder = save_reward_model(tmp_path / "judge", chat_template=TEMPLATE)
    (judge,) = script_rewards(folder, None, given(), template_kwargs={})
    assert judge.__name__ == "judge"
    wanted = load_reward_model(folder, label=0, output="logit")
    records = [{"prompt": "ab "}, {"prompt": [{"role": "user", "content": "q"}]}]
    found = judge(outputs=["cd", "e"], record=records)
    assert found == pytest.approx(wanted(["ab cd", "<user>q<assistant>e"]), rel=1e-5)
    (own,) = script_rewards(wanted, None, given(), template_kwargs={})
    assert own(outputs=["cd", "e"], record=records) == pytest.approx(found)


# The same script by TRL.


@pytest.mark.parity
def test_a_script_learns_by_trl_and_by_jrl(checkpoint, tmp_path):
    """The import is all that differs; the reward of both rises far above what the model began with."""
    theirs = pytest.importorskip("trl")
    rows = [{"prompt": f"tell {i % 7} "} for i in range(64)]

    def script(trainer, config, rows, folder, **more):
        args = config(
            **options(
                folder,
                per_device_train_batch_size=32,
                num_generations=8,
                max_completion_length=8,
                max_steps=25,
                learning_rate=3e-3,
                lr_scheduler_type="constant",
                report_to="none",
                bf16=False,
            ),
            **more,
        )
        made = trainer(model=str(checkpoint), reward_funcs=share_of_vowels, args=args, train_dataset=rows)
        made.train()
        return [line["reward"] for line in made.state.log_history if "reward" in line]

    import datasets

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers is about to rename what TRL sets
        by_trl = script(
            theirs.GRPOTrainer,
            theirs.GRPOConfig,
            datasets.Dataset.from_list(rows),
            tmp_path / "a",
            use_cpu=True,
        )
    by_jrl = script(GRPOTrainer, GRPOConfig, rows, tmp_path / "b")
    for found in (by_trl, by_jrl):
        assert len(found) == 25
        assert np.mean(found[-5:]) > np.mean(found[:5]) + 0.1

# SPDX-License-Identifier: Apache-2.0
"""Reward functions of TRL's shape, called by jrl: completions as text or as messages, and columns of the data."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jrl.data.chat import is_dialogue
from jrl.data.tokenizer import load_tokenizer, prompt_prefix
from jrl.models.model_object import is_model_object
from jrl.rollout.keywords import is_async
from jrl.trainers.loading import RewardModel, load_reward_model
from jrl.trl.group_tools import EpisodeTools, Turns, messages_of
from jrl.trl.models import ModelHandle

RECORD = "record"
"""Metadata of a prompt: its row of the data set, as it is."""
OWN_COLUMNS = ("prompt", "completion", "completion_ids")
"""Columns that reward functions get under other names."""


class Played(NamedTuple):
    """Episodes, one entry each.

    Attributes:
      turns: Of each.
      openings: Metadata of their prompts.
      failures: What an environment failed with.
    """

    turns: Turns
    openings: Sequence[Mapping[str, Any]]
    failures: Sequence[str | None]


class Given(NamedTuple):
    """Answers and doors that reward functions get beside the completions.

    Attributes:
      state: Gives transformers' `TrainerState`, as it is now.
      log_extra: `(column, values)`: a column of the logged completions.
      log_metric: `(name, value)`: a figure of the logged metrics.
      episodes: Gives the environment of tools; None where a rollout is one completion.
      with_objects: Whether functions get the objects whose methods are tools.
    """

    state: Callable[[], Any]
    log_extra: Callable[[str, Sequence[Any]], None]
    log_metric: Callable[[str, float], None]
    episodes: Callable[[], EpisodeTools] | None = None
    with_objects: bool = False

    def arguments(
        self,
        outputs: Sequence[str],
        output_tokens: Sequence[Sequence[int]],
        records: Sequence[Mapping[str, Any]],
        played: Played | None = None,
    ) -> dict[str, Any]:
        """Keywords of a reward function.

        Args:
          outputs: Texts of the completions.
          output_tokens: Their sampled ids, the EOS included.
          records: Rows of the data, one a completion.
          played: Of episodes.
        """
        columns = [name for name in records[0] if name not in OWN_COLUMNS]
        completions, own = completions_like(records, outputs), {}
        if played is not None:
            assert self.episodes is not None, "episodes have tools"
            worlds = self.episodes().worlds(output_tokens, *played)
            completions = [
                messages_of(world, turns, len(ids))
                for world, turns, ids in zip(worlds, played.turns, output_tokens, strict=True)
            ]
            own = {"environments": [world.object for world in worlds]} if self.with_objects else {}
        return {
            "prompts": [record["prompt"] for record in records],
            "completions": completions,
            "completion_ids": [list(row) for row in output_tokens],
            **{name: [record[name] for record in records] for name in columns},
            **own,
            "trainer_state": self.state(),
            "log_extra": self.log_extra,
            "log_metric": self.log_metric,
        }


def completions_like(records: Sequence[Mapping[str, Any]], outputs: Sequence[str]) -> list[Any]:
    """Completions in the form of their prompts: texts, or a list with the assistant's message.

    Args:
      records: Rows of the data, one a completion.
      outputs: Texts of the completions.
    """
    return [
        [{"role": "assistant", "content": text}] if is_dialogue(record["prompt"]) else text
        for record, text in zip(records, outputs, strict=True)
    ]


class ScriptReward:
    """A reward function of a script's own.

    Args:
      function: `f(prompts, completions, completion_ids, **columns, trainer_state, log_extra, log_metric)`.
      name: Of the metrics.
      given: What it gets beside the completions.
    """

    def __init__(self, function: Callable[..., Any], name: str, given: Given) -> None:
        self.function, self.__name__, self._given = function, name, given

    def __call__(
        self,
        outputs: list[str],
        output_tokens: list[list[int]],
        record: list[Any],
        turns: list[Any] | None = None,
        opening: list[Any] | None = None,
        failures: list[Any] | None = None,
    ) -> Any:
        """One reward a completion, or None where the function does not apply; the last three are of episodes."""
        played = _played(turns, opening, failures)
        return self.function(**self._given.arguments(outputs, output_tokens, record, played))


class AsyncScriptReward(ScriptReward):
    """A reward function that is awaited."""

    async def __call__(
        self,
        outputs: list[str],
        output_tokens: list[list[int]],
        record: list[Any],
        turns: list[Any] | None = None,
        opening: list[Any] | None = None,
        failures: list[Any] | None = None,
    ) -> Any:
        """One reward a completion, or None where the function does not apply; the last three are of episodes."""
        played = _played(turns, opening, failures)
        return await self.function(**self._given.arguments(outputs, output_tokens, record, played))


def _played(turns: Any, openings: Any, failures: Any) -> Played | None:
    """The episodes, where there are tools."""
    return None if turns is None else Played(turns, openings, failures)


class ClassifierReward:
    """A sequence classifier's score of prompt and completion.

    Args:
      model: The classifier as jrl's reward function.
      name: Of the metrics.
      template_kwargs: Variables of its tokenizer's chat template.
    """

    def __init__(self, model: RewardModel, name: str, template_kwargs: Mapping[str, Any]) -> None:
        self.model, self.__name__, self._template_kwargs = model, name, dict(template_kwargs)
        # A tokenizer that puts BOS before every text would put a second one before a template's.
        adds_bos = bool(prompt_prefix(model.tokenizer))
        self._begins_with = (model.tokenizer.bos_token or "") if adds_bos else ""

    def __call__(self, outputs: list[str], record: list[Any]) -> list[float]:
        """One score a completion."""
        texts = []
        for row, text in zip(record, outputs, strict=True):
            prompt = row["prompt"]
            if is_dialogue(prompt):
                messages = [*prompt, {"role": "assistant", "content": text}]
                whole = self.model.tokenizer.apply_chat_template(
                    messages, tokenize=False, **self._template_kwargs
                )
                texts.append(whole.removeprefix(self._begins_with))
            else:
                texts.append(prompt + text)
        return self.model(texts)


Reward = ScriptReward | ClassifierReward


def script_rewards(
    reward_funcs: Any,
    processing_classes: Any,
    given: Given,
    *,
    template_kwargs: Mapping[str, Any],
) -> list[Reward]:
    """The reward functions of a script as jrl calls them, under TRL's names.

    Args:
      reward_funcs: One or several of: a function, `async def` or not; a model's name or folder; a model.
      processing_classes: Tokenizers of the models among them, one or one each; None: those that lie with the models.
      given: What functions get beside the completions.
      template_kwargs: Variables of chat templates.
    Raises:
      ValueError: If there is none, or the tokenizers are not one each.
    """
    several = isinstance(reward_funcs, list | tuple)
    functions = list(reward_funcs) if several else [reward_funcs]
    if not functions or any(function is None for function in functions):
        raise ValueError(f"`reward_funcs` must hold at least one reward function, got {reward_funcs!r}.")
    one_each = isinstance(processing_classes, list | tuple)
    tokenizers = list(processing_classes) if one_each else [processing_classes] * len(functions)
    if len(tokenizers) != len(functions) or (processing_classes is not None and not one_each and several):
        raise ValueError(
            f"`reward_processing_classes` must hold one entry for each of {len(functions)} reward functions, got "
            f"{len(tokenizers) if one_each else 1}."
        )
    return [
        _one(function, tokenizer, place, given, template_kwargs)
        for place, (function, tokenizer) in enumerate(zip(functions, tokenizers, strict=True))
    ]


def _one(
    function: Any, tokenizer: Any, place: int, given: Given, template_kwargs: Mapping[str, Any]
) -> Reward:
    is_model = isinstance(function, RewardModel | ModelHandle | str | os.PathLike) or is_model_object(
        function
    )
    if given.episodes is not None and is_model:
        raise ValueError(
            f"`reward_funcs[{place}]` must be a function beside `tools` or `environment_factory`, got "
            f"{function!r:.80}: a classifier reads one answer."
        )
    if isinstance(function, RewardModel):
        return ClassifierReward(function, type(function).__name__, template_kwargs)
    if isinstance(function, ModelHandle):
        function = function.source
    if isinstance(function, str | os.PathLike) or is_model_object(function):
        found = None if tokenizer is None else load_tokenizer(tokenizer)
        model = load_reward_model(function, label=0, output="logit", tokenizer=found)
        return ClassifierReward(model, _model_name(function), template_kwargs)
    if not callable(function):
        raise ValueError(
            f"`reward_funcs[{place}]` must be a function, a model's name or a model, got {type(function).__name__}."
        )
    name = function.__name__ if hasattr(function, "__name__") else type(function).__name__
    return (AsyncScriptReward if is_async(function) else ScriptReward)(function, name, given)


def _model_name(source: Any) -> str:
    """The last part of a model's name, as TRL calls its metrics."""
    if isinstance(source, str | os.PathLike):
        return Path(source).name
    return Path(str(source.config._name_or_path or type(source).__name__)).name

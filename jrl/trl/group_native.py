# SPDX-License-Identifier: Apache-2.0
"""jrl's online trainer with a recipe of TRL's, and prompts of TRL's shape."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from jrl.data.chat import is_dialogue, render_prompt
from jrl.data.prompts import PromptSet
from jrl.data.tokenizer import encode_prompts
from jrl.environments.tool_use import OPENING
from jrl.learners.recipe import Recipe
from jrl.rollout.experience import Experience
from jrl.trainers.online import OnlineTrainer
from jrl.trl.group_method import GRPOMethod, RLOOMethod, grpo_recipe, rloo_recipe
from jrl.trl.group_rewards import RECORD

RECIPES: Mapping[type, Callable[[Any], Recipe]] = {GRPOMethod: grpo_recipe, RLOOMethod: rloo_recipe}
"""Section of the method → its recipe."""
Columns = Callable[[], tuple[dict[str, list[Any]], dict[str, float]]]
"""What reward functions logged since it was last asked: columns of the completions, and figures behind `LOGGED`."""
LOGGED = "log_metric/"
"""Before the names of figures that reward functions log, so that none takes the place of one of jrl's."""


class GroupNative(OnlineTrainer):
    """Runs TRL's GRPO or RLOO.

    Attributes:
      logged: Of the reward functions.
    """

    tokens_metric: ClassVar[str] = "completion/tokens"
    logged: Columns
    episodes: ClassVar[Any] = None
    """Environment of tools; None: a rollout is one completion."""

    def prepare(self) -> None:
        """Makes what plays episodes, where there are tools."""
        self.environment = self.episodes
        super().prepare()

    def make_recipe(self) -> Recipe:
        """TRL's, as the section says."""
        return RECIPES[type(self.config.method)](self.config.method)

    def add_prompt_set(
        self, prompts: PromptSet, reward_fn: Callable[..., Any] | Sequence[Callable[..., Any]]
    ) -> None:
        """Takes prompts and reward functions; what these log goes into the run's record."""
        super().add_prompt_set(prompts, reward_fn)
        collect, told = self.collect, set[tuple[str, str]]()

        def collected(*given: Any, **options: Any) -> Experience:
            found = collect(*given, **options)
            columns, figures = self.logged()
            rows, problems = with_columns(found.rows, columns)
            for problem, text in problems.items():
                if problem not in told:  # once a run, and not every iteration
                    told.add(problem)
                    warnings.warn(text, stacklevel=2)
            return replace(found, metrics=found.metrics | figures, rows=rows)

        self.collect = collected


def with_columns(
    rows: Sequence[Mapping[str, Any]], columns: Mapping[str, Sequence[Any]]
) -> tuple[list[dict[str, Any]], dict[tuple[str, str], str]]:
    """Rows of the samples' log with the columns that reward functions logged, and what cannot be taken as it is.

    A column named as one of jrl's own stands behind `log_extra/`; one that is not of as many values as there are rows
    is left out: of several processes each judges rows of its own, and logs what it says of them alone.

    Args:
      rows: Of all completions.
      columns: Name → values.
    Returns:
      The rows, and what is to be said: (column, problem) → a text for people.
    """
    own = rows[0].keys() if rows else ()
    taken: dict[str, Sequence[Any]] = {}
    problems: dict[tuple[str, str], str] = {}
    for name, values in columns.items():
        if len(values) != len(rows):
            problems[name, "length"] = (
                f"`log_extra`: the column {name!r} has {len(values)} values for {len(rows)} completions, and is left "
                "out of `rollouts.jsonl`: it must have one of each, which several processes cannot log."
            )
        elif name in own:
            taken[f"log_extra/{name}"] = values
            problems[name, "name"] = (
                f"`log_extra`: the column {name!r} has the name of one of jrl's own, and is `log_extra/{name}` in "
                "`rollouts.jsonl`."
            )
        else:
            taken[name] = values
    widened = [
        {**row, **{name: values[number] for name, values in taken.items()}} for number, row in enumerate(rows)
    ]
    return widened, problems


def checked_rows(records: Sequence[Any]) -> list[dict[str, Any]]:
    """Rows of a data set, all with the same columns.

    Args:
      records: With a `prompt`, a text or messages, and further columns.
    Raises:
      ValueError: If a row has no prompt, or is of another kind than the first.
    """
    rows: list[dict[str, Any]] = []
    for number, record in enumerate(records):
        if not isinstance(record, Mapping) or "prompt" not in record:
            raise ValueError(f"`samples`: row {number} must have a `prompt`, got {record!r:.80}.")
        rows.append({str(name): value for name, value in record.items()})
    for number, row in enumerate(rows):
        if row.keys() != rows[0].keys():
            raise ValueError(
                f"`samples`: row {number} has the columns {sorted(row)}, row 0 has {sorted(rows[0])}; all must have "
                "the same."
            )
        if not isinstance(row["prompt"], str) and not is_dialogue(row["prompt"]):
            raise ValueError(
                f"`samples`: the prompt of row {number} must be a text or a list of messages, got "
                f"{type(row['prompt']).__name__}."
            )
    return rows


def encode_rows(
    records: Sequence[Any], tokenizer: Any, template_kwargs: Mapping[str, Any]
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """Ids of the prompts of a data set, and its rows.

    Args:
      records: As `checked_rows` takes them.
      tokenizer: Puts its special tokens before a text; its template renders messages.
      template_kwargs: Variables of the template.
    Raises:
      ValueError: If a row has no prompt, or is of another kind than the first.
    """
    rows = checked_rows(records)
    texts = [number for number, row in enumerate(rows) if isinstance(row["prompt"], str)]
    encoded = dict(
        zip(texts, encode_prompts(tokenizer, [rows[number]["prompt"] for number in texts]), strict=True)
    )
    ids = [
        encoded[number]
        if number in encoded
        else render_prompt(tokenizer, row["prompt"], row=number, template_kwargs=template_kwargs)
        for number, row in enumerate(rows)
    ]
    return ids, rows


def prompt_set(
    ids: Sequence[Sequence[int]],
    rows: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    seed: int,
    openings: Sequence[Mapping[str, Any]] | None = None,
) -> PromptSet:
    """Prompts with their rows as metadata; none is cut.

    Args:
      ids: Of the prompts.
      rows: Of the data set.
      tokenizer: Pads.
      seed: Of the order.
      openings: Metadata that episodes with tools need.
    """
    longest = max(map(len, ids), default=1)
    metadata = {RECORD: rows} if openings is None else {RECORD: rows, OPENING: openings}
    return PromptSet.from_tokens(ids, metadata, tokenizer, max_length=longest, seed=seed)

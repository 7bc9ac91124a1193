# SPDX-License-Identifier: Apache-2.0
"""`Method`: all that jrl knows of an algorithm beside its maths, in one place.

Configurations by name, defaults, model cards, citations, `jrl plan`, the command line and the console read entries;
none of them names an algorithm. The entries of jrl's own algorithms are in `jrl.methods`.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from jrl import built_in
from jrl.learners.config import MethodConfig, OnlineConfig
from jrl.learners.recipe import Recipe
from jrl.trainers.config.registry import METHODS

if TYPE_CHECKING:
    from jrl.trainers.config.trl_config import TRLConfig


class Footprint(NamedTuple):
    """Memory and work of a run beside the model that learns, for `jrl plan`.

    Attributes:
      value_head: Whether the model has one.
      num_q_heads: Of the model.
      sampling_rows: Rows of a sampling call; 0: the algorithm does not sample.
      evaluation_rows: Where it does not, rows of a sampling call of its evaluations; 0: they do not sample, either.
      slots: Rows that are written together where each ends by itself; 0: a call's rows end together.
      plays: Whether an environment answers, whose words slots read; told by limits of turns.
      slots_beside: Further collections, ahead of their updates, whose slots lie beside those of one.
      rows_per_sample: Rows that a sample has in an optimizer step: 2 for a pair.
      passes_per_sample: Passes of each sample in an optimizer step: more than one where it has denoising steps.
      reads_logits: Whether an optimizer step reads logits, whose head is a language model's.
      window: Tokens of a row whose logits an optimizer step reads; 0: all.
      update_rows: Rows that an update passes through the frozen layers before its first step; 0: each step its own.
      reference: What the algorithm keeps to be held against: "branch" copies of the layers that train, "whole" a copy
        of all that trains, another configuration's model; None: nothing.
      scores: When policy or reference score rows outside of the update: "rollouts" each sampling call, "steps" each
        optimizer step.
      update_reads_reference: Whether the update itself passes through the reference.
    """

    value_head: bool = False
    num_q_heads: int = 0
    sampling_rows: int = 0
    evaluation_rows: int = 0
    slots: int = 0
    plays: bool = False
    slots_beside: int = 0
    rows_per_sample: int = 1
    passes_per_sample: int = 1
    reads_logits: bool = True
    window: int = 0
    update_rows: int = 0
    reference: Literal["branch", "whole"] | TRLConfig | None = None
    scores: Literal["rollouts", "steps"] | None = None
    update_reads_reference: bool = False


def _nothing(method: Any) -> Sequence[str]:
    del method
    return ()


@dataclass(frozen=True, kw_only=True)
class Method:
    """An algorithm's entry.

    Attributes:
      name: Of the command `jrl <name>`: lower-case letters, digits and underscores.
      config: Class of its section of a configuration, which a YAML file finds by the class's name.
      default: Makes its default configuration.
      title: What it is called, for people.
      summary: One line for `jrl --help`.
      recipe: Makes the `Recipe` of an online algorithm from its section; None: its trainer brings its own update.
      tags: Of its models on the hub.
      papers: What to cite for a section as it is configured: keys of `papers.bib`, or BibTeX entries.
      data: What it learns from: "prompts" with a reward function, "rewarded" samples, "samples", "pairs", "images" by
        a flat configuration, or images "drawn" of prompts with a reward function.
      model: What it trains.
      footprint: Of a configuration, for `jrl plan`; None: derived from the recipe, or not planned where there is none.
      headlines: Metrics for a glance, and their short names.
      variants: Published algorithms that are values of the same section: the name of each one's command, and the fields
        in which it differs from `default`.
      sizes: Fields that a recipe keeps where a variant does not set them: they say how much, and not which algorithm.
      unasked: Fields of its section in a run that has no configuration, where they differ from `default`: that is made
        for the model and the rate of a library from which users come.
      fastest_rate: Highest learning rate that is chosen for a small model; None: that of all methods.
      own_tokens: Whether texts are always tokenised with special tokens, as TRL's methods do.
      scales_loss: Whether it may compute in float16.
    """

    name: str
    config: type[MethodConfig]
    default: Callable[[], TRLConfig]
    title: str
    summary: str
    recipe: Callable[[Any], Recipe] | None = None
    tags: tuple[str, ...] = ()
    papers: Callable[[Any], Sequence[str]] = _nothing
    data: Literal["prompts", "rewarded", "samples", "pairs", "images", "drawn"] = "prompts"
    model: Literal["language", "classifier", "diffusion"] = "language"
    footprint: Callable[[TRLConfig], Footprint] | None = None
    headlines: Mapping[str, str] = field(default_factory=dict)
    variants: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    sizes: tuple[str, ...] = ()
    unasked: Mapping[str, Any] = field(default_factory=dict)
    fastest_rate: float | None = None
    own_tokens: bool = False
    scales_loss: bool = False

    def switches(self, variant: str) -> dict[str, Any]:
        """All fields that tell the variants apart, as one of them has them, whatever a recipe says.

        What it does not set itself, but another does, has its default: else a recipe of that other would show through.

        Args:
          variant: A name of `variants`.
        """
        defaults = vars(self.default().method)
        told = {name: None for fields in self.variants.values() for name in fields if name not in self.sizes}
        return {name: defaults[name] for name in told} | dict(self.variants[variant])


_ENTRIES: dict[type[MethodConfig], Method] = {}


COMMANDS = ("bench", "config", "doctor", "env", "generate", "plan", "report", "sweep", "view")
"""Commands of `jrl` that are no algorithm's."""


def register(method: Method) -> Method:
    """Makes an algorithm known to configurations, `jrl plan`, model cards and the command line of this process.

    Args:
      method: The entry; one whose class is defined anew, as in a notebook's cell, replaces the old one.
    Raises:
      ValueError: If a name is another algorithm's or no name for a command, or the section's `name` is not its class's.
      TypeError: If a part is of another kind: a function that is none, or a section that is no dataclass of its own.
    """
    _check_parts(method)
    held = entries().get(method.name)
    _check_commands(method)
    METHODS.add(method.config.__name__, method.config)
    default = method.config.__dataclass_fields__["name"].default
    if not isinstance(default, str) or METHODS.find(default) is not method.config:
        raise ValueError(
            f"The first field of {method.config.__name__} must be `name: str = {method.config.__name__!r}`, by which a "
            f"YAML file finds the class; got {default!r}."
        )
    if held is not None:
        del _ENTRIES[held.config]
    _ENTRIES[method.config] = method
    return method


def _check_commands(method: Method) -> None:
    """Refuses names that are no commands, or those of another algorithm."""
    others = [
        entry for entry in entries().values() if entry.config.__qualname__ != method.config.__qualname__
    ]
    taken = {name: entry.config.__name__ for entry in others for name in (entry.name, *entry.variants)}
    for name in (method.name, *method.variants):
        if name in taken:
            raise ValueError(f"`name` of the method must be its own: {name!r} is that of {taken[name]}.")
    if method.name in method.variants:
        raise ValueError(f"`variants` of the method {method.name!r} must have names of their own.")


def _check_parts(method: Method) -> None:
    """Refuses an entry that would fail in the middle of a run."""
    what = f"of the method {method.name!r}"
    for name in (method.name, *method.variants):
        if not re.fullmatch(r"[a-z][a-z0-9_]*", name) or name in COMMANDS:
            raise ValueError(
                f"`name` {what} must be lower-case letters, digits and underscores, and none of the commands "
                f"{COMMANDS}; got {name!r}."
            )
    base = MethodConfig if method.recipe is None else OnlineConfig
    if not (isinstance(method.config, type) and issubclass(method.config, base)):
        more = "" if method.recipe is None else ", for it has a recipe"
        raise TypeError(
            f"`config` {what} must be a subclass of jrl.{base.__name__}{more}; got {method.config!r}."
        )
    if "__dataclass_fields__" not in vars(method.config):
        raise TypeError(f"`config` {what} must be decorated with `@dataclass(kw_only=True)`.")
    parts = {
        "default": method.default,
        "papers": method.papers,
        "recipe": method.recipe,
        "footprint": method.footprint,
    }
    for name, part in parts.items():
        if not callable(part) and (part is not None or name in ("default", "papers")):
            raise TypeError(f"`{name}` {what} must be a function, got {part!r}.")


def _by_section() -> Mapping[type[MethodConfig], Method]:
    """All entries, jrl's own among them, by the class of their section."""
    importlib.import_module(built_in.METHODS_MODULE)
    return _ENTRIES


def entries() -> Mapping[str, Method]:
    """All algorithms that are known, by name, in the order in which they became known."""
    return {entry.name: entry for entry in _by_section().values()}


def commands() -> Mapping[str, Method]:
    """All algorithms that have a command, by its name: entries, and their variants."""
    return {name: entry for entry in entries().values() for name in (entry.name, *entry.variants)}


def entry_of(config: MethodConfig) -> Method | None:
    """The entry of a section of a configuration, or of the class that it derives from; None: it has none."""
    known = _by_section()
    return next((known[cls] for cls in type(config).__mro__ if cls in known), None)


def footprint_of(config: TRLConfig) -> Footprint | None:
    """Footprint of a configuration's run; None: its algorithm is not planned."""
    entry, method = entry_of(config.method), config.method
    if entry is None or type(method) is not entry.config:
        return None
    if entry.footprint is not None:
        return entry.footprint(config)
    if entry.recipe is None or not isinstance(method, OnlineConfig):
        return None
    recipe = entry.recipe(method)
    num_steps = recipe.num_steps(method.num_rollouts, config.train.batch_size)
    settings = method.gen_experience_kwargs or method.gen_kwargs
    new_tokens = settings.get("max_new_tokens", 0)
    plays = any(settings.get(name) is not None for name in ("max_turns", "max_turn_tokens"))
    return Footprint(
        value_head=recipe.critic,
        sampling_rows=method.chunk_size,
        slots=method.rollout_slots or (method.chunk_size if plays else 0),
        plays=plays,
        # Where each begins at the prompt behind the one before, they come one after another.
        slots_beside=0 if recipe.sampling.refills else config.train.rollouts_ahead,
        # Of a list evaluations try each, and rollouts take the first.
        window=new_tokens[0] if isinstance(new_tokens, list | tuple) else new_tokens,
        update_rows=method.num_rollouts,
        reference=None if recipe.kl is None else "branch",
        scores="rollouts"
        if recipe.needs_scoring(num_steps, is_stale=config.train.rollouts_ahead > 0)
        else None,
        update_reads_reference=recipe.reads_reference,
    )

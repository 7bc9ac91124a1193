# SPDX-License-Identifier: Apache-2.0
"""Base classes of the algorithms' configurations."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any, SupportsFloat


def _sampling() -> dict[str, Any]:
    return {"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True}


@dataclass(kw_only=True)
class MethodConfig:
    """The `method` section of a configuration; each algorithm subclasses it beside its update.

    Field names are those of the seed library; the learner that reads them binds each to the standard term.

    Attributes:
      name: Class name of the configuration, by which a file chooses the algorithm. Case does not matter.
      gen_kwargs: How to sample; must hold `max_new_tokens`. See `jrl.rollout.sampler.GenerationSettings`.
    """

    name: str
    gen_kwargs: dict[str, Any] = field(default_factory=_sampling)

    def __post_init__(self) -> None:
        """Validates a new configuration."""
        self.validate()

    def validate(self) -> None:
        """Checks the fields: on construction, and again when a trainer copies a configuration edited since.

        Raises:
          ValueError: Naming the field, what it must be, and what it is.
        """
        check_numbers(self, "method")
        check_fields(
            self,
            (
                "gen_kwargs",
                "max_new_tokens" in self.gen_kwargs,
                "a mapping that holds `max_new_tokens` (the width of the completion window)",
            ),
        )


@dataclass(kw_only=True)
class LanguageConfig(MethodConfig):
    """Options of all algorithms that train a language model.

    Attributes:
      router_aux_loss_coef: Weight of the loss that balances the experts of a mixture, added to the loss of every
        optimizer step (Fedus et al. 2021, arXiv:2101.03961); 0: there is none. For models with a mixture of experts
        alone. What a checkpoint's config says under this name is its pre-training's, and is not read.
    """

    router_aux_loss_coef: float = 0.0

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(self, ("router_aux_loss_coef", self.router_aux_loss_coef >= 0, "at least 0"))


@dataclass(kw_only=True)
class OnlineConfig(LanguageConfig):
    """Options that every online policy gradient shares: how rollouts are collected.

    Attributes:
      num_rollouts: Rollouts collected for one iteration, over all devices.
      chunk_size: Rollouts of one generation call, over all devices; also the batch of an evaluation.
      rollout_slots: Rollouts that are written together, over all devices: as soon as one is over, the next takes its
        slot, and no call runs until its longest row; `chunk_size` are then the rows of a scoring or reward call. None:
        calls of `chunk_size`; with an environment as many slots.
      num_generations: Samples of each prompt, among `num_rollouts`; algorithms that compare them need at least 2.
      missing_eos_penalty: Part of the score of a completion that `max_new_tokens` cut, with a minus sign, before
        clipping; None: nothing.
      gen_experience_kwargs: Used instead of `gen_kwargs` for rollouts; evaluation keeps `gen_kwargs`.
      routing_replay: Whether scoring and update send each token to the experts that it visited while it was sampled
        (Ma et al. 2025, arXiv:2510.11370). For models with a mixture of experts alone.
    """

    num_rollouts: int = 128
    chunk_size: int = 128
    rollout_slots: int | None = None
    num_generations: int = 1
    missing_eos_penalty: float | None = None
    gen_experience_kwargs: dict[str, Any] | None = None
    routing_replay: bool = False

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        experience, penalty = self.gen_experience_kwargs, self.missing_eos_penalty
        check_fields(
            self,
            ("num_rollouts", self.num_rollouts >= 1, "at least 1"),
            ("chunk_size", self.chunk_size >= 1, "at least 1"),
            ("rollout_slots", self.rollout_slots is None or self.rollout_slots >= 1, "at least 1, or None"),
            (
                "num_generations",
                self.num_generations >= 1 and self.num_rollouts % self.num_generations == 0,
                f"at least 1 and a divisor of `method.num_rollouts` = {self.num_rollouts}: all samples of a prompt "
                f"belong to one iteration{_fitting(self.num_rollouts, self.num_generations)}",
            ),
            (
                "chunk_size",
                self.chunk_size % max(self.num_generations, 1) == 0,
                f"a multiple of `method.num_generations` = {self.num_generations}: all samples of a prompt are drawn "
                "in one call",
            ),
            ("missing_eos_penalty", penalty is None or penalty >= 0, "at least 0, or None"),
            (
                "routing_replay",
                not self.routing_replay or self.rollout_slots is None,
                "False beside `method.rollout_slots`, whose slots keep no record of experts",
            ),
            (
                "gen_experience_kwargs",
                experience is None or "max_new_tokens" in experience,
                "a mapping that holds `max_new_tokens` (it replaces `gen_kwargs` for rollouts), or None",
            ),
        )


def check_numbers(config: Any, section: str) -> None:
    """Raises for the first field that is declared a number and holds none, before anything compares it.

    Args:
      config: Dataclass whose fields they are.
      section: Its name in a configuration file.
    Raises:
      ValueError: Naming the field and the type it has.
    """
    for declared in fields(config):
        kinds = set(inspect.formatannotation(declared.type).strip("'").replace(" ", "").split("|"))
        if declared.name not in vars(config):
            continue  # a subclass sets it after the check
        value = vars(config)[declared.name]
        if not kinds & {"int", "float"} or not kinds <= {"int", "float", "bool", "None"}:
            continue
        if isinstance(value, SupportsFloat) or (value is None and "None" in kinds):
            continue
        expected = "a number, or None" if "None" in kinds else "a number"
        raise ValueError(
            f"`{section}.{declared.name}` must be {expected}, got {type(value).__name__} {value!r}."
        )


def check_fields(config: MethodConfig, *checks: tuple[str, bool, str]) -> None:
    """Raises for the first field that does not hold.

    Args:
      config: Whose fields they are.
      *checks: (field name, whether it holds, what the field must be).
    Raises:
      ValueError: For the first entry whose condition is False.
    """
    for name, holds, expected in checks:
        if not holds:
            raise ValueError(f"`method.{name}` must be {expected}, got {vars(config)[name]!r}.")


def refuse_methods(config: MethodConfig, names: Sequence[str], instead: str) -> None:
    """Refuses a configuration with a method that no update would call.

    Args:
      config: Of a class that may have one.
      names: Of such methods.
      instead: The class of which they are called.
    Raises:
      TypeError: Naming the method.
    """
    for name in names:
        if hasattr(type(config), name):
            raise TypeError(
                f"{type(config).__name__} must not define `{name}`: nothing would call it. Derive the class from "
                f"`{instead}`, whose `{name}` is compiled into the update."
            )


def _fitting(whole: int, wanted: int) -> str:
    """The divisors next to a number that is none, for its error."""
    below = next((size for size in range(min(wanted, whole), 0, -1) if whole % size == 0), None)
    above = next((size for size in range(max(wanted, 1), whole + 1) if whole % size == 0), None)
    near = sorted({size for size in (below, above) if size})
    return f" ({' or '.join(map(str, near))} would fit)" if near else ""


def positive_or_none(value: float | None) -> bool:
    """True for None and for positive numbers."""
    return value is None or value > 0

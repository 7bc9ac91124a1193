# SPDX-License-Identifier: Apache-2.0
"""What every method's configuration shares."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


def _sampling() -> dict[str, Any]:
    return {"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True}


@dataclass(kw_only=True)
class MethodConfig:
    """The `method` section of a configuration; each algorithm subclasses it beside its update.

    Field names are those of the seed library; the learner that reads them binds each to the standard term.

    Attributes:
      name: Class name of the configuration, by which a file chooses the algorithm. Case does not matter.
      gen_kwargs: How to sample; must hold `max_new_tokens`. See `jrl.trainers.generation.GenerationSettings`.
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
        check_fields(
            self,
            (
                "gen_kwargs",
                "max_new_tokens" in self.gen_kwargs,
                "a mapping that holds `max_new_tokens` (the width of the completion window)",
            ),
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

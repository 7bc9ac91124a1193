# SPDX-License-Identifier: Apache-2.0
"""What every method's configuration shares."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(kw_only=True)
class MethodConfig:
    """The `method` section of a configuration; each algorithm subclasses it beside its update.

    Field names are those of the seed library; the learner that reads them binds each to the standard term.

    Attributes:
      name: Class name of the configuration, by which a file chooses the algorithm. Case does not matter.
    """

    name: str

    def __post_init__(self) -> None:
        """Validates a new configuration."""
        self.validate()

    def validate(self) -> None:
        """Checks the fields: on construction, and again when a trainer copies a configuration edited since.

        Raises:
          ValueError: Naming the field, what it must be, and what it is.
        """


def check_fields(*checks: tuple[bool, str, str, object]) -> None:
    """Raises for the first field that does not hold.

    Args:
      *checks: (whether it holds, field name, what the field must be, its value).
    Raises:
      ValueError: For the first entry whose condition is False.
    """
    for holds, name, expected, got in checks:
        if not holds:
            raise ValueError(f"`method.{name}` must be {expected}, got {got!r}.")

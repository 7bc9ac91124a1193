# SPDX-License-Identifier: Apache-2.0
"""The shape of a mutation: one small patch that breaks one rule, and the test that must notice."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutation:
    """A deliberate breach of a lore rule.

    Attributes:
      rule: Number of the rule, such as "1.2".
      file: Source file that is patched, from the repository's root.
      old: Text to replace; it must occur exactly once in the file.
      new: The broken text.
      test: Id of the test that must fail with the patch, such as "tests/ops/test_kl.py::test_lore_3_1".
    """

    rule: str
    file: str
    old: str
    new: str
    test: str

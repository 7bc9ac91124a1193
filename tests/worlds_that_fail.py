# SPDX-License-Identifier: Apache-2.0
"""Environments for tests of worker processes: each does, on the prompt "bad" and in its turn 1, what it must not."""

from __future__ import annotations

import os
import time
from typing import ClassVar


class World:
    """Counts turns in its own state."""

    def reset(self, prompt: str, seed: int) -> str:
        self.bad, self.count = prompt == "bad", seed
        return ""

    def step(self, text: str, turn: int) -> tuple[str, float, bool]:
        if self.bad and turn == 1:
            self.fail()
        self.count += len(text)
        return f"{self.count}", 1.0, turn == 3

    def fail(self) -> None:
        """Fails; a class below says how."""


class Hangs(World):
    def fail(self) -> None:
        time.sleep(600)


class Dies(World):
    def fail(self) -> None:
        os._exit(3)


class Exits(World):
    def fail(self) -> None:
        raise SystemExit(0)


class Hoards(World):
    def fail(self) -> None:
        self.hoard = bytearray(2**34)


class Raises(World):
    def fail(self) -> None:
        raise KeyError("lamp")


class Slow:
    def step(self, text: str) -> tuple[str, float, bool]:
        time.sleep(0.5)
        return "", float(os.getpid()), True


class Greedy:
    def step(self, **everything: object) -> tuple[str, float, bool]:
        return "", 0.0, True


class Counts:
    """Counts its calls on the disk of nobody: in the class, which all worlds of a process share, and in itself."""

    calls: ClassVar[int] = 0

    def reset(self, seed: int, difficulty: int = 1) -> str:
        self.seed, self.own = seed, 0
        return ""

    def step(self, text: str, texts: tuple[str, ...] = ()) -> tuple[str, float, bool]:
        self.own += 1
        type(self).calls += 1
        return f"{self.own} {self.seed}", float(type(self).calls), False

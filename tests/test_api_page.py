# SPDX-License-Identifier: Apache-2.0
"""docs/api.md is what `__all__` and the docstrings say: `python -m tests.test_api_page` writes it anew."""

import ast
import importlib
import inspect
import itertools
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "api.md"
ROOMS = {
    "jrl": "Training, configuration, models and data: what most scripts need.",
    "jrl.rewards": "Rewards that compare an answer with a known solution, and isolation of reward code.",
    "jrl.environments": "Environments of other packages, and tools.",
    "jrl.data": "Prompts, samples, tokenizers and padding.",
    "jrl.rollout": "Calls of reward functions, and statistics of prompts and groups.",
    "jrl.learners": "Recipes of online algorithms and their compiled update.",
    "jrl.losses": "Losses: pure functions of arrays.",
    "jrl.ops": "The mathematics below the losses: pure functions of arrays.",
    "jrl.sweep": "Searches over configurations.",
}
"""Public rooms and what stands in them."""
INTRODUCTION = """# API

Every public name, by module: the names in each `__all__`, with the first line of the docstring. The page is generated.
`help` shows the rest: arguments with shapes and ranges, errors, the source, and an example that runs.

```python
import jrl

help(jrl.ops.gae)
```

Configuration classes are described field by field in [configuration](configuration.md).
The names of TRL and trlX live in `jrl.trl` and `jrl.trlx`: see [coming from TRL](migrating/from_trl.md) and
[coming from trlX](migrating/from_trlx.md).
"""


def signature(value: Any) -> str:
    """Names of the arguments, without annotations and defaults; "" of what is not called."""
    if not inspect.isfunction(value):
        return ""
    names, is_named = [], False
    for argument in inspect.signature(value).parameters.values():
        if argument.kind is argument.KEYWORD_ONLY and not is_named:
            names.append("*")
            is_named = True
        names.append(
            {argument.VAR_POSITIONAL: "*", argument.VAR_KEYWORD: "**"}.get(argument.kind, "") + argument.name
        )
        is_named = is_named or argument.kind is argument.VAR_POSITIONAL
    return f"({', '.join(names)})"


def constants(room: str) -> dict[str, str]:
    """Strings behind the constants and types of a package's modules, by name."""
    package = importlib.import_module(room)
    paths = sorted(Path(package.__file__).parent.glob("*.py"))
    found = {}
    for path in paths:
        body = ast.parse(path.read_text(encoding="utf-8")).body
        for node, after in itertools.pairwise(body):
            targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
            if isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant):
                found |= {x.id: after.value.value for x in targets if isinstance(x, ast.Name)}
    return found


def first_line(room: str, name: str) -> str:
    """First line of a name's docstring."""
    value = getattr(importlib.import_module(room), name)
    is_documented = inspect.ismodule(value) or inspect.isclass(value) or inspect.isroutine(value)
    text = inspect.getdoc(value) if is_documented else constants(room).get(name)
    assert text, f"{room}.{name} has no docstring"
    paragraph = inspect.cleandoc(text).partition("\n\n")[0]
    return " ".join(paragraph.split()).replace("|", "\\|")


def page() -> str:
    """What docs/api.md has to say."""
    parts = [INTRODUCTION]
    for room, text in ROOMS.items():
        module = importlib.import_module(room)
        parts.append(f"## `{room}`\n\n{text}\n\n| name | what it is |\n|---|---|")
        for name in sorted(module.__all__, key=str.lower):
            value = getattr(module, name)
            parts.append(f"| `{name}{signature(value)}` | {first_line(room, name)} |")
        parts.append("")
    return "\n".join(parts)


def test_the_page_is_as_the_docstrings_are():
    assert PAGE.read_text(encoding="utf-8") == page(), "write it anew: python -m tests.test_api_page"


def test_every_public_room_is_on_it():
    """Rooms of the package whose `__init__` exports names; the faces have pages of their own."""
    faces = {"jrl.trl", "jrl.trlx", "jrl.interop", "jrl.typing", "jrl.cli", "jrl.methods"}
    exporting = {
        f"jrl.{path.parent.name}"
        for path in (ROOT / "jrl").glob("*/__init__.py")
        if "__all__" in path.read_text(encoding="utf-8")
    }
    assert exporting - faces <= set(ROOMS)


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (lambda first, *, second=1: first, "(first, *, second)"),
        (lambda *rows, key, **others: rows, "(*rows, key, **others)"),
        (3, ""),
    ],
)
def test_a_signature_names_the_arguments(function, expected):
    assert signature(function) == expected


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")

# SPDX-License-Identifier: Apache-2.0
"""Who may import whom: the layer table of the design, read off the source of every module."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "jrl"
JAX = {"jax", "jaxtyping", "numpy"}
# Module prefix -> (modules of jrl it may import, distributions it may import). The longest prefix rules.
TABLE: dict[str, tuple[set[str], set[str]]] = {
    "jrl.typing": ({"jrl.typing"}, JAX),
    "jrl.mesh": (set(), JAX),
    "jrl.rewards": (set(), set()),
    "jrl.image_rewards": (set(), {"numpy", "PIL"}),
    "jrl.ops": ({"jrl.typing", "jrl.ops"}, JAX),
    "jrl.ops.chunks": ({"jrl.mesh", "jrl.ops"}, JAX),
    "jrl.losses": ({"jrl.typing", "jrl.ops", "jrl.losses"}, JAX),
    "jrl.models": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.losses", "jrl.models"},
        JAX | {"flax", "ml_dtypes"},
    ),
    "jrl.models.hub": ({"jrl.models"}, {"huggingface_hub", "transformers"}),
    "jrl.models.diffusion.tokenizer": ({"jrl.models"}, {"numpy", "jaxtyping", "transformers"}),
    "jrl.models.adapters": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.models"},
        JAX | {"flax", "ml_dtypes", "safetensors"},
    ),
    "jrl.models.quantize": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.models"},
        JAX | {"flax", "ml_dtypes", "qwix"},
    ),
    "jrl.models.families": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.models"},
        JAX | {"flax", "ml_dtypes", "transformers"},
    ),
    "jrl.data": (
        {"jrl.typing", "jrl.ops.alignment", "jrl.data"},
        {"numpy", "jaxtyping", "tokenizers", "transformers", "datasets"},
    ),
    "jrl.data.mapping": (set(), {"numpy", "rich", "transformers"}),
    "jrl.data.chat_rendering": (
        {"jrl.typing", "jrl.data"},
        {"transformers", "jinja2"},
    ),
    "jrl.rollout": ({"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.losses", "jrl.rollout"}, JAX),
    "jrl.learners": (
        {"jrl.typing", "jrl.mesh", "jrl.ops", "jrl.losses", "jrl.learners"},
        {"jax", "jaxtyping", "optax", "flax"},
    ),
}
# Above the learners everything below is open, and the loops may use any declared dependency.
OPEN = (
    "jrl.trainers",
    "jrl.distributed",
    "jrl.api",
    "jrl.bench",
    "jrl.cli",
    "jrl.notebook",
    "jrl.sweep",
    "jrl.trlx",
    "jrl.trl",
    "jrl.__main__",
    "jrl",
)
TOP = ("jrl.api", "jrl.bench", "jrl.cli", "jrl.notebook", "jrl.sweep", "jrl.trlx", "jrl.trl", "jrl.__main__")
# Algorithms of one folder know nothing of each other; what they share is named here.
SHARED = {
    "jrl.learners": {"state", "config", "guards", "optimizers", "accumulate", "forward"},
    "jrl.losses": set(),
}


def modules() -> dict[str, Path]:
    """Every module of the package by its dotted name."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imports(path: Path, module: str) -> set[str]:
    """Dotted names a file imports, at whatever depth; `from a import b` is a.b where that is a module."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}: relative imports hide the layer they reach into"
            assert node.module is not None
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                names.add(full if full in MODULES else node.module)
    return names


def within(name: str, prefixes: set[str]) -> bool:
    return any(name == prefix or name.startswith(f"{prefix}.") for prefix in prefixes)


def rule_of(module: str) -> tuple[set[str], set[str]] | None:
    matching = [prefix for prefix in TABLE if within(module, {prefix})]
    return TABLE[max(matching, key=len)] if matching else None


def breaches(module: str, names: set[str]) -> list[str]:
    """What a module may not import, each with the reason."""
    found = []
    rule = rule_of(module)
    if rule is None and module not in OPEN and not within(module, set(OPEN[:-1])):
        found.append(f"{module} stands in no layer of the table")
    for name in sorted(names):
        if within(name, {"jrl"}):
            if rule is not None and not within(name, rule[0]):
                found.append(f"{module} may not import {name}")
            if rule is None and not within(module, set(TOP)) and module != "jrl" and within(name, set(TOP)):
                found.append(f"{module} may not import {name}, which stands above it")
        elif rule is not None:
            top = name.split(".")[0]
            if top not in sys.stdlib_module_names and top not in rule[1]:
                found.append(f"{module} may not import {top}")
    for folder, shared in SHARED.items():
        if within(module, {folder}) and module != folder:
            word = module.removeprefix(f"{folder}.").split(".")[0]
            for name in names:
                other = name.removeprefix(f"{folder}.").split(".")[0]
                if not within(name, {folder}) or name == folder or other in shared:
                    continue
                if word in shared or other.split("_")[0] != word.split("_")[0]:
                    found.append(f"{module} may not import its sibling {name}")
    return found


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_what_lies_below_it(module: str) -> None:
    assert breaches(module, imports(MODULES[module], module)) == []


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("jrl.ops.kl", "jrl.losses.ppo"),
        ("jrl.ops.kl", "flax"),
        ("jrl.losses.ppo", "jrl.losses.sft"),
        ("jrl.losses.ppo", "jrl.models.policy"),
        ("jrl.learners.ppo", "jrl.learners.sft"),
        ("jrl.learners.accumulate", "jrl.learners.ppo"),
        ("jrl.learners.ppo", "jrl.rollout.score"),
        ("jrl.rollout.generate", "jrl.models.transformer"),
        ("jrl.models.transformer", "transformers"),
        ("jrl.data.prompts", "jax"),
        ("jrl.trainers.ppo", "jrl.api"),
        ("jrl.brand_new", "jax"),
    ],
)
def test_a_breach_is_seen(module: str, name: str) -> None:
    assert breaches(module, {name})


def test_the_package_itself_needs_no_torch() -> None:
    for module, path in MODULES.items():
        assert not {name.split(".")[0] for name in imports(path, module)} & {
            "torch",
            "diffusers",
            "trl",
            "peft",
        }

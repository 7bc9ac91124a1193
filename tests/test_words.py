# SPDX-License-Identifier: Apache-2.0
"""One word for one thing: the table of docs/words.md, held against the package."""

import ast
import inspect
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    tuple(re.findall(r"`([\w.]+)`", cell) for cell in line.strip("|\n").split(" | "))
    for line in (ROOT / "docs" / "words.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| `")
]
FACES = ("trl/", "trlx/", "interop/")
FIELDS = "a field of the configuration, which has the seed's name"
MEANT_OTHERWISE = {
    ("cliprange", "learners/ppo.py"): FIELDS,
    ("cliprange_value", "learners/ppo.py"): FIELDS,
    ("init_kl_coef", "learners/ppo.py"): FIELDS,
    ("lam", "learners/ppo.py"): FIELDS,
    ("vf_coef", "learners/ppo.py"): FIELDS,
    ("tau", "learners/ilql.py"): FIELDS,
    ("old_log_probs", "learners/ddpo.py"): FIELDS,
    ("old_log_probs", "learners/ddpo_config.py"): FIELDS,
    ("eps", "learners/optimizers.py"): "the argument of Adam",
    ("eps", "ops/advantages.py"): "of a dtype",
    ("eps", "data/offline.py"): "of a dtype",
    ("dones", "data/offline.py"): "trlX's column",
    ("query", "models/diffusion/transformer.py"): "of attention",
    ("rng", "models/attention.py"): "the argument of flax's Dropout",
    ("generation", "data/chat/rendering.py"): "the tag of a chat template",
    ("generation", "data/chat/templates.py"): "the tag of a chat template",
    ("response", "data/demonstrations/classic.py"): "the part of a text behind TRL's response template",
    ("response", "bench/"): "the flag `--response`",
}
"""(word, file or folder of jrl) → why it stands there though the table has another for what it would mean here."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names of variables, attributes, arguments, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                yield name or ""
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def test_the_table_is_read():
    assert len(ROWS) >= 25
    assert all(len(row) == 4 and row[0] and row[2] for row in ROWS)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][0])
def test_each_word_is_of_its_place(row):
    known = set()
    for place in row[2]:
        known |= {place.rpartition(".")[2], *inspect.signature(pkgutil.resolve_name(place)).parameters}
    assert set(row[0]) - known == set()


def test_no_thing_has_a_second_word():
    words = {word for row in ROWS for word in row[3]}
    assert len(words) > 30 and not words & {word for row in ROWS for word in row[0]}
    known = set()
    for path in sorted((ROOT / "jrl").rglob("*.py")):
        name = path.relative_to(ROOT / "jrl").as_posix()
        if name.startswith(FACES):
            continue
        for word in words & set(identifiers(ast.parse(path.read_text(encoding="utf-8")))):
            entries = {
                (word, place) for place in (name, f"{name.partition('/')[0]}/")
            } & MEANT_OTHERWISE.keys()
            assert entries, f"jrl/{name} has `{word}`, which docs/words.md has another word for"
            known |= entries
    assert known == MEANT_OTHERWISE.keys()

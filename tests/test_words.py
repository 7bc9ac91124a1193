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
PAGE = (ROOT / "docs" / "words.md").read_text(encoding="utf-8").splitlines()
ROWS = [
    tuple(re.findall(r"`([\w.]+)`", cell) for cell in line.strip("|\n").split(" | "))
    for line in PAGE
    if line.startswith("| `")
]
OWN = {word for row in ROWS for word in row[0]}
SECOND = {word for row in ROWS for word in row[3]}
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
    ("generation", "data/chat/tool_calls.py"): "the argument of `Chat.render`",
    ("generation", "environments/chat.py"): "the argument of `Chat.render`",
    ("generation", "data/chat/templates.py"): "the tag of a chat template",
    ("response", "data/demonstrations/classic.py"): "the part of a text behind TRL's response template",
    ("response", "bench/"): "the flag `--response`",
}
"""(word, file or folder of jrl) → why it stands there though the table has another for what it would mean here."""

METRIC = re.compile(r"(?:\w|<\w*>)+(?:/(?:\w|<\w*>)+)+")
TRL = "TRL's metric, which dashboards draw"
STAY = {
    "logps/chosen": TRL,
    "logps/rejected": TRL,
    "rewards/chosen": TRL,
    "rewards/rejected": TRL,
    "rewards/margins": TRL,
    "rewards/accuracies": TRL,
    "rewards/displaced": "stands in the group of TRL's that it is read beside",
    "logits/chosen": TRL,
    "logits/rejected": TRL,
    "ddpo/recomputed_logprob_max_dev": "a metric that was published before it was held against the table",
    "reference_logps": "a folder of runs on users' disks, which a resumed run reads",
}
"""Name of a metric or of what a run writes → why it stays, though the table has another word for it."""


def identifiers(tree: ast.AST) -> Iterator[str]:
    """Names of variables, attributes, arguments, functions and classes."""
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name) | ast.Attribute(attr=name) | ast.arg(arg=name) | ast.keyword(arg=name):
                yield name or ""
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                yield name


def shown(text: ast.AST) -> str | None:
    """A literal as it is written, with `<>` for what an f-string puts in; None of all else."""
    match text:
        case ast.Constant(value=str(value)):
            return value
        case ast.JoinedStr(values=parts):
            return "".join(part.value if isinstance(part, ast.Constant) else "<>" for part in parts)
    return None


def lasting_names(tree: ast.Module) -> Iterator[str]:
    """Metrics, which are literals with a slash in them, and words that are constants of the module, as folders are."""
    found = {name for node in ast.walk(tree) if (name := shown(node))}
    yield from filter(METRIC.fullmatch, found)
    for node in tree.body:
        if isinstance(node, ast.Assign) and re.fullmatch(r"\w+", shown(node.value) or ""):
            yield shown(node.value) or ""


def is_off_the_table(name: str) -> bool:
    """Whether a part of a name is a second word, or the group of a metric a word that means an array."""
    parts = re.sub(r"[/<>]+", "_", name)
    second = any(re.search(rf"(?:^|_){word}(?:_|$)", parts) for word in SECOND)
    return second or ("/" in name and name.partition("/")[0] in OWN)


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
    assert len(SECOND) > 30 and not SECOND & OWN
    known = set()
    for path in sorted((ROOT / "jrl").rglob("*.py")):
        name = path.relative_to(ROOT / "jrl").as_posix()
        if name.startswith(FACES):
            continue
        for word in SECOND & set(identifiers(ast.parse(path.read_text(encoding="utf-8")))):
            entries = {
                (word, place) for place in (name, f"{name.partition('/')[0]}/")
            } & MEANT_OTHERWISE.keys()
            assert entries, f"jrl/{name} has `{word}`, which docs/words.md has another word for"
            known |= entries
    assert known == MEANT_OTHERWISE.keys()


def test_no_metric_has_a_second_word():
    emitted = {
        name: path.relative_to(ROOT).as_posix()
        for path in sorted((ROOT / "jrl").rglob("*.py"))
        if not path.relative_to(ROOT / "jrl").as_posix().startswith(FACES)
        for name in lasting_names(ast.parse(path.read_text(encoding="utf-8")))
    }
    page = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    described = {
        name: "docs/metrics.md" for name in re.findall(r"`([^`\s]+)`", page) if METRIC.fullmatch(name)
    }
    assert len(emitted) > 200 and len(described) > 100
    off = {name: place for name, place in (described | emitted).items() if is_off_the_table(name)}
    unlisted = {name: place for name, place in off.items() if name not in STAY}
    assert not unlisted, f"docs/words.md has other words for these: {unlisted}"
    assert STAY.keys() - off.keys() == set()


def test_the_page_lists_the_names_that_stay():
    listed = [
        name
        for line in PAGE
        if line.startswith("- `")
        for name in re.findall(r"`([\w/]+)`", line.partition(": ")[0])
    ]
    assert sorted(listed) == sorted(STAY)

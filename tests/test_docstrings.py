# SPDX-License-Identifier: Apache-2.0
"""Docstrings say what their readers need, and their first lines make sense without their neighbours."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "jrl"
MATHS = sorted(
    path for room in ("ops", "losses") for path in (PACKAGE / room).glob("*.py") if path.name != "__init__.py"
)
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
LEANING = re.compile(
    r"(What|Whether|How|Where|Which|Who|Whose|By whom|Of|The same|That|Those|These|Their|Its|As|With)\b"
)
"""Openings of first lines that only make sense beside something else: name the thing, or begin with a verb."""


SCALAR = re.compile(r"(Scalar|int|float|bool|str|Float\[Array, ''\])( \| None)?")
"""Annotations of a single number, flag or word."""
IN_PLACE = {
    "check_positive": "the number is what is checked",
    "check_share": "the number is what is checked",
    "adaptive_kl_coef": "the coefficient is what is moved, by the KL beside it",
    "apply_temperature": "a step of the sampler: logits and the one number that the function is named after",
    "keep_top_p": "a step of the sampler: logits and the one number that the function is named after",
    "steer": "a step of the sampler: logits, advantages and what weighs them",
    "positions_of": "a budget in bytes is what is turned into positions",
    "denoising_steps": "a schedule, cut into so many steps of so much noise",
    "flow_steps": "the same of a flow",
}
"""Functions of which a scalar may be given by its place, and why."""


def relative(path):
    return str(path.relative_to(PACKAGE))


def section(docstring, name):
    """Lines of a section of a docstring, "" where it has none."""
    found = re.search(rf"^{name}:(.*?)(?=^\w+:|\Z)", docstring, re.MULTILINE | re.DOTALL)
    return found.group(1) if found else ""


def public_functions(path):
    """Functions of a module that anyone may call, with their docstrings."""
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
            yield node, ast.get_docstring(node) or ""


@pytest.mark.parametrize("path", MATHS, ids=relative)
class TestMaths:
    def test_every_argument_is_described(self, path):
        """`Args:` names each argument: its shape stands in the annotation, its meaning, range and unit here."""
        for node, docstring in public_functions(path):
            given = node.args
            names = [x.arg for x in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
            described = section(docstring, "Args")
            missing = [name for name in names if not re.search(rf"^  {name}: \S", described, re.MULTILINE)]
            assert not missing, f"{node.name} does not describe {missing}"

    def test_a_scalar_is_given_by_its_name(self, path):
        """`vespo(2.0, 3.0, 3.0, 2.0)` says nothing to its reader. The names that `checks` print are no numbers."""
        by_place = {
            node.name: [
                x.arg
                for x in (*node.args.posonlyargs, *node.args.args)
                if x.annotation
                and SCALAR.fullmatch(ast.unparse(x.annotation))
                and (path.name, ast.unparse(x.annotation)) != ("checks.py", "str")
            ]
            for node, _ in public_functions(path)
        }
        assert {name: found for name, found in by_place.items() if found and name not in IN_PLACE} == {}
        assert [name for name in IN_PLACE if by_place.get(name) == []] == []

    def test_every_result_is_described(self, path):
        """`Returns:` gives range, unit and reduction; the shape stands in the annotation.

        What builds a surrogate returns it, and its first line says which.
        """
        for node, docstring in public_functions(path):
            if ast.unparse(node.returns) not in ("None", "Surrogate"):
                found = section(docstring, "Returns").strip()
                assert found, f"{node.name} does not describe its result"

    def test_every_function_names_its_source(self, path):
        """`Reference:` names paper and equation, or says `none;` and why. A module may say `none;` for all of it.

        A paper named by the module alone does not count: it does not say which function follows which equation.
        """
        of_module = section(ast.get_docstring(ast.parse(path.read_text())) or "", "Reference")
        for node, docstring in public_functions(path):
            found = section(docstring, "Reference").strip()
            assert found or of_module.strip().startswith("none"), f"{node.name} names no source"
            # A title, an arXiv number or a year; or the reason why there is none.
            assert not found or re.search(r"^none; \w|\d{4}|`", found), f"{node.name}: {found}"

    def test_every_function_shows_an_example(self, path):
        """Examples are run by `test_doctests.py`."""
        for node, docstring in public_functions(path):
            assert ">>> " in section(docstring, "Example"), f"{node.name} has no example"
            assert re.search(rf"(>>>|\.\.\.).*\b{node.name}\(", docstring), f"{node.name}: not what is shown"

    def test_every_field_is_described(self, path):
        """`Attributes:` names each field of a public class."""
        for node in ast.parse(path.read_text()).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_"):
                continue
            described = section(ast.get_docstring(node) or "", "Attributes")
            fields = [x.target.id for x in node.body if isinstance(x, ast.AnnAssign)]
            missing = [name for name in fields if not re.search(rf"^  {name}: \S", described, re.MULTILINE)]
            assert not missing, f"{node.name} does not describe {missing}"


def named_docstrings(node, name):
    """(name, docstring) of a module or class and of everything public in it."""
    found = ast.get_docstring(node)
    if found is not None:
        yield name, found
    for part in node.body:
        if isinstance(part, DEFINITIONS) and (not part.name.startswith("_") or part.name.endswith("__")):
            if isinstance(part, ast.ClassDef):
                yield from named_docstrings(part, f"{name}::{part.name}")
            elif (found := ast.get_docstring(part)) is not None:
                yield f"{name}::{part.name}", found


def test_first_lines_stand_alone():
    """A reader meets a first line in a list, in `help()` or in an editor, without what is written around it."""
    leaning = [
        f"{name}: {docstring.partition(chr(10))[0]}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for name, docstring in named_docstrings(ast.parse(path.read_text(encoding="utf-8")), relative(path))
        if LEANING.match(docstring)
    ]
    assert not leaning, "\n".join(leaning)


def prose(docstring):
    """Sentences of a docstring, but for its examples and sources."""
    text = re.split(r"^(?:Example|Reference):", docstring, flags=re.MULTILINE)[0]
    text = re.sub(r"^\s*\*{0,2}\w+:\s", "\n\n", text, flags=re.MULTILINE)
    paragraphs = [" ".join(part.split()) for part in re.split(r"\n\s*\n", text)]
    return [part for paragraph in paragraphs for part in re.split(r"(?<=[.?!])\s+", paragraph) if part]


def test_sentences_of_everything_public_are_short():
    rooms = [importlib.import_module(name) for name in ("jrl", "jrl.ops", "jrl.losses", "jrl.rewards")]
    values = {id(value): value for room in rooms for name in room.__all__ for value in [getattr(room, name)]}
    docstrings = [inspect.getdoc(value) for value in values.values() if callable(value)]
    counts = [
        len(re.sub(r"`[^`]*`", "code", sentence).split())
        for docstring in docstrings
        for sentence in prose(docstring or "")
    ]
    assert len(counts) > 1000
    assert sum(counts) / len(counts) <= 12
    assert sum(count > 30 for count in counts) / len(counts) <= 0.03

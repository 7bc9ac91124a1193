# SPDX-License-Identifier: Apache-2.0
"""The shape of a mutation: what changes inside one named function, and the test that must notice.

A change is a pair of patterns in Python. `old` is sought in the function's syntax tree, not in its text, so layout
and comments do not matter; a name that the module does not define (an argument, a local variable) stands for any
expression, so renaming does not matter either. `new` takes its place, with the same expressions under the same
names. A pattern is an expression, statements, or `_(name=value)`: the keyword argument of any call.
"""

from __future__ import annotations

import ast
import builtins
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
BUILTINS = set(dir(builtins))
Node = ast.AST
Bindings = dict[str, Node]


@dataclass(frozen=True)
class Mutation:
    """A deliberate breach of a lore rule.

    Attributes:
      rule: Number of the rule, such as "1.2".
      target: Dotted path of what is changed: a function, a method, a function inside one, or a module.
      old: Pattern that must fit exactly one place in the target.
      new: What takes its place.
      test: Id of the test that must fail with the change, such as "tests/ops/test_kl.py::test_lore_3_1".
    """

    rule: str
    target: str
    old: str
    new: str
    test: str


def source_of(target: str) -> tuple[Path, list[str]]:
    """The file of a dotted path, and the names that lead to the target inside it."""
    parts = target.split(".")
    for length in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:length])
        for file in (path.with_suffix(".py"), path / "__init__.py"):
            if file.is_file():
                return file, parts[length:]
    raise LookupError(f"there is no module of {target}")


def mutate(mutation: Mutation) -> tuple[Path, str]:
    """The file that a mutation changes, and its source afterwards.

    Raises:
      LookupError: The target does not exist, or the pattern fits no place in it, or several.
    """
    file, names = source_of(mutation.target)
    tree = ast.parse(file.read_text(encoding="utf-8"))
    scope: Node = tree
    for name in names:
        found = [
            node for node in ast.walk(scope) if node is not scope and getattr(node, "name", None) == name
        ]
        if not found:
            raise LookupError(f"there is no {mutation.target} in {file.relative_to(ROOT)}")
        scope = found[0]
    literal = _defined(tree) | BUILTINS
    old, new = _parse(mutation.old), _parse(mutation.new)
    places = list(_places(scope, old, literal))
    exact = [place for place in places if all(_is_name(node, name) for name, node in place[3].items())]
    places = exact or places
    if len(places) != 1:
        raise LookupError(f"`{mutation.old}` fits {len(places)} places in {mutation.target}")
    parent, field, where, bound = places[0]
    fresh = [_Filled(bound).visit(copy.deepcopy(node)) for node in new]
    if where is None:
        setattr(parent, field, fresh[0])
    else:
        getattr(parent, field)[where : where + len(old)] = fresh
    return file, ast.unparse(ast.fix_missing_locations(tree)) + "\n"


def _parse(pattern: str) -> list[Any]:
    body = ast.parse(pattern).body
    if len(body) == 1 and isinstance(body[0], ast.Expr):
        value = body[0].value
        if isinstance(value, ast.Call) and _is_name(value.func, "_"):
            return list(value.keywords)
        return [value]
    return list(body)


def _defined(tree: ast.Module) -> set[str]:
    found = set()
    for node in tree.body:
        for part in (
            ast.walk(node) if isinstance(node, ast.Import | ast.ImportFrom | ast.Assign | ast.If) else [node]
        ):
            if isinstance(part, ast.alias):
                found.add((part.asname or part.name).split(".")[0])
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                found.add(part.id)
            elif isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name):
                found.add(part.target.id)
            elif isinstance(part, ast.FunctionDef | ast.ClassDef):
                found.add(part.name)
    return found


def _places(
    scope: Node, old: list[Any], literal: set[str]
) -> Iterator[tuple[Node, str, int | None, Bindings]]:
    for parent in ast.walk(scope):
        for field, value in ast.iter_fields(parent):
            if isinstance(value, list):
                for at in range(len(value) - len(old) + 1):
                    bound: Bindings = {}
                    if all(_fits(p, n, bound, literal) for p, n in zip(old, value[at:], strict=False)):
                        yield parent, field, at, bound
            elif isinstance(value, ast.AST) and len(old) == 1:
                bound = {}
                if _fits(old[0], value, bound, literal):
                    yield parent, field, None, bound


def _fits(pattern: Any, node: Any, bound: Bindings, literal: set[str]) -> bool:
    if isinstance(pattern, ast.Name) and pattern.id not in literal and isinstance(node, ast.expr):
        known = bound.setdefault(pattern.id, node)
        return _same(known, node)
    if isinstance(pattern, ast.AST):
        return type(pattern) is type(node) and all(
            _fits(getattr(pattern, name, None), getattr(node, name, None), bound, literal)
            for name in pattern._fields
            if name not in ("ctx", "kind", "type_comment")
        )
    if isinstance(pattern, list):
        return len(pattern) == len(node) and all(
            _fits(p, n, bound, literal) for p, n in zip(pattern, node, strict=True)
        )
    return type(pattern) is type(node) and pattern == node


def _same(x: Node, y: Node) -> bool:
    return ast.unparse(x) == ast.unparse(y)


def _is_name(node: Node, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


class _Filled(ast.NodeTransformer):
    """Puts what the old pattern's names stood for in their places in the new one."""

    def __init__(self, bound: Bindings) -> None:
        self.bound = bound

    def visit_Name(self, node: ast.Name) -> Node:
        found = copy.deepcopy(self.bound.get(node.id, node))
        if isinstance(found, ast.Name):
            found.ctx = node.ctx
        return found

# SPDX-License-Identifier: Apache-2.0
"""Every use of a run's root key has a stream of its own."""

import ast
from pathlib import Path

import jrl

ROOT = Path(jrl.__file__).resolve().parent
OTHER_KEYS = {"NOISE_STREAM": "of the key of a dropout pass, not of the root key"}


def streams():
    """Name → number of each constant that names a stream, wherever it stands."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if not isinstance(node, ast.Assign) or "STREAM" not in ast.unparse(node.targets[0]):
                continue
            names, numbers = ast.unparse(node.targets[0]), ast.literal_eval(node.value)
            for name, number in zip(
                names.strip("()").split(", "),
                numbers if isinstance(numbers, tuple) else (numbers,),
                strict=True,
            ):
                assert name not in found, f"{name} has two homes"
                found[name] = number
    return found


def test_no_two_streams_share_a_number():
    found = {name: number for name, number in streams().items() if name not in OTHER_KEYS}
    assert len(found) >= 8
    assert len(set(found.values())) == len(found), found


def test_no_stream_is_a_bare_number():
    bare = [
        f"{path.relative_to(ROOT)}: {ast.unparse(node)}"
        for path in sorted(ROOT.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) == "jax.random.fold_in"
        and any(root in ast.unparse(node.args[0]) for root in ("root_key", "train.seed"))
        and isinstance(node.args[1], ast.Constant)
    ]
    assert bare == []

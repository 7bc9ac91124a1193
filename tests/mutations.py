# SPDX-License-Identifier: Apache-2.0
"""Breaks every covered lore rule on purpose, in a copy of the tree, and shows its test going red.

    python tests/mutations.py [ONLY ...]     # everything, or rules such as 5.6, or areas such as learners

Each entry of `tests/mutation_patches/*.py` replaces one piece of source text; its test must fail with the patch
(and pass without it: the default suite shows that, `--baseline` shows it here). Rules without a patch are listed
with what they wait for. Exits 1 if any test stays green.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.lore import RULES, TABLE, WAITS, lore_table  # noqa: E402
from tests.mutation_patches.base import Mutation  # noqa: E402

COPIED = ("jrl", "tests", "configs", "examples", "docs", "pyproject.toml", "README.md")
IGNORED = shutil.ignore_patterns("__pycache__", "*.pyc")
MESH_FLAG = "--xla_force_host_platform_device_count=8"


def load_patches(only: Collection[str] = ()) -> list[Mutation]:
    """Mutations ordered by rule: all, or those of the named rules and areas (names of patch files)."""
    found: list[Mutation] = []
    for path in sorted((ROOT / "tests" / "mutation_patches").glob("*.py")):
        if path.stem in ("base", "__init__"):
            continue
        spec = importlib.util.spec_from_file_location(f"mutation_patches_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found.extend(m for m in module.PATCHES if not only or path.stem in only or m.rule in only)
    return sorted(found, key=lambda mutation: list(RULES).index(mutation.rule))


def problems(mutation: Mutation, root: Path = ROOT) -> str | None:
    """Why a patch cannot be applied or its test cannot be found, or None."""
    source = root / mutation.file
    if not source.is_file():
        return f"there is no file {mutation.file}"
    count = source.read_text(encoding="utf-8").count(mutation.old)
    if count != 1:
        return f"the text to replace occurs {count} times in {mutation.file}"
    path, *parts = mutation.test.split("::")
    name = parts[-1].split("[")[0] if parts else ""
    if not (root / path).is_file() or not re.search(
        rf"^\s*def {re.escape(name)}\(", (root / path).read_text(encoding="utf-8"), re.MULTILINE
    ):
        return f"there is no test {mutation.test}"
    if not name.startswith(f"test_lore_{mutation.rule.replace('.', '_')}_"):
        return f"{mutation.test} is not named after rule {mutation.rule}"
    return None


def run_test(root: Path, test: str) -> tuple[bool, str]:
    """Whether the test passes in that tree, and the end of what it printed."""
    flags = os.environ.get("XLA_FLAGS", "")
    environment = os.environ | {"PYTHONPATH": str(root)}
    environment |= {"XLA_FLAGS": f"{flags} {MESH_FLAG}".strip()} if test.startswith("tests/mesh/") else {}
    # Every tier may hold a rule's test. A slow machine must not pass for a red test.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-m",
        "",
        "-p",
        "no:cacheprovider",
        "--no-time-limit",
        test,
    ]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=False)
    if done.returncode not in (0, 1):
        raise RuntimeError(f"{test} did not run:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, done.stdout[-2000:]


def copy_tree(target: Path) -> None:
    """What tests need of the repository, with its compilation cache within reach."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=IGNORED)
        elif source.is_file():
            shutil.copy2(source, target / name)
    cache = ROOT / ".jax_cache"
    cache.mkdir(exist_ok=True)
    (target / ".jax_cache").symlink_to(cache)


def main() -> int:
    """Runs the mutations; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("only", nargs="*", help="rules such as 5.6, or areas such as learners")
    parser.add_argument("--baseline", action="store_true", help="also show each test green without its patch")
    parser.add_argument("--write-table", action="store_true", help="write docs/lore.md and stop")
    arguments = parser.parse_args()
    if arguments.write_table:
        TABLE.write_text(lore_table(), encoding="utf-8")
        return 0
    patches = load_patches(arguments.only)
    red = 0
    for mutation in patches:
        reason = problems(mutation)
        start = time.perf_counter()
        if reason is None:
            with tempfile.TemporaryDirectory(prefix="jrl-mutation-") as name:
                root = Path(name)
                copy_tree(root)
                if arguments.baseline and not run_test(root, mutation.test)[0]:
                    reason = "the test fails without the patch"
                else:
                    file = root / mutation.file
                    text = file.read_text(encoding="utf-8")
                    file.write_text(text.replace(mutation.old, mutation.new), encoding="utf-8")
                    if run_test(root, mutation.test)[0]:
                        reason = "STAYS GREEN"
        red += reason is None
        print(
            f"{mutation.rule:>5}  {reason or 'red'}  {mutation.test}  ({time.perf_counter() - start:.0f} s)",
            flush=True,
        )
    covered = {mutation.rule for mutation in patches}
    print(f"\n{len(covered)} covered of {len(RULES)}, {red} of {len(patches)} red")
    if not arguments.only:
        for rule in RULES:
            if rule not in covered:
                print(f"{rule:>5}  waits for {WAITS.get(rule, 'its mutation')}")
    return int(red != len(patches))


if __name__ == "__main__":
    sys.exit(main())

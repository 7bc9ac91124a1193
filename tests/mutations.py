# SPDX-License-Identifier: Apache-2.0
"""Breaks every covered lore rule on purpose, in a process of its own, and shows its test going red.

    python tests/mutations.py [ONLY ...]     # everything, or rules such as 5.6, or areas such as learners

Each entry of `tests/mutation_patches/*.py` changes one function as it is imported; no file is touched. Its test must
fail with the change (and pass without it: the default suite shows that, `--baseline` shows it here). Rules without a
mutation are listed with what they wait for. Exits 1 if any test stays green.
"""

from __future__ import annotations

import argparse
import importlib.machinery
import importlib.util
import os
import re
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Collection
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from tests.lore import RULES, TABLE, WAITS, lore_table  # noqa: E402
from tests.mutation_patches.base import Mutation, mutate  # noqa: E402

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


def problems(mutation: Mutation) -> str | None:
    """Why a mutation cannot be made or its test cannot be found, or None."""
    try:
        mutate(mutation)
    except (LookupError, SyntaxError) as error:
        return str(error)
    path, *parts = mutation.test.split("::")
    name = parts[-1].split("[")[0] if parts else ""
    if not (ROOT / path).is_file() or not re.search(
        rf"^\s*def {re.escape(name)}\(", (ROOT / path).read_text(encoding="utf-8"), re.MULTILINE
    ):
        return f"there is no test {mutation.test}"
    if not name.startswith(f"test_lore_{mutation.rule.replace('.', '_')}_"):
        return f"{mutation.test} is not named after rule {mutation.rule}"
    return None


def install(mutation: Mutation) -> None:
    """Lets Python read the changed source instead of the file, and no bytecode of that file."""
    file, changed = mutate(mutation)
    read = importlib.machinery.SourceFileLoader.get_data

    def get_data(self: importlib.machinery.SourceFileLoader, path: str) -> bytes:
        here = Path(path)
        if here == file:
            return changed.encode()
        if here.suffix == ".pyc" and here.parents[1] == file.parent and here.name.startswith(f"{file.stem}."):
            raise OSError("bytecode of the unchanged source")
        return read(self, path)

    importlib.machinery.SourceFileLoader.get_data = get_data  # type: ignore[method-assign]
    sys.dont_write_bytecode = True


def run_test(test: str, mutation: Mutation | None = None) -> bool:
    """Whether a test passes in a process of its own, with that mutation."""
    with tempfile.TemporaryFile("w+") as said:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forks: nothing of JAX but its modules is there yet
            child = os.fork()
        if child == 0:
            _run_in_child(test, mutation, said.fileno())
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        said.seek(0)
        if status not in (0, 1):
            raise RuntimeError(f"{test} did not run:\n{said.read()[-4000:]}")
    return status == 0


def _run_in_child(test: str, mutation: Mutation | None, output: int) -> None:
    status = 70
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.chdir(ROOT)
        if test.startswith("tests/mesh/"):
            os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {MESH_FLAG}".strip()
        if mutation is not None:
            install(mutation)
        # Every tier may hold a rule's test. A slow machine must not pass for a red test.
        status = int(
            pytest.main(
                [
                    "-x",
                    "-m",
                    "",
                    "-W",
                    "ignore:Module already imported",
                    "-p",
                    "no:cacheprovider",
                    test,
                ]
            )
        )
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def preload() -> None:
    """Imports what every child would import anyway, but nothing of jrl."""
    import jax
    import jaxtyping
    import optax
    import transformers

    assert jax and jaxtyping and optax
    assert transformers.GPT2Config and transformers.PreTrainedTokenizerFast
    assert not any(name.split(".")[0] == "jrl" for name in sys.modules)


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
    preload()
    red = 0
    for mutation in patches:
        reason = problems(mutation)
        start = time.perf_counter()
        if reason is None and arguments.baseline and not run_test(mutation.test):
            reason = "the test fails without the mutation"
        if reason is None and run_test(mutation.test, mutation):
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

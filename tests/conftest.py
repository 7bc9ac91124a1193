# SPDX-License-Identifier: Apache-2.0
"""What holds in every test: checked shapes, no silent broadcasting, fixed keys, a report of what is slow."""

from __future__ import annotations

import gc
import itertools
import os
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import hypothesis
import jaxtyping

# Programs here are tiny and many: compiling them fast matters more than how fast they run.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()
# XLA's newer emitters of fused loops take as long as all else in a compilation. All tiers but `slow` and `aot` do
# without them; only those two run what users run.
QUICK = "--xla_cpu_use_fusion_emitters=false"

# Before anything of jrl is imported: a call whose array shapes contradict its annotations fails.
jaxtyping.install_import_hook(["jrl.ops", "jrl.losses"], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

from tests import tiers  # noqa: E402

# The same examples in every run: a test that fails by chance refuses a change that did nothing. To look for others:
# HYPOTHESIS_PROFILE=random.
hypothesis.settings.register_profile("same", derandomize=True, database=None)
hypothesis.settings.register_profile("random", database=None)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))
ROOT = Path(__file__).resolve().parents[1]
TIERS = ("parity", "slow", "mesh", "aot")
# What a test without a mark may take on a quiet machine. The same test has been seen to take 3 s and 15 s on one
# machine, so a test over it is named at the end of the run and fails nothing: a clock refuses no change.
SECONDS = 5.0

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Parity at 1e-4 needs true float32 products; on a CPU they always are.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


def pytest_configure(config: pytest.Config) -> None:
    """Flags of the quick tiers, before anything is computed; what the environment says stays."""
    flags = os.environ["XLA_FLAGS"]
    is_quick = tiers.KNOWS_EMITTERS and tiers.is_quick(config.option.markexpr)
    if is_quick and "xla_cpu_use_fusion_emitters" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {QUICK}"


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What data sets keep between runs is kept for this one alone."""
    os.environ["JRL_CACHE"] = str(tmp_path_factory.mktemp("jrl_cache"))


# Modules after which a process forgets its compiled functions. JAX's cache of calls has 8,192 places in a process and
# keeps no further function once they are taken: its `_cache_size()` is then 0. A whole default tier takes that many.
MODULES = 50
_modules_begun = itertools.count(1)


@pytest.fixture(scope="module", autouse=True)
def _room_for_calls() -> None:
    """Room for this module's functions in JAX's cache of calls, which tests count compilations by."""
    if next(_modules_begun) % MODULES == 0:
        jax.clear_caches()


@pytest.fixture
def key() -> jax.Array:
    """The same key in every test."""
    return jax.random.key(0)


def _cpu_seconds() -> float:
    """Processor time of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`-m fast` and `-m broad` read only the files that they choose from: importing all takes half a minute."""
    inside = collection_path.relative_to(ROOT) if collection_path.is_relative_to(ROOT) else None
    if inside is None or len(inside.parts) < 2:
        return None
    if config.option.markexpr == "fast":
        return None if tiers.is_in_rooms(inside.as_posix()) else True
    if config.option.markexpr == "broad" and inside.name.startswith("test_"):
        return None if inside.as_posix() in tiers.broad_files() else True
    return None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks of the lists, before `-m` chooses by them."""
    tiers.mark(items)


def pytest_collection_finish() -> None:
    """What imports and collection made lives to the end: no collector need look at it again, a fifth of the time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 100)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measures the test itself; what fixtures build is shared and not counted.

    Other work on the machine stretches the wall clock more than the processor time; several threads stretch the
    processor time but not the wall clock. A test is slow when both are over the limit.
    """
    wall, cpu = time.perf_counter(), _cpu_seconds()
    result = yield
    seconds = min(time.perf_counter() - wall, _cpu_seconds() - cpu)
    if seconds > SECONDS and not any(item.get_closest_marker(tier) for tier in TIERS):
        item.user_properties.append(("slow", seconds))
    return result


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Names the tests that are too slow for the default tier."""
    slow = [
        (seconds, report.nodeid)
        for report in terminalreporter.getreports("passed")
        for name, seconds in report.user_properties
        if name == "slow" and report.when == "call"
    ]
    if slow:
        terminalreporter.section(f"over {SECONDS:.0f} s: share what it builds, make it smaller, or mark it")
        for seconds, nodeid in sorted(slow, reverse=True):
            terminalreporter.line(f"{seconds:6.1f} s  {nodeid}")

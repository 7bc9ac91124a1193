# SPDX-License-Identifier: Apache-2.0
"""What holds in every test: checked shapes, no silent broadcasting, fixed keys, a time limit."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import jaxtyping

# Programs here are tiny and many: compiling them fast matters more than how fast they run.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_backend_optimization_level=0".strip()

# Before anything of jrl is imported: a call whose array shapes contradict its annotations fails.
jaxtyping.install_import_hook(["jrl.ops", "jrl.losses"], "beartype.beartype")

import jax  # noqa: E402
import pytest  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TIERS = ("parity", "slow", "mesh")
# What a test without a mark may take on a quiet machine, and at what it fails anywhere: processor time too depends on
# the neighbours, and the same test has been seen to take 3 s and 8 s on one machine.
SECONDS, FAIL_SECONDS = 5.0, 12.0
HARD_SECONDS = 60.0

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
jax.config.update("jax_numpy_rank_promotion", "raise")
# Parity at 1e-4 needs true float32 products; on a CPU they always are.
jax.config.update("jax_default_matmul_precision", "highest")
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", 0)


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """What data sets keep between runs is kept for this one alone."""
    os.environ["JRL_CACHE"] = str(tmp_path_factory.mktemp("jrl_cache"))


@pytest.fixture
def key() -> jax.Array:
    """The same key in every test."""
    return jax.random.key(0)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--no-time-limit`: for runs that ask only whether a test passes."""
    parser.addoption("--no-time-limit", action="store_true", help="let tests without a mark take any time")


def too_slow(*, wall: float, cpu: float) -> str | None:
    """Why a test of the default tier breaks its limit, or None.

    Other work on the machine stretches the wall clock more than the processor time; several threads stretch the
    processor time but not the wall clock. A test is slow when both are over the limit, and also when the wall
    clock alone is far over it (it sleeps or waits).
    """
    if min(wall, cpu) > FAIL_SECONDS or wall > HARD_SECONDS:
        return (
            f"took {wall:.1f} s ({cpu:.1f} s of processor time); without a mark it may take {SECONDS:.0f} on a quiet "
            f"machine. Share what it builds in a fixture, make it smaller, or mark it with one of {', '.join(TIERS)}."
        )
    return None


def _cpu_seconds() -> float:
    """Processor time of this process and of the children it has waited for."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, Any, Any]:
    """Measures the test itself; what fixtures build is shared and not counted."""
    wall, cpu = time.perf_counter(), _cpu_seconds()
    result = yield
    limited = not any(item.get_closest_marker(tier) for tier in TIERS)
    if limited and not item.config.getoption("--no-time-limit"):
        reason = too_slow(wall=time.perf_counter() - wall, cpu=_cpu_seconds() - cpu)
        if reason is not None:
            raise AssertionError(f"{item.nodeid} {reason}")
    return result

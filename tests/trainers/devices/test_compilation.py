# SPDX-License-Identifier: Apache-2.0
"""Where compiled programs are kept, and who decides it."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl import compilation
from jrl.compilation import compiled, machine_name, use_compilation_cache
from tests.processes.job import Job

NAMES = (
    "jax_compilation_cache_dir",
    "jax_persistent_cache_min_compile_time_secs",
    "jax_enable_compilation_cache",
)


@pytest.fixture
def fresh(monkeypatch, tmp_path):
    """JAX as it comes, and jrl's folder in a temporary place."""
    before = {name: getattr(jax.config, name) for name in NAMES}
    monkeypatch.setenv("JRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("JRL_COMPILATION_CACHE", raising=False)
    jax.config.update("jax_compilation_cache_dir", None)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)
    yield tmp_path
    for name, value in before.items():
        jax.config.update(name, value)
    compilation.compilation_cache.reset_cache()


def test_it_is_on_by_default_in_the_users_cache(fresh):
    folder = use_compilation_cache()
    assert folder == fresh / "cache" / "compiled" / machine_name()
    assert folder.stat().st_mode & 0o777 == 0o700
    assert jax.config.jax_compilation_cache_dir == str(folder)
    assert jax.config.jax_persistent_cache_min_compile_time_secs == compilation.MIN_COMPILE_SECONDS


def test_a_folder_of_the_users_is_kept_with_its_limits(fresh):
    jax.config.update("jax_compilation_cache_dir", str(fresh / "mine"))
    assert use_compilation_cache() == fresh / "mine"
    assert jax.config.jax_compilation_cache_dir == str(fresh / "mine")
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 1.0
    assert not (fresh / "cache").exists()


def test_a_limit_of_the_users_is_kept(fresh):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 3.0)
    use_compilation_cache()
    assert jax.config.jax_persistent_cache_min_compile_time_secs == 3.0


def test_who_turned_caches_off_has_none(fresh, monkeypatch):
    monkeypatch.setenv("JRL_COMPILATION_CACHE", "off")
    assert use_compilation_cache() is None
    monkeypatch.delenv("JRL_COMPILATION_CACHE")
    jax.config.update("jax_enable_compilation_cache", False)
    assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_the_variable_names_another_folder(fresh, monkeypatch):
    monkeypatch.setenv("JRL_COMPILATION_CACHE", str(fresh / "other"))
    assert use_compilation_cache() == fresh / "other" / machine_name()


def test_a_folder_that_cannot_be_made_is_said_and_does_not_stop_a_run(fresh, monkeypatch):
    (fresh / "file").write_text("")
    monkeypatch.setenv("JRL_COMPILATION_CACHE", str(fresh / "file"))
    with pytest.warns(UserWarning, match="Compiled programs are not kept: .* cannot be made"):
        assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_a_folder_of_another_user_is_not_used(fresh, monkeypatch):
    monkeypatch.setattr(compilation.os, "getuid", lambda: 12345)
    with pytest.warns(UserWarning, match="belongs to another user"):
        assert use_compilation_cache() is None


@pytest.mark.parametrize("mode", [0o720, 0o702])
def test_a_folder_that_others_may_write_is_not_used(fresh, mode):
    folder = fresh / "cache" / "compiled" / machine_name()
    folder.mkdir(parents=True)
    folder.chmod(mode)
    with pytest.warns(UserWarning, match="may be written by others"):
        assert use_compilation_cache() is None
    assert jax.config.jax_compilation_cache_dir is None


def test_what_a_dying_process_left_empty_is_removed(fresh):
    """But nothing else: JAX's lock is empty, and so may be what a link points at."""
    folder = use_compilation_cache()
    (folder / "jit_f-cache").write_bytes(b"")
    (folder / "jit_g-cache").write_bytes(b"program")
    (folder / ".lockfile").write_bytes(b"")
    (fresh / "empty").write_bytes(b"")
    (folder / "link").symlink_to(fresh / "empty")
    (folder / "folder").mkdir()
    jax.config.update("jax_compilation_cache_dir", None)
    use_compilation_cache()
    assert {entry.name for entry in folder.iterdir()} == {"jit_g-cache", ".lockfile", "link", "folder"}


def test_an_empty_file_that_cannot_be_removed_does_not_stop_a_run(fresh, monkeypatch):
    folder = use_compilation_cache()
    (folder / "jit_f-cache").write_bytes(b"")
    jax.config.update("jax_compilation_cache_dir", None)

    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(compilation.Path, "unlink", refuse)
    assert use_compilation_cache() == folder


def test_machines_that_differ_share_no_folder(monkeypatch):
    here = machine_name()
    monkeypatch.setattr(compilation, "_processor", lambda: "flags : another set")
    assert machine_name() != here


@pytest.mark.slow
def test_a_second_process_compiles_nothing_anew(tmp_path):
    """A program that was run before the cache was turned on does not keep JAX from using it."""
    script = """
import jax
import jax.numpy as jnp
import numpy as np
jax.jit(lambda x: x + 1)(1.0)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event))
from jrl import compilation
compilation.MIN_COMPILE_SECONDS = 0.0
assert compilation.use_compilation_cache()
jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones((8, 8)))
print(sum(event.endswith("cache_hits") for event in hits), sum(event.endswith("cache_misses") for event in hits))
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("JAX_")}
    environment |= {"JRL_COMPILATION_CACHE": str(tmp_path), "JAX_PLATFORMS": "cpu"}

    def run() -> list[int]:
        command = [sys.executable, "-c", script]
        done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
        return [int(word) for word in done.stdout.split()]

    (hits, misses), (later_hits, later_misses) = run(), run()
    assert hits == 0 and misses > 0
    assert later_hits == misses and later_misses == 0


def test_a_program_may_be_called_inside_another():
    program = compiled(lambda x: (x * 2.0).sum())
    x = jnp.arange(3.0)
    assert program(x) == 6.0
    assert jax.jit(lambda x: program(x) + 1)(x) == 7.0
    np.testing.assert_array_equal(jax.grad(program)(x), [2.0, 2.0, 2.0])


@pytest.mark.parametrize("named", [True, False])
def test_several_devices_of_a_cpu_keep_none(tmp_path, named):
    """Read back, a program over them hangs in its collectives; a folder that the user named is not left out unsaid."""
    script = """
import jax, warnings
from jrl.compilation import use_compilation_cache
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    assert use_compilation_cache() is None and not jax.config.jax_enable_compilation_cache
print(*[warning.message for warning in said])
"""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("J")}
    environment |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    environment |= {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)} if named else {"JRL_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)
    assert ("hang when they are read back" in done.stdout) == named and not list(tmp_path.iterdir())


def test_several_processes_of_a_cpu_keep_none(tmp_path):
    """The same where each has one device: what process 0 reads back and the others compile anew no longer fits."""
    script = """
import jax
from jrl.compilation import cache_refusal, use_compilation_cache
from jrl.distributed import join
join()
assert jax.local_device_count() == 1 and jax.device_count() == 2
print(cache_refusal())
assert use_compilation_cache() is None and not jax.config.jax_enable_compilation_cache
jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.ones((8, 8)))
"""
    variables = {"JAX_COMPILATION_CACHE_DIR": str(tmp_path / "programs")}
    variables |= {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    job = Job(["-c", script], tmp_path / "logs", num_processes=2, variables=variables)
    job.succeed(timeout=120.0)
    for process in range(2):
        said = job.output(process)
        assert "the run has several devices of a CPU" in said and "hang when they are read back" in said
    assert not list(tmp_path.glob("programs/*"))

# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

import jax
import pytest

from jrl.cli import environment as doctor
from jrl.cli import main
from jrl.cli.environment import (
    LITTLE_DISK,
    LITTLE_MEMORY,
    NO_DISK,
    Check,
    check_accelerator,
    check_cache,
    check_disk,
    check_extras,
    check_hub,
    check_memory,
    check_package,
    check_variables,
    check_versions,
    checks,
    has_nvidia_gpu,
    has_tpu,
)
from jrl.compilation import VARIABLE
from jrl.trainers.loop.activity import SECONDS_FILE

HERE = Path("/somewhere/jrl")


@pytest.mark.parametrize(
    ("check", "verdict", "remedy"),
    [
        (check_package(["jrl-post"], HERE), "ok", ""),
        (check_package([], HERE), "ok", ""),
        (check_package(["jrl", "jrl-post"], HERE), "wrong", "pip uninstall -y jrl"),
        (check_versions("0.10.2", "0.10.1"), "ok", ""),
        (check_versions("0.10.2", "0.9.0"), "wrong", "jaxlib==0.10.2"),
        (check_accelerator(backend="cpu", has_gpu=False, has_tpu=False, chosen=None), "ok", ""),
        (check_accelerator(backend="gpu", has_gpu=True, has_tpu=False, chosen=None), "ok", ""),
        (check_accelerator(backend="cpu", has_gpu=True, has_tpu=False, chosen=None), "wrong", "[cuda13]"),
        (check_accelerator(backend="cpu", has_gpu=False, has_tpu=True, chosen=None), "wrong", "[tpu]"),
        (check_accelerator(backend="cpu", has_gpu=True, has_tpu=False, chosen="cpu"), "warning", "unset"),
        (check_accelerator(backend="none", has_gpu=True, has_tpu=False, chosen=None), "wrong", "nvidia-smi"),
        (check_memory(LITTLE_MEMORY, None), "ok", ""),
        (check_memory(LITTLE_MEMORY - 1, None), "warning", "smaller model"),
        (check_disk("disk", HERE, LITTLE_DISK), "ok", ""),
        (check_disk("disk", HERE, LITTLE_DISK - 1), "warning", "free space"),
        (check_disk("disk", HERE, NO_DISK - 1), "wrong", "free space"),
        (check_cache(HERE, "JRL_COMPILATION_CACHE is off"), "warning", "JRL_COMPILATION_CACHE"),
        (check_hub({}), "ok", ""),
        (check_hub({"HF_HUB_OFFLINE": "0"}), "ok", ""),
        (check_hub({"HF_HUB_OFFLINE": "1"}), "warning", "local folders"),
        (check_extras("0.8", "5.0"), "ok", ""),
        (check_extras("not installed", "5.0"), "wrong", "pip install safetensors"),
        (check_variables({"PATH": "/bin", "JAX_DISABLE_JIT": "0"}), "ok", ""),
        (check_variables({"JAX_DISABLE_JIT": "1"}), "warning", "unset JAX_DISABLE_JIT"),
    ],
)
def test_verdicts(check, verdict, remedy):
    assert check.verdict == verdict and remedy in check.remedy
    assert bool(check.remedy) == (verdict != "ok")


def test_the_cache_is_counted(tmp_path):
    (tmp_path / "a_program").write_bytes(b"x" * 2048)
    (tmp_path / SECONDS_FILE).write_text("{}")
    (tmp_path / ".lockfile").write_text("")
    (tmp_path / "a_program-atime").write_bytes(b"12345678")
    assert "1 programs, 2.0 KiB" in check_cache(tmp_path, None).found


@pytest.mark.parametrize("command", ["doctor", "env"])
def test_both_names_print_versions_and_checks(command, capsys):
    assert main([command]) == 0
    said = capsys.readouterr().out
    assert "- jax: " in said and "[  ok   ] accelerator: JAX computes on cpu." in said


def test_memory_says_how_a_gpu_gives_more_of_it():
    assert check_memory(None, 6 << 30, "set it").found == "unknown, 6.0 GiB usable on each device (set it)"
    assert "set it" not in check_memory(None, None, "set it").found


def test_a_wrong_check_shows_in_the_status(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "checks", lambda: iter([Check("disk", "wrong", "full", "free space")]))
    assert main(["doctor"]) == 1
    assert "[ wrong ] disk: full. Remedy: free space" in capsys.readouterr().out


def test_a_hidden_gpu_is_named():
    found = check_accelerator(backend="cpu", has_gpu=True, has_tpu=False, chosen=None, visible="")
    assert found.verdict == "warning" and found.remedy == "unset CUDA_VISIBLE_DEVICES"
    seen = check_accelerator(backend="cpu", has_gpu=True, has_tpu=False, chosen=None, visible="0")
    assert seen.verdict == "wrong" and "or the driver is too old" in seen.found


@pytest.mark.parametrize(
    ("made", "vendor", "expected"),
    [
        ("dev/accel0", "", True),
        ("dev/accel/accel0", "", False),  # a laptop's
        ("dev/vfio/0", "0x1ae0\n", True),
        ("dev/vfio/0", "0x8086\n", False),
        ("dev/null", "0x1ae0\n", False),
    ],
)
def test_what_a_tpu_is(tmp_path, made, vendor, expected):
    for name, content in ((made, ""), ("sys/bus/pci/devices/0000:00:04.0/vendor", vendor)):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert has_tpu(tmp_path) == expected


@pytest.mark.parametrize(
    ("said", "expected"),
    [("echo 'GPU 0: a card'", True), ("true", False), ("echo failed; exit 9", False), (None, False)],
)
def test_what_a_gpu_is(tmp_path, monkeypatch, said, expected):
    """The driver's program may be there without any."""
    if said is not None:
        (tmp_path / "nvidia-smi").write_text(f"#!/bin/sh\n{said}\n")
        (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert has_nvidia_gpu() == expected


def test_the_checks_change_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", None, raising=False)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "cache"))
    (found,) = [check for check in checks() if check.name == "compilation cache"]
    assert found.verdict == "ok" and "0 programs" in found.found and str(tmp_path / "cache") in found.found
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(VARIABLE, "off")
    (found,) = [check for check in checks() if check.name == "compilation cache"]
    assert found.verdict == "warning" and f"{VARIABLE} is off" in found.found

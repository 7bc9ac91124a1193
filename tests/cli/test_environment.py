# SPDX-License-Identifier: Apache-2.0
from pathlib import Path

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
)

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
        (check_cache(None, "off"), "warning", "unset JRL_COMPILATION_CACHE"),
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
    assert "1 programs, 2.0 KiB" in check_cache(tmp_path, None).found


@pytest.mark.parametrize("command", ["doctor", "env"])
def test_both_names_print_versions_and_checks(command, capsys):
    assert main([command]) == 0
    said = capsys.readouterr().out
    assert "- jax: " in said and "[  ok   ] accelerator: JAX computes on cpu." in said


def test_a_wrong_check_shows_in_the_status(monkeypatch, capsys):
    monkeypatch.setattr(doctor, "checks", lambda: iter([Check("disk", "wrong", "full", "free space")]))
    assert main(["doctor"]) == 1
    assert "[ wrong ] disk: full. Remedy: free space" in capsys.readouterr().out

# SPDX-License-Identifier: Apache-2.0
"""Which comparisons run where, the record of one, and how a worker answers; no peer is started."""

import importlib.util
import json
import shutil
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "compare.py"


@pytest.fixture
def compare(monkeypatch, tmp_path):
    """The script as a module; workers take a second (jrl) or two (the peer)."""
    spec = importlib.util.spec_from_file_location("compare_script", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_script", module)
    spec.loader.exec_module(module)

    class Worker:
        def __init__(self, python, command):
            self.seconds = 1.0 if command[0].endswith("_jrl.py") else 2.0

        def wait_until_ready(self):
            pass

        def measure(self):
            return self.seconds

        def stop(self):
            pass

    monkeypatch.setattr(module, "Worker", Worker)
    monkeypatch.setattr(module, "versions", lambda python, packages: dict.fromkeys(packages, python))
    return module


@pytest.fixture
def here(compare, monkeypatch):
    """What this script's own environment can import, to be filled by a test."""
    packages = set()
    monkeypatch.setattr(compare, "can_import", lambda python, names: packages.issuperset(names))
    return packages


def run(compare, monkeypatch, *flags):
    monkeypatch.setattr(sys, "argv", ["compare.py", *flags])
    compare.main()


def printed(capsys):
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


def test_a_record_says_when_and_with_which_versions(compare, here, monkeypatch, capsys, tmp_path):
    here.update(("torch", "transformers"))
    run(compare, monkeypatch, "generate", "--rounds", "3", "--peers", str(tmp_path))
    ((record,), _) = printed(capsys)
    assert record["date"] == datetime.now(UTC).strftime("%Y-%m-%d")
    assert set(record["versions"]) == {"jrl", "jax"}
    assert record["versions_peer"] == dict.fromkeys(("transformers", "torch"), sys.executable)
    assert (record["seconds"], record["seconds_peer"], record["ratio"]) == (1, 2, 2)


def test_the_newest_trl_of_this_environment_will_do(compare, here, monkeypatch, capsys, tmp_path):
    here.update(("torch", "transformers", "trl"))
    run(compare, monkeypatch, "sft", "dpo", "reward", "--peers", str(tmp_path / "none"))
    records, _ = printed(capsys)
    assert [record["versions_peer"]["trl"] for record in records] == [sys.executable] * 3


def test_an_installed_environment_comes_first(compare, here, monkeypatch, capsys, tmp_path):
    here.update(("torch", "transformers", "trl"))
    python = tmp_path / "trlnew" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    run(compare, monkeypatch, "sft", "--peers", str(tmp_path))
    ((record,), _) = printed(capsys)
    assert record["versions_peer"]["trl"] == str(python)


def test_without_a_name_what_cannot_run_is_left_out_and_said(compare, here, monkeypatch, capsys, tmp_path):
    here.update(("torch", "transformers"))
    run(compare, monkeypatch, "--peers", str(tmp_path))
    records, err = printed(capsys)
    with_transformers_alone = {"generate", "randomwalks"}
    assert {record["benchmark"].removeprefix("compare/") for record in records} == with_transformers_alone
    assert {line.partition(":")[0] for line in err.splitlines()} == set(
        compare.CASES
    ) - with_transformers_alone
    here.clear()
    run(compare, monkeypatch, "--peers", str(tmp_path))
    records, err = printed(capsys)
    assert not records and "generate: left out" in err


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ppo_iteration", "install.py trl074"),
        ("sft", "install.py trlnew"),
        ("generate", "transformers, torch"),
    ],
)
def test_a_named_case_that_cannot_run_says_what_it_needs(
    compare, here, monkeypatch, capsys, tmp_path, name, words
):
    here.update(("trl",))  # the oldest trl is another than that of this environment
    with pytest.raises(SystemExit):
        run(compare, monkeypatch, name, "--peers", str(tmp_path))
    assert words in capsys.readouterr().err


@pytest.fixture
def asked(monkeypatch):
    """The script as a module, untouched."""
    spec = importlib.util.spec_from_file_location("compare_asked", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "compare_asked", module)
    spec.loader.exec_module(module)
    return module


def test_what_can_be_imported_is_asked_of_the_interpreter(asked):
    assert asked.can_import(sys.executable, ("json", "math"))
    assert not asked.can_import(sys.executable, ("json", "no_such_module"))


def test_a_worker_needs_the_standard_library_alone_to_answer(asked, monkeypatch, tmp_path):
    """An interpreter without any installed package; a library that prints while it starts; a run of 50 ms."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" -S -E "$@"\n')
    python.chmod(0o755)
    for name in ("line_protocol.py", "sizes.py"):
        shutil.copy(asked.PEERS / name, tmp_path)
    work = "from line_protocol import answer\nfrom sizes import ROWS\nprint('hello')\nimport time\n"
    (tmp_path / "idle.py").write_text(f"{work}answer(lambda: time.sleep(0.05))\n")
    monkeypatch.setattr(asked, "PEERS", tmp_path)
    worker = asked.Worker(str(python), ("idle.py",))
    worker.wait_until_ready()
    assert all(0.05 <= worker.measure() < 30 for _ in range(2))
    worker._process.stdin.close()
    assert worker._process.wait(timeout=30) == 0
    worker._process.stdout.close()

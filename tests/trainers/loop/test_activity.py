# SPDX-License-Identifier: Apache-2.0
import json
import re
import time

import jax
import jax.numpy as jnp
import pytest

from jrl.trainers.loop.activity import SECONDS_FILE, Activity, says_what_takes_long
from jrl.trainers.loop.stopwatch import CompileCounter, Stopwatch


@pytest.fixture
def parts(tmp_path, monkeypatch):
    monkeypatch.setattr(type(jax.config), "jax_compilation_cache_dir", str(tmp_path), raising=False)
    stopwatch, compilations = Stopwatch(), CompileCounter()
    return stopwatch, compilations, lambda: Activity(stopwatch, compilations, "a model")


def test_the_innermost_part_of_the_stopwatch_is_named(parts):
    stopwatch, _, make = parts
    activity = make()
    assert activity.now() == "updating"
    with stopwatch("evaluation"):
        assert activity.now() == "evaluating, 0 s"
        with stopwatch("reward"):
            assert activity.now() == "waiting for the reward function, 0 s"
        assert activity.now() == "evaluating, 0 s"
    with stopwatch("own part"):
        assert activity.now() == "own part, 0 s"
    assert activity.now() == "updating"


def test_a_program_that_compiles_goes_first_and_its_time_is_remembered(parts, tmp_path):
    stopwatch, compilations, make = parts
    compilations.took["update"] = 38.2
    compilations.took["small"] = 0.2
    make().keep()
    assert json.loads((tmp_path / SECONDS_FILE).read_text()) == {"update of a model": 38.2}
    activity = make()
    compilations.running = "update", time.perf_counter() - 12
    with stopwatch("rollout"):
        assert activity.now() == "compiling the update, 12 s (38 s last time)"
    compilations.running = "elsewhere", time.perf_counter()
    assert activity.now() == "compiling elsewhere, 0 s"


@pytest.mark.parametrize("content", ["no JSON", "[1]", '{"a": "b"}'])
def test_times_that_cannot_be_read_are_only_not_known(parts, tmp_path, content):
    (tmp_path / SECONDS_FILE).write_text(content)
    assert parts[2]().now() == "updating"


def test_jax_tells_when_a_program_begins_and_how_long_it_took():
    def a_program_of_this_test(x):
        return x * 2 + 1

    with CompileCounter() as compilations:
        jax.jit(a_program_of_this_test)(jnp.ones(7)).block_until_ready()
    assert compilations.running is None and compilations.count >= 1
    assert 0 < compilations.took["a_program_of_this_test"] <= compilations.seconds


def test_what_takes_long_is_said_now_and_then(capsys):
    with says_what_takes_long("loading", quiet_seconds=0.02):
        time.sleep(0.1)
    said = capsys.readouterr().err.splitlines()
    assert said and all(re.fullmatch(r"still loading, \d+ s", line) for line in said)
    with says_what_takes_long("loading"):
        pass
    assert capsys.readouterr().err == ""

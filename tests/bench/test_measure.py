# SPDX-License-Identifier: Apache-2.0
"""Clocks, rates and records of the benchmarks."""

import json
import math
import re
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache
from transformers import T5Config

from jrl.bench import measure, models, suite
from jrl.bench.counts import Phase
from jrl.bench.measure import Machine, Timing, measure_machine, peak_bytes, time_calls
from jrl.bench.models import PRESETS, Options, Shapes, find_subject
from jrl.bench.suite import BENCHMARKS, run_benchmark
from jrl.bench.work import Work
from jrl.cli import main
from jrl.cli.bench import WHAT
from tests.trainers.runs import save_tiny_checkpoint

FIELDS = {
    *("benchmark", "model", "shapes", "options", "seconds", "rounds", "all_seconds", "tokens_per_second"),
    *(
        "samples_per_second",
        "flops",
        "bytes",
        "matrix_rate",
        "bandwidth",
        "floor_seconds",
        "floor_share",
        "mfu",
    ),
    *(
        "mfu_of",
        "bandwidth_share",
        "compile_seconds",
        "peak_bytes",
        "attention",
        "hardware",
        "versions",
        "date",
    ),
}
MACHINE = Machine(matrix_rate=1e11, bandwidth=1e10, peak_rate=None)


@pytest.fixture
def tiny(tmp_path):
    return save_tiny_checkpoint(tmp_path / "tiny")


@pytest.fixture
def _known_machine(monkeypatch):
    monkeypatch.setattr(suite, "measure_machine", lambda dtype: MACHINE)


def test_the_first_call_is_no_part_of_the_median():
    calls = []

    def call():
        calls.append(None)
        time.sleep(0.05 if len(calls) == 1 else 0.001)

    timing = time_calls(call, rounds=3)
    assert len(calls) == 4 and len(timing.seconds) == 3
    assert timing.first >= 0.05 > timing.median
    assert timing.compile_seconds == timing.first - timing.median


def test_the_median_is_of_the_rounds():
    assert Timing((3.0, 1.0, 2.0), first=10.0).median == 2.0


@pytest.mark.parametrize("counts", [dict(rounds=0), dict(warmup=0)])
def test_no_rounds_are_refused(counts):
    with pytest.raises(ValueError, match="`rounds` and `warmup` must be at least 1"):
        time_calls(lambda: None, **counts)


def test_results_are_waited_for(monkeypatch):
    waited = []
    monkeypatch.setattr(measure.jax, "block_until_ready", waited.append)
    time_calls(lambda: "arrays", rounds=2)
    assert waited == ["arrays"] * 3


@pytest.mark.slow
def test_the_machine_has_rates_that_a_machine_can_have():
    machine = measure_machine("float32")
    assert 1e9 < machine.matrix_rate < 1e16 and 1e8 < machine.bandwidth < 1e14
    assert measure_machine("float32") is machine


def test_peak_memory_counts_what_was_in_use():
    kept = jnp.ones((2**22,))
    assert peak_bytes() > kept.nbytes


def test_every_name_of_the_command_is_a_benchmark():
    assert tuple(BENCHMARKS) == WHAT


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_what_they_are_called(name):
    expected = {
        "randomwalks": 1_655_280,  # as trlX's example counts them
        "gpt2-124m": 124_439_808,
        "qwen2-0.5b": 494_032_768,
        "llama-1b": 1_235_814_400,
        "llama-8b": 8_030_261_248,
    }
    entries = find_subject(name).lm.entries()
    assert sum(math.prod(entry.shape) for entry in entries) == expected[name]


def test_an_encoder_is_refused(tmp_path):
    T5Config(d_model=8, d_kv=2, d_ff=8, num_layers=1, num_heads=2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="must be a decoder, got t5"):
        find_subject(tmp_path)


def test_rows_longer_than_the_model_are_refused(tiny, _known_machine):
    with pytest.raises(ValueError, match=r"rows of 200 tokens, but .* has 128 positions"):
        run_benchmark("decode", find_subject(tiny), Shapes(prompt=100, response=100))


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--num-layers-unfrozen", "1"], ["--lora-rank", "2", "--remat"]])
def test_every_benchmark_of_a_checkpoint(tiny, capsys, options):
    shapes = ["--rows", "4", "--prompt", "4", "--response", "4", "--batch-size", "4", "--minibatch-size", "2"]
    assert main(["bench", "--model", tiny, "--what", ",".join(WHAT), *shapes, "--rounds", "2", *options]) == 0
    records = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [record["benchmark"] for record in records] == list(WHAT)
    for record in records:
        parts = {name for name in record if name.startswith("seconds_")}
        assert set(record) - parts == FIELDS
        assert parts == (
            {"seconds_rollout", "seconds_decode", "seconds_reward", "seconds_update"}
            if record["benchmark"] == "ppo_iteration"
            else set()
        )
        assert record["flops"] > 0 and record["bytes"] > 0
        assert 0 < record["seconds"] <= max(record["all_seconds"])
        assert len(record["all_seconds"]) == 2


@pytest.mark.slow
def test_a_record_is_what_its_parts_say(tiny, _known_machine, monkeypatch):
    monkeypatch.setattr(suite, "time_calls", lambda call, rounds: Timing((0.5,) * rounds, first=2.0))
    record = run_benchmark("decode", find_subject(tiny), Shapes(rows=4, prompt=4, response=4), rounds=5)
    assert set(record) == FIELDS
    assert record["tokens_per_second"] == 4 * 4 / 0.5 and record["samples_per_second"] == 8
    assert record["mfu"] == round(record["flops"] / 0.5 / 1e11, 4) and record["mfu_of"] == "measured rate"
    assert record["compile_seconds"] == 1.5


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--what", "decode,fly"], "--what must name some of .*, got 'fly'"),
        (["--rows", "0"], "--rows must be at least 1, got 0"),
        (
            ["--batch-size", "6", "--minibatch-size", "4"],
            "--minibatch-size must divide --batch-size = 6, got 4",
        ),
        (["--beta", "1"], "unknown flags"),
    ],
)
def test_mistaken_flags_are_named(flags, message, capsys):
    assert main(["bench", "--model", "randomwalks", *flags]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_options_name_the_adapter():
    assert Options().peft_config is None
    assert Options(lora_rank=4).split["adapter"].r == 4


def test_a_step_takes_all_rows_where_minibatches_do_not_divide_them():
    assert Shapes(rows=128, minibatch_size=100).step_minibatch_size == 128
    assert Shapes(rows=32, minibatch_size=8).step_minibatch_size == 8


@pytest.mark.parametrize(
    ("kind", "rate"),
    [
        ("NVIDIA H200", 989.4e12),
        ("NVIDIA H100 80GB HBM3", 989.4e12),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("TPU v5 lite", 197e12),
        ("TPU v5", 459e12),
    ],
)
def test_the_data_sheet_is_read_by_the_whole_name_of_the_device(monkeypatch, kind, rate):
    monkeypatch.setattr(measure.jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    assert measure._peak_rate(jnp.dtype("bfloat16")) == rate
    assert measure._peak_rate(jnp.dtype("float32")) is None


@pytest.fixture
def order(monkeypatch):
    """What `run_benchmark` does, in its order; the work itself is one small program."""
    done = []

    def probe(dtype):
        done.append("probe")
        return MACHINE

    def peak():
        done.append("peak")
        return 7

    def make(subject, shapes):
        def call():
            done.append(("call", jax.config.jax_enable_compilation_cache, is_cache_used()))

        return Work(call, tokens=1, samples=1, phases=(Phase(1e9, 1e9),))

    monkeypatch.setattr(suite, "measure_machine", probe)
    monkeypatch.setattr(suite, "peak_bytes", peak)
    monkeypatch.setitem(suite.BENCHMARKS, "decode", make)
    return done


def is_cache_used():
    return compilation_cache.is_cache_used(jax.devices()[0].client)


def test_the_probes_of_the_machine_are_no_part_of_the_peak(tiny, order):
    record = run_benchmark("decode", find_subject(tiny), Shapes(rows=1, prompt=1, response=2), rounds=1)
    assert [word if isinstance(word, str) else word[0] for word in order] == ["call", "call", "peak", "probe"]
    assert record["peak_bytes"] == 7


def test_no_program_comes_from_the_compilation_cache(tiny, order, tmp_path):
    """JAX remembers whether it has a cache: a run before the benchmark must not leave it on."""
    before = jax.config.jax_compilation_cache_dir
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    compilation_cache.reset_cache()
    try:
        assert is_cache_used()
        run_benchmark("decode", find_subject(tiny), Shapes(rows=1, prompt=1, response=2), rounds=1)
        assert [word[1:] for word in order if word[0] == "call"] == [(False, False)] * 2
        assert is_cache_used()
    finally:
        jax.config.update("jax_compilation_cache_dir", before)
        compilation_cache.reset_cache()


def test_presets_shapes_fit_their_models():
    for name, preset in PRESETS.items():
        assert preset.shapes.length <= models.find_subject(name).lm.max_positions
        assert preset.shapes.batch_size % preset.shapes.minibatch_size == 0

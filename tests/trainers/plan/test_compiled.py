# SPDX-License-Identifier: Apache-2.0
"""Compiled plans: here for the CPU that compiles, whose programs can also be run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import yaml

import jrl
from jrl.cli import main
from jrl.mesh import make_mesh
from jrl.models.cost import device_bytes
from jrl.trainers.plan import compiled, targets
from jrl.trainers.plan.compiled import CompiledPlan, CompiledProgram, compile_run
from jrl.trainers.plan.hlo import Collective, Work
from jrl.trainers.plan.hlo_text import Array
from jrl.trainers.plan.targets import Target, parse_target
from jrl.trainers.programs import Program
from tests.trainers.runs import count_vowels, grpo_config, ppo_config


class Here(Target):
    """The device of the tests."""

    def devices(self) -> Sequence[Any]:
        return jax.devices()[:1]


def here(memory_bytes: int = 1 << 30) -> Target:
    known = parse_target("gpu:h100")
    fields = {name: value for name, value in vars(known).items()}
    return Here(**fields | {"name": "cpu:here", "platform": "cpu", "memory_bytes": memory_bytes})


def test_a_plan_holds_what_the_run_holds(checkpoint: str, tmp_path: Path) -> None:
    config = ppo_config(checkpoint, tmp_path / "run")
    found = compile_run(config, here(), make_mesh(devices=here().devices()))
    trainer = jrl.PPOTrainer(config, reward_fn=count_vowels)
    held = device_bytes((trainer.state, trainer.frozen, trainer.ref_params))
    assert found.held_bytes == held
    assert [program.name for program in found.programs] == ["sample", "score", "update"]
    sample, score, update = found.programs
    assert update.held_bytes == device_bytes((trainer.state, trainer.frozen))
    assert score.held_bytes == device_bytes((trainer.params, trainer.frozen, trainer.ref_params))
    assert sample.held_bytes == device_bytes((trainer.params, trainer.frozen))
    assert found.total == held + max(program.own_bytes for program in found.programs)
    # Four steps of two microbatches a pass, two passes, against one: the loops are counted as often as they run.
    assert update.flops > 4 * score.flops > 0
    text = found.table()
    assert "cpu:here" in text and "update, compiled in" in text and "fits into 1.0 GiB" in text
    assert "a call of all rounds takes at least" in text and ": memory " in text and "products " in text
    assert text.count("its kernels one after another") == 3 and "% of it for memory" in text


def test_the_least_time_of_a_call_is_by_the_data_sheet() -> None:
    """8 rounds read 3.35 GB each; in each a ring of 4 gathers 2 MB, and once it sums 4 MB."""
    gather = Collective("all-gather", (Array("bf16", (1_000_000,)),), frozenset({"fsdp"}), 4, (None,), "")
    total = Collective("all-reduce", (Array("f32", (1_000_000,)),), frozenset({"data"}), 4, (), "")
    program = CompiledProgram(
        name="sample",
        seconds=1.0,
        held_bytes=0,
        given_bytes=0,
        argument_bytes=0,
        result_bytes=0,
        temporary_bytes=0,
        flops=989e12,
        work=(Work(989e12, 335_000_000_000, 1), Work(989e9, 33_500_000_000, 8)),
        collectives=(gather, total),
        round_bytes=3_350_000_000,
        rounds=8,
        kernels={},
        num_sorts=0,
        largest=(),
    )
    target = parse_target("gpu:h100x4")
    assert program.sent_bytes == 8 * 1_500_000 + 6_000_000
    found = program.least_seconds(target, "bfloat16")
    assert found == pytest.approx({"products": 1.0, "memory": 0.008, "links": 18e6 / 450e9})
    assert "products" not in program.least_seconds(target, "float8_e4m3")
    # One kernel computes for a second; another moves for 10 ms in each round, and computes for 1 ms.
    assert program.kernel_seconds(target, "bfloat16") == pytest.approx((1.08, 0.08))
    assert program.kernel_seconds(target, "float8_e4m3") == pytest.approx((0.18, 0.18))
    assert replace(program, round_bytes=None).least_seconds(target, "bfloat16")["memory"] == 0


@pytest.fixture(scope="module")
def updating(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> CompiledPlan:
    """A plan of an update alone."""
    config = grpo_config(checkpoint, tmp_path_factory.mktemp("run"))
    return compile_run(config, here(), make_mesh(devices=here().devices()), only=["update"])


@pytest.mark.parametrize(
    ("share", "fits", "is_told"), [(0.74, True, False), (0.94, True, True), (0.96, False, False)]
)
def test_a_gpu_gives_programs_a_part_of_its_memory(
    updating: CompiledPlan, share: float, fits: bool, is_told: bool
) -> None:
    target = replace(updating.target, platform="gpu", memory_bytes=int(updating.total / share))
    found = replace(updating, target=target)
    assert found.fits is fits
    assert ("XLA_CLIENT_MEM_FRACTION" in found.table()) is is_told
    assert replace(found, target=replace(target, platform="tpu")).fits


def test_arguments_take_as_much_as_the_compiler_lays_them_out(updating: CompiledPlan) -> None:
    """A program that does not read all of them has less than their shapes, which lie there all the same."""
    found = updating
    (update,) = found.programs
    shapes = update.held_bytes + update.given_bytes
    for argument_bytes, padding in ((shapes + 1000, 1000), (shapes - 1000, 0)):
        laid_out = replace(update, argument_bytes=argument_bytes)
        total = replace(found, programs=(laid_out,)).total
        assert total == found.held_bytes + update.own_bytes + padding


@pytest.mark.slow
def test_a_reference_that_the_update_reads_is_held_once(checkpoint: str, tmp_path: Path) -> None:
    method = {"beta": 0.1, "kl_estimator": "full"}
    config = grpo_config(checkpoint, tmp_path / "run", method=method, model={"num_layers_unfrozen": 1})
    found, scored = (
        compile_run(each, here(), make_mesh(devices=here().devices()), only=["update"])
        for each in (config, config.evolve(method={"kl_estimator": "k2"}))
    )
    trainer = jrl.OnlineTrainer(config, reward_fn=count_vowels)
    reference = device_bytes(trainer.ref_params)
    assert found.held_bytes == scored.held_bytes
    assert found.held_bytes == device_bytes((trainer.state, trainer.frozen)) + reference
    (update,), (other,) = found.programs, scored.programs
    assert update.held_bytes == found.held_bytes == other.held_bytes + reference
    assert update.given_bytes == other.given_bytes
    # A pass through the branch, and one more through the head of either model.
    assert update.flops > 1.2 * other.flops


def test_programs_can_be_chosen_and_saved(checkpoint: str, tmp_path: Path) -> None:
    config = grpo_config(checkpoint, tmp_path / "run")
    told: list[str] = []
    found = compile_run(
        config,
        here(),
        make_mesh(devices=here().devices()),
        only=["update"],
        save=tmp_path / "saved",
        tell=told.append,
    )
    assert told == [program.name for program in found.programs] == ["update"]
    assert (tmp_path / "saved" / "update.bin").stat().st_size > 10_000
    with pytest.raises(
        ValueError, match=r"`--programs` must be of \['sample', 'score', 'update'\], got \['learn'\]"
    ):
        compile_run(config, here(), make_mesh(devices=here().devices()), only=["learn"])


@pytest.fixture
def recipe(checkpoint: str, tmp_path: Path) -> str:
    path = tmp_path / "recipe.yaml"
    config = grpo_config(checkpoint, tmp_path / "run")
    path.write_text(yaml.safe_dump(config.to_dict()), encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("memory", "status"), [(1 << 30, 0), (1 << 10, 1)])
def test_the_status_says_whether_a_run_fits(
    recipe: str, memory: int, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "parse_target", lambda text: replace(here(memory), name=text))
    command = ["plan", "--config", recipe, "--compile", "gpu:h100", "--programs", "update"]
    assert main(command) == status
    printed = capsys.readouterr()
    assert "compiled for gpu:h100" in printed.out and "compiling update" in printed.err
    assert ("does not fit into 1.0 KiB" in printed.out) == bool(status)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--save", "x"], "--save needs --compile"),
        (["--programs", "update"], "--programs needs --compile"),
        (["--compile", "gpu:h100", "--hbm", "80"], "--hbm must not be given with --compile"),
        (["--target", "gpu:h100", "--devices", "2"], "--devices must not be given with --target"),
        (["--target", "gpu:h100", "--compile", "gpu:h100"], "--target must not be given with --compile"),
        (["--target", "gpu:gtx"], "must name one of the chips"),
        (["--compile", "gpu:h100", "--mesh", "data=3"], "must multiply to the number of devices, 1"),
        (["--compile", "tpu:v5e:2x4"], r"jrl-post\[plan-tpu\]"),
    ],
)
def test_what_cannot_be_compiled_is_refused(
    recipe: str, flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--config", recipe, *flags]) != 0
    assert message.replace("\\", "") in capsys.readouterr().err


class Stubborn:
    """A lowered program that compiles with other kernels alone."""

    def __init__(self, lowered: Any, message: str) -> None:
        self.lowered, self.message, self.options = lowered, message, list[Any]()

    def lower(self, *_: Any) -> Stubborn:
        return self

    def compile(self, compiler_options: Any = None) -> Any:
        self.options.append(compiler_options)
        if compiler_options is None:
            raise jax.errors.JaxRuntimeError(self.message)
        return self.lowered.compile()


def test_a_product_without_tiles_is_left_to_a_library() -> None:
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))
    program = Stubborn(lowered, "INTERNAL: Couldn't find output tile sizes that satisfy hlo: %dot.676")
    with pytest.warns(UserWarning, match="update is compiled with all products by cuBLAS"):
        found, reported = compiled._compiled(Program("update", program, (), held=()), is_tpu=False)
    assert program.options == [None, {"xla_gpu_enable_triton_gemm": False}]
    assert found.as_text() and reported is None
    other = Stubborn(lowered, "INTERNAL: something else")
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        compiled._compiled(Program("update", other, (), held=()), is_tpu=False)


class Reporting(Stubborn):
    """A lowered program of a TPU, whose compiler writes this report; "": none."""

    def compile(self, compiler_options: Any = None) -> Any:
        folder = Path(compiler_options["xla_dump_to"])
        if self.message:
            (folder / "module_0293.jit_update.after_optimizations-memory-usage-report.txt").write_text(
                self.message, encoding="utf-8"
            )
        return self.lowered.compile()


REPORT = """Memory Space: default (color=0)
Total bytes: 135680512 (129.39MiB)
  cumulative_size;       size;       offset; used_by_n_values; shapes_list

Memory Space: vmem (color=1)
Total bytes: 217440512 (207.37MiB)
"""


def test_what_a_tpu_reserves_is_what_its_compiler_reports() -> None:
    """On-chip memory is not of it."""
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))
    program = Reporting(lowered, REPORT)
    found, reported = compiled._compiled(Program("update", program, (), held=()), is_tpu=True)
    assert found.as_text() and reported == 135680512


def test_a_tpu_program_without_a_report_is_warned_of() -> None:
    lowered = jax.jit(lambda x: x @ x).lower(jnp.ones((4, 4)))
    program = Reporting(lowered, "")
    with pytest.warns(UserWarning, match="no report on the memory of update"):
        found, reported = compiled._compiled(Program("update", program, (), held=()), is_tpu=True)
    assert found.as_text() and reported is None


def test_a_program_that_the_compiler_refuses_does_not_fit(
    checkpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 20 GiB exceed the 16 of the device\nmore")

    monkeypatch.setattr(compiled, "_compile", refuse)
    config, mesh = ppo_config(checkpoint, tmp_path / "run"), make_mesh(devices=here().devices())
    found = compile_run(config, here(), mesh, only=["score"])
    assert not found.fits and list(found.too_large) == ["score"]
    assert "score does not fit: RESOURCE_EXHAUSTED: 20 GiB exceed the 16 of the device\n" in found.table()

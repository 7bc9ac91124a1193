# SPDX-License-Identifier: Apache-2.0
"""A run's programs, compiled for absent devices: what the compiler reserves, sends and calls.

`jax.experimental.topologies` describes devices to a compiler that is on this machine; nothing is run. What comes out is
the executable that a job on those devices would build, but for kernels of products that a device measures before it
chooses; where XLA has none to offer without measuring, cuBLAS's take their place, and a warning says so.
"""

from __future__ import annotations

import math
import re
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
from jax.experimental import serialize_executable
from jax.sharding import Mesh

from jrl.device_memory import GPU_ADVICE, is_worth_more
from jrl.models.cost import format_bytes
from jrl.trainers.config.method import footprint_of
from jrl.trainers.config.registry import get_trainer
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.setup import compute_dtype
from jrl.trainers.plan.hlo import (
    Collective,
    Work,
    collectives,
    kernels,
    largest_arrays,
    loops,
    num_flops,
    num_sorts,
    work,
)
from jrl.trainers.plan.model_part import kept_reference, model_part
from jrl.trainers.plan.run_plan import RunPlan, plan_run
from jrl.trainers.plan.targets import Target
from jrl.trainers.programs import Program, placed_bytes, weights_on

_LIBRARIES = re.compile("cudnn|cublas|cufft|tpu_custom_call|mosaic")
"""Kernels that a library brings; the compilers' own helpers are custom calls, too."""
_NO_TILES = "Couldn't find output tile sizes"
_REPORT = re.compile(r"Memory Space: default \(color=0\)\nTotal bytes: (\d+) ")
"""Head of the report of XLA for TPUs on what a program takes of a device's memory, arguments among it."""


@dataclass(frozen=True)
class CompiledProgram:
    """Compiler's figures of a program; bytes and FLOPs are those of one device.

    Attributes:
      name: "sample", "score", "update".
      seconds: That compiling it took.
      held_bytes: Of the arguments that the run holds anyway: parameters, optimizer, reference; by their shapes.
      given_bytes: Of the other arguments, by their shapes.
      argument_bytes: Of all arguments, as the compiler lays them out; it leaves out what the program does not read.
      result_bytes: Of what it returns, without what takes the place of an argument.
      temporary_bytes: That it reserves beside them.
      flops: Of its matrix products, loops counted as often as they run.
      work: What each of its kernels computes and moves.
      collectives: What it sends.
      round_bytes: That a token's round of sampling reads of weights and cache; None: there is no such loop.
      rounds: Of a loop that may end early, if it does not, as in `jrl.trainers.programs.Program`.
      kernels: Calls of kernels from libraries, by name.
      num_sorts: Sorts.
      largest: Kinds, shapes and bytes of the largest arrays.
    """

    name: str
    seconds: float
    held_bytes: int
    given_bytes: int
    argument_bytes: int
    result_bytes: int
    temporary_bytes: int
    flops: float
    work: tuple[Work, ...]
    collectives: tuple[Collective, ...]
    round_bytes: int | None
    rounds: int
    kernels: dict[str, int]
    num_sorts: int
    largest: tuple[tuple[str, tuple[int, ...], int], ...]

    @property
    def own_bytes(self) -> int:
        """Bytes that a call takes beside what the run holds."""
        return self.given_bytes + self.result_bytes + self.temporary_bytes

    @property
    def padding_bytes(self) -> int:
        """Bytes by which the compiler's layout of the arguments is larger than their shapes: TPUs fill their tiles."""
        return max(self.argument_bytes - self.held_bytes - self.given_bytes, 0)

    @property
    def moved_bytes(self) -> int:
        """Bytes of weights and cache that all rounds of sampling read; 0 elsewhere, where products take the time."""
        return self.rounds * (self.round_bytes or 0)

    @property
    def sent_bytes(self) -> int:
        """Bytes that a device sends, loops counted as often as they run."""
        return sum(
            one.sent_bytes * math.prod(self.rounds if count is None else count for count in one.place)
            for one in self.collectives
        )

    def least_seconds(self, target: Target, dtype: str) -> dict[str, float]:
        """Seconds of a call at the rates of the data sheet, if nothing else took any and no loop ended early.

        Products, memory and links work side by side, so that the call takes at least the longest of them.

        Args:
          target: The devices.
          dtype: Of the products' operands.
        Returns:
          Seconds by "products", "memory" and "links", without those whose rate is not known.
        """
        found = {"memory": self.moved_bytes / target.memory_rate}
        if dtype in target.matrix_flops:
            found["products"] = self.flops / target.matrix_flops[dtype]
        if target.link_rate is not None:
            found["links"] = self.sent_bytes / target.link_rate
        return found

    def kernel_seconds(self, target: Target, dtype: str) -> tuple[float, float]:
        """Seconds of a call's kernels one after another, each as long as its products or its memory takes.

        Starting a kernel takes nothing here, products have the data sheet's peak rate, and what a kernel finds in a
        cache of the chip counts as moved. Kernels of a TPU that fetch ahead lie beside others, and count as if alone.

        Args:
          target: The devices.
          dtype: Of the products' operands; one whose rate is not known takes no time.
        Returns:
          (seconds, those of them in kernels that take longer to move than to compute).
        """
        rate = target.matrix_flops.get(dtype, math.inf)
        total = bound = 0.0
        for kernel in self.work:
            products, memory = kernel.flops / rate, kernel.num_bytes / target.memory_rate
            total += kernel.rounds * max(products, memory)
            bound += kernel.rounds * memory if memory > products else 0.0
        return total, bound


@dataclass(frozen=True)
class CompiledPlan:
    """The programs of a run on a target.

    Attributes:
      target: The devices.
      planned: From shapes alone.
      held_bytes: That lie on a device all the time.
      dtype: Of the computation.
      programs: In the order in which an iteration calls them.
      too_large: Programs that the compiler refused for want of memory, with what it said.
    """

    target: Target
    planned: RunPlan
    held_bytes: int
    dtype: str
    programs: tuple[CompiledProgram, ...]
    too_large: Mapping[str, str]

    @property
    def total(self) -> int:
        """Bytes of one device at the fullest moment."""
        taken = (program.own_bytes + program.padding_bytes for program in self.programs)
        return self.held_bytes + max(taken, default=0)

    @property
    def fits(self) -> bool:
        """True where programs may have as much of a device's memory."""
        return not self.too_large and self.total <= self.target.usable_bytes

    def table(self) -> str:
        """Everything in lines, with what was planned beside what is reserved."""
        planned = self.planned
        axes = ", ".join(f"{axis}={size}" for axis, size in planned.mesh.items())
        lines = [
            f"compiled for {self.target.name} ({axes})",
            f"{'held on each device':<46}{_size(self.held_bytes)}, planned {format_bytes(sum(planned.held.values()))}",
        ]
        own = planned.program_bytes
        for program in self.programs:
            beside = f", planned {format_bytes(own[program.name])}" if program.name in own else ""
            lines += ["", f"{program.name}, compiled in {program.seconds:.0f} s"]
            lines += [f"  {'taken by a call beside it':<44}{_size(program.own_bytes)}{beside}"]
            lines += _described(program)
            seconds = program.least_seconds(self.target, self.dtype)
            parts = ", ".join(f"{name} {_time(value)}" for name, value in seconds.items() if value)
            if parts:
                lines.append(
                    f"  {'a call of all rounds takes at least':<44}{_time(max(seconds.values())):>12}: {parts}"
                )
            total, bound = program.kernel_seconds(self.target, self.dtype)
            if total:
                waiting = f"{bound / total:.0%} of it for memory"
                lines.append(f"  {'its kernels one after another':<44}{_time(total):>12}: {waiting}")
        lines += [f"\n{name} does not fit: {said}" for name, said in self.too_large.items()]
        verdict = "fits" if self.fits else "does not fit"
        usable = self.target.usable_bytes
        lines += ["", f"{'memory of each device, at most':<46}{_size(self.total)}"]
        lines.append(f"{verdict} into {format_bytes(usable)} ({self.total / usable:.0%})")
        if self.target.platform == "gpu" and is_worth_more(self.total, self.target.memory_bytes):
            lines.append(GPU_ADVICE)
        return "\n".join(lines)


def compile_run(
    config: TRLConfig,
    target: Target,
    mesh: Mesh,
    *,
    only: Collection[str] = (),
    save: Path | None = None,
    tell: Callable[[str], None] = lambda name: None,
) -> CompiledPlan:
    """Compiles the programs of a recipe; of its model only the config files are read.

    Args:
      config: The run's configuration; its own `train.mesh` is not looked at.
      target: Where it would run.
      mesh: Of the target's devices.
      only: Names of programs; empty: all.
      save: Folder for the executables, `<name>.bin` each, as `jax.experimental.serialize_executable` writes them, and
        for their optimized HLO, `<name>.hlo.txt`.
      tell: Called with a program's name before it is compiled.
    Raises:
      ValueError: If the configuration does not describe such a run, or a name is none of its programs.
    """
    config.validate()
    with jax.set_mesh(mesh):
        planned = plan_run(config, mesh.abstract_mesh)
        programs, held = _programs(config, mesh)
        unknown = set(only) - {program.name for program in programs}
        if unknown:
            names = [program.name for program in programs]
            raise ValueError(f"`--programs` must be of {names}, got {sorted(unknown)}.")
        found, too_large = [], dict[str, str]()
        for program in programs:
            if only and program.name not in only:
                continue
            tell(program.name)
            try:
                found.append(_compile(program, mesh, save=save))
            except jax.errors.JaxRuntimeError as error:
                if "RESOURCE_EXHAUSTED" not in str(error):
                    raise
                too_large[program.name] = str(error).partition("\n")[0]
        dtype = compute_dtype(config)
    return CompiledPlan(target, planned, held, dtype, tuple(found), too_large)


def _programs(config: TRLConfig, mesh: Mesh) -> tuple[list[Program], int]:
    """(the programs of a run, bytes of what it holds on each device)."""
    footprint = footprint_of(config)
    if footprint is None:
        raise ValueError(
            f"`method.name` must be that of an algorithm that `jrl plan` knows, got {config.method.name!r}."
        )
    model = model_part(config, mesh.abstract_mesh, footprint, attends_as_configured=True)
    programs = get_trainer(config.train.trainer).programs(config, model, mesh)
    update = next(program for program in programs if program.name == "update")
    reference = weights_on(mesh, kept_reference(model, footprint))
    return programs, placed_bytes(update.arguments[:2]) + placed_bytes(reference)


def _compile(program: Program, mesh: Mesh, *, save: Path | None) -> CompiledProgram:
    began = time.perf_counter()
    compiled, reported_bytes = _compiled(program, is_tpu=mesh.devices.flat[0].platform == "tpu")
    seconds = time.perf_counter() - began
    memory, text = compiled.memory_analysis(), compiled.as_text()
    result_bytes = memory.output_size_in_bytes - memory.alias_size_in_bytes
    temporary_bytes = memory.temp_size_in_bytes
    if reported_bytes is not None:
        temporary_bytes = reported_bytes - memory.argument_size_in_bytes - result_bytes
    if save is not None:
        _save(compiled, text, save, program.name)
    given_bytes = placed_bytes(program.given)
    rounds = [loop.round_bytes for loop in loops(text) if loop.trips is None and not loop.place]
    return CompiledProgram(
        name=program.name,
        seconds=seconds,
        held_bytes=placed_bytes(program.arguments) - given_bytes,
        given_bytes=given_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        result_bytes=result_bytes,
        temporary_bytes=temporary_bytes,
        flops=num_flops(text, program.rounds),
        work=tuple(work(text, program.rounds)),
        collectives=tuple(collectives(text, mesh)),
        round_bytes=max(rounds) if rounds and program.name == "sample" else None,
        rounds=program.rounds,
        kernels={name: count for name, count in kernels(text).items() if _LIBRARIES.search(name)},
        num_sorts=num_sorts(text),
        largest=tuple(largest_arrays(text, 3)),
    )


def _compiled(program: Program, *, is_tpu: bool) -> tuple[Any, int | None]:
    """(the executable, bytes that it takes of a device by XLA's report, arguments among them; None without a report).

    Without a GPU, XLA takes default tiles for each product that it fuses, and ends where they do not fit
    (jax-ml/jax#34010); with one it measures several, and leaves those out.
    """
    lowered = program.function.lower(*program.arguments)
    if is_tpu:
        return _compiled_for_tpu(lowered, program.name)
    try:
        return lowered.compile(), None
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
    warnings.warn(
        f"{program.name} is compiled with all products by cuBLAS: XLA's default tiles do not fit one that it fuses.",
        stacklevel=2,
    )
    return lowered.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}), None


def _compiled_for_tpu(lowered: Any, name: str) -> tuple[Any, int | None]:
    """(the executable, bytes that XLA reports for it; None, with a warning, where there is no report).

    The temporary bytes of `memory_analysis` are more than a TPU's compiler holds against the memory of a device: the
    sum that it names when it refuses a program is that of its report, which it writes among its dumps alone.
    """
    with tempfile.TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        reports = [path.read_text("utf-8") for path in Path(folder).glob("*memory-usage-report.txt")]
    found = [int(match[1]) for match in map(_REPORT.match, reports) if match]
    if found:
        return compiled, max(found)
    warnings.warn(
        f"XLA wrote no report on the memory of {name}, as another version of libtpu may do. What it reserves is taken "
        "from JAX's `memory_analysis`, which on TPUs is too much.",
        stacklevel=2,
    )
    return compiled, None


def _save(compiled: Any, text: str, folder: Path, name: str) -> None:
    """Writes an executable and its HLO."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.hlo.txt").write_text(text, encoding="utf-8")
    try:
        content = serialize_executable.serialize(compiled)[0]
    except (AttributeError, TypeError, ValueError) as error:
        warnings.warn(
            f"The executable of {name} cannot be saved, its HLO is: JAX cannot serialize what a kernel of it brings "
            f"({error}).",
            stacklevel=2,
        )
        return
    (folder / f"{name}.bin").write_bytes(content)


def _described(program: CompiledProgram) -> list[str]:
    """Lines of a program."""
    lines = [
        f"  {'arguments that the run does not hold':<44}{_size(program.given_bytes)}",
        f"  {'all arguments, as the compiler lays them out':<44}{_size(program.argument_bytes)}",
        f"  {'results':<44}{_size(program.result_bytes)}",
        f"  {'reserved while it runs':<44}{_size(program.temporary_bytes)}",
        f"  {'FLOPs of its matrix products':<44}{program.flops:>12.3g}",
    ]
    for (kind, axes, place), (count, sent) in _by_place(program.collectives).items():
        lines.append(f"  {f'{count} {kind} over {axes}, {place}':<44}{_size(sent)}")
    lines += [f"  {f'{count} calls of {name}':<44}" for name, count in program.kernels.items()]
    if program.round_bytes is not None:
        lines.append(f"  {'read of weights and cache for each token':<44}{_size(program.round_bytes)}")
    for dtype, shape, size in program.largest:
        lines.append(f"  {f'array {dtype}{list(shape)}':<44}{_size(size)}")
    if program.num_sorts:
        lines.append(f"  {program.num_sorts} sorts")
    return [line.rstrip() for line in lines]


def _by_place(found: Sequence[Collective]) -> dict[tuple[str, str, str], tuple[int, int]]:
    """(kind, axes, place) → (how many, bytes that a device sends in one round)."""
    counts, sent = Counter[tuple[str, str, str]](), Counter[tuple[str, str, str]]()
    for one in found:
        rounds = " x ".join("?" if count is None else str(count) for count in one.place)
        key = one.kind, "+".join(sorted(one.axes)), f"in a loop of {rounds}" if rounds else "once"
        counts[key] += 1
        sent[key] += one.sent_bytes
    return {key: (counts[key], sent[key]) for key in counts}


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{1e3 * seconds:.2g} ms"


def _size(num_bytes: int) -> str:
    return f"{format_bytes(num_bytes):>12}"

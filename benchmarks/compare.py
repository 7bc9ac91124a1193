# SPDX-License-Identifier: Apache-2.0
"""jrl and its peers at the same work, in turn on the same machine: A B A B ..., each in a process of its own.

    python benchmarks/peers/install.py                   # once: the peers' virtual environments
    python benchmarks/compare.py ppo_iteration           # or any other; unnamed, all but those that run by name alone

Prints one JSON line a case: median seconds of both, and their ratio, which is how many times as fast jrl is. Workers
are the scripts of `benchmarks/peers/`; each has warmed up before the first round. trlX is in no package registry, so
there is no case of it: `randomwalks` has the arithmetic of its iteration in plain torch, without its trainer, and
`benchmarks/randomwalks.py` prints jrl's figure beside the one once recorded for trlX.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PEERS = ROOT / "benchmarks" / "peers"
GPT2 = "GPT-2 124M, float32, random weights"


@dataclass(frozen=True)
class Case:
    """One comparison.

    Attributes:
      ours: Worker of jrl and its flags.
      peer: The other worker and its flags.
      environment: Of install.py, where the peer is installed; None: in the environment that runs this script.
      here_too: Whether the environment that runs this script will do as well, if it has the packages.
      packages: Of the peer, whose versions are printed.
      shapes: What both work on.
      rounds: Measurements of each.
      on_request: Whether it runs only where it is named: it needs an accelerator, or is another case in small.
    """

    ours: tuple[str, ...]
    peer: tuple[str, ...]
    environment: str | None
    packages: tuple[str, ...]
    shapes: str
    here_too: bool = False
    rounds: int = 5
    on_request: bool = False


def ppo(trained: str, *flags: str) -> Case:
    """A PPO iteration against trl 0.7.4, which trains every layer; an iteration of it takes over a minute."""
    return Case(
        ours=("ppo_jrl.py", *flags),
        peer=("ppo_trl.py",),
        environment="trl074",
        packages=("trl", "transformers", "torch"),
        shapes=f"{GPT2}; 32 rollouts of 16 + 48 tokens, 4 epochs, 8 rows an optimizer step; {trained}",
        rounds=3,
    )


def step(what: str, rows: str) -> Case:
    """An optimizer step against the newest trl."""
    return Case(
        ours=("steps_jrl.py", what),
        peer=("steps_trl.py", what),
        environment="trlnew",
        packages=("trl", "transformers", "torch"),
        shapes=f"{GPT2}; a step of 32 {rows} of 16 + 48 tokens, 8 a microbatch",
        here_too=True,
    )


def grpo(model: str, what: str, *, on_request: bool) -> Case:
    """A GRPO iteration against the newest trl."""
    return Case(
        ours=("grpo_jrl.py", "--model", model),
        peer=("grpo_trl.py", "--model", model),
        environment="trlnew",
        packages=("trl", "transformers", "torch"),
        shapes=f"{what}; 8 prompts x 8 completions of 128 + 64 tokens, an optimizer step on all, 8 a microbatch",
        here_too=True,
        rounds=3,
        on_request=on_request,
    )


def ddpo(model: str, shapes: str, *flags: str, precision: str, on_request: bool) -> Case:
    """An epoch of DDPO with LoRA against diffusers' networks and the same algorithm in torch."""
    given = ("--model", model, *flags)
    return Case(
        ours=("ddpo_jrl.py", *given, "--precision", precision),
        peer=("ddpo_torch.py", *given, "--dtype", precision),
        environment=None,
        packages=("diffusers", "peft", "torch"),
        shapes=f"{shapes}, {precision}, random weights",
        here_too=True,
        rounds=3,
        on_request=on_request,
    )


CASES = {
    "generate": Case(
        ours=("generate_jrl.py",),
        peer=("generate_transformers.py",),
        environment=None,
        packages=("transformers", "torch"),
        shapes=f"{GPT2}; 32 rows, 16 + 48 tokens",
        here_too=True,
    ),
    "ppo_iteration": ppo("every layer trained, full reference"),
    "ppo_iteration_last_2": ppo(
        "jrl trains the last 2 layers, trl all of them", "--num-layers-unfrozen", "2"
    ),
    "randomwalks": Case(
        ours=("ppo_jrl.py", "--model", "randomwalks", "--iterations", "5"),
        peer=("ppo_torch.py", "--iterations", "5"),
        environment=None,
        packages=("transformers", "torch"),
        shapes="trlX's random walks, GPT-2 of 1.7M, float32; 5 iterations of 128 rollouts of 1 + 9 tokens and 8 steps",
        here_too=True,
    ),
    "sft": step("sft", "rows"),
    "dpo": step("dpo", "pairs"),
    "reward": step("reward", "pairs"),
    "grpo": grpo("gpt2-124m", GPT2, on_request=False),
    "grpo_mini": grpo("gpt2-mini", "GPT-2 of 6.9M, float32, random weights", on_request=True),
    "ddpo": ddpo(
        "sd15",
        "Stable Diffusion 1.5, LoRA; 16 samples of 50 steps under guidance, 8 a microbatch",
        *("--rows", "16", "--steps", "50", "--minibatch", "8"),
        precision="bfloat16",
        on_request=True,
    ),
    "ddpo_tiny": ddpo(
        "tiny",
        "a tiny Stable Diffusion, LoRA; 8 samples of 10 steps under guidance, 4 a microbatch",
        *("--rows", "8", "--steps", "10", "--minibatch", "4"),
        precision="float32",
        on_request=False,
    ),
}


class Worker:
    """A process that prints "ready" once it is warm, then the seconds of a run for every line it reads."""

    def __init__(self, python: str, command: tuple[str, ...]) -> None:
        self._name = command[0]
        self._process = subprocess.Popen(
            [python, PEERS / command[0], *command[1:]],
            env=os.environ | {"PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_until_ready(self) -> None:
        """Skips what a library prints while it starts.

        Raises:
          RuntimeError: If the worker ends before that.
        """
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if line.strip() == "ready":
                return
        raise RuntimeError(f"Worker {self._name} did not start; its error stands above.")

    def measure(self) -> float:
        """Seconds of one run.

        Raises:
          RuntimeError: If the worker ended instead.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"Worker {self._name} ended in the middle of a run; its error stands above.")
        return float(line)

    def stop(self) -> None:
        """Ends the process."""
        self._process.kill()
        self._process.wait()


def versions(python: str, packages: tuple[str, ...]) -> dict[str, str]:
    """Of these packages in the environment of an interpreter."""
    code = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]), sep='\\n')"
    out = subprocess.run([python, "-c", code, *packages], check=True, capture_output=True, text=True).stdout
    return dict(zip(packages, out.split(), strict=True))


def can_import(python: str, names: tuple[str, ...]) -> bool:
    """Whether an interpreter has these modules, and they load."""
    done = subprocess.run([python, "-c", f"import {', '.join(names)}"], capture_output=True)
    return done.returncode == 0


def find_python(case: Case, peers: Path) -> str | None:
    """The interpreter that runs the peer's worker; None where nothing has its packages."""
    if case.environment is not None:
        installed = peers / case.environment / "bin" / "python"
        if installed.exists():
            return str(installed)
    return sys.executable if case.here_too and can_import(sys.executable, case.packages) else None


def missing(case: Case, peers: Path) -> str:
    """What a case that cannot run needs."""
    needs = []
    if case.environment is not None:
        needs.append(f"`python benchmarks/peers/install.py {case.environment} --folder {peers}`")
    if case.here_too:
        needs.append(f"{', '.join(case.packages)} in the environment that runs this script")
    return "needs " + ", or ".join(needs)


def compare(name: str, case: Case, python: str, rounds: int) -> dict[str, object]:
    """Runs both in turn, the peer with this interpreter; the record that is printed."""
    workers: list[Worker] = []
    try:
        # One after the other: a library that compiles must not slow the other's warm-up.
        for interpreter, command in ((sys.executable, case.ours), (python, case.peer)):
            workers.append(Worker(interpreter, command))
            workers[-1].wait_until_ready()
        pairs = [tuple(worker.measure() for worker in workers) for _ in range(rounds)]
    finally:
        for worker in workers:
            worker.stop()
    ours, theirs = ([round(seconds, 3) for seconds in column] for column in zip(*pairs, strict=True))
    ratios = [b / a for a, b in pairs]
    return {
        "benchmark": f"compare/{name}",
        "shapes": case.shapes,
        "rounds": rounds,
        "seconds": round(statistics.median(ours), 3),
        "seconds_peer": round(statistics.median(theirs), 3),
        "ratio": round(statistics.median(theirs) / statistics.median(ours), 2),
        "ratio_lowest": round(min(ratios), 2),
        "ratio_highest": round(max(ratios), 2),
        "all_seconds": ours,
        "all_seconds_peer": theirs,
        "hardware": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores",
        "versions": {"jrl": version("jrl-post"), "jax": version("jax")},
        "versions_peer": versions(python, case.packages),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--peers", type=Path, default=Path(".peers"), help="folder of install.py")
    parser.add_argument("--rounds", type=int, help="measurements of each; none: the case's own number")
    flags = parser.parse_args()
    for name in flags.cases:
        if name not in CASES:
            parser.error(f"unknown case {name!r}; known are {', '.join(CASES)}.")
    for name in flags.cases or CASES:
        case = CASES[name]
        if case.on_request and not flags.cases:
            print(f"{name}: left out, it runs only by its name", file=sys.stderr)
            continue
        python = find_python(case, flags.peers)
        if python is None:
            if flags.cases:
                parser.error(f"case {name!r} {missing(case, flags.peers)}.")
            print(f"{name}: left out, it {missing(case, flags.peers)}", file=sys.stderr)
            continue
        print(json.dumps(compare(name, case, python, flags.rounds or case.rounds)), flush=True)


if __name__ == "__main__":
    main()

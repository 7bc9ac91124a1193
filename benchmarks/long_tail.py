# SPDX-License-Identifier: Apache-2.0
"""Completions of many lengths: slots beside batches that run until their longest row, and continuous batching.

    python benchmarks/long_tail.py [--model gpt2-124m] [--rows 256] [--slots 32] [--rounds 3] [--without-peer]

Lengths are log-normal with median 32, cut at 512, and forced by a limit of each row. All three run in turn: (a) jrl's
slots, (b) jrl's sampler in batches of as many rows, each until its longest row is over, and (c) continuous batching of
transformers, in a process of its own (`peers/long_tail_transformers.py`). Prints one JSON line: seconds of each round,
medians and ratios, steps of the loops, and programs compiled before and during the rounds; and on stderr the seconds so
far after each round. Ids of (a) and (b) must be equal in every round, or the script fails.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PEERS = Path(__file__).resolve().parent / "peers"
sys.path.insert(0, str(PEERS))

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from long_tail_sizes import LONGEST, PROMPT, rows_of  # noqa: E402
from sizes import GPT2  # noqa: E402
from transformers import GPT2Config  # noqa: E402

from jrl.mesh import make_mesh  # noqa: E402
from jrl.models.model import CausalLM  # noqa: E402
from jrl.rollout.episode import Task  # noqa: E402
from jrl.rollout.episodes import Player  # noqa: E402
from jrl.rollout.sampler import GenerationSettings, Sampler  # noqa: E402
from jrl.rollout.turns import TurnPrograms  # noqa: E402
from jrl.typing import ModelInputs  # noqa: E402

TEMPERATURE = 0.03
"""Random weights give nearly even odds to all ids, and a rounding then moves one draw in a thousand to the next id. At
this temperature few ids have any odds, and what two programs draw can be held equal."""
SETTINGS = GenerationSettings(
    max_new_tokens=LONGEST, eos_token_id=(), pad_token_id=0, temperature=TEMPERATURE
)
Run = Callable[[np.ndarray, np.ndarray], list[list[int]]]
"""(prompts, lengths) → ids behind each prompt."""
compilations: Counter[str] = Counter()


def main() -> None:
    """Measures and prints."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("--model", choices=GPT2, default="gpt2-124m")
    top.add_argument("--rows", type=int, default=256, help="a multiple of the slots")
    top.add_argument("--slots", type=int, default=32)
    top.add_argument("--rounds", type=int, default=3)
    top.add_argument("--without-peer", action="store_true", help="leaves transformers out")
    flags = top.parse_args()
    jax.monitoring.register_event_duration_secs_listener(_count)
    shape = GPT2[flags.model] | {"n_positions": 1024}
    model = CausalLM.from_config(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    params = jax.jit(model.init)(jax.random.key(0))
    prompts, lengths = rows_of(flags.rows, shape["vocab_size"])
    runs = {
        "slots": on_slots(model.policy(), params, flags.slots),
        "batches": in_batches(model.policy(), params, flags.slots),
    }
    few = slice(0, 2 * flags.slots)
    compiled, seen = {}, Steps()
    for name, run in runs.items():
        compilations.clear()
        run(prompts[few], lengths[few].clip(max=40))
        compiled[name] = compilations["programs"]
    compilations.clear()
    peer = None if flags.without_peer else Peer(flags)
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    if peer is not None:
        seconds["transformers"] = []
    for number in range(flags.rounds):
        found = {}
        for name, run in runs.items():
            began = time.perf_counter()
            with seen if number == 0 else contextlib.nullcontext():
                found[name] = run(prompts, lengths)
            seconds[name].append(time.perf_counter() - began)
        assert found["slots"] == found["batches"], "slots and batches must write the same ids"
        assert [len(ids) for ids in found["slots"]] == lengths.tolist(), "each row has its length"
        if peer is not None:
            seconds["transformers"].append(peer.run())
        print(json.dumps(seconds), file=sys.stderr, flush=True)
    medians = {name: statistics.median(times) for name, times in seconds.items()}
    batches = lengths.reshape(-1, flags.slots)
    print(
        json.dumps(
            {
                **vars(flags),
                "tokens": int(lengths.sum()),
                "longest": int(lengths.max()),
                "seconds": {name: [round(t, 1) for t in times] for name, times in seconds.items()},
                "medians": {name: round(t, 1) for name, t in medians.items()},
                "batches_over_slots": ratios(seconds["batches"], seconds["slots"]),
                "transformers_over_slots": ratios(seconds.get("transformers"), seconds["slots"]),
                "steps": {**seen.by_slots, "batches": int(batches.max(axis=1).sum())},
                "compiled_before": compiled,
                "compiled_in_rounds": compilations["programs"],
                "ids_equal": True,
                "device": jax.devices()[0].device_kind,
                "machine": platform.machine(),
                "cores": len(os.sched_getaffinity(0)),
                "load": [round(load, 1) for load in os.getloadavg()],
                "jax": jax.__version__,
            }
        )
    )


class Steps:
    """Counts steps of the loop over tokens by the number of slots that made them, while entered."""

    def __init__(self) -> None:
        self.by_slots: Counter[str] = Counter()
        self._write = TurnPrograms.write

    def __enter__(self) -> None:
        """Waits for each call from here on."""

        def counted(programs: TurnPrograms, *given: Any, **options: Any) -> Any:
            cache, written = self._write(programs, *given, **options)
            self.by_slots[f"slots_{programs.num_slots}"] += int(np.asarray(written.lengths).max())
            return cache, written

        TurnPrograms.write = counted  # type: ignore[method-assign, assignment]

    def __exit__(self, *error: object) -> None:
        """Counts no more."""
        TurnPrograms.write = self._write  # type: ignore[method-assign]


def on_slots(policy: Any, params: Any, slots: int) -> Run:
    """Writes all rows on so many slots."""
    player = Player(policy, None, make_mesh(1, 1, 1, devices=jax.devices()[:1]))

    def run(prompts: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        tasks = [
            Task(row, prompt.tolist(), limit=int(length))
            for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
        ]
        given: tuple[Any, ...] = (params, {}, tasks, SETTINGS, jax.random.key(1))
        episodes = player.play(*given, num_slots=slots, prompt_width=PROMPT)
        return [episode.ids for episode in episodes]

    return run


def in_batches(policy: Any, params: Any, rows: int) -> Run:
    """Writes all rows, so many a call of the sampler; calls are dispatched ahead."""
    program = Sampler(policy).program(SETTINGS, rows)

    def run(prompts: np.ndarray, lengths: np.ndarray) -> list[list[int]]:
        key, calls = jax.random.key(1), []
        for start in range(0, len(lengths), rows):
            numbers = np.arange(start, start + rows)
            tokens = jnp.asarray(prompts[numbers])
            knobs = SETTINGS.knobs._replace(limits=jnp.asarray(lengths[numbers]))
            inputs = ModelInputs(tokens, jnp.ones(tokens.shape, bool))
            calls.append(program(params, {}, inputs, jnp.asarray(numbers), knobs, key))
        return [
            ids[:count].tolist()
            for call in calls
            for ids, count in zip(np.asarray(call.tokens), np.asarray(call.lengths), strict=True)
        ]

    return run


class Peer:
    """The worker of transformers.

    Args:
      flags: Of this script.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        sizes = ("--rows", str(flags.rows), "--slots", str(flags.slots), "--model", flags.model)
        self._process = subprocess.Popen(
            [sys.executable, str(PEERS / "long_tail_transformers.py"), *sizes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._answer()

    def run(self) -> float:
        """Seconds of a run of it."""
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._answer())

    def _answer(self) -> str:
        assert self._process.stdout is not None, "it is a pipe"
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("The worker of transformers stopped; its error is above.")
        return line


def ratios(longer: list[float] | None, shorter: list[float]) -> dict[str, float] | None:
    """How many times as long: of the medians, and the lowest and highest of a round."""
    if longer is None:
        return None
    each = [a / b for a, b in zip(longer, shorter, strict=True)]
    whole = statistics.median(longer) / statistics.median(shorter)
    return {"medians": round(whole, 2), "lowest": round(min(each), 2), "highest": round(max(each), 2)}


def _count(event: str, seconds: float, **details: Any) -> None:
    del seconds, details
    compilations["programs"] += event == "/jax/core/compile/backend_compile_duration"


if __name__ == "__main__":
    main()

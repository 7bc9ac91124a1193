# SPDX-License-Identifier: Apache-2.0
"""Samples of one prompt that share a pass over it, beside a pass for each of them.

    python benchmarks/shared_prefill.py [--model gpt2-124m] [--prompt 256] [--response 64] [--generations 8]

Both samplers run in turn in one process (A B A B ...). Prints one JSON line: median seconds of the first token alone
(the pass over the prompt) and of whole completions, the compiler's temporary bytes of both programs, and whether the
sampled ids are equal.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jrl.bench.models import PRESETS, find_subject
from jrl.compilation import COMPILER_OPTIONS
from jrl.rollout.generate import make_generate
from jrl.typing import Completions, ModelInputs, SamplingKnobs


def main() -> None:
    """Measures and prints."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("--model", default="gpt2-124m", choices=list(PRESETS))
    top.add_argument("--prompt", type=int, default=256, help="tokens of it")
    top.add_argument("--response", type=int, default=64, help="tokens of a completion")
    top.add_argument("--prompts", type=int, default=1, help="of a call")
    top.add_argument("--generations", type=int, default=8, help="samples of each prompt")
    top.add_argument("--rounds", type=int, default=5)
    flags = top.parse_args()
    line: dict[str, Any] = {
        **vars(flags),
        "machine": platform.machine(),
        "device": jax.devices()[0].device_kind,
    }
    for phase, length in (("first_token", 1), ("completions", flags.response)):
        line[phase] = compare(flags, length)
    print(json.dumps(line))


def compare(flags: argparse.Namespace, response: int) -> dict[str, Any]:
    """Seconds, temporary bytes and equality of both samplers, for completions of so many tokens."""
    subject = find_subject(flags.model)
    params, frozen = subject.load()
    prompts = subject.tokens(flags.prompts, flags.prompt, seed=1)
    rows = flags.prompts * flags.generations
    knobs = SamplingKnobs(jnp.float32(1))
    calls: dict[str, Callable[[], Completions]] = {}
    found: dict[str, Any] = {}
    for name, generations in (("shared", flags.generations), ("each", 1)):
        tokens = jnp.repeat(prompts, flags.generations // generations, axis=0)
        inputs = ModelInputs(tokens, jnp.ones(tokens.shape, bool))
        generate = jax.jit(
            make_generate(
                subject.policy,
                max_new_tokens=response,
                eos_token_ids=(),
                pad_token_id=0,
                num_generations=generations,
            ),
            compiler_options=COMPILER_OPTIONS,
        )
        given = (params, frozen, inputs, jnp.arange(rows), knobs, jax.random.key(2))
        program = generate.lower(*given).compile()
        memory = program.memory_analysis()
        found[f"{name}_temporary_bytes"] = None if memory is None else memory.temp_size_in_bytes
        calls[name] = lambda program=program, given=given: program(*given)
    ids = {name: jax.block_until_ready(call()).tokens for name, call in calls.items()}
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(flags.rounds):
        for name, call in calls.items():
            began = time.perf_counter()
            jax.block_until_ready(call())
            seconds[name].append(time.perf_counter() - began)
    medians = {f"{name}_seconds": round(statistics.median(times), 4) for name, times in seconds.items()}
    ratio = statistics.median(seconds["each"]) / statistics.median(seconds["shared"])
    return {
        **medians,
        "ratio": round(ratio, 2),
        **found,
        "ids_equal": bool(jnp.array_equal(ids["shared"], ids["each"])),
    }


if __name__ == "__main__":
    main()

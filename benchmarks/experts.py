# SPDX-License-Identifier: Apache-2.0
"""Speed of a mixture of experts in three forms: blocks of rows, `jax.lax.ragged_dot`, all experts for all tokens.

    python benchmarks/experts.py [--rounds 9]

The forms run in turn, so that a machine which slows down slows all. Prints one JSON line a shape and direction: the
median milliseconds of each form, and how long the others take compared to blocks (above 1: blocks are faster).
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp

from jrl.models import experts as module
from jrl.models.config import Experts
from jrl.models.products import PLAIN, blocks

# Tokens, width, inner width, experts, experts a token.
SHAPES = {
    "train": (1024, 256, 512, 16, 2),
    "train-many": (1024, 256, 128, 64, 8),
    "prefill": (128, 256, 512, 16, 2),
    "decode": (8, 256, 512, 16, 2),
    "decode-many": (8, 256, 128, 64, 8),
}


def routed(product: Callable[..., Any]) -> Callable[..., Any]:
    """The layer with this form of the product."""

    def run(experts: Experts, x: Any, scores: Any, gate: Any, up: Any, down: Any) -> Any:
        weights, chosen = module.route(scores, experts)
        with mock.patch.object(module, "grouped_dot", product):
            return module.mix_experts(x, weights, chosen, gate, up, down, glu=module.plain_glu(jax.nn.silu))

    return run


def dense(experts: Experts, x: Any, scores: Any, gate: Any, up: Any, down: Any) -> Any:
    """Every expert answers every token; the answers of those not chosen count nothing."""
    weights, chosen = module.route(scores, experts)
    hidden = jax.nn.silu(jnp.einsum("bqd,edf->bqef", x, gate)) * jnp.einsum("bqd,edf->bqef", x, up)
    share = (jax.nn.one_hot(chosen, experts.count) * weights[..., None]).sum(axis=-2)
    return jnp.einsum("bqef,efd,bqe->bqd", hidden, down, share)


FORMS = {"blocks": routed(blocks.grouped_dot), "ragged": routed(PLAIN.grouped_dot), "dense": dense}


def arguments(shape: tuple[int, ...]) -> tuple[Experts, list[Any]]:
    """A random layer and its input."""
    num_tokens, width, inner, count, per_token = shape
    shapes = [(1, num_tokens, width), (1, num_tokens, count)]
    shapes += [(count, width, inner), (count, width, inner), (count, inner, width)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    return Experts(count, per_token, inner, True), [*arrays[:2], *(0.05 * array for array in arrays[2:])]


def compile_all(experts: Experts, inputs: list[Any]) -> dict[tuple[str, str], Any]:
    """Every form, forwards and with all gradients."""
    found = {}
    for name, form in FORMS.items():

        def forward(*xs: Any, form: Callable[..., Any] = form) -> Any:
            return form(experts, *xs)

        def both(*xs: Any, forward: Callable[..., Any] = forward) -> Any:
            return jax.grad(lambda *xs: jnp.square(forward(*xs)).sum(), range(5))(*xs)

        for direction, function in (("forward", forward), ("forward+backward", both)):
            found[name, direction] = jax.jit(function).lower(*inputs).compile()
    return found


def main() -> None:
    """Measures every shape."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    print(
        json.dumps(
            {"jax": jax.__version__, "device": jax.devices()[0].device_kind, "host": platform.machine()}
        )
    )
    for shape_name, shape in SHAPES.items():
        experts, inputs = arguments(shape)
        programs = compile_all(experts, inputs)
        seconds: dict[tuple[str, str], list[float]] = {key: [] for key in programs}
        for index in range(rounds + 1):
            for key, program in programs.items():
                start = time.perf_counter()
                jax.block_until_ready(program(*inputs))
                if index:  # the first round warms up
                    seconds[key].append(time.perf_counter() - start)
        for direction in ("forward", "forward+backward"):
            median = {name: 1e3 * statistics.median(seconds[name, direction]) for name in FORMS}
            line = {"shape": shape_name, "tokens_D_F_E_k": shape, "direction": direction}
            line |= {f"{name}_ms": round(ms, 2) for name, ms in median.items()}
            line |= {
                f"{name}/blocks": round(median[name] / median["blocks"], 2) for name in ("ragged", "dense")
            }
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()

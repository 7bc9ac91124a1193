# SPDX-License-Identifier: Apache-2.0
"""Worker: the work of `generate_transformers.py` by `jrl.rollout.generate`, log-probabilities of the samples included.

    python benchmarks/peers/generate_jrl.py [--batch 32] [--prompt 16] [--response 48] [--model gpt2-124m]

Prints "ready" once the program is compiled and has run; then, for every line on stdin, runs once and prints the
seconds. Weights are random, in float32; all layers could be trained.
"""

from __future__ import annotations

import argparse
import sys
import time

import jax
import jax.numpy as jnp
from transformers import GPT2Config

from jrl.models.model import CausalLM
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs

SHAPES = {
    "gpt2-mini": dict(n_embd=256, n_layer=6, n_head=8, vocab_size=8192, n_positions=256),
    "gpt2-124m": dict(n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=256),
}


def main() -> None:
    """Compiles the sampler, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32, help="rows sampled at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=48, help="tokens sampled for each")
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    flags = parser.parse_args()
    shape = SHAPES[flags.model]
    model = CausalLM.from_config(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(2), (flags.batch, flags.prompt), 2, shape["vocab_size"])
    prompts = ModelInputs(tokens, jnp.ones_like(tokens, dtype=bool))
    knobs = SamplingKnobs(jnp.float32(1), jnp.float32(1))
    generate = jax.jit(
        make_generate(model.policy(), max_new_tokens=flags.response, eos_token_ids=(), pad_token_id=0)
    )

    def sample(run: int) -> float:
        begin = time.perf_counter()
        out = generate(params, {}, prompts, jnp.arange(flags.batch), knobs, jax.random.key(run))
        jax.block_until_ready(out)
        return time.perf_counter() - begin

    sample(0)
    print("ready", flush=True)
    for run, _ in enumerate(sys.stdin, start=1):
        print(sample(run), flush=True)


if __name__ == "__main__":
    main()

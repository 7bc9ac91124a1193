# SPDX-License-Identifier: Apache-2.0
"""Worker: the work of `generate_transformers.py` by `jrl.rollout.generate`, log-probabilities of the samples included.

    python benchmarks/peers/generate_jrl.py [--batch 32] [--prompt 16] [--response 48] [--model gpt2-124m]

Answers by `line_protocol.py`, once the program is compiled and has run. Weights are random, in float32; all layers
could be trained.
"""

from __future__ import annotations

import argparse
import itertools

import jax
import jax.numpy as jnp
from line_protocol import answer
from sizes import GPT2, PROMPT, RESPONSE, ROWS
from transformers import GPT2Config

from jrl.models.model import CausalLM
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs


def main() -> None:
    """Compiles the sampler, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=ROWS, help="rows sampled at once")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=RESPONSE, help="tokens sampled for each")
    parser.add_argument("--model", choices=GPT2, default="gpt2-124m")
    flags = parser.parse_args()
    shape = GPT2[flags.model]
    model = CausalLM.from_config(GPT2Config(**shape, bos_token_id=0, eos_token_id=0))
    params = jax.jit(model.init)(jax.random.key(0))
    tokens = jax.random.randint(jax.random.key(2), (flags.batch, flags.prompt), 2, shape["vocab_size"])
    prompts = ModelInputs(tokens, jnp.ones_like(tokens, dtype=bool))
    knobs = SamplingKnobs(jnp.float32(1))
    generate = jax.jit(
        make_generate(model.policy(), max_new_tokens=flags.response, eos_token_ids=(), pad_token_id=0)
    )

    seeds = itertools.count()

    def sample() -> None:
        out = generate(params, {}, prompts, jnp.arange(flags.batch), knobs, jax.random.key(next(seeds)))
        jax.block_until_ready(out)

    sample()
    answer(sample)


if __name__ == "__main__":
    main()

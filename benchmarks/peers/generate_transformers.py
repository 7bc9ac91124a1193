# SPDX-License-Identifier: Apache-2.0
"""Worker: samples from GPT-2 124M with the `generate` of transformers, on as many threads as there are cores.

    python benchmarks/peers/generate_transformers.py [--batch 32] [--prompt 16] [--response 48] [--model gpt2-124m]

Needs torch and transformers (the extra "parity"). Prints "ready" after a first run; then, for every line on stdin, runs
once and prints the seconds. Weights are random, in float32. Plain sampling at temperature 1 with the cache; no EOS, so
that every row has all its tokens, and no figure beside the ids is asked for.
"""

from __future__ import annotations

import argparse
import os
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel

SHAPES = {
    "gpt2-mini": dict(n_embd=256, n_layer=6, n_head=8, vocab_size=8192, n_positions=256),
    "gpt2-124m": dict(n_embd=768, n_layer=12, n_head=12, vocab_size=50257, n_positions=256),
}


def main() -> None:
    """Builds the model, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=32, help="rows sampled at once")
    parser.add_argument("--prompt", type=int, default=16, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=48, help="tokens sampled for each")
    parser.add_argument("--model", choices=SHAPES, default="gpt2-124m")
    flags = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = SHAPES[flags.model]
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    tokens = torch.randint(2, shape["vocab_size"], (flags.batch, flags.prompt))
    mask = torch.ones_like(tokens)

    def sample() -> float:
        begin = time.perf_counter()
        with torch.no_grad():
            out = model.generate(
                tokens,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                top_p=1.0,
                temperature=1.0,
                use_cache=True,
                max_new_tokens=flags.response,
            )
        seconds = time.perf_counter() - begin
        assert out.shape == (flags.batch, flags.prompt + flags.response), out.shape
        return seconds

    sample()
    print("ready", flush=True)
    for _ in sys.stdin:
        print(sample(), flush=True)


if __name__ == "__main__":
    main()

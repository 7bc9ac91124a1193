# SPDX-License-Identifier: Apache-2.0
"""Worker: samples from GPT-2 124M with the `generate` of transformers, on as many threads as there are cores.

    python benchmarks/peers/generate_transformers.py [--batch 32] [--prompt 16] [--response 48] [--model gpt2-124m]

Needs torch and transformers (the extra "parity"). Answers by `line_protocol.py`, after a first run. Weights are random,
in float32. Plain sampling at temperature 1 with the cache; no EOS, so that every row has all its tokens, and no figure
beside the ids is asked for.
"""

from __future__ import annotations

import argparse
import os

import torch
from line_protocol import answer
from sizes import GPT2, PROMPT, RESPONSE, ROWS
from transformers import GPT2Config, GPT2LMHeadModel


def main() -> None:
    """Builds the model, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=ROWS, help="rows sampled at once")
    parser.add_argument("--prompt", type=int, default=PROMPT, help="tokens of each prompt")
    parser.add_argument("--response", type=int, default=RESPONSE, help="tokens sampled for each")
    parser.add_argument("--model", choices=GPT2, default="gpt2-124m")
    flags = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = GPT2[flags.model]
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    tokens = torch.randint(2, shape["vocab_size"], (flags.batch, flags.prompt))
    mask = torch.ones_like(tokens)

    def sample() -> None:
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
        assert out.shape == (flags.batch, flags.prompt + flags.response), out.shape

    sample()
    answer(sample)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Worker: rows of many lengths by the continuous batching of transformers, on as many threads as there are cores.

    python benchmarks/peers/long_tail_transformers.py [--rows 256] [--slots 32] [--model gpt2-124m]

Needs torch and transformers (the extra "parity"). Speaks `line_protocol.py`, but runs once for each line: a run takes
minutes. Weights are random, in float32; each row has a limit of its own and no EOS, and plain sampling at temperature
1. The cache is as large as so many slots need, in pages of 16 tokens: by itself it would take nine tenths of memory.
"""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
from line_protocol import is_asked, say_ready, say_seconds
from long_tail_sizes import LONGEST, PROMPT, rows_of
from sizes import GPT2
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.generation import ContinuousBatchingConfig

PAGE = 16
"""Tokens of a page of the cache."""


def main() -> None:
    """Builds the model, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--slots", type=int, default=32, help="most rows that are written together")
    parser.add_argument("--model", choices=GPT2, default="gpt2-124m")
    flags = parser.parse_args()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    shape = GPT2[flags.model] | {"n_positions": 1024}
    model = GPT2LMHeadModel(GPT2Config(**shape, bos_token_id=0, eos_token_id=None, pad_token_id=0)).eval()
    model.set_attn_implementation("sdpa")
    prompts, lengths = rows_of(flags.rows, shape["vocab_size"])
    few = min(flags.rows, 4)
    run(model, prompts[:few].tolist(), [4] * few, flags.slots)
    say_ready()
    while is_asked():
        begin = time.perf_counter()
        run(model, prompts.tolist(), lengths.tolist(), flags.slots)
        say_seconds(time.perf_counter() - begin)


def run(model: Any, prompts: list[list[int]], lengths: list[int], slots: int) -> None:
    """Writes all rows, each to its length."""
    sampling = GenerationConfig(
        max_new_tokens=LONGEST,
        do_sample=True,
        top_k=0,
        top_p=1.0,
        temperature=1.0,
        eos_token_id=-1,
        pad_token_id=0,
    )
    pages = -(-(PROMPT + LONGEST) // PAGE)
    batching = ContinuousBatchingConfig(
        page_size=PAGE,
        num_blocks=slots * pages,
        max_batch_tokens=512,
        max_requests_per_batch=slots,
        allow_block_sharing=False,
    )
    found: dict[str, int] = {}
    manager_of = model.continuous_batching_context_manager
    with torch.no_grad(), manager_of(sampling, continuous_batching_config=batching, warmup=False) as manager:
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True)):
            manager.add_request(prompt, request_id=str(row), max_new_tokens=length)
        while len(found) < len(prompts):
            result = manager.get_result(timeout=1)
            if result is None and not manager.is_running():
                raise RuntimeError(f"The manager stopped after {len(found)} of {len(prompts)} rows.")
            if result is not None and result.is_finished():
                if result.error is not None:
                    raise RuntimeError(f"Row {result.request_id}: {result.error}")
                found[result.request_id] = len(result.generated_tokens)
    assert [found[str(row)] for row in range(len(prompts))] == lengths, "each row has its length"


if __name__ == "__main__":
    main()

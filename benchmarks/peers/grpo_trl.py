# SPDX-License-Identifier: Apache-2.0
"""Worker: iterations of GRPO by the newest trl's `GRPOTrainer`, sampling by transformers.

    .peers/trlnew/bin/python benchmarks/peers/grpo_trl.py [--model gpt2-124m]

Speaks as `line_protocol.py` does, after a first iteration. One is 64 completions, forward and backward of 8
microbatches of 8 of them, clipping, AdamW. Every layer is trained, in float32, without dropout, on as many threads as
there are cores. trl takes the first pass over the microbatches for the old log-probabilities; jrl makes one of its own.
"""

from __future__ import annotations

import argparse
import os
import tempfile

import torch
from datasets import Dataset
from grpo_work import arguments, make_config, make_rows, make_tokenizer, share_of_ones
from sizes import GPT2
from steps_trl import Stopwatch
from transformers import GPT2LMHeadModel
from trl import GRPOConfig, GRPOTrainer


def main() -> None:
    """Builds the trainer, then iterates on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=tuple(GPT2), default="gpt2-124m")
    model = parser.parse_args().model
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as folder:
        GRPOTrainer(
            GPT2LMHeadModel(make_config(model)),
            share_of_ones,
            GRPOConfig(**arguments(folder), use_cpu=True),
            Dataset.from_list(make_rows(model)),
            processing_class=make_tokenizer(model),
            callbacks=[Stopwatch()],
        ).train()


if __name__ == "__main__":
    main()

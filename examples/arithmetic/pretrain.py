# SPDX-License-Identifier: Apache-2.0
"""The first stage: a small GPT-2 with random weights reads worked answers, right and wrong ones alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from random import Random
from typing import Any

import jax
from sentiment.tokenizer import train_tokenizer
from transformers import GPT2Config

import jrl

from .tasks import Task

VOCAB_SIZE = 1024  # more than the merges there are: every number and sign is then one token
ARCHITECTURE = dict(n_layer=4, n_embd=128, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def pretrain(
    task: Task,
    problems: Sequence[Mapping[str, Any]],
    held_out: Sequence[Mapping[str, Any]],
    folder: Path,
    *,
    config: jrl.TRLConfig,
    seed: int,
) -> Path | None:
    """Fine-tunes a policy from scratch on worked answers.

    Args:
      task: Writes them.
      problems: Of the task; two answers of each are read.
      held_out: Others, on which the share of right answers is shown on the way.
      folder: Run folder. `initial` (random weights), `sft` (the run) and `sft_model` (the result) are written there.
      config: SFT recipe.
      seed: Of the mistakes, the weights and the data order.
    Returns:
      Folder of the trained checkpoint, the tokenizer included; None if the process was asked to stop.
    """
    random = Random(seed)
    samples = [[row["prompt"], task.work(row["problem"], random)] for _ in range(2) for row in problems]
    tokenizer = train_tokenizer(
        ["".join(sample) for sample in samples], vocab_size=VOCAB_SIZE, max_length=config.train.seq_length
    )
    architecture = GPT2Config(
        vocab_size=len(tokenizer),
        n_positions=config.train.seq_length,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **ARCHITECTURE,
    )
    model, params = jrl.load_model(architecture, key=jax.random.key(seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    correct = task.verifier()
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=samples,
        eval_prompts=held_out,
        metric_fn=lambda outputs, problem: {"pass@1": correct(outputs, problem)},
        config=config.evolve(
            method={"gen_kwargs": {"max_new_tokens": task.max_new_tokens}},
            train={"seed": seed, "checkpoint_dir": str(folder / "sft")},
        ),
    )
    return None if trainer.interrupted else Path(trainer.save_pretrained(folder / "sft_model"))

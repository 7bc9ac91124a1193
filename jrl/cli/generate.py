# SPDX-License-Identifier: Apache-2.0
"""`jrl generate`: prompts completed by a checkpoint."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp

from jrl.data.batching import pad_left
from jrl.data.tokenizer import encode_prompts, load_tokenizer, tokenize
from jrl.models.hub import ADAPTER_CONFIG, CONFIG, local_folder
from jrl.notebook import load_model
from jrl.trainers.checkpoints.checkpointer import MODEL
from jrl.trainers.checkpoints.resume import checkpoints_in, find_checkpoint
from jrl.trainers.loading.tokenizers import tokenizer_home
from jrl.trainers.loggers.safe_text import for_terminal


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument(
        "--model", required=True, metavar="DIRECTORY", help="model, adapter, checkpoint or run"
    )
    command.add_argument("--prompt", action="append", required=True, help="text to complete; repeatable")
    command.add_argument(
        "--max-new-tokens", type=int, default=40, help="most tokens of a completion; default: %(default)s"
    )
    command.add_argument(
        "--temperature",
        type=float,
        default=1.0,
        help="divides the logits: below 1 the likely tokens are taken more often; default: %(default)s, as in training",
    )
    command.add_argument(
        "--top-k",
        type=int,
        default=0,
        help="sample among the so many likeliest tokens; default: %(default)s, which is all",
    )
    command.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        help="sample among the likeliest tokens that hold this much probability; default: %(default)s, which is all",
    )
    command.add_argument(
        "--beta", type=float, help="weight of Q − V in the logits, of a checkpoint that `jrl ilql` wrote"
    )
    command.add_argument("--seed", type=int, default=0, help="of the sampling; default: %(default)s")


def prepare(flags: argparse.Namespace, overrides: list[str]) -> Callable[[], None]:
    """`jrl generate`: prints every prompt with its completion; of a seq2seq model, what it writes."""
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    _check(flags)
    local_folder(flags.model, argument="--model")
    path = model_folder(flags.model)
    model, params = load_model(path)
    if flags.beta is not None and "q_heads" not in params:
        raise ValueError(
            f"--beta weighs Q − V, and {path} holds no Q heads: `jrl ilql` keeps them in its checkpoints, "
            "`save_pretrained(heads=True)` in an export."
        )
    tokenizer = load_tokenizer(tokenizer_home(path, "--model"))
    seq2seq = model.lm.decoder_start_token_id is not None
    if seq2seq:
        rows = tokenize(tokenizer, flags.prompt, add_special_tokens=True)
    else:
        rows = encode_prompts(tokenizer, flags.prompt)
    tokens, mask = pad_left(rows, pad_token_id=tokenizer.pad_token_id)
    if not mask.any(axis=1).all():
        raise ValueError("a --prompt has no tokens; to start a document, give the BOS or EOS text.")
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    eos = [*own, *model.lm.eos_token_ids]
    positions = model.lm.max_positions
    if tokens.shape[1] + flags.max_new_tokens > positions:
        raise ValueError(
            f"the longest --prompt has {tokens.shape[1]} tokens and --max-new-tokens is {flags.max_new_tokens}, but "
            f"the model has {positions} positions."
        )

    def work() -> None:
        completions = model.generate(
            params,
            jnp.asarray(tokens),
            jnp.asarray(mask),
            jax.random.key(flags.seed),
            max_new_tokens=flags.max_new_tokens,
            temperature=flags.temperature,
            top_k=flags.top_k,
            top_p=flags.top_p,
            beta=flags.beta,
            eos_token_id=eos,
            pad_token_id=tokenizer.pad_token_id,
        )
        ids = jax.device_get(completions).tolist()
        for prompt, output in zip(
            flags.prompt, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
        ):
            text = output if seq2seq else f"{prompt}{output}"
            print(for_terminal(text) if sys.stdout.isatty() else text)  # a pipe gets every character as it is

    return work


def model_folder(path: str) -> str:
    """The model that a path means: of a run's folder that in its newest whole checkpoint, which is said.

    Args:
      path: A model's folder, a run's, one checkpoint of it, or a hub id.
    Raises:
      CheckpointError: If the run has no whole checkpoint.
    """
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return path
    if checkpoints_in(folder):
        found = find_checkpoint(folder, _tell) / MODEL
    elif (folder / MODEL).is_dir():
        found = folder / MODEL
    else:
        return path
    _tell(f"{path} is no model itself; this is {found}")
    return str(found)


def _tell(text: str) -> None:
    print(f"jrl generate: {text}", file=sys.stderr)


def _check(flags: argparse.Namespace) -> None:
    """Numbers out of range, before a model is loaded."""
    for flag, fits, expected, value in (
        ("max-new-tokens", flags.max_new_tokens >= 1, "at least 1", flags.max_new_tokens),
        ("temperature", flags.temperature > 0, "positive", flags.temperature),
        ("top-k", flags.top_k >= 0, "at least 0 (0: off)", flags.top_k),
        ("top-p", 0 < flags.top_p <= 1, "above 0 and at most 1", flags.top_p),
        ("seed", flags.seed >= 0, "at least 0", flags.seed),
    ):
        if not fits:
            raise ValueError(f"--{flag} must be {expected}, got {value}.")

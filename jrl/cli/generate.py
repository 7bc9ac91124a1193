# SPDX-License-Identifier: Apache-2.0
"""`jrl generate`: prompts completed by a checkpoint, as text or, of a file, as JSON lines with rewards."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jrl.cli.flags import add_reward_flags
from jrl.cli.generated_samples import SampleWriter
from jrl.data.batching import pad_left
from jrl.data.prompts import PromptSet
from jrl.data.sources.named_sources import load_prompts
from jrl.data.tokenizer import encode_prompts, load_tokenizer, tokenize
from jrl.models.hub import ADAPTER_CONFIG, CONFIG, local_folder
from jrl.named_functions import load_rewards
from jrl.notebook import Model, load_model
from jrl.rollout.keywords import reward_functions, unique_names
from jrl.trainers.checkpoints.checkpointer import MODEL
from jrl.trainers.checkpoints.resume import checkpoints_in, find_checkpoint
from jrl.trainers.checkpoints.retention import best_checkpoint
from jrl.trainers.loading.tokenizers import tokenizer_home
from jrl.trainers.loggers.safe_text import for_terminal


def add_flags(command: argparse.ArgumentParser) -> None:
    """The flags of the command."""
    command.add_argument(
        "--model", required=True, metavar="DIRECTORY", help="model, adapter, checkpoint or run"
    )
    command.add_argument(
        "--newest",
        action="store_true",
        help="of a run, the newest checkpoint; default: the best one, where one is",
    )
    prompts = command.add_mutually_exclusive_group(required=True)
    prompts.add_argument("--prompt", action="append", help="text to complete; repeatable")
    prompts.add_argument(
        "--prompts",
        metavar="FILE_OR_DATASET",
        help="one prompt a line, record or row: prints a JSON line for each, with its completion",
    )
    command.add_argument(
        "--reward",
        action="append",
        metavar="MODULE:FUNCTION_OR_CLASSIFIER",
        help="judges the samples of --prompts; repeatable: their sum",
    )
    add_reward_flags(command)
    command.add_argument(
        "--batch-size", type=int, default=32, help="prompts of --prompts in a call; default: %(default)s"
    )
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
        help="sample among the so many likeliest tokens; 1 is greedy; default: %(default)s, which is all",
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
    """`jrl generate`: prints every prompt with its completion, or JSON lines; of a seq2seq model, what it writes."""
    if overrides:
        raise ValueError(f"unknown flags {overrides}.")
    _check(flags)
    rewards, texts = _rewards(flags), load_prompts(flags.prompts) if flags.prompts else []
    local_folder(flags.model, argument="--model")
    path = model_folder(flags.model, newest=flags.newest)
    model, params = load_model(path)
    if flags.beta is not None and "q_heads" not in params:
        raise ValueError(
            f"--beta weighs Q − V, and {path} holds no Q heads: `jrl ilql` keeps them in its checkpoints, "
            "`save_pretrained(heads=True)` in an export."
        )
    tokenizer = load_tokenizer(tokenizer_home(path, "--model"))
    own = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    eos = [*own, *model.lm.eos_token_ids]
    complete = partial(
        model.generate,
        max_new_tokens=flags.max_new_tokens,
        temperature=flags.temperature,
        top_k=flags.top_k,
        top_p=flags.top_p,
        beta=flags.beta,
        eos_token_id=eos,
        pad_token_id=tokenizer.pad_token_id,
    )
    key = jax.random.key(flags.seed)
    seq2seq = model.lm.decoder_start_token_id is not None
    if flags.prompts:
        prompts = _prompt_set(flags, texts, tokenizer, model)
        writer = SampleWriter(complete, tokenizer, eos, rewards, flags.batch_size)
        return lambda: _print_all(writer.lines(params, prompts, key))
    if seq2seq:
        rows = tokenize(tokenizer, flags.prompt, add_special_tokens=True)
    else:
        rows = encode_prompts(tokenizer, flags.prompt)
    tokens, mask = pad_left(rows, pad_token_id=tokenizer.pad_token_id)
    if not mask.any(axis=1).all():
        raise ValueError("a --prompt has no tokens; to start a document, give the BOS or EOS text.")
    positions = model.lm.max_positions
    if tokens.shape[1] + flags.max_new_tokens > positions:
        raise ValueError(
            f"the longest --prompt has {tokens.shape[1]} tokens and --max-new-tokens is {flags.max_new_tokens}, but "
            f"the model has {positions} positions."
        )

    def work() -> None:
        completions = complete(params, jnp.asarray(tokens), jnp.asarray(mask), key)
        ids = jax.device_get(completions).tolist()
        for prompt, output in zip(
            flags.prompt, tokenizer.batch_decode(ids, skip_special_tokens=True), strict=True
        ):
            text = output if seq2seq else f"{prompt}{output}"
            print(for_terminal(text) if sys.stdout.isatty() else text)  # a pipe gets every character as it is

    return work


def _prompt_set(flags: argparse.Namespace, texts: list[Any], tokenizer: Any, model: Model) -> PromptSet:
    """Prompts of the file, of which each fits the model together with its completion."""
    room = model.lm.max_positions - (flags.max_new_tokens if model.lm.decoder_start_token_id is None else 0)
    if room < 1:
        raise ValueError(
            f"--max-new-tokens must leave room for a prompt in the model's {model.lm.max_positions} positions, got "
            f"{flags.max_new_tokens}."
        )
    return PromptSet(
        texts,
        tokenizer,
        max_length=room,
        seed=0,
        long_prompts="truncate",  # a warning says so
        decoder_start_token_id=model.lm.decoder_start_token_id,
    )


def _print_all(lines: Iterable[str]) -> None:
    for line in lines:
        print(for_terminal(line) if sys.stdout.isatty() else line, flush=True)


def _rewards(flags: argparse.Namespace) -> dict[str, Callable[..., Any]]:
    """The reward functions by name; {} where none are given.

    Raises:
      ValueError: If there is one, and no file of prompts whose samples it would judge.
    """
    asks = [name for name in ("reward", "reward_label", "reward_output") if vars(flags)[name] is not None]
    if not flags.reward:
        if asks:
            raise ValueError(
                f"--{asks[0].replace('_', '-')} chooses a score of --reward, which is not given."
            )
        return {}
    if not flags.prompts:
        raise ValueError(
            "--reward judges the samples of --prompts, but --prompt is given: write the prompt into a file, one a "
            "line, and give its name as --prompts."
        )
    functions = reward_functions(
        load_rewards(flags.reward, label=flags.reward_label, output=flags.reward_output), "--reward"
    )
    return dict(zip(unique_names(functions), functions, strict=True))


def model_folder(path: str, *, newest: bool = False) -> str:
    """The model that a path means: of a run's folder that in its best whole checkpoint, which is said.

    Args:
      path: A model's folder, a run's, one checkpoint of it, or a hub id.
      newest: Whether a run's newest whole checkpoint is meant; it is where no evaluation had a score.
    Raises:
      CheckpointError: If the run has no whole checkpoint.
    """
    folder = Path(path).expanduser()
    if any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        return path
    which = ""
    if checkpoints_in(folder):
        best = None if newest else best_checkpoint(folder, _tell)
        checkpoint = best or find_checkpoint(folder, _tell)
        which = ", its newest checkpoint"
        if best is not None:
            which = f", its best checkpoint of {len(checkpoints_in(folder))}; --newest takes the newest one"
        found = checkpoint / MODEL
    elif (folder / MODEL).is_dir():
        found = folder / MODEL
    else:
        return path
    _tell(f"{path} is no model itself; this is {found}{which}")
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
        ("batch-size", flags.batch_size >= 1, "at least 1", flags.batch_size),
    ):
        if not fits:
            raise ValueError(f"--{flag} must be {expected}, got {value}.")

# SPDX-License-Identifier: Apache-2.0
"""A helpful and harmless assistant in miniature: SFT on dialogues, then PPO or ILQL from preferences.

    python examples/hh_dialogue.py                  # PPO
    python examples/hh_dialogue.py --method ilql

downloads nothing: 800 requests come with the example, some with a history, each with a reply that was chosen and one
that was rejected. A small GPT-2 first learns to talk from both. A linear reward model learns from the pairs which reply
is preferred. Then

- PPO gets, for every reply of its own, the score of that reply minus the score of the chosen one, which travels with
  the prompt as the metadata `original_output`;
- ILQL learns offline from the same pairs, +1 for the chosen and −1 for the rejected reply, and decodes steered by
  β·(Q − V).

A reply ends where the model goes on with "Human:" or "Assistant:". Data in the shape of `dialogue/dialogues.jsonl`, and
any checkpoint, take the place of these (`--dialogues`, `--model`). Every field of the recipe is a flag, and with
`--sft.` in front of the SFT recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from dialogue.preference import Preference
from rich.console import Console
from sentiment.pretrain import gpt2_config
from sentiment.tokenizer import train_tokenizer
from stages import RECIPES, add_flags, report, split_overrides, stopped

import jrl

DIALOGUES = Path(__file__).resolve().parent / "dialogue" / "dialogues.jsonl"
STOP_SEQUENCES = ("Human:", "human:", "Assistant:", "assistant:")
Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="hh_dialogue")
    top.add_argument("--method", choices=("ppo", "ilql"), default="ppo", help="what follows SFT")
    top.add_argument(
        "--dialogues", default=DIALOGUES, help="records with `turns`, `chosen`, `rejected`, one a line"
    )
    top.add_argument("--num-eval-prompts", type=int, default=128, help="dialogues held out")
    flags, rest = top.parse_known_args(argv)
    overrides, sft_overrides = split_overrides(rest)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    config = jrl.apply_overrides(
        jrl.TRLConfig.load_yaml(RECIPES / f"{flags.method}_dialogue.yaml"), overrides
    )
    records = [json.loads(line) for line in Path(flags.dialogues).read_text(encoding="utf-8").splitlines()]
    heldout, train = records[: flags.num_eval_prompts], records[flags.num_eval_prompts :]
    preference = Preference(*columns(train))
    console.print(
        f"reward model: {preference.accuracy(*columns(heldout)):.1%} of the held-out pairs in order"
    )

    start = flags.model
    if start is None:
        sft_config = jrl.apply_overrides(
            jrl.TRLConfig.load_yaml(RECIPES / "sft_dialogue.yaml"), sft_overrides
        )
        start = pretrain(train, folder, config=sft_config, seed=flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")
    console.rule(flags.method.upper())
    trainer = jrl.train(
        model_path=str(start),
        **(online(train, preference) if flags.method == "ppo" else offline(train)),
        eval_prompts=prompts_of(heldout),
        metric_fn=preference_metrics(preference),
        config=config.evolve(
            train={"seed": flags.seed, "checkpoint_dir": str(folder / flags.method)},
        ),
        stop_sequences=list(STOP_SEQUENCES),
    )
    if trainer.interrupted:
        resume = ("--model", start, "--train.resume_from_checkpoint", folder / flags.method)
        return stopped(console, argv, folder, *resume)
    trainer.save_pretrained(folder / "policy")
    names = sorted(name for name in trainer.history[0] if name.startswith("metrics/"))
    report(console, folder, trainer.history, names, seconds=time.perf_counter() - began)
    return 0


def prompt_of(record: Record) -> str:
    """The dialogue up to where the reply begins."""
    said = [
        f"Human: {text}\nAssistant:" if turn % 2 == 0 else f" {text}\n"
        for turn, text in enumerate(record["turns"])
    ]
    return "".join(said)


def columns(records: Sequence[Record]) -> tuple[list[str], list[str], list[str]]:
    """Prompts, chosen and rejected replies."""
    prompts = [prompt_of(record) for record in records]
    return prompts, [record["chosen"] for record in records], [record["rejected"] for record in records]


def prompts_of(records: Sequence[Record]) -> list[dict[str, str]]:
    """Prompts with the chosen reply as metadata."""
    return [{"prompt": prompt_of(record), "original_output": record["chosen"]} for record in records]


def online(records: Sequence[Record], preference: Preference) -> dict[str, Any]:
    """What PPO learns from: prompts, and how much better than the chosen reply the policy's own one scores."""

    def reward_fn(prompts: list[str], outputs: list[str], original_output: list[str]) -> list[float]:
        return margins(preference, prompts, outputs, original_output)

    return {"prompts": prompts_of(records), "reward_fn": reward_fn}


def offline(records: Sequence[Record]) -> dict[str, Any]:
    """What ILQL learns from: both replies to every prompt, +1 for the chosen and −1 for the rejected one."""
    prompts, chosen, rejected = columns(records)
    replies = zip(prompts + prompts, chosen + rejected, strict=True)
    samples = [[prompt, f" {reply}"] for prompt, reply in replies]
    return {"samples": samples, "rewards": [1.0] * len(records) + [-1.0] * len(records)}


def preference_metrics(preference: Preference) -> Callable[..., dict[str, list[float]]]:
    """A metric function: `margin` over the chosen reply in nats, and `preferred`, the share that beats or equals it."""

    def metric_fn(
        prompts: list[str], outputs: list[str], original_output: list[str]
    ) -> dict[str, list[float]]:
        found = margins(preference, prompts, outputs, original_output)
        return {"margin": found, "preferred": [float(margin >= 0) for margin in found]}

    return metric_fn


def margins(
    preference: Preference, prompts: Sequence[str], outputs: Sequence[str], originals: Sequence[str]
) -> list[float]:
    """Score of each output minus that of the original one, in nats."""
    return list(np.subtract(preference(prompts, outputs), preference(prompts, originals)).tolist())


def pretrain(records: Sequence[Record], folder: Path, *, config: jrl.TRLConfig, seed: int) -> Path | None:
    """Trains a small GPT-2 from random weights on the dialogues, good and bad replies alike.

    Args:
      records: The tokenizer is trained on them as well.
      folder: `initial` (random weights), `sft` (the run) and `sft_model` (the result) are written there.
      config: SFT recipe.
      seed: Of the weights and the data order.
    Returns:
      Folder of the trained checkpoint, the tokenizer included; None if the process was asked to stop.
    """
    samples = [dialogue(record, reply) for record in records for reply in ("chosen", "rejected")]
    texts = ["".join(sample) for sample in samples]
    tokenizer = train_tokenizer(texts, vocab_size=1536, max_length=config.train.seq_length)
    model, params = jrl.load_model(gpt2_config(tokenizer, config.train.seq_length), key=jax.random.key(seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=samples,
        eval_prompts=[prompt_of(record) for record in records[:4]],
        config=config.evolve(
            train={"seed": seed, "checkpoint_dir": str(folder / "sft")},
        ),
    )
    return None if trainer.interrupted else Path(trainer.save_pretrained(folder / "sft_model"))


def dialogue(record: Record, reply: str) -> list[str]:
    """Messages in turn, requests first; `reply` is "chosen" or "rejected". Only what the assistant says is learned."""
    turns = [*record["turns"], record[reply]]
    last = len(turns) - 1
    return [
        f"Human: {text}\nAssistant:" if turn % 2 == 0 else f" {text}" + ("\n" if turn < last else "")
        for turn, text in enumerate(turns)
    ]


if __name__ == "__main__":
    raise SystemExit(main())

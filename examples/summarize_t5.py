# SPDX-License-Identifier: Apache-2.0
"""Summaries of short news by a T5: supervised on reference summaries, then PPO with ROUGE as the reward.

    python examples/summarize_t5.py

downloads nothing: 1500 short articles come with the example, and a T5 of 1.0 million parameters starts from random
weights. The reference of each article travels with its prompt as metadata, and reaches the reward function as the
keyword `summary`. A T5 of the hub starts from its checkpoint, with its own tokenizer:

    python examples/summarize_t5.py --model google/flan-t5-small --model.num_layers_unfrozen 2

Every field of the PPO recipe is a flag, and with `--sft.` in front of the SFT recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console
from sentiment.tokenizer import train_tokenizer
from stages import RECIPES, add_flags, report, split_overrides, stopped
from summaries.rouge import rouge
from transformers import T5Config

import jrl

ARTICLES = Path(__file__).resolve().parent / "summaries" / "articles.jsonl"
ARCHITECTURE = dict(d_model=128, d_kv=32, num_heads=4, d_ff=512, num_layers=2, dropout_rate=0.0)
NAMES = ("reward/mean", "metrics/rouge1", "metrics/rouge2", "metrics/rougeL")
Article = dict[str, str]


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="summarize_t5")
    top.add_argument("--articles", default=ARTICLES, help="records with `prompt` and `summary`, one a line")
    top.add_argument("--num-eval-prompts", type=int, default=200, help="articles held out")
    flags, rest = top.parse_known_args(argv)
    overrides, sft_overrides = split_overrides(rest)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(RECIPES / "ppo_summarize_t5.yaml"), overrides)
    articles = [json.loads(line) for line in Path(flags.articles).read_text(encoding="utf-8").splitlines()]
    heldout, train = articles[: flags.num_eval_prompts], articles[flags.num_eval_prompts :]

    start = flags.model
    if start is None:
        sft_config = jrl.apply_overrides(
            jrl.TRLConfig.load_yaml(RECIPES / "sft_summarize_t5.yaml"), sft_overrides
        )
        start = pretrain(train, heldout, folder, config=sft_config, seed=flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")
    console.rule("PPO")
    trainer = jrl.train(
        model_path=str(start),
        reward_fn=overlap,
        prompts=train,
        eval_prompts=heldout,
        metric_fn=summary_metrics,
        config=config.evolve(
            train={"seed": flags.seed, "checkpoint_dir": str(folder / "ppo")},
        ),
    )
    if trainer.interrupted:
        resume = ("--model", start, "--train.resume_from_checkpoint", folder / "ppo")
        return stopped(console, argv, folder, *resume)
    trainer.save_pretrained(folder / "policy")
    report(console, folder, trainer.history, NAMES, seconds=time.perf_counter() - began)
    return 0


def overlap(outputs: Sequence[str], summary: Sequence[str]) -> list[float]:
    """The reward: the mean of ROUGE-1, -2 and -L with the reference summary, in [0, 1]."""
    return rouge(outputs, summary)["rouge_mean"]


def summary_metrics(outputs: Sequence[str], summary: Sequence[str]) -> dict[str, list[float]]:
    """ROUGE of each output."""
    return rouge(outputs, summary)


def pretrain(
    train: Sequence[Article], heldout: Sequence[Article], folder: Path, *, config: jrl.TRLConfig, seed: int
) -> Path | None:
    """Trains a small T5 from random weights on (article, summary) pairs.

    Args:
      train: Articles to learn from; the tokenizer is trained on them as well.
      heldout: Articles of the evaluations.
      folder: `initial` (random weights), `sft` (the run) and `sft_model` (the result) are written there.
      config: SFT recipe.
      seed: Of the weights and the data order.
    Returns:
      Folder of the trained checkpoint, the tokenizer included; None if the process was asked to stop.
    """
    texts = [text for article in train for text in article.values()]
    tokenizer = train_tokenizer(texts, vocab_size=1024, max_length=config.train.seq_length)
    model, params = jrl.load_model(t5_config(tokenizer), key=jax.random.key(seed))
    jrl.save_model(folder / "initial", model, params, tokenizer)
    trainer = jrl.train(
        model_path=str(folder / "initial"),
        samples=[[article["prompt"], article["summary"]] for article in train],
        eval_prompts=list(heldout),
        metric_fn=summary_metrics,
        config=config.evolve(
            train={"seed": seed, "checkpoint_dir": str(folder / "sft")},
        ),
    )
    return None if trainer.interrupted else Path(trainer.save_pretrained(folder / "sft_model"))


def t5_config(tokenizer: Any) -> T5Config:
    """Architecture of the model, for a tokenizer; decoders start with the padding token, as T5's do."""
    return T5Config(
        vocab_size=len(tokenizer),
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        decoder_start_token_id=tokenizer.pad_token_id,
        **ARCHITECTURE,
    )


if __name__ == "__main__":
    raise SystemExit(main())

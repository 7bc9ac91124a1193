# SPDX-License-Identifier: Apache-2.0
"""Offline reinforcement learning: ILQL learns from reviews and their scores, and never samples while it learns.

    python examples/ilql_sentiment.py

downloads nothing: corpus, tokenizer and the policy to start from are those of `ppo_sentiment.py`. Every review of the
corpus is a sample and VADER's compound score its reward. What steers is decoding: the logits get β·(Q − V), and every
evaluation samples at each β of the recipe. Samples with rewards of your own come from a file, one record a line:

    python examples/ilql_sentiment.py --model gpt2 --samples rated.jsonl

Every field of the ILQL recipe is a flag, and with `--sft.` in front of the SFT recipe.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from sentiment.corpus import Corpus, make_corpus, split_corpus
from sentiment.pretrain import pretrain
from sentiment.rewards import vader
from stages import RECIPES, add_flags, report, split_overrides, stopped

import jrl


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="ilql_sentiment")
    top.add_argument("--samples", help="records with `text` and `reward`; default: a corpus, scored by VADER")
    top.add_argument("--num-reviews", type=int, default=8000, help="size of the generated corpus")
    top.add_argument("--num-eval-prompts", type=int, default=128, help="held-out prompts")
    flags, rest = top.parse_known_args(argv)
    overrides, sft_overrides = split_overrides(rest)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(RECIPES / "ilql_sentiment.yaml"), overrides)
    corpus, rewards = read_corpus(flags)

    start = flags.model
    if start is None:
        sft_config = jrl.apply_overrides(
            jrl.TRLConfig.load_yaml(RECIPES / "sft_sentiment.yaml"), sft_overrides
        )
        start = pretrain(corpus, folder, config=sft_config, seed=flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")
    console.rule("ILQL")
    trainer = jrl.train(
        model_path=str(start),
        samples=corpus.train_reviews,
        rewards=rewards,
        eval_prompts=corpus.eval_prompts,
        metric_fn=sentiment,
        config=config.evolve(
            train={"seed": flags.seed, "checkpoint_dir": str(folder / "ilql")},
        ),
    )
    if trainer.interrupted:
        resume = ("--model", start, "--train.resume_from_checkpoint", folder / "ilql")
        return stopped(console, argv, folder, *resume)
    trainer.save_pretrained(folder / "policy")
    names = sorted(name for name in trainer.history[0] if name.startswith("metrics/sentiment"))
    report(console, folder, trainer.history, names, seconds=time.perf_counter() - began)
    return 0


def sentiment(samples: Sequence[str]) -> dict[str, list[float]]:
    """A metric function: how positive each sample reads, in [−1, 1]."""
    return {"sentiment": vader(samples)}


def read_corpus(flags: argparse.Namespace) -> tuple[Corpus, list[float]]:
    """The reviews to learn from with a reward each, and held-out prompts."""
    if flags.samples is None:
        corpus = make_corpus(flags.num_reviews, num_eval_prompts=flags.num_eval_prompts, seed=flags.seed)
        return corpus, vader(corpus.train_reviews)
    records = [json.loads(line) for line in Path(flags.samples).read_text(encoding="utf-8").splitlines()]
    texts = [record["text"] for record in records]
    num_train = len(texts) - len(texts) // 10
    corpus = split_corpus(
        texts, num_train=num_train, num_eval_prompts=flags.num_eval_prompts, seed=flags.seed
    )
    return corpus, [float(record["reward"]) for record in records[:num_train]]


if __name__ == "__main__":
    raise SystemExit(main())

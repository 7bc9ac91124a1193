# SPDX-License-Identifier: Apache-2.0
"""Steers a language model towards positive movie reviews: SFT on a review corpus, then PPO against a
sentiment score.

    python examples/ppo_sentiment.py

downloads nothing: the corpus is written by a grammar, the tokenizer is trained on it, and a small GPT-2
learns to write such reviews before PPO steers it. Any part can be the real thing. The recipe of trlX and TRL,
a GPT-2 fine-tuned on IMDB, is

    python examples/ppo_sentiment.py --config configs/ppo_imdb.yaml --model lvwerra/gpt2-imdb \\
        --dataset stanfordnlp/imdb --reward lvwerra/distilbert-imdb

Every field of the PPO recipe is a flag (`--method.target 4`), and so is every field of the SFT recipe
(`--sft.train.total_steps 400`).
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from sentiment.corpus import Corpus, load_corpus, make_corpus
from sentiment.judge import Checkpoint, judge
from sentiment.pretrain import pretrain
from sentiment.report import report
from sentiment.rewards import reward_named
from stages import RECIPES, add_flags, split_overrides, stopped

import jrl
from jrl.cli import add_reward_flags


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flags, ppo_overrides, sft_overrides = parse(argv)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(flags.config), ppo_overrides)
    choice = dict(label=flags.reward_label, output=flags.reward_output)
    reward_fn = reward_named(flags.reward, **choice, mesh=jrl.reward_mesh(config))
    corpus = read_corpus(flags)

    start = flags.model
    if start is None:
        console.rule("Supervised fine-tuning")
        sft_config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(flags.sft_config), sft_overrides)
        start = pretrain(corpus, folder, config=sft_config, tokenizer_path=flags.tokenizer, seed=flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")
    tokenizer_path = flags.tokenizer or start
    reference = Checkpoint(start, tokenizer_path)
    options = dict(seed=flags.seed, gen_kwargs=config.method.gen_kwargs)
    before = judge(reference.complete(corpus.eval_prompts, **options), reward_fn, reference)

    console.rule("PPO")
    trainer = jrl.train(
        model_path=start,
        reward_fn=reward_fn,
        prompts=corpus.train_prompts,
        eval_prompts=corpus.eval_prompts,
        config=config.evolve(
            train={"seed": flags.seed, "checkpoint_dir": str(folder / "ppo")},
            tokenizer={"tokenizer_path": str(tokenizer_path)},
        ),
    )
    if trainer.interrupted:
        resume = ("--model", start, "--train.resume_from_checkpoint", folder / "ppo")
        return stopped(console, argv, folder, *resume)
    policy = Checkpoint(trainer.save_pretrained(folder / "policy"))
    after = judge(policy.complete(corpus.eval_prompts, **options), reward_fn, reference)
    seconds = time.perf_counter() - began
    report(console, folder, before, after, trainer.history, target_kl=config.method.target, seconds=seconds)
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str], list[str]]:
    """The flags, the overrides of the PPO recipe, and those of the SFT recipe (`--sft.` in front)."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="ppo_sentiment")
    top.add_argument(
        "--tokenizer", help="directory or hub id; default: the model's, or one trained on the corpus"
    )
    top.add_argument("--dataset", help="reviews: a .txt, .jsonl or .csv file, or a `datasets` name")
    top.add_argument(
        "--reward",
        default="vader",
        help="`vader`, an importable module:function, or a classifier (directory or hub id)",
    )
    add_reward_flags(top)
    top.add_argument("--config", default=RECIPES / "ppo_sentiment.yaml", help="PPO recipe")
    top.add_argument("--sft-config", default=RECIPES / "sft_sentiment.yaml", help="SFT recipe")
    top.add_argument("--num-reviews", type=int, default=8000, help="size of the generated corpus")
    top.add_argument("--num-eval-prompts", type=int, default=256, help="held-out prompts")
    flags, rest = top.parse_known_args(argv)
    return flags, *split_overrides(rest)


def read_corpus(flags: argparse.Namespace) -> Corpus:
    """The reviews named by `--dataset`, or written for the occasion."""
    if flags.dataset is not None:
        return load_corpus(flags.dataset, num_eval_prompts=flags.num_eval_prompts, seed=flags.seed)
    return make_corpus(flags.num_reviews, num_eval_prompts=flags.num_eval_prompts, seed=flags.seed)


if __name__ == "__main__":
    raise SystemExit(main())

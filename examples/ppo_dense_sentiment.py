# SPDX-License-Identifier: Apache-2.0
"""PPO with rewards per token: reviews that begin with scorn and end with praise.

    python examples/ppo_dense_sentiment.py

The reward function returns a list for every completion, one number a token: minus the sentiment of the first half on
the token in the middle, the sentiment of the second half on the last. A token's return then holds only what follows
it, so the policy learns each half from what it caused. `--sparse` puts the sum of both on the last token instead.

Nothing is downloaded: corpus, tokenizer and the policy to start from are those of `ppo_sentiment.py`. Every field of
the recipe is a flag; an adapter instead of the last layer is

    python examples/ppo_dense_sentiment.py --model.peft_config "{peft_type: LORA, r: 8, lora_alpha: 32}"
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from sentiment.corpus import make_corpus
from sentiment.pretrain import pretrain
from sentiment.rewards import vader
from stages import RECIPES, add_flags, report, split_overrides, stopped

import jrl

NAMES = ("reward/mean", "metrics/first_half", "metrics/second_half")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="ppo_dense_sentiment")
    top.add_argument("--sparse", action="store_true", help="the same reward, all of it on the last token")
    top.add_argument("--num-reviews", type=int, default=8000, help="size of the generated corpus")
    top.add_argument("--num-eval-prompts", type=int, default=256, help="held-out prompts")
    flags, rest = top.parse_known_args(argv)
    overrides, sft_overrides = split_overrides(rest)
    began, console, folder = time.perf_counter(), Console(), Path(flags.output_dir)
    config = jrl.apply_overrides(jrl.TRLConfig.load_yaml(RECIPES / "ppo_dense_sentiment.yaml"), overrides)
    corpus = make_corpus(flags.num_reviews, num_eval_prompts=flags.num_eval_prompts, seed=flags.seed)

    start = flags.model
    if start is None:
        sft_config = jrl.apply_overrides(
            jrl.TRLConfig.load_yaml(RECIPES / "sft_sentiment.yaml"), sft_overrides
        )
        start = pretrain(corpus, folder, config=sft_config, seed=flags.seed)
        if start is None:
            return stopped(console, argv, folder, "--sft.train.resume_from_checkpoint", folder / "sft")
    trainer = jrl.train(
        model_path=str(start),
        reward_fn=sparse_turnaround if flags.sparse else turnaround,
        prompts=corpus.train_prompts,
        eval_prompts=corpus.eval_prompts,
        metric_fn=half_sentiments,
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


def turnaround(output_tokens: Sequence[list[int]], tokenizer: Any) -> list[list[float]]:
    """A reward for every token: −sentiment of the first half at its last token, that of the second half at the end.

    Args:
      output_tokens: Ids of each completion, its EOS included.
      tokenizer: Decodes the halves.
    Returns:
      As many numbers as ids for each completion; all but two of them are 0. A single token is a second half.
    """
    rewards = []
    for tokens, first, second in zip(output_tokens, *_sentiments(output_tokens, tokenizer), strict=True):
        row = [0.0] * len(tokens)
        row[_middle(tokens) - 1] -= first
        row[-1] += second
        rewards.append(row)
    return rewards


def sparse_turnaround(output_tokens: Sequence[list[int]], tokenizer: Any) -> list[float]:
    """The same reward as one number a completion."""
    return [sum(row) for row in turnaround(output_tokens, tokenizer)]


def half_sentiments(output_tokens: Sequence[list[int]], tokenizer: Any) -> dict[str, list[float]]:
    """A metric function: the sentiment of each half, in [−1, 1]."""
    first, second = _sentiments(output_tokens, tokenizer)
    return {"first_half": first, "second_half": second}


def _middle(tokens: Sequence[int]) -> int:
    """Where the second half begins."""
    return len(tokens) // 2


def _sentiments(output_tokens: Sequence[list[int]], tokenizer: Any) -> tuple[list[float], list[float]]:
    """Sentiments of all first halves, and of all second halves."""
    halves = [(tokens[: _middle(tokens)], tokens[_middle(tokens) :]) for tokens in output_tokens]
    first, second = (
        tokenizer.batch_decode(list(side), skip_special_tokens=True) for side in zip(*halves, strict=True)
    )
    return vader(first), vader(second)


if __name__ == "__main__":
    raise SystemExit(main())

# SPDX-License-Identifier: Apache-2.0
"""The whole chain: SFT, a reward model from preferences, PPO against it, and DPO on the same preferences.

    python examples/rlhf_chain.py

downloads nothing. A small GPT-2 learns to write movie reviews; it writes two completions of every prompt; a judge
prefers one of them, with the noise of Bradley and Terry. From these pairs a reward model is learned, which PPO then
climbs, and DPO learns from them directly. The judge's own score is hidden: no training reads it. It closes the account,
in a table of all policies by learned and by true reward, and in a plot of both over the steps of PPO. Where the learned
reward still rises and the true one does not, the policy has found what the reward model is wrong about.

Every field of a stage's recipe is a flag, with the stage in front: `--sft.train.total_steps 400`,
`--reward.train.epochs 1`, `--ppo.method.init_kl_coef 0.2`, `--dpo.method.beta 0.5`. The same command with the same
`--output-dir` goes on where it was stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from chain.preferences import Pair, accuracy, best_accuracy, make_pairs, read_pairs, save_pairs
from chain.report import assess, report, scores_of
from rich.console import Console
from sentiment.corpus import Corpus, make_corpus
from sentiment.judge import Checkpoint
from sentiment.pretrain import pretrain
from stages import MAIN, RECIPES, add_flags, split_by_stage, stopped

import jrl

STAGE_RECIPES = {
    "sft": "sft_sentiment.yaml",
    "reward": "reward_chain.yaml",
    "ppo": "ppo_chain.yaml",
    "dpo": "dpo_chain.yaml",
}


class Stopped(Exception):
    """The process was asked to stop, and all is saved."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the chain; what it leaves is in `--output-dir`."""
    argv = sys.argv[1:] if argv is None else list(argv)
    flags, configs = parse(argv)
    console, chain = Console(), Chain(flags, configs)
    try:
        run(chain, console)
    except Stopped:
        return stopped(console, argv, chain.folder)
    return 0


def parse(argv: Sequence[str]) -> tuple[argparse.Namespace, dict[str, jrl.TRLConfig]]:
    """The flags, and the configuration of every stage."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    add_flags(top, run="rlhf_chain")
    top.epilog = (
        "Any --stage.a.b flag overrides a field of that stage's recipe; stages are sft, reward, ppo, dpo."
    )
    top.add_argument("--num-reviews", type=int, default=8000, help="size of the generated corpus")
    top.add_argument("--num-pairs", type=int, default=3000, help="prompts that get two completions each")
    top.add_argument("--num-eval-prompts", type=int, default=256, help="held-out prompts")
    flags, rest = top.parse_known_args(argv)
    overrides = split_by_stage(rest, STAGE_RECIPES)
    if overrides[MAIN]:
        top.error(
            f"{overrides[MAIN][0]} names no stage: --sft., --reward., --ppo. or --dpo. must stand in front."
        )
    return flags, {
        stage: jrl.apply_overrides(jrl.TRLConfig.load_yaml(RECIPES / recipe), overrides[stage])
        for stage, recipe in STAGE_RECIPES.items()
    }


class Chain:
    """The stages, each with its folder; one that an earlier call has finished is not run again.

    Args:
      flags: Of the command line.
      configs: Configuration by stage.

    Attributes:
      folder: All that the chain leaves behind.
      seconds: Wall-clock time by stage.
      histories: Records of the stages that ran in this call.
    """

    def __init__(self, flags: argparse.Namespace, configs: dict[str, jrl.TRLConfig]) -> None:
        self.flags, self.configs, self.folder = flags, configs, Path(flags.output_dir)
        self.seconds: dict[str, float] = {}

    def corpus(self) -> Corpus:
        """Reviews and prompts."""
        flags = self.flags
        return make_corpus(flags.num_reviews, num_eval_prompts=flags.num_eval_prompts, seed=flags.seed)

    @contextlib.contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        """Measures a stage."""
        began = time.perf_counter()
        yield
        self.seconds[stage] = round(time.perf_counter() - began, 1)

    def config(self, stage: str, start: Path) -> jrl.TRLConfig:
        """A stage's configuration: its own folder, in which it goes on where an earlier call was stopped."""
        run = self.folder / stage
        return self.configs[stage].evolve(
            model={"model_path": str(start)},
            train={
                "seed": self.flags.seed,
                "checkpoint_dir": str(run),
                "resume_from_checkpoint": str(run) if any(run.glob("checkpoint_*")) else None,
            },
        )

    def train(self, stage: str, start: Path, **data: Any) -> jrl.Trainer:
        """Runs a stage to its end; its model lies in `<stage>_model`."""
        trainer = jrl.train(config=self.config(stage, start), **data)
        if trainer.interrupted:
            raise Stopped
        trainer.save_pretrained(self.model(stage))
        return trainer

    def model(self, stage: str) -> Path:
        """Folder of a stage's model."""
        return self.folder / f"{stage}_model"


def run(chain: Chain, console: Console) -> None:
    """All stages and the report."""
    flags, corpus, gen_kwargs = chain.flags, chain.corpus(), chain.configs["ppo"].method.gen_kwargs
    with chain.clock("sft"):
        console.rule("Supervised fine-tuning")
        start = first_policy(chain, corpus)
    policy = Checkpoint(start)
    with chain.clock("pairs"):
        console.rule("Preferences")
        pairs = preferences(chain, policy, corpus.train_prompts[: flags.num_pairs], gen_kwargs)
    train, heldout = pairs[len(pairs) // 10 :], pairs[: len(pairs) // 10]
    console.print(f"{len(train)} pairs to learn from, {len(heldout)} held out")
    with chain.clock("reward"):
        console.rule("Reward model")
        figures, reward_model = learned_reward(chain, start, train, heldout)
    metric_fn = scores_of(reward_model)
    with chain.clock("ppo"):
        console.rule("PPO")
        ppo = chain.train(
            "ppo",
            start,
            reward_fn=reward_model,
            prompts=corpus.train_prompts,
            eval_prompts=corpus.eval_prompts,
            metric_fn=metric_fn,
        )
    with chain.clock("dpo"):
        console.rule("DPO")
        dpo = chain.train(
            "dpo",
            start,
            samples=[pair.record() for pair in train],
            eval_prompts=corpus.eval_prompts,
            metric_fn=metric_fn,
        )
    with chain.clock("report"):
        options: dict[str, Any] = {"gen_kwargs": gen_kwargs, "seed": flags.seed}
        policies = {
            "SFT": policy,
            "PPO": Checkpoint(chain.model("ppo")),
            "DPO": Checkpoint(chain.model("dpo")),
        }
        verdicts = [
            assess(name, found, policy, corpus.eval_prompts, reward_model, **options)
            for name, found in policies.items()
        ]
    histories = {"PPO": ppo.history, "DPO": dpo.history}
    report(console, chain.folder, verdicts, histories, figures, seconds=chain.seconds)


def first_policy(chain: Chain, corpus: Corpus) -> Path:
    """The model of the SFT stage, or that of `--model`, or that of an earlier call."""
    done = Path(chain.flags.model) if chain.flags.model else chain.model("sft")
    if (done / "config.json").exists() or chain.flags.model:
        return done
    config = chain.configs["sft"]
    run = chain.folder / "sft"
    if any(run.glob("checkpoint_*")):
        config = config.evolve(train={"resume_from_checkpoint": str(run)})
    found = pretrain(corpus, chain.folder, config=config, seed=chain.flags.seed)
    if found is None:
        raise Stopped
    return found


def preferences(
    chain: Chain, policy: Checkpoint, prompts: Sequence[str], gen_kwargs: dict[str, Any]
) -> list[Pair]:
    """The pairs, written down for the next call."""
    path = chain.folder / "pairs.jsonl"
    if not path.exists():
        save_pairs(path, make_pairs(policy, prompts, gen_kwargs=gen_kwargs, seed=chain.flags.seed))
    return read_pairs(path)


def learned_reward(
    chain: Chain, start: Path, train: Sequence[Pair], heldout: Sequence[Pair]
) -> tuple[dict[str, float], jrl.RewardModel]:
    """The reward model, and how well it orders pairs that it has not seen."""
    if not (chain.model("reward") / "config.json").exists():
        chain.train("reward", start, samples=[pair.record() for pair in train])
    reward_model = jrl.load_reward_model(chain.model("reward"), output="logit")
    chosen, rejected = (
        reward_model(samples=[pair.prompt + text for pair, text in zip(heldout, texts, strict=True)])
        for texts in ([pair.chosen for pair in heldout], [pair.rejected for pair in heldout])
    )
    right, agreement = accuracy(heldout, chosen, rejected)
    figures = {
        "pairs": float(len(train)),
        "accuracy": right,
        "best": best_accuracy(heldout),
        "agreement": agreement,
        "mean_score": float(np.mean([*chosen, *rejected])),
    }
    return {name: round(value, 4) for name, value in figures.items()}, reward_model


if __name__ == "__main__":
    raise SystemExit(main())

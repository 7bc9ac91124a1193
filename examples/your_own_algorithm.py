# SPDX-License-Identifier: Apache-2.0
"""An online algorithm of your own, as a value: REINFORCE with a constant baseline.

    python examples/your_own_algorithm.py --output-dir runs/reinforce

A section of the configuration, a recipe, an entry: registered, it has resume, meshes, LoRA, hydra, model cards and
`jrl plan` as every algorithm does. The task is the random walks of trlX, whose data have a mean optimality of 0.35.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

from randomwalks.pretrain import pretrain
from randomwalks.randomwalks import make_randomwalks

import jrl


@dataclass(kw_only=True)
class ReinforceConfig(jrl.OnlineConfig):
    """REINFORCE (Williams 1992).

    Attributes:
      baseline: Subtracted from every return; a constant near the mean reward lowers the variance.
    """

    name: str = "ReinforceConfig"
    baseline: float = 0.5


def reinforce_recipe(config: ReinforceConfig) -> jrl.Recipe:
    """Returns to go minus the baseline, times the log-probability; no critic, no reference."""
    return jrl.Recipe(
        estimate=jrl.learners.returns_to_go(baseline=config.baseline),
        loss=jrl.PolicyLoss(surrogate=jrl.losses.reinforce(), prefix="reinforce"),
        prefix="reinforce",
    )


def default_reinforce_config() -> jrl.TRLConfig:
    """One optimizer step an iteration, as the estimator wants it: on the policy's own samples."""
    return jrl.default_config(ReinforceConfig(num_rollouts=128, chunk_size=128), lr=3e-4, batch_size=128)


jrl.register(
    jrl.Method(
        name="reinforce",
        config=ReinforceConfig,
        recipe=reinforce_recipe,
        default=default_reinforce_config,
        title="REINFORCE with a constant baseline",
        summary="REINFORCE against a reward function",
        tags=("reinforce", "reinforcement-learning"),
        papers=lambda config: (
            "@article{williams1992simple,\n"
            "  title = {Simple statistical gradient-following algorithms for connectionist reinforcement learning},\n"
            "  author = {Williams, Ronald J.},\n  year = {1992},\n  journal = {Machine Learning 8, 229--256},\n}",
        ),
    )
)


def main() -> None:
    """Learns the walks by imitation, then to walk well by REINFORCE."""
    top = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    top.add_argument("--output-dir", type=Path, default=Path("runs/reinforce"))
    top.add_argument("--steps", type=int, default=160, help="optimizer steps of REINFORCE")
    top.add_argument("--sft-steps", type=int, help="of the imitation; default: the recipe's")
    flags = top.parse_args()
    task = make_randomwalks(seed=1000)
    recipe = Path(__file__).parents[1] / "configs" / "sft_randomwalks.yaml"
    sft = jrl.TRLConfig.load_yaml(recipe)
    if flags.sft_steps:
        sft = sft.evolve(train={"total_steps": flags.sft_steps})
    start = pretrain(task.walks, task.letters, flags.output_dir, config=sft, seed=0)
    config = default_reinforce_config().evolve(
        method={"gen_kwargs": {"max_new_tokens": 9}},
        scheduler={"name": "constant", "kwargs": {}},
        train={
            "total_steps": flags.steps,
            "epochs": flags.steps,
            "seq_length": 10,
            "eval_interval": 20,
            "checkpoint_dir": str(flags.output_dir / "reinforce"),
        },
    )
    jrl.train(
        model_path=str(start),
        reward_fn=task.reward_fn,
        prompts=task.eval_prompts,
        eval_prompts=task.eval_prompts * 50,
        metric_fn=task.metric_fn,
        config=config,
    )


if __name__ == "__main__":
    main()

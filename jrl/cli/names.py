# SPDX-License-Identifier: Apache-2.0
"""Names of the commands and one line of each: `jrl --help` reads these and imports no command.

Algorithms say their line themselves (`Method.summary`); a test holds this table to it.
"""

from __future__ import annotations

from typing import NamedTuple


class Name(NamedTuple):
    """A command, as the list of commands shows it.

    Attributes:
      summary: One line.
      aliases: Other names of it: the variants of an algorithm.
      module: Of a tool: where its `add_flags` and its `prepare` are.
    """

    summary: str
    aliases: tuple[str, ...] = ()
    module: str = ""


ALGORITHMS = {
    "ppo": Name("online PPO against a reward function"),
    "grpo": Name(
        "policy gradients without a critic (GRPO, RLOO, DAPO, ...) against a reward function",
        (
            *("dr_grpo", "dapo", "bnpo", "gspo", "gspo_token", "cispo", "rloo", "reinforce_pp"),
            *(
                "reinforce_pp_baseline",
                "remax",
                "opo",
                "sapo",
                "gmpo",
                "maxrl",
                "luspo",
                "vespo",
                "dppo",
                "gfpo",
            ),
        ),
    ),
    "rft": Name("rejection fine-tuning: trains on those of its own samples that score best"),
    "ilql": Name("offline reinforcement learning from samples with a reward each"),
    "sft": Name("supervised fine-tuning"),
    "dpo": Name("direct preference optimisation; --help lists TRL's flat fields"),
    "reward": Name("a reward model from preferences; --help lists TRL's flat fields"),
    "ddpo": Name("reinforcement learning of a diffusion model; --help lists its fields"),
    "reward_gradient": Name("gradients of a differentiable reward through a diffusion model (DRaFT)"),
}
"""jrl's own algorithms."""
TOOLS = {
    "generate": Name("complete prompts with a checkpoint", module="jrl.cli.generate"),
    "bench": Name("how fast a model samples and learns on this machine", module="jrl.cli.bench"),
    "plan": Name("memory and traffic of a recipe on devices not yet here", module="jrl.cli.plan"),
    "config": Name("an algorithm's recipe, each field under what it means", module="jrl.cli.config"),
    "doctor": Name(
        "versions, devices, memory, disk, caches and common traps, each with a verdict",
        ("env",),
        "jrl.cli.environment",
    ),
    "report": Name("a run, or several, as one HTML page", module="jrl.cli.report"),
    "view": Name("the report of runs at work, live in a browser", module="jrl.cli.view"),
    "sweep": Name("search hyperparameters of a script with Ray Tune", module="jrl.cli.sweep"),
}
"""Commands that are no algorithm's."""

# SPDX-License-Identifier: Apache-2.0
"""Names that jrl itself registers, and the module that registers each: imported when the name is first looked up.

A configuration is read the same way whatever was imported before it, and nobody waits for algorithms that they do not
name.
"""

from __future__ import annotations

METHODS_MODULE = "jrl.methods"
"""The module that registers every algorithm."""
METHODS = dict.fromkeys(
    (
        "DDPOConfig",
        "DPOConfig",
        "GRPOConfig",
        "ILQLConfig",
        "PPOConfig",
        "RFTConfig",
        "RewardConfig",
        "RewardGradientConfig",
        "SFTConfig",
    ),
    METHODS_MODULE,
)
"""Sections of configurations."""
TRAINERS = {
    "DDPOTrainer": "jrl.trainers.diffusion.ddpo",
    "DPOTrainer": "jrl.trainers.dpo",
    "ILQLTrainer": "jrl.trainers.ilql",
    "OnlineTrainer": "jrl.trainers.online",
    "PPOTrainer": "jrl.trainers.ppo",
    "RFTTrainer": "jrl.trainers.rft",
    "RewardGradientTrainer": "jrl.trainers.diffusion.reward_gradient",
    "RewardTrainer": "jrl.trainers.reward_model",
    "SFTTrainer": "jrl.trainers.sft",
}
"""Trainers."""
LAYOUTS = ("jrl.trlx.old_layouts",)
"""Translators of configurations that another library or release wrote."""

# SPDX-License-Identifier: Apache-2.0
"""Environments of other packages, and tools, for `jrl.train(environment=...)`."""

from jrl.environments.reasoning import ReasoningGym, reasoning_gym_prompts, reasoning_gym_reward
from jrl.environments.text_arena import TextArena, TextArenaChat, text_arena_prompts
from jrl.environments.tool_use import Tools
from jrl.environments.verifiers import Verifiers, verifiers_prompts

__all__ = [
    "ReasoningGym",
    "TextArena",
    "TextArenaChat",
    "Tools",
    "Verifiers",
    "reasoning_gym_prompts",
    "reasoning_gym_reward",
    "text_arena_prompts",
    "verifiers_prompts",
]

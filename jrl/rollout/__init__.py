# SPDX-License-Identifier: Apache-2.0
"""Experience: sampling, scoring, text, the user's rewards, and their statistics by prompt."""

from jrl.rollout.prompt_statistics import (
    global_advantages,
    group_advantages,
    prompt_advantages,
    prompt_stats,
)
from jrl.rollout.rewards import call_reward_fn
from jrl.rollout.text import Texts, decode_rows

__all__ = [
    "Texts",
    "call_reward_fn",
    "decode_rows",
    "global_advantages",
    "group_advantages",
    "prompt_advantages",
    "prompt_stats",
]

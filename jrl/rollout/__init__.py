# SPDX-License-Identifier: Apache-2.0
"""Experience: sampling, scoring, text, and the user's rewards."""

from jrl.rollout.rewards import call_reward_fn
from jrl.rollout.text import Texts, decode_rows

__all__ = ["Texts", "call_reward_fn", "decode_rows"]

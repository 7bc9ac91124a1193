# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that verifiers hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

REWARDS, TEST = "jrl/rewards.py", "tests/test_rewards.py"

PATCHES = [
    Mutation(  # digits of every script
        rule="9.4",
        file=REWARDS,
        old='_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)"',
        new='_DIGITS = r"(?:[0-9]{1,3}(?:,[0-9]{3})+|\\d+)"',
        test=f"{TEST}::test_lore_9_4_known_false_positives_stay_false",
    ),
    Mutation(  # units are not looked at
        rule="9.4",
        file=REWARDS,
        old='return None if value is None else Number(-value if found["sign"] in ("-", "\\u2212") else value, unit)',
        new='return None if value is None else Number(-value if found["sign"] in ("-", "\\u2212") else value, "")',
        test=f"{TEST}::test_lore_9_4_units_must_agree",
    ),
    Mutation(  # the example in a repeated prompt counts
        rule="9.4",
        file=REWARDS,
        old="return text.split(echoed)[-1] if any(mark in echoed for mark in marks) else text",
        new="return text",
        test=f"{TEST}::test_lore_9_4_an_echo_of_the_prompt_is_no_answer",
    ),
]

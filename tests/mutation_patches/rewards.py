# SPDX-License-Identifier: Apache-2.0
"""Breaches of the rules that verifiers hold."""

from __future__ import annotations

from tests.mutation_patches.base import Mutation

# fmt: off
PATCHES = [
    # digits of every script
    Mutation("9.4", "jrl.rewards",
             "'(?:[0-9]{1,3}(?:,[0-9]{3})+|[0-9]+)'", "'(?:[0-9]{1,3}(?:,[0-9]{3})+|\\\\d+)'",
             "tests/test_rewards.py::test_lore_9_4_known_false_positives_stay_false"),
    # units are not looked at
    Mutation("9.4", "jrl.rewards._parse",
             "Number(-value if found['sign'] in ('-', '−') else value, unit)",
             "Number(-value if found['sign'] in ('-', '−') else value, '')",
             "tests/test_rewards.py::test_lore_9_4_units_must_agree"),
    # the example in a repeated prompt counts
    Mutation("9.4", "jrl.rewards._behind",
             "text.split(echoed)[-1] if any((mark in echoed for mark in marks)) else text", "text",
             "tests/test_rewards.py::test_lore_9_4_an_echo_of_the_prompt_is_no_answer"),
]

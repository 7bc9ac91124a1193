# SPDX-License-Identifier: Apache-2.0
"""Demonstrations to imitate, as rows with a mask."""

from jrl.data.demonstrations.classic import completion_mask, places, template_ids
from jrl.data.demonstrations.completions import CompletionSet
from jrl.data.demonstrations.demonstration_records import IGNORED_LABEL
from jrl.data.demonstrations.demonstration_set import DemonstrationFormat, DemonstrationSet
from jrl.data.demonstrations.dialogue import tokenize_dialogue
from jrl.data.demonstrations.packing import PackedSet
from jrl.data.demonstrations.rows import DialogueRow, RowSet

__all__ = [
    "IGNORED_LABEL",
    "CompletionSet",
    "DemonstrationFormat",
    "DemonstrationSet",
    "DialogueRow",
    "PackedSet",
    "RowSet",
    "completion_mask",
    "places",
    "template_ids",
    "tokenize_dialogue",
]

# SPDX-License-Identifier: Apache-2.0
"""Preference pairs, for DPO and reward models."""

from jrl.data.preferences.comparison_format import ComparisonFormat
from jrl.data.preferences.preference_format import PairRow, PreferenceFormat
from jrl.data.preferences.preference_records import check_preference
from jrl.data.preferences.preference_set import ComparisonSet, PreferenceSet
from jrl.data.preferences.preference_tokens import TokenPair, tokenize_pairs

__all__ = [
    "ComparisonFormat",
    "ComparisonSet",
    "PairRow",
    "PreferenceFormat",
    "PreferenceSet",
    "TokenPair",
    "check_preference",
    "tokenize_pairs",
]

# SPDX-License-Identifier: Apache-2.0
"""Samples of a run: prompts, draws, evaluations."""

from jrl.trainers.rollouts.draws import Draws
from jrl.trainers.rollouts.evaluation import Evaluation
from jrl.trainers.rollouts.prompt_sets import document_start, prompt_budget

__all__ = [
    "Draws",
    "Evaluation",
    "document_start",
    "prompt_budget",
]

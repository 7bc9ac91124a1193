# SPDX-License-Identifier: Apache-2.0
"""Model cards: text, citations, a plot of the run."""

from jrl.trainers.cards.card import model_card

__all__ = [
    "model_card",
]

# SPDX-License-Identifier: Apache-2.0
"""Wordle with 200 words, letter by letter: the world, data of a middling player, and the exact optimum."""

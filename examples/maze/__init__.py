# SPDX-License-Identifier: Apache-2.0
"""A maze in text: the world, data of a poor player, and the exact value of every way to play it."""

# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/hh_dialogue.py`: dialogues with a good and a bad reply, and a reward learned from them."""

# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/summarize_t5.py`: short news with a summary each, a small T5, and the overlap of two texts."""

# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/rlhf_chain.py`: a hidden judge's preferences, and what they led to."""

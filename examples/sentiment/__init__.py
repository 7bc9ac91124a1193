# SPDX-License-Identifier: Apache-2.0
"""The parts of `examples/ppo_sentiment.py`: a review corpus, a small policy, a reward, and a report."""

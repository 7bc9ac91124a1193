# SPDX-License-Identifier: Apache-2.0
"""RL post-training of language models in functional JAX/Flax."""

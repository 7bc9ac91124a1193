# SPDX-License-Identifier: Apache-2.0
"""Flax models of the Hugging Face architectures, and their checkpoints."""

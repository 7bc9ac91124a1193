# SPDX-License-Identifier: Apache-2.0
"""Host-side data: tokenizers, prompts, samples to imitate, and batches of them."""

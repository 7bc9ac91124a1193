# SPDX-License-Identifier: Apache-2.0
"""Text-to-image diffusion models of the Stable Diffusion kind, and their folders."""

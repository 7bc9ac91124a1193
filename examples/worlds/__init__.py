# SPDX-License-Identifier: Apache-2.0
"""What the worlds of several turns share: how they are learned, played and reported."""

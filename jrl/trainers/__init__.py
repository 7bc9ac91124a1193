# SPDX-License-Identifier: Apache-2.0
"""The loops, and all side effects."""

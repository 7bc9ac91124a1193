# SPDX-License-Identifier: Apache-2.0
"""Sums that a small model cannot do in its head, and a calculator that it may ask."""

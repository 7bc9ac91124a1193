# SPDX-License-Identifier: Apache-2.0
"""Problems with an answer that a program checks, and a small model that has seen them worked with mistakes."""

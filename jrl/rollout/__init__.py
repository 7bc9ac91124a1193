# SPDX-License-Identifier: Apache-2.0
"""Experience: sampling, scoring, text, and the user's rewards."""

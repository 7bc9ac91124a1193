# SPDX-License-Identifier: Apache-2.0
"""A text-to-image model that two processor cores train in minutes: pictures of shapes, networks, pretraining."""

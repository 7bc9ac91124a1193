# SPDX-License-Identifier: Apache-2.0
"""Memory and communication of a run, estimated from shapes."""

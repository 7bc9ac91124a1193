# SPDX-License-Identifier: Apache-2.0
"""One pure update an algorithm: `(state, frozen, batch, key) -> (state, metrics)`."""

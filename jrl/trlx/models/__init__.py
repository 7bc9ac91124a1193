# SPDX-License-Identifier: Apache-2.0
"""trlX's models and the configurations of the methods that learn with them."""

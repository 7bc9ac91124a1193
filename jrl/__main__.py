# SPDX-License-Identifier: Apache-2.0
"""`python -m jrl` is the `jrl` command."""

import sys

from jrl.cli import main

sys.exit(main())

# SPDX-License-Identifier: Apache-2.0
"""The example of a new method: short, and it learns."""

import pytest

from tests.examples.processes import EXAMPLES, finish, start

PROGRAM = EXAMPLES / "new_method.py"


def test_it_stays_under_sixty_lines():
    assert len(PROGRAM.read_text().splitlines()) < 60


@pytest.mark.slow
def test_it_runs(tmp_path):
    output = finish(start(tmp_path / "run", 2, cwd=tmp_path, program=[PROGRAM]))
    assert "evaluation at step 2" in output and (tmp_path / "run" / "checkpoint_2").exists()

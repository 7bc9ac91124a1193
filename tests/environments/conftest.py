# SPDX-License-Identifier: Apache-2.0
import pytest

from tests.trainers.runs import save_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")

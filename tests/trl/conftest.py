# SPDX-License-Identifier: Apache-2.0
from typing import Any

import pytest

from jrl.trl.group_native import GroupNative
from tests.environments.chat_models import only
from tests.trainers.runs import save_tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture
def writes(monkeypatch):
    """Has models write nothing but some calls and answers."""

    def begin(calls: Any, answers: Any) -> None:
        prepare = GroupNative.prepare

        def restricted(trainer: GroupNative) -> None:
            trainer.logit_mask = only(trainer.tokenizer, calls, answers)
            prepare(trainer)

        monkeypatch.setattr(GroupNative, "prepare", restricted)

    return begin

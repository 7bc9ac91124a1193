# SPDX-License-Identifier: Apache-2.0
"""What counts as a method of a script's own, and what such a method may not do while it is traced."""

from __future__ import annotations

import pytest

from jrl.interop.overrides import (
    own_methods,
    refuse_assigned,
    refuse_overrides,
    refuse_while_traced,
    traced,
)
from jrl.trl import RewardTrainer


def mine(*arguments):
    return arguments


class Derived(RewardTrainer):
    compute_loss = mine


def names(cls, **attributes):
    made = object.__new__(cls)
    vars(made).update(attributes)
    return set(own_methods(made, RewardTrainer, ("compute_loss", "evaluate")))


def test_a_method_of_ones_own_is_on_a_subclass_an_object_or_jrls_class(monkeypatch):
    assert names(RewardTrainer) == set()
    assert names(Derived) == {"compute_loss"}
    assert names(RewardTrainer, evaluate=mine) == {"evaluate"}
    monkeypatch.setattr(RewardTrainer, "compute_loss", mine)
    assert names(RewardTrainer) == {"compute_loss"}


def test_what_nothing_calls_is_refused_wherever_it_was_put(monkeypatch):
    cures = {"training_step": "Override `compute_loss`."}
    refuse_overrides(Derived, RewardTrainer, cures)
    refuse_assigned(object.__new__(RewardTrainer), cures)
    made = object.__new__(RewardTrainer)
    made.training_step = mine
    with pytest.raises(TypeError, match=r"`RewardTrainer\.training_step` was set.*Override `compute_loss`"):
        refuse_assigned(made, cures)
    monkeypatch.setattr(RewardTrainer, "training_step", mine, raising=False)
    for cls in (RewardTrainer, Derived):
        with pytest.raises(TypeError, match=f"{cls.__name__} must not override `training_step`"):
            refuse_overrides(cls, RewardTrainer, cures)


def test_what_changes_is_refused_inside_alone():
    def reads():
        refuse_while_traced("state", "Do it elsewhere.")

    with pytest.raises(TypeError, match=r"`Mine\.loss` must not use `state`: .* Do it elsewhere\."):
        traced("Mine.loss", reads)
    reads()

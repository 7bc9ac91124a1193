# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules of torch, given where TRL took them: translated to the number, or refused in words."""

from __future__ import annotations

import numpy as np
import pytest

from jrl.trl.torch_optimizers import is_torch_optimizer, is_torch_schedule, named_optimizer, tabulated

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity


def weights():
    return [torch.nn.Parameter(torch.ones(2)), torch.nn.Parameter(torch.ones(3))]


@pytest.mark.parametrize(("make", "expected"), [
    (lambda ps: torch.optim.Adam(ps, lr=2e-3),
     ("adam", {"lr": 2e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0})),
    (lambda ps: torch.optim.AdamW(ps, 1e-3, betas=(0.8, 0.9), weight_decay=0.1),
     ("adamw", {"lr": 1e-3, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.1})),
    (lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
     ("sgd", {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.0})),
    (lambda ps: torch.optim.AdamW([{"params": ps[:1], "weight_decay": 0.2},
                                   {"params": ps[1:], "weight_decay": 0.0}], lr=1e-3),
     ("adamw", {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.2})),
])  # fmt: skip
def test_an_object_is_read_to_the_number(make, expected):
    given = make(weights())
    assert is_torch_optimizer(given) and named_optimizer(given) == expected


def test_a_class_with_its_arguments():
    """What is not given is as torch has it: its own rate, too."""
    for kind, kwargs in (
        (torch.optim.SGD, {"lr": 0.5, "momentum": 0.1}),
        (torch.optim.AdamW, {}),
        (torch.optim.RMSprop, {"centered": False}),
    ):
        assert named_optimizer(kind, kwargs) == named_optimizer(kind(weights(), **kwargs))
    assert named_optimizer(torch.optim.AdamW, {})[1]["lr"] == 1e-3
    with pytest.raises(TypeError, match="unexpected keyword argument 'momentun'"):
        named_optimizer(torch.optim.SGD, {"momentun": 0.9})
    assert is_torch_optimizer(torch.optim.Adam) and not is_torch_optimizer("adam")


@pytest.mark.parametrize(("make", "message"), [
    (lambda ps: torch.optim.LBFGS(ps), "torch's LBFGS has no counterpart here; .* have"),
    (lambda ps: torch.optim.Adam(ps, amsgrad=True), "`amsgrad` has no counterpart"),
    (lambda ps: torch.optim.SGD([{"params": ps[:1], "lr": 1.0}, {"params": ps[1:]}], lr=0.1),
     "groups of SGD must have"),
])  # fmt: skip
def test_what_has_no_counterpart_names_the_cure(make, message):
    with pytest.raises(ValueError, match=message) as raised:
        named_optimizer(make(weights()))
    assert "\n" not in str(raised.value)


def test_a_schedule_is_its_rates_and_stays_as_it_was():
    from transformers import get_cosine_schedule_with_warmup

    optimizer = torch.optim.AdamW(weights(), lr=2e-3)
    schedule = get_cosine_schedule_with_warmup(optimizer, 2, 10)
    assert is_torch_schedule(schedule) and named_optimizer(optimizer)[1]["lr"] == 2e-3
    found, start = tabulated(schedule, 11), schedule.get_last_lr()
    assert start == schedule.get_last_lr() == [0.0] and optimizer.param_groups[0]["lr"] == 0.0
    for step in range(11):
        assert float(found(step)) == pytest.approx(schedule.get_last_lr()[0], rel=1e-6, abs=1e-12)
        optimizer.step()
        schedule.step()
    assert float(found(99)) == float(found(10))
    with pytest.raises(ValueError, match="follows a metric"):
        tabulated(torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer), 3)


def test_all_that_a_schedule_changes_is_put_back_and_told():
    optimizer = torch.optim.SGD(weights(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=10)
    before = {name: value for name, value in optimizer.param_groups[0].items() if name != "params"}
    with pytest.warns(UserWarning, match="OneCycleLR also changes momentum"):
        tabulated(schedule, 6)
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before
    with pytest.raises(ValueError, match="total"):  # torch's own words
        tabulated(schedule, 99)
    assert {name: value for name, value in optimizer.param_groups[0].items() if name != "params"} == before
    assert schedule.last_epoch == 0


def test_a_trainer_takes_both(checkpoint, tmp_path):
    from jrl.trl import SFTConfig, SFTTrainer

    optimizer = torch.optim.SGD(weights(), lr=1.0)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    args = SFTConfig(
        str(tmp_path), max_steps=3, logging_steps=1, per_device_train_batch_size=2, report_to="none"
    )
    texts = [{"text": f"{n} thin things"} for n in range(4)]
    trainer = SFTTrainer(str(checkpoint), args=args, train_dataset=texts, optimizers=(optimizer, schedule))
    trainer.train()
    rates = [line["learning_rate"] for line in trainer.state.log_history if "learning_rate" in line]
    np.testing.assert_allclose(rates, [1.0, 0.5, 0.25])

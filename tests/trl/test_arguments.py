# SPDX-License-Identifier: Apache-2.0
"""From a flat configuration to the sections of a run."""

from __future__ import annotations

import warnings

import jax
import numpy as np
import pytest
from transformers import TrainingArguments
from transformers.trainer_utils import SchedulerType
from transformers.training_args import OptimizerNames

from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.trl import arguments as arguments_module
from jrl.trl.arguments import check_meanings, compute_dtype, interval, train_section
from jrl.trl.configs import DPOConfig, RewardConfig, SFTConfig
from jrl.trl.constructor_arguments import flat_copy
from jrl.trl.optimization import OPTIMIZERS, SCHEDULES, optimizer_section, scheduler_section


def section(config, *, num_rows=10, mesh=None, seq_length=32):
    return train_section(config, trainer="SFTTrainer", seq_length=seq_length, num_rows=num_rows, mesh=mesh)


def config(**fields):
    return SFTConfig(output_dir="out", **fields)


def test_rows_are_counted_over_devices_and_accumulation():
    found = section(config(per_device_train_batch_size=3, gradient_accumulation_steps=2), num_rows=100)
    devices = jax.device_count()
    assert (found.minibatch_size, found.batch_size) == (3 * devices, 6 * devices)
    assert found.epochs == 3 and found.total_steps == 3 * -(-100 // (6 * devices))


def test_devices_of_the_tensor_axis_share_their_rows(monkeypatch):
    monkeypatch.setattr(jax, "device_count", lambda: 8)
    found = section(config(per_device_train_batch_size=2), mesh={"tensor": 4, "data": 2})
    assert found.minibatch_size == 4 and found.mesh == {"tensor": 4, "data": 2}


@pytest.mark.parametrize(
    ("fields", "steps", "epochs"),
    [
        ({"num_train_epochs": 2}, 6, 2),
        ({"num_train_epochs": 0.5}, 2, 1),
        ({"max_steps": 7}, 7, 3),
        ({"max_steps": 2, "num_train_epochs": 9}, 2, 1),
    ],
)
def test_max_steps_count_before_passes(fields, steps, epochs):
    found = section(config(per_device_train_batch_size=4, **fields))
    assert (found.total_steps, found.epochs) == (steps, epochs)


def test_a_stream_needs_max_steps():
    with pytest.raises(ValueError, match="`max_steps` must be positive for a data set without a length"):
        section(config(), num_rows=None)
    assert section(config(max_steps=5), num_rows=None).total_steps == 5


@pytest.mark.parametrize(
    ("strategy", "steps", "expected"),
    [("no", 5, 0), ("epoch", 5, 3), ("steps", 5, 5), ("steps", 0.25, 3), ("best", 5, 0)],
)
def test_intervals(strategy, steps, expected):
    assert interval(strategy, steps, total_steps=12, per_pass=3) == expected


def test_evaluation_follows_the_log_unless_told():
    assert section(config(eval_strategy="steps", logging_steps=4)).eval_interval == 4
    assert section(config(evaluation_strategy="epoch")).eval_interval == 2  # the older name
    assert section(config()).eval_interval == 0


def test_checkpoints():
    found = section(
        config(save_strategy="epoch", save_total_limit=2, save_only_model=True, overwrite_output_dir=True)
    )
    assert (found.checkpoint_interval, found.keep_checkpoints) == (2, 2)
    assert found.overwrite and not found.save_optimizer and not found.save_best
    best = config(load_best_model_at_end=True, eval_strategy="epoch", save_strategy="epoch")
    assert section(best).save_best and (best.metric_for_best_model, best.greater_is_better) == ("loss", False)
    with pytest.raises(ValueError, match="`load_best_model_at_end` needs evaluations"):
        config(load_best_model_at_end=True)


def test_what_is_said_about_the_run():
    found = section(
        config(seed=7, run_name="a", report_to="tensorboard", logging_dir="logs", max_grad_norm=0)
    )
    assert (found.seed, found.run_name, found.tracker, found.logging_dir) == (7, "a", "tensorboard", "logs")
    assert found.max_grad_norm is None and found.remat and found.checkpoint_dir == "out"
    assert section(config(gradient_checkpointing=False, report_to="none")).tracker is None
    with pytest.raises(ValueError, match=r"`report_to` must be one of .*got \['mlflow'\]"):
        section(config(report_to="mlflow"))


@pytest.mark.parametrize(("bf16", "backend", "expected"), [
    (None, "cpu", "float32"), (None, "gpu", "bfloat16"), (True, "cpu", "bfloat16"), (False, "gpu", "float32"),
])  # fmt: skip
def test_the_compute_dtype(monkeypatch, bf16, backend, expected):
    monkeypatch.setattr(arguments_module.jax, "default_backend", lambda: backend)
    assert compute_dtype(config(bf16=bf16)) == expected


def test_half_precision_becomes_bfloat16_and_says_so():
    with pytest.warns(UserWarning, match="`fp16` computes in bfloat16"):
        assert compute_dtype(config(fp16=True)) == "bfloat16"
    with pytest.raises(ValueError, match="must not both be True"):
        config(fp16=True, bf16=True)


def test_transformers_own_arguments_are_taken_with_their_own_defaults():
    plain = TrainingArguments("out", report_to="none", use_cpu=True)
    found = flat_copy(plain, DPOConfig)
    assert found.learning_rate == 5e-5 and found.logging_steps == 500 and found.beta == 0.1
    assert compute_dtype(found) == "float32" and not section(found).remat


def test_a_copy_is_a_copy():
    given = DPOConfig("out", loss_type="ipo")
    found = flat_copy(given, DPOConfig)
    found.beta = 0.7
    assert given.beta == 0.1 and found.loss_type == ["ipo"]


def test_defaults_say_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for made in (RewardConfig, SFTConfig, DPOConfig):
            check_meanings(made("out"), made.MEANINGS)
        check_meanings(TrainingArguments("out", report_to="none"), SFTConfig.MEANINGS)


@pytest.mark.parametrize(("fields", "name"), [
    ({"push_to_hub": True}, "push_to_hub"), ({"deepspeed": "ds.json"}, "deepspeed"), ({"fsdp": "full_shard"}, "fsdp"),
    ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
])  # fmt: skip
def test_what_cannot_be_had_is_refused(fields, name):
    with pytest.raises(ValueError, match=f"`{name}` must be left at its default"):
        check_meanings(config(**fields), SFTConfig.MEANINGS)


def test_what_has_no_effect_is_said_once():
    given = config(dataloader_num_workers=3)
    with pytest.warns(UserWarning, match=r"`SFTConfig\(dataloader_num_workers=\)` has no effect"):
        check_meanings(given, SFTConfig.MEANINGS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_meanings(given, SFTConfig.MEANINGS)


def test_an_unknown_field_is_an_error():
    with pytest.raises(TypeError, match="bogus"):
        config(bogus=1)


@pytest.mark.parametrize("name", [member.value for member in OptimizerNames])
def test_every_optimizer_is_mapped_or_refused_by_name(name):
    given = config(optim=name)
    if name not in OPTIMIZERS:
        with pytest.raises(ValueError, match=f"got '{name}'"):
            optimizer_section(given)
        return
    found = optimizer_section(given)
    make_optimizer(found.name, found.kwargs, make_schedule("constant", {}), max_grad_norm=1.0)


def test_an_optimizer_of_few_bits_names_adapters():
    with pytest.raises(ValueError, match="train LoRA adapters"):
        optimizer_section(config(optim="adamw_bnb_8bit"))


def test_the_numbers_of_adam():
    given = config(learning_rate=3e-4, adam_beta1=0.8, adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.1)
    expected = {"lr": 3e-4, "betas": [0.8, 0.95], "eps": 1e-6, "weight_decay": 0.1}
    assert optimizer_section(given).kwargs == expected
    assert optimizer_section(config(optim="sgd", optim_args="momentum=0.9, nesterov=True")).kwargs == {
        "lr": 2e-5, "weight_decay": 0.0, "momentum": 0.9, "nesterov": True,
    }  # fmt: skip
    with pytest.raises(ValueError, match="`optim_args` must be"):
        optimizer_section(config(optim="sgd", optim_args="momentum"))


KWARGS = {
    "cosine_with_min_lr": {"min_lr": 1e-5},
    "cosine_with_restarts": {"num_cycles": 3},
    "polynomial": {"lr_end": 1e-6},
    "warmup_stable_decay": {"num_decay_steps": 7},
}
FURTHER = [
    ("cosine_with_restarts", {}),
    ("inverse_sqrt", {"timescale": 50}),
    ("polynomial", {"lr_end": 1e-6, "power": 2.0}),
    *(
        (
            "warmup_stable_decay",
            {"num_decay_steps": 9, "warmup_type": kind, "decay_type": kind, "min_lr_ratio": 0.1},
        )
        for kind in ("linear", "cosine", "1-sqrt")
    ),
    ("warmup_stable_decay", {"num_decay_steps": 5, "num_stable_steps": 3}),
]
"""Schedules with further arguments."""


@pytest.mark.parametrize("name", [member.value for member in SchedulerType])
def test_every_schedule_is_mapped_or_refused_by_name(name):
    given = config(
        lr_scheduler_type=name, warmup_steps=2, eval_strategy="epoch", lr_scheduler_kwargs=KWARGS.get(name)
    )
    if name not in SCHEDULES:
        with pytest.raises(ValueError, match=f"got '{name}'"):
            scheduler_section(given, 20)
        return
    found = scheduler_section(given, 20)
    schedule = make_schedule(found.name, found.kwargs)(2e-5)
    assert all(np.isfinite(float(schedule(step))) for step in range(21))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:Both num_training_steps and num_stable_steps")
@pytest.mark.parametrize("warmup", [0, 4, 30])  # 30: the run ends within its warm-up
@pytest.mark.parametrize(
    ("name", "kwargs"), [*((name, KWARGS.get(name)) for name in sorted(SCHEDULES)), *FURTHER]
)
def test_schedules_are_transformers(name, kwargs, warmup):
    torch = pytest.importorskip("torch")
    from transformers import get_scheduler

    rate, total = 2e-2, 20
    if name == "constant":
        warmup = 0
    given = config(
        learning_rate=rate, lr_scheduler_type=name, warmup_steps=warmup, lr_scheduler_kwargs=kwargs
    )
    found = scheduler_section(given, total)
    schedule = make_schedule(found.name, found.kwargs)(rate)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=rate)
    oracle = get_scheduler(
        name,
        optimizer,
        num_warmup_steps=warmup,
        num_training_steps=total,
        scheduler_specific_kwargs=kwargs,
    )
    for step in range(total):
        assert float(schedule(step)) == pytest.approx(oracle.get_last_lr()[0], rel=1e-5, abs=1e-9), step
        optimizer.step()
        oracle.step()


def test_a_schedule_names_what_it_does_not_take():
    for name, kwargs in (
        ("cosine", {"num_cycles": 2}),
        ("warmup_stable_decay", {}),
        ("cosine_with_min_lr", {}),
    ):
        with pytest.raises(ValueError, match="`lr_scheduler_kwargs`"):
            scheduler_section(config(lr_scheduler_type=name, lr_scheduler_kwargs=kwargs), 10)
    with pytest.raises(ValueError, match="'linear' takes no"):
        scheduler_section(config(lr_scheduler_kwargs={"power": 2}), 10)
    with pytest.raises(ValueError, match="must be a dict, or JSON"):
        scheduler_section(config(lr_scheduler_kwargs="power=2"), 10)
    assert config(lr_scheduler_kwargs='{"min_lr": 1e-6}').lr_scheduler_kwargs == {"min_lr": 1e-6}


def test_the_warm_up():
    assert scheduler_section(config(warmup_steps=3), 10).kwargs["warmup_steps"] == 3
    assert scheduler_section(config(warmup_steps=0.25), 10).kwargs["warmup_steps"] == 3
    assert scheduler_section(config(), 10, ratio=0.2).kwargs["warmup_steps"] == 2
    found = scheduler_section(config(warmup_steps=30), 10)
    rate = make_schedule(found.name, found.kwargs)(3.0)
    assert float(rate(10)) == pytest.approx(1.0), "a run that ends within its warm-up never reaches the rate"


@pytest.mark.parametrize(("fields", "message"), [
    ({"logging_steps": 0}, "`logging_steps` must be"), ({"eval_strategy": "steps", "eval_steps": 1.5}, "`eval_steps`"),
    ({"warmup_steps": -1}, "`warmup_steps`"), ({"model_init_kwargs": "{not json"}, "`model_init_kwargs` must be JSON"),
    ({"eval_strategy": "sometimes"}, "sometimes"), ({"num_train_epochs": 0}, "`num_train_epochs` must be positive"),
    ({"save_strategy": "best"}, "`save_strategy` best needs evaluations"),
    ({"mesh": "fsdp=4"}, "`mesh` must be a dict, or JSON"),
    ({"gradient_accumulation_steps": 0}, "`gradient_accumulation_steps` must be at least 1"),
])  # fmt: skip
def test_values_out_of_range(fields, message):
    with pytest.raises(ValueError, match=message):
        config(**fields)

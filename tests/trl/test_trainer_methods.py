# SPDX-License-Identifier: Apache-2.0
"""Methods of transformers' Trainer that the pages promise, on a trainer of TRL's shape."""

from __future__ import annotations

import json

import huggingface_hub
import jax
import jax.numpy as jnp
import optax
import pytest
from transformers import EarlyStoppingCallback, TrainerCallback, TrainingArguments

from jrl.trainers.checkpoints.checkpointer import CheckpointError
from jrl.trl import SFTConfig, SFTTrainer


class Quiet(TrainerCallback):
    """Does nothing."""


@pytest.fixture(scope="module")
def trainer(checkpoint, tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    args = SFTConfig(str(folder), max_steps=1, per_device_train_batch_size=2, report_to=[None])
    return SFTTrainer(
        str(checkpoint), args=args, train_dataset=[{"text": "a b"}, {"text": "c d"}], callbacks=[Quiet]
    )


def test_metrics_are_printed_and_written(trainer, capsys):
    trainer.log_metrics("train", {"loss": 1.23456, "n": 3})
    assert capsys.readouterr().out == "***** train metrics *****\n  loss = 1.2346\n  n    = 3\n"
    trainer.save_metrics("train", {"loss": 1.5})
    trainer.save_metrics("eval", {"eval_loss": 2.5})
    folder = trainer.args.output_dir
    with open(f"{folder}/train_results.json") as file:
        assert json.load(file) == {"loss": 1.5}
    with open(f"{folder}/all_results.json") as file:
        assert json.load(file) == {"loss": 1.5, "eval_loss": 2.5}


def test_who_and_how_many(trainer, capsys):
    assert trainer.is_world_process_zero() and trainer.is_local_process_zero()
    trainer.accelerator.print("hello")
    assert capsys.readouterr().out == "hello\n"
    assert trainer.accelerator.prepare(3) == trainer.accelerator.gather(3) == 3
    assert trainer.num_examples(trainer.get_train_dataloader()) == 2
    assert trainer.get_num_trainable_parameters() == sum(
        leaf.size for leaf in jax.tree.leaves(trainer.native.params)
    )


@pytest.mark.parametrize(("optimizers", "norm", "expected"), [
    ((optax.sgd(1.0), None), 0.5, 0.5),
    ((optax.sgd(1.0), None), 0.0, 200.0),
    ((None, lambda step: 1.0), 0.5, 0.5),
], ids=["optax", "never", "a_schedule"])  # fmt: skip
def test_the_gradient_is_clipped_whatever_the_optimizer(checkpoint, tmp_path, optimizers, norm, expected):
    args = SFTConfig(
        str(tmp_path), max_steps=1, max_grad_norm=norm, optim="sgd", per_device_train_batch_size=2
    )
    rows = [{"text": "a b"}, {"text": "c d"}]
    native = SFTTrainer(str(checkpoint), args=args, train_dataset=rows, optimizers=optimizers).native
    optimizer, gradient = native.make_optimizer(), {"w": jnp.full(4, 100.0)}
    changes, _ = optimizer.update(gradient, optimizer.init(gradient), gradient)
    assert float(optax.tree.norm(changes)) == pytest.approx(expected, rel=1e-5)


def test_an_upload_goes_to_the_branch_that_is_asked_for(trainer, monkeypatch):
    calls = []

    def noted(name):
        def call(self, repo_id, **options):
            calls.append((name, repo_id, options.get("branch") or options.get("revision")))
            return f"https://hub/{repo_id}"

        return call

    for name in ("create_repo", "create_branch", "upload_folder"):
        monkeypatch.setattr(huggingface_hub.HfApi, name, noted(name))
    assert trainer.push_to_hub(repo_id="a/b") == "https://hub/a/b"
    assert calls == [("create_repo", "a/b", None), ("upload_folder", "a/b", None)]
    calls.clear()
    monkeypatch.setattr(trainer.config, "hub_revision", "mine")
    trainer.push_to_hub(repo_id="a/b")
    trainer.push_to_hub(repo_id="a/b", revision="other")
    branches = [(name, branch) for name, _, branch in calls if name != "create_repo"]
    assert branches == [
        ("create_branch", "mine"),
        ("upload_folder", "mine"),
        ("create_branch", "other"),
        ("upload_folder", "other"),
    ]


def test_callbacks_come_and_go(trainer):
    found = trainer.pop_callback(Quiet)
    assert isinstance(found, Quiet) and trainer.pop_callback(Quiet) is None
    trainer.add_callback(found)
    trainer.remove_callback(found)
    trainer.remove_callback(EarlyStoppingCallback)
    assert trainer.callbacks == []


@pytest.mark.slow
@pytest.mark.parametrize("make", [SFTConfig, TrainingArguments])
def test_a_script_that_is_run_again_is_told_a_cure_that_works(checkpoint, tmp_path, make):
    def script(make, **fields):
        args = make(str(tmp_path), max_steps=1, per_device_train_batch_size=2, report_to="none", **fields)
        return SFTTrainer(
            str(checkpoint), args=args, train_dataset=[{"text": "a b"}, {"text": "c d"}]
        ).train()

    assert script(make).global_step == 1
    with pytest.raises(CheckpointError, match=r"`overwrite_output_dir=True` of `jrl\.trl\.SFTConfig`"):
        script(make)
    assert script(SFTConfig, overwrite_output_dir=True).global_step == 1

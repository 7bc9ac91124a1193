# SPDX-License-Identifier: Apache-2.0
"""Losses that a subclass of the DPO, reward and SFT trainers computes its own way: the run learns from them."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jrl.trl import (
    DPOConfig,
    DPOTrainer,
    IterativeSFTTrainer,
    RewardConfig,
    RewardTrainer,
    SFTConfig,
    SFTTrainer,
)

PAIRS = [{"prompt": f"say {i}", "chosen": " good" + " yes" * (i % 3), "rejected": " bad"} for i in range(7)]
TEXTS = [{"text": "hello" + " you" * (i % 4)} for i in range(7)]
KINDS = {
    DPOTrainer: (DPOConfig, PAIRS),
    RewardTrainer: (RewardConfig, PAIRS),
    SFTTrainer: (SFTConfig, TEXTS),
}


def make(cls, base, checkpoint, folder, **fields):
    """Two steps of gradient descent of two microbatches; the second step has three rows of four."""
    config, rows = KINDS[base]
    defaults = {
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "gradient_checkpointing": False,
        "max_length": 32,
        "logging_steps": 1,
        "max_steps": 2,
        "save_strategy": "no",
        "seed": 3,
    }
    args = config(output_dir=str(folder), **(defaults | fields))
    return cls(
        checkpoint, args=args, train_dataset=rows, eval_dataset=rows[:3], optimizers=(optax.sgd(0.1), None)
    )


def params_of(trainer):
    return jax.device_get(trainer.native.params)


def same(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), first, second)


@pytest.fixture(scope="module")
def plain(checkpoint, tmp_path_factory):
    found = {}

    def trained(base):
        if base not in found:
            trainer = make(base, base, checkpoint, tmp_path_factory.mktemp("plain"))
            before = params_of(trainer)
            trainer.train()
            found[base] = before, params_of(trainer), list(trainer.state.log_history), trainer.evaluate()
        return found[base]

    return trained


class ByHandDPO(DPOTrainer):
    def dpo_loss(self, policy_chosen, policy_rejected, ref_chosen, ref_rejected, reference_free=False):
        ratios = self.beta * ((policy_chosen - ref_chosen) - (policy_rejected - ref_rejected))
        good, bad = self.beta * (policy_chosen - ref_chosen), self.beta * (policy_rejected - ref_rejected)
        return -jax.nn.log_sigmoid(ratios), good, bad


class SuperDPO(DPOTrainer):
    def dpo_loss(self, *sums):
        return super().dpo_loss(*sums)


class ByHandReward(RewardTrainer):
    """As TRL 0.7.1 writes it."""

    def compute_loss(self, model, inputs, return_outputs=False):
        good, bad = (
            model(input_ids=inputs[f"input_ids_{x}"], attention_mask=inputs[f"attention_mask_{x}"])[0]
            for x in ("chosen", "rejected")
        )
        loss = -jax.nn.log_sigmoid(good - bad - inputs["margin"][:, None]).mean()
        return (loss, {"rewards_chosen": good, "rewards_rejected": bad}) if return_outputs else loss


class NewerReward(RewardTrainer):
    """As TRL 0.28 writes it."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        inputs["use_cache"] = False
        outputs = self.model(**inputs)
        good, bad = jnp.split(outputs.logits.squeeze(-1), 2)
        return -jax.nn.log_sigmoid(good - bad).mean()


class SuperReward(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        assert outputs["rewards_chosen"].shape == inputs["margin"].shape
        return (loss, outputs) if return_outputs else loss


class ByHandSFT(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        labels = inputs.pop("labels")
        logits = model(**inputs).logits[:, :-1]
        real = labels[:, 1:] != -100
        chosen = jnp.take_along_axis(
            jax.nn.log_softmax(logits), jnp.where(real, labels[:, 1:], 0)[..., None], -1
        )
        return -(chosen[..., 0] * real).sum() / real.sum()


class LabelledSFT(SFTTrainer):
    def compute_loss(self, model, inputs, **options):
        return model(**inputs)["loss"]


class SuperSFT(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "base"),
    [
        (ByHandDPO, DPOTrainer),
        (SuperDPO, DPOTrainer),
        (ByHandReward, RewardTrainer),
        (NewerReward, RewardTrainer),
        (SuperReward, RewardTrainer),
        (ByHandSFT, SFTTrainer),
        (LabelledSFT, SFTTrainer),
        (SuperSFT, SFTTrainer),
    ],
)
def test_what_a_subclass_writes_out_is_what_the_run_learns(cls, base, plain, checkpoint, tmp_path):
    _, wanted, log, evaluation = plain(base)
    trainer = make(cls, base, checkpoint, tmp_path)
    trainer.train()
    same(params_of(trainer), wanted)
    for line, expected in zip(trainer.state.log_history, log, strict=True):
        for name in expected.keys() - {"train_runtime", "train_steps_per_second", "train_samples_per_second"}:
            assert line[name] == pytest.approx(expected[name], rel=1e-3, abs=1e-5), name
    found = trainer.evaluate()
    for name in evaluation.keys() - {"eval_runtime"}:
        assert found[name] == pytest.approx(evaluation[name], rel=1e-3, abs=1e-5), name


class Still(SFTTrainer):
    """A loss without a gradient, and lines of its own."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        return 7 + 0 * super().compute_loss(model, inputs)

    def log(self, logs, start_time=None):
        super().log({**logs, "mine": 1.0}, start_time)


@pytest.mark.slow
def test_the_loss_is_what_moves_and_what_is_shown(plain, checkpoint, tmp_path):
    trainer = make(Still, SFTTrainer, checkpoint, tmp_path)
    trainer.train()
    jax.tree.map(np.testing.assert_array_equal, params_of(trainer), plain(SFTTrainer)[0])
    lines = trainer.state.log_history
    assert all(line["mine"] == 1 for line in lines)
    assert [line["loss"] for line in lines if "loss" in line] == pytest.approx([7, 7])
    assert trainer.evaluate()["eval_loss"] == pytest.approx(7)


class InTorch(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        torch = pytest.importorskip("torch")
        return torch.nn.functional.cross_entropy(model(**inputs).logits, inputs["labels"])


class OneEach(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return model(inputs["input_ids"], inputs["attention_mask"]).logits[:, 0]


class Annealed(SFTTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        return super().compute_loss(model, inputs) * 0.9**self.state.global_step


class Logged(RewardTrainer):
    def compute_loss(self, model, inputs, return_outputs=False):
        loss = super().compute_loss(model, inputs)
        self.log({"mine": loss})
        return loss


class MeanDPO(DPOTrainer):
    def dpo_loss(self, *sums):
        losses, good, bad = super().dpo_loss(*sums)
        return losses.mean(), good, bad


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "base", "error", "message"),
    [
        (InTorch, SFTTrainer, TypeError, r"`InTorch\.compute_loss` must compute with jax arrays"),
        (OneEach, RewardTrainer, ValueError, r"`OneEach\.compute_loss` must return the loss as one number"),
        (Annealed, SFTTrainer, TypeError, r"`Annealed\.compute_loss` must not use `state`"),
        (Logged, RewardTrainer, TypeError, r"`Logged\.compute_loss` must not use `log`.*is logged"),
        (MeanDPO, DPOTrainer, ValueError, r"`MeanDPO\.dpo_loss` must return losses of shape"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_line(cls, base, error, message, checkpoint, tmp_path):
    trainer = make(cls, base, checkpoint, tmp_path)
    with pytest.raises(error, match=message) as caught:
        trainer.train()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("base", KINDS)
@pytest.mark.parametrize(
    "name",
    [
        "training_step",
        "get_train_dataloader",
        "create_optimizer",
        "get_optimizer_cls_and_kwargs",
        "_clip_grad_norm",
    ],
)
def test_a_method_that_nobody_would_call_is_refused_before_anything_is_read(base, name, tmp_path):
    cls = type("Mine", (base,), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=f"Mine must not override `{name}`: nothing here calls it"):
        make(cls, base, "no such folder", tmp_path)


@pytest.mark.parametrize("name", ["get_batch_loss_metrics", "concatenated_forward", "compute_loss"])
def test_what_dpo_computes_is_in_its_loss(name, tmp_path):
    cls = type("Mine", (DPOTrainer,), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=f"Mine must not override `{name}`.*Override `dpo_loss`"):
        make(cls, DPOTrainer, "no such folder", tmp_path)


@pytest.mark.slow
def test_what_a_run_would_not_call_is_said_before_it_begins(checkpoint, tmp_path):
    cls = type("Mine", (SFTTrainer,), {"evaluate": lambda self: {}})
    trainer = make(cls, SFTTrainer, checkpoint, tmp_path, eval_strategy="epoch")
    with pytest.raises(
        TypeError, match=r"`Mine\.evaluate` is not called by a run, which has `eval_strategy`"
    ):
        trainer.train()
    trainer = make(SFTTrainer, SFTTrainer, checkpoint, tmp_path)
    trainer.compute_loss = lambda model, inputs: 0.0
    with pytest.raises(TypeError, match="`compute_loss` must be a method of a subclass"):
        trainer.train()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("cls", "base", "fields", "name"),
    [
        (ByHandSFT, SFTTrainer, {"packing": True}, "packing"),
        (ByHandSFT, SFTTrainer, {"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        (ByHandDPO, DPOTrainer, {"use_weighting": True}, "use_weighting"),
    ],
)
def test_options_of_the_configured_loss_are_refused_beside_an_own_one(
    cls, base, fields, name, checkpoint, tmp_path
):
    with pytest.raises(ValueError, match=f"`{name}` must not be set where"):
        make(cls, base, checkpoint, tmp_path, **fields)


@pytest.mark.parametrize(
    ("base", "names"),
    [
        (SFTTrainer, ("get_batch_samples", "call_model_init", "_prepare_non_packed_dataloader")),
        (RewardTrainer, ("_determine_best_metric", "_get_num_items_in_batch", "get_batch_samples")),
        (DPOTrainer, ("generate_from_model_and_ref", "call_model_init")),
        (IterativeSFTTrainer, ("prepare_model_inputs", "_step_safety_checker", "training_step")),
    ],
)
def test_what_the_seeds_call_by_themselves_is_refused(base, names):
    for name in names:
        cls = type("Mine", (base,), {name: lambda self, *args: None})
        with pytest.raises(
            TypeError, match=rf"Mine must not override `{name}`: nothing here calls it.*\. \S"
        ):
            cls("no such folder")


def test_what_a_subclass_of_dpo_samples_with_is_its_own(tmp_path):
    cls = type("Mine", (DPOTrainer,), {"get_batch_samples": lambda self, *args: None})
    with pytest.raises(FileNotFoundError, match="no such folder"):
        make(cls, DPOTrainer, "no such folder", tmp_path)

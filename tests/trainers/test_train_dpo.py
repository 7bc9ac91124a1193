# SPDX-License-Identifier: Apache-2.0
"""Whole DPO runs on the tiny model: the reference in its four kinds, evaluation, resuming, what is refused."""

from pathlib import Path

import jax
import numpy as np
import pytest

import jrl
from jrl.learners.dpo import DPOState
from jrl.trainers import dpo as trainer_module
from jrl.trainers.dpo import DPOTrainer
from jrl.trainers.loading.dpo_reference import CACHE, load_logprobs, save_logprobs
from jrl.trainers.loggers.watch import find
from tests.tiny import tiny_hf_config
from tests.trainers.runs import PREFERENCES, dpo_config, repeatable, save_tiny_checkpoint

LORA = {"peft_type": "LORA", "r": 2, "target_modules": ["c_attn"]}


def prepare(checkpoint, run_dir, *, steps=4, eval_samples=None, **sections):
    """A trainer with its samples."""
    train = {"total_steps": steps} | sections.pop("train", {})
    trainer = DPOTrainer(dpo_config(checkpoint, run_dir, train=train, **sections))
    trainer.add_samples(PREFERENCES)
    if eval_samples is not None:
        trainer.add_eval_samples(eval_samples)
    return trainer


def training(trainer):
    return [record for record in repeatable(trainer.history) if "iteration" in record]


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """Twelve steps, with held-out pairs."""
    folder = tmp_path_factory.mktemp("whole")
    trainer = prepare(checkpoint, folder, steps=12, eval_samples=PREFERENCES[:3])
    trainer.learn()
    return trainer


def test_it_learns_to_prefer(whole):
    records = training(whole)
    assert records[0]["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert records[-1]["dpo/loss"] < 0.5
    assert records[-1]["rewards/accuracies"] == 1
    assert records[-1]["rewards/margins"] > 0.5


def test_held_out_pairs_are_measured_before_and_after(whole):
    first, last = (record for record in whole.history if "evaluation" in record)
    assert first["eval/dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert abs(first["eval/rewards/chosen"]) < 1e-4
    assert last["eval/dpo/loss"] < first["eval/dpo/loss"] and last["eval/rewards/margins"] > 0


def test_tokens_of_both_completions_are_counted(whole):
    """A pass has 4 and 2 pairs; copies count nothing."""
    records = training(whole)
    rows = whole.samples.rows
    each_pass = sum(len(row.chosen.tokens) + len(row.rejected.tokens) for row in rows)
    assert records[0]["dpo/tokens"] + records[1]["dpo/tokens"] == each_pass


def test_the_reference_leaves_memory_when_it_has_scored(whole):
    assert whole.reference is None
    with pytest.raises(ValueError, match="`samples` must be added before `learn`"):
        whole.score_reference(whole._preferences(PREFERENCES[3:]))


def test_lore_8_2_precomputed_equals_online(checkpoint, tmp_path):
    online = prepare(checkpoint, tmp_path / "online", method={"precompute_ref_log_probs": False})
    once = prepare(checkpoint, tmp_path / "once")
    once.score_reference(once.samples)
    for step in range(2):
        live, kept = (trainer.place(trainer.samples.batch(step, 4)) for trainer in (online, once))
        for ours, theirs in zip(live[-2:], kept[-2:], strict=True):
            assert np.any(np.asarray(ours) < -1)
            np.testing.assert_allclose(ours, theirs, atol=1e-5)


@pytest.mark.slow
def test_a_run_with_the_reference_online_is_the_same(whole, checkpoint, tmp_path):
    online = prepare(checkpoint, tmp_path, method={"precompute_ref_log_probs": False})
    online.learn()
    for record, expected in zip(training(online), training(whole), strict=False):
        for name in ("dpo/loss", "rewards/chosen", "rewards/margins", "optim/grad_norm"):
            assert record[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-5), name
    assert not (tmp_path / CACHE).exists()


def test_a_resumed_run_does_not_ask_the_reference_again(checkpoint, tmp_path, monkeypatch):
    first = prepare(checkpoint, tmp_path)
    first.score_reference(first.samples)
    (file,) = (tmp_path / CACHE).iterdir()

    def fail(*args, **kwargs):
        raise AssertionError("the reference was asked again")

    monkeypatch.setattr(trainer_module, "score_samples", fail)
    second = prepare(checkpoint, tmp_path)
    second.score_reference(second.samples)
    for ours, theirs in zip(*(trainer.samples.batch(0, 4)[-2:] for trainer in (first, second)), strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert np.any(ours != 0)
    assert load_logprobs(file) is not None


@pytest.mark.filterwarnings("ignore:.*were cut")
def test_lore_8_2_other_tokens_or_another_dtype_are_scored_anew(checkpoint, tmp_path):
    """Each of these would be a silent constant beside the policy's log-probabilities."""
    runs = [
        prepare(checkpoint, tmp_path / "run"),
        prepare(checkpoint, tmp_path / "run", train={"seq_length": 12}),
        prepare(checkpoint, tmp_path / "run", train={"compute_dtype": "bfloat16"}),
    ]
    for number, trainer in enumerate(runs, start=1):
        trainer.score_reference(trainer.samples)
        assert len(list((tmp_path / "run" / CACHE).iterdir())) == number


def test_lore_8_2_other_weights_are_scored_anew(checkpoint, tmp_path):
    """The same architecture, one number changed."""
    first = prepare(checkpoint, tmp_path)
    first.score_reference(first.samples)
    second = prepare(checkpoint, tmp_path)
    second.state = DPOState(
        second.state.train.replace(params=jax.tree.map(lambda x: x + 1e-3, second.params)), None
    )
    second.score_reference(second.samples)
    assert len(list((tmp_path / CACHE).iterdir())) == 2


def test_a_damaged_file_is_as_none(tmp_path):
    path = tmp_path / "kept.npz"
    rows = [np.array([-1.0, -2.0], np.float32), np.array([-3.0], np.float32)]
    save_logprobs(path, rows, rows[::-1])
    chosen, rejected = load_logprobs(path)
    for found, wanted in ((chosen, rows), (rejected, rows[::-1])):
        for x, y in zip(found, wanted, strict=True):
            np.testing.assert_array_equal(x, y)
    path.write_bytes(path.read_bytes()[:60])
    assert load_logprobs(path) is None
    assert load_logprobs(tmp_path / "missing.npz") is None


def test_under_an_adapter_the_base_model_is_the_reference(checkpoint, tmp_path):
    trainer = prepare(checkpoint, tmp_path, steps=3, model={"peft_config": LORA})
    assert trainer.reference.params() == {}
    start = trainer.measure_samples(trainer.samples)
    assert start["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    # Whatever the adapter has become, the reference is the base.
    params = jax.tree.map(lambda x: x + 0.1, trainer.params)
    trainer.state = DPOState(trainer.state.train.replace(params=params), None)
    moved = trainer.measure_samples(trainer.samples)
    assert abs(moved["rewards/chosen"]) > 0.01
    assert moved["logps/chosen"] - moved["rewards/chosen"] / 0.5 == pytest.approx(
        start["logps/chosen"], abs=1e-3
    )


@pytest.mark.slow
def test_an_adapter_learns_to_prefer(checkpoint, tmp_path):
    model = {"peft_config": LORA}
    trainer = prepare(checkpoint, tmp_path, steps=12, model=model, optimizer={"kwargs": {"lr": 1e-2}})
    trainer.learn()
    assert training(trainer)[-1]["dpo/loss"] < 0.6
    assert trainer.reference is not None  # it costs nothing, so pairs may still come


def test_a_reference_of_its_own(checkpoint, tmp_path):
    """Another family, the same tokens: the policy is not at the reference when training begins."""
    other = save_tiny_checkpoint(tmp_path / "other_model", "llama")
    trainer = prepare(checkpoint, tmp_path / "run", method={"ref_model_path": other})
    found = trainer.measure_samples(trainer.samples)
    assert abs(found["rewards/chosen"]) > 0.01
    same = prepare(checkpoint, tmp_path / "same", method={"ref_model_path": checkpoint})
    assert same.measure_samples(same.samples)["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)


def test_a_reference_with_other_tokens_is_refused_before_weights_are_read(checkpoint, tmp_path, monkeypatch):
    monkeypatch.setattr("jrl.trainers.loading.setup.load_checkpoint", None)
    wider = tiny_hf_config("gpt2", vocab_size=99)
    with pytest.raises(
        ValueError, match=r"`method.ref_model_path` must name a model with the policy's vocabulary of 97"
    ):
        prepare(checkpoint, tmp_path, method={"ref_model_path": wider})


@pytest.mark.slow
def test_a_reference_that_follows_starts_at_the_policy(checkpoint, tmp_path):
    method = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 1.0}
    trainer = prepare(checkpoint, tmp_path, steps=3, method=method, eval_samples=PREFERENCES[:2])
    trainer.learn()
    losses = [record["dpo/loss"] for record in training(trainer)]
    # Moved onto the policy after step 2, so that the third step starts at log 2 again; the second did not.
    assert losses[0] == pytest.approx(np.log(2), abs=1e-5) == losses[2]
    assert abs(losses[1] - np.log(2)) > 1e-3
    assert not (tmp_path / CACHE).exists()


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        (
            {"method": {"sync_ref_model": True}, "model": {"peft_config": LORA}},
            "`method.sync_ref_model` must be False under `model.peft_config`",
        ),
        (
            {"method": {"sync_ref_model": True, "ref_model_path": "OTHER"}},
            "`method.ref_model_path` must name a model of the policy's architecture",
        ),
        (
            {"method": {"loss_type": ["aot"]}},
            "`minibatch_size` must be `batch_size` = 4 with the loss 'aot'",
        ),
    ],
)
def test_references_and_losses_that_do_not_fit_are_refused(checkpoint, tmp_path, sections, message):
    if sections["method"].get("ref_model_path") == "OTHER":
        other = save_tiny_checkpoint(tmp_path / "other_model", "llama")
        sections = {"method": sections["method"] | {"ref_model_path": other}}
    with pytest.raises(ValueError, match=message):
        prepare(checkpoint, tmp_path / "run", **sections)


def test_rewards_and_prompts_are_refused(checkpoint, tmp_path):
    with pytest.raises(ValueError, match="DPOTrainer learns from `samples` with `chosen` and `rejected`"):
        jrl.train(samples=PREFERENCES, prompts=["a"], config=dpo_config(checkpoint, tmp_path))


class TestDisplacement:
    def found(self, figures):
        """Steps at which a run with these (chosen reward, margin) is spoken of."""
        history = [
            {"step": step, "iteration": step, "rewards/chosen": chosen, "rewards/margins": margin}
            for step, (chosen, margin) in enumerate(figures, start=1)
        ]
        return [finding.step for finding in find(history) if finding.rule.name == "displaced"]

    def test_lore_8_3_a_margin_that_grows_while_the_chosen_falls_is_said_once(self):
        assert self.found([(-0.1 * step, 0.2 * step) for step in range(30)]) == [11]

    @pytest.mark.parametrize(("chosen", "margin"), [(0.1, 0.5), (-0.1, -0.2)])
    def test_lore_8_3_nothing_is_said_of_chosen_ones_that_rise_or_of_no_margin(self, chosen, margin):
        assert self.found([(chosen, margin)] * 30) == []

    def test_single_batches_say_nothing(self):
        assert self.found([(-0.1 if step % 10 else 0.1, 1.0) for step in range(30)]) == []


@pytest.mark.slow
def test_lore_8_3_a_run_on_near_copies_is_flagged(checkpoint, tmp_path):
    """Completions that share all but one token: the shared part is pushed down with the rejected one."""
    pairs = [
        {"prompt": "say", "chosen": f" {'a' * 6}{x}{y * 6}", "rejected": f" {'a' * 6}{z}{y * 6}"}
        for x, y, z in (("b", "c", "d"), ("e", "c", "f"), ("g", "h", "i"), ("j", "h", "k"))
    ]
    config = dpo_config(
        checkpoint,
        tmp_path,
        train={"total_steps": 60, "minibatch_size": 4},
        optimizer={"kwargs": {"lr": 3e-4}},
        method={"loss_type": ["apo_down"]},
    )
    trainer = DPOTrainer(config)
    trainer.add_samples(pairs)
    trainer.learn()
    assert [record["watch"] for record in trainer.history if "watch" in record].count("displaced") == 1
    last = training(trainer)[-1]
    assert last["rewards/displaced"] > 0.5 and last["rewards/margins"] > 0
    assert last["logps/chosen"] < training(trainer)[0]["logps/chosen"]


@pytest.mark.slow
@pytest.mark.parametrize("sync", [False, True])
def test_resumed_equals_never_stopped_bit_for_bit(checkpoint, tmp_path, sync):
    method = {"sync_ref_model": sync, "ref_model_sync_steps": 2}
    straight = prepare(checkpoint, tmp_path / "whole", steps=9, method=method)
    straight.learn()
    prepare(checkpoint, tmp_path / "cut", steps=4, method=method).learn()
    resumed = prepare(
        checkpoint,
        tmp_path / "cut",
        steps=9,
        method=method,
        train={"resume_from_checkpoint": str(tmp_path / "cut")},
    )
    resumed.learn()
    for expected, got in zip(jax.tree.leaves(straight.state), jax.tree.leaves(resumed.state), strict=True):
        np.testing.assert_array_equal(expected, got)
    assert training(resumed) == training(straight)


@pytest.mark.slow
def test_an_encoder_decoder_learns_too(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "t5", "t5")
    trainer = prepare(checkpoint, tmp_path / "run", steps=6, model={"model_arch_type": "seq2seq"})
    trainer.learn()
    records = training(trainer)
    assert records[0]["dpo/loss"] == pytest.approx(np.log(2), abs=1e-5)
    assert records[-1]["dpo/loss"] < 0.65


@pytest.mark.slow
def test_what_it_writes_is_a_model_that_samples(whole, tmp_path):
    folder = whole.save_pretrained(tmp_path / "out")
    assert (Path(folder) / "config.json").exists()
    assert len(whole.generate(["the cat"], gen_kwargs={"max_new_tokens": 4})) == 1

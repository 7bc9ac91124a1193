# SPDX-License-Identifier: Apache-2.0
"""Whole DDPO runs on the toy denoiser: what is logged and kept, resuming, rewards on threads, what is refused."""

import json
import random
import signal
import threading
import time

import jax
import numpy as np
import pytest

from jrl.rollout.rewards import RewardError
from jrl.trainers.checkpoints.checkpointer import CheckpointError
from jrl.trainers.diffusion import diffusion_trainer
from jrl.trainers.diffusion.ddpo import DDPOTrainer
from jrl.trainers.diffusion.ddpo_prompts import PromptRandomness, draw_prompts
from jrl.trainers.diffusion.ddpo_sampling import to_host
from jrl.trainers.loop.stopwatch import Stopwatch
from tests.trainers.diffusion.runs import (
    PROMPTS,
    STEPS,
    again,
    brightness,
    ddpo_config,
    draw_prompt,
    make,
    toy_model,
)
from tests.trainers.runs import repeatable

EVALUATED = {"eval_prompts": list(PROMPTS[:2])}


class Seen:
    """A hook that keeps what it is given."""

    def __init__(self):
        self.calls = []

    def __call__(self, data, global_step, tracker):
        tracker.log({"seen": len(data)}, global_step)
        tracker.log_images({"first": data[0][0][0]}, global_step)
        self.calls.append((data, global_step))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four epochs, and the trainer that others are copies of."""
    hook = Seen()
    trainer = make(tmp_path_factory.mktemp("whole"), hook=hook, method=EVALUATED)
    trainer.before = jax.tree.map(np.array, jax.device_get((trainer.params, trainer.frozen)))
    trainer.learn()
    return trainer


def training(trainer):
    return [record for record in repeatable(trainer.history) if "iteration" in record]


def one_epoch(trainer, epoch=0):
    with jax.set_mesh(trainer.mesh):
        return trainer.one_epoch(epoch, while_sampling=lambda: None, stopwatch=Stopwatch())


class TestARun:
    def test_every_epoch_is_logged(self, whole):
        records = training(whole)
        assert [record["step"] for record in records] == [2, 4, 6, 8]
        assert [record["epoch"] for record in records] == [0, 1, 2, 3]
        for record in records:
            assert record["ddpo/pre_update_ratio_max_dev"] < 1e-5
            assert record["ddpo/pre_update_clip_fraction"] == 0
            assert 0 < record["reward/mean"] < 1 and record["reward/std"] > 0
            assert record["rollout/images"] == 8 and record["reward/failed"] == 0
            assert np.isfinite(record["ddpo/loss"])
        assert records[-1]["reward/prompts_tracked"] == 1
        times = [record for record in whole.history if "iteration" in record][-1]
        assert {"time/rollout", "time/reward", "perf/images_per_second"} <= times.keys()

    def test_nothing_is_compiled_after_the_first_epoch(self, whole):
        counts = [record["perf/compilations"] for record in whole.history if "iteration" in record]
        # The first evaluation comes before them all.
        assert len(set(counts)) == 1

    def test_what_trains_moves_and_the_rest_stays(self, whole):
        params, frozen = whole.before
        for old, new in zip(jax.tree.leaves(frozen), jax.tree.leaves(whole.frozen), strict=True):
            np.testing.assert_array_equal(old, new)
        moved = [
            np.abs(old - new).max()
            for old, new in zip(*map(jax.tree.leaves, (params, whole.params)), strict=True)
        ]
        assert min(moved) > 0

    def test_the_hook_sees_every_epoch(self, whole):
        calls = whole.image_samples_hook.calls
        assert [step for _, step in calls] == [0, 2, 4, 6]
        data, _ = calls[0]
        assert len(data) == 2
        images, prompts, metadata, rewards, reward_metadata = data[-1]
        assert images.shape == (4, 3, 8, 8) and images.dtype == np.float32
        assert images.min() >= 0 and images.max() <= 1
        assert set(prompts) <= set(PROMPTS) and [PROMPTS[entry["number"]] for entry in metadata] == list(
            prompts
        )
        np.testing.assert_array_equal(rewards, images.mean(axis=(1, 2, 3)))
        assert rewards.dtype == np.float32 and reward_metadata == {"judged": 4}

    def test_evaluations_always_start_from_the_same_noise(self, whole, tmp_path):
        found = [record for record in whole.history if "evaluation" in record]
        assert [record["step"] for record in found] == [0, 4, 8]
        assert found[0]["sampling/eta"] == 0 and found[0]["sampling/num_prompts"] == 2
        fresh = again(whole, tmp_path)
        for step in (5, 6):
            metrics = fresh.run_evaluation(step).metrics
            assert metrics == {name: found[0][name] for name in metrics}
        assert 0 < abs(found[-1]["reward/mean"] - found[0]["reward/mean"]) < 0.1

    def test_images_and_samples_are_on_the_disk(self, whole):
        names = {path.name for path in (whole.run_dir / "rollouts").iterdir()}
        assert names == {
            "rollouts.jsonl",
            "samples.jsonl",
            *(f"evaluation_{step:06d}.png" for step in (0, 4, 8)),
            *(f"samples_{step:06d}.png" for step in (4, 8)),
        }
        lines = (whole.run_dir / "rollouts" / "rollouts.jsonl").read_text().splitlines()
        assert len(lines) == 32 and json.loads(lines[0])["prompt"] in PROMPTS
        model = whole.run_dir / "checkpoint_8" / "hf_model"
        assert (model / "unet" / "diffusion_pytorch_model.safetensors").is_file()
        card = (model / "README.md").read_text()
        assert "library_name: diffusers" in card and "pipeline_tag: text-to-image" in card
        assert "drawn by `draw_prompt`" in card and "2305.13301" in card


class TestTotalSteps:
    def test_the_last_epoch_makes_the_steps_that_are_left(self, whole, tmp_path):
        trainer = again(whole, tmp_path, train={"total_steps": 3})
        trainer.method.eval_prompts.clear()
        trainer.learn()
        assert [record["step"] for record in training(trainer)] == [2, 3]
        assert int(trainer.optimizer_steps()) == 3 and (tmp_path / "checkpoint_3").is_dir()
        assert training(trainer)[0] == training(whole)[0]
        hook = trainer.image_samples_hook = Seen()
        trainer.config.train.total_steps = 4
        trainer.config.train.resume_from_checkpoint = str(tmp_path)
        trainer.learn()
        assert [step for _, step in hook.calls] == [3] and training(trainer)[-1]["step"] == 4


class TestResuming:
    def test_two_epochs_and_two_are_four(self, whole, tmp_path):
        """Statistics of prompts, generators, optimizer and keys all go on, bit for bit."""
        first = again(whole, tmp_path, train={"epochs": 2})
        first.learn()
        second = again(whole, tmp_path, train={"epochs": 4, "resume_from_checkpoint": str(tmp_path)})
        second.learn()
        assert training(second) == training(whole)
        assert second.memory == whole.memory
        for one, other in zip(jax.tree.leaves(second.state), jax.tree.leaves(whole.state), strict=True):
            np.testing.assert_array_equal(one, other)

    def test_a_failing_epoch_is_done_again_from_its_beginning(self, whole, tmp_path):
        """What the failed epoch drew counts as never drawn."""
        calls = []

        def fails_once(images, prompts, metadata):
            calls.append(prompts)
            if len(calls) == 5:  # the first judges the evaluation's images
                raise ConnectionError("the judge does not answer")
            return brightness(images, prompts, metadata)

        trainer = again(whole, tmp_path, reward=fails_once)
        with pytest.raises(
            RewardError, match="epoch 1, sampling batch 1: `reward_function` raised Connection"
        ) as error:
            trainer.learn()
        folder = tmp_path / "failed_rollouts" / "epoch_1_sampling_batch_1"
        assert f"kept in {folder}" in error.value.__notes__[0]
        assert len(list(folder.glob("*.png"))) == 4
        lines = (folder / "prompts.jsonl").read_text().splitlines()
        assert [json.loads(line)["prompt"] for line in lines] == list(calls[4])
        resumed = again(whole, tmp_path, train={"resume_from_checkpoint": str(tmp_path)})
        resumed.learn()
        assert training(resumed) == training(whole)

    @pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
    def test_a_signal_in_an_epoch_ends_the_run_after_it(self, whole, tmp_path, number):
        calls = []

        def signals(images, prompts, metadata):
            calls.append(prompts)
            if len(calls) == 1:
                signal.raise_signal(number)
            return brightness(images, prompts, metadata)

        trainer = again(whole, tmp_path)
        trainer.method.eval_prompts.clear()
        trainer.reward_function = signals
        trainer.learn()
        assert trainer.interrupted and [record["step"] for record in training(trainer)] == [2]
        resumed = again(whole, tmp_path, train={"resume_from_checkpoint": str(tmp_path)})
        resumed.method.eval_prompts.clear()
        resumed.learn()
        assert training(resumed) == training(whole)

    def test_a_fresh_run_does_not_write_over_another(self, whole, tmp_path):
        again(whole, tmp_path, train={"epochs": 1}).learn()
        with pytest.raises(CheckpointError, match=r"train\.overwrite"):
            again(whole, tmp_path, train={"epochs": 1}).learn()


class TestRewards:
    def test_threads_give_the_same_numbers_in_the_same_order(self, whole, tmp_path):
        names = set()

        def sleepy(images, prompts, metadata):
            names.add(threading.current_thread().name)
            time.sleep(0.05 * (4 - metadata[0]["number"]))  # later batches may be ready first
            return brightness(images, prompts, metadata)

        found = {}
        for on_threads in (False, True):
            method = {"async_reward_computation": on_threads}
            trainer = again(whole, tmp_path, reward=sleepy, hook=Seen(), method=method)
            one_epoch(trainer)
            found[on_threads] = trainer
        sync, on_threads = (trainer.image_samples_hook.calls[0][0] for trainer in found.values())
        for one, other in zip(sync, on_threads, strict=True):
            np.testing.assert_array_equal(one[3], other[3])
            assert one[1] == other[1]
        for one, other in zip(*(jax.tree.leaves(trainer.state) for trainer in found.values()), strict=True):
            np.testing.assert_array_equal(one, other)
        assert threading.main_thread().name in names and any("reward_function" in name for name in names)

    def test_a_batch_is_judged_while_the_next_is_sampled(self, whole, tmp_path):
        """The first call of a thread does not wait for the second batch's images."""
        trainer = again(whole, tmp_path)
        began, sampled = threading.Event(), threading.Event()

        class Batches(list):
            def __iter__(self):
                yield self[0]
                assert began.wait(10)  # the first is being judged before the second is there
                sampled.set()
                yield self[1]

        def waits(images, prompts, metadata):
            began.set()
            assert sampled.wait(10)
            return brightness(images, prompts, metadata)

        trainer.reward_function = waits
        batch = [np.full((2, 3, 8, 8), 0.5, np.float32), ("a", "b"), ({}, {})]
        vectors, found = trainer.compute_rewards(Batches([batch, batch]), True)
        assert [vector.tolist() for vector in vectors] == [[0.5, 0.5], [0.5, 0.5]] and len(found) == 2

    @pytest.mark.parametrize("on_threads", [False, True])
    @pytest.mark.parametrize(
        ("reward", "reason"),
        [
            (lambda images, prompts, metadata: (images.mean(axis=(1, 2, 3))[:-1], {}), "got 3 for 4 images"),
            (
                lambda images, prompts, metadata: (np.full(4, np.nan), {}),
                "the reward must be finite, got nan",
            ),
            (lambda images, prompts, metadata: (images.mean(), {}), "one reward an image, got float32"),
            (lambda images, prompts, metadata: (["good"] * 4, {}), "rewards must be numbers"),
            (
                lambda images, prompts, metadata: (images, {}),
                r"one reward an image, got the shape \(4, 3, 8, 8\)",
            ),
            (lambda images: 0, "raised TypeError"),
        ],
    )
    def test_what_it_may_not_return(self, whole, tmp_path, reward, reason, on_threads):
        trainer = again(whole, tmp_path, reward=reward, method={"async_reward_computation": on_threads})
        before = trainer.memory
        with pytest.raises(RewardError, match=f"epoch 0, sampling batch 0: .*{reason}"):
            one_epoch(trainer)
        assert trainer.memory == before and (tmp_path / "failed_rollouts").is_dir()

    @pytest.mark.parametrize("kind", [list, np.float64, np.int64, "column", "alone"])
    def test_what_it_may_return(self, whole, tmp_path, kind):
        def reward(images, prompts, metadata):
            numbers = np.arange(len(images))
            answers = {
                list: numbers.tolist(),
                "column": numbers[:, None],
                "alone": numbers,
            }
            answer = answers[kind] if kind in answers else numbers.astype(kind)
            return answer if kind == "alone" else (answer, {})

        trainer = again(whole, tmp_path, reward=reward, hook=Seen())
        one_epoch(trainer)
        rewards = trainer.image_samples_hook.calls[0][0][1][3]
        assert rewards.dtype == np.float32 and rewards.tolist() == [0, 1, 2, 3]

    def test_failures_may_be_skipped(self, whole, tmp_path):
        def half(images, prompts, metadata):
            rewards = brightness(images, prompts, metadata)[0]
            rewards[:2] = np.nan
            return rewards, {}

        trainer = again(whole, tmp_path, reward=half, train={"reward_errors": "skip"})
        done = one_epoch(trainer)
        assert done.host["reward/failed"] == 4 and np.isfinite(done.host["reward/mean"])
        assert [row["reward"] is None for row in done.rows] == [True, True, False, False] * 2

    def test_an_epoch_without_any_reward_stops_the_run(self, whole, tmp_path):
        nothing = again(
            whole,
            tmp_path,
            reward=lambda *batch: (np.full(4, np.nan), {}),
            train={"reward_errors": "skip"},
        )
        with pytest.raises(RewardError, match="failed on every image of the epoch"):
            one_epoch(nothing)

    def test_one_that_hangs_is_given_up(self, whole, tmp_path):
        trainer = again(whole, tmp_path, reward=lambda *batch: time.sleep(30), train={"reward_timeout": 0.05})
        with pytest.raises(
            RewardError, match=r"`reward_function` took longer than `train\.reward_timeout`, 0\.05 s"
        ):
            one_epoch(trainer)


class TestPrompts:
    def test_generators_are_the_runs_own(self):
        """Whoever else draws changes nothing, and nothing is changed for whoever else draws."""
        one, other = PromptRandomness(3), PromptRandomness(3)
        before, of_numpy = random.getstate(), np.random.get_state()[1].copy()
        first = draw_prompts(draw_prompt, one, 6, images_per_prompt=1)
        assert random.getstate() == before and (np.random.get_state()[1] == of_numpy).all()
        random.random()
        assert draw_prompts(draw_prompt, other, 6, images_per_prompt=1) == first
        later = PromptRandomness(0)
        later.load(json.loads(json.dumps(one.state())))
        following = draw_prompts(draw_prompt, one, 6, images_per_prompt=2)
        assert draw_prompts(draw_prompt, later, 6, images_per_prompt=2) == following
        assert len(following) == 6 and following[::2] == following[1::2]
        assert len({prompt.text for prompt in first + following}) > 1

    @pytest.mark.parametrize("shared", [False, True])
    def test_images_of_one_prompt_stand_beside_each_other(self, whole, tmp_path, shared):
        """They start from one noise where that is asked for; the noise on the way is each row's own."""
        calls = []

        def always_the_same():
            calls.append(0)
            return "a cat", len(calls)

        method = {"sample_images_per_prompt": 4, "advantage": "group", "share_initial_noise": shared}
        trainer = again(whole, tmp_path, method=method)
        trainer.prompt_function = always_the_same
        with jax.set_mesh(trainer.mesh):
            found = trainer.collect(
                trainer.params,
                trainer.frozen,
                0,
                jax.random.key(1),
                trainer.memory,
                while_sampling=lambda: None,
                stopwatch=Stopwatch(),
            )
        assert len(calls) == 2
        assert [batch[2] for batch in found.images] == [(1,) * 4, (2,) * 4]
        states = np.asarray(found.batch.trajectories.latents)
        assert len(np.unique(states[:, 0, 0, 0, 0])) == (2 if shared else 8)
        assert len(np.unique(states[:, 1, 0, 0, 0])) == 8
        if shared:
            np.testing.assert_array_equal(states[:4, 0], states[[0] * 4, 0])
        advantages = np.asarray(found.batch.advantages)
        np.testing.assert_allclose(advantages.reshape(2, 4).mean(axis=1), 0, atol=1e-5)

    @pytest.mark.parametrize("answer", ["a cat", ("a cat",), (3, {}), None])
    def test_what_they_must_be(self, whole, tmp_path, answer):
        trainer = again(whole, tmp_path)
        trainer.prompt_function = lambda: answer
        with pytest.raises(ValueError, match=r"`prompt_function` must return \(prompt, metadata\)"):
            one_epoch(trainer)


def test_images_must_lie_between_0_and_1():
    for value in (1.5, -0.5, np.nan):
        with pytest.raises(ValueError, match=r"images must lie in \[0, 1\]"):
            to_host(np.full((1, 2, 2, 3), value, np.float32))


@pytest.mark.parametrize(
    ("arguments", "sections", "reason"),
    [
        ({}, {"train": {"batch_size": 3, "minibatch_size": 3}}, "`train.batch_size` must divide the samples"),
        ({}, {"method": {"sample_height": 7}}, "`method.sample_height` must be a positive multiple of 2"),
        ({}, {"method": {"sample_num_steps": 1001}}, "`method.sample_num_steps` must be in 1..1000"),
        ({}, {"method": {"sample_eta": 0.0}}, "`method.sample_eta` must be in"),
        ({}, {"model": {"num_layers_unfrozen": 2}}, "`model.num_layers_unfrozen` must be -1"),
        ({}, {"model": {"attn_implementation": "xla"}}, "diffusion model has its own attention"),
        (
            {},
            {"model": {"peft_config": {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}}},
            "must be LORA",
        ),
        (
            {},
            {"train": {"trainer": "PPOTrainer"}},
            "`train.trainer` = 'PPOTrainer' needs a `method` of PPOConfig",
        ),
        ({"reward_function": None}, {}, "`reward_function` must be a function"),
        ({"prompt_function": "cats"}, {}, "`prompt_function` must be a function"),
    ],
)
def test_what_is_refused(arguments, sections, reason, tmp_path):
    given = {"reward_function": brightness, "prompt_function": draw_prompt} | arguments
    with pytest.raises(ValueError, match=reason):
        DDPOTrainer(ddpo_config(tmp_path, **sections), model=toy_model(), **given)


def test_weights_that_are_put_in_stay_the_callers(whole, tmp_path):
    """The update gives its own buffers away."""
    trainer = again(whole, tmp_path)
    given = jax.tree.map(lambda leaf: leaf + 0, trainer.params)
    trainer.replace_params(given)
    one_epoch(trainer)
    assert not any(leaf.is_deleted() for leaf in jax.tree.leaves(given))


def test_evaluations_see_the_running_mean(whole, tmp_path):
    trainer = again(whole, tmp_path)
    mean = jax.tree.map(lambda leaf: leaf + 1, trainer.params)
    trainer.state = trainer.state.replace(ema=mean)
    assert trainer.sampling_params is mean and trainer.exported_params is mean
    assert trainer.params is trainer.state.train.params
    without = again(whole, tmp_path).run_evaluation(0).metrics
    assert trainer.run_evaluation(0).metrics["reward/mean"] != without["reward/mean"]


def test_the_steps_of_denoising_are_those_of_the_configuration(whole):
    assert whole.method.num_trained_steps == STEPS


def test_a_large_network_at_an_adapters_rate_is_warned_of(monkeypatch, tmp_path):
    monkeypatch.setattr(diffusion_trainer, "LARGE", 100)
    with pytest.warns(UserWarning, match="`optimizer.kwargs.lr` is 0.001, and all of a network"):
        make(tmp_path)

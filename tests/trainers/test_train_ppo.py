# SPDX-License-Identifier: Apache-2.0
import json
import shutil

import jax
import numpy as np
import pytest

import jrl
from jrl.data.sources.fingerprint import fingerprint
from jrl.rollout.rewards import RewardError
from jrl.trainers.checkpoints.checkpointer import CheckpointError
from jrl.trainers.loop.run import Run
from jrl.trainers.rollouts.evaluation import count_samples
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, repeatable


def train(config, **arguments):
    defaults = dict(reward_fn=count_vowels, prompts=PROMPTS, eval_prompts=PROMPTS[:4])
    return jrl.train(config=config, **(defaults | arguments))


@pytest.fixture(scope="module")
def whole(checkpoint, tmp_path_factory):
    """Three iterations of four optimizer steps, never interrupted."""
    return train(ppo_config(checkpoint, tmp_path_factory.mktemp("whole")))


class TestRun:
    def test_history_holds_training_records_and_evaluations(self, whole):
        training = [record for record in whole.history if "iteration" in record]
        assert [record["step"] for record in training] == [4, 8, 12]
        wanted = {
            "reward/mean",
            "kl/per_sequence",
            "kl/per_token",
            "kl/coef",
            "ppo/policy_loss",
            "ppo/value_loss",
        }
        wanted |= {"ppo/clip_fraction", "ppo/explained_variance", "ppo/ratio_max_dev_first_minibatch"}
        wanted |= {
            "time/rollout",
            "time/reward",
            "time/update",
            "perf/tokens_per_second",
            "perf/compilations",
        }
        assert wanted <= training[0].keys()

    def test_metrics_file_is_the_history(self, whole):
        lines = (whole.run_dir / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == json.loads(json.dumps(whole.history))

    def test_lore_9_7_the_untrained_model_is_evaluated_first(self, whole):
        assert whole.history[0]["step"] == 0 and whole.history[0]["evaluation"] == 0
        assert "reward/mean" in whole.history[0]

    def test_lore_9_3_an_evaluation_says_how_it_sampled(self, whole):
        template = whole.tokenizer.chat_template
        found = {
            name.removeprefix("sampling/"): value
            for name, value in whole.history[0].items()
            if "sampling/" in name
        }
        means = found.pop("reward_means")
        assert len(means) == 4 and np.mean(means) == pytest.approx(whole.history[0]["reward/mean"])
        assert found == {
            "num_prompts": len(whole.eval_prompts),
            "samples_per_prompt": 1,
            "reward": "count_vowels",
            "prompts": "evaluation",
            "do_sample": True,
            "temperature": 1.0,
            "top_k": 0,
            "top_p": 1.0,
            "max_new_tokens": 8,
            "chat_template_sha256": None if template is None else fingerprint(template)[:16],
        }

    @pytest.mark.parametrize(
        ("prompts", "distinct", "samples"), [("aabb", 2, 2), ("abab", 2, 2), ("aab", 2, None), ("ab", 2, 1)]
    )
    def test_lore_9_3_repeated_prompts_are_samples_of_one(self, prompts, distinct, samples):
        assert count_samples(list(prompts)) == {"num_prompts": distinct, "samples_per_prompt": samples}

    def test_ratio_is_one_before_the_first_step(self, whole):
        records = [record for record in whole.history if "iteration" in record]
        # 4 ulp of the largest |log-prob|: a tiny model over 97 tokens stays below 16 nats, so 4 * 2**-20.
        assert max(record["ppo/ratio_max_dev_first_minibatch"] for record in records) <= 4 * 2.0**-20

    def test_frozen_parameters_are_untouched(self, whole, checkpoint):
        _, params = jrl.load_model(checkpoint)
        for name in ("embed", "position", "layers_0"):
            for before, after in zip(
                jax.tree.leaves(params[name]), jax.tree.leaves(whole.frozen[name]), strict=True
            ):
                np.testing.assert_array_equal(before, after)

    def test_samples_are_kept_as_json_lines(self, whole):
        lines = (whole.run_dir / "rollouts" / "rollouts.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        assert len(rows) == 3 * 8
        assert {"prompt", "output", "reward"} <= rows[0].keys()

    def test_lore_9_2_same_seed_same_metrics(self, whole, checkpoint, tmp_path):
        again = train(ppo_config(checkpoint, tmp_path))
        assert repeatable(again.history) == repeatable(whole.history)


@pytest.fixture(scope="module")
def cut(checkpoint, tmp_path_factory):
    """Six steps of updates of four, then nine in all."""
    folder = tmp_path_factory.mktemp("cut")
    config = ppo_config(checkpoint, folder, train={"total_steps": 6, "eval_interval": 100})
    first = train(config)
    return first, train(config.evolve(train={"total_steps": 9, "resume_from_checkpoint": str(folder)}))


def first_update(trainer):
    """Figures of the first iteration, without clocks."""
    (found,) = (record for record in repeatable(trainer.history) if record.get("iteration") == 1)
    return found


class TestTotalSteps:
    """`total_steps` is exact where the run ends inside an update."""

    def test_the_last_update_makes_the_steps_that_are_left(self, cut):
        first, _ = cut
        records = [record for record in first.history if "iteration" in record]
        assert [record["step"] for record in records] == [4, 6]
        assert int(first.optimizer_steps()) == 6
        assert (first.run_dir / "checkpoint_6").is_dir()
        assert [record["step"] for record in first.history if "evaluation" in record] == [0, 6]

    def test_nothing_more_is_compiled_for_it(self, cut):
        first, _ = cut
        records = [record for record in first.history if "iteration" in record]
        assert records[0]["perf/compilations"] == records[1]["perf/compilations"]

    def test_a_raised_total_goes_on_from_inside_the_update(self, cut):
        _, second = cut
        records = [record for record in second.history if "iteration" in record]
        assert [record["step"] for record in records] == [4, 6, 9]
        assert [record["iteration"] for record in records] == [1, 2, 3]
        assert int(second.optimizer_steps()) == 9
        assert {path.name for path in second.run_dir.glob("checkpoint_*")} == {"checkpoint_6", "checkpoint_9"}

    def test_an_update_before_it_does_not_depend_on_where_the_run_ends_bit_for_bit(
        self, cut, checkpoint, tmp_path
    ):
        """One program makes both: where the run ends is a number that it reads."""
        sizes = {"total_steps": 5, "eval_interval": 100}
        shorter = train(ppo_config(checkpoint, tmp_path, train=sizes))
        assert [record["step"] for record in shorter.history if "iteration" in record] == [4, 5]
        assert first_update(shorter) == first_update(cut[0])

    def test_an_update_before_it_is_that_of_a_run_which_divides(self, cut, whole):
        """Of a run that divides the program knows the number of steps: it is another, of which compilers may round
        otherwise (some of XLA for CPUs differ by 4e-7, see `xla_cpu_use_fusion_emitters` in `tests/conftest.py`).
        """
        assert first_update(cut[0]) == pytest.approx(first_update(whole), rel=1e-5)

    def test_epochs_still_end_a_run(self, whole):
        for total, epochs, expected in [(6, 100, 6), (6, 1, 4), (8, 2, 8), (9, 2, 8)]:
            run = Run(whole, num_steps=total, steps_per_iteration=4, max_iterations=epochs)
            assert run.last_step == expected


class TestResume:
    @pytest.mark.parametrize("stopped_after", [1, 2])
    @pytest.mark.slow
    def test_resumed_equals_never_stopped_bit_for_bit(self, whole, checkpoint, tmp_path, stopped_after):
        train(ppo_config(checkpoint, tmp_path, train={"total_steps": 4 * stopped_after}))
        resumed = train(
            ppo_config(checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path)}),
        )
        for expected, got in zip(jax.tree.leaves(whole.state), jax.tree.leaves(resumed.state), strict=True):
            np.testing.assert_array_equal(expected, got)
        training = [record for record in repeatable(whole.history) if "iteration" in record]
        assert [record for record in repeatable(resumed.history) if "iteration" in record] == training

    def test_other_data_is_refused_by_name(self, whole, checkpoint, tmp_path):
        train(ppo_config(checkpoint, tmp_path, train={"total_steps": 4}))
        later = tmp_path / "checkpoint_8"
        shutil.copytree(tmp_path / "checkpoint_4", later)
        again = ppo_config(
            checkpoint, tmp_path, train={"resume_from_checkpoint": str(tmp_path / "checkpoint_4")}
        )
        with pytest.raises(CheckpointError, match="with others: `prompts`, `stop_sequences` "):
            train(again, prompts=PROMPTS[::-1], stop_sequences=["."])
        assert later.is_dir()  # a run that is refused touches nothing

    @pytest.mark.slow
    def test_another_architecture_with_the_same_tensors_is_refused(self, checkpoint, tmp_path):
        train(ppo_config(checkpoint, tmp_path / "run", train={"total_steps": 4}))
        shutil.copytree(checkpoint, tmp_path / "other")
        file = tmp_path / "other" / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"layer_norm_epsilon": 0.1}))
        again = ppo_config(str(tmp_path / "other"), tmp_path / "run")
        again = again.evolve(train={"resume_from_checkpoint": str(tmp_path / "run")})
        with pytest.raises(CheckpointError, match="with others: `model_path` "):
            train(again)


class TestRewardFailures:
    @pytest.mark.parametrize(
        ("broken", "message"),
        [
            (lambda outputs: [0.0] * (len(outputs) - 1), "one reward a sample"),
            (lambda outputs: [float("nan")] * len(outputs), "nan"),
        ],
    )
    def test_rollouts_and_state_survive_a_broken_reward(self, checkpoint, tmp_path, broken, message):
        calls = []

        def reward_fn(outputs, **others):
            calls.append(len(outputs))
            return broken(outputs) if len(calls) > 4 else count_vowels(outputs)

        with pytest.raises(RewardError, match="(?i)" + message) as caught:
            train(ppo_config(checkpoint, tmp_path), reward_fn=reward_fn)
        assert "failed_rollouts" in str(caught.value.__notes__)
        kept = list((tmp_path / "failed_rollouts").glob("*.jsonl"))
        assert len(kept) == 1 and json.loads(kept[0].read_text().splitlines()[0])["prompt"]
        assert (tmp_path / "checkpoint_4").exists()

    def test_skip_leaves_failed_rows_out(self, checkpoint, tmp_path):
        def reward_fn(outputs, prompts, **others):
            if any(prompt == "rain" for prompt in prompts):
                raise KeyError("rain")
            return count_vowels(outputs)

        trainer = train(
            ppo_config(checkpoint, tmp_path, train={"reward_errors": "skip", "total_steps": 4}),
            reward_fn=reward_fn,
        )
        record = next(record for record in trainer.history if "iteration" in record)
        assert record["reward/failed"] >= 1
        assert record["reward/failed_fraction"] == record["reward/failed"] / 8
        assert np.isfinite(record["reward/mean"])


def test_dense_rewards_and_metadata_reach_the_reward_function(checkpoint, tmp_path):
    seen = []

    def reward_fn(samples, prompts, outputs, output_tokens, topic):
        seen.append((list(prompts), list(topic)))
        return [[1.0] * len(tokens) for tokens in output_tokens]

    prompts = [{"prompt": text, "topic": text.upper()} for text in PROMPTS]
    config = ppo_config(checkpoint, tmp_path, train={"total_steps": 4})
    trainer = train(config, reward_fn=reward_fn, prompts=prompts, eval_prompts=None)
    assert all(topic == [text.upper() for text in texts] for texts, topic in seen)
    assert all("prompt" in prompt for prompt in prompts)
    record = next(record for record in trainer.history if "iteration" in record)
    assert record["reward/mean"] == pytest.approx(record["completion/length_mean"])


@pytest.fixture(scope="module")
def swept(checkpoint, tmp_path_factory):
    method = {"gen_kwargs": {"max_new_tokens": 8, "temperature": [0.5, 1.0]}}
    run_dir = tmp_path_factory.mktemp("swept")
    return train(ppo_config(checkpoint, run_dir, train={"total_steps": 4}, method=method))


def test_evaluation_sweeps_a_generation_argument(swept):
    assert {"reward/mean@temperature=0.5", "reward/mean@temperature=1.0"} <= swept.history[0].keys()
    assert swept.rollout_settings().temperature == 0.5


@pytest.mark.slow
def test_one_compilation_per_program_over_a_run(checkpoint, tmp_path):
    config = ppo_config(checkpoint, tmp_path, train={"total_steps": 80, "eval_interval": 1000})
    trainer = train(config)
    assert len([record for record in trainer.history if "iteration" in record]) == 20
    assert trainer.update._cache_size() == 1
    assert trainer.collect._join_and_score._cache_size() == 1
    counts = [record["perf/compilations"] for record in trainer.history if "iteration" in record]
    assert counts[2:] == counts[2:3] * len(counts[2:])

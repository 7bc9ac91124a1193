# SPDX-License-Identifier: Apache-2.0
"""Trainers of trlX's shape that bring a loss or experience of their own, by hand and through `train`."""

import dataclasses
import shutil
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jrl.trlx as trlx
from jrl.learners.guards import skip_nonfinite
from jrl.learners.ppo import PPOConfig
from jrl.trainers.base import Trainer
from jrl.trainers.sft import SFTTrainer
from jrl.trlx.loop import as_pytree, make_loss_update
from jrl.trlx.registry import TRAINERS
from jrl.trlx.utils import set_seed
from tests.trainers.runs import PROMPTS, count_vowels, ilql_config, ppo_config, sft_config

SAMPLES = [["ab", "cd"], ["xyz", "w"], ["so", "it goes"], ["we", "are one"]]
SGD = {"name": "sgd", "kwargs": {"lr": 0.1}}


class Cloning(trlx.AccelerateRLTrainer):
    """Supervised fine-tuning, written as a trlX user would."""

    def make_experience(self, samples, seq_length):
        dialogs = [trlx.tokenize_dialogue(sample, self.tokenizer, seq_length) for sample in samples]
        self.store = trlx.DialogStore(dialogs, self.tokenizer)

    def loss(self, batch):
        logits = self.model(batch["input_ids"], batch["attention_mask"]).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        learned = labels != -100
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        loss = jnp.sum(losses * learned) / jnp.sum(learned)
        return loss, {"losses/loss": loss}


@pytest.fixture
def registered():
    """`Cloning` under its own name, for one test."""
    trlx.register_trainer(Cloning)
    yield "CLONING"
    TRAINERS._classes.pop("cloning"), TRAINERS._spelled.pop("cloning")


@pytest.fixture(scope="module")
def config(checkpoint, tmp_path_factory):
    train = {"total_steps": 2, "batch_size": 4, "minibatch_size": None}
    return sft_config(checkpoint, tmp_path_factory.mktemp("loop") / "native", train=train).evolve(
        optimizer=SGD
    )


@pytest.fixture(scope="module")
def native(config):
    """jrl's own trainer on the same samples, all in every step."""
    trainer = SFTTrainer(config)
    trainer.add_samples(SAMPLES)
    trainer.learn()
    return trainer


class TestLoss:
    def test_a_loss_of_ones_own_learns_as_jrl_does(self, config, native, registered, tmp_path):
        own = config.evolve(train={"trainer": registered, "checkpoint_dir": str(tmp_path)})
        trainer = trlx.train(samples=SAMPLES, config=own, eval_prompts=PROMPTS[:2])
        logged = [record for record in trainer.native.history if "losses/loss" in record]
        assert isinstance(trainer, Cloning) and [record["step"] for record in logged] == [1, 2]
        expected = [record["sft/loss"] for record in native.history if "sft/loss" in record]
        np.testing.assert_allclose([record["losses/loss"] for record in logged], expected, rtol=1e-5)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), trainer.params, native.params)
        assert trainer.nth_evaluation == 2 and (tmp_path / "checkpoint_2").exists()

    def test_microbatches_change_nothing_but_memory(self, config):
        trainer = Cloning(config.evolve(train={"minibatch_size": 2}))
        rows = {"x": jnp.arange(8.0).reshape(4, 2)}
        trainer.loss = lambda batch: (
            jnp.mean(batch["x"]) * sum(leaf.sum() for leaf in jax.tree.leaves(trainer.model.params)),
            {"one": 1.0},
        )
        found = []
        for size in (2, 4):
            trainer.mb_size = size
            found.append(
                jax.jit(make_loss_update(trainer))(
                    trainer.native.state, trainer.native.frozen, rows, jax.random.key(0)
                )
            )
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found[0][0], found[1][0])

    @pytest.mark.parametrize(("field", "value"), [("router_aux_loss_coef", 0.1), ("routing_replay", True)])
    def test_what_a_script_does_not_know_of_experts_is_refused(self, config, field, value):
        trainer = SimpleNamespace(config=dataclasses.replace(config, method=PPOConfig(**{field: value})))
        with pytest.raises(
            ValueError, match=f"`method.{field}` must be .* where a method of the trainer is replaced"
        ):
            make_loss_update(trainer)

    def test_a_loss_may_call_the_one_that_it_replaces(self, config):
        class Doubled(trlx.AccelerateSFTTrainer):
            def loss(self, batch):
                loss, stats = super().loss(batch)
                return 2.0 * loss, stats

        trainer = Doubled(config.evolve(train={"trainer": "SFTTrainer"}))
        trainer.make_experience(SAMPLES, 32)
        batch = as_pytree(next(iter(trainer.create_train_dataloader())))
        with jax.set_mesh(trainer.native.mesh):
            _, stats = jax.eval_shape(
                make_loss_update(trainer),
                trainer.native.state,
                trainer.native.frozen,
                batch,
                jax.random.key(0),
            )
        assert "sft/loss" in stats

    def test_callbacks_come_after_passes_and_epochs(self, config, tmp_path):
        told = []

        class Watched(Cloning):
            def post_backward_callback(self):
                told.append(("pass", self.iter_count))

            def post_epoch_callback(self):
                told.append(("epoch", self.iter_count))

        trainer = Watched(config.evolve(train={"checkpoint_dir": str(tmp_path), "total_steps": 5}))
        trainer.make_experience(SAMPLES, 32)
        trainer.n_inner_epochs = 2
        assert trainer.learn() is None and trainer.iter_count == 5
        assert told == [("pass", 1), ("pass", 2), ("epoch", 2), ("pass", 3), ("pass", 4), ("epoch", 4)]

    def test_without_a_loss_or_a_store_there_is_nothing_to_learn(self, config, tmp_path):
        trainer = trlx.AccelerateRLTrainer(config.evolve(train={"checkpoint_dir": str(tmp_path)}))
        with pytest.raises(ValueError, match="no store to learn from: `make_experience`"):
            trainer.learn()
        with pytest.raises(ValueError, match="no store yet"):
            trainer.push_to_store([])
        with pytest.raises(NotImplementedError, match="defines no `loss`"):
            trainer.loss(None)


class TestExperience:
    @pytest.mark.slow
    def test_rollouts_of_ones_own_are_learned(self, checkpoint, tmp_path):
        class Copying(trlx.AcceleratePPOTrainer):
            """Every rollout says "th", with reward 1 for its first token and 0 for its second."""

            def make_experience(self, num_rollouts=1024, iter_count=0):
                query, response = (np.asarray(self.tokenizer(text)["input_ids"]) for text in ("a", "oo"))
                logprobs = np.full(2, -4.5, np.float32)
                values = np.zeros(2, np.float32)
                rewards = np.array([1.0, 0.0], np.float32)
                row = trlx.PPORLElement(query, response, logprobs, values, rewards)
                self.push_to_store([row] * num_rollouts)

        config = ppo_config(
            checkpoint, tmp_path, train={"total_steps": 4, "batch_size": 8, "minibatch_size": None}
        )
        trainer = Copying(config, reward_fn=count_vowels)
        trainer.add_prompt_pipeline(trlx.PromptPipeline(["a"], 8, trainer.tokenizer))
        before = jax.device_get(trainer.params)
        trainer.learn()
        losses = [record["ppo/value_loss"] for record in trainer.native.history if "ppo/value_loss" in record]
        assert trainer.iter_count == 4 and losses[-1] < losses[0] and len(trainer.store) == 8
        moved = jax.tree.map(lambda old, new: bool((old != new).any()), before, trainer.params)
        assert any(jax.tree.leaves(moved))

    @pytest.mark.slow
    def test_the_controller_and_the_moments_move_beside_a_loss_of_ones_own(self, checkpoint, tmp_path):
        method = {"target": 1e-4, "horizon": 100, "init_kl_coef": 0.5}
        config = ppo_config(checkpoint, tmp_path, method=method)
        trainer = Doubled(config, reward_fn=count_vowels)
        trainer.add_prompt_pipeline(trlx.PromptPipeline(PROMPTS, 24, trainer.tokenizer))
        trainer.make_experience(8)
        first = trainer.native.state
        trainer.post_epoch_callback()
        second = trainer.native.state
        # The policy is its reference, far below the target: the weight falls.
        assert 0.5 > float(first.kl_coef) > float(second.kl_coef) > 0
        assert [float(state.moments.running.num_values) for state in (first, second)] == [8, 16]

    @pytest.mark.slow
    def test_every_epoch_goes_on_in_the_prompts_beside_a_loss_of_ones_own(
        self, checkpoint, tmp_path, monkeypatch
    ):
        trainer = trlx.AcceleratePPOTrainer(ppo_config(checkpoint, tmp_path), reward_fn=count_vowels)
        trainer.add_prompt_pipeline(trlx.PromptPipeline(PROMPTS, 24, trainer.tokenizer))
        own, keys, told = trainer.loss, trainer.native.keys, []
        trainer.loss = lambda batch: own(batch)
        monkeypatch.setattr(trainer.native, "keys", lambda number: told.append(number) or keys(number))
        trainer.learn()
        assert trainer.iter_count == 12 and told == [0, 1, 2]


class Doubled(trlx.AcceleratePPOTrainer):
    """A loss of its own, on the rollouts that jrl makes."""

    def loss(self, batch):
        loss, stats = super().loss(batch)
        return 2.0 * loss, stats


class Halved(trlx.AcceleratePPOTrainer):
    """Rollouts of its own: jrl's, at half the rewards."""

    def make_experience(self, num_rollouts=1024, iter_count=0):
        super().make_experience(num_rollouts, iter_count)
        rows = list(self.store)
        self.store.clear_history()
        self.push_to_store([dataclasses.replace(row, rewards=row.rewards / 2) for row in rows])


class TestResume:
    @pytest.mark.slow
    @pytest.mark.parametrize("kind", [Doubled, Halved])
    @pytest.mark.parametrize("step", [7, 8])
    def test_a_run_cut_inside_an_epoch_or_at_its_end_is_the_whole_run(self, checkpoint, tmp_path, kind, step):
        calls = []

        def rewards(outputs, **others):
            calls.append(outputs)
            return count_vowels(outputs)

        def run(name, **train):
            calls.clear()
            config = ppo_config(
                checkpoint,
                tmp_path / name,
                train={"checkpoint_interval": step, "keep_checkpoints": 3, **train},
            )
            trainer = kind(config, reward_fn=rewards)
            trainer.add_prompt_pipeline(trlx.PromptPipeline(PROMPTS, 24, trainer.tokenizer))
            trainer.learn()
            losses = [record["ppo/loss"] for record in trainer.native.history if "ppo/loss" in record]
            return jax.device_get(trainer.native.state), losses, list(calls)

        state, losses, told = run("whole")
        shutil.copytree(tmp_path / "whole", tmp_path / "cut")
        shutil.rmtree(tmp_path / "cut" / "checkpoint_12")
        last = tmp_path / "cut" / f"checkpoint_{step}"
        again, resumed, told_again = run("cut", resume_from_checkpoint=str(last))
        jax.tree.map(np.testing.assert_array_equal, state, again)
        assert losses == resumed and len(told) == 6
        assert told_again == told[4:]  # two calls an epoch: those of the third alone

    @pytest.mark.slow
    def test_a_run_that_is_done_learns_nothing_more(self, config, tmp_path):
        for resume in (None, str(tmp_path)):
            train = {"checkpoint_dir": str(tmp_path), "total_steps": 1, "epochs": 3, "eval_interval": 0}
            trainer = Cloning(config.evolve(train={**train, "resume_from_checkpoint": resume}))
            trainer.make_experience(SAMPLES, 32)
            trainer.learn()
            assert trainer.iter_count == 1


def _mine(self, *arguments, **options):
    return None


_EVERY = (
    "_accumulate",
    "evaluate",
    "generate_eval",
    "decode",
    "setup_scheduler",
    "save",
    "save_pretrained",
    "load",
)
_NATIVE = ("get_arch", "setup_model", "setup_optimizer")
_LOOP = (
    "loss",
    "prepare_learning",
    "create_train_dataloader",
    "post_backward_callback",
    "post_epoch_callback",
)


class TestOverrides:
    """A method of trlX's trainers that trlX calls is called here too, or refused when the trainer is made."""

    @pytest.mark.parametrize(
        ("base", "names"),
        [
            ("AccelerateRLTrainer", _EVERY),
            ("AcceleratePPOTrainer", (*_EVERY, *_NATIVE, "generate", "push_to_store")),
            ("AccelerateILQLTrainer", (*_EVERY, *_NATIVE, *_LOOP)),
            ("AccelerateSFTTrainer", (*_EVERY, *_NATIVE)),
            ("AccelerateRFTTrainer", (*_EVERY, *_NATIVE, *_LOOP, "generate", "make_experience")),
        ],
    )
    def test_one_that_nothing_calls_is_refused(self, config, base, names):
        for name in names:
            own = type("Mine", (getattr(trlx, base),), {name: _mine})
            with pytest.raises(
                TypeError,
                match=rf"Mine must not override `{name}`: nothing here calls it, so it would change nothing\. \S",
            ):
                own(config, reward_fn=len)

    @pytest.mark.parametrize(
        ("base", "names"),
        [
            ("AcceleratePPOTrainer", ("make_experience", "generate", "push_to_store")),
            ("AcceleratePPOTrainer", ("loss", "setup_model", "setup_optimizer")),
            (
                "AcceleratePPOTrainer",
                ("add_prompt_pipeline", "add_eval_pipeline", "learn", "setup_rollout_logging"),
            ),
            ("AccelerateSFTTrainer", ("make_experience", "post_epoch_callback", "setup_optimizer")),
            (
                "AccelerateRLTrainer",
                ("get_arch", "setup_model", "setup_optimizer", "make_experience", *_LOOP),
            ),
        ],
    )
    def test_one_that_is_called_is_not(self, base, names):
        own = type("Mine", (getattr(trlx, base),), dict.fromkeys(names, _mine))
        own._refuse_overrides(object.__new__(own))

    def test_an_orchestrators_experience_is_refused(self):
        own = type("Mine", (trlx.PPOOrchestrator,), {"make_experience": _mine})
        with pytest.raises(TypeError, match=r"override `make_experience`.*Override that of AcceleratePPO"):
            own(object(), object())

    def test_an_optimizer_of_ones_own_moves_the_parameters(self, config, tmp_path):
        class Standing(Cloning):
            def setup_optimizer(self):
                return skip_nonfinite(optax.chain(optax.trace(0.9), optax.scale(0.0)))

        trainer = Standing(config.evolve(train={"checkpoint_dir": str(tmp_path), "total_steps": 1}))
        before = jax.device_get(trainer.params)
        trainer.make_experience(SAMPLES, 32)
        trainer.learn()
        assert trainer.iter_count == 1
        jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(trainer.params))

    def test_samples_of_a_seq2seq_model_pass_their_own_method(self, t5_checkpoint, tmp_path):
        told = []

        class Watched(trlx.AccelerateILQLTrainer):
            def make_experience_seq2seq(self, samples, rewards, max_length=2048):
                told.append(samples)
                super().make_experience_seq2seq(samples, rewards, max_length)

        config = ilql_config(t5_checkpoint, tmp_path).evolve(model={"model_arch_type": "seq2seq"})
        trainer = Watched(config)
        trainer.make_experience([["ab", "cd"]], [1.0])
        assert told == [[["ab", "cd"]]] and len(trainer.store) == 1


@pytest.mark.slow
def test_a_trainers_model_draws_anew_at_every_call_and_heeds_the_seed(config):
    model = trlx.AccelerateSFTTrainer(config).model
    draw = lambda: model.generate([[3, 4, 5]], do_sample=True, max_new_tokens=12).tolist()  # noqa: E731
    set_seed(3)
    drawn = [draw() for _ in range(3)]
    assert drawn[0] != drawn[1] != drawn[2] != drawn[0]
    set_seed(3)
    assert [draw() for _ in range(3)] == drawn


class TestTrain:
    def test_jrls_trainers_come_in_trlxs_shape(self, config, tmp_path):
        own = config.evolve(train={"checkpoint_dir": str(tmp_path), "trainer": "AccelerateSFTTrainer"})
        trainer = trlx.train(samples=SAMPLES, config=own, stop_sequences=["!"])
        assert type(trainer) is trlx.AccelerateSFTTrainer and isinstance(trainer.native, SFTTrainer)
        assert trainer.stop_sequences == ["!"] and trainer.iter_count == 2 and len(trainer.store) == 4

    def test_a_trainer_of_jrls_shape_is_registered_with_jrl(self):
        class Plain(Trainer):
            pass

        trlx.register_trainer("plain_of_test")(Plain)
        assert trlx.get_trainer("Plain_of_test") is Plain and "plain_of_test" not in TRAINERS

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            ({}, "give `reward_fn`"),
            ({"samples": ["a"], "rewards": [1.0, 2.0]}, "one entry a sample: got 2 for 1"),
            ({"samples": ["ab"], "split_token": ":"}, r"sample 0 \('ab'\) does not hold ':'"),
        ],
    )
    def test_errors_are_jrls(self, config, arguments, message):
        with pytest.raises(ValueError, match=message):
            trlx.train(config=config, **arguments)

    def test_unknown_names_list_the_registered(self, config):
        with pytest.raises(
            ValueError,
            match=r"`train.trainer` must be one of .*AcceleratePPOTrainer.*ILQLTrainer, .*'PPOTraner'",
        ):
            trlx.train(samples=SAMPLES, config=config.evolve(train={"trainer": "PPOTraner"}))

    @pytest.mark.parametrize(
        ("data", "missing"),
        [({"samples": SAMPLES}, "make_experience"), ({"reward_fn": len}, "add_prompt_pipeline")],
    )
    def test_the_base_class_takes_no_data(self, config, data, missing):
        base = config.evolve(train={"trainer": "AccelerateRLTrainer"})
        with pytest.raises(ValueError, match=f"AccelerateRLTrainer defines no `{missing}`"):
            trlx.train(config=base, **data)

    def test_nemo_says_what_to_use(self, config):
        with pytest.raises(ImportError, match="use AcceleratePPOTrainer and spread the model"):
            trlx.NeMoPPOTrainer(config)

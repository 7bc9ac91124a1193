# SPDX-License-Identifier: Apache-2.0
"""A method's configuration with a `loss` of its own: it is what the compiled update learns by."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
from jrl import trlx
from jrl.learners.ppo import ppo_recipe
from jrl.losses.policy_gradient import Targets
from jrl.trainers.config.registry import METHODS
from jrl.trlx.maths import labels_of, own_ilql_objective
from jrl.typing import ILQLBatch, ModelInputs, Predictions
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, tiny_run

TRLX_PPO = {name: value for name, value in vars(trlx.default_ppo_config().method).items() if name != "name"}
TRLX_ILQL = {name: value for name, value in vars(trlx.default_ilql_config().method).items() if name != "name"}
SGD = trlx.OptimizerConfig("sgd", {"lr": 0.1})
SAMPLES = [("the cat", " sat"), ("a dog", " ran away"), ("we", " go"), ("rain", " falls down")]


@pytest.fixture(autouse=True)
def _as_scripts_run():
    with jax.numpy_rank_promotion("allow"):
        yield


@pytest.fixture(autouse=True)
def _registry(monkeypatch):
    monkeypatch.setattr(METHODS, "_classes", dict(METHODS._classes))


@pytest.fixture
def still():
    """A PPO configuration by whose loss nothing moves but one bias: the loss is Σ over actions of 3·V."""

    @trlx.register_method
    @dataclass
    class StillPPOConfig(trlx.PPOConfig):
        def loss(self, logprobs, values, old_logprobs, old_values, advantages, returns, mask):
            del logprobs, old_logprobs, old_values, advantages, returns
            loss = 3 * jnp.sum(values * mask) / mask.sum()
            return loss, {"losses": {"mine": loss}}

    return StillPPOConfig


def rollouts(seed=0):
    rng = np.random.default_rng(seed)
    lengths = np.array([5, 2, 1, 4])
    mask = jnp.asarray(np.arange(5)[None, :] < lengths[:, None])
    one = lambda: jnp.asarray(rng.normal(size=(4, 5)), jnp.float32)  # noqa: E731
    return one, mask


def now_of(one):
    return Predictions(one(), one(), jnp.abs(one()), lambda: jnp.zeros((4, 5, 7)))


def test_the_loss_of_a_ppo_configuration_is_the_loss_of_the_update():
    @dataclass
    class Plain(trlx.PPOConfig):
        def loss(self, logprobs, values, old_logprobs, old_values, advantages, returns, mask):
            return super().loss(logprobs, values, old_logprobs, old_values, advantages, returns, mask)

        def get_advantages_and_returns(self, values, rewards, response_length, use_whitening=True):
            advantages, returns = super().get_advantages_and_returns(values, rewards, response_length, False)
            return 2 * advantages, returns

    one, mask = rollouts()
    own, default = Plain(name="PPOConfig", **TRLX_PPO), trlx.PPOConfig(name="PPOConfig", **TRLX_PPO)
    functions, ours = ppo_recipe(own), ppo_recipe(default)
    now, rewards, values = now_of(one), one(), one()
    advantages, returns = ours.estimate(rewards, values, mask, None)
    targets = Targets(one(), values, advantages, returns, mask)
    expected, found = ours.loss(now, targets), functions.loss(now, targets)
    np.testing.assert_allclose(found.loss_sum, expected.loss_sum, rtol=1e-5)
    assert found.weight == expected.weight == 12
    doubled, same_returns = functions.estimate(rewards, values, mask, None)
    np.testing.assert_allclose(same_returns, returns, atol=1e-6)
    np.testing.assert_allclose(doubled, 2 * jnp.where(mask, returns - values, 0.0), atol=1e-5)


def test_a_subclass_without_methods_leaves_the_update_alone():
    @dataclass
    class Named(trlx.PPOConfig):
        pass

    config = Named(name="PPOConfig", **TRLX_PPO)
    recipe = ppo_recipe(config)
    assert config.adapt(recipe) is recipe
    assert trlx.ILQLConfig(name="ILQLConfig", **TRLX_ILQL).own_objective() is None


@pytest.mark.parametrize("field", [{"entropy_coef": 0.1}, {"ratio_threshold": 10.0}])
def test_an_option_of_the_loss_that_is_replaced_is_refused(still, field):
    with pytest.raises(ValueError, match=r"must be off beside StillPPOConfig\.loss"):
        ppo_recipe(still(name="StillPPOConfig", **(TRLX_PPO | field)))


@pytest.mark.parametrize(
    ("base", "method"),
    [
        (jrl.PPOConfig, "loss"),
        (jrl.PPOConfig, "get_advantages_and_returns"),
        (jrl.ILQLConfig, "loss"),
    ],
)
def test_a_method_on_a_configuration_of_jrls_own_is_refused(base, method):
    config = dataclass(type("MyConfig", (base,), {method: lambda self: None}))()
    hook = (lambda: ppo_recipe(config)) if base is jrl.PPOConfig else config.own_objective
    with pytest.raises(TypeError, match=rf"must not define `{method}`.*jrl\.trlx\.(PPO|ILQL)Config"):
        hook()


@pytest.mark.parametrize("returned", [jnp.float32(1.0), (jnp.ones(3), {})])
def test_a_loss_that_is_no_mean_with_its_numbers_is_refused(returned):
    @dataclass
    class Wrong(trlx.PPOConfig):
        def loss(self, **arrays):
            return returned

    one, mask = rollouts()
    config = Wrong(name="PPOConfig", **TRLX_PPO)
    functions = ppo_recipe(config)
    with pytest.raises(ValueError, match=r"`Wrong\.loss` must return"):
        functions.loss(now_of(one), Targets(one(), one(), one(), one(), mask))


def test_the_states_of_a_batch_are_those_of_trlxs_store():
    columns = jnp.array([[2, 3, 6], [1, 0, 0], [0, 0, 0]])
    mask = jnp.array([[True, True, True], [True, False, False], [False, False, False]])
    inputs = ModelInputs(jnp.zeros((3, 9), jnp.int32), jnp.ones((3, 9), bool))
    labels = labels_of(ILQLBatch(inputs, columns, mask, jnp.ones((3, 3))))
    assert labels.states_ixs.tolist() == [[2, 3, 6, 7], [1, 2, 0, 0], [1, 0, 0, 0]]
    assert labels.actions_ixs.tolist() == [[2, 3, 6], [1, 0, 0], [0, 0, 0]]
    assert labels.dones.tolist() == [[1, 1, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]
    assert labels.rewards.tolist() == [[1, 1, 1], [1, 0, 0], [0, 0, 0]]


def test_a_loss_of_ones_own_is_refused_rows_that_go_on():
    one, mask = jnp.ones((1, 1)), jnp.ones((1, 1), bool)
    inputs = ModelInputs(jnp.zeros((1, 2), jnp.int32), jnp.ones((1, 2), bool))
    batch = ILQLBatch(inputs, jnp.zeros((1, 1), jnp.int32), mask, one, after=inputs)
    objective = own_ilql_objective(trlx.default_ilql_config().method, lambda outputs, labels: one)
    with pytest.raises(ValueError, match="rows of these samples go on in others"):
        objective(None, {}, {}, {}, batch)


def own_ilql(checkpoint, run_dir, method, **fields):
    config = tiny_run(trlx.default_ilql_config(), checkpoint, run_dir)
    given = {**vars(config.method), **fields, "name": method.__name__}
    return trlx.TRLConfig(**{**vars(config), "method": method(**given)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["causal", "seq2seq"])
def test_the_loss_of_an_ilql_configuration_is_the_loss_of_the_update(
    kind, checkpoint, t5_checkpoint, tmp_path
):
    @trlx.register_method
    @dataclass
    class MyILQLConfig(trlx.ILQLConfig):
        factor: float = 1.0

        def loss(self, outputs, labels):
            loss, stats = super().loss(outputs, labels)
            return self.factor * loss, {**stats, "mine": self.factor * loss}

    texts = SAMPLES if kind == "causal" else ["".join(pair) for pair in SAMPLES]
    path = checkpoint if kind == "causal" else t5_checkpoint
    changes = {"total_steps": 2, "batch_size": 4, "minibatch_size": 2}
    histories = {}
    for name in ("plain", "own", "still"):
        config = own_ilql(path, tmp_path / name, MyILQLConfig, factor=0.0 if name == "still" else 1.0)
        if name == "plain":
            config = tiny_run(trlx.default_ilql_config(), path, tmp_path / name)
        sizes = {"model": {"model_arch_type": kind}, "method": {"gen_kwargs": {"max_new_tokens": 8}}}
        # Adam would make a whole step of what is rounding.
        config.optimizer = SGD
        config = config.evolve(train=changes, **sizes)
        trainer = trlx.train(samples=texts, rewards=[1.0, 0.5, 0.2, 0.0], config=config)
        histories[name] = trainer.native.params, trainer.native.history
    plain, own = histories["plain"], histories["own"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6), plain[0], own[0])
    mine = next(one["mine"] for one in own[1] if "mine" in one)
    theirs = next(one["ilql/loss"] for one in plain[1] if "ilql/loss" in one)
    assert mine == pytest.approx(theirs, rel=1e-5)
    moved = jax.tree.map(lambda a, b: float(jnp.abs(a - b).max()), histories["still"][0], own[0])
    assert max(jax.tree.leaves(moved)) > 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("train", [trlx.train, jrl.train])
def test_a_run_learns_by_the_loss_of_its_configuration(train, still, checkpoint, tmp_path):
    config = ppo_config(
        checkpoint,
        tmp_path / "run",
        train={"total_steps": 4},
        optimizer={"name": "sgd", "kwargs": {"lr": 0.1}},
    )
    given = {**vars(config.method), "name": "StillPPOConfig"}
    config = trlx.TRLConfig(**{**vars(config), "method": still(**given)})
    trainer = train(reward_fn=count_vowels, prompts=PROMPTS, eval_prompts=PROMPTS[:2], config=config)
    native = trainer if train is jrl.train else trainer.native
    record = next(record for record in native.history if "losses/mine" in record)
    # The value head starts at 0, and this loss pushes every value down: 3 · 0.1 a step and more.
    assert record["losses/mine"] < -0.3


@pytest.mark.slow
def test_a_loss_of_torch_is_refused_in_words(checkpoint, tmp_path):
    @trlx.register_method
    @dataclass
    class TorchlikeConfig(trlx.PPOConfig):
        def loss(self, logprobs, values, old_logprobs, old_values, advantages, returns, mask):
            loss = jnp.mean(logprobs)
            return loss, {"losses/total_loss": loss.item()}

    config = ppo_config(checkpoint, tmp_path / "run")
    config = trlx.TRLConfig(**{**vars(config), "method": TorchlikeConfig(**vars(config.method))})
    with pytest.raises(TypeError, match=r"`TorchlikeConfig\.loss` must compute with jax arrays"):
        trlx.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)

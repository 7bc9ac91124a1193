# SPDX-License-Identifier: Apache-2.0
"""Methods that a subclass of `PPOTrainer` overrides: `step` learns from them, or the subclass is refused by name."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.trl.core import masked_mean
from jrl.trl.models import AutoModelForCausalLMWithValueHead
from jrl.trl.ppo import PPOConfig, PPOTrainer
from tests.tiny import tiny_hf_config, tiny_tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:The mean KL per sequence")]
ROWS = 4


@pytest.fixture(autouse=True, scope="module")
def _as_scripts_run():
    with jax.numpy_rank_promotion("allow"):
        yield


def make(cls=PPOTrainer, **options):
    sizes = {"batch_size": ROWS, "mini_batch_size": 2, "gradient_accumulation_steps": 2, "ppo_epochs": 2}
    config = PPOConfig(**(sizes | {"learning_rate": 0.1} | options))
    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config())
    return cls(config, model, tokenizer=tiny_tokenizer(), optimizer="sgd")


def batch(seed=0):
    rng = np.random.default_rng(seed)
    queries = [rng.integers(2, 97, size) for size in rng.integers(2, 8, ROWS)]
    responses = [rng.integers(1, 97, size) for size in rng.integers(2, 9, ROWS)]
    return queries, responses, [float(score) for score in rng.normal(size=ROWS)]


def params_of(trainer):
    return jax.device_get(trainer.native.params)


def same(first, second):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=2e-6), first, second)


@pytest.fixture(scope="module")
def plain():
    """Parameters and statistics of jrl's own step, the second one under another KL coefficient."""
    trainer = make()
    first = trainer.step(*batch())
    after = params_of(trainer)
    trainer.kl_ctl.value = 2.0
    second = trainer.step(*batch(1))
    return after, params_of(trainer), first, second


class Rewritten(PPOTrainer):
    """TRL's maths written out by hand, as scripts have it."""

    def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
        kl = logprobs - ref_logprobs
        non_score = -self.kl_ctl.value * kl
        last = (jnp.arange(masks.shape[1]) == masks.sum(axis=1, keepdims=True) - 1) * masks
        return non_score + last * scores[:, None], non_score, kl

    def compute_advantages(self, values, rewards, mask):
        advantages, last = [], 0.0
        for t in reversed(range(rewards.shape[1])):
            following = values[:, t + 1] if t + 1 < rewards.shape[1] else 0.0
            last = rewards[:, t] + self.config.gamma * following - values[:, t] + 0.95 * last
            advantages.insert(0, last)
        raw = jnp.stack(advantages, axis=1) * mask
        mean = (raw * mask).sum() / mask.sum()
        variance = (((raw - mean) * mask) ** 2).sum() / (mask.sum() - 1)
        return values, (raw - mean) / jnp.sqrt(variance + 1e-8) * mask, raw + values

    def loss(self, old_logprobs, values, logits, vpreds, logprobs, mask, advantages, returns):
        ratio = jnp.exp(logprobs - old_logprobs)
        policy = -jnp.minimum(advantages * ratio, advantages * jnp.clip(ratio, 0.8, 1.2))
        clipped = jnp.clip(vpreds, values - 0.2, values + 0.2)
        value = 0.5 * jnp.maximum((vpreds - returns) ** 2, (clipped - returns) ** 2)
        top = masked_mean(logits.max(axis=-1), mask)
        stats = {"mine": {"top": top, "one": jnp.float32(1)}, "loss/value": masked_mean(value, mask)}
        return masked_mean(policy, mask), 0.1 * masked_mean(value, mask), stats


def test_what_a_subclass_writes_out_is_what_step_learns(plain):
    trainer = make(Rewritten)
    stats = trainer.step(*batch())
    same(params_of(trainer), plain[0])
    trainer.kl_ctl.value = 2.0  # the coefficient of this step, not of the one that was compiled
    later = trainer.step(*batch(1))
    same(params_of(trainer), plain[1])
    for found, wanted in ((stats, plain[2]), (later, plain[3])):
        assert found["ppo/mine/one"] == pytest.approx(1) and np.isfinite(found["ppo/mine/top"])
        for name in wanted.keys() - {name for name in wanted if name.startswith("time/")}:
            np.testing.assert_allclose(found[name], wanted[name], rtol=2e-3, atol=2e-5, err_msg=name)


class Calling(PPOTrainer):
    """Changes arguments and results of jrl's own methods."""

    def compute_rewards(self, *args):
        rewards, non_score = super().compute_rewards(*args)
        return 0 * rewards, non_score

    def loss(self, *args):
        policy, value, stats = super().loss(*args)
        return 3 * policy, 0 * value, {**stats, "mine": policy}


def test_super_answers_and_what_is_made_of_it_counts(plain):
    trainer = make(Calling)
    before = params_of(trainer)
    stats = trainer.step(*batch())
    after = params_of(trainer)
    same(after["v_head"], before["v_head"])
    assert np.abs(after["v_head"]["out"]["kernel"] - plain[0]["v_head"]["out"]["kernel"]).max() > 1e-4
    # Rewards of 0 and values of 0: nothing to learn, however often it is weighed.
    assert stats["ppo/returns/mean"] == 0 and stats["ppo/mine"] == pytest.approx(stats["ppo/loss/policy"])
    assert stats["ppo/policy/ratio"].shape == plain[2]["ppo/policy/ratio"].shape


def test_a_method_that_is_put_on_the_trainer_counts_from_the_next_step_on():
    trainer = make()
    trainer.step(*batch())
    trainer.loss = lambda *args: (jnp.float32(0) * args[4].sum(), jnp.float32(0), {"mine": jnp.float32(7)})
    before = params_of(trainer)
    assert trainer.step(*batch(1))["ppo/mine"] == 7
    jax.tree.map(np.testing.assert_array_equal, params_of(trainer), before)


class InTorch(PPOTrainer):
    def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
        torch = pytest.importorskip("torch")
        return torch.tensor(scores), None


class InNumPy(PPOTrainer):
    def compute_advantages(self, values, rewards, mask):
        return values, np.exp(rewards), values


class WithItem(PPOTrainer):
    def loss(self, *args):
        return args[4].mean().item(), 0.0, {}


class OnlyRewards(PPOTrainer):
    def compute_rewards(self, scores, logprobs, ref_logprobs, masks):
        return scores


class Counting(PPOTrainer):
    def loss(self, *args):
        return args[4].mean() / (1 + self.current_step), 0.0, {}


class WeighsByKL(PPOTrainer):
    def loss(self, *args):
        return args[4].mean() * self.kl_ctl.value, 0.0, {}


class MovesValues(PPOTrainer):
    def compute_advantages(self, values, rewards, mask):
        return values + 1, rewards, values


@pytest.mark.parametrize(
    ("cls", "error", "message"),
    [
        (InTorch, TypeError, r"`InTorch\.compute_rewards` must compute with jax arrays.*jrl\.ops"),
        (InNumPy, TypeError, r"`InNumPy\.compute_advantages` must compute with jax arrays.*jrl\.ops"),
        (WithItem, TypeError, r"`WithItem\.loss` must compute with jax arrays.*without .*`\.item\(\)`"),
        (OnlyRewards, ValueError, r"`OnlyRewards\.compute_rewards` must return rewards of shape \(4, "),
        (Counting, TypeError, r"`Counting\.loss` must not use `current_step`"),
        (WeighsByKL, TypeError, r"`WeighsByKL\.loss` must not use `kl_ctl.value`.*`compute_rewards` gets"),
        (MovesValues, ValueError, r"`MovesValues\.compute_advantages` must return `values` as they were"),
    ],
)
def test_what_cannot_be_compiled_is_said_in_one_line(cls, error, message):
    trainer = make(cls)
    trainer.native.make_recipe()  # as a loop of one's own asks once more
    before = params_of(trainer)
    with pytest.raises(error, match=message) as caught:
        trainer.step(*batch())
    assert "\n" not in str(caught.value)
    jax.tree.map(np.testing.assert_array_equal, params_of(trainer), before)
    assert trainer.current_step == 0


def test_dense_scores_and_whole_distributions_are_refused_beside_own_rewards():
    queries, responses, scores = batch()
    dense = [np.zeros(len(row)) for row in responses]
    with pytest.raises(ValueError, match=r"`scores\[0\]` must be one number where `compute_rewards`"):
        make(Rewritten).step(queries, responses, dense)
    with pytest.raises(ValueError, match='`kl_penalty` must not be "full"'):
        make(Rewritten, kl_penalty="full").step(queries, responses, scores)


@pytest.mark.parametrize("name", ["train_minibatch", "batched_forward_pass", "_kl_penalty"])
def test_a_method_that_nobody_would_call_is_refused_by_name(name):
    cls = type("Mine", (PPOTrainer,), {name: lambda self, *args: None})
    with pytest.raises(TypeError, match=f"Mine must not override `{name}`: nothing here calls it.*Override"):
        make(cls)

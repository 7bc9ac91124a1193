# SPDX-License-Identifier: Apache-2.0
"""TRL's helpers: figures that TRL 0.7.1 gave, and what each promises."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.trl import core
from jrl.trl.models import AutoModelForCausalLM
from tests.tiny import tiny_hf_config

X, MASK = [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[0, 1, 1], [1, 1, 0]]
WHITE = [[-1.936492, -1.161895, -0.387298], [0.387298, 1.161895, 1.936492]]


def test_masked_statistics():
    assert float(core.masked_mean(X, MASK)) == 3.5
    np.testing.assert_allclose(core.masked_mean(X, MASK, axis=1), [2.5, 4.5])
    assert float(core.masked_var(X, MASK)) == pytest.approx(1.6666667)
    assert float(core.masked_var(X, MASK, unbiased=False)) == 1.25
    np.testing.assert_allclose(core.masked_whiten(X, MASK), WHITE, atol=1e-5)
    np.testing.assert_allclose(core.masked_whiten(X, MASK, shift_mean=False), np.add(WHITE, 3.5), atol=1e-5)
    np.testing.assert_allclose(core.whiten([2.0, 3.0]), core.masked_whiten([1.0, 2.0, 3.0], [0, 1, 1])[1:])
    assert float(core.masked_mean([np.nan, 2.0], [0, 1])) == 2.0


def test_logprobs_and_entropy():
    logits = [[[1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]]
    np.testing.assert_allclose(
        core.logprobs_from_logits(logits, [[2, 0]]), [[-0.407606, -1.098612]], atol=1e-5
    )
    whole = core.logprobs_from_logits(logits, None, gather=False)
    np.testing.assert_allclose(np.exp(whole).sum(axis=-1), 1, atol=1e-6)
    assert float(whole[0, 0, 2]) == pytest.approx(-0.407606, abs=1e-5)
    np.testing.assert_allclose(core.entropy_from_logits(logits), [[0.832396, 1.098612]], atol=1e-5)


def test_running_moments():
    running = core.RunningMoments()
    assert (running.mean, running.std, running.var) == (0, 1, 1)
    assert running.update([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 1.290994))
    assert (running.mean, running.var, running.std) == pytest.approx((2.5, 1.25, 1.290994))
    assert running.update([10.0, -2.0]) == pytest.approx((4.0, 8.485281))
    assert (running.mean, running.var, running.std, running.count) == pytest.approx((3, 13.333333, 4, 6))


def test_kl_controllers():
    adaptive, fixed = core.AdaptiveKLController(0.2, 6, 10000), core.FixedKLController(0.2)
    for kl, expected in ((12, 0.201024), (3, 0.19999475712), (6.6, 0.20050674369822719)):
        adaptive.update(kl, 256)
        fixed.update(kl, 256)
        assert adaptive.value == pytest.approx(expected, rel=1e-6)
    assert fixed.value == 0.2


def test_lengths_leave_out_the_upper_bound():
    core.set_seed(1)
    sampler = core.LengthSampler(2, 5)
    drawn = [sampler() for _ in range(200)]
    assert set(drawn) == {2, 3, 4}
    core.set_seed(1)
    assert [sampler() for _ in range(200)] == drawn
    with pytest.raises(ValueError, match="`max_value` must be above `min_value`"):
        core.LengthSampler(3, 3)


def test_dictionaries():
    assert core.flatten_dict({"a": {"b": 1, "c": {"d": 2}}, "e": 3}) == {"a/b": 1, "a/c/d": 2, "e": 3}
    with pytest.raises(ValueError, match="'a/b'"):
        core.flatten_dict({"a/b": 1})
    stacked = core.stack_dicts([{"x": jnp.array([1.0])}, {"x": jnp.array([[2.0], [3.0]])}])
    np.testing.assert_array_equal(stacked["x"], [[1, -1], [2, 3]])
    assert core.add_suffix({"a": 1}, "_b") == {"a_b": 1}
    found = core.stats_to_np({"a": jnp.ones(1, jnp.bfloat16), "b": jnp.ones(2, jnp.bfloat16), "c": "text"})
    assert (found["a"], found["c"], found["b"].dtype) == (1.0, "text", np.float32)
    assert core.convert_to_scalar({"a": jnp.ones(()), "b": [1, 2]}) == {"a": 1.0, "b": [1, 2]}
    averaged = core.average_torch_dicts([{"a": [1.0, 3.0]}, {"a": [3.0, 5.0]}])
    np.testing.assert_array_equal(averaged["a"], [2, 4])


def test_padding_clipping_and_division():
    np.testing.assert_array_equal(core.pad_to_size([[1, 2]], 4), [[1, 2, 50256, 50256]])
    with pytest.raises(ValueError, match="`size` must be at least the 2 entries"):
        core.pad_to_size([[1, 2]], 1)
    np.testing.assert_array_equal(core.pad_to_length([1, 2], 3, 0), [1, 2, 0])
    np.testing.assert_array_equal(core.pad_to_length([1, 2], 1, 0), [1, 2])
    np.testing.assert_array_equal(core.clip_by_value([-1.0, 0.0, 9.0], 0.0, [1.0, 2.0, 3.0]), [0, 0, 3])
    assert core.exact_div(6, 3) == 2
    with pytest.raises(ValueError, match=r"got 7 and 3\. Really"):
        core.exact_div(7, 3, "Really")
    mean, variance, count = core.get_global_statistics([1.0, 3.0, 9.0], [1, 1, 0])
    assert (float(mean), float(variance), count) == (2, 1, 2)


def test_helpers_can_be_differentiated():
    gradient = jax.grad(lambda x: core.masked_mean(x, MASK))(jnp.asarray(X))
    np.testing.assert_allclose(gradient, np.asarray(MASK) / 4)


def test_responses_have_exactly_the_length_asked_for():
    # EOS is as likely as any other id here, and ends nothing.
    model = AutoModelForCausalLM.from_pretrained(tiny_hf_config())
    found = core.respond_to_batch(model, [[5, 6], [7, 8]], txt_len=12)
    assert found.shape == (2, 12)
    again = core.respond_to_batch(
        AutoModelForCausalLM.from_pretrained(tiny_hf_config()), [[5, 6], [7, 8]], 12
    )
    np.testing.assert_array_equal(found, again)

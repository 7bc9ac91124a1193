# SPDX-License-Identifier: Apache-2.0
"""Collections where a program holds the thread that sends it, as on GPUs: a thread of its own sends."""

from __future__ import annotations

import contextlib
import threading
from concurrent.futures import CancelledError
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.prompts import PromptSet
from jrl.mesh import make_mesh
from jrl.placement import DISPATCH
from jrl.rollout import collect
from jrl.rollout.collect import Collector, Sending
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.rewards import RewardError
from jrl.rollout.sampler import GenerationSettings, Sampler
from tests.tiny import tiny_lm, tiny_tokenizer

MESH = make_mesh()
SECONDS = 60.0
ROWS, CALL = 6, 2


@pytest.fixture
def threaded(monkeypatch):
    """As on a GPU."""
    monkeypatch.setattr(collect, "sending_holds_the_host", lambda mesh: True)


@pytest.fixture(scope="module")
def setting():
    """A model, prompts and settings."""
    lm, params = tiny_lm("gpt2")
    tokenizer = tiny_tokenizer()
    rows = [[5 + row, 7, 9] for row in range(ROWS)]
    prompts = PromptSet.from_tokens(rows, {}, tokenizer, max_length=3, seed=0)
    settings = GenerationSettings(max_new_tokens=4, eos_token_id=(0,), pad_token_id=0)
    return lm.policy(), params, tokenizer, prompts, settings


def collected(setting, sampler, reward, follow=None, folder=None):
    _, params, tokenizer, prompts, settings = setting
    rewards = RewardCall(reward, tokenizer, skip_errors=False, timeout=None, failures=folder)
    collector = Collector(sampler, tokenizer, (), MESH, CALL, rewards=rewards)
    with jax.set_mesh(MESH):
        return collector(
            params, {}, prompts, np.arange(ROWS), settings, jax.random.key(3), label="rows", follow=follow
        )


def lengths(outputs):
    return [float(len(output)) for output in outputs]


def longest(inputs, completions):
    return jnp.max(completions.lengths) + inputs.tokens.shape[1]


def test_a_thread_of_its_own_changes_no_sample(setting, monkeypatch):
    sampler = Sampler(setting[0])
    expected = collected(setting, sampler, lengths, longest)
    monkeypatch.setattr(collect, "sending_holds_the_host", lambda mesh: True)
    found = collected(setting, sampler, lengths, longest)
    assert found.texts.samples == expected.texts.samples
    np.testing.assert_array_equal(found.rewards, expected.rewards)
    for one, two in zip(found.calls, expected.calls, strict=True):
        jax.tree.map(np.testing.assert_array_equal, one.completions, two.completions)
        assert one.followed() == two.followed()


@pytest.mark.usefixtures("threaded")
def test_rewards_are_given_while_a_call_holds_the_thread_that_sends_it(setting):
    """A reward function of the first call comes before scoring of that call, and the second call, are sent."""
    sampler, judged, sent = Sampler(setting[0]), threading.Event(), list[str]()

    def sample(*arguments):
        found = sampler(*arguments)
        sent.append("sampled")
        return found

    def follow(inputs, completions):
        assert judged.wait(SECONDS), "the host was held"
        sent.append("scored")
        return longest(inputs, completions)

    def reward(outputs):
        judged.set()
        return lengths(outputs)

    found = collected(setting, sample, reward, follow)
    # Programs come in the order in which one process, or many, would have sent them.
    assert sent == ["sampled", "scored"] * (ROWS // CALL)
    assert [int(call.followed()) for call in found.calls] == [
        int(jnp.max(c.completions.lengths)) + 3 for c in found.calls
    ]


@pytest.mark.usefixtures("threaded")
def test_the_mesh_is_in_force_where_programs_are_sent(setting):
    sampler, meshes = Sampler(setting[0]), set()

    def sample(*arguments):
        meshes.add((jax.sharding.get_mesh(), threading.current_thread().name.partition("_")[0]))
        return sampler(*arguments)

    collected(setting, sample, lengths)
    assert meshes == {(MESH, "sending")}


@pytest.mark.usefixtures("threaded")
def test_settings_of_the_calling_thread_hold_where_programs_are_sent(setting):
    sampler, found = Sampler(setting[0]), set()

    def sample(*arguments):
        found.add(jax.config.jax_default_matmul_precision)
        return sampler(*arguments)

    with jax.default_matmul_precision("float32"):
        collected(setting, sample, lengths)
    assert found == {"float32"}


@pytest.mark.usefixtures("threaded")
@pytest.mark.parametrize("fails", ["sampling", "scoring", "reward"])
def test_a_failure_ends_the_collection(setting, fails, tmp_path):
    """Whoever fails is told, and no thread is left."""
    sampler, asked = Sampler(setting[0]), list[int]()

    def fail(where):
        if fails == where:
            raise LookupError(where)

    def sample(*arguments):
        fail("sampling")
        return sampler(*arguments)

    def follow(inputs, completions):
        fail("scoring")
        return longest(inputs, completions)

    def reward(outputs):
        asked.append(len(outputs))
        fail("reward")
        return lengths(outputs)

    with pytest.raises((LookupError, RewardError), match=fails):
        collected(setting, sample, reward, follow, tmp_path)
    if fails != "reward":  # the second call's samples come behind the first one's scores
        assert len(asked) <= 1
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sending")]


@pytest.mark.usefixtures("threaded")
def test_nothing_is_sent_after_the_end():
    send, held, goes_on, sent = Sending(MESH), threading.Event(), threading.Event(), list[str]()

    def hold():
        held.set()
        assert goes_on.wait(SECONDS)
        sent.append("first")

    first, second = send(hold), send(lambda: sent.append("second"))
    assert held.wait(SECONDS)
    closing = threading.Thread(target=send.close)
    closing.start()
    with pytest.raises(CancelledError):
        second()
    goes_on.set()
    closing.join(SECONDS)
    first()
    assert sent == ["first"]


@pytest.mark.usefixtures("threaded")
def test_a_reward_that_sends_programs_itself_waits_for_nobody(setting):
    """Programs of one device may come in any order."""
    sampler, judged = Sampler(setting[0]), threading.Event()

    def follow(inputs, completions):
        assert judged.wait(SECONDS), "the reward waited"
        return longest(inputs, completions)

    def reward(outputs):
        with DISPATCH, jax.set_mesh(MESH):  # as a reward model of jrl's
            found = jax.jit(jnp.sum)(jnp.arange(len(outputs)))
        judged.set()
        return [float(found)] * len(outputs)

    for outer in (contextlib.nullcontext(), DISPATCH):  # evaluations have the devices to themselves
        with outer:
            assert collected(setting, sampler, reward, follow).rewards.tolist() == [1.0] * ROWS
        judged.clear()


def test_a_thread_sends_to_a_single_gpu_alone():
    def devices(platform, count):
        found = np.asarray([SimpleNamespace(platform=platform)] * count)
        return SimpleNamespace(devices=found, size=count)

    cases = {("gpu", 1): True, ("gpu", 8): False, ("tpu", 1): False, ("cpu", 1): False}
    assert {case: collect.sending_holds_the_host(devices(*case)) for case in cases} == cases

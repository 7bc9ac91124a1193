# SPDX-License-Identifier: Apache-2.0
"""Collections where a program holds the thread that sends it, as on GPUs: a thread of its own sends."""

from __future__ import annotations

import threading
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.data.prompts import PromptSet
from jrl.mesh import make_mesh
from jrl.placement import DISPATCH
from jrl.rollout import collect
from jrl.rollout.collect import Collector
from jrl.rollout.reward_call import RewardCall
from jrl.rollout.rewards import RewardError
from jrl.rollout.sampler import GenerationSettings, Sampler
from tests.tiny import tiny_lm, tiny_tokenizer

MESH = make_mesh()
SECONDS = 60.0
ROWS, CALL = 6, 2


@pytest.fixture
def threaded(monkeypatch):
    """As on one process's GPUs."""
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


def collected(setting, sampler, reward, follow=None):
    _, params, tokenizer, prompts, settings = setting
    rewards = RewardCall(reward, tokenizer, skip_errors=False, timeout=None, failures=Path("unused"))
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
@pytest.mark.parametrize("fails", ["sampling", "scoring", "reward"])
def test_a_failure_ends_the_collection(setting, fails):
    """Whoever fails is told, no thread is left, and nothing is sent after the end."""
    sampler, sent = Sampler(setting[0]), list[str]()

    def fail(where):
        if fails == where:
            raise LookupError(where)

    def sample(*arguments):
        fail("sampling")
        sent.append("sampled")
        return sampler(*arguments)

    def follow(inputs, completions):
        fail("scoring")
        return longest(inputs, completions)

    def reward(outputs):
        fail("reward")
        return lengths(outputs)

    with pytest.raises((LookupError, RewardError), match=fails):
        found = collected(setting, sample, reward, follow)
        [call.followed() for call in found.calls]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("sending")]
    before = list(sent)
    threading.Event().wait(0.05)
    assert sent == before


@pytest.mark.usefixtures("threaded")
def test_who_has_the_devices_to_itself_sends_itself(setting):
    """A thread of its own would wait for the devices, and the caller for the thread."""
    threads = set()

    def sample(*arguments):
        threads.add(threading.current_thread())
        return Sampler(setting[0])(*arguments)

    with DISPATCH:
        collected(setting, sample, lengths)
    assert threads == {threading.current_thread()}

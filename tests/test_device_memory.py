# SPDX-License-Identifier: Apache-2.0
"""What is said where a device has too little memory."""

import jax
import jax.numpy as jnp
import pytest

import jrl
from jrl.device_memory import GPU_ADVICE, gpu_advice, is_worth_more, note_if_out_of_memory
from jrl.rollout.rewards import RewardError
from jrl.trainers.loading import setup
from tests.trainers.runs import count_vowels, ppo_config, save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A tiny checkpoint."""
    return save_tiny_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def gpu(monkeypatch):
    """The backend seems a GPU, and nobody said how much of it programs get."""
    for name in ("XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    return monkeypatch


def out_of_memory() -> jax.errors.JaxRuntimeError:
    """The error of a device that is asked for a pebibyte."""
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jax.jit(lambda: jnp.zeros(1 << 50, jnp.int8))()
    return caught.value


def notes(error: BaseException) -> list[str]:
    """What is added to an error; JAX may have added notes of its own."""
    before = len(getattr(error, "__notes__", []))
    note_if_out_of_memory(error)
    return getattr(error, "__notes__", [])[before:]


def test_a_gpu_gives_more_where_it_is_told(gpu):
    assert gpu_advice() == GPU_ADVICE
    assert "75%" in GPU_ADVICE and "XLA_CLIENT_MEM_FRACTION=0.95" in GPU_ADVICE


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_who_has_said_how_much_programs_get_is_not_advised(gpu, name):
    gpu.setenv(name, "0.5")
    assert gpu_advice() is None


def test_a_cpu_has_no_share():
    assert gpu_advice() is None


def test_a_device_without_memory_says_what_helps(gpu):
    smaller, more = notes(out_of_memory())
    assert "train.minibatch_size" in smaller and "method.chunk_size" in smaller and "jrl plan" in smaller
    assert more == f"B{GPU_ADVICE[1:]}."


def test_a_share_is_of_gpus_alone():
    (smaller,) = notes(out_of_memory())
    assert "too little memory" in smaller


def test_a_device_without_memory_may_be_what_caused_an_error():
    error = RewardError("a reward function raised")
    error.__cause__ = out_of_memory()
    (smaller,) = notes(error)
    assert "too little memory" in smaller
    assert notes(error) == []  # once


def test_a_model_that_no_device_has_memory_for_says_what_helps(checkpoint, tmp_path, monkeypatch):
    def place(*_):
        raise out_of_memory()

    monkeypatch.setattr(setup, "place", place)
    with pytest.raises(jax.errors.JaxRuntimeError) as caught:
        jrl.PPOTrainer(ppo_config(checkpoint, tmp_path), reward_fn=count_vowels)
    assert sum("too little memory" in note for note in caught.value.__notes__) == 1


@pytest.mark.parametrize(
    ("share", "is_worth"), [(0.74, False), (0.76, True), (0.94, True), (0.96, False), (10.0, False)]
)
def test_more_is_worth_it_where_it_suffices(share, is_worth):
    assert is_worth_more(int(share * (1 << 30)), 1 << 30) is is_worth


def test_an_allocator_without_a_share_is_not_advised(gpu):
    gpu.setenv("XLA_PYTHON_CLIENT_ALLOCATOR", "platform")
    assert gpu_advice() is None


@pytest.mark.parametrize("error", [ValueError("RESOURCE_EXHAUSTED"), jax.errors.JaxRuntimeError("INTERNAL")])
def test_other_errors_are_left_alone(error):
    assert notes(error) == []

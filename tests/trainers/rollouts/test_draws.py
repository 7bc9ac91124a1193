# SPDX-License-Identifier: Apache-2.0
"""Keys of a script's sampling calls: no two alike, repeated by a seed, kept by checkpoints."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from jrl.trainers.rollouts.draws import GENERATION_STREAM, Draws, reseed
from jrl.trl.core import set_seed
from jrl.trl.models import AutoModelForCausalLMWithValueHead
from jrl.trl.ppo import PPOConfig, PPOTrainer
from tests.tiny import tiny_hf_config, tiny_tokenizer


def numbers(draws, count=3):
    return [tuple(np.asarray(jax.random.key_data(draws.key())).tolist()) for _ in range(count)]


def test_no_two_calls_have_one_key_and_a_seed_repeats_them():
    first, other = Draws(3), Draws(4)
    keys = numbers(first) + numbers(other)
    assert len(set(keys)) == 6
    assert numbers(Draws(3)) == keys[:3]
    reseed(4)
    again = numbers(first)
    assert again == keys[3:] == numbers(Draws())
    reseed(4)
    assert numbers(first) == again


def test_what_a_checkpoint_holds_goes_on():
    draws = Draws(7)
    numbers(draws)
    kept = draws.state()
    wanted = numbers(draws)
    later = Draws(1)
    later.load(kept)
    assert numbers(later) == wanted
    reseed(5)
    later.load(kept)
    assert numbers(later) == wanted


def seeded(seed, number):
    """The key of `trainer.generate(seed=number)`."""
    stream = jax.random.fold_in(jax.random.key(seed), GENERATION_STREAM)
    return tuple(np.asarray(jax.random.key_data(jax.random.fold_in(stream, number))).tolist())


def test_counted_calls_and_those_that_name_a_seed_share_no_key():
    named = {seeded(3, number) for number in range(4)}
    assert not named & set(numbers(Draws(3), 4))
    draws = Draws(1)
    reseed(3)
    assert not named & set(numbers(draws, 4))


def test_calls_of_an_older_checkpoint_go_on_where_they_stood():
    draws = Draws(1)
    draws.load({"seed": 3, "calls": 2})
    assert numbers(draws, 2) == [seeded(3, 2), seeded(3, 3)]
    again = Draws(1)
    again.load(draws.state())
    assert numbers(again, 1) == [seeded(3, 4)]


@pytest.mark.slow
def test_a_model_samples_anew_at_every_call_whoever_has_it(tmp_path):
    options = dict(max_new_tokens=8, do_sample=True, eos_token_id=-1)

    def calls(model, count=3):
        return [model.generate([[5, 6, 7]], **options)[0].tolist() for _ in range(count)]

    def distinct(rows):
        return len({tuple(row) for row in rows}) == len(rows)

    model = AutoModelForCausalLMWithValueHead.from_pretrained(tiny_hf_config())
    set_seed(2)
    alone = calls(model)
    set_seed(2)
    assert distinct(alone) and calls(model) == alone
    config = PPOConfig(batch_size=4, mini_batch_size=2, seed=2)
    trainer = PPOTrainer(config, model, tokenizer=tiny_tokenizer())
    rows = calls(trainer.model) + calls(model)
    assert distinct(rows)
    # One counter for all ways to sample from one model.
    assert np.asarray(trainer.generate([[5, 6, 7]], **options)[0]).tolist() not in rows
    path = trainer.save_state(tmp_path)
    wanted = calls(trainer.model)
    trainer.load_state(path)
    assert calls(trainer.model) == wanted
    set_seed(9)
    seeded = calls(trainer.model)
    set_seed(9)
    assert calls(trainer.model) == seeded != wanted

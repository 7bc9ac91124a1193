# SPDX-License-Identifier: Apache-2.0
"""Which ids end a row: the tokenizer's EOS and those of generation_config.json, wherever rows are sampled."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import GenerationConfig

import jrl
from jrl.api import prepare
from jrl.cli import main
from jrl.trl import AutoModelForCausalLM
from tests.tiny import EOS_ID, VOCAB_SIZE, tiny_lm, tiny_tokenizer
from tests.trainers.runs import (
    PROMPTS,
    REWARDED,
    count_vowels,
    ilql_config,
    ppo_config,
    rft_config,
    save_tiny_checkpoint,
)

# Half of what the model may write, as <end_of_turn> stands beside <eos>; the tokenizer's own is not among them.
ENDS = list(range(2, VOCAB_SIZE, 2))
GENERATION = {"eos_token_id": ENDS, "temperature": 0.1, "top_k": 3, "max_new_tokens": 3}


@pytest.fixture(scope="module")
def chatty(tmp_path_factory):
    """A checkpoint whose generation_config.json has an EOS list."""
    folder = tmp_path_factory.mktemp("chatty")
    save_tiny_checkpoint(folder)
    (folder / "generation_config.json").write_text(json.dumps(GENERATION))
    return str(folder)


def ends_of(generation_config, **config):
    lm = tiny_lm("gpt2")[0]
    hf_config = lm.hf_config.__class__.from_dict({**lm.hf_config.to_dict(), **config})
    return replace(lm, generation_config=generation_config, hf_config=hf_config).eos_token_ids


@pytest.mark.parametrize(
    ("generation_config", "config", "expected"),
    [
        ({"eos_token_id": [1, 107, 7, 1]}, {}, (1, 7)),  # 107: no id of this vocabulary
        ({"eos_token_id": 7}, {}, (7,)),
        ({"eos_token_id": None}, {}, ()),
        ({}, {"eos_token_id": 7}, ()),
        (None, {"eos_token_id": 7}, ()),
        (None, {"eos_token_id": [7, 9]}, (7, 9)),
        # What transformers writes of its own accord repeats the default of the config's class.
        ({"_from_model_config": True, "eos_token_id": 7}, {"eos_token_id": 7}, ()),
        ({"_from_model_config": True, "eos_token_id": [5, 6]}, {"eos_token_id": 7}, (5, 6)),
    ],
)
def test_what_a_checkpoint_says_of_its_ends(generation_config, config, expected):
    assert ends_of(generation_config, **config) == expected


def test_a_file_of_transformers_is_read(tmp_path):
    save_tiny_checkpoint(tmp_path)
    GenerationConfig(eos_token_id=[EOS_ID, 7]).save_pretrained(tmp_path)
    assert jrl.load_model(tmp_path, quiet=True)[0].lm.eos_token_ids == (EOS_ID, 7)


@pytest.mark.parametrize(
    ("config", "data"),
    [
        (ppo_config, {"reward_fn": count_vowels, "prompts": PROMPTS}),
        (rft_config, {"reward_fn": count_vowels, "prompts": PROMPTS}),
        (ilql_config, {"samples": [text for text, _ in REWARDED], "rewards": [r for _, r in REWARDED]}),
    ],
)
def test_every_trainer_ends_rows_there_unless_told_otherwise(tmp_path, chatty, config, data):
    trainer = prepare(config=config(chatty, tmp_path / "run"), **data)
    assert trainer.settings.eos_token_id == (EOS_ID, *ENDS)
    # Sampling settings of that file are the user's of another day: rollouts follow `gen_kwargs` alone.
    assert (trainer.settings.temperature, trainer.settings.top_k, trainer.settings.max_new_tokens) == (
        1,
        0,
        8,
    )
    told, _ = trainer.parse_generation({"max_new_tokens": 4, "eos_token_id": 5})
    assert told.eos_token_id == (5,)


def test_a_row_that_ends_there_has_ended_and_its_text_does_not_show_it(tmp_path, chatty):
    seen = []

    def reward_fn(outputs, output_tokens, **others):
        seen.extend(zip(outputs, output_tokens, strict=True))
        return [1.0] * len(outputs)

    config = ppo_config(chatty, tmp_path / "run", method={"missing_eos_penalty": 5.0})
    trainer = prepare(reward_fn=reward_fn, prompts=PROMPTS, config=config)
    trainer.evaluate()
    ended = [(text, ids) for text, ids in seen if ids[-1] in ENDS]
    assert len(ended) > len(seen) / 2
    for text, ids in ended:
        assert not set(ids[:-1]) & {EOS_ID, *ENDS}
        assert text == tiny_tokenizer().decode(ids[:-1])


@pytest.mark.slow
def test_ids_are_sampled_up_to_there(chatty):
    model, params = jrl.load_model(chatty, quiet=True)
    tokens = jnp.asarray([tiny_tokenizer()("the cat")["input_ids"]] * 8)
    rows = model.generate(params, tokens, jnp.ones(tokens.shape, bool), jax.random.key(0), max_new_tokens=16)
    check_ends(np.asarray(rows))
    handle = AutoModelForCausalLM.from_pretrained(chatty)
    check_ends(handle.generate(tokens, do_sample=True, max_new_tokens=16)[:, tokens.shape[1] :])


def check_ends(rows):
    for row in rows.tolist():
        end = next(place for place, token in enumerate(row) if token in ENDS)
        assert len(set(row[end + 1 :])) <= 1, "padding alone stands behind the end"


@pytest.mark.slow
def test_the_command_line_samples_up_to_there(chatty, capsys):
    words = ["generate", "--model", chatty, "--prompt", "the cat", "--max-new-tokens", "64"]
    assert main([*words, "--seed", "1"]) == 0
    assert len(capsys.readouterr().out) < 40

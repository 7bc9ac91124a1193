# SPDX-License-Identifier: Apache-2.0
"""Which tokenizer a run has: the model's own, and a word where another one was asked for."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from transformers import GPT2Config

import jrl
from jrl import trlx
from jrl.api import prepare
from jrl.data.tokenizer import load_tokenizer
from jrl.models.checkpoint import save_checkpoint
from jrl.trainers.config.method import entries
from jrl.trainers.config.sections import ModelConfig, TokenizerConfig
from jrl.trainers.loading.dpo_reference import reference_config
from jrl.trainers.loading.tokenizers import load_run_tokenizer
from jrl.trl import ModelHandle, SFTConfig
from jrl.trl.constructor_arguments import flat_tokenizer
from jrl.trlx.api import Request
from jrl.trlx.seed_defaults import with_seed_prompts
from tests.data.test_contexts import TOKENIZERS
from tests.tiny import tiny_lm, tiny_tokenizer
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, sft_config


def other_tokenizer(folder, change):
    """The tiny tokenizer with another vocabulary, as files."""
    tiny_tokenizer().save_pretrained(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    change(content["model"]["vocab"])
    path.write_text(json.dumps(content))
    return str(folder)


def swap(vocabulary):
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def adapter_folder(folder, base):
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "base_model_name_or_path": base}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)


def ids(tokenizer, text="the cat"):
    return tokenizer(text)["input_ids"]


@pytest.mark.parametrize(
    "default",
    [*(entry.default for entry in entries().values()), trlx.default_ppo_config, trlx.default_sft_config],
)
def test_default_configurations_name_no_tokenizer(default):
    assert default().tokenizer.tokenizer_path is None


def test_recipes_leave_the_tokenizer_to_the_model():
    recipes = sorted((Path(__file__).parents[3] / "configs").rglob("*.yaml"))
    assert len(recipes) > 20
    assert [path.name for path in recipes if "tokenizer_path" in path.read_text()] == []


def test_a_model_path_alone_brings_the_models_tokenizer(tmp_path, checkpoint):
    config = sft_config(checkpoint, tmp_path / "run").evolve(tokenizer={"tokenizer_path": None})
    trainer = prepare(model_path=checkpoint, samples=["the cat"], eval_prompts=["a"], config=config)
    assert trainer.tokenizer.get_vocab() == load_tokenizer(checkpoint).get_vocab()


def test_an_adapters_folder_brings_its_own_or_that_of_its_base(tmp_path, checkpoint):
    folder = adapter_folder(tmp_path / "adapter", checkpoint)
    assert ids(load_run_tokenizer(ModelConfig(folder), TokenizerConfig())) == ids(tiny_tokenizer())
    other_tokenizer(tmp_path / "adapter", swap)
    assert ids(load_run_tokenizer(ModelConfig(folder), TokenizerConfig())) != ids(tiny_tokenizer())


def test_a_config_object_has_none():
    with pytest.raises(
        ValueError, match=r"tokenizer_path.*must be given for a GPT2Config.*config object brings no"
    ):
        load_run_tokenizer(ModelConfig(GPT2Config()), TokenizerConfig())


def test_a_model_alone_is_no_empty_tokenizer(tmp_path):
    GPT2Config().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="has no vocabulary, only 1 special tokens"):
        load_run_tokenizer(ModelConfig(str(tmp_path)), TokenizerConfig())


def test_another_vocabulary_is_warned_of_and_both_are_named(tmp_path, checkpoint):
    path = other_tokenizer(tmp_path / "other", swap)
    with pytest.warns(UserWarning, match="2 ids mean another text") as caught:
        load_run_tokenizer(ModelConfig(checkpoint), TokenizerConfig(path))
    (warning,) = caught
    assert path in str(warning.message) and checkpoint in str(warning.message)


@pytest.mark.parametrize("change", [lambda vocabulary: None, lambda vocabulary: vocabulary.update({"~": 97})])
def test_a_copy_and_one_that_adds_tokens_are_not_warned_of(tmp_path, checkpoint, change):
    path = other_tokenizer(tmp_path / "other", change)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_run_tokenizer(ModelConfig(checkpoint), TokenizerConfig(path))


def test_a_model_without_a_tokenizer_is_compared_with_none(tmp_path):
    GPT2Config().save_pretrained(tmp_path / "model")
    path = other_tokenizer(tmp_path / "other", swap)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load_run_tokenizer(ModelConfig(str(tmp_path / "model")), TokenizerConfig(path))


def test_a_reference_is_read_with_the_policys_tokenizer(checkpoint):
    config = jrl.default_dpo_config().evolve(model={"model_path": checkpoint})
    assert reference_config(config, "/another").tokenizer.tokenizer_path == checkpoint


@pytest.fixture(scope="module")
def llama_like(tmp_path_factory):
    """A checkpoint whose tokenizer puts BOS before every text; the last two of its ids are special."""
    folder = tmp_path_factory.mktemp("llama_like")
    tokenizer = TOKENIZERS["llama"]
    lm, params = tiny_lm("gpt2")
    save_checkpoint(folder, lm, params, tokenizer=tokenizer)
    return str(folder)


def prompt_ids(trainer):
    return trainer.eval_prompts.rows(np.arange(1), width=16).token_lists[0]


def test_a_run_samples_from_bos_where_the_tokenizer_writes_it(tmp_path, llama_like):
    config = ppo_config(llama_like, tmp_path / "run")
    trainer = prepare(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    assert prompt_ids(trainer) == trainer.tokenizer(PROMPTS[0])["input_ids"]
    assert prompt_ids(trainer)[0] == trainer.tokenizer.bos_token_id


def test_trlx_samples_without_and_says_so(tmp_path, llama_like):
    given = dict.fromkeys(("samples", "rewards", "metric_fn"))
    config = ppo_config(llama_like, tmp_path / "run")
    options = {"reward_fn": count_vowels, "prompts": PROMPTS, "eval_prompts": PROMPTS, "stop_sequences": ()}
    with pytest.warns(UserWarning, match=r"trlX's rule: prompts and samples begin without \['{'\]") as caught:
        trainer = Request(with_seed_prompts(config), **given, **options).adapted().native
    assert len([one for one in caught if "trlX's rule" in str(one.message)]) == 1
    assert prompt_ids(trainer)[0] != trainer.tokenizer.bos_token_id


def test_methods_that_trlx_lacks_have_one_rule():
    with pytest.raises(ValueError, match=r"add_special_tokens` must be true for DPOConfig, got False"):
        jrl.default_dpo_config().evolve(tokenizer={"add_special_tokens": False})
    config = jrl.default_dpo_config()
    assert with_seed_prompts(config) is config


def test_a_trainer_of_trls_shape_reads_an_adapters_folder_likewise(tmp_path, checkpoint):
    folder = adapter_folder(tmp_path / "adapter", checkpoint)
    config = SFTConfig(output_dir=str(tmp_path / "out"))
    assert ids(flat_tokenizer(config, None, ModelHandle(folder))) == ids(tiny_tokenizer())
    with pytest.raises(
        ValueError, match=r"`tokenizer` \(or `processing_class`\) must be given for a GPT2Config"
    ):
        flat_tokenizer(config, None, ModelHandle(GPT2Config()))

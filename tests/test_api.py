# SPDX-License-Identifier: Apache-2.0
"""The public face: `jrl.train`, and a model in a notebook."""

import copy
import inspect
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jrl
import jrl.api
from jrl import trlx
from jrl.api import prepare
from jrl.cli import main
from jrl.data.prompts import PromptSet
from jrl.models.checkpoint import load_checkpoint
from jrl.trainers.loop.stopwatch import CompileCounter
from jrl.trainers.sft import SFTTrainer
from tests.trainers.runs import save_tiny_checkpoint, sft_config


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    return jrl.load_model(save_tiny_checkpoint(tmp_path_factory.mktemp("model") / "tiny"))


def prompts(width=4):
    return jnp.ones((2, width), jnp.int32), jnp.ones((2, width), bool)


def test_train_takes_the_seeds_arguments_in_the_seeds_order():
    assert list(inspect.signature(jrl.train).parameters) == [
        "model_path",
        "reward_fn",
        "dataset",
        "samples",
        "rewards",
        "prompts",
        "eval_prompts",
        "metric_fn",
        "config",
        "stop_sequences",
        "environment",  # jrl's own
    ]


class TestDispatch:
    """What is given decides the default configuration; `train.trainer` decides the algorithm."""

    @pytest.fixture
    def chosen(self, monkeypatch):
        """Configurations that a trainer would have been made of, and the data it would have had."""
        found = []

        class Trainer:
            def add_data(self, **data):
                found.append(data)

        monkeypatch.setattr(jrl.api, "make_trainer", lambda config, **rest: found.append(config) or Trainer())
        return found

    @pytest.mark.parametrize(
        ("given", "trainer"),
        [
            ({"reward_fn": len}, "PPOTrainer"),
            ({"reward_fn": len, "prompts": ["a"]}, "PPOTrainer"),
            ({"samples": ["a"], "rewards": [1.0]}, "ILQLTrainer"),
            ({"samples": ["a"]}, "SFTTrainer"),
        ],
    )
    def test_without_a_config(self, chosen, given, trainer):
        with pytest.warns(UserWarning, match=f"No `config` given: using the default one for {trainer}"):
            prepare(**given)
        config, data = chosen
        assert config.train.trainer == trainer
        assert {name: value for name, value in data.items() if value is not None} == {
            name: value for name, value in given.items() if name != "reward_fn"
        }

    @pytest.mark.filterwarnings("ignore:No `config`")
    @pytest.mark.parametrize("library", ["pandas", "datasets"])
    def test_a_table_is_its_rows(self, chosen, library):
        rows = [{"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}]
        module = pytest.importorskip(library)
        table = module.DataFrame(rows) if library == "pandas" else module.Dataset.from_list(rows)
        prepare(samples=table)
        prepare(samples=table, rewards=[1.0, 2.0])
        prepare(samples={"train": table}) if library == "datasets" else None
        samples = [data["samples"] for data in chosen[1::2]]
        assert samples[:2] == [rows, [["a", "b"], ["c", "d"]]] and samples[2:] in ([], [rows])

    @pytest.mark.filterwarnings("ignore:No `config`")
    def test_a_data_set_is_unpacked_first(self, chosen):
        with pytest.warns(DeprecationWarning, match="pass `samples` and `rewards`"):
            prepare(dataset=(["a", "b"], [1.0, 2.0]))
        config, data = chosen
        assert config.train.trainer == "ILQLTrainer"
        assert (data["samples"], data["rewards"]) == (["a", "b"], [1.0, 2.0])

    def test_the_model_path_replaces_the_configured_one(self, chosen):
        config = jrl.default_sft_config()
        prepare(model_path="there", samples=["a"], config=config)
        assert (chosen[0].model.model_path, config.model.model_path) == ("there", "gpt2")


@pytest.mark.filterwarnings("ignore:`dataset` is deprecated")
@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ({}, ValueError, "give `reward_fn`.*or `samples`"),
        ({"reward_fn": 3}, ValueError, "`reward_fn` must be a function or a list of functions, got int"),
        ({"rewards": [1.0]}, ValueError, "give `samples` too"),
        ({"samples": []}, ValueError, "`samples` must hold at least one entry, got none"),
        ({"reward_fn": len, "prompts": Path("a")}, ValueError, "`prompts` must be a list, got the path 'a'"),
        ({"samples": "abc"}, ValueError, "`samples` must be a list, got a single str: put it in a list"),
        ({"samples": ["a"], "rewards": 3}, TypeError, "`rewards` must be a list, got int"),
        ({"reward_fn": len, "prompts": "abc"}, ValueError, "`prompts` must be a list, got a single str"),
        ({"samples": ["a"], "eval_prompts": []}, ValueError, "`eval_prompts` must hold at least one entry"),
        ({"samples": ["a"], "metric_fn": 3}, ValueError, "`metric_fn` must be a function, got int"),
        ({"samples": ["a"], "stop_sequences": "ab"}, ValueError, "`stop_sequences` must be a list of texts"),
        ({"samples": ["a"], "rewards": [1.0, 2.0]}, ValueError, "one entry a sample: got 2 for 1 samples"),
        ({"dataset": (["a"], [1.0]), "samples": ["a"]}, ValueError, "give it or them, not both"),
        ({"dataset": ["a"]}, ValueError, r"must be the pair \(samples, rewards\)"),
        ({"samples": ["a"], "config": {}}, TypeError, "must be a TRLConfig, got dict"),
    ],
)
@pytest.mark.parametrize("train", [jrl.train, trlx.train])
def test_arguments_that_do_not_fit_are_named(train, given, error, message):
    with pytest.raises(error, match=message):
        train("somewhere", **copy.copy(given))


def test_files_and_generators_are_read_by_jrl_alone():
    """trlX takes lists; `jrl.train` takes what `tests/data/sources/test_arguments.py` lists."""
    with pytest.raises(
        ValueError, match=r"must be a list, got the path 'rows.jsonl': `.*read_records\(path\)`"
    ):
        trlx.train("somewhere", samples="rows.jsonl")
    with pytest.raises(TypeError, match="`samples` must be a list, got list_iterator"):
        trlx.train("somewhere", samples=iter(["a"]))
    with pytest.raises(FileNotFoundError, match=r"there is no file rows\.jsonl"):
        jrl.train("somewhere", samples="rows.jsonl")
    with pytest.raises(ValueError, match="`samples` must hold at least one entry"):
        jrl.train("somewhere", samples=iter([]))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ([], "got an empty list"),
        ([len, None], r"`reward_fn\[1\]` must be a function, got NoneType"),
    ],
)
def test_a_list_of_reward_functions_that_does_not_fit(given, message):
    with pytest.raises(ValueError, match=message):
        jrl.train("somewhere", reward_fn=given)


def test_trlx_takes_one_reward_function():
    with pytest.raises(ValueError, match="`reward_fn` must be one function, as trlX has it, got a list"):
        trlx.train("somewhere", reward_fn=[len, len])


@pytest.mark.parametrize(("weights", "count"), [([1.0], 2), ([1.0, 2.0], 1)])
def test_weights_that_do_not_fit_are_refused_before_a_model_is_read(weights, count):
    method = jrl.GRPOConfig(reward_weights=weights, num_generations=8)
    with pytest.raises(ValueError, match=f"one entry a reward function, {count}, got {len(weights)}"):
        jrl.train("/nowhere", reward_fn=[len] * count, config=jrl.default_config(method))


def test_a_tracker_that_is_missing_is_said_before_a_model_is_loaded(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = jrl.default_sft_config().evolve(train={"tracker": "wandb"})
    with pytest.raises(ImportError, match="needs the package wandb: pip install wandb, or"):
        prepare(model_path="/nowhere", samples=["a"], config=config)


def test_a_script_of_trlx_runs_without_its_default_tracker(monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    config = trlx.default_sft_config().evolve(tokenizer={"tokenizer_path": "/nowhere"})
    with (
        pytest.warns(UserWarning, match=r"needs the package wandb.*the console and metrics.jsonl alone"),
        pytest.raises((ValueError, FileNotFoundError), match="/nowhere"),  # so far it came
    ):
        trlx.train("/nowhere", samples=["a"], config=config)
    assert config.train.tracker == "wandb"


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"trainer": "OwnTrainr"}, r"`train.trainer` must be one of .*ILQLTrainer.*, got 'OwnTrainr'"),
        ({"pipeline": "PromptPipelin"}, r"`train.pipeline` must be one of .*Did you mean `PromptPipeline`\?"),
        (
            {"trainer_kwargs": {"logit_msk": 1}},
            r"logit_msk.*SFTTrainer takes \['logit_mask', 'optimizer'\]. Did you mean `logit_mask`",
        ),
        (
            {"trainer_kwargs": {"reward_fn": 1}},
            "`train.trainer_kwargs.reward_fn`: give `reward_fn` to `train`",
        ),
    ],
)
def test_names_are_checked_before_a_model_is_loaded(train, message):
    with pytest.raises(ValueError, match=message):
        prepare(samples=["a"], config=jrl.default_sft_config().evolve(train=train))


@jrl.register_trainer
class PatientTrainer(SFTTrainer):
    """A trainer with an argument of its own."""

    def __init__(self, config, *, patience, **others):
        self.patience = patience
        super().__init__(config, **others)


@jrl.register_pipeline("InOrder")
class OrderedPrompts(PromptSet):
    """Prompts as they come."""

    def order(self, global_indices):
        return global_indices % len(self)


def test_registered_trainers_and_pipelines_are_used(tmp_path):
    checkpoint = save_tiny_checkpoint(tmp_path / "tiny")
    vocab_size = len(jrl.load_tokenizer(checkpoint))
    train = {
        "trainer": "PatientTrainer",
        "pipeline": "InOrder",
        "trainer_kwargs": {"patience": 3, "logit_mask": np.zeros((vocab_size, vocab_size), bool)},
    }
    config = sft_config(checkpoint, tmp_path / "run", train=train)
    trainer = prepare(samples=["the cat"], eval_prompts=["a", "b", "c"], config=config)
    assert isinstance(trainer, PatientTrainer) and trainer.patience == 3
    assert isinstance(trainer.eval_prompts, OrderedPrompts)
    assert trainer.eval_prompts.order(np.arange(4)).tolist() == [0, 1, 2, 0]
    assert trainer.logit_mask.shape == (vocab_size, vocab_size)


@pytest.mark.parametrize(
    ("register", "message"),
    [
        (jrl.register_pipeline, "must be a subclass of jrl.data.prompts.PromptSet"),
        (jrl.register_method, "must be a subclass of jrl.learners.config.MethodConfig"),
    ],
)
def test_what_cannot_serve_is_not_registered(register, message):
    with pytest.raises(TypeError, match=message):
        register(type("Stranger", (), {}))


def test_generate_is_the_same_inside_jit_and_compiles_once(loaded, key):
    model, params = loaded
    settings = dict(max_new_tokens=3, eos_token_id=1, pad_token_id=0)
    eager = [model.generate(params, *prompts(), key, **settings, temperature=1.0)]
    with CompileCounter() as compilations:
        eager += [model.generate(params, *prompts(), key, **settings, temperature=t) for t in (1.0, 0.5)]
    jitted = jax.jit(lambda params, tokens, mask: model.generate(params, tokens, mask, key, **settings))
    np.testing.assert_array_equal(eager[0], eager[1])
    np.testing.assert_array_equal(eager[0], jitted(params, *prompts()))
    assert compilations.count == 0


def test_generate_refuses_more_positions_than_the_model_has(loaded, key):
    model, params = loaded
    positions = model.lm.config.max_positions
    with pytest.raises(ValueError, match=rf"`max_new_tokens` is {positions}.*has {positions} positions"):
        model.generate(params, *prompts(), key, max_new_tokens=positions)


def test_logits_have_the_real_vocabulary_and_do_not_see_padding(loaded):
    model, params = loaded
    tokens, mask = prompts()
    padded = jnp.pad(tokens, ((0, 0), (3, 0))), jnp.pad(mask, ((0, 0), (3, 0)))
    logits = jax.jit(model.logits)(params, tokens)
    assert logits.shape == (2, 4, model.lm.config.vocab_size) and logits.dtype == jnp.float32
    np.testing.assert_allclose(jax.jit(model.logits)(params, *padded)[:, 3:], logits, atol=1e-5)


def test_random_weights_need_a_key(loaded):
    with pytest.raises(ValueError, match="`key` is required"):
        jrl.load_model(loaded[0].lm.hf_config)


def test_importing_jrl_imports_neither_torch_nor_transformers():
    code = "import sys, jrl; print(sorted({'torch', 'transformers', 'diffusers'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.slow
def test_an_adapter_folder_is_its_base_with_the_adapter_merged(tmp_path):
    base = save_tiny_checkpoint(tmp_path / "base")
    # B is random too, or the adapter would change nothing.
    peft_config = {"peft_type": "LORA", "r": 2, "lora_alpha": 8, "init_lora_weights": False}
    config = sft_config(base, tmp_path / "run", model={"peft_config": peft_config})
    trainer = prepare(samples=["the cat sat"], eval_prompts=["the"], config=config)
    folder = trainer.save_pretrained(tmp_path / "adapter")
    _, params = jrl.load_model(folder, quiet=True)
    expected = load_checkpoint(trainer.save_pretrained(tmp_path / "merged", merge_adapter=True)).params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), params, expected)
    kernels = [tree["layers_0"]["attn"]["q"]["kernel"] for tree in (params, load_checkpoint(base).params)]
    assert np.abs(kernels[0] - kernels[1]).max() > 0.01
    assert jrl.estimate_cost(folder).parameters == jrl.estimate_cost(base).parameters
    assert main(["generate", "--model", str(folder), "--prompt", "the", "--max-new-tokens", "2"]) == 0


def test_virtual_tokens_are_no_model_of_their_own(tmp_path):
    base = save_tiny_checkpoint(tmp_path / "base")
    peft_config = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 2}
    config = sft_config(base, tmp_path / "run", model={"peft_config": peft_config})
    trainer = prepare(samples=["the cat sat"], eval_prompts=["the"], config=config)
    with pytest.raises(ValueError, match="holds virtual tokens, which are no part of any weight"):
        jrl.load_model(trainer.save_pretrained(tmp_path / "adapter"), quiet=True)

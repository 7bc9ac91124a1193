# SPDX-License-Identifier: Apache-2.0
"""Transformers and PEFT model objects of torch: read in memory, they give the numbers that they give in torch."""

import copy
import json
import warnings

import jax
import numpy as np
import pytest
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoModelForSequenceClassification

import jrl
from jrl.models.checkpoint import load_checkpoint
from jrl.models.classifier import load_classifier
from jrl.models.classifier_adapter import load_adapted_classifier
from jrl.models.classifier_start import load_start
from jrl.models.model_object import ModelObject
from jrl.trainers.checkpoints.checkpointer import CheckpointError
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled
from tests.models.family_cases import CASES
from tests.tiny import VOCAB_SIZE, tiny_hf_config, tiny_tokenizer
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, repeatable, sft_config

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings(
        "ignore::Warning:peft", "ignore::Warning:transformers", "ignore::Warning:torch"
    ),
]
torch = pytest.importorskip("torch", reason="needs the parity extra")
peft = pytest.importorskip("peft", reason="needs the parity extra")

TOLERANCE = 1e-4
SAMPLES = ["the cat sat", ["a dog", " ran off"], "so it goes on and on", "rain"]


def made(factory, config, **options):
    """A torch model, none of its parameters at its initial value."""
    torch.manual_seed(0)
    model = factory.from_config(copy.deepcopy(config), attn_implementation="eager", **options).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    return model


def tokens():
    return np.random.default_rng(0).integers(3, VOCAB_SIZE, (2, 9)).astype(np.int32)


def torch_logits(model, **inputs):
    with torch.no_grad():
        found = model(**{name: torch.tensor(value).long() for name, value in inputs.items()})
    return found.logits.float().numpy()


def jrl_logits(model):
    lm, params = jrl.load_model(model, quiet=True)
    return np.asarray(lm.logits(params, tokens()))


# Mixtral's experts are stacked in memory, and are not in files; so are Kimi Linear's convolutions, and names differ.
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "kimi_linear"])
def test_logits_of_a_decoder_are_those_of_torch(name):
    oracle = made(AutoModelForCausalLM, CASES[name])
    expected = torch_logits(oracle, input_ids=tokens())
    np.testing.assert_allclose(jrl_logits(oracle), expected, atol=TOLERANCE)
    assert expected.std() > 0.1


def test_weights_in_bfloat16_are_read_without_loss():
    oracle = made(AutoModelForCausalLM, tiny_hf_config("llama"), dtype=torch.bfloat16)
    found = jrl_logits(oracle)
    np.testing.assert_allclose(found, torch_logits(oracle.float(), input_ids=tokens()), atol=TOLERANCE)


def test_logits_of_an_encoder_decoder_are_those_of_torch():
    oracle = made(AutoModelForSeq2SeqLM, tiny_hf_config("t5"))
    model, params = jrl.load_model(oracle, quiet=True)
    found = model.logits(params, tokens(), context_tokens=tokens()[:, ::-1])
    context = np.ascontiguousarray(tokens()[:, ::-1])
    expected = torch_logits(oracle, input_ids=context, decoder_input_ids=tokens())
    np.testing.assert_allclose(found, expected, atol=TOLERANCE)


@pytest.mark.parametrize("config", [ENCODERS["bert"], DECODERS["gpt2"]], ids=["bert", "gpt2"])
def test_scores_of_a_classifier_are_those_of_torch(config):
    oracle = made(AutoModelForSequenceClassification, labelled(config, 1))
    mask = np.ones(tokens().shape, bool)
    expected = torch_logits(oracle, input_ids=tokens(), attention_mask=mask)
    model, params = load_classifier(oracle)
    np.testing.assert_allclose(model.scores(params, tokens(), mask), expected, atol=TOLERANCE)
    start = load_start(oracle, jax.random.key(0), mesh=jrl.mesh.make_mesh())
    assert start.fresh == ()
    np.testing.assert_allclose(start.model.scores(start.params, tokens(), mask), expected, atol=TOLERANCE)


def adapted(config=None, factory=AutoModelForCausalLM, **options):
    base = made(factory, config or tiny_hf_config("llama"))
    lora = peft.LoraConfig(r=3, lora_alpha=5, init_lora_weights=False, **options)
    return peft.get_peft_model(base, lora).eval()


# Two parameters of one module are adapted by two wrappers, one in the other.
@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("llama", {}),
        ("llama", {"use_dora": True}),
        ("llama", {"target_modules": "all-linear"}),
        ("mixtral", {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}),
    ],
)
def test_logits_under_an_adapter_are_those_of_peft(name, options):
    config = CASES[name] if name == "mixtral" else None
    oracle = adapted(config, task_type="CAUSAL_LM", **options)
    expected = torch_logits(oracle, input_ids=tokens())
    np.testing.assert_allclose(jrl_logits(oracle), expected, atol=TOLERANCE)
    with oracle.disable_adapter():
        assert np.abs(torch_logits(oracle, input_ids=tokens()) - expected).max() > 0.01


@pytest.mark.parametrize("tied", [False, True])
def test_rows_and_whole_modules_beside_an_adapter_are_read(tied):
    options = {"trainable_token_indices": [5, 9], "modules_to_save": ["model.norm"]}
    config = tiny_hf_config("llama", tie_word_embeddings=tied)
    oracle = adapted(config, task_type="CAUSAL_LM", **options)
    before = torch_logits(oracle, input_ids=tokens())
    with torch.no_grad():
        for name, parameter in oracle.named_parameters():
            if "trainable_tokens" in name or ".modules_to_save." in name:
                parameter.add_(0.2)
    expected = torch_logits(oracle, input_ids=tokens())
    assert np.abs(expected - before).max() > 0.01
    np.testing.assert_allclose(jrl_logits(oracle), expected, atol=TOLERANCE)


def test_scores_of_an_adapted_classifier_are_those_of_peft():
    config, modules = labelled(ENCODERS["bert"], 1), ["classifier", "pooler"]
    factory = AutoModelForSequenceClassification
    oracle = adapted(config, factory, task_type="SEQ_CLS", modules_to_save=modules)
    with torch.no_grad():  # the trained head is not the base model's
        oracle.base_model.model.classifier.modules_to_save.default.weight.add_(0.3)
    mask = np.ones(tokens().shape, bool)
    model, params = load_adapted_classifier(oracle)
    expected = torch_logits(oracle, input_ids=tokens(), attention_mask=mask)
    np.testing.assert_allclose(model.scores(params, tokens(), mask), expected, atol=TOLERANCE)


def test_what_cannot_be_read_is_refused_in_one_line():
    config = tiny_hf_config("llama")
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    merged = adapted(task_type="CAUSAL_LM")
    merged.merge_adapter()
    strange = made(AutoModelForCausalLM, config)
    strange.model.register_parameter("extra", torch.nn.Parameter(torch.zeros(2)))
    broken = made(AutoModelForCausalLM, config)
    broken.lm_head.weight.data[0, 0] = float("nan")
    for model, reason in [
        (empty, r"LlamaForCausalLM object: .* has no values"),
        (merged, r"merged into the weights: call `unmerge_adapter\(\)`"),
        (strange, r"1 tensor has no place in a llama model: model.extra"),
        (broken, r"lm_head.weight holds NaN or infinity"),
    ]:
        with pytest.raises(ValueError, match=reason):
            jrl.load_model(model, quiet=True)


def test_an_adapter_of_transformers_own_is_refused():
    from transformers.integrations import peft as integration

    own = made(AutoModelForCausalLM, tiny_hf_config("llama"))
    try:
        integration.check_peft_version(min_version=integration.MIN_PEFT_VERSION)
    except ValueError as error:  # transformers 5.24 asks for PEFT 0.22, which is not out
        pytest.skip(str(error))
    own.add_adapter(peft.LoraConfig(target_modules=["q_proj"]))
    with pytest.raises(ValueError, match=r"`add_adapter`.*get_peft_model"):
        jrl.load_model(own, quiet=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A torch model, and the folder that it was saved to and reads its name from."""
    folder = tmp_path_factory.mktemp("torch")
    made(AutoModelForCausalLM, tiny_hf_config("gpt2")).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder), folder


def test_a_run_on_an_object_is_the_run_on_its_folder(saved, tmp_path):
    model, folder = saved
    before = {name: value.clone() for name, value in model.state_dict().items()}
    histories = []
    for name, source in (("folder", str(folder)), ("object", model)):
        config = ppo_config(str(folder), tmp_path / name)
        trainer = jrl.train(model_path=source, reward_fn=count_vowels, prompts=PROMPTS, config=config)
        histories.append(repeatable(trainer.history))
    assert histories[0] == histories[1]
    # jrl holds the object itself, and changes nothing of it.
    assert trainer.config.model.model_path.module is model
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    text = (tmp_path / "object" / "checkpoint_12" / "config.yaml").read_text()
    assert f"model_path: GPT2LMHeadModel object named '{folder}'" in " ".join(text.split())

    config = ppo_config(str(folder), tmp_path / "object", train={"total_steps": 16})
    config.train.resume_from_checkpoint = str(tmp_path / "object")
    config.model.model_path = model  # as scripts assign it
    resumed = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    assert resumed.config.model.model_path.module is model
    assert len(resumed.history) > len(trainer.history)

    other = copy.deepcopy(model)
    other.transformer.h[0].mlp.c_fc.weight.data.add_(0.1)
    with pytest.raises(CheckpointError, match="frozen"):
        jrl.train(model_path=other, reward_fn=count_vowels, prompts=PROMPTS, config=config)


def test_an_adapter_of_an_object_trains_on_and_names_its_base(saved, tmp_path):
    _, folder = saved
    base = AutoModelForCausalLM.from_pretrained(folder)
    lora = peft.LoraConfig(r=2, task_type="CAUSAL_LM", init_lora_weights=False, fan_in_fan_out=True)
    model = peft.get_peft_model(base, lora)
    model.save_pretrained(tmp_path / "adapter")
    exports = []
    for name, source in (("folder", str(tmp_path / "adapter")), ("object", model)):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            config = sft_config(str(folder), tmp_path / name).evolve(model={"num_layers_unfrozen": -1})
            trainer = jrl.train(model_path=source, samples=SAMPLES, eval_prompts=["the"], config=config)
        exports.append(trainer.save_pretrained(tmp_path / name / "export"))
    first, second = (jrl.load_model(export, quiet=True)[1] for export in exports)
    jax.tree.map(np.testing.assert_array_equal, first, second)
    written = json.loads((exports[1] / "adapter_config.json").read_text())
    assert written["base_model_name_or_path"] == str(folder)


def test_a_reward_model_takes_an_object_and_a_tokenizer(saved):
    classifier = made(AutoModelForSequenceClassification, labelled(ENCODERS["bert"], 1))
    with pytest.raises(
        ValueError, match="`tokenizer` must be given for BertForSequenceClassification object"
    ):
        jrl.load_reward_model(classifier)
    reward = jrl.load_reward_model(classifier, tokenizer=tiny_tokenizer(), max_length=16)
    ids = np.array([tiny_tokenizer()("the cat")["input_ids"]])
    expected = torch_logits(classifier, input_ids=ids)
    np.testing.assert_allclose(reward(samples=["the cat"]), expected[0], atol=TOLERANCE)
    assert ModelObject(saved[0]).tokenizer_path == str(saved[1])


def test_what_the_object_generates_with_is_kept(saved):
    assert load_checkpoint(made(AutoModelForCausalLM, tiny_hf_config("gpt2"))).model.generation_config is None
    model = copy.deepcopy(saved[0])
    model.generation_config = copy.deepcopy(model.generation_config)
    model.generation_config.eos_token_id = [1, 5]
    model.generation_config._from_model_config = False
    assert load_checkpoint(model).model.generation_config["eos_token_id"] == [1, 5]

# SPDX-License-Identifier: Apache-2.0
"""Checkpoints whose config says less, more or other than their tensors: read as transformers reads them, or refused."""

import copy
import json
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from transformers import LlamaConfig

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.classifier import Classifier
from jrl.models.families.rope import read_rope
from jrl.models.model import make_model
from jrl.models.positions import check_length
from jrl.models.safetensors_io import TensorFiles
from tests.models.classifier_cases import ENCODERS, labelled
from tests.models.family_cases import CASES
from tests.tiny import tiny_hf_config, tiny_lm

TOLERANCE = 1e-4
PLAIN = [name for name in CASES if "-" not in name]
YARN = dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64)


def other_head(folder, family):
    """A folder of an untied model whose config says that it is tied."""
    config = tiny_hf_config(family, tie_word_embeddings=False)
    lm = make_model(config)
    save_checkpoint(folder, lm, lm.init(jax.random.key(1)))
    path = folder / "config.json"
    said = {"tie_word_embeddings": True} | ({"scale_decoder_outputs": True} if family == "t5" else {})
    path.write_text(json.dumps(json.loads(path.read_text()) | said))


@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_another_head_in_the_file_of_a_tied_model_is_read(family, tmp_path):
    other_head(tmp_path / "tied", family)
    with pytest.warns(UserWarning, match=r"lm_head.weight differs from .*nothing is tied"):
        loaded = load_checkpoint(tmp_path / "tied")
    head = TensorFiles(tmp_path / "tied").read("lm_head.weight")
    np.testing.assert_array_equal(loaded.params["lm_head"]["kernel"][:, :97], head.T)
    save_checkpoint(tmp_path / "again", loaded.model, loaded.params)
    # T5's logits are scaled by the same entry, and its head is its own in either case.
    says_tied = json.loads((tmp_path / "again" / "config.json").read_text())["tie_word_embeddings"]
    assert says_tied == (family == "t5")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = load_checkpoint(tmp_path / "again")
    assert bool(caught) == (family == "t5")
    assert again.model.config == loaded.model.config
    jax.tree.map(np.testing.assert_array_equal, again.params, loaded.params)


def test_the_same_head_twice_in_a_file_stays_tied(tmp_path):
    lm, params = tiny_lm("gpt2")
    save_checkpoint(tmp_path, lm, params)
    untied = copy.deepcopy(lm.hf_config)
    untied.tie_word_embeddings = False
    head = {"lm_head": {"kernel": params["embed"]["embedding"].T}}
    save_checkpoint(tmp_path, make_model(untied), params | head)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    assert load_checkpoint(tmp_path).model.config.tie_embeddings


@pytest.mark.parametrize("name", [*PLAIN, "t5"])
def test_a_decoder_that_reads_both_ways_is_refused(name):
    config = tiny_hf_config("t5") if name == "t5" else copy.deepcopy(CASES[name])
    config.is_causal = False
    with pytest.raises(ValueError, match="`is_causal` must be True, got False"):
        make_model(config)
    if name != "t5":
        with pytest.raises(ValueError, match="`is_causal` must be True, got False"):
            Classifier.from_config(config)
    config.is_causal = True
    make_model(config)


@pytest.mark.parametrize(
    ("given", "cut"), [(None, False), (False, False), (0, False), (True, True), (1, True)]
)
def test_truncate_of_yarn_is_what_python_takes_for_true(given, cut):
    found = read_rope("llama", YARN | {"truncate": given}, 8).scaling
    assert found.truncate is cut
    assert read_rope("llama", YARN, 8).scaling.truncate


LIMITED = ["gpt2", "gpt_bigcode", "gpt_neo", "opt", "gptj", "phi3-longrope"]
UNLIMITED = [
    "gpt_neox",
    "bloom",
    "llama",
    "mistral",
    "gemma2",
    "gemma3_text",
    "qwen3",
    "olmo2",
    "smollm3",
    "phi3",
]
DYNAMIC = LlamaConfig(
    **CASES["llama"].to_dict() | {"rope_parameters": dict(rope_type="dynamic", rope_theta=1e4, factor=2.0)}
)


@pytest.mark.parametrize("name", [*LIMITED, "dynamic"])
def test_rows_beyond_a_table_or_a_scaling_are_refused(name):
    lm = make_model(DYNAMIC if name == "dynamic" else CASES[name])
    limit = lm.max_positions
    params = jax.eval_shape(lm.init, jax.random.key(0))
    tokens = jnp.zeros((1, limit + 1), jnp.int32)
    message = f"`tokens` must have rows of at most {limit} tokens.*got {limit + 1}"
    with pytest.raises(ValueError, match=message):
        lm.logits(params, tokens)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lm.logits, params, tokens, jnp.ones(tokens.shape, bool))
    # Padding takes no position.
    check_length(lm.config, tokens.shape, np.arange(limit + 1)[None] > 0)
    check_length(lm.config, (1, limit), None)


def test_texts_beyond_the_positions_of_a_classifier_are_refused():
    model = Classifier.from_config(labelled(ENCODERS["roberta"], 1))
    params = jax.eval_shape(model.init, jax.random.key(0))
    tokens = jnp.full((1, model.max_positions + 1), 5, jnp.int32)
    with pytest.raises(ValueError, match=f"rows of at most {model.max_positions} tokens"):
        model.scores(params, tokens, np.ones(tokens.shape, bool))


@pytest.mark.parametrize("name", UNLIMITED)
def test_plain_rotary_positions_and_alibi_go_on(name):
    check_length(make_model(CASES[name]).config, (1, 10**6), None)


def torch_model(config):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()


def torch_logits(oracle, tokens, **inputs):
    import torch

    with torch.no_grad():
        return oracle(torch.tensor(tokens).long(), **inputs).logits.numpy()


@pytest.mark.parity
@pytest.mark.parametrize("name", ["gpt_neox", "llama", "bloom", "gemma3_text", "qwen3"])
def test_logits_beyond_the_context_are_those_of_torch(name, tmp_path):
    config = copy.deepcopy(CASES[name])
    if name != "bloom":
        config.max_position_embeddings = 16
    oracle = torch_model(config)
    oracle.save_pretrained(tmp_path)
    tokens = np.random.default_rng(0).integers(2, 97, (2, 40)).astype(np.int32)
    loaded = load_checkpoint(tmp_path)
    assert name == "bloom" or loaded.model.max_positions == 16
    found = loaded.model.logits(loaded.params, tokens)
    np.testing.assert_allclose(found, torch_logits(oracle, tokens), atol=TOLERANCE)


@pytest.mark.parity
@pytest.mark.parametrize("truncate", [None, False, True, "absent"])
def test_logits_of_yarn_are_those_of_torch_whatever_truncate_says(truncate, tmp_path):
    given = {} if truncate == "absent" else {"truncate": truncate}
    config = LlamaConfig(**CASES["llama"].to_dict() | {"rope_parameters": YARN | given, "head_dim": 32})
    oracle = torch_model(config)
    oracle.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    tokens = np.random.default_rng(0).integers(2, 97, (2, 60)).astype(np.int32)
    found = loaded.model.logits(loaded.params, tokens)
    np.testing.assert_allclose(found, torch_logits(oracle, tokens), atol=TOLERANCE)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*nothing is tied")
@pytest.mark.parametrize("family", ["gpt2", "llama", "t5"])
def test_logits_of_a_tied_model_with_another_head_are_those_of_torch(family, tmp_path):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM

    other_head(tmp_path / "tied", family)
    factory = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    tokens = np.random.default_rng(0).integers(2, 97, (2, 9)).astype(np.int32)
    loaded = load_checkpoint(tmp_path / "tied")
    save_checkpoint(tmp_path / "again", loaded.model, loaded.params)
    context = dict(context_tokens=tokens, context_mask=np.ones(tokens.shape, bool)) if family == "t5" else {}
    found = loaded.model.logits(loaded.params, tokens, None, **context)
    for folder in ("tied", "again"):
        oracle = factory.from_pretrained(tmp_path / folder, attn_implementation="eager").eval()
        more = {"decoder_input_ids": torch.tensor(tokens).long()} if family == "t5" else {}
        np.testing.assert_allclose(found, torch_logits(oracle, tokens, **more), atol=TOLERANCE)


def kimi(folder, **changes):
    """The folder of a DeepSeek-V3, described as Kimi K2's are: by a class that comes with the checkpoint."""
    path = folder / "config.json"
    own = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "scoring_func": "sigmoid"}
    own |= {"topk_method": "noaux_tc", "moe_layer_freq": 1, "ep_size": 1, "seq_aux": True}
    path.write_text(json.dumps(json.loads(path.read_text()) | {"model_type": "kimi_k2"} | own | changes))


def test_kimi_k2_is_read_as_deepseek_v3_and_written_as_that(tmp_path):
    model = make_model(CASES["deepseek_v3-kimi-k2"])
    save_checkpoint(tmp_path, model, model.init(jax.random.key(0)))
    expected = load_checkpoint(tmp_path)
    kimi(tmp_path)
    loaded = load_checkpoint(tmp_path)
    assert loaded.model.config == expected.model.config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, expected.params)
    save_checkpoint(tmp_path / "again", loaded.model, loaded.params)
    written = json.loads((tmp_path / "again" / "config.json").read_text())
    assert (written["model_type"], written["architectures"]) == ("deepseek_v3", ["DeepseekV3ForCausalLM"])
    assert "auto_map" not in written


@pytest.mark.parametrize(
    ("key", "value"), [("scoring_func", "softmax"), ("topk_method", "greedy"), ("moe_layer_freq", 2)]
)
def test_another_router_of_kimi_k2_is_refused(key, value, tmp_path):
    CASES["deepseek_v3-kimi-k2"].save_pretrained(tmp_path)
    kimi(tmp_path, **{key: value})
    with pytest.raises(ValueError, match=f"deepseek_v3: `{key}` must be .* got {value!r}"):
        load_checkpoint(tmp_path)


@pytest.mark.parity
def test_kimi_k2_computes_what_torchs_deepseek_v3_does_with_its_weights(tmp_path):
    import torch

    from tests.models.parity import perturbed, reopened

    oracle = perturbed(CASES["deepseek_v3-kimi-k2"], seed=0)
    oracle.save_pretrained(tmp_path / "kimi")
    kimi(tmp_path / "kimi")
    loaded = load_checkpoint(tmp_path / "kimi")
    tokens = np.random.default_rng(0).integers(2, 90, (2, 40))
    with torch.no_grad():
        theirs = oracle(torch.tensor(tokens)).logits.numpy()
        save_checkpoint(tmp_path / "jrl", loaded.model, loaded.params)
        back = reopened(tmp_path / "jrl")(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(
        loaded.model.logits(loaded.params, jnp.asarray(tokens)), theirs, atol=TOLERANCE
    )
    np.testing.assert_array_equal(back, theirs)


@pytest.mark.parity
def test_queries_of_llama_4_grow_as_in_torch_where_nothing_is_padded(tmp_path):
    import torch

    from tests.models.parity import jrl_greedy, perturbed, torch_greedy

    config = copy.deepcopy(CASES["llama4_text"])
    config.floor_scale, config.attn_scale = 5, 2.0
    oracle = perturbed(config, seed=0)
    oracle.save_pretrained(tmp_path)
    loaded = load_checkpoint(tmp_path)
    tokens = np.random.default_rng(0).integers(2, 90, (2, 40))
    with torch.no_grad():
        theirs = oracle(torch.tensor(tokens)).logits.numpy()
    ours = loaded.model.logits(loaded.params, jnp.asarray(tokens))
    np.testing.assert_allclose(ours, theirs, atol=TOLERANCE)
    plain = make_model(CASES["llama4_text"]).logits(loaded.params, jnp.asarray(tokens))
    assert np.abs(plain - theirs).max() > 0.1
    rows = tokens.astype(np.int32), np.ones_like(tokens, bool)
    (them, _), (us, _) = torch_greedy(oracle, *rows), jrl_greedy(loaded.model, loaded.params, *rows)
    np.testing.assert_array_equal(us, them)


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore:.*nothing is tied:UserWarning")
def test_a_mistral_3_whose_config_is_silent_has_the_head_of_its_file(tmp_path):
    """Torch's class ties by default, and its loader does not where the file holds another head."""
    import torch
    from transformers import Mistral3Config

    from tests.models.multimodal_cases import CASES as MULTIMODAL
    from tests.models.parity import auto_class, perturbed

    config = copy.deepcopy(MULTIMODAL["mistral3-ministral3"])
    perturbed(config, seed=0).save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    fields = json.loads(path.read_text())
    assert fields.pop("tie_word_embeddings") is False and Mistral3Config().tie_word_embeddings
    path.write_text(json.dumps(fields))
    oracle = auto_class(config).from_pretrained(tmp_path, attn_implementation="eager").eval()
    tokens = np.random.default_rng(0).integers(2, 90, (2, 12))
    with torch.no_grad():
        theirs = oracle(torch.tensor(tokens)).logits.numpy()
    loaded = load_checkpoint(tmp_path)
    assert not loaded.model.config.tie_embeddings
    np.testing.assert_allclose(
        loaded.model.logits(loaded.params, jnp.asarray(tokens)), theirs, atol=TOLERANCE
    )

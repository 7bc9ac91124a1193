# SPDX-License-Identifier: Apache-2.0
"""Adapters against the real peft: its files give the same logits here, and ours give the same logits there."""

import copy
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.adapters.config import LoraConfig as LoraConfigOfJrl
from jrl.models.adapters.peft_format import load_adapter, read_adapter_folder, save_adapter
from jrl.models.adapters.targets import UNADAPTED
from jrl.models.checkpoint import load_checkpoint
from jrl.typing import ModelInputs
from tests.models.family_cases import CASES as FAMILY_CASES
from tests.models.multimodal_cases import CASES as MULTIMODAL
from tests.tiny import PAD_ID, VOCAB_SIZE, tiny_hf_config

pytestmark = [
    pytest.mark.parity,
    pytest.mark.filterwarnings(
        "ignore::Warning:peft", "ignore::Warning:transformers", "ignore::Warning:torch"
    ),
]

ROWS, LENGTH = 3, 9
WITH_DORA = ("gpt_neox", "bloom")
# Scaled embeddings, alternating windows, ALiBi, positions with an offset, rotary in part, one key head.
WITH_VIRTUAL_TOKENS = (
    "gemma",
    "gemma2",
    "gemma3_text",
    "bloom",
    "mistral",
    "opt",
    "gptj",
    "phi3",
    "gpt_bigcode",
)
LORA = dict(r=3, lora_alpha=5)
CASES = {
    "gpt2": ("gpt2", dict(LORA)),
    "gpt2_every_map": ("gpt2", dict(LORA, target_modules="all-linear")),
    "gpt2_dora": ("gpt2", dict(LORA, target_modules=["c_attn", "c_proj"], use_dora=True)),
    "gpt2_rslora": ("gpt2", dict(LORA, use_rslora=True)),
    "llama_every_map": ("llama", dict(LORA, target_modules="all-linear")),
    "llama_dora": (
        "llama",
        dict(LORA, target_modules=["q_proj", "k_proj", "o_proj", "up_proj"], use_dora=True),
    ),
    "llama_head": ("llama", dict(LORA, target_modules=["v_proj", "lm_head"])),
    "llama_pattern": ("llama", dict(LORA, target_modules=r".*\.1\..*(gate|down)_proj")),
    "llama_ranks": (
        "llama",
        dict(
            LORA,
            target_modules=["q_proj", "v_proj", "down_proj"],
            rank_pattern={"v_proj": 2, r"layers\.1\.self_attn\.q_proj": 4},
            alpha_pattern={"mlp.down_proj": 11},
        ),
    ),
    "llama_layers": (
        "llama",
        dict(LORA, target_modules=["q_proj", "o_proj"], layers_to_transform=[1], exclude_modules=["o_proj"]),
    ),
}


@functools.cache
def torch_base(family: str):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(tiny_hf_config(family)).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """Folder and jrl model of a family's torch model."""

    @functools.cache
    def get(family: str):
        folder = tmp_path_factory.mktemp(family)
        torch_base(family).save_pretrained(folder)
        return folder, load_checkpoint(folder)

    return get


def peft_model(family: str, config):
    """The torch model with an adapter none of whose parameters is at its start."""
    import torch
    from peft import get_peft_model

    model = get_peft_model(copy.deepcopy(torch_base(family)), config).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def rows(padding: str | None) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask; ragged on the side that is named."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(2, VOCAB_SIZE, size=(ROWS, LENGTH))
    lengths = np.array([LENGTH, 4, 6]) if padding else np.full(ROWS, LENGTH)
    mask = np.arange(LENGTH)[None, :] < lengths[:, None]
    mask = mask[:, ::-1] if padding == "left" else mask
    return np.where(mask, tokens, PAD_ID), mask


def torch_logits(model, tokens, mask, virtual: int = 0):
    import torch

    arguments = dict(attention_mask=torch.tensor(mask.astype(np.int64)))
    if not virtual:
        positions = np.maximum(np.cumsum(mask, axis=1) - 1, 0)
        arguments["position_ids"] = torch.tensor(positions)
    with torch.no_grad():
        logits = model(torch.tensor(tokens), **arguments).logits.numpy()
    return logits[:, -LENGTH:]


def jrl_reader(lm, config, tokens, mask):
    """`read(params, frozen)`: logits of these rows, compiled once for all parameters."""
    policy = lm.policy(adapter=config)
    inputs = ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))

    @jax.jit
    def logits(params, frozen):
        trunk = policy.trunk(frozen, inputs)
        hidden = policy.branch(params, frozen, trunk, inputs, None).policy
        return policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE]

    return lambda params, frozen: np.asarray(logits(params, frozen))


def jrl_logits(lm, config, params, frozen, tokens, mask):
    return jrl_reader(lm, config, tokens, mask)(params, frozen)


@pytest.mark.parametrize("case", CASES)
def test_lora_of_peft_gives_the_same_logits_and_goes_back(case, base, tmp_path):
    from peft import LoraConfig, PeftModel

    family, options = CASES[case]
    theirs = peft_model(family, LoraConfig(task_type="CAUSAL_LM", **options))
    theirs.save_pretrained(tmp_path / "theirs")
    tokens, mask = rows("left")
    wanted = torch_logits(theirs, tokens, mask)

    _, loaded = base(family)
    found = read_adapter_folder(tmp_path / "theirs")
    adapter = loaded.model.bind(found.config)
    params = load_adapter(found.folder, adapter)
    read = jrl_reader(loaded.model, found.config, tokens, mask)
    ours = read(params, loaded.params)
    plain = torch_logits(torch_base(family), tokens, mask)
    assert np.abs(wanted - plain)[mask].max() > 1e-2
    np.testing.assert_allclose(ours[mask], wanted[mask], atol=1e-4)

    moved = jax.tree.map(lambda x: 1.5 * x, params)
    save_adapter(tmp_path / "ours", adapter, moved, base_model=None)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        back = PeftModel.from_pretrained(copy.deepcopy(torch_base(family)), tmp_path / "ours").eval()
    np.testing.assert_allclose(
        torch_logits(back, tokens, mask)[mask],
        read(moved, loaded.params)[mask],
        atol=1e-4,
    )


@pytest.mark.parametrize("padding", [None, "right"])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
@pytest.mark.parametrize("kind", ["prefix", "projected_prefix", "prompt"])
def test_virtual_tokens_of_peft_give_the_same_logits_and_go_back(kind, family, padding, base, tmp_path):
    from peft import PeftModel, PrefixTuningConfig, PromptTuningConfig

    options = dict(task_type="CAUSAL_LM", num_virtual_tokens=3)
    if kind == "prompt":
        config = PromptTuningConfig(**options)
    elif kind == "prefix":
        config = PrefixTuningConfig(**options)
    else:
        config = PrefixTuningConfig(prefix_projection=True, encoder_hidden_size=12, **options)
    theirs = peft_model(family, config)
    theirs.save_pretrained(tmp_path / "theirs")
    tokens, mask = rows(padding)
    wanted = torch_logits(theirs, tokens, mask, virtual=3)

    _, loaded = base(family)
    found = read_adapter_folder(tmp_path / "theirs")
    adapter = loaded.model.bind(found.config)
    params = load_adapter(found.folder, adapter)
    read = jrl_reader(loaded.model, found.config, tokens, mask)
    ours = read(params, loaded.params)
    assert np.abs(wanted - torch_logits(torch_base(family), tokens, mask))[mask].max() > 1e-2
    np.testing.assert_allclose(ours[mask], wanted[mask], atol=1e-4)

    moved = jax.tree.map(lambda x: 0.7 * x, params)
    save_adapter(tmp_path / "ours", adapter, moved, base_model=None)
    back = PeftModel.from_pretrained(copy.deepcopy(torch_base(family)), tmp_path / "ours").eval()
    np.testing.assert_allclose(
        torch_logits(back, tokens, mask, virtual=3)[mask],
        read(moved, loaded.params)[mask],
        atol=1e-4,
    )


@pytest.mark.parametrize("name", FAMILY_CASES)
def test_every_linear_map_of_every_family_is_where_peft_has_it(name, tmp_path):
    """Under "all-linear", so that every fused, split and reordered weight is adapted, and both sides find the same."""
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(FAMILY_CASES[name]).eval()
    base.save_pretrained(tmp_path / "base")
    # Under experts PEFT turns "all-linear" into stacked parameters, which jrl does not adapt.
    targets = ["q_proj", "k_proj", "v_proj", "o_proj"] if "experts" in str(base) else "all-linear"
    if base.config.model_type in UNADAPTED:
        # PEFT takes nothing for granted here but names. Those of an MLP are experts in a file, which jrl refuses.
        targets = ["q_proj", "k_proj", "v_proj", "o_proj", "in_proj"]
        targets += [] if "experts" in str(base) else ["gate_proj", "up_proj", "down_proj"]
    options = dict(LORA, target_modules=targets, use_dora=name in WITH_DORA)
    theirs = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="CAUSAL_LM", **options)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(2, VOCAB_SIZE, (2, 7))

    loaded = load_checkpoint(tmp_path / "base")
    found = read_adapter_folder(tmp_path / "theirs")
    everywhere = LoraConfigOfJrl(**LORA, target_modules="all-linear", use_dora=name in WITH_DORA)
    adapter = loaded.model.bind(everywhere if targets == "all-linear" else found.config)
    params = load_adapter(found.folder, adapter)
    mask = np.ones(tokens.shape, bool)
    with torch.no_grad():
        wanted, plain = theirs(tokens).logits.numpy(), base(tokens).logits.numpy()
    assert np.abs(wanted - plain).max() > 1e-2
    ours = jrl_logits(loaded.model, adapter.config, params, loaded.params, tokens.numpy(), mask)
    np.testing.assert_allclose(ours, wanted, atol=1e-4)

    save_adapter(tmp_path / "ours", adapter, params, base_model=None)
    back = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_allclose(back(tokens).logits.numpy(), wanted, atol=1e-5)


@pytest.mark.parametrize("targets", [None, ("q_proj", "down_proj")], ids=["default", "names"])
@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_peft_finds_the_text_model_of_a_multimodal_one_and_nothing_else(family, targets, tmp_path):
    """Beside it are modules of the same names, in Gemma 4 of a class that PEFT refuses."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    torch.manual_seed(0)
    base = AutoModelForImageTextToText.from_config(MULTIMODAL[family]).eval()
    base.save_pretrained(tmp_path / "base")
    tokens, mask = rows(None)
    loaded = load_checkpoint(tmp_path / "base")
    config = LoraConfigOfJrl(**LORA, target_modules=targets)
    fresh, _ = loaded.model.split_params(loaded.params, adapter=config, key=jax.random.key(0))
    params = {"lora": jax.tree.map(lambda x: x + 0.1, fresh["lora"])}
    save_adapter(tmp_path / "ours", loaded.model.bind(config), params, base_model=None)
    plain = torch_logits(base, tokens, mask)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # an adapter elsewhere would miss its tensors
        back = PeftModel.from_pretrained(base, tmp_path / "ours").eval()
    wanted = torch_logits(back, tokens, mask)
    found = read_adapter_folder(tmp_path / "ours")
    read = load_adapter(found.folder, loaded.model.bind(found.config))
    ours = jrl_logits(loaded.model, found.config, read, loaded.params, tokens, mask)
    assert np.abs(wanted - plain).max() > 1e-2
    np.testing.assert_allclose(ours, wanted, atol=1e-4)


@pytest.mark.parametrize(
    "beside",
    [{}, {"trainable_token_indices": [5, 9, 41]}, {"modules_to_save": ["final_layer_norm", "lm_head"]}],
    ids=["alone", "rows", "whole"],
)
def test_t5_with_lora_of_peft_gives_the_same_logits_and_goes_back(beside, tmp_path):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=VOCAB_SIZE)
    base = T5ForConditionalGeneration(config).eval()
    base.save_pretrained(tmp_path / "base")
    options = dict(LORA, target_modules="all-linear", **beside)
    theirs = get_peft_model(copy.deepcopy(base), LoraConfig(task_type="SEQ_2_SEQ_LM", **options)).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    tokens, mask = rows("right")
    context = torch.randint(2, VOCAB_SIZE, (ROWS, 5))
    inputs = ModelInputs(
        jnp.asarray(tokens, jnp.int32),
        jnp.asarray(mask),
        context_tokens=jnp.asarray(context.numpy(), jnp.int32),
        context_mask=jnp.ones(context.shape, bool),
    )

    def torch_side(model):
        with torch.no_grad():
            return model(input_ids=context, decoder_input_ids=torch.tensor(tokens)).logits.numpy()

    loaded = load_checkpoint(tmp_path / "base")
    found = read_adapter_folder(tmp_path / "theirs")
    params = load_adapter(found.folder, loaded.model.bind(found.config))
    policy = loaded.model.policy(adapter=found.config)

    @jax.jit
    def logits(params, frozen):
        hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        return policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE]

    wanted = torch_side(theirs)
    assert np.abs(wanted - torch_side(base))[mask].max() > 1e-2
    np.testing.assert_allclose(np.asarray(logits(params, loaded.params))[mask], wanted[mask], atol=1e-4)
    adapter = loaded.model.bind(found.config)
    save_adapter(tmp_path / "ours", adapter, params, base_model=None, task_type="SEQ_2_SEQ_LM")
    back = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
    np.testing.assert_allclose(torch_side(back), wanted, atol=1e-5)


@pytest.mark.parametrize("kind", ["prompt", "prefix"])
@pytest.mark.parametrize("name", WITH_VIRTUAL_TOKENS)
def test_every_kind_of_position_and_embedding_takes_virtual_tokens_as_under_peft(name, kind, tmp_path):
    import torch
    from peft import PrefixTuningConfig, PromptTuningConfig, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_config(FAMILY_CASES[name]).eval()
    base.save_pretrained(tmp_path / "base")
    make = PromptTuningConfig if kind == "prompt" else PrefixTuningConfig
    theirs = get_peft_model(copy.deepcopy(base), make(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(2, VOCAB_SIZE, (2, 7))
    mask = np.ones(tokens.shape, bool)
    loaded, found = load_checkpoint(tmp_path / "base"), read_adapter_folder(tmp_path / "theirs")
    params = load_adapter(found.folder, loaded.model.bind(found.config))
    with torch.no_grad():
        wanted = theirs(tokens, attention_mask=torch.ones_like(tokens)).logits[:, -7:].numpy()
    ours = jrl_logits(loaded.model, found.config, params, loaded.params, tokens.numpy(), mask)
    np.testing.assert_allclose(ours, wanted, atol=1e-4)

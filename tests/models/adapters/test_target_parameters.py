# SPDX-License-Identifier: Apache-2.0
"""LoRA on stacked experts, by the names of their parameters: against PEFT, and against its own definition."""

import copy
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.forward import Reader
from jrl.learners.sft import make_sft_update
from jrl.learners.state import init_train_state
from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.peft_format import load_adapter, read_adapter_folder, save_adapter
from jrl.models.checkpoint import load_checkpoint
from jrl.models.model import CausalLM
from jrl.models.quantize import quantize_frozen
from jrl.ops.metrics import finalize
from tests.learners.batches import CHUNK_BYTES, random_sequences, sgd
from tests.models.adapters.test_peft_parity import jrl_logits, jrl_reader
from tests.models.family_cases import CASES as FAMILY_CASES
from tests.tiny import VOCAB_SIZE

BOTH = ("experts.gate_up_proj", "experts.down_proj")
LORA = dict(r=3, lora_alpha=5)
# Stacked and one by one in files; (E, out, in) and (E, in, out) in memory; gate and up in turn; biases; shared experts.
FAMILIES = (
    "mixtral",
    "qwen3_moe",
    "qwen3_moe-some-layers",
    "gpt_oss",
    "qwen2_moe",
    "qwen3_next",
    "glm4_moe",
    "llama4_text",
    "gemma4_text-experts",
    "granitemoehybrid",
    "jamba",
)
UNGATED = ("experts.up_proj", "experts.down_proj")
TARGETS = {
    "both": dict(target_modules=["q_proj"], target_parameters=list(BOTH)),
    "down": dict(target_modules=[], target_parameters=["experts.down_proj"]),
    "gate_up": dict(target_modules=[], target_parameters=["experts.gate_up_proj"]),
    "ranks": dict(
        target_modules=["v_proj"],
        target_parameters=["gate_up_proj", "down_proj"],
        rank_pattern={r".*\.gate_up_proj": 2, "v_proj": 4},
        alpha_pattern={"experts.down_proj": 7},
        use_rslora=True,
    ),
    "router": dict(target_modules=[], target_parameters=["gate.weight", "gate_up_proj"]),
    "ungated": dict(target_modules=["q_proj", "fc1_latent_proj"], target_parameters=list(UNGATED)),
    "everything": dict(target_modules="all-linear"),
    "mamba": dict(
        target_modules=["in_proj", "x_proj", "out_proj", "q_proj"],
        target_parameters=["router.weight", "gate_up_proj"],
    ),
    "everything read": dict(target_modules="all-linear", exclude_modules=["dt_proj"]),
}
CASES = [
    ("nemotron_h-latent-experts", "ungated"),
    *((family, "both") for family in FAMILIES),
    *(("mixtral", name) for name in ("down", "gate_up", "ranks", "router", "everything")),
    *(("gpt_oss", name) for name in ("down", "ranks", "everything")),
    *((family, "everything") for family in ("qwen3_moe-some-layers", "qwen2_moe", "qwen3_next", "glm4_moe")),
    ("gemma4_text-experts", "everything"),
    ("granitemoehybrid", "everything"),
    *(("kimi_linear", name) for name in ("both", "everything")),
    *(("jamba", name) for name in ("mamba", "everything read")),
]


@functools.cache
def torch_base(family: str):
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(FAMILY_CASES[family]).eval()


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """The jrl model of a family's torch model."""

    @functools.cache
    def get(family: str):
        folder = tmp_path_factory.mktemp(family)
        torch_base(family).save_pretrained(folder)
        return load_checkpoint(folder)

    return get


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning:peft", "ignore::Warning:transformers", "ignore::Warning:torch")
@pytest.mark.parametrize(("family", "targets"), CASES)
def test_experts_of_peft_give_the_same_logits_and_go_back(family, targets, base, tmp_path):
    import torch
    from peft import LoraConfig as LoraConfigOfPeft
    from peft import PeftModel, get_peft_model

    options = dict(LORA) | TARGETS[targets]
    plain = torch_base(family)
    theirs = get_peft_model(copy.deepcopy(plain), LoraConfigOfPeft(task_type="CAUSAL_LM", **options)).eval()
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.requires_grad:
                parameter.add_(0.1 * torch.randn_like(parameter))
    theirs.save_pretrained(tmp_path / "theirs")
    tokens = torch.randint(2, VOCAB_SIZE, (2, 7))
    with torch.no_grad():
        wanted, unadapted = theirs(tokens).logits.numpy(), plain(tokens).logits.numpy()
    assert np.abs(wanted - unadapted).max() > 1e-2

    loaded, found = base(family), read_adapter_folder(tmp_path / "theirs")
    adapter = loaded.model.bind(found.config)
    if targets == "everything":
        own = loaded.model.bind(LoraConfig(**LORA, target_modules="all-linear"))
        assert facts(own) == facts(adapter)
    params = load_adapter(found.folder, adapter)
    mask = np.ones(tokens.shape, bool)
    read = jrl_reader(loaded.model, found.config, tokens.numpy(), mask)
    np.testing.assert_allclose(read(params, loaded.params), wanted, atol=1e-5)

    moved = jax.tree.map(lambda x: 1.5 * x, params)
    save_adapter(tmp_path / "ours", adapter, moved, base_model=None)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(missing|unexpected).* keys")
        back = PeftModel.from_pretrained(copy.deepcopy(plain), tmp_path / "ours").eval()
    with torch.no_grad():
        np.testing.assert_allclose(back(tokens).logits.numpy(), read(moved, loaded.params), atol=1e-5)


def facts(adapter):
    """What a file must hold, and by what it is scaled."""
    return {module.name: (module.shapes, module.scale) for module in adapter.modules}


def test_names_and_shapes_of_two_parameters_of_one_module():
    lm = CausalLM.from_config(FAMILY_CASES["mixtral"])
    found = facts(lm.bind(LoraConfig(r=3, lora_alpha=6, target_parameters=BOTH)))
    assert found["model.layers.1.mlp.experts.base_layer"] == ({"A": (15, 32), "B": (128, 15)}, 2.0)
    assert found["model.layers.1.mlp.experts"] == ({"A": (15, 64), "B": (32, 15)}, 2.0)
    alone = facts(lm.bind(LoraConfig(target_parameters=("layers.1.mlp.experts.gate_up_proj",))))
    assert set(alone) == {"model.layers.1.mlp.experts"}


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("mixtral", dict(lora_dropout=0.1), "`lora_dropout` must be off under `target_parameters`"),
        ("mixtral", dict(use_dora=True), "`use_dora` must be off under `target_parameters`"),
        ("mixtral", dict(target_parameters=("experts.w1",)), "names 'experts.w1', which must be the end of"),
        ("gpt_oss", dict(target_parameters=("gate_up_proj_bias",)), "names 'gate_up_proj_bias'"),
        ("llama", dict(target_parameters=("down_proj",)), "in this llama model it has none"),
        (
            "qwen3_moe",
            dict(target_modules=("mlp.gate",), target_parameters=("mlp.gate.weight",)),
            "model.layers.0.mlp.gate must be adapted once",
        ),
        (
            "mixtral",
            dict(target_parameters=None, target_modules="all-linear", use_dora=True),
            '"all-linear" sets',
        ),
    ],
)
def test_what_parameters_cannot_have_is_refused(family, options, message):
    lm = CausalLM.from_config(FAMILY_CASES[family])
    with pytest.raises(ValueError, match=message):
        lm.bind(LoraConfig(**dict(target_parameters=BOTH) | options))


@functools.cache
def fresh(family: str, kind: str = "float32"):
    """(model, config, trainable, frozen) with an adapter of all experts at its start."""
    lm = CausalLM.from_config(FAMILY_CASES[family])
    config = LoraConfig(**LORA, target_parameters=BOTH)
    whole = quantize_frozen(lm.init(jax.random.key(0)), kind)
    return lm, config, *lm.split_params(whole, adapter=config, key=jax.random.key(1))


def some_tokens():
    tokens = np.asarray(jax.random.randint(jax.random.key(2), (2, 7), 2, VOCAB_SIZE))
    return tokens, np.ones(tokens.shape, bool)


def moved_from(params):
    """Away from the start, where B is 0."""
    return jax.tree.map(lambda x: x + 0.1 * jax.random.normal(jax.random.key(3), x.shape), params)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["mixtral", "gpt_oss"])
def test_starts_as_the_base_model_and_merges_into_it(family):
    lm, config, params, frozen = fresh(family)
    adapter = lm.bind(config)
    start = jrl_logits(lm, config, params, frozen, *some_tokens())
    np.testing.assert_array_equal(start, jrl_logits(lm, None, {}, frozen, *some_tokens()))
    moved = moved_from(params)
    apart = jrl_logits(lm, config, moved, frozen, *some_tokens())
    assert np.abs(apart - start).max() > 1e-2
    merged = adapter.merge(frozen, moved["lora"])
    np.testing.assert_allclose(jrl_logits(lm, None, {}, merged, *some_tokens()), apart, atol=1e-5)
    back = adapter.unmerge(merged, moved["lora"])
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-6), back, dict(frozen))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["float32", "nf4"])
def test_a_step_of_sft_trains_every_matrix(kind):
    lm, config, params, frozen = fresh("mixtral", kind)
    moved = moved_from(params)
    update = make_sft_update(
        Reader(lm.policy(adapter=config), chunk_bytes=CHUNK_BYTES), sgd(1.0), batch_size=8, minibatch_size=8
    )
    state, metrics = jax.jit(update)(
        init_train_state(moved, sgd(1.0)), frozen, random_sequences(8), jax.random.key(0)
    )
    assert np.isfinite(finalize(metrics)["sft/loss"])
    change = jax.tree.map(
        lambda new, old: float(jnp.abs(new - old).max()), state.params["lora"], moved["lora"]
    )
    assert len(change) == 4 and all(each > 1e-6 for each in jax.tree.leaves(change)), change

"""Modules that train whole beside an adapter: what they replace, what is refused, and that PEFT computes the same."""

import copy
import functools
import warnings

import jax
import numpy as np
import pytest

from jrl.models.adapters import LoraConfig, read_adapter_config
from jrl.models.adapters.peft_format import load_adapter, read_adapter_folder, save_adapter
from jrl.models.checkpoint import load_checkpoint
from jrl.models.model import CausalLM
from jrl.models.policy import branch_start, init_reference
from tests.models.adapters.test_peft_parity import rows, torch_logits
from tests.models.adapters.test_token_rows import TestAgainstPeft, log_likelihood, model, moved, split
from tests.models.family_cases import CASES as FAMILY_CASES
from tests.models.test_policy import decode_all
from tests.tiny import tiny_lm, tiny_prompts

torch_base, torch_step = TestAgainstPeft.torch_base, TestAgainstPeft.torch_step
del TestAgainstPeft  # its tests are run where they stand
EVERYTHING = ("embed_tokens", "lm_head", "model.norm", "layers.1.mlp")


def test_copies_take_the_place_of_the_parameters_and_get_their_gradient():
    options = dict(target_modules=("q_proj",), modules_to_save=EVERYTHING)
    lm, policy, params, frozen = split("llama", False, **options)
    adapter, (tokens, mask) = lm.bind(LoraConfig(**options)), rows("left")
    objective = functools.partial(log_likelihood, tokens=tokens, mask=mask)
    grad = jax.jit(jax.grad(lambda p: objective(policy, p, frozen), has_aux=True))
    forward = jax.jit(lambda p, frozen: objective(policy, p, frozen)[1])
    np.testing.assert_array_equal(forward(params, frozen), forward({}, frozen))

    params = moved(params)
    gradient, logits = grad(params)
    whole = jax.jit(adapter.merge)(frozen, params["lora"])
    wanted_gradient, wanted = jax.jit(jax.grad(lambda p: objective(lm.policy(), p, {}), has_aux=True))(whole)
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    found = {}
    for each in adapter.whole:
        found |= gradient["lora"][each.name]
    for name in ("embed", "lm_head", "final_norm"):
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4),
            found[name],
            wanted_gradient[name],
        )
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4),
        found["layers_1"]["mlp"],
        wanted_gradient["layers_1"]["mlp"],
    )
    assert init_reference(params) == {}
    # What trains is donated: none of it may be the frozen model's own buffer.
    fresh = lm.split_params(model("llama", False)[1], adapter=LoraConfig(**options), key=jax.random.key(1))[0]
    own = {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(frozen)}
    assert not own & {leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(fresh)}


@pytest.mark.parametrize("saved", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_lore_2_7_decoding_equals_scoring_where_a_tied_table_is_untied(saved):
    _, policy, params, frozen = split("llama", True, target_modules=("q_proj",), modules_to_save=saved)
    params, inputs = moved(params), tiny_prompts(3, 8)
    real = inputs.attention_mask

    @jax.jit
    def both(params, frozen):
        scored = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        decoded = decode_all(policy, params, frozen, inputs, prefill=4).policy
        return [policy.logits(params, frozen, hidden) for hidden in (scored, decoded)]

    scored, decoded = both(params, frozen)
    np.testing.assert_allclose(scored[real], decoded[real], atol=1e-4)


def test_layers_below_all_that_trains_are_a_shared_trunk():
    lm = tiny_lm("llama", 3)[0]

    def cut(**options):
        return branch_start(
            lm.config, 0, 0, lm.bind(LoraConfig(target_modules=("layers.2.mlp.up_proj",), **options))
        )

    assert cut() == cut(modules_to_save=("model.norm", "lm_head")) == 2
    assert cut(modules_to_save=("layers.1.mlp",)) == 1
    assert cut(modules_to_save=("embed_tokens",)) is None
    assert cut(trainable_token_indices=(3,)) is None
    assert cut(trainable_token_indices={"lm_head": (3,)}) == 2


def test_equal_layers_that_share_a_body_still_train_what_is_whole():
    """A shared body computes no gradient for layers that it takes for frozen."""
    lm, whole = tiny_lm("llama", 2)
    config = LoraConfig(target_modules=("q_proj",), modules_to_save=("mlp",))
    params, frozen = lm.split_params(whole, adapter=config, key=jax.random.key(1))
    tokens, mask = rows("right")

    def gradient(share):
        policy = lm.policy(adapter=config, share_layers=share)
        return jax.jit(jax.grad(lambda p: log_likelihood(policy, p, frozen, tokens, mask)[0]))(params)["lora"]

    shared, alone = gradient(True), gradient(False)
    name = "model.layers.0.mlp"
    assert np.abs(shared[name]["layers_0"]["mlp"]["up"]["kernel"]).max() > 1e-2
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), shared, alone)


@pytest.mark.parametrize(
    ("family", "given", "message"),
    [
        ("llama", ["nrm"], "names 'nrm', which must be the end of a module's name; modules end in .*norm"),
        ("llama", ["layers.1.mlp", "up_proj"], r"fits model\.layers\.1\.mlp, and names .*up_proj, too"),
        ("t5", ["shared"], "fits shared, and T5 embeds by other modules than it"),
    ],
)
def test_what_does_not_fit_is_refused(family, given, message):
    config = read_adapter_config({"peft_type": "LORA", "modules_to_save": given})
    with pytest.raises(ValueError, match=message):
        tiny_lm(family)[0].bind(config)


def test_experts_and_adapted_maps_and_trained_rows_are_refused():
    mixture = CausalLM.from_config(FAMILY_CASES["mixtral"])
    with pytest.raises(ValueError, match=r"fits model\.layers\.0\.mlp\.experts, and it holds experts"):
        mixture.bind(LoraConfig(modules_to_save=("layers.0.mlp.experts",)))
    assert [each.name for each in mixture.bind(LoraConfig(modules_to_save=("layers.0.mlp.gate",))).whole]
    joined = CausalLM.from_config(FAMILY_CASES["kimi_linear"])
    with pytest.raises(
        ValueError, match=r"self_attn\.conv1d, and transformers holds several tensors of it as"
    ):
        joined.bind(LoraConfig(modules_to_save=("conv1d",)))
    lm = model("llama", True)[0]
    with pytest.raises(ValueError, match=r"q_proj has an adapter: leave it out"):
        lm.bind(LoraConfig(modules_to_save=("roj",)))
    with pytest.raises(ValueError, match=r"fits lm_head, and rows of it train by `trainable_token_indices`"):
        lm.bind(LoraConfig(modules_to_save=("lm_head",), trainable_token_indices=(3,)))


def test_as_in_peft_a_map_that_is_saved_whole_has_no_adapter():
    bound = model("llama", False)[0].bind(LoraConfig(modules_to_save=("layers.1.self_attn",)))
    assert [module.name for module in bound.modules] == [
        "model.layers.0.self_attn.q_proj",
        "model.layers.0.self_attn.v_proj",
    ]


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning:peft", "ignore::Warning:transformers", "ignore::Warning:torch")
@pytest.mark.parametrize(
    ("family", "tied", "given"),
    [
        ("llama", False, ["embed_tokens", "lm_head", "norm"]),
        ("llama", False, ["layers.1.self_attn", "mlp.up_proj"]),
        ("llama", True, ["embed_tokens"]),
        ("llama", True, ["lm_head"]),
        ("llama", True, ["embed_tokens", "lm_head"]),
        ("gpt2", True, ["wte", "wpe", "ln_f", "h.1.attn.c_attn"]),
        ("gptj", False, ["lm_head"]),  # with a bias
    ],
)
def test_a_step_there_and_a_step_here(family, tied, given, tmp_path):
    from peft import LoraConfig as PeftLora
    from peft import PeftModel, get_peft_model

    base = torch_base(family, tied)
    base.save_pretrained(tmp_path / "base")
    targets = ["mlp.c_proj"] if family == "gpt2" else ["q_proj"]
    options = dict(r=2, target_modules=targets, modules_to_save=given, init_lora_weights=False)
    theirs = get_peft_model(copy.deepcopy(base), PeftLora(task_type="CAUSAL_LM", **options)).eval()
    tokens, mask = rows("left")
    torch_step(theirs, tokens, mask, 0.02)
    theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
    wanted = torch_logits(theirs, tokens, mask)
    assert np.abs(wanted - torch_logits(base, tokens, mask))[mask].max() > 1e-2

    loaded = load_checkpoint(tmp_path / "base")
    found = read_adapter_folder(tmp_path / "theirs")
    adapter = loaded.model.bind(found.config)
    params = load_adapter(found.folder, adapter)
    policy = loaded.model.policy(adapter=found.config)
    objective = functools.partial(log_likelihood, policy, frozen=loaded.params, tokens=tokens, mask=mask)
    gradient, ours = jax.jit(jax.grad(lambda p: objective(p), has_aux=True))(params)
    np.testing.assert_allclose(ours[mask], wanted[mask], atol=1e-5)

    stepped = jax.tree.map(lambda p, g: p + 0.02 * g, params, gradient)
    save_adapter(tmp_path / "ours", adapter, stepped, base_model=str(tmp_path / "base"))
    torch_step(theirs, tokens, mask, 0.02)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        back = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
    wanted = torch_logits(back, tokens, mask)
    np.testing.assert_allclose(wanted[mask], torch_logits(theirs, tokens, mask)[mask], atol=1e-4)
    np.testing.assert_allclose(wanted[mask], jax.jit(objective)(stepped)[1][mask], atol=1e-5)

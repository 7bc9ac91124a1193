"""Rows of tokens that train: what they compute and change, and that PEFT computes the same from the same files."""

import copy
import functools
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.models.adapters import LoraConfig, read_adapter_config
from jrl.models.adapters.peft_format import load_adapter, read_adapter_folder, save_adapter
from jrl.models.checkpoint import load_checkpoint
from jrl.models.model import make_model
from jrl.models.policy import init_reference
from jrl.ops.logprobs import logprobs_from_logits
from jrl.typing import ModelInputs
from tests.models.adapters.test_peft_parity import rows, torch_logits
from tests.models.family_cases import CASES as FAMILY_CASES
from tests.models.test_policy import decode_all, scorer
from tests.tiny import VOCAB_SIZE, tiny_hf_config, tiny_prompts

IDS = [41, 7, 60]


def hf_config(family: str, *, tied: bool):
    if family in FAMILY_CASES and family not in ("gpt2", "llama", "t5"):
        return FAMILY_CASES[family]
    return tiny_hf_config(family, tie_word_embeddings=tied)


@functools.cache
def model(family: str, tied: bool):
    lm = make_model(hf_config(family, tied=tied))
    return lm, lm.init(jax.random.key(0))


def split(family: str, tied: bool, **options):
    """(lm, policy, params, frozen) with rows, and LoRA where it is asked for, at their start."""
    lm, whole = model(family, tied)
    config = LoraConfig(**({"target_modules": ()} | options))
    params, frozen = lm.split_params(whole, adapter=config, key=jax.random.key(1))
    return lm, lm.policy(adapter=config), params, frozen


def moved(params, scale=0.1):
    leaves, structure = jax.tree.flatten(params)
    keys = jax.random.split(jax.random.key(2), len(leaves))
    return structure.unflatten(
        [leaf + scale * jax.random.normal(key, leaf.shape) for leaf, key in zip(leaves, keys, strict=True)]
    )


def log_likelihood(policy, params, frozen, tokens, mask):
    inputs = ModelInputs(jnp.asarray(tokens, jnp.int32), jnp.asarray(mask))
    hidden = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
    logits = policy.logits(params, frozen, hidden)[..., :VOCAB_SIZE]
    found = logprobs_from_logits(logits[:, :-1], inputs.tokens[:, 1:])
    # What padding predicts is nobody's affair.
    real = inputs.attention_mask[:, 1:] & inputs.attention_mask[:, :-1]
    return jnp.where(real, found, 0.0).sum(), logits


@pytest.mark.parametrize("tied", [False, True])
def test_rows_act_as_a_table_that_holds_them(tied):
    """Logits and the rows' gradient are those of a table with these rows in it; all other rows are constants."""
    lm, policy, params, frozen = split("llama", tied, trainable_token_indices=tuple(IDS))
    params = moved(params)
    tokens, mask = rows("left")
    tokens[0, :3] = IDS
    objective = functools.partial(log_likelihood, tokens=tokens, mask=mask)
    grad = jax.jit(jax.grad(lambda p: objective(policy, p, frozen), has_aux=True))
    gradient, logits = grad(params)
    assert jax.tree.map(jnp.shape, gradient) == {"lora": {"model.embed_tokens": {"rows": (3, 32)}}}

    table = np.array(frozen["embed"]["embedding"])
    table[IDS] = params["lora"]["model.embed_tokens"]["rows"]
    whole = {**frozen, "embed": {"embedding": jnp.asarray(table)}}
    plain = lm.policy()
    wanted_gradient, wanted = jax.jit(
        jax.grad(lambda embed: objective(plain, {**whole, "embed": embed}, {}), has_aux=True)
    )(whole["embed"])
    np.testing.assert_allclose(logits, wanted, atol=1e-5)
    found = gradient["lora"]["model.embed_tokens"]["rows"]
    assert np.abs(found).min(axis=0).max() > 0
    np.testing.assert_allclose(found, wanted_gradient["embedding"][jnp.asarray(IDS)], rtol=1e-4, atol=1e-5)


def test_only_the_rows_have_moments_and_the_reference_has_the_old_ones():
    _, policy, params, frozen = split("llama", True, trainable_token_indices=tuple(IDS))
    score, prompts = scorer(policy), tiny_prompts()
    np.testing.assert_array_equal(score(params, frozen, prompts)[0], score({}, frozen, prompts)[0])
    optimizer = make_optimizer("adam", {"lr": 0.1}, make_schedule("constant", {}), max_grad_norm=None)
    sizes = sorted(leaf.size for leaf in jax.tree.leaves(optimizer.init(params)))
    assert sizes[-2:] == [3 * 32, 3 * 32] and sizes[-3] == 1
    reference = init_reference(moved(params))
    assert reference == {}
    np.testing.assert_array_equal(score(reference, frozen, prompts)[0], score({}, frozen, prompts)[0])


@pytest.mark.parametrize("tied", [False, True])
def test_lore_2_7_decoding_with_rows_equals_scoring(tied):
    _, policy, params, frozen = split("llama", tied, trainable_token_indices=tuple(IDS), r=2)
    params, inputs = moved(params), tiny_prompts(3, 8)
    inputs = inputs._replace(tokens=inputs.tokens.at[0, 5].set(IDS[0]))
    real = inputs.attention_mask

    @jax.jit
    def both(params, frozen):
        scored = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).policy
        decoded = decode_all(policy, params, frozen, inputs, prefill=4).policy
        return [policy.logits(params, frozen, hidden) for hidden in (scored, decoded)]

    scored, decoded = both(params, frozen)
    np.testing.assert_allclose(scored[real], decoded[real], atol=1e-4)


@pytest.mark.parametrize("rows_of", [tuple(IDS), {"embed_tokens": tuple(IDS), "lm_head": (3, 4)}])
def test_merge_writes_the_rows(rows_of):
    options = dict(target_modules=("q_proj",), trainable_token_indices=rows_of)
    lm, policy, params, frozen = split("llama", False, **options)
    params, adapter, (tokens, mask) = moved(params), lm.bind(LoraConfig(**options)), rows("left")
    whole = jax.jit(adapter.merge)(frozen, params["lora"])
    changed = np.flatnonzero((whole["embed"]["embedding"] != frozen["embed"]["embedding"]).any(axis=1))
    assert list(changed) == sorted(IDS)
    objective = functools.partial(log_likelihood, tokens=tokens, mask=mask)
    _, wanted = jax.jit(functools.partial(objective, policy))(params, frozen)
    _, found = jax.jit(functools.partial(objective, lm.policy()))(whole, {})
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    with pytest.raises(ValueError, match=r"`unmerge_adapter` cannot undo model\.embed_tokens"):
        adapter.unmerge(whole, params["lora"])


@pytest.mark.parametrize("ids", [{"lm_head": (3,)}, {"embed_tokens": (3,), "lm_head": (4,)}])
def test_rows_at_one_end_of_a_tied_table_are_not_merged(ids):
    options = dict(target_modules=("q_proj",), trainable_token_indices=ids)
    lm, _, params, frozen = split("llama", True, **options)
    with pytest.raises(ValueError, match=r"`merge_adapter` must be False where .* trains apart"):
        lm.bind(LoraConfig(**options)).merge(frozen, params["lora"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"trainable_token_indices": [97]}, "must be below the 97 entries of the vocabulary, got 97"),
        (
            {"trainable_token_indices": {"norm": [3]}},
            "names 'norm', which must be the end of .* of model.norm",
        ),
        ({"trainable_token_indices": {"wte": [3]}}, "or lm_head; it is that of no module"),
        (
            {"trainable_token_indices": {"lm_head": [3]}, "target_modules": ["lm_head"]},
            "must leave out lm_head, which `target_modules` adapts",
        ),
    ],
)
def test_what_does_not_fit_is_refused(given, message):
    config = read_adapter_config({"peft_type": "LORA", "target_modules": ["q_proj"]} | given)
    with pytest.raises(ValueError, match=message):
        model("llama", False)[0].bind(config)


def test_the_head_of_a_family_with_a_bias_is_refused():
    lm = make_model(FAMILY_CASES["gptj"])
    with pytest.raises(ValueError, match="must leave out lm_head, which has a bias"):
        lm.bind(LoraConfig(trainable_token_indices={"lm_head": (3,)}))


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning:peft", "ignore::Warning:transformers", "ignore::Warning:torch")
class TestAgainstPeft:
    """Both ways, after a step of gradient ascent there and one here."""

    @staticmethod
    def torch_base(family, tied):
        import torch
        from transformers import AutoModelForCausalLM

        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(hf_config(family, tied=tied)).eval()

    @staticmethod
    def torch_step(theirs, tokens, mask, rate):
        """A step of gradient ascent on the log-likelihood of rows; the gradients by name."""
        import torch

        ids, real = torch.tensor(tokens), torch.tensor(mask.astype(np.int64))
        positions = torch.tensor(np.maximum(np.cumsum(mask, axis=1) - 1, 0))
        logits = theirs(ids, attention_mask=real, position_ids=positions).logits
        found = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None])[..., 0]
        (found * real[:, 1:] * real[:, :-1]).sum().backward()
        gradients = {}
        with torch.no_grad():
            for name, parameter in theirs.named_parameters():
                if parameter.requires_grad:
                    gradients[name] = parameter.grad.numpy().copy()
                    parameter.add_(rate * parameter.grad)
                    parameter.grad = None
        return gradients

    @pytest.mark.parametrize("alone", [False, True], ids=["beside_lora", "alone"])
    @pytest.mark.parametrize(
        ("family", "tied", "given"),
        [
            ("llama", False, IDS),
            ("llama", True, IDS),
            ("gpt2", True, IDS),
            ("gemma", True, IDS),  # scales embeddings
            ("opt", True, IDS),  # narrow embeddings
            ("llama", False, {"embed_tokens": [5], "lm_head": [5]}),
            ("llama", False, {"embed_tokens": [5, 9], "lm_head": [60]}),
            ("llama", True, {"embed_tokens": [5, 9], "lm_head": [5, 9]}),
            ("llama", True, {"embed_tokens": [5, 9], "lm_head": [60]}),
            ("llama", True, {"lm_head": [60, 3]}),
        ],
    )
    def test_a_step_there_and_a_step_here(self, family, tied, given, alone, tmp_path):
        from peft import LoraConfig as PeftLora
        from peft import PeftModel, TrainableTokensConfig, get_peft_model

        base = self.torch_base(family, tied)
        base.save_pretrained(tmp_path / "base")
        if alone and isinstance(given, dict):
            pytest.skip("TRAINABLE_TOKENS has one list of ids")
        if alone:
            config = TrainableTokensConfig(task_type="CAUSAL_LM", token_indices=given)
        else:
            targets = {"gpt2": ["c_attn"]}.get(family, ["q_proj"])
            config = PeftLora(
                task_type="CAUSAL_LM",
                r=2,
                target_modules=targets,
                trainable_token_indices=given,
                init_lora_weights=False,
            )
        theirs = get_peft_model(copy.deepcopy(base), config).eval()
        tokens, mask = rows("left")
        tokens[0, :3] = IDS
        tokens[1, -2:] = [5, 9]
        plain = torch_logits(base, tokens, mask)
        self.torch_step(theirs, tokens, mask, 0.05)
        theirs.save_pretrained(tmp_path / "theirs", save_embedding_layers=False)
        wanted = torch_logits(theirs, tokens, mask)
        assert np.abs(wanted - plain)[mask].max() > 1e-2

        loaded = load_checkpoint(tmp_path / "base")
        found = read_adapter_folder(tmp_path / "theirs")
        adapter = loaded.model.bind(found.config)
        params = load_adapter(found.folder, adapter)
        policy = loaded.model.policy(adapter=found.config)
        objective = functools.partial(log_likelihood, policy, frozen=loaded.params, tokens=tokens, mask=mask)
        gradient, ours = jax.jit(jax.grad(lambda p: objective(p), has_aux=True))(params)
        np.testing.assert_allclose(ours[mask], wanted[mask], atol=1e-5)

        stepped = jax.tree.map(lambda p, g: p + 0.05 * g, params, gradient)
        save_adapter(tmp_path / "ours", adapter, stepped, base_model=str(tmp_path / "base"))
        gradients = self.torch_step(theirs, tokens, mask, 0.05)
        for each in adapter.tokens:
            (name,) = [name for name in gradients if f".{each.name}." in name and "trainable" in name]
            np.testing.assert_allclose(
                gradient["lora"][each.name]["rows"], gradients[name], rtol=1e-3, atol=1e-4
            )
        with warnings.catch_warnings():
            warnings.simplefilter("error", RuntimeWarning)
            back = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / "ours").eval()
        wanted = torch_logits(back, tokens, mask)
        np.testing.assert_allclose(wanted[mask], torch_logits(theirs, tokens, mask)[mask], atol=1e-4)
        np.testing.assert_allclose(wanted[mask], jax.jit(objective)(stepped)[1][mask], atol=1e-5)

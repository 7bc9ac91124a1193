# SPDX-License-Identifier: Apache-2.0
"""What a family must do beyond its logits: a hydra reference, LoRA, a mesh. One tiny random model of each.

The columns of the table in docs/models.md: `tests/models/family_table.py`.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jrl.mesh import batch_sharding, make_mesh, tree_shardings
from jrl.models.adapters import LoraConfig
from jrl.models.adapters.peft_format import adapter_entries
from jrl.models.model import LanguageModel, make_model
from jrl.models.policy import init_reference
from jrl.typing import ModelInputs
from tests.models import family_cases, multimodal_cases, seq2seq_cases

ROWS, LENGTH = 8, 9
CASES = family_cases.CASES | multimodal_cases.CASES | seq2seq_cases.CASES
CONFIGS = {config.model_type: config for config in reversed(CASES.values())}
"""A config of every language model's family: its first case."""


@functools.cache
def model(family: str) -> tuple[LanguageModel, Any]:
    """The model of a family, and parameters of which none is at its initial value."""
    lm = make_model(CONFIGS[family])
    rng = np.random.default_rng(0)
    shapes = jax.eval_shape(lm.init, jax.random.key(0))
    # Scales are around 1, or around 0 where 1 is added.
    adds_one = lm.family.kind == "causal" and lm.config.norm.endswith("plus_one")
    middle = 0.0 if adds_one else 1.0
    return lm, jax.tree.map(
        lambda leaf: (0.1 * rng.normal(size=leaf.shape) + (middle if leaf.ndim == 1 else 0.0)).astype(
            np.float32
        ),
        shapes,
    )


def rows(family: str) -> ModelInputs:
    """Left-padded rows; of an encoder-decoder with a context, which is padded the other way round."""
    tokens, context = (jax.random.randint(jax.random.key(seed), (ROWS, LENGTH), 2, 97) for seed in (1, 2))
    mask = jnp.arange(LENGTH)[None] >= jnp.arange(ROWS)[:, None] % 4
    if model(family)[0].family.kind == "causal":
        return ModelInputs(tokens, mask)
    return ModelInputs(tokens, mask, None, context, mask[::-1, ::-1])


def whole_logits(lm: LanguageModel, params: Any, inputs: ModelInputs) -> Any:
    """Logits of the model itself, 0 at padding."""
    context: dict[str, Any] = {}
    if inputs.context_tokens is not None:
        context = dict(context_tokens=inputs.context_tokens, context_mask=inputs.context_mask)
    logits = lm.logits(params, inputs.tokens, inputs.attention_mask, **context)
    return jnp.where(inputs.attention_mask[..., None], logits, 0.0)


def hydra_report(family: str) -> tuple[float, float]:
    """Largest distance between logits of the hydra reference, the policy before training, and the model itself.

    Returns:
      It, and the model's largest logit.
    """
    lm, params = model(family)
    split: dict[str, Any] = dict(num_layers_unfrozen=1)
    policy = lm.policy(**split)

    @jax.jit
    def run(params: Any, inputs: ModelInputs) -> tuple[Any, Any]:
        trained, frozen = lm.split_params(params, **split)
        trunk = policy.trunk(frozen, inputs)

        def logits(own: Any) -> Any:
            features = policy.branch(own, frozen, trunk, inputs, None)
            found = policy.logits(own, frozen, features.policy)[..., : lm.vocab_size]
            return jnp.where(inputs.attention_mask[..., None], found, 0.0)

        own = whole_logits(lm, params, inputs)
        errors = [jnp.abs(logits(part) - own).max() for part in (init_reference(trained), trained)]
        return jnp.maximum(*errors), jnp.abs(own).max()

    error, largest = run(params, rows(family))
    return float(error), float(largest)


def lora_report(family: str) -> tuple[float, list[str], list[str]]:
    """An adapter of the family's default targets.

    Returns:
      Distance of a fresh one from the base model; adapted modules that no gradient reaches; names in PEFT's file.
    """
    lm, whole = model(family)
    config = LoraConfig(r=2)
    split: dict[str, Any] = dict(adapter=config)
    policy, inputs = lm.policy(**split), rows(family)
    params, frozen = lm.split_params(whole, key=jax.random.key(0), **split)

    @jax.jit
    def run(params: Any, frozen: Any, inputs: ModelInputs) -> tuple[Any, Any]:
        def logits(params: Any) -> Any:
            features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
            found = policy.logits(params, frozen, features.policy)[..., : lm.vocab_size]
            return jnp.where(inputs.attention_mask[..., None], found, 0.0)

        error = jnp.abs(logits(params) - whole_logits(lm, {**frozen}, inputs)).max()
        moved = jax.tree.map(lambda leaf: leaf + 0.1, params)
        return error, jax.grad(lambda params: jnp.square(logits(params)).sum())(moved)

    error, gradient = run(params, frozen, inputs)
    dead = [
        jax.tree_util.keystr(path)
        for path, leaf in jax.tree_util.tree_leaves_with_path(gradient["lora"])
        if not np.any(leaf)
    ]
    return float(error), dead, lora_names(family)


def lora_names(family: str) -> list[str]:
    """Names in PEFT's file of that adapter, for which nothing is compiled."""
    adapter = model(family)[0].bind(LoraConfig(r=2))
    assert adapter is not None
    return [entry.name for entry in adapter_entries(adapter)]


def mesh_error(family: str) -> float:
    """Largest distance between logits on a mesh (2, 2, 2) and on one device."""
    lm, params = model(family)
    inputs, mesh = rows(family), make_mesh(2, 2, 2)
    run = jax.jit(functools.partial(whole_logits, lm))
    wanted = np.asarray(run(params, inputs))
    placed = jax.device_put(params, tree_shardings(mesh, params)[0])
    spread = jax.device_put(inputs, batch_sharding(mesh))
    with jax.set_mesh(mesh):
        return float(np.abs(np.asarray(run(placed, spread)) - wanted).max())

# SPDX-License-Identifier: Apache-2.0
"""A reward model that trains: from a config to arrays on the mesh, and back to a folder."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jrl.data.tokenizer import check_vocabulary
from jrl.mesh import place, tree_shardings
from jrl.models.adapters.lora import Lora
from jrl.models.classifier import HEADS, Classifier, save_classifier
from jrl.models.classifier_adapter import (
    bind_classifier,
    load_classifier_adapter,
    save_classifier_adapter,
)
from jrl.models.classifier_start import Start, describe_start, load_start
from jrl.models.hub import name_of_base
from jrl.models.policy import ADAPTERS
from jrl.models.quantize import quantize_frozen
from jrl.models.scorer import make_scorer, split_scorer
from jrl.placement import fetch
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.adapters import AdapterPlan, plan_adapter
from jrl.trainers.loading.export import check_merge, whole_model
from jrl.trainers.loading.setup import (
    ADAPTER_STREAM,
    COMPUTE_DTYPES,
    INIT_STREAM,
    ModelBundle,
    check_what_trains,
    compute_dtype,
)
from jrl.trainers.loading.tokenizers import load_run_tokenizer
from jrl.typing import Frozen, Params, PRNGKey, Scorer


@dataclass(frozen=True)
class ScorerBundle(ModelBundle):
    """A reward model, ready to train.

    Attributes:
      model: Architecture and checkpoint names.
      scorer: The model as algorithms see it.
      fresh: Parts of the head that no checkpoint held.
    """

    model: Classifier
    scorer: Scorer
    fresh: tuple[str, ...]


def load_scorer(config: TRLConfig, mesh: Mesh, *, dropout: bool) -> ScorerBundle:
    """Loads tokenizer and model, splits what trains from what does not, and places both.

    A classifier with one label keeps its head; a language model gets a fresh one, drawn from `train.seed`.

    Args:
      config: The run's configuration.
      mesh: Where the arrays go.
      dropout: Whether the run draws dropout.
    Raises:
      ValueError: If configuration, tokenizer and model do not fit each other. What the model's own config tells is
        checked before any weight is read.
    """
    section, train = config.model, config.train
    tokenizer = load_run_tokenizer(config.model, config.tokenizer)
    plan = plan_adapter(section, tokenizer, dropout=dropout)
    described = describe_classifier(config, plan)
    check_vocabulary(tokenizer, described.vocab_size)
    adapter = bind_classifier(described, plan.config)
    scorer = make_run_scorer(config, described, adapter)
    root_key = jax.random.key(train.seed)
    start = load_start(
        plan.base,
        jax.random.fold_in(root_key, INIT_STREAM),
        changes=section.model_extra_configs,
        dtype=jnp.bfloat16 if adapter is not None and section.frozen_dtype != "float32" else jnp.float32,
        mesh=mesh,
    )
    params, fresh = start.params, start.fresh
    if adapter is not None and plan.continues:
        assert plan.folder is not None
        params, fresh = params | load_classifier_adapter(plan.folder, start.model, adapter), ()
    key = jax.random.fold_in(root_key, ADAPTER_STREAM)
    trainable, frozen = split_classifier(config, params, start.model, adapter, key=key, mesh=mesh)
    # A fresh adapter, or one of a folder of its own, is not on the mesh yet.
    trainable = place(trainable, tree_shardings(mesh, trainable)[0])
    return ScorerBundle(
        trainable,
        frozen,
        tokenizer,
        adapter,
        plan.base,
        list(start.replicated),
        padded_model(start, tokenizer),
        scorer,
        fresh,
    )


def describe_classifier(config: TRLConfig, plan: AdapterPlan) -> Classifier:
    """The model that the config tells of, which the run's configuration must fit: no weight is read.

    Args:
      config: The run's configuration.
      plan: Its adapter.
    Raises:
      ValueError: If it does not fit.
    """
    model, length = describe_start(plan.base, config.model.model_extra_configs), config.train.seq_length
    if length > model.max_positions:
        raise ValueError(
            f"`train.seq_length` is {length}, but the model has {model.max_positions} positions; shorten `seq_length` "
            "(the longest text) or bring a model with a longer context."
        )
    check_what_trains(config, plan, with_value_head=True)
    return model


def make_run_scorer(config: TRLConfig, model: Classifier, adapter: Lora | None) -> Scorer:
    """The model as algorithms see it, computed as a run's configuration asks for."""
    return make_scorer(
        model,
        num_layers_unfrozen=config.model.num_layers_unfrozen,
        adapter=adapter,
        compute_dtype=COMPUTE_DTYPES[compute_dtype(config)],
        remat=config.train.remat,
        attn_implementation=config.model.attn_implementation,
    )


def split_classifier(
    config: TRLConfig,
    params: Params,
    model: Classifier,
    adapter: Lora | None,
    *,
    key: PRNGKey,
    mesh: Mesh | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """(what trains, what does not, in as many bits as `model.frozen_dtype` says).

    Args:
      config: The run's configuration.
      params: The whole model, and perhaps an adapter that was loaded.
      model: What they belong to.
      adapter: What trains in the place of layers.
      key: For a fresh adapter.
      mesh: Where the parameters lie; None: on one device.
    """
    quantize = partial(quantize_frozen, kind=config.model.frozen_dtype, mesh=mesh)
    if adapter is not None:
        # First, so that what starts as a norm of frozen weights is that of those which are used.
        params = quantize(params, keep=(*HEADS, *ADAPTERS))
    trainable, frozen = split_scorer(
        params, model, num_layers_unfrozen=config.model.num_layers_unfrozen, adapter=adapter, key=key
    )
    return trainable, frozen if adapter is not None else quantize(frozen)


def padded_model(start: Start, tokenizer: Any) -> Classifier:
    """The model with the tokenizer's pad id in its config, by which others find the last token of a decoder's text."""
    model = start.model
    if model.family.kind == "encoder":
        # It reads the first token, and RoBERTa's positions begin after the pad id that it was made with.
        return model
    if tokenizer.pad_token_id == tokenizer.eos_token_id:
        warnings.warn(
            "The tokenizer's pad token is its EOS. jrl reads a score at the EOS that ends a text; transformers takes "
            "that EOS for padding and reads one token earlier. Give the tokenizer a pad token of its own "
            "(`tokenizer.tokenizer_extra_configs: {pad_token: ...}`) where the model shall be used there.",
            stacklevel=2,
        )
    hf_config = copy.deepcopy(model.hf_config)
    hf_config.pad_token_id = tokenizer.pad_token_id
    return replace(model, hf_config=hf_config)


def scorer_writer(
    model: Classifier,
    params: Params,
    frozen: Frozen,
    *,
    adapter: Lora | None,
    base_model: Any,
    tokenizer: Any,
    merge_adapter: bool,
) -> Callable[[Path], None]:
    """A function that writes the parameters as they are now: copied to the host here, written whenever called.

    Args:
      model: The classifier.
      params: What trains.
      frozen: The rest.
      adapter: What trains beside the frozen model; None: parts of the model itself do.
      base_model: The model without its adapter, as `model_path` names it.
      tokenizer: Stored beside.
      merge_adapter: Writes the whole model, with the adapter in its weights.
    Raises:
      ValueError: If an adapter is to be merged where there is none, or into int8 or nf4 weights.
    """
    check_merge(adapter, merge_adapter=merge_adapter)
    if adapter is not None and not merge_adapter:
        own = fetch(dict(params), everywhere=False)
        name = name_of_base(base_model)
        return lambda directory: save_classifier_adapter(
            directory, model, adapter, own, base_model=name, tokenizer=tokenizer
        )
    host = whole_model(params, frozen, adapter)
    return lambda directory: save_classifier(directory, model, host, tokenizer=tokenizer)

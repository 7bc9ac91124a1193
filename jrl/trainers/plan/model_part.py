# SPDX-License-Identifier: Apache-2.0
"""The models of a planned run as shapes: the one that learns, and the reference that it is held against."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax.sharding import AbstractMesh

from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.reward_model_config import RewardConfig
from jrl.mesh import experts_parts, platform
from jrl.models.classifier import Classifier
from jrl.models.classifier_adapter import bind_classifier
from jrl.models.config import TransformerConfig
from jrl.models.diffusion.folder import describe_diffusion_model
from jrl.models.diffusion.pipeline import DiffusionModel
from jrl.models.heads import HEADS
from jrl.models.model import CausalLM, LanguageModel
from jrl.models.policy import ADAPTERS, init_reference, make_policy
from jrl.models.quantize import quantize_frozen
from jrl.models.routing import check_expert_axis
from jrl.models.seq2seq_config import Seq2SeqConfig
from jrl.trainers.config.method import Footprint, entry_of
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trainers.loading.adapters import plan_adapter
from jrl.trainers.loading.denoiser import bind_denoiser, check_denoiser, make_denoiser, split_denoiser
from jrl.trainers.loading.scorer import describe_classifier, make_run_scorer, split_classifier
from jrl.trainers.loading.setup import (
    COMPUTE_DTYPES,
    check_what_trains,
    compute_dtype,
    described_model,
    router_options,
)
from jrl.typing import DenoiserFns, PolicyFns, Scorer


@dataclass(frozen=True)
class ModelShapes:
    """A model as shapes, and where it is.

    Attributes:
      name: Of its architecture.
      params: What trains.
      frozen: The rest.
      mesh: Where it would be.
      dtype: Of the computation.
    """

    name: str
    params: Any
    frozen: Any
    mesh: AbstractMesh
    dtype: Any

    @property
    def layers(self) -> LanguageShapes | None:
        """The layers of a language model, whose activations and traffic can be counted; None: it has no such."""
        return None


@dataclass(frozen=True)
class LanguageShapes(ModelShapes):
    """A language model as shapes, or the layers of a classifier.

    Attributes:
      lm: The model.
      policy: As algorithms see it.
      counted: The same, whose residuals are what a compiler keeps of activations.
      keeping: The same, which keeps every activation; `counted` itself without remat.
      depth: Layers that a gradient passes.
    """

    lm: LanguageModel
    policy: PolicyFns
    counted: PolicyFns
    keeping: PolicyFns
    depth: int

    @property
    def layers(self) -> LanguageShapes:
        """The model itself."""
        return self


@dataclass(frozen=True)
class ClassifierShapes(ModelShapes):
    """A classifier as shapes.

    Attributes:
      model: The model.
      scorer: As algorithms see it.
      decoder: Its layers, with its parameters; None: it is an encoder.
    """

    model: Classifier
    scorer: Scorer
    decoder: LanguageShapes | None

    @property
    def layers(self) -> LanguageShapes | None:
        """The layers of a decoder; an encoder has none that are counted."""
        return self.decoder


@dataclass(frozen=True)
class DiffusionShapes(ModelShapes):
    """A diffusion model as shapes.

    Attributes:
      model: The model, with shapes in the place of its weights.
      denoiser: As algorithms see it.
    """

    model: DiffusionModel
    denoiser: DenoiserFns

    def with_frozen(self, more: Mapping[str, Any]) -> DiffusionShapes:
        """Returns a copy with more that does not train, such as a reward's weights."""
        return replace(self, frozen={**self.frozen, **more})


def model_part(
    config: TRLConfig, mesh: AbstractMesh, footprint: Footprint, *, attends_as_configured: bool = False
) -> ModelShapes:
    """The model that a configuration trains.

    Args:
      config: The run's.
      mesh: Where it would be.
      footprint: Of the run: which heads the model has.
      attends_as_configured: Whether to take the kernel that `model.attn_implementation` finds for the mesh in force;
        False takes einsums, whose activations are counted from shapes.
    Raises:
      ValueError: If the model cannot be what the configuration asks for.
    """
    entry = entry_of(config.method)
    assert entry is not None, "it has a footprint"
    if not attends_as_configured:
        config = config.evolve(model={"attn_implementation": "einsum"})
    return _KINDS[entry.model](config, mesh, footprint)


def kept_reference(part: ModelShapes, footprint: Footprint) -> Any:
    """Parameters that the reference has for itself during training, as shapes; {} where it has none."""
    if footprint.reference is None:
        return {}
    if footprint.reference == "whole":
        return part.params
    if footprint.reference == "branch":
        return jax.eval_shape(init_reference, part.params)
    own = model_part(footprint.reference, part.mesh, Footprint())
    return {**own.params, **own.frozen}


def _language_part(config: TRLConfig, mesh: AbstractMesh, footprint: Footprint) -> LanguageShapes:
    adapter = plan_adapter(config.model, None)
    check_what_trains(config, adapter, with_value_head=footprint.value_head)
    lm = described_model(config, adapter)
    check_expert_axis(lm.config, experts_parts(mesh))
    value_head = config.model.value_head if footprint.value_head else None
    lm = replace(lm, value_head=value_head, num_q_heads=footprint.num_q_heads)
    split: dict[str, Any] = {"num_layers_unfrozen": config.model.num_layers_unfrozen}
    if adapter.config is not None:
        split["adapter"] = adapter.config
    dtype = COMPUTE_DTYPES[compute_dtype(config)]
    make = partial(
        lm.policy,
        compute_dtype=dtype,
        attn_implementation=config.model.attn_implementation,
        **router_options(config.method),
        **split,
    )
    shapes = _shapes(lm, split, config.model.frozen_dtype)
    depth = _depth(lm, config, adapts="adapter" in split)
    return LanguageShapes(
        lm.family.model_type,
        *shapes,
        mesh,
        dtype,
        lm,
        *_policies(make, mesh, remat=config.train.remat),
        depth,
    )


def _classifier_part(config: TRLConfig, mesh: AbstractMesh, footprint: Footprint) -> ClassifierShapes:
    del footprint
    assert isinstance(config.method, RewardConfig), "the only algorithm of such models"
    plan = plan_adapter(config.model, None, dropout=not config.method.disable_dropout)
    model = describe_classifier(config, plan)
    adapter = bind_classifier(model, plan.config)

    def init(key: Any) -> Any:
        return split_classifier(config, model.init(key), model, adapter, key=key)

    dtype = COMPUTE_DTYPES[compute_dtype(config)]
    scorer = make_run_scorer(config, model, adapter)
    params, frozen = jax.eval_shape(init, _key())
    shared = model.family.model_type, params, frozen, mesh, dtype
    if not isinstance(model.config, TransformerConfig):
        return ClassifierShapes(*shared, model, scorer, None)
    make = partial(
        make_policy,
        model.config,
        num_layers_unfrozen=config.model.num_layers_unfrozen,
        adapter=adapter,
        compute_dtype=dtype,
        attn_implementation=config.model.attn_implementation,
    )
    lm = CausalLM(model.hf_config, model.family, model.config)
    depth = _depth(lm, config, adapts=adapter is not None)
    decoder = LanguageShapes(*shared, lm, *_policies(make, mesh, remat=config.train.remat), depth)
    return ClassifierShapes(*shared, model, scorer, decoder)


def _diffusion_part(config: TRLConfig, mesh: AbstractMesh, footprint: Footprint) -> DiffusionShapes:
    del footprint
    method = config.method
    has_reference = isinstance(method, DDPOConfig) and method.beta_kl > 0
    check_denoiser(config.model)
    model = describe_diffusion_model(config.model.model_path)
    lora = bind_denoiser(model, config.model.peft_config)

    def init(weights: Any, key: Any) -> Any:
        weighed = replace(model, weights=weights)
        return split_denoiser(config, weighed, lora, key=key, with_reference=has_reference)

    params, frozen = jax.eval_shape(init, dict(model.weights), _key())
    dtype = COMPUTE_DTYPES[compute_dtype(config)]
    denoiser = make_denoiser(config, model, lora)
    return DiffusionShapes(model.name, params, frozen, mesh, dtype, model, denoiser)


def _policies(
    make: Callable[..., PolicyFns], mesh: AbstractMesh, *, remat: bool
) -> tuple[PolicyFns, PolicyFns, PolicyFns]:
    """A model as a run computes it, as its activations are counted, and as it keeps every one of them.

    XLA for GPUs computes again what costs little, as a shared body is told to, and over `fsdp` layers one by one, too
    (`jrl.models.layer_loop`): so there the activations are counted as if layers shared one.
    """
    with jax.sharding.use_abstract_mesh(mesh):
        on_gpus = mesh.abstract_device is not None and platform() == "gpu"
    count = partial(make, share_layers=True if on_gpus else None)
    keeping = count(remat=False)
    return make(remat=remat), count(remat=True) if remat else keeping, keeping


def _depth(lm: LanguageModel, config: TRLConfig, *, adapts: bool) -> int:
    """Layers that a gradient passes: those that train, all under an adapter."""
    unfrozen = config.model.num_layers_unfrozen
    if not adapts and unfrozen != -1:
        return max(unfrozen, 1)
    return lm.config.num_layers + (
        lm.config.num_encoder_layers if isinstance(lm.config, Seq2SeqConfig) else 0
    )


def _shapes(lm: LanguageModel, split: dict[str, Any], kind: str) -> tuple[Any, Any]:
    """(params, frozen) of a model as shapes, rounded as the run would round them."""

    def init(key: Any) -> Any:
        params = lm.init(key)
        if "adapter" in split:
            params = quantize_frozen(params, kind=kind, keep=(*HEADS, *ADAPTERS))
        params, frozen = lm.split_params(params, key=key, **split)
        return params, frozen if "adapter" in split else quantize_frozen(frozen, kind=kind)

    shapes: tuple[Any, Any] = jax.eval_shape(init, _key())
    return shapes


def _key() -> Any:
    """Shape of a random key."""
    return jax.eval_shape(partial(jax.random.key, 0))


_KINDS: Mapping[str, Callable[[TRLConfig, AbstractMesh, Footprint], ModelShapes]] = {
    "language": _language_part,
    "classifier": _classifier_part,
    "diffusion": _diffusion_part,
}

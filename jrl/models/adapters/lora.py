# SPDX-License-Identifier: Apache-2.0
"""LoRA, rsLoRA and DoRA: which modules are adapted, and how their matrices reach the projections.

Adapters are kept as PEFT keeps them, one entry a module of the checkpoint: A (r, in) and B (out, r), so that files
are read and written as they lie. What a projection of jrl needs is cut from them when a program is traced: the
family's own table says which parameters a module holds and in which order its outputs lie.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.token_rows import TokenRows
from jrl.models.adapters.whole_modules import WholeModule
from jrl.models.families.base import Shape
from jrl.models.layers import adapted_kernel
from jrl.models.products import loop_weights
from jrl.models.rounding import round_adapters, round_kernels
from jrl.typing import Params, PRNGKey

_ABOVE = int(np.iinfo(np.int32).max)
# What acts before the layers counts as the first of them, what acts after them is above all.
_OUTSIDE_LAYERS: Mapping[str, int] = {
    **dict.fromkeys(
        ("embed", "embed_in", "embed_norm", "layer_embed", "layer_embed_in", "layer_embed_norm", "position"),
        0,
    ),
    "decoder_relative_bias": 0,
    **dict.fromkeys(("final_norm", "embed_out", "lm_head"), _ABOVE),
}


@dataclass(frozen=True)
class AdaptedProjection:
    """A projection of an adapted module.

    Attributes:
      path: Of the projection among the parameters, ("layers_0", "attn", "q") or, of all experts,
        ("layers_0", "experts", "gate").
      inputs: Sizes of the axes it contracts.
      outputs: Sizes of the axes it makes.
      rows: For each output, flattened, its row in the checkpoint's weight; −1 where it only pads the vocabulary.
    """

    path: tuple[str, ...]
    inputs: Shape
    outputs: Shape
    rows: np.ndarray


@dataclass(frozen=True)
class AdaptedModule:
    """A linear map of the checkpoint with an adapter, or a parameter that stacks those of all experts of a layer.

    Attributes:
      name: In an adapter's file, "transformer.h.0.attn.c_attn".
      size_in: Inputs.
      size_out: Outputs.
      rank: Of the update.
      scale: s of W + s·B·A.
      parts: The projections it holds.
      inputs_first: The checkpoint stores the weight as (in, out).
      experts: E, how many maps are stacked, each with an update of its own; None: it is one map.
      swapped: A reads what the maps make, and B makes what they read: so PEFT takes parameters that lie (E, in, out)
        without a mark of it.
    """

    name: str
    size_in: int
    size_out: int
    rank: int
    scale: float
    parts: tuple[AdaptedProjection, ...]
    inputs_first: bool
    experts: int | None = None
    swapped: bool = False

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of A and B, as PEFT keeps them: (r, in) and (out, r); of experts (E·r, in) and (out, r·E)."""
        ranks = self.rank * (self.experts or 1)
        return {"A": (ranks, self.size_in), "B": (self.size_out, ranks)}


@partial(jax.tree_util.register_dataclass, data_fields=("trained", "leaves"), meta_fields=())
@dataclass(frozen=True)
class LoopAdapters:
    """Adapters as a loop over tokens reads them.

    Attributes:
      trained: As they are trained.
      leaves: `Lora.variables` of them.
    """

    trained: Params
    leaves: dict[str, Any]


@dataclass(frozen=True)
class Lora:
    """A LoRA configuration, bound to one model.

    Attributes:
      config: The configuration.
      modules: What it adapts.
      tokens: Rows of tokens that train beside.
      whole: Modules whose copies train beside.
    """

    config: LoraConfig
    modules: tuple[AdaptedModule, ...]
    tokens: tuple[TokenRows, ...] = ()
    whole: tuple[WholeModule, ...] = ()
    name: ClassVar[str] = "lora"

    @property
    def beside(self) -> tuple[TokenRows | WholeModule, ...]:
        """Rows and modules that train beside the updates of maps, and take the place of the base model's."""
        return (*self.tokens, *self.whole)

    @property
    def tops(self) -> list[tuple[str, str]]:
        """Module, and first step of the path of a parameter, of all that it touches."""
        maps = [(module.name, part.path[0]) for module in self.modules for part in module.parts]
        return maps + [(each.name, top) for each in self.beside for top in each.tops]

    @property
    def first_layer(self) -> int:
        """Index of the lowest layer that is adapted; a number above all layers where only what follows them is.

        Raises:
          ValueError: If a module belongs to no layer, and is not known to lie below or above them.
        """
        return min(_layer(*each) for each in self.tops)

    @property
    def first_whole_layer(self) -> int:
        """Index of the lowest layer with parameters that train whole; a number above all layers where none has."""
        names = [top for each in self.whole for top in each.tops if top.startswith("layers_")]
        return min((_layer("", name) for name in names), default=_ABOVE)

    def init(self, key: PRNGKey, params: Params) -> dict[str, Any]:
        """Fresh adapters, float32: B is 0, so that the policy starts as the base model to the bit.

        Args:
          key: For A.
          params: The base model: DoRA's norms start as those of its weights.
        """
        maps = {
            module.name: _init_module(self.config, module, jax.random.fold_in(key, index), params)
            for index, module in enumerate(self.modules)
        }
        return maps | {each.name: each.init(params) for each in self.beside}

    def variables(self, adapters: Params | LoopAdapters) -> dict[str, Any]:
        """The collection "lora" that layers read: one entry a projection or table, nested as the parameters are."""
        if isinstance(adapters, LoopAdapters):
            return adapters.leaves
        tree: dict[str, Any] = {}
        for each in self.beside:
            for path, leaf in each.leaves(adapters[each.name]).items():
                _place(tree, path, leaf)
        for module in self.modules:
            weights = adapters[module.name]
            if module.experts is not None:
                for part in module.parts:
                    _place(tree, part.path, _expert_leaf(module, module.experts, part, weights))
                continue
            # The scale goes into B in float32, once and not for every token.
            b = module.scale * weights["B"].T
            for part in module.parts:
                leaf = {"a": weights["A"].T.reshape(*part.inputs, module.rank)}
                leaf["b"] = _outputs(b, part).reshape(module.rank, *part.outputs)
                if "magnitude" in weights:
                    leaf["magnitude"] = _outputs(weights["magnitude"][None], part).reshape(part.outputs)
                if self.config.lora_dropout:
                    leaf["rate"] = self.config.lora_dropout
                _place(tree, part.path, leaf)
        return tree

    def overlay(self, params: Params, adapters: Params | LoopAdapters) -> dict[str, Any]:
        """The model's parameters, those of modules that train whole from the adapter."""
        found = dict(params)
        trained = adapters.trained if isinstance(adapters, LoopAdapters) else adapters
        for each in self.whole:
            found = each.overlay(found, trained[each.name])
        return found

    def loop_weights(self, weights: Params, num_rows: int, num_tokens: int, *, dtype: Any) -> Params:
        """`PolicyFns.loop_weights`: A and B are scaled, turned and rounded once, and not for every token.

        DoRA reads the norms of kernels for every token: they stay as they are trained.
        """
        if self.config.use_dora:
            return weights
        found = dict(loop_weights(weights, num_rows, num_tokens))
        if self.name in weights:
            trained = found[self.name]
            found[self.name] = LoopAdapters(trained, round_adapters(self.variables(trained), dtype))
        return found

    def rounded(self, weights: Params, dtype: Any) -> Params:
        """`PolicyFns.rounded`. DoRA's norms are of the kernels as they are trained."""
        return weights if self.config.use_dora else round_kernels(weights, dtype)

    def merge(self, params: Params, adapters: Params) -> dict[str, Any]:
        """The whole model with W + s·B·A in place of every adapted W, computed in float32, in the dtype of W.

        Raises:
          ValueError: If one end of a tied table trains: the whole model has no second one.
        """
        untied = [each.name for each in self.beside if each.untied]
        if untied:
            raise ValueError(
                f"`merge_adapter` must be False where {untied[0]} trains apart: this model's head is tied to its "
                "embedding, and the merged one would have two tables. Give both the same "
                "`trainable_token_indices`, or write the adapter."
            )

        def merged(module: AdaptedModule, kernel: Array, leaf: Mapping[str, Array]) -> Array:
            if module.experts is None:
                return adapted_kernel(kernel, leaf).astype(kernel.dtype)
            return (kernel.astype(jnp.float32) + _update(module, leaf)).astype(kernel.dtype)

        found = self._mapped(merged, params, adapters)
        for each in self.beside:
            found = each.merge(found, adapters[each.name])
        return found

    def unmerge(self, params: Params, adapters: Params) -> dict[str, Any]:
        """Undoes `merge`, up to rounding.

        Raises:
          ValueError: Under DoRA, whose merged weight has lost the norm it had before, and where rows or modules were
            replaced.
        """
        if self.beside:
            raise ValueError(
                f"`unmerge_adapter` cannot undo {self.beside[0].name}, which the adapter replaced: keep the base "
                "parameters that `merge_adapter` was given; it leaves them as they are."
            )
        if self.config.use_dora:
            raise ValueError(
                "`unmerge_adapter` cannot undo DoRA, which replaces the norms of the weights: keep the base parameters "
                "that `merge_adapter` was given; it leaves them as they are."
            )

        def unmerged(module: AdaptedModule, kernel: Array, leaf: Mapping[str, Array]) -> Array:
            return (kernel.astype(jnp.float32) - _update(module, leaf)).astype(kernel.dtype)

        return self._mapped(unmerged, params, adapters)

    def _mapped(self, change: Any, params: Params, adapters: Params) -> dict[str, Any]:
        variables = self.variables(adapters)
        tree = jax.tree.map(lambda x: x, dict(params))
        for module in self.modules:
            for part in module.parts:
                *parents, last = (*part.path, "kernel") if module.experts is None else part.path
                node, leaf = _find(tree, parents), _find(variables, part.path)
                node[last] = change(module, node[last], leaf)
        return tree


def _expert_leaf(
    module: AdaptedModule, count: int, part: AdaptedProjection, weights: Mapping[str, Array]
) -> dict[str, Array]:
    """What `ExpertsMlp` reads. In A the ranks of an expert lie side by side, in B the experts of a rank."""
    a = weights["A"].reshape(count, module.rank, module.size_in)
    b = module.scale * weights["B"].reshape(module.size_out, module.rank, count).T
    read, made = (b, a) if module.swapped else (a, b)
    return {"a": read.swapaxes(1, 2), "b": _outputs(made, part)}


def _update(module: AdaptedModule, leaf: Mapping[str, Array]) -> Array:
    """s·B·A of a projection, in the layout of its kernel."""
    if module.experts is None:
        return jnp.tensordot(leaf["a"], leaf["b"], 1)
    return jnp.einsum("eir,ero->eio", leaf["a"], leaf["b"])


def _layer(module: str, name: str) -> int:
    """Layer of a parameter, by the first step of its path: the first one stands for everything below all."""
    match = re.fullmatch(r"layers_(\d+)", name)
    if match is None and name not in _OUTSIDE_LAYERS:
        raise ValueError(
            f"peft_config: `target_modules`: {module} holds the parameter {name!r}, which is neither a layer's "
            f"nor one of {', '.join(_OUTSIDE_LAYERS)}: whether it lies below or above the layers is not known."
        )
    return int(match[1]) if match else _OUTSIDE_LAYERS[name]


def _outputs(matrix: Float[Array, "*r out"], part: AdaptedProjection) -> Float[Array, "*r part"]:
    """The columns of a part; 0 where it pads the vocabulary."""
    start, rows = int(part.rows[0]), part.rows
    if np.array_equal(rows, np.arange(start, start + len(rows))):
        return matrix[..., start : start + len(rows)]
    padded = jnp.pad(matrix, (*((0, 0) for _ in matrix.shape[1:]), (0, 1)))
    return padded[..., np.where(rows < 0, matrix.shape[-1], rows)]


def _init_module(config: LoraConfig, module: AdaptedModule, key: PRNGKey, params: Params) -> dict[str, Array]:
    a_key, b_key = jax.random.split(key)
    shape = module.shapes["A"]
    if config.init_lora_weights == "gaussian":
        a = jax.random.normal(a_key, shape) / module.rank
    else:
        a = _uniform(a_key, shape)
    shape = module.shapes["B"]
    b = _uniform(b_key, shape) if config.init_lora_weights is False else jnp.zeros(shape)
    found = {"A": a, "B": b}
    if config.use_dora:
        magnitude = jnp.zeros(module.size_out)
        for part in module.parts:
            kernel = _find(params, part.path)["kernel"].astype(jnp.float32)
            norms = jnp.sqrt(jnp.square(kernel).sum(axis=tuple(range(len(part.inputs))))).reshape(-1)
            real = part.rows >= 0
            magnitude = magnitude.at[part.rows[real]].set(norms[real])
        found["magnitude"] = magnitude
    return found


def _uniform(key: PRNGKey, shape: Shape) -> Array:
    bound = shape[1] ** -0.5
    return jax.random.uniform(key, shape, minval=-bound, maxval=bound)


def _find(tree: Mapping[str, Any], path: Sequence[str]) -> Any:
    for name in path:
        tree = tree[name]
    return tree


def _place(tree: dict[str, Any], path: tuple[str, ...], leaf: Any) -> None:
    for name in path[:-1]:
        tree = tree.setdefault(name, {})
    tree[path[-1]] = leaf

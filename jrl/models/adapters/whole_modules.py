# SPDX-License-Identifier: Apache-2.0
"""Modules of a language model whose copies train whole beside an adapter: PEFT's `modules_to_save`.

The base model keeps its own, which the reference reads.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
from flax import traverse_util
from jaxtyping import Array

from jrl.models.adapters.memory_names import name_in_memory
from jrl.models.adapters.token_rows import EMBED, EMBEDDING, HEAD, TokenRows, Vocabulary
from jrl.models.families.base import Entry, Shape
from jrl.models.layers import INPUTS, OUTPUTS, WHOLE
from jrl.typing import Params

_EXPERTS = re.compile(r"/experts/(gate|up|down)(_bias)?$")


@dataclass(frozen=True)
class WholeModule:
    """A module whose copy trains.

    Attributes:
      name: In an adapter's file, "model.norm".
      entries: Its tensors, as the model's table has them.
      shapes: Path → shape of its parameters.
      end: Of a table of embeddings the end at which the copy acts, "inputs" or "outputs"; None: the copy takes the
        place of the parameters.
      untied: The end is one of a table that is both.
    """

    name: str
    entries: tuple[Entry, ...]
    shapes: Mapping[str, Shape]
    end: str | None
    untied: bool

    @property
    def tops(self) -> tuple[str, ...]:
        """Names of parameters where it acts, first steps of paths."""
        if self.end is not None:
            return (EMBED,) if self.end == INPUTS else (HEAD,)
        return tuple(dict.fromkeys(path.split("/")[0] for path in self.shapes))

    def init(self, params: Params) -> dict[str, Any]:
        """A copy of the base model's parameters, float32, by the names they have there."""

        def copy(path: str) -> Array:
            found: Any = params
            for name in path.split("/"):
                found = found[name]
            # A copy, for what trains is donated; first as an array, for a frozen kernel may be rounded.
            return jnp.array(found.astype(jnp.float32), copy=True)

        return dict(traverse_util.unflatten_dict({path: copy(path) for path in self.shapes}, sep="/"))

    def leaves(self, weights: Params) -> dict[tuple[str, str], Any]:
        """Leaves that a table reads, by the path in its collection; none where the copy takes the parameters' place."""
        return {} if self.end is None else {(EMBED, self.end): {WHOLE: weights[EMBED]["embedding"]}}

    def overlay(self, params: Params, weights: Params) -> dict[str, Any]:
        """The model's parameters with the copy in their place, but for a table that has ends."""
        return dict(params) if self.end is not None else _overlaid(params, weights)

    def merge(self, params: Params, weights: Params) -> dict[str, Any]:
        """The whole model with the copy in it, in the dtype of what it replaces."""
        return _overlaid(params, weights, keep_dtype=True)


def bind_whole_modules(
    names: Sequence[str],
    modules: Mapping[str, tuple[Entry, ...]],
    shapes: Mapping[str, Shape],
    vocabulary: Vocabulary,
    taken: Sequence[str],
    rows: Sequence[TokenRows],
) -> tuple[WholeModule, ...]:
    """The modules that `modules_to_save` names, found as PEFT 0.21 finds them: by the end of their name, dot or not.

    Args:
      names: Ends of names.
      modules: Of the model: name → tensors below it.
      shapes: Of its parameters, by path.
      vocabulary: Of the model.
      taken: Names of maps that have an adapter.
      rows: Rows of tokens that train.
    Raises:
      ValueError: If a name fits nothing, or something that cannot be kept whole.
    """
    embedding, head = (
        entry.name.removesuffix(".weight") for entry in (vocabulary.embedding, vocabulary.head)
    )
    if vocabulary.is_tied:
        tensor = Entry(
            f"{head}.weight", (EMBEDDING,), vocabulary.embedding.transform, vocabulary.embedding.shape
        )
        modules = {**modules, head: (tensor,)}
    for name in names:
        if not any(module.endswith(name) for module in modules):
            ends = sorted({module.rsplit(".", 1)[-1] for module in modules} - {"model"})
            raise ValueError(
                f"peft_config: `modules_to_save` names {name!r}, which must be the end of a module's name; modules end "
                f"in {', '.join(end for end in ends if not end.isdigit())}."
            )
    # Rows of a tied table, which bear the embedding's name, are the head's too.
    with_rows = {each.name for each in rows} | {head for each in rows if OUTPUTS in each.ends}
    chosen = [module for module in modules if module.endswith(tuple(names))]
    found = []
    for module in chosen:
        below = [each for each in chosen if each.startswith(f"{module}.")]
        adapted = [each for each in taken if f"{each}.".startswith(f"{module}.")]
        reason = None
        if below:
            reason = f"names {below[0]}, too, which is part of it: name one of them"
        elif adapted:
            reason = f"{adapted[0]} has an adapter: leave it out of `target_modules` and `target_parameters`"
        elif any(_EXPERTS.search(path) for entry in modules[module] for path in entry.paths):
            reason = "it holds experts, whose copies jrl does not keep: adapt them by `target_parameters`"
        elif len({name_in_memory(entry.name) for entry in modules[module]}) < len(modules[module]):
            reason = (
                "transformers holds several tensors of it as one, which jrl does not keep: name other modules"
            )
        elif module in with_rows:
            reason = "rows of it train by `trainable_token_indices`: take one of the two"
        elif module == embedding and module == "shared":
            reason = "T5 embeds by other modules than it, which keep the base model's table"
        if reason is not None:
            raise ValueError(f"peft_config: `modules_to_save` fits {module}, and {reason}.")
        paths = [path for entry in modules[module] for path in entry.paths]
        end = {embedding: INPUTS, head: OUTPUTS}.get(module) if paths == [EMBEDDING] else None
        of_module = {path: shapes[path] for path in paths}
        found.append(
            WholeModule(module, modules[module], of_module, end, end is not None and vocabulary.is_tied)
        )
    return tuple(found)


def _overlaid(params: Params, weights: Params, *, keep_dtype: bool = False) -> dict[str, Any]:
    """A tree with another one's leaves in the place of its own."""
    tree = dict(params)
    for name, value in weights.items():
        old = tree[name]
        if isinstance(value, Mapping):
            tree[name] = _overlaid(old, value, keep_dtype=keep_dtype)
        else:
            tree[name] = value.astype(old.dtype) if keep_dtype else value
    return tree

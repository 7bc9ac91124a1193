# SPDX-License-Identifier: Apache-2.0
"""Rows of the embedding, and of the head, that train for some tokens alone: PEFT's `trainable_token_indices`.

As in PEFT, a row that trains takes the place of the base model's: it is no difference to it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array

from jrl.models.adapters.config import LoraConfig
from jrl.models.families import find_family
from jrl.models.families.base import Entry, Shape
from jrl.models.layers import INPUTS, OUTPUTS
from jrl.typing import Params

EMBED, HEAD = "embed", "lm_head"
EMBEDDING = f"{EMBED}/embedding"


class Vocabulary(NamedTuple):
    """The modules of a checkpoint that know tokens.

    Attributes:
      embedding: Entry of the table of embeddings.
      head: Entry of the head's weight; of a tied head, which no file has, what it would be.
      is_tied: The table is the head too.
      has_bias: The head has a bias.
      size: Real entries of the vocabulary.
    """

    embedding: Entry
    head: Entry
    is_tied: bool
    has_bias: bool
    size: int

    @classmethod
    def of(cls, entries: Sequence[Entry], config: Any, model_type: str) -> Vocabulary:
        """Vocabulary of a model.

        Args:
          entries: Its table of tensors.
          config: Its architecture, of a decoder or an encoder and decoder.
          model_type: Names the family.
        """
        embedding = next(entry for entry in entries if entry.paths == (EMBEDDING,))
        untied = find_family(model_type).entries(replace(config, tie_embeddings=False))
        head = next(entry for entry in untied if entry.paths == (f"{HEAD}/kernel",))
        has_bias = any(entry.paths == (f"{HEAD}/bias",) for entry in entries)
        return cls(embedding, head, config.tie_embeddings, has_bias, config.vocab_size)


@dataclass(frozen=True)
class TokenRows:
    """Rows of some tokens that train.

    Attributes:
      name: Of their module in an adapter's file, "model.embed_tokens".
      ids: Of the tokens, one a row.
      width: D.
      top: Parameters that they stand in for: "embed" or "lm_head".
      ends: Where they act: "inputs", "outputs".
      untied: They act at one end of a table that is both.
    """

    name: str
    ids: tuple[int, ...]
    width: int
    top: str
    ends: tuple[str, ...]
    untied: bool

    @property
    def shape(self) -> Shape:
        """(rows, D)."""
        return len(self.ids), self.width

    @property
    def tops(self) -> tuple[str, ...]:
        """Names of parameters where they act, first steps of paths."""
        return (EMBED,) if INPUTS in self.ends else (HEAD,)

    def init(self, params: Params) -> dict[str, Array]:
        """The rows of the base model, float32."""
        ids = jnp.asarray(self.ids)
        if self.top == EMBED:
            return {"rows": params[EMBED]["embedding"][ids].astype(jnp.float32)}
        return {"rows": params[HEAD]["kernel"][:, ids].T.astype(jnp.float32)}

    def leaves(self, weights: Params) -> dict[tuple[str, str], Any]:
        """Leaves of the collection that layers read, by their path in it."""
        leaf = {"rows": weights["rows"], "ids": jnp.asarray(self.ids)}
        return {(self.top, end): leaf for end in self.ends}

    def merge(self, params: Params, weights: Params) -> dict[str, Any]:
        """The whole model with these rows in it."""
        ids, own = jnp.asarray(self.ids), dict(params[self.top])
        if self.top == EMBED:
            own["embedding"] = own["embedding"].at[ids].set(weights["rows"].astype(own["embedding"].dtype))
        else:
            own["kernel"] = own["kernel"].at[:, ids].set(weights["rows"].T.astype(own["kernel"].dtype))
        return {**params, self.top: own}


def bind_token_rows(
    config: LoraConfig, names: Sequence[str], vocabulary: Vocabulary
) -> tuple[TokenRows, ...]:
    """The rows that `trainable_token_indices` names in a model, found as PEFT 0.21 finds them.

    A list means the embedding, and with a tied head the head too; so does a dict that names both with the same ids.
    With other ids, or the head alone, each end of a tied table has rows of its own.

    Args:
      config: The configuration.
      names: Of all modules of the model.
      vocabulary: Of the model.
    Raises:
      ValueError: If a name or an id does not fit the model.
    """
    given = config.trainable_token_indices
    if given is None:
        return ()
    embedding, head = (
        entry.name.removesuffix(".weight") for entry in (vocabulary.embedding, vocabulary.head)
    )
    named = given if isinstance(given, Mapping) else {embedding: given}
    found: dict[str, tuple[int, ...]] = {}
    for name, ids in named.items():
        fitting = [each for each in (*names, head) if each.endswith(name)]
        if not fitting or not set(fitting) <= {embedding, head}:
            raise ValueError(
                f"peft_config: `trainable_token_indices` names {name!r}, which must be the end of {embedding} or "
                f"{head}; it is that of {', '.join(dict.fromkeys(fitting[:5])) or 'no module'}."
            )
        found |= dict.fromkeys(fitting, ids)
        if max(ids) >= vocabulary.size:
            raise ValueError(
                f"peft_config: `trainable_token_indices` must be below the {vocabulary.size} entries of the "
                f"vocabulary, got {max(ids)}. jrl adds no rows to a model: resize its embedding first, and save it."
            )
    if head in found and vocabulary.has_bias:
        raise ValueError(
            f"peft_config: `trainable_token_indices` must leave out {head}, which has a bias: PEFT would drop it."
        )
    width, tied = vocabulary.embedding.shape[1], vocabulary.is_tied
    if tied and embedding in found and found.get(head, found[embedding]) == found[embedding]:
        return (TokenRows(embedding, found[embedding], width, EMBED, (INPUTS, OUTPUTS), False),)
    rows = []
    if embedding in found:
        rows.append(TokenRows(embedding, found[embedding], width, EMBED, (INPUTS,), tied))
    if head in found:
        rows.append(TokenRows(head, found[head], width, EMBED if tied else HEAD, (OUTPUTS,), tied))
    return tuple(rows)

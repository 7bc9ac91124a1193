# SPDX-License-Identifier: Apache-2.0
"""Methods of a torch module that scripts call on a model: parameters by name, the value head, a forward pass.

Tensors are copies under the names of the checkpoint: torch's where torch is loaded, NumPy's elsewhere. Writing to them
changes nothing here; a trainer trains.
"""

from __future__ import annotations

import abc
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

from jrl.compilation import COMPILER_OPTIONS
from jrl.interop import UntrainedModel, as_torch, is_tensor, warn_ignored
from jrl.losses.sft import nll
from jrl.models.model import CausalLM, LanguageModel
from jrl.models.positions import check_length
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trl.named_tensors import Held
from jrl.trl.own_losses import token_loss_of
from jrl.typing import Frozen, ModelInputs, Params, PolicyFns

_PREFIX = "pretrained_model."
_HEAD = "v_head."


@dataclass(frozen=True)
class ForwardOutput:
    """A forward pass of a model without a value head.

    Attributes:
      logits: (B L V).
      loss: Mean negative log-likelihood of the labels, each under the position before it; None without labels.
    """

    logits: Any
    loss: Any = None


@dataclass(frozen=True)
class Tensors:
    """Tensors as attributes, such as `v_head.summary.weight`."""

    weight: Any
    bias: Any


@dataclass(frozen=True)
class Dropout:
    """The dropout that a script asked for before the value head; none is drawn.

    Attributes:
      p: Its rate.
    """

    p: float


class ValueHeadView:
    """A value head as TRL's attribute of this name.

    Args:
      tensors: Name, as in the model's file → tensor.
      dropout: See there.

    Attributes:
      dropout: The rate that was asked for, without effect.
    """

    def __init__(self, tensors: Mapping[str, Any], dropout: Dropout) -> None:
        self._tensors, self.dropout = tensors, dropout

    @property
    def summary(self) -> Tensors:
        """Linear layer of the head: weight (1 H) and bias (1).

        Raises:
          AttributeError: If the head has two layers.
        """
        names = [f"{_HEAD}summary.{part}" for part in ("weight", "bias")]
        if any(name not in self._tensors for name in names):
            raise AttributeError(
                f"this value head has two layers, as trlX's: `get_parameter` has {', '.join(self._tensors)}."
            )
        return Tensors(*(self._tensors[name] for name in names))


class ModuleSurface(abc.ABC):
    """Methods and attributes of a torch module, for a model of jrl's.

    Attributes:
      with_value_head: Whether a script expects a value head.
      summary_dropout_prob: Rate of dropout before the value head that a script asked for, and that has no effect.
    """

    with_value_head: bool
    summary_dropout_prob: float

    @abc.abstractmethod
    def _weights(self) -> PolicyTrainer | UntrainedModel:
        """Model that computes: a trainer's, or one that is loaded for this purpose."""

    @abc.abstractmethod
    def _held(self) -> Held:
        """Tensors that the model holds now."""

    def eval(self) -> Self:
        """The model itself: it has no modes, a trainer draws dropout by its own rule."""
        return self

    def train(self, mode: bool = True) -> Self:
        """Returns the model unchanged; modes have no meaning here."""
        del mode
        return self

    def to(self, *place: Any, **options: Any) -> Self:
        """Returns the model unchanged: arrays stand where the mesh puts them."""
        del place, options
        return self

    def gradient_checkpointing_enable(self, **options: Any) -> None:
        """No effect, said once: a trainer's configuration decides (`gradient_checkpointing`)."""
        del options
        warn_ignored("gradient_checkpointing_enable", "the trainer's `gradient_checkpointing` decides")

    @property
    def pretrained_model(self) -> Self:
        """The model below its value head: the same handle."""
        return self

    @property
    def device(self) -> Any:
        """Device of ids for `generate`: the host."""
        torch = sys.modules.get("torch")
        return "cpu" if torch is None else torch.device("cpu")

    @property
    def v_head(self) -> ValueHeadView:
        """The value head, where there is one. All processes must ask for it.

        Raises:
          AttributeError: If there is none.
        """
        held = self._held()
        names = [name for name in held.shapes if name.startswith(_HEAD)]
        if not names:
            raise AttributeError(f"{type(self).__name__} has no value head: load it with its class for PPO.")
        found = {name: _parameter(array) for name, array in held.tensors(names).items()}
        return ValueHeadView(found, Dropout(self.summary_dropout_prob))

    def state_dict(self) -> dict[str, Any]:
        """Name → tensor, a copy: the model, its value head, and an adapter under the names of PEFT's file.

        All processes must call it; each gets the whole model.
        """
        return {name: as_torch(array) for name, array in self._held().tensors().items()}

    def named_parameters(self) -> Iterator[tuple[str, Any]]:
        """(name, copy) of each, one by one; with a value head `pretrained_model.` stands before the model's names.

        torch's `requires_grad` says of each whether it trains. All processes must go through all of them.
        """
        held = self._held()
        trained = held.trained
        for name in held.shapes:
            array = held.tensors([name])[name]
            prefix = _PREFIX if self.with_value_head and not name.startswith(_HEAD) else ""
            yield prefix + name, _parameter(array) if name in trained else as_torch(array)

    def parameters(self) -> Iterator[Any]:
        """The tensors alone."""
        return (tensor for _, tensor in self.named_parameters())

    def get_parameter(self, target: str) -> Any:
        """Returns a tensor by its name. All processes must ask for it.

        Raises:
          AttributeError: If there is none of this name.
        """
        held, name = self._held(), target.removeprefix(_PREFIX)
        if name not in held.shapes:
            raise AttributeError(f"the model has no parameter {target!r}.")
        array = held.tensors([name])[name]
        return _parameter(array) if name in held.trained else as_torch(array)

    def num_parameters(self, only_trainable: bool = False) -> int:
        """Numbers in all tensors, an adapter's and a value head's among them; none is read.

        Args:
          only_trainable: Only in what trains.
        """
        held = self._held()
        names = held.trained if only_trainable else held.shapes
        return sum(math.prod(held.shapes[name]) for name in names)

    def __call__(
        self,
        input_ids: Any,
        attention_mask: Any = None,
        labels: Any = None,
        decoder_input_ids: Any = None,
    ) -> Any:
        """A forward pass, for looking: no gradient flows.

        Args:
          input_ids: Ids (B L).
          attention_mask: 1 on real ones; default: all are.
          labels: Ids to be predicted, −100 where none is; they are shifted here.
          decoder_input_ids: Of an encoder-decoder: the decoder's ids.
        Returns:
          With a value head (logits (B L V), loss or None, values (B L)), else a `ForwardOutput`.
        Raises:
          ValueError: If a row is longer than the context of a model that knows no further positions.
        """
        loaded = self._weights()
        rows = _ids(input_ids), _mask(input_ids, attention_mask)
        if decoder_input_ids is None:
            check_rows(loaded.lm, *rows)
            inputs = ModelInputs(*rows)
        else:
            inputs = ModelInputs(_ids(decoder_input_ids), _mask(decoder_input_ids, None), None, *rows)
        with jax.set_mesh(loaded.mesh):
            logits, values = _forward(loaded.lenient_policy, loaded.params, loaded.frozen, inputs)
        logits = logits[..., : loaded.lm.vocab_size]
        values = values if self.with_value_head else None
        loss = None if labels is None else token_loss_of(logits, _ids(labels), nll)
        found = [None if x is None else as_torch(x) for x in (logits, loss, values)]
        return tuple(found) if self.with_value_head else ForwardOutput(found[0], found[1])


def check_rows(lm: LanguageModel, ids: Any, mask: Any) -> None:
    """Refuses rows beyond the positions that a decoder has.

    Args:
      lm: Architecture.
      ids: (B L).
      mask: True on real tokens.
    Raises:
      ValueError: If a row is too long.
    """
    if isinstance(lm, CausalLM):
        check_length(lm.config, ids.shape, mask)


@partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS)
def _forward(policy: PolicyFns, params: Params, frozen: Frozen, inputs: ModelInputs) -> tuple[Any, Any]:
    """(logits, values or None)."""
    features = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None)
    values = policy.heads(params, features.value).get("values")
    return policy.logits(params, frozen, features.policy), values


def _parameter(array: np.ndarray) -> Any:
    """A copy that torch takes for something that trains."""
    found = as_torch(array)
    return found.requires_grad_(True) if is_tensor(found) else found


def _ids(given: Any) -> jax.Array:
    return jnp.asarray(np.asarray(given), jnp.int32)


def _mask(ids: Any, given: Any) -> jax.Array:
    return jnp.ones(np.shape(ids), bool) if given is None else jnp.asarray(np.asarray(given) != 0)

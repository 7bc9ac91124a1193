# SPDX-License-Identifier: Apache-2.0
"""Operations and bytes that a benchmark's work needs, by formula, and the least time they can take.

Counted are matrix products (two operations for each multiplication with its addition) and attention over all keys of a
row, masked ones included; a sampled token has only those up to its own. Norms, activations, softmax and draws are left
out, and so is what is computed twice to save memory: a floor says what the work needs, not what a program does. Bytes
are those of weights, gradients, optimizer moments and the filled part of the key/value cache, each as often as it must
pass through the processor; activations are left out. So both are lower bounds, and `floor_seconds` is one on the
machine's own rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jrl.bench.measure import Machine
from jrl.bench.models import Shapes, Subject
from jrl.models.entries_io import initial_shapes
from jrl.models.policy import branch_start, split_params

_ADAM_BYTES = 7 * 4
"""A step of Adam reads parameter, gradient and two moments, and writes all but the gradient, in float32."""
_LAYER = "layers_{}"


@dataclass(frozen=True)
class Phase:
    """A part of the work that no other part can overlap with.

    Attributes:
      flops: Floating-point operations.
      num_bytes: Bytes moved between memory and processor.
    """

    flops: float
    num_bytes: float

    def floor_seconds(self, machine: Machine) -> float:
        """The longer of computing and moving."""
        return max(self.flops / machine.matrix_rate, self.num_bytes / machine.bandwidth)

    def times(self, count: int) -> Phase:
        """Returns the phase repeated `count` times."""
        return Phase(count * self.flops, count * self.num_bytes)


@dataclass(frozen=True)
class _Matrices:
    """Weights of matrix products, as numbers of multiplications a position.

    Attributes:
      own: Of trainable weights.
      fixed: Of frozen ones.
    """

    own: float = 0.0
    fixed: float = 0.0

    @property
    def forward(self) -> float:
        """Operations a position."""
        return 2 * (self.own + self.fixed)

    @property
    def backward(self) -> float:
        """Operations a position: the input's gradient, and where it trains the weight's."""
        return 2 * (2 * self.own + self.fixed)

    @property
    def size(self) -> float:
        """Numbers that a pass reads."""
        return self.own + self.fixed


class Counts:
    """Operations and bytes of a model's passes.

    Args:
      subject: The model and how it trains.

    Raises:
      ValueError: If a layer has something else than plain attention.
    """

    def __init__(self, subject: Subject) -> None:
        lm, options = subject.lm, subject.options
        if not all(layer.has_keys_alone for layer in lm.config.layers):
            raise ValueError(
                f"`jrl bench` counts the operations of plain attention, and {lm.family.model_type} has layers of "
                "another kind or size: a share of the peak would be wrong. Take a model of another family."
            )
        self.config, self.itemsize = lm.config, jnp.dtype(options.compute_dtype).itemsize
        shapes = initial_shapes(lm.init)
        adapter = lm.bind(options.split["adapter"])
        trainable, _ = jax.eval_shape(
            lambda params: split_params(
                params,
                lm.config,
                num_layers_unfrozen=options.num_layers_unfrozen,
                adapter=adapter,
                key=jax.random.key(0),
            ),
            shapes,
        )
        self.num_trainable = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainable))
        self.cut = branch_start(lm.config, options.num_layers_unfrozen, 0, adapter) or 0
        self.layers = [
            self._layer(shapes[_LAYER.format(index)], index, _LAYER.format(index) in trainable)
            for index in range(lm.config.num_layers)
        ]
        adapters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainable.get("lora", {})))
        self.layers[-1] = _Matrices(self.layers[-1].own + adapters, self.layers[-1].fixed)
        head = "embed" if lm.config.tie_embeddings else "lm_head"
        size = lm.config.padded_vocab_size * lm.feature_width
        self.head = _Matrices(own=size) if head in trainable else _Matrices(fixed=size)
        # The default value head: D to 2D to 1.
        self.value_head = _Matrices(own=2 * lm.feature_width**2 + 2 * lm.feature_width)

    def _layer(self, tree: Any, index: int, trains: bool) -> _Matrices:
        """Matrices of a block: every kernel, of experts only those that a token visits."""
        experts, total = self.config.layers[index].experts, 0.0
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            names = [str(part.key) for part in path if isinstance(part, jax.tree_util.DictKey)]
            if experts is not None and "experts" in names and leaf.ndim == 3:
                total += math.prod(leaf.shape) * experts.per_token / experts.count
            elif names[-1] == "kernel":
                total += math.prod(leaf.shape)
        return _Matrices(own=total) if trains else _Matrices(fixed=total)

    def attention(self, queries: int, keys: float) -> float:
        """Operations of one layer's scores and weighted sums."""
        return 4.0 * queries * keys * self.config.num_heads * self.config.head_dim

    def decode(self, shapes: Shapes) -> tuple[Phase, ...]:
        """Prompt and completion of `shapes.rows` rows: (prefill, all further tokens)."""
        rows = shapes.rows
        weights = sum(layer.size for layer in self.layers) + self.head.size
        column = 2 * rows * self.config.num_kv_heads * self.config.head_dim * len(self.layers)

        def step(tokens: int, columns: float) -> Phase:
            flops = sum(
                rows * tokens * layer.forward + self.attention(rows * tokens, columns)
                for layer in self.layers
            )
            return Phase(flops + rows * self.head.forward, self.itemsize * (weights + column * columns))

        # The cache is as long as a row from the start, but the work needs what is filled: P + 1 columns after the
        # first of the further tokens, P + R - 1 after the last.
        filled = shapes.prompt + shapes.response / 2
        return step(shapes.prompt, shapes.prompt), step(1, filled).times(shapes.response - 1)

    def score(self, shapes: Shapes) -> tuple[Phase, ...]:
        """Log-probabilities under policy and reference, and values, of `shapes.rows` rows."""
        rows, length, window = shapes.rows, shapes.length, shapes.rows * shapes.response
        trunk = self._forward(0, self.cut, rows, length)
        branch = self._forward(self.cut, len(self.layers), rows, length)
        heads = window * (2 * self.head.forward + self.value_head.forward)
        weights = sum(layer.size * (1 if index < self.cut else 2) for index, layer in enumerate(self.layers))
        return (Phase(trunk + 2 * branch + heads, self.itemsize * (weights + 2 * self.head.size)),)

    def update(self, shapes: Shapes) -> tuple[Phase, ...]:
        """A PPO update: the frozen trunk once, then every epoch's passes, then its optimizer steps."""
        rows, passes = shapes.rows, shapes.epochs * -(-shapes.rows // shapes.minibatch_size)
        below = self.layers[: self.cut]
        trunk = Phase(
            self._forward(0, self.cut, rows, shapes.length),
            self.itemsize * sum(layer.size for layer in below) * -(-rows // shapes.minibatch_size),
        )
        trained = self._training(self.cut, shapes.epochs * rows, shapes, passes, value_head=True)
        return trunk, trained, Phase(0.0, _ADAM_BYTES * self.num_trainable).times(shapes.ppo_steps)

    def step(self, shapes: Shapes, *, rows_per_item: int) -> tuple[Phase, ...]:
        """Phases of an optimizer step on `shapes.rows` items of one row (SFT) or two rows (DPO) each."""
        rows, passes = shapes.rows * rows_per_item, shapes.rows // shapes.step_minibatch_size
        below = self._forward(0, self.cut, rows, shapes.length)
        trained = self._training(self.cut, rows, shapes, passes, value_head=False)
        return (
            Phase(below, self.itemsize * passes * sum(layer.size for layer in self.layers[: self.cut])),
            trained,
            Phase(0.0, _ADAM_BYTES * self.num_trainable),
        )

    def _forward(self, start: int, stop: int, rows: int, length: int) -> float:
        return sum(
            rows * (length * layer.forward + self.attention(length, length))
            for layer in self.layers[start:stop]
        )

    def _training(self, start: int, rows: int, shapes: Shapes, passes: int, *, value_head: bool) -> Phase:
        """Forward and backward of the layers from `start` on and the heads."""
        length, window, layers = shapes.length, rows * shapes.response, self.layers[start:]
        flops = sum(
            rows * (length * (layer.forward + layer.backward) + 3 * self.attention(length, length))
            for layer in layers
        )
        for head in (self.head, self.value_head) if value_head else (self.head,):
            flops += window * (head.forward + head.backward)
        weights = sum(layer.size for layer in layers) + self.head.size
        # Read forwards and backwards, and the gradient written.
        return Phase(flops, passes * (2 * self.itemsize * weights + 4 * self.num_trainable))


def total(phases: tuple[Phase, ...]) -> Phase:
    """All phases as one sum."""
    return Phase(sum(phase.flops for phase in phases), sum(phase.num_bytes for phase in phases))


def floor_seconds(phases: tuple[Phase, ...], machine: Machine) -> float:
    """The least time that the phases take one after another."""
    return sum(phase.floor_seconds(machine) for phase in phases)

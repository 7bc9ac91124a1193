# SPDX-License-Identifier: Apache-2.0
"""One body for equal layers: a program whose size, and time to compile, does not grow with the depth of the model.

Parameters stay one entry a layer. Inside a program those of equal layers are stacked, split over the mesh as they are,
and `jax.lax.scan` runs one body over them. On TPUs what is frozen is not stacked, which would be a second copy of it:
each round picks its own. Layers are equal where their options are, and the shapes, dtypes and kinds
of all their variables, adapters included; where kinds of layers alternate, one body holds a whole period of them.

Every platform has its form (`jrl.models.products`): CPUs and GPUs run layers one by one, as a GPU would copy what goes
into the stacks and comes out of them. Figures:
`docs/internals/0005-decoder-by-kinds.md`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jaxtyping import Array, Float

from jrl.mesh import constrain_parameters, is_split_over_fsdp, path_name, platform
from jrl.models.products import MIXED_VALUES, products
from jrl.models.rounding import round_kernels

Stream = Float[Array, "B Q D"]
DROPOUT = "dropout"
DEAR = frozenset({"ragged_dot_general", "ffi_call", "sort", "top_k"})
"""Primitives whose results are kept for a backward pass that computes a layer's others again, beside products with
weights and attention's output: kernels and sorts."""


class Run(NamedTuple):
    """Layers that share a body.

    Attributes:
      start: The first of them.
      period: Layers of the body.
      repeats: How often it runs; 1 where a layer stands alone.
    """

    start: int
    period: int
    repeats: int


def find_runs(kinds: Sequence[Hashable]) -> list[Run]:
    """Cuts a sequence of layers into runs, so that there are as few bodies as can be.

    Args:
      kinds: What each layer is; equal ones can share a body.
    """
    count = len(kinds)
    # Whole numbers in their place: all are compared with all.
    numbers: dict[Hashable, int] = {}
    kinds = [numbers.setdefault(kind, len(numbers)) for kind in kinds]
    # Bodies, then runs, of the best cut of all layers from each one on.
    best: list[tuple[int, int, list[Run]]] = [(0, 0, [])]
    for start in reversed(range(count)):
        cuts = []
        for period in range(1, (count - start) // 2 + 1):
            for repeats in range(2, _repeats(kinds, start, period) + 1):
                bodies, runs, rest = best[count - start - period * repeats]
                cuts.append((bodies + period, runs + 1, [Run(start, period, repeats), *rest]))
        bodies, runs, rest = best[-1]
        cuts.append((bodies + 1, runs + 1, [Run(start, 1, 1), *rest]))
        best.append(min(cuts, key=lambda cut: cut[:2]))
    return best[-1][2]


def _repeats(kinds: Sequence[Hashable], start: int, period: int) -> int:
    """How often the layers from `start` on repeat with this period."""
    stop = start + period
    while stop < len(kinds) and kinds[stop] == kinds[stop - period]:
        stop += 1
    return (stop - start) // period


def run_blocks(
    blocks: Sequence[nn.Module],
    call: Callable[..., Any],
    x: Stream,
    *,
    alike: Callable[[int], tuple[Hashable, nn.Module]],
    share: bool | None,
    remat: bool,
    num_frozen: int = 0,
    given: Sequence[tuple[Any, ...]] | None = None,
) -> Stream:
    """The residual stream after blocks that are called one after the other.

    Dropout draws other numbers where bodies are shared, by the same law: a layer's key is made of its name as before,
    and what the parts of a layer make of it is the same in all layers of a body.

    Args:
      blocks: Bound to their variables.
      call: Calls one of them, with the stream and what is given to it alone. What else it reads is the same for all.
      x: The stream before them.
      alike: Of a block's index: what must be equal beside its variables, and a module like it that is bound to nothing
        and recomputes nothing.
      share: Equal blocks share a body; None: where that is the platform's form.
      remat: The backward pass recomputes what a shared body does in each round; the blocks say it for themselves.
      num_frozen: So many of the first blocks have parameters without a gradient; adapters may have one.
      given: Further arguments of `call` for each block, trees of arrays of the same shapes for all; None: none.
    """
    share = products().shares_layers if share is None else share
    alone = gathering_again(call, remat=remat)
    given = [()] * len(blocks) if given is None else given
    if not share:
        for block, own in zip(blocks, given, strict=True):
            x = alone(block, x, *own)
        return x
    variables = [block.variables for block in blocks]
    for run in find_runs([(alike(index)[0], _kind(tree)) for index, tree in enumerate(variables)]):
        if run.repeats == 1:
            x = alone(blocks[run.start], x, *given[run.start])
            continue
        body: list[Any] = [alike(run.start + offset)[1] for offset in range(run.period)]
        stop = run.start + run.period * run.repeats
        equal = [slice(run.start + offset, stop, run.period) for offset in range(run.period)]
        lying = [variables[each] for each in equal]
        frozen = None
        if stop <= num_frozen and platform() == "tpu":
            frozen = [[tree["params"] for tree in trees] for trees in lying]
            lying = [[{**tree, "params": {}} for tree in trees] for trees in lying]
        stacked = [_stack([_rounded(tree, body[0].dtype) for tree in trees]) for trees in lying]
        keys = [_stack([_rngs(block) for block in blocks[each]]) for each in equal]
        owned = [_stack(given[each]) for each in equal]
        x = _scan(body, call, x, stacked, keys, owned, frozen, repeats=run.repeats, remat=remat)
    return x


def gathering_again(call: Callable[..., Any], *, remat: bool) -> Callable[..., Any]:
    """A call of a block that stands alone, whose backward pass gathers kernels over `fsdp` anew.

    XLA makes one gather of two of the same kernel, and so would hold all layers whole from the forward pass to the
    backward pass, however many devices there are. What is dear (`_is_dear`) is kept, not computed again.

    A CPU is spared: its compiler does not order a program for memory, and would compute all layers again at once.

    Args:
      call: Of a block, and of what else it reads.
      remat: The block computes all of itself again, and gathers for it.
    """
    if remat or not is_split_over_fsdp() or platform() == "cpu":
        return call
    return nn.remat(call, policy=_is_dear)


def _scan(
    body: Sequence[nn.Module],
    call: Callable[..., Any],
    x: Stream,
    variables: Sequence[Any],
    keys: Sequence[dict[str, Array]],
    owned: Sequence[Any],
    frozen: Sequence[Sequence[Any]] | None,
    *,
    repeats: int,
    remat: bool,
) -> Stream:
    """Runs the modules of a body over what is stacked for each of them, and over parameters that each round picks.

    They are picked inside of what the backward pass computes again, so that no round's are kept for it.
    """

    def step(x: Stream, each: Any) -> tuple[Stream, None]:
        round_index, *stacks = each
        for offset, (module, own, rngs, given) in enumerate(zip(body, *stacks, strict=True)):

            def one(
                x: Stream,
                own: Any,
                rngs: Any,
                given: Any,
                index: Array,
                module: Any = module,
                offset: int = offset,
            ) -> Any:
                if frozen is not None:
                    own = _with_picked(own, frozen[offset], index, module.dtype)
                return nn.apply(call, module)(own, x, *given, rngs=rngs)

            # Between the rounds of a loop the compiler merges nothing, so that it need not be kept from it.
            again = jax.checkpoint(one, prevent_cse=False, policy=None if remat else _is_dear)
            x = again(x, own, rngs, given, round_index)
        return x, None

    return jax.lax.scan(step, x, (jnp.arange(repeats), variables, keys, owned))[0]


def _with_picked(variables: Any, frozen: Sequence[Any], index: Array, dtype: Any) -> Any:
    """Variables with the parameters of one layer, copied from where they lie, and rounded before they are gathered."""
    picked = constrain_parameters(jax.lax.switch(index, [lambda tree=tree: tree for tree in frozen]))
    rounded = _rounded({**variables, "params": picked}, dtype)
    return {**rounded, "params": constrain_parameters(rounded["params"])}


def _is_dear(primitive: Any, *_: Any, **options: Any) -> bool:
    """True where a primitive's results are kept for the backward pass, which computes all others again.

    Of layers one by one the compiler itself computes again what costs little, where nothing keeps it from that. What
    one loop leaves for another it keeps as it is told: without this, GPT-2's update takes 1.8 times the temporary
    memory on a TPU.
    Scores are not kept, whose number grows with the square of the length.
    """
    name = primitive.name
    if name == "name":
        return bool(options["name"] == MIXED_VALUES)
    if name == "dot_general":
        _, (batch_axes, _) = options["dimension_numbers"]
        return not batch_axes
    return name in DEAR or name.startswith("dot_product_attention")


def _kind(variables: Any) -> Hashable:
    leaves, structure = jax.tree.flatten(variables)
    return structure, tuple((np.shape(leaf), jnp.result_type(leaf)) for leaf in leaves)


def _rounded(variables: Any, dtype: Any) -> Any:
    """Variables with kernels as products read them: under bfloat16 their stack, and its gradient, take half the bytes.

    DoRA's norms are of the kernels as they are trained.
    """
    if any("magnitude" in path_name(path) for path, _ in jax.tree_util.tree_leaves_with_path(variables)):
        return variables
    return {**variables, "params": round_kernels(variables["params"], dtype)}


def _rngs(block: nn.Module) -> dict[str, Array]:
    return {DROPOUT: block.make_rng(DROPOUT)} if block.has_rng(DROPOUT) else {}


def _stack(trees: Sequence[Any]) -> Any:
    """Trees of equal structure as one, whose leaves have a leading axis."""

    def stack(*leaves: Any) -> Array:
        if not jnp.issubdtype(jnp.result_type(leaves[0]), jnp.floating):
            return jnp.stack(leaves)
        stacked: Array = _stacking.bind(*leaves)
        return stacked

    return jax.tree.map(stack, *trees)


def _stack_leaves(*leaves: Array) -> Array:
    """`jnp.stack`, each layer's part written at one of `_numbers`."""
    stacked = jax.lax.empty((len(leaves), *leaves[0].shape), leaves[0].dtype)
    for number, leaf in zip(_numbers(len(leaves)), leaves, strict=True):
        stacked = jax.lax.dynamic_update_index_in_dim(stacked, leaf, number, axis=0)
    return stacked


def _stack_shape(*leaves: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((len(leaves), *leaves[0].shape), leaves[0].dtype)


def _unstack(gradient: Float[Array, "N ..."], *leaves: Any) -> list[Array]:
    """Each layer's part of a stack's gradient, picked by one of `_numbers`.

    XLA picks it inside of the kernels that read it: those of the optimizer.
    """
    return [
        jax.lax.dynamic_index_in_dim(gradient, number, keepdims=False) for number in _numbers(len(leaves))
    ]


def _numbers(count: int) -> Array:
    """0, 1, 2 … behind a barrier to the compiler.

    By constants no two of the kernels that write or read a stack would be equal, and XLA would compile one for each
    layer.
    """
    return jax.lax.optimization_barrier(jnp.arange(count, dtype=jnp.uint32))


def _stack_batch(leaves: Sequence[Any], axes: Sequence[Any]) -> tuple[Array, int]:
    size = next(leaf.shape[axis] for leaf, axis in zip(leaves, axes, strict=True) if axis is not None)
    fronted = [batching.bdim_at_front(leaf, axis, size) for leaf, axis in zip(leaves, axes, strict=True)]
    return _stacking.bind(*fronted), 1


_stacking = Primitive("stack_layers")
"""`jnp.stack` with a transpose of its own. `jax.custom_vjp` would end forward mode."""
_stacking.def_impl(jax.jit(_stack_leaves))
_stacking.def_abstract_eval(_stack_shape)
mlir.register_lowering(_stacking, mlir.lower_fun(_stack_leaves, multiple_results=False))
ad.deflinear2(_stacking, _unstack)
batching.primitive_batchers[_stacking] = _stack_batch

# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts in place of the MLP: every token visits a few of many MLPs, gated or not.

Tokens are sorted by expert and multiplied group by group, so that the work grows with the experts that a token visits
and not with those there are. No expert has a capacity, so no token is dropped, and what a token gets does not depend on
the others.

Router as in Mixtral (Jiang et al. 2024, arXiv:2401.04088) and Qwen3 (arXiv:2505.09388): softmax, then the k largest. Or
as in DeepSeek-V3 (arXiv:2412.19437, section 2.1.2): sigmoids, groups, and a bias that steers the choice alone. Left
out: noise in the router.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jaxtyping import Array, Float, Int

from jrl.mesh import partition_spec
from jrl.models.config import ClampedGlu, Experts, TransformerConfig
from jrl.models.layers import (
    ACTIVATIONS,
    Norm,
    Projection,
    as_row,
    gathered,
    stored_kernel,
    waiting_for,
)
from jrl.models.products import Kernel, grouped_dot
from jrl.models.quantize import QuantizedKernel
from jrl.models.routing import CHOSEN, REPLAYED, ROUTED, SHARES

PARTS = ("gate", "up", "down")


class AdaptedKernels(NamedTuple):
    """Matrices of all experts with a low-rank update each: W + a·b, which is never made."""

    kernels: Float[Array, "E K N"]
    a: Float[Array, "E K r"]
    b: Float[Array, "E r N"]


ExpertKernels = Float[Array, "E K N"] | AdaptedKernels
"""Matrices of all experts, with or without updates."""


class ExpertsMlp(nn.Module):
    """Routes every token to its experts and adds up their answers by the router's weights.

    Frozen experts may be rounded; see `jrl.models.quantize`. Where the variables hold an adapter of a projection
    (collection "lora": `a` (E, in, r) and `b` (E, r, out), with the scale inside), it is added expert by expert.

    Attributes:
      config: The decoder.
      experts: How many experts there are, and how they are chosen.
      dtype: Of the computation; the router and the sum of the answers are float32.
    """

    config: TransformerConfig
    experts: Experts
    dtype: Any

    @nn.compact
    def __call__(
        self, x: Float[Array, "B Q D"], stream: Float[Array, "B Q D"] | None = None
    ) -> Float[Array, "B Q D"]:
        """Output of the experts that read x, to be added to the residual stream, which some routers read; None: x."""
        config, experts = self.config, self.experts
        router = Projection(
            (config.width,), (experts.count,), experts.use_bias, config.init_range, jnp.float32, name="router"
        )
        bias = None
        if experts.scoring == "sigmoid" and not experts.scale_inputs:
            bias = self.param("choice_bias", nn.initializers.zeros_init(), (experts.count,), jnp.float32)
        record: Array | None = self.get_variable(REPLAYED, CHOSEN)
        read = x
        if experts.scaled_router:
            norm = Norm(config.norm, config.norm_epsilon, (config.width,), jnp.float32, name="router_norm")
            read = norm(x if stream is None else stream) * config.width**-0.5
        scores = router(read)
        weights, chosen = route(scores, experts, bias, record)
        if experts.scaled_router:
            own = self.param("answer_scale", nn.initializers.ones_init(), (experts.count,), jnp.float32)
            weights = weights * own.astype(jnp.float32)[chosen]
        self._note(CHOSEN, chosen)
        self._note(SHARES, shares(scores, experts))
        read_width = experts.latent_width or config.width
        wide = (experts.count, read_width, experts.width)
        shapes = {"gate": wide, "up": wide, "down": (experts.count, experts.width, read_width)}
        parts = PARTS if experts.gated else PARTS[1:]
        kernels = {name: stored_kernel(self, shapes[name], config.init_range, name) for name in parts}
        adapters: dict[str, Mapping[str, Array] | None] = {
            name: self.get_variable("lora", name) for name in parts
        }
        biases = None
        if experts.use_bias:
            sizes = (("gate", experts.width), ("up", experts.width), ("down", config.width))
            biases = tuple(
                self.param(f"{name}_bias", nn.initializers.zeros_init(), (experts.count, size), jnp.float32)
                for name, size in sizes
            )
        x, answers = x.astype(self.dtype), self._answers
        if experts.latent_width is not None:
            x = self._project(config.width, read_width, "latent_down")(x)
        if any(isinstance(kernel, QuantizedKernel) for kernel in kernels.values()):
            # Expanded where they are used and once more for the gradient, as those of a `Projection`.
            kernels, answers = waiting_for(x, kernels), jax.checkpoint(answers)
        y = answers(x, weights, chosen, kernels, adapters, biases)
        return y if experts.latent_width is None else self._project(read_width, config.width, "latent_up")(y)

    def _project(self, size_in: int, size_out: int, name: str) -> Projection:
        config = self.config
        return Projection((size_in,), (size_out,), config.mlp_bias, config.init_range, self.dtype, name=name)

    def _note(self, name: str, value: Array) -> None:
        """Hands on what the router did, to who asks for the collection; else it costs nothing."""
        if not self.is_initializing():
            self.sow(ROUTED, name, value, init_fn=lambda: None, reduce_fn=lambda _, newest: newest)

    def _answers(
        self,
        x: Float[Array, "B Q D"],
        weights: Float[Array, "B Q k"],
        chosen: Int[Array, "B Q k"],
        kernels: dict[str, Kernel],
        adapters: Mapping[str, Mapping[str, Array] | None],
        biases: tuple[Array, ...] | None,
    ) -> Float[Array, "B Q D"]:
        clamped, activation = self.experts.clamped_glu, ACTIVATIONS[self.config.activation]
        gated = plain_glu(activation) if clamped is None else clamped_glu(clamped)
        whole = {
            name: _with_update(kernel, adapters[name], self.dtype)
            for name, kernel in gathered(self, kernels).items()
        }
        gate, up, down = whole.get("gate"), whole["up"], whole["down"]
        glu = gated if self.experts.gated else lambda _, up: activation(up)
        mix = partial(mix_experts, glu=glu, scale_inputs=self.experts.scale_inputs)
        if biases is None:
            return _on_shards(mix, x, weights, chosen, gate, up, down).astype(self.dtype)
        gate_bias, up_bias, down_bias = (bias.astype(self.dtype) for bias in biases)
        wide = gate_bias[:, None], up_bias[:, None]
        y = _on_shards(mix, x, weights, chosen, gate, up, down, *wide)
        # Once for all parts of the width, whose answers are added up; a gather of rows would move them between devices.
        shares = jnp.einsum("bqke,bqk->bqe", jax.nn.one_hot(chosen, self.experts.count), weights)
        shift = jnp.einsum(
            "bqe,ed->bqd", shares, down_bias.astype(jnp.float32), precision=jax.lax.Precision.HIGHEST
        )
        return (y + shift).astype(self.dtype)


def _with_update(kernel: Kernel, leaf: Mapping[str, Array] | None, dtype: Any) -> ExpertKernels:
    whole = kernel.astype(dtype)
    return whole if leaf is None else AdaptedKernels(whole, leaf["a"].astype(dtype), leaf["b"].astype(dtype))


def plain_glu(activation: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    """act(gate) · up."""
    return lambda gate, up: activation(gate) * up


def clamped_glu(clamped: ClampedGlu) -> Callable[[Array, Array], Array]:
    """The gate that `ClampedGlu` describes."""

    def glu(gate: Array, up: Array) -> Array:
        gate, up = jnp.minimum(gate, clamped.limit), jnp.clip(up, -clamped.limit, clamped.limit)
        return gate * jax.nn.sigmoid(clamped.sharpness * gate) * (up + 1)

    return glu


def route(
    scores: Float[Array, "B Q E"],
    experts: Experts,
    bias: Float[Array, "E"] | None = None,
    record: Int[Array, "B Q k"] | None = None,
) -> tuple[Float[Array, "B Q k"], Int[Array, "B Q k"]]:
    """The experts that each token visits, best first, and how much the answer of each counts.

    Args:
      scores: Of the router, float32; between equal ones the first expert wins.
      experts: How they are chosen, and what is done with their weights.
      bias: Added to the sigmoids for the choice alone, so it has no gradient; None: nothing is.
      record: Experts to visit in the place of the best ones; negative where the scores decide. None: everywhere.
    Returns:
      Weights, positive, and ids of the experts.
    """
    if experts.scoring == "softmax":
        softmax = jax.nn.softmax(scores, axis=-1)
        weights, chosen = jax.lax.top_k(softmax, experts.per_token)
        if record is not None:
            chosen = jnp.where(record >= 0, record, chosen)
            weights = jnp.take_along_axis(softmax, chosen, axis=-1)
    else:
        sigmoids = jax.nn.sigmoid(scores)
        # Without a bias the scores themselves: far out their sigmoids are equal.
        wanted = jax.lax.stop_gradient(scores if bias is None else sigmoids + as_row(bias, scores.ndim))
        _, chosen = jax.lax.top_k(_in_best_groups(wanted, experts), experts.per_token)
        if record is not None:
            chosen = jnp.where(record >= 0, record, chosen)
        weights = jnp.take_along_axis(sigmoids, chosen, axis=-1)
    if experts.renormalize:
        # Sigmoids may all be 0; a softmax is not.
        least = 1e-20 if experts.scoring == "sigmoid" else None
        total = weights.sum(axis=-1, keepdims=True)
        weights = weights / (total if least is None else total + least)
    return weights if experts.scale == 1.0 else weights * experts.scale, chosen


def shares(scores: Float[Array, "B Q E"], experts: Experts) -> Float[Array, "B Q E"]:
    """Share of each expert in a token: the softmax, or as in DeepSeek-V3 the sigmoids divided by their sum."""
    if experts.scoring == "softmax":
        return jax.nn.softmax(scores, axis=-1)
    sigmoids = jax.nn.sigmoid(scores)
    return sigmoids / (sigmoids.sum(axis=-1, keepdims=True) + 1e-20)


def _in_best_groups(wanted: Float[Array, "B Q E"], experts: Experts) -> Float[Array, "B Q E"]:
    """−inf outside the groups whose two most wanted experts are wanted most."""
    if experts.groups_per_token == experts.groups:
        return wanted
    groups = wanted.reshape(*wanted.shape[:-1], experts.groups, -1)
    sums = jax.lax.top_k(groups, 2)[0].sum(axis=-1)
    _, best = jax.lax.top_k(sums, experts.groups_per_token)
    is_best = jax.nn.one_hot(best, experts.groups, dtype=jnp.bool_).any(axis=-2)
    return jnp.where(is_best[..., None], groups, -jnp.inf).reshape(wanted.shape)


def mix_experts(
    x: Float[Array, "B Q D"],
    weights: Float[Array, "B Q k"],
    chosen: Int[Array, "B Q k"],
    gate: ExpertKernels | None,
    up: ExpertKernels,
    down: ExpertKernels,
    gate_bias: Float[Array, "E 1 F"] | None = None,
    up_bias: Float[Array, "E 1 F"] | None = None,
    *,
    glu: Callable[[Any, Array], Array],
    scale_inputs: bool = False,
    all_here: bool = True,
) -> Float[Array, "B Q D"]:
    """Σ over the chosen experts e of weight · down_e(glu(gate_e(x), up_e(x))), summed in float32.

    Gate and up are (E, D, F), down is (E, F, D). Without a gate `glu` gets None in its place. Where it is to scale
    inputs, the weight multiplies x and not the answer. Unless all experts are here, ids below 0 and above E are of
    others: they sort to the end, and add nothing.
    """
    per_token = chosen.shape[-1]
    count = _stacked(up).shape[0]
    if not all_here:
        chosen = jnp.where((chosen >= 0) & (chosen < count), chosen, count)
    visits = chosen.reshape(-1)
    order = jnp.argsort(visits, stable=True)
    place = jnp.argsort(order)
    sizes = jnp.bincount(visits, length=count)
    tokens = x.reshape(-1, 1, x.shape[-1])
    rows = jnp.broadcast_to(tokens, (tokens.shape[0], per_token, x.shape[-1])).reshape(-1, x.shape[-1])
    if scale_inputs:
        rows = rows * weights.reshape(-1, 1).astype(rows.dtype)
        weights = jnp.ones_like(weights)
    rows = _permute(rows, order, place)
    # No product is promised of rows beyond the last group, nor a gradient of them: neither goes in or out.
    is_here = (visits[order] < count)[:, None]
    if not all_here:
        rows = jnp.where(is_here, rows, 0)
    gates = None if gate is None else _multiply(rows, gate, sizes)
    ups = _multiply(rows, up, sizes)
    if gates is not None and gate_bias is not None and up_bias is not None:
        gates, ups = gates + gate_bias[visits[order], 0], ups + up_bias[visits[order], 0]
    hidden = glu(gates, ups)
    answers = _multiply(hidden, down, sizes)
    if not all_here:
        answers = jnp.where(is_here, answers, 0)
    answers = _permute(answers, place, order)
    answers = answers.reshape(*chosen.shape, x.shape[-1]).astype(jnp.float32)
    # A product and a sum would be fused with the gather above, which takes a CPU as long as the experts themselves.
    return jnp.einsum("bqkd,bqk->bqd", answers, weights, precision=jax.lax.Precision.HIGHEST)


def _stacked(kernels: ExpertKernels) -> Float[Array, "E K N"]:
    return kernels.kernels if isinstance(kernels, AdaptedKernels) else kernels


def _multiply(
    rows: Float[Array, "M K"], kernels: ExpertKernels, sizes: Int[Array, "E"]
) -> Float[Array, "M N"]:
    """Each row times the matrix of its expert, and through its update."""
    y = grouped_dot(rows, _stacked(kernels), sizes)
    if not isinstance(kernels, AdaptedKernels):
        return y
    return y + grouped_dot(grouped_dot(rows, kernels.a, sizes), kernels.b, sizes)


@jax.custom_jvp
def _permute(rows: Float[Array, "M K"], order: Int[Array, "M"], inverse: Int[Array, "M"]) -> Array:
    """`rows[order]`."""
    return rows.at[order].get(mode="promise_in_bounds", unique_indices=True)


@_permute.defjvp
def _permute_tangent(primals: tuple[Array, Array, Array], tangents: Any) -> tuple[Array, Array]:
    # A scatter, for its transpose is a gather: so the gradient gathers too. That of a gather would scatter.
    rows, order, inverse = primals
    moved = jnp.zeros_like(rows).at[inverse].set(tangents[0], mode="promise_in_bounds", unique_indices=True)
    return _permute(rows, order, inverse), moved


def _on_shards(
    mix: Callable[..., Array],
    x: Float[Array, "B Q D"],
    weights: Float[Array, "B Q k"],
    chosen: Int[Array, "B Q k"],
    gate: ExpertKernels | None,
    up: ExpertKernels,
    down: ExpertKernels,
    *wide_biases: Float[Array, "E 1 F"],
) -> Float[Array, "B Q D"]:
    """`mix` on the mesh in force: every device sorts its own tokens and holds its part of every expert's width.

    Devices along `expert` hold whole experts, and gather each other's tokens: each adds up the answers of its experts,
    and these are summed where the tokens came from.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return mix(x, weights, chosen, gate, up, down, *wide_biases)
    rows, _ = partition_spec(mesh, ("batch", None, None), x.shape)
    wide, _ = partition_spec(mesh, ("experts", None, "mlp"), _stacked(up).shape)
    narrow, _ = partition_spec(mesh, ("experts", "mlp", None), _stacked(down).shape)
    whole = jax.sharding.PartitionSpec(wide[0])

    def specs(kernels: ExpertKernels | None, own: Any, a: Any, b: Any) -> Any:
        return AdaptedKernels(own, a, b) if isinstance(kernels, AdaptedKernels) else own

    def local(x: Array, weights: Array, chosen: Array, *kernels: Any) -> Array:
        if wide[0] is None:
            y = mix(x, weights, chosen, *kernels)
        elif rows[0] is None:
            y = jax.lax.psum(of_experts(x, weights, chosen, *kernels), wide[0])
        else:
            tokens = (jax.lax.all_gather(part, wide[0], tiled=True) for part in (x, weights, chosen))
            y = jax.lax.psum_scatter(of_experts(*tokens, *kernels), wide[0], tiled=True)
        return y if wide[2] is None else jax.lax.psum(y, wide[2])

    def of_experts(
        x: Array,
        weights: Array,
        chosen: Array,
        gate: ExpertKernels | None,
        up: ExpertKernels,
        *kernels: ExpertKernels,
    ) -> Array:
        first = jax.lax.axis_index(wide[0]) * _stacked(up).shape[0]
        return mix(x, weights, chosen - first, gate, up, *kernels, all_here=False)

    # The partitioner cannot split a sort or a ragged product: it would gather all tokens on every device.
    split = jax.shard_map(
        local,
        in_specs=(
            *(rows, rows, rows),
            *(specs(kernels, wide, whole, wide) for kernels in (gate, up)),
            specs(down, narrow, narrow, whole),
            *(wide for _ in wide_biases),
        ),
        out_specs=rows,
        check_vma=False,
    )
    return split(x, weights, chosen, gate, up, down, *wide_biases)

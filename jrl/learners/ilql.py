# SPDX-License-Identifier: Apache-2.0
"""Implicit language Q-learning: offline, from samples with a reward each or episodes with a reward a turn.

Reference: Snell et al. 2022, arXiv:2206.11871.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float, Int

from jrl.forward import Reader, column_features
from jrl.learners.accumulate import (
    Loss,
    Rows,
    accumulate,
    batch_in_order,
    optimizer_step,
    split_rows,
    take_rows,
)
from jrl.learners.balance import balanced, load_metric
from jrl.learners.config import LanguageConfig, check_fields, refuse_methods
from jrl.learners.forward import mask_rows
from jrl.learners.state import TrainState, init_train_state
from jrl.losses.ilql import Q_TARGETS, ILQLPredictions, ilql_loss
from jrl.mesh import hold_behind, hold_split, is_split_over_fsdp, logits_parts, platform
from jrl.ops.alignment import states_at, targets_at
from jrl.ops.chunks import map_positions, positions_of
from jrl.ops.logprobs import logprobs_from_logits, take_targets
from jrl.ops.reductions import LossOut
from jrl.typing import (
    Features,
    Frozen,
    ILQLBatch,
    Mean,
    Metrics,
    Params,
    PolicyFns,
    PRNGKey,
    Update,
)


def _steered_sampling() -> dict[str, Any]:
    return {"max_new_tokens": 56, "top_k": 20, "beta": 1.0, "temperature": 1.0}


@dataclass(kw_only=True)
class ILQLConfig(LanguageConfig):
    """Implicit language Q-learning; `gen_kwargs` may hold `beta`, the weight of Q − V in sampling (default 1).

    Attributes:
      tau: Expectile of the value function, in (0, 1); above 0.5 it leans to the better actions.
      gamma: Discount per token.
      cql_scale: Weight of the conservative term, which keeps Q of unseen actions low.
      awac_scale: Weight of the behaviour's log-likelihood.
      alpha: Share of the online Q heads that a sync moves the target heads by; 1 copies.
      beta: Exponent of exp(beta · (Q − V)) that weighs the log-likelihood; 0 is plain likelihood. Not the `beta` of
        `gen_kwargs`.
      steps_for_target_q_sync: Optimizer steps between two syncs.
      two_qs: Whether there are two Q heads, of which the smaller one counts, or one.
      target: What Q learns from: "td", the reward and the value of the next state, or "mc", the return that the data
        had (Monte Carlo).
      reward_scale: Factor of the rewards of episodes, which are not standardised. Rewards of whole samples are.
      context_turns: Most turns of an episode before the one that is learned from; None: as many as fit.
      keep_prompt: Whether rows that begin later than their episode begin with its prompt all the same.
    """

    name: str = "ILQLConfig"
    tau: float = 0.7
    gamma: float = 0.99
    cql_scale: float = 0.1
    awac_scale: float = 1.0
    alpha: float = 0.001
    beta: float = 0.0
    steps_for_target_q_sync: int = 5
    two_qs: bool = True
    target: str = "td"
    reward_scale: float = 1.0
    context_turns: int | None = None
    keep_prompt: bool = False
    gen_kwargs: dict[str, Any] = field(default_factory=_steered_sampling)

    def own_objective(self) -> ILQLObjective | None:
        """Objective that replaces `ilql_objective`; here None.

        Raises:
          TypeError: If a subclass defines a method that is only called of `jrl.trlx.ILQLConfig`'s.
        """
        refuse_methods(self, ("loss",), "jrl.trlx.ILQLConfig")
        return None

    def validate(self) -> None:
        """Refuses values outside their range."""
        super().validate()
        check_fields(
            self,
            ("tau", 0 < self.tau < 1, "in (0, 1)"),
            ("gamma", 0 <= self.gamma <= 1, "in [0, 1]"),
            ("cql_scale", self.cql_scale >= 0, "at least 0"),
            ("awac_scale", self.awac_scale >= 0, "at least 0"),
            ("alpha", 0 < self.alpha <= 1, "in (0, 1]"),
            ("beta", self.beta >= 0, "at least 0"),
            ("steps_for_target_q_sync", self.steps_for_target_q_sync >= 1, "at least 1"),
            ("target", self.target in Q_TARGETS, f"one of {tuple(Q_TARGETS)}"),
            ("reward_scale", self.reward_scale > 0, "positive"),
            ("context_turns", self.context_turns is None or self.context_turns >= 0, "at least 0, or None"),
        )


@struct.dataclass
class ILQLState:
    """All that ILQL carries from one step to the next.

    Attributes:
      train: Parameters, among them the online Q heads and the value head, and optimizer.
      target_params: The target Q heads, a tree like `train.params["q_heads"]`. Only a sync moves them.
    """

    train: TrainState
    target_params: Params


class _Read(NamedTuple):
    """What a head says of the actions.

    Attributes:
      read: `(weights, states (b t D), actions (b t)) -> tree of (b t)`.
      weights: What no other read has.
      hidden: States (B T D).
    """

    read: Callable[[Params, Array, Array], Any]
    weights: Params
    hidden: Float[Array, "B T D"]


ILQLObjective = Callable[[Reader, Params, Frozen, Params, ILQLBatch], LossOut]
"""(reader, params, frozen, target_params, batch) → (sum, weight, metrics) of a minibatch, traced into the update."""


def init_ilql_state(params: Params, optimizer: optax.GradientTransformation) -> ILQLState:
    """State before the first step.

    Args:
      params: What trains. It holds `v_head` and `q_heads`, and `target_q_heads` where a checkpoint brought them; else
        the targets start as copies.
      optimizer: From `make_optimizer`.
    Raises:
      ValueError: If a head is missing.
    """
    _check_heads(params)
    trained = {name: tree for name, tree in params.items() if name != "target_q_heads"}
    # Copies, because the state is donated and no buffer can be given away twice.
    targets = params.get("target_q_heads", jax.tree.map(jnp.copy, params["q_heads"]))
    return ILQLState(train=init_train_state(trained, optimizer), target_params=targets)


def ilql_objective(
    reader: Reader,
    params: Params,
    frozen: Frozen,
    target_params: Params,
    batch: ILQLBatch,
    *,
    config: ILQLConfig,
    with_load: bool = False,
) -> LossOut:
    """ILQL's loss of a batch, to be differentiated with respect to `params`.

    Args:
      reader: The model; its `chunk_bytes` hold Q values, too.
      params: Its trainable parameters, with `v_head` and `q_heads`.
      frozen: The rest.
      target_params: The target Q heads. They read the same hidden states as the online ones, and pass no gradient.
      batch: Rewarded samples.
      config: Names of trlX; bound here to the standard terms and nowhere else.
      with_load: Whether the metrics hold the load of the experts, for `accumulate`.
    Returns:
      The sum over actions, their number, and the metrics; see `jrl.losses.ilql.ilql_loss`.
    Raises:
      ValueError: If a head is missing.
    """
    _check_heads(params)
    policy = reader.policy
    trunk = policy.trunk(frozen, batch.inputs)
    features = column_features(policy, params, frozen, trunk, batch.inputs, batch.columns)
    actions = targets_at(batch.inputs.tokens, batch.columns)
    vocab_size = jax.eval_shape(partial(policy.logits, params, frozen), features.policy[:, 0]).shape[-1]
    positions = positions_of(
        reader.chunk_bytes, vocab_size=vocab_size, num_parts=logits_parts(actions.shape[0], vocab_size)
    )
    out = ilql_loss(
        _predictions(policy, params, frozen, target_params, features, actions, positions=positions),
        batch.rewards,
        batch.mask,
        gamma=config.gamma,
        expectile=config.tau,
        cql_coef=config.cql_scale,
        awac_coef=config.awac_scale,
        awac_beta=config.beta,
        targets=Q_TARGETS[config.target],
        after=AFTER[config.target](reader, params, frozen, batch),
    )
    if not with_load:
        return out
    return out._replace(metrics=out.metrics | load_metric(features.load, batch.mask))


def values_after(
    reader: Reader, params: Params, frozen: Frozen, batch: ILQLBatch
) -> Float[Array, "B"] | None:
    """V of the state behind the last action of each row, 0 where it is terminal; None where all are."""
    if batch.after is None:
        return None
    policy, inputs = reader.policy, batch.after
    lengths = jnp.sum(inputs.attention_mask, axis=1, dtype=jnp.int32)
    states = policy.branch(params, frozen, policy.trunk(frozen, inputs), inputs, None).value
    last = states_at(states, jnp.maximum(lengths - 1, 0)[:, None])
    values = policy.heads({"v_head": params["v_head"]}, last)["values"][:, 0]
    return jnp.where(lengths > 0, values, 0.0)


def returns_after(
    reader: Reader, params: Params, frozen: Frozen, batch: ILQLBatch
) -> Float[Array, "B"] | None:
    """Return of the data behind the last action of each row; None where there is nothing behind any."""
    del reader, params, frozen
    return batch.returns_after


AFTER: Mapping[str, Callable[[Reader, Params, Frozen, ILQLBatch], Float[Array, "B"] | None]] = {
    "td": values_after,
    "mc": returns_after,
}
"""What follows the last action of each row, by the name in `ILQLConfig.target`."""


def make_ilql_update(
    reader: Reader,
    optimizer: optax.GradientTransformation,
    config: ILQLConfig,
    *,
    batch_size: int,
    minibatch_size: int,
    objective: ILQLObjective | None = None,
) -> Update:
    """Builds ILQL's update: an optimizer step, and every `steps_for_target_q_sync` steps a sync of the target heads.

        θ̄ ← α·θ + (1 − α)·θ̄    after step n, if n is a multiple of `steps_for_target_q_sync`

    Steps are those of `TrainState.step`, as everywhere: one that was skipped as not finite counts, and moves the
    targets towards the unmoved heads if its turn it is.

    Args:
      reader: The model, with value and Q heads.
      optimizer: From `make_optimizer`.
      config: Of the method.
      batch_size: Rows of an optimizer step, over all devices.
      minibatch_size: Rows in one forward pass; must divide `batch_size`.
      objective: What is minimised; None: `ilql_objective` as configured. A row of padding has no action in the mask.
    Returns:
      `(ILQLState, frozen, ILQLBatch, key) -> (ILQLState, metrics)`; one compiled call. The batch holds at most
      `batch_size` rows; the key is not used, since nothing is drawn.
    Raises:
      ValueError: If `minibatch_size` does not divide `batch_size`; on a call, if the batch has more rows.
    """
    split_rows(batch_size, batch_size=batch_size, minibatch_size=minibatch_size)
    minimised = objective or partial(ilql_objective, config=config, with_load=config.router_aux_loss_coef > 0)

    def update(state: ILQLState, frozen: Frozen, batch: ILQLBatch, key: PRNGKey) -> tuple[ILQLState, Metrics]:
        del key
        num_rows = batch.mask.shape[0]
        microbatches = batch_in_order(num_rows, batch_size=batch_size, minibatch_size=minibatch_size)

        def loss(params: Params, rows: Rows) -> Loss:
            taken = mask_rows(take_rows(batch, rows.ids), rows.valid)
            targets = hold_split(state.target_params, rows)
            out: Loss = minimised(reader, params, hold_split(frozen, rows), targets, taken)
            return out

        params, coef = state.train.params, config.router_aux_loss_coef
        whole = balanced(loss, params, microbatches, coef=coef)
        train, metrics = optimizer_step(state.train, optimizer, accumulate(whole, params, *microbatches))
        due = train.step % config.steps_for_target_q_sync == 0
        targets = jax.lax.cond(
            due,
            lambda online, target: optax.incremental_update(online, target, config.alpha),
            lambda online, target: target,
            train.params["q_heads"],
            state.target_params,
        )
        metrics["ilql/target_sync"] = Mean(due.astype(jnp.float32), jnp.ones((), jnp.float32))
        return ILQLState(train=train, target_params=targets), metrics

    return update


def _predictions(
    policy: PolicyFns,
    params: Params,
    frozen: Frozen,
    target_params: Params,
    features: Features,
    actions: Int[Array, "B T"],
    *,
    positions: int,
) -> ILQLPredictions:
    """What the model predicts for the actions of a batch.

    Args:
      policy: The model.
      params: Its trainable parameters.
      frozen: The rest.
      target_params: The target Q heads, of which values of the actions alone are computed.
      features: Of the actions' states.
      actions: To predict.
      positions: Most of them, over all devices, whose logits, or Q values of one head, are computed at once.
    """

    def of_target(head: Params, hidden: Array, actions: Int[Array, "b t"]) -> Float[Array, "b t"]:
        return policy.heads({"q_heads": {"0": head}}, hidden, actions)["q_values"][0]

    def of_policy(_: Params, hidden: Array, actions: Int[Array, "b t"]) -> Float[Array, "b t"]:
        return logprobs_from_logits(policy.logits(params, frozen, hidden), actions)

    def of_head(head: Params, hidden: Array, actions: Int[Array, "b t"]) -> tuple[Array, Array]:
        values = policy.heads({"q_heads": {"0": head}}, hidden)["q_values"][0]
        return take_targets(values, actions), logprobs_from_logits(values, actions)

    # The loss passes no gradient to the targets; stopped here, the backward pass does not even run through them.
    fixed = jax.lax.stop_gradient(features.value)
    reads = [
        *(_Read(of_target, head, fixed) for head in target_params.values()),
        _Read(of_policy, {}, features.policy),
        *(_Read(of_head, head, features.value) for head in params["q_heads"].values()),
    ]
    found = _one_by_one(reads, actions, positions=positions)
    of_targets, (logprobs, *of_heads) = found[: len(target_params)], found[len(target_params) :]
    q_values, q_logprobs = (jnp.stack(each, axis=-1) for each in zip(*of_heads, strict=True))
    target_q = jnp.min(jnp.stack(of_targets), axis=0)
    values = policy.heads({"v_head": params["v_head"]}, features.value)["values"]
    return ILQLPredictions(logprobs, values, q_values, q_logprobs, target_q)


def _one_by_one(reads: Sequence[_Read], actions: Int[Array, "B T"], *, positions: int) -> list[Any]:
    """Results of reads whose own weights are whole over `fsdp` one after the other, and so are their gradients.

    Each waits for the one before, and in the backward pass for the one behind. Else the compiler gathers several, and Q
    heads are as large as many layers.

    Args:
      reads: In their order. One without weights of its own waits for none.
      actions: What they are asked for.
      positions: As many as one read may have at once. Where all reads together have no more, what they computed is kept
        for the backward pass. Else it is computed again: piece by piece, since pieces are loops, and loops run one
        after the other. Accelerators that gather kernels need no loop where a read is one piece, since there the reads
        wait; in two pieces they would gather twice.
    """
    is_small = actions.size * len(reads) <= positions
    waits = is_split_over_fsdp() and platform() != "cpu"  # XLA for CPUs does not keep to the order
    pieces = min(positions, -(-actions.size // 2))
    found: list[Any] = []
    for read, weights, hidden in reads:
        if found:
            weights, found[-1] = hold_behind(weights, found[-1])
        of_held = partial(read, weights)
        if is_small:
            found.append(of_held(hidden, actions))
        elif waits and actions.size <= positions:
            found.append(jax.checkpoint(of_held)(hidden, actions))
        else:
            found.append(map_positions(of_held, (hidden, actions), positions=pieces))
    return found


def _check_heads(params: Params) -> None:
    missing = [name for name in ("v_head", "q_heads") if name not in params]
    if missing:
        raise ValueError(
            f"`params` must hold `v_head` and `q_heads`, {' and '.join(missing)} is missing. "
            "Were they made for another method? `jrl.models.heads.init_q_heads` makes Q heads."
        )

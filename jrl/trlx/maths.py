# SPDX-License-Identifier: Apache-2.0
"""The maths of trlX's method configurations: `loss` and `get_advantages_and_returns`.

jrl's own stand behind trlX's signatures. What a script's configuration defines itself is traced into the update.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jrl.forward import Reader
from jrl.interop import as_array, checked_array, checked_scalar, flat_names, in_kind_of, traced
from jrl.learners.credit import Credit, Estimate
from jrl.learners.ilql import ILQLConfig, ILQLObjective
from jrl.learners.ppo import PPOConfig, ppo_policy_loss
from jrl.learners.recipe import Recipe, mean_loss
from jrl.losses.ilql import Q_TARGETS, ILQLPredictions, ilql_loss
from jrl.losses.policy_gradient import Targets
from jrl.losses.ppo import ppo_loss
from jrl.ops.alignment import states_at, targets_at
from jrl.ops.logprobs import logprobs_from_logits, take_targets
from jrl.ops.masking import whiten, zero_masked
from jrl.ops.reductions import LossOut, loss_of_mean
from jrl.ops.returns import gae
from jrl.trlx.data.ilql_types import ILQLBatch, ILQLSeq2SeqBatch
from jrl.typing import Frozen, Kept, Mean, Metrics, Params, Predictions
from jrl.typing import ILQLBatch as NativeBatch

Methods = Mapping[str, Callable[..., Any]]


def stats_of(metrics: Metrics) -> dict[str, Any]:
    """Metrics as numbers, also inside a compiled function."""
    return {
        name: metric.total / jnp.maximum(metric.weight, 1e-9) if isinstance(metric, Mean) else metric.value
        for name, metric in metrics.items()
        if not isinstance(metric, Kept)
    }


def advantages_and_returns(
    config: PPOConfig, values: Any, rewards: Any, response_length: int, use_whitening: bool | None
) -> tuple[Any, Any]:
    """Advantages and returns; see `jrl.trlx.PPOConfig.get_advantages_and_returns`."""
    v, r = (as_array(x, jnp.float32)[:, :response_length] for x in (values, rewards))
    everywhere = jnp.ones(v.shape, bool)
    advantages = gae(r, v, everywhere, gamma=config.gamma, gae_lambda=config.lam)
    returns = advantages + v
    found = whiten(advantages, everywhere) if use_whitening else advantages
    return in_kind_of(values, jax.lax.stop_gradient(found)), in_kind_of(values, returns)


def ppo_mean_loss(config: PPOConfig, now: Mapping[str, Any], mask: Any) -> tuple[Any, dict[str, Any]]:
    """Mean PPO loss; see `jrl.trlx.PPOConfig.loss`; `now` holds its arguments by their names."""
    given = {name: as_array(array, jnp.float32) for name, array in now.items()}
    logprobs, values = given.pop("logprobs"), given.pop("values")
    real = as_array(mask, jnp.float32) != 0
    out = ppo_loss(
        logprobs,
        values,
        jnp.zeros_like(logprobs),
        Targets(**given, mask=real),
        clip_range=config.cliprange,
        value_clip_range=config.cliprange_value,
        value_coef=config.vf_coef,
        entropy_coef=0.0,
    )
    return _mean_and_stats(out, now["logprobs"])


def ilql_mean_loss(config: ILQLConfig, outputs: Any, labels: Any) -> tuple[Any, dict[str, Any]]:
    """Mean ILQL loss; see `jrl.trlx.ILQLConfig.loss`."""
    logits, (qs, target_qs, vs) = outputs
    seq2seq = isinstance(labels, ILQLSeq2SeqBatch)
    tokens = as_array(labels.decoder_input_ids if seq2seq else labels.input_ids, jnp.int32)
    columns = as_array(labels.actions_ixs, jnp.int32)
    actions = targets_at(tokens, columns)
    q = jnp.stack([as_array(head, jnp.float32) for head in qs])
    targets = jnp.stack([as_array(head, jnp.float32) for head in target_qs])
    each_head = jnp.broadcast_to(actions, q.shape[:-1])
    predictions = ILQLPredictions(
        logprobs=logprobs_from_logits(states_at(as_array(logits, jnp.float32), columns), actions),
        values=as_array(vs, jnp.float32)[:, :-1, 0],
        q_values=jnp.moveaxis(take_targets(q, each_head), 0, -1),
        q_logprobs=jnp.moveaxis(logprobs_from_logits(q, each_head), 0, -1),
        target_q=jax.lax.stop_gradient(jnp.min(take_targets(targets, each_head), axis=0)),
    )
    out = ilql_loss(
        predictions,
        as_array(labels.rewards, jnp.float32),
        as_array(labels.dones, bool)[:, :-1],
        gamma=config.gamma,
        expectile=config.tau,
        cql_coef=config.cql_scale,
        awac_coef=config.awac_scale,
        awac_beta=config.beta,
        targets=Q_TARGETS[config.target],
    )
    return _mean_and_stats(out, logits)


def _mean_and_stats(out: LossOut, given: Any) -> tuple[Any, dict[str, Any]]:
    stats = {name: in_kind_of(given, value) for name, value in stats_of(out.metrics).items()}
    return in_kind_of(given, out.mean), stats


def own_recipe(config: PPOConfig, recipe: Recipe, own: Methods) -> Recipe:
    """A recipe with a configuration's own methods in the place of its parts.

    Args:
      config: Whose methods they are.
      recipe: PPO's, as configured.
      own: `loss`, `get_advantages_and_returns`, or both.
    Raises:
      ValueError: If a field of the configuration belongs to the loss that is replaced.
    """
    if "get_advantages_and_returns" in own:
        recipe = replace(recipe, estimate=_own_advantages(config, own["get_advantages_and_returns"]))
    if "loss" in own:
        for name, value in (
            ("entropy_coef", config.entropy_coef),
            ("ratio_threshold", config.ratio_threshold),
        ):
            if value:
                raise ValueError(
                    f"`method.{name}` must be off beside {type(config).__name__}.loss, got {value!r}: it "
                    "belongs to the loss that this one replaces."
                )
        loss = mean_loss(_own_ppo_loss(config, own["loss"]), ppo_policy_loss(config))
        recipe = replace(recipe, loss=loss)
    return recipe


def _own_advantages(config: PPOConfig, method: Callable[..., Any]) -> Estimate:
    name = f"{type(config).__name__}.get_advantages_and_returns"

    def estimate(rewards: Array, values: Array | None, mask: Bool[Array, "N T"], groups: Any) -> Credit:
        del groups
        assert values is not None, "PPO has a critic"
        if config.whiten_rewards:
            rewards = whiten(rewards, mask, shift_mean=False)
        found = traced(name, method, zero_masked(values, mask), zero_masked(rewards, mask), rewards.shape[1])
        _check_pair(name, found, "advantages and returns")
        first, second = (
            zero_masked(checked_array(name, what, array, rewards), mask)
            for what, array in zip(("advantages", "returns"), found, strict=True)
        )
        return Credit(jax.lax.stop_gradient(first), jax.lax.stop_gradient(second))

    return estimate


def _own_ppo_loss(config: PPOConfig, method: Callable[..., Any]) -> Callable[..., tuple[Any, Any]]:
    name = f"{type(config).__name__}.loss"

    def mean(now: Predictions, targets: Targets) -> tuple[Any, Any]:
        mask = targets.mask
        names = ("old_logprobs", "old_values", "advantages", "returns")
        fixed = {name: array for name, array in targets._asdict().items() if name in names}
        arrays = {
            name: zero_masked(array, mask)
            for name, array in {"logprobs": now.logprobs, "values": now.values, **fixed}.items()
        }
        found = traced(name, method, **arrays, mask=mask.astype(jnp.int32))
        _check_pair(name, found, "a loss and what to log of it")
        return checked_scalar(name, "the loss", found[0]), flat_names(found[1])

    return mean


def own_ilql_objective(config: ILQLConfig, method: Callable[..., Any]) -> ILQLObjective:
    """A configuration's own `loss` as what an update minimises.

    Logits and Q values of every column stand in memory together, as the method reads them.
    """
    name = f"{type(config).__name__}.loss"

    def objective(
        reader: Reader, params: Params, frozen: Frozen, target_params: Params, batch: NativeBatch
    ) -> LossOut:
        if batch.after is not None:
            raise ValueError(
                f"`{name}` gets labels in which every row ends its episode, and rows of these samples go on in others: "
                "learn from them with jrl's own loss, or raise `train.seq_length` until an episode fits into a row."
            )
        policy = reader.policy
        features = policy.branch(params, frozen, policy.trunk(frozen, batch.inputs), batch.inputs, None)
        labels = labels_of(batch)
        acting = states_at(features.value, batch.columns)
        states = states_at(features.value, as_array(labels.states_ixs, jnp.int32))
        fixed = jax.lax.stop_gradient(acting)
        qs = tuple(policy.heads({"q_heads": params["q_heads"]}, acting)["q_values"])
        target_qs = tuple(policy.heads({"q_heads": target_params}, fixed)["q_values"])
        vs = policy.heads({"v_head": params["v_head"]}, states)["values"][..., None]
        outputs = policy.logits(params, frozen, features.policy), (qs, target_qs, vs)
        found = traced(name, method, outputs, labels)
        _check_pair(name, found, "a loss and what to log of it")
        return loss_of_mean(checked_scalar(name, "the loss", found[0]), flat_names(found[1]), batch.mask)

    return objective


def labels_of(batch: NativeBatch) -> ILQLBatch | ILQLSeq2SeqBatch:
    """A learner's batch as trlX's; one that is mere padding is shown as actions, so that no mean is 0/0."""
    inputs, mask = batch.inputs, batch.mask | ~jnp.any(batch.mask)
    place = jnp.arange(mask.shape[1] + 1)[None, :]
    length = jnp.sum(mask, axis=1, dtype=jnp.int32)[:, None]
    last = jnp.max(jnp.where(mask, batch.columns, 0), axis=1, keepdims=True) + 1
    columns: Int[Array, "B T+1"] = jnp.pad(jnp.where(mask, batch.columns, 0), ((0, 0), (0, 1)))
    arrays: dict[str, Any] = {
        "rewards": zero_masked(batch.rewards, mask),
        "states_ixs": jnp.where(place == length, last, columns),
        "actions_ixs": columns[:, :-1],
        "dones": jnp.pad(mask, ((0, 0), (0, 1))).astype(jnp.int32),
    }
    if inputs.context_tokens is None or inputs.context_mask is None:
        return ILQLBatch(inputs.tokens, inputs.attention_mask.astype(jnp.int32), **arrays)  # type: ignore[arg-type]
    return ILQLSeq2SeqBatch(
        inputs.context_tokens,  # type: ignore[arg-type]
        inputs.context_mask.astype(jnp.int32),  # type: ignore[arg-type]
        inputs.tokens,  # type: ignore[arg-type]
        **arrays,
    )


def _check_pair(name: str, found: Any, what: str) -> None:
    if not isinstance(found, tuple) or len(found) != 2:
        raise ValueError(f"`{name}` must return a pair, {what}, got {type(found).__name__}.")

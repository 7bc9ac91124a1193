# SPDX-License-Identifier: Apache-2.0
"""Worlds that are small enough to be enumerated: what others estimate by sampling is computed here.

- `Tree`: 8 tokens, EOS 0, at most 5 tokens: 19,608 completions over 2,801 states. The policy is a table of logits.
- All 2^G groups of 0/1 scores of one prompt.

In float64: call inside `jax.enable_x64(True)`.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jrl.ops import kl_from_logits

VOCAB, HORIZON, EOS = 8, 5, 0
GOLDEN = json.loads((Path(__file__).parents[1] / "golden" / "policy_gradient.json").read_text())


class Tree(NamedTuple):
    """All completions of the world, right-padded to `HORIZON`.

    Attributes:
      states: Number of the state before each token, (19608, 5); 0 where masked.
      tokens: The tokens; 0 where masked.
      mask: True on tokens.
      rewards: One a completion.
      ref_logits: The reference's table (2801, 8).
    """

    states: np.ndarray
    tokens: np.ndarray
    mask: np.ndarray
    rewards: np.ndarray
    ref_logits: np.ndarray


def _node_logits(prefix: tuple[int, ...]) -> list[float]:
    h = 0
    for token in prefix:
        h = (h * 31 + token + 7) % 1009
    return [math.sin(0.7 * h + 1.3 * v * (1 + len(prefix))) for v in range(VOCAB)]


def _reward(tokens: tuple[int, ...]) -> float:
    """1 if the first token is even and their sum a multiple of 3; −0.05 a token; −0.5 without EOS."""
    body = [token for token in tokens if token != EOS]
    hit = len(body) > 0 and body[0] % 2 == 0 and sum(body) % 3 == 0
    return float(hit) - 0.05 * len(tokens) - (0.0 if tokens[-1] == EOS else 0.5)


@functools.cache
def tree() -> Tree:
    """The world; built once."""
    states = {
        prefix: number
        for number, prefix in enumerate(
            prefix
            for length in range(HORIZON)
            for prefix in itertools.product(range(1, VOCAB), repeat=length)
        )
    }
    completions = [
        (*prefix, token)
        for prefix in states
        for token in range(VOCAB)
        if token == EOS or len(prefix) == HORIZON - 1
    ]
    shape = (len(completions), HORIZON)
    rows = Tree(
        np.zeros(shape, np.int32),
        np.zeros(shape, np.int32),
        np.zeros(shape, bool),
        np.array([_reward(tokens) for tokens in completions]),
        np.array([_node_logits(prefix) for prefix in states]),
    )
    for i, tokens in enumerate(completions):
        length = len(tokens)
        rows.states[i, :length] = [states[tokens[:t]] for t in range(length)]
        rows.tokens[i, :length] = tokens
        rows.mask[i, :length] = True
    return rows


def action_logprobs(logits: Any) -> jax.Array:
    """log π of every token of every completion (19608, 5); 0 where masked."""
    world = tree()
    found = jax.nn.log_softmax(logits)[world.states, world.tokens]
    return jnp.where(world.mask, found, 0.0)


def objective(logits: Any, beta: float) -> jax.Array:
    """J(π) = E r − β·KL(π ‖ π_ref), over all completions."""
    world = tree()
    logprobs = jnp.sum(action_logprobs(logits), axis=1)
    ref_logprobs = jnp.sum(action_logprobs(world.ref_logits), axis=1)
    return jnp.sum(jnp.exp(logprobs) * (world.rewards - beta * (logprobs - ref_logprobs)))


def state_divergences(logits: Any) -> jax.Array:
    """KL(π ‖ π_ref) of the state before every token of every completion (19608, 5); 0 where masked."""
    world = tree()
    found = kl_from_logits(jnp.asarray(logits), jnp.asarray(world.ref_logits))[world.states]
    return jnp.where(world.mask, found, 0.0)


def optimum(beta: float) -> tuple[float, np.ndarray]:
    """J* = β·log E_ref e^(r/β), and log π*, ∝ log π_ref + r/β, of every completion."""
    world = tree()
    tilted = np.asarray(jnp.sum(action_logprobs(world.ref_logits), axis=1)) + world.rewards / beta
    log_z = np.logaddexp.reduce(tilted)
    return float(beta * log_z), tilted - log_z


def optimal_logits(beta: float) -> np.ndarray:
    """A table whose completions have the probabilities of π*: of each action, the mass that lies behind it."""
    world = tree()
    _, logprobs = optimum(beta)
    masses = np.zeros(world.ref_logits.shape)
    probabilities = np.exp(logprobs)
    for t in range(HORIZON):
        rows = world.mask[:, t]
        np.add.at(masses, (world.states[rows, t], world.tokens[rows, t]), probabilities[rows])
    return np.log(np.maximum(masses, 1e-300))


@functools.cache
def all_groups(size: int) -> np.ndarray:
    """All 2^G vectors of 0/1 scores."""
    return np.array(list(itertools.product([0, 1], repeat=size)))


def enumerated(advantages: Callable[..., Any], size: int) -> np.ndarray:
    """Advantages (2^G, G) of all groups, by one call of an estimator (scores, groups, valid) → (N,)."""
    groups = all_groups(size)
    flat = jnp.asarray(groups.reshape(-1), float)
    numbers = jnp.repeat(jnp.arange(len(groups)), size)
    found = jax.jit(advantages)(flat, numbers, jnp.ones(flat.shape, bool))
    return np.asarray(found, np.float64).reshape(groups.shape)


def weight_of(found: np.ndarray, p: float) -> tuple[float, float]:
    """w_G(p) of an estimator whose expectation is w·∇p, and the variance of its gradient, for one logit.

    Args:
      found: Of `enumerated`.
      p: Chance of score 1, whose logit is the parameter.
    """
    size = found.shape[1]
    groups = all_groups(size)
    successes = groups.sum(axis=1)
    chances = p**successes * (1 - p) ** (size - successes)
    # ∂ log π(y)/∂logit = y − p, and ∂p/∂logit = p(1 − p).
    gradients = (found * (groups - p)).mean(axis=1)
    mean = float(chances @ gradients)
    return mean / (p * (1 - p)), float(chances @ gradients**2 - mean**2)

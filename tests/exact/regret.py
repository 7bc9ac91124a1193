# SPDX-License-Identifier: Apache-2.0
"""Trains a table of logits by every algorithm in the enumerable world, and computes the regret that is left.

python tests/exact/regret.py docs/exact_regret.json docs/exact_regret.png

Every step samples groups from the table, and takes the gradient of the recipe that a run would compile: one pass,
on the policy, so ratios are 1 and algorithms that differ in their clip alone do not differ here. There is one prompt,
so no group is left out or refilled. What is drawn and printed is exact: J* − J(π) over all 19,608 completions.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[2]))

from jrl.learners.grpo import grpo_recipe
from jrl.learners.grpo_algorithms import ALGORITHMS, algorithm
from jrl.learners.grpo_config import GRPOConfig
from jrl.ops import place_scores
from jrl.typing import Predictions, Rollouts, Scored, Sequences
from tests.exact.enumerable import EOS, HORIZON, VOCAB, action_logprobs, objective, optimum, tree

SEEDS, BETA = 5, 0.5


class Budget(NamedTuple):
    """Of a run: optimizer steps, groups of 8 in each (or as many rows in groups of another size), first step size."""

    num_steps: int
    num_groups: int
    learning_rate: float


SHORT, LONG = Budget(1000, 8, 0.1), Budget(2500, 128, 0.05)
_LENGTH = {"gen_kwargs": {"max_new_tokens": HORIZON}}
RIGHT_OR_WRONG: Mapping[str, GRPOConfig] = {
    name: algorithm(name, **_LENGTH, beta=0.0) for name in ALGORITHMS
} | {"GRPOConfig()": GRPOConfig(**_LENGTH)}
"""Every algorithm without its KL: what is left of the chance to be wrong."""
HELD_TO_REFERENCE: Mapping[str, GRPOConfig] = {
    **{name: algorithm(name, **_LENGTH, beta=BETA) for name in ("rloo", "reinforce_pp", "remax")},
    **{
        f"GRPOConfig(), {name} in the loss": GRPOConfig(**_LENGTH, beta=BETA, **fields)
        for name, fields in {
            "k2": {"kl_estimator": "k2"},
            "k3": {"kl_estimator": "k3"},
            "k3 times the ratio": {"kl_estimator": "k3", "use_bias_correction_kl": True},
        }.items()
    },
}
"""Algorithms with a KL, in the form that each has."""


def children() -> np.ndarray:
    """Number of the state behind each action (2801, 8); −1 where the completion ends."""
    world = tree()
    found = np.full((len(world.ref_logits), VOCAB), -1, np.int32)
    for t in range(HORIZON - 1):
        rows = world.mask[:, t + 1]
        found[world.states[rows, t], world.tokens[rows, t]] = world.states[rows, t + 1]
    return found


def rewards_of(tokens: jax.Array, mask: jax.Array, *, binary: bool) -> jax.Array:
    """Of completions (N, 5): the world's, or whether one is right and ends."""
    ended = jnp.any((tokens == EOS) & mask, axis=1)
    body = jnp.where(mask, tokens, 0)
    hit = (body[:, 0] > 0) & (body[:, 0] % 2 == 0) & (jnp.sum(body, axis=1) % 3 == 0)
    if binary:
        return (hit & ended).astype(jnp.float32)
    return hit - 0.05 * jnp.sum(mask, axis=1) - jnp.where(ended, 0.0, 0.5)


def sample(
    logits: jax.Array, next_state: jax.Array, key: jax.Array | None, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """(states, tokens, mask) of completions (count, 5); greedy ones without a key."""
    state, alive, found = jnp.zeros(count, jnp.int32), jnp.ones(count, bool), []
    for t in range(HORIZON):
        rows = logits[state]
        drawn = (
            jnp.argmax(rows, axis=1)
            if key is None
            else jax.random.categorical(jax.random.fold_in(key, t), rows)
        )
        token = jnp.where(alive, drawn, 0)
        found.append((jnp.where(alive, state, 0), token, alive))
        alive = alive & (token != EOS)
        state = jnp.maximum(next_state[state, token], 0)
    return tuple(jnp.stack(column, axis=1) for column in zip(*found, strict=True))  # type: ignore[return-value]


def make_train(config: GRPOConfig, *, binary: bool, budget: Budget) -> Callable[[jax.Array], jax.Array]:
    """A run of an algorithm: key → the table after it. The step size falls to 0, so that what is left is no noise."""
    recipe, next_state = grpo_recipe(config), jnp.asarray(children())
    ref_logits = jnp.asarray(tree().ref_logits, jnp.float32)
    size = config.num_generations
    count = max(8 * budget.num_groups // size, 1) * size
    optimizer = optax.adam(optax.linear_schedule(budget.learning_rate, 0.0, budget.num_steps))

    def rollouts_of(table: jax.Array, key: jax.Array) -> tuple[Rollouts, jax.Array, jax.Array]:
        states, tokens, mask = sample(table, next_state, key, count)
        chosen = partial(_chosen, states=states, tokens=tokens, mask=mask)
        scores = rewards_of(tokens, mask, binary=binary)
        _, best, of_best = sample(table, next_state, None, 1)
        greedy = jnp.broadcast_to(rewards_of(best, of_best, binary=binary), (count,))
        old = chosen(table)
        inputs: Any = None  # no model reads them
        sequences = Sequences(inputs, jnp.zeros(count, jnp.int32), mask)
        found = Rollouts(
            sequences,
            Scored(old, chosen(ref_logits)),
            place_scores(scores, mask),
            old,
            jnp.arange(count) // size,
            greedy,
        )
        return found, states, tokens

    def step(carry: Any, key: jax.Array) -> tuple[Any, None]:
        table, opt_state = carry
        rollouts, states, tokens = rollouts_of(table, key)
        kept = recipe.selected(rollouts)
        mask = kept.sequences.mask
        rewards, _ = recipe.scaled_rewards(kept, recipe.scaling.init())
        coef = 0.0 if recipe.kl is None else recipe.kl.coef
        targets = recipe.targets(rewards, kept.scored, mask, coef, kept.groups, kept.sampler_logprobs)

        def loss(table: jax.Array) -> jax.Array:
            now = _chosen(table, states=states, tokens=tokens, mask=mask)
            return recipe.loss(Predictions(now, None, None, lambda: table), targets).mean

        updates, opt_state = optimizer.update(jax.grad(loss)(table), opt_state)
        return (optax.apply_updates(table, updates), opt_state), None

    def train(key: jax.Array) -> jax.Array:
        (table, _), _ = jax.lax.scan(
            step, (ref_logits, optimizer.init(ref_logits)), jax.random.split(key, budget.num_steps)
        )
        return table

    return train


def _chosen(table: jax.Array, *, states: jax.Array, tokens: jax.Array, mask: jax.Array) -> jax.Array:
    """log π of the actions; 0 where there is none."""
    found = jnp.take_along_axis(jax.nn.log_softmax(table)[states], tokens[..., None], axis=-1)[..., 0]
    return jnp.where(mask, found, 0.0)


def regret_of(table: jax.Array, *, binary: bool) -> float:
    """J* − J(π), exactly: of the chance to be right where `binary`, else of the reward less 0.5 times the KL."""
    with jax.enable_x64(True):
        logits, world = np.asarray(table, np.float64), tree()
        if not binary:
            return optimum(BETA)[0] - float(objective(logits, BETA))
        chances = jnp.exp(jnp.sum(action_logprobs(logits), axis=1))
        right = rewards_of(jnp.asarray(world.tokens), jnp.asarray(world.mask), binary=True)
        return 1.0 - float(chances @ right)


def regrets(config: GRPOConfig, *, binary: bool, budget: Budget, num_seeds: int = SEEDS) -> list[float]:
    """Regret of each seed after training."""
    train = jax.jit(make_train(config, binary=binary, budget=budget))
    return [regret_of(train(jax.random.key(seed)), binary=binary) for seed in range(num_seeds)]


def fixed_point(estimator: Callable[..., Any] | None, *, weight: float, num_steps: int = 3000) -> float:
    """Regret where the expected gradient of an algorithm is 0, found by following it over all completions.

    Args:
      estimator: (log π, log π_ref) → the KL of an action in the loss; None: k1 in the reward.
      weight: Of the reward's gradient: (G − 1)/G of r − μ.
    """
    with jax.enable_x64(True):
        world = tree()
        mask, rewards = jnp.asarray(world.mask), jnp.asarray(world.rewards)
        ref_logprobs = action_logprobs(world.ref_logits)
        optimizer = optax.adam(optax.linear_schedule(0.05, 0.0, num_steps))

        def loss(table: jax.Array, chances: jax.Array) -> jax.Array:
            logprobs = action_logprobs(table)
            log_ratio = jnp.where(mask, logprobs - ref_logprobs, 0.0)
            score, kl = rewards, 0.0
            if estimator is None:
                score = rewards - BETA * jax.lax.stop_gradient(jnp.sum(log_ratio, axis=1))
            else:
                of_actions = estimator(logprobs, ref_logprobs)
                kl = BETA * jnp.sum(jnp.where(mask, of_actions, 0.0), axis=1)
            return jnp.sum(chances * (kl - weight * score * jnp.sum(logprobs, axis=1)))

        def step(carry: Any, _: None) -> tuple[Any, None]:
            table, state = carry
            chances = jnp.exp(jnp.sum(action_logprobs(table), axis=1))
            updates, state = optimizer.update(jax.grad(loss)(table, chances), state)
            return (optax.apply_updates(table, updates), state), None

        start = jnp.asarray(world.ref_logits)
        run = jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=num_steps)[0][0])
        return regret_of(run(), binary=False)


def alike(rows: Mapping[str, list[float]]) -> dict[tuple[str, ...], list[float]]:
    """Algorithms that came to the same numbers, together: one pass on the policy clips nothing."""
    found: dict[tuple[float, ...], list[str]] = {}
    for name, values in rows.items():
        found.setdefault(tuple(values), []).append(name)
    return {tuple(names): list(values) for values, names in found.items()}


def _threes(names: tuple[str, ...]) -> list[str]:
    return [", ".join(names[i : i + 3]) for i in range(0, len(names), 3)]


def plot(found: Mapping[str, Mapping[str, list[float]]], path: str) -> None:
    """Draws the regrets of both settings, a point a seed."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, 2, figsize=(11, 5), layout="constrained", gridspec_kw={"width_ratios": [3, 2]}
    )
    titles = ("right or wrong: chance to be wrong", f"reward less {BETA} KL: J* − J(π)")
    for axes, title, rows in zip(panels, titles, found.values(), strict=True):
        together = alike(rows)
        ordered = sorted(together, key=lambda names: float(np.mean(together[names])))
        for place, names in enumerate(ordered):
            axes.plot(together[names], [place] * SEEDS, "o", color="tab:blue", alpha=0.5)
        axes.set_yticks(range(len(ordered)), [",\n".join(_threes(names)) for names in ordered])
        axes.set_xscale("log")
        axes.set_title(title)
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=110)


def main(table: str, picture: str) -> None:
    """Trains all, and writes the regrets and their plot."""
    found: dict[str, dict[str, list[float]]] = {"right_or_wrong": {}, "held_to_reference": {}}
    for setting, configs, binary, budget in (
        ("right_or_wrong", RIGHT_OR_WRONG, True, SHORT),
        ("held_to_reference", HELD_TO_REFERENCE, False, LONG),
    ):
        for name, config in configs.items():
            left = regrets(config, binary=binary, budget=budget)
            found[setting][name] = [round(value, 6) for value in left]
            print(setting, name, found[setting][name], flush=True)
    Path(table).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    plot(found, picture)


if __name__ == "__main__":
    main(*sys.argv[1:])

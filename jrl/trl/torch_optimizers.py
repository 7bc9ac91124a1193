# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules of torch, by object or class, as jrl's own: their numbers are taken over, not the objects.

A step of torch's optimizer moves torch's parameters, which train nothing here. Its class says the method, its
`param_groups` the arguments. A schedule of torch is stepped through once and becomes a table of rates.
"""

from __future__ import annotations

import copy
import inspect
import warnings
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
import optax

NATIVE: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "Adam": ("adam", ("betas", "eps", "weight_decay")),
    "AdamW": ("adamw", ("betas", "eps", "weight_decay")),
    "SGD": ("sgd", ("momentum", "nesterov", "weight_decay")),
    "RMSprop": ("rmsprop", ("alpha", "eps", "momentum", "weight_decay")),
    "Lion": ("lion", ("betas", "weight_decay")),
}
"""Class of torch (Lion: of its packages) → (jrl's name, arguments that both have)."""
_ONLY_OFF = ("amsgrad", "maximize", "dampening", "centered")
Named = tuple[str, dict[str, Any]]


def is_torch_optimizer(value: Any) -> bool:
    """True for an optimizer of torch or its class; optax's are named tuples without `param_groups`."""
    made = value if isinstance(value, type) else type(value)
    return hasattr(value, "param_groups") or any(
        base.__module__.startswith("torch.optim") for base in made.__mro__
    )


def is_torch_schedule(value: Any) -> bool:
    """True for a learning-rate scheduler of torch, transformers' among them."""
    return hasattr(value, "get_last_lr") and hasattr(value, "state_dict")


def named_optimizer(value: Any, kwargs: Mapping[str, Any] | None = None) -> Named:
    """(jrl's name, arguments) of a torch optimizer.

    Args:
      value: The object, or its class with `kwargs`.
      kwargs: Arguments of the class, of which torch's defaults fill in the rest; None: nothing is known of them.
    Raises:
      TypeError: If the class has no such argument.
      ValueError: If jrl has no such method, an argument has no counterpart, or the groups differ.
    """
    label = (value if isinstance(value, type) else type(value)).__name__
    if label not in NATIVE:
        raise ValueError(
            f"`optimizer`: torch's {label} has no counterpart here; {sorted(NATIVE)} have. Give one of them, a pair "
            "(name, arguments) of jrl's, or an optax transformation."
        )
    name, taken = NATIVE[label]
    groups = [_of_class(value, kwargs)] if isinstance(value, type) else value.param_groups
    for option in _ONLY_OFF:
        if any(group.get(option) for group in groups):
            raise ValueError(f"`optimizer`: {label}'s `{option}` has no counterpart here; leave it off.")
    found = [_arguments(group, taken) for group in groups]
    decays = {group.pop("weight_decay") for group in found if "weight_decay" in group} - {0}
    if any(group != found[0] for group in found) or len(decays) > 1:
        raise ValueError(
            f"`optimizer`: the groups of {label} must have the same arguments, except that some have no weight decay "
            "(norms and biases never have any here); got groups that differ. Give an optax.multi_transform instead."
        )
    known = any("weight_decay" in group for group in groups)
    return name, found[0] | ({"weight_decay": max(decays, default=0.0)} if known else {})


def _of_class(make: type, kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
    """The group that an object of the class would have."""
    if kwargs is None:
        return {}
    found = inspect.signature(make).bind_partial(**kwargs)
    found.apply_defaults()
    return found.arguments


def _arguments(group: Mapping[str, Any], taken: tuple[str, ...]) -> dict[str, Any]:
    """Entries of a group that jrl takes; a schedule's own start counts as the rate."""
    found = {name: group[name] for name in taken if name in group}
    if "betas" in found:
        found["betas"] = [float(one) for one in found["betas"]]
    rate = group.get("initial_lr", group.get("lr"))
    return found if rate is None else {"lr": float(rate)} | found


def _copied(group: Mapping[str, Any]) -> dict[str, Any]:
    """A group's values: a schedule may change any of them, such as OneCycleLR the momentum."""
    return {name: copy.deepcopy(value) for name, value in group.items() if name != "params"}


def tabulated(scheduler: Any, steps: int) -> optax.Schedule:
    """A schedule of torch as a table of its rates; scheduler and optimizer are left as they were, whatever happens.

    Args:
      scheduler: Of torch or transformers, at its beginning.
      steps: Length of the table; its last rate holds beyond.
    Raises:
      ValueError: If it asks for a metric, or its groups have rates of their own.
    """
    label = type(scheduler).__name__
    if label == "ReduceLROnPlateau":
        raise ValueError(
            "`lr_scheduler`: ReduceLROnPlateau follows a metric, and a schedule here is a function of the step: give "
            "one, such as optax.exponential_decay(...)."
        )
    groups = scheduler.optimizer.param_groups
    before, values = copy.deepcopy(scheduler.state_dict()), [_copied(group) for group in groups]
    table, others = [], set()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that no optimizer stepped in between is what is meant
            for step in range(steps):
                if step:
                    scheduler.step()
                table.append({float(rate) for rate in scheduler.get_last_lr()})
                for group, start in zip(groups, values, strict=True):
                    others |= {name for name in start if name != "lr" and group[name] != start[name]}
    finally:
        scheduler.load_state_dict(before)
        for group, start in zip(groups, values, strict=True):
            for name in group.keys() - start.keys() - {"params"}:
                del group[name]
            group.update(start)
    if any(len(step) > 1 for step in table):
        raise ValueError(f"`lr_scheduler`: the groups of {label} must have one rate, got several.")
    if others:
        warnings.warn(
            f"`lr_scheduler`: {label} also changes {', '.join(sorted(others))}, which stay here as they begin: the "
            "rate alone follows it.",
            stacklevel=5,
        )
    found = jnp.asarray([step.pop() for step in table], jnp.float32)
    return lambda count: found[jnp.minimum(count, steps - 1)]

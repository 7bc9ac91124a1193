# SPDX-License-Identifier: Apache-2.0
"""Optimizers and learning-rate schedules by name: torch's names and defaults, optax's arithmetic.

Every optimizer made here clips the global norm of the accumulated gradient, counts its own steps for the
schedule, leaves norms, biases and the like out of weight decay, and skips (and counts) a step whose gradient is not
finite.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from jrl.learners.guards import clip_by_global_norm, skip_nonfinite
from jrl.mesh import path_name
from jrl.suggestions import did_you_mean

UNDECAYED = ("scale", "magnitude", "log_rates", "sinks", "skip", "stream_scale", "answer_scale")
"""Last names of leaves that are neither weights of a linear map nor biases; a bias is told by the end of its name."""

Rate = Callable[[float], optax.Schedule]
"""A schedule that waits for the base learning rate, which the optimizer's arguments hold."""


class RateState(NamedTuple):
    """State of the last link of every chain.

    Attributes:
      steps: Optimizer steps taken, or left out on purpose (`pass_over`); those skipped as non-finite do not count.
      learning_rate: Rate of the last step taken, kept to be logged.
    """

    steps: Int[Array, ""]
    learning_rate: Float[Array, ""]


def _scale_by_rate(schedule: optax.Schedule) -> optax.GradientTransformation:
    """Multiplies updates by minus the scheduled rate."""

    def init(params: optax.Params) -> RateState:
        del params
        return RateState(jnp.zeros((), jnp.int32), jnp.asarray(schedule(jnp.int32(0)), jnp.float32))

    def update(
        updates: optax.Updates, state: RateState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, RateState]:
        del params
        rate = jnp.asarray(schedule(state.steps), jnp.float32)
        scaled = jax.tree.map(lambda u: (-rate * u).astype(u.dtype), updates)
        return scaled, RateState(state.steps + 1, rate)

    return optax.GradientTransformation(init, update)


def decayed(params: optax.Params) -> Any:
    """True for every leaf that weight decay applies to: all but norm scales, biases, decay rates and sinks.

    They are told by name, because dimensions do not tell them: a bias of (heads, head width) has two.
    """

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        name = path_name(path).rsplit("/", 1)[-1]
        return name not in UNDECAYED and not name.endswith("bias")

    return jax.tree_util.tree_map_with_path(is_decayed, params)


def _decay(weight_decay: float) -> optax.GradientTransformation:
    return optax.add_decayed_weights(weight_decay, mask=decayed) if weight_decay else optax.identity()


def _adam(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    # torch's Adam adds the decay to the gradient, so it passes through the moments (L2 coupling).
    return optax.chain(_decay(weight_decay), optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps))


def _adamw(
    *, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_adam(b1=betas[0], b2=betas[1], eps=eps), _decay(weight_decay))


def _sgd(
    *, momentum: float = 0.0, nesterov: bool = False, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    heavy_ball = optax.trace(decay=momentum, nesterov=nesterov) if momentum else optax.identity()
    return optax.chain(_decay(weight_decay), heavy_ball)


def _rmsprop(
    *, alpha: float = 0.99, eps: float = 1e-8, momentum: float = 0.0, weight_decay: float = 0.0
) -> optax.GradientTransformation:
    heavy_ball = optax.trace(decay=momentum) if momentum else optax.identity()
    # torch adds eps outside the root.
    scale = optax.scale_by_rms(decay=alpha, eps=eps, eps_in_sqrt=False)
    return optax.chain(_decay(weight_decay), scale, heavy_ball)


def _lion(
    *, betas: tuple[float, float] = (0.9, 0.99), weight_decay: float = 0.0
) -> optax.GradientTransformation:
    return optax.chain(optax.scale_by_lion(b1=betas[0], b2=betas[1]), _decay(weight_decay))


def _adafactor(*, weight_decay: float = 0.0, clip_threshold: float = 1.0) -> optax.GradientTransformation:
    # The memory-saving second moment of adafactor with an ordinary learning rate (no relative step size).
    return optax.chain(
        optax.scale_by_factored_rms(), optax.clip_by_block_rms(clip_threshold), _decay(weight_decay)
    )


OPTIMIZERS: dict[str, Callable[..., optax.GradientTransformation]] = {
    "adafactor": _adafactor,
    "adam": _adam,
    "adamw": _adamw,
    "lion": _lion,
    "rmsprop": _rmsprop,
    "sgd": _sgd,
}


def _constant() -> Rate:
    return lambda lr: optax.constant_schedule(lr)


def _cosine_annealing(*, T_max: float, eta_min: float = 0.0) -> Rate:
    if not T_max > 0:
        raise ValueError(f"scheduler 'cosine_annealing': `T_max` must be positive steps, got {T_max}.")

    def rate(learning_rate: float) -> optax.Schedule:
        def schedule(count: Any) -> Any:
            phase = jnp.pi * (count / T_max)
            return eta_min + 0.5 * (learning_rate - eta_min) * (1.0 + jnp.cos(phase))

        return schedule

    return rate


def _line(start: float, end: float, steps: int) -> optax.Schedule:
    """Linear schedule from start to end in so many steps; of none, optax would keep the start for ever."""
    return optax.linear_schedule(start, end, steps) if steps else optax.constant_schedule(end)


def _linear(*, start_factor: float = 1 / 3, end_factor: float = 1.0, total_iters: int = 5) -> Rate:
    return lambda lr: _line(lr * start_factor, lr * end_factor, total_iters)


def _warmup_constant(*, warmup_steps: int) -> Rate:
    return lambda lr: _line(0.0, lr, warmup_steps)


def _warmup_linear(*, warmup_steps: int, total_steps: int, eta_min: float = 0.0) -> Rate:
    if total_steps < warmup_steps:
        raise ValueError(
            f"scheduler 'warmup_linear': `total_steps` counts the {warmup_steps} `warmup_steps` too, got {total_steps}."
        )
    return lambda lr: optax.join_schedules(
        [_line(0.0, lr, warmup_steps), _line(lr, eta_min, total_steps - warmup_steps)], [warmup_steps]
    )


def _warmup_cosine(*, warmup_steps: int, total_steps: int, eta_min: float = 0.0) -> Rate:
    return lambda lr: optax.warmup_cosine_decay_schedule(0.0, lr, warmup_steps, total_steps, eta_min)


def _warmup_polynomial(
    *, warmup_steps: int, total_steps: int, eta_min: float = 0.0, power: float = 1.0
) -> Rate:
    return lambda lr: optax.join_schedules(
        [
            _line(0.0, lr, warmup_steps),
            optax.polynomial_schedule(lr, eta_min, power, max(total_steps - warmup_steps, 1)),
        ],
        [warmup_steps],
    )


def _warmup_cosine_restarts(*, warmup_steps: int, total_steps: int, num_cycles: int = 1) -> Rate:
    def falling(count: Any) -> Any:
        progress = count / max(1, total_steps - warmup_steps)
        phase = jnp.mod(num_cycles * progress, 1.0)
        return jnp.where(progress < 1.0, 0.5 * (1.0 + jnp.cos(jnp.pi * phase)), 0.0)

    return lambda lr: optax.join_schedules(
        [_line(0.0, lr, warmup_steps), lambda count: lr * falling(count)], [warmup_steps]
    )


def _warmup_inverse_sqrt(*, warmup_steps: int, timescale: float | None = None) -> Rate:
    scale = timescale or warmup_steps or 10_000
    return lambda lr: optax.join_schedules(
        [_line(0.0, lr, warmup_steps), lambda count: lr / jnp.sqrt((count + scale) / scale)], [warmup_steps]
    )


_RISES: dict[str, Callable[[Any], Any]] = {
    "linear": lambda progress: progress,
    "cosine": lambda progress: 0.5 * (1.0 - jnp.cos(jnp.pi * progress)),
    "1-sqrt": lambda progress: 1.0 - jnp.sqrt(1.0 - progress),
}
_FALLS: dict[str, Callable[[Any, float], Any]] = {
    "linear": lambda progress, _: 1.0 - progress,
    "cosine": lambda progress, cycles: 0.5 * (1.0 + jnp.cos(jnp.pi * cycles * 2.0 * progress)),
    "1-sqrt": lambda progress, _: 1.0 - jnp.sqrt(progress),
}


def _warmup_stable_decay(
    *,
    warmup_steps: int,
    stable_steps: int,
    decay_steps: int,
    warmup_type: str = "linear",
    decay_type: str = "cosine",
    min_lr_ratio: float = 0.0,
    num_cycles: float = 0.5,
) -> Rate:
    for label, given, table in (("warmup_type", warmup_type, _RISES), ("decay_type", decay_type, _FALLS)):
        if given not in table:
            raise ValueError(
                f"scheduler 'warmup_stable_decay': `{label}` must be one of {sorted(table)}, got {given!r}."
            )

    def rate(learning_rate: float) -> optax.Schedule:
        def part(share: Any) -> Any:
            return learning_rate * jnp.maximum(share * (1.0 - min_lr_ratio) + min_lr_ratio, 0.0)

        rise = lambda count: part(_RISES[warmup_type](jnp.minimum(count / max(1, warmup_steps), 1.0)))  # noqa: E731
        fall = lambda count: part(  # noqa: E731
            _FALLS[decay_type](jnp.minimum(count / max(1, decay_steps), 1.0), num_cycles)
        )
        pieces = [
            rise,
            optax.constant_schedule(learning_rate),
            fall,
            optax.constant_schedule(learning_rate * min_lr_ratio),
        ]
        ends = [warmup_steps, warmup_steps + stable_steps, warmup_steps + stable_steps + decay_steps]
        return optax.join_schedules(pieces, ends)

    return rate


SCHEDULES: dict[str, Callable[..., Rate]] = {
    "constant": _constant,
    "cosine_annealing": _cosine_annealing,
    "linear": _linear,
    "warmup_constant": _warmup_constant,
    "warmup_cosine": _warmup_cosine,
    "warmup_cosine_restarts": _warmup_cosine_restarts,
    "warmup_inverse_sqrt": _warmup_inverse_sqrt,
    "warmup_linear": _warmup_linear,
    "warmup_polynomial": _warmup_polynomial,
    "warmup_stable_decay": _warmup_stable_decay,
}


def make_schedule(name: str, kwargs: Mapping[str, Any]) -> Rate:
    """A learning-rate schedule by name; it counts optimizer steps, never microbatches.

    - `constant`.
    - `cosine_annealing(T_max, eta_min=0)`: eta_min + ½(lr − eta_min)(1 + cos(π t / T_max)), so periodic.
    - `linear(start_factor=1/3, end_factor=1, total_iters=5)`: from lr·start_factor to lr·end_factor.
    - `warmup_constant(warmup_steps)`, `warmup_linear(warmup_steps, total_steps, eta_min=0)`,
      `warmup_polynomial(warmup_steps, total_steps, eta_min=0, power=1)`,
      `warmup_cosine(warmup_steps, total_steps, eta_min=0)`: from 0 to lr in `warmup_steps`, then as named.
    - `warmup_cosine_restarts(warmup_steps, total_steps, num_cycles=1)`: falls to 0 and jumps back to lr so often.
    - `warmup_inverse_sqrt(warmup_steps, timescale=None)`: lr / √(1 + t / timescale) behind it; None: its length.
    - `warmup_stable_decay(warmup_steps, stable_steps, decay_steps, warmup_type="linear", decay_type="cosine",
      min_lr_ratio=0, num_cycles=0.5)`: from lr·min_lr_ratio up, constant, down to it again; the types are `linear`,
      `cosine` and `1-sqrt`.

    Args:
      name: One of the above; case does not matter.
      kwargs: The schedule's arguments.
    Returns:
      `learning_rate -> schedule`; the base rate stands in the optimizer's arguments.
    Raises:
      ValueError: On an unknown name or argument, or one that is missing.
    """
    builder = _look_up(name, SCHEDULES, section="scheduler")
    arguments = _checked(kwargs, builder, section=f"scheduler {name!r}")
    rate: Rate = builder(**arguments)
    return rate


def make_optimizer(
    name: str, kwargs: Mapping[str, Any], schedule: Rate, *, max_grad_norm: float | None
) -> optax.GradientTransformation:
    """An optimizer by name, ready for a learner.

    Args:
      name: `adam`, `adamw`, `sgd`, `rmsprop`, `lion` or `adafactor`; case does not matter.
      kwargs: torch's names and defaults: `lr` (required), `betas`, `eps`, `weight_decay`, `momentum`, ...
        ε of Adam is added outside the root, to the bias-corrected moment.
      schedule: From `make_schedule`.
      max_grad_norm: The whole optimizer batch's gradient is scaled down to this global norm; None: never.
    Returns:
      An optimizer whose state is optax's `ApplyIfFiniteState`: a step whose gradient is not finite changes
      neither parameters nor moments and is counted in `notfinite_count` (in a row) and `total_notfinite`.
    Raises:
      ValueError: On an unknown name or argument, one that is missing, or one out of range.
    """
    if _is_of_bitsandbytes(name):
        raise ValueError(
            f"optimizer {name!r}: 8-bit moments of bitsandbytes need torch. To save optimizer memory, "
            "train LoRA adapters (`model.peft_config`) or fewer layers (`model.num_layers_unfrozen`)."
        )
    builder = _look_up(name, OPTIMIZERS, section="optimizer")
    arguments = dict(kwargs)
    if "lr" not in arguments:
        raise ValueError(
            f"optimizer {name!r}: `lr` is required in optimizer.kwargs, got {sorted(arguments)}."
        )
    learning_rate = arguments.pop("lr")
    _check_number("lr", learning_rate, section=f"optimizer {name!r}")
    arguments = _checked(arguments, builder, section=f"optimizer {name!r}")
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(f"`max_grad_norm` must be positive, or None for no clipping, got {max_grad_norm}.")
    clip = optax.identity() if max_grad_norm is None else clip_by_global_norm(max_grad_norm)
    chain = optax.chain(clip, builder(**arguments), _scale_by_rate(schedule(learning_rate)))
    return skip_nonfinite(chain)


def learning_rate(opt_state: optax.OptState) -> Float[Array, ""] | None:
    """Rate of the last step taken, if the optimizer came from `make_optimizer`; None otherwise."""
    rate: Float[Array, ""] | None = optax.tree.get(opt_state, "learning_rate", default=None)
    return rate


def pass_over(opt_state: optax.OptState, num_steps: int | Int[Array, ""]) -> optax.OptState:
    """The state after steps that were left out on purpose: the schedule goes on, so that it ends when the run does."""
    steps = optax.tree.get(opt_state, "steps", default=None)
    return opt_state if steps is None else optax.tree.set(opt_state, steps=steps + num_steps)


def check_optimizer(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuses names that `make_optimizer` does not know; what is missing or out of range is left to it.

    Args:
      name: Of an optimizer. Those of bitsandbytes pass: `make_optimizer` says what to take instead.
      kwargs: Its arguments, `lr` among them.
    Raises:
      ValueError: On an unknown name or argument, naming the closest one.
    """
    if not _is_of_bitsandbytes(name):
        builder = _look_up(name, OPTIMIZERS, section="optimizer")
        _check_known(kwargs, ["lr", *inspect.signature(builder).parameters], section=f"optimizer {name!r}")


def check_schedule(name: str, kwargs: Mapping[str, Any]) -> None:
    """Refuses names that `make_schedule` does not know; what is missing or out of range is left to it.

    Args:
      name: Of a schedule.
      kwargs: Its arguments.
    Raises:
      ValueError: On an unknown name or argument, naming the closest one.
    """
    builder = _look_up(name, SCHEDULES, section="scheduler")
    _check_known(kwargs, inspect.signature(builder).parameters, section=f"scheduler {name!r}")


def _is_of_bitsandbytes(name: str) -> bool:
    return name.lower().endswith("_8bit_bnb")


def _look_up(name: str, table: Mapping[str, Callable[..., Any]], *, section: str) -> Callable[..., Any]:
    if name.lower() not in table:
        hint = did_you_mean(name, table)
        raise ValueError(
            f"`{section}.name`: unknown name {name!r}; known are {', '.join(sorted(table))}.{hint}"
        )
    return table[name.lower()]


def _checked(kwargs: Mapping[str, Any], builder: Callable[..., Any], *, section: str) -> dict[str, Any]:
    """The arguments, once all are known, numbers, and none is missing."""
    parameters = inspect.signature(builder).parameters
    _check_known(kwargs, parameters, section=section)
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in kwargs:
            raise ValueError(f"{section}: `{name}` is required, got {sorted(kwargs)}.")
    for name, value in kwargs.items():
        if parameters[name].annotation != "str":
            _check_number(name, value, section=section)
    return dict(kwargs)


def _check_known(kwargs: Mapping[str, Any], known: Iterable[str], *, section: str) -> None:
    names = list(known)
    for name in kwargs:
        if name not in names:
            hint = did_you_mean(name, names)
            if "lr" in names and str(name).startswith("learning"):
                hint = " Did you mean `lr`?"
            raise ValueError(f"{section}: unknown argument `{name}`; it takes {names}.{hint}")


_NUMBER = "a finite number that is not negative"
_EXPECTED = {"betas": "two finite numbers that are not negative"}


def _check_number(label: str, value: Any, *, section: str) -> None:
    pair = label == "betas" and isinstance(value, list | tuple) and len(value) == 2
    for part in value if pair else (None,) if label == "betas" else (value,):
        if not isinstance(part, int | float) or not math.isfinite(part) or part < 0:
            raise ValueError(
                f"{section}: `{label}` must be {_EXPECTED.get(label, _NUMBER)}, got {value!r}. "
                "In YAML, a number without a dot such as 1e-4 is text to some readers."
            )

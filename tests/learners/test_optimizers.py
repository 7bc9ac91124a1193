# SPDX-License-Identifier: Apache-2.0
"""Optimizers and schedules: hand values, torch's own steps, decay, names and errors."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

from jrl.learners.optimizers import (
    OPTIMIZERS,
    SCHEDULES,
    decayed,
    learning_rate,
    make_optimizer,
    make_schedule,
)
from jrl.models.model import make_model
from tests.models.family_cases import CASES

CONSTANT = make_schedule("constant", {})


def steps(optimizer: optax.GradientTransformation, params: Any, gradients: list[Any]) -> list[Any]:
    """Parameters after each step."""
    state, visited = optimizer.init(params), []
    for gradient in gradients:
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        visited.append(params)
    return visited


class TestAdam:
    GRADIENTS = (1e-6, -3e-6, 2e-6)  # as small as ε, or ε would not show

    def by_hand(self, eps: float, *, tf1: bool = False) -> list[float]:
        """θ ← θ − lr·m̂/(√v̂ + ε) in float64; in TF1's form ε is not bias-corrected."""
        theta = m = v = 0.0
        visited = []
        for t, g in enumerate(self.GRADIENTS, start=1):
            m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
            effective = eps / math.sqrt(1 - 0.999**t) if tf1 else eps
            theta -= 0.01 * (m / (1 - 0.9**t)) / (math.sqrt(v / (1 - 0.999**t)) + effective)
            visited.append(theta)
        return visited

    @pytest.mark.parametrize("eps", [1e-8, 1e-5])
    def test_lore_7_1_epsilon_is_outside_the_root_of_the_corrected_moment(self, eps: float) -> None:
        optimizer = make_optimizer("adam", {"lr": 0.01, "eps": eps}, CONSTANT, max_grad_norm=None)
        visited = steps(optimizer, jnp.zeros(()), [jnp.float32(g) for g in self.GRADIENTS])
        # 1 − 0.999 in float32 is right to 3e-5; the second step nearly cancels the first.
        np.testing.assert_allclose(
            visited, self.by_hand(eps), rtol=1e-4, atol=1e-5 * abs(self.by_hand(eps)[0])
        )
        # TF1's form is far from that at the first step: ε is in effect 32 times as large.
        assert abs(self.by_hand(1e-5, tf1=True)[0]) < abs(self.by_hand(1e-5)[0]) / 10

    def test_l2_of_adam_passes_through_the_moments_and_decay_of_adamw_does_not(self) -> None:
        params, zero = {"kernel": jnp.full(1, 2.0)}, {"kernel": jnp.zeros(1)}
        arguments = {"lr": 0.1, "weight_decay": 0.01}
        coupled = steps(make_optimizer("adam", arguments, CONSTANT, max_grad_norm=None), params, [zero])
        assert float(coupled[0]["kernel"][0]) == pytest.approx(
            2.0 - 0.1, rel=1e-5
        )  # m̂/√v̂ = 1 whatever the size
        decoupled = steps(make_optimizer("adamw", arguments, CONSTANT, max_grad_norm=None), params, [zero])
        assert float(decoupled[0]["kernel"][0]) == pytest.approx(2.0 * (1 - 0.1 * 0.01), rel=1e-6)

    def test_adamw_decays_by_a_hundredth_unless_told(self) -> None:
        params, zero = {"kernel": jnp.full(1, 2.0)}, {"kernel": jnp.zeros(1)}
        visited = steps(make_optimizer("adamw", {"lr": 0.1}, CONSTANT, max_grad_norm=None), params, [zero])
        assert float(visited[0]["kernel"][0]) == pytest.approx(2.0 * (1 - 0.1 * 0.01), rel=1e-6)


def test_lore_7_5_decay_skips_norms_and_biases() -> None:
    params = {
        "attn": {"q": {"kernel": jnp.ones((2, 2, 2)), "bias": jnp.ones((2, 2))}},
        "attn_norm": {"scale": jnp.ones(2), "bias": jnp.ones(2)},
        "embed": {"embedding": jnp.ones((3, 2))},
    }
    assert decayed(params) == {
        "attn": {"q": {"kernel": True, "bias": False}},
        "attn_norm": {"scale": False, "bias": False},
        "embed": {"embedding": True},
    }
    for name in ("adamw", "adam", "sgd", "lion"):
        optimizer = make_optimizer(name, {"lr": 0.1, "weight_decay": 0.5}, CONSTANT, max_grad_norm=None)
        (after,) = steps(optimizer, params, [jax.tree.map(jnp.zeros_like, params)])
        moved = jax.tree.map(lambda old, new: bool(jnp.any(old != new)), params, after)
        assert moved == decayed(params), name


def test_of_every_family_only_weights_of_linear_maps_tables_and_convolutions_decay() -> None:
    paths = {path for case in CASES.values() for entry in make_model(case).entries() for path in entry.paths}
    tree = traverse_util.unflatten_dict(dict.fromkeys(paths, 0), sep="/")
    found = traverse_util.flatten_dict(decayed(tree), sep="/")
    last = {True: set[str](), False: set[str]()}
    for path, is_decayed in found.items():
        last[is_decayed].add(path.rsplit("/", 1)[-1])
    taps = {"taps", "q_taps", "k_taps", "v_taps"}
    assert last[True] == {"kernel", "embedding", "gate", "up", "down"} | taps
    biases = {"bias", "choice_bias", "decay_bias", "gate_bias", "up_bias", "down_bias"}
    biases |= {"step_bias", "q_taps_bias", "k_taps_bias", "v_taps_bias"}
    assert last[False] == {"scale", "answer_scale", "stream_scale", "log_rates", "sinks", "skip"} | biases


class TestSchedules:
    def rates(self, name: str, kwargs: dict[str, Any], counts: list[int], lr: float = 1.0) -> list[float]:
        schedule = make_schedule(name, kwargs)(lr)
        return [float(schedule(jnp.int32(count))) for count in counts]

    def test_lore_7_4_rates_at_the_start_after_one_step_at_the_end_of_warm_up_and_last(self) -> None:
        warm = {"warmup_steps": 10, "total_steps": 110}
        at = [0, 1, 10, 110]
        assert self.rates("warmup_constant", {"warmup_steps": 10}, at) == pytest.approx([0, 0.1, 1, 1])
        assert self.rates("warmup_linear", warm, at) == pytest.approx([0, 0.1, 1, 0], abs=1e-6)
        assert self.rates("warmup_cosine", warm | {"eta_min": 0.2}, at) == pytest.approx(
            [0, 0.1, 1, 0.2], abs=1e-6
        )
        assert self.rates("constant", {}, at, lr=3e-5) == pytest.approx([3e-5] * 4)

    def test_lore_7_4_the_rate_used_is_the_one_logged_and_counts_optimizer_steps(self) -> None:
        optimizer = make_optimizer(
            "sgd", {"lr": 1.0}, make_schedule("warmup_constant", {"warmup_steps": 4}), max_grad_norm=None
        )
        params, state = jnp.zeros(()), optimizer.init(jnp.zeros(()))
        for step in range(6):
            updates, state = optimizer.update(jnp.float32(1), state, params)
            assert float(updates) == -min(step / 4, 1.0)
            assert float(learning_rate(state)) == -float(updates)
        # A skipped step is no step: the schedule waits.
        _, state = optimizer.update(jnp.float32(jnp.nan), state, params)
        assert int(state.inner_state[-1].steps) == 6 and int(state.total_notfinite) == 1

    def test_cosine_annealing_goes_down_and_up_again(self) -> None:
        kwargs = {"T_max": 100, "eta_min": 0.1}
        assert self.rates("cosine_annealing", kwargs, [0, 50, 100, 150, 200]) == pytest.approx(
            [1, 0.55, 0.1, 0.55, 1], abs=1e-5
        )
        # The idiom of trlX's configurations for a constant rate.
        assert self.rates("cosine_annealing", {"T_max": 1e12, "eta_min": 3e-5}, [0, 10_000], lr=3e-5) == (
            pytest.approx([3e-5, 3e-5], rel=1e-6)
        )

    def test_linear_has_the_defaults_of_torch(self) -> None:
        assert self.rates("linear", {}, [0, 5, 50], lr=3.0) == pytest.approx([1, 3, 3])

    @pytest.mark.parametrize(
        ("name", "kwargs", "rates"),
        [
            ("warmup_constant", {"warmup_steps": 0}, [1, 1]),
            ("warmup_linear", {"warmup_steps": 0, "total_steps": 10}, [1, 0.5]),
            ("warmup_linear", {"warmup_steps": 0, "total_steps": 0, "eta_min": 0.25}, [0.25, 0.25]),
            ("warmup_cosine", {"warmup_steps": 0, "total_steps": 10}, [1, 0.5]),
            ("linear", {"total_iters": 0}, [1, 1]),
        ],
    )
    def test_a_ramp_of_no_steps_is_at_its_end(
        self, name: str, kwargs: dict[str, Any], rates: list[float]
    ) -> None:
        assert self.rates(name, kwargs, [0, 5]) == pytest.approx(rates)

    def test_all_steps_count_the_warm_up_too(self) -> None:
        with pytest.raises(ValueError, match=r"`total_steps` counts the 10 `warmup_steps` too, got 9"):
            make_schedule("warmup_linear", {"warmup_steps": 10, "total_steps": 9})


@pytest.mark.parametrize("name", sorted(OPTIMIZERS))
def test_every_optimizer_descends(name: str) -> None:
    optimizer = make_optimizer(name.upper(), {"lr": 0.05}, CONSTANT, max_grad_norm=1.0)

    def step(carry: Any, _: None) -> tuple[Any, jax.Array]:
        params, state = carry
        loss, gradient = jax.value_and_grad(lambda p: jnp.sum(jnp.square(p["kernel"] - 1.0)))(params)
        updates, state = optimizer.update(gradient, state, params)
        return (optax.apply_updates(params, updates), state), loss

    params = {"kernel": jnp.zeros((2, 2))}
    _, losses = jax.lax.scan(step, (params, optimizer.init(params)), None, length=100)
    assert losses[-1] < losses[0] / 10


class TestErrors:
    def make(self, name: str, **kwargs: Any) -> Any:
        return make_optimizer(name, {"lr": 1e-3} | kwargs, CONSTANT, max_grad_norm=None)

    def test_unknown_names_list_the_closest(self) -> None:
        with pytest.raises(ValueError, match=r"unknown name 'adamww'.*Did you mean `adamw`"):
            self.make("adamww")
        with pytest.raises(
            ValueError, match=r"unknown name 'cosine_anealing'.*Did you mean `cosine_annealing`"
        ):
            make_schedule("cosine_anealing", {"T_max": 1})

    def test_unknown_arguments_list_the_closest(self) -> None:
        with pytest.raises(ValueError, match=r"unknown argument `weight_decy`.*Did you mean `weight_decay`"):
            self.make("adamw", weight_decy=0.1)
        with pytest.raises(ValueError, match=r"unknown argument `eta_mn`.*Did you mean `eta_min`"):
            make_schedule("cosine_annealing", {"T_max": 10, "eta_mn": 0})

    def test_missing_arguments_are_named(self) -> None:
        with pytest.raises(ValueError, match="`lr` is required"):
            make_optimizer("adamw", {}, CONSTANT, max_grad_norm=None)
        with pytest.raises(ValueError, match="`T_max` is required"):
            make_schedule("cosine_annealing", {})

    def test_eight_bit_moments_are_refused_with_an_alternative(self) -> None:
        with pytest.raises(ValueError, match="LoRA"):
            self.make("adamw_8bit_bnb")

    @pytest.mark.parametrize(
        "kwargs",
        [
            {"lr": "1e-4"},
            {"lr": -1.0},
            {"lr": math.nan},
            {"lr": [1e-4]},
            {"betas": [0.9, "0.99"]},
            {"betas": 0.9},
            {"betas": [0.9]},
        ],
    )
    def test_numbers_must_be_numbers(self, kwargs: dict[str, Any]) -> None:
        with pytest.raises(ValueError, match="finite number"):
            self.make("adamw", **kwargs)

    def test_a_clip_of_zero_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`max_grad_norm` must be positive"):
            make_optimizer("sgd", {"lr": 1.0}, CONSTANT, max_grad_norm=0.0)

    def test_a_period_of_zero_is_refused(self) -> None:
        with pytest.raises(ValueError, match="`T_max` must be positive"):
            make_schedule("cosine_annealing", {"T_max": 0})


@pytest.mark.parity
class TestTorch:
    SETTINGS = (
        ("adam", "Adam", {"betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.1}),
        ("adamw", "AdamW", {"betas": (0.9, 0.95), "weight_decay": 0.1}),
        ("adamw", "AdamW", {}),
        ("sgd", "SGD", {"momentum": 0.9, "weight_decay": 0.1}),
        ("sgd", "SGD", {"momentum": 0.9, "nesterov": True}),
        ("rmsprop", "RMSprop", {"alpha": 0.9, "momentum": 0.5}),
    )

    @pytest.mark.parametrize(("name", "torch_name", "kwargs"), SETTINGS)
    def test_steps_equal_torch(self, name: str, torch_name: str, kwargs: dict[str, Any]) -> None:
        torch = pytest.importorskip("torch")
        rng = np.random.default_rng(0)
        start = rng.normal(size=(4, 3)).astype(np.float32)
        gradients = rng.normal(size=(10, 4, 3)).astype(np.float32)
        weight = torch.nn.Parameter(torch.tensor(start))
        reference = getattr(torch.optim, torch_name)([weight], lr=0.01, **kwargs)
        theirs = []
        for gradient in gradients:
            weight.grad = torch.tensor(gradient)
            reference.step()
            theirs.append(weight.detach().numpy().copy())
        optimizer = make_optimizer(name, {"lr": 0.01} | kwargs, CONSTANT, max_grad_norm=None)
        ours = steps(
            optimizer, {"kernel": jnp.asarray(start)}, [{"kernel": jnp.asarray(g)} for g in gradients]
        )
        np.testing.assert_allclose([o["kernel"] for o in ours], theirs, rtol=2e-5, atol=1e-6)

    @pytest.mark.parametrize(
        ("name", "torch_name", "kwargs"),
        [
            ("cosine_annealing", "CosineAnnealingLR", {"T_max": 7, "eta_min": 0.01}),
            ("linear", "LinearLR", {"start_factor": 0.25, "end_factor": 0.5, "total_iters": 6}),
        ],
    )
    def test_rates_equal_torch(self, name: str, torch_name: str, kwargs: dict[str, Any]) -> None:
        torch = pytest.importorskip("torch")
        reference = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.3)
        scheduler = getattr(torch.optim.lr_scheduler, torch_name)(reference, **kwargs)
        theirs = []
        for _ in range(14):
            theirs.append(scheduler.get_last_lr()[0])
            reference.step()
            scheduler.step()
        schedule = make_schedule(name, kwargs)(0.3)
        np.testing.assert_allclose(
            [float(schedule(jnp.int32(t))) for t in range(14)], theirs, rtol=1e-4, atol=1e-7
        )


def test_every_schedule_is_documented() -> None:
    for name in SCHEDULES:
        assert f"`{name}" in make_schedule.__doc__

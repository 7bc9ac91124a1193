# SPDX-License-Identifier: Apache-2.0
"""Losses, gradients and a whole epoch of DDPO, against what TRL 0.23.1 computed of the same trajectories."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.learners import ddpo
from jrl.learners.ddpo import init_ddpo_state, make_ddpo_update
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.ddpo_objective import DenoisingRows, ddpo_objective
from jrl.learners.ddpo_order import Order
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.ops.metrics import finalize
from jrl.ops.noise_schedule import denoising_steps
from jrl.rollout.prompt_statistics import global_advantages
from jrl.typing import DDPOBatch, DenoiserFns, Trajectories
from tests.diffusion_toy import SD_SCHEDULE

GOLDEN = Path(__file__).parents[1] / "golden" / "trl_ddpo_0231.npz"
WEIGHTS = ("mix", "look", "time")
STEPS = 5


@pytest.fixture(scope="module")
def stored() -> dict[str, np.ndarray]:
    with np.load(GOLDEN) as found:
        return dict(found)


def single(x: np.ndarray) -> jax.Array:
    return jnp.asarray(x, jnp.float32)


def channels_last(x: np.ndarray) -> jax.Array:
    return single(np.moveaxis(x, -3, -1))


def predict(params: Any, frozen: Any, latents: Any, timesteps: Any, context: Any) -> jax.Array:
    """The network of the golden file."""
    shift = jnp.mean(context, axis=1) @ params["look"]
    shift = shift + jnp.sin(timesteps[:, None] / 300.0) * params["time"][None, :]
    return 0.5 * jnp.tanh(latents @ params["mix"] + shift[:, None, None, :])


MODEL = DenoiserFns(
    encode=lambda frozen, tokens: tokens,
    predict=predict,
    reference=partial(predict, None),
    decode=lambda frozen, latents: latents,
)


def weights(stored: dict[str, np.ndarray]) -> dict[str, jax.Array]:
    return {name: single(stored[name]) for name in WEIGHTS}


@pytest.mark.parametrize("case", ["guided", "plain"])
def test_loss_kl_clip_fraction_and_gradients(case: str, stored: dict[str, np.ndarray]) -> None:
    column = 3
    rows = DenoisingRows(
        latents=channels_last(stored["latents"][:, column]),
        next_latents=channels_last(stored["latents"][:, column + 1]),
        steps=jnp.full(4, column, jnp.int32),
        old_logprobs=single(stored[f"loss_{case}_old"]),
        advantages=single(stored[f"loss_{case}_advantages"]),
        context=single(stored["context"]),
        negative=single(stored["negative"]),
        valid=jnp.ones(4, bool),
    )
    config = DDPOConfig(sample_num_steps=STEPS, train_cfg=case == "guided", train_clip_range=1e-3)

    @jax.jit
    def objective(params: Any) -> Any:
        loss_sum, weight, metrics = ddpo_objective(
            MODEL,
            params,
            {},
            rows,
            steps=denoising_steps(SD_SCHEDULE, STEPS, 1.0),
            schedule=SD_SCHEDULE,
            config=config,
        )
        return loss_sum / weight, metrics

    (loss, metrics), grads = jax.value_and_grad(objective, has_aux=True)(weights(stored))
    numbers = finalize(metrics)
    assert float(loss) == pytest.approx(float(stored[f"loss_{case}_loss"]), abs=1e-5)
    assert numbers["ddpo/approx_kl"] == pytest.approx(float(stored[f"loss_{case}_approx_kl"]), rel=1e-3)
    assert numbers["ddpo/clip_fraction"] == float(stored[f"loss_{case}_clipfrac"])
    for name in WEIGHTS:
        wanted = stored[f"loss_{case}_grad_{name}"]
        assert np.linalg.norm(grads[name] - wanted) <= 1e-3 * np.linalg.norm(wanted), name


@pytest.mark.slow
def test_an_epoch_of_two_passes(stored: dict[str, np.ndarray], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four samples, three of five steps each, two microbatches a step, in TRL's own order: the weights behind AdamW."""
    by_pass = stored["epoch_order"].reshape(2, 4, 3, 2)
    samples = by_pass[:, :, 0, 0]
    steps = np.zeros((2, 4, 3), np.int32)
    for number in range(2):
        steps[number, samples[number]] = by_pass[number, :, :, 1]
    order = Order(jnp.asarray(samples, jnp.int32), jnp.asarray(steps))
    monkeypatch.setattr(ddpo, "shuffled_order", lambda key, num_samples, config: order)
    config = DDPOConfig(
        sample_num_steps=STEPS,
        train_timestep_fraction=0.6,
        train_num_inner_epochs=2,
        train_clip_range=1e-2,
    )
    optimizer = make_optimizer(
        "adamw",
        {"lr": 1e-3, "betas": [0.9, 0.999], "weight_decay": 1e-4, "eps": 1e-8},
        make_schedule("constant", {}),
        max_grad_norm=1.0,
    )
    batch = DDPOBatch(
        Trajectories(channels_last(stored["latents"]), single(stored["logprobs"]), single(stored["context"])),
        single(stored["negative"]),
        jnp.asarray(global_advantages(stored["rewards"])),
    )
    update = jax.jit(make_ddpo_update(MODEL, SD_SCHEDULE, optimizer, config, batch_size=2, minibatch_size=1))
    start = weights(stored)
    state, metrics = update(init_ddpo_state(start, optimizer, config), {}, batch, jax.random.key(0))
    for name in WEIGHTS:
        wanted = stored[f"epoch_{name}"]
        np.testing.assert_allclose(state.train.params[name], wanted, rtol=1e-4, atol=1e-7)
        # Adam moves every entry by about the rate in each of four steps; the moves themselves agree, too.
        change = wanted - stored[name]
        assert np.linalg.norm(state.train.params[name] - wanted) <= 1e-3 * np.linalg.norm(change), name
    numbers = finalize(metrics)
    assert numbers["ddpo/loss"] == pytest.approx(float(stored["epoch_loss"].mean()), abs=1e-5)
    assert numbers["ddpo/clip_fraction"] == pytest.approx(float(stored["epoch_clipfrac"].mean()))
    assert numbers["ddpo/pre_update_ratio_max_dev"] <= 1e-5

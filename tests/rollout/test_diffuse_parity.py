# SPDX-License-Identifier: Apache-2.0
"""A whole image of torch diffusers' tiny Stable Diffusion, step by step, with the same noise."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import traverse_util

torch = pytest.importorskip("torch")
diffusers = pytest.importorskip("diffusers")

from jrl.learners.ddpo_config import DDPOConfig  # noqa: E402
from jrl.learners.ddpo_objective import DenoisingRows, ddpo_objective, recompute_logprobs  # noqa: E402
from jrl.models.diffusion.folder import load_diffusion_model  # noqa: E402
from jrl.ops.metrics import finalize  # noqa: E402
from jrl.ops.noise_schedule import denoising_steps  # noqa: E402
from jrl.rollout.diffuse import denoise  # noqa: E402
from jrl.typing import DDPOBatch, Trajectories  # noqa: E402
from tests.models.diffusion.tiny_pipelines import tiny_pipeline  # noqa: E402
from tests.models.diffusion.torch_unets import loaded  # noqa: E402

pytestmark = pytest.mark.parity

STEPS, GUIDANCE, ROWS, EDGE = 5, 5.0, 2, 8
PROMPTS = ["a red circle", "two blue squares"]
CONFIG = DDPOConfig(sample_num_steps=STEPS, sample_guidance_scale=GUIDANCE, train_clip_range=1e-2)


def channels_first(x: Any) -> Any:
    return torch.tensor(np.moveaxis(np.asarray(x), -1, -3).copy())


def channels_last(x: Any) -> np.ndarray:
    return np.moveaxis(x.detach().numpy(), -3, -1)


class Step:
    """The paper's formulas in torch: a stochastic DDIM step and its mean log-density."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler, self.levels = scheduler, scheduler.alphas_cumprod.double()

    def __call__(
        self, output: Any, timestep: int, latents: Any, *, noise: Any = None, after: Any = None
    ) -> tuple[Any, Any]:
        now, then = self.levels[timestep], self.levels[max(timestep - 1000 // STEPS, 0)]
        std = float(((1 - then) / (1 - now) * (1 - now / then)).sqrt())
        clean = (latents - float((1 - now).sqrt()) * output) / float(now.sqrt())
        mean = float(then.sqrt()) * clean + float((1 - then - std**2).sqrt()) * output
        after = mean + std * noise if after is None else after
        density = torch.distributions.Normal(mean, std).log_prob(after.detach())
        return after, density.mean(dim=(1, 2, 3))


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The pipeline on either side, and what each sampled from the same noise."""
    folder: Path = tmp_path_factory.mktemp("pipeline")
    pipeline = tiny_pipeline("A", folder)
    model = load_diffusion_model(folder)
    rng = np.random.default_rng(0)
    initial = rng.normal(size=(ROWS, EDGE, EDGE, 4)).astype(np.float32)
    noise = rng.normal(size=(STEPS, ROWS, EDGE, EDGE, 4)).astype(np.float32)

    pipeline.scheduler.set_timesteps(STEPS)
    step = Step(pipeline.scheduler)
    with torch.no_grad():
        context, negative = pipeline.encode_prompt(PROMPTS, "cpu", 1, True, [""] * ROWS)
        states, logprobs = [channels_first(initial)], []
        for number, timestep in enumerate(pipeline.scheduler.timesteps):
            away, towards = pipeline.unet(
                torch.cat([states[-1]] * 2), timestep, torch.cat([negative, context])
            ).sample.chunk(2)
            guided = away + GUIDANCE * (towards - away)
            after, density = step(guided, int(timestep), states[-1], noise=channels_first(noise[number]))
            states.append(after)
            logprobs.append(density)
        scaled = states[-1] / pipeline.vae.config.scaling_factor
        images = (pipeline.vae.decode(scaled).sample / 2 + 0.5).clamp(0, 1)

    functions = model.functions(compute_dtype=jnp.float32)
    params, frozen = model.split(
        lora=None, key=jax.random.key(0), compute_dtype=jnp.float32, with_reference=False
    )
    steps = denoising_steps(model.schedule, STEPS, 1.0)

    @jax.jit
    def sample(params: Any, frozen: Any, tokens: Any, empty: Any) -> tuple[Trajectories, Any, Any]:
        found_negative = functions.encode(frozen, empty)
        trajectories = denoise(
            functions,
            params,
            frozen,
            functions.encode(frozen, tokens),
            found_negative,
            jnp.asarray(initial),
            lambda number: jnp.asarray(noise)[number],
            steps=steps,
            schedule=model.schedule,
            guidance_scale=GUIDANCE,
            guidance_rescale=0.0,
        )
        return trajectories, found_negative, functions.decode(frozen, trajectories.latents[:, -1])

    found = sample(params, frozen, model.tokenizer(PROMPTS), model.tokenizer([""]))
    return {
        "pipeline": pipeline,
        "step": step,
        "torch": (states, logprobs, images, context, negative),
        "model": model,
        "functions": functions,
        "params": params,
        "frozen": frozen,
        "steps": steps,
        "found": found,
    }


def test_timesteps_and_levels(both: dict[str, Any]) -> None:
    scheduler = both["pipeline"].scheduler
    assert both["steps"].timesteps.tolist() == scheduler.timesteps.tolist()
    np.testing.assert_allclose(both["model"].schedule.alphas_cumprod, scheduler.alphas_cumprod, atol=1e-6)


def test_latents_log_probabilities_and_images(both: dict[str, Any]) -> None:
    states, logprobs, images, context, _ = both["torch"]
    trajectories, _, found = both["found"]
    np.testing.assert_allclose(trajectories.context, context.numpy(), atol=1e-5)
    for number, state in enumerate(states):
        np.testing.assert_allclose(
            trajectories.latents[:, number], channels_last(state), rtol=1e-4, atol=1e-4, err_msg=str(number)
        )
    np.testing.assert_allclose(trajectories.logprobs, torch.stack(logprobs, 1).numpy(), atol=1e-4)
    np.testing.assert_allclose(found, channels_last(images), atol=1e-4)


@pytest.mark.parametrize("minibatch_size", [ROWS, 1])
def test_lore_2_3_the_learner_finds_the_samplers_log_probabilities(
    minibatch_size: int, both: dict[str, Any]
) -> None:
    trajectories, negative, _ = both["found"]
    batch = DDPOBatch(trajectories, negative, jnp.zeros(ROWS))

    @jax.jit
    def again(params: Any, frozen: Any, batch: DDPOBatch) -> DDPOBatch:
        return recompute_logprobs(
            both["functions"],
            params,
            frozen,
            batch,
            steps=both["steps"],
            schedule=both["model"].schedule,
            config=CONFIG,
            minibatch_size=minibatch_size,
        )

    found = again(both["params"], both["frozen"], batch).trajectories.logprobs
    limit = 1e-6 if minibatch_size == ROWS else 5e-6
    assert np.abs(found - trajectories.logprobs).max() <= limit


def test_the_gradient_of_a_column(both: dict[str, Any]) -> None:
    """Of all parameters of the U-Net, through both halves of guidance and the clipped ratio."""
    column, advantages = 3, np.array([1.5, -0.5], np.float32)
    states, logprobs, _, context, negative = both["torch"]
    unet, timestep = both["pipeline"].unet, int(both["steps"].timesteps[column])
    # Both ratios lie on the sides where clipping gives no shelter: gradients flow.
    old = logprobs[column] + torch.tensor([0.005, 0.005])
    away, towards = unet(
        torch.cat([states[column]] * 2), timestep, torch.cat([negative, context])
    ).sample.chunk(2)
    guided = away + GUIDANCE * (towards - away)
    _, density = both["step"](guided, timestep, states[column], after=states[column + 1])
    ratio, weight = torch.exp(density - old), torch.tensor(advantages)
    loss = torch.maximum(-weight * ratio, -weight * ratio.clamp(0.99, 1.01)).mean()
    loss.backward()

    trajectories, found_negative, _ = both["found"]
    rows = DenoisingRows(
        latents=trajectories.latents[:, column],
        next_latents=trajectories.latents[:, column + 1],
        steps=jnp.full(ROWS, column, jnp.int32),
        old_logprobs=jnp.asarray(old.numpy()),
        advantages=jnp.asarray(advantages),
        context=trajectories.context,
        negative=found_negative,
        valid=jnp.ones(ROWS, bool),
    )

    @jax.jit
    def objective(params: Any, frozen: Any) -> Any:
        loss_sum, weight, metrics = ddpo_objective(
            both["functions"],
            params,
            frozen,
            rows,
            steps=both["steps"],
            schedule=both["model"].schedule,
            config=CONFIG,
        )
        return loss_sum / weight, metrics

    (value, metrics), grads = jax.value_and_grad(objective, has_aux=True)(both["params"], both["frozen"])
    numbers = finalize(metrics)
    assert float(value) == pytest.approx(float(loss.detach()), abs=1e-5)
    kl = 0.5 * float(((density - old) ** 2).mean().detach())
    assert numbers["ddpo/approx_kl"] == pytest.approx(kl, rel=1e-3)
    shapes = traverse_util.flatten_dict(jax.tree.map(np.shape, grads["unet"]), sep="/")
    wanted = loaded(
        both["model"].unet.entries(), {name: p.grad for name, p in unet.named_parameters()}, shapes
    )
    off = jax.tree.map(lambda a, b: a - b, grads["unet"], wanted)
    assert float(optax.tree.norm(wanted)) > 0
    assert float(optax.tree.norm(off)) <= 1e-3 * float(optax.tree.norm(wanted))

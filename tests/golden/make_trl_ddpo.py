# SPDX-License-Identifier: Apache-2.0
"""Writes down what the last TRL with a DDPO trainer computes: scheduler steps, losses, one epoch, prompt statistics.

    python3.11 -m venv classic
    classic/bin/pip install trl==0.23.1 diffusers==0.35.2 transformers==4.57.1 torch==2.13.0
    classic/bin/python tests/golden/make_trl_ddpo.py tests/golden/trl_ddpo_0231.npz

The file says which versions made it. All in float64, the schedule included; the network is one of three small arrays.
"""

import contextlib
import sys
from types import SimpleNamespace

import accelerate
import diffusers
import numpy as np
import torch
import trl
from diffusers import DDIMScheduler
from trl import DDPOConfig, DDPOTrainer
from trl.models import modeling_sd_base
from trl.trainer.ddpo_trainer import PerPromptStatTracker

torch.set_default_dtype(torch.float64)

STEPS, TRAINED = 5, 3
SAMPLES, CHANNELS, SIZE, PROMPT, WIDTH = 4, 4, 4, 2, 3
SCHEDULE = {
    "beta_start": 0.00085,
    "beta_end": 0.012,
    "beta_schedule": "scaled_linear",
    "steps_offset": 1,
    "set_alpha_to_one": False,
}


def scheduler(num_steps: int, **changes: object) -> DDIMScheduler:
    """With a schedule in float64."""
    made = DDIMScheduler(**{"clip_sample": False, **SCHEDULE, **changes})
    made.alphas_cumprod = torch.cumprod(1.0 - torch.linspace(0.00085**0.5, 0.012**0.5, 1000) ** 2, dim=0)
    made.final_alpha_cumprod = made.alphas_cumprod[0]
    made.set_timesteps(num_steps)
    return made


class Net(torch.nn.Module):
    """out = ½·tanh(latents·mix + mean(context)·look + sin(t/300)·time)."""

    def __init__(self, mix: np.ndarray, look: np.ndarray, time: np.ndarray) -> None:
        super().__init__()
        self.mix, self.look, self.time = (torch.nn.Parameter(torch.tensor(x)) for x in (mix, look, time))

    def forward(self, latents: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> object:
        shift = context.mean(1) @ self.look + torch.sin(timesteps[:, None] / 300.0) * self.time
        mixed = torch.einsum("bcyx,cd->bdyx", latents, self.mix) + shift[:, :, None, None]
        return SimpleNamespace(sample=0.5 * torch.tanh(mixed))


def steps() -> dict[str, np.ndarray]:
    """Single steps of every prediction type, with and without clipping, at five timesteps."""
    rng = np.random.default_rng(0)
    timesteps = np.array([981, 961, 501, 21, 1])
    shape = (len(timesteps), CHANNELS, SIZE, SIZE)
    latents, output, noise = rng.normal(size=(3, *shape))
    latents = latents * 2.0
    found = {"timesteps": timesteps, "latents": latents, "output": output, "noise": noise}
    clipping = {
        "plain": {},
        "clip": {"clip_sample": True, "clip_sample_range": 1.0},
        "threshold": {
            "thresholding": True,
            "dynamic_thresholding_ratio": 0.9,
            "sample_max_value": 1.5,
        },
    }
    modeling_sd_base.randn_tensor = lambda *args, **kwargs: torch.tensor(noise)
    for prediction in ("epsilon", "sample", "v_prediction"):
        for eta in (0.5, 1.0):
            for name, changes in clipping.items():
                for corrected in (False, True):
                    out = modeling_sd_base.scheduler_step(
                        scheduler(50, prediction_type=prediction, **changes),
                        torch.tensor(output),
                        torch.tensor(timesteps),
                        torch.tensor(latents),
                        eta=eta,
                        use_clipped_model_output=corrected,
                    )
                    case = f"{prediction}_{eta}_{name}_{int(corrected)}"
                    found[f"{case}_next"] = out.latents.numpy()
                    found[f"{case}_logprobs"] = out.log_probs.numpy()
    return {f"step_{name}": value for name, value in found.items()}


def given() -> dict[str, np.ndarray]:
    """Weights, trajectories that this network could have taken, and their rewards."""
    rng = np.random.default_rng(1)
    weights = {
        "mix": rng.normal(size=(CHANNELS, CHANNELS)) * 0.5,
        "look": rng.normal(size=(WIDTH, CHANNELS)),
        "time": rng.normal(size=(CHANNELS,)),
    }
    net, pace = Net(**weights), scheduler(STEPS)
    context = rng.normal(size=(SAMPLES, PROMPT, WIDTH))
    negative = rng.normal(size=(1, PROMPT, WIDTH))
    embeds = torch.tensor(np.concatenate([np.repeat(negative, SAMPLES, 0), context]))
    latents = [torch.tensor(rng.normal(size=(SAMPLES, CHANNELS, SIZE, SIZE)))]
    logprobs = []
    for timestep in pace.timesteps:
        now = timestep.repeat(SAMPLES)
        with torch.no_grad():
            away, towards = net(torch.cat([latents[-1]] * 2), torch.cat([now] * 2), embeds).sample.chunk(2)
            noise = torch.tensor(rng.normal(size=latents[-1].shape))
            modeling_sd_base.randn_tensor = lambda *args, noise=noise, **kwargs: noise
            out = modeling_sd_base.scheduler_step(
                pace, away + 5.0 * (towards - away), now, latents[-1], eta=1.0
            )
        latents.append(out.latents)
        logprobs.append(out.log_probs)
    return {
        **weights,
        "context": context,
        "negative": negative,
        "latents": torch.stack(latents, 1).numpy(),
        "logprobs": torch.stack(logprobs, 1).numpy(),
        "timesteps": pace.timesteps.numpy(),
        "rewards": np.array([1.0, -0.5, 3.0, 0.25]),
    }


def trainer(data: dict[str, np.ndarray], **options: object) -> DDPOTrainer:
    """TRL's trainer without its constructor, which asks for a whole pipeline."""
    made = object.__new__(DDPOTrainer)
    made.config = DDPOConfig(
        sample_num_steps=STEPS,
        sample_num_batches_per_epoch=1,
        sample_batch_size=SAMPLES,
        train_batch_size=1,
        **options,
    )
    net = Net(*(data[name] for name in ("mix", "look", "time")))
    made.num_train_timesteps = int(STEPS * made.config.train_timestep_fraction)
    made.accelerator = accelerate.Accelerator(
        cpu=True,
        gradient_accumulation_steps=made.config.train_gradient_accumulation_steps * made.num_train_timesteps,
    )
    made.trainable_layers = list(net.parameters())
    net, made.optimizer = made.accelerator.prepare(net, made._setup_optimizer(made.trainable_layers))
    pace = scheduler(STEPS)
    made.sd_pipeline = SimpleNamespace(
        unet=net,
        scheduler_step=lambda *args, **kwargs: modeling_sd_base.scheduler_step(pace, *args, **kwargs),
    )
    made.autocast = contextlib.nullcontext
    made.image_samples_callback = None
    return made


def losses(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Loss, KL, clip fraction and gradients of one column, from a policy that has moved."""
    found = {}
    drift = np.random.default_rng(2).normal(size=SAMPLES) * 2e-3
    for name, train_cfg in (("guided", True), ("plain", False)):
        made = trainer(data, train_cfg=train_cfg, train_clip_range=1e-3)
        column = 3
        embeds = data["context"]
        if train_cfg:
            embeds = np.concatenate([np.repeat(data["negative"], SAMPLES, 0), embeds])
        advantages = np.array([1.0, -0.5, 7.0, -9.0])
        old = data["logprobs"][:, column] + drift
        arguments = (
            data["latents"][:, column],
            np.repeat(data["timesteps"][column], SAMPLES),
            data["latents"][:, column + 1],
            old,
            advantages,
            embeds,
        )
        loss, approx_kl, clipfrac = made.calculate_loss(*(torch.tensor(x) for x in arguments))
        loss.backward()
        found |= {
            f"{name}_old": old,
            f"{name}_advantages": advantages,
            f"{name}_loss": loss.detach().numpy(),
            f"{name}_approx_kl": approx_kl.detach().numpy(),
            f"{name}_clipfrac": clipfrac.numpy(),
        }
        for parameter, which in zip(made.trainable_layers, ("mix", "look", "time"), strict=True):
            found[f"{name}_grad_{which}"] = parameter.grad.numpy()
    return {f"loss_{name}": value for name, value in found.items()}


def epoch(data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Two passes of an epoch through the trainer's own `step`: the weights behind it, and the order it took."""
    torch.manual_seed(0)
    made = trainer(
        data,
        train_timestep_fraction=TRAINED / STEPS,
        train_gradient_accumulation_steps=2,
        train_num_inner_epochs=2,
        train_learning_rate=1e-3,
        train_clip_range=1e-2,
    )
    made._generate_samples = lambda iterations, batch_size: (
        [
            {
                "prompt_ids": torch.zeros(SAMPLES, 1),
                "prompt_embeds": torch.tensor(data["context"]),
                "negative_prompt_embeds": torch.tensor(np.repeat(data["negative"], SAMPLES, 0)),
                "timesteps": torch.tensor(np.tile(data["timesteps"], (SAMPLES, 1))),
                "latents": torch.tensor(data["latents"][:, :-1]),
                "next_latents": torch.tensor(data["latents"][:, 1:]),
                "log_probs": torch.tensor(data["logprobs"]),
            }
        ],
        [[None, None, None]],
    )
    made.reward_fn = lambda *args: (data["rewards"], None)
    logged, order = [], []
    made.accelerator.log = lambda values, step: logged.append(values)
    calculate = made.calculate_loss

    def recorded(latents: torch.Tensor, timesteps: torch.Tensor, *rest: torch.Tensor) -> object:
        step = int(np.flatnonzero(data["timesteps"] == int(timesteps[0]))[0])
        sample = int(np.flatnonzero((data["latents"][:, step] == latents.numpy()).all((1, 2, 3)))[0])
        order.append((sample, step))
        return calculate(latents, timesteps, *rest)

    made.calculate_loss = recorded
    made.step(0, 0)
    names = ("mix", "look", "time")
    found = {name: x.detach().numpy() for name, x in zip(names, made.trainable_layers, strict=True)}
    for name in ("loss", "approx_kl", "clipfrac"):
        found[name] = np.array([float(values[name]) for values in logged if name in values])
    found["order"] = np.array(order)
    return {f"epoch_{name}": value for name, value in found.items()}


def tracker() -> dict[str, np.ndarray]:
    """Advantages by prompt over three epochs."""
    rng = np.random.default_rng(3)
    prompts, rewards = rng.integers(0, 4, size=(3, 12)), rng.normal(size=(3, 12))
    kept = PerPromptStatTracker(8, 5)
    found = [
        kept.update([str(i) for i in names], values) for names, values in zip(prompts, rewards, strict=True)
    ]
    return {"tracker_prompts": prompts, "tracker_rewards": rewards, "tracker_advantages": np.array(found)}


def computed() -> dict[str, np.ndarray]:
    """All of it, beside what was given."""
    data = given()
    return data | steps() | losses(data) | epoch(data) | tracker()


if __name__ == "__main__":
    versions = f"trl {trl.__version__}, diffusers {diffusers.__version__}, torch {torch.__version__}"
    np.savez_compressed(sys.argv[1], **computed(), environment=np.array(versions))
    print(versions)

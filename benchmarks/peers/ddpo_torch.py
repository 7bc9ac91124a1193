# SPDX-License-Identifier: Apache-2.0
"""Worker: an epoch of DDPO by torch: diffusers' networks, PEFT's adapters, and the algorithm in a screen of code.

    python benchmarks/peers/ddpo_torch.py [--model sd15] [--rows 8] [--steps 50] [--minibatch 4] [--dtype bfloat16]

Speaks as `line_protocol.py` does. An epoch encodes `rows` prompts, samples them in `steps` steps of DDIM (η = 1) under
guidance 5, decodes the images, and takes one optimizer step on all rows and steps, in microbatches, with random
rewards. Weights are random; LoRA of rank 4 trains, in float32; the rest is in the dtype given. Products of float32 use
TF32 if `--tf32` is given, and no intermediate values are recomputed for the gradient unless `--remat` is.
"""

from __future__ import annotations

import argparse
import math
from typing import Any

import torch
from diffusers import AutoencoderKL, UNet2DConditionModel
from line_protocol import answer
from peft import LoraConfig
from stable_diffusion import GUIDANCE, MODELS, betas
from transformers import CLIPTextConfig, CLIPTextModel


class Denoising:
    """DDIM with noise as a Gaussian policy.

    Args:
      num_steps: T.
      device: Of the coefficients.
    """

    def __init__(self, num_steps: int, device: str) -> None:
        levels = torch.cumprod(1.0 - torch.tensor(betas(), dtype=torch.float64), 0)
        stride = len(levels) // num_steps
        now = torch.arange(num_steps - 1, -1, -1) * stride + 1
        after = (now - stride).clamp(min=0)
        self.timesteps = now.to(device)
        start, end = levels[now], levels[after]
        std = ((1 - end) / (1 - start) * (1 - start / end)).sqrt()
        coefficients = (start.sqrt(), (1 - start).sqrt(), end.sqrt(), (1 - end - std**2).sqrt(), std)
        self.coefficients = torch.stack(coefficients).float().to(device)

    def mean(self, latents: torch.Tensor, noise: torch.Tensor, step: torch.Tensor) -> tuple[Any, Any]:
        """Mean and standard deviation of the next latents; `step` counts from the first one, one a row."""
        signal, share, next_signal, direction, std = self.coefficients[:, step].view(5, -1, 1, 1, 1)
        return next_signal * (latents - share * noise) / signal + direction * noise, std


def log_density(x: torch.Tensor, mean: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """Of a diagonal Gaussian, its mean over the elements of a row."""
    value = -((x - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return value.mean(dim=(1, 2, 3))


class Epoch:
    """Everything an epoch needs; calling it runs one.

    Args:
      flags: Of the command line.
    """

    def __init__(self, flags: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.device = "cuda" if torch.cuda.is_available() else "cpu"
        self.dtype, self.flags, sizes = getattr(torch, flags.dtype), flags, MODELS[flags.model]
        self.unet = UNet2DConditionModel(**sizes["unet"]).to(self.device, self.dtype).requires_grad_(False)
        self.vae = AutoencoderKL(**sizes["vae"]).to(self.device, self.dtype).requires_grad_(False)
        self.text = CLIPTextModel(CLIPTextConfig(**sizes["text_encoder"])).to(self.device, self.dtype).eval()
        self.text.requires_grad_(False)
        names = ["to_q", "to_k", "to_v", "to_out.0"]
        self.unet.add_adapter(
            LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=names)
        )
        self.trainable = [weight for weight in self.unet.parameters() if weight.requires_grad]
        for weight in self.trainable:
            weight.data = weight.data.float()
        if flags.remat:
            self.unet.enable_gradient_checkpointing()
        # Its networks have no dropout; checkpointing asks for training mode.
        self.unet.train(flags.remat)
        self.optimizer = torch.optim.AdamW(self.trainable, lr=3e-4, weight_decay=1e-4)
        self.denoising = Denoising(flags.steps, self.device)
        config = sizes["text_encoder"]
        shape = (flags.rows + 1, config["max_position_embeddings"])
        self.tokens = torch.randint(0, config["vocab_size"], shape, device=self.device)
        edge = sizes["unet"]["sample_size"]
        self.shape = (flags.rows, sizes["unet"]["in_channels"], edge, edge)

    def __call__(self) -> None:
        """Samples and learns, and waits until both are done."""
        trajectory, log_probs, context = self.sample()
        rewards = torch.randn(self.flags.rows, device=self.device)
        self.update(trajectory, log_probs, context, (rewards - rewards.mean()) / (rewards.std() + 1e-8))
        if self.device == "cuda":
            torch.cuda.synchronize()

    def guided(self, latents: torch.Tensor, timesteps: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """The predicted noise under guidance; row 0 of `context` is the negative prompt, the others are the rows'."""
        rows = len(latents)
        both = torch.cat([context[:1].expand(rows, -1, -1), context[1:]])
        with torch.autocast(self.device, self.dtype, enabled=self.dtype != torch.float32):
            out = self.unet(
                latents.repeat(2, 1, 1, 1).to(self.dtype), timesteps.repeat(2), encoder_hidden_states=both
            ).sample.float()
        negative, positive = out.chunk(2)
        return negative + GUIDANCE * (positive - negative)

    @torch.no_grad()
    def sample(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """States (T + 1, rows, ...), log-densities (T, rows), and what the denoiser reads of the prompts."""
        context = self.text(self.tokens)[0]
        states, densities = [torch.randn(self.shape, device=self.device)], []
        for number in range(self.flags.steps):
            step = torch.full((self.flags.rows,), number, device=self.device)
            noise = self.guided(states[-1], self.denoising.timesteps[step], context)
            mean, std = self.denoising.mean(states[-1], noise, step)
            states.append(mean + std * torch.randn_like(mean))
            densities.append(log_density(states[-1], mean, std))
        for rows in states[-1].split(8):
            self.vae.decode(rows.to(self.dtype) / self.vae.config.scaling_factor)
        return torch.stack(states), torch.stack(densities), context

    def update(
        self, states: torch.Tensor, old: torch.Tensor, context: torch.Tensor, advantages: torch.Tensor
    ) -> None:
        """One optimizer step on the clipped surrogate of all rows and steps."""
        order = torch.randperm(self.flags.rows, device=self.device)
        columns = torch.rand(self.flags.rows, self.flags.steps, device=self.device).argsort(1)
        groups = order.split(self.flags.minibatch)
        for rows in groups:
            for column in columns[rows].T:
                latents, after = states[column, rows], states[column + 1, rows]
                read = torch.cat([context[:1], context[1:][rows]])
                noise = self.guided(latents, self.denoising.timesteps[column], read)
                mean, std = self.denoising.mean(latents, noise, column)
                ratio = (log_density(after, mean, std) - old[column, rows]).exp()
                gain = advantages[rows].clamp(-5, 5)
                loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - 1e-4, 1 + 1e-4)).mean()
                (loss / (len(groups) * self.flags.steps)).backward()
        torch.nn.utils.clip_grad_norm_(self.trainable, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    """Warms up, then measures on demand."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="sd15")
    parser.add_argument("--rows", type=int, default=8, help="samples of an epoch")
    parser.add_argument("--steps", type=int, default=50, help="denoising steps")
    parser.add_argument("--minibatch", type=int, default=4, help="samples of a microbatch")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--tf32", action="store_true", help="TF32 in products of float32")
    parser.add_argument("--remat", action="store_true", help="gradient checkpointing")
    flags = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = flags.tf32
    epoch = Epoch(flags)
    epoch()
    answer(epoch)


if __name__ == "__main__":
    main()

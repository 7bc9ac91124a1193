# SPDX-License-Identifier: Apache-2.0
"""Writes diffusion_parts.npz: what diffusers 0.42.1 and transformers 5.23 on torch 2.13 (CPU) make of tiny networks.

    python -m tests.golden.make_diffusion_parts

Runs from the root of the repository, where all of them are installed. The networks are the autoencoder and the text
encoder of pipeline A, every norm and bias perturbed; latents have a large mean. Tensors have the names of the
libraries' own files.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.models.diffusion.tiny_pipelines import tiny_text_encoder, tiny_vae


def main() -> None:
    """Writes the file beside this one."""
    vae, text_encoder = tiny_vae("A"), tiny_text_encoder("A")
    generator = np.random.default_rng(0)
    scale = vae.config.scaling_factor
    latents = (scale * (3 + 5 * generator.standard_normal((1, 4, 6, 4)))).astype(np.float32)
    images = generator.uniform(size=(1, 8, 12, 3)).astype(np.float32)
    tokens = generator.integers(0, 1000, (2, 9))

    def first(x: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(x.transpose(0, 3, 1, 2)))

    def last(x: torch.Tensor) -> np.ndarray:
        return x.numpy().transpose(0, 2, 3, 1)

    with torch.no_grad():
        decoded = last(vae.decode(first(latents) / scale).sample)
        moments = vae.encode(first(2 * images - 1)).latent_dist
        context = text_encoder(torch.from_numpy(tokens)).last_hidden_state.numpy()
    tensors = {f"vae/{name}": tensor.numpy() for name, tensor in vae.state_dict().items()}
    tensors |= {f"text_encoder/{name}": tensor.numpy() for name, tensor in text_encoder.state_dict().items()}
    data = {
        "latents": latents,
        "decoded": np.clip(decoded / 2 + 0.5, 0, 1),
        "images": images,
        "mean": scale * last(moments.mean),
        "deviation": scale * last(moments.std),
        "tokens": tokens.astype(np.int32),
        "context": context,
    }
    np.savez_compressed(Path(__file__).with_name("diffusion_parts.npz"), **tensors, **data)


if __name__ == "__main__":
    main()

# SPDX-License-Identifier: Apache-2.0
"""Writes diffusion_unet.npz: what diffusers 0.42.1 on torch 2.13 (CPU) makes of a tiny U-Net with random weights.

    python -m tests.golden.make_diffusion_unet

Runs from the root of the repository, where both are installed. The network is U-Net C of the parity tests, every norm
and bias perturbed, on latents of an uneven size with a large mean. Tensors have the names of diffusers' own file.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.models.diffusion.torch_unets import inputs, nchw, nhwc, torch_unet


def main() -> None:
    """Writes the file beside this one."""
    module = torch_unet("C")
    latents, timesteps, context = inputs(4, 8, height=7)
    with torch.no_grad():
        output = module(nchw(latents), torch.from_numpy(timesteps), torch.from_numpy(context)).sample
    tensors = {f"tensors/{name}": tensor.numpy() for name, tensor in module.state_dict().items()}
    data = {"latents": latents, "timesteps": timesteps, "context": context, "output": nhwc(output)}
    np.savez_compressed(Path(__file__).with_name("diffusion_unet.npz"), **tensors, **data)


if __name__ == "__main__":
    main()

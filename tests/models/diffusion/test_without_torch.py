# SPDX-License-Identifier: Apache-2.0
"""A diffusers folder is read, run and written in a process where torch, diffusers and PEFT cannot be imported."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
PROGRAM = """
import sys

# Whoever imports one of them gets a ModuleNotFoundError, and whoever asks is told that it is not installed.
sys.modules |= dict.fromkeys(("torch", "diffusers", "peft", "accelerate"))

import jax
import jax.numpy as jnp
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.folder import load_diffusion_model

model = load_diffusion_model(sys.argv[1])
lora = model.unet.bind_lora(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian"))
params, frozen = model.split(lora=lora, key=jax.random.key(0), compute_dtype=jnp.float32, with_reference=True)
functions = model.functions(compute_dtype=jnp.float32, lora=lora)
context = jax.jit(functions.encode)(frozen, jnp.asarray(model.tokenizer(["a red cat", "a blue dog"])))
assert context.shape == (2, 16, 8) and bool((context[0] != context[1]).any())
latents = jax.random.normal(jax.random.key(1), (2, *model.latent_shape()))
timesteps = jnp.asarray([981, 1])
output = jax.jit(functions.predict)(params, frozen, latents, timesteps, context)
assert output.shape == latents.shape and output.dtype == jnp.float32
# B is 0: the adapter changes no bit.
assert bool((output == jax.jit(functions.reference)(frozen, latents, timesteps, context)).all())
images = jax.jit(functions.decode)(frozen, latents)
assert images.shape == (2, 16, 16, 3) and bool(((images >= 0) & (images <= 1)).all())
model.trained(params, lora).save(sys.argv[2])
assert load_diffusion_model(sys.argv[2]).found_lora is not None
assert sys.modules["torch"] is None and sys.modules["diffusers"] is None
print("done")
"""


@pytest.mark.slow
def test_a_model_runs_without_torch(tiny_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", PROGRAM, str(tiny_folder), str(tmp_path / "again")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "done"

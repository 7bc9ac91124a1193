# SPDX-License-Identifier: Apache-2.0
"""An epoch of DDPO on a Stable Diffusion of random weights: how fast it is, and how far rounding moves its ratios."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jrl.bench.diffusion_counts import UNetCounts, unet_counts
from jrl.bench.measure import Machine, hardware, measure_machine, peak_bytes, versions
from jrl.learners.ddpo import init_ddpo_state, make_ddpo_update
from jrl.learners.ddpo_config import DDPOConfig
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.models.adapters.config import LoraConfig
from jrl.models.diffusion.clip_config import read_clip_config
from jrl.models.diffusion.clip_text import ClipText
from jrl.models.diffusion.pipeline import DiffusionModel, decoding_dtype
from jrl.models.diffusion.unet import UNet
from jrl.models.diffusion.unet_config import read_unet_config
from jrl.models.diffusion.vae import VAE
from jrl.models.diffusion.vae_config import read_vae_config
from jrl.ops.metrics import finalize
from jrl.ops.noise_schedule import make_noise_schedule
from jrl.rollout.diffuse import decode_in_chunks, make_diffuse
from jrl.rollout.prompt_statistics import global_advantages
from jrl.typing import DDPOBatch


@dataclass(frozen=True)
class Precision:
    """Precision in which products are computed.

    Attributes:
      dtype: Of activations and frozen weights.
      products: JAX's name of the precision of float32 products.
    """

    dtype: str
    products: str


PRECISIONS = {
    "float32": Precision("float32", "highest"),
    "tf32": Precision("float32", "tensorfloat32"),
    "bfloat16": Precision("bfloat16", "default"),
}


@dataclass(frozen=True)
class EpochShapes:
    """Sizes of an epoch.

    Attributes:
      rows: Samples, all drawn in one call and trained on in one optimizer step.
      steps: Denoising steps, T.
      minibatch: Samples of a microbatch.
      guidance: w.
      precision: Of `PRECISIONS`.
      lora_rank: Of the adapter that trains; 0: the whole U-Net does.
      remat: Recomputes each block of the U-Net in the backward pass.
    """

    rows: int
    steps: int
    minibatch: int
    guidance: float
    precision: str
    lora_rank: int
    remat: bool


def random_model(
    name: str, sizes: Mapping[str, Mapping[str, Any]], schedule: Mapping[str, Any]
) -> DiffusionModel:
    """A model of random weights on the first device; it has no tokenizer.

    Args:
      name: What it is called.
      sizes: Configurations of "unet", "vae" and "text_encoder", with the keys of diffusers and transformers.
      schedule: Keys of a scheduler's configuration.
    """
    unet, vae = UNet(read_unet_config(sizes["unet"])), VAE(read_vae_config(sizes["vae"]))
    text_encoder = ClipText(read_clip_config(sizes["text_encoder"]))
    edge = sizes["unet"]["sample_size"]

    def no_tokenizer(texts: Any) -> Any:
        raise ValueError(f"{name} has random weights and reads no text.")

    keys = jax.random.split(jax.random.key(0), 3)
    return DiffusionModel(
        name=name,
        unet=unet,
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=no_tokenizer,
        schedule=make_noise_schedule(schedule),
        weights={
            "unet": unet.init(keys[0]),
            "vae": vae.init(keys[1]),
            "text_encoder": text_encoder.init(keys[2]),
        },
        sample_size=(edge, edge),
    )


class Epoch:
    """An epoch of DDPO, ready to run; rewards are random.

    Args:
      model: From `random_model`.
      shapes: Sizes.
    """

    def __init__(self, model: DiffusionModel, shapes: EpochShapes) -> None:
        self.shapes = shapes
        method = DDPOConfig(
            sample_num_steps=shapes.steps,
            sample_guidance_scale=shapes.guidance,
            sample_batch_size=shapes.rows,
            sample_num_batches_per_epoch=1,
        )
        method.validate()
        dtype = jnp.dtype(PRECISIONS[shapes.precision].dtype)
        lora = None
        if shapes.lora_rank:
            rank = shapes.lora_rank
            lora = model.unet.bind_lora(LoraConfig(r=rank, lora_alpha=rank, init_lora_weights="gaussian"))
        params, frozen = model.split(
            lora=lora, key=jax.random.key(1), compute_dtype=dtype, with_reference=False
        )
        params, self._frozen = jax.device_put((params, frozen))
        functions = model.functions(compute_dtype=dtype, remat=shapes.remat, lora=lora)
        optimizer = make_optimizer(
            "adamw", {"lr": 3e-4, "weight_decay": 1e-4}, make_schedule("constant", {}), max_grad_norm=1.0
        )
        self._state = init_ddpo_state(params, optimizer, method)
        self._latent_shape = model.latent_shape()
        diffuse = make_diffuse(
            functions,
            model.schedule,
            num_steps=shapes.steps,
            eta=1.0,
            guidance_scale=shapes.guidance,
            guidance_rescale=0.0,
            latent_shape=self._latent_shape,
        )
        update = make_ddpo_update(
            functions,
            model.schedule,
            optimizer,
            method,
            batch_size=shapes.rows,
            minibatch_size=shapes.minibatch,
        )
        self._diffuse, self._update = jax.jit(diffuse), jax.jit(update, donate_argnums=0)
        self._decode = jax.jit(
            lambda frozen, latents: decode_in_chunks(
                lambda rows: functions.decode(frozen, rows), latents, decode_rows=8
            )
        )
        config = model.text_encoder.config  # type: ignore[attr-defined]
        shape = (shapes.rows + 1, config.max_position_embeddings)
        self._tokens = jax.random.randint(jax.random.key(2), shape, 0, config.vocab_size)
        self._negative = jax.jit(functions.encode)(self._frozen, self._tokens[:1])
        self._epoch = 0

    def sample(self) -> tuple[Any, Any]:
        """Trajectories and images of the next epoch, which are waited for."""
        self._epoch += 1
        keys = jax.random.split(jax.random.key(self._epoch), 2 * self.shapes.rows)
        initial, steps = keys[: self.shapes.rows], keys[self.shapes.rows :]
        return jax.block_until_ready(
            self._diffuse(
                self._state.train.params, self._frozen, self._tokens[1:], self._negative, initial, steps
            )
        )

    def decode(self, trajectories: Any) -> Any:
        """The images once more."""
        return jax.block_until_ready(self._decode(self._frozen, trajectories.latents[:, -1]))

    def update(self, trajectories: Any) -> dict[str, float]:
        """Takes an optimizer step on all trajectories, waits for it and returns its metrics."""
        rewards = jax.random.normal(jax.random.fold_in(jax.random.key(3), self._epoch), (self.shapes.rows,))
        advantages = jnp.asarray(global_advantages(jax.device_get(rewards)))
        batch = DDPOBatch(trajectories, self._negative, advantages)
        self._state, metrics = self._update(
            self._state, self._frozen, batch, jax.random.fold_in(jax.random.key(4), self._epoch)
        )
        return finalize(jax.device_get(metrics))

    def __call__(self) -> None:
        """Samples and learns."""
        self.update(self.sample()[0])


def precision_context(precision: str) -> contextlib.AbstractContextManager[Any]:
    """Context in which float32 products have this precision; whatever is compiled must be compiled in it."""
    return jax.default_matmul_precision(PRECISIONS[precision].products)


def measure_ddpo(
    name: str,
    sizes: Mapping[str, Mapping[str, Any]],
    schedule: Mapping[str, Any],
    shapes: EpochShapes,
    *,
    rounds: int,
) -> dict[str, Any]:
    """Measures epochs on the first device.

    Args:
      name: Of the model.
      sizes: As for `random_model`.
      schedule: Likewise.
      shapes: Sizes of an epoch.
      rounds: Epochs after the first, which compiles.
    Returns:
      A record of plain numbers and texts; benchmarks/README.md describes its fields.
    """
    seconds: dict[str, list[float]] = {"sample": [], "decode": [], "update": []}

    def timed(part: str, call: Callable[[], Any]) -> Any:
        begin = time.perf_counter()
        result = call()
        seconds[part].append(time.perf_counter() - begin)
        return result

    with precision_context(shapes.precision):
        model = random_model(name, sizes, schedule)
        counts = unet_counts(
            model.unet.config,
            latent_shape=model.sample_size,
            context_length=sizes["text_encoder"]["max_position_embeddings"],
        )
        parameters = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(model.weights["unet"]))
        decoded_in = decoding_dtype(jnp.dtype(PRECISIONS[shapes.precision].dtype))
        epoch, found = Epoch(model, shapes), []
        del model  # what of it does not train has been cast
        for _ in range(rounds + 1):
            trajectories, _ = timed("sample", epoch.sample)
            timed("decode", partial(epoch.decode, trajectories))
            found.append(timed("update", partial(epoch.update, trajectories)))
        peak = peak_bytes()
        del epoch, trajectories
        machine = measure_machine(PRECISIONS[shapes.precision].dtype)
    return {
        "benchmark": "ddpo",
        "model": name,
        "parameters": parameters,
        "shapes": asdict(shapes),
        "decoding_dtype": str(jnp.dtype(decoded_in)),
        "rounds": rounds,
        **_rates(shapes, seconds, counts, machine),
        "peak_bytes": peak,
        "pre_update_ratio_max_dev": max(one["ddpo/pre_update_ratio_max_dev"] for one in found),
        "pre_update_clip_fraction": max(one["ddpo/pre_update_clip_fraction"] for one in found),
        "hardware": hardware(),
        "versions": versions(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
    }


def _rates(
    shapes: EpochShapes, seconds: Mapping[str, list[float]], counts: UNetCounts, machine: Machine
) -> dict[str, Any]:
    """Times of an epoch's parts, compilation apart, and the share of the machine's rate that they reach."""
    median = {part: statistics.median(values[1:]) for part, values in seconds.items()}
    network_rows = shapes.rows * shapes.steps * (2 if shapes.guidance > 1 else 1)
    flops = {
        "denoising": network_rows * counts.forward,
        "update": network_rows * (counts.forward + counts.backward(full=not shapes.lora_rank)),
    }
    denoising = max(median["sample"] - median["decode"], 1e-9)
    peak_rate = machine.peak_rate or machine.matrix_rate
    return {
        "samples_per_second": round(shapes.rows / (median["sample"] + median["update"]), 4),
        **{f"seconds_{part}": round(value, 4) for part, value in median.items()},
        **{f"all_seconds_{part}": [round(x, 4) for x in values[1:]] for part, values in seconds.items()},
        "compile_seconds": round(sum(values[0] - median[part] for part, values in seconds.items()), 2),
        **{f"flops_{part}": value for part, value in flops.items()},
        "mfu_denoising": round(flops["denoising"] / denoising / peak_rate, 4),
        "mfu_update": round(flops["update"] / median["update"] / peak_rate, 4),
        "mfu_of": "data sheet" if machine.peak_rate else "measured rate",
        "matrix_rate": round(machine.matrix_rate),
    }

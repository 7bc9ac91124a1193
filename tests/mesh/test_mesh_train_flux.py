# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO of a tiny FLUX.1 on every mesh: the same images, figures that agree, and kernels that lie in parts."""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
import pytest

from jrl.mesh import abstract_mesh, tree_shardings
from jrl.models.diffusion.flux import Flux
from jrl.models.diffusion.flux_config import read_flux_config
from jrl.trainers.diffusion.ddpo import DDPOTrainer
from tests.models.diffusion.test_flux import FLUX_DEV
from tests.models.diffusion.tiny_flux_folder import save_tiny_flux_folder
from tests.trainers.diffusion.runs import brightness, ddpo_config, draw_prompt
from tests.trainers.runs import repeatable

pytestmark = pytest.mark.mesh
MESHES = {
    "8x1x1": {"data": 8, "fsdp": 1, "tensor": 1},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
    # Rows on every device whole, as on a single one.
    "1x1x8": {"data": 1, "fsdp": 1, "tensor": 8},
}
METHOD = {
    "sample_batch_size": 8,
    "sample_num_batches_per_epoch": 1,
    "sample_num_steps": 2,
    "sample_eta": 0.7,
    "sample_guidance_scale": 3.5,
    "sample_images_per_prompt": 4,
    "sample_height": 8,
    "sample_width": 8,
    "advantage": "group",
    "per_prompt_stat_tracking": False,
    "beta_kl": 0.05,
}
Run = tuple[list[dict[str, Any]], np.ndarray]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """(history, images of the last batch) of two epochs that train an adapter, by mesh."""
    home = tmp_path_factory.mktemp("flux")
    folder, found = save_tiny_flux_folder(home / "tiny"), {}
    for name, mesh in MESHES.items():
        config = ddpo_config(
            home / name,
            model={"model_path": str(folder), "peft_config": {"peft_type": "LORA", "r": 2, "lora_alpha": 2}},
            method=METHOD,
            train={"mesh": mesh, "batch_size": 8, "minibatch_size": 8, "epochs": 2},
        )
        trainer = DDPOTrainer(config, reward_function=brightness, prompt_function=draw_prompt)
        trainer.learn()
        found[name] = repeatable(trainer.history), trainer.gallery.last[0]
    return found


@pytest.mark.parametrize("name", ["8x1x1", "2x2x2"])
def test_images_and_figures_agree(runs: dict[str, Run], name: str) -> None:
    (expected, images), (records, found) = runs["1x1x8"], runs[name]
    np.testing.assert_allclose(found, images, atol=1e-3)
    pairs = list(
        zip(*([r for r in x if "iteration" in r] for x in (records, expected)), strict=True),
    )
    assert len(pairs) == 2
    for one, other in pairs:
        assert one["ddpo/pre_update_ratio_max_dev"] < 1e-5
        # Each epoch ends with an Adam step, whose normalisation amplifies rounding; hence not 1e-5.
        assert one == pytest.approx(other, rel=1e-3, abs=1e-4)


def test_memory_of_dev_at_its_real_size() -> None:
    """On (1, 4, 2) each device holds an eighth of what multiplies activations, and norms and biases whole."""
    mesh = abstract_mesh(1, 4, 2, num_devices=8)
    shapes = Flux(read_flux_config(FLUX_DEV)).shapes
    places = tree_shardings(mesh, shapes)[0]
    held = sum(
        math.prod(place.shard_shape(leaf.shape))
        for leaf, place in zip(jax.tree.leaves(shapes), jax.tree.leaves(places), strict=True)
    )
    whole = sum(leaf.size for leaf in jax.tree.leaves(shapes))
    # The maps that make shifts and scales are split in four: their results are needed whole.
    modulation = sum(
        leaf.size
        for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
        if "linear" in jax.tree_util.keystr(path) and "norm" in jax.tree_util.keystr(path)
    )
    assert held == pytest.approx((whole - modulation) / 8 + modulation / 4, rel=0.01)

# SPDX-License-Identifier: Apache-2.0
"""Flow-GRPO of a tiny multimodal diffusion transformer: groups, a KL, fewer steps than in evaluation, a folder."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jrl.models.diffusion.joined_context import join_context
from jrl.models.diffusion.mmdit import MMDiT
from jrl.models.diffusion.mmdit_config import MMDiTConfig
from jrl.ops.flow_schedule import FlowSchedule
from jrl.trainers.diffusion.ddpo import DDPOTrainer
from tests.diffusion_toy import LATENT
from tests.trainers.diffusion.runs import PROMPTS, brightness, ddpo_config, draw_prompt, toy_model

pytestmark = pytest.mark.slow
WIDTH = 8
TRANSFORMER = MMDiT(
    MMDiTConfig(
        sample_size=LATENT[0],
        in_channels=LATENT[-1],
        num_layers=2,
        attention_head_dim=4,
        num_attention_heads=1,
        joint_attention_dim=WIDTH,
        caption_projection_dim=4,
        pooled_projection_dim=WIDTH,
        out_channels=LATENT[-1],
        pos_embed_max_size=4,
        dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )
)
FLOW = FlowSchedule(use_dynamic_shifting=True, base_image_seq_len=2, max_image_seq_len=8)
METHOD = {
    "sample_eta": 0.7,
    "sample_images_per_prompt": 4,
    "advantage": "group",
    "advantage_std": "global",
    "beta_kl": 0.1,
    "kl_to_go": True,
    "eval_prompts": list(PROMPTS[:2]),
    "eval_num_steps": 5,
}


@dataclass(frozen=True)
class PooledEncoder:
    """A table of words, with their mean as the pooled prompt."""

    def encode(self, params: Any, tokens: Any, *, dtype: Any) -> Any:
        """Rows of the table, and the pooled one behind them."""
        rows = jnp.take(params["embedding"], tokens, axis=0).astype(dtype)
        return join_context(rows, rows.mean(axis=1))


def model() -> Any:
    toy = toy_model()
    weights = {**toy.weights, "unet": jax.device_get(TRANSFORMER.init(jax.random.key(0)))}
    return replace(toy, unet=TRANSFORMER, text_encoder=PooledEncoder(), schedule=FLOW, weights=weights)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: Any) -> Any:
    config = ddpo_config(tmp_path_factory.mktemp("flow"), method=METHOD, train={"epochs": 2})
    found = DDPOTrainer(config, reward_function=brightness, prompt_function=draw_prompt, model=model())
    found.learn()
    return found


def test_the_shift_is_that_of_the_images(trainer: Any) -> None:
    # 4 × 4 latents are 2 × 2 patches: μ = 0.5 + 2·(1.15 − 0.5)/6.
    assert trainer.model.schedule.resolution_shift == pytest.approx(0.5 + 2 * 0.65 / 6)


def test_a_fresh_policy_has_ratio_one_and_no_kl(trainer: Any) -> None:
    records = [record for record in trainer.history if "ddpo/kl" in record]
    assert all(record["ddpo/pre_update_ratio_max_dev"] < 1e-5 for record in records)
    assert records[0]["ddpo/kl"] < records[-1]["ddpo/kl"] < 1.0
    assert all(np.isfinite(record["ddpo/loss"]) for record in records)


def test_evaluation_has_steps_of_its_own(trainer: Any) -> None:
    sampler = trainer.make_sampler(2, 0.0, 5)
    tokens = [PROMPTS[0], PROMPTS[1]]
    numbers = np.arange(2, dtype=np.int32)
    found, _ = sampler(
        trainer.params,
        trainer.frozen,
        sampler.negative(trainer.frozen),
        tokens,
        jax.random.key(0),
        starts=numbers,
        steps=numbers,
    )
    assert found.logprobs.shape == (2, 5) and not np.asarray(found.logprobs).any()
    assert trainer.run_evaluation(0).sampling["num_steps"] == 5


def test_its_folder_is_the_transformers(trainer: Any, tmp_path: Any) -> None:
    trainer.model_writer()(tmp_path)
    config = json.loads((tmp_path / "transformer" / "config.json").read_text())
    assert config["_class_name"] == "SD3Transformer2DModel" and config["qk_norm"] == "rms_norm"
    before, after = model().weights["unet"], jax.device_get(trainer.params["unet"])
    # What was never learned stays, weight decay or not.
    table = ("pos_embed", "position_bias")
    np.testing.assert_array_equal(after[table[0]][table[1]], before[table[0]][table[1]])
    assert (after["proj_out"]["kernel"] != before["proj_out"]["kernel"]).any()

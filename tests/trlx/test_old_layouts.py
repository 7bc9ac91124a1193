# SPDX-License-Identifier: Apache-2.0
"""Files of older trlX releases: where every field goes, what is said, and what the schedule then does."""

from __future__ import annotations

import copy
import warnings

import numpy as np
import pytest

from jrl.learners.optimizers import make_schedule
from jrl.trainers.config import parse_gen_kwargs
from jrl.trainers.config.trl_config import TRLConfig
from jrl.trlx.old_layouts import modernise

# The values of the PPO and ILQL files that v0.2 shipped.
FIRST_PPO = """
model: {model_path: lvwerra/gpt2-imdb, tokenizer_path: gpt2, model_type: AcceleratePPOModel, num_layers_unfrozen: 2}
train:
  {seq_length: 48, epochs: 1000, total_steps: 10000, batch_size: 128, lr_ramp_steps: 100, lr_decay_steps: 79000,
   weight_decay: 1.0e-6, learning_rate_init: 1.412e-4, learning_rate_target: 1.0e-5, opt_betas: [0.9, 0.95],
   checkpoint_interval: 10000, eval_interval: 16, pipeline: PPOPipeline, orchestrator: PPOOrchestrator}
method:
  {name: ppoconfig, num_rollouts: 128, chunk_size: 128, ppo_epochs: 4, init_kl_coef: 0.2, target: 6, horizon: 10000,
   gamma: 1, lam: 0.95, cliprange: 0.2, cliprange_value: 0.2, vf_coef: 2.3,
   gen_kwargs: {max_length: 48, min_length: 48, top_k: 0.0, top_p: 1.0, do_sample: True}}
"""
FIRST_ILQL = """
model: {model_path: gpt2, tokenizer_path: gpt2, model_type: ILQLModel}
train:
  {seq_length: 64, batch_size: 128, epochs: 10, total_steps: 10000, lr_ramp_steps: 100, lr_decay_steps: 3366,
   weight_decay: 1.0e-6, learning_rate_init: 1.0e-4, learning_rate_target: 1.0e-4, opt_betas: [0.9, 0.95],
   checkpoint_interval: 10000, eval_interval: 16, pipeline: OfflinePipeline, orchestrator: OfflineOrchestrator,
   seed: 7}
method:
  {name: ilqlconfig, tau: 0.7, gamma: 0.99, cql_scale: 0.1, awac_scale: 1, alpha: 0.005, steps_for_target_q_sync: 1,
   betas: [16], two_qs: true}
"""
THIRD = """
model: {model_path: gpt2, tokenizer_path: gpt2, model_type: AccelerateILQLModel, num_layers_unfrozen: -1}
train:
  {seq_length: 64, batch_size: 128, epochs: 100, total_steps: 1000, lr_init: 5.0e-5, lr_target: 1.0e-6,
   opt_betas: [0.9, 0.95], opt_eps: 1.0e-8, weight_decay: 1.0e-6, checkpoint_interval: 1000, eval_interval: 100,
   pipeline: PromptPipeline, orchestrator: OfflineOrchestrator, entity_name: us}
method:
  {name: ilqlconfig, tau: 0.7, gamma: 0.99, cql_scale: 0.1, awac_scale: 1, alpha: 0.001, steps_for_target_q_sync: 5,
   betas: [1, 4], two_qs: true, gen_kwargs: {max_new_tokens: 56, top_k: 20, temperature: 1.0}}
"""
FOURTH = """
model:
  model_path: gpt2
  model_arch_type: causal
  delta_kwargs: {delta_type: lora, modified_modules: [c_attn], lora_r: 8, lora_alpha: 16, lora_dropout: 0.0}
tokenizer: {tokenizer_path: gpt2, truncation_side: left}
optimizer: {name: adamw, kwargs: {lr: 1.0e-4}}
scheduler: {name: cosine_annealing, kwargs: {T_max: 1000, eta_min: 1.0e-4}}
train:
  {seq_length: 64, batch_size: 8, epochs: 100, total_steps: 1000, checkpoint_interval: 1000, eval_interval: 100,
   pipeline: PromptPipeline, orchestrator: PPOOrchestrator, trainer: AcceleratePPOTrainer, trackers: [wandb]}
method: {name: ppoconfig, gen_kwargs: {max_new_tokens: 40}, scale_reward: False, ref_mean: null, ref_std: null,
         cliprange_reward: 10}
"""


def load(tmp_path, text):
    """The configuration of a file, and what was said."""
    path = tmp_path / "config.yaml"
    path.write_text(text)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        config = TRLConfig.load_yaml(path)
    return config, [str(warning.message) for warning in said]


class TestFirstLayout:
    def test_ppo(self, tmp_path):
        config, said = load(tmp_path, FIRST_PPO)
        assert (config.model.model_path, config.model.num_layers_unfrozen) == ("lvwerra/gpt2-imdb", 2)
        assert config.tokenizer.tokenizer_path == "gpt2"
        assert config.optimizer.name == "adamw"
        assert config.optimizer.kwargs == {"lr": 1.412e-4, "betas": [0.9, 0.95], "weight_decay": 1e-6}
        assert config.scheduler.name == "warmup_linear"
        assert config.scheduler.kwargs == {"warmup_steps": 100, "total_steps": 79100, "eta_min": 1e-5}
        train = config.train
        assert (train.trainer, train.pipeline) == ("PPOTrainer", "PromptPipeline")
        assert (train.total_steps, train.epochs, train.batch_size, train.eval_interval) == (
            10000,
            1000,
            128,
            16,
        )
        assert config.method.vf_coef == 2.3
        assert config.method.cliprange_reward is None  # there was no clipping
        assert config.method.gen_kwargs == {
            "max_new_tokens": 48,
            "min_new_tokens": 48,
            "top_k": 0.0,
            "top_p": 1.0,
            "do_sample": True,
        }
        settings, _ = parse_gen_kwargs(config.method.gen_kwargs, eos_token_id=1, pad_token_id=0)
        assert settings.top_k == 0 and isinstance(settings.top_k, int)
        # 48 tokens for prompt and completion together; now 48 are sampled, and a prompt may have as many.
        assert train.seq_length == 96
        assert len(said) == 13

    @pytest.mark.parametrize(
        ("old", "new"),
        [
            ("model.tokenizer_path", "tokenizer.tokenizer_path"),
            ("model.model_type", "train.trainer"),
            ("train.learning_rate_init", "optimizer.kwargs.lr"),
            ("train.learning_rate_target", "scheduler.kwargs.eta_min"),
            ("train.opt_betas", "optimizer.kwargs.betas"),
            ("train.weight_decay", "optimizer.kwargs.weight_decay"),
            ("train.lr_ramp_steps", "scheduler.kwargs.warmup_steps"),
            ("train.lr_decay_steps", "scheduler.kwargs.total_steps"),
            ("train.pipeline", "PromptPipeline"),
            ("train.orchestrator", "train.trainer"),
            ("method.gen_kwargs.max_length", "method.gen_kwargs.max_new_tokens"),
            ("method.gen_kwargs.min_length", "method.gen_kwargs.min_new_tokens"),
            ("train.seq_length", "96"),
        ],
    )
    def test_one_warning_a_field_names_the_new_one(self, tmp_path, old, new):
        about = [text for text in load(tmp_path, FIRST_PPO)[1] if text.startswith(f"`{old}`")]
        assert len(about) == 1 and new in about[0]

    def test_ilql(self, tmp_path):
        config, said = load(tmp_path, FIRST_ILQL)
        assert config.train.trainer == "ILQLTrainer"
        assert (config.train.pipeline, config.train.seed, config.train.seq_length) == (
            "PromptPipeline",
            7,
            64,
        )
        assert (config.method.alpha, config.method.beta) == (0.005, 0.0)
        assert config.method.gen_kwargs == {
            "max_new_tokens": 56,
            "top_k": 20,
            "temperature": 1.0,
            "beta": 16,
        }
        assert any("`method.betas`" in text and "`method.gen_kwargs.beta` = 16" in text for text in said)

    def test_short_ilql_budgets_leave_room_for_a_prompt(self, tmp_path):
        config, _ = load(tmp_path, FIRST_ILQL.replace("seq_length: 64", "seq_length: 11"))
        assert config.method.gen_kwargs["max_new_tokens"] == 10

    def test_the_rate_ramps_up_then_decays(self, tmp_path):
        """From 0 to 1.412e-4 in 100 steps, to 1e-5 in 79,000 more, constant from there."""
        config, _ = load(tmp_path, FIRST_PPO)
        rate = make_schedule(config.scheduler.name, config.scheduler.kwargs)(config.optimizer.kwargs["lr"])
        found = [float(rate(step)) for step in (0, 50, 100, 100 + 39500, 79100, 90000)]
        np.testing.assert_allclose(found, [0, 0.706e-4, 1.412e-4, 0.756e-4, 1e-5, 1e-5], rtol=1e-5)

    @pytest.mark.parametrize(("ramp", "first"), [(0, 1.412e-4), (100, 0.0)])
    def test_no_decay(self, tmp_path, ramp, first):
        text = FIRST_PPO.replace("learning_rate_target: 1.0e-5", "learning_rate_target: 1.412e-4")
        text = text.replace("lr_ramp_steps: 100", f"lr_ramp_steps: {ramp}")
        config, said = load(tmp_path, text.replace("lr_decay_steps: 79000", "lr_decay_steps: 0"))
        rate = make_schedule(config.scheduler.name, config.scheduler.kwargs)(1.412e-4)
        np.testing.assert_allclose([float(rate(0)), float(rate(5000))], [first, 1.412e-4])
        assert any(text.startswith("`train.lr_decay_steps` = 0 is left out") for text in said)

    def test_a_decay_without_steps(self, tmp_path):
        with pytest.raises(ValueError, match=r"`train.lr_decay_steps` is 0.*fall from 0.0001412 to 1e-05"):
            load(tmp_path, FIRST_PPO.replace("lr_decay_steps: 79000", "lr_decay_steps: 0"))

    def test_warnings_point_at_the_reader(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text(FIRST_PPO)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            TRLConfig.load_yaml(path)
        assert {warning.filename for warning in said} == {__file__}


class TestLaterLayouts:
    def test_the_third(self, tmp_path):
        config, _ = load(tmp_path, THIRD)
        assert config.train.trainer == "ILQLTrainer"
        assert config.optimizer.kwargs == {
            "lr": 5e-5,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 1e-6,
        }
        assert config.scheduler.name == "cosine_annealing"
        assert config.scheduler.kwargs == {"T_max": 1000, "eta_min": 1e-6}
        # Several weights are what an evaluation runs through.
        assert config.method.gen_kwargs == {
            "max_new_tokens": 56,
            "top_k": 20,
            "temperature": 1.0,
            "beta": [1, 4],
        }
        assert config.train.entity_name == "us"

    def test_the_fourth(self, tmp_path):
        config, said = load(tmp_path, FOURTH)
        assert config.model.peft_config == {
            "peft_type": "LORA",
            "r": 8,
            "lora_alpha": 16,
            "lora_dropout": 0.0,
            "target_modules": ["c_attn"],
        }
        assert config.train.tracker == "wandb"
        assert config.train.trainer == "AcceleratePPOTrainer"
        assert config.tokenizer.truncation_side == "left"
        assert len(said) == 3

    def test_all_modules_are_all_linear_maps(self, tmp_path):
        config, _ = load(tmp_path, FOURTH.replace("[c_attn]", "all"))
        assert config.model.peft_config["target_modules"] == "all-linear"

    @pytest.mark.parametrize(
        ("given", "tracker", "count"),
        [("[]", None, 3), ("wandb", "wandb", 3), ("[tensorboard, wandb]", "tensorboard", 4)],
    )
    def test_one_tracker(self, tmp_path, given, tracker, count):
        config, said = load(tmp_path, FOURTH.replace("[wandb]", given))
        assert config.train.tracker == tracker
        assert len(said) == count


class TestLengths:
    """`max_length` counted the prompt."""

    def test_room_is_left_alone_where_there_is_some(self, tmp_path):
        text = FIRST_PPO.replace("seq_length: 48", "seq_length: 64")
        config, said = load(tmp_path, text)
        assert config.train.seq_length == 64
        assert not any(line.startswith("`train.seq_length`") for line in said)

    def test_the_present_layout_too(self, tmp_path):
        """As in the file of trlX's own tests."""
        text = FOURTH.replace("{max_new_tokens: 40}", "{max_length: 48, min_length: 48}")
        config, _ = load(tmp_path, text)
        assert config.method.gen_kwargs == {"max_new_tokens": 48, "min_new_tokens": 48}
        assert config.train.seq_length == 64

    def test_rollouts_of_their_own(self):
        config = {
            "method": {"name": "PPO", "gen_experience_kwargs": {"max_length": 8}},
            "train": {"seq_length": 32},
        }
        with pytest.warns(UserWarning, match="gen_experience_kwargs.max_new_tokens"):
            assert modernise(config)["method"]["gen_experience_kwargs"] == {"max_new_tokens": 8}

    def test_both_names(self):
        config = {"method": {"name": "PPO", "gen_kwargs": {"max_length": 8, "max_new_tokens": 4}}}
        with pytest.raises(
            ValueError, match=r"`method.gen_kwargs.max_new_tokens` is 4, and `.*max_length` means"
        ):
            modernise(config)


class TestMistakes:
    @pytest.mark.parametrize(
        ("layout", "old", "new", "message"),
        [
            (
                THIRD,
                "lr_init: 5.0e-5",
                "lr_init: 5.0e-5, learning_rate_init: 1",
                "`train.lr_init` means the same",
            ),
            (FIRST_ILQL, "betas: [16]", "betas: 16", "`method.betas` must be a list of numbers, got 16"),
            (FIRST_ILQL, "betas: [16]", "betas: []", "`method.betas` must be a list of numbers"),
            (
                FOURTH,
                "delta_type: lora",
                "delta_type: adapter",
                "`model.delta_kwargs`: 'adapter' means nothing",
            ),
            (FOURTH, "lora_r", "bottleneck", r"`model.delta_kwargs`: \['bottleneck'\] means nothing"),
            (FIRST_PPO, "weight_decay", "wieght_decay", "Unknown field `train.wieght_decay`"),
            (FIRST_PPO, "lr_ramp_steps: 100", "lr_ramp_steps: many", "`train.lr_ramp_steps` must be int"),
        ],
    )
    @pytest.mark.filterwarnings("ignore")
    def test_they_name_themselves(self, tmp_path, layout, old, new, message):
        assert old in layout
        with pytest.raises((ValueError, TypeError), match=message):
            config, _ = load(tmp_path, layout.replace(old, new, 1))
            make_schedule(config.scheduler.name, config.scheduler.kwargs)

    def test_the_caller_s_dictionary_stays(self):
        config = {"method": {"name": "ilql", "betas": [1]}, "train": {"orchestrator": "x", "seq_length": 64}}
        before = copy.deepcopy(config)
        with pytest.warns(UserWarning):
            modernise(config)
        assert config == before

    def test_the_present_layout_passes_as_it_is(self, recwarn):
        for config in (
            {"method": {"name": "PPO", "gen_kwargs": {"max_new_tokens": 3}}},
            {"model": "gpt2"},
            {},
        ):
            assert modernise(config) == config
        assert not recwarn.list

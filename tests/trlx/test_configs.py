# SPDX-License-Identifier: Apache-2.0
"""trlX's configuration classes: its signatures, its old layout, and the configurations of its examples."""

from __future__ import annotations

import copy
import inspect
import json
import pickle
import warnings
from dataclasses import dataclass

import pytest
import yaml

import jrl
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.trainers.config.gen_kwargs import parse_gen_kwargs
from jrl.trainers.config.registry import get_trainer
from jrl.trlx import train
from jrl.trlx.data.configs import (
    ILQLConfig,
    MethodConfig,
    ModelConfig,
    OptimizerConfig,
    PPOConfig,
    RFTConfig,
    SchedulerConfig,
    SFTConfig,
    TokenizerConfig,
    TrainConfig,
    TRLConfig,
)
from jrl.trlx.data.default_configs import default_ilql_config, default_ppo_config, default_sft_config
from jrl.trlx.old_configs import OldILQLConfig, OldModelConfig, OldPPOConfig, OldTrainConfig

PPO = dict(
    name="PPOConfig",
    ppo_epochs=4,
    num_rollouts=128,
    chunk_size=128,
    init_kl_coef=0.05,
    target=6,
    horizon=10000,
    gamma=1,
    lam=0.95,
    cliprange=0.2,
    cliprange_value=0.2,
    vf_coef=1,
    scale_reward="ignored",
    ref_mean=None,
    ref_std=None,
    cliprange_reward=10,
    gen_kwargs=dict(max_new_tokens=40, top_k=0, top_p=1.0, do_sample=True),
)
ILQL = dict(
    name="ilqlconfig",
    tau=0.7,
    gamma=0.99,
    cql_scale=0.1,
    awac_scale=1,
    alpha=0.001,
    beta=0,
    steps_for_target_q_sync=5,
    two_qs=True,
    gen_kwargs=dict(max_new_tokens=56, top_k=20, beta=1, temperature=1.0),
)
TRAIN = dict(
    seq_length=1024, epochs=100, total_steps=1000, batch_size=32, checkpoint_interval=1000, eval_interval=100
)
OLD_PPO = {name: value for name, value in PPO.items() if name not in ("scale_reward", "ref_mean", "ref_std")}
del OLD_PPO["cliprange_reward"]
OLD_ILQL = {name: value for name, value in ILQL.items() if name not in ("beta", "gen_kwargs")} | {
    "betas": [16]
}
OLD_TRAIN = dict(
    total_steps=10000,
    seq_length=64,
    epochs=1000,
    batch_size=128,
    lr_ramp_steps=100,
    lr_decay_steps=79000,
    weight_decay=1e-6,
    learning_rate_init=1.412e-4,
    learning_rate_target=1.412e-4,
    opt_betas=[0.9, 0.95],
    checkpoint_interval=10000,
    eval_interval=16,
    pipeline="PPOPipeline",
    orchestrator="PPOOrchestrator",
)


def example(trainer, method, *, model, lr, betas=(0.9, 0.95), weight_decay=1e-6, tokenizer=None, **train):
    """An example's configuration, section by section as its script has them."""
    return TRLConfig(
        train=TrainConfig(**(TRAIN | train), pipeline="PromptPipeline", trainer=trainer),
        model=model,
        tokenizer=tokenizer or TokenizerConfig(tokenizer_path="gpt2", truncation_side="right"),
        optimizer=OptimizerConfig(
            name="adamw", kwargs=dict(lr=lr, betas=betas, eps=1.0e-8, weight_decay=weight_decay)
        ),
        scheduler=SchedulerConfig(name="cosine_annealing", kwargs=dict(T_max=1e12, eta_min=lr)),
        method=method,
    )


def steered(**changes):
    return ILQLConfig(**(ILQL | changes))


def clipped(**changes):
    return PPOConfig(**(PPO | changes))


def sampling(max_new_tokens, **more):
    return dict(max_new_tokens=max_new_tokens, top_k=0, top_p=1.0, do_sample=True) | more


WALKS = ModelConfig(model_path="CarperAI/randomwalks", num_layers_unfrozen=-1)
T5 = TokenizerConfig(tokenizer_path="lvwerra/t5-imdb", padding_side="right", truncation_side="right")
LORA = dict(peft_type="LORA", r=8, lora_alpha=32, lora_dropout=0.1)
EXAMPLES = {
    "randomwalks_ppo": lambda: example(
        "AcceleratePPOTrainer",
        clipped(init_kl_coef=0, target=None, vf_coef=1.2, cliprange_reward=1, gen_kwargs=sampling(9)),
        model=WALKS,
        lr=3e-4,
        seq_length=10,
        epochs=20,
        total_steps=10000,
        batch_size=100,
        checkpoint_interval=10000,
        eval_interval=20,
    ),
    "randomwalks_ilql": lambda: example(
        "AccelerateILQLTrainer",
        steered(
            tau=0.8, alpha=0.1, gen_kwargs=dict(max_new_tokens=9, top_k=10, beta=[0, 1, 100], temperature=1.0)
        ),
        model=ModelConfig(model_path="gpt2", num_layers_unfrozen=-1),
        lr=2e-4,
        seq_length=11,
        epochs=20,
        total_steps=1000,
        batch_size=100,
        eval_interval=16,
    ),
    "randomwalks_rft": lambda: example(
        "AccelerateRFTTrainer",
        RFTConfig(
            name="RFTConfig",
            n_generations_per_prompt=100,
            start_percentile=0.9,
            end_percentile=0.95,
            n_improve_steps=1,
            gen_kwargs=sampling(9),
        ),
        model=WALKS,
        lr=3e-4,
        betas=(0.9, 0.99),
        weight_decay=0,
        seq_length=10,
        batch_size=100,
    ),
    "ppo_sentiments": lambda: default_ppo_config(),
    "ppo_sentiments_peft": lambda: default_ppo_config().evolve(model=dict(peft_config=LORA)),
    "ppo_sentiments_llama": lambda: example(
        "AcceleratePPOTrainer",
        clipped(init_kl_coef=0.001),
        model=ModelConfig(model_path="NousResearch/Llama-2-7b-hf", num_layers_unfrozen=2),
        lr=1e-5,
        total_steps=400,
    ),
    "ppo_sentiments_t5": lambda: example(
        "AcceleratePPOTrainer",
        clipped(gamma=0.99, chunk_size=12, gen_kwargs=sampling(50, eos_token_id=-1)),
        model=ModelConfig(model_path="lvwerra/t5-imdb", num_layers_unfrozen=-1, model_arch_type="seq2seq"),
        tokenizer=T5,
        lr=5e-5,
        seq_length=128,
        batch_size=12,
        save_best=False,
    ),
    "ilql_sentiments": lambda: default_ilql_config(),
    "ilql_sentiments_t5": lambda: example(
        "AccelerateILQLTrainer",
        steered(gen_kwargs=dict(max_new_tokens=56, top_k=20, beta=4, temperature=1.0)),
        model=ModelConfig(model_path="lvwerra/t5-imdb", num_layers_unfrozen=-1, model_arch_type="seq2seq"),
        tokenizer=T5,
        lr=5e-5,
        seq_length=128,
    ),
    "sft_sentiments": lambda: default_sft_config(),
    "rft_sentiments": lambda: example(
        "AccelerateRFTTrainer",
        RFTConfig(
            name="RFTConfig",
            n_generations_per_prompt=4,
            start_percentile=0.9,
            end_percentile=0.9,
            n_improve_steps=1,
            gen_kwargs=sampling(40),
        ),
        model=ModelConfig(model_path="lvwerra/gpt2-imdb", num_layers_unfrozen=-1),
        lr=3e-5,
    ),
    "alpaca": lambda: example(
        "AccelerateSFTTrainer",
        SFTConfig(name="sftconfig", gen_kwargs=sampling(256)),
        model=ModelConfig(model_path="EleutherAI/gpt-j-6B"),
        lr=2e-5,
        total_steps=2400,
        batch_size=4,
    ),
    "hh_ppo": lambda: example(
        "AcceleratePPOTrainer",
        clipped(num_rollouts=64, chunk_size=16, scale_reward="running", gen_kwargs=sampling(128)),
        model=ModelConfig(model_path="EleutherAI/gpt-j-6B", num_layers_unfrozen=2),
        tokenizer=TokenizerConfig(tokenizer_path="EleutherAI/gpt-j-6B", truncation_side="left"),
        lr=8e-6,
        batch_size=4,
    ),
    "hh_ilql": lambda: example(
        "AccelerateILQLTrainer",
        steered(
            tau=0.6,
            alpha=0.0001,
            steps_for_target_q_sync=1,
            gen_kwargs=dict(max_new_tokens=128, top_k=20, beta=[1, 4], temperature=1.0),
        ),
        model=ModelConfig(model_path="EleutherAI/gpt-j-6B", num_layers_unfrozen=-1),
        tokenizer=TokenizerConfig(tokenizer_path="EleutherAI/gpt-j-6B", truncation_side="left"),
        lr=1e-6,
    ),
    "summarize_rlhf": lambda: example(
        "AcceleratePPOTrainer",
        clipped(init_kl_coef=0.1, vf_coef=0.2, chunk_size=16, gen_kwargs=dict(max_new_tokens=50)),
        model=ModelConfig(model_path="CarperAI/openai_summarize_tldr_sft", num_layers_unfrozen=8),
        lr=5e-6,
        seq_length=550,
        batch_size=4,
    ),
    "summarize_daily_cnn": lambda: example(
        "AcceleratePPOTrainer",
        clipped(
            gen_kwargs=dict(max_new_tokens=100),
            gen_experience_kwargs=dict(
                max_new_tokens=100, do_sample=True, temperature=1.0, top_k=50, top_p=0.95
            ),
        ),
        model=ModelConfig(
            model_path="google/flan-t5-large", model_arch_type="seq2seq", num_layers_unfrozen=2
        ),
        tokenizer=TokenizerConfig(tokenizer_path="google/flan-t5-large", truncation_side="right"),
        lr=1e-5,
        seq_length=612,
        batch_size=12,
    ),
}


class TestExamples:
    @pytest.mark.parametrize("name", EXAMPLES)
    def test_trlx_s_examples_fit(self, name):
        config = EXAMPLES[name]()
        config.validate()
        assert isinstance(config, jrl.TRLConfig)
        assert config.train.tracker == "wandb"
        trainer = get_trainer(config.train.trainer)
        assert trainer.__name__ == config.train.trainer.removeprefix("Accelerate")
        gen_kwargs = [config.method.gen_kwargs]
        if isinstance(config.method, PPOConfig) and config.method.gen_experience_kwargs:
            gen_kwargs.append(config.method.gen_experience_kwargs)
        for given in gen_kwargs:
            steers = isinstance(config.method, ILQLConfig)
            settings, _ = parse_gen_kwargs(given, eos_token_id=1, pad_token_id=0, steers=steers)
            assert settings.max_new_tokens < config.train.seq_length
        schedule = make_schedule(config.scheduler.name, config.scheduler.kwargs)
        make_optimizer(
            config.optimizer.name, config.optimizer.kwargs, schedule, max_grad_norm=config.train.max_grad_norm
        )
        again = TRLConfig.from_dict(json.loads(str(config)))
        assert str(again) == str(config)


class TestConstructors:
    @pytest.mark.parametrize(
        ("face", "given"),
        [
            (PPOConfig, PPO),
            (ILQLConfig, ILQL),
            (TrainConfig, TRAIN | {"pipeline": "PromptPipeline", "trainer": "x"}),
        ],
    )
    def test_by_position_as_by_name(self, face, given):
        order = [name for name in inspect.signature(face).parameters if name in given]
        found = face(*(given[name] for name in order))
        assert found == face(**given)
        assert type(found) is face

    def test_defaults_are_not_shared(self):
        first, second = (OptimizerConfig("adamw") for _ in range(2))
        first.kwargs["lr"] = 1
        assert second.kwargs == {}

    def test_jrl_s_own_fields_are_taken_by_name(self):
        train = TrainConfig(**TRAIN, pipeline="PromptPipeline", trainer="x", mesh={"data": 1}, remat=True)
        assert (train.mesh, train.remat, train.tracker) == ({"data": 1}, True, "wandb")

    @pytest.mark.parametrize(
        ("face", "given", "message"),
        [
            (
                PPOConfig,
                {"name": "PPOConfig", "ppo_epoch": 4},
                "PPOConfig: unknown argument `ppo_epoch`. Did you",
            ),
            (SFTConfig, {"name": "SFTConfig"}, r"SFTConfig: the arguments \['gen_kwargs'\] are required"),
            (TrainConfig, TRAIN, r"TrainConfig: the arguments \['pipeline', 'trainer'\] are required"),
            (OptimizerConfig, {}, "OptimizerConfig: the arguments"),
            (TRLConfig, {"train": None}, r"TRLConfig: the arguments \['method', 'model'"),
            (TRLConfig, {"trian": None}, "TRLConfig: unknown argument `trian`. Did you mean `train`"),
        ],
    )
    def test_mistakes_name_themselves(self, face, given, message):
        with pytest.raises(TypeError, match=message):
            face(**given)

    def test_values_are_checked(self):
        with pytest.raises(ValueError, match=r"`method\.gamma`"):
            clipped(gamma=2)

    def test_copies_and_pickles(self):
        config = default_ppo_config()
        assert copy.deepcopy(config) == config == pickle.loads(pickle.dumps(config))
        assert type(copy.deepcopy(config).method) is PPOConfig

    def test_editing_keeps_the_classes(self):
        config = default_ilql_config().evolve(train={"seed": 3}, method={"tau": 0.9})
        assert [type(section) for section in vars(config).values()] == [
            ILQLConfig,
            ModelConfig,
            OptimizerConfig,
            SchedulerConfig,
            TokenizerConfig,
            TrainConfig,
        ]
        changed = TRLConfig.update(config.to_dict(), {"train.seed": 4, "optimizer.kwargs.lr": 1.0})
        assert (type(changed), type(changed.method), changed.train.seed) == (TRLConfig, ILQLConfig, 4)

    def test_sections_read_dictionaries(self):
        assert SFTConfig.from_dict({"name": "SFT", "gen_kwargs": {"max_new_tokens": 3}}).gen_kwargs == {
            "max_new_tokens": 3
        }
        with pytest.raises(ValueError, match="Did you mean `tokenizer_path`"):
            TokenizerConfig.from_dict({"tokenizer_pth": "gpt2"})

    def test_a_method_of_ones_own(self):
        @dataclass
        class Own(MethodConfig):
            """Fields after those of every method, as trlX's scripts write them."""

            gen_kwargs: dict
            strength: float = 1.0

        own = Own(name="Own", gen_kwargs={"max_new_tokens": 3})
        assert (own.name, own.strength) == ("Own", 1.0)
        assert isinstance(own, jrl.MethodConfig)

    def test_files_get_trlx_s_defaults(self, tmp_path):
        path = tmp_path / "config.yaml"
        content = default_ppo_config().to_dict()
        del content["train"]["tracker"], content["train"]["project_name"]
        path.write_text(yaml.safe_dump(content))
        assert TRLConfig.load_yaml(path) == default_ppo_config()
        assert jrl.TRLConfig.load_yaml(path).train.tracker is None


class TestOldLayout:
    def test_sections_are_told_by_their_arguments(self):
        assert ModelConfig("gpt2", "gpt2", "ILQLModel") == OldModelConfig("gpt2", "gpt2", "ILQLModel", -1)
        assert (
            ModelConfig(model_path="gpt2", tokenizer_path="gpt2", model_type="ILQLModel").num_layers_unfrozen
            == -1
        )
        assert type(ModelConfig("gpt2", "causal", 2)) is ModelConfig
        old, new = TrainConfig(*OLD_TRAIN.values()), TrainConfig(*TRAIN.values(), "PromptPipeline", "x")
        assert (type(old), type(new)) == (OldTrainConfig, TrainConfig)
        assert old == TrainConfig(**OLD_TRAIN)
        assert (old.checkpoint_dir, old.project_name, old.seed) == ("ckpts", "trlx", 1000)
        assert type(PPOConfig(**OLD_PPO)) is type(PPOConfig(*OLD_PPO.values())) is OldPPOConfig
        assert type(PPOConfig(**PPO)) is type(PPOConfig(*PPO.values())) is PPOConfig
        assert type(ILQLConfig(**OLD_ILQL)) is OldILQLConfig
        assert type(ILQLConfig(**ILQL)) is type(ILQLConfig(*ILQL.values())) is ILQLConfig

    def test_an_old_name_asks_for_all_of_the_old_section(self):
        with pytest.raises(TypeError, match=r"OldTrainConfig: the arguments \[.*'learning_rate_init'"):
            TrainConfig(lr_ramp_steps=100)

    @pytest.mark.parametrize("by_name", [False, True])
    def test_three_sections_become_six(self, by_name):
        sections = {
            "model": ModelConfig("lvwerra/gpt2-imdb", "gpt2", "AcceleratePPOModel", 2),
            "train": TrainConfig(**OLD_TRAIN),
            "method": PPOConfig(**OLD_PPO),
        }
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            config = TRLConfig(**sections) if by_name else TRLConfig(*sections.values())
        assert len(said) == 10
        assert any("`train.lr_ramp_steps` is an old name" in str(warning.message) for warning in said)
        assert [type(section) for section in vars(config).values()] == [
            PPOConfig,
            ModelConfig,
            OptimizerConfig,
            SchedulerConfig,
            TokenizerConfig,
            TrainConfig,
        ]
        assert (config.train.trainer, config.train.tracker) == ("PPOTrainer", "wandb")
        assert (config.model.num_layers_unfrozen, config.tokenizer.tokenizer_path) == (2, "gpt2")
        assert config.optimizer.kwargs == {"lr": 1.412e-4, "betas": [0.9, 0.95], "weight_decay": 1e-6}
        assert config.method.cliprange_reward is None

    def test_betas_steer_the_sampling(self):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            train = OLD_TRAIN | {"pipeline": "OfflinePipeline", "orchestrator": "OfflineOrchestrator"}
            config = TRLConfig(
                ModelConfig("gpt2", "gpt2", "AccelerateILQLModel"),
                TrainConfig(**train),
                ILQLConfig(**OLD_ILQL),
            )
        assert config.train.trainer == "ILQLTrainer"
        assert config.method.gen_kwargs["beta"] == 16


@pytest.mark.parametrize(
    ("name", "full"), [("lr", "optimizer.kwargs.lr"), ("vf_coef", "method.vf_coef"), ("seed", "train.seed")]
)
def test_a_name_that_stands_alone_is_the_field_of_that_name(name, full):
    base = default_ppo_config()
    with pytest.warns(UserWarning, match=rf"`{name}` is `{full}` now"):
        found = TRLConfig.update(base, {name: 3})
    assert found == TRLConfig.update(base, {full: 3}) != base
    with pytest.raises(ValueError, match="Unknown parameter `nothing`"):
        TRLConfig.update(base, {"nothing": 3})


def test_a_device_of_the_first_release_is_left_out_with_a_word():
    tree = default_ppo_config().to_dict()
    tree["model"]["device"] = "cuda"
    with pytest.warns(UserWarning, match="`model.device` = 'cuda' is left out: `train.mesh`"):
        assert TRLConfig.from_dict(tree) == default_ppo_config()


def test_a_trainer_of_nemo_is_refused_before_anything_else():
    config = default_ppo_config().evolve(train={"trainer": "NeMoPPOTrainer"})
    with pytest.raises(ImportError, match=r"NeMoPPOTrainer needs NeMo.*AcceleratePPOTrainer.*train\.mesh"):
        train(samples="no samples at all", rewards=3, config=config)

# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import copy

import pytest
import yaml

from jrl.learners.config import MethodConfig
from jrl.learners.ilql import ILQLConfig
from jrl.learners.ppo import PPOConfig
from jrl.learners.rft import RFTConfig
from jrl.learners.sft import SFTConfig
from jrl.methods import (
    default_ilql_config,
    default_ppo_config,
    default_rft_config,
    default_sft_config,
)
from jrl.trainers.config.coercion import parse_yaml
from jrl.trainers.config.overrides import apply_overrides
from jrl.trainers.config.sections import ModelConfig, TrainConfig
from jrl.trainers.config.trl_config import TRLConfig


@pytest.fixture
def config():
    return default_ppo_config()


class TestDefaults:
    def test_ppo_is_trlxs(self, config):
        assert (config.model.model_path, config.model.num_layers_unfrozen) == ("lvwerra/gpt2-imdb", 2)
        assert config.optimizer.kwargs == {
            "lr": 3e-5,
            "betas": [0.9, 0.95],
            "eps": 1e-8,
            "weight_decay": 1e-6,
        }
        assert config.scheduler.kwargs == {"T_max": 1e12, "eta_min": 3e-5}
        train = config.train
        assert (train.total_steps, train.batch_size, train.checkpoint_interval) == (10000, 32, 10000)
        assert (train.eval_interval, train.epochs, train.seq_length, train.seed) == (100, 100, 1024, 1000)
        method = config.method
        assert isinstance(method, PPOConfig)
        assert (method.num_rollouts, method.chunk_size, method.ppo_epochs) == (128, 128, 4)
        assert (method.init_kl_coef, method.target, method.horizon) == (0.001, None, 10000)
        assert (method.gamma, method.lam, method.cliprange, method.vf_coef) == (1, 0.95, 0.2, 1)
        assert method.gen_kwargs == {"max_new_tokens": 40, "top_k": 0, "top_p": 1.0, "do_sample": True}

    def test_sft_is_trlxs(self):
        config = default_sft_config()
        assert isinstance(config.method, SFTConfig)
        assert (config.train.total_steps, config.train.batch_size, config.optimizer.kwargs["lr"]) == (
            1000,
            8,
            1e-4,
        )

    def test_ilql_is_trlxs(self):
        config = default_ilql_config()
        train, method = config.train, config.method
        assert (config.model.model_path, config.model.num_layers_unfrozen) == ("gpt2", -1)
        assert (train.seq_length, train.total_steps, train.batch_size) == (64, 1000, 128)
        assert (train.checkpoint_interval, train.eval_interval, train.epochs) == (1000, 100, 100)
        assert config.optimizer.kwargs["lr"] == config.scheduler.kwargs["eta_min"] == 5e-5
        assert isinstance(method, ILQLConfig)
        assert (method.tau, method.gamma, method.cql_scale, method.awac_scale) == (0.7, 0.99, 0.1, 1)
        assert (method.alpha, method.beta, method.steps_for_target_q_sync) == (0.001, 0, 5)
        assert method.two_qs
        assert method.gen_kwargs == {"max_new_tokens": 56, "top_k": 20, "beta": 1, "temperature": 1.0}

    def test_rft_has_trlxs_percentiles(self):
        method = default_rft_config().method
        assert isinstance(method, RFTConfig)
        assert (method.start_percentile, method.end_percentile) == (0.7, 0.95)
        assert (method.n_improve_steps, method.n_generations_per_prompt) == (4, 32)

    @pytest.mark.parametrize(
        "make", [default_ppo_config, default_ilql_config, default_sft_config, default_rft_config]
    )
    def test_dictionaries_and_yaml_round_trip(self, make, tmp_path):
        config = make()
        assert list(config.to_dict()) == ["method", "model", "optimizer", "scheduler", "tokenizer", "train"]
        assert TRLConfig.from_dict(config.to_dict()) == config
        path = tmp_path / "config.yaml"
        path.write_text(yaml.safe_dump(config.to_dict()))
        assert TRLConfig.load_yaml(path) == config
        path.write_text(str(config))  # JSON is YAML
        assert TRLConfig.load_yaml(path) == config

    def test_to_dict_shares_nothing(self, config):
        config.to_dict()["optimizer"]["kwargs"]["lr"] = 1
        assert config.optimizer.kwargs["lr"] == 3e-5


class TestYAML:
    def load(self, tmp_path, text):
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return TRLConfig.load_yaml(path)

    MINIMAL = """
method: {name: ppoconfig, init_kl_coef: 1e-3}
model: {model_path: gpt2}
optimizer: {name: adamw, kwargs: {lr: 1e-4, eps: 1E-8, betas: [.9, 0.95]}}
scheduler: {name: cosine_annealing, kwargs: {T_max: 1e12}}
tokenizer: {tokenizer_path: gpt2}
train: {total_steps: 8, seq_length: 64, epochs: 1, batch_size: 4, checkpoint_interval: 0, eval_interval: 0,
        trainer: AcceleratePPOTrainer, pipeline: PromptPipeline, max_grad_norm: "1e0"}
"""

    def test_numbers_without_a_dot_are_numbers(self, tmp_path):
        config = self.load(tmp_path, self.MINIMAL)
        assert config.optimizer.kwargs == {"lr": 1e-4, "eps": 1e-8, "betas": [0.9, 0.95]}
        assert config.scheduler.kwargs["T_max"] == 1e12
        assert (config.method.init_kl_coef, config.train.max_grad_norm) == (1e-3, 1.0)
        assert isinstance(config.method, PPOConfig)

    def test_a_command_fills_what_is_required(self, tmp_path):
        path = tmp_path / "config.yaml"
        path.write_text(self.MINIMAL.replace("epochs: 1, ", ""), encoding="utf-8")
        with pytest.raises(ValueError, match=r"`jrl config ppo > run.yaml` writes a whole one"):
            TRLConfig.load_yaml(path)
        with pytest.warns(UserWarning, match=r"lacks \['train.epochs'\]: they take .*'train.epochs': \d+"):
            found = TRLConfig.load_recipe(path)
        assert found.train.epochs == default_ppo_config().train.epochs
        assert found.evolve(train={"epochs": 1}) == self.load(tmp_path, self.MINIMAL)

    def test_words_that_hold_digits_stay_words(self, tmp_path):
        config = self.load(tmp_path, self.MINIMAL.replace("tokenizer_path: gpt2", "tokenizer_path: e5-1e"))
        assert config.tokenizer.tokenizer_path == "e5-1e"

    @pytest.mark.parametrize(
        ("old", "new", "error", "message"),
        [
            ("batch_size", "batchsize", ValueError, r"`train.batchsize`.*Did you mean `batch_size`"),
            ("scheduler:", "shceduler:", ValueError, r"`shceduler`.*Did you mean `scheduler`"),
            ("epochs: 1, ", "", ValueError, r"lacks.*train.epochs"),
            ("ppoconfig", "ppoconfg", ValueError, r"method.name.*Did you mean `PPOConfig`"),
            ("name: ppoconfig, ", "", ValueError, r"method.name` is required"),
            ("batch_size: 4", "batch_size: four", TypeError, r"`train.batch_size` must be int, got 'four'"),
            ("batch_size: 4", "batch_size: 4.5", TypeError, r"`train.batch_size` must be int, got 4.5"),
            ("batch_size: 4", "batch_size: true", TypeError, r"`train.batch_size` must be int, got True"),
            ("batch_size: 4", "batch_size: 0", ValueError, r"`train.batch_size` must be at least 1"),
            ("model: {model_path: gpt2}", "model: gpt2", TypeError, r"`model` must be a dict"),
            ("kwargs: {T_max: 1e12}", "kwargs: 3", TypeError, r"`scheduler.kwargs` must be dict"),
            ("AcceleratePPOTrainer", "SFTTrainer", ValueError, r"needs a `method` of SFTConfig"),
        ],
    )
    def test_mistakes_name_themselves(self, tmp_path, old, new, error, message):
        assert old in self.MINIMAL
        with pytest.raises(error, match=message):
            self.load(tmp_path, self.MINIMAL.replace(old, new, 1))

    def test_a_whole_number_may_have_a_dot(self, tmp_path):
        config = self.load(tmp_path, self.MINIMAL.replace("total_steps: 8", "total_steps: 1e4"))
        assert config.train.total_steps == 10_000 and isinstance(config.train.total_steps, int)

    def test_not_a_mapping(self, tmp_path):
        with pytest.raises(ValueError, match="must hold the sections"):
            self.load(tmp_path, "- 1")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("train: &a\n  x: *a\n", "nested too deeply, or without end"),
            ("[" * 3000 + "]" * 3000, "nested too deeply"),
            (
                "a0: &a0 [1,1,1,1,1,1,1,1,1,1]\n"
                + "".join(f"a{n}: &a{n} [{','.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 20)),
                r"repeats itself by aliases \(`\*name`\) to 1\.\de\+20 values",
            ),
        ],
    )
    def test_yaml_without_end(self, tmp_path, text, message):
        with pytest.raises(ValueError, match=message) as caught:
            self.load(tmp_path, text)
        assert "\n" not in str(caught.value)

    def test_an_alias_may_repeat_a_section(self):
        found = parse_yaml("a: &a {x: 1}\nb: *a\nc: {<<: *a, y: 2}")
        assert found == {"a": {"x": 1}, "b": {"x": 1}, "c": {"x": 1, "y": 2}}

    def test_code_in_yaml_is_not_run(self, tmp_path):
        with pytest.raises(ValueError, match=r"config.yaml: not YAML: could not determine a constructor"):
            self.load(tmp_path, "model: !!python/object/apply:os.getcwd []")


class TestMissingSections:
    """They take the values of the method's default configuration, and the warning shows them."""

    @pytest.mark.parametrize(
        ("name", "make"),
        [
            ("PPOConfig", default_ppo_config),
            ("ilql", default_ilql_config),
            ("SFTConfig", default_sft_config),
            ("RFT", default_rft_config),
        ],
    )
    def test_they_are_the_defaults_of_the_method(self, name, make):
        expected = make()
        with pytest.warns(UserWarning, match="has no section") as said:
            found = TRLConfig.from_dict({"method": {"name": name}})
        found.method.name = expected.method.name  # kept as it was written
        assert found == expected
        (message,) = (str(warning.message) for warning in said)
        assert f"no section {list(expected.to_dict())[1:]}" in message
        assert "'kwargs': {'T_max': 1000000000000.0" in message

    def test_a_trainer_tells_the_method(self):
        train = vars(default_ilql_config().train) | {"trainer": "AccelerateILQLTrainer", "seed": 4}
        with pytest.warns(UserWarning, match="has no section"):
            found = TRLConfig.from_dict({"train": train})
        assert isinstance(found.method, ILQLConfig)
        assert found.train.seed == 4

    def test_whole_configurations_say_nothing(self, config, recwarn):
        TRLConfig.from_dict(config.to_dict())
        assert not recwarn.list

    @pytest.mark.parametrize("given", [{}, {"train": {"trainer": "MyTrainer"}}, {"train": 3}])
    def test_without_a_method_there_are_none(self, given):
        with pytest.raises(ValueError, match=r"lacks the sections \['method'.*ILQLConfig.*as `method.name`"):
            TRLConfig.from_dict(given)


class TestEditing:
    """trlX's `update` drops unknown nested keys and bare names silently and changes its base; here both raise."""

    def test_evolve_merges_and_leaves_the_base_alone(self, config):
        before = copy.deepcopy(config)
        kwargs = {"weight_decay": 0.5}
        found = config.evolve(train={"seed": 3, "mesh": {"data": 2}}, optimizer={"kwargs": kwargs})
        assert (found.train.seed, found.train.mesh) == (3, {"data": 2})
        assert found.optimizer.kwargs == before.optimizer.kwargs | kwargs
        assert config == before
        found.optimizer.kwargs["lr"] = 1
        found.method.gen_kwargs["max_new_tokens"] = 1
        assert config == before

    def test_a_new_name_starts_from_its_own_defaults(self, config):
        found = config.evolve(scheduler={"name": "constant", "kwargs": {}}, optimizer={"name": "ADAMW"})
        assert found.scheduler.kwargs == {}
        assert found.optimizer.kwargs == config.optimizer.kwargs

    def test_another_spelling_of_the_method_is_no_new_one(self, config):
        config.method.vf_coef = 0.3
        found = config.evolve(method={"name": "ppo", "gamma": 0.9})
        assert (found.method.gamma, found.method.vf_coef) == (0.9, 0.3)
        assert isinstance(config.evolve(method={"name": "SFT"}, train={"trainer": "SFT"}).method, SFTConfig)

    def test_a_method_that_is_not_registered_keeps_its_class(self, config):
        class Own(MethodConfig):
            """Not registered: only files look methods up."""

        config.method, config.train.trainer = Own(name="Own"), "OwnTrainer"
        assert type(config.evolve(train={"seed": 3}).method) is Own

    def test_a_dictionary_for_a_field_that_is_none(self, config):
        found = config.evolve(method={"gen_experience_kwargs": {"max_new_tokens": 5}})
        assert found.method.gen_experience_kwargs == {"max_new_tokens": 5}

    @pytest.mark.parametrize(
        "change", [{"train": {"seed": 3}}, {"train.seed": 3}, {"train.seed": 3, "train": {}}]
    )
    def test_update_takes_nested_and_dotted_names(self, config, change):
        before = copy.deepcopy(config)
        assert TRLConfig.update(config, change).train.seed == 3
        assert TRLConfig.update(config.to_dict(), change).train.seed == 3
        assert config == before

    def test_dotted_names_merge_at_every_depth(self, config):
        found = TRLConfig.update(config, {"train.mesh.data": 1, "train.mesh.tensor": 2, "train": {"seed": 3}})
        assert (found.train.mesh, found.train.seed) == ({"data": 1, "tensor": 2}, 3)

    def test_update_adds_to_free_dictionaries(self, config):
        found = TRLConfig.update(
            config, {"optimizer.kwargs.weight_decay": 0.5, "method.gen_kwargs.temperature": 0.7}
        )
        assert found.optimizer.kwargs["weight_decay"] == 0.5
        assert found.method.gen_kwargs["temperature"] == 0.7

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"train.sede": 1}, r"`train.sede` of TrainConfig. Did you mean `seed`"),
            ({"lrr": 1}, r"Unknown parameter `lrr`"),
            ({"bogus.x": 1}, r"Unknown section `bogus`"),
            ({"trian": {}}, r"`trian`"),
        ],
    )
    def test_unknown_names_raise(self, config, change, message):
        with pytest.raises(ValueError, match=message):
            TRLConfig.update(config, change)

    def test_a_number_for_a_section_or_a_dictionary(self, config):
        with pytest.raises(TypeError, match="`train` must be a dict"):
            config.evolve(train=3)
        with pytest.raises(TypeError, match=r"`optimizer.kwargs` must be dict"):
            config.evolve(optimizer={"kwargs": 3})


class TestValidate:
    """Scripts assign to sections; the trainer checks its copy once."""

    @pytest.mark.parametrize(
        ("section", "field", "value", "error", "message"),
        [
            ("train", "batch_size", "x", TypeError, "`train.batch_size` must be int"),
            ("train", "minibatch_size", 5, ValueError, "a divisor of `train.batch_size` = 32"),
            ("train", "mesh", {"data": 2, "model": 1}, ValueError, "`train.mesh`"),
            ("train", "max_grad_norm", 0.0, ValueError, "`train.max_grad_norm` must be positive"),
            ("train", "sede", 3, ValueError, "Unknown field `train.sede`. Did you mean `seed`"),
            ("train", "tracker", "wand", ValueError, "Did you mean `wandb`"),
            ("tokenizer", "tokenizer_path", "", ValueError, "`tokenizer.tokenizer_path` must be a folder or"),
            ("model", "num_layers_unfrozen", -2, ValueError, "`model.num_layers_unfrozen`"),
            ("model", "peft_config", {"r": 8}, ValueError, "`peft_type` must be one of LORA"),
            ("method", "gamma", 1.5, ValueError, r"`method.gamma`"),
            ("method", "cliprange", "wide", TypeError, r"`method.cliprange` must be float"),
        ],
    )
    def test_assigned_mistakes_are_found(self, config, section, field, value, error, message):
        config.validate()
        setattr(vars(config)[section], field, value)
        with pytest.raises(error, match=message):
            config.validate()

    @pytest.mark.parametrize("field", ["gen_kwargs", "gen_experience_kwargs"])
    def test_unknown_names_of_sampling_are_refused_before_a_model_is_read(self, config, field):
        message = rf"method.{field}: `temprature` is not known; .* Did you mean `temperature`"
        changed = {"max_new_tokens": 4, "temprature": 1.0}
        with pytest.raises(ValueError, match=message):
            config.evolve(method={field: changed})
        setattr(config.method, field, changed)
        with pytest.raises(ValueError, match=message):
            config.validate()

    def test_names_of_the_seeds_pass_as_sampling_takes_them(self, config):
        config.method.gen_kwargs = {
            "max_new_tokens": 4,
            "beta": [1, 100],
            "num_beams": 1,
            "synced_gpus": False,
        }
        config.validate()
        config.method.gen_kwargs["num_beams"] = 4
        with pytest.raises(ValueError, match="`num_beams` must be 1, got 4"):
            config.validate()

    def test_an_attribute_that_is_no_section_is_refused(self, config):
        config.trian = 3
        with pytest.raises(ValueError, match=r"Unknown section `trian`.* Did you mean `train`"):
            config.validate()

    def test_construction_checks_too(self):
        with pytest.raises(ValueError, match="minibatch_size"):
            TrainConfig(8, 64, 1, 4, 0, 0, minibatch_size=3)
        with pytest.raises(ValueError, match="num_layers_unfrozen"):
            ModelConfig("gpt2", num_layers_unfrozen=-3)

    def test_an_int_passes_for_a_float(self, config):
        config.method.gamma = 1
        config.validate()
        assert isinstance(config.method.gamma, float)


class TestOverrides:
    def apply(self, config, line):
        return apply_overrides(config, line.split("|"))

    def test_values_are_held_against_each_other_when_all_are_there(self, config):
        flags = ["--method.num_rollouts|24", "--method.chunk_size|24", "--method.num_generations|12"]
        for order in (flags, flags[::-1]):
            method = self.apply(config, "|".join(order)).method
            assert (method.num_rollouts, method.num_generations) == (24, 12)
        with pytest.raises(ValueError, match=r"`method\.num_generations` must be"):
            self.apply(config, "--method.num_generations|11")

    @pytest.mark.parametrize(
        ("line", "section", "field", "value"),
        [
            ("--method.cliprange|0.1", "method", "cliprange", 0.1),
            ("--train.seed=3", "train", "seed", 3),
            ("--method.init_kl_coef|1e-4", "method", "init_kl_coef", 1e-4),
            ("--model.num_layers_unfrozen|-1", "model", "num_layers_unfrozen", -1),
            ("--train.run_name|3", "train", "run_name", "3"),
            ("--train.run_name|a: b", "train", "run_name", "a: b"),
            ("--train.remat", "train", "remat", True),
            ("--train.save_best|false", "train", "save_best", False),
            ("--train.tracker|wandb", "train", "tracker", "wandb"),
            ("--train.tracker|null", "train", "tracker", None),
            ("--method.target|6", "method", "target", 6.0),
            ("--method.target|None", "method", "target", None),
            ("--method.scale_reward|running", "method", "scale_reward", "running"),
            ("--method.scale_reward|false", "method", "scale_reward", False),
            ("--train.tags|[a, b]", "train", "tags", ["a", "b"]),
            ("--train.mesh.data|2|--train.mesh.tensor=1", "train", "mesh", {"data": 2, "tensor": 1}),
        ],
    )
    def test_values_take_the_type_of_their_field(self, config, line, section, field, value):
        before = copy.deepcopy(config)
        found = vars(vars(self.apply(config, line))[section])[field]
        assert found == value
        assert type(found) is type(value)
        assert config == before

    def test_entries_of_dictionaries_are_yaml(self, config):
        found = self.apply(config, "--optimizer.kwargs.lr|1e-5|--optimizer.kwargs.betas=[0.9, 0.99]")
        assert found.optimizer.kwargs["lr"] == 1e-5
        assert found.optimizer.kwargs["betas"] == [0.9, 0.99]
        assert found.optimizer.kwargs["eps"] == 1e-8

    @pytest.mark.parametrize(
        ("line", "error", "message"),
        [
            ("--train.sede|3", ValueError, "Did you mean `train.seed`"),
            ("--trian.seed|3", ValueError, "Did you mean `train`"),
            ("--train.seed|x", TypeError, "`train.seed` must be int, got 'x'"),
            ("--train.seed|1.5", TypeError, "`train.seed` must be int"),
            ("--train.seed", ValueError, "--train.seed needs a value"),
            ("--train.tracker|wand", ValueError, "Did you mean `wandb`"),
            ("train.seed|3", ValueError, "Expected an override"),
            ("--method.gamma|2", ValueError, "method.gamma"),
        ],
    )
    def test_mistakes_name_themselves(self, config, line, error, message):
        with pytest.raises(error, match=message):
            self.apply(config, line)

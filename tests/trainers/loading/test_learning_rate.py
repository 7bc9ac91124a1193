# SPDX-License-Identifier: Apache-2.0
import re
from dataclasses import dataclass

import jax
import pytest

import jrl
from jrl import api
from jrl.cli import main
from jrl.cli.train import chooses_rate, given_fields
from jrl.models.model import make_model
from jrl.trainers.config.method import entries
from jrl.trainers.loading.learning_rate import (
    FASTEST,
    GPT2_PARAMETERS,
    RATE,
    SLOWEST,
    learning_rate_for,
    with_choices_for_model,
)
from tests.tiny import tiny_hf_config
from tests.trainers.runs import save_tiny_checkpoint


@pytest.mark.parametrize("rate", [3e-5, 5e-5, 1e-4, 1e-6])
def test_gpt2_keeps_the_default(rate):
    assert learning_rate_for(rate, GPT2_PARAMETERS) == rate


def test_the_rate_falls_with_size_within_its_bounds():
    sizes = [10**power for power in range(4, 13)]
    rates = [learning_rate_for(3e-5, size) for size in sizes]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == FASTEST and rates[-1] == SLOWEST
    assert learning_rate_for(1e-8, 10**12) == 1e-8  # slower by default
    assert learning_rate_for(1e-2, 10**4) == 1e-2


def test_sixteen_times_smaller_is_eight_times_faster():
    assert learning_rate_for(3e-5, GPT2_PARAMETERS // 16) == pytest.approx(8 * 3e-5)


def test_adapters_take_ten_times_as_much():
    assert learning_rate_for(3e-5, GPT2_PARAMETERS, has_adapter=True) == pytest.approx(3e-4)


def of_size(**fields):
    return jrl.default_ppo_config().evolve(model={"model_path": tiny_hf_config(**fields)})


def test_a_default_configuration_gets_the_rate_of_its_model():
    default = of_size()
    config, said = with_choices_for_model(default)
    assert config.optimizer.kwargs == default.optimizer.kwargs | {"lr": 1e-3}
    assert config.scheduler.kwargs == {"T_max": 1e12, "eta_min": 1e-3}  # constant, as before
    assert default.optimizer.kwargs["lr"] == 3e-5
    (number,) = re.findall(r"^learning rate 0\.001, chosen for a model of ([\d,]+) parameters ", said)
    shapes = jax.eval_shape(lambda: make_model(default.model.model_path).init(jax.random.key(0)))
    assert int(number.replace(",", "")) == sum(leaf.size for leaf in jax.tree.leaves(shapes))


def test_an_adapter_is_told():
    lora = {"peft_config": {"peft_type": "LORA", "r": 2}, "num_layers_unfrozen": -1}
    config, said = with_choices_for_model(of_size(n_embd=512, n_layer=12, n_head=8).evolve(model=lora))
    assert "an adapter of a model" in said and config.optimizer.kwargs["lr"] <= FASTEST


def test_what_cannot_be_read_is_left_to_the_trainer(tmp_path):
    config = jrl.default_ppo_config().evolve(model={"model_path": str(tmp_path)})
    assert with_choices_for_model(config) == (config, "")


def test_the_weight_of_the_kl_and_the_length_suit_the_model_too():
    default = of_size()
    config, said = with_choices_for_model(default)
    assert config.method.init_kl_coef == 0.05 and default.method.init_kl_coef == 0.001
    assert config.train.seq_length == 128  # the model's positions
    assert config.train.checkpoint_interval == config.train.eval_interval == 100
    assert "`method.init_kl_coef` 0.05 (PPOConfig's is 0.001)" in said
    assert "`train.seq_length` 128, the model's positions" in said
    assert "`train.checkpoint_interval` 100, that of evaluations" in said


def test_what_the_user_gave_stays():
    given = ["optimizer.kwargs.lr", "method.init_kl_coef", "train.seq_length", "train.checkpoint_interval"]
    default = of_size().evolve(train={"seq_length": 1024})
    assert with_choices_for_model(default, given) == (default, "")


def test_names_of_the_recipe_and_of_the_flags_are_given(tmp_path):
    (tmp_path / "run.yaml").write_text("method: {name: PPOConfig, init_kl_coef: 0.1}\ntrain: {seed: 3}")
    words = ["--train.seq_length", "64", "--optimizer.kwargs.lr=1e-4", "--train.save_best"]
    found = given_fields(str(tmp_path / "run.yaml"), words)
    assert {"method.init_kl_coef", "train.seed", "train.seq_length", "train.save_best", RATE} <= found
    assert {"method.ppo_epochs", "train.checkpoint_interval"} <= found, "a recipe is as Python reads it"
    assert "train.batch_size" not in found and given_fields(None, []) == frozenset()


@pytest.mark.parametrize("name", [name for name, entry in entries().items() if entry.model != "language"])
def test_other_models_keep_their_default(name):
    config = entries()[name].default()
    assert with_choices_for_model(config) == (config, "")


@pytest.mark.parametrize(
    ("words", "chosen"),
    [
        (["--optimizer.kwargs.lr", "1e-4"], True),
        (["--optimizer.name=sgd"], True),
        (["--optimizer.kwargs", "{lr: 1e-4}"], True),
        (["--optimizer.kwargs={lr: 1e-4}"], True),
        (["--optimizer.kwargs", "{weight_decay: 0.1}"], False),
        (["--optimizer.kwargs.weight_decay", "0.1"], False),
        (["--scheduler.name", "constant"], False),
        (["--train.seed", "3"], False),
        ([], False),
    ],
)
def test_a_rate_of_the_user_s_own_stays(words, chosen):
    assert chooses_rate(None, words) is chosen


@pytest.mark.parametrize(
    ("recipe", "chosen"),
    [
        ("train: {seed: 3}", False),
        ("optimizer: {kwargs: {weight_decay: 0.1}}", False),
        ("optimizer: {kwargs: {lr: 1e-4}}", True),
        ("optimizer: {name: adamw}", True),
    ],
)
def test_a_rate_of_the_recipe_stays(recipe, chosen, tmp_path):
    (tmp_path / "run.yaml").write_text(f"method: {{name: PPOConfig}}\n{recipe}")
    assert chooses_rate(str(tmp_path / "run.yaml"), []) is chosen


def test_a_command_says_the_default_rate_of_a_model_without_a_size(tmp_path, capsys):
    words = ["ppo", "--reward", "tests.trainers.runs:count_vowels", "--prompts", str(tmp_path / "none.txt")]
    with pytest.raises(SystemExit):
        raise SystemExit(main([*words, "--model.model_path", str(tmp_path)]))
    assert "learning rate 3e-05, the default of PPOConfig; `optimizer.kwargs.lr`" in capsys.readouterr().out


def test_jrl_config_writes_what_the_command_would_choose(tmp_path, capsys):
    path = save_tiny_checkpoint(tmp_path / "tiny")
    assert main(["config", "ppo", "--model.model_path", path]) == 0
    out, err = capsys.readouterr()
    assert "lr: 0.001" in out and "eta_min: 0.001" in out
    assert err.startswith("jrl config: learning rate 0.001, chosen for")
    assert main(["config", "ppo", "--model.model_path", path, "--optimizer.kwargs.lr", "2e-4"]) == 0
    out, err = capsys.readouterr()
    assert "lr: 0.0002" in out and "learning rate" not in err
    own = ["--optimizer.kwargs.lr", "2e-4", "--method.init_kl_coef", "0.2", "--train.seq_length=64"]
    own += ["--train.checkpoint_interval", "50"]
    assert main(["config", "ppo", "--model.model_path", path, *own]) == 0
    out, err = capsys.readouterr()
    assert "init_kl_coef: 0.2" in out and err == ""


@pytest.fixture
def made(monkeypatch):
    """Configurations of the trainers that `prepare` asks for."""
    found = []
    monkeypatch.setattr(api, "make_trainer", lambda config, **_: found.append(config) or _Data())
    return found


def test_a_configuration_that_is_given_stays(made):
    """Objects are the user's: the seeds' defaults in them, too."""
    default = of_size()
    api.prepare(config=default, reward_fn=lambda outputs: [1.0], prompts=["a"])
    assert made[0].optimizer == default.optimizer and made[0].optimizer.kwargs["lr"] == 3e-5
    assert with_choices_for_model(default)[0].optimizer.kwargs["lr"] == 1e-3  # what it would have had


def test_jrl_train_without_a_configuration_says_its_rate(made):
    with pytest.warns(UserWarning, match=r"(?s)with model .*learning rate 0\.001, chosen for a model of"):
        api.prepare(model_path=tiny_hf_config(), reward_fn=lambda outputs: [1.0], prompts=["a"])
    assert made[0].optimizer.kwargs["lr"] == 1e-3


def test_grpo_takes_at_most_a_third_of_a_small_model_s_rate():
    """An update of groups has no critic that would quiet it; the recipes of small models take 2e-4 to 3e-4."""
    default = jrl.methods.default_grpo_config().evolve(model={"model_path": tiny_hf_config()})
    config, said = with_choices_for_model(default)
    assert config.optimizer.kwargs["lr"] == 3e-4 and "learning rate 0.0003, chosen for a model of" in said
    assert learning_rate_for(3e-5, GPT2_PARAMETERS, fastest=3e-4) == 3e-5


def test_a_method_alone_gets_a_run_that_suits_the_model(made):
    """As without a configuration: what the method does not say is chosen, and said."""
    method = jrl.GRPOConfig(num_rollouts=32, num_generations=8)
    with pytest.warns(
        UserWarning, match=r"(?s)`config` is a GRPOConfig alone.*learning rate 0\.0003, chosen"
    ) as told:
        api.prepare(
            model_path=tiny_hf_config(), reward_fn=lambda outputs: [1.0], prompts=["a"], config=method
        )
    assert made[0].method == method and made[0].method is not method
    assert made[0].optimizer.kwargs["lr"] == 3e-4 and made[0].train.batch_size == 32
    assert "`train.batch_size` 32, that of the rollouts" in str(told[0].message)
    with pytest.warns(UserWarning, match="PPOConfig alone"):
        api.prepare(reward_fn=lambda outputs: [1.0], prompts=["a"], config=of_size().method)
    assert made[1].method.init_kl_coef == 0.001, "a field of the method is given"


def test_a_method_that_nobody_knows_is_refused():
    with pytest.raises(
        ValueError, match=r"`config` must be .* of a known method, got Unknown.*jrl\.register"
    ):
        api.prepare(reward_fn=lambda outputs: [1.0], prompts=["a"], config=Unknown(name="Unknown"))


@dataclass(kw_only=True)
class Unknown(jrl.OnlineConfig):
    """A section without an entry."""


class _Data:
    def add_data(self, **data):
        pass

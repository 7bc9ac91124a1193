# SPDX-License-Identifier: Apache-2.0
"""The plan of a recipe is what its arrays then take."""

import pytest
import yaml

from jrl.cli import main
from jrl.models.cost import device_bytes
from jrl.trainers.plan import abstract_mesh, plan_run
from jrl.trainers.ppo import PPOTrainer
from tests.trainers.runs import count_vowels, ppo_config, save_tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("plan") / "tiny")


def test_a_mesh_must_multiply_to_the_devices():
    assert dict(abstract_mesh(fsdp=4, num_devices=8).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    with pytest.raises(ValueError, match="`mesh` must multiply to the number of devices, 8; got data=3"):
        abstract_mesh(data=3, num_devices=8)


@pytest.mark.slow
def test_held_bytes_are_those_of_a_trainer(checkpoint, tmp_path):
    config = ppo_config(checkpoint, tmp_path)
    trainer = PPOTrainer(config, reward_fn=count_vowels)
    plan = plan_run(config, abstract_mesh(num_devices=1))
    train = trainer.state.train
    assert plan.held["parameters that train"] == device_bytes(train.params)
    assert plan.held["optimizer"] == device_bytes(train.opt_state)
    assert plan.held["frozen parameters"] == device_bytes(trainer.frozen)
    assert set(plan.step_traffic.values()) == set(plan.token_traffic.values()) == {0}


@pytest.mark.slow
def test_splitting_divides_what_is_held_and_costs_traffic(checkpoint, tmp_path):
    config = ppo_config(checkpoint, tmp_path)
    one, split = (plan_run(config, abstract_mesh(data=1, fsdp=n, num_devices=n)) for n in (1, 4))
    # Norms and biases lie whole on every device.
    assert one.held["optimizer"] / 4 < split.held["optimizer"] < one.held["optimizer"] / 3
    assert split.step_traffic["fsdp: parameters gathered, forward and backward"] > 0
    assert split.sampling["parameters, whole over fsdp"] == sum(
        one.held[name] for name in ("parameters that train", "frozen parameters")
    )


@pytest.mark.slow
def test_the_command_says_whether_it_fits(checkpoint, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(ppo_config(checkpoint, tmp_path).to_dict()))
    assert main(["plan", "--config", str(recipe), "--mesh", "fsdp=4", "--hbm", "1"]) == 0
    assert "fits into 1.0 GiB" in capsys.readouterr().out

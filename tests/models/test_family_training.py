# SPDX-License-Identifier: Apache-2.0
"""Every language model's family under a hydra reference, with LoRA, and on a mesh.

One PPO iteration of each is in `tests/trainers/test_train_families.py`.
"""

import pytest

from tests.models.family_training import (
    CONFIGS,
    hydra_report,
    lora_names,
    lora_report,
    mesh_error,
    model,
)

TOLERANCE = 1e-5


@pytest.mark.parametrize("family", CONFIGS)
def test_the_hydra_reference_is_the_model_before_training(family):
    error, largest = hydra_report(family)
    # Logits that a mistake could change.
    assert largest > 0.1 and error < TOLERANCE


@pytest.mark.parametrize("family", CONFIGS)
def test_lora_begins_as_the_model_and_a_gradient_reaches_every_target(family):
    error, dead, names = lora_report(family)
    assert error < TOLERANCE and not dead
    modules = {entry.name.removesuffix(".weight") for entry in model(family)[0].entries()}
    saved = {name.removeprefix("base_model.model.").rpartition(".lora_")[0] for name in names}
    assert names and saved <= modules
    ends = {name.rpartition(".lora_")[2] for name in names}
    assert ends == {"A.weight", "B.weight"}


@pytest.mark.mesh
@pytest.mark.parametrize("family", CONFIGS)
def test_a_mesh_computes_the_logits_of_one_device(family):
    assert mesh_error(family) < TOLERANCE


@pytest.mark.parity
@pytest.mark.filterwarnings("ignore::Warning:peft", "ignore::Warning:transformers", "ignore::FutureWarning")
@pytest.mark.parametrize("family", CONFIGS)
def test_peft_finds_the_modules_that_are_adapted_under_the_same_names(family):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from peft import LoraConfig, get_peft_model

    from jrl.models.adapters.targets import DEFAULT_TARGETS
    from tests.models.parity import auto_class

    with torch.device("meta"):
        oracle = auto_class(CONFIGS[family]).from_config(CONFIGS[family])
        targets = DEFAULT_TARGETS[family]
        targets = targets if isinstance(targets, str) else list(targets)
        peft = get_peft_model(oracle, LoraConfig(r=2, target_modules=targets))
    theirs = {name.replace(".default.", ".") for name, _ in peft.named_parameters() if ".lora_" in name}
    # PEFT matches the eyes of a multimodal model by the same names.
    text = {name for name in theirs if "vision" not in name and "visual" not in name}
    assert set(lora_names(family)) == text

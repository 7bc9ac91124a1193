# SPDX-License-Identifier: Apache-2.0
"""LoRA of a classifier on disk, its head beside it; and against the real peft, in both directions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrl.models.adapters.config import LoraConfig
from jrl.models.adapters.peft_format import read_adapter_folder
from jrl.models.classifier import save_classifier
from jrl.models.classifier_adapter import (
    bind_classifier,
    load_adapted_classifier,
    load_classifier_adapter,
    save_classifier_adapter,
)
from jrl.models.scorer import make_scorer, split_scorer
from jrl.typing import ModelInputs
from tests.models.classifier_cases import DECODERS, ENCODERS, labelled, random_classifier

LORA = LoraConfig(r=2, lora_alpha=5)
MASK = np.arange(7)[None, :] < np.array([7, 4, 1])[:, None]
# torch finds a decoder's last token by the pad id.
TOKENS = np.where(MASK, np.random.default_rng(0).integers(3, 90, (3, 7)), 0).astype(np.int32)


def adapted(name: str, folder: Path, lora: LoraConfig = LORA) -> Any:
    """A base model and a loud adapter of it on disk: (model, adapter, trainable, scores)."""
    model, params = random_classifier(labelled((ENCODERS | DECODERS)[name], 1))
    adapter = bind_classifier(model, lora)
    assert adapter is not None
    trainable, frozen = split_scorer(params, model, adapter=adapter, key=jax.random.key(0))
    rng = np.random.default_rng(1)
    trainable = jax.tree.map(lambda x: x + 0.2 * rng.normal(size=x.shape).astype(np.float32), trainable)
    save_classifier(folder / "base", model, params)
    save_classifier_adapter(folder / "adapter", model, adapter, trainable, base_model=str(folder / "base"))
    inputs = ModelInputs(jnp.asarray(TOKENS), jnp.asarray(MASK))
    return (
        model,
        adapter,
        trainable,
        jax.jit(make_scorer(model, adapter=adapter))(trainable, frozen, inputs, None),
    )


def merged_scores(folder: Path) -> np.ndarray:
    model, params = load_adapted_classifier(folder)
    return np.asarray(jax.jit(model.scores)(params, TOKENS, MASK))[:, 0]


@pytest.mark.parametrize("name", ["gpt2", "distilbert"])
def test_what_is_saved_is_loaded_back_and_merges_to_the_same_scores(name: str, tmp_path: Path) -> None:
    model, adapter, trainable, expected = adapted(name, tmp_path)
    values = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    heads = ["score"] if name == "gpt2" else ["classifier", "pre_classifier"]
    assert (values["task_type"], values["modules_to_save"]) == ("SEQ_CLS", heads)
    found = read_adapter_folder(tmp_path / "adapter")
    assert (found.config.r, found.config.lora_alpha) == (2, 5)
    bound = bind_classifier(model, found.config)
    assert bound is not None and [module.name for module in bound.modules] == [
        m.name for m in adapter.modules
    ]
    loaded = load_classifier_adapter(found.folder, model, adapter)
    jax.tree.map(np.testing.assert_array_equal, loaded, trainable)
    np.testing.assert_allclose(merged_scores(tmp_path / "adapter"), expected, atol=1e-5)
    half = load_adapted_classifier(tmp_path / "adapter", dtype=jnp.bfloat16)[1]
    assert half["layers_0"]["attn"]["q"]["kernel"].dtype == jnp.bfloat16
    assert half[heads[0] if name == "gpt2" else "classifier"]["kernel"].dtype == jnp.float32


def test_an_adapter_without_its_head_is_no_reward_model(tmp_path: Path) -> None:
    model, adapter, _, _ = adapted("gpt2", tmp_path)
    path = tmp_path / "adapter" / "adapter_model.safetensors"
    tensors = load_file(path)
    assert "base_model.model.score.weight" in tensors
    save_file({name: x for name, x in tensors.items() if "score" not in name}, path)
    with pytest.raises(ValueError, match=r"without the head .* `modules_to_save` \['score'\] left out"):
        load_classifier_adapter(tmp_path / "adapter", model, adapter)


def test_an_adapter_that_names_no_base_is_refused(tmp_path: Path) -> None:
    adapted("gpt2", tmp_path)
    path = tmp_path / "adapter" / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"base_model_name_or_path": None}))
    with pytest.raises(ValueError, match="has no `base_model_name_or_path`"):
        load_adapted_classifier(tmp_path / "adapter")


PARITY = [
    pytest.mark.parity,
    pytest.mark.filterwarnings(
        "ignore::Warning:peft", "ignore::Warning:transformers", "ignore::Warning:torch"
    ),
]
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("gpt2", {}),
    "gpt2-all": ("gpt2", {"target_modules": "all-linear"}),
    "llama": ("llama", {"use_rslora": True}),
    "llama-dora": ("llama", {"use_dora": True, "target_modules": ["q_proj", "down_proj"]}),
    "bert": ("bert", {}),
    "roberta": ("roberta", {}),
    "distilbert": ("distilbert", {"target_modules": ["q_lin", "v_lin"]}),
}


def torch_scores(model: Any) -> np.ndarray:
    import torch

    with torch.no_grad():
        out = model(input_ids=torch.tensor(TOKENS).long(), attention_mask=torch.tensor(MASK).long())
    return out.logits.numpy()[:, 0]


class TestAgainstPeft:
    pytestmark = PARITY

    @pytest.mark.parametrize("case", CASES)
    def test_peft_opens_what_jrl_writes(self, case: str, tmp_path: Path) -> None:
        pytest.importorskip("peft")
        from peft import PeftModel
        from transformers import AutoModelForSequenceClassification

        name, options = CASES[case]
        given = {key: tuple(x) if isinstance(x, list) else x for key, x in options.items()}
        _, _, _, expected = adapted(name, tmp_path, LoraConfig(r=2, lora_alpha=5, **given))
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base", num_labels=1)
        before = torch_scores(base.eval())
        model = PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
        np.testing.assert_allclose(torch_scores(model), expected, atol=1e-4)
        assert np.abs(before - expected).max() > 1e-2

    @pytest.mark.parametrize("case", CASES)
    def test_jrl_opens_what_peft_writes(self, case: str, tmp_path: Path) -> None:
        pytest.importorskip("peft")
        import torch
        from peft import LoraConfig as PeftConfig
        from peft import get_peft_model
        from transformers import AutoModelForSequenceClassification

        name, options = CASES[case]
        model, params = random_classifier(labelled((ENCODERS | DECODERS)[name], 1))
        save_classifier(tmp_path / "base", model, params)
        base = AutoModelForSequenceClassification.from_pretrained(tmp_path / "base")
        heads = list(model.head_modules)
        config = PeftConfig(task_type="SEQ_CLS", r=2, lora_alpha=5, modules_to_save=heads, **options)
        theirs = get_peft_model(base, config).eval()
        torch.manual_seed(0)
        with torch.no_grad():
            for parameter in theirs.parameters():
                if parameter.requires_grad:
                    parameter += 0.2 * torch.randn_like(parameter)
        theirs.save_pretrained(tmp_path / "theirs")
        np.testing.assert_allclose(merged_scores(tmp_path / "theirs"), torch_scores(theirs), atol=1e-4)

    def test_transformers_opens_a_language_model_s_adapter_at_once(self, tmp_path: Path) -> None:
        """The base need not be a classifier: the head comes from the adapter's file."""
        pytest.importorskip("peft")
        from transformers import AutoModelForSequenceClassification

        _, _, _, expected = adapted("gpt2", tmp_path)
        base = load_file(tmp_path / "base" / "model.safetensors")
        save_file(
            {name: x for name, x in base.items() if not name.startswith("score")},
            tmp_path / "base" / "model.safetensors",
            metadata={"format": "pt"},
        )
        model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "adapter", num_labels=1).eval()
        np.testing.assert_allclose(torch_scores(model), expected, atol=1e-4)

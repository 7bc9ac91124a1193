# SPDX-License-Identifier: Apache-2.0
"""Against torch transformers: a classifier's checkpoint gives the same vectors and scores, in both directions."""

import inspect

import jax
import numpy as np
import pytest
from transformers import AutoModelForSequenceClassification
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from jrl.models.classifier import load_classifier, save_classifier
from jrl.models.encoder import Encoder
from jrl.models.positions import token_positions
from tests.models.classifier_cases import DECODERS, ENCODERS, LABELS, labelled

pytestmark = pytest.mark.parity
torch = pytest.importorskip("torch", reason="needs the parity extra")

# Families of which torch has no classifier: jrl alone reads what it writes of them.
ALONE = (
    "bamba",
    "cohere",
    "cohere2",
    "ernie4_5",
    "falcon_h1",
    "gemma4_text",
    "glm4_moe",
    "glm4_moe_lite",
    "granite",
    "granitemoehybrid",
    "kimi_linear",
    "lfm2",
    "llama4_text",
    "nemotron_h",
    "qwen3_5_moe_text",
)
COMPARED = [name for name, config in DECODERS.items() if config.model_type not in ALONE]
LENGTHS = (24, 11, 1)
TOLERANCE = 1e-4


def torch_classifier(config, folder):
    """A checkpoint written by torch, every parameter moved away from its start."""
    torch.manual_seed(0)
    oracle = AutoModelForSequenceClassification.from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    oracle.save_pretrained(folder)
    return oracle


def texts(pad, left=0, right=0):
    """Rows of different lengths, aligned on the side that is not padded."""
    rng = np.random.default_rng(0)
    columns = np.arange(max(LENGTHS) + left + right)[None, :]
    lengths = np.array(LENGTHS)[:, None]
    mask = columns >= columns.size - lengths if left else columns < lengths
    words = rng.integers(3, 97, (len(LENGTHS), max(LENGTHS)))
    tokens = np.full(mask.shape, pad, np.int32)
    tokens[mask] = np.concatenate([row[:length] for row, length in zip(words, LENGTHS, strict=True)])
    return tokens, mask


def torch_scores(oracle, tokens, mask, **options):
    attention_mask = torch.tensor(mask).long()
    if "position_ids" in inspect.signature(oracle.forward).parameters:
        options["position_ids"] = (attention_mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return oracle(torch.tensor(tokens).long(), attention_mask=attention_mask, **options).logits.numpy()


def check_back_to_torch(folder, oracle, model, params):
    """jrl → disk → torch: bit-equal tensors, and so equal scores; the labels stay."""
    save_classifier(folder, model, params)
    back, info = AutoModelForSequenceClassification.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert back.config.id2label == oracle.config.id2label
    assert back.config.architectures == [type(oracle).__name__]
    expected = oracle.state_dict()
    assert back.state_dict().keys() == expected.keys()
    for name, tensor in back.state_dict().items():
        assert torch.equal(tensor, expected[name]), name


def test_only_families_without_a_torch_classifier_are_left_out():
    known = set(MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES)
    assert {config.model_type for config in DECODERS.values()} - known == set(ALONE)


@pytest.mark.parametrize("num_labels", [len(LABELS), 1])
@pytest.mark.parametrize("name", ENCODERS)
def test_encoder(name, num_labels, tmp_path):
    config = labelled(ENCODERS[name], num_labels)
    oracle = torch_classifier(config, tmp_path / "torch")
    tokens, mask = texts(config.pad_token_id)
    seen = {}
    head = oracle.classifier.out_proj if config.model_type == "roberta" else oracle.classifier
    head.register_forward_hook(lambda module, inputs, output: seen.update(pooled=inputs[0].numpy()))
    with torch.no_grad():
        out = oracle(
            torch.tensor(tokens).long(),
            attention_mask=torch.tensor(mask).long(),
            output_hidden_states=True,
        )

    model, params = load_classifier(tmp_path / "torch")
    assert model.labels == tuple(config.id2label.values())
    encoder = Encoder(model.config)

    def run(method, *args):
        return jax.jit(lambda *args: encoder.apply({"params": params}, *args, method=method))(*args)

    x = run("embed_tokens", tokens, token_positions(mask))
    np.testing.assert_allclose(x[mask], out.hidden_states[0].numpy()[mask], atol=TOLERANCE)
    for index, expected in enumerate(out.hidden_states[1:]):
        x = run(lambda module, x, m, index=index: module.run_layers(x, m, index, index + 1), x, mask)
        np.testing.assert_allclose(x[mask], expected.numpy()[mask], atol=TOLERANCE, err_msg=f"block {index}")
    np.testing.assert_allclose(run("pool", x, mask), seen["pooled"], atol=TOLERANCE)
    scores = jax.jit(model.scores)(params, tokens, mask)
    np.testing.assert_allclose(scores, out.logits.numpy(), atol=TOLERANCE)
    check_back_to_torch(tmp_path / "jrl", oracle, model, params)


@pytest.mark.parametrize(
    ("name", "num_labels"), [*((name, len(LABELS)) for name in COMPARED), ("gpt2", 1), ("llama", 1)]
)
def test_decoder_with_a_score_head(name, num_labels, tmp_path):
    config = labelled(DECODERS[name], num_labels)
    oracle = torch_classifier(config, tmp_path / "torch")
    model, params = load_classifier(tmp_path / "torch")
    scores = jax.jit(model.scores)
    for padding in ({"right": 5}, {"left": 5}):
        tokens, mask = texts(config.pad_token_id, **padding)
        expected = torch_scores(oracle, tokens, mask)
        np.testing.assert_allclose(scores(params, tokens, mask), expected, atol=TOLERANCE)
        assert expected.shape == (3, num_labels) and expected.std() > 0.02
    check_back_to_torch(tmp_path / "jrl", oracle, model, params)

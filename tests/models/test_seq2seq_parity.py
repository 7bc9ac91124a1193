# SPDX-License-Identifier: Apache-2.0
"""Against torch transformers, for T5 1.0 and 1.1, mT5 and umT5: each stage, greedy decoding, and the way back."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jrl.models.checkpoint import load_checkpoint
from jrl.models.seq2seq_attention import distance_buckets
from tests.models.seq2seq_cases import CASES

pytestmark = pytest.mark.parity
pytest.importorskip("torch", reason="needs the parity extra")


@pytest.mark.parametrize("case", CASES)
def test_every_stage_equals_torch(case, tmp_path):
    from tests.models.seq2seq_parity import compare

    report = compare(CASES[case], tmp_path)
    errors = (report.embeddings, *report.blocks, report.final_norm, report.logits)
    assert max(errors) < 1e-4, report
    assert report.generation, report
    # The way back loses nothing at all: torch computes with the very numbers it wrote.
    assert report.returned == 0.0 and report.round_trip, report


@pytest.mark.parametrize(("num_buckets", "max_distance"), [(8, 20), (32, 128), (64, 512)])
def test_buckets_are_those_of_torch(num_buckets, max_distance):
    import torch
    from transformers.models.t5.modeling_t5 import T5Attention

    ahead = torch.arange(-2 * max_distance, 1)
    theirs = T5Attention._relative_position_bucket(ahead, False, num_buckets, max_distance).numpy()
    ours = distance_buckets(num_buckets, max_distance)[np.minimum(-ahead.numpy(), max_distance)]
    np.testing.assert_array_equal(ours, theirs)


def test_old_files_repeat_the_embedding_and_say_in_the_config_that_the_head_is_not_tied(tmp_path):
    from tests.models.seq2seq_parity import perturbed

    perturbed(CASES["t5-1.1"], 0).save_pretrained(tmp_path)
    expected = load_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight"):
        tensors[name] = tensors["shared.weight"].copy()
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    tensors[name] = np.zeros((8, 4), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    # As transformers 4 wrote it.
    del config["scale_decoder_outputs"]
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": False}))
    found = load_checkpoint(tmp_path)
    assert found.model.config == expected.model.config
    for path, leaf in found.params["lm_head"].items():
        np.testing.assert_array_equal(leaf, expected.params["lm_head"][path])


def test_a_head_that_transformers_tied_is_read_from_the_embedding(tmp_path):
    import torch
    from transformers import T5ForConditionalGeneration

    torch.manual_seed(0)
    T5ForConditionalGeneration(CASES["t5-1.1"]).save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    params = load_checkpoint(tmp_path).params
    np.testing.assert_array_equal(params["lm_head"]["kernel"], params["embed"]["embedding"].T)

# SPDX-License-Identifier: Apache-2.0
"""Public models at their real size, by shapes alone: each has as many parameters as its authors published.

`real_configs/` holds the fields of their config.json, in the words of the hub.
"""

import json
import math
import shutil
import tempfile
from pathlib import Path

import jax
import pytest
from flax.traverse_util import flatten_dict

from jrl.models.classifier import Classifier
from jrl.models.families import FAMILIES, READ_AS, find_family
from jrl.models.hub import read_hf_config
from jrl.models.model import make_model

FOLDER = Path(__file__).parent / "real_configs"

# Tied weights count once. Encoders are counted with a classifier of 2 labels, roberta-large-mnli of 3. The number is
# torch's where the authors give billions alone, or count multi-token prediction: Ministral 3's text model, EXAONE,
# Hunyuan, AFM, Bamba, Jamba, Gemma 4, Granite 4, Minitron, Nemotron-H and 3, Qwen3-Next, Qwen3.5, GLM, Kimi K2 and
# Linear, umT5 and Llama 4. Of multimodal models the text model is counted.
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-xl": 1_557_611_200,
    "starcoder": 15_517_456_384,
    "gpt-neo-1.3B": 1_315_575_808,
    "gpt-j-6b": 6_050_882_784,
    "gpt-neox-20b": 20_554_567_680,
    "pythia-6.9b": 6_857_302_016,
    "opt-350m": 331_196_416,
    "opt-6.7b": 6_658_473_984,
    "bloom-7b1": 7_069_016_064,
    "Llama-2-7b-hf": 6_738_415_616,
    "Llama-3.1-8B": 8_030_261_248,
    "Llama-3.2-1B": 1_235_814_400,
    "Mistral-7B-v0.1": 7_241_732_096,
    "Qwen2.5-0.5B": 494_032_768,
    "Qwen2.5-7B": 7_615_616_512,
    "Qwen3-0.6B": 596_049_920,
    "Qwen3-8B": 8_190_735_360,
    "gemma-2b": 2_506_172_416,
    "gemma-2-9b": 9_241_705_984,
    "gemma-3-1b-pt": 999_885_952,
    "Phi-3-mini-4k-instruct": 3_821_079_552,
    "OLMo-2-1124-7B": 7_298_617_344,
    "SmolLM3-3B": 3_075_098_624,
    "Mixtral-8x7B-v0.1": 46_702_792_704,
    "Qwen3-30B-A3B": 30_532_122_624,
    "Ministral-8B-Instruct-2410": 8_019_808_256,
    "Ministral-3-8B-Base-2512": 8_489_553_920,
    "Olmo-3-1025-7B": 7_298_011_136,
    "granite-3.1-2b-instruct": 2_533_531_648,
    "granite-4.0-h-tiny": 6_939_037_248,
    "Bamba-9B-v1": 9_780_235_392,
    "AI21-Jamba-1.5-Mini": 51_570_323_328,
    "Seed-OSS-36B-Instruct": 36_151_104_512,
    "EXAONE-4.0-1.2B": 1_279_391_488,
    "Hunyuan-0.5B-Instruct": 539_010_048,
    "ERNIE-4.5-0.3B-PT": 360_748_032,
    "AFM-4.5B": 4_619_184_640,
    "GLM-4-9B-0414": 9_400_279_040,
    "c4ai-command-r-v01": 34_980_831_232,
    "c4ai-command-r7b-12-2024": 8_028_033_024,
    "Qwen1.5-MoE-A2.7B": 14_315_784_192,
    "phi-2": 2_779_683_840,
    "starcoder2-3b": 3_030_371_328,
    "stablelm-2-1_6b": 1_644_515_328,
    "falcon-7b": 6_921_720_704,
    "Minitron-4B-Base": 4_190_509_056,
    "Qwen3-Next-80B-A3B-Instruct": 79_674_391_296,
    "Qwen3.5-9B": 8_953_803_264,
    "Qwen3.5-35B-A3B": 34_660_610_688,
    "gemma-3-4b-pt": 3_880_263_168,
    "gemma-4-31B": 30_697_345_340,
    "gemma-4-E2B-text": 4_628_569_379,
    "Mistral-Small-3.1-24B-Base-2503": 23_572_403_200,
    "Qwen2.5-VL-7B-Instruct": 7_615_616_512,
    "Qwen3-VL-8B-Instruct": 8_190_735_360,
    "Qwen3.5-9B-multimodal": 8_953_803_264,
    "Qwen3.5-35B-A3B-multimodal": 34_660_610_688,
    "Llama-4-Scout-17B-16E": 107_769_861_120,
    "Llama-4-Maverick-17B-128E-text": 400_711_848_960,
    "DeepSeek-V3": 671_026_419_200,
    "Kimi-K2-Instruct": 1_026_408_232_448,
    "Kimi-Linear-48B-A3B-Instruct": 49_122_681_728,
    "GLM-4.5-Air": 106_852_251_264,
    "GLM-4.7-Flash": 29_943_393_920,
    "LFM2-1.2B": 1_170_340_608,
    "Falcon-H1-0.5B-Base": 521_411_104,
    "Nemotron-H-4B-Base-8K": 4_489_223_040,
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16": 31_577_940_288,
    "gpt-oss-20b": 20_914_757_184,
    "t5-base": 222_903_552,
    "flan-t5-base": 247_577_856,
    "flan-t5-xxl": 11_135_332_352,
    "mt5-small": 300_176_768,
    "umt5-small": 306_601_984,
    "bert-base-uncased": 109_483_778,
    "roberta-large-mnli": 355_362_819,
    "distilbert-base-uncased-finetuned-sst-2-english": 66_955_010,
}

OVER_THE_VOCABULARY = ("embed/embedding", "lm_head/kernel", "lm_head/bias")


def real_config(name):
    with tempfile.TemporaryDirectory() as folder:
        shutil.copyfile(FOLDER / f"{name}.json", Path(folder, "config.json"))
        return read_hf_config(Path(folder))


def real_model(hf_config):
    encoder = find_family(hf_config.model_type).kind == "encoder"
    return Classifier.from_config(hf_config) if encoder else make_model(hf_config)


def test_every_family_has_a_real_model():
    files = {path.stem: json.loads(path.read_text()) for path in FOLDER.iterdir()}
    assert set(files) == set(PARAMETERS)
    assert {fields["model_type"] for fields in files.values()} == {*FAMILIES, *READ_AS}


@pytest.mark.parametrize("name", PARAMETERS)
def test_checkpoint_and_parameters_have_the_published_size(name):
    model = real_model(real_config(name))
    entries = model.entries()
    assert sum(math.prod(entry.shape) for entry in entries) == PARAMETERS[name]

    shapes = flatten_dict(jax.eval_shape(model.init, jax.random.key(0)), sep="/")
    assert {path for entry in entries for path in entry.paths} == set(shapes)
    # Nothing but the vocabulary is padded.
    padded = shapes["embed/embedding"].shape[0]
    in_file = 0
    for path, leaf in shapes.items():
        size = math.prod(leaf.shape)
        in_file += size // padded * model.vocab_size if path in OVER_THE_VOCABULARY else size
    assert in_file == PARAMETERS[name]


@pytest.mark.parity
@pytest.mark.parametrize("name", PARAMETERS)
def test_torch_has_the_same_size(name):
    torch = pytest.importorskip("torch", reason="needs the parity extra")
    from transformers import (
        AutoModelForCausalLM,
        AutoModelForImageTextToText,
        AutoModelForSeq2SeqLM,
        AutoModelForSequenceClassification,
    )

    classes = dict(
        causal=AutoModelForCausalLM,
        seq2seq=AutoModelForSeq2SeqLM,
        encoder=AutoModelForSequenceClassification,
    )
    # The model's own config: it knows which T5 ties its head, while transformers ties all until a file says otherwise.
    model = real_model(real_config(name))
    opens = AutoModelForImageTextToText if model.family.is_multimodal else classes[model.family.kind]
    with torch.device("meta"):
        oracle = opens.from_config(model.hf_config)
    # Without the tensors that nobody needs: an untied T5 has the embedding three times.
    needed = [
        leaf
        for key, leaf in oracle.named_parameters()
        if not model.family.is_ignored(key, model.config)
        and (not model.family.is_multimodal or key.startswith(model.family.text_prefixes))
    ]
    # What steers the choice of experts, and what scales a layer of Gemma 4, is no parameter there, but in the file.
    buffers = ("e_score_correction_bias", "layer_scalar")
    needed += [leaf for key, leaf in oracle.named_buffers() if key.endswith(buffers)]
    assert sum(leaf.numel() for leaf in needed) == PARAMETERS[name]

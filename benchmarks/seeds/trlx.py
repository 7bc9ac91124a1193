# SPDX-License-Identifier: Apache-2.0
"""trlX's own tests, example scripts and YAML files against `jrl.trlx`, with their imports changed.

    git clone https://github.com/CarperAI/trlx
    python -m benchmarks.seeds.trlx --trlx trlx

Needs torch, peft, datasets, accelerate, hypothesis, networkx and pytest beside jrl. Prints N of M and what is left,
file by file; `--write-docs` puts the table into `docs/migrating/from_trlx.md`. `--only 'tests/test_utils.py'` runs
some files, `-k` some tests. The YAML files are those of every tag in the clone.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import sqlite3
import subprocess
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from benchmarks.seeds.runner import ROOT, Change, Row, Script, Seed, main
from benchmarks.seeds.stand_ins import configs_to, in_cache, rows_to, usual_tokenizers

IMPORTS = (
    Change("", r"^(\s*)import trlx$", r"\1from jrl import trlx"),
    Change("", r"^(\s*(?:from|import) )trlx\b", r"\1jrl.trlx"),
)
# What newer libraries ask of an old script or test, whichever library trains.
PEFT_PATHS = Change("", r"\bpeft\.utils\.config\b", "peft.utils.peft_types")
ROWS = {"train.total_steps": 2, "train.batch_size": 4, "train.eval_interval": 2, "train.seq_length": 96}
OFFLINE = {**ROWS, "method.gen_kwargs.max_new_tokens": 8}
ONLINE = {**OFFLINE, "method.num_rollouts": 8, "method.chunk_size": 8, "method.ppo_epochs": 1}
ROLLOUTS = {**ONLINE, "method.gen_experience_kwargs.max_new_tokens": 8}
RFT = {**OFFLINE, "method.n_generations_per_prompt": 2}
WALKS = {"train.total_steps": 2, "train.batch_size": 20, "train.eval_interval": 2}


def _hparams(values: dict[str, Any]) -> str:
    """On a command line that the runner formats: braces are doubled."""
    return f"'{json.dumps(values)}'".replace("{", "{{").replace("}", "}}")


def _given(values: dict[str, Any], *, call: str = "main()") -> tuple[Change, ...]:
    """The same for a script that reads no command line."""
    return (Change("", rf"^    {call[:-1]}\)".replace("(", r"\("), f"    {call[:-1]}{values})"),)


def _updated(kind: str, values: dict[str, Any]) -> tuple[Change, ...]:
    """The same for a script that takes a default configuration as it is."""
    name = f"default_{kind}_config"
    return (Change("", rf"\b{name}\(\)", f"{name}().update({name}(), {values})"),)


def _evolved(values: dict[str, Any]) -> tuple[Change, ...]:
    """The same for a script whose configuration is called `config` and is read by nothing before `trlx.train`."""
    return (Change("", r"^(\s+)config=config,$", rf"\1config=TRLConfig.update(config, {values}),"),)


PROGRAMS = "examples/experiments/grounded_program_synthesis"
GPT2 = '"model.model_path": "gpt2", "tokenizer.tokenizer_path": "gpt2", '
NO_CODEGEN = Change(
    "another model: CodeGen is none of jrl's families", r"^    main\(\{", f"    main({{{GPT2}"
)
NO_BEAMS = Change("no `num_beams`: jrl has no beam search", r'^\s+"num_beams": 4,\n', "")
NO_METADATA = Change(
    "its reward function of a server takes no metadata, in trlX neither",
    r"reward_fn\(\*\*kwargs\)",
    'reward_fn(**{name: kwargs[name] for name in ("samples", "prompts", "outputs")})',
)
CPU = Change("", r'torch\.device\("cuda:\{\}"\.format\(1\)\)', 'torch.device("cpu")')
FEW_ROWS = Change("", r"take\(\d+\)", "take(64)")
FEW_TEXTS = Change("", r"\[\"text\"\]\]", '["text"][:64]]')
NEMO = "trains on NeMo: refused with what to use instead, `train.mesh`"
NO_TRLX = "uses no name of trlX"
TORCH_OPTIMIZER = "compares with a class of torch or bitsandbytes"
STALE = {
    (
        "v0.2",
        "configs/ppo_gptj.yml",
    ): "of an earlier layout (`n_ctx`, `gen_size`), which trlX 0.2 refuses too",
}
PARAMETER = "writes into a torch module's parameters"
BACKWARD = "calls `backward` and a torch optimizer on the model"

TRLX = Seed(
    name="trlX, newest commit",
    imports=(*IMPORTS, PEFT_PATHS),
    tests=("tests/test_*.py",),
    scripts=(
        Script("examples/architext.py", small=_updated("ppo", ONLINE)),
        Script("examples/ilql_sentiments.py", _hparams(OFFLINE)),
        Script("examples/ilql_sentiments_t5.py", small=_given(OFFLINE)),
        Script("examples/ppo_dense_sentiments.py", _hparams(ONLINE), small=(FEW_TEXTS,)),
        Script("examples/ppo_sentiments.py", _hparams(ONLINE), small=(FEW_TEXTS,)),
        Script("examples/ppo_sentiments_llama.py", _hparams(ONLINE), small=(FEW_TEXTS,)),
        Script("examples/ppo_sentiments_peft.py", _hparams(ONLINE), small=(FEW_TEXTS,)),
        Script("examples/ppo_sentiments_t5.py", _hparams(ONLINE)),
        Script("examples/ppo_translation_t5.py", _hparams(ROLLOUTS), changes=(NO_BEAMS,), small=(FEW_ROWS,)),
        Script("examples/rft_sentiments.py", _hparams(RFT), small=(FEW_TEXTS,)),
        Script("examples/sft_sentiments.py", _hparams(OFFLINE)),
        Script("examples/simulacra.py", small=_updated("ilql", OFFLINE)),
        Script("examples/alpaca/sft_alpaca.py", _hparams(OFFLINE)),
        Script("examples/hh/ilql_hh.py", _hparams({**OFFLINE, "train.seq_length": 128}), changes=(NO_METADATA,)),
        Script("examples/hh/ppo_hh.py", _hparams(ONLINE)),
        Script("examples/hh/sft_hh.py", _hparams(OFFLINE)),
        Script("examples/randomwalks/ilql_randomwalks.py", _hparams(WALKS)),
        Script("examples/randomwalks/ppo_randomwalks.py", _hparams({**WALKS, "method.num_rollouts": 40})),
        Script("examples/randomwalks/rft_randomwalks.py", _hparams(WALKS)),
        Script(f"{PROGRAMS}/train_trlx.py", changes=(NO_CODEGEN,), small=_given(ONLINE)),
        Script(
            "examples/summarize_daily_cnn/t5_summarize_daily_cnn.py",
            small=_evolved(ROLLOUTS),
        ),
        Script("examples/summarize_rlhf/ilql_summarize_t5.py", _hparams(OFFLINE), small=(CPU,)),
        Script(
            "examples/summarize_rlhf/trlx_gptj_text_summarization.py",
            small=(CPU, *_evolved({**ONLINE, "model.num_layers_unfrozen": 2})),
        ),
        *(
            Script(f"examples/{name}.py", cannot=NEMO)
            for name in (
                "nemo_ilql_inference", "nemo_ilql_sentiments", "nemo_ppo_inference", "nemo_ppo_sentiments",
                "nemo_sft_sentiments", "nemo_vs_ds_chat", "llama_nemo/nemo_llama2_ppo_sentiments",
            )
        ),
        *(
            Script(f"examples/{name}.py", cannot=NO_TRLX)
            for name in (
                "hh/to_triton", "llama_nemo/convert_llama_to_nemo", "summarize_rlhf/reward_model/gptj_reward_test",
                "summarize_rlhf/reward_model/train_reward_model_gptj", "summarize_rlhf/sft/train_gptj_summarize",
                "summarize_rlhf/trlx_inference_gptj",
            )
        ),
    ),
    copied=("tests", "examples", "configs"),
    inside={
        "tests/test_utils.py::test_optimizer_class_getters*": TORCH_OPTIMIZER,
        "tests/test_utils.py::test_scheduler_class_getters*": TORCH_OPTIMIZER,
        "tests/test_utils.py::test_hf_attr_getters*": "finds modules inside a torch model",
        "tests/test_models.py::*::test_save_load": PARAMETER,
        "tests/test_models.py::test_ilql_heads_alpha": PARAMETER,
        "tests/test_models.py::*::test_frozen_head": "reads `requires_grad` of torch parameters",
        **{f"tests/test_peft.py::*::test_{name}*": BACKWARD for name in (
            "save_and_load", "backpropagation_and_disabling", "forward_hydra", "generate", "lora_modules_to_save",
        )},
        "tests/test_peft.py::*::test_peft_not_installed_error": "wants an error where PEFT is missing; jrl needs none",
        "tests/test_trainers.py::*::test_accumulate_context": "calls a private method around accelerate's `no_sync`",
        "tests/test_minibatch.py::*_with_prompt_pipeline": "wants torch tensors where texts were given",
    },
    known={
        "tests/test_trainers.py::*checkpoint": "checkpoints stand at the ends of iterations, and this run has one",
    },
    stand_ins=lambda clone, folder: _stand_ins(clone, folder),
    more=lambda clone: yaml_rows(clone),
)  # fmt: skip


def _stand_ins(clone: Path, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Models in a hub cache, data in folders, and modules in place of services and packages that are not here."""
    cache, data = folder / "hub", folder / "data"
    shutil.rmtree(folder, ignore_errors=True)
    models(clone, cache)
    found = datasets(data)
    modules(folder / "modules")
    work = clone_free_files(folder, cache)
    return found | work, {
        "HF_HUB_CACHE": str(cache),
        "TRITON_HOST": "localhost:8001/rewards",
    }


def models(clone: Path, cache: Path) -> None:
    """The models that tests and examples name, in miniature."""
    import torch
    import transformers as hf

    torch.manual_seed(0)
    texts = [path.read_text(errors="replace") for path in sorted(clone.rglob("*.md"))]
    plain, padded, two = usual_tokenizers(texts, 600)
    # Room for a pad or separator token that a script adds.
    size, ends = 640, {"bos_token_id": 0, "eos_token_id": 0}
    wide = {"vocab_size": size, "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    small = {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 1024, "vocab_size": size, **ends}
    layers = {"hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    gpt2 = hf.GPT2Config(**small)
    gptj = hf.GPTJConfig(**small, rotary_dim=4)
    codegen = hf.CodeGenConfig(**small, rotary_dim=4)
    neox = hf.GPTNeoXConfig(**layers, intermediate_size=64, vocab_size=size, **ends)
    opt = hf.OPTConfig(**layers, ffn_dim=64, word_embed_proj_dim=32, max_position_embeddings=1024, **wide)
    llama = hf.LlamaConfig(**layers, intermediate_size=64, max_position_embeddings=1024, **wide)
    named: dict[str, tuple[Any, Any]] = {
        "gpt2": (gpt2, plain),
        "lvwerra/gpt2-imdb": (gpt2, plain),
        "architext/gptj-162M": (gptj, plain),
        "EleutherAI/gpt-j-6B": (gptj, plain),
        "CarperAI/openai_summarize_tldr_sft": (gptj, plain),
        "reshinthadith/codegen_350M_list_manip_5_len": (codegen, plain),
        "EleutherAI/gpt-neox-20b": (neox, plain),
        "EleutherAI/pythia-160m": (neox, plain),
        "facebook/opt-125m": (opt, padded),
        "facebook/opt-1.3b": (opt, padded),
        "NousResearch/Llama-2-7b-hf": (llama, padded),
    }
    for name, (config, tokenizer) in named.items():
        in_cache(cache, name, _saved(hf.AutoModelForCausalLM.from_config(config), tokenizer))
    sizes = {"d_model": 32, "d_ff": 64, "d_kv": 8, "num_layers": 4, "num_heads": 4, "vocab_size": size}
    for name, kind in (
        ("t5-small", "relu"), ("t5-large", "relu"), ("google/t5-efficient-tiny", "relu"), ("lvwerra/t5-imdb", "relu"),
        ("google/flan-t5-small", "gated-gelu"), ("google/flan-t5-large", "gated-gelu"),
        ("pvduy/flant5-xl_openai_tldr_sft", "gated-gelu"),
    ):  # fmt: skip
        t5 = hf.T5Config(
            **sizes, feed_forward_proj=kind, decoder_start_token_id=0, tie_word_embeddings=kind == "relu"
        )
        in_cache(cache, name, _saved(hf.T5ForConditionalGeneration(t5), two))
    labels = {"id2label": {0: "NEGATIVE", 1: "POSITIVE"}, "label2id": {"NEGATIVE": 0, "POSITIVE": 1}}
    bert = hf.DistilBertConfig(
        vocab_size=size, dim=32, hidden_dim=64, n_layers=2, n_heads=4, pad_token_id=0, **labels
    )
    for name in ("lvwerra/distilbert-imdb", "distilbert-base-uncased"):
        in_cache(cache, name, _saved(hf.DistilBertForSequenceClassification(bert), padded))
    in_cache(cache, "CarperAI/randomwalks", _saved(hf.GPT2LMHeadModel(_walk_config()), _walk_tokenizer()))


def _saved(model: Any, tokenizer: Any) -> Any:
    """What writes both to a folder."""

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return save


def _walk_config() -> Any:
    import transformers as hf

    return hf.GPT2Config(
        n_layer=2, n_embd=48, n_head=4, vocab_size=23, n_positions=32, bos_token_id=22, eos_token_id=22
    )


def _walk_tokenizer() -> Any:
    """One token a letter: nodes "a" to "u", then "|"."""
    import transformers as hf
    from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
    from tokenizers import models as token_models

    words = [*"abcdefghijklmnopqrstu|", "<|endoftext|>"]
    made = Tokenizer(
        token_models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<|endoftext|>")
    )
    made.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    made.decoder = decoders.Fuse()
    end = "<|endoftext|>"
    return hf.PreTrainedTokenizerFast(tokenizer_object=made, bos_token=end, eos_token=end, unk_token=end)


def datasets(data: Path) -> dict[str, Path]:
    """The data that examples name: a few hundred short rows each."""
    chance = random.Random(0)
    words = re.findall(
        r"\S+", "the film was good bad long short and I liked hated it very much because of its story."
    )
    sentence = lambda size: " ".join(chance.choice(words) for _ in range(size))  # noqa: E731
    rows = range(300)

    def turn() -> dict[str, str]:
        return {
            "prompt": f"\n\nHuman: {sentence(6)}\n\nAssistant:",
            "chosen": sentence(5),
            "rejected": sentence(5),
        }

    imdb = [{"text": sentence(60), "label": number % 2} for number in range(600)]
    hh = [turn() for _ in rows]
    alpaca = [
        {"instruction": sentence(5), "input": sentence(3) if i % 2 else "", "output": sentence(6)}
        for i in rows
    ]
    news = [{"article": sentence(30), "highlights": sentence(6)} for _ in rows]
    posts = [{"prompt": f"POST: {sentence(12)} TL;DR:", "label": sentence(6)} for _ in rows]
    pairs = [
        {
            "prompt": f"POST: {sentence(12)}",
            "chosen": f"TL;DR: {sentence(5)}",
            "rejected": f"TL;DR: {sentence(5)}",
        }
        for _ in rows
    ]
    speech = [{"translation": {"en": sentence(8), "de": sentence(8)}} for _ in rows]
    return {
        "imdb": rows_to(data / "imdb", {"train": imdb, "test": imdb}),
        "Dahoas/full-hh-rlhf": rows_to(data / "full_hh", {"train": hh, "test": hh}),
        "Dahoas/rm-static": rows_to(data / "rm_static", {"train": hh, "test": hh}),
        "tatsu-lab/alpaca": rows_to(data / "alpaca", {"train": alpaca}),
        "cnn_dailymail": configs_to(data / "news", {"3.0.0": {"train": news, "validation": news}}),
        "CarperAI/openai_summarize_tldr": configs_to(
            data / "tldr", {"default": {"train": posts, "valid": posts}}
        ),
        "CarperAI/openai_summarize_comparisons": rows_to(data / "pairs", {"train": pairs}),
        "wmt16": configs_to(data / "wmt16", {"de-en": {"train": speech, "validation": speech}}),
    }


def clone_free_files(folder: Path, cache: Path) -> dict[str, Path]:
    """Files that examples download or make beforehand: a reward model's weights, ratings, lists of programs."""
    import torch
    import transformers as hf

    snapshot = next((cache / "models--EleutherAI--gpt-j-6B" / "snapshots").iterdir())
    model = hf.AutoModelForCausalLM.from_pretrained(snapshot)
    weights = {f"transformer.{name}": array for name, array in model.transformer.state_dict().items()}
    path = folder / "files" / "pytorch_model.bin"
    path.parent.mkdir(parents=True)
    torch.save(weights | {"v_head.weight": torch.randn(1, 32)}, path)
    ratings = folder / "files" / "ratings.sqlite"
    with sqlite3.connect(ratings) as connection:
        connection.execute("CREATE TABLE generations (id INTEGER, prompt TEXT)")
        connection.execute("CREATE TABLE images (id INTEGER, gid INTEGER)")
        connection.execute("CREATE TABLE ratings (iid INTEGER, rating INTEGER)")
        for number in range(64):
            connection.execute(
                "INSERT INTO generations VALUES (?, ?)", (number, f"a cat in the rain {number}")
            )
            connection.execute("INSERT INTO images VALUES (?, ?)", (number, number))
            connection.execute("INSERT INTO ratings VALUES (?, ?)", (number, number % 10))
    programs = [{"input": "Input: [1,2] Output: [2,1] Function:"}] * 32
    for part in ("train", "test"):
        (folder / "files" / f"{part}.json").write_text(json.dumps(programs))
    return {
        "reward_model/rm_checkpoint/pytorch_model.bin": path,
        "sac_public_2022_06_29.sqlite": ratings,
        "dataset/train.json": folder / "files" / "train.json",
        "dataset/test.json": folder / "files" / "test.json",
    }


def modules(folder: Path) -> None:
    """Modules in place of packages that score texts by a server or by models of the hub: the score is made up."""
    (folder / "tritonclient").mkdir(parents=True)
    (folder / "tritonclient" / "__init__.py").write_text("")
    (folder / "tritonclient" / "utils.py").write_text(
        "def np_to_triton_dtype(dtype):\n    return str(dtype)\n"
    )
    (folder / "tritonclient" / "grpc.py").write_text(_TRITON)
    (folder / "comet.py").write_text('__version__ = "1.1.3"\n')
    (folder / "evaluate.py").write_text(_EVALUATE)


_TRITON = """
import numpy as np


class InferInput:
    def __init__(self, name, shape, dtype):
        self.shape = shape

    def set_data_from_numpy(self, array):
        self.array = array


class InferenceServerClient:
    def __init__(self, url, verbose=False):
        pass

    def infer(self, model, inputs):
        self.rewards = np.asarray(inputs[0].array).mean(axis=1)
        return self

    def as_numpy(self, name):
        return self.rewards
"""
_EVALUATE = """
class Metric:
    def __init__(self, name):
        self.name = name

    def compute(self, predictions, references, **more):
        scores = [float(len(set(a.split()) & set(b.split()))) for a, b in zip(predictions, references)]
        mean = sum(scores) / max(len(scores), 1)
        return {"scores": scores, "mean_score": mean, "score": mean, self.name: mean}


def load(name, *arguments, **options):
    return Metric(name)
"""


def yaml_rows(clone: Path) -> dict[str, Callable[[], Row]]:
    """One row a tag: how many of its configurations load, and of its sweep files are understood."""
    names = {tag: f"YAML files of {tag}" for tag in _git(clone, "tag").split()}
    return {name: partial(_yaml_row, clone, tag, name) for tag, name in names.items()}


def _yaml_row(clone: Path, tag: str, name: str) -> Row:
    row = Row(name, kind="YAML files")
    for file, content in _yaml_files(clone, tag):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                _read(content)
                row.passed += 1
            except Exception as error:
                if (tag, file) in STALE:
                    row.inside.append((file, f"{file}: {STALE[tag, file]}"))
                else:
                    row.failed.append((file, f"{type(error).__name__}: {error}"))
    return row


def _yaml_files(clone: Path, tag: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and content of every file that is a configuration of trlX or a sweep; others are accelerate's or NeMo's."""
    for name in _git(clone, "ls-tree", "-r", "--name-only", tag).splitlines():
        if name.endswith((".yml", ".yaml")) and not name.startswith("."):
            content = yaml.safe_load(_git(clone, "show", f"{tag}:{name}"))
            if isinstance(content, dict) and (
                "tune_config" in content or {"model", "train", "method"} <= set(content)
            ):
                yield name, content


def _read(content: dict[str, Any]) -> None:
    """Loads a configuration; of a sweep file, asks a configuration to take the first value of every entry."""
    import tempfile

    from jrl.sweep import read_plan
    from jrl.trlx.data.default_configs import TRLConfig, default_ilql_config, default_ppo_config

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "file.yml"
        path.write_text(yaml.safe_dump(content))
        if "tune_config" not in content:
            TRLConfig.load_yaml(path)
            return
        read_plan(path)
    base = default_ilql_config() if any("tau" in name for name in content) else default_ppo_config()
    TRLConfig.update(
        base, {name: entry["values"][0] for name, entry in content.items() if name != "tune_config"}
    )


def _git(clone: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", "-C", str(clone), *arguments], check=True, capture_output=True, text=True
    ).stdout


if __name__ == "__main__":
    main({"trlx": TRLX}, ROOT / "docs" / "migrating" / "from_trlx.md", "trlX's own files")

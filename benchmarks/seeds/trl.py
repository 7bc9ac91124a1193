# SPDX-License-Identifier: Apache-2.0
"""TRL's own tests and example scripts against `jrl.trl`, with their imports changed.

    git clone --branch v0.7.1 https://github.com/huggingface/trl trl-0.7.1
    git clone --branch v0.28.0 https://github.com/huggingface/trl trl-0.28.0
    python -m benchmarks.seeds.trl --v0.7.1 trl-0.7.1 --v0.28.0 trl-0.28.0

Needs torch, peft, datasets, accelerate and pytest beside jrl. Prints N of M and what is left, file by file;
`--write-docs` puts the table into `docs/migrating/from_trl.md`. `--only 'tests/test_core.py'` runs some
files, `-k` some tests.
"""

from __future__ import annotations

import contextlib
import random
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.seeds.runner import ROOT, Change, Script, Seed, main
from benchmarks.seeds.stand_ins import CHATML, byte_level, configs_to, in_cache, rows_to, usual_tokenizers

INTERNAL = "trl-internal-testing"
LLAMA = "huggyllama/llama-7b"
IMPORTS = (
    Change("", r"^(\s*)import trl$", r"\1import jrl.trl as trl"),
    Change("", r"^(\s*(?:from|import) )trl\b", r"\1jrl.trl"),
    Change("", r"""(["'])trl\.(?=[a-z_]+\.)""", r"\1jrl.trl."),
)

# What newer transformers, datasets or accelerate ask of an old script, whichever library trains.
EVAL_STRATEGY = Change("transformers 5: `eval_strategy`", r"\bevaluation_strategy\b", "eval_strategy")
SAFETENSORS = (
    Change("transformers 5: files are safetensors", r"pytorch_model\.bin", "model.safetensors"),
    Change("", r"adapter_model\.bin", "adapter_model.safetensors"),
)
NO_AUTH = Change("transformers 5: no `use_auth_token`", r", use_auth_token=True|^\s*use_auth_token=.*\n", "")


NO_WANDB = Change("without wandb", r'log_with="wandb"', "log_with=None")
NO_REPORT = Change("without wandb", r'report_to="wandb"', 'report_to="none"')
NO_BITS = Change("without bitsandbytes", r"""(?:"load_in_8bit": |load_in_8bit=)True,""", "")
NO_DEVICE = Change("on a CPU: no `device_map`", r""",\s*device_map=\{"": Accelerator\(\).*\}""", "")
NO_ANSWER = Change("without the column `answer`, which its batch lacks", r""", "answer"\]\)""", "])")
NO_TOOLS = Change("transformers 5: a function for `load_tool`", r"load_tool\([^)]*\)", "str")
NO_TOOL_IMPORT = Change("", r", load_tool$", "")
NO_TOKEN = Change("", r"^.*HfFolder\.save_token.*\n", "")
NO_FOLDER = Change("huggingface_hub 1: no `HfFolder`", r"^(from huggingface_hub import .*), HfFolder", r"\1")


def _sizes(*pairs: tuple[str, str]) -> tuple[Change, ...]:
    """Changes of sizes alone."""
    return tuple(Change("", pattern, replacement) for pattern, replacement in pairs)


def old_models(clone: Path, cache: Path) -> None:
    """The models that 0.7.1's tests and examples name."""
    import torch
    import transformers as hf

    # Its tests count the tokens of this text: words that GPT-2's own tokenizer has whole.
    texts = [*_texts(clone), *["This morning I went to the "] * 1000]
    plain, padded, two = usual_tokenizers(texts, 1000)
    torch.manual_seed(0)
    ends = {"bos_token_id": 0, "eos_token_id": 0}
    gpt2 = hf.GPT2Config(vocab_size=len(plain), n_embd=32, n_layer=5, n_head=4, n_positions=512, **ends)
    wide = {"vocab_size": len(padded), "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 3}
    llama = hf.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, **wide
    )
    t5 = hf.T5Config(
        vocab_size=len(two), d_model=32, d_ff=64, d_kv=8, num_layers=5, num_heads=4, decoder_start_token_id=0
    )
    neo = hf.GPTNeoConfig(
        vocab_size=len(plain), hidden_size=32, num_layers=2, num_heads=4, intermediate_size=64,
        attention_types=[[["global", "local"], 1]], max_position_embeddings=512, **ends,
    )  # fmt: skip
    gptj = hf.GPTJConfig(
        vocab_size=len(plain), n_embd=32, n_layer=5, n_head=4, rotary_dim=4, n_positions=512, **ends
    )
    # Its tests count this model's parameters.
    neox = hf.GPTNeoXConfig(
        vocab_size=1024, hidden_size=32, num_hidden_layers=5, num_attention_heads=4, intermediate_size=37, **ends
    )  # fmt: skip
    opt = hf.OPTConfig(
        hidden_size=32, ffn_dim=64, num_hidden_layers=5, num_attention_heads=4, word_embed_proj_dim=32,
        max_position_embeddings=512, **wide,
    )  # fmt: skip
    bloom = hf.BloomConfig(hidden_size=32, n_layer=5, n_head=4, **wide)
    code = hf.GPTBigCodeConfig(vocab_size=len(plain), n_embd=32, n_layer=2, n_head=4, n_positions=512, **ends)
    bert = hf.RobertaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_labels=2, **wide
    )
    causal: dict[str, tuple[Any, Any]] = {
        "dummy-GPT2-correct-vocab": (gpt2, plain),
        "tiny-random-GPT2LMHeadModel": (gpt2, plain),
        "tiny-random-GPT2Model": (gpt2, plain),
        "tiny-random-LlamaForCausalLM": (llama, padded),
        "tiny-random-GPTNeoForCausalLM": (neo, plain),
        "tiny-random-GPTJForCausalLM": (gptj, plain),
        "tiny-random-GPTNeoXForCausalLM": (neox, plain),
        "tiny-random-OPTForCausalLM": (opt, padded),
        "tiny-random-BloomForCausalLM": (bloom, padded),
        "tiny-BloomForCausalLM-correct-vocab": (bloom, padded),
    }
    named = {f"{INTERNAL}/{name}": pair for name, pair in causal.items()} | {
        name: (gpt2, plain)
        for name in ("gpt2", "lvwerra/gpt2-imdb", "ybelkada/gpt-neo-125m-detox", "EleutherAI/gpt-neo-125M")
    }
    named |= {name: (llama, padded) for name in ("huggyllama/llama-7b", "meta-llama/Llama-2-7b-hf")}
    named |= {"facebook/opt-350m": (opt, padded), "bigcode/starcoderbase": (code, plain)}
    named |= {"ybelkada/gpt-j-6b-sharded-bf16": (gptj, plain)}
    for name, (config, tokenizer) in named.items():
        in_cache(cache, name, _saved(hf.AutoModelForCausalLM.from_config(config), tokenizer))
    for name in (
        "tiny-random-T5ForConditionalGeneration",
        "tiny-random-T5Model",
        "tiny-T5ForConditionalGeneration-correct-vocab",
    ):
        in_cache(cache, f"{INTERNAL}/{name}", _saved(hf.T5ForConditionalGeneration(t5), two))
    for name in ("lvwerra/distilbert-imdb", "facebook/roberta-hate-speech-dynabench-r4-target"):
        in_cache(cache, name, _saved(hf.RobertaForSequenceClassification(bert), padded))


def _saved(model: Any, tokenizer: Any) -> Any:
    """What writes both to a folder."""

    def save(folder: Path) -> None:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)

    return save


def _texts(clone: Path) -> list[str]:
    """English to learn merges from: the seed's own pages."""
    return [path.read_text(errors="replace") for path in sorted(clone.glob("docs/source/*.md*"))[:20]]


def old_data(data: Path) -> dict[str, Path]:
    """The data that 0.7.1's tests and examples name: a thousand short rows each."""
    chance = random.Random(0)
    words = (
        "film",
        "was",
        "good",
        "bad",
        "long",
        "short",
        "liked",
        "hated",
        "very",
        "story",
        "again",
        "because",
    )
    sentence = lambda size: " ".join(chance.choice(words) for _ in range(size))  # noqa: E731
    rows = range(1000)
    turn = lambda: f"\n\nHuman: {sentence(6)}\n\nAssistant: {sentence(5)}"  # noqa: E731
    pairs = [{"chosen": turn(), "rejected": turn()} for _ in rows]
    stack = [{"question": sentence(5), "response_j": sentence(6), "response_k": sentence(6)} for _ in rows]
    imdb = [{"text": sentence(60), "label": chance.randrange(2)} for _ in rows]
    chat = [{"text": f"### Human: {sentence(5)}### Assistant: {sentence(6)}"} for _ in rows]
    toxic = [
        {"prompt": {"text": sentence(20), "toxicity": 0.9}, "continuation": {"text": sentence(5)}}
        for _ in rows
    ]
    sums = [{"question": sentence(6), "answer": f"{sentence(4)}\n#### {chance.randrange(9)}"} for _ in rows]
    trivia = [{"question": sentence(5), "answer": {"normalized_aliases": ["good"]}} for _ in rows]
    both = lambda found: {"train": found, "test": found[:64]}  # noqa: E731
    paired = data / "stack"
    for part in ("finetune", "reward", "rl", "evaluation"):
        rows_to(paired / "data" / part, {"train": stack})
    return {
        "imdb": rows_to(data / "imdb", both(imdb)),
        "Anthropic/hh-rlhf": rows_to(data / "hh", both(pairs)),
        "timdettmers/openassistant-guanaco": rows_to(data / "guanaco", both(chat)),
        "lvwerra/stack-exchange-paired": paired,
        "allenai/real-toxicity-prompts": rows_to(data / "toxicity", both(toxic)),
        "gsm8k": configs_to(data / "gsm8k", {"main": both(sums)}),
        "trivia_qa": configs_to(data / "trivia", {"rc": both(trivia)}),
    }


def old_stand_ins(clone: Path, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Of 0.7.1."""
    cache, data = folder / "hub", folder / "data"
    if not cache.is_dir():
        old_models(clone, cache)
        _diffusion(cache)
    judge = data / "reward_adapter"
    if not judge.is_dir():
        _reward_adapter(cache, judge)
    return old_data(data) | {"trl-lib/llama-7b-hh-rm-adapter": judge}, {"HF_HUB_CACHE": str(cache)}


def _reward_adapter(cache: Path, folder: Path) -> None:
    """An adapter of two labels on the tiny Llama."""
    import transformers as hf
    from peft import LoraConfig, get_peft_model

    place = next(cache.glob(f"models--{LLAMA.replace('/', '--')}/snapshots/*"))
    base = hf.AutoModelForSequenceClassification.from_pretrained(place, num_labels=2)
    model = get_peft_model(base, LoraConfig(task_type="SEQ_CLS"))
    model.peft_config["default"].base_model_name_or_path = LLAMA
    model.save_pretrained(folder)


def _diffusion(cache: Path) -> None:
    """A tiny Stable Diffusion in diffusers' layout, whose images are of 8 latents in place of 64."""
    from tests.models.diffusion.tiny_pipelines import tiny_pipeline

    for name in ("hf-internal-testing/tiny-stable-diffusion-torch", "runwayml/stable-diffusion-v1-5"):
        in_cache(cache, name, lambda folder: tiny_pipeline("A", folder))


def new_stand_ins(clone: Path, folder: Path) -> tuple[dict[str, Path], dict[str, str]]:
    """Of 0.28.0: the models of its own script in miniature, the data of its own scripts."""
    import torch
    import transformers as hf

    cache, data = folder / "hub", folder / "data"
    texts = _texts(clone)
    if not cache.is_dir():
        torch.manual_seed(0)
        special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
        chat = hf.PreTrainedTokenizerFast(
            tokenizer_object=byte_level(texts, 1200, special),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
        )
        chat.chat_template = CHATML
        bare = hf.PreTrainedTokenizerFast(
            tokenizer_object=byte_level(texts, 1200, ["<s>", "<pad>", "</s>", "<unk>"]),
            bos_token="<s>", pad_token="<pad>", eos_token="</s>", unk_token="<unk>",
        )  # fmt: skip
        sizes = {
            "hidden_size": 8, "num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2,
            "intermediate_size": 32,
        }  # fmt: skip
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}

        def own(tokenizer: Any) -> dict[str, Any]:
            ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
            return {"vocab_size": len(tokenizer), **ends}

        scorer = {**sizes, "hidden_size": 16, "num_labels": 1}
        models = {
            "tiny-Qwen2ForCausalLM-2.5": (hf.Qwen2ForCausalLM, sizes, chat),
            "tiny-Qwen3ForCausalLM": (hf.Qwen3ForCausalLM, {**sizes, "head_dim": 4}, chat),
            "tiny-Qwen3MoeForCausalLM": (hf.Qwen3MoeForCausalLM, {**sizes, "head_dim": 4, **experts}, chat),
            "tiny-LlamaForCausalLM-3.2": (hf.LlamaForCausalLM, sizes, chat),
            "tiny-LlamaForCausalLM-3.1": (hf.LlamaForCausalLM, sizes, chat),
            "tiny-LlamaForCausalLM-3": (hf.LlamaForCausalLM, sizes, chat),
            "tiny-MistralForCausalLM-0.1": (hf.MistralForCausalLM, sizes, chat),
            "tiny-MistralForCausalLM-0.2": (hf.MistralForCausalLM, sizes, chat),
            "tiny-GemmaForCausalLM": (hf.GemmaForCausalLM, {**sizes, "head_dim": 4}, chat),
            "tiny-Gemma2ForCausalLM": (hf.Gemma2ForCausalLM, {**sizes, "head_dim": 4}, chat),
            "tiny-Phi3ForCausalLM": (hf.Phi3ForCausalLM, sizes, chat),
            "tiny-GPTNeoXForCausalLM": (hf.GPTNeoXForCausalLM, sizes, bare),
            "tiny-GPT2LMHeadModel": (hf.GPT2LMHeadModel, {"n_embd": 8, "n_layer": 2, "n_head": 4}, bare),
            "tiny-BloomForCausalLM": (
                hf.BloomForCausalLM,
                {"hidden_size": 8, "n_layer": 2, "n_head": 4},
                bare,
            ),
            "tiny-OPTForCausalLM": (
                hf.OPTForCausalLM,
                {
                    "hidden_size": 8,
                    "ffn_dim": 32,
                    "word_embed_proj_dim": 8,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 4,
                },
                bare,
            ),
            "tiny-Qwen2ForSequenceClassification-2.5": (hf.Qwen2ForSequenceClassification, scorer, chat),
            "tiny-Qwen3ForSequenceClassification": (
                hf.Qwen3ForSequenceClassification,
                {**scorer, "head_dim": 4},
                chat,
            ),
            "tiny-Qwen3MoeForSequenceClassification": (
                hf.Qwen3MoeForSequenceClassification,
                {**scorer, "head_dim": 4, **experts},
                chat,
            ),
            "tiny-LlamaForSequenceClassification-3.2": (hf.LlamaForSequenceClassification, scorer, chat),
            "tiny-GPTNeoXForSequenceClassification": (hf.GPTNeoXForSequenceClassification, scorer, bare),
            "tiny-GptNeoXForSequenceClassification": (hf.GPTNeoXForSequenceClassification, scorer, bare),
        }
        for name, (model_class, fields, tokenizer) in models.items():
            config = model_class.config_class(**{**fields, **own(tokenizer)})
            in_cache(cache, f"{INTERNAL}/{name}", _saved(model_class(config), tokenizer))
        two = hf.T5Config(vocab_size=len(bare), d_model=24, d_ff=48, d_kv=8, num_layers=2, num_heads=4)
        in_cache(
            cache,
            f"{INTERNAL}/tiny-T5ForConditionalGeneration",
            _saved(hf.T5ForConditionalGeneration(two), bare),
        )
        in_cache(cache, "Qwen/Qwen3-4B", lambda folder: chat.save_pretrained(folder))
        _adapters(hf.Qwen3ForCausalLM, hf.Qwen3Config(**{**sizes, "head_dim": 4}, **own(chat)), cache)
    return _own_data(clone, data), {"HF_HUB_CACHE": str(cache)}


def _adapters(model_class: Any, config: Any, cache: Path) -> None:
    """Two adapters on the tiny Qwen3."""
    from peft import LoraConfig, get_peft_model

    for name in ("tiny-PeftModel", "tiny-PeftModel-2"):
        model = get_peft_model(model_class(config), LoraConfig())
        model.peft_config["default"].base_model_name_or_path = f"{INTERNAL}/tiny-Qwen3ForCausalLM"
        in_cache(cache, f"{INTERNAL}/{name}", model.save_pretrained)


def _own_data(clone: Path, data: Path) -> dict[str, Path]:
    """The data sets that the clone's own scripts make, caught where they would be pushed to the hub."""
    import datasets

    found: dict[str, dict[str, Any]] = {}

    def keep(self: Any, repo_id: str, config_name: str = "default", **_: Any) -> None:
        splits = self if isinstance(self, datasets.DatasetDict) else {"train": self}
        found.setdefault(repo_id, {})[config_name] = {name: list(rows) for name, rows in splits.items()}

    before = datasets.Dataset.push_to_hub, datasets.DatasetDict.push_to_hub
    datasets.Dataset.push_to_hub = datasets.DatasetDict.push_to_hub = keep  # type: ignore[assignment]
    try:
        for name in ("zen", "harmony", "toolcall"):
            scope: dict[str, Any] = {"__name__": name}
            source = clone / "scripts" / f"generate_{name}_dataset.py"
            sys.modules[name] = type(sys)(name)
            exec(compile(source.read_text(), str(source), "exec"), scope)
            with (
                tempfile.TemporaryDirectory() as place,
                contextlib.chdir(place),
            ):  # one of them writes there, too
                scope["main"](0.1, True, f"{INTERNAL}/{name}")
    finally:
        datasets.Dataset.push_to_hub, datasets.DatasetDict.push_to_hub = before  # type: ignore[method-assign]
    return {name: configs_to(data / name.split("/")[1], configs) for name, configs in found.items()}


_MODELS = Change(
    "model lists cut to the families that jrl reads (of the seeds' seq2seq models: T5 alone)",
    r"""^    "trl-internal-testing/tiny-random-(?!GPT|OPT|Bloom|T5|Llama).*\n""",
    "",
)
_SMALL_LLAMA = _sizes((r"range\(100000\)", "range(1000)"), (r"num_proc = 24", "num_proc = 2"))

OLD = Seed(
    name="TRL 0.7.1",
    imports=(*IMPORTS, Change("", _MODELS.pattern, "")),
    tests=("tests/test_*.py",),
    scripts=(
        Script("examples/hello_world.py"),
        Script("examples/dpo.py", "--max_steps 2 --max_length 64", (EVAL_STRATEGY,)),
        Script(
            "examples/scripts/reward_trainer.py",
            "--batch_size 4 --gradient_accumulation_steps 1 --seq_length 64 --output_dir {out}/o",
            (EVAL_STRATEGY,),
            _sizes(
                (r"num_proc=4", "num_proc=1"),
                (r"num_train_epochs=script_args.num_train_epochs", "max_steps=2"),
            ),
        ),
        Script(
            "examples/scripts/sft_trainer.py",
            "--batch_size 4 --gradient_accumulation_steps 1 --seq_length 64 --max_steps 2 --output_dir {out}/o",
            (NO_AUTH,),
        ),
        Script(
            "examples/scripts/sentiment_tuning.py",
            "--batch_size 8 --mini_batch_size 4",
            (
                Change(
                    "transformers 5: `top_k=None` for `return_all_scores`",
                    r'"return_all_scores": True',
                    '"top_k": None',
                ),
            ),
            _sizes((r'split="train"\)', 'split="train[:16]")')),
        ),
        Script("examples/scripts/multi_adapter_rl.py", small=_sizes((r"train\[:1%\]", "train[:8]"))),
        Script("examples/scripts/multi_adapter_rl_v2.py", small=_sizes((r"train\[:1%\]", "train[:8]"))),
        Script(
            "examples/scripts/stable_diffusion_tuning.py",
            cannot="needs the weights of an aesthetic predictor",
        ),
        Script(
            "examples/research_projects/stack_llama/scripts/supervised_finetuning.py",
            f"--model_path {LLAMA} --max_steps 2 --seq_length 64 --size_valid_set 40 "
            "--streaming --output_dir {out}/o",
            (NO_AUTH, EVAL_STRATEGY, NO_BITS, NO_DEVICE, NO_REPORT),
        ),
        Script(
            "examples/research_projects/stack_llama/scripts/reward_modeling.py",
            cannot="uses no name of TRL: transformers' Trainer with torch's loss",
        ),
        Script(
            "examples/research_projects/stack_llama/scripts/merge_peft_adapter.py",
            cannot="uses no name of TRL: PEFT merges an adapter",
        ),
        Script(
            "examples/research_projects/stack_llama/scripts/rl_training.py",
            f"--model_name {LLAMA} --tokenizer_name {LLAMA} --reward_model_name lvwerra/distilbert-imdb --batch_size 8 "
            "--gradient_accumulation_steps 1 --output_max_length 8 --steps 2",
            (NO_BITS,),
            _SMALL_LLAMA,
        ),
        Script(
            "examples/research_projects/stack_llama_2/scripts/sft_llama2.py",
            cannot="loads its model in 4 bits by bitsandbytes, which needs a CUDA device",
        ),
        Script(
            "examples/research_projects/stack_llama_2/scripts/dpo_llama2.py",
            cannot="loads its model in 4 bits by bitsandbytes, which needs a CUDA device",
        ),
        Script(
            "examples/research_projects/toxicity/scripts/gpt-j-6b-toxicity.py",
            "--batch_size 4 --mini_batch_size 2",
            small=_sizes(
                (
                    r'ds = load_dataset\(dataset_name, split="train"\)',
                    'ds = load_dataset(dataset_name, split="train[:8]")',
                ),
                (r"num_shared_layers=20", "num_shared_layers=2"),
            ),
        ),
        Script(
            "examples/research_projects/toxicity/scripts/evaluate-toxicity.py",
            cannot="uses no name of TRL: it measures a torch model",
        ),
        *(
            Script(
                f"examples/research_projects/tools/{name}.py",
                args,
                (NO_TOOLS, NO_WANDB, NO_AUTH, NO_ANSWER),
                (
                    NO_TOOL_IMPORT,
                    *_sizes(
                        (r"batch_size=256", "batch_size=8"), (r"mini_batch_size=64", "mini_batch_size=4")
                    ),
                    *_sizes((r"range\(100\)", "range(1)"), (r"range\(1, len\(ds\)\)", "range(9)")),
                    *_sizes((r'split="test"', 'split="test[:8]"')),
                ),
            )
            for name, args in (
                ("calculator", ""),
                (
                    "python_interpreter",
                    "--batch_size 8 --gradient_accumulation_steps 1 --max_new_tokens 8 --n_epochs 1",
                ),
                (
                    "triviaqa",
                    "--batch_size 8 --gradient_accumulation_steps 1 --max_new_tokens 8 --iterations 1",
                ),
            )
        ),
    ),
    changes={
        "tests/test_ppo_trainer.py": (NO_FOLDER, NO_TOKEN),
        "tests/test_sft_trainer.py": SAFETENSORS,
        "tests/test_peft_models.py": SAFETENSORS,
        "tests/*": (EVAL_STRATEGY,),
    },
    inside={
        "tests/test_modeling_value_head.py::*test_transformers_bf16_kwargs": "dtypes of torch modules",
        "tests/test_modeling_value_head.py::*test_from_save_transformers*": "state dicts of torch modules",
        "tests/test_modeling_value_head.py::ReferenceModelTest*": "gradients through a torch module",
        **{
            f"tests/test_ppo_trainer.py::*::test_{name}": "gradients of a torch module"
            for name in (
                "ppo_step",
                "ppo_step_with_masks",
                "ppo_step_with_no_ref*",
                "ppo_step_rewards_shape",
                "ppo_step_no_dataset",
                "ppo_trainer_max_grad_norm",
                "peft_model_ppo_trainer",
                "peft_model_ppo_adapter_rm_trainer",
            )
        },
        "tests/test_ddpo_trainer.py::*test_calculate_loss": "torch tensors between sampler and loss",
        "tests/test_ddpo_trainer.py::*test_generate_samples": "torch tensors between sampler and loss",
        "tests/test_no_peft.py::*test_ppo_trainer_no_peft": "gradients of a torch module",
        "tests/test_sft_trainer.py::*test_peft_sft_trainer": "asks for an object of PEFT",
        "tests/test_environments.py::*test_text_environment_run": "counts ids of GPT-2's own tokenizer",
    },
    known={
        "tests/test_modeling_value_head.py::*test_value_head_init_random": "a fresh value head says 0, by choice",
        "tests/test_modeling_value_head.py::Seq2Seq*test_generate": "a decoder begins with its start id alone",
        "tests/test_ppo_trainer.py::*test_drop_last_dataloader": "fewer rows than a batch are an error, by choice",
        "tests/test_reward_trainer.py::*assert_value_error": "said when the trainer is made, by choice",
        "tests/test_sft_trainer.py::*test_constant_length_dataset": "`len` is of the rows that come, by choice",
        "tests/test_sft_trainer.py::*infinite_with_model": "`train_dataset` stays as it was given",
        "tests/test_sft_trainer.py::*infinite_with_model_epochs": "a pass has the rows that come, by choice",
        "tests/test_sft_trainer.py::*uncorrect_data": "either form of `formatting_func` is taken, by choice",
    },
    stand_ins=old_stand_ins,
)

NEW = Seed(
    name="TRL 0.28.0",
    imports=IMPORTS,
    tests=("tests/test_*.py",),
    scripts=(),
    stand_ins=new_stand_ins,
    inside={
        "tests/test_cli_utils.py::*_config_with_*": "mocks `open` and `yaml.safe_load`",
        "tests/test_cli_utils.py::*_arg_override*": "mocks `open` and `yaml.safe_load`",
        "tests/test_cli_utils.py::*_with_config_defaults*": "mocks `open` and `yaml.safe_load`",
        "tests/test_cli_utils.py::*_trlparser_parses_yaml*": "the hub's name of its data, inside a YAML text",
    },
    not_taken={
        "tests/test_grpo_trainer.py": "not run yet: the trainer here is that of 1.16",
        "tests/test_rloo_trainer.py": "not run yet: the trainer here is that of 1.16",
        "tests/test_vllm_client_server.py": "`vllm-serve`: sampling is compiled with the model",
        "tests/test_activation_offloading.py": "moves torch's activations between devices",
        "tests/test_cli.py": "TRL's own command line",
        **{
            f"tests/test_{name}.py": "on no page that jrl follows"
            for name in (
                "callbacks",
                "chat_template_utils",
                "data_utils",
                "model_utils",
                "rich_progress_callback",
                "utils",
            )
        },
    },
)

if __name__ == "__main__":
    main({"v0.7.1": OLD, "v0.28.0": NEW}, ROOT / "docs" / "migrating" / "from_trl.md", "TRL's own files")

# SPDX-License-Identifier: Apache-2.0
"""What must hold of PPO's programs on accelerators, read from what their own compilers made of them.

Models have real widths and two layers.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import jax
import pytest
from transformers import Gemma2Config, GPT2Config, LlamaConfig, MixtralConfig, T5Config

import jrl
from jrl.mesh import abstract_mesh, path_name
from jrl.models.model import make_model
from jrl.trainers.plan.hlo import (
    collectives,
    entry_arguments,
    kernels,
    largest_arrays,
    loops,
    num_flops,
    num_sorts,
)
from jrl.trainers.plan.hlo_text import arrays_of, read_module, sites
from tests.aot.conftest import Compile, compile_recipe

pytestmark = pytest.mark.aot

ROWS, PROMPT, RESPONSE, EPOCHS = 128, 128, 64, 4
SCORES_BYTES = 256 << 20
NARROW = {"num_attention_heads": 8, "num_key_value_heads": 2, "num_hidden_layers": 2, "hidden_size": 1024}
MODELS: dict[str, Any] = {
    "gpt2": GPT2Config(n_layer=2),
    "llama": LlamaConfig(
        **{**NARROW, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 2048},
        intermediate_size=5632,
        vocab_size=32000,
    ),
    "gemma2": Gemma2Config(**NARROW, intermediate_size=4096, vocab_size=32000, head_dim=128),
    "mixtral": MixtralConfig(**NARROW, intermediate_size=3584, vocab_size=32000, num_local_experts=8),
    "t5": T5Config(
        d_model=768, d_kv=64, d_ff=3072, num_layers=2, num_decoder_layers=2, num_heads=12, vocab_size=32128
    ),
}
FUSED = ("gpt2", "llama", "mixtral")
"""Models whose attention cuDNN's kernel computes; Gemma 2 caps its scores, T5 has a learned bias."""
SPLASH = (*FUSED, "gemma2")
"""Models whose attention the splash kernel of TPUs computes."""


DECODING = "__gpu$xla.gpu.triton"
"""Target of Pallas's kernels on GPUs."""


class Case(NamedTuple):
    """A model, compiled.

    Attributes:
      name: Of the model.
      is_gpu: Whether the target is one.
      programs: Optimized HLO.
      mesh: Sizes that the target has.
    """

    name: str
    is_gpu: bool
    programs: dict[str, str]
    mesh: Any


CASES = [
    *(("gpu:h100x8", name, {"data": 2, "fsdp": 4, "tensor": 1}) for name in MODELS),
    ("gpu:h100x16", "llama", {"data": 2, "fsdp": 4, "tensor": 2}),
    ("tpu:v5e:2x4", "gpt2", {"data": 2, "fsdp": 4, "tensor": 1}),
]


@pytest.fixture(scope="module", params=CASES, ids=lambda case: f"{case[0]}-{case[1]}")
def case(request: pytest.FixtureRequest, compile_for: Compile) -> Case:
    target, name, sizes = request.param
    mesh = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    programs = compile_for(MODELS[name], target, mesh, ["sample", "score", "update"])
    return Case(
        name,
        target.startswith("gpu"),
        programs,
        abstract_mesh(**sizes, num_devices=math.prod(sizes.values())),
    )


def num_bytes(name: str, tensor: int) -> int:
    """Bytes of the kernels that decoding reads, in bfloat16, on one device."""
    lm = make_model(MODELS[name])
    shapes = jax.eval_shape(lm.init, jax.random.key(0))
    leaves = jax.tree_util.tree_leaves_with_path(shapes)
    read = [
        leaf.size
        for path, leaf in leaves
        if leaf.ndim > 1 and "encoder" not in (text := jax.tree_util.keystr(path)) and "position" not in text
    ]
    if not getattr(lm.config, "tie_embeddings", True):
        read.remove(shapes["embed"]["embedding"].size)  # of which a few rows are read
    return 2 * sum(read) // tensor


class TestSampling:
    def test_no_weight_is_gathered_for_a_token(self, case: Case) -> None:
        """Only whether all rows have ended goes over links in the loop; under `tensor` the sums of activations do, too,
        and the weights of blocks of the vocabulary, in which a draw looks for its token.
        """
        own_rows = ROWS // (case.mesh.shape["data"] * case.mesh.shape["fsdp"])
        blocks = 2 * math.isqrt(make_model(MODELS[case.name]).config.padded_vocab_size)
        for found in collectives(case.programs["sample"], case.mesh):
            if found.place and found.num_bytes > 1024:
                assert found.axes == {"tensor"}, found
                assert found.kind == "all-reduce" or found.num_bytes <= 4 * own_rows * blocks, found

    def test_weights_are_rounded_before_they_are_gathered(self, case: Case) -> None:
        """Excepted is the table to whose rows GPT-2 adds positions in float32."""
        for found in collectives(case.programs["sample"], case.mesh):
            if found.kind != "all-gather" or "fsdp" not in found.axes:
                continue
            for array in found.arrays:
                is_table = (
                    case.name == "gpt2" and MODELS["gpt2"].n_embd in array.shape and max(array.shape) > 50_000
                )
                assert array.dtype == "bf16" or array.num_bytes < 1 << 22 or is_table, found

    def test_the_vocabulary_is_not_sorted(self, case: Case) -> None:
        """Experts sort the few tokens of a step."""
        lines = [line for line in case.programs["sample"].splitlines() if re.search(r"[ =]sort\(", line)]
        assert len(lines) == num_sorts(case.programs["sample"])
        assert not any(str(MODELS[case.name].vocab_size) in line for line in lines)
        assert not lines or case.name == "mixtral"

    def test_a_token_reads_the_weights_and_the_cache_once(self, case: Case) -> None:
        if case.name == "t5":
            pytest.skip("the loop of T5 reads the keys of the prompt, too")
        config = make_model(MODELS[case.name]).config
        parts = case.mesh.shape["data"] * case.mesh.shape["fsdp"]
        columns, heads = PROMPT + RESPONSE - 1, config.num_kv_heads // case.mesh.shape["tensor"]
        cache = 2 * 2 * config.num_layers * (ROWS // parts) * heads * columns * config.head_dim
        token = max(loop.round_bytes for loop in loops(case.programs["sample"]) if not loop.place)
        needed = num_bytes(case.name, case.mesh.shape["tensor"]) + cache
        assert token <= 1.15 * needed, (token, needed)


class TestMemory:
    def test_no_array_of_all_scores(self, case: Case) -> None:
        """(rows, heads, queries, keys) in float32."""
        for name, text in case.programs.items():
            for kind, shape, size in largest_arrays(text, 40):
                is_scores = kind == "f32" and len(shape) >= 4 and shape[-1] == shape[-2]
                assert not (is_scores and size > SCORES_BYTES), (name, shape)

    def test_the_state_is_donated(self, case: Case) -> None:
        """Parameters and Adam's two moments come back where they were given."""
        text = case.programs["update"]
        header = text.partition("\n")[0]
        given = [int(number) for number in re.findall(r"\{\d+\}: \((\d+), \{\}, \w+-alias\)", header)]
        arguments = entry_arguments(text)
        shapes = jax.eval_shape(make_model(MODELS[case.name], value_head="mlp").init, jax.random.key(0))
        parts = case.mesh.shape["fsdp"] * case.mesh.shape["tensor"]
        state = 3 * 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes)) // parts
        # Norms and biases lie whole on every device.
        assert state <= sum(arguments[number].num_bytes for number in given) < 1.03 * state

    def test_kernels_of_the_optimizer_name_no_layer_of_a_body(self, case: Case) -> None:
        """They are then equal for all of its layers, and the compiler of TPUs writes them once."""
        if case.is_gpu:
            pytest.skip("layers run one by one")
        bodies = [
            {each.opcode for each in computation.instructions.values()}
            for computation in read_module(case.programs["update"]).computations.values()
        ]
        steps = [opcodes for opcodes in bodies if "sqrt" in opcodes and "fusion" not in opcodes]
        # Kernels and biases of attention and of the MLP, of both layers at once or of each.
        assert sum("dynamic-slice" in opcodes for opcodes in steps) >= 8
        assert not any("slice" in opcodes for opcodes in steps)

    def test_gpus_gather_the_kernels_of_a_layer_in_each_pass(self, case: Case) -> None:
        """So none stay whole from the forward pass to the backward pass. On TPUs a body of equal layers sees to it."""
        if not case.is_gpu:
            pytest.skip("gathers of a body are sent in rounds")
        shapes = jax.eval_shape(make_model(MODELS[case.name]).init, jax.random.key(0))
        needed = Counter(
            split_heads(leaf.shape, case.mesh.shape["tensor"])
            for path, leaf in jax.tree_util.tree_leaves_with_path(shapes)
            if re.search("/[qkvo]/kernel", path_name(path))
        )
        gathered = Counter(
            tuple(sorted(array.shape))
            for found in collectives(case.programs["update"], case.mesh)
            if found.kind == "all-gather" and found.axes == {"fsdp"}
            for array in found.arrays
        )
        assert needed and {shape: gathered[shape] for shape in needed} == {
            shape: 2 * count for shape, count in needed.items()
        }


def split_heads(shape: tuple[int, ...], parts: int) -> tuple[int, ...]:
    """Sizes of a kernel of attention on one device, sorted, as compilers lay it out anew."""
    heads, head_dim, width = shape if shape[0] < shape[2] else (shape[1], shape[2], shape[0])
    return tuple(sorted((heads // parts, head_dim, width)))


class TestKernels:
    def test_attention_of_whole_rows_is_one_kernel(self, case: Case) -> None:
        """Rows of up to 512 tokens have one kernel for the gradients of queries, keys and values."""
        served, score, gradient = (
            (FUSED, "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward")
            if case.is_gpu
            else (SPLASH, "splash_mha_fwd", "splash_mha_dkv")
        )
        for program, wanted in (("score", {score}), ("update", {score, gradient})):
            text = case.programs[program]
            found = {name for name in kernels(text) if "fmha" in name}
            found |= set(re.findall(r"%(splash_m[hq]a_[a-z]+)\w*[.\d]* = ", text))
            assert found == (wanted if case.name in served else set())

    def test_a_token_attends_by_one_kernel(self, case: Case) -> None:
        """On GPUs, in each layer. It writes the cache where it lies, and nothing chooses between lengths of it."""
        if not (case.is_gpu and case.name in FUSED):
            assert DECODING not in kernels(case.programs["sample"])
            return
        in_loop = [site.instruction for site in sites(read_module(case.programs["sample"])) if site.place]
        found = [it for it in in_loop if it.target == DECODING]
        assert len(found) == make_model(MODELS[case.name]).config.num_layers
        assert all(it.in_place == {1: 1, 2: 2} for it in found)
        caches = {array for it in found for array in arrays_of(it.result)[1:]}
        others = [
            it for it in in_loop if it.opcode in ("copy", "fusion") and caches & {*arrays_of(it.result)}
        ]
        choices = [it for it in in_loop if it.opcode == "conditional"]
        assert caches and not others and not choices


class TestUpdate:
    def test_it_computes_what_the_model_needs(self, case: Case) -> None:
        """At most 1.1 times: 6 FLOPs for each weight and token, and attention's products."""
        if case.name in ("t5", "mixtral"):
            pytest.skip("its tokens do not pass all weights")
        lm = make_model(MODELS[case.name])
        config, devices = lm.config, case.mesh.size
        shapes = jax.eval_shape(lm.init, jax.random.key(0))
        layers = [tree for name, tree in shapes.items() if name.startswith("layers_")]
        weights = sum(leaf.size for leaf in jax.tree.leaves(layers))
        head = config.padded_vocab_size * config.width
        tokens, actions = EPOCHS * ROWS * (PROMPT + RESPONSE), EPOCHS * ROWS * RESPONSE
        keys = (PROMPT + RESPONSE) * config.num_heads * config.head_dim * config.num_layers
        needed = 6 * tokens * weights + 6 * actions * head + 12 * tokens * keys
        # Value heads are not counted; they have a tenth of a percent.
        assert 0.8 * needed < num_flops(case.programs["update"], rounds=4) * devices < 1.1 * needed


@pytest.mark.parametrize("target", ["gpu:l4", "gpu:l40s", "gpu:rtx4090", "gpu:a100", "gpu:b200"])
def test_kernels_serve_gpus_that_are_no_hopper(target: str, compile_for: Compile) -> None:
    """Compute capability 8.9 has less than half of an H100's shared memory for a block, 10.0 other instructions.

    Heads are as wide as any that cuDNN's kernel takes there.
    """
    model = LlamaConfig(**NARROW, intermediate_size=4096, vocab_size=32000)
    assert model.head_dim == 128
    programs = compile_for(model, target, "data=1", ["sample", "update"])
    assert DECODING in kernels(programs["sample"])
    assert "__cudnn$fmhaSoftmaxBackward" in kernels(programs["update"])


def test_zeros_of_the_size_of_the_parameters_are_made_once(tmp_path: Path) -> None:
    """Sums of gradients begin with them. No other array of zeros lies beside these in an update of Llama on 8 H100."""
    MODELS["llama"].save_pretrained(tmp_path / "model")
    config = jrl.default_sft_config().evolve(
        model={"model_path": str(tmp_path / "model")},
        train={"seq_length": 192, "batch_size": 32, "minibatch_size": 16},
    )
    text = compile_recipe(config, tmp_path, "gpu:h100x8", "data=2,fsdp=4", ["update"])["update"]
    shapes = jax.eval_shape(make_model(MODELS["llama"]).init, jax.random.key(0))
    made = [
        array.num_bytes
        for site in sites(read_module(text))
        if not site.is_fused and site.instruction.opcode in ("broadcast", "fusion")
        for beside in [site.frame.computation.instructions]
        if all(beside[name].opcode == "constant" for name in site.instruction.operands)
        for array in arrays_of(site.instruction.result)
        if array.dtype == "f32"
    ]
    trained = 4 * sum(leaf.size for leaf in jax.tree.leaves(shapes)) // 4
    assert 0.5 * trained < sum(made) < 1.1 * trained


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_pieces_of_the_vocabulary_share_nothing_as_wide_as_one(name: str, compile_for: Compile) -> None:
    """A loop over pieces holds no array of (rows, positions, V), and reads a piece's logits twice to reduce them.

    GPT-2's vocabulary is padded, which takes a mask; Llama's is not.
    """
    text = compile_for(
        MODELS[name], "gpu:h100x1", "data=1", ["update"], train={"logprob_chunk_bytes": 64 << 20}
    )["update"]
    vocab_size = make_model(MODELS[name]).config.padded_vocab_size
    width = MODELS[name].hidden_size
    num_loops, module = 0, read_module(text)
    for site in sites(module):
        if site.instruction.opcode != "while":
            continue
        held = wide_arrays(site.instruction.result, vocab_size, width)
        assert not held, (site.instruction.name, held)
        body = module.computations[site.instruction.called["body"][0]].instructions
        reads = [
            array
            for it in body.values()
            if it.opcode == "fusion"
            and "reduce"
            in {part.opcode for part in module.computations[it.called["calls"][0]].instructions.values()}
            for operand in it.operands
            for array in wide_arrays(body[operand].result, vocab_size, width)
        ]
        num_loops += bool(reads)
        assert len(reads) <= 2, (site.instruction.name, reads)
    assert num_loops == 2, "forward and backward"


def wide_arrays(result: str, vocab_size: int, width: int) -> list[Any]:
    """Arrays of a type that have a column of the vocabulary for each of many positions; not a head's kernel."""
    return [
        array
        for array in arrays_of(result)
        if array.shape[-1:] == (vocab_size,) and math.prod(array.shape[:-1]) > 64 and array.shape[0] != width
    ]

# SPDX-License-Identifier: Apache-2.0
"""What is read from compiled programs is what was written: texts of a TPU's, a GPU's and the CPU's compiler."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jrl.mesh import abstract_mesh, make_mesh
from jrl.trainers.plan import hlo
from jrl.trainers.plan.hlo_text import Array
from tests.golden.make_hlo import (
    FEATURES,
    HEAD_WIDTH,
    HEADS,
    HIDDEN,
    KEYS,
    LAYERS,
    MICROBATCHES,
    POSITIONS,
    ROWS,
    SIZES,
    TOKENS,
    VOCAB,
    WIDTH,
    optimized,
)

GOLDEN = Path(__file__).parents[2] / "golden"
MESH = abstract_mesh(*SIZES, num_devices=8)
OWN = ROWS // 8  # rows of a device


def golden(name):
    return (GOLDEN / f"hlo_{name}.txt").read_text(encoding="utf-8")


def gathers(text):
    return [one for one in hlo.collectives(text, MESH) if one.kind == "all-gather"]


def assert_sampled(text, itemsize):
    """`sample` of make_hlo.py: what is gathered once and read for each token."""
    gathered = gathers(text)
    assert {(one.axes, one.group_size, one.place) for one in gathered} == {(frozenset({"fsdp"}), 4, ())}
    assert {shape for one in gathered for shape in one.shapes} == {(LAYERS, WIDTH, WIDTH), (VOCAB, WIDTH)}
    # Whether all rows have ended is asked of all devices, for every token.
    (asked,) = (one for one in hlo.collectives(text, MESH) if one.kind != "all-gather")
    assert (asked.kind, asked.axes, asked.place) == ("all-reduce", {"data", "fsdp"}, (None,))
    assert asked.op_name == "jit(sample)/while/cond/reduce_and"
    tokens, layers = hlo.loops(text)
    assert (tokens.op_name, tokens.trips, tokens.place) == ("jit(sample)/while", None, ())
    assert tokens.most_trips == TOKENS
    assert (layers.trips, layers.place) == (LAYERS, (None,))
    reads = {array.shape: size for array, size in zip(tokens.carried, tokens.reads, strict=True)}
    assert reads[VOCAB, WIDTH] == itemsize * VOCAB * WIDTH
    assert reads[LAYERS, WIDTH, WIDTH] == itemsize * LAYERS * WIDTH * WIDTH
    assert reads[OWN, TOKENS, WIDTH] == 4 * OWN * TOKENS * WIDTH  # written in place, then read whole
    reads = {array.shape: size for array, size in zip(layers.carried, layers.reads, strict=True)}
    assert reads[LAYERS, WIDTH, WIDTH] == itemsize * WIDTH * WIDTH  # one layer's slice
    token_flops = 2 * OWN * WIDTH * (LAYERS * WIDTH + VOCAB)
    assert hlo.num_flops(text, rounds=1) == token_flops
    assert hlo.num_flops(text, rounds=TOKENS) == TOKENS * token_flops
    assert hlo.num_flops(text, rounds=TOKENS + 99) == TOKENS * token_flops
    assert hlo.num_sorts(text) == 1


def assert_updated(text, itemsize):
    """`update` of make_hlo.py: what is gathered and reduced for each layer of each microbatch."""
    found = hlo.collectives(text, MESH)
    place = (MICROBATCHES, LAYERS)
    (gathered,) = (one for one in found if one.kind == "all-gather")
    assert (gathered.axes, gathered.place, gathered.num_bytes) == ({"fsdp"}, place, itemsize * WIDTH * WIDTH)
    assert gathered.sent_bytes == itemsize * WIDTH * WIDTH * 3 // 4
    (summed,) = (one for one in found if one.kind != "all-gather")
    assert (summed.kind, summed.axes, summed.place) == ("all-reduce", {"data", "fsdp"}, place)
    assert summed.sent_bytes == 2 * 4 * WIDTH * WIDTH * 7 // 8
    assert [loop.place for loop in hlo.loops(text)] == [(), (MICROBATCHES,), (MICROBATCHES,)]
    assert hlo.num_flops(text, rounds=99) == MICROBATCHES * LAYERS * 3 * 2 * OWN * WIDTH * WIDTH
    assert hlo.num_sorts(text) == 0


@pytest.mark.parametrize(("platform", "itemsize"), [("tpu", 2), ("gpu", 4)])
def test_what_a_sampler_moves_for_each_token(platform, itemsize):
    assert_sampled(golden(f"{platform}_sample"), itemsize)


@pytest.mark.parametrize(("platform", "itemsize"), [("tpu", 2), ("gpu", 4)])
def test_what_an_update_moves_for_each_layer(platform, itemsize):
    assert_updated(golden(f"{platform}_update"), itemsize)


@pytest.mark.mesh
def test_a_program_compiled_here_says_the_same():
    mesh = make_mesh(*SIZES)
    assert_sampled(optimized("sample", mesh), 4)
    assert_updated(optimized("update", mesh), 4)


def test_a_collective_spread_over_fusions_is_one():
    text = golden("tpu_feed_forward")
    assert text.count(" all-gather(") == 6 and text.count('"AsyncCollectiveStart"') == 1
    assert hlo.kernels(text) == {}
    found = sorted(one.shapes for one in gathers(text))
    assert found == 2 * [((FEATURES, HIDDEN),)] + 2 * [((HIDDEN, FEATURES),)]
    assert {(one.axes, one.place) for one in gathers(text)} == {(frozenset({"fsdp"}), ())}
    assert hlo.num_flops(text, rounds=1) == 4 * 2 * (POSITIONS // 8) * FEATURES * HIDDEN


def test_attention_of_cudnn_is_named_and_counted():
    text = golden("gpu_attention")
    assert hlo.kernels(text) == {"__cudnn$fmhaSoftmax": 1, "__cudnn$fmhaSoftmaxBackward": 1}
    assert hlo.num_flops(text, rounds=1) == 7 * 2 * OWN * HEADS * KEYS**2 * HEAD_WIDTH


def test_generated_kernels_of_a_gpu_are_named():
    assert hlo.kernels(golden("gpu_sample"))["__triton_nested_gemm_fusion"] == 2


def test_the_largest_arrays_are_those_held():
    found = hlo.largest_arrays(golden("gpu_sample"), 3)
    assert found[0] == ("f32", (VOCAB, WIDTH), 4 * VOCAB * WIDTH)
    sizes = [size for _, _, size in hlo.largest_arrays(golden("tpu_update"), 99)]
    assert sizes == sorted(sizes, reverse=True) and len(sizes) > 5


def test_what_lies_inside_a_fusion_is_not_held():
    fused = """
%fused (a: f32[8,16]) -> f32[8] {
  %a = f32[8,16]{1,0} parameter(0)
  %w = f32[8,16,99]{2,1,0} broadcast(%a), dimensions={0,1}
  %z = f32[] constant(0)
  ROOT %s = f32[8]{0} reduce(%w, %z), dimensions={1,2}, to_apply=%add
}
"""
    text = entry(PARAMETER, "ROOT %f = f32[8]{0} fusion(%p), kind=kLoop, calls=%fused", before=fused)
    assert hlo.largest_arrays(text, 9) == [("f32", (8, 16), 512), ("f32", (8,), 32)]


def test_what_a_program_is_given():
    assert hlo.entry_arguments(golden("tpu_sample")) == (
        Array("f32", (LAYERS, WIDTH // 4, WIDTH)),
        Array("f32", (VOCAB, WIDTH // 4)),
        Array("f32", (OWN, WIDTH)),
    )


def entry(*lines, before=""):
    return (
        f"HloModule m\n{before}\nENTRY %e () -> f32[] {{\n"
        + "\n".join(f"  {line}" for line in lines)
        + "\n}\n"
    )


PARAMETER = "%p = f32[8,16]{1,0} parameter(0)"


@pytest.mark.parametrize(
    ("groups", "axes", "size"),
    [
        # Devices of (data 2, fsdp 4): 0 1 2 3 / 4 5 6 7.
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", {"fsdp"}, 4),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", {"data"}, 2),
        ("replica_groups={}", {"data", "fsdp"}, 8),
        ("replica_groups={{0},{1},{2},{3},{4},{5},{6},{7}}", set(), 1),
        ("replica_groups=[2,4]<=[8]", {"fsdp"}, 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", {"data"}, 2),
        ("replica_groups=[1,8]<=[8]", {"data", "fsdp"}, 8),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", {"fsdp"}, 4),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", {"data"}, 2),
        ("replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", {"fsdp"}, 4),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", {"data"}, 2),
        ("replica_groups=mesh['a'=8] {'a':(2)4}", {"fsdp"}, 4),
        ("replica_groups=mesh['a1'=2,'a'=4] {'a'}", {"fsdp"}, 4),
    ],
)
def test_groups_of_devices_in_every_notation(groups, axes, size):
    text = entry(PARAMETER, f"%a = f32[8,16]{{1,0}} all-reduce(%p), channel_id=1, {groups}, to_apply=%add")
    (found,) = hlo.collectives(text, MESH)
    assert (found.axes, found.group_size, found.arrays) == (axes, size, (Array("f32", (8, 16)),))


@pytest.mark.parametrize(
    ("line", "kind", "sent"),
    [
        # 8 x 16 float32 are 512 bytes; a ring of four sends three quarters of what it makes.
        ("%a = f32[8,16]{1,0} all-gather(%p), GROUPS", "all-gather", 384),
        ("%a = (f32[2,16]{1,0}, f32[8,16]{1,0}) all-gather-start(%p), GROUPS", "all-gather", 384),
        ("%a = ((f32[2,4]{1,0}, f32[2,12]{1,0}), (f32[8,4]{1,0}, f32[8,12]{1,0})) all-gather-start(%p, %p), GROUPS",
         "all-gather", 384),
        ("%a = f32[8,16]{1,0} all-reduce(%p), GROUPS, to_apply=%add", "all-reduce", 768),
        ("%a = (f32[8,8]{1,0}, f32[8,8]{1,0}) all-reduce-start(%p, %p), GROUPS, to_apply=%add", "all-reduce", 768),
        ("%a = f32[2,16]{1,0} reduce-scatter(%p), GROUPS, to_apply=%add", "reduce-scatter", 384),
        ("%a = ((f32[8,16]{1,0}), f32[2,16]{1,0}) reduce-scatter-start(%p), GROUPS", "reduce-scatter", 384),
        ("%a = f32[8,16]{1,0} all-to-all(%p), GROUPS", "all-to-all", 384),
        ("%a = f32[8,16]{1,0} collective-permute(%p), source_target_pairs={{0,1},{1,2}}", "collective-permute", 512),
        ("%a = (f32[8,16]{1,0}, f32[8,16]{1,0}, u32[], u32[]) collective-permute-start(%p), "
         "source_target_pairs={{0,1},{1,2}}", "collective-permute", 512),
    ],
)  # fmt: skip
def test_bytes_that_a_device_sends(line, kind, sent):
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    (found,) = hlo.collectives(entry(PARAMETER, line.replace("GROUPS", groups)), MESH)
    assert (found.kind, found.sent_bytes, found.axes) == (kind, sent, {"fsdp"})


def test_an_all_reduce_fused_with_each_devices_slice_is_a_reduce_scatter():
    """As libtpu writes it; an all-reduce that is read whole beside stays one."""
    fused = """
%all-reduce-scatter.1 (input.10: bf16[8,16]) -> bf16[2,16] {
  %input.10 = bf16[8,16]{1,0} parameter(0)
  %all-reduce.171 = bf16[8,16]{1,0} all-reduce(%input.10), replica_groups={{0,1,2,3},{4,5,6,7}}, to_apply=%add
  %partition-id.59 = u32[] partition-id()
  %zero = u32[] constant(0)
  ROOT %dynamic-slice.1168 = bf16[2,16]{1,0} dynamic-slice(%all-reduce.171, %partition-id.59, %zero)
}
"""
    text = entry(
        "%p = bf16[8,16]{1,0} parameter(0)",
        "ROOT %f = bf16[2,16]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, "
        'metadata={op_name="jit(update)/dot_general"}',
        before=fused,
    )
    (found,) = hlo.collectives(text, MESH)
    assert (found.kind, found.arrays, found.axes) == ("reduce-scatter", (Array("bf16", (2, 16)),), {"fsdp"})
    assert (found.sent_bytes, found.op_name) == (3 * 64, "jit(update)/dot_general")
    text = text.replace("ROOT %dynamic-slice.1168", "%n = bf16[8,16]{1,0} negate(%all-reduce.171)\n  ROOT %d")
    (found,) = hlo.collectives(text, MESH)
    assert (found.kind, found.num_bytes) == ("all-reduce", 256)


def test_the_end_of_an_asynchronous_collective_is_not_another():
    groups = "replica_groups={{0,1,2,3},{4,5,6,7}}"
    text = entry(
        PARAMETER,
        f"%s = (f32[8,16]{{1,0}}, f32[32,16]{{1,0}}) all-gather-start(%p), {groups}",
        "%d = f32[32,16]{1,0} all-gather-done(%s)",
    )
    assert len(hlo.collectives(text, MESH)) == 1


def test_one_that_an_asynchronous_call_wraps_is_found():
    wrapped = (
        "%w (q: f32[8,16]) -> f32[8,16] {\n  %q = f32[8,16]{1,0} parameter(0)\n"
        "  ROOT %t = f32[8,16]{1,0} all-to-all(%q), replica_groups={{0,4},{1,5},{2,6},{3,7}}\n}\n"
    )
    text = entry(
        PARAMETER,
        "%s = ((f32[8,16]{1,0}), f32[8,16]{1,0}, u32[]) async-start(%p), calls=%w",
        "%d = f32[8,16]{1,0} async-done(%s), calls=%w",
        before=wrapped,
    )
    (found,) = hlo.collectives(text, MESH)
    assert (found.kind, found.axes) == ("all-to-all", {"data"})


def counted_loop(start, limit, direction, step):
    """A loop that counts, as a TPU's compiler writes it: constants copied, the limit carried along."""
    before = f"""
%body (b: (s32[], s32[])) -> (s32[], s32[]) {{
  %b = (s32[], s32[]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %n = s32[] get-tuple-element(%b), index=1
  %one = s32[] constant({step})
  %next = s32[] add(%i, %one)
  ROOT %r = (s32[], s32[]) tuple(%next, %n)
}}

%cond (c: (s32[], s32[])) -> pred[] {{
  %c = (s32[], s32[]) parameter(0)
  %j = s32[] get-tuple-element(%c), index=0
  %m = s32[] get-tuple-element(%c), index=1
  ROOT %l = pred[] compare(%j, %m), direction={direction}
}}
"""
    return entry(
        f"%z = s32[] constant({start})",
        "%k = s32[] copy(%z)",
        f"%limit = s32[] constant({limit})",
        "%t = (s32[], s32[]) tuple(%k, %limit)",
        "ROOT %w = (s32[], s32[]) while(%t), condition=%cond, body=%body",
        before=before,
    )


@pytest.mark.parametrize(
    ("start", "limit", "direction", "step", "trips"),
    [
        (0, 7, "LT", 1, 7),
        (2, 7, "LT", 2, 3),
        (0, 7, "LE", 1, 8),
        (7, 0, "GT", -1, 7),
        (7, 0, "GE", -3, 3),
        (0, 6, "NE", 2, 3),
        (0, 7, "NE", 2, None),
        (5, 5, "LT", 1, 0),
        (0, 7, "LT", -1, None),
        (0, 7, "EQ", 1, None),
    ],
)
def test_a_loop_that_counts_says_its_rounds(start, limit, direction, step, trips):
    (found,) = hlo.loops(counted_loop(start, limit, direction, step))
    assert (found.trips, found.most_trips) == (trips, trips)


def test_a_number_that_is_compared_one_ahead():
    text = counted_loop(0, 7, "LT", 1).replace(
        "%j = s32[] get-tuple-element(%c), index=0",
        "%o = s32[] constant(1)\n  %h = s32[] get-tuple-element(%c), index=0\n  %j = s32[] add(%o, %h)",
    )
    assert hlo.loops(text)[0].trips == 6


def test_a_limit_that_is_not_known_is_none():
    text = counted_loop(0, 7, "LT", 1).replace("%limit = s32[] constant(7)", "%limit = s32[] parameter(0)")
    assert hlo.loops(text)[0].trips is None
    assert hlo.loops(text)[0].most_trips is None


@pytest.mark.parametrize(
    ("limit", "direction", "step", "most"),
    [
        ("minimum(%given, %seven)", "LT", 1, 7),
        ("minimum(%given, %seven)", "LE", 2, 4),
        ("clamp(%zero, %given, %seven)", "LT", 1, 7),
        ("maximum(%given, %seven)", "LT", 1, None),
        ("minimum(%given, %seven)", "NE", 1, None),
    ],
)
def test_a_limit_of_which_a_part_is_known_says_how_many_at_most(limit, direction, step, most):
    text = counted_loop(0, 7, direction, step).replace(
        "%limit = s32[] constant(7)",
        "%given = s32[] parameter(0)\n  %seven = s32[] constant(7)\n  %zero = s32[] constant(0)\n"
        f"  %limit = s32[] {limit}",
    )
    (found,) = hlo.loops(text)
    assert (found.trips, found.most_trips) == (None, most)


def test_what_the_program_says_of_its_rounds_comes_first():
    text = counted_loop(0, 7, "LT", 1).replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert hlo.loops(text)[0].trips == 5


@pytest.mark.parametrize(
    ("rows", "features", "kernel", "given", "padding"),
    [
        ((9,), 3, (3,), {"window_strides": (2,)}, "SAME"),
        ((9, 8), 4, (3, 2), {"window_strides": (1, 2), "rhs_dilation": (2, 1)}, "SAME"),
        ((7, 7), 6, (3, 3), {"window_strides": (1, 1), "feature_group_count": 3}, "SAME"),
        ((5, 5), 2, (3, 3), {"window_strides": (1, 1), "lhs_dilation": (2, 2)}, ((1, 2), (2, 1))),
    ],
)
def test_operations_of_a_convolution_are_xlas(rows, features, kernel, given, padding):
    """XLA counts the same taps; what it adds for anything else is not in this program."""
    groups = given.get("feature_group_count", 1)
    inputs, kernel = jnp.ones((2, features, *rows)), jnp.ones((6, features // groups, *kernel))
    lowered = jax.jit(lambda x, k: lax.conv_general_dilated(x, k, padding=padding, **given)).lower(
        inputs, kernel
    )
    taps = lowered.compiler_ir("hlo").as_hlo_text()
    assert hlo.num_flops(taps, rounds=1) == lowered.cost_analysis()["flops"]


def test_a_batched_product_that_a_tpu_writes_as_a_convolution():
    """Of twelve heads, each meets its own kernel alone: 12 of 12 x 12 pairs, by padding and a reversed window."""
    text = entry(
        "%x = f32[16,768,1]{2,1,0} parameter(0)",
        "%k = f32[768,12,64]{2,1,0} parameter(1)",
        "%c = f32[16,12,64]{2,1,0} convolution(%x, %k), window={size=12 pad=11_11 rhs_reversal=1}, "
        "dim_labels=bf0_i0o->b0f",
    )
    assert hlo.num_flops(text, rounds=1) == 2 * 16 * 768 * 12 * 64


@pytest.mark.parametrize(
    ("call", "flops"),
    [
        ('custom_call_target="__cublas$lt$matmul", backend_config={"gemm_backend_config":{"dot_dimension_numbers":'
         '{"lhs_contracting_dimensions":["1"],"rhs_contracting_dimensions":["0"]}}}', 2 * 8 * 4 * 16),
        ('custom_call_target="tpu_custom_call", backend_config={"custom_call_config":{"body":"TUzv",'
         '"cost_estimate":{"flops":"4096","transcendentals":"0"}}}', 4096),
        ('custom_call_target="tpu_custom_call", backend_config={}', 0),
        ('custom_call_target="AllocateBuffer"', 0),
    ],
)  # fmt: skip
def test_operations_of_a_custom_call(call, flops):
    text = entry(
        PARAMETER,
        "%q = f32[16,4]{1,0} parameter(1)",
        f"%c = (f32[8,4]{{1,0}}, s8[64]{{0}}) custom-call(%p, %q), {call}",
    )
    assert hlo.num_flops(text, rounds=1) == flops
    assert sum(hlo.kernels(text).values()) == ("AllocateBuffer" not in call)


@pytest.mark.parametrize(
    ("result", "given", "target"),
    [
        ("outputs", "%inputs, %kernel", "__cudnn$convForward"),
        ("inputs", "%outputs, %kernel", "__cudnn$convBackwardInput"),
        ("kernel", "%inputs, %outputs", "__cudnn$convBackwardFilter"),
    ],
)
def test_operations_of_cudnns_convolutions(result, given, target):
    """All directions of one convolution make as many products; their dimensions are named as the forward one's."""
    shapes = {"inputs": "bf16[4,33,33,320]", "kernel": "bf16[640,3,3,320]", "outputs": "bf16[4,16,16,640]"}
    text = entry(
        *(f"%{name} = {shape}{{3,2,1,0}} parameter({at})" for at, (name, shape) in enumerate(shapes.items())),
        f"%c = ({shapes[result]}{{3,2,1,0}}, u8[0]{{0}}) custom-call({given}), window={{size=3x3 stride=2x2}}, "
        f'dim_labels=b01f_o01i->b01f, custom_call_target="{target}"',
    )
    assert hlo.num_flops(text, rounds=1) == 2 * 4 * (16 * 3) ** 2 * 320 * 640


@pytest.mark.parametrize(
    ("kernel", "products"),
    [
        ("splash_mha_fwd_residuals", 2),
        ("splash_mqa_dq_no_residuals", 3),
        ("splash_mha_dkv_no_residuals", 4),
        ("flash_mha_bwd_dq_block_q=128", 3),
        ("flash_mha_bwd_dkv_block_q=128", 4),
        ("my_own_kernel", 0),
    ],
)
def test_a_kernel_whose_attributes_go_on_over_lines(kernel, products):
    """As libtpu writes splash attention, with figures of its own for a profiler."""
    text = entry(
        "%m = s8[1,4,4]{2,1,0} parameter(0)",
        "%q = bf16[4,8,512,128]{3,2,1,0} parameter(1)",
        "%k = bf16[4,2,256,128]{3,2,1,0} parameter(2)",
        '%c = bf16[4,8,512,128]{3,2,1,0} custom-call(%m, %q, %k, %k), custom_call_target="tpu_custom_call", '
        "frontend_attributes={kernel_metadata={\n"
        '"xprof_metadata":"{\\"block_q\\": 128, \\"q_layout\\": 1}"\n'
        f'}}}}, metadata={{op_name="jit(f)/{kernel}/pallas_call"}}',
        "ROOT %s = bf16[4,8,512,128]{3,2,1,0} sort(%c), dimensions={3}, to_apply=%less",
    )
    assert hlo.num_flops(text, rounds=1) == products * 2 * 4 * 8 * 512 * 128 * 256
    assert hlo.kernels(text) == {"tpu_custom_call": 1} and hlo.num_sorts(text) == 1


@pytest.mark.parametrize(("queries_too", "products"), [("", 4), ("bf16[4,1,8,512,128]{4,3,2,1,0}, ", 5)])
def test_a_kernel_that_makes_all_three_gradients_has_a_product_more(queries_too, products):
    """As libtpu writes splash attention's: what it adds up in, then the gradients."""
    sums, keys = "f32[4,256,128]{2,1,0}", "bf16[4,2,256,128]{3,2,1,0}"
    text = entry(
        "%q = bf16[4,8,512,128]{3,2,1,0} parameter(0)",
        f"%k = {keys} parameter(1)",
        f"%c = ({sums}, {sums}, {queries_too}{keys}, {keys}) custom-call(%q, %k, %k), "
        'custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/splash_mha_dkv_segmented_no_residuals"}',
    )
    assert hlo.num_flops(text, rounds=1) == products * 2 * 4 * 8 * 512 * 128 * 256


APPENDING = """%q = bf16[4,18,64]{2,1,0} parameter(0)
  %k = bf16[4,2,512,64]{3,2,1,0} parameter(1)
  %v = bf16[4,2,512,64]{3,2,1,0} parameter(2)
  ROOT %c = (bf16[4,2,7,64]{3,2,1,0}, bf16[4,2,512,64]{3,2,1,0}, bf16[4,2,512,64]{3,2,1,0}) custom-call(%q, %k, %v), \
custom_call_target="__gpu$xla.gpu.triton", output_to_operand_aliasing={{1}: (1, {}), {2}: (2, {})}, \
metadata={op_name="jit(f)/attn._attend/attend_spans/pallas_call"}"""
"""As XLA writes the decoding kernel, which is given the newest keys and values behind the queries."""


def test_the_decoding_kernel_of_gpus_has_two_products():
    text = entry(APPENDING)
    assert hlo.num_flops(text, rounds=1) == 2 * 2 * 4 * 2 * 7 * 64 * 512


def test_the_decoding_kernel_reads_a_cache_and_does_not_write_it_anew():
    cache, queries, given = 2 * 4 * 2 * 512 * 64, 2 * 4 * 14 * 64, 2 * 4 * 18 * 64
    (kernel,) = hlo.work(entry(APPENDING), rounds=1)
    assert kernel.num_bytes == 2 * cache + given + queries
    # Any other may write all of what it is given.
    (kernel,) = hlo.work(entry(APPENDING.replace("attend_spans", "my_own")), rounds=1)
    assert kernel.num_bytes == 4 * cache + given + queries


def test_what_a_kernel_has_written_in_place_is_read_on():
    kinds, array = "(s32[], f32[64,16])", "f32[64,16]{1,0}"
    body = f"""
%body (b: {kinds}) -> {kinds} {{
  %b = {kinds} parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %w = {array} get-tuple-element(%b), index=1
  %k = {array} custom-call(%i, %w), custom_call_target="mine", output_to_operand_aliasing={{{{}}: (1, {{}})}}
  %d = f32[4,16]{{1,0}} dynamic-slice(%k, %i, %i), dynamic_slice_sizes={{4,16}}
  ROOT %r = {kinds} tuple(%i, %k)
}}

%cond (c: {kinds}) -> pred[] {{
  ROOT %p = pred[] constant(true)
}}
"""
    loop = f"ROOT %l = {kinds} while(%g), condition=%cond, body=%body"
    (found,) = hlo.loops(entry(f"%g = {kinds} parameter(0)", loop, before=body))
    assert found.reads[1] == 4 * (64 + 4) * 16


def test_sorts_of_a_library_count():
    text = entry(
        PARAMETER,
        "%s = f32[8,16]{1,0} sort(%p), dimensions={1}, to_apply=%less",
        '%r = (f32[128]{0}, u8[9]{0}) custom-call(%p), custom_call_target="__cub$DeviceRadixSort"',
    )
    assert hlo.num_sorts(text) == 2


@pytest.mark.parametrize(
    ("dtype", "size"),
    [("f32", 24), ("bf16", 12), ("pred", 6), ("s4", 3), ("f8e4m3fn", 6), ("c64", 48), ("token", 0)],
)
def test_bytes_of_an_array(dtype, size):
    assert Array(dtype, (2, 3)).num_bytes == size
    assert Array(dtype, (2, 3)).is_float is (dtype in ("f32", "bf16", "f8e4m3fn"))


def test_a_text_that_is_no_program_is_refused():
    with pytest.raises(
        ValueError, match=r"must be optimized HLO with an ENTRY computation.*got 5 characters"
    ):
        hlo.loops("hello")


def test_bytes_that_a_round_of_a_loop_reads():
    """Four rows sliced inside a fusion; a table by one branch of two; of a cache, written in place, eight rows."""
    before = """
%sliced (a: f32[64,16], o: s32[]) -> f32[4,16] {
  %a = f32[64,16]{1,0} parameter(0)
  %o = s32[] parameter(1)
  %zero = s32[] constant(0)
  %d = f32[4,16]{1,0} dynamic-slice(%a, %o, %zero), dynamic_slice_sizes={4,16}
  ROOT %n = f32[4,16]{1,0} negate(%d)
}

%written (e: f32[64,16], h: f32[4,16], j: s32[]) -> f32[64,16] {
  %e = f32[64,16]{1,0} parameter(0)
  %h = f32[4,16]{1,0} parameter(1)
  %j = s32[] parameter(2)
  %nought = s32[] constant(0)
  ROOT %now = f32[64,16]{1,0} dynamic-update-slice(%e, %h, %j, %nought)
}

%squared (k: f32[64,16]) -> f32[64,16] {
  %k = f32[64,16]{1,0} parameter(0)
  ROOT %kk = f32[64,16]{1,0} multiply(%k, %k)
}

%reads (x: f32[64,16]) -> f32[64,16] {
  %x = f32[64,16]{1,0} parameter(0)
  ROOT %y = f32[64,16]{1,0} fusion(%x), kind=kLoop, calls=%squared
}

%skips (u: f32[64,16]) -> f32[64,16] {
  %u = f32[64,16]{1,0} parameter(0)
  %v = f32[] constant(0)
  ROOT %s = f32[64,16]{1,0} broadcast(%v), dimensions={}
}

%body (b: (s32[], f32[64,16], f32[64,16], f32[64,16])) -> (s32[], f32[64,16], f32[64,16], f32[64,16]) {
  %b = (s32[], f32[64,16], f32[64,16], f32[64,16]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %w = f32[64,16]{1,0} get-tuple-element(%b), index=1
  %t = f32[64,16]{1,0} get-tuple-element(%b), index=2
  %f = f32[4,16]{1,0} fusion(%w, %i), kind=kLoop, calls=%sliced
  %zero = s32[] constant(0)
  %m = f32[64,16]{1,0} get-tuple-element(%b), index=3
  %u = f32[64,16]{1,0} fusion(%m, %f, %i), kind=kLoop, calls=%written
  %q = f32[8,16]{1,0} dynamic-slice(%u, %i, %zero), dynamic_slice_sizes={8,16}
  %p = pred[] constant(true)
  %c = f32[64,16]{1,0} conditional(%p, %t, %t), true_computation=%reads, false_computation=%skips
  ROOT %r = (s32[], f32[64,16], f32[64,16], f32[64,16]) tuple(%i, %w, %c, %u)
}

%cond (c: (s32[], f32[64,16], f32[64,16], f32[64,16])) -> pred[] {
  ROOT %k = pred[] constant(true)
}
"""
    kinds = "(s32[], f32[64,16], f32[64,16], f32[64,16])"
    text = entry(
        f"%g = {kinds} parameter(0)",
        f"ROOT %l = {kinds} while(%g), condition=%cond, body=%body",
        before=before,
    )
    (loop,) = hlo.loops(text)
    assert loop.trips is None
    assert loop.reads[1:] == (4 * 4 * 16, 4 * 64 * 16, 4 * 8 * 16)
    assert loop.round_bytes == sum(loop.reads)


WORK = """
%product (a: bf16[64,16], o: s32[], v: f32[16]) -> f32[4] {
  %a = bf16[64,16]{1,0} parameter(0)
  %o = s32[] parameter(1)
  %zero = s32[] constant(0)
  %d = bf16[4,16]{1,0} dynamic-slice(%a, %o, %zero), dynamic_slice_sizes={4,16}
  %v = f32[16]{0} parameter(2)
  ROOT %r = f32[4]{0} dot(%d, %v), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%written (e: f32[64,4], h: f32[4], j: s32[]) -> (f32[64,4], f32[4]) {
  %e = f32[64,4]{1,0} parameter(0)
  %h = f32[4]{0} parameter(1)
  %row = f32[1,4]{1,0} bitcast(%h)
  %j = s32[] parameter(2)
  %nought = s32[] constant(0)
  %n = f32[4]{0} negate(%h)
  %now = f32[64,4]{1,0} dynamic-update-slice(%e, %row, %j, %nought)
  ROOT %both = (f32[64,4], f32[4]) tuple(%now, %n)
}

%processed (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %wide = f32[4,99]{1,0} broadcast(%x), dimensions={0}
  ROOT %sum = f32[4]{0} reduce(%wide, %x), dimensions={1}, to_apply=%add
}

%unchanged (u: f32[4]) -> f32[4] {
  %u = f32[4]{0} parameter(0)
  ROOT %y = f32[4]{0} exponential(%u)
}

%body (b: (s32[], bf16[64,16], f32[64,4])) -> (s32[], bf16[64,16], f32[64,4]) {
  %b = (s32[], bf16[64,16], f32[64,4]) parameter(0)
  %i = s32[] get-tuple-element(%b), index=0
  %w = bf16[64,16]{1,0} get-tuple-element(%b), index=1
  %c = f32[64,4]{1,0} get-tuple-element(%b), index=2
  %here = f32[16]{0:T(128)S(1)} custom-call(), custom_call_target="AllocateBuffer"
  %p = f32[4]{0} fusion(%w, %i, %here), kind=kOutput, calls=%product
  %t = pred[] constant(true)
  %chosen = f32[4]{0} conditional(%t, %p, %p), true_computation=%processed, false_computation=%unchanged
  %f = (f32[64,4]{1,0}, f32[4]{0:T(128)S(1)}) fusion(%c, %chosen, %i), kind=kLoop, calls=%written
  %u = f32[64,4]{1,0} get-tuple-element(%f), index=0
  ROOT %r = (s32[], bf16[64,16], f32[64,4]) tuple(%i, %w, %u)
}

%cond (c: (s32[], bf16[64,16], f32[64,4])) -> pred[] {
  ROOT %k = pred[] constant(true)
}
"""


def test_what_a_kernel_computes_and_moves():
    """Of slices what is sliced, of what is written in place what is new, of two branches the cheaper one; nothing for
    on-chip memory.
    """
    kinds = "(s32[], bf16[64,16], f32[64,4])"
    loop = (
        'while(%g), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"5"}}',
        "copy-start(%q)",
        'custom-call(%h, %h), custom_call_target="__cublas$gemm", '
        'backend_config={"lhs_contracting_dimensions":["1"]}',
    )
    text = entry(
        f"%g = {kinds} parameter(0)",
        "%q = f32[128]{0} parameter(1)",
        "%h = bf16[8,8]{1,0} parameter(2)",
        f"%ahead = (f32[128]{{0:S(1)}}, f32[128]{{0}}, u32[]{{:S(2)}}) {loop[1]}",
        f"%m = (f32[8,8]{{1,0}}, s8[4096]{{0}}) {loop[2]}",
        f"ROOT %l = {kinds} {loop[0]}",
        before=WORK,
    )
    assert hlo.work(text, rounds=1) == [
        (0.0, 4 * 128, 1),  # fetched to where the next kernel finds it
        (2.0 * 8 * 8 * 8, 2 * 64 + 4 * 64, 1),  # both operands are one array; its scratch holds nothing
        (2.0 * 4 * 16, 2 * 4 * 16 + 4 + 4 * 4, 5),
        (0.0, 4 * 4 + 4 * 4, 5),
        (0.0, 4 * 4 + 4 + 4 * 4, 5),
    ]


@pytest.mark.parametrize("name", ["tpu_sample", "tpu_update", "gpu_sample", "gpu_update"])
def test_kernels_together_compute_the_whole(name):
    text = golden(name)
    made = sum(kernel.flops * kernel.rounds for kernel in hlo.work(text, rounds=TOKENS))
    assert made == hlo.num_flops(text, rounds=TOKENS) > 0

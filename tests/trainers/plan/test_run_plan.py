# SPDX-License-Identifier: Apache-2.0
"""The plan of a recipe is what its arrays then take."""

import copy
import threading
import time

import jax
import jax.numpy as jnp
import pytest
import yaml
from jax.sharding import AbstractDevice
from transformers import GPT2Config, LlamaConfig, T5Config

import jrl
from benchmarks.compiled_plans import RECIPES, RESULTS, TARGETS, recorded, with_layers
from jrl.api import prepare
from jrl.cli import main
from jrl.learners.dpo_config import DPOConfig
from jrl.learners.grpo_algorithms import algorithm
from jrl.learners.sft import SFTConfig
from jrl.mesh import abstract_mesh
from jrl.models.cost import device_bytes
from jrl.models.model import make_model
from jrl.trainers.config.method import footprint_of
from jrl.trainers.config.registry import get_trainer
from jrl.trainers.plan.model_part import model_part
from jrl.trainers.plan.run_plan import RunPlan, plan_run
from jrl.trainers.plan.targets import parse_target
from jrl.trainers.ppo import PPOTrainer
from jrl.typing import ModelInputs
from tests.models.family_cases import CASES
from tests.models.family_cases_gemma4 import CASES as GEMMA4
from tests.recipe_shapes import ARCHITECTURES
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, save_tiny_checkpoint

TINY = LlamaConfig(
    hidden_size=32,
    num_hidden_layers=3,
    num_attention_heads=4,
    intermediate_size=64,
    vocab_size=97,
    max_position_embeddings=64,
    tie_word_embeddings=False,
)
AT_WORK, LOGITS, GRADIENT = "in a layer", "while it reads logits", "in the gradient of logits"
RECOMPUTED = "activations of the layer computed again"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_tiny_checkpoint(tmp_path_factory.mktemp("plan") / "tiny")


def test_a_mesh_must_multiply_to_the_devices():
    assert dict(abstract_mesh(fsdp=4, num_devices=8).shape) == {"data": 2, "fsdp": 4, "tensor": 1}
    with pytest.raises(ValueError, match="`mesh` must multiply to the number of devices, 8; got data=3"):
        abstract_mesh(data=3, num_devices=8)


def planned(config, *, model=TINY, mesh=None, **train):
    config = config.evolve(model={"model_path": model}, train={"batch_size": 4, "seq_length": 16} | train)
    mesh = mesh or {"fsdp": 4}
    return plan_run(config, abstract_mesh(**mesh, num_devices=4))


@pytest.mark.parametrize(
    ("settings", "asked"),
    [
        ({}, False),
        ({"sync_ref_model": True}, True),
        ({"precompute_ref_log_probs": False}, True),
        ({"precompute_ref_log_probs": True}, False),
    ],
)
def test_which_reference_of_dpo_stays(settings, asked):
    assert DPOConfig(**settings).asks_reference is asked


@pytest.mark.slow
def test_remat_holds_the_activations_of_one_layer_beside_the_inputs_of_all():
    config = jrl.default_sft_config()
    whole, again = (planned(config, remat=remat).learning["in a layer"] for remat in (False, True))
    kept = "activations of a microbatch"
    assert whole[RECOMPUTED] == 0 < again[kept] < whole[kept]
    assert again[RECOMPUTED] == (whole[kept] - again[kept]) // 3


@pytest.mark.slow
def test_heads_that_queries_share_are_split():
    config = jrl.default_sft_config()
    shared = LlamaConfig(
        **(TINY.to_dict() | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 4})
    )
    whole, split = (
        planned(config, model=shared, mesh={"data": 4 // n, "tensor": n}, seq_length=64) for n in (1, 2)
    )
    kept = "activations of a microbatch"
    # Twice the rows on half of the heads; the stream is whole.
    assert split.learning[AT_WORK][kept] < 1.5 * whole.learning[AT_WORK][kept]


@pytest.mark.slow
def test_channels_of_a_scan_are_split():
    whole, split = (
        planned(jrl.default_sft_config(), model=CASES["jamba-odd"], mesh={"data": 4 // n, "tensor": n})
        for n in (1, 2)
    )
    kept = "activations of a microbatch"
    # Twice the rows on half of the channels. What is as wide as the stream or the state is whole: 2.04 times were none.
    assert split.learning[AT_WORK][kept] < 1.6 * whole.learning[AT_WORK][kept]


@pytest.mark.parametrize("rows", [2, 4, 32])
def test_rows_as_many_as_heads_are_not_split_over_tensor(rows):
    config, mesh = jrl.default_sft_config(), {"data": 2, "tensor": 2}
    shared = LlamaConfig(**(TINY.to_dict() | {"num_attention_heads": 4, "num_key_value_heads": 2}))
    found, other = (
        planned(config, model=shared, mesh=mesh, batch_size=size, seq_length=16).learning[AT_WORK]
        for size in (rows, 3 * rows)
    )
    kept = "activations of a microbatch"
    assert other[kept] == 3 * found[kept]


@pytest.mark.slow
def test_rows_that_do_not_divide_are_computed_on_every_device():
    config = jrl.default_sft_config()
    five, four, twenty = (planned(config, batch_size=n) for n in (5, 4, 20))
    for name in ("activations of a microbatch", "logits"):
        assert five.learning[LOGITS][name] == twenty.learning[LOGITS][name] == 5 * four.learning[LOGITS][name]
    split = {"fsdp": 2, "tensor": 2}
    three, six = (planned(config, batch_size=n, mesh=split).step_traffic for n in (3, 6))
    assert three["tensor: activations summed"] == six["tensor: activations summed"] > 0


@pytest.mark.slow
def test_scoring_gathers_the_policy_and_the_whole_reference():
    plan = planned(jrl.default_ppo_config().evolve(model={"num_layers_unfrozen": -1}))
    policy = plan.token_traffic["fsdp: parameters gathered, once a call"]
    head = policy - (plan.score_traffic["fsdp: parameters gathered"] - policy)
    # The reference has all but the value head; three quarters of a kernel come from elsewhere.
    value = 32 * 64 + 64 + 64 + 1
    assert 0 < head <= 3 * value
    assert "sent by each device in scoring" in plan.table()
    assert planned(jrl.default_sft_config()).score_traffic == {}


def test_the_reference_of_an_adapter_is_a_pass_of_its_own():
    config = jrl.default_ppo_config().evolve(model={"num_layers_unfrozen": -1})
    adapter = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": ["q_proj"]}
    whole, adapted = (
        planned(one, mesh={"data": 2, "tensor": 2}).score_traffic["tensor: activations summed"]
        for one in (config, config.evolve(model={"peft_config": adapter}))
    )
    assert whole == adapted > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("method", "copies", "asked"),
    [
        ({}, 0, False),
        ({"sync_ref_model": True}, 1, True),
        ({"precompute_ref_log_probs": False}, 1, True),
        ({"precompute_ref_log_probs": False, "ref_model_path": TINY}, 1, True),
        ({"ref_model_path": TINY}, 0, False),
    ],
    ids=["asked once", "moves", "stands", "own", "own, asked once"],
)
def test_a_reference_that_dpo_keeps_is_counted(method, copies, asked):
    plan = planned(jrl.default_dpo_config().evolve(method=method))
    held = plan.held
    assert held["reference's own parameters"] == copies * held["parameters that train"]
    gathered = plan.score_traffic.get("fsdp: parameters gathered", 0)
    assert 2 * gathered == asked * plan.step_traffic["fsdp: parameters gathered, forward and backward"]


@pytest.mark.slow
def test_a_reference_that_the_update_reads_is_counted():
    config = jrl.default_grpo_config().evolve(model={"num_layers_unfrozen": -1}, method={"beta": 0.1})
    plan, scored = (planned(config.evolve(method={"kl_estimator": name})) for name in ("full", "k2"))
    assert plan.held == scored.held
    assert plan.held["reference's own parameters"] == plan.held["parameters that train"]
    sent = plan.step_traffic
    passes = "fsdp: parameters gathered, forward and backward"
    assert 2 * sent["reference, fsdp: parameters gathered"] == sent[passes] > 0
    assert {name: size for name, size in sent.items() if "reference" not in name} == scored.step_traffic


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


@pytest.mark.parametrize("sent", [0, 1])
def test_what_is_never_sent_is_not_listed(sent):
    """As on one device; whatever is held is listed, be it nothing."""
    traffic = {"fsdp: parameters gathered": sent, "tensor: activations summed": 0}
    plan = RunPlan(
        "m", {"data": 1}, 1, {"frozen parameters": 0}, {"in a layer": {}}, {}, traffic, traffic, traffic
    )
    table = plan.table()
    assert table.count("sent by each device") == table.count("activations summed") == 3 * sent
    assert "frozen parameters" in table


@pytest.mark.slow
def test_splitting_divides_what_is_held_and_costs_traffic(checkpoint, tmp_path):
    config = ppo_config(checkpoint, tmp_path)
    one, split = (plan_run(config, abstract_mesh(data=1, fsdp=n, num_devices=n)) for n in (1, 4))
    # Norms and biases lie whole on every device.
    assert one.held["optimizer"] / 4 < split.held["optimizer"] < one.held["optimizer"] / 3
    assert split.step_traffic["fsdp: parameters gathered, forward and backward"] > 0
    assert split.sampling["parameters, as sampling reads them"] == sum(
        one.held[name] for name in ("parameters that train", "frozen parameters")
    )


@pytest.mark.slow
def test_the_command_says_whether_it_fits(checkpoint, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(ppo_config(checkpoint, tmp_path).to_dict()))
    assert main(["plan", "--config", str(recipe), "--mesh", "fsdp=4", "--hbm", "1"]) == 0
    printed = capsys.readouterr().out
    assert "fits into 1.0 GiB" in printed and "XLA_CLIENT_MEM_FRACTION" not in printed


def test_the_command_says_where_a_gpu_must_be_told_to_give_more(checkpoint, tmp_path, capsys):
    config = ppo_config(checkpoint, tmp_path)
    total = plan_run(config, abstract_mesh(num_devices=1)).total
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(config.to_dict()))
    said = {}
    for share in (0.74, 0.76, 1.01):
        assert main(["plan", "--config", str(recipe), "--hbm", str(total / share / 2**30)]) == 0
        printed = capsys.readouterr().out
        said[share] = "does not fit" not in printed, "XLA_CLIENT_MEM_FRACTION" in printed
    assert said == {0.74: (True, False), 0.76: (True, True), 1.01: (False, False)}


def test_a_kind_of_device_is_planned_as_for_a_mesh_of_such_devices():
    """What `jrl plan --compile` plans beside the compiler's figures, which needs the compiler, is on file."""
    row = next(
        row for row in recorded(RESULTS) if (row["recipe"], row["target"]) == ("ppo_imdb", "gpu:h100x8")
    )
    config = jrl.TRLConfig.load_recipe(row["recipe"])
    model = with_layers(ARCHITECTURES[RECIPES[row["recipe"]]](), row["layers"])
    target = parse_target(row["target"])
    sizes = TARGETS[row["target"]]
    mesh, unknown = (abstract_mesh(*sizes, num_devices=8, device=device) for device in (target.device, None))
    config = config.evolve(model={"model_path": model})
    found = plan_run(config, mesh)
    assert sum(found.held.values()) == row["held_planned"]
    for name, planned in found.program_bytes.items():
        assert planned == pytest.approx(row["programs"][name]["planned"], rel=1e-6)
    assert plan_run(config, unknown).step_bytes > found.step_bytes


@pytest.mark.parametrize(
    ("evaluations", "rollouts", "same_as"),
    [(16, {"max_new_tokens": 120}, 120), (120, {"max_new_tokens": 16}, 16), ([120, 16], None, 120)],
)
def test_prompts_are_those_of_rollouts(evaluations, rollouts, same_as, checkpoint):
    def planned(gen_kwargs, gen_experience_kwargs=None):
        config = jrl.default_ppo_config().evolve(
            model={"model_path": checkpoint},
            train={"seq_length": 128, "batch_size": 32},
            method={
                "gen_kwargs": gen_kwargs,
                "gen_experience_kwargs": gen_experience_kwargs,
                "num_rollouts": 32,
                "chunk_size": 32,
            },
        )
        return plan_run(config, abstract_mesh(num_devices=1))

    found = planned({"max_new_tokens": evaluations}, rollouts)
    assert found.sampling == planned({"max_new_tokens": same_as}).sampling
    assert found.sampling != planned({"max_new_tokens": 136 - same_as}).sampling


@pytest.mark.parametrize("method", ["sft", "ilql"])
def test_an_evaluation_samples_where_the_algorithm_does_not(method, checkpoint, tmp_path):
    """A smaller optimizer batch makes its calls smaller."""
    defaults = {"sft": jrl.default_sft_config, "ilql": jrl.default_ilql_config}[method]()
    config = defaults.evolve(model={"model_path": checkpoint}, train={"seq_length": 64})
    large, small = (
        plan_run(config.evolve(train={"batch_size": rows}), abstract_mesh(num_devices=1)) for rows in (64, 32)
    )
    assert large.sampling["cache"] == pytest.approx(2 * small.sampling["cache"], rel=1e-3)
    assert large.program_bytes["sample"] == sum(large.sampling.values())


def test_sampling_reads_q_heads_and_not_their_targets(checkpoint):
    """Over `fsdp` they are made whole: in float32, and on TPUs as products read them."""
    config = jrl.default_ilql_config().evolve(model={"model_path": checkpoint}, train={"seq_length": 64})

    def further_head(read, name, mesh):
        """Bytes by which a plan has more of something with a second Q head."""
        two, one = (plan_run(config.evolve(method={"two_qs": two_qs}), mesh) for two_qs in (True, False))
        return read(two)[name] - read(one)[name]

    one_device = abstract_mesh(num_devices=1)
    head_and_target = further_head(lambda plan: plan.held, "parameters that train", one_device)
    for name, parts in (("gpu:h100x2", 2), ("tpu:v5e:2x2", 4)):
        target = parse_target(name)
        mesh = abstract_mesh(fsdp=-1, data=1, num_devices=target.num_devices, device=target.device)
        found = further_head(lambda plan: plan.sampling, "parameters, as sampling reads them", mesh)
        assert found == head_and_target // parts, name


def test_a_target_is_planned_for(checkpoint, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(ppo_config(checkpoint, tmp_path).to_dict()))
    command = ["plan", "--config", str(recipe), "--mesh", "fsdp=2", "--target", "gpu:rtx4090x2"]
    assert main([*command, "--method.chunk_size", "16000000", "--method.num_rollouts", "16000000"]) == 1
    assert "does not fit into 22.4 GiB" in capsys.readouterr().out
    assert main(command) == 0
    printed = capsys.readouterr().out
    # A twentieth of 23.6 GiB is CUDA's.
    assert (
        "fits into 22.4 GiB" in printed and "fsdp=2" in printed and "XLA_CLIENT_MEM_FRACTION" not in printed
    )


def test_a_method_that_is_not_planned_is_refused():
    class Unknown(SFTConfig):
        """Nobody has said what it holds."""

    config = jrl.default_sft_config()
    config.method = Unknown()
    with pytest.raises(ValueError, match=r"`method\.name` must be one of \['PPOConfig', .* to be planned"):
        plan_run(config, abstract_mesh(num_devices=1))


def test_a_flat_recipe_is_told_from_a_nested_one(capsys):
    assert main(["plan", "--config", "dpo_llama2_7b_lora"]) == 2
    error = capsys.readouterr().err
    assert "dpo_llama2_7b_lora has TRL's flat fields" in error and error.count("\n") == 1


def test_sampling_in_bfloat16_rounds_the_kernels_before_it_gathers_them():
    exact, rounded = (
        planned(jrl.default_ppo_config(), compute_dtype=dtype) for dtype in ("float32", "bfloat16")
    )
    name, sent = "parameters, as sampling reads them", "fsdp: parameters gathered, once a call"
    # Norms and the value head, which stay, are small.
    assert 0.5 < rounded.sampling[name] / exact.sampling[name] < 0.6
    assert 0.5 < rounded.token_traffic[sent] / exact.token_traffic[sent] < 0.6
    alone = planned(jrl.default_ppo_config(), mesh={"data": 4}, compute_dtype="bfloat16")
    kernels = 3 * (4 * 32 * 32 + 3 * 32 * 64) + 32 * 128
    table = 128 * 32
    assert alone.sampling[name] == 2 * (kernels + table)
    assert planned(jrl.default_ppo_config(), mesh={"data": 4}, compute_dtype="float32").sampling[name] == 0


def test_a_table_to_which_positions_are_added_stays_beside_its_copy():
    model = GPT2Config(
        n_embd=32, n_layer=2, n_head=4, vocab_size=128, n_positions=64, bos_token_id=0, eos_token_id=0
    )
    name = "parameters, as sampling reads them"
    whole, split = (
        planned(jrl.default_ppo_config(), model=model, mesh=mesh, compute_dtype="bfloat16").sampling[name]
        for mesh in ({"data": 4}, {"fsdp": 4})
    )
    kernels, table = 2 * 12 * 32 * 32, 128 * 32
    # What was rounded; then also what was not: tables of embeddings and positions, the value head, biases, norms.
    assert whole == 2 * (kernels + table)
    assert split > whole + 4 * (table + 64 * 32)


def test_a_step_reads_the_logits_of_its_window_alone():
    config = jrl.default_ppo_config()
    four, eight, all_of_them = (
        planned(one).learning[LOGITS]["logits"]
        for one in (
            *(config.evolve(method={"gen_kwargs": {"max_new_tokens": width}}) for width in (4, 8)),
            jrl.default_sft_config(),
        )
    )
    assert 16 * four == 8 * eight == 4 * all_of_them == 4 * 4 * 16 * 128


def test_the_gradient_of_logits_is_as_products_read_it_beside_that_of_the_table():
    """Above the limit they are in pieces: each has its own gradients beside the sum of those before."""
    config = jrl.default_sft_config().evolve(train={"compute_dtype": "bfloat16"})
    whole = planned(config).learning
    logits, gradient = whole[LOGITS]["logits"], whole[GRADIENT]["gradient of the kernel, whole"]
    assert whole[GRADIENT]["gradient of logits, as products read it"] == logits // 2
    assert gradient == 4 * 128 * 32
    pieces = planned(config.evolve(train={"logprob_chunk_bytes": logits // 4})).learning
    assert pieces[LOGITS]["logits"] == logits // 4
    # Pieces have equal sizes: two where all but a third would fit into one.
    halves = planned(config.evolve(train={"logprob_chunk_bytes": 2 * logits // 3})).learning
    assert halves[LOGITS]["logits"] == logits // 2
    name = "logits of a piece, their gradient, and it laid out anew"
    assert pieces[GRADIENT][name] == 3 * (logits // 4)
    assert pieces[GRADIENT]["gradient of the kernel, whole: a piece's, and those before"] == 2 * gradient


def test_what_lies_beside_the_gradient_of_the_vocabulary_is_by_platform():
    """GPUs are done with the kernel by then. A piece's logits are not needed once their gradient is rounded."""
    kernel, gradient, logits = 2 * 128 * 32, 4 * 128 * 32, 4 * 16 * 128
    config = jrl.default_sft_config().evolve(
        model={"model_path": TINY},
        train={"batch_size": 4, "seq_length": 16, "compute_dtype": "bfloat16"},
    )
    names = (LOGITS, GRADIENT, "in the gradient of the vocabulary's kernel", "while that is scattered")
    found = {}
    for most in (logits, logits // 4):
        chunked = config.evolve(train={"logprob_chunk_bytes": most})
        for device in ("gpu", "tpu"):
            learning = plan_run(chunked, mesh_of(device)).learning
            shared = set(learning[LOGITS]) - {"kernel of the vocabulary as it is read, whole", "logits"}
            own = (
                {name: size for name, size in moment.items() if name not in shared}
                for moment in learning.values()
            )
            sums = dict(zip(learning, (sum(moment.values()) for moment in own), strict=True))
            found[device, most] = [sums[name] for name in names if name in sums]
    half, piece = logits // 2, logits // 4
    assert found == {
        ("gpu", logits): [kernel + logits, kernel + half, gradient + half, gradient + gradient // 4],
        ("gpu", piece): [kernel + piece, kernel + gradient + piece + piece // 2],
        ("tpu", logits): [kernel + logits, kernel + half + gradient],
        ("tpu", piece): [kernel + piece, kernel + gradient + piece + piece // 2],
    }


@pytest.mark.parametrize(
    ("width", "device", "on_chip"),
    [(32, "TPU v5 lite", 84 << 20), (4096, "TPU v5 lite", 84 << 20), (4096, "TPU v5", 8 << 20)],
)
def test_a_part_of_a_step_lies_in_on_chip_memory_of_a_tpu(width, device, on_chip):
    """Nothing is reserved for it; of a small model that is all."""
    model = GPT2Config(n_layer=2, n_embd=width, n_head=4, vocab_size=97)
    config = jrl.default_sft_config().evolve(
        model={"model_path": model}, train={"batch_size": 4, "seq_length": 16, "compute_dtype": "bfloat16"}
    )
    whole, part = (plan_run(config, mesh_of("tpu", kind)) for kind in ("another", device))
    assert part.step_bytes == (0 if width == 32 else whole.step_bytes - on_chip)
    for moment, sizes in part.learning.items():
        assert sum(sizes.values()) == max(sum(whole.learning[moment].values()) - on_chip, 0)
    assert part.fullest == whole.fullest and "what of these lies in on-chip memory" in part.table()


@pytest.mark.parametrize("tied", [True, False])
def test_a_tpu_keeps_its_part_of_the_vocabulary_s_kernel_beside_the_gathered_one(tied):
    model = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97, tie_word_embeddings=tied)
    found = {}
    for case in (("tpu", "bfloat16"), ("tpu", "float32"), ("gpu", "bfloat16")):
        config = jrl.default_sft_config().evolve(
            model={"model_path": model}, train={"batch_size": 4, "seq_length": 16, "compute_dtype": case[1]}
        )
        sizes = plan_run(config, mesh_of(case[0])).learning[LOGITS]
        found[case] = sizes.get("a device's part of the vocabulary's kernel")
    assert found == {
        ("tpu", "bfloat16"): 2 * 128 * 32 // 4,
        ("tpu", "float32"): None,
        ("gpu", "bfloat16"): None,
    }


def test_devices_that_compute_all_rows_make_their_own_parts_of_gradients():
    split, whole = (planned(jrl.default_sft_config(), batch_size=rows).learning for rows in (4, 5))
    name = "gradient of the kernel, whole"
    assert split[GRADIENT][name] == 4 * whole[GRADIENT][name] > 0
    name = "gradient of a layer, whole"
    assert split[AT_WORK][name] > 0 == whole[AT_WORK][name]
    name = "kernels of a layer as they are read, whole"
    matrices = 4 * (4 * 32 * 32 + 3 * 32 * 64)
    assert split[AT_WORK][name] - whole[AT_WORK][name] == matrices * 3 // 4


@pytest.mark.parametrize(("device", "parts"), [("gpu", 4), ("tpu", 1)])
def test_gpus_that_compute_all_rows_do_not_gather_the_kernel_of_the_vocabulary(device, parts):
    config = jrl.default_sft_config().evolve(model={"model_path": TINY}, train={"seq_length": 16})
    divided, undivided = (
        plan_run(config.evolve(train={"batch_size": rows}), mesh_of(device)).learning[LOGITS]
        for rows in (4, 5)
    )
    name = "kernel of the vocabulary as it is read, whole"
    assert divided[name] == parts * undivided[name] > 0


def test_layers_of_an_encoder_count_with_those_of_the_decoder():
    config = jrl.default_sft_config().evolve(
        model={"model_arch_type": "seq2seq"}, train={"batch_size": 4, "seq_length": 16}
    )
    one, three = (
        plan_run(
            config.evolve(
                model={
                    "model_path": T5Config(
                        d_model=32,
                        d_kv=8,
                        d_ff=64,
                        num_heads=4,
                        num_layers=count,
                        num_decoder_layers=1,
                        vocab_size=97,
                    )
                }
            ),
            mesh_of("gpu"),
        ).learning[AT_WORK]["gradients of these, as products make them"]
        for count in (1, 3)
    )
    matrices, norms = 4 * (4 * 32 * 32 + 2 * 32 * 64), 4 * 2 * 32
    assert three - one == 2 * (matrices // 4 + norms)


def test_a_model_without_logits_has_no_kernel_of_a_vocabulary_on_a_tpu():
    config = jrl.default_reward_config().evolve(
        model={"model_path": GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97)},
        train={"batch_size": 4, "seq_length": 16},
    )
    names = {name for sizes in plan_run(config, mesh_of("tpu")).learning.values() for name in sizes}
    assert "gradients of the table's uses" in names
    assert not [name for name in names if "vocabulary" in name or "logits" in name]


def test_on_a_tpu_a_single_microbatch_keeps_gradients_of_layers_in_stacks():
    config, name = jrl.default_sft_config(), "gradients, summed over microbatches"
    config = config.evolve(model={"model_path": TINY}, train={"batch_size": 4, "seq_length": 16})
    summed = {}
    for rows in (4, 2):
        one = config.evolve(train={"minibatch_size": rows})
        summed[rows] = [
            max(moment.get(name, 0) for moment in plan_run(one, mesh_of(device)).learning.values())
            for device in ("gpu", "tpu")
        ]
    shapes = jax.eval_shape(make_model(TINY).init, jax.random.key(0))
    leaves = jax.tree.leaves({key: tree for key, tree in shapes.items() if key.startswith("layers_")})
    # Of 4 bytes, on four devices; scales of norms are whole.
    layers = sum(leaf.size if leaf.ndim > 1 else 4 * leaf.size for leaf in leaves)
    assert summed[2][0] == summed[2][1] == summed[4][0]
    assert summed[4][0] - summed[4][1] == layers


def test_the_gradient_of_a_table_s_logits_is_rounded_beside_them_on_gpus():
    config = jrl.default_sft_config().evolve(
        model={"model_path": GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97)},
        train={"batch_size": 4, "seq_length": 16, "compute_dtype": "bfloat16"},
    )
    learning = plan_run(config, mesh_of("gpu")).learning
    assert learning[GRADIENT]["logits"] == learning[LOGITS]["logits"]


def test_a_single_microbatch_has_no_sum_of_gradients_before_its_backward_pass():
    config, name = jrl.default_sft_config(), "gradients, summed over microbatches"
    one, two = (planned(config, minibatch_size=rows).learning for rows in (4, 2))
    assert name not in one[LOGITS] and one[AT_WORK][name] == two[LOGITS][name] == two[AT_WORK][name] > 0


def test_a_table_is_whole_to_embed_where_a_device_has_as_many_tokens_as_it_has_rows():
    """GPT-2's, which is tied and adds positions in float32, lies beside its rounded copy if it is frozen.

    One that trains is gathered anew for each use.
    """
    model, config = GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=97), jrl.default_sft_config()
    found = {}
    for unfrozen, rows in ((-1, 32), (1, 32), (-1, 28), (1, 28)):  # of 16 tokens, on four devices
        one = config.evolve(model={"num_layers_unfrozen": unfrozen})
        plan = planned(one, model=model, compute_dtype="bfloat16", batch_size=rows)
        table, gradients = "tables of embeddings as they are read, whole", "gradients of the table's uses"
        found[unfrozen, rows] = (
            plan.learning[LOGITS]["kernel of the vocabulary as it is read, whole"],
            plan.learning["while it embeds"][table],
            plan.learning["in the gradient of embeddings"][gradients],
        )
    whole = 4 * 128 * 32
    assert found == {
        (-1, 32): (whole // 2, whole + whole // 2, 2 * whole),
        (1, 32): (whole + whole // 2, whole + whole // 2, 0),
        (-1, 28): (whole // 2, 0, 2 * whole // 4),
        (1, 28): (whole + whole // 2, 0, 0),
    }


def test_both_tables_of_gemma4_are_counted():
    """That of the layers' inputs has 103 rows of 5 · 6 numbers, is read rounded, and has no gradient as a head."""
    model, config = GEMMA4["gemma4_text"], jrl.default_sft_config()
    found = planned(config, model=model, compute_dtype="bfloat16", batch_size=32).learning
    table, own = 4 * 128 * 32, 4 * 103 * 30
    assert found["while it embeds"]["tables of embeddings as they are read, whole"] == (table + own) // 2
    gradients = found["in the gradient of embeddings"]["gradients of the table's uses"]
    assert gradients == 2 * table + own


def test_prompts_are_read_in_parts_of_a_bounded_size():
    config, name = jrl.default_ppo_config(), "activations of a layer that reads the prompts"
    mesh = {"data": 4}

    def found(rows, completion):
        method = {"chunk_size": rows, "num_rollouts": rows, "gen_kwargs": {"max_new_tokens": completion}}
        return planned(config.evolve(method=method), mesh=mesh, seq_length=64).sampling[name]

    # Rows of 64 tokens, a quarter of them on a device: twice the MLP's inside and the stream.
    assert found(8, 60) == 2 * found(4, 60) == 2 * 64 * (2 * 64 + 2 * 32) * 4
    assert found(4 * 256, 60) == found(4 * 512, 60) == 16384 * (2 * 64 + 2 * 32) * 4
    # Longer prompts: queries, keys, values and result; the scores of four heads, and as many weights.
    assert found(4, 24) == 64 * 4 * 32 * 4 + 2 * 4 * 40 * 40 * 4


@pytest.mark.parametrize(
    ("kind", "device", "on_chip"),
    [("causal", "TPU v6 lite", 84), ("seq2seq", "TPU v6 lite", 84), ("causal", "TPU v5", 28)],
)
def test_a_part_of_a_sampling_call_lies_in_on_chip_memory_of_a_tpu(kind, device, on_chip):
    models = {
        "causal": GPT2Config(n_layer=2, n_embd=1024, n_head=4),
        "seq2seq": T5Config(d_model=1024, d_kv=64, d_ff=64, num_heads=4, num_layers=1, num_decoder_layers=1),
    }
    config = jrl.default_ppo_config().evolve(
        model={"model_path": models[kind], "model_arch_type": kind, "num_layers_unfrozen": -1},
        train={"batch_size": 4, "seq_length": 16, "compute_dtype": "bfloat16"},
        method={"num_rollouts": 4, "chunk_size": 4, "gen_kwargs": {"max_new_tokens": 8}},
    )
    whole, part = (
        sum(plan_run(config, mesh_of("tpu", name)).sampling.values()) for name in ("another", device)
    )
    assert whole - part == min(on_chip << 20, whole) and (part > 0) == (kind == "causal")


@pytest.mark.parametrize("case", ["mixtral", "kimi_linear", "lfm2", "falcon_h1", "jamba", "nemotron_h"])
def test_a_plan_with_experts_or_mixers_does_not_say_that_it_is_the_most(case):
    found = planned(jrl.default_ppo_config(), model=CASES[case], seq_length=16)
    assert not found.is_whole
    assert "not counted: activations of experts and mixers that read the prompts" in found.table()
    assert "memory of each device, at least" in found.table()


def test_a_plan_without_sampling_or_of_plain_layers_alone_is_whole():
    assert planned(jrl.default_dpo_config(), model=CASES["mixtral"]).is_whole
    assert planned(jrl.default_ppo_config()).is_whole


def test_experts_are_split_over_their_axis_and_what_is_exchanged_is_counted():
    config = copy.deepcopy(CASES["qwen3_moe-some-layers"])
    config.num_experts = 8

    def plan(**mesh):
        return planned(jrl.default_sft_config(), model=config, mesh=mesh)

    together, split = plan(data=4), plan(expert=4)
    # 3 matrices of 8 experts a layer with experts, of which a device keeps a quarter.
    experts = 4 * 3 * 8 * config.hidden_size * config.moe_intermediate_size
    layers = sum(layer.experts is not None for layer in make_model(config).config.layers)
    held = [each.held["parameters that train"] for each in (together, split)]
    assert held[0] - held[1] == layers * experts * 3 // 4
    # One row of 16 tokens a device: tokens and answers of 3 others, both float32 here, forward and backward.
    exchanged = 2 * layers * 3 * 16 * config.hidden_size * (4 + 4)
    assert split.step_traffic["expert: tokens gathered, answers summed"] == exchanged
    assert not any("expert" in name for name in together.step_traffic)
    with pytest.raises(ValueError, match="`mesh` must have no axis `expert` for a model without"):
        planned(jrl.default_sft_config(), mesh={"expert": 4})


def test_latent_experts_exchange_latent_vectors():
    config = copy.deepcopy(CASES["nemotron_h-latent-experts"])
    config.n_routed_experts = 12
    layers = [layer.experts for layer in make_model(config).config.layers if layer.experts is not None]
    assert {experts.latent_width for experts in layers} == {12} and config.hidden_size > 12
    plan = planned(jrl.default_sft_config(), model=config, mesh={"expert": 4})
    exchanged = 2 * len(layers) * 3 * 16 * 12 * (4 + 4)
    assert plan.step_traffic["expert: tokens gathered, answers summed"] == exchanged


def test_one_q_head_and_its_gradient_are_whole_at_a_time():
    """In float32. Devices that all compute all rows make their own parts of gradients."""
    weights, biases, moment = 32 * 64 + 64 * 128, 64 + 128, "while it reads Q values"
    # Logits and values of two heads are kept where those of two target heads would fit as well.
    for rows, own_rows, parts, lacking in ((4, 1, 1, 0), (5, 5, 4, 1)):
        logits = 4 * own_rows * 15 * 128
        config = jrl.default_ilql_config()
        sizes = planned(config, batch_size=rows, logprob_chunk_bytes=5 * logits - lacking).learning[moment]
        assert sizes["a Q head as it is read, whole"] == 4 * (weights + biases)
        assert sizes["its gradient"] == 4 * (weights // parts + biases)
        assert sizes.get("logits and Q values", 0) == (0 if lacking else 3 * logits)
    assert moment not in planned(jrl.default_sft_config()).learning


def test_a_tpu_lays_out_its_part_of_the_target_heads_anew():
    config = jrl.default_ilql_config().evolve(
        model={"model_path": TINY}, train={"batch_size": 4, "seq_length": 16}
    )
    name, moment = "last kernels of target heads, laid out anew", "while it reads Q values"
    for device, size in (("tpu", 2 * 4 * 64 * 128 // 4), ("gpu", None)):
        assert plan_run(config, mesh_of(device)).learning[moment].get(name) == size


def test_of_target_heads_hidden_layers_are_gathered_and_columns_found():
    """Of everything else each pass gathers what the device has not; a row of 16 tokens has 15 columns of 64 a head."""
    q_head = 4 * (32 * 64 + 64 * 128)
    with_heads, without = (
        planned(config).step_traffic for config in (jrl.default_ilql_config(), jrl.default_sft_config())
    )
    assert with_heads["fsdp: target heads"] == 2 * (4 * 32 * 64 + 4 * 15 * 64) * 3 // 4
    assert "fsdp: target heads" not in without
    gathered = "fsdp: parameters gathered, forward and backward"
    v_head = 4 * 32 * 64
    assert with_heads[gathered] - without[gathered] == 2 * (2 * q_head + v_head) * 3 // 4
    # A hidden layer as wide as the vocabulary of 128: nothing is looked up.
    wide = copy.deepcopy(TINY)
    wide.hidden_size, wide.head_dim = 64, 16
    sent = planned(jrl.default_ilql_config(), model=wide).step_traffic["fsdp: target heads"]
    assert sent == 2 * 4 * (64 * 128 + 128 * 128) * 3 // 4


@pytest.mark.parametrize(("device", "itemsize"), [("gpu", 4), ("tpu", 2)])
def test_the_value_head_and_its_gradient_lie_beside_the_kernel_of_the_vocabulary(device, itemsize):
    """GPUs that all compute all rows have no such moment."""
    config, moment = (
        jrl.default_ppo_config().evolve(model={"model_path": TINY}),
        "in the gradient of the value head",
    )
    weights, rest = 32 * 64, 64 + 64 + 1
    for rows, parts in ((4, 1), (5, 4)):
        train = {"batch_size": rows, "seq_length": 16, "compute_dtype": "bfloat16"}
        learning = plan_run(config.evolve(train=train), mesh_of(device)).learning
        if (device, parts) == ("gpu", 4):
            assert moment not in learning
            continue
        assert learning[moment]["kernel of the vocabulary as it is read, whole"] == 2 * 128 * 32
        assert learning[moment]["value head as it is read, whole"] == itemsize * (weights + rest)
        assert learning[moment]["gradient of the value head"] == 4 * (weights // parts + rest)


def test_frozen_layers_are_passed_once_for_all_rows():
    config, name = jrl.default_ppo_config(), "output of the frozen layers, all rows"
    some = planned(
        config.evolve(model={"num_layers_unfrozen": 1}, method={"num_rollouts": 8, "chunk_size": 8})
    )
    assert some.learning[AT_WORK][name] == 8 * 16 * 32 * 4 // 4
    # Four rows are added up on four devices: each sends three quarters of them.
    assert some.step_traffic["data, fsdp: the frozen layers' output"] == 4 * 16 * 32 * 4 * 3 // 4
    every = planned(config.evolve(model={"num_layers_unfrozen": -1}))
    assert every.learning[AT_WORK][name] == every.step_traffic["data, fsdp: the frozen layers' output"] == 0
    assert sum(some.learning[some.fullest].values()) == some.step_bytes


def mesh_of(device, kind=None):
    """Four devices of a platform, and of a kind; None: of no known one."""
    mesh = abstract_mesh(fsdp=4, num_devices=4)
    if device is None:
        return mesh
    return mesh.update(abstract_device=AbstractDevice(kind or device, num_cores=None, platform=device))


@pytest.mark.parametrize(
    ("device", "dtype", "copies", "gradients", "frozen"),
    [
        ("gpu", "bfloat16", 1, 1, 0),
        ("gpu", "float32", 0, 1, 0),
        ("tpu", "bfloat16", 1, 1, 1),
        (None, "float32", 1, 1, 2),
        ("cpu", "float32", 0, 0, 0),
    ],
)
def test_kernels_of_layers_as_products_read_them(device, dtype, copies, gradients, frozen):
    """A layer's own copy and its gradient; a shared body reads a stack of frozen layers, too, and on a TPU picks one at
    a time. Of three layers the last trains.
    """
    mesh = mesh_of(device)
    config = jrl.default_ppo_config().evolve(
        model={"model_path": TINY, "num_layers_unfrozen": 1},
        train={"batch_size": 4, "seq_length": 16, "compute_dtype": dtype},
    )
    found = {
        unfrozen: plan_run(config.evolve(model={"num_layers_unfrozen": unfrozen}), mesh)
        for unfrozen in (1, 3)
    }
    read, made = "kernels of layers as products read them", "gradients of these, as products make them"
    one, three = (plan.learning[AT_WORK] for plan in found.values())
    layer = three[made] // 3
    assert (one[made], three[made]) == (gradients * layer, gradients * 3 * layer)
    assert (one[read], three[read]) == ((copies + frozen) * layer, copies * 3 * layer)
    assert (layer > 0) == bool(gradients)
    assert {read, made} & found[3].learning[LOGITS].keys() == {read}


def test_prompts_that_a_kernel_reads_have_no_scores():
    """Ten rows of 64 columns. A TPU's kernel takes its operands anew, each of eight heads in tiles of 128 numbers."""
    name = "activations of a layer that reads the prompts"

    def found(device, **model):
        config = jrl.default_ppo_config().evolve(
            model={"model_path": TINY, **model},
            method={"num_rollouts": 40, "chunk_size": 40, "gen_kwargs": {"max_new_tokens": 24}},
            train={"batch_size": 4, "seq_length": 64, "compute_dtype": "float32"},
        )
        return plan_run(config, mesh_of(device)).sampling[name]

    scores = 10 * 2 * 4 * 40 * 40 * 4
    assert found(None) == found("tpu", attn_implementation="einsum") == 10 * 64 * 4 * 32 * 4 + scores
    assert found("tpu") == 2 * 10 * 64 * 2 * 8 * 128 * 4
    prefix = {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 3}
    by_einsums = found("tpu", peft_config=prefix, num_layers_unfrozen=-1)
    assert by_einsums == found(None, peft_config=prefix, num_layers_unfrozen=-1) > 0


def test_rows_that_read_their_prompts_fill_a_cache_of_their_own_in_each_layer():
    """Half of a device's 512 rows of 40 tokens at a time, and all of 256."""

    def found(rows):
        method = {"chunk_size": rows, "num_rollouts": rows, "gen_kwargs": {"max_new_tokens": 24}}
        config = jrl.default_ppo_config().evolve(method=method)
        return planned(config, mesh={"data": 4}, seq_length=64).sampling

    name = "a layer's cache of the rows that read their prompts"
    assert 2 * TINY.num_hidden_layers * found(4 * 512)[name] == pytest.approx(
        found(4 * 512)["cache"], abs=100
    )
    assert name not in found(4 * 256)


def test_narrow_heads_fill_the_tiles_of_a_tpu():
    """Each of 16 keys or values of 8 numbers takes 128."""
    config = jrl.default_ppo_config().evolve(
        model={"model_path": TINY},
        train={"batch_size": 4, "seq_length": 16},
        method={"num_rollouts": 4, "chunk_size": 4},
    )
    plain, tpu = (plan_run(config, mesh_of(device)).sampling["cache"] for device in ("gpu", "tpu"))
    buffers = 4 * 2 * 3 * 4 * 16  # of a row: bytes, keys and values, layers, heads, columns
    assert tpu - plain == buffers * (128 - 8)


def test_slots_have_the_cache_of_their_rows_and_of_the_last_ones():
    method = {"chunk_size": 32, "rollout_slots": 8}
    whole = planned(jrl.default_ppo_config().evolve(method={"chunk_size": 32}), mesh={"tensor": 4})
    slots = planned(jrl.default_ppo_config().evolve(method=method), mesh={"tensor": 4})
    few, last = slots.sampling["cache"], slots.sampling["slots of the last rows"]
    assert (4 * few, 4 * last) == pytest.approx((whole.sampling["cache"], few), abs=100)
    assert slots.score_traffic == whole.score_traffic, "rows are scored by the call"
    split = planned(jrl.default_ppo_config().evolve(method=method), mesh={"fsdp": 4})
    assert "slots of the last rows" not in split.sampling, "rows never change their device"


@pytest.mark.slow
def test_slots_of_rollouts_ahead_lie_beside_each_other_and_beside_an_update(checkpoint, tmp_path):
    """Of a run whose worlds wait until all collections have begun, and again until an update has."""
    slots, ahead, updated = 5, 2, threading.Event()
    live = {"sampling": 0, "learning": 0}

    def allocated() -> int:
        """Bytes of all arrays with so many rows: no other has them."""
        return sum(x.nbytes for x in jax.live_arrays() if x.shape[:1] == (slots,))

    def until(count: int) -> int:
        """Bytes once so many collections have caches."""
        wanted, ends = 0.98 * count * plan.sampling["cache"], time.monotonic() + 60
        while allocated() < wanted and time.monotonic() < ends:
            time.sleep(0.01)
        return allocated()

    def world(text: str) -> tuple[str, float, bool]:
        collection = threading.current_thread().name
        if collection == "rollouts-0":
            live["sampling"] = live["sampling"] or until(1 + ahead)
        elif collection.startswith("rollouts-"):  # an evaluation has none
            updated.wait(60)
        return "", 1.0, True

    config = ppo_config(checkpoint, tmp_path, train={"rollouts_ahead": ahead, "total_steps": 12}).evolve(
        train={"seq_length": 24, "eval_interval": 0},
        method={"rollout_slots": slots, "gen_kwargs": {"max_turns": 1}},
    )
    plan = plan_run(config, abstract_mesh(num_devices=1))
    trainer = prepare(environment=world, prompts=PROMPTS, config=config)
    update = trainer.update

    def updating(*given):
        live["learning"] = live["learning"] or until(ahead)
        updated.set()
        return update(*given)

    trainer.update = updating
    trainer.learn()
    beside = plan.sampling["slots of the other rollouts ahead"]
    assert live["sampling"] == pytest.approx(plan.sampling["cache"] + beside, rel=0.02)
    assert live["learning"] == pytest.approx(plan.learning[AT_WORK]["slots that sample meanwhile"], rel=0.02)


def test_collections_that_come_one_after_another_have_one_cache():
    """DAPO: its next prompt is known when the rollouts before are there; a call's own cache is over with it."""
    method = algorithm("dapo", rollout_slots=4)
    turned = planned(jrl.default_config(method), rollouts_ahead=3)
    assert "slots of the other rollouts ahead" not in turned.sampling
    of_one = turned.sampling["cache"] + turned.sampling["parameters, as sampling reads them"]
    assert turned.learning[AT_WORK]["slots that sample meanwhile"] == of_one
    without = planned(jrl.default_ppo_config(), rollouts_ahead=3)
    assert "slots that sample meanwhile" not in without.learning[AT_WORK]
    assert not [name for name in without.sampling if "slots" in name]


def test_an_environment_plays_on_the_slots_of_a_call():
    """What worlds say is read by copies of the slots that it is for: by 16 of 32 together, or by all in place."""
    method = {"chunk_size": 32, "gen_kwargs": {"max_turns": 2}}
    plan = planned(jrl.default_ppo_config().evolve(method=method), mesh={"tensor": 4}).sampling
    copied = plan["slots of the last rows"] + plan["more of them, which read what worlds say"]
    assert 2 * copied == pytest.approx(plan["cache"], abs=100)


def test_programs_of_slots_are_not_compiled_ahead():
    config = jrl.default_ppo_config().evolve(method={"rollout_slots": 8}, model={"model_path": TINY})
    mesh = abstract_mesh(num_devices=1)
    with pytest.raises(ValueError, match=r"`method\.rollout_slots` must be null where programs are compiled"):
        get_trainer("OnlineTrainer").programs(config, model_part(config, mesh, footprint_of(config)), mesh)


def test_slots_of_a_seq2seq_model_are_refused():
    t5 = T5Config(
        d_model=32, num_layers=2, num_heads=4, d_kv=8, d_ff=64, vocab_size=97, decoder_start_token_id=0
    )
    config = jrl.default_ppo_config().evolve(
        model={"model_arch_type": "seq2seq"}, method={"rollout_slots": 8}
    )
    with pytest.raises(ValueError, match=r"`method\.rollout_slots` must be null for a seq2seq model, got 8"):
        planned(config, model=t5)


def test_a_plan_counts_activations_of_another_form_than_it_compiles():
    """On GPUs a run's layers are called one by one, and counted as a shared body keeps them."""
    mesh = mesh_of("gpu")
    config = jrl.default_sft_config().evolve(model={"model_path": TINY})
    part = model_part(config, mesh, footprint_of(config))

    def num_scans(policy):
        inputs = ModelInputs(jnp.ones((4, 8), jnp.int32), jnp.ones((4, 8), bool))
        with jax.sharding.use_abstract_mesh(mesh):
            jaxpr = jax.make_jaxpr(
                lambda p, f: policy.branch(p, f, policy.trunk(f, inputs), inputs, None).policy
            )
            return str(jaxpr(part.params, part.frozen)).count("scan[")

    assert [num_scans(policy) for policy in (part.policy, part.counted)] == [0, 1]

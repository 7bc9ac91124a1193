# SPDX-License-Identifier: Apache-2.0
"""Checkpoint folders: what is written, what is refused, and that nothing changes on the way."""

import json
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import NamedSharding
from safetensors.numpy import load_file, save_file
from transformers import AutoTokenizer, GenerationConfig

from jrl.mesh import make_mesh
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.heads import init_value_head
from tests.tiny import tiny_lm, tiny_policy, tiny_tokenizer


def with_head(params, kind):
    head = jax.tree.map(lambda x: x + 0.5, init_value_head(kind, 32, jax.random.key(3)))
    return {**params, "v_head": head}


@pytest.fixture(scope="module", params=["gpt2", "llama"])
def saved(request, tmp_path_factory):
    """(folder, model, params) of a checkpoint with a value head."""
    model, params = tiny_lm(request.param)
    folder = tmp_path_factory.mktemp(request.param) / "model"
    params = with_head(params, "mlp")
    save_checkpoint(
        folder,
        model,
        params,
        tokenizer=tiny_tokenizer(),
        generation_config=GenerationConfig(max_new_tokens=7),
    )
    return folder, model, params


@pytest.fixture
def edited(saved, tmp_path):
    """A copy of the folder, and a function that changes its tensors."""
    folder = tmp_path / "model"
    shutil.copytree(saved[0], folder)

    def edit(change):
        tensors = load_file(folder / "model.safetensors")
        save_file(change(tensors), folder / "model.safetensors", metadata={"format": "pt"})

    return folder, edit


def assert_equal_trees(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, dict(expected))


def test_round_trip_is_exact(saved):
    folder, model, params = saved
    loaded = load_checkpoint(folder)
    assert_equal_trees(loaded.params, params)
    assert (loaded.model.config, loaded.model.value_head) == (model.config, "mlp")
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("float32")}


def test_folder_holds_what_other_libraries_read(saved):
    folder, model, _ = saved
    tensors = load_file(folder / "model.safetensors")
    # trlX's names and torch's layout, (out, in); the vocabulary without its padding; tied weights once.
    assert {name: t.shape for name, t in tensors.items() if name.startswith("v_head")} == {
        "v_head.0.weight": (64, 32),
        "v_head.0.bias": (64,),
        "v_head.2.weight": (1, 64),
        "v_head.2.bias": (1,),
    }
    embedding = "transformer.wte.weight" if model.family.model_type == "gpt2" else "model.embed_tokens.weight"
    assert tensors[embedding].shape == (97, 32)
    assert ("lm_head.weight" in tensors) is not model.config.tie_embeddings
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [model.family.architecture] and config["dtype"] == "float32"
    assert len(AutoTokenizer.from_pretrained(folder)) == 97
    assert GenerationConfig.from_pretrained(folder).max_new_tokens == 7
    assert not list(folder.parent.glob(".*"))


def test_linear_value_head_has_the_names_of_trl(tmp_path):
    model, params = tiny_lm("gpt2")
    params = with_head(params, "linear")
    save_checkpoint(tmp_path / "m", model, params)
    tensors = load_file(tmp_path / "m" / "model.safetensors")
    assert tensors["v_head.summary.weight"].shape == (1, 32) and tensors["v_head.summary.bias"].shape == (1,)
    loaded = load_checkpoint(tmp_path / "m")
    assert loaded.model.value_head == "linear"
    assert_equal_trees(loaded.params, params)


def test_sharded_files_with_an_index(tmp_path, saved):
    _, model, params = saved
    save_checkpoint(tmp_path / "m", model, params, max_shard_bytes=20_000)
    shards = sorted(file.name for file in (tmp_path / "m").glob("model-*.safetensors"))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    index = json.loads((tmp_path / "m" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(
        tensor.nbytes for shard in shards for tensor in load_file(tmp_path / "m" / shard).values()
    )
    assert_equal_trees(load_checkpoint(tmp_path / "m").params, params)
    (tmp_path / "m" / shards[1]).unlink()
    with pytest.raises(
        FileNotFoundError, match=f"{shards[1]} is missing, though model.safetensors.index.json"
    ):
        load_checkpoint(tmp_path / "m")


def test_saving_again_replaces_the_old_files(tmp_path, saved):
    _, model, params = saved
    save_checkpoint(tmp_path / "m", model, params, max_shard_bytes=20_000)
    (tmp_path / "m" / "notes.txt").write_text("kept")
    plain = {name: value for name, value in params.items() if name != "v_head"}
    save_checkpoint(tmp_path / "m", model, plain)
    assert sorted(file.name for file in (tmp_path / "m").iterdir()) == [
        "config.json",
        "model.safetensors",
        "notes.txt",
    ]
    loaded = load_checkpoint(tmp_path / "m")
    assert loaded.model.value_head is None
    assert_equal_trees(loaded.params, plain)


@pytest.mark.parametrize("again", [True, False])
def test_what_lies_beside_the_heads_stays(tmp_path, saved, again):
    _, model, params = saved
    save_checkpoint(tmp_path / "m", model, params, heads="apart")
    (tmp_path / "m" / "heads" / "model.safetensors.index.json").write_text("of shards")
    (tmp_path / "m" / "heads" / "my_notes.txt").write_text("kept")
    plain = {name: value for name, value in params.items() if name != "v_head"}
    save_checkpoint(tmp_path / "m", model, params if again else plain, heads="apart")
    new = ["model.safetensors"] if again else []
    assert sorted(file.name for file in (tmp_path / "m" / "heads").iterdir()) == [*new, "my_notes.txt"]
    assert (load_checkpoint(tmp_path / "m").model.value_head is not None) == again


def test_a_failed_save_leaves_the_old_checkpoint(tmp_path, saved):
    folder, model, params = saved
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    class BrokenTokenizer:
        def save_pretrained(self, directory):
            raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space left"):
        save_checkpoint(folder, model, params, tokenizer=BrokenTokenizer())
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before
    assert not list(folder.parent.glob(".*"))


def test_other_dtypes_are_read_into_the_one_asked_for(edited):
    folder, edit = edited
    edit(lambda tensors: {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in tensors.items()})
    master = load_checkpoint(folder).params
    assert {leaf.dtype for leaf in jax.tree.leaves(master)} == {jnp.dtype("float32")}
    half = load_checkpoint(folder, dtype=jnp.bfloat16).params
    assert half["layers_0"]["attn"]["q"]["kernel"].dtype == jnp.bfloat16
    assert half["v_head"]["out"]["kernel"].dtype == jnp.float32
    np.testing.assert_array_equal(
        half["layers_0"]["mlp"]["up"]["kernel"].astype(jnp.float32), master["layers_0"]["mlp"]["up"]["kernel"]
    )


def test_tensors_go_to_their_place_on_the_mesh(saved):
    mesh = make_mesh(1, 1, 1, devices=jax.devices()[:1])
    loaded = load_checkpoint(saved[0], mesh=mesh)
    assert all(isinstance(leaf.sharding, NamedSharding) for leaf in jax.tree.leaves(loaded.params))
    assert loaded.replicated == ()


def test_unknown_and_missing_tensors_are_named(edited):
    folder, edit = edited
    edit(lambda tensors: tensors | {"score.weight": np.ones(3, np.float32)})
    with pytest.raises(ValueError, match=r"1 tensor has no place in a \w+ model: score.weight"):
        load_checkpoint(folder)
    edit(lambda tensors: {k: v for k, v in tensors.items() if k not in ("score.weight", "v_head.2.bias")})
    with pytest.raises(ValueError, match=r"1 tensor is missing: v_head\.2\.bias"):
        load_checkpoint(folder)


def test_wrong_shapes_are_named(edited):
    folder, _ = edited
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 96}))
    with pytest.raises(ValueError, match=r"weight must have shape \(96, 32\) by its config, got \(97, 32\)"):
        load_checkpoint(folder)


def test_old_gpt2_files_are_read(tmp_path):
    # Without the prefix of the body, with the causal mask as a buffer and the tied head a second time.
    model, params = tiny_lm("gpt2")
    save_checkpoint(tmp_path / "m", model, params)
    file = tmp_path / "m" / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor for name, tensor in load_file(file).items()}
    tensors |= {
        "h.0.attn.bias": np.ones((1, 1, 8, 8), np.float32),
        "lm_head.weight": tensors["wte.weight"].copy(),
    }
    save_file(tensors, file)
    assert_equal_trees(load_checkpoint(tmp_path / "m").params, params)


def test_what_is_not_a_checkpoint_says_so(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(FileNotFoundError, match=r"not a model checkpoint: it has no config\.json"):
        load_checkpoint(tmp_path)
    (tmp_path / "hf_model").mkdir()
    with pytest.raises(FileNotFoundError, match="Its model is in the subfolder hf_model"):
        load_checkpoint(tmp_path)
    model, _ = tiny_lm("gpt2")
    model.hf_config.save_pretrained(tmp_path)
    with pytest.raises(
        FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"
    ):
        load_checkpoint(tmp_path)
    # Pickles that hold no weights: nothing to convert.
    for name in ("training_args.bin", "optimizer.bin", "adapter_model.bin"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"model\.safetensors\.index\.json\.$"):
        load_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match=r"holds pytorch_model\.bin, a pickle, .*python -c"):
        load_checkpoint(tmp_path)


def test_cut_off_file_is_named(edited):
    folder, _ = edited
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable safetensors file.*cut off"):
        load_checkpoint(folder)


@pytest.mark.parametrize("size", ["5GB", 5e9, 0, -1, True, None])
def test_a_shard_size_that_is_no_number_of_bytes_is_refused(tmp_path, saved, size):
    _, model, params = saved
    with pytest.raises(ValueError, match=f"`max_shard_bytes` must be a positive whole .*, got {size!r}"):
        save_checkpoint(tmp_path / "m", model, params, max_shard_bytes=size)
    assert not list(tmp_path.iterdir())


def test_half_a_tree_is_not_saved(tmp_path):
    model, _ = tiny_lm("llama")
    _, params, _, _ = tiny_policy("llama", 1)
    with pytest.raises(
        ValueError, match=r"missing or unknown: embed/embedding, layers_0.*`merge_params` forgotten"
    ):
        save_checkpoint(tmp_path / "m", model, params)
    assert not list(tmp_path.iterdir())

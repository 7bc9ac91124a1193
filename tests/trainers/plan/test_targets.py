# SPDX-License-Identifier: Apache-2.0
"""Names of devices that are not here, and what is said where their compiler is missing."""

import os
from importlib.metadata import PackageNotFoundError

import pytest
from jax.experimental import topologies

from jrl.trainers.plan import targets
from jrl.trainers.plan.targets import MissingCompilerError, parse_target

DESCRIBED = ["devices"]


@pytest.fixture
def asked(monkeypatch):
    """What JAX is asked for, with the environment it is asked in; the compilers' libraries seem installed."""
    calls = []

    def get_topology_desc(**kwargs):
        calls.append((kwargs, dict(os.environ)))
        return topologies.TopologyDescription(DESCRIBED)

    monkeypatch.setattr(topologies, "get_topology_desc", get_topology_desc)
    found = {
        "libtpu": "0.0.42.1",
        "jax-cuda12-plugin": "0.10.2",
        "jax": "0.10.2",
        "nvidia-cudnn-cu12": "9.28.0.42",
    }
    wanted = [
        'jaxlib<=0.10.2,>=0.10.2; extra == "tpu"',
        'libtpu==0.0.42.*; extra == "tpu"',
        'jax-cuda12-plugin<=0.10.2,>=0.10.2; extra == "cuda12"',
        "numpy>=2",
    ]
    monkeypatch.setattr(targets, "version", lambda name: found[name])
    monkeypatch.setattr(targets, "requires", lambda name: wanted)
    return calls


@pytest.mark.parametrize(
    ("name", "devices", "per_host"),
    [
        ("tpu:v5e:2x4", 8, 4),
        ("tpu:v5e:1x1", 1, 1),
        ("tpu:v5p:2x2x2", 8, 4),
        ("tpu:v6e:16x16", 256, 4),
        ("gpu:h200", 1, 1),
        ("gpu:a100x4", 4, 4),
        ("gpu:h100x16", 16, 8),
        ("gpu:rtx4090", 1, 1),
        ("gpu:rtx4090x2", 2, 2),
        ("gpu:RTX4090", 1, 1),
    ],
)
def test_a_name_says_how_many_devices(name, devices, per_host):
    target = parse_target(name)
    assert (target.name, target.platform) == (name, name[:3])
    assert (target.num_devices, target.devices_per_host) == (devices, per_host)


@pytest.mark.parametrize(
    ("name", "bfloat16", "memory", "rate", "link"),
    [
        # Data sheets: TFLOP/s, GB (GiB of a TPU that a program may have), GB/s, and half of the links' two directions.
        ("tpu:v5e:2x4", 197, 15.75 * 1.073741824, 819, 200),
        ("tpu:v5p:2x2x2", 459, 95.74 * 1.073741824, 2765, 600),
        ("tpu:v6e:2x4", 918, 31.25 * 1.073741824, 1638, 400),
        ("gpu:a100", 312, 85.1, 2039, 300),
        ("gpu:h100", 989, 84.9, 3350, 450),
        ("gpu:h200", 989, 151.4, 4800, 450),
        ("gpu:b200", 2250, 191.5, 7672, 900),
        # The white paper and PCIe of the fourth generation; memory as PyTorch says it, in GiB.
        ("gpu:l4", 121, 22.0 * 1.073741824, 300, 32),
        ("gpu:l40s", 362, 44.3 * 1.073741824, 864, 32),
        ("gpu:rtx4090", 165, 23.6 * 1.073741824, 1008, 32),
    ],
)
def test_figures_are_the_data_sheets(name, bfloat16, memory, rate, link):
    target = parse_target(name)
    assert target.matrix_flops["bfloat16"] == bfloat16 * 1e12
    assert target.memory_bytes / 1e9 == pytest.approx(memory, rel=1e-3)
    assert (target.memory_rate, target.link_rate) == (rate * 1e9, link * 1e9)
    with pytest.raises(TypeError):
        target.matrix_flops["bfloat16"] = 0.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cpu:8", r"must begin with tpu: or gpu:, got 'cpu:8'"),
        ("tpu:v7e:2x4", r"one of the chips \['v5e', 'v5p', 'v6e'\], got 'v7e'"),
        ("gpu:h10x8", r"one of the chips \['l4', .*'h100', .*\], got 'h10x8'"),
        ("gpu:rtx4090ti", r"got 'rtx4090ti'"),
        ("tpu:v5e", r"a slice of 2 sizes, as v5e:4x4, each a multiple of a host's 2x2 .* got ''"),
        ("tpu:v5e:3x4", r"each a multiple of a host's 2x2 and at most 16x16; got '3x4'"),
        ("tpu:v5e:32x4", r"at most 16x16; got '32x4'"),
        ("tpu:v5p:2x4", r"a slice of 3 sizes, as v5p:4x4x2"),
        ("tpu:v5e:0x4", r"got '0x4'"),
        ("gpu:h100x12", r"up to 8 GPUs, or a multiple of it: 8 on each host; got 12"),
        ("gpu:h100x0", r"got 0"),
    ],
)
def test_an_impossible_name_says_what_is_known(name, message):
    with pytest.raises(ValueError, match=message):
        parse_target(name)


def test_cuda_keeps_a_part_of_a_gpu():
    chip, gpu = parse_target("tpu:v5e:2x4"), parse_target("gpu:h100")
    assert chip.usable_bytes == chip.memory_bytes
    assert gpu.usable_bytes == int(0.95 * gpu.memory_bytes)


@pytest.mark.parametrize(
    ("name", "described"),
    [
        ("gpu:rtx4090", ["threads_per_core_limit: 1536 ", "{ major: 8 minor: 9 }", "_optin: 101376 "]),
        ("gpu:b200", ["threads_per_core_limit: 2048 ", "{ major: 10 ", "_optin: 232448 "]),
    ],
)
def test_a_chip_is_described_by_its_own_figures(asked, name, described):
    parse_target(name).devices()
    ((kwargs, _),) = asked
    assert all(kwargs["target_config"].count(part) == 1 for part in described)
    assert kwargs["target_config"].count("threads_per_core_limit") == 1


def test_a_tpu_is_asked_for_with_its_slice_and_hosts(asked):
    assert parse_target("tpu:v5p:2x2x4").devices() == DESCRIBED
    ((kwargs, environment),) = asked
    assert kwargs == {"platform": "tpu", "topology_name": "v5p:2x2x4", "chips_per_host_bounds": (2, 2, 1)}
    assert environment["ALLOW_MULTIPLE_LIBTPU_LOAD"] == "1" and environment["TPU_SKIP_MDS_QUERY"] == "1"


def test_a_gpu_is_asked_for_with_its_description(asked):
    assert parse_target("gpu:h100x16").devices() == DESCRIBED
    ((kwargs, environment),) = asked
    assert (kwargs["platform"], kwargs["topology"]) == ("cuda", "1x2x8")
    described = kwargs["target_config"]
    assert "core_count: 132 " in described and "cuda_compute_capability { major: 9 " in described
    assert "device_memory_size: 84942979072 " in described and "memory_bandwidth: 3350000000000 " in described
    assert "dnn_version_info { major: 9 minor: 28 }" in described
    assert environment["CUDA_VISIBLE_DEVICES"] == "-1"


def test_the_environment_is_as_before(asked, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.delenv("TPU_SKIP_MDS_QUERY", raising=False)
    before = dict(os.environ)
    parse_target("gpu:h100").devices()
    parse_target("tpu:v5e:2x4").devices()
    assert dict(os.environ) == before


def test_without_a_wheel_of_cudnn_its_oldest_version_is_described(asked, monkeypatch):
    found = {"jax-cuda12-plugin": "0.10.2", "jax": "0.10.2"}

    def version(distribution):
        if distribution not in found:
            raise PackageNotFoundError(distribution)
        return found[distribution]

    monkeypatch.setattr(targets, "version", version)
    parse_target("gpu:h100").devices()
    assert "dnn_version_info { major: 9 minor: 8 }" in asked[0][0]["target_config"]


@pytest.mark.parametrize(
    ("name", "library", "extra"),
    [("tpu:v5e:2x4", "libtpu", "plan-tpu"), ("gpu:h100", "jax-cuda12-plugin", "plan-gpu")],
)
def test_a_missing_compiler_says_how_to_install_it(asked, monkeypatch, name, library, extra):
    def version(distribution):
        raise PackageNotFoundError(distribution)

    monkeypatch.setattr(targets, "version", version)
    with pytest.raises(
        MissingCompilerError, match=rf"is {library}.*not installed: pip install 'jrl-post\[{extra}\]'"
    ):
        parse_target(name).devices()
    assert not asked


def test_a_compiler_of_another_version_is_refused(asked, monkeypatch):
    found = {"libtpu": "0.0.41", "jax": "0.10.2"}
    monkeypatch.setattr(targets, "version", found.get)
    with pytest.raises(
        MissingCompilerError, match=r"libtpu must be ==0\.0\.42\.\* for jax 0\.10\.2, got 0\.0\.41"
    ):
        parse_target("tpu:v5e:2x4").devices()
    assert not asked


def test_gpus_that_jax_gave_up_are_named(asked, monkeypatch):
    def refuse(**kwargs):
        raise NotImplementedError("topology not implemented for cuda")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    with pytest.raises(MissingCompilerError, match="JAX_PLATFORMS=cpu"):
        parse_target("gpu:h100").devices()

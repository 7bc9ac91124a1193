# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a real run with every one of their files damaged: the last whole one is taken, and that is said."""

import errno
import os
import random
import shutil
import subprocess
from pathlib import Path

import pytest

from jrl.trainers.checkpoints.manifest import CheckpointError
from jrl.trainers.checkpoints.resume import checkpoints_in, find_checkpoint
from tests.faults.jobs import assert_same_run, start

pytestmark = pytest.mark.slow
FLIPS = 200


def flipped(content, rng):
    place = rng.randrange(len(content))
    return content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :]


DAMAGE = {
    "truncated": lambda content: content[: len(content) // 2],
    "emptied": lambda content: b"",
    "zeroed": lambda content: bytes(len(content)),
    "one bit flipped": lambda content: flipped(content, random.Random(len(content))),
    "missing": None,
}


@pytest.fixture
def copied(whole, tmp_path):
    """The run's folder, to be damaged; older and newer checkpoint."""
    shutil.copytree(whole("ppo")[0], tmp_path / "run")
    older, newer = checkpoints_in(tmp_path / "run").values()
    return tmp_path / "run", older, newer


def files_of(checkpoint):
    return sorted(path for path in checkpoint.rglob("*") if path.is_file())


def falls_back(folder, older, newer):
    """Whether the older one is taken and the newer one spoken of."""
    told = []
    found = find_checkpoint(folder, told.append)
    return found == older and len(told) == 1 and str(newer) in told[0] and "Falling back" in told[0]


def test_every_damage_to_every_file_is_noticed(copied):
    folder, older, newer = copied
    for path in files_of(newer):
        content = path.read_bytes()
        for name, damage in DAMAGE.items():
            if damage is None:
                path.unlink()
            elif damage(content) == content:
                continue  # an empty file cannot be emptied
            else:
                path.write_bytes(damage(content))
            assert falls_back(folder, older, newer), (path, name)
            path.write_bytes(content)
    assert find_checkpoint(folder, print) == newer


def test_any_bit_counts(copied):
    folder, older, newer = copied
    rng = random.Random(0)
    files = [path for path in files_of(newer) if path.stat().st_size]
    for _ in range(FLIPS):
        path = rng.choice(files)
        content = path.read_bytes()
        path.write_bytes(flipped(content, rng))
        assert falls_back(folder, older, newer), path
        path.write_bytes(content)


def test_without_a_whole_one_nothing_is_resumed(copied):
    folder, *both = copied
    for path in both:
        (path / "cursor.json").unlink()
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is whole"):
        find_checkpoint(folder, print)


@pytest.mark.parametrize("number", [errno.EIO, errno.ESTALE])
@pytest.mark.parametrize("name", ["manifest.json", "cursor.json", "state"])
def test_a_checkpoint_that_the_disk_cannot_read(name, number, copied, checkpoint, whole, tmp_path):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler: the disk is that of the whole process, not only Python's")
    library = tmp_path / "bad_sector.so"
    source = Path(__file__).with_name("bad_sector.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    folder, older, newer = copied
    whole_folder, steps = whole("ppo")
    bad = {"LD_PRELOAD": str(library), "BAD_PATH": str(newer / name), "BAD_ERRNO": str(number)}
    said = start("ppo", checkpoint, folder, steps=steps, environment=bad).finish()
    assert os.strerror(number) in said and f"Falling back to {older}" in said
    assert_same_run(folder, whole_folder)


def test_a_run_with_a_damaged_checkpoint_becomes_the_run_it_was(copied, checkpoint, whole):
    folder, older, newer = copied
    whole_folder, steps = whole("ppo")
    victim = max(files_of(newer / "state"), key=lambda path: path.stat().st_size)
    victim.write_bytes(flipped(victim.read_bytes(), random.Random(1)))
    said = start("ppo", checkpoint, folder, steps=steps, branch=True).finish()
    assert "Not a whole checkpoint" in said and f"Falling back to {older}" in said
    assert f"resumed at {older.name.removeprefix('checkpoint_')}" in said
    assert_same_run(folder, whole_folder)

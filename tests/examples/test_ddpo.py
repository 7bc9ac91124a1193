# SPDX-License-Identifier: Apache-2.0
"""The example of Stable Diffusion on a tiny pipeline's folder, as a user starts it."""

import json

import numpy as np
import pytest

from jrl.models.diffusion.folder import load_diffusion_model
from tests.examples.processes import EXAMPLES, finish, start
from tests.models.diffusion.tiny_folder import save_tiny_folder

REWARD = """
def brightness(images, prompts, metadata):
    assert set(prompts) <= {"a cat", "a dog"} and images.shape[1] == 3
    return images.mean(axis=(1, 2, 3)), {}
"""


@pytest.mark.slow
@pytest.mark.parametrize("use_lora", [True, False])
def test_it_trains_a_folder_and_writes_one(use_lora, tmp_path):
    save_tiny_folder(tmp_path / "model")
    (tmp_path / "prompts.txt").write_text("a cat\n\na dog\n")
    (tmp_path / "mine.py").write_text(REWARD)
    words = [
        *("--pretrained_model", tmp_path / "model", "--prompts", tmp_path / "prompts.txt"),
        *("--reward", "mine:brightness", "--use_lora", use_lora, "--logdir", tmp_path / "run"),
        *("--num_epochs", 2, "--sample_num_steps", 3, "--sample_batch_size", 2),
        *("--sample_num_batches_per_epoch", 2, "--train_batch_size", 2, "--log_with", "tensorboard"),
        *("--per_prompt_stat_tracking_min_count", 2),
    ]
    printed = finish(start(*words, cwd=tmp_path, program=[EXAMPLES / "ddpo.py"]))
    assert "the trained model is in" in printed
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    epochs = [record for record in map(json.loads, lines) if "reward/mean" in record]
    assert len(epochs) == 2 and all(np.isfinite(record["reward/mean"]) for record in epochs)
    assert (tmp_path / "run" / "model" / "README.md").exists()
    model, before = (
        load_diffusion_model(folder) for folder in (tmp_path / "run" / "model", tmp_path / "model")
    )
    assert (model.found_lora is not None) == use_lora
    weight, was = (found.weights["unet"]["conv_in"]["kernel"] for found in (model, before))
    assert (np.asarray(weight) == np.asarray(was)).all() == use_lora


@pytest.mark.slow
def test_a_file_without_prompts_is_refused(tmp_path):
    (tmp_path / "prompts.txt").write_text("\n\n")
    process = start("--prompts", tmp_path / "prompts.txt", cwd=tmp_path, program=[EXAMPLES / "ddpo.py"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "a prompt on each line" in output.splitlines()[-1]


@pytest.mark.slow
def test_a_file_names_no_code(tmp_path):
    (tmp_path / "mine.py").write_text("print('imported')\ndef brightness(images, prompts, metadata): ...\n")
    (tmp_path / "run.yaml").write_text("reward: mine:brightness\n")
    process = start("--config", tmp_path / "run.yaml", cwd=tmp_path, program=[EXAMPLES / "ddpo.py"])
    output, _ = process.communicate(timeout=600)
    assert process.returncode == 1 and "imported\n" not in output
    assert "`reward` must not name a function in a file" in output.splitlines()[-1]

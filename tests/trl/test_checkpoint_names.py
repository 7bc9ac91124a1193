# SPDX-License-Identifier: Apache-2.0
"""Checkpoints under transformers' names."""

from __future__ import annotations

import shutil

import pytest

from jrl.trainers.checkpoints.checkpointer import MODEL
from jrl.trl.checkpoint_names import behind_link, drop_links, link_model


def test_links_lead_to_models_and_go_with_them(tmp_path):
    folders = [tmp_path / f"checkpoint_{step}" for step in (1, 2)]
    for folder in folders:
        (folder / MODEL).mkdir(parents=True)
        (folder / MODEL / "config.json").write_text("{}")
        link_model(folder)
    assert (tmp_path / "checkpoint-2" / "config.json").is_file()
    assert behind_link(tmp_path / "checkpoint-2") == folders[1].resolve()
    assert behind_link(tmp_path) == tmp_path
    shutil.rmtree(folders[0])
    drop_links(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["checkpoint-2", "checkpoint_2"]


def test_a_folder_of_that_name_stays(tmp_path):
    (tmp_path / "checkpoint-1").mkdir()
    link_model(tmp_path / "checkpoint_1")
    drop_links(tmp_path)
    assert not (tmp_path / "checkpoint-1").is_symlink()


@pytest.mark.slow
def test_a_run_leaves_them_and_resumes_from_them(checkpoint, tmp_path):
    from jrl.trl import AutoModelForCausalLM, SFTConfig, SFTTrainer

    def trained(steps, resume=None):
        args = SFTConfig(
            str(tmp_path),
            max_steps=steps,
            per_device_train_batch_size=2,
            save_steps=1,
            report_to="none",
            lr_scheduler_type="constant",
        )
        rows = [{"text": f"{n} thin things"} for n in range(4)]
        trainer = SFTTrainer(str(checkpoint), args=args, train_dataset=rows)
        trainer.train(resume_from_checkpoint=resume)
        return trainer

    trained(1)
    model = AutoModelForCausalLM.from_pretrained(str(tmp_path / "checkpoint-1"))
    assert model.config.model_type == "gpt2"
    assert trained(2, str(tmp_path / "checkpoint-1")).state.global_step == 2
    assert (tmp_path / "checkpoint-2" / "model.safetensors").is_file()

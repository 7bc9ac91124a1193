# SPDX-License-Identifier: Apache-2.0
"""A tiny run of a diffusion model as one process of a job: `diffusion_worker.py SPECIFICATION`, a JSON file.

It holds `algorithm` ("ddpo", "flow_grpo", "reward_gradient" or "trl"), `folder` (of the run and of what this writes),
`model` (a folder; null: the toy), `reward` (of a function below), `own_prompts` (whether each process draws others,
which must not be), `sections` that replace fields of the configuration, and `hurt`: null, or a process and the call of
its reward function in which it kills itself. In the end each process writes `result_<process>.json`, with the history
and the prompts that it judged, and `params_<process>.npz`; where the hook was called also `images_<process>.npz`, with
all that it saw.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jrl
from jrl.distributed import join
from jrl.placement import fetch
from jrl.trainers.diffusion.ddpo import DDPOTrainer
from tests.trainers.diffusion import runs, test_train_flow_grpo
from tests.trainers.runs import repeatable

ROWS_SEEN: list[list[str]] = []
"""Prompts of every call of the reward function in this process."""
SHOWN: dict[str, np.ndarray] = {}
"""Images and rewards that the hook was given in this process."""
HURT: dict[str, int] = {}


def seen(prompts: tuple[str, ...]) -> None:
    """Counts a call of the reward function; in the one that is meant, this process is killed."""
    ROWS_SEEN.append(list(prompts))
    if HURT and jax.process_index() == HURT["process"] and len(ROWS_SEEN) == HURT["call"]:
        print(f"killed in call {HURT['call']}", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)


def brightness(images: np.ndarray, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
    """Mean of all pixels."""
    seen(prompts)
    return runs.brightness(images, prompts, metadata)


def brightness_in_jax(images: np.ndarray, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
    """The same on this process's device, whatever the others do: the number of its images may differ from theirs."""
    seen(prompts)
    return jnp.mean(jnp.asarray(images), axis=(1, 2, 3)), {}


def fails_in_process_1(images: np.ndarray, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
    """The same, and an error in the second process in its second call."""
    if jax.process_index() == 1 and ROWS_SEEN:
        raise OSError("the judge is down")
    return brightness(images, prompts, metadata)


def fails_on_circles(images: np.ndarray, prompts: tuple[str, ...], metadata: tuple[Any, ...]) -> Any:
    """The same, and no reward for one prompt."""
    rewards, found = brightness(images, prompts, metadata)
    return [None if "circle" in p else float(x) for p, x in zip(prompts, rewards, strict=True)], found


REWARDS = {
    function.__name__: function
    for function in (brightness, brightness_in_jax, fails_in_process_1, fails_on_circles)
}


def show(data: list[list[Any]], step: int, tracker: Any) -> None:
    """Keeps what the hook is given."""
    for number, (images, prompts, _, rewards, _) in enumerate(data):
        assert len(images) == len(prompts) == len(rewards)
        SHOWN[f"{step}_{number}_images"], SHOWN[f"{step}_{number}_rewards"] = images, rewards


def draw_own_prompt() -> tuple[str, dict[str, int]]:
    """Another prompt in every process, which must not be."""
    return runs.PROMPTS[jax.process_index()], {}


def trl_trainer(folder: Path) -> Any:
    """The face of TRL's shape, with sizes of one device."""
    from jrl.trl.ddpo import DDPOTrainer as FlatTrainer
    from jrl.trl.ddpo_config import DDPOConfig
    from jrl.trl.ddpo_pipeline import DefaultDDPOStableDiffusionPipeline

    config = DDPOConfig(
        num_epochs=2,
        sample_num_steps=runs.STEPS,
        sample_batch_size=2,
        sample_num_batches_per_epoch=2,
        train_batch_size=1,
        train_gradient_accumulation_steps=2,
        logdir=str(folder / "run"),
    )
    pipeline = DefaultDDPOStableDiffusionPipeline(runs.toy_model(), use_lora=False)
    return FlatTrainer(config, brightness, runs.draw_prompt, pipeline, show)


def make_trainer(given: dict[str, Any], run_dir: Path) -> Any:
    """The trainer of a specification."""
    sections, reward = given["sections"], REWARDS[given["reward"]]
    prompts = draw_own_prompt if given["own_prompts"] else runs.draw_prompt
    model = None if given["model"] else runs.toy_model()
    changes = {"model": {"model_path": given["model"], **sections.pop("model", {})}} if given["model"] else {}
    if given["algorithm"] == "reward_gradient":
        from tests.trainers.diffusion import test_train_reward_gradient  # has arrays of JAX

        config = test_train_reward_gradient.run_config(run_dir, **sections).evolve(**changes)
        return jrl.RewardGradientTrainer(
            config,
            reward_function=test_train_reward_gradient.COLOURFUL,
            prompt_function=prompts,
            model=model,
        )
    if given["algorithm"] == "flow_grpo":
        model = test_train_flow_grpo.model()
        sections["method"] = {**test_train_flow_grpo.METHOD, **sections.get("method", {})}
    config = runs.ddpo_config(run_dir, **sections).evolve(**changes)
    return DDPOTrainer(
        config, reward_function=reward, prompt_function=prompts, model=model, image_samples_hook=show
    )


def main(given: dict[str, Any]) -> None:
    """Trains, and writes what came of it."""
    folder = Path(given["folder"])
    HURT.update(given["hurt"] or {})
    join()  # the toy's weights are computed
    process = jax.process_index()
    if given["algorithm"] == "trl":
        face = trl_trainer(folder)
        face.train()
        trainer = face.native
        images = face.sd_pipeline(
            ["red square", "blue circle"], num_inference_steps=2, generator=7, output_type="np"
        )
        SHOWN["called"] = images.images
        samples, pairs = face._generate_samples(1, 2)
        SHOWN["generated"], SHOWN["latents"] = pairs[0][0], samples[0]["latents"]
        face.save_pretrained(folder / "saved")
    else:
        trainer = make_trainer(given, folder / "run")
        trainer.learn()
        trainer.save_pretrained(folder / "saved")
    result = {"history": repeatable(trainer.history), "rows_seen": ROWS_SEEN}
    (folder / f"result_{process}.json").write_text(json.dumps(result), encoding="utf-8")
    leaves = jax.tree_util.tree_flatten_with_path(fetch(dict(trainer.params)))[0]
    np.savez(folder / f"params_{process}.npz", **{jax.tree_util.keystr(path): leaf for path, leaf in leaves})
    if SHOWN:
        np.savez(folder / f"images_{process}.npz", **SHOWN)


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))

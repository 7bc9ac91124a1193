# SPDX-License-Identifier: Apache-2.0
"""A run in a process of its own, for tests that stop it: `interrupted_run.py ALGORITHM CHECKPOINT FOLDER STEPS`."""

import sys
from pathlib import Path

import jrl
from tests.trainers.runs import (
    COMPARISONS,
    PREFERENCES,
    PROMPTS,
    REWARDED,
    count_vowels,
    dpo_config,
    ilql_config,
    ppo_config,
    reward_config,
    rft_config,
    sft_config,
)

algorithm, checkpoint, folder, steps = sys.argv[1:]
train = {
    "total_steps": int(steps),
    "checkpoint_interval": 4,
    "eval_interval": 1000,
    "resume_from_checkpoint": folder,
}
if algorithm in ("ppo", "rft"):
    make_config = {"ppo": ppo_config, "rft": rft_config}[algorithm]
    jrl.train(
        reward_fn=count_vowels,
        prompts=PROMPTS,
        eval_prompts=PROMPTS[:2],
        config=make_config(checkpoint, Path(folder), train=train),
    )
elif algorithm == "dpo":
    method = {"sync_ref_model": True, "ref_model_sync_steps": 3}
    config = dpo_config(checkpoint, Path(folder), train=train, method=method)
    jrl.train(samples=PREFERENCES, eval_prompts=["the"], config=config)
elif algorithm == "reward":
    jrl.train(samples=COMPARISONS, config=reward_config(checkpoint, Path(folder), train=train))
elif algorithm == "ilql":
    jrl.train(
        samples=[sample for sample, _ in REWARDED],
        rewards=[reward for _, reward in REWARDED],
        eval_prompts=["the"],
        config=ilql_config(checkpoint, Path(folder), train=train),
    )
else:
    samples = ["the cat sat", "a dog ran", "so it goes", "rain again", "one more", "we go on"]
    jrl.train(samples=samples, eval_prompts=["the"], config=sft_config(checkpoint, Path(folder), train=train))

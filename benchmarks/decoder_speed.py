# SPDX-License-Identifier: Apache-2.0
"""Speed of the decoder against an older commit of this repository: sampling, scoring and an update of PPO.

    python benchmarks/decoder_speed.py --baseline <commit> [--rounds 5] [--model gpt2-mini]

Both trees run in processes of their own, in turn (A B A B ...), so that a machine which slows down slows both. Prints
one JSON line a measurement: median seconds of each tree and their ratio (below 1: this tree is faster).
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from peers.sizes import GPT2

ROOT = Path(__file__).resolve().parents[1]
# Runs inside either tree: only what both have may be used here.
WORKER = """
import json, os, sys, time
import jrl
import jax, jax.numpy as jnp, optax
from transformers import GPT2Config
from jrl.learners.optimizers import make_optimizer, make_schedule
from jrl.learners.ppo import PPOConfig
from tests.learners.ppo_parts import ppo_state, ppo_update
from jrl.models.heads import init_value_head
from jrl.models.model import CausalLM
from jrl.models.policy import init_reference, split_params
from jrl.ops.alignment import join
from jrl.rollout.generate import make_generate
from jrl.rollout.score import make_score
from jrl.typing import ModelInputs, Rollouts, SamplingKnobs

assert jrl.__file__.startswith(os.getcwd()), jrl.__file__
shape, rows, prompt, new = json.loads(sys.argv[1]), 16, 16, 48
lm = CausalLM.from_config(GPT2Config(**shape, bos_token_id=0, eos_token_id=0,
                                       embd_pdrop=0, attn_pdrop=0, resid_pdrop=0))
params = {**lm.init(jax.random.key(0)), "v_head": init_value_head("mlp", shape["n_embd"], jax.random.key(1))}
policy = lm.policy(num_layers_unfrozen=2)
trainable, frozen = split_params(params, lm.config, num_layers_unfrozen=2)
reference = init_reference(trainable)
tokens = jax.random.randint(jax.random.key(2), (rows, prompt), 2, shape["vocab_size"])
inputs = ModelInputs(tokens, jnp.ones((rows, prompt), bool))
knobs = SamplingKnobs(jnp.float32(1), jnp.float32(1))
generate = jax.jit(make_generate(policy, max_new_tokens=new, eos_token_ids=(), pad_token_id=0))
score = jax.jit(make_score(policy, logprob_chunk_bytes=2**28))
config = PPOConfig(num_rollouts=rows, chunk_size=rows, ppo_epochs=2, gen_kwargs=dict(max_new_tokens=new))
optimizer = make_optimizer("adamw", dict(lr=1e-5), make_schedule("constant", {}), max_grad_norm=1.0)
update = jax.jit(ppo_update(policy, optimizer, config, batch_size=rows, minibatch_size=8,
                                 logprob_chunk_bytes=2**28, temperature=1.0), donate_argnums=0)
sample = lambda: generate(trainable, frozen, inputs, jnp.arange(rows), knobs, jax.random.key(3))
completions = sample()
sequences = join(inputs, completions, pad_token_id=0)
scored = score(trainable, frozen, reference, sequences, jnp.float32(1))
batch = Rollouts(sequences, scored, jnp.ones_like(scored.values))
state = [ppo_state(jax.tree.map(jnp.copy, trainable), optimizer, config)]

def learn():
    state[0], metrics = update(state[0], frozen, batch, jax.random.key(4))
    return metrics

work = {"generate": sample, "score": lambda: score(trainable, frozen, reference, sequences, jnp.float32(1)),
        "update": learn}
for name in work:
    jax.block_until_ready(work[name]())
print("ready", flush=True)
for line in sys.stdin:
    begin = time.perf_counter()
    jax.block_until_ready(work[line.strip()]())
    print(time.perf_counter() - begin, flush=True)
"""


def start(tree: Path, shape: dict[str, int]) -> subprocess.Popen[str]:
    """A worker that has compiled everything and waits for names of measurements."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER, json.dumps(shape)],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    if process.stdout.readline().strip() != "ready":
        raise RuntimeError(f"The worker in {tree} did not start; its error stands above.")
    return process


def measure(process: subprocess.Popen[str], name: str) -> float:
    """Seconds of one call."""
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(name + "\n")
    process.stdin.flush()
    return float(process.stdout.readline())


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--baseline", required=True, help="commit to compare with")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each tree, at least 5")
    parser.add_argument("--model", choices=GPT2, default="gpt2-mini")
    flags = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        old = Path(folder) / "baseline"
        subprocess.run(
            ["git", "worktree", "add", "--detach", "--quiet", old, flags.baseline], cwd=ROOT, check=True
        )
        try:
            workers = {tree: start(tree, GPT2[flags.model]) for tree in (old, ROOT)}
            for name in ("generate", "score", "update"):
                times: dict[Path, list[float]] = {old: [], ROOT: []}
                for _ in range(flags.rounds):
                    for tree, worker in workers.items():
                        times[tree].append(measure(worker, name))
                before, now = (statistics.median(times[tree]) for tree in (old, ROOT))
                record = {
                    "benchmark": f"decoder_speed/{name}",
                    "model": flags.model,
                    "rounds": flags.rounds,
                    "baseline": flags.baseline,
                    "seconds_baseline": round(before, 4),
                    "seconds": round(now, 4),
                    "ratio": round(now / before, 3),
                    "hardware": f"{platform.machine()}, {os.cpu_count()} cores",
                }
                print(json.dumps(record), flush=True)
            for worker in workers.values():
                worker.kill()
        finally:
            subprocess.run(["git", "worktree", "remove", "--force", old], cwd=ROOT, check=True)


if __name__ == "__main__":
    main()

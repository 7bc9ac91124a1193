# SPDX-License-Identifier: Apache-2.0
"""In bfloat16 scoring and update agree on every token's probability, because jrl's programs round as written."""

import ast
from pathlib import Path

import pytest

import jrl
from tests.tiny import tiny_hf_config
from tests.trainers.runs import PROMPTS, count_vowels, ppo_config, save_tiny_checkpoint

PACKAGE = Path(jrl.__file__).resolve().parent
# Programs without a pass through a model, and programs that are traced into others, which have the options.
OTHERS = {
    "notebook.py: adapter.merge",
    "trainers/base.py: init",
    "compilation.py: function",
    "trainers/loading/export.py: adapter.merge",
    "trainers/loop/peers.py: jnp.sum",
    "trainers/rollouts/ahead.py: partial(jax.tree.map, jnp.copy)",
    "placement.py: lambda x: x",
    "placement.py: lambda x: [x.sum(axis=group) for group in groups]",
    "rollout/experience.py: assemble",
    "rollout/experience.py: hold_rows",
    "rollout/experience.py: put_rows",
    "trl/ddpo_pipeline.py: ddim_step",
    "trl/ppo_native.py: self._estimates",
    "trlx/trainer/accelerate_ppo_trainer.py: functools.partial(after_rollouts, recipe=self.native_ppo.recipe)",
}


@pytest.mark.slow
def test_the_ratio_before_the_first_step_is_1_in_bfloat16(tmp_path):
    """As XLA compiles by default, it is up to 0.04 away from 1 here."""
    fields = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6)
    hf_config = tiny_hf_config("llama", **fields, initializer_range=0.06)
    tokenizer = save_tiny_checkpoint(tmp_path / "tokenizer")
    config = ppo_config(tokenizer, tmp_path / "run").evolve(
        model={"model_path": hf_config, "num_layers_unfrozen": -1},
        method={"num_rollouts": 32, "chunk_size": 32, "ppo_epochs": 1, "gen_kwargs": {"max_new_tokens": 20}},
        train={"compute_dtype": "bfloat16", "batch_size": 32, "minibatch_size": 8, "total_steps": 1},
    )
    trainer = jrl.train(reward_fn=count_vowels, prompts=PROMPTS, config=config)
    name = "ppo/ratio_max_dev_first_minibatch"
    found = [record[name] for record in trainer.history if name in record]
    assert len(found) == 1 and found[0] < 5e-6


def test_every_program_of_a_model_has_the_options():
    without = set()
    files = [*PACKAGE.glob("*.py")]
    for folder in ("rollout", "trainers", "trl", "trlx"):
        files += (PACKAGE / folder).rglob("*.py")
    texts = {path: path.read_text(encoding="utf-8") for path in files}
    for path, text in texts.items():
        for node in ast.walk(ast.parse(text if "jax.jit" in text else "")):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "jax.jit":
                given = {word.arg: ast.unparse(word.value) for word in node.keywords}
                if given.get("compiler_options") != "COMPILER_OPTIONS":
                    without.add(f"{path.relative_to(PACKAGE).as_posix()}: {ast.unparse(node.args[0])}")
    assert without == OTHERS

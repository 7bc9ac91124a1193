# SPDX-License-Identifier: Apache-2.0
"""How far a mixture's sampler and its learner disagree before the first step, with routing replay and without.

    python benchmarks/routing_replay.py [--rows 32] [--tokens 64] [--experts 16]

A small Mixtral with random weights samples in bfloat16 and is scored in float32. So every difference between the two is
rounding: of activations, and, where rounding changes which experts score highest, of whole experts. Both readings are
of the same samples. Prints one JSON line: |ratio − 1| of the sampled tokens (mean and largest), the share of (token,
layer) pairs for which float32 alone picks other experts, and the share of tokens with such a layer.
"""

from __future__ import annotations

import argparse
import json
from datetime import UTC, datetime
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from transformers import MixtralConfig

from jrl.bench.measure import hardware, versions
from jrl.models.model import CausalLM
from jrl.ops.alignment import join
from jrl.rollout.generate import make_generate
from jrl.rollout.score import make_score
from jrl.typing import ModelInputs, SamplingKnobs

PROMPT, VOCAB, CHUNK_BYTES = 16, 512, 1 << 28


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64, help="of each completion")
    parser.add_argument("--experts", type=int, default=16)
    given = parser.parse_args()
    lm = CausalLM.from_config(mixture(given.experts))
    measured = measure(lm, rows=given.rows, tokens=given.tokens)
    about = {"benchmark": "routing_replay", "date": datetime.now(UTC).date().isoformat()}
    print(json.dumps(about | vars(given) | measured | {"hardware": hardware()} | versions()))


def mixture(num_experts: int) -> MixtralConfig:
    """Four layers of `num_experts` experts, two for each token, whose answers are as large as the stream."""
    ids = dict(vocab_size=VOCAB, bos_token_id=0, eos_token_id=0, pad_token_id=0)
    return MixtralConfig(
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=num_experts,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        initializer_range=0.1,
        **ids,
    )


def measure(lm: CausalLM, *, rows: int, tokens: int) -> dict[str, Any]:
    """Samples once in bfloat16, and reads the samples in float32 twice."""
    params = lm.init(jax.random.key(0))
    prompts = ModelInputs(
        jax.random.randint(jax.random.key(1), (rows, PROMPT), 1, VOCAB), jnp.ones((rows, PROMPT), bool)
    )
    noisy = lm.policy(compute_dtype=jnp.bfloat16, routing_replay=True)
    generate = make_generate(noisy, max_new_tokens=tokens, eos_token_ids=(), pad_token_id=0)
    knobs = SamplingKnobs(jnp.float32(1.0))
    sampled = jax.jit(generate)(params, {}, prompts, jnp.arange(rows), knobs, jax.random.key(2))
    replayed = join(prompts, sampled, pad_token_id=0)
    plain = replayed._replace(inputs=replayed.inputs._replace(experts=None))
    exact = lm.policy(routing_replay=True)
    score = jax.jit(make_score(exact, logprob_chunk_bytes=CHUNK_BYTES))

    def deviations(sequences: Any) -> np.ndarray:
        found = score(params, {}, None, sequences, jnp.float32(1.0)).logprobs
        return np.abs(np.expm1(np.float64(found) - np.float64(sampled.logprobs)))

    @jax.jit
    def own_choices(params: Any) -> Any:
        cache = exact.init_cache(params, {}, plain.inputs, plain.inputs.tokens.shape[1])
        return exact.visited(exact.decode(params, {}, plain.inputs, cache)[1])

    # As sets, and without the last token, of which the sampler keeps no record.
    record, own = (np.sort(x, axis=-1)[:, :-1] for x in (replayed.inputs.experts, own_choices(params)))
    differs = np.any(record != own, axis=-1)
    return {
        "with_replay": _summary(deviations(replayed)),
        "without_replay": _summary(deviations(plain)),
        "visits_that_differ": round(float(differs.mean()), 5),
        "tokens_that_differ": round(float(differs.any(axis=-1).mean()), 5),
    }


def _summary(deviations: np.ndarray) -> dict[str, float]:
    return {
        "ratio_dev_mean": round(float(deviations.mean()), 5),
        "ratio_dev_max": round(float(deviations.max()), 4),
    }


if __name__ == "__main__":
    main()

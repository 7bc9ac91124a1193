# SPDX-License-Identifier: Apache-2.0
"""Runs one tiny encoder-decoder in torch and in jrl, as `tests.models.parity` does with decoders."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import AutoModelForSeq2SeqLM

from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.seq2seq import EncoderDecoder, Rows
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs
from tests.models.parity import NEW_TOKENS, Report, left_padded

WIDTH = 30
LENGTHS = (30, 29, 12, 5)


def compare(hf_config: Any, folder: Path, *, seed: int = 0) -> Report:
    """Compares the model of a tiny config; `folder` must be empty. The first of the blocks is the whole encoder.

    Raises:
      AssertionError: If torch finds tensors missing or left over in what jrl wrote.
    """
    oracle = perturbed(hf_config, seed)
    oracle.save_pretrained(folder / "torch")
    loaded = load_checkpoint(folder / "torch")
    inputs = rows(hf_config.vocab_size)
    theirs, ours = torch_stream(oracle, inputs), jrl_stream(loaded.model, loaded.params, inputs)
    masks = [inputs.context_mask] + [inputs.attention_mask] * (len(ours) - 1)
    encoder, embeddings, *blocks, final_norm, logits = (
        float(np.abs(a - b)[mask].max()) for a, b, mask in zip(ours, theirs, masks, strict=True)
    )

    save_checkpoint(folder / "jrl", loaded.model, loaded.params)
    back = torch_stream(reopened(folder / "jrl"), inputs)[-1]
    again = load_checkpoint(folder / "jrl").params
    same = jax.tree.map(lambda a, b: bool((a == b).all()) and a.dtype == b.dtype, loaded.params, again)
    return Report(
        torch_class=type(oracle).__name__,
        embeddings=embeddings,
        blocks=(encoder, *blocks),
        final_norm=final_norm,
        logits=logits,
        generation=np.array_equal(
            torch_greedy(oracle, inputs), jrl_greedy(loaded.model, loaded.params, inputs)
        ),
        right_padded=None,
        returned=float(np.abs(back - theirs[-1])[inputs.attention_mask].max()),
        round_trip=jax.tree.all(same),
    )


def perturbed(hf_config: Any, seed: int) -> Any:
    """A random torch model, none of its parameters at its initial value."""
    torch.manual_seed(seed)
    oracle = build(hf_config)
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return oracle


def build(hf_config: Any) -> Any:
    """A fresh torch model; a head that nothing scales is its own, as in published checkpoints of 1.1 and mT5.

    transformers ties every new one.
    """
    config = copy.deepcopy(hf_config)
    made = AutoModelForSeq2SeqLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    if not hf_config.to_dict().get("scale_decoder_outputs", False):
        made.lm_head.weight = torch.nn.Parameter(torch.randn_like(made.lm_head.weight))
    return made.eval()


def reopened(folder: Path) -> Any:
    """The torch model of a folder, which must hold exactly its tensors."""
    oracle, info = AutoModelForSeq2SeqLM.from_pretrained(
        folder, attn_implementation="eager", output_loading_info=True
    )
    problems = {what: found for what, found in info.items() if found}
    assert not problems, problems
    return oracle.eval()


def rows(vocab_size: int) -> ModelInputs:
    """Contexts with 0, 1, 7 and 20 pads on the left, and decoder rows padded on the right, on the host."""
    context, context_mask = left_padded(vocab_size)
    mask = np.arange(WIDTH)[None, :] < np.array(LENGTHS)[:, None]
    ids = np.random.default_rng(1).integers(2, vocab_size, mask.shape)
    ids[:, 0] = 0
    arrays: Any = (np.where(mask, ids, 0).astype(np.int32), mask, None, context, context_mask)
    return ModelInputs(*arrays)


def torch_arguments(inputs: ModelInputs) -> dict[str, Any]:
    """What both `forward` and `generate` of torch are told of the context."""
    return {
        "input_ids": torch.tensor(inputs.context_tokens).long(),
        "attention_mask": torch.tensor(inputs.context_mask).long(),
    }


def torch_stream(oracle: Any, inputs: ModelInputs) -> list[np.ndarray]:
    """The encoder's output, the decoder's embeddings, its stream after each block and its final norm, and logits."""
    seen: list[torch.Tensor] = []
    stack = oracle.decoder
    hooks = [
        stack.block[0].register_forward_pre_hook(lambda module, given: seen.append(given[0])),
        *(
            block.register_forward_hook(
                lambda module, given, out: seen.append(out if isinstance(out, torch.Tensor) else out[0])
            )
            for block in stack.block
        ),
        stack.final_layer_norm.register_forward_hook(lambda module, given, out: seen.append(out)),
    ]
    with torch.no_grad():
        out = oracle(
            **torch_arguments(inputs),
            decoder_input_ids=torch.tensor(inputs.tokens).long(),
            decoder_attention_mask=torch.tensor(inputs.attention_mask).long(),
            use_cache=False,
        )
    for hook in hooks:
        hook.remove()
    return [part.numpy() for part in (out.encoder_last_hidden_state, *seen, out.logits)]


def jrl_stream(model: Any, params: Any, inputs: ModelInputs) -> list[np.ndarray]:
    """The same of jrl."""
    module = EncoderDecoder(model.config)

    @jax.jit
    def run(params: Any, inputs: ModelInputs) -> list[Any]:
        def call(*given: Any, method: str) -> Any:
            return module.apply({"params": params}, *given, method=method)

        encoded = call(inputs.context_tokens, inputs.context_mask, method="encode")
        columns = jnp.arange(WIDTH)
        causal = columns[None, :, None] >= columns[None, None, :]
        context = Rows(causal & inputs.attention_mask[:, None, :], columns, inputs.context_mask)
        found = [call(inputs.tokens, method="embed_tokens")]
        for index in range(model.config.num_layers):
            found.append(call(found[-1], encoded, context, index, index + 1, method="run_layers")[0])
        hidden = call(found[-1], method="norm")
        return [encoded, *found, hidden, call(hidden, method="logits")[..., : model.vocab_size]]

    return [np.asarray(part) for part in run(params, jax.tree.map(jnp.asarray, inputs))]


def torch_greedy(oracle: Any, inputs: ModelInputs) -> np.ndarray:
    """The tokens that torch's own `generate` writes; nothing ends a row."""
    oracle.generation_config.eos_token_id = None
    with torch.no_grad():
        found = oracle.generate(**torch_arguments(inputs), max_new_tokens=NEW_TOKENS, do_sample=False)
    return found[:, 1:].numpy()


def jrl_greedy(model: Any, params: Any, inputs: ModelInputs) -> np.ndarray:
    """The tokens that jrl writes, with its cache."""
    generate = make_generate(
        model.policy(), max_new_tokens=NEW_TOKENS, eos_token_ids=(), pad_token_id=0, do_sample=False
    )
    count = len(inputs.tokens)
    start = jnp.full((count, 1), model.config.decoder_start_token_id)
    prompts = ModelInputs(start, jnp.ones((count, 1), bool), None, *map(jnp.asarray, inputs[3:5]))
    knobs = SamplingKnobs(jnp.array(1.0), jnp.array(1.0))
    return np.asarray(
        jax.jit(generate)(params, {}, prompts, jnp.arange(count), knobs, jax.random.key(0)).tokens
    )

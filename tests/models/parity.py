# SPDX-License-Identifier: Apache-2.0
"""Runs one tiny decoder in torch and in jrl, and says how far the two are apart.

The torch model of transformers writes the checkpoint, with every parameter moved away from its initial value, so that
no norm or bias is the identity. jrl reads it, computes the same rows, and writes it back.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSeq2SeqLM,
    Llama4ForConditionalGeneration,
)

from jrl.models.attention import full_context
from jrl.models.checkpoint import load_checkpoint, save_checkpoint
from jrl.models.families import find_family
from jrl.models.positions import token_positions
from jrl.models.transformer import Decoder
from jrl.rollout.generate import make_generate
from jrl.typing import ModelInputs, SamplingKnobs

# Tensors this small are slower with threads.
torch.set_num_threads(1)

PADS = (0, 1, 7, 20)
LENGTH = 20
NEW_TOKENS = 32


@dataclass(frozen=True)
class Report:
    """Largest absolute differences at real tokens, and what agrees exactly.

    Attributes:
      torch_class: Name of the model in transformers.
      embeddings: Of the residual stream before the first block.
      blocks: Of the residual stream after each block.
      final_norm: Of what the head reads.
      logits: Of the logits.
      generation: Whether greedy decoding gives the same tokens, and gives each a log-probability within 1e-4.
      right_padded: Of the logits, where the same rows have their pads on the right; None: not compared.
      returned: Of torch's logits before and after the checkpoint went through jrl.
      round_trip: Whether jrl reads back exactly what it wrote.
    """

    torch_class: str
    embeddings: float
    blocks: tuple[float, ...]
    final_norm: float
    logits: float
    generation: bool
    right_padded: float | None
    returned: float
    round_trip: bool


def compare(hf_config: Any, folder: Path, *, seed: int = 0) -> Report:
    """Compares the model of a tiny config; `folder` must be empty.

    Raises:
      AssertionError: If torch finds tensors missing or left over in what jrl wrote.
    """
    oracle = perturbed(hf_config, seed)
    oracle.save_pretrained(folder / "torch")
    torch_class, oracle = type(oracle).__name__, writer(oracle)
    loaded = load_checkpoint(folder / "torch")
    tokens, mask = left_padded(hf_config.get_text_config().vocab_size)
    theirs = torch_stream(oracle, len(loaded.model.config.layers), tokens, mask)
    stream = jrl_stream(loaded.model)
    ours = stream(loaded.params, tokens, mask)
    embeddings, *_, final_norm, logits = (max_error(a, b, mask) for a, b in zip(ours, theirs, strict=True))
    blocks = [stream_error(a, b, mask) for a, b in zip(ours[1:-2], theirs[1:-2], strict=True)]

    right = (tokens[:, ::-1].copy(), mask[:, ::-1].copy())
    right_padded = max_error(
        stream(loaded.params, *right)[-1],
        torch_stream(oracle, len(blocks), *right)[-1],
        right[1],
    )

    save_checkpoint(folder / "jrl", loaded.model, loaded.params)
    returned = writer(reopened(folder / "jrl", auto_class(hf_config)))
    back = torch_stream(returned, len(blocks), tokens, mask)[-1]
    again = load_checkpoint(folder / "jrl").params
    same = jax.tree.map(
        lambda a, b: np.array_equal(np.asarray(a), np.asarray(b)) and a.dtype == b.dtype, loaded.params, again
    )
    return Report(
        torch_class=torch_class,
        embeddings=embeddings,
        blocks=tuple(blocks),
        final_norm=final_norm,
        logits=logits,
        generation=same_completions(
            torch_greedy(oracle, tokens, mask), jrl_greedy(loaded.model, loaded.params, tokens, mask)
        ),
        right_padded=right_padded,
        returned=max_error(back, theirs[-1], mask),
        round_trip=jax.tree.all(same),
    )


def max_error(one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> float:
    """Largest absolute difference at real tokens."""
    return float(np.abs(one - other)[mask].max())


def stream_error(one: np.ndarray, other: np.ndarray, mask: np.ndarray) -> float:
    """The same of a residual stream; where values are above 10, by the tens of the largest of them.

    Float32 has as many digits for a large number as for a small one. Gemma 4's stream reaches 16: there torch's own
    float32 is 4.7e-5 from its float64, and jrl's 6.5e-5 from that.
    """
    return max_error(one, other, mask) / max(float(np.abs(other[mask]).max()) / 10, 1.0)


def auto_class(hf_config: Any) -> Any:
    """The class that opens checkpoints of a config: a multimodal one has that of its text model in it."""
    if find_family(hf_config.model_type).kind == "seq2seq":
        return AutoModelForSeq2SeqLM
    return AutoModelForImageTextToText if "text_config" in hf_config.to_dict() else AutoModelForCausalLM


def writer(oracle: Any) -> Any:
    """The part of a torch model that reads and writes text: Llama 4's, in transformers 5, asks for an image."""
    return oracle.language_model if type(oracle) is Llama4ForConditionalGeneration else oracle


def perturbed(hf_config: Any, seed: int) -> Any:
    """A random torch model, none of its parameters at its initial value."""
    torch.manual_seed(seed)
    config = copy.deepcopy(hf_config)
    made = auto_class(config).from_config(config, attn_implementation="eager", dtype=torch.float32)
    oracle = made.eval()
    with torch.no_grad():
        for parameter in oracle.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        for module in oracle.modules():
            # Its scale multiplies as 1 + scale and begins at 1 in torch; trained ones are about 0.
            if type(module).__name__ == "NemotronLayerNorm1P":
                module.weight.sub_(1.0)
        # What steers the choice of experts, and what scales the stream, is no parameter there.
        for name, buffer in oracle.named_buffers():
            if name.endswith(("e_score_correction_bias", "layer_scalar")):
                buffer.add_(0.2 * torch.randn_like(buffer))
        # Blocks speak louder than the embedding, or a tied head repeats the last token for ever.
        oracle.get_input_embeddings().weight.mul_(0.3)
    return oracle


def reopened(folder: Path, opens: Any = AutoModelForCausalLM) -> Any:
    """The torch model of a folder, which must hold exactly its tensors."""
    oracle, info = opens.from_pretrained(folder, attn_implementation="eager", output_loading_info=True)
    problems = {what: found for what, found in info.items() if found}
    assert not problems, problems
    return oracle.eval()


def left_padded(vocab_size: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows with 0, 1, 7 and 20 pads on the left, all of one width, and their mask."""
    rng = np.random.default_rng(0)
    mask = np.arange(max(PADS) + LENGTH)[None, :] >= np.array(PADS)[:, None]
    return np.where(mask, rng.integers(2, vocab_size, mask.shape), 0).astype(np.int32), mask


def torch_stream(oracle: Any, num_layers: int, tokens: np.ndarray, mask: np.ndarray) -> list[np.ndarray]:
    """Embeddings, the stream after each block, what the head reads, and logits."""
    seen: list[torch.Tensor] = []
    blocks = next(
        module
        for module in oracle.modules()
        if isinstance(module, torch.nn.ModuleList) and len(module) == num_layers
    )

    def before(module: Any, inputs: tuple[Any, ...], named: dict[str, Any]) -> None:
        seen.append(inputs[0] if inputs else named["hidden_states"])

    def after(module: Any, inputs: Any, output: Any) -> None:
        seen.append(output if isinstance(output, torch.Tensor) else output[0])

    hooks = [blocks[0].register_forward_pre_hook(before, with_kwargs=True)]
    hooks += [block.register_forward_hook(after) for block in blocks]
    hooks.append(oracle.get_output_embeddings().register_forward_pre_hook(before, with_kwargs=True))
    attention_mask = torch.tensor(mask).long()
    # BLOOM has no positions to be told: it counts them from the mask.
    told = {} if oracle.config.model_type == "bloom" else {"position_ids": torch_positions(attention_mask)}
    with torch.no_grad():
        out = oracle(torch.tensor(tokens).long(), attention_mask=attention_mask, use_cache=False, **told)
    for hook in hooks:
        hook.remove()
    return [part.numpy() for part in (*seen, out.logits)]


def torch_positions(attention_mask: Any) -> Any:
    """Counted over the real tokens, as jrl does for every family."""
    return (attention_mask.cumsum(-1) - 1).clamp(min=0)


def jrl_stream(model: Any) -> Callable[[Any, np.ndarray, np.ndarray], list[np.ndarray]]:
    """The same of jrl: `stream(params, tokens, mask)`, compiled once for all rows of a shape."""
    decoder = Decoder(model.config)

    @jax.jit
    def run(params: Any, tokens: Any, mask: Any) -> list[Any]:
        def call(*inputs: Any, method: str) -> Any:
            return decoder.apply({"params": params}, *inputs, method=method)

        positions = token_positions(mask)
        context = full_context(model.config, mask, positions)
        carried = [call(tokens, positions, method="embed_tokens")]
        for index in range(model.config.num_layers):
            carried.append(call(carried[-1], context, index, index + 1, method="run_layers")[0])
        hidden = call(carried[-1].x, method="norm")
        return [*(each.x for each in carried), hidden, call(hidden, method="logits")[..., : model.vocab_size]]

    return lambda params, tokens, mask: [np.asarray(part) for part in run(params, tokens, mask)]


def torch_greedy(oracle: Any, tokens: np.ndarray, mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The tokens that torch's own `generate` adds, and their log-probabilities; nothing ends a row."""
    oracle.generation_config.eos_token_id = None
    with torch.no_grad():
        out = oracle.generate(
            torch.tensor(tokens).long(),
            attention_mask=torch.tensor(mask).long(),
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            return_dict_in_generate=True,
            output_logits=True,
        )
    added = out.sequences[:, tokens.shape[1] :]
    logprobs = torch.stack(out.logits, dim=1).log_softmax(dim=-1)
    return added.numpy(), logprobs.gather(-1, added[:, :, None])[:, :, 0].numpy()


def jrl_greedy(
    model: Any, params: Any, tokens: np.ndarray, mask: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """The same of jrl, with its cache."""
    generate = make_generate(
        model.policy(), max_new_tokens=NEW_TOKENS, eos_token_ids=(), pad_token_id=0, do_sample=False
    )
    rows, knobs = jnp.arange(len(tokens)), SamplingKnobs(jnp.array(1.0), jnp.array(1.0))
    prompts = ModelInputs(jnp.asarray(tokens), jnp.asarray(mask))
    out = jax.jit(generate)(params, {}, prompts, rows, knobs, jax.random.key(0))
    return np.asarray(out.tokens), np.asarray(out.logprobs)


def same_completions(theirs: tuple[np.ndarray, np.ndarray], ours: tuple[np.ndarray, np.ndarray]) -> bool:
    """Whether the tokens are equal and their log-probabilities agree."""
    return np.array_equal(theirs[0], ours[0]) and float(np.abs(theirs[1] - ours[1]).max()) < 1e-4

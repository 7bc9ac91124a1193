# SPDX-License-Identifier: Apache-2.0
"""A classifier as a reward function: texts go in, one number a text comes out, all on the device and without torch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int

from jrl.compilation import COMPILER_OPTIONS
from jrl.data.batching import bucket_length, pad_right
from jrl.data.tokenizer import check_vocabulary, load_tokenizer, without_surrogates
from jrl.distributed import join
from jrl.mesh import make_mesh
from jrl.models.adapters.peft_format import is_adapter_folder
from jrl.models.classifier import Classifier, load_classifier
from jrl.models.classifier_adapter import load_adapted_classifier
from jrl.placement import DISPATCH, place_rows
from jrl.trainers.loading.tokenizers import tokenizer_home
from jrl.typing import Params

POSITIVE = ("positive", "pos")
APPEND_EOS = "append_eos"
"""Entry of tokenizer_config.json: whether the texts that a model was trained on all ended in EOS."""
Output = Literal["probability", "logit"]
OUTPUTS = get_args(Output)


@dataclass(frozen=True, eq=False)
class RewardModel:
    """A reward function: `reward(samples=[...])` gives a float a text. Made by `load_reward_model`.

    Attributes:
      classifier: Architecture and labels.
      params: Its arrays, on the mesh.
      tokenizer: The classifier's own.
      label: Number of the score that is read.
      output: "probability" or "logit" of it; with one label, its logit in either case.
      batch_size: Rows of every program; fewer texts are filled up.
      max_length: Tokens of a text, special tokens included; longer ones are cut.
      mesh: Where the scores are computed.
      compute_dtype: Of activations and matrix products.
      append_eos: Whether EOS is put behind a text that lacks it.
    """

    classifier: Classifier
    params: Params
    tokenizer: Any
    label: int
    output: Output
    batch_size: int
    max_length: int
    mesh: Mesh
    compute_dtype: Any
    append_eos: bool = False

    def __call__(self, samples: Sequence[str]) -> list[float]:
        """Rewards of some texts, in their order.

        Texts of similar length share a batch, and every batch is on its way to the device before the first answer is
        waited for.

        Raises:
          ValueError: If `samples` is not a list of strings.
        """
        if not samples:
            return []
        rows = self._encode(samples)
        order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        answers = [self._dispatch([rows[row] for row in batch]) for batch in batches]
        rewards = [0.0] * len(rows)
        for batch, answer in zip(batches, jax.device_get(answers), strict=True):
            for row, reward in zip(
                batch, answer, strict=False
            ):  # the answer also has the rows that fill it up
                rewards[row] = float(reward)
        return rewards

    def _encode(self, samples: Sequence[str]) -> list[list[int]]:
        """Ids of each text, with the special tokens that the classifier was trained with."""
        if isinstance(samples, str):
            raise ValueError("`samples` must be a list of texts, got one string.")
        for index, sample in enumerate(samples):
            if not isinstance(sample, str):
                raise ValueError(f"`samples[{index}]` must be a string, got {type(sample).__name__}.")
        # `verbose=False`: the texts are cut here, so nobody need be warned of their length.
        room = self.max_length - self.append_eos
        texts = [without_surrogates(sample) for sample in samples]
        encoded = self.tokenizer(texts, truncation=True, max_length=room, verbose=False)
        rows = [list(row) for row in encoded["input_ids"]]
        if not self.append_eos:
            return rows
        eos = self.tokenizer.eos_token_id
        return [row if row[-1:] == [eos] else [*row, eos] for row in rows]

    def _dispatch(self, rows: list[list[int]]) -> Float[Array, "B"]:
        """Sends one batch to the device; waits for nothing."""
        full = rows + [[]] * (self.batch_size - len(rows))
        width = min(bucket_length(max(map(len, rows))), self.max_length)
        tokens, mask = pad_right(full, pad_token_id=0, width=width)
        with DISPATCH, jax.set_mesh(self.mesh):
            return self._score(self.params, *place_rows(self.mesh, (tokens, mask)))

    @functools.cached_property
    def _score(self) -> Callable[..., Float[Array, "B"]]:
        """The compiled program; one for every width that comes."""
        several = len(self.classifier.labels) > 1
        independent = self.classifier.hf_config.problem_type == "multi_label_classification"

        def score(
            params: Params, tokens: Int[Array, "B L"], attention_mask: Bool[Array, "B L"]
        ) -> Float[Array, "B"]:
            scores = self.classifier.scores(params, tokens, attention_mask, compute_dtype=self.compute_dtype)
            if several and self.output == "probability":
                scores = jax.nn.sigmoid(scores) if independent else jax.nn.softmax(scores, axis=-1)
            return scores[:, self.label]

        return jax.jit(score, compiler_options=COMPILER_OPTIONS)


def load_reward_model(
    path_or_id: Any,
    *,
    label: str | int | None = None,
    output: Output = "probability",
    batch_size: int = 64,
    max_length: int | None = None,
    mesh: Mesh | None = None,
    dtype: Any = None,
    append_eos: bool | None = None,
    tokenizer: Any = None,
) -> RewardModel:
    """A sequence classifier of the Hugging Face format as a reward function for `jrl.train`.

    Args:
      path_or_id: A folder, or "organisation/name" on the hub, with its tokenizer: a BERT, RoBERTa or DistilBERT
        classifier, or a decoder with a score head. Or a folder with a LoRA adapter of one, which is merged into the
        base model that it names; without a tokenizer in it, that model's is read. Or a transformers or PEFT model
        object of torch.
      label: Which of several labels is the reward: its name in the checkpoint, whatever the case, or its number.
        Default: the one called positive; else the second of two.
      output: The label's probability (softmax over the labels; a sigmoid each where the checkpoint says
        "multi_label_classification"), or its logit. A model with one label always gives its logit.
      batch_size: Rows of a batch on the device.
      max_length: Longest text in tokens; default: what model and tokenizer allow. Longer ones are cut on the
        tokenizer's truncation side.
      mesh: Where it runs, for example that of the trainer; default: the first device.
      dtype: Of parameters and computation; default float32. Scores are float32 always.
      append_eos: Whether EOS is put behind a text that lacks it, for a model that was trained on texts which end in it:
        their decoded form has lost it. Default: what `RewardTrainer` wrote into the tokenizer's config, else False.
      tokenizer: A folder, a hub id or a tokenizer that is built already; default: the one that lies with the model.
    Raises:
      FileNotFoundError: If the folder holds no checkpoint.
      ValueError: If it is no classifier, has no such label, or an argument is out of range.
    """
    if output not in OUTPUTS:
        raise ValueError(f"`output` must be one of {', '.join(OUTPUTS)}, got {output!r}.")
    if batch_size < 1:
        raise ValueError(f"`batch_size` must be at least 1, got {batch_size}.")
    join()  # before anything of JAX is computed
    mesh = make_mesh(1, 1, 1, devices=jax.local_devices()[:1]) if mesh is None else mesh
    if any(device.process_index != jax.process_index() for device in mesh.devices.flat):
        raise ValueError(
            "`mesh` must lie on this process's own devices, got one over several processes: each scores rows of its "
            "own. `jrl.trainers.loading.setup.reward_mesh(config)` gives one, and None the first device."
        )
    dtype = jnp.float32 if dtype is None else dtype
    load = load_adapted_classifier if is_adapter_folder(path_or_id) else load_classifier
    classifier, params = load(path_or_id, dtype=dtype, mesh=mesh)
    tokenizer = load_tokenizer(tokenizer_home(path_or_id, "`tokenizer`") if tokenizer is None else tokenizer)
    tokenizer.truncation_side = tokenizer.init_kwargs.get("truncation_side", "right")
    check_vocabulary(tokenizer, classifier.vocab_size)
    longest = min(classifier.max_positions, tokenizer.model_max_length)
    max_length = longest if max_length is None else max_length
    append_eos = bool(tokenizer.init_kwargs.get(APPEND_EOS, False)) if append_eos is None else append_eos
    if append_eos and tokenizer.eos_token_id is None:
        raise ValueError(f"`append_eos` must be False: the tokenizer of {path_or_id} has no EOS token.")
    if not 1 <= max_length <= classifier.max_positions:
        raise ValueError(
            f"`max_length` must be from 1 to the model's {classifier.max_positions} positions, got {max_length}."
        )
    return RewardModel(
        classifier,
        params,
        tokenizer,
        find_label(classifier.labels, label),
        output,
        batch_size,
        max_length,
        mesh,
        dtype,
        append_eos,
    )


def find_label(labels: Sequence[str], label: str | int | None) -> int:
    """Number of the label that is the reward.

    Args:
      labels: Names in order.
      label: A name, whatever the case; a number, or its digits; None picks the only one, the one called positive, or
        the second of two.
    Raises:
      ValueError: If there is no such label, or none can be picked.
    Example:
      >>> find_label(("NEGATIVE", "POSITIVE"), None), find_label(("toxic", "neutral"), "Neutral")
      (1, 1)
    """
    names = [name.casefold() for name in labels]
    listed = ", ".join(f"{number}: {name}" for number, name in enumerate(labels))
    if label is None:
        positive = [number for number, name in enumerate(names) if name in POSITIVE]
        if len(labels) == 1:
            return 0
        if len(positive) == 1:
            return positive[0]
        if len(labels) == 2:
            return 1
        raise ValueError(f"`label` must say which of the labels is the reward ({listed}), got None.")
    if isinstance(label, str) and names.count(label.casefold()) == 1:
        return names.index(label.casefold())
    if str(label).isdecimal() and int(label) < len(labels):
        return int(label)
    raise ValueError(f"`label` must be a label of this classifier ({listed}) or its number, got {label!r}.")

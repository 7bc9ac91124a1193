# SPDX-License-Identifier: Apache-2.0
"""Prompts of a DDPO epoch: the user's function, called under random generators of the run's own."""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jrl.data.sources.fingerprint import fingerprint

PromptFunction = Callable[[], tuple[str, Any]]


class Prompt(NamedTuple):
    """Prompt of an image.

    Attributes:
      text: What the model reads.
      metadata: Whatever the user's reward function wants to know beside it.
    """

    text: str
    metadata: Any


class PromptList:
    """A prompt function that draws from a list, each prompt as likely as the others.

    Args:
      prompts: Texts, or mappings with `prompt`, whose other keys are the metadata.
    Raises:
      ValueError: If there are none, or one has no text.
    """

    def __init__(self, prompts: Sequence[Any]) -> None:
        self.prompts = [_with_metadata(prompt) for prompt in prompts]
        if not self.prompts:
            raise ValueError("`prompts` must hold at least one prompt, got none.")

    def __call__(self) -> tuple[str, Any]:
        """Draws a prompt; its metadata is a copy, which whoever gets it may change."""
        text, metadata = random.choice(self.prompts)
        return text, copy.deepcopy(metadata)

    def sha256(self) -> str:
        """Fingerprint of the list."""
        return fingerprint(self.prompts)


def _with_metadata(prompt: Any) -> tuple[str, dict[str, Any]]:
    """(text, metadata) of an entry of a file."""
    entry = {"prompt": prompt} if isinstance(prompt, str) else dict(prompt)
    text = entry.pop("prompt", None)
    if not isinstance(text, str):
        raise ValueError(f"`prompts` must be texts, or records with a text as `prompt`, got {prompt!r:.80}.")
    return text, entry


class PromptRandomness:
    """Python's and NumPy's global generators, as a prompt function finds them.

    A prompt function draws from `random` or `numpy.random`. It finds there a stream that depends on the seed and on its
    own calls alone, and whoever else draws, a reward function on another thread for one, keeps the generators that
    were there before: so the prompts of a run repeat, and go on where a checkpoint was written.

    Args:
      seed: Of both generators.
    """

    def __init__(self, seed: int) -> None:
        self._python: Any = random.Random(seed).getstate()
        self._numpy: Any = np.random.RandomState(seed % 2**32).get_state()

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        """The global generators are the run's own inside."""
        python, of_numpy = random.getstate(), np.random.get_state()
        random.setstate(self._python)
        np.random.set_state(self._numpy)
        try:
            yield
        finally:
            self._python, self._numpy = random.getstate(), np.random.get_state()
            random.setstate(python)
            np.random.set_state(of_numpy)

    def state(self) -> dict[str, Any]:
        """State of the random generators, as plain JSON."""
        version, words, gauss = self._python
        name, keys, place, has_gauss, cached = self._numpy
        return {
            "python": [version, np.asarray(words, "<u4").tobytes().hex(), gauss],
            "numpy": [
                name,
                np.asarray(keys, "<u4").tobytes().hex(),
                int(place),
                int(has_gauss),
                float(cached),
            ],
        }

    def load(self, found: Mapping[str, Any]) -> None:
        """Puts back what `state` gave."""
        version, words, gauss = found["python"]
        self._python = (version, tuple(np.frombuffer(bytes.fromhex(words), "<u4").tolist()), gauss)
        name, keys, place, has_gauss, cached = found["numpy"]
        self._numpy = (name, np.frombuffer(bytes.fromhex(keys), "<u4"), place, has_gauss, cached)


def draw_prompts(
    prompt_function: PromptFunction, randomness: PromptRandomness, count: int, *, images_per_prompt: int
) -> list[Prompt]:
    """The prompts of an epoch, one an image: the function is called once for every `images_per_prompt` of them.

    All are drawn before the first image is: what a reward function draws on another thread then mixes with nothing.

    Args:
      prompt_function: The user's: no arguments, returns (prompt, metadata).
      randomness: What it draws from.
      count: Images of the epoch, a multiple of `images_per_prompt`.
      images_per_prompt: Images of one prompt, which stand beside each other.
    Raises:
      ValueError: If it returns something else.
    """
    with randomness():
        drawn = [_checked(prompt_function()) for _ in range(count // images_per_prompt)]
    return [prompt for prompt in drawn for _ in range(images_per_prompt)]


def _checked(answer: Any) -> Prompt:
    """(prompt, metadata) as a `Prompt`."""
    if not isinstance(answer, tuple | list) or len(answer) != 2 or not isinstance(answer[0], str):
        raise ValueError(
            "`prompt_function` must return (prompt, metadata) with a text as prompt, got "
            f"{answer!r:.80}. Without metadata, return (prompt, {{}})."
        )
    return Prompt(answer[0], answer[1])

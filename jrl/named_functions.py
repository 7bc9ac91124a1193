# SPDX-License-Identifier: Apache-2.0
"""Functions and rewards by the names that flags give them."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from jax.sharding import Mesh

from jrl import image_rewards
from jrl.suggestions import did_you_mean
from jrl.trainers.diffusion.aesthetic_reward import load_aesthetic_reward
from jrl.trainers.diffusion.clip_reward import load_clip_reward
from jrl.trainers.loading.reward_model import Output, load_reward_model
from jrl.typing import DifferentiableReward


def load_function(name: str) -> Callable[..., Any]:
    """The function that `module:function` names; modules of the working directory are found too.

    Raises:
      ValueError: If there is no such module or function, with what there is.
    """
    module_name, _, function_name = name.partition(":")
    if not module_name or not function_name:
        raise ValueError(
            f"expected `module:function`, as in `my_rewards:politeness`, got {name!r}. Write "
            f"`my_rewards:{name.strip(':')}` for a function of my_rewards.py."
        )
    module = load_module(module_name, asked_for_as=name)
    function = vars(module).get(function_name)
    if not callable(function):
        found = sorted(
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and value.__module__ == module.__name__
        )
        near = did_you_mean(function_name, found)
        raise ValueError(f"{module_name!r} has no function {function_name!r}; it has {found}.{near}")
    return function


def load_module(module_name: str, *, asked_for_as: str) -> ModuleType:
    """Imports a module; those of the working directory are found, too.

    Args:
      module_name: Dotted.
      asked_for_as: What the user wrote, for the error.
    Raises:
      ValueError: If there is no such module.
    """
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        return importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise
        here = sorted(path.stem for path in Path.cwd().glob("*.py"))
        raise ValueError(
            f"there is no module {module_name!r} (asked for as {asked_for_as!r}), neither installed nor as "
            f"{module_name.replace('.', '/')}.py in {Path.cwd()}.{did_you_mean(module_name, here)} Mend the name, or "
            "call `jrl` in the folder where the file lies."
        ) from error


def names_function(name: str) -> bool:
    """True where a reward's name is that of a function to import, and not of a classifier."""
    return not Path(name).is_dir() and (":" in name or "/" not in name)


def load_reward(
    name: str, *, label: str | None = None, output: Output | None = None, mesh: Mesh | None = None
) -> Callable[..., Any]:
    """The reward that `--reward` names: an importable `module:function`, or a classifier by its folder or hub id.

    Args:
      name: Of the reward.
      label: Of the classifier, as in `jrl.load_reward_model`.
      output: Likewise; None: its default.
      mesh: Where a classifier runs.
    Raises:
      ValueError: If there is no such function or classifier, or a function is given a label or an output.
    """
    if names_function(name):
        if label is not None or output is not None:
            raise ValueError(
                f"--reward-label and --reward-output choose a score of a classifier, but --reward is {name!r}."
            )
        return load_function(name)
    return load_reward_model(name, label=label, output=output or "probability", mesh=mesh)


def load_rewards(
    names: Sequence[str],
    *,
    label: str | None = None,
    output: Output | None = None,
    mesh: Mesh | None = None,
) -> Callable[..., Any] | list[Callable[..., Any]]:
    """The rewards that `--reward` names, once or several times; see `load_reward`.

    Args:
      names: At least one.
      label: Of the one classifier among them.
      output: Likewise.
      mesh: Where classifiers run.
    Returns:
      A function where there is one name, a list of functions where there are several.
    Raises:
      ValueError: Where one is none, or a label or an output is of no classifier, or of several.
    """
    if len(names) == 1:
        return load_reward(names[0], label=label, output=output, mesh=mesh)
    classifiers = [name for name in names if not names_function(name)]
    if (label is not None or output is not None) and len(classifiers) != 1:
        raise ValueError(
            "--reward-label and --reward-output choose a score of one classifier, but --reward names "
            f"{len(classifiers)}: {classifiers}. `jrl.load_reward_model` in a function of yours chooses for each."
        )
    return [
        load_function(name)
        if names_function(name)
        else load_reward(name, label=label, output=output, mesh=mesh)
        for name in names
    ]


def load_image_reward(name: str) -> image_rewards.ImageReward | DifferentiableReward:
    """The reward of images that `--reward` of DDPO names.

    Args:
      name: "brightness", "jpeg_compressibility", "jpeg_incompressibility"; or as for `load_differentiable_reward`.
    Raises:
      FileNotFoundError: If a file of a model is missing.
      ValueError: If there is no such function.
    """
    return image_rewards.BY_NAME.get(name) or load_differentiable_reward(name)


def load_differentiable_reward(name: str) -> Any:
    """The reward of images that `--reward` of reward gradients names: a model, or a function to import.

    Args:
      name: "aesthetic:" and a file of the predictor's weights, "clip:" and a folder or hub id, or `module:function`.
    Raises:
      FileNotFoundError: If a file of a model is missing.
      ValueError: If there is no such function.
    """
    if not names_image_model(name):
        return load_function(name)
    kind, _, place = name.partition(":")
    return _IMAGE_MODELS[kind](place)


def names_image_model(name: str) -> bool:
    """True where a reward's name is that of a model's file or folder: behind the colon stands no name of a function."""
    kind, _, place = name.partition(":")
    return kind in _IMAGE_MODELS and bool(place) and not place.isidentifier()


_IMAGE_MODELS: Mapping[str, Callable[[str], DifferentiableReward]] = {
    "aesthetic": load_aesthetic_reward,
    "clip": load_clip_reward,
}

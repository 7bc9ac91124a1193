# SPDX-License-Identifier: Apache-2.0
"""A reward model as a second LoRA adapter on the base that a policy's adapter has: the base is there once.

TRL's `reward_adapter`. Nothing is switched: the policy's adapter is not read here, and the reward's not there.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jrl.compilation import COMPILER_OPTIONS
from jrl.models.adapters import is_adapter_folder, read_adapter_folder
from jrl.models.classifier import SCORE, Classifier, token_scores
from jrl.models.classifier_adapter import bind_classifier, count_labels, load_classifier_adapter
from jrl.models.hub import name_of_base
from jrl.models.policy import make_policy
from jrl.trainers.loading import COMPUTE_DTYPES
from jrl.typing import Frozen, ModelInputs, Params, PolicyFns


@dataclass(frozen=True)
class RewardAdapter:
    """An adapter with its score head.

    Attributes:
      params: The LoRA matrices and the head.
      policy: The body with the adapter.
    """

    params: Params
    policy: PolicyFns

    @classmethod
    def load(cls, folder: str, hf_config: Any, base: Any, *, compute_dtype: str) -> RewardAdapter:
        """Reads an adapter that a reward model was trained with.

        Args:
          folder: PEFT's, with the head in it.
          hf_config: Of the policy's base.
          base: That base, as the policy names it; an adapter of another one is warned of.
          compute_dtype: As `train.compute_dtype`.
        Raises:
          ValueError: If it does not fit the base, or has no head.
        """
        found, name = read_adapter_folder(folder), name_of_base(base)
        if found.base_model is not None and name is not None and name_of_base(found.base_model) != name:
            warnings.warn(
                f"`reward_adapter` {folder} was trained on {found.base_model}, and the policy's base is {name}: its "
                "scores mean something only where both are the same model.",
                stacklevel=4,
            )
        config = copy.deepcopy(hf_config)
        config.num_labels = count_labels(found.folder, Classifier.from_config(config))
        model = Classifier.from_config(config)
        adapter = bind_classifier(model, found.config)
        policy = make_policy(
            model.body, num_layers_unfrozen=-1, adapter=adapter, compute_dtype=COMPUTE_DTYPES[compute_dtype]
        )
        assert adapter is not None
        return cls(load_classifier_adapter(found.folder, model, adapter), policy)

    def scores(self, frozen: Frozen, inputs: ModelInputs) -> Float[Array, "B L labels"]:
        """Float32 scores at every token; the reward of a text is that of its last real one."""
        return _scores(self.policy, self.params, frozen, inputs)


@partial(jax.jit, static_argnums=0, compiler_options=COMPILER_OPTIONS)
def _scores(
    policy: PolicyFns, params: Params, frozen: Frozen, inputs: ModelInputs
) -> Float[Array, "B L labels"]:
    body = {name: value for name, value in params.items() if name != SCORE}
    features = policy.branch(body, frozen, policy.trunk(frozen, inputs), inputs, None)
    return token_scores(params[SCORE], jnp.asarray(features.policy))


def check_reward_adapter(folder: Any) -> str:
    """The folder of a `reward_adapter`.

    Raises:
      ValueError: If it is none.
    """
    if not isinstance(folder, str) or not is_adapter_folder(folder):
        raise ValueError(
            f"`reward_adapter` must be a folder with a PEFT adapter of a reward model, got {folder!r}. One of the hub "
            "must be downloaded first."
        )
    return folder

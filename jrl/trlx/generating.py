# SPDX-License-Identifier: Apache-2.0
"""How trlX's trainers sample: ids in, ids out, and texts of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jrl.trainers.base import GENERATION_STREAM
from jrl.trainers.policy_trainer import PolicyTrainer
from jrl.trlx.base import BaseRLTrainer
from jrl.trlx.sampling import decode_samples, generate_ids


class GeneratingTrainer(BaseRLTrainer):
    """A trainer that samples through one of jrl's own.

    Attributes:
      native: jrl's own trainer.
    """

    native: PolicyTrainer
    _calls: int = 0

    @property
    def generate_kwargs(self) -> dict[str, Any]:
        """How evaluation samples."""
        return dict(self.config.method.gen_kwargs)

    @property
    def generate_experience_kwargs(self) -> dict[str, Any] | None:
        """How rollouts sample, where that is another way."""
        return None

    def generate(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> np.ndarray:
        """Prompts with what the policy writes after them, as rollouts sample.

        Args:
          input_ids: Prompts (B P), padded on either side.
          attention_mask: 1 on real tokens; default: all are.
          **kwargs: Replace entries of `gen_experience_kwargs`, or of `gen_kwargs` where there are none.
        Returns:
          Ids (B, P + longest completion), padded after each row's end; of a seq2seq model, the decoder's rows.
        """
        return self._generate(
            input_ids, attention_mask, self.generate_experience_kwargs or self.generate_kwargs, kwargs
        )

    def generate_eval(self, input_ids: Any, attention_mask: Any = None, **kwargs: Any) -> np.ndarray:
        """The same as evaluation samples."""
        return self._generate(input_ids, attention_mask, self.generate_kwargs, kwargs)

    def _generate(
        self, input_ids: Any, attention_mask: Any, base: Mapping[str, Any], changes: Mapping[str, Any]
    ) -> np.ndarray:
        # Tokenizers return it beside the ids, and no language model here has a table for it.
        values = {name: value for name, value in {**base, **changes}.items() if name != "token_type_ids"}
        if "max_length" in changes and "max_new_tokens" not in changes:
            values.pop("max_new_tokens", None)
        key = jax.random.fold_in(self.native.root_key, GENERATION_STREAM)
        key, self._calls = jax.random.fold_in(key, self._calls), self._calls + 1
        return generate_ids(self.native, input_ids, attention_mask, values, key)

    def sample(self, prompts: Sequence[str], length: int, n_samples: int) -> list[str]:  # type: ignore[override]
        """Completions of the prompts as texts, the list repeated as often as `n_samples` needs."""
        prompts = [prompts[number % len(prompts)] for number in range(n_samples)]
        self._calls += 1
        return self.native.generate(prompts, gen_kwargs={"max_new_tokens": length}, seed=self._calls)

    def decode(
        self,
        prompts: Sequence[Any],
        samples: Sequence[Any],
        prompt_sizes: Sequence[int] | None = None,
        append_eos_token: bool = False,
    ) -> tuple[list[str], list[str], list[str]]:
        """Texts of what `generate` returned: (samples, prompts, outputs), outputs cut at the first stop sequence.

        Args:
          prompts: Ids of the prompts (B P).
          samples: Ids as `generate` returned them.
          prompt_sizes: Columns of each prompt; default: all P.
          append_eos_token: Whether EOS's text follows outputs that ended by themselves.
        """
        return decode_samples(
            self.native,
            prompts,
            samples,
            prompt_sizes,
            stop_sequences=tuple(self.stop_sequences),
            append_eos_token=append_eos_token,
        )

# SPDX-License-Identifier: Apache-2.0
"""What an evaluation of images says of its rewards."""

import numpy as np
import pytest

import jrl
from jrl.trainers.diffusion.ddpo_evaluation import Judged


def test_images_of_one_prompt_are_averaged_before_the_error():
    rewards = np.array([1.0, 3.0, 7.0, np.nan], np.float32)
    judged = Judged(np.zeros((4, 3, 8, 8)), ("a cat", "a cat", "a dog", "a dog"), rewards)
    found = judged.as_evaluation(jrl.default_ddpo_config().method)
    assert found.sampling["reward_means"] == [2.0, 7.0]
    # Their deviation is 5 / sqrt(2).
    assert found.metrics["reward/standard_error"] == pytest.approx(2.5)
    assert found.metrics["reward/mean"] == pytest.approx(11 / 3)
    of_one = judged._replace(prompts=("a cat",) * 4).as_evaluation(jrl.default_ddpo_config().method)
    assert "reward/standard_error" not in of_one.metrics

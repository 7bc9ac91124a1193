# SPDX-License-Identifier: Apache-2.0
"""The 95 rules that decide whether RL training of language models works, and which test holds which.

A test that holds rule 1.2 is called `test_lore_1_2_...`; from those names `docs/lore.md` is written
(`python tests/mutations.py --write-table`), and a test keeps it up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TABLE = ROOT / "docs" / "lore.md"

RULES = {
    "1.1": "train on the sampled ids, never on re-encoded text",
    "1.2": "under left padding, positions count real tokens",
    "1.3": "masks come from lengths, so pad may equal EOS",
    "1.4": "the EOS that the policy emitted is an action",
    "1.5": "everything after the first EOS is masked, nothing before it",
    "1.6": "logits at t score token t+1; the value at t precedes that action",
    "1.7": "prompt, tool and environment tokens are no actions",
    "1.8": "a completion cut by the length limit is not terminated",
    "1.9": "reward, mask and stored ids use the same cut at a stop string",
    "1.10": "one chat template for sampling and training",
    "1.11": "packed rows: segment ids in attention, restarting positions",
    "1.12": "rows without actions contribute zero, not NaN",
    "1.13": "prompts are cut on the side that is meant, and counted",
    "2.1": "logits are divided by the temperature in every ratio and KL",
    "2.2": "the sampler's log-probability is that of the processed distribution",
    "2.3": "before the first step the ratio is 1",
    "2.4": "log-softmax in float32",
    "2.5": "the head accumulates in float32",
    "2.6": "no dropout anywhere in RL",
    "2.7": "cached decoding and full scoring agree",
    "2.8": "a row does not depend on its neighbours",
    "2.9": "after a weight sync the sampler has all new weights",
    "2.10": "health metrics of sampler against learner",
    "2.11": "log-ratios are clamped before exp, reported unclamped",
    "2.12": "merged LoRA is another policy than base and adapter",
    "2.13": "float32 products on a GPU need their precision set",
    "3.1": "values: k1 unbiased, k3 unbiased and never negative, k2 biased",
    "3.2": "gradients of k1, k2, k3 as losses",
    "3.3": "KL as a reward: β·k1 per token, detached",
    "3.4": "value of k3 with the gradient of k2",
    "3.5": "off policy, the KL term needs the ratio",
    "3.6": "KL to a copied reference is 0 at the start",
    "3.7": "KL from unfiltered logits on both sides",
    "3.8": "the adaptive coefficient's closed form",
    "3.9": "KL per token and per sequence have different names",
    "4.1": "the score lands on the last action",
    "4.2": "GAE runs over valid steps only",
    "4.3": "returns are raw advantages plus old values",
    "4.4": "whitening: masked, over the global batch",
    "4.5": "the value clip takes the larger loss",
    "4.6": "the critic starts near zero",
    "4.7": "a reward model reads the last real token; its scores are centred",
    "4.8": "a fixed penalty for a missing EOS",
    "4.9": "groups without spread have advantage 0",
    "4.10": "which deviation divides, and over what",
    "4.11": "dividing by the group's deviation is optional",
    "4.12": "leave-one-out baseline",
    "4.13": "the samples of a prompt stay together",
    "4.14": "several rewards: order of sum and normalisation",
    "4.15": "clip, then KL penalty, then whitening",
    "4.16": "soft over-long penalty",
    "4.17": "dropped groups are refilled or renormalised",
    "4.18": "the discount per token is 1 unless argued",
    "5.1": "reductions are chosen by name",
    "5.2": "the denominator counts the whole optimizer batch",
    "5.3": "the clipped surrogate's gradient table",
    "5.4": "dual clip",
    "5.5": "the first loss is 0, its gradient is not",
    "5.6": "no gradient into advantages, returns and old log-probabilities",
    "5.7": "GSPO: one ratio a response",
    "5.8": "CISPO: all tokens keep their gradient",
    "5.9": "old log-probabilities are fixed for all epochs",
    "5.10": "entropy: full vocabulary, masked, maximised",
    "5.11": "chunked log-probabilities equal plain ones",
    "5.12": "SFT: completions only, mean over the global batch's tokens",
    "5.13": "clip fraction by side and sign, k3, largest ratio",
    "6.1": "three policies: sampler, anchor, current",
    "6.2": "masking instead of truncating importance weights",
    "6.3": "no double correction",
    "6.4": "samples carry the weights' version",
    "6.5": "weight swaps in mid-sequence",
    "6.6": "effective sample size",
    "6.7": "the order of completion does not choose the batch",
    "7.1": "where Adam's ε sits",
    "7.2": "float32 master weights and moments",
    "7.3": "the accumulated gradient is clipped, and logged before",
    "7.4": "schedules count optimizer steps",
    "7.5": "frozen means unchanged to the bit; decay skips norms and biases",
    "7.6": "non-finite steps are skipped and counted",
    "7.7": "masks act on the input of log, exp and division",
    "8.1": "DPO sums log-probabilities; ln 2 at the start",
    "8.2": "when reference log-probabilities may be cached",
    "8.3": "the chosen log-probability is watched",
    "8.4": "the reward model's loss",
    "8.5": "ILQL's parts",
    "8.6": "a terminal state has value 0",
    "8.7": "RFT's selection",
    "8.8": "DDPO's densities",
    "9.1": "keys derive from seed, step and index, not from arrival",
    "9.2": "same config, seed and machine: same metrics",
    "9.3": "pass@k",
    "9.4": "verifiers under attack",
    "9.5": "controls: constant, reversed and length-only rewards",
    "9.6": "a tiny task with a known optimum",
    "9.7": "the untrained model is scored first",
}
WAITS = {
    # jrl samples with the weights that it is about to update, and waits for the update before it samples again.
    **{f"6.{number}": "rollouts from older weights" for number in (4, 5, 7)},
}
_TEST = re.compile(
    r"^(class (?P<class>\w+)|(?P<indent> *)def (?P<test>test_lore_\d+_\d+_\w+)\()", re.MULTILINE
)
_HEAD = """# Lore: which test holds which rule

The rules are those of `RULES` in `tests/lore.py`; a test is named after its rule. `python tests/mutations.py`
breaks each rule on purpose and shows its test going red. This page is written by
`python tests/mutations.py --write-table`.

```bash
python tests/mutations.py 1.3      # breaks one rule; its tests must go red
```

Rules are numbered by subject. Group 1 is about tokens and masks, group 2 about log-probabilities.

| rule | what it says | tests |
|---|---|---|
"""


def lore_tests() -> dict[str, list[str]]:
    """Rule -> ids of its tests, found by name."""
    found: dict[str, list[str]] = {}
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        owner = ""
        for match in _TEST.finditer(path.read_text(encoding="utf-8")):
            if match["class"]:
                owner = f"{match['class']}::"
                continue
            _, _, chapter, number, *_ = match["test"].split("_")
            owner = owner if match["indent"] else ""
            test = f"{path.relative_to(ROOT)}::{owner}{match['test']}"
            found.setdefault(f"{chapter}.{number}", []).append(test)
    return found


def lore_table() -> str:
    """The text of `docs/lore.md`."""
    tests, lines = lore_tests(), []
    for rule, title in RULES.items():
        named = "<br>".join(f"`{test}`" for test in tests.get(rule, []))
        lines.append(f"| {rule} | {title} | {named or 'waits for ' + WAITS.get(rule, 'its test')} |\n")
    return _HEAD + "".join(lines)

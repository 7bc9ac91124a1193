# SPDX-License-Identifier: Apache-2.0
"""Opens a checkpoint with the real TRL and writes down what it computes.

    python3.11 -m venv trl-venv
    trl-venv/bin/pip install trl==0.11.4 transformers==4.46.3 torch==2.13.0
    trl-venv/bin/python tests/golden/make_trl_value_head.py CHECKPOINT_FOLDER TOKENS.npy OUT.npz

`tests/models/test_trl.py` runs it on a folder that jrl has just written, with the interpreter that
JRL_TRL_PYTHON names.
"""

import sys

import numpy as np
import torch
from trl import AutoModelForCausalLMWithValueHead


def main(folder: str, tokens_path: str, out_path: str) -> None:
    """Writes logits, values and the head's own tensors."""
    model = AutoModelForCausalLMWithValueHead.from_pretrained(folder).eval()
    tokens = torch.tensor(np.load(tokens_path)).long()
    with torch.no_grad():
        logits, _, values = model(tokens)
    head = {name.replace(".", "_"): tensor.numpy() for name, tensor in model.v_head.state_dict().items()}
    np.savez(out_path, logits=logits.numpy(), values=values.numpy(), **head)


if __name__ == "__main__":
    main(*sys.argv[1:])

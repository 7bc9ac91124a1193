# SPDX-License-Identifier: Apache-2.0
"""Uploads of a model's folder to the Hugging Face hub."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any


def push_to_hub(
    folder: str | os.PathLike[str],
    repo_id: str,
    *,
    private: bool | None = None,
    token: Any = None,
    commit_message: str = "Upload model",
    revision: str | None = None,
) -> str:
    """Uploads a folder to the Hugging Face hub and returns its address.

    Args:
      folder: That `save_pretrained` wrote, or `hf_model` of a checkpoint; its README.md is the model card.
      repo_id: "organisation/name"; made if missing.
      private: Whether a repository that is made is private.
      token: Of the hub; None: the one of this machine.
      commit_message: Of the upload.
      revision: Branch that gets it, made if missing; None: the main one.

    Raises:
      ValueError: If there is no such folder, before anything is asked of the hub.
      RuntimeError: If the hub cannot be reached, or refuses; the message has the hub's reason.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    if not Path(folder).is_dir():
        raise ValueError(
            f"`folder` must be a folder that holds a model, got {os.fspath(folder)!r}, which is none. "
            "`trainer.save_pretrained(folder)` writes one."
        )
    api = HfApi(token=token)
    # Errors of the client that huggingface_hub connects by, which it is free to change.
    of_client: Any = HfHubHTTPError.__bases__
    try:
        address = api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        api.upload_folder(
            repo_id=repo_id, folder_path=Path(folder), commit_message=commit_message, revision=revision
        )
    except (OSError, RuntimeError, HFValidationError, *of_client) as error:
        reason = " ".join(str(error).split())
        raise RuntimeError(f"`repo_id` {repo_id!r} could not be pushed to: {reason}") from error
    return str(address)

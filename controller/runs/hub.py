"""Uploads an exported folder to the Hugging Face hub at the user's request. No other module uploads anything.

The repository's name is checked before anything is exported. huggingface_hub finds the user's token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, UserError, first_line

KEY = "--push-to-hub"


def check_repository(repository: str) -> None:
    """Raise UserError if this is not a valid repository name or the package is not installed. Uses no network."""
    try:
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError as error:
        what = "the `huggingface_hub` package is not installed"
        raise UserError(what, where=KEY, remedy="pip install huggingface_hub") from error
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        what = f"`{repository}` is not a valid repository name"
        raise UserError(what, where=KEY, remedy="use USER/NAME") from error


def push(folder: Path, repository: str, *, is_public: bool, message: str, api: Any = None) -> str:
    """Upload the folder to a repository, which is created if it does not exist, and return its URL.

    Args:
        folder: folder with config, weights and tokenizer.
        repository: USER/NAME, or NAME for one in the user's own namespace.
        is_public: whether a created repository is public; an existing one is not changed.
        message: commit message.
        api: a huggingface_hub.HfApi; None: one with the user's token.

    Raises:
        OperationError: the hub rejects the upload, or cannot be reached.
    """
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        url = api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # a third-party library: no token, no permission, no network, no space
        why = f"{type(error).__name__}: {first_line(error)}"
        words = f"{folder} is complete, but could not be uploaded to {repository} ({why})"
        remedy = f"run `hf auth login` to store a token, then `hf upload {repository} {folder}` to upload the folder"
        raise OperationError(f"{words} -> {remedy}") from error
    return str(url)

"""Sends an exported folder to the Hugging Face hub, when a user asks for it: the only place that does.

Owns: the repository, what is refused before anything is exported. Refuses: tokens (the package finds the user's).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from areal_like.errors import OperationError, UserError, first_line

KEY = "--push-to-hub"


def check_repository(repository: str) -> None:
    """Raise UserError where this is no name of a repository, or the package is absent. Touches no network."""
    try:
        from huggingface_hub.utils import HFValidationError, validate_repo_id
    except ImportError as error:
        what = "huggingface_hub is not installed"
        raise UserError(what, where=KEY, remedy="pip install huggingface_hub") from error
    try:
        validate_repo_id(repository)
    except HFValidationError as error:
        raise UserError(f"`{repository}` is no repository", where=KEY, remedy="such as USER/NAME") from error


def push(folder: Path, repository: str, *, is_public: bool, message: str, api: Any = None) -> str:
    """Upload the folder to a repository, which is made where it does not exist; its address.

    Args:
        folder: with config, weights and tokenizer.
        repository: USER/NAME, or NAME of the user's own.
        is_public: of a repository that is made; one that is there stays as it is.
        message: of the commit.
        api: a huggingface_hub.HfApi; None: one with the user's token.

    Raises:
        OperationError: the hub refuses, or cannot be reached.
    """
    if api is None:
        from huggingface_hub import HfApi

        api = HfApi()
    try:
        url = api.create_repo(repository, private=not is_public, exist_ok=True)
        api.upload_folder(repo_id=url.repo_id, folder_path=folder, commit_message=message)
    except Exception as error:  # somebody else's library: no token, no right, no network, no room
        why = f"{type(error).__name__}: {first_line(error)}"
        words = f"{folder} is complete, and could not be sent to {repository} ({why})"
        remedy = f"`hf auth login` gives a token, and `hf upload {repository} {folder}` sends it"
        raise OperationError(f"{words} -> {remedy}") from error
    return str(url)

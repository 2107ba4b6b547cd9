"""Opens an encrypted starting model for the commands that can use one; the others say how to decrypt it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

from areal_like.errors import UserError
from areal_like.plain_folder import is_encrypted_model, plain_folder, use_memory_for_scratch
from controller.config.loading import Loaded
from controller.config.run_config import RunConfig


@contextlib.contextmanager
def opened_model(loaded: Loaded[RunConfig], command: str) -> Iterator[Loaded[RunConfig]]:
    """Yield the config with a decrypted copy of an encrypted `model.path`, for `eval`. If its runs are encrypted,
    temporary files are in shared memory from here on.

    Raises UserError: another command, a run that is not encrypted itself, or the key is missing or another one.
    """
    config = loaded.config
    if config.encryption is not None:  # checks of the configuration write rows to temporary files
        use_memory_for_scratch()
    folder = Path(config.model.path or "").expanduser()
    if config.model.path is None or not is_encrypted_model(folder):
        yield loaded
        return
    if command != "eval":
        what = f"the model is encrypted, which areal-like {command} does not support"
        raise UserError(what, where=f"model.path: {folder}", remedy=f"run areal-like decrypt {folder} NEW_FOLDER")
    if config.encryption is None:
        what = "the model is encrypted, but answers to its evaluation would be stored in the clear"
        raise UserError(what, where=f"model.path: {folder}", remedy="set encryption.key_file or encryption.key_env")
    with plain_folder(folder.resolve()) as plain:
        model = config.model.model_copy(update={"path": str(plain)})
        yield dataclasses.replace(loaded, config=config.model_copy(update={"model": model}))

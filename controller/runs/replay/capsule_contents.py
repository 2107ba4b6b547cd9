"""Entries of a capsule: which files of checkpoints and models, and the checks of what an archive of others holds."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from areal_like.errors import UserError
from controller.runs.replay.capsule_file import MANIFEST
from controller.runs.replay.config_text import LEFT_OUT, portable

WEIGHTS = ".safetensors"
MODEL_SUFFIXES = frozenset({WEIGHTS, ".json", ".jinja", ".txt", ".model", ".tiktoken", ".bpe"})
"""Files of a model's folder that are taken: weights, config and tokenizer."""
_OF_OTHER_RUNS = ("provenance.json", "trainer_state.json")
"""Files that say how a model was made: they may name folders, and no step reads them."""
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".pickle", ".ckpt", ".joblib"})
_NAMES_ITS_FOLDER = ("adapter_config.json", "config.json", "tokenizer_config.json")
"""Files whose `base_model_name_or_path`, `_name_or_path` or `name_or_path` may be a folder of the machine."""
Entries = dict[str, Path | bytes]
"""Files and contents by their names in the archive."""


def model_files(prefix: str, folder: Path) -> Entries:
    """Weights, config and tokenizer of a model, as entries; other files of the folder are not read by a step.

    Raises UserError if the folder is gone or has no weights as safetensors.
    """
    if not folder.is_dir():
        remedy = "restore this model, which the step reads"
        raise UserError("there is no such model folder", where=str(folder), remedy=remedy)
    found = {
        file: _without_folder(file)
        for file in sorted(folder.rglob("*"))
        if file.is_file() and file.suffix in MODEL_SUFFIXES and file.name not in _OF_OTHER_RUNS
    }
    if not any(file.suffix == WEIGHTS for file in found):
        remedy = "convert the model's weights to safetensors"
        raise UserError(
            "the folder has no safetensors files, and a capsule must not contain pickle files",
            where=str(folder),
            remedy=remedy,
        )
    return {f"{prefix}{file.relative_to(folder)}": content for file, content in found.items()}


def checkpoint_files(prefix: str, folder: Path) -> Entries:
    """All files of a checkpoint, as entries, with its manifest of the files as they are in the capsule."""
    found: Entries = {
        str(file.relative_to(folder)): _without_folder(file) for file in sorted(folder.rglob("*")) if file.is_file()
    }
    manifest = json.loads((folder / MANIFEST).read_text())
    for name, content in found.items():
        if isinstance(content, bytes) and name in manifest["files"]:
            digest = hashlib.sha256(content).hexdigest()
            manifest["files"][name] = {"num_bytes": len(content), "sha256": digest}
    found[MANIFEST] = json.dumps(manifest, indent=1).encode()
    return {f"{prefix}{name}": content for name, content in found.items()}


def _without_folder(file: Path) -> Path | bytes:
    """The file, or its contents without the path of the model's folder, which adapters and some configs name."""
    if file.name not in _NAMES_ITS_FOLDER:
        return file
    try:
        found = json.loads(file.read_text())
    except ValueError:
        return file
    if not isinstance(found, dict):
        return file
    names = [key for key in found if key.endswith("name_or_path") and portable(found[key]) != found[key]]
    return json.dumps({**found, **dict.fromkeys(names, LEFT_OUT)}, indent=2).encode() if names else file


def refuse_pickles(names: Iterable[str]) -> None:
    """Raise ValueError if a file may be a pickle: an archive of others may have weights in one."""
    for name in names:
        if PurePosixPath(name).suffix.lower() in PICKLES:
            raise ValueError(f"{name} may be a pickle file, which a capsule must not contain")


def read_result(file: Path) -> dict[str, Any]:
    """Read result.json. Raises OSError, ValueError."""
    found = json.loads(file.read_text())
    if not isinstance(found, dict):
        raise ValueError(f"{file.name} is not a JSON object")
    for key, kind in (("gradients", list), ("metrics", dict), ("tensors", dict)):
        if not isinstance(found.get(key), kind):
            raise ValueError(f"{file.name} has no {key}")
    if not all(isinstance(update, dict) for update in found["gradients"]):
        raise ValueError(f"{file.name} does not list the gradients by tensor")
    return found


def read_setup(file: Path) -> dict[str, Any]:
    """Read trainer.json of where a capsule was made. Raises OSError, ValueError."""
    found = json.loads(file.read_text())
    setup = found.get("setup_here") if isinstance(found, dict) else None
    return setup if isinstance(setup, dict) else {}


def count(manifest: Mapping[str, Any], key: str) -> int:
    """A positive number of the manifest. Raises ValueError."""
    value = manifest.get(key)
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"the manifest has no valid {key}")
    return value

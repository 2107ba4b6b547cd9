"""Checks without torch whether a folder is a Hugging Face model that can be loaded: config.json, weights and tokenizer
files.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.weights.safetensors_header import read_header, shapes_in
from areal_like.weights.tensor_parts import has_parts
from controller.config.problems import nearest

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")

MAX_SMALL_BYTES = 32 << 20
"""Largest size of the files of a model without its weights that are sent to another machine."""
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def weight_bytes(folder: Path) -> int:
    """Size of the weight files of a model's folder; 0 if there are none (yet)."""
    return sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in folder.glob(pattern))


def files_without_weights(folder: Path) -> dict[str, bytes]:
    """Files of a model's folder except its weights, by name; none if they are larger than MAX_SMALL_BYTES together."""
    paths = [path for path in sorted(folder.iterdir()) if path.is_file() and path.suffix not in _WEIGHT_SUFFIXES]
    if sum(path.stat().st_size for path in paths) > MAX_SMALL_BYTES:
        return {}
    return {path.name: path.read_bytes() for path in paths}


def find_model(path: str) -> Path | None:
    """The local folder of a model; None for a hub name that is not downloaded. Raises UserError if it is neither."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        if not any(folder.iterdir()):
            raise UserError(
                "the folder is empty",
                where=path,
                remedy="specify a folder that contains config.json and model.safetensors",
            )
        return folder
    if folder.exists():
        raise UserError(
            "the path is a file, not a folder", where=path, remedy="specify the folder that contains config.json"
        )
    if is_hub_name(path):
        cached = _hub_snapshot(path)
        if cached is None and os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
            raise UserError(
                "the model is not on this machine, and HF_HUB_OFFLINE prevents downloading it",
                where=path,
                remedy="unset HF_HUB_OFFLINE, or specify the folder of a local model",
            )
        return cached
    parent = folder.parent
    near = nearest(folder.name, [p.name for p in parent.iterdir() if p.is_dir()], count=2) if parent.is_dir() else []
    remedy = (
        f"did you mean {' or '.join(str(parent / name) for name in near)}?" if near else "specify the folder of a model"
    )
    raise UserError("no such folder", where=path, remedy=remedy)


def is_hub_name(path: str) -> bool:
    """Return whether the text has the form owner/name, and no folder called owner exists."""
    return re.fullmatch(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*", path) is not None and not Path(path).parent.is_dir()


def _hub_snapshot(name: str) -> Path | None:
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")).expanduser()
    snapshots = hub / f"models--{name.replace('/', '--')}" / "snapshots"
    found = [path for path in snapshots.glob("*") if (path / "config.json").is_file()]
    return max(found, key=lambda path: path.stat().st_mtime) if found else None


def read_model_config(folder: Path) -> dict[str, Any]:
    """Read config.json of a model. Raises UserError."""
    path = folder / "config.json"
    if not path.is_file():
        raise UserError(
            "the folder contains no config.json", where=str(folder), remedy="specify a Hugging Face model folder"
        )
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"the file cannot be read as JSON ({error})",
            where=str(path),
            remedy="correct the file, or download it again",
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise UserError(
            "the file contains no model_type", where=str(path), remedy="use the model's original config.json"
        )
    return config


def check_weights(folder: Path) -> None:
    """Check the weight files. Raises UserError if any are missing, empty, truncated or not safetensors."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise UserError(
                "the index of the weights is damaged", where=str(index), remedy="download the file again"
            ) from error
        files = [folder / str(name) for name in names]
        for file in files:
            if not file.is_file():
                raise UserError(f"{file.name} is missing", where=str(index), remedy="download the complete model")
    else:
        files = [file for file in (folder / "model.safetensors",) if file.is_file()]
        if not files and (folder / "adapter_config.json").is_file():
            remedy = (
                "convert the checkpoint to a complete model with areal-like export, and specify the exported folder"
            )
            raise UserError("the folder contains only a LoRA adapter", where=str(folder), remedy=remedy)
        if not files and has_parts(folder):
            remedy = "convert it with areal-like export, and specify the exported folder"
            raise UserError(
                "the folder is a checkpoint in the parts of several ranks", where=str(folder), remedy=remedy
            )
        if not files and not list(folder.glob("pytorch_model*.bin*")):
            raise UserError(
                "the folder contains no weights",
                where=str(folder),
                remedy="specify a folder that contains model.safetensors",
            )
    for file in files:
        read_header(file)


def tensor_shapes(path: str) -> dict[str, tuple[int, ...]]:
    """Shapes of a local model's tensors by name, from its safetensors headers; empty if they cannot be read, or are the
    parts of a checkpoint, which `check_weights` refuses."""
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        folder = find_model(path)
        if folder is None or has_parts(folder):
            return {}
        for file in sorted(folder.glob("*.safetensors")):
            shapes |= shapes_in(file)
    except (UserError, OSError, KeyError, TypeError, ValueError, OverflowError):
        return {}
    return shapes


def check_tokenizer(folder: Path) -> None:
    """Check the tokenizer. Raises UserError if a folder has no tokenizer files."""
    if not folder.is_dir():
        raise UserError(
            "there is no such tokenizer folder",
            where=str(folder),
            remedy="set model.tokenizer to from_model, bytes, or an existing folder",
        )
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise UserError(
            "the folder contains no tokenizer",
            where=str(folder),
            remedy="copy tokenizer.json into this folder, or set model.tokenizer",
        )


def problems_of(path: str, tokenizer: str) -> tuple[list[UserError], dict[str, Any] | None, bool]:
    """All problems of model.path, its config if it can be read, and whether the model is on this machine."""
    found: list[UserError] = []
    config: dict[str, Any] | None = None
    try:
        folder = find_model(path)
    except UserError as error:
        return [error], None, True
    if folder is not None:
        try:
            config = read_model_config(folder)
        except UserError as error:
            found.append(error)
        found += _faults(folder, tokenizer)
    elif tokenizer not in ("from_model", "bytes") and ":" not in tokenizer and not is_hub_name(tokenizer):
        found += [error for error in (_fault(check_tokenizer, Path(tokenizer)),) if error]
    return found, config, folder is not None


def _faults(folder: Path, tokenizer: str) -> Iterator[UserError]:
    checks = [(check_weights, folder)]
    if tokenizer == "from_model":
        checks.append((check_tokenizer, folder))
    elif tokenizer != "bytes" and ":" not in tokenizer:
        checks.append((check_tokenizer, Path(tokenizer)))
    for check, target in checks:
        fault = _fault(check, target)
        if fault is not None:
            yield fault


def _fault(check: Any, target: Path) -> UserError | None:
    try:
        check(target)
    except UserError as error:
        return error
    return None

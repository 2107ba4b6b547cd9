"""Reads from config.json whether a folder is a classifier, without torch and without weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from areal_like.errors import UserError
from areal_like.scored_text import check_tokenizer

SEQUENCE, TOKEN = "ForSequenceClassification", "ForTokenClassification"
WHERE = "reward scorer reward_model"


@dataclass(frozen=True)
class Head:
    """The output of the folder's model: one row of scores per text, or per token."""

    is_per_token: bool
    num_labels: int
    label: int
    """Index of the class whose score is used."""


def check_folder(path: str, label: int | str | None) -> Head:
    """Check a folder. Raises UserError if it does not exist, has no config, is not a classifier, or lacks the class
    (then `where` is `label`)."""
    folder = Path(path).expanduser()
    if not folder.is_dir():
        raise UserError(
            f"there is no folder {path}", where=WHERE, remedy="use a local folder that contains a classifier"
        )
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        remedy = "use a folder in Hugging Face format"
        raise UserError(f"{path} has no config.json", where=WHERE, remedy=remedy) from error
    except (OSError, ValueError) as error:
        raise UserError(f"{path}/config.json cannot be read ({error})", where=WHERE) from error
    names = config.get("architectures") if isinstance(config, dict) else None
    name = names[0] if isinstance(names, list) and names and isinstance(names[0], str) else ""
    if not name.endswith((SEQUENCE, TOKEN)):
        raise UserError(
            f"{path} contains {name or 'a model without a named architecture'}, which is not a classifier, so its "
            "scores would come from randomly initialised weights",
            where=WHERE,
            remedy=f"use a model whose architecture name ends with {SEQUENCE} or {TOKEN}",
        )
    if not any(next(folder.glob(pattern), None) for pattern in ("*.safetensors", "pytorch_model*.bin")):
        remedy = "download the weights of the model"
        raise UserError(f"{path} contains no weights (*.safetensors)", where=WHERE, remedy=remedy)
    check_tokenizer(folder)
    classes = _classes(config)
    return Head(name.endswith(TOKEN), len(classes), _index_of(label, classes))


def _classes(config: dict[str, Any]) -> list[str]:
    """Names of the classes by index; transformers assumes two classes if config.json names none."""
    names = config.get("id2label")
    if isinstance(names, dict) and names:
        try:
            return [str(name) for _, name in sorted((int(index), name) for index, name in names.items())]
        except ValueError:
            pass
    number = config.get("num_labels")
    return [f"LABEL_{index}" for index in range(number if isinstance(number, int) and number > 0 else 2)]


def _index_of(label: int | str | None, classes: list[str]) -> int:
    if label is None:
        if len(classes) == 1:
            return 0
        raise UserError(
            f"the model has {len(classes)} classes, but no class is chosen as the reward", where="label",
            remedy=f"set label to one of {', '.join(classes[:8])}",
        )  # fmt: skip
    if isinstance(label, int) and 0 <= label < len(classes):
        return label
    if isinstance(label, str) and label in classes:
        return classes.index(label)
    raise UserError(f"the model has no class {label!r}", where="label", remedy=f"use one of {', '.join(classes[:8])}")

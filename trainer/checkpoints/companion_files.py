"""The files besides weights and config that belong to a model's folder, and copying them. Imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path

COMPANIONS = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.jinja", "chat_template*",
    "additional_chat_templates", "generation_config.json", "*.tiktoken", "sentencepiece*", "spiece*",
    "reward_model.json",
)  # fmt: skip


def copy_companions(source: Path, folder: Path) -> None:
    """Copy tokenizer, chat template and generation config of the model folder `source`."""
    for pattern in COMPANIONS:
        for file in sorted(source.glob(pattern)):
            if file.is_dir():
                shutil.copytree(file, folder / file.name, dirs_exist_ok=True)
            else:
                shutil.copyfile(file, folder / file.name)

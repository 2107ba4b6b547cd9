"""The files that make a model's folder complete: which are copied, folders among them, and which never are."""

from __future__ import annotations

from pathlib import Path

from trainer.checkpoints.companion_files import copy_companions

COMPANIONS = (
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "chat_template.jinja", "chat_template.json", "tool_use.jinja", "generation_config.json",
    "qwen.tiktoken", "sentencepiece.bpe.model", "spiece.model", "additional_chat_templates/tools.jinja",
)  # fmt: skip
OTHERS = (
    "config.json",
    "model.safetensors",
    "optimizer.safetensors",
    "README.md",
    "state.json",
    "notes/tokenizer.json",
)


def test_tokenizer_templates_and_generation_config_are_copied_and_nothing_else(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    target.mkdir()
    for name in (*COMPANIONS, *OTHERS):
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"content of {name}")
    copy_companions(source, target)
    copied = {file.relative_to(target).as_posix(): file.read_text() for file in target.rglob("*") if file.is_file()}
    assert copied == {name: f"content of {name}" for name in COMPANIONS}


def test_what_lies_there_already_is_replaced_also_in_folders(tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    for folder, text in ((source, "new"), (target, "old")):
        (folder / "additional_chat_templates").mkdir(parents=True)
        (folder / "additional_chat_templates" / "a.jinja").write_text(text)
        (folder / "tokenizer.json").write_text(text)
    (target / "additional_chat_templates" / "own.jinja").write_text("kept")
    copy_companions(source, target)
    assert (target / "tokenizer.json").read_text() == "new"
    templates = target / "additional_chat_templates"
    assert {file.name: file.read_text() for file in templates.iterdir()} == {"a.jinja": "new", "own.jinja": "kept"}


def test_a_folder_without_companions_gives_none(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "target").mkdir()
    copy_companions(tmp_path / "source", tmp_path / "target")
    assert list((tmp_path / "target").iterdir()) == []

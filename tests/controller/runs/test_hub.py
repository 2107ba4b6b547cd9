"""Sending an exported folder to the hub, with an API that records calls: no test touches the network."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from areal_like.errors import OperationError, UserError
from controller.runs import convert, hub
from controller.runs.hub import check_repository, push
from controller.runs.serving_words import serving_words


class Url(str):
    """As RepoUrl: an address that knows its repository."""

    __slots__ = ()

    @property
    def repo_id(self) -> str:
        return str(self)


class Api:
    def __init__(self, error: Exception | None = None) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.error = error

    def create_repo(self, repository: str, **facts: Any) -> Any:
        self.calls.append(("create_repo", (repository, facts)))
        return Url(f"me/{repository.rpartition('/')[2]}")

    def upload_folder(self, **facts: Any) -> None:
        self.calls.append(("upload_folder", facts))
        if self.error is not None:
            raise self.error


@pytest.mark.parametrize("is_public", [False, True])
def test_the_repository_is_made_private_unless_asked_and_gets_the_folder(is_public: bool, tmp_path: Path) -> None:
    api = Api()
    assert push(tmp_path, "model", is_public=is_public, message="step", api=api) == "me/model"
    assert api.calls == [
        ("create_repo", ("model", {"private": not is_public, "exist_ok": True})),
        ("upload_folder", {"repo_id": "me/model", "folder_path": tmp_path, "commit_message": "step"}),
    ]


def test_a_refusal_of_the_hub_is_one_sentence_that_keeps_the_folder(tmp_path: Path) -> None:
    with pytest.raises(
        OperationError, match=r"is complete, but could not be uploaded to a/b \(OSError: 401\).*hf auth login"
    ):
        push(tmp_path, "a/b", is_public=False, message="", api=Api(OSError("401\nmore")))


def test_what_is_no_repository_is_refused_before_anything_is_exported() -> None:
    check_repository("user/model")
    for wrong in ("a/b/c", "..", "x y"):
        with pytest.raises(UserError, match="is not a valid repository name"):
            check_repository(wrong)


@pytest.fixture
def exported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Any]:
    """Exports that write nothing, and what was sent."""
    sent: list[Any] = []
    folder = tmp_path / "run" / "checkpoints" / "step_000004"
    monkeypatch.setattr(convert, "checkpoint_of", lambda source, version: folder)
    monkeypatch.setattr(convert, "export_checkpoint", lambda *arguments, **more: "float32")
    monkeypatch.setattr(convert, "push", lambda target, repository, **facts: sent.append((repository, facts)) or "url")
    return sent


def test_an_export_sends_nothing_unless_asked(
    exported: list[Any], tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    asked: dict[str, Any] = {"version": None, "dtype": None, "lora": None}
    monkeypatch.setattr(hub, "push", lambda *arguments, **facts: pytest.fail("the network"))
    assert convert.export("run", str(tmp_path / "out"), **asked) == 0
    assert exported == []
    words = capsys.readouterr().out
    assert f"vllm serve {tmp_path / 'out'}" in words
    assert convert.export("run", str(tmp_path / "out"), **asked, repository="me/model") == 0
    assert exported == [("me/model", {"is_public": False, "message": "step_000004 of run"})]
    assert "uploaded the model to url" in capsys.readouterr().out
    with pytest.raises(UserError, match="--public: --public requires a repository"):
        convert.export("run", str(tmp_path / "out"), **asked, is_public=True)


def test_a_folder_is_served_by_commands_that_can_be_pasted(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    (folder / "chat_template.jinja").touch()
    lines = serving_words(folder)
    assert [line.partition(":")[0] for line in lines] == ["SGLang", "vLLM", "llama.cpp"]
    assert all(f"'{folder}'" in line for line in lines)
    (folder / "adapter_config.json").write_text('{"base_model_name_or_path": "Qwen/Qwen3-0.6B"}')
    lines = serving_words(folder)
    assert f"vllm serve Qwen/Qwen3-0.6B --enable-lora --lora-modules 'my model'='{folder}'" in lines[1]
    (folder / "adapter_config.json").write_text("{")
    assert "vllm serve BASE --enable-lora" in serving_words(folder)[1]


@pytest.mark.parametrize(
    ("config", "is_float32"),
    [
        ('{"dtype": "float32"}', True),
        ('{"torch_dtype": "float32"}', True),
        ('{"dtype": "bfloat16"}', False),
        ("[", False),
    ],
)
def test_servers_are_asked_to_keep_float32(tmp_path: Path, config: str, is_float32: bool) -> None:
    (tmp_path / "config.json").write_text(config)
    assert [line.endswith(" --dtype float32") for line in serving_words(tmp_path)[:2]] == [is_float32] * 2


def test_a_model_without_a_chat_template_is_asked_for_completions(tmp_path: Path) -> None:
    assert "ask for /v1/completions" in serving_words(tmp_path)[-1]
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert len(serving_words(tmp_path)) == 3

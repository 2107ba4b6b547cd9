"""Claims about files and variables that options name: read as they should be, and no error shows a key."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.errors import UserError
from areal_like.external.key import read_key
from services.reward.option_files import read_rubric
from services.reward.scorer_options import HttpOptions

URL = "http://127.0.0.1:1/score"
SECRET = "sk-secret"


def of_file(path: Path) -> str | None:
    return read_key(HttpOptions(url=URL, key_file=str(path)), "here")


def of_env(value: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setenv("SOME_KEY", value)
    return read_key(HttpOptions(url=URL, key_env="SOME_KEY"), "here")


def test_server_without_a_key_needs_none() -> None:
    assert read_key(HttpOptions(url=URL), "here") is None


def test_key_is_what_stands_in_the_file_or_the_variable_without_white_space_around_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(f"  {SECRET}\n")
    assert of_file(tmp_path / "key") == SECRET
    monkeypatch.setenv("HOME", str(tmp_path))
    assert of_file(Path("~/key")) == SECRET
    assert of_env(f"{SECRET}\n", monkeypatch) == SECRET


@pytest.mark.parametrize(
    "key", [f"{SECRET} {SECRET}", f"{SECRET}\t{SECRET}", f"{SECRET}\n{SECRET}", f"{SECRET}\u00fc", f"{SECRET}\x07"]
)
def test_key_that_no_header_can_carry_is_refused_and_not_shown(
    key: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "key").write_text(key)
    for read in (lambda: of_file(tmp_path / "key"), lambda: of_env(key, monkeypatch)):
        with pytest.raises(UserError) as raised:
            read()
        assert "contains white space, control or non-ASCII" in raised.value.what
        assert SECRET not in str(raised.value)
        assert raised.value.where == "here"


def test_empty_key_names_where_it_was_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "key").write_text(" \n")
    with pytest.raises(UserError) as raised:
        of_file(tmp_path / "key")
    assert raised.value.what == f"file {tmp_path / 'key'} contains no key"
    assert raised.value.remedy == "write the key into this file"
    with pytest.raises(UserError) as raised:
        of_env("", monkeypatch)
    assert raised.value.what == "environment variable SOME_KEY contains no key"


def test_key_file_that_cannot_be_read_says_why(tmp_path: Path) -> None:
    with pytest.raises(UserError) as raised:
        of_file(tmp_path / "none")
    assert raised.value.what == f"the key cannot be read from file {tmp_path / 'none'} (No such file or directory)"
    (tmp_path / "key").write_bytes(b"\xff\xfe")
    with pytest.raises(UserError, match=r"\(not text\)"):
        of_file(tmp_path / "key")


def test_rubric_is_the_text_of_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "rubric").write_text("J\u00fcdge: {{ response }}", encoding="utf-8")
    assert read_rubric(str(tmp_path / "rubric"), "here") == "J\u00fcdge: {{ response }}"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert read_rubric("~/rubric", "here") == "J\u00fcdge: {{ response }}"


@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "cannot be read (No such file or directory)"), (b"\xff", "cannot be read (not UTF-8 text)"),
     (b"no answer in it", "response"), (b"{{ response", "rubric_file")],
)  # fmt: skip
def test_rubric_that_cannot_be_used_is_named_with_its_file(content: bytes | None, words: str, tmp_path: Path) -> None:
    file = tmp_path / "rubric"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UserError) as raised:
        read_rubric(str(file), "here")
    assert raised.value.what.startswith(f"rubric_file {file} ")
    assert words in raised.value.what
    assert raised.value.where == "here"

"""Claims about requests: asked once, answered once, rubbish is answered too, and nothing is left behind."""

from __future__ import annotations

from pathlib import Path

import pytest

from areal_like.errors import UserError
from controller.runtime.control_requests import MAX_BYTES, Request, Requests, answer_to, ask, is_taken, withdraw


def test_request_is_taken_once_and_answered(tmp_path: Path) -> None:
    folder = tmp_path / "requests"
    desk = Requests(folder)
    assert desk.take() == []
    key = ask(folder, "drain", "rollout-1")
    assert answer_to(folder, key) is None
    assert is_taken(folder, key) is False
    assert desk.take() == [Request(key, "drain", "rollout-1")]
    assert desk.take() == []
    assert is_taken(folder, key) is True
    desk.answer(key, "rollout-1", is_granted=True)
    assert answer_to(folder, key) == (True, "rollout-1")
    assert list(folder.iterdir()) == []


def test_what_an_earlier_stretch_left_is_void(tmp_path: Path) -> None:
    ask(tmp_path, "add")
    assert Requests(tmp_path).take() == []


@pytest.mark.parametrize(
    "content", ["", "[]", "{", '{"wish": "explode"}', '{"wish": "drain", "worker": 3}', "x" * 9999]
)
def test_what_is_no_request_is_refused_and_removed(tmp_path: Path, content: str) -> None:
    desk = Requests(tmp_path)
    (tmp_path / "k.json").write_text(content)
    assert desk.take() == []
    found = answer_to(tmp_path, "k")
    assert found is not None
    assert not found[0]
    assert list(tmp_path.iterdir()) == []


def test_withdrawn_request_is_not_granted(tmp_path: Path) -> None:
    desk = Requests(tmp_path)
    withdraw(tmp_path, ask(tmp_path, "add"))
    assert desk.take() == []


def test_folder_that_cannot_be_written_is_a_users_mistake(tmp_path: Path) -> None:
    (tmp_path / "requests").write_text("a file is in the way")
    with pytest.raises(UserError, match="request"):
        ask(tmp_path / "requests", "add")


def test_oversized_request_is_not_read_whole(tmp_path: Path) -> None:
    desk = Requests(tmp_path)
    (tmp_path / "k.json").write_text('{"wish": "add", "worker": "' + "x" * MAX_BYTES + '"}')
    assert desk.take() == []


def test_of_many_requests_sixty_four_are_taken_at_one_look(tmp_path: Path) -> None:
    desk = Requests(tmp_path)
    keys = sorted(ask(tmp_path, "add") for _ in range(70))
    assert [request.key for request in desk.take()] == keys[:64]
    assert [request.key for request in desk.take()] == keys[64:]


def test_a_folder_that_cannot_be_read_holds_no_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ask(tmp_path, "add")

    def failing(path: Path, pattern: str) -> None:
        raise OSError("input/output error")

    monkeypatch.setattr(Path, "glob", failing)
    assert Requests(tmp_path).take() == []


def test_answer_that_cannot_be_written_is_no_reason_to_end_the_run(tmp_path: Path) -> None:
    desk = Requests(tmp_path / "never made")
    desk.answer("k", "text", is_granted=True)
    assert answer_to(tmp_path / "never made", "k") is None


def test_answer_is_read_once_and_withdrawing_takes_it_away(tmp_path: Path) -> None:
    desk = Requests(tmp_path)
    desk.answer("k", "no", is_granted=False)
    assert answer_to(tmp_path, "k") == (False, "no")
    assert answer_to(tmp_path, "k") is None
    desk.answer("k", "yes", is_granted=True)
    withdraw(tmp_path, "k")
    assert answer_to(tmp_path, "k") is None
    (tmp_path / "k.answer").write_text('{"other": 1}')
    assert answer_to(tmp_path, "k") == (False, "")


def test_requests_are_taken_in_the_order_they_were_left_and_each_has_a_key_of_its_own(tmp_path: Path) -> None:
    desk = Requests(tmp_path)
    keys = [ask(tmp_path, wish) for wish in ("add", "checkpoint", "drain")]  # type: ignore[arg-type]
    assert [(request.key, request.wish, request.worker) for request in desk.take()] == [
        (keys[0], "add", ""), (keys[1], "checkpoint", ""), (keys[2], "drain", ""),
    ]  # fmt: skip
    assert len(set(keys)) == 3

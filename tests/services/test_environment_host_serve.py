"""The whole life of an environment process, played in this one: from its setup to the end of its stream."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from typing import Any

import msgspec
import pytest

from areal_like.errors import UserError
from services.environment import host as module
from services.environment.config import EnvironmentSettings
from services.environment.host import load, main, serve
from services.environment.job import (
    Act,
    Answered,
    Begin,
    Close,
    HostReady,
    HostRefusal,
    HostSetup,
    decode_for_service,
)
from services.environment.marker import Marker
from services.processes.framing import PREFIX, frame
from tests.open_descriptors import num_open_on

SETTINGS = EnvironmentSettings(kind="guess_number", options={})
SETUP = HostSetup(settings=SETTINGS.model_dump(mode="json"), service_pid=77)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process did to itself, in order."""
    done: list[Any] = []
    monkeypatch.setattr(module, "die_with_parent", lambda pid: done.append(("parent", pid)))
    monkeypatch.setattr(module, "freeze_heap", lambda: done.append("settled"))
    monkeypatch.setattr(module, "become_subreaper", lambda: done.append("subreaper"))
    monkeypatch.setattr(module, "append_user_path", lambda: done.append("path"))
    monkeypatch.setattr(module.faulthandler, "enable", lambda: done.append("faults"))
    return done


def served(*messages: msgspec.Struct | bytes) -> tuple[int, list[Any]]:
    """The exit status, and what was said, of a process that gets these and then the end of its stream."""
    ours, theirs = socket.socketpair()
    marker, fd = Marker.make()
    os.close(fd)
    for message in messages:
        ours.sendall(message if isinstance(message, bytes) else frame(message))
    ours.shutdown(socket.SHUT_WR)

    async def run() -> int:
        async with asyncio.timeout(20.0):
            return await serve(theirs, marker)

    status = asyncio.run(run())
    data = b""
    ours.settimeout(20.0)
    theirs.close()
    while chunk := ours.recv(1 << 16):
        data += chunk
    ours.close()
    marker.close()
    said = []
    while data:
        length = PREFIX.unpack(data[: PREFIX.size])[0]
        said.append(decode_for_service(data[PREFIX.size : PREFIX.size + length]))
        data = data[PREFIX.size + length :]
    return status, said


def test_process_loads_and_answers_until_its_stream_ends(calls: list[Any]) -> None:
    row = {"size": 9}
    status, (ready, *said) = served(
        SETUP, Begin(episode=1, row=row, seed=1), Act(episode=1, action="5"), Close(episode=1),
        Act(episode=1, action="6"), Begin(episode=2, row=row, seed=2),
    )  # fmt: skip
    assert status == 0
    assert isinstance(ready, HostReady)
    assert [one.episode for one in said] == [1, 1, 2]
    assert all(isinstance(one, Answered) for one in said)
    assert calls == [("parent", 77), "settled"]


@pytest.mark.parametrize("first", [b"", frame(Begin(episode=1, row={}, seed=1)), frame(SETUP)[:-1]])
def test_stream_that_does_not_begin_with_a_setup_is_no_service(first: bytes, calls: list[Any]) -> None:
    assert served(first) == (1, [])
    assert calls == []


def test_environment_that_cannot_be_used_is_refused_and_ends_the_process(calls: list[Any]) -> None:
    unknown = msgspec.structs.replace(SETUP, settings={**SETUP.settings, "kind": "guess_numbre"})
    status, (refusal,) = served(unknown)
    assert status == 2
    assert isinstance(refusal, HostRefusal)
    assert "guess_numbre" in refusal.sentence
    assert calls == [("parent", 77)]


def test_mistake_in_the_users_own_code_is_printed_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = [UserError("module x cannot be imported"), UserError("there is no such kind")]
    errors[0].__cause__ = ZeroDivisionError("in the user's module")

    def find(kind: str, options: Any) -> Any:
        raise errors.pop(0)

    monkeypatch.setattr(module, "find_environment", find)
    assert load(SETUP) == HostRefusal(sentence="module x cannot be imported")
    assert "ZeroDivisionError: in the user's module" in capsys.readouterr().err
    assert load(SETUP) == HostRefusal(sentence="there is no such kind")
    assert capsys.readouterr().err == ""


def test_options_are_checked_before_the_class_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[Any] = []
    monkeypatch.setattr(module, "check_environment", lambda kind, options: checked.append((kind, options)))
    loaded = load(SETUP)
    assert isinstance(loaded, tuple)
    assert loaded[1] == SETTINGS
    assert checked == [("guess_number", {})]


class Exited(BaseException):
    """In place of the end of the process."""


@pytest.mark.parametrize(
    ("outcome", "status"), [(0, 0), (2, 2), (ConnectionResetError(), 1), (msgspec.MsgspecError(), 1)]
)
def test_process_prepares_itself_and_ends_with_the_status_of_what_it_did(
    outcome: Any, status: int, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = socket.socketpair()
    marker, fd = Marker.make()
    inode = os.fstat(fd).st_ino
    before = num_open_on(inode)
    stream_fd = theirs.detach()
    os.set_inheritable(stream_fd, True)

    async def serve(stream: socket.socket, given: Marker) -> int:
        assert not os.get_inheritable(stream.fileno()), "the user's processes must not hold it"
        assert num_open_on(inode) == before, "its memory is mapped, and the descriptor closed"
        given.enter(5, 1)
        assert marker.look().episode == 5
        stream.close()
        calls.append("served")
        if isinstance(outcome, Exception):
            raise outcome
        return int(outcome)

    def leave(status: int) -> None:
        calls.append(status)
        raise Exited

    monkeypatch.setattr(module, "serve", serve)
    monkeypatch.setattr(os, "_exit", leave)
    monkeypatch.setattr(sys, "argv", ["host", "--fd", str(stream_fd), "--marker", str(fd)])
    with pytest.raises(Exited):
        main()
    assert calls == ["subreaper", "faults", "path", "served", status]
    ours.close()
    marker.close()


@pytest.mark.parametrize("missing", ["--fd", "--marker"])
def test_process_without_its_descriptors_does_not_begin(
    missing: str, calls: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word for name in ("--fd", "--marker") if name != missing for word in (name, "0")]
    monkeypatch.setattr(sys, "argv", ["host", *given])
    with pytest.raises(SystemExit):
        main()
    assert f"the following arguments are required: {missing}" in capsys.readouterr().err
    assert calls == []

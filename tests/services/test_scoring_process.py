"""Claims about the child's side of the pipe: it says what it is, names each scorer before it runs, and ends quietly."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_like.errors import UserError
from areal_like.external.errors import ExternalStop
from services.processes.framing import PREFIX, frame
from services.reward import scoring_process as module
from services.reward.composition import WeightedSum
from services.reward.job import Began, Job, Outcome, Ready, Refusal, Setup, decode_for_service
from services.reward.scoring_process import Stream, flush_output, load, serve

LIMIT_S = 300.0
SETUP = Setup(
    scorers=[{"kind": "running_sum"}, {"kind": "length", "weight": 2.0, "options": {"min_tokens": 1}}],
    service_pid=77,
    clip={"max": 2.5},
)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What the process did to itself, in order."""
    done: list[Any] = []
    monkeypatch.setattr(module, "die_with_parent", lambda pid: done.append(("parent", pid)))
    monkeypatch.setattr(module, "freeze_heap", lambda: done.append("settled"))
    monkeypatch.setattr(module, "become_subreaper", lambda: done.append("subreaper"))
    monkeypatch.setattr(module, "append_user_path", lambda: done.append("path"))
    monkeypatch.setattr(module.faulthandler, "enable", lambda: done.append("faults"))
    monkeypatch.setattr(module, "flush_output", lambda: done.append("flushed"))
    return done


class Service:
    """The other end of the pipe."""

    def __init__(self) -> None:
        self.socket, theirs = socket.socketpair()
        self.socket.settimeout(LIMIT_S)
        self.fd = theirs.detach()

    def send(self, *messages: Any) -> None:
        for message in messages:
            self.socket.sendall(frame(message))

    def end(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)

    def received(self) -> list[Any]:
        """All messages up to the end of the stream."""
        data = b""
        while chunk := self.socket.recv(1 << 16):
            data += chunk
        found = []
        while data:
            length = PREFIX.unpack(data[: PREFIX.size])[0]
            found.append(decode_for_service(data[PREFIX.size : PREFIX.size + length]))
            data = data[PREFIX.size + length :]
        return found


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    yield made
    made.socket.close()


def job(number: int, response: str = "#3", scorer: str = "") -> Job:
    return Job(job_id=number, scorer=scorer, row={"answer": "3"}, response=response, finish_reason="stop", num_tokens=2)


def test_process_says_what_it_has_loaded_then_answers_one_job_after_the_other(
    calls: list[Any], service: Service
) -> None:
    service.send(SETUP, job(1), job(2, "#4"), job(3, scorer="length"))
    service.end()
    assert serve(Stream(service.fd)) == 0
    ready, *rest = service.received()
    assert isinstance(ready, Ready)
    assert ready.names == ["running_sum", "length"]
    assert ready.volatile == []
    assert [(type(one), one.job_id) for one in rest] == [
        (Began, 1), (Began, 1), (Outcome, 1), (Began, 2), (Began, 2), (Outcome, 2), (Began, 3), (Outcome, 3),
    ]  # fmt: skip
    assert [one.scorer for one in rest if isinstance(one, Began)] == [*ready.names, *ready.names, "length"]
    assert [one.value for one in rest if isinstance(one, Outcome)] == [2.5, 2.0, 1.0], "the sum is clipped"
    assert calls == [("parent", 77), "settled", "flushed", "flushed", "flushed"]


def test_stream_that_does_not_begin_with_a_setup_is_no_service(calls: list[Any], service: Service) -> None:
    service.send(job(1))
    service.end()
    assert serve(Stream(service.fd)) == 1
    assert service.received() == []
    assert calls == []


def test_process_without_a_word_from_the_service_ends(calls: list[Any], service: Service) -> None:
    service.end()
    assert serve(Stream(service.fd)) == 1


def test_scorer_that_cannot_be_used_is_refused_and_ends_the_process(calls: list[Any], service: Service) -> None:
    service.send(Setup(scorers=[{"kind": "lenght"}], service_pid=77))
    assert serve(Stream(service.fd)) == 2
    (refusal,) = service.received()
    assert isinstance(refusal, Refusal)
    assert "did you mean length?" in refusal.sentence
    assert calls == [("parent", 77)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_a_refused_key_ends_the_service_of_a_run_and_is_a_verdict_of_a_shared_one(
    is_shared: bool, calls: list[Any], service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(self: Any, sample: Any) -> Any:
        if sample.response == "#4":
            raise ExternalStop("http://h rejected the key", where="reward scorer llm_judge")
        return {"value": 1.0}

    monkeypatch.setattr("services.reward.scorers.lengths.LengthScorer.score", refused)
    service.send(msgspec.structs.replace(SETUP, is_shared=is_shared), job(1, "#4"), *([job(2)] if is_shared else []))
    service.end()
    assert serve(Stream(service.fd)) == (0 if is_shared else 2)
    ended = [one for one in service.received() if isinstance(one, Outcome | Refusal)]
    sentence = "reward scorer llm_judge: http://h rejected the key"
    if not is_shared:
        assert ended == [Refusal(sentence=sentence)]
        return
    first, second = ended
    assert (first.kind, first.reason, first.scorer) == ("invalid", f"length: {sentence}", "length")
    assert second.kind == "scored"


def test_message_comes_whole_in_whatever_pieces(service: Service) -> None:
    body = frame(SETUP)
    pieces = [body[:2], body[2:5], body[5:-1], body[-1:]]

    def send() -> None:
        for piece in pieces:
            service.socket.sendall(piece)
        service.socket.sendall(body[:-3])
        service.end()

    thread = threading.Thread(target=send)
    thread.start()
    stream = Stream(service.fd)
    assert stream.receive() == SETUP
    assert stream.receive() is None, "a message that is cut is none"
    thread.join()


def test_children_of_a_scorer_do_not_hold_the_stream(service: Service) -> None:
    os.set_inheritable(service.fd, True)
    stream = Stream(service.fd)
    assert not os.get_inheritable(service.fd)
    del stream


# ---------------------------------------------------------------- loading


class Bad:
    """A sum whose warm-up fails."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def warm_up(self) -> None:
        raise self.error


def test_scorers_are_warm_once_they_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    warm: list[bool] = []
    monkeypatch.setattr(WeightedSum, "warm_up", lambda self: warm.append(True))
    loaded = load(SETUP)
    assert isinstance(loaded, WeightedSum)
    assert warm == [True]


@pytest.mark.parametrize(
    ("error", "sentence"),
    [
        (UserError("is too large", where="model"), "model: is too large"),
        (RuntimeError("broken"), "the scorers cannot be loaded (RuntimeError: broken)"),
        (SystemExit("bye"), "the scorers cannot be loaded (SystemExit: bye)"),
    ],
)
def test_whatever_loading_raises_is_one_sentence(
    error: BaseException, sentence: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(WeightedSum, "from_settings", lambda scorers, clip, is_shared: Bad(error))
    loaded = load(SETUP)
    assert isinstance(loaded, Refusal)
    assert loaded.sentence == sentence
    assert ("Traceback" in capsys.readouterr().err) is not isinstance(error, UserError)


def test_mistake_in_the_users_own_code_is_printed_with_its_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = UserError("module x cannot be imported")
    error.__cause__ = ZeroDivisionError("in the user's module")
    monkeypatch.setattr(WeightedSum, "from_settings", lambda scorers, clip, is_shared: Bad(error))
    assert isinstance(load(SETUP), Refusal)
    assert "ZeroDivisionError: in the user's module" in capsys.readouterr().err


# ---------------------------------------------------------------- the process as a whole


@pytest.fixture
def main(calls: list[Any], service: Service, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[Any]]:
    """Run it; returns what it did, its status last."""
    monkeypatch.setattr(sys, "argv", ["scoring_process", "--fd", str(service.fd)])
    monkeypatch.setattr(module.os, "_exit", lambda status: calls.append(("exit", status)))

    def run() -> list[Any]:
        module.main()
        return calls

    return run


def test_process_is_ready_for_user_code_before_it_serves_and_ends_without_its_exit_handlers(
    main: Callable[[], list[Any]], service: Service
) -> None:
    service.send(SETUP)
    service.end()
    assert main() == ["subreaper", "faults", "path", ("parent", 77), "settled", "flushed", ("exit", 0)]


@pytest.mark.parametrize("error", [ConnectionResetError(), BrokenPipeError()])
def test_service_that_is_gone_ends_the_process_quietly(
    error: Exception, main: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(stream: Stream) -> int:
        raise error

    monkeypatch.setattr(module, "serve", gone)
    assert main()[-2:] == ["flushed", ("exit", 1)]


def test_service_that_talks_nonsense_ends_the_process(main: Callable[[], list[Any]], service: Service) -> None:
    service.socket.sendall(PREFIX.pack(3) + b"\x00\x01\x02")
    service.end()
    assert main()[-1] == ("exit", 1)


def test_output_that_scorers_closed_or_replaced_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    closed = (tmp_path / "out").open("w")
    closed.close()
    kept = (tmp_path / "err").open("w")
    kept.write("last words")
    for stream in (closed, None):
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", kept)
        flush_output()
    assert (tmp_path / "err").read_text() == "last words"
    kept.close()


@pytest.mark.processes
def test_a_process_imports_no_more_than_it_scores_with() -> None:
    """A service starts one for each that died or hung, so its imports are part of what a bad scorer costs."""
    code = (
        "import sys, services.reward.scoring_process\n"
        "heavy = {'numpy', 'zmq', 'asyncio', 'ssl', 'jinja2', 'yaml', 'torch'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=root)
    assert done.returncode == 0, done.stderr

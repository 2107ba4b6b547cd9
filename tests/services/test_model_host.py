"""Claims about the process that holds a reward model: who shares a batch, whose scores are whose, what clients hear."""

from __future__ import annotations

import contextlib
import queue
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from areal_like.errors import OperationError, UserError
from services.reward import classifier, model_host, model_wire
from services.reward.model_host import Request, next_batch, serve_connection, status, write_status
from services.reward.model_wire import Item, ModelClient, ModelFailed, Reply, Scores, decode_items, receive, send
from services.reward.scorer_options import RewardModelOptions

LIMIT_S = 300.0


def request(*texts: str) -> Request:
    return Request([Item(text=text) for text in texts], queue.SimpleQueue())


def waiting(*requests: Request) -> queue.SimpleQueue[Request]:
    found: queue.SimpleQueue[Request] = queue.SimpleQueue()
    for one in requests:
        found.put(one)
    return found


# ---------------------------------------------------------------- batches


def test_a_batch_waits_for_its_first_request() -> None:
    source, first = waiting(), request("a")
    threading.Timer(0.05, source.put, [first]).start()
    assert next_batch(source, 1) == [first]


def test_batch_is_what_waits_oldest_first() -> None:
    requests = [request("a"), request("b", "c"), request("d")]
    assert next_batch(waiting(*requests), 16) == requests


def test_batch_ends_once_it_has_as_many_texts_as_fit() -> None:
    first, second, third = request("a"), request("b", "c"), request("d")
    source = waiting(first, second, third)
    assert next_batch(source, 3) == [first, second]
    assert next_batch(source, 3) == [third]


def test_nobody_asking_gives_an_empty_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "QUIET_S", 0.01)
    assert next_batch(waiting(), 4) == []


# ---------------------------------------------------------------- one connection


@pytest.fixture
def connection() -> Iterator[tuple[socket.socket, queue.SimpleQueue[Request]]]:
    """The scorer's end of a connection that is attended, and the queue its requests come to."""
    ours, theirs = socket.socketpair()
    ours.settimeout(LIMIT_S)
    requests: queue.SimpleQueue[Request] = queue.SimpleQueue()
    thread = threading.Thread(target=serve_connection, args=(theirs, requests), daemon=True)
    thread.start()
    yield ours, requests
    ours.close()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert theirs.fileno() == -1


def decoded(body: bytes | None) -> Reply:
    assert body is not None
    return msgspec.msgpack.decode(body, type=Reply)


def test_connection_gets_the_answer_to_each_of_its_requests(connection: Any) -> None:
    ours, requests = connection
    for text, value in (("a", 1.0), ("b", 2.0)):
        send(ours, [Item(text=text)])
        asked = requests.get(timeout=LIMIT_S)
        assert [item.text for item in asked.items] == [text]
        asked.answer.put(Reply(scores=[Scores(values=[value])]))
        assert decoded(receive(ours)).scores == [Scores(values=[value])]


def test_what_is_no_request_is_answered_with_why_and_the_connection_goes_on(connection: Any) -> None:
    ours, requests = connection
    send(ours, {"not": "a list"})
    assert "not a request" in decoded(receive(ours)).failure
    assert requests.empty()
    send(ours, [Item(text="a")])
    requests.get(timeout=LIMIT_S).answer.put(Reply(failure="broken"))
    assert decoded(receive(ours)).failure == "broken"


# ---------------------------------------------------------------- the whole process, its model aside


class FakeClassifier:
    """Scores a text by its length; "boom" fails, "end" ends the serving thread."""

    def __init__(self, options: RewardModelOptions) -> None:
        if options.path == "missing":
            raise UserError("no such folder")
        self.batches: list[list[str]] = []

    def score(self, items: list[Item]) -> list[Scores]:
        texts = [item.text for item in items]
        if "end" in texts:
            raise SystemExit
        if "boom" in texts:
            raise OperationError("the model failed")
        return [Scores(values=[float(len(text))]) for text in texts]


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setattr(classifier, "Classifier", FakeClassifier)
    path = tmp_path / "0.socket"
    path.write_text("left by the process before this one")
    options = RewardModelOptions(path="model", socket=str(path), max_batch=8)

    def serve() -> None:
        with contextlib.suppress(SystemExit):
            model_host.serve(options)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    for _ in range(2000):
        if status(str(path)).exists():
            break
        thread.join(0.01)
    assert status(str(path)).read_text() == ""
    yield path
    monkeypatch.setattr(model_wire, "ANSWER_TIMEOUT_S", 0.2)
    with pytest.raises(ModelFailed):
        ModelClient(str(path)).score([Item(text="end")])
    thread.join(LIMIT_S)
    assert not thread.is_alive()


def test_every_client_gets_the_scores_of_its_own_texts(host: Path) -> None:
    found: dict[int, list[Scores]] = {}

    def ask(number: int) -> None:
        client = ModelClient(str(host))
        found[number] = client.score([Item(text="x" * number), Item(text="y" * (number + 10))])

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(1, 7)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT_S)
    wanted = {number: [Scores(values=[float(number)]), Scores(values=[number + 10.0])] for number in range(1, 7)}
    assert found == wanted


def test_requests_in_one_batch_get_their_own_scores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests wait before the model looks: their scores are cut apart by how many texts each has."""
    monkeypatch.setattr(classifier, "Classifier", FakeClassifier)
    first, second = request("a", "bb"), request("ccc")
    batches = iter([[], [first, second]])

    def next_one(requests: Any, max_texts: int) -> list[Request]:
        assert max_texts == 5
        try:
            return next(batches)
        except StopIteration:
            raise SystemExit from None

    monkeypatch.setattr(model_host, "next_batch", next_one)
    with pytest.raises(SystemExit):
        model_host.serve(RewardModelOptions(path="model", socket=str(tmp_path / "s"), max_batch=5))
    assert first.answer.get_nowait().scores == [Scores(values=[1.0]), Scores(values=[2.0])]
    assert second.answer.get_nowait().scores == [Scores(values=[3.0])]
    assert first.answer.empty()
    assert second.answer.empty()


def test_a_model_that_fails_tells_those_who_asked_and_serves_the_next(host: Path) -> None:
    client = ModelClient(str(host))
    with pytest.raises(ModelFailed, match="the model failed"):
        client.score([Item(text="boom")])
    assert client.score([Item(text="four")]) == [Scores(values=[4.0])]


def test_a_model_that_cannot_be_loaded_is_said_in_the_status_file_and_by_the_exit_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(classifier, "Classifier", FakeClassifier)
    watched: list[int] = []
    monkeypatch.setattr(model_host, "die_with_parent", watched.append)
    options = RewardModelOptions(path="missing", socket=str(tmp_path / "s"))
    monkeypatch.setattr("sys.argv", ["model_host", "--options", options.model_dump_json(), "--service-pid", "7"])
    with pytest.raises(SystemExit) as ended:
        model_host.main()
    assert ended.value.code == 2
    assert "no such folder" in status(str(tmp_path / "s")).read_text()
    assert watched == [7], "it ends with the service"


def test_status_is_written_in_one_piece(tmp_path: Path) -> None:
    write_status(str(tmp_path / "s"), "refused")
    assert [path.name for path in tmp_path.iterdir()] == ["s.status"]
    assert status(str(tmp_path / "s")).read_text() == "refused"


# ---------------------------------------------------------------- the client


class Answering:
    """A listener that answers each connection once with what it is given; None: it hangs up."""

    def __init__(self, path: Path, *answers: bytes | None) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen(4)
        self.num_connections = 0
        self._answers = answers
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        for answer in self._answers:
            stream, _ = self.listener.accept()
            self.num_connections += 1
            with stream:
                body = receive(stream)
                assert body is not None
                assert decode_items(body) == [Item(text="a")]
                if answer is not None:
                    stream.sendall(answer)


def framed(message: Any) -> bytes:
    body = msgspec.msgpack.encode(message)
    return model_wire.PREFIX.pack(len(body)) + body


def test_client_connects_again_after_the_process_was_started_again(tmp_path: Path) -> None:
    path = tmp_path / "s"
    client = ModelClient(str(path))
    with pytest.raises(ModelFailed, match="does not respond"):
        client.score([Item(text="a")])
    scores = [Scores(values=[1.0], num_cut=2)]
    server = Answering(path, None, framed(Reply(scores=scores)))
    with pytest.raises(ModelFailed, match="ended"):
        client.score([Item(text="a")])
    assert client.score([Item(text="a")]) == scores
    assert server.num_connections == 2
    server.listener.close()


@pytest.mark.parametrize("cut", [2, 10])
def test_an_answer_cut_in_the_middle_is_no_answer(cut: int, tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = Answering(path, framed(Reply(scores=[Scores(values=[1.0])]))[:cut])
    with pytest.raises(ModelFailed, match="ended"):
        ModelClient(str(path)).score([Item(text="a")])
    server.listener.close()


def test_an_answer_that_claims_to_be_larger_than_any_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "s"
    server = Answering(path, model_wire.PREFIX.pack(model_wire.MAX_BYTES + 1))
    with pytest.raises(ModelFailed, match=f"the message is too long: {model_wire.MAX_BYTES + 1} bytes"):
        ModelClient(str(path)).score([Item(text="a")])
    server.listener.close()


def test_messages_of_any_length_up_to_the_largest_arrive_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    ours, theirs = socket.socketpair()
    body = {"text": "x" * (3 << 20)}
    sender = threading.Thread(target=send, args=(ours, body))
    sender.start()
    encoded = receive(theirs)
    sender.join(LIMIT_S)
    assert encoded is not None
    assert msgspec.msgpack.decode(encoded) == body
    monkeypatch.setattr(model_wire, "MAX_BYTES", 5)
    for text, fits in (("1234", True), ("12345", False)):
        send(ours, text)
        if fits:
            assert receive(theirs) is not None
        else:
            with pytest.raises(OSError, match="the message is too long: 6 bytes"):
                receive(theirs)
    ours.close()
    theirs.close()

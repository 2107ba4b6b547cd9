"""Requests to an external model: failures of a real server on loopback, budgets, and recorded answers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from odd_server import OddServer, chat, flood, hang, hang_up, reply

from areal_like.errors import UserError
from areal_like.external.chat import CHAT, chat_choice
from areal_like.external.client import ModelClient
from areal_like.external.errors import (
    BudgetUsedUp,
    ExternalStop,
    RequestFailed,
    RequestRefused,
    RequestTimedOut,
)
from areal_like.external.records import AnswerRecords
from areal_like.external.settings import ModelEndpointOptions

BODY = {"messages": [{"role": "user", "content": "2+2?"}], "temperature": 0.0, "max_tokens": 8}
YES = chat("4", usage=(10, 2))
Behave = Callable[..., None]


@pytest.fixture
def serve() -> Iterator[Callable[[Behave], OddServer]]:
    servers: list[OddServer] = []

    def start(behave: Behave) -> OddServer:
        servers.append(OddServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def says(*replies: Any) -> Behave:
    """Replies in order, the last one from then on; a number is an empty reply with that status."""

    def behave(number: int, handler: Any, asked: Any) -> None:
        one = replies[min(number, len(replies)) - 1]
        reply(handler, b"busy", one) if isinstance(one, int) else reply(handler, one)

    return behave


def client_of(server: OddServer | str, file: Path | None = None, **options: Any) -> ModelClient:
    url = server if isinstance(server, str) else f"{server.url}/v1/"
    fields = {"base_url": url, "model": "m", "backoff_s": 0.01, "records": str(file) if file else None, **options}
    return ModelClient(ModelEndpointOptions.model_validate(fields), CHAT, "rollout.models: judge")


def ask(client: ModelClient, *bodies: Any, **keywords: Any) -> list[Any]:
    """The replies to these requests, one after the other."""

    async def all_of() -> list[Any]:
        try:
            return [await client.ask(body, checked, **keywords) for body in bodies]
        finally:
            await client.close()

    return asyncio.run(all_of())


def checked(one: Any) -> Any:
    """A reply, if it is a chat completion."""
    chat_choice(one, "here")
    return one


def said(one: Any) -> str | None:
    return chat_choice(one, "here").message.content


def other(number: int) -> dict[str, Any]:
    return {**BODY, "messages": [{"role": "user", "content": f"{number}?"}]}


# ---------------------------------------------------------------- failures


def test_a_server_that_is_busy_and_then_fails_is_asked_again(serve: Any) -> None:
    server = serve(says(429, 500, 503, YES))
    client = client_of(server)
    (found,) = ask(client, BODY)
    assert said(found) == "4"
    assert [one["model"] for one in server.asked] == ["m"] * 4
    assert client.counters()["failed_attempts"] == 3


def test_an_attempt_that_hangs_is_given_up_for_the_next_one(serve: Any) -> None:
    server = serve(lambda number, handler, asked: hang(handler) if number == 1 else reply(handler, YES))
    (found,) = ask(client_of(server, attempt_timeout_s=0.2), BODY)
    assert (said(found), len(server.asked)) == ("4", 2)


@pytest.mark.parametrize(
    ("behave", "kind", "words"),
    [
        (says(503), RequestFailed, "failed 3 times; last failure: status 503"),
        (lambda n, h, a: hang(h), RequestTimedOut, "did not reply within"),
        (lambda n, h, a: hang_up(h), RequestFailed, "failed 3 times"),
        (lambda n, h, a: flood(h), RequestRefused, "larger than max_reply_kb \\(256\\)"),
        (says(b'{"choices": ['), RequestRefused, "a reply that is not JSON"),
        (says(b"\xff"), RequestRefused, "a reply that is not JSON"),
        (says(404), RequestRefused, "rejected the request: status 404"),
    ],
)
def test_each_failure_has_its_kind_and_nothing_is_recorded(
    behave: Any, kind: type[Exception], words: str, serve: Any, tmp_path: Path
) -> None:
    file, total_s = tmp_path / "a.jsonl", 1.0 if kind is RequestTimedOut else 60.0
    with pytest.raises(kind, match=words):
        ask(client_of(serve(behave), file, retries=2, total_timeout_s=total_s), BODY)
    assert not file.exists()


@pytest.mark.parametrize("status", [401, 403])
def test_a_refused_key_ends_everything_and_is_shown_nowhere(
    status: int, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-verysecret")
    server = serve(lambda n, h, asked: reply(h, f"bad key {h.headers['Authorization']}".encode(), status))
    with pytest.raises(ExternalStop) as raised:
        ask(client_of(server, key_env="THE_KEY"), BODY)
    text = str(raised.value)
    assert "rejected the key (environment variable THE_KEY)" in text
    assert "sk-verysecret" not in text
    assert (len(server.asked), server.headers[0]["Authorization"]) == (1, "Bearer sk-verysecret")


def test_no_more_requests_run_at_once_than_allowed(serve: Any) -> None:
    running, most = [0], [0]

    def behave(number: int, handler: Any, asked: Any) -> None:
        running[0] += 1
        most[0] = max(most[0], running[0])
        server.ending.wait(0.05)
        running[0] -= 1
        reply(handler, YES)

    server = serve(behave)
    options = ModelEndpointOptions(base_url=server.url, model="m")

    async def all_of() -> None:
        client = ModelClient(options, CHAT, "here", max_concurrency=2)
        await asyncio.gather(*(client.ask(other(number), checked) for number in range(7)))
        await client.close()

    asyncio.run(all_of())
    assert (most[0], len(server.asked)) == (2, 7)


# ---------------------------------------------------------------- records


def test_a_recorded_answer_is_neither_sent_nor_paid_again(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(YES)), tmp_path / "deep" / "a.jsonl"
    ask(client_of(server, file, price_in=1.0, price_out=2.0), BODY, BODY)
    again = client_of(server, file)
    assert said(*ask(again, BODY)) == "4"
    assert len(server.asked) == 1
    assert (again.counters()["recorded"], again.counters()["requests"]) == (1, 0)
    (line,) = [json.loads(text) for text in file.read_text().splitlines()]
    assert line["request"]["messages"] == BODY["messages"]
    assert (line["tokens_in"], line["tokens_out"], line["cost"]) == (10, 2, pytest.approx(14e-6))


def test_a_run_is_repeated_from_its_records_without_the_server(serve: Any, tmp_path: Path) -> None:
    server, file = serve(lambda n, h, asked: reply(h, chat(f"answer {n}", usage=(1, 1)))), tmp_path / "a.jsonl"
    first = ask(client_of(server, file), other(1), other(2), other(1))
    server.close()
    replayed = client_of("http://127.0.0.1:9/v1", file, record="replay", key_env="NOT_SET_ANYWHERE")
    assert ask(replayed, other(1), other(2), other(1)) == first
    missing = client_of("http://127.0.0.1:9/v1", file, record="replay")
    with pytest.raises(ExternalStop, match=r"contains no answer to a request of this run \(3\?\)"):
        ask(missing, other(3))


def test_requests_with_other_seeds_have_other_answers(serve: Any, tmp_path: Path) -> None:
    server, file = serve(lambda n, h, asked: reply(h, chat(f"answer {n}"))), tmp_path / "a.jsonl"
    one, two = ask(client_of(server, file), BODY, salt=1), ask(client_of(server, file), BODY, salt=2)
    assert said(*one) != said(*two)
    assert ask(client_of(server, file), BODY, salt=1) == one
    assert len(server.asked) == 2


def test_write_sends_every_request_and_a_sampled_one_without_a_seed_is_never_reused(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(YES)), tmp_path / "a.jsonl"
    ask(client_of(server, file, record="write"), BODY, BODY)
    ask(client_of(server, file), BODY, BODY, is_repeatable=False)
    assert (len(server.asked), len(file.read_text().splitlines())) == (4, 4)


def test_off_keeps_counts_and_no_texts(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(YES)), tmp_path / "a.jsonl"
    ask(client_of(server, file, record="off"), BODY, BODY)
    assert len(server.asked) == 2
    assert "2+2" not in file.read_text()
    assert AnswerRecords(file).refresh().tokens == 24


def test_a_key_that_a_server_repeats_is_not_recorded(
    serve: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-verysecret")
    server = serve(lambda n, h, asked: reply(h, chat(h.headers["Authorization"])))
    ask(client_of(server, tmp_path / "a.jsonl", key_env="THE_KEY"), BODY)
    assert "sk-verysecret" not in (tmp_path / "a.jsonl").read_text()


@pytest.mark.parametrize("record", ["write", "reuse"])
def test_records_that_cannot_be_written_end_everything(record: str, serve: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ExternalStop, match="recorded"):
        ask(client_of(serve(says(YES)), tmp_path / "file" / "a.jsonl", record=record), BODY)


NO_MODEL = {"error": {"message": "the model is overloaded", "code": 502}}


def test_an_error_with_status_200_is_a_failed_attempt_and_not_an_answer(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(NO_MODEL, {**NO_MODEL, "choices": []}, YES)), tmp_path / "a.jsonl"
    client = client_of(server, file, max_tokens_total=100)
    assert said(*ask(client, BODY)) == "4"
    assert (client.counters()["failed_attempts"], len(file.read_text().splitlines())) == (2, 1)
    with pytest.raises(RequestFailed, match=r"last failure: status 200 .*the model is overloaded"):
        ask(client_of(serve(says(NO_MODEL)), file, retries=1, max_tokens_total=100), other(1))


@pytest.mark.parametrize("extra", [{"error": None}, {"error": {"code": 1}}])
def test_an_answer_with_a_field_for_errors_is_an_answer(extra: dict[str, Any], serve: Any) -> None:
    server = serve(says({**YES, **extra}))
    assert said(*ask(client_of(server), BODY)) == "4"
    assert len(server.asked) == 1


@pytest.mark.parametrize("record", ["reuse", "write"])
def test_a_reply_of_another_form_is_paid_but_not_used_again(record: str, serve: Any, tmp_path: Path) -> None:
    server, file = serve(says({"detail": "no", "usage": YES["usage"]}, {"detail": "no"}, YES)), tmp_path / "a.jsonl"
    for _ in range(2):
        with pytest.raises(RequestRefused, match="a reply that is not a chat completion"):
            ask(client_of(server, file, record=record, max_tokens_total=100), BODY)
    assert AnswerRecords(file).refresh().tokens == 12
    assert "detail" not in file.read_text()
    assert said(*ask(client_of(server, file, record=record, max_tokens_total=100), BODY)) == "4"
    assert said(*ask(client_of("http://127.0.0.1:9/v1", file, record="replay"), BODY)) == "4"


def test_a_recorded_reply_of_another_form_is_asked_for_again_but_not_in_a_replay(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(YES)), tmp_path / "a.jsonl"
    ask(client_of(server, file), BODY)
    file.write_text(file.read_text().replace('"choices"', '"chances"'))
    with pytest.raises(RequestRefused, match="a reply that is not a chat completion"):
        ask(client_of(server, file, record="replay"), BODY)
    assert said(*ask(client_of(server, file), BODY)) == "4"
    assert len(server.asked) == 2


def test_a_replay_without_its_file_is_refused_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no such file"):
        client_of("http://h/v1", tmp_path / "none.jsonl", record="replay")
    with pytest.raises(UserError, match="no file is set to replay answers from"):
        client_of("http://h/v1", record="replay")


# ---------------------------------------------------------------- budgets


@pytest.mark.parametrize(
    ("budget", "words"),
    [
        ({"max_tokens_total": 30}, r"36 of 30 tokens.*increase max_tokens_total"),
        ({"max_cost": 0.03, "price_in": 1000.0, "price_out": 1000.0}, r"a cost of 0.036 of 0.03.*increase max_cost"),
    ],
)
def test_a_budget_ends_the_requests_with_one_sentence_and_nothing_is_lost(
    budget: dict[str, Any], words: str, serve: Any, tmp_path: Path
) -> None:
    server, file = serve(says(YES)), tmp_path / "a.jsonl"
    with pytest.raises(ExternalStop, match=rf"the budget of model m at .* is used up \({words}.*a\.jsonl"):
        ask(client_of(server, file, **budget), *map(other, range(9)))
    assert len(server.asked) == 3
    larger = {**budget, "max_tokens_total": 1000, "max_cost": 1000.0 if "price_in" in budget else None}
    assert len(ask(client_of(server, file, **larger), *map(other, range(9)))) == 9
    assert len(server.asked) == 9, "the first three were recorded"


def test_recorded_answers_are_free_when_the_budget_is_used_up(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(YES)), tmp_path / "a.jsonl"
    ask(client_of(server, file, max_tokens_total=12), BODY)
    assert said(*ask(client_of(server, file, max_tokens_total=12), BODY)) == "4"
    with pytest.raises(ExternalStop, match="used up"):
        ask(client_of(server, file, max_tokens_total=12), other(1))


def test_processes_that_share_a_file_share_the_budget(serve: Any, tmp_path: Path) -> None:
    server, file = serve(says(YES)), tmp_path / "a.jsonl"
    one, two = (client_of(server, file, max_tokens_total=40) for _ in range(2))

    async def in_turn() -> None:
        for number in range(9):
            await (one if number % 2 else two).ask(other(number), checked)

    with pytest.raises(ExternalStop, match="48 of 40 tokens"):
        asyncio.run(in_turn())
    assert len(server.asked) == 4


def test_requests_may_fail_instead_when_the_budget_is_used_up(serve: Any, tmp_path: Path) -> None:
    client = client_of(serve(says(YES)), tmp_path / "a.jsonl", max_tokens_total=1, on_exhausted="fail")
    with pytest.raises(BudgetUsedUp, match=r"used up \(12 of 1 tokens\)"):
        ask(client, BODY, other(1))


def test_a_server_that_counts_no_tokens_has_no_budget(serve: Any, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    with pytest.raises(ExternalStop, match="reports no token counts"):
        ask(client_of(serve(says(chat("4"))), file, max_tokens_total=100), BODY)
    assert len(file.read_text().splitlines()) == 1


def test_a_budget_needs_a_file() -> None:
    with pytest.raises(UserError, match="set `records` to the file in which to record the replies"):
        client_of("http://h/v1", max_tokens_total=1)

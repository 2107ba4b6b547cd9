"""Servers, gates and bounds through a real reward service: settings cross to its processes, failures stay data."""

from __future__ import annotations

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest
from odd_server import OddServer, chat, hang, reply
from reward_harness import PATIENCE_S, Service

pytestmark = pytest.mark.e2e


@pytest.fixture(scope="module")
def server() -> Iterator[OddServer]:
    def behave(number: int, handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        row = asked.get("row", {})
        if handler.path.endswith("/chat/completions"):
            reply(handler, chat('{"score": 8}'))
        elif row.get("do") == "hang":
            hang(handler)
        elif row.get("do") == "fail":
            reply(handler, b"oops", 500)
        else:
            reply(handler, {"value": row.get("gives", 1)})

    server = OddServer(behave)
    yield server
    server.close()


@pytest.fixture(scope="module")
def service(server: OddServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    judge = {"base_url": server.url, "model": "m", "rubric": "{{ prompt }} {{ response }}?"}
    scorers = [
        {"kind": "http", "options": {"url": server.url, "total_timeout_s": 4.0, "retries": 1, "backoff_s": 0.01}},
        {"kind": "llm_judge", "weight": 0.5, "options": judge},
        {"kind": "format", "weight": 0.0, "gate": {"otherwise": -1.0}, "options": {"must_contain": ["ok"]}},
    ]
    settings = {"scorers": scorers, "clip": {"max": 2.0}, "retries": 0, "timeout_s": 10.0}
    service = Service(tmp_path_factory.mktemp("remote"), settings)
    yield service
    service.close()


def test_a_servers_and_a_judges_score_are_summed_and_the_sum_is_bounded(service: Service) -> None:
    verdict = service.ask("", "ok", prompt="p", gives=1)
    assert verdict.value == pytest.approx(1.4)
    assert verdict.components == {"http": 1.0, "llm_judge": 0.8, "llm_judge.raw": 8.0, "format": 1.0}
    assert service.ask("", "ok", prompt="p", gives=50).value == 2.0


def test_an_answer_that_fails_the_gate_asks_nobody(service: Service, server: OddServer) -> None:
    num_asked = len(server.asked)
    verdict = service.ask("hang", "no", prompt="p")
    assert (verdict.value, verdict.components) == (-1.0, {"format": 0.0, "correct": 0.0})
    assert len(server.asked) == num_asked


def test_a_server_that_hangs_costs_a_verdict_and_no_process(service: Service) -> None:
    before = service.scoring_pids()
    verdict = service.ask("hang", "ok", prompt="p")
    assert verdict.kind == "timed_out"
    assert "within 4 s" in verdict.reason
    assert service.ask("fail", "ok", prompt="p").kind == "crashed"
    assert service.ask("", "ok", prompt="p").value == pytest.approx(1.4)
    assert service.scoring_pids() == before


def test_a_number_no_json_can_hold_is_invalid(service: Service, tmp_path: Path) -> None:
    assert service.ask("", "ok", prompt="p", gives="NaN").kind == "invalid"
    assert service.ask("", "ok").kind == "invalid"  # the rubric names `prompt`, and the row has none


def test_a_budget_that_is_used_up_ends_the_service_with_one_sentence(server: OddServer, tmp_path: Path) -> None:
    def counts(number: int, handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        reply(handler, chat('{"score": 8}', usage=(10, 5)))

    paid = OddServer(counts)
    options = {"base_url": paid.url, "model": "m", "rubric": "{{ response }}?", "max_tokens_total": 25}
    service = Service(tmp_path, {"scorers": [{"kind": "llm_judge", "options": options}]})
    try:
        assert [service.ask("", f"answer {number}").value for number in range(2)] == [0.8, 0.8]
        service.send(service.request("", "answer 3"))
        assert service.process.wait(PATIENCE_S) == 2
    finally:
        service.close()
        paid.close()
    last = service.log.strip().splitlines()[-1]
    assert last.startswith("error: reward scorer llm_judge: the budget of model m at http://127.0.0.1")
    assert "used up (30 of 25 tokens)" in last
    assert len((tmp_path / "external" / "llm_judge.jsonl").read_text().splitlines()) == 2

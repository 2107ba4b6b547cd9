"""`areal-like data answers`: an external model labels rows, its answers dispute a label, and are scored."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from odd_server import OddServer, chat, reply

from controller.cli.main import main

LABELS = ["3", "5", "9"]
"""Of 1+2, 2+3 and 3+4: the last one is wrong."""


@pytest.fixture
def serve() -> Iterator[Callable[[Any], OddServer]]:
    servers: list[OddServer] = []

    def start(behave: Any) -> OddServer:
        servers.append(OddServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    lines = [{"id": n, "prompt": f"{n}+{n + 1}=", "answer": LABELS[n - 1]} for n in (1, 2, 3)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return tmp_path / "rows.jsonl"


def adds(number: int, handler: Any, asked: Any) -> None:
    """Adds correctly, except in one of four answers."""
    left, right = map(int, re.findall(r"\d+", asked["messages"][-1]["content"]))
    total = left + right + (asked["seed"] == 3)
    reply(handler, chat(f"so \\boxed{{{total}}}", usage=(4, 6)))


def answers(rows: Path, server: OddServer, *words: str, out: str = "answers.jsonl") -> tuple[int, Path]:
    target = rows.parent / out
    command = ["data", "answers", str(rows), "-o", str(target), "--base-url", f"{server.url}/v1", "--model", "big"]
    return main([*command, *words]), target


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_a_labeller_disputes_the_wrong_label_and_its_answers_are_in_the_order_of_the_rows(
    rows: Path, serve: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(adds)
    status, target = answers(rows, server, "--price-out", "1000", "--system", "Add.")
    assert (status, len(server.asked)) == (0, 12)
    assert (
        "12 answers to 3 rows (12 requested, 0 taken from the record; 120 tokens, cost 0.072)"
        in capsys.readouterr().out
    )
    lines = lines_of(target)
    assert [line["id"] for line in lines] == [1] * 4 + [2] * 4 + [3] * 4
    assert lines[-1] | {"where": ""} == {
        "id": 3, "where": "", "prompt": "3+4=", "response": "so \\boxed{8}", "gold": "9", "finish_reason": "stop",
        "model": "big", "num_tokens": 6,
    }  # fmt: skip
    assert server.asked[0]["messages"][0] == {"role": "system", "content": "Add."}
    assert main(["data", "labels", str(target), "--json"]) == 0
    (disputed,) = json.loads(capsys.readouterr().out)["listed"]
    assert (disputed["label"], disputed["answer"], disputed["num_agree"]) == ("9", "7", 3)
    review = {**disputed, "decision": "accept"}
    (tmp_path / "review.jsonl").write_text(json.dumps(review) + "\n")
    made = tmp_path / "made"
    command = ["data", "relabel", str(rows), "--review", str(tmp_path / "review.jsonl"), "-o", str(made)]
    assert main(command) == 0
    assert [line["answer"] for line in lines_of(made / "rows.jsonl")] == ["3", "5", "7"]


def test_a_budget_that_is_used_up_loses_nothing_and_the_records_replace_the_endpoint(
    rows: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(adds)
    status, target = answers(rows, server, "--max-tokens-total", "45", "--concurrency", "1")
    assert (status, target.exists()) == (2, False)
    error = capsys.readouterr().err
    assert "the budget of model big" in error
    assert "increase max_tokens_total" in error
    assert len(server.asked) == 5
    assert answers(rows, server) == (0, target)
    assert len(server.asked) == 12, "five were recorded"
    first = target.read_text()
    server.close()
    status, again = answers(rows, server, "--replay", "--records", f"{target}.external.jsonl", out="again.jsonl")
    assert (status, again.read_text()) == (0, first)
    assert answers(rows, server)[0] == 2
    assert "already exists" in capsys.readouterr().err


def test_requests_without_an_answer_are_counted_and_the_rest_is_written(
    rows: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    def behave(number: int, handler: Any, asked: Any) -> None:
        reply(handler, b"no", 400) if asked["messages"][-1]["content"].startswith("2") else adds(number, handler, asked)

    status, target = answers(rows, serve(behave), "--num-answers", "2")
    assert (status, [line["id"] for line in lines_of(target)]) == (1, [1, 1, 3, 3])
    error = capsys.readouterr().err
    assert "2 requests were not answered; the first failure" in error
    assert "rows.jsonl:2" in error
    status, target = answers(rows, serve(lambda n, h, a: reply(h, b"no", 400)), out="none.jsonl")
    assert (status, target.exists()) == (1, False)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--max-cost", "1"], "max_cost requires a price per million tokens"),
        (["--key-env", "SURELY_NOT_SET"], "SURELY_NOT_SET contains no key"),
        (["--extra-body", "[1]"], "is not a JSON object"),
        (["--extra-body", '{"n": 2}'], "extra_body must not contain `n`"),
        (["--replay"], "there is no such file"),
    ],
)
def test_mistakes_are_one_sentence(
    words: list[str], said: str, rows: Path, serve: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(adds)
    assert answers(rows, server, *words)[0] == 2
    assert said in capsys.readouterr().err
    assert not server.asked

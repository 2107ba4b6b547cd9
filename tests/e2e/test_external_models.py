"""A whole job that is judged behind an endpoint: its budget ends it with one sentence, and nothing is lost."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from odd_server import OddServer, chat, reply

pytestmark = pytest.mark.e2e

KEY = "sk-not-in-any-file"
JUDGE = (
    "reward.scorers=[{{kind: llm_judge, options: {{base_url: '{url}/v1', model: big, rubric: '{{{{ response }}}}', "
    "key_env: JUDGE_KEY, max_tokens_total: 300, price_in: 2, price_out: 4}}}}]"
)


@pytest.fixture
def server() -> Iterator[OddServer]:
    def behave(number: int, handler: Any, asked: Any) -> None:
        text = asked["messages"][0]["content"]
        if handler.headers["Authorization"] != f"Bearer {KEY}":
            reply(handler, b"wrong key", 401)
        elif number % 9 == 0:
            reply(handler, b"busy", 429, Retry_After="0")
        else:
            reply(handler, chat(json.dumps({"score": min(len(text), 10)}), usage=(10, 5)))

    server = OddServer(behave)
    yield server
    server.close()


def test_a_budget_ends_a_run_with_one_sentence_and_a_larger_one_lets_it_finish(
    areal, quickstart, short, server, monkeypatch
):
    monkeypatch.setenv("JUDGE_KEY", KEY)
    small = ["num_steps=2", "data.eval=null", "warm_start=null", "filter_zero_signal=false", "groups_per_step=5"]
    run = areal("train", quickstart, *short, *small, JUDGE.format(url=server.url))
    assert run.wait() == 2, run.output
    last = run.output.strip().splitlines()[-1]
    assert "the budget of model big" in last, run.output
    assert "increase max_tokens_total" in last
    assert "Traceback" not in run.output
    records = run.folder / "external" / "llm_judge.jsonl"
    num_paid = len(records.read_text().splitlines())
    assert num_paid >= 20

    config = run.folder / "config.yaml"
    config.write_text(config.read_text().replace("max_tokens_total: 300", "max_tokens_total: 9000000"))
    resumed = areal("resume", str(run.folder))
    assert resumed.wait() == 0, resumed.output
    assert resumed.summary["audit"] == "clean"
    lines = [json.loads(line) for line in records.read_text().splitlines()]
    assert len({line["key"] for line in lines}) == len(lines) > num_paid, "nothing is paid twice"
    external = resumed.summary["external"]["llm_judge"]
    assert external["requests"] == len(lines)
    assert external["cost"] == pytest.approx(len(lines) * (10 * 2 + 5 * 4) / 1e6)
    files = [path for path in run.folder.rglob("*") if path.is_file()]
    assert [str(path) for path in files if KEY.encode() in path.read_bytes()] == []

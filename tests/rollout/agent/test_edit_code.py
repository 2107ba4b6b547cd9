"""The shipped agents that edit code and that search, as programs of their own, with scripted policies."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml
from agent_policy import Policy

from areal_like.errors import UserError
from areal_like.verdict import Verdict
from rollout.workflow import Sample, load_workflow
from services.reward.composition import WeightedSum
from services.reward.config import ScorerSettings
from services.reward.job import Job

pytestmark = pytest.mark.processes
AGENTS = Path(__file__).parents[3] / "configs" / "agents"
RECIPE = AGENTS.parent / "agent_code_8b_8gpu.yaml"
BROKEN = "def mean(values):\n    return sum(values) / 2\n"


def call(name: str, **arguments: str) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


class Judged(Policy):
    """A policy whose answers scorer `code` judges in the sandbox."""

    scorer: WeightedSum
    row: dict[str, Any]

    async def score(self, response: str, answer: Any) -> Verdict:
        self.scored.append(response)
        job = Job(job_id=1, scorer="", row=self.row, response=response, finish_reason="stop", num_tokens=1)
        outcome = self.scorer.score(job, lambda name: None)
        return Verdict(kind=outcome.kind, value=outcome.value, reason=outcome.reason, components=outcome.components)


@pytest.fixture(scope="module")
def scorer() -> Iterator[WeightedSum]:
    options = {"extract": "whole", "time_limit_s": 3.0}
    try:
        made = WeightedSum.from_settings((ScorerSettings(kind="code", options=options),))
    except UserError as error:
        pytest.skip(f"no sandbox here: {error}")
    yield made
    (part,) = made._parts.values()
    part.scorer._judges.close()  # type: ignore[attr-defined]


def played(policy: Policy, program: str, row: dict[str, Any], **options: Any) -> Sample:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("the package openai is not installed")
    workflow = load_workflow("agent", {"command": ["python", str(AGENTS / program)], **options})
    task: Any = SimpleNamespace(row=row)
    return asyncio.run(workflow.run(task, policy))  # type: ignore[arg-type]


def test_a_program_that_is_repaired_through_tools_passes_the_tests_of_its_row(scorer: WeightedSum) -> None:
    repaired = BROKEN.replace("/ 2", "/ len(values)")
    row = {
        "prompt": "mean is wrong for three values.", "files": {"solution.py": BROKEN},
        "tests": ["assert mean([3, 4, 8]) == 5", "assert mean([7]) == 7"],
    }  # fmt: skip
    policy = Judged(
        "<think>Look.</think>" + call("read_file", path="solution.py") + "<|im_end|>",
        call("run_python", code="print(mean([3, 4, 8]))") + call("write_file", path="../x", content="") + "<|im_end|>",
        call("replace_text", path="solution.py", old="/ 2", new="/ len(values)") + "<|im_end|>",
        call("run_python", code="print(mean([3, 4, 8]))") + "<|im_end|>",
        "It divides by the number of values now.<|im_end|>",
    )  # fmt: skip
    policy.scorer, policy.row = scorer, row
    preload = yaml.safe_load(RECIPE.read_text())["rollout"]["workflow_options"]["preload"]
    sample = played(policy, "edit_code.py", row, preload=preload)
    assert (policy.scored, sample.verdict.value) == ([repaired], 1.0), sample.verdict
    assert sample.verdict.components["agent_tool_calls"] == 5.0
    shown = policy.tokenizer.decode(policy.prompts[-1])
    for words in (
        BROKEN,
        "7.5",
        "Error: ValueError: ../x is not in the work folder",
        "solution.py has 2 lines",
        "5.0",
    ):
        assert words in shown
    assert len(sample.others) == 0, "one conversation is one trajectory"


def test_a_program_that_is_handed_in_as_it_was_fails_its_tests(scorer: WeightedSum) -> None:
    row = {"prompt": "?", "files": {"solution.py": BROKEN}, "tests": ["assert mean([3, 4, 8]) == 5"]}
    policy = Judged("Done: assert mean([3, 4, 8]) == 5 holds.<|im_end|>")
    policy.scorer, policy.row = scorer, row
    assert played(policy, "edit_code.py", row).verdict.value == 0.0, "what the policy says is not judged"


@contextmanager
def search_server() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(parse_qs(urlsplit(self.path).query)["q"][0])
            body = json.dumps({"results": ["Paris is the capital of France."]}).encode()
            self.send_response(200)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/search", asked
    finally:
        server.shutdown()
        server.server_close()


def test_an_agent_that_searches_is_shown_what_was_found_and_reports_an_exact_match(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    row = {"question": "Capital of France?", "answers": ["the Paris", "Paris, France"]}
    policy = Policy(call("search", query="France") + call("search", q="?") + "<|im_end|>", "So:\nParis.<|im_end|>")
    with search_server() as (url, asked):
        monkeypatch.setenv("SEARCH_URL", url)
        sample = played(policy, "search.py", row, reward="agent")
    assert (sample.verdict.value, sample.verdict.components["searches"], asked) == (1.0, 2.0, ["France"]), (
        sample.verdict
    )
    shown = policy.tokenizer.decode(policy.prompts[-1])
    assert "Paris is the capital of France." in shown
    assert "Error: TypeError" in shown


def test_a_sample_whose_search_server_is_gone_has_no_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SEARCH_URL", "http://127.0.0.1:9/search")
    policy = Policy(call("search", query="France") + "<|im_end|>")
    sample = played(policy, "search.py", {"question": "?", "answer": "x"}, reward="agent")
    assert (sample.verdict.kind, sample.verdict.is_scored) == ("crashed", False), "no reward of zero"

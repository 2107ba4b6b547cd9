"""The shipped programs (configs/agents): one agent in three languages, each as it is, with a scripted policy."""

from __future__ import annotations

import asyncio
import importlib.util
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from agent_policy import Policy

from rollout.workflow import load_workflow

AGENTS = Path(__file__).parents[3] / "configs" / "agents"
LINES = ('3+8:2;<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 9}}\n</tool_call><|im_end|>', "#1<|im_end|>")


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "needs"),
    [
        ({"command": ["python", str(AGENTS / "tool_sum.py")]}, "openai"),
        ({"command": ["python", str(AGENTS / "tool_sum.py")], "preload": ["openai", "warm_openai"]}, "openai"),
        ({"command": ["bash", str(AGENTS / "tool_sum.sh")]}, "curl jq"),
        ({"command": ["node", str(AGENTS / "tool_sum.mjs")]}, "node"),
    ],
)
def test_the_agent_calls_its_tool_and_ends_with_the_answer(options: dict[str, Any], needs: str) -> None:
    if needs == "openai" and importlib.util.find_spec("openai") is None:
        pytest.skip("the package openai is not installed")
    if missing := [one for one in needs.split() if needs != "openai" and shutil.which(one) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    policy = Policy(*LINES)
    task: Any = SimpleNamespace(row={"prompt": "3+8+9=", "answer": "0"})
    sample = asyncio.run(load_workflow("agent", options).run(task, policy))  # type: ignore[arg-type]
    assert (policy.scored, sample.verdict.kind, sample.others) == (["#1"], "scored", ()), sample.verdict
    assert policy.sampled(sample.trajectory) == "".join(LINES)
    given = policy.tokenizer.decode(policy.prompts[1])
    assert given.endswith("<|im_start|>tool\n1<|im_end|>\n<|im_start|>assistant\n"), "the last digit of 2 + 9"

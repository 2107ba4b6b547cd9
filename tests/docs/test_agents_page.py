"""The programs and commands of the page "Train your agent" do what it says, with a scripted policy."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from agent_policy import Policy, serving

from rollout.workflow import load_workflow

PAGE = Path(__file__).resolve().parents[2] / "docs" / "agents.md"
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
CALL = '<tool_call>\n{"name": "add", "arguments": {"x": 2, "y": 9}}\n</tool_call><|im_end|>'


def block(kind: str, words: str) -> str:
    (found,) = [text for name, text in BLOCKS if name == kind and words in text]
    return str(found)


def run(command: list[str], policy: Policy, **options: Any) -> Any:
    task: Any = SimpleNamespace(row={"prompt": "3+8+9=", "answer": "0"})
    return asyncio.run(load_workflow("agent", {"command": command, **options}).run(task, policy))  # type: ignore[arg-type]


@pytest.mark.processes
def test_the_program_of_the_page_runs_as_its_config_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if importlib.util.find_spec("openai") is None:
        pytest.skip("the package openai is not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "agent.py").write_text(block("python", "# agent.py"))
    options = yaml.safe_load(block("yaml", "workflow: agent"))["rollout"]["workflow_options"]
    policy = Policy(CALL, "#1<|im_end|>")
    sample = run(options.pop("command"), policy, **options)
    assert (policy.scored, sample.verdict.kind) == (["#1"], "scored"), sample.verdict
    assert policy.tokenizer.decode(policy.prompts[1]).endswith("tool\n1<|im_end|>\n<|im_start|>assistant\n")


def test_the_config_for_live_traffic_makes_the_workflow() -> None:
    rollout = yaml.safe_load(block("yaml", "workflow: traffic"))["rollout"]
    assert load_workflow(rollout["workflow"], rollout["workflow_options"]).is_resumable is False


@pytest.mark.processes
def test_the_commands_with_curl_ask_the_policy_hand_in_a_text_and_report_a_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if missing := [one for one in ("bash", "curl", "jq") if shutil.which(one) is None]:
        pytest.skip(f"{' and '.join(missing)} not installed")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "solution.py").write_text("x = 7\n")
    shown = [block("bash", words) for words in ("chat/completions", "AREAL_LIKE_ANSWER_URL", "AREAL_LIKE_REWARD_URL")]
    (script := tmp_path / "agent.sh").write_text("set -euo pipefail\n" + "\n".join(shown))
    policy = Policy("7<|im_end|>", "7<|im_end|>")
    assert run(["bash", str(script)], policy).verdict.is_scored
    assert policy.scored == ["x = 7\n"]
    sample = run(["bash", str(script)], policy, reward="agent")
    assert (sample.verdict.value, sample.verdict.components["tests"]) == (1.0, 3.0)


def test_the_lines_with_anthropics_sdk_get_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("anthropic", reason="the package anthropic is not installed")
    names: dict[str, Any] = {"row": {"prompt": "3 and 4?"}}

    async def talk() -> None:
        async with serving(Policy("7<|im_end|>")) as (agent, address, _):
            monkeypatch.setenv("ANTHROPIC_BASE_URL", address)
            monkeypatch.setenv("ANTHROPIC_API_KEY", agent.secret)
            await asyncio.to_thread(exec, block("python", "Anthropic()"), names)

    asyncio.run(talk())
    assert names["message"].content[0].text == "7"

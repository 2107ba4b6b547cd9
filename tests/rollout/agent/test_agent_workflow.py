"""The workflow `agent` with a scripted policy: real HTTP on loopback, and real programs."""

from __future__ import annotations

import asyncio
import json
import sys
from types import SimpleNamespace
from typing import Any

import aiohttp
import psutil
import pytest
from agent_policy import ADD, ASK, CALL, Policy, asked, played, serving

from areal_like.errors import UserError
from rollout.agent.listener import listening
from rollout.agent.session import AgentSession
from rollout.agent.workflow import AgentWorkflow
from rollout.chat.formats import FORMATS
from rollout.workflow import SampleCut, load_workflow


def test_a_conversation_with_a_tool_continues_the_sampled_tokens_and_is_one_trajectory() -> None:
    policy = Policy(CALL, "7<|im_end|>")

    async def talk() -> Any:
        agent = AgentSession(policy, FORMATS["hermes"])  # type: ignore[arg-type]
        async with (
            listening(agent) as address,
            aiohttp.ClientSession(headers={"Authorization": f"Bearer {agent.secret}"}) as client,
        ):

            async def post(messages: Any) -> Any:
                body = {"model": "m", "messages": messages, "tools": [ADD], "logprobs": True, "return_token_ids": True}
                async with client.post(f"{address}/v1/chat/completions", json=body) as response:
                    return await response.json()

            first = await post(ASK["messages"])
            message = first["choices"][0]["message"]
            call = message["tool_calls"][0]
            called = {"role": "assistant", "content": None, "tool_calls": [call]}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "7"}
            second = await post([*ASK["messages"], called, result])
        return first, second, agent

    first, second, agent = asyncio.run(talk())
    choice = first["choices"][0]
    assert (choice["finish_reason"], choice["message"]["reasoning_content"]) == ("tool_calls", "Hm.")
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"x": 3, "y": 4}'}
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"]) == first["usage"]["completion_tokens"]
    assert policy.prompts[1][: len(policy.prompts[0]) + len(choice["token_ids"])] == (
        first["prompt_token_ids"] + choice["token_ids"]
    )
    assert second["choices"][0]["message"]["content"] == "7"
    (trajectory,) = agent.store.trajectories()
    assert policy.sampled(trajectory) == CALL + "7<|im_end|>"
    assert agent.last_content == "7"


def test_a_streamed_answer_has_the_same_parts() -> None:
    policy = Policy(f"Sum.{CALL.removeprefix('<think>Hm.</think>')}")
    body = {**ASK, "tools": [ADD], "stream": True, "stream_options": {"include_usage": True}}
    ((status, text),), _ = asked(policy, body)
    *events, last = [line.removeprefix("data: ") for line in text.strip().split("\n\n")]
    chunks = [json.loads(event) for event in events]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]]
    calls = [call for delta in deltas for call in delta.get("tool_calls", ())]
    assert status == 200
    assert last == "[DONE]"
    assert "".join(delta.get("content") or "" for delta in deltas) == "Sum."
    assert calls[0]["function"]["name"] == "add"
    assert json.loads("".join(call["function"]["arguments"] for call in calls)) == {"x": 3, "y": 4}
    assert chunks[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert chunks[-1]["usage"]["completion_tokens"] > 0


def test_a_retry_gets_the_same_answer_and_an_equal_request_another() -> None:
    policy = Policy("1<|im_end|>", "2<|im_end|>", "3<|im_end|>")
    retry, keyed = {"x-stainless-retry-count": "1"}, {"Idempotency-Key": "k"}
    answers, agent = asked(policy, ASK, (ASK, retry), ASK, (ASK, keyed), (ASK, keyed))
    assert [body["choices"][0]["message"]["content"] for _, body in answers] == ["1", "1", "2", "3", "3"]
    assert agent.counts["agent_retries"] == 2
    assert len(agent.store.trajectories()) == 3


def test_the_smaller_limit_of_tokens_counts_and_a_cut_answer_can_be_continued() -> None:
    policy = Policy("1234<|im_end|>", "5<|im_end|>")
    answers, agent = asked(policy, {**ASK, "max_tokens": 2})
    assert policy.limits == [2]
    assert answers[0][1]["choices"][0]["finish_reason"] == "length"
    more = [*ASK["messages"], {"role": "assistant", "content": "12"}, {"role": "user", "content": "on"}]
    prompt = agent.store.prompt(more)
    given = policy.tokenizer.decode(prompt.transcript.tokens_T[len(policy.prompts[0]) :])
    assert given == "12<|im_end|>\n<|im_start|>user\non<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        ({**ASK, "n": 2}, 400, "n is not supported here: send several requests"),
        ({**ASK, "logit_bias": {"1": 2}}, 400, "logit_bias is not supported"),
        ({**ASK, "stop": ["x"]}, 400, "stop is not supported"),
        ({**ASK, "tool_choice": "required"}, 400, "tool_choice must be auto or none"),
        ({**ASK, "response_format": {"type": "json_object"}}, 400, "response_format must be text"),
        ({**ASK, "max_tokens": 0}, 400, "at least 1"),
        ({**ASK, "tools": [{"name": "f"}]}, 400, "every tool must be"),
        ({"messages": []}, 400, "at least one message"),
        ({"messages": [{"role": "robot", "content": "x"}]}, 400, "messages[0].role must be one of"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "a part that is not text"),
        ({"messages": [{"role": "user", "content": "x" * 9000}]}, 400, "leaves no room for an answer"),
        ({"messages": [*ASK["messages"], {"role": "assistant", "content": "x"}]}, 400, "the last message must not be"),
        ({"messages": [{"role": "assistant", "tool_calls": 1}, *ASK["messages"]]}, 400, "tool_calls must be a list"),
        ("{", 400, "the request is not JSON"),
        ([], 400, "not a JSON object"),
    ],
)  # fmt: skip
def test_a_request_that_cannot_be_answered_gets_a_sentence_and_the_next_is_answered(
    body: Any, status: int, said: str
) -> None:
    answers, agent = asked(Policy("7<|im_end|>"), body, ASK)
    assert answers[0][0] == status
    assert said in answers[0][1]["error"]["message"]
    assert answers[1][0] == 200
    assert agent.counts["agent_refused"] == 1


def test_a_wrong_key_an_unknown_path_and_a_call_after_the_end_are_refused_and_counted() -> None:
    answers, agent = asked(Policy(), (ASK, {"Authorization": "Bearer x"}))
    assert answers[0][0] == 401
    assert "OPENAI_API_KEY" in answers[0][1]["error"]["message"]
    assert agent.counts["agent_refused"] == 1
    assert asked(Policy(), ASK, path="/v1/embeddings")[0][0][0] == 404

    async def late() -> Any:
        async with serving(Policy()) as (agent, address, client):
            agent.is_over = True
            async with client.post(f"{address}/v1/chat/completions", json=ASK) as response:
                return response.status, await response.json(), agent.counts["agent_refused"]

    status, answer, num_refused = asyncio.run(late())
    assert (status, answer["error"]["code"], num_refused) == (409, "sample_ended", 1)
    assert answer["error"]["message"] == "the sample has ended"


def test_an_empty_answer_has_empty_content_and_one_with_calls_has_none() -> None:
    answers, _ = asked(Policy("<|im_end|>", CALL), ASK, {**ASK, "tools": [ADD]})
    assert [body["choices"][0]["message"]["content"] for _, body in answers] == ["", None]


def test_a_malformed_call_is_shown_to_the_agent_and_counted() -> None:
    ((_, body),), agent = asked(Policy("<tool_call>{add</tool_call><|im_end|>"), {**ASK, "tools": [ADD]})
    message = body["choices"][0]["message"]
    assert "tool_calls" not in message
    assert "{add" in message["content"]
    assert agent.counts["agent_malformed_calls"] == 1


def test_requests_with_tools_are_refused_where_the_notation_of_calls_is_unknown() -> None:
    answers, _ = asked(Policy("7<|im_end|>"), {**ASK, "tools": [ADD]}, ASK, no_tools="set the format")
    assert [status for status, _ in answers] == [400, 200]
    assert answers[0][1]["error"]["message"] == "set the format"


@pytest.mark.parametrize("body", [{"reward": "1"}, {"reward": float("nan")}, {}, [], {"reward": 1, "components": [1]}])
def test_a_reward_that_is_no_number_is_refused(body: Any) -> None:
    answers, agent = asked(Policy(), body, path="/rl/reward")
    assert answers[0][0] == 400
    assert agent.reward is None


# ---------------------------------------------------------------- programs

TWO_TURNS = """
    tools = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
    messages = [{"role": "user", "content": row["prompt"]}]
    while calls := (message := ask(messages, tools=tools)).get("tool_calls"):
        messages.append(message)
        for call in calls:
            total = sum(json.loads(call["function"]["arguments"]).values())
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": str(total)})
"""


@pytest.mark.processes
def test_an_unchanged_program_takes_two_turns_and_its_last_answer_is_judged(tmp_path: Any) -> None:
    policy = Policy(CALL, "7<|im_end|>")
    sample = played(policy, TWO_TURNS, tmp_path)
    assert policy.sampled(sample.trajectory) == CALL + "7<|im_end|>"
    assert (policy.scored, sample.verdict.value, sample.others) == (["7"], 1.0, ())
    assert sample.verdict.components["turns"] == 2
    assert sample.verdict.components["agent_tool_calls"] == 1
    assert set(sample.trajectory.versions_T[sample.trajectory.loss_mask_T]) == {2}


@pytest.mark.processes
def test_a_sample_goes_on_after_requests_that_were_refused_and_its_verdict_counts_them(tmp_path: Any) -> None:
    program = """
        import urllib.error

        def refused(**more):
            try:
                ask([{"role": "user", "content": "3 and 4?"}], **more)
            except urllib.error.HTTPError as error:
                return error.code, json.load(error)["error"]["message"].split(":")[0]

        key = os.environ["OPENAI_API_KEY"]
        os.environ["OPENAI_API_KEY"] = "another"
        print(refused())
        os.environ["OPENAI_API_KEY"] = key
        print(refused(n=2), refused(logit_bias={"5": 1}))
        ask([{"role": "user", "content": "3 and 4?"}], tools=[{"type": "function", "function": {"name": "add"}}])
    """
    unknown = '<tool_call>{"name": "divide", "arguments": {}}</tool_call><tool_call>{"name"</tool_call><|im_end|>'
    sample = played(Policy(unknown), program, tmp_path)
    assert sample.verdict.is_scored, sample.verdict
    counts = {name: sample.verdict.components[f"agent_{name}"] for name in ("requests", "refused", "malformed_calls")}
    assert counts == {"requests": 4.0, "refused": 3.0, "malformed_calls": 2.0}


@pytest.mark.processes
def test_a_program_finds_the_policy_by_the_variables_of_both_sdks_and_past_a_proxy(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_PROXY", "example.org")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    program = """
        assert os.environ["NO_PROXY"] == "example.org,127.0.0.1", os.environ["NO_PROXY"]
        body = {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "?"}]}
        headers = {"x-api-key": os.environ["ANTHROPIC_API_KEY"], "Content-Type": "application/json"}
        url = os.environ["ANTHROPIC_BASE_URL"] + "/v1/messages"
        request = urllib.request.Request(url, json.dumps(body).encode(), headers)
        (block,) = json.load(urllib.request.urlopen(request))["content"]
        assert block["text"] == "7", block
    """
    sample = played(Policy("7<|im_end|>"), program, tmp_path)
    assert sample.verdict.value == 1.0, sample.verdict


@pytest.mark.processes
def test_a_program_reports_its_reward_and_conversations_of_its_own_are_further_trajectories(tmp_path: Any) -> None:
    program = """
        ask([{"role": "user", "content": "plan"}])
        ask([{"role": "user", "content": "do"}])
        post(os.environ["AREAL_LIKE_REWARD_URL"], {"reward": 0.5, "components": {"tests": 3}})
    """
    policy = Policy("a<|im_end|>", "b<|im_end|>")
    sample = played(policy, program, tmp_path, reward="agent")
    assert (sample.verdict.value, sample.verdict.components["tests"], policy.scored) == (0.5, 3.0, [])
    assert [policy.sampled(one) for one in (sample.trajectory, *sample.others)] == ["b<|im_end|>", "a<|im_end|>"]


@pytest.mark.processes
@pytest.mark.parametrize(
    ("program", "options", "kind", "reason"),
    [
        ("pass", {}, "invalid", "never requested an answer"),
        ("ask([{'role': 'user', 'content': '?'}])", {"reward": "agent"}, "invalid", "reported no reward"),
        (
            "ask([{'role': 'user', 'content': '?'}]); raise ValueError('oh no')",
            {},
            "crashed",
            "ended with status 1: ValueError: oh no",
        ),
        ("import signal; os.kill(os.getpid(), signal.SIGKILL)", {}, "crashed", "ended with signal SIGKILL"),
        ("import threading; threading.Event().wait()", {"timeout_s": 0.5}, "timed_out", "longer than 0.5 s"),
    ],
)
def test_a_program_that_fails_gives_its_sample_no_reward_and_says_why(
    program: str, options: Any, kind: str, reason: str, tmp_path: Any
) -> None:
    verdict = played(Policy("7<|im_end|>"), program, tmp_path, **options).verdict
    assert (verdict.kind, verdict.value, verdict.failed_in) == (kind, None, "agent")
    assert reason in verdict.reason


@pytest.mark.processes
@pytest.mark.parametrize(
    ("ending", "kind", "value", "reason"),
    [
        ("pass", "scored", 1.0, ""),
        ("sys.exit(1)", "scored", 0.0, ""),
        ("sys.exit(2)", "crashed", None, "ended with status 2"),
        ("import signal; os.kill(os.getpid(), signal.SIGTERM)", "crashed", None, "ended with signal SIGTERM"),
    ],
)
def test_the_exit_of_a_program_is_its_reward_and_another_end_none(
    ending: str, kind: str, value: float | None, reason: str, tmp_path: Any
) -> None:
    policy = Policy("7<|im_end|>")
    program = f"ask([{{'role': 'user', 'content': '?'}}]); {ending}"
    verdict = played(policy, program, tmp_path, reward="exit").verdict
    assert (verdict.kind, verdict.value, policy.scored) == (kind, value, [])
    assert reason in verdict.reason


@pytest.mark.processes
def test_a_sample_that_is_cut_or_cancelled_leaves_no_process(tmp_path: Any) -> None:
    program = """
        import subprocess
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        open(sys.argv[0] + ".pids", "w").write(f"{os.getpid()} {child.pid}")
        ask([{"role": "user", "content": "?"}])
    """
    policy = Policy(SampleCut("segment"))
    with pytest.raises(SampleCut):
        played(policy, program, tmp_path)
    pids = [int(pid) for pid in (tmp_path / "agent.py.pids").read_text().split()]
    assert len(pids) == 2
    assert not [pid for pid in pids if psutil.pid_exists(pid)]

    async def cancelled() -> None:
        workflow = AgentWorkflow(command=[sys.executable, "-S", str(tmp_path / "agent.py")])
        waiting = Policy()
        waiting.going.clear()
        run = asyncio.create_task(workflow.run(SimpleNamespace(row={}), waiting))  # type: ignore[arg-type]
        while not waiting.prompts:
            await asyncio.wait({run}, timeout=0.01)
            assert not run.done()
        run.cancel()
        with pytest.raises(asyncio.CancelledError):
            await run

    asyncio.run(cancelled())
    pids = [int(pid) for pid in (tmp_path / "agent.py.pids").read_text().split()]
    assert not [pid for pid in pids if psutil.pid_exists(pid)]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"command": "python agent.py"}, "list of strings"),
        ({"command": []}, "list of strings"),
        ({"command": ["no-such-program-here"]}, "there is no program 'no-such-program-here'"),
        ({"command": ["sh", "agent.sh"]}, "there is no file 'agent.sh'"),
        ({"command": ["sh"], "preload": "openai"}, "`preload` must be a list of module names"),
        ({"command": ["sh"], "preload": ["openai"]}, "remove `preload`"),
        ({"command": ["sh"], "reward": "coin"}, "`reward` must be `scorer`, `agent` or `exit`"),
        ({"command": ["sh"], "timeout_s": 0}, "`timeout_s` must be greater than 0"),
        ({"command": ["sh"], "format": "hermse"}, "did you mean hermes"),
        ({}, "command"),
    ],
)
def test_options_that_cannot_be_used_are_refused(options: Any, said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_workflow("agent", options)


def test_a_tokenizer_without_a_chat_template_is_refused() -> None:
    policy = Policy(template="")
    with pytest.raises(UserError, match="require a chat template"):
        asyncio.run(AgentWorkflow(command=["sh"]).run(SimpleNamespace(row={}), policy))  # type: ignore[arg-type]

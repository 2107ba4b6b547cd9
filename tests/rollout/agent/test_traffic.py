"""The workflow `traffic` with a scripted policy: real HTTP on loopback, several conversations, late rewards."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import aiohttp
import numpy as np
import pytest
from agent_policy import ADD, ASK, CALL, Policy, until

from areal_like.errors import UserError
from rollout.agent import streaming
from rollout.agent.streaming import BEGINS_HEADER, CONVERSATION_HEADER
from rollout.agent.traffic import TrafficWorkflow
from rollout.workflow import Sample, ServingWorkflow, load_workflow

CHAT = "/v1/chat/completions"
SEVEN, OTHER = "7<|im_end|>", "8<|im_end|>"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as made:
        return int(made.getsockname()[1])


class Outside(Policy):
    """The policy for requests that belong to no sample."""

    worker_index, num_slots = 0, 2

    def __init__(self, *lines: Any) -> None:
        super().__init__(*lines)
        self.reported: list[str] = []

    def report(self, text: str) -> None:
        self.reported.append(text)


class Site:
    """A workflow that serves, its samples, and a client."""

    def __init__(
        self, workflow: TrafficWorkflow, outside: Outside, address: str, client: aiohttp.ClientSession
    ) -> None:
        self.workflow, self.outside, self.address, self.client = workflow, outside, address, client
        self.samples: list[asyncio.Task[Sample]] = []

    def sample(self, *lines: Any) -> Policy:
        """Lease a sample whose policy says these lines."""
        policy = Policy(*lines)
        task = SimpleNamespace(group_id=len(self.samples), sample_index=0, row={})
        self.samples.append(asyncio.create_task(self.workflow.run(task, policy)))  # type: ignore[arg-type]
        return policy

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any, Any]:
        async with self.client.post(self.address + path, json=body, headers=headers) as response:
            text = await response.text()
            is_json = response.content_type == "application/json"
            return response.status, json.loads(text) if is_json else text, response.headers

    async def ask(self, conversation: str = "", *more: Any, **body: Any) -> tuple[int, Any, Any]:
        headers = {CONVERSATION_HEADER: conversation} if conversation else {}
        return await self.post(CHAT, {**ASK, "messages": [*ASK["messages"], *more], **body}, **headers)

    async def begin(self, conversation: str, *more: Any, **headers: str) -> tuple[int, Any, Any]:
        """A request that says that it begins a conversation."""
        named = {CONVERSATION_HEADER: conversation} if conversation else {}
        body = {**ASK, "messages": [*ASK["messages"], *more]}
        return await self.post(CHAT, body, **{BEGINS_HEADER: "true", **named, **headers})

    async def reward(self, conversation: str, reward: Any, **more: Any) -> tuple[int, str]:
        status, body, _ = await self.post("/rl/reward", {"conversation_id": conversation, "reward": reward, **more})
        return status, body["error"]["code"] if status != 200 else ""

    def pass_deadline(self, conversation: str) -> None:
        """As if the time limit of a conversation had passed."""
        one = self.workflow._conversations._open[conversation]  # type: ignore[union-attr]
        one._moved_s = float("-inf")
        one._changed.set()

    @property
    def counts(self) -> dict[str, float]:
        return {name.removeprefix("traffic_"): n for name, n in self.workflow.traffic_counters().items() if n}


@asynccontextmanager
async def site(*outside: Any, **options: Any) -> AsyncIterator[Site]:
    port = free_port()
    workflow = load_workflow("traffic", {"port": port, **options})
    assert isinstance(workflow, TrafficWorkflow)
    policy = Outside(*outside)
    async with workflow.serving(policy), aiohttp.ClientSession() as client:  # type: ignore[arg-type]
        made = Site(workflow, policy, f"http://127.0.0.1:{port}", client)
        yield made
        for one in made.samples:
            one.cancel()
        await asyncio.gather(*made.samples, return_exceptions=True)


def test_it_is_a_workflow_that_serves_and_others_are_not() -> None:
    assert isinstance(load_workflow("traffic", {"port": 8001}), ServingWorkflow)
    assert not isinstance(load_workflow("single_turn"), ServingWorkflow)


def test_a_conversation_with_a_tool_is_one_trajectory_with_the_reward_of_its_client() -> None:
    async def talk() -> Any:
        async with site() as here:
            policy = here.sample(CALL, SEVEN)
            await until(lambda: here.workflow._conversations._free)  # type: ignore[union-attr]
            status, body, headers = await here.ask(tools=[ADD])
            name = body["conversation_id"]
            assert (status, headers[CONVERSATION_HEADER]) == (200, name)
            message = body["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "7"}
            _, body, _ = await here.ask("", message, result, tools=[ADD])
            assert body["conversation_id"] == name, "it is found by its messages"
            assert await here.reward(name, 0.5, components={"stars": 3}) == (200, "")
            return policy, await here.samples[0], here.counts

    policy, sample, counts = asyncio.run(talk())
    assert policy.sampled(sample.trajectory) == CALL + SEVEN
    assert (sample.others, sample.verdict.kind, sample.verdict.value) == ((), "scored", 0.5)
    assert sample.verdict.components["turns"] == 2
    assert sample.verdict.components["stars"] == 3
    assert counts == {"requests": 2, "recorded": 2, "conversations": 1, "rewards": 1}


def test_the_oldest_sample_gets_the_next_conversation_and_without_one_requests_are_answered_unrecorded() -> None:
    async def talk() -> Any:
        async with site(OTHER, OTHER) as here:
            policies = [here.sample("1<|im_end|>"), here.sample("2<|im_end|>")]
            await until(lambda: len(here.workflow._conversations._free) == 2)  # type: ignore[union-attr]
            bodies = [(await here.ask())[1] for _ in range(3)]
            said = [body["choices"][0]["message"]["content"] for body in bodies]
            names = [body["conversation_id"] for body in bodies]
            assert said == ["1", "2", "8"]
            assert len(set(names)) == 3
            here.sample("9<|im_end|>")
            _, again, _ = await here.ask(names[2])
            assert again["choices"][0]["message"]["content"] == "8", "it stays unrecorded although a sample waits"
            refused = await here.reward(names[2], 1.0)
            assert await here.reward(names[1], 1.0) == (200, "")
            assert (await here.samples[1]).verdict.value == 1.0
            return refused, [len(policy.prompts) for policy in policies], here.counts

    refused, prompts, counts = asyncio.run(talk())
    assert refused == (409, "not_recorded")
    assert prompts == [1, 1]
    assert {key: counts[key] for key in ("requests", "recorded", "not_recorded", "refused_rewards")} == {
        "requests": 4, "recorded": 2, "not_recorded": 2, "refused_rewards": 1,
    }  # fmt: skip


EXAMPLE = [{"role": "assistant", "content": "12"}, {"role": "user", "content": "1 and 4?"}]
"""An answer that the client gives as an example, and the question after it."""


@pytest.mark.parametrize("name", ["", "mine"])
def test_a_conversation_that_begins_with_answers_is_recorded_if_its_client_says_that_it_begins(name: str) -> None:
    async def talk() -> Any:
        async with site() as here:
            policy = here.sample("5<|im_end|>", SEVEN)
            _, body, _ = await here.begin(name, *EXAMPLE)
            known = body["conversation_id"]
            message = body["choices"][0]["message"]
            _, body, _ = await here.ask(name, *EXAMPLE, message, {"role": "user", "content": "3 and 4?"})
            assert body["conversation_id"] == known
            assert await here.reward(known, 1.0) == (200, "")
            return policy, await here.samples[0], here.counts, here.outside.reported

    policy, sample, counts, reported = asyncio.run(talk())
    assert policy.sampled(sample.trajectory) == "5<|im_end|>" + SEVEN
    assert (counts["recorded"], counts["conversations"], reported) == (2, 1, [])


def test_without_that_word_it_is_not_recorded_and_the_run_and_the_client_read_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def talk() -> Any:
        async with site(OTHER, OTHER, OTHER) as here:
            here.sample(SEVEN)
            names = [(await here.ask(name, *EXAMPLE))[1]["conversation_id"] for name in ("new", "", "other")]
            assert names[::2] == ["new", "other"]
            _, body, _ = await here.post("/rl/reward", {"conversation_id": "new", "reward": 1})
            await here.begin("new", *EXAMPLE[:0])
            assert (await here.reward("new", 1.0)) == (409, "not_recorded"), "it has begun before"
            return body["error"], here.counts, here.outside.reported

    error, counts, reported = asyncio.run(talk())
    assert error["code"] == "not_recorded"
    assert "its first request to this worker already had answers in it" in error["message"]
    assert f"{BEGINS_HEADER}: true" in error["message"]
    assert "conversations" not in counts
    (said,) = reported
    assert f"{BEGINS_HEADER}: true" in said
    assert [one.message for one in caplog.records if one.levelname == "WARNING"] == [said]


def test_a_conversation_without_an_id_stays_the_one_that_was_not_recorded_and_is_no_reason_to_warn() -> None:
    async def talk() -> Any:
        async with site(OTHER, OTHER, OTHER) as here:
            _, body, _ = await here.ask()
            names, messages = [body["conversation_id"]], []
            for _ in range(2):
                messages += [body["choices"][0]["message"], {"role": "user", "content": "and?"}]
                _, body, _ = await here.ask("", *messages)
                names.append(body["conversation_id"])
            _, refused, _ = await here.post("/rl/reward", {"conversation_id": names[0], "reward": 1})
            return names, refused["error"]["message"], here.outside.reported

    names, said, reported = asyncio.run(talk())
    assert len(set(names)) == 1
    assert "no sample waited for a conversation when it began" in said
    assert reported == []


def test_a_conversation_that_is_over_may_go_on_without_an_id_and_is_no_reason_to_warn() -> None:
    async def talk() -> Any:
        async with site(OTHER) as here:
            here.sample(SEVEN)
            _, body, _ = await here.ask()
            name = body["conversation_id"]
            await here.reward(name, 1.0)
            await here.samples[0]
            here.sample(SEVEN)
            _, body, _ = await here.ask("", body["choices"][0]["message"], {"role": "user", "content": "thanks"})
            return name, body["conversation_id"], await here.reward(name, 1.0), here.outside.reported

    name, again, refused, reported = asyncio.run(talk())
    assert (again, refused, reported) == (name, (409, "conversation_ended"), [])


def test_a_request_that_begins_a_conversation_continues_none_but_the_one_that_it_names_or_repeats() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample("12<|im_end|>", SEVEN)
            here.sample("5<|im_end|>")
            await until(lambda: len(here.workflow._conversations._free) == 2)  # type: ignore[union-attr]
            await here.ask("mine")
            forked = [(await here.begin("", *EXAMPLE, **{"Idempotency-Key": "k"}))[1] for _ in range(2)]
            assert [one["choices"][0]["message"]["content"] for one in forked] == ["5", "5"]
            _, more, _ = await here.begin("mine", *EXAMPLE)
            assert more["choices"][0]["message"]["content"] == "7"
            return [one["conversation_id"] for one in (*forked, more)]

    first, again, named = asyncio.run(talk())
    assert (first == again, first == named, named) == (True, False, "mine")


def test_another_word_than_true_or_false_is_refused() -> None:
    async def talk() -> Any:
        async with site(OTHER) as here:
            said = [await here.post(CHAT, ASK, **{BEGINS_HEADER: word}) for word in ("yes", "False")]
            return [status for status, _, _ in said], said[0][1]["error"]["message"]

    statuses, words = asyncio.run(talk())
    assert statuses == [400, 200]
    assert words == f"the header {BEGINS_HEADER} must be true or false"


def test_the_last_reward_that_is_not_final_counts_at_the_deadline() -> None:
    async def talk() -> Any:
        async with site(OTHER) as here:
            here.sample(SEVEN)
            _, body, _ = await here.ask("mine")
            assert body["conversation_id"] == "mine"
            assert await here.reward("mine", 0.0, final=False) == (200, "")
            assert await here.reward("mine", 0.25, final=False) == (200, "")
            here.pass_deadline("mine")
            sample = await here.samples[0]
            late = await here.reward("mine", 1.0)
            assert (await here.ask("mine"))[0] == 200, "a conversation that is over is answered"
            return sample, late, here.counts

    sample, late, counts = asyncio.run(talk())
    assert (sample.verdict.kind, sample.verdict.value) == ("scored", 0.25)
    assert late == (409, "reward_too_late")
    assert (counts["rewards"], counts["late_rewards"], counts.get("missing_rewards")) == (2, 1, None)
    assert counts["not_recorded"] == 1


@pytest.mark.parametrize(("policy", "kind", "value"), [("drop", "invalid", None), (-1.0, "scored", -1.0)])
def test_a_conversation_without_a_reward_ends_at_its_deadline(policy: Any, kind: str, value: float | None) -> None:
    async def talk() -> Any:
        async with site(reward_timeout_s=0.05, on_missing_reward=policy) as here:
            here.sample(SEVEN)
            await here.ask()
            return await here.samples[0], here.counts

    sample, counts = asyncio.run(talk())
    assert (sample.verdict.kind, sample.verdict.value) == (kind, value)
    assert "0.05 s after the last request" in sample.verdict.reason
    assert counts["missing_rewards"] == 1


def test_a_client_may_say_that_no_reward_will_come() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            await here.ask("a")
            assert await here.reward("a", None) == (200, "")
            return await here.samples[0], await here.reward("a", 1.0), here.counts

    sample, again, counts = asyncio.run(talk())
    assert (sample.verdict.kind, sample.verdict.reason) == ("invalid", "its client sent no reward")
    assert again == (409, "conversation_ended")
    assert counts["missing_rewards"] == 1


def test_a_client_that_takes_back_its_reward_and_never_ends_the_conversation_missed_the_deadline() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            await here.ask("a")
            await here.reward("a", 1.0, final=False)
            await here.reward("a", None, final=False)
            here.pass_deadline("a")
            return await here.samples[0]

    sample = asyncio.run(talk())
    assert (sample.verdict.kind, "s after the last request" in sample.verdict.reason) == ("invalid", True)


def test_the_deadline_waits_for_an_answer_that_is_generated() -> None:
    async def talk() -> Any:
        async with site() as here:
            policy = here.sample(SEVEN)
            policy.going.clear()
            asked = asyncio.create_task(here.ask("a"))
            await until(lambda: policy.prompts)
            here.pass_deadline("a")
            for _ in range(9):  # its sample looks at the deadline
                await asyncio.sleep(0)
            assert not here.samples[0].done()
            policy.going.set()
            assert (await asked)[0] == 200
            assert await here.reward("a", 1.0) == (200, "")
            return await here.samples[0]

    assert asyncio.run(talk()).verdict.value == 1.0


def test_a_refused_first_request_leaves_the_sample_to_the_next_conversation() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            status, body, _ = await here.ask("a", {"role": "user", "content": "x" * 5000})
            assert (status, body["error"]["code"]) == (400, "context_length_exceeded")
            await until(lambda: here.workflow._conversations._free)  # type: ignore[union-attr]
            assert (await here.ask("b"))[0] == 200
            assert await here.reward("b", 1.0) == (200, "")
            return await here.samples[0]

    assert asyncio.run(talk()).verdict.value == 1.0


def test_a_dropped_sample_gives_its_running_request_an_unrecorded_answer() -> None:
    async def talk() -> Any:
        async with site(OTHER) as here:
            policy = here.sample(SEVEN)
            policy.going.clear()
            asked = asyncio.create_task(here.ask("a"))
            await until(lambda: policy.prompts)
            here.samples[0].cancel()  # as the worker does when the run drops the group, or takes the sample back
            status, body, _ = await asked
            return status, body["choices"][0]["message"]["content"], await here.reward("a", 1.0), here.counts

    status, said, refused, counts = asyncio.run(talk())
    assert (status, said, refused) == (200, "8", (409, "conversation_dropped"))
    assert counts == {
        "requests": 1, "not_recorded": 1, "conversations": 1, "dropped": 1, "refused_rewards": 1, "refused": 1,
    }  # fmt: skip


def test_a_dropped_sample_with_its_reward_gives_a_running_request_an_unrecorded_answer_too() -> None:
    async def talk() -> Any:
        async with site(OTHER) as here:
            policy = here.sample(SEVEN, SEVEN)
            _, body, _ = await here.ask("a")
            policy.going.clear()
            more = body["choices"][0]["message"], {"role": "user", "content": "and?"}
            asked = asyncio.create_task(here.ask("a", *more))
            await until(lambda: len(policy.prompts) == 2)
            assert await here.reward("a", 1.0) == (200, "")
            here.samples[0].cancel()
            status, body, _ = await asked
            return status, body["choices"][0]["message"]["content"], await here.reward("a", 1.0), here.counts

    status, said, refused, counts = asyncio.run(talk())
    assert (status, said, refused) == (200, "8", (409, "conversation_ended"))
    assert (counts["dropped"], counts["conversations"], counts["rewards"]) == (1, 1, 1)


def test_a_sample_that_has_its_conversation_is_not_dropped() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            await here.ask("a")
            await here.reward("a", 1.0)
            await here.samples[0]
            return here.counts

    assert "dropped" not in asyncio.run(talk())


def test_bad_rewards_get_a_clear_status_and_are_counted() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            await here.ask("a")
            status, body, _ = await here.post("/rl/reward", {"conversation_id": "b", "reward": 1})
            assert (status, body["error"]["code"]) == (404, "unknown_conversation")
            assert "the worker that had it was restarted" in body["error"]["message"]
            bad = [
                {"reward": 1},
                {"conversation_id": "a"},
                {"conversation_id": "a", "reward": "good"},
                {"conversation_id": "a", "reward": True},
                {"conversation_id": "a", "reward": 1, "final": "yes"},
                {"conversation_id": "a", "reward": 1, "components": {"x": "y"}},
            ]
            statuses = [(await here.post("/rl/reward", one))[0] for one in bad]
            assert not here.samples[0].done()
            return statuses, here.counts

    statuses, counts = asyncio.run(talk())
    assert statuses == [400] * 6
    assert (counts["unknown_rewards"], counts["refused"]) == (1, 7)


def test_an_id_that_cannot_be_in_a_header_is_refused() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            return [(await here.ask(name))[0] for name in ("x" * 129, "x" * 128)]

    assert asyncio.run(talk()) == [400, 200]


def test_streamed_answers_and_the_other_dialects_have_the_id_too() -> None:
    async def talk() -> Any:
        async with site() as here:
            for _ in range(3):
                here.sample(SEVEN)
            status, text, headers = await here.ask(stream=True)
            assert status == 200
            assert "[DONE]" in text
            names = [headers[CONVERSATION_HEADER]]
            for path, body in (
                ("/v1/messages", {**ASK, "max_tokens": 9}),
                ("/v1/responses", {"model": "m", "input": "?"}),
            ):
                status, answer, headers = await here.post(path, body)
                assert (status, headers[CONVERSATION_HEADER]) == (200, answer["conversation_id"])
                names.append(answer["conversation_id"])
            for name in names:
                assert (await here.reward(name, 1.0))[0] == 200
            return names, await asyncio.gather(*here.samples)

    names, samples = asyncio.run(talk())
    assert len(set(names)) == 3
    assert [sample.verdict.value for sample in samples] == [1.0] * 3


def test_a_stream_that_begins_before_its_answer_has_the_id_in_its_header(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streaming, "COMMENT_S", 0.001)

    async def talk() -> Any:
        async with site() as here:
            policy = here.sample(SEVEN)
            policy.going.clear()
            async with here.client.post(here.address + CHAT, json={**ASK, "stream": True}) as response:
                assert not policy.answers
                policy.going.set()
                text = await response.text()
            name = response.headers[CONVERSATION_HEADER]
            assert await here.reward(name, 0.5) == (200, "")
            return text, await here.samples[0]

    text, sample = asyncio.run(talk())
    assert "[DONE]" in text
    assert sample.verdict.value == 0.5


def test_a_response_is_continued_by_its_id_within_its_conversation() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample("1<|im_end|>", "3<|im_end|>")
            here.sample("2<|im_end|>", "4<|im_end|>")
            await until(lambda: len(here.workflow._conversations._free) == 2)  # type: ignore[union-attr]
            first = [(await here.post("/v1/responses", {"model": "m", "input": "?"}))[1] for _ in range(2)]
            more = {"model": "m", "input": "on", "previous_response_id": first[1]["id"]}
            _, body, _ = await here.post("/v1/responses", more)
            return first, body

    first, body = asyncio.run(talk())
    assert first[0]["id"] != first[1]["id"]
    assert body["conversation_id"] == first[1]["conversation_id"]
    assert body["output"][0]["content"][0]["text"] == "4"


def test_a_retry_of_a_first_request_is_the_same_conversation() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN)
            here.sample(OTHER)
            keyed = {"Idempotency-Key": "k"}
            bodies = [(await here.post(CHAT, ASK, **keyed))[1] for _ in range(2)]
            return [body["conversation_id"] for body in bodies], here.counts

    names, counts = asyncio.run(talk())
    assert names[0] == names[1]
    assert counts["conversations"] == 1


def test_clients_may_use_equal_idempotency_keys_each_for_one_request() -> None:
    async def talk() -> Any:
        async with site() as here:
            here.sample(SEVEN, SEVEN)
            here.sample(OTHER)
            await until(lambda: len(here.workflow._conversations._free) == 2)  # type: ignore[union-attr]
            keyed = {"Idempotency-Key": "1"}
            other = {**ASK, "messages": [{"role": "user", "content": "4 and 4?"}]}
            bodies = [(await here.post(CHAT, body, **keyed))[1] for body in (ASK, other, ASK, other)]
            said = [body["choices"][0]["message"] for body in bodies]
            more = [*ASK["messages"], said[0], {"role": "user", "content": "sure?"}]
            status, refused, _ = await here.post(CHAT, {**ASK, "messages": more}, **keyed)
            return [one["content"] for one in said], status, refused["error"]["code"], here.counts

    said, status, code, counts = asyncio.run(talk())
    assert said == ["7", "8", "7", "8"]
    assert counts["conversations"] == 2
    assert (status, code) == (400, "idempotency_key_reused"), "it continues the conversation that has used the key"


def test_a_key_is_required_where_there_is_one_and_web_pages_need_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAFFIC_KEY", "secret")

    async def talk(**options: Any) -> list[int]:
        async with site(OTHER, OTHER, **options) as here:
            key, page = {"Authorization": "Bearer secret"}, {"Origin": "http://example.org"}
            return [(await here.post(CHAT, ASK, **headers))[0] for headers in ({}, key, page)]

    assert asyncio.run(talk(key_variable="TRAFFIC_KEY")) == [401, 200, 401]
    assert asyncio.run(talk()) == [200, 200, 403]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({}, "port"),
        ({"port": 0}, "`port` must be a whole number from 1 to 65535"),
        ({"port": 8001, "host": "0.0.0.0"}, "other machines may be able to connect to 0.0.0.0"),
        ({"port": 8001, "key_variable": "NO_SUCH_KEY"}, "environment variable NO_SUCH_KEY is not set"),
        ({"port": 8001, "reward_timeout_s": 0}, "`reward_timeout_s` must be a number greater than 0"),
        ({"port": 8001, "on_missing_reward": "zero"}, "`on_missing_reward` must be `drop` or a finite number"),
        ({"port": 8001, "on_missing_reward": float("nan")}, "`on_missing_reward` must be `drop` or a finite number"),
        ({"port": 8001, "thinking": "no"}, "`thinking` must be `keep` or `template`"),
        ({"port": 8001, "format": "none"}, "none"),
    ],
)
def test_bad_options_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(UserError, match=said):
        load_workflow("traffic", options)


def test_a_port_in_use_is_an_error_that_names_it() -> None:
    async def talk() -> None:
        async with site() as here, here.workflow.serving(Outside()):  # type: ignore[arg-type]
            pass

    with pytest.raises(UserError, match="is in use") as refused:
        asyncio.run(talk())
    assert refused.value.where == "rollout.workflow_options.port"


def test_every_sampled_token_of_a_forked_conversation_is_trained_once() -> None:
    async def talk() -> Any:
        async with site() as here:
            policy = here.sample("1<|im_end|>", "2<|im_end|>", "3<|im_end|>")
            _, body, _ = await here.ask("a")
            message = body["choices"][0]["message"]
            for text in ("more?", "other?"):
                await here.ask("a", message, {"role": "user", "content": text})
            await here.reward("a", 1.0)
            return policy, await here.samples[0]

    policy, sample = asyncio.run(talk())
    trajectories = [sample.trajectory, *sample.others]
    assert len(trajectories) == 2
    assert sum(int(np.count_nonzero(one.loss_mask_T)) for one in trajectories) == sum(map(len, policy.answers))

"""External models of a workflow, with a real policy engine and a server on loopback: what is sent, and what its answers
are in a trajectory; a teacher behind an endpoint gives the log-probs that transformers computes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from odd_server import OddServer, chat, reply

from areal_like.errors import UserError
from areal_like.external.errors import BudgetUsedUp, ExternalStop, RequestFailed
from rollout.tokens import load_tokenizer
from rollout.transcript import Transcript
from rollout.workflow import Sample

ROW = {"prompt": "19:"}
USAGE = {"usage": {"prompt_tokens": 4, "completion_tokens": 1}}


@pytest.fixture
def serve() -> Iterator[Callable[..., OddServer]]:
    servers: list[OddServer] = []

    def start(behave: Any) -> OddServer:
        servers.append(OddServer(behave))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def helper(server: OddServer, name: str = "helper", **fields: Any) -> dict[str, Any]:
    own = {key: fields.pop(key) for key in ("temperature", "max_new_tokens") if key in fields}
    endpoint = {"base_url": f"{server.url}/v1", "model": "big", "backoff_s": 0.01, "retries": 1, **fields}
    return {"name": name, "endpoint": endpoint, **own}


class Ask:
    """One answer of the policy, then of the external model `helper` to each prompt; all are added to the transcript."""

    is_resumable = False
    models = ("helper",)

    def __init__(self, *prompts: Any, **asked: Any) -> None:
        self.prompts, self.asked = prompts, asked
        self.answers: list[Any] = []

    async def run(self, task: Any, tools: Any) -> Sample:
        talk = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        talk.sampled(await tools.generate(talk))
        model = tools.models["helper"]
        self.answers = list(
            await asyncio.gather(*(model.generate(prompt or talk, **self.asked) for prompt in self.prompts))
        )
        for answer in self.answers:
            talk.given(answer)
        return Sample(trajectory=talk.close("environment"), verdict=tools.verdict(1.0), response_text="")


def test_messages_go_out_as_they_are_and_the_answer_is_given_and_not_trained(at_desk: Any, serve: Any) -> None:
    server = serve(lambda n, h, asked: reply(h, {**chat("19"), **USAGE}))
    workflow = Ask([{"role": "user", "content": "How many?"}], [{"role": "user", "content": "Why?"}])

    async def test(desk: Any) -> Any:
        made = await desk.sample(workflow, ROW, seed=7)
        return made, desk.hosts.counters(), desk.bench.tokens.encode("19")

    sample, counters, expected = at_desk(
        test, models=[helper(server, system="Be brief.", temperature=0.5, max_new_tokens=9)]
    )
    first, second = sorted(server.asked, key=lambda one: one["messages"][-1]["content"])
    assert first["messages"] == [
        {"role": "system", "content": "Be brief."}, {"role": "user", "content": "How many?"},
    ]  # fmt: skip
    assert {key: first[key] for key in ("model", "temperature", "max_tokens")} == {
        "model": "big", "temperature": 0.5, "max_tokens": 9,
    }  # fmt: skip
    assert first["seed"] != second["seed"]
    assert [(one.model, one.version) for one in sample.trajectory.sources] == [("helper", 0), ("helper", 0)]
    source = sample.trajectory.sources[0]
    assert sample.trajectory.tokens_T[source.start : source.end].tolist() == expected.tolist()
    assert not sample.trajectory.loss_mask_T[source.start :].any()
    assert [answer.is_trainable for answer in workflow.answers] == [False, False]
    assert (counters["model_helper_requests"], counters["model_helper_tokens_in"]) == (2, 8)
    assert counters["model_helper_tokens"] == 2 * len(expected)


def test_a_prompt_of_tokens_is_sent_as_text(at_desk: Any, serve: Any) -> None:
    server = serve(lambda n, h, asked: reply(h, chat("1", "length")))
    workflow = Ask(None, max_new_tokens=3)

    async def test(desk: Any) -> Any:
        await desk.sample(workflow, ROW)
        return desk.bench.tokens

    at_desk(test, models=[helper(server, send_seed=False)])
    (asked,) = server.asked
    assert asked["messages"][0]["content"].startswith("19:")
    assert (asked["max_tokens"], "seed" in asked) == (3, False)
    assert workflow.answers[0].finish_reason == "length"


def test_a_failed_request_is_an_error_of_the_workflow_and_a_budget_ends_the_worker(
    at_desk: Any, serve: Any, tmp_path: Path
) -> None:
    busy = serve(lambda n, h, asked: reply(h, b"busy", 503))
    workflow = Ask([{"role": "user", "content": "?"}])

    async def test(desk: Any) -> None:
        await desk.sample(workflow, ROW)

    with pytest.raises(RequestFailed, match="failed 2 times"):
        at_desk(test, models=[helper(busy)])
    paid = serve(lambda n, h, asked: reply(h, {**chat("1"), **USAGE}))
    twice = Ask(*[[{"role": "user", "content": text}] for text in "ab"])

    async def run_out(desk: Any) -> Any:
        for seed in range(9):
            await desk.sample(twice, ROW, seed=seed)

    limits = {"records": str(tmp_path / "a.jsonl"), "max_tokens_total": 12, "max_concurrency": 1}
    with pytest.raises(ExternalStop, match=r"the budget of model big .* is used up \(15 of 12 tokens\)"):
        at_desk(run_out, models=[helper(paid, **limits)])
    with pytest.raises(BudgetUsedUp):
        at_desk(run_out, models=[helper(paid, **{**limits, "on_exhausted": "fail", "record": "write"})])


def test_what_ends_the_worker_is_kept_even_if_the_workflow_hides_it(at_desk: Any, serve: Any) -> None:
    server = serve(lambda n, h, asked: reply(h, b"no", 401))
    seen: list[Any] = []

    class Hides(Ask):
        async def run(self, task: Any, tools: Any) -> Sample:
            seen.append(tools)
            try:
                return await super().run(task, tools)
            except UserError:
                talk = Transcript(tools.tokens.prompt(task.row))
                talk.sampled(await tools.generate(talk))
                return Sample(trajectory=talk.close(), verdict=tools.verdict(0.0), response_text="")

    async def test(desk: Any) -> None:
        await desk.sample(Hides([{"role": "user", "content": "?"}]), ROW)

    at_desk(test, models=[helper(server)])
    assert isinstance(seen[0].engine_error, ExternalStop)
    assert "rejected the key" in str(seen[0].engine_error)


# ---------------------------------------------------------------- tokens and teachers


def knows_tokens(zoo: Any, tokenizer: Any, version: int = 0) -> Any:
    """A server of `/completions` as vLLM's: greedy answers and log-probs of a model of the zoo."""

    def behave(number: int, handler: Any, asked: Any) -> None:
        prompt = asked["prompt"]
        if "prompt_logprobs" in asked:
            said = zoo.logprobs(version, np.asarray(prompt, np.int32))
            rows: list[Any] = [None]
            for place, token in enumerate(prompt[1:]):
                text = tokenizer.decode([token])
                rows.append({str(token): {"logprob": float(said[place, token]), "decoded_token": text}})
            reply(handler, {"choices": [{"prompt_logprobs": rows}], "usage": {"prompt_tokens": len(prompt)}})
            return
        ids: list[int] = []
        logprobs: list[float] = []
        for _ in range(asked["max_tokens"]):
            said = zoo.logprobs(version, np.asarray([*prompt, *ids, 0], np.int32))[-1]
            ids.append(int(said.argmax()))
            logprobs.append(float(said.max()))
        choice = {"token_ids": ids, "logprobs": {"token_logprobs": logprobs}, "finish_reason": "length"}
        reply(handler, {"choices": [choice], **USAGE})

    return behave


def test_token_ids_go_out_and_come_back(at_desk: Any, zoo: Any, serve: Any) -> None:
    workflow = Ask(None)

    async def test(desk: Any) -> Any:
        server.asked.clear()  # those of the start
        return await desk.sample(workflow, ROW)

    server = serve(knows_tokens(zoo, load_tokenizer(zoo.policy, "from_model"), version=1))
    sample = at_desk(test, models=[helper(server, api="tokens", temperature=0.0)])
    trajectory, (source,) = sample.trajectory, sample.trajectory.sources
    assert server.asked[0]["prompt"] == trajectory.tokens_T[: source.start].tolist()
    said = zoo.logprobs(1, trajectory.tokens_T)
    for place in range(source.start, source.end):
        assert trajectory.tokens_T[place] == said[place - 1].argmax()
    logprobs_R = workflow.answers[0].segment.logprobs_R
    assert logprobs_R == pytest.approx([said[place - 1].max() for place in range(source.start, source.end)], abs=1e-5)


class Once:
    is_resumable = True

    async def run(self, task: Any, tools: Any) -> Sample:
        talk = Transcript(tools.tokens.prompt(task.row))
        talk.sampled(await tools.generate(talk))
        return Sample(trajectory=talk.close(), verdict=tools.verdict(1.0), response_text="")


def test_a_teacher_behind_an_endpoint_gives_the_log_probs_of_its_model(at_desk: Any, zoo: Any, serve: Any) -> None:
    server = serve(knows_tokens(zoo, load_tokenizer(zoo.policy, "from_model"), version=2))

    async def test(desk: Any) -> Any:
        return await desk.sample(Once(), ROW, max_new_tokens=6)

    trajectory = at_desk(test, models=[helper(server, "expert", api="tokens")], teacher="expert").trajectory
    said, mask_T = zoo.logprobs(2, trajectory.tokens_T), trajectory.loss_mask_T
    for place in np.flatnonzero(mask_T):
        expected = said[place - 1, trajectory.tokens_T[place]]
        assert trajectory.teacher_logprobs_T[place] == pytest.approx(expected, abs=1e-5)
    assert not trajectory.teacher_logprobs_T[~mask_T].any()


@pytest.mark.parametrize(
    ("behave", "words"),
    [
        (lambda n, h, a: reply(h, {"choices": [{"text": "x"}], **USAGE}), "does not return log-probs of prompt tokens"),
        (lambda n, h, a: reply(h, b"no such route", 404), "rejected the request: status 404"),
    ],
)
def test_a_teacher_without_log_probs_of_given_tokens_is_refused_at_the_start(
    behave: Any, words: str, at_desk: Any, serve: Any
) -> None:
    async def test(desk: Any) -> None:
        raise AssertionError("must not start")

    with pytest.raises(
        UserError, match=rf"a teacher needs log-probs.*{words}.*use a server that offers prompt_logprobs"
    ):
        at_desk(test, models=[helper(serve(behave), "expert", api="tokens")], teacher="expert")


def test_another_tokenizer_is_refused_at_the_start(at_desk: Any, zoo: Any, serve: Any) -> None:
    class Shifted:
        def decode(self, ids: list[int]) -> str:
            return "odd"

    async def test(desk: Any) -> None:
        raise AssertionError("must not start")

    with pytest.raises(UserError, match=r"is 'odd' at .* in the policy's tokenizer -> use"):
        at_desk(test, models=[helper(serve(knows_tokens(zoo, Shifted())), api="tokens")])


def test_the_tokenizer_is_compared_at_each_start_but_not_in_a_replay_or_without_budget(
    at_desk: Any, zoo: Any, serve: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    class Shifted:
        def decode(self, ids: list[int]) -> str:
            return "odd"

    async def starts(desk: Any) -> None:
        await desk.sample(Ask(None), ROW)

    ours, other = (
        serve(knows_tokens(zoo, load_tokenizer(zoo.policy, "from_model"))),
        serve(knows_tokens(zoo, Shifted())),
    )
    recorded = {"api": "tokens", "records": str(tmp_path / "a.jsonl"), "send_seed": False}
    at_desk(starts, models=[helper(ours, **recorded)])
    with pytest.raises(UserError, match="is 'odd' at"):
        at_desk(starts, models=[helper(other, **recorded)])
    num_asked = len(other.asked)
    at_desk(starts, models=[helper(other, **recorded, record="replay")])
    for on_exhausted in ("end", "fail"):
        limits = {"max_tokens_total": 1, "on_exhausted": on_exhausted}
        at_desk(starts, models=[helper(other, **recorded, **limits)])  # its answers are recorded
    assert len(other.asked) == num_asked
    assert (
        caplog.text.count("is not compared with the policy's, because the budget is used up (max_tokens_total: ") == 2
    )


def test_a_chat_endpoint_computes_no_log_probs(at_desk: Any, serve: Any) -> None:
    class Scores:
        is_resumable = False

        async def run(self, task: Any, tools: Any) -> Sample:
            await tools.models["helper"].logprobs(tools.tokens.prompt(task.row), np.array([1], np.int32))
            raise AssertionError("must be refused")

    async def test(desk: Any) -> None:
        await desk.sample(Scores(), ROW)

    with pytest.raises(UserError, match="`api: chat` returns no log-probs of given tokens"):
        at_desk(test, models=[helper(serve(lambda n, h, a: reply(h, chat("1"))))])

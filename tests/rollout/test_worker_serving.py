"""A worker whose workflow answers clients: before its samples, outside of them, and until it shuts down."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager

import pytest

from areal_like.errors import EngineError, UserError
from areal_like.wire import messages as m
from rollout.transcript import Transcript
from rollout.workflow import ServingWorkflow


class Serves:
    """Its samples wait for clients who never come."""

    is_resumable = False

    def __init__(self, fault=None):
        self.policy, self.is_open, self.fault = None, False, fault

    @asynccontextmanager
    async def serving(self, policy):
        if self.fault is not None:
            raise self.fault
        self.policy, self.is_open = policy, True
        try:
            yield
        finally:
            self.is_open = False

    def traffic_counters(self):
        return {"traffic_requests": 3.0}

    async def run(self, task, tools):
        await asyncio.Event().wait()

    def prompt(self):
        tokens = self.policy.tokens
        return Transcript(tokens.encode("ab"), encode=tokens.encode)


def test_samples_wait_for_clients_and_requests_are_answered_outside_of_them(rig, fake):
    workflow = Serves()
    assert isinstance(workflow, ServingWorkflow)

    async def scenario(r):
        await r.ready()
        assert (workflow.policy.worker_index, workflow.policy.num_slots) == (0, 4)
        r.lease(fake.task(1))
        await r.until(lambda: r.beat().state == "wait:traffic", "the wait")
        answer = await workflow.policy.generate(workflow.prompt(), max_new_tokens=4)
        assert (len(answer.segment), answer.segment.last_version) == (4, 0)
        request = r.engine.requests[-1]
        assert (request.share_key, request.session_key) == (-1, -1)
        assert not r.got(m.SampleFinished)
        assert not r.got(m.Progress)
        await r.until(lambda: r.beat().counters.get("traffic_requests") == 3.0, "the counters")
        r.stop.set()
        await r.task
        assert [one.reason for one in r.got(m.SampleReturned)] == ["drain"]
        assert not workflow.is_open

    rig(scenario, workflow=workflow)


def test_a_warning_of_the_workflow_is_reported_to_the_controller(rig, fake):
    workflow = Serves()

    async def scenario(r):
        await r.ready(version=None)
        await r.until(lambda: workflow.policy is not None, "the policy")
        workflow.policy.report("a conversation is not recorded")
        await r.until(lambda: r.got(m.Incident), "the warning")
        assert [one.text for one in r.got(m.Incident)] == ["a conversation is not recorded"]

    rig(scenario, workflow=workflow)


def test_an_answer_outside_of_samples_goes_on_over_a_rollback(rig, fake):
    workflow = Serves()

    async def scenario(r):
        await r.ready(version=3)
        r.engine.allow(2)
        asked = asyncio.create_task(workflow.policy.generate(workflow.prompt(), max_new_tokens=5))
        await r.until(lambda: r.engine.num_tokens == 2, "two tokens")
        await r.load(1, lineage="l1")  # everything is parked
        r.engine.allow(100)
        await r.load(4, lineage="l1")
        answer = await asked
        assert answer.segment.versions_R.tolist()[:2] == [3, 3]
        assert len(answer.segment) == 5
        assert answer.segment.last_version == 4, "versions never decrease along an answer"

    rig(scenario, workflow=workflow)


def test_an_engine_that_fails_outside_of_samples_ends_the_worker(rig, fake):
    workflow = Serves()

    async def scenario(r):
        await r.ready()
        r.engine.failure = EngineError("lost")
        with pytest.raises(EngineError, match="lost"):
            await workflow.policy.generate(workflow.prompt())
        with pytest.raises(EngineError, match="lost"):
            await r.task

    rig(scenario, workflow=workflow)


def test_an_address_that_is_not_available_ends_the_worker_with_its_words(rig, fake):
    async def scenario(r):
        with pytest.raises(UserError, match="port 8001 is in use"):
            await r.task

    rig(scenario, workflow=Serves(UserError("port 8001 is in use")))

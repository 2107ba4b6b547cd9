"""Claims about answers that leave a worker: recalled ones, and all of them when it drains."""

from __future__ import annotations

import asyncio
import json

from areal_like.trajectory import Segment
from areal_like.wire import messages as m


def test_recalled_answer_goes_back_with_all_its_tokens_and_is_made_no_further(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(3)
        r.lease(fake.task(1), fake.task(2, index=1))
        await r.until(lambda: r.engine.num_tokens == 6, "tokens")
        r.send(m.RecallLeases(lease_ids=(1,)))
        await r.until(lambda: r.got(m.SampleReturned), "handed back")
        [back] = r.got(m.SampleReturned)
        assert (back.lease_id, back.reason) == (1, "migrated")
        assert r.reports[1][1].tokens_R.tolist() == fake.answer_of(fake.task(1))[:3]
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "the other one")
        assert [done.lease_id for done in r.got(m.SampleFinished)] == [2]
        assert len(r.reports[1][1]) == 3, "nothing is reported of it afterwards"

    rig(scenario)


def test_moved_answer_is_the_answer_that_would_have_been_made_here(rig, fake):
    """No token twice, none lost: what the first worker made and what the second adds is the whole answer."""

    async def scenario(r):
        await r.ready()
        r.engine.allow(4)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 4, "tokens")
        r.send(m.RecallLeases(lease_ids=(1,)))
        await r.until(lambda: r.got(m.SampleReturned), "handed back")
        r.engine.allow(100)
        r.lease(fake.task(5, prefix=r.reports[1][1], moved_from="rollout-7"))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        [done] = r.got(m.SampleFinished)
        assert done.trajectory.tokens_T[2:].tolist() == fake.answer_of(fake.task(1))
        assert r.engine.num_tokens == 6, "no token was sampled twice"

    rig(scenario)


def test_answer_whose_verdict_is_due_is_not_handed_back(rig, fake):
    async def scenario(r):
        await r.ready()
        r.holds_verdicts = True
        r.lease(fake.task(1))
        await r.until(lambda: r.questions, "question")
        r.send(m.RecallLeases(lease_ids=(1, 99)))
        await r.until(lambda: r.worker._counters.get("recalls_kept"), "looked at")
        r.give_verdict(r.questions[0])
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert not r.got(m.SampleReturned)

    rig(scenario)


def test_answer_of_a_workflow_that_cannot_resume_is_not_handed_back(rig, fake):
    class Talk:
        is_resumable = False

        async def run(self, task, tools):
            from rollout.workflow import SingleTurn

            return await SingleTurn().run(task, tools)

    async def scenario(r):
        await r.ready()
        r.engine.allow(3)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 3, "tokens")
        r.send(m.RecallLeases(lease_ids=(1,)))
        await r.until(lambda: r.worker._counters.get("recalls_kept"), "looked at")
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert not r.got(m.SampleReturned)

    rig(scenario, workflow=Talk())


def test_sample_that_waits_for_its_version_moves_without_tokens(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1, min_version=9))
        await r.until(lambda: 1 in r.worker._book.running, "leased")
        r.send(m.RecallLeases(lease_ids=(1,)))
        await r.until(lambda: r.got(m.SampleReturned), "handed back")
        assert len(r.got(m.SampleReturned)[0].segment) == 0

    rig(scenario)


def test_worker_that_leaves_says_so_before_anything_else(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(2)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 2, "tokens")
        r.stop.set()
        await r.task
        await r.until(lambda: r.got(m.Goodbye), "Goodbye")
        kinds = [type(message) for message in r.inbox]
        assert kinds.index(m.Draining) < kinds.index(m.SampleReturned) < kinds.index(m.Goodbye)

    rig(scenario)


def test_move_is_an_arrow_from_worker_to_worker_on_the_timeline(rig, fake, tmp_path):
    async def scenario(r):
        await r.ready()
        r.engine.allow(4)
        r.lease(fake.task(1, group_id=3))
        await r.until(lambda: r.engine.num_tokens == 4, "tokens")
        r.send(m.RecallLeases(lease_ids=(1,)))
        await r.until(lambda: r.got(m.SampleReturned), "handed back")
        r.engine.allow(100)
        prefix = r.reports[1][1]
        assert isinstance(prefix, Segment)
        r.lease(fake.task(5, group_id=3, prefix=prefix, moved_from="rollout-7"))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        await asyncio.sleep(0)
        r.worker._bench.tracer.flush()

    rig(scenario)
    events = [json.loads(line) for line in (tmp_path / "w.trace.jsonl").read_text().splitlines()]
    ends = {event["ph"]: event for event in events if event.get("name") == "m3.0.4"}
    assert set(ends) == {"s", "f"}
    assert ends["s"]["id"] == ends["f"]["id"]
    for end in ends.values():
        slices = [event for event in events if event["ph"] == "X" and event["tid"] == end["tid"]]
        touched = [one for one in slices if one["ts"] <= end["ts"] <= one["ts"] + one["dur"]]
        assert touched, "an arrow must touch a slice"

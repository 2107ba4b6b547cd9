"""The desk against a pool of puppets: retries, deadlines, duplicates, back-pressure, clients that go."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from areal_like.verdict import Verdict
from areal_like.wire.messages import MAX_RESPONSE_CHARS, ScoreRefused, ScoreReply, ScoreRequest
from services.processes.framing import PREFIX
from services.reward import request_scheduler as desk_module
from services.reward.cache import ScoreCache
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome, decode_for_process
from services.reward.request_scheduler import RequestScheduler


class PuppetPool:
    """Answers each attempt as `script` says; `limits` and `jobs` are what it was given."""

    label = "puppet@1"

    def __init__(self, script: Callable[[Job, int], Coroutine[Any, Any, Outcome]]) -> None:
        self._script = script
        self.limits: list[float] = []
        self.jobs: list[Job] = []

    async def attempt(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        decoded = decode_for_process(job[PREFIX.size :])
        assert isinstance(decoded, Job)
        self.jobs.append(decoded)
        self.limits.append(limit_s)
        return await self._script(decoded, len(self.jobs))


class Stage:
    """A desk with one lane, its pool, and the replies it gave."""

    def __init__(self, script: Callable[[Job, int], Coroutine[Any, Any, Outcome]], **settings: Any) -> None:
        self.pool = PuppetPool(script)
        self.replies: list[tuple[str, str, Verdict]] = []
        self.refusals: list[tuple[str, str]] = []
        self.can_send = True
        self.desk = RequestScheduler(self.pool, RewardSettings(**settings), self._reply)  # type: ignore[arg-type]

    def _reply(self, peer: str, message: ScoreReply | ScoreRefused) -> bool:
        if isinstance(message, ScoreRefused):
            self.refusals.append((message.request_id, message.reason))
        elif self.can_send:
            self.replies.append((peer, message.request_id, message.verdict))
        return self.can_send

    async def settled(self) -> None:
        while not self.desk.is_idle:  # noqa: ASYNC110  (turns of the loop, no time)
            await asyncio.sleep(0)


def request(request_id: str = "a", deadline_s: float = 100.0, row: dict[str, Any] | None = None) -> ScoreRequest:
    return ScoreRequest(
        request_id=request_id, scorer="", row=row or {}, response="r", finish_reason="stop", num_tokens=1,
        deadline_s=deadline_s,
    )  # fmt: skip


def play(stage: Stage, scene: Callable[[Stage], Coroutine[Any, Any, None]]) -> None:
    async def run() -> None:
        lane = asyncio.create_task(stage.desk.work(lambda *_: None))
        try:
            async with asyncio.timeout(300.0):
                await scene(stage)
        finally:
            lane.cancel()
            await asyncio.wait({lane})

    asyncio.run(run())


async def right(job: Job, attempt: int) -> Outcome:
    return Outcome(job_id=job.job_id, kind="scored", value=1.0, components={"x": 1.0}, scorer_s={"x": 0.1})


def ends_as(*kinds: str) -> Callable[[Job, int], Coroutine[Any, Any, Outcome]]:
    async def script(job: Job, attempt: int) -> Outcome:
        kind = kinds[min(attempt, len(kinds)) - 1]
        return await right(job, attempt) if kind == "scored" else Outcome(job_id=job.job_id, kind=kind, reason=kind)

    return script


def test_failures_are_retried_as_often_as_the_settings_say() -> None:
    for kinds, retries, kind, attempts in (
        (("crashed", "scored"), 1, "scored", 2),
        (("timed_out", "crashed", "scored"), 2, "scored", 3),
        (("crashed",), 0, "crashed", 1),
        (("crashed",), 2, "crashed", 3),
        (("invalid", "scored"), 2, "invalid", 1),
    ):
        stage = Stage(ends_as(*kinds), retries=retries)

        async def scene(stage: Stage) -> None:
            await stage.desk.take("w", request())
            await stage.settled()

        play(stage, scene)
        ((_, _, verdict),) = stage.replies
        assert (verdict.kind, verdict.attempts, len(stage.pool.jobs)) == (kind, attempts, attempts)


def test_an_attempt_is_bounded_by_timeout_and_all_of_them_by_the_deadline() -> None:
    async def scene(stage: Stage) -> None:
        await stage.desk.take("w", request("a", deadline_s=100.0))
        await stage.desk.take("w", request("b", deadline_s=3.0))
        await stage.settled()

    stage = Stage(ends_as("crashed"), retries=1, timeout_s=7.0)
    play(stage, scene)
    assert stage.pool.limits[:2] == [7.0, 7.0]
    assert stage.pool.limits[2] == 3.0
    assert 2.0 < stage.pool.limits[3] < 3.0


def test_no_attempt_is_made_when_the_deadline_is_used_up() -> None:
    async def slow_crash(job: Job, attempt: int) -> Outcome:
        await asyncio.sleep(0.1)
        return Outcome(job_id=job.job_id, kind="timed_out")

    async def scene(stage: Stage) -> None:
        await stage.desk.take("w", request(deadline_s=0.1))
        await stage.settled()

    stage = Stage(slow_crash, retries=5)
    play(stage, scene)
    assert len(stage.pool.jobs) == 1
    assert stage.replies[0][2].kind == "timed_out"


def test_a_duplicate_is_answered_once_while_open_and_from_memory_later() -> None:
    async def scene(stage: Stage) -> None:
        for _ in range(3):
            await stage.desk.take("w", request())
        await stage.settled()
        assert len(stage.replies) == 1
        await stage.desk.take("w", request())
        await stage.desk.take("another worker", request())
        await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    assert [peer for peer, _, _ in stage.replies] == ["w", "w", "another worker"]
    assert len(stage.pool.jobs) == 2


def test_a_reply_that_could_not_be_sent_is_there_when_asked_again() -> None:
    async def scene(stage: Stage) -> None:
        stage.can_send = False
        await stage.desk.take("w", request())
        await stage.settled()
        assert stage.desk.tally.counters()["undelivered"] == 1
        stage.can_send = True
        stage.desk.welcome("w", "same")
        await stage.desk.take("w", request())

    stage = Stage(right)
    stage.desk.welcome("w", "same")
    play(stage, scene)
    assert len(stage.replies) == len(stage.pool.jobs) == 1
    assert stage.desk.tally.counters()["undelivered"] == 1


def test_a_new_incarnation_voids_what_the_old_one_asked() -> None:
    gate = asyncio.Event()

    async def gated(job: Job, attempt: int) -> Outcome:
        await gate.wait()
        return Outcome(job_id=job.job_id, kind="scored", value=float(job.row["n"]))

    async def scene(stage: Stage) -> None:
        stage.desk.welcome("w", "old")
        await stage.desk.take("w", request(row={"n": 1}))
        await stage.desk.take("w", request("b", row={"n": 2}))
        await asyncio.sleep(0)
        stage.desk.welcome("w", "new")
        await stage.desk.take("w", request(row={"n": 3}))
        gate.set()
        await stage.settled()

    stage = Stage(gated)
    play(stage, scene)
    assert [(request_id, verdict.value) for _, request_id, verdict in stage.replies] == [("a", 3.0)]
    assert [job.row["n"] for job in stage.pool.jobs] == [1, 3], "what nobody waits for is not even begun"
    assert stage.desk.tally.counters()["abandoned"] == 2


def test_a_full_queue_makes_the_sender_wait_and_loses_nothing() -> None:
    gate = asyncio.Event()
    taken: list[int] = []

    async def gated(job: Job, attempt: int) -> Outcome:
        await gate.wait()
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        async def send_all() -> None:
            for number in range(10):
                await stage.desk.take("w", request(str(number)))
                taken.append(number)

        sending = asyncio.create_task(send_all())
        for _ in range(50):
            await asyncio.sleep(0)
        assert len(taken) == 1 + 3, "one runs, max_queue wait"
        assert stage.desk.is_full
        gate.set()
        await sending
        await stage.settled()

    stage = Stage(gated, max_queue=3)
    play(stage, scene)
    assert [request_id for _, request_id, _ in stage.replies] == [str(number) for number in range(10)]


def test_remembered_verdicts_are_bounded(monkeypatch: Any) -> None:
    monkeypatch.setattr(desk_module, "MAX_REPLIES", 5)

    async def scene(stage: Stage) -> None:
        for number in (*range(20), 19, 0):
            await stage.desk.take("w", request(str(number), row={"n": number}))
            await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    numbers = [job.row["n"] for job in stage.pool.jobs]
    assert numbers == [*range(20), 0], "the newest was remembered, the oldest was scored again"


def test_a_forged_outcome_is_invalid() -> None:
    async def forged(job: Job, attempt: int) -> Outcome:
        return Outcome(job_id=job.job_id, kind="scored", value=float("nan"))

    async def scene(stage: Stage) -> None:
        await stage.desk.take("w", request())
        await stage.settled()

    stage = Stage(forged)
    play(stage, scene)
    assert stage.replies[0][2].kind == "invalid"


def test_verdicts_are_counted_with_their_seconds() -> None:
    async def scene(stage: Stage) -> None:
        for number in range(3):
            await stage.desk.take("w", request(str(number)))
        await stage.settled()

    stage = Stage(ends_as("scored", "crashed", "scored"), retries=0)
    play(stage, scene)
    counters = stage.desk.tally.counters()
    assert (counters["scored"], counters["crashed"], counters["timed_out"], counters["invalid"]) == (2, 1, 0, 0)
    assert counters["scorer.x.answers"] == 2
    assert counters["scorer.x.busy_s"] > 0.19
    assert counters["busy_s"] >= 0.0


def test_a_full_queue_refuses_by_name_and_takes_again_once_there_is_room() -> None:
    gate = asyncio.Event()

    async def gated(job: Job, attempt: int) -> Outcome:
        await gate.wait()
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        for number in range(3):
            stage.desk.offer("w", request(str(number)))
        assert stage.refusals == [("2", "full")]
        gate.set()
        await stage.settled()
        stage.desk.offer("w", request("2"))
        await stage.settled()

    stage = Stage(gated, max_queue=2)
    play(stage, scene)
    assert [request_id for _, request_id, _ in stage.replies] == ["0", "1", "2"]
    assert stage.desk.tally.counters()["refused_full"] == 1


def test_a_draining_desk_finishes_what_it_took_and_refuses_what_is_new() -> None:
    gate = asyncio.Event()

    async def gated(job: Job, attempt: int) -> Outcome:
        await gate.wait()
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        for number in range(3):
            stage.desk.offer("w", request(str(number)))
        await asyncio.sleep(0)
        stage.desk.is_draining = True
        stage.desk.offer("w", request("new"))
        stage.desk.offer("w", request("0"))
        assert stage.refusals == [("new", "draining")], "a duplicate of what runs is no new request"
        gate.set()
        await stage.settled()

    stage = Stage(gated)
    play(stage, scene)
    assert [request_id for _, request_id, _ in stage.replies] == ["0", "1", "2"]


def test_what_is_left_when_the_drain_is_over_is_refused_and_never_answered() -> None:
    gate = asyncio.Event()

    async def gated(job: Job, attempt: int) -> Outcome:
        await gate.wait()
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        for number in range(3):
            stage.desk.offer("w", request(str(number)))
        await asyncio.sleep(0)
        assert stage.desk.num_open == 3
        assert stage.desk.refuse_open() == 3
        gate.set()
        await stage.settled()

    stage = Stage(gated)
    play(stage, scene)
    assert stage.refusals == [(str(number), "draining") for number in range(3)]
    assert not stage.replies
    assert stage.desk.num_open == 0


def test_a_scorer_with_a_number_of_retries_of_its_own_is_tried_so_often() -> None:
    def crash_in(name: str) -> Callable[[Job, int], Coroutine[Any, Any, Outcome]]:
        async def script(job: Job, attempt: int) -> Outcome:
            return Outcome(job_id=job.job_id, kind="crashed", reason="x", scorer=name)

        return script

    async def scene(stage: Stage) -> None:
        stage.desk.offer("w", request())
        await stage.settled()

    scorers = [{"kind": "math", "retries": 4}, {"kind": "math"}, {"kind": "code", "retries": 0}]
    for name, attempts in (("math", 5), ("math#2", 2), ("code", 1)):
        stage = Stage(crash_in(name), scorers=scorers, retries=1)
        play(stage, scene)
        verdict = stage.replies[0][2]
        assert (verdict.attempts, verdict.failed_in) == (attempts, name)


def test_an_answer_too_long_to_score_is_invalid_without_an_attempt() -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.offer("w", msgspec.structs.replace(request(), response="x" * (MAX_RESPONSE_CHARS + 1)))
        await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    assert stage.replies[0][2].kind == "invalid"
    assert str(MAX_RESPONSE_CHARS) in stage.replies[0][2].reason
    assert not stage.pool.jobs


def test_an_exact_duplicate_is_answered_from_the_cache_and_says_so() -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.cache = ScoreCache(1 << 20, "puppet@1", ())
        for number, row in enumerate(({"a": 1, "b": 2}, {"b": 2, "a": 1}, {"a": 1, "b": 3})):
            stage.desk.offer("w", request(str(number), row=row))
            await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    verdicts = {request_id: verdict for _, request_id, verdict in stage.replies}
    assert [verdicts[name].attempts for name in "012"] == [1, 0, 1]
    assert verdicts["1"].value == verdicts["0"].value
    assert verdicts["1"].components == verdicts["0"].components
    assert stage.desk.cache.counters()["cache.hits"] == 1
    assert stage.desk.tally.counters()["scored"] == 3


def test_a_failure_is_never_answered_from_the_cache() -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.cache = ScoreCache(1 << 20, "puppet@1", ())
        for number in range(2):
            stage.desk.offer("w", request(str(number)))
            await stage.settled()

    stage = Stage(ends_as("crashed", "scored"), retries=0)
    play(stage, scene)
    assert [verdict.kind for _, _, verdict in stage.replies] == ["crashed", "scored"]


def test_service_with_one_lane_is_busy_while_it_works() -> None:
    busy: list[bool] = []

    async def seen(job: Job, attempt: int) -> Outcome:
        assert busy[-1:] == [True]
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        for number in range(2):
            stage.desk.offer("w", request(str(number)))
            await stage.settled()

    stage = Stage(seen)
    stage.desk._on_busy = busy.append
    play(stage, scene)
    assert busy == [True, False] * 2


def test_service_is_busy_from_the_first_lane_that_works_to_the_last_that_ends() -> None:
    busy: list[bool] = []
    gates = [asyncio.Event(), asyncio.Event()]

    async def gated(job: Job, attempt: int) -> Outcome:
        await gates[job.row["n"]].wait()
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        other = asyncio.create_task(stage.desk.work(lambda *_: None))
        for number in range(2):
            stage.desk.offer("w", request(str(number), row={"n": number}))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert (busy, stage.desk.is_idle, stage.desk.num_open, stage.desk.num_waiting) == ([True], False, 2, 0)
        gates[0].set()
        while stage.desk.num_open == 2:  # noqa: ASYNC110  (turns of the loop, no time)
            await asyncio.sleep(0)
        assert busy == [True]
        gates[1].set()
        await stage.settled()
        other.cancel()

    stage = Stage(gated)
    stage.desk._on_busy = busy.append
    play(stage, scene)
    assert busy == [True, False]


def test_reply_tells_how_much_is_open_and_how_many_work() -> None:
    replies: list[ScoreReply] = []

    async def scene(stage: Stage) -> None:
        for number in range(3):
            stage.desk.offer("w", request(str(number)))
        assert stage.desk.num_waiting == 3
        await stage.settled()

    stage = Stage(right, num_workers=2)
    stage.desk._reply = lambda peer, message: replies.append(message) or True  # type: ignore[func-returns-value,arg-type]
    play(stage, scene)
    assert [(reply.request_id, reply.num_open, reply.num_workers) for reply in replies] == [
        ("0", 2, 2), ("1", 1, 2), ("2", 0, 2)
    ]  # fmt: skip


def test_scoring_process_gets_all_of_the_request_under_a_number_of_its_own() -> None:
    async def scene(stage: Stage) -> None:
        asked = ScoreRequest(
            request_id="a", scorer="math", row={"x": [1]}, response="long", finish_reason="length", num_tokens=9,
            deadline_s=5.0,
        )  # fmt: skip
        stage.desk.offer("w", asked)
        await stage.settled()

    stage = Stage(ends_as("crashed", "scored"), retries=1)
    play(stage, scene)
    first, second = stage.pool.jobs
    assert first.job_id != second.job_id
    for job in (first, second):
        assert (job.scorer, job.row, job.response) == ("math", {"x": [1]}, "long")
        assert (job.finish_reason, job.num_tokens) == ("length", 9)
    assert stage.replies[0][2].scorer == "math"
    assert stage.desk.tally.counters()["retries"] == 1


@pytest.mark.parametrize("deadline_s", [0.0, -1.0, math.inf, math.nan])
def test_request_without_a_usable_deadline_is_invalid_without_an_attempt(deadline_s: float) -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.offer("w", request(deadline_s=deadline_s))
        await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    verdict = stage.replies[0][2]
    assert (verdict.kind, verdict.attempts, verdict.wall_s) == ("invalid", 1, 0.0)
    assert verdict.reason == f"deadline_s {deadline_s} is not a positive number"
    assert stage.pool.jobs == []


@pytest.mark.parametrize("max_cached", [0, 1 << 20])
def test_row_that_cannot_be_passed_on_is_invalid_without_an_attempt(max_cached: int) -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.cache = ScoreCache(max_cached, "puppet@1", ())
        stage.desk.offer("w", request(row={"n": 1 << 70}))
        await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    verdict = stage.replies[0][2]
    assert (verdict.kind, verdict.attempts) == ("invalid", 1)
    assert verdict.reason.startswith("the row cannot be passed to a scorer (")
    assert stage.pool.jobs == []


def test_answer_of_just_the_longest_length_is_scored() -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.offer("w", msgspec.structs.replace(request(), response="x" * MAX_RESPONSE_CHARS))
        await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    assert stage.replies[0][2].kind == "scored"


def test_client_that_was_dismissed_is_new_when_it_comes_again() -> None:
    async def scene(stage: Stage) -> None:
        stage.desk.welcome("w", "same")
        stage.desk.dismiss("w")
        for _ in range(2):
            stage.desk.offer("w", request())
            await stage.settled()
            stage.desk.welcome("w", "same")

    stage = Stage(right)
    play(stage, scene)
    assert len(stage.pool.jobs) == 2, "what it asked before it said Hello was forgotten"


def test_client_that_is_gone_is_forgotten_and_others_are_not() -> None:
    gate = asyncio.Event()

    async def gated(job: Job, attempt: int) -> Outcome:
        await gate.wait()
        return await right(job, attempt)

    async def scene(stage: Stage) -> None:
        gate.set()
        for peer in ("gone", "here"):
            stage.desk.welcome(peer, "x")
            stage.desk.offer(peer, request("old"))
        await stage.settled()
        gate.clear()
        for peer in ("gone", "here"):
            stage.desk.offer(peer, request("running or waiting"))
        await asyncio.sleep(0)
        stage.desk.dismiss("gone")
        assert stage.desk.num_open == 1
        gate.set()
        await stage.settled()
        for peer in ("gone", "here"):
            stage.desk.welcome(peer, "x")
            stage.desk.offer(peer, request("old"))
        await stage.settled()

    stage = Stage(gated)
    play(stage, scene)
    assert [(peer, name) for peer, name, _ in stage.replies] == [
        ("gone", "old"), ("here", "old"), ("here", "running or waiting"), ("here", "old"), ("gone", "old"),
    ]  # fmt: skip
    assert len(stage.pool.jobs) == 5, "one is scored again, as its verdict was forgotten"
    counters = stage.desk.tally.counters()
    assert (counters["abandoned"], counters["duplicates"]) == (1, 1)


def test_as_many_verdicts_are_remembered_as_may_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(desk_module, "MAX_REPLIES", 2)

    async def scene(stage: Stage) -> None:
        for name in ("a", "b", "c", "b", "c", "a"):
            stage.desk.offer("w", request(name, row={"name": name}))
            await stage.settled()

    stage = Stage(right)
    play(stage, scene)
    assert [job.row["name"] for job in stage.pool.jobs] == ["a", "b", "c", "a"], "the first alone was scored again"


def test_times_are_measured_from_when_a_request_came_and_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(desk_module, "time", SimpleNamespace(monotonic=lambda: now_s))
    seen: list[tuple[str, float]] = []

    async def slow(job: Job, attempt: int) -> Outcome:
        nonlocal now_s
        now_s += 4.0
        return Outcome(job_id=job.job_id, kind="crashed") if attempt == 1 else await right(job, attempt)

    async def run() -> None:
        nonlocal now_s
        stage.desk.offer("w", request())
        now_s += 3.0
        lane = asyncio.create_task(
            stage.desk.work(lambda entry, verdict, began_s: seen.append((entry.request.request_id, began_s)))
        )
        await asyncio.sleep(0)
        await stage.settled()
        lane.cancel()

    stage = Stage(slow, retries=1, timeout_s=50.0)
    asyncio.run(run())
    verdict = stage.replies[0][2]
    assert (verdict.attempts, verdict.wall_s) == (2, 8.0)
    assert seen == [("a", 103.0)]
    assert stage.desk.tally.counters()["queue_p50_s"] == 3.0
    assert stage.pool.limits == [50.0, 50.0]


@pytest.mark.parametrize(("left_s", "attempts"), [(0.0625, 2), (0.03125, 1)])
def test_further_attempt_needs_some_time(left_s: float, attempts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(desk_module, "time", SimpleNamespace(monotonic=lambda: now_s))

    async def slow(job: Job, attempt: int) -> Outcome:
        nonlocal now_s
        now_s += 4.0 - left_s
        return Outcome(job_id=job.job_id, kind="timed_out")

    async def scene(stage: Stage) -> None:
        stage.desk.offer("w", request(deadline_s=4.0))
        await stage.settled()

    stage = Stage(slow, retries=5)
    play(stage, scene)
    assert stage.pool.limits == [4.0, left_s][:attempts]

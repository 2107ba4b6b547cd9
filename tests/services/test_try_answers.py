"""Verdicts on a few answers: each of its own answer, and no more at once than there are processes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from areal_like.errors import UserError
from areal_like.probe_files import TryAnswer, TrySpec, TryVerdict
from services.processes.framing import PREFIX
from services.reward import try_answers
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome, decode_for_process


class FakePool:
    """Scores an answer by its length; later ones sooner."""

    made: list[FakePool]

    def __init__(self, settings: RewardSettings) -> None:
        self.settings, self.jobs, self.events = settings, [], []  # type: ignore[var-annotated]
        self.num_running = self.most_running = 0
        FakePool.made.append(self)

    async def start(self) -> None:
        self.events.append("start")
        if self.settings.scorers[0].kind == "odd:scorer":
            raise UserError("no module odd")

    async def run(self) -> None:
        self.events.append("run")
        try:
            await asyncio.Event().wait()
        finally:
            self.events.append("end")

    async def attempt(self, framed: bytes, job_id: int, limit_s: float) -> Outcome:
        job = decode_for_process(framed[PREFIX.size :])
        assert isinstance(job, Job)
        assert (job.job_id, limit_s) == (job_id, self.settings.timeout_s)
        self.jobs.append(job)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        for _ in range(3 if job_id % 2 else 1):
            await asyncio.sleep(0)
        self.num_running -= 1
        if job.response == "broken":
            return Outcome(job_id=job_id, kind="crashed", reason="no answer")
        components = {"correct": 1.0} if len(job.response) > 2 else {}
        return Outcome(job_id=job_id, kind="scored", value=float(len(job.response)), components=components)

    async def close(self) -> None:
        self.events.append("close")


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    FakePool.made = []
    monkeypatch.setattr(try_answers, "Pool", FakePool)
    monkeypatch.setattr(try_answers.process_tree, "become_subreaper", lambda: None)


def verdicts(*responses: str, kind: str = "math", **settings: Any) -> list[TryVerdict]:
    answers = [
        TryAnswer(row={"answer": text}, response=text, finish_reason="length", num_tokens=number)
        for number, text in enumerate(responses)
    ]
    order = TrySpec(settings={"scorers": [{"kind": kind}], **settings}, answers=answers)
    return asyncio.run(try_answers.verdicts_on(order))


def test_each_answer_has_its_own_verdict_in_the_order_asked() -> None:
    found = verdicts("a", "broken", "ccc", "dd", "eeeee", timeout_s=7.0)
    assert found == [
        TryVerdict(kind="scored", value=1.0, correct=None, reason=""),
        TryVerdict(kind="crashed", value=None, correct=None, reason="no answer"),
        TryVerdict(kind="scored", value=3.0, correct=1.0, reason=""),
        TryVerdict(kind="scored", value=2.0, correct=None, reason=""),
        TryVerdict(kind="scored", value=5.0, correct=1.0, reason=""),
    ]
    (pool,) = FakePool.made
    jobs = sorted(pool.jobs, key=lambda job: job.job_id)
    assert [(job.job_id, job.row, job.response, job.finish_reason, job.num_tokens, job.scorer) for job in jobs] == [
        (number + 1, {"answer": text}, text, "length", number, "")
        for number, text in enumerate(["a", "broken", "ccc", "dd", "eeeee"])
    ]


def test_processes_are_two_at_most_each_with_one_answer_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    for num_cores, expected in ((8, 2), (1, 1), (None, 1)):
        monkeypatch.setattr("os.cpu_count", lambda num_cores=num_cores: num_cores)
        verdicts(*"abcdef", num_workers=5)
        pool = FakePool.made[-1]
        assert pool.settings.num_workers == expected
        assert pool.most_running == expected


def test_pool_is_closed_whatever_becomes_of_it() -> None:
    assert verdicts() == []
    assert FakePool.made[-1].events[0] == "start"
    assert FakePool.made[-1].events[-1] == "close"
    with pytest.raises(UserError, match="no module odd"):
        verdicts("a", kind="odd:scorer")
    assert FakePool.made[-1].events == ["start", "close"]

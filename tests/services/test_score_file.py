"""Claims about scoring a file: every row one verdict, in the order of rows; and what a stop leaves."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest

from areal_like.errors import OperationError, UserError
from areal_like.verdict import MAX_REASON_CHARS
from services.processes.framing import PREFIX
from services.reward import score_file as module
from services.reward.code_options import CodeOptions
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome, decode_for_process
from services.reward.score_file import MAX_ATTEMPTS, ScoreSpec, ScoreStatus, score_file, settings_of

LIMIT_S = 300.0
Script = Callable[[Job, int], Any]


def scored(job: Job, value: float = 1.0, **more: Any) -> Outcome:
    return Outcome(job_id=job.job_id, kind="scored", value=value, **more)


class FakePool:
    """Judges by a script instead of processes; remembers what it was given."""

    label = "fake@1"
    script: ClassVar[Script]
    made: ClassVar[list[FakePool]] = []

    def __init__(self, settings: RewardSettings) -> None:
        self.settings = settings
        self.jobs: list[Job] = []
        self.limits: list[float] = []
        self.ids: list[int] = []
        self.num_running = self.most_running = 0
        self.is_kept = self.is_closed = False
        FakePool.made.append(self)

    async def start(self) -> None:
        pass

    async def run(self) -> None:
        self.is_kept = True
        await asyncio.Event().wait()

    async def attempt(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        decoded = decode_for_process(job[PREFIX.size :])
        assert isinstance(decoded, Job)
        assert decoded.job_id == job_id
        self.jobs.append(decoded)
        self.ids.append(job_id)
        self.limits.append(limit_s)
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            found = type(self).script(decoded, len(self.jobs))
            return await found if asyncio.iscoroutine(found) else found
        finally:
            self.num_running -= 1

    async def close(self) -> None:
        self.is_closed = True


@pytest.fixture(autouse=True)
def fake_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Pool", FakePool)
    monkeypatch.setattr("services.processes.process_tree.become_subreaper", lambda: None)
    monkeypatch.setattr(FakePool, "made", [])


class Desk:
    """A file of rows, and scoring it."""

    def __init__(self, folder: Path) -> None:
        self.source, self.target = folder / "in.jsonl", folder / "out.jsonl"
        self.shown: list[tuple[int, int]] = []

    def write(self, *rows: Any) -> None:
        self.source.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def score(self, script: Script, kind: str = "my:function", num_workers: int = 1, **more: Any) -> ScoreStatus:
        FakePool.script = staticmethod(script)  # type: ignore[assignment]

        def show(standing: ScoreStatus) -> None:
            self.shown.append((standing.num_before, standing.totals.num_rows))

        return score_file(ScoreSpec(kind, self.source, self.target, num_workers, **more), show)

    def verdicts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.target.read_text().splitlines()]


@pytest.fixture
def desk(tmp_path: Path) -> Desk:
    return Desk(tmp_path)


def row(number: int) -> dict[str, Any]:
    return {"id": f"r{number}", "response": f"answer {number}", "gold": number}


def test_every_row_gets_its_own_verdict(desk: Desk) -> None:
    desk.write(*(row(number) for number in range(5)))
    standing = desk.score(lambda job, _: scored(job, float(job.response.split()[1]), components={"x": 2.0}))
    found = desk.verdicts()
    assert [(one["id"], one["verdict"], one["value"]) for one in found] == [
        (f"r{number}", "scored", float(number)) for number in range(5)
    ]
    assert found[0]["components"] == {"x": 2.0}
    assert found[0]["scorer"] == standing.scorer == "fake@1"
    assert (standing.num_rows, standing.num_before, standing.totals.num_rows) == (5, 0, 5)
    assert standing.totals.sum_value == 10.0
    assert standing.stopped_by == 0
    assert 0 < standing.wall_s < LIMIT_S
    assert desk.shown == [(0, number) for number in range(6)], "once at the start, then after each verdict"
    (pool,) = FakePool.made
    assert pool.is_kept
    assert pool.is_closed
    assert len(set(pool.ids)) == 5


def test_verdicts_are_written_in_the_order_of_rows_whichever_ends_first(desk: Desk) -> None:
    desk.write(*(row(number) for number in range(6)))
    third_is_done = asyncio.Event()

    async def script(job: Job, _: int) -> Outcome:
        if job.response == "answer 0":
            await asyncio.wait_for(third_is_done.wait(), LIMIT_S)
        elif job.response == "answer 2":
            third_is_done.set()
        return scored(job)

    desk.score(script, num_workers=2)
    assert [one["id"] for one in desk.verdicts()] == [f"r{number}" for number in range(6)]
    assert FakePool.made[0].most_running == 2


def test_only_so_many_verdicts_wait_for_an_earlier_row(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_WAITING_PER_WORKER", 2)
    desk.write(*(row(number) for number in range(12)))
    num_begun_before_the_first_ended = 0

    async def script(job: Job, number: int) -> Outcome:
        nonlocal num_begun_before_the_first_ended
        if job.response == "answer 0":
            for _ in range(200):
                await asyncio.sleep(0)
            num_begun_before_the_first_ended = len(FakePool.made[0].jobs)
        return scored(job)

    desk.score(script, num_workers=2)
    assert num_begun_before_the_first_ended == 4, "two workers, two each: the first row's own included"
    assert len(desk.verdicts()) == 12


def test_same_command_goes_on_where_it_was_and_scores_only_the_rest(desk: Desk) -> None:
    desk.write(*(row(number) for number in range(2)))
    desk.score(lambda job, _: scored(job))
    desk.write(*(row(number) for number in range(4)))
    desk.shown.clear()
    standing = desk.score(lambda job, _: scored(job))
    assert [job.response for job in FakePool.made[1].jobs] == ["answer 2", "answer 3"]
    assert (standing.num_before, standing.totals.num_rows, standing.num_rows) == (2, 4, 4)
    assert desk.shown[0] == (2, 2)
    desk.score(lambda job, _: scored(job))
    assert not FakePool.made[2].jobs
    assert not FakePool.made[2].is_kept, "with nothing to score the pool is not kept up"
    assert FakePool.made[2].is_closed
    desk.score(lambda job, _: scored(job), overwrite=True)
    assert len(FakePool.made[3].jobs) == 4


def test_crash_is_tried_again_and_the_second_attempt_counts(desk: Desk) -> None:
    desk.write(row(0), row(1))
    crashed = lambda job: Outcome(job_id=job.job_id, kind="crashed", reason="killed")  # noqa: E731
    desk.score(lambda job, attempt: crashed(job) if attempt == 1 else scored(job))
    assert [one["verdict"] for one in desk.verdicts()] == ["scored", "scored"]
    assert [job.response for job in FakePool.made[0].jobs] == ["answer 0", "answer 0", "answer 1"]


def test_row_that_crashes_every_time_is_given_up(desk: Desk) -> None:
    desk.write(row(0))
    standing = desk.score(lambda job, _: Outcome(job_id=job.job_id, kind="crashed", reason="killed"))
    assert [(one["verdict"], one["value"], one["reason"]) for one in desk.verdicts()] == [("crashed", None, "killed")]
    assert len(FakePool.made[0].jobs) == MAX_ATTEMPTS
    assert standing.totals.first_fault == "line 1: killed"


@pytest.mark.parametrize("kind", ["timed_out", "invalid"])
def test_row_out_of_time_or_refused_is_not_tried_again(kind: str, desk: Desk) -> None:
    desk.write(row(0))
    desk.score(lambda job, _: Outcome(job_id=job.job_id, kind=kind, reason="why"))
    assert desk.verdicts()[0]["verdict"] == kind
    assert len(FakePool.made[0].jobs) == 1


def test_forged_outcome_is_invalid(desk: Desk) -> None:
    desk.write(row(0), row(1))
    desk.score(lambda job, number: scored(job, float("nan")) if number == 1 else scored(job))
    assert [one["verdict"] for one in desk.verdicts()] == ["invalid", "scored"]


def test_bad_line_is_a_verdict_of_its_own_and_never_reaches_a_process(desk: Desk) -> None:
    desk.source.write_text('{"id": "a"}\n' + json.dumps(row(1)) + "\n")
    desk.score(lambda job, _: scored(job))
    first, second = desk.verdicts()
    assert first["verdict"] == "invalid"
    assert "response" in first["reason"]
    assert second["verdict"] == "scored"
    assert len(FakePool.made[0].jobs) == 1


def test_row_that_cannot_be_sent_to_a_process_is_invalid_and_costs_no_attempt(
    desk: Desk, monkeypatch: pytest.MonkeyPatch
) -> None:
    desk.write(row(0), row(1))
    framed = module.frame

    def refusing(job: Job) -> bytes:
        if job.response == "answer 0":
            raise OverflowError("y" * 1000)
        return framed(job)

    monkeypatch.setattr(module, "frame", refusing)
    desk.score(lambda job, _: scored(job))
    first, second = desk.verdicts()
    assert first["verdict"] == "invalid"
    assert first["reason"].startswith("the row cannot be passed to a scorer (yyy")
    assert len(first["reason"]) == MAX_REASON_CHARS
    assert second["verdict"] == "scored"


def test_maths_sees_the_gold_answer_alone_and_a_function_the_whole_row(desk: Desk) -> None:
    desk.write({**row(7), "more": "m"})
    desk.score(lambda job, _: scored(job), kind="math")
    assert FakePool.made[0].jobs[0].row == {"gold": "7"}
    desk.score(lambda job, _: scored(job), kind="math", options={"gold_field": "more"}, overwrite=True)
    assert FakePool.made[1].jobs[0].row["more"] == "m"
    desk.score(lambda job, _: scored(job), overwrite=True)
    assert FakePool.made[2].jobs[0].row["more"] == "m"


def test_verdicts_of_other_options_are_not_gone_on_with(desk: Desk) -> None:
    desk.write(row(0))
    first = desk.score(lambda job, _: scored(job), options={"b": 1, "a": 2})
    assert first.scorer == 'fake@1 {"a": 2, "b": 1}'
    with pytest.raises(UserError, match="was scored by"):
        desk.score(lambda job, _: scored(job), options={"a": 3, "b": 1})


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_ends_it_keeps_what_is_written_and_says_which_it_was(number: signal.Signals, desk: Desk) -> None:
    desk.write(*(row(number) for number in range(4)))

    async def script(job: Job, _: int) -> Outcome:
        if job.response == "answer 2":
            signal.raise_signal(number)
            await asyncio.sleep(LIMIT_S)
        return scored(job)

    before = signal.getsignal(number)
    standing = desk.score(script)
    assert standing.stopped_by == number
    assert [one["id"] for one in desk.verdicts()] == ["r0", "r1"]
    assert FakePool.made[0].is_closed
    assert signal.getsignal(number) in (before, signal.SIG_DFL, signal.default_int_handler)
    assert desk.score(lambda job, _: scored(job)).num_before == 2, "the same command goes on from there"


def test_pool_that_cannot_be_kept_up_ends_it_as_one_error(desk: Desk, monkeypatch: pytest.MonkeyPatch) -> None:
    desk.write(row(0))

    async def run(self: FakePool) -> None:
        raise OperationError("scoring processes can no longer be started")

    async def script(job: Job, _: int) -> Outcome:
        await asyncio.sleep(LIMIT_S)
        return scored(job)

    monkeypatch.setattr(FakePool, "run", run)
    with pytest.raises(OperationError, match="can no longer be started"):
        desk.score(script)
    assert FakePool.made[0].is_closed


def test_files_that_cannot_be_used_are_refused(desk: Desk, tmp_path: Path) -> None:
    right: Script = lambda job, _: scored(job)  # noqa: E731
    with pytest.raises(UserError, match="there is no such file"):
        desk.score(right)
    desk.source.mkdir()
    with pytest.raises(UserError, match="is not a regular file"):
        desk.score(right)
    desk.source.rmdir()
    desk.write(row(0))
    desk.target.symlink_to(desk.source)
    before = desk.source.read_text()
    with pytest.raises(UserError, match="input and output are the same file"):
        desk.score(right, overwrite=True)
    assert desk.source.read_text() == before
    assert not FakePool.made


# ---------------------------------------------------------------- settings


def settings(kind: str, timeout_s: float | None = None, **options: Any) -> RewardSettings:
    return settings_of(ScoreSpec(kind, Path("in"), Path("out"), 3, options=options, timeout_s=timeout_s))


def test_rows_of_maths_have_their_gold_answer_in_gold_unless_the_user_says_otherwise() -> None:
    assert settings("math").scorers[0].options == {"gold_field": "gold"}
    assert settings("math", gold_field="answer").scorers[0].options == {"gold_field": "answer"}
    assert "gold_field" not in settings("format", must_stop=True).scorers[0].options


def test_time_of_an_answer_is_the_users_or_that_of_a_service() -> None:
    assert settings("math").timeout_s == RewardSettings().timeout_s == 30.0
    assert settings("math", 3.5).timeout_s == 3.5
    assert settings("math").num_workers == 3


def test_a_program_has_a_minute_of_its_own_and_three_on_the_wall() -> None:
    room_s = CodeOptions.ROOM_S
    plain = settings("code")
    assert plain.scorers[0].options["total_limit_s"] == 60.0
    assert plain.timeout_s == 180.0 + room_s
    limited = settings("code", total_limit_s=5.0)
    assert (limited.scorers[0].options["total_limit_s"], limited.timeout_s) == (5.0, 15.0 + room_s)
    timed = settings("code", 20.0)
    assert (timed.scorers[0].options["total_limit_s"], timed.timeout_s) == (20.0 - room_s, 20.0)
    assert settings("code", room_s + 0.5).scorers[0].options["total_limit_s"] == 0.5


@pytest.mark.parametrize(
    ("kind", "timeout_s", "options", "where"),
    [
        ("code", CodeOptions.ROOM_S, {}, "option total_limit_s"),
        ("code", None, {"total_limit_s": "long"}, "option total_limit_s"),
        ("math", None, {"no_such": 1}, "option no_such"),
        ("math", -1.0, {}, "timeout_s"),
    ],
)
def test_settings_that_cannot_work_name_the_option(kind: str, timeout_s: Any, options: Any, where: str) -> None:
    with pytest.raises(UserError) as raised:
        settings(kind, timeout_s, **options)
    assert raised.value.where == where

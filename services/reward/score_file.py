"""Scores a file of rows with the pool, without a run: the implementation of `areal-like score`.

Lines are in score_rows.py, the output in score_output.py, the display in controller/cli/score.py.

Loops.  `_lane`  one per scoring process: takes the next row, waits for its verdict, bounded by `timeout_s` and one
                 further attempt after a crash; waits if too many verdicts wait for an earlier one.
        `pool.run` keeps the processes.
SIGINT or SIGTERM cancels everything; the written output stays, and the same command continues from there.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pydantic

from areal_like.errors import UserError
from areal_like.process import first_cause
from areal_like.verdict import MAX_REASON_CHARS, Verdict
from services.processes import process_tree
from services.processes.framing import frame
from services.reward.code_options import CodeOptions
from services.reward.config import RewardSettings, contradictions
from services.reward.job import Job, Outcome
from services.reward.pool import Pool
from services.reward.record_files import with_file_next_to
from services.reward.score_output import Totals, VerdictFile, verdict_line
from services.reward.score_rows import Row, num_lines, only_gold, rows_of

DEFAULT_TIMEOUT_S = 30.0
"""Default timeout, as in the service (`reward.timeout_s`)."""
PROGRAM_TIME_S = 60.0
"""Default limit for all tests of a program together; rows may have their own limits."""
BUSY_FACTOR = 3.0
"""Factor of `total_limit_s`, which is own time of a program, for the default wall-clock timeout."""
MAX_WAITING_PER_WORKER = 64
"""Number of verdicts that may wait for an earlier row's; each is a line of the output, and the rows themselves are not
kept."""
MAX_ATTEMPTS = 2
"""Number of attempts after a crash; a row that timed out is not retried."""


@dataclass(frozen=True)
class ScoreSpec:
    """What to score: rows of `source` by scorer `kind` with `options`, verdicts to `target`.

    timeout_s: per attempt; None for the scorer's default. overwrite: discard existing verdicts.
    """

    kind: str
    source: Path
    target: Path
    num_workers: int
    options: dict[str, Any] = field(default_factory=dict)
    timeout_s: float | None = None
    overwrite: bool = False


@dataclass
class ScoreStatus:
    """Progress. num_before: number of rows that had a verdict at the start; stopped_by: the signal that ended it."""

    num_rows: int
    num_before: int = 0
    totals: Totals = field(default_factory=Totals)
    scorer: str = ""
    wall_s: float = 0.0
    """Seconds since the first row."""
    stopped_by: int = 0


def score_file(order: ScoreSpec, show: Callable[[ScoreStatus], None]) -> ScoreStatus:
    """Score all rows that have no verdict yet. `show` is called after each verdict.

    Raises UserError for files and scorers that cannot be used, OperationError if the pool cannot be kept running,
    OSError.
    """
    settings = settings_of(order)
    if not order.source.is_file():
        what = "the input is not a regular file" if order.source.exists() else "there is no such file"
        raise UserError(what, where=str(order.source))
    if order.target.exists() and order.source.samefile(order.target):
        raise UserError(
            "input and output are the same file", where=str(order.target), remedy="choose a different output file"
        )
    try:
        standing = ScoreStatus(num_rows=num_lines(order.source))
    except OSError as error:
        raise UserError(f"the file cannot be read ({error.strerror})", where=str(order.source)) from error
    with VerdictFile(order.target, overwrite=order.overwrite) as target, order.source.open("rb") as source:
        work = _Work(order, settings, target, rows_of(source, order.kind), standing, show)
        try:
            asyncio.run(work.run())
        except BaseExceptionGroup as group:
            raise first_cause(group) from group
    return standing


def settings_of(order: ScoreSpec) -> RewardSettings:
    """The pool's settings. Raises UserError."""
    options = dict(order.options)
    timeout_s = order.timeout_s
    if order.kind == "math":
        options.setdefault("gold_field", "gold")
    if order.kind == "code":
        room_s = CodeOptions.ROOM_S
        total_s = PROGRAM_TIME_S if timeout_s is None else timeout_s - room_s
        if total_s > 0:
            options.setdefault("total_limit_s", total_s)
        is_number = isinstance(options.get("total_limit_s"), int | float)
        timeout_s = BUSY_FACTOR * options["total_limit_s"] + room_s if timeout_s is None and is_number else timeout_s
    fields: dict[str, Any] = {
        "scorers": [{"kind": order.kind, "options": options}],
        "num_workers": order.num_workers,
        "timeout_s": DEFAULT_TIMEOUT_S if timeout_s is None else timeout_s,
    }
    try:
        settings = RewardSettings.model_validate(fields)
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        raise UserError(first["msg"], where=".".join(map(str, first["loc"]))) from error
    for key, what, remedy in contradictions(settings):
        raise UserError(what, where=key.removeprefix("scorers.0.").replace("options.", "option "), remedy=remedy)
    return settings


class _Work:
    """Scores one file. Call `run` once."""

    def __init__(
        self,
        order: ScoreSpec,
        settings: RewardSettings,
        target: VerdictFile,
        rows: Iterator[Row],
        standing: ScoreStatus,
        show: Callable[[ScoreStatus], None],
    ) -> None:
        self._order, self._settings, self._target, self._rows = order, settings, target, rows
        self._standing, self._show = standing, show
        self._finished: dict[int, tuple[bytes, Verdict]] = {}
        """Output lines of verdicts that wait for an earlier row's, by row number."""
        self._job_ids = itertools.count(1)
        self._room = asyncio.Semaphore(MAX_WAITING_PER_WORKER * settings.num_workers)
        self._began_s = time.monotonic()

    async def run(self) -> None:
        """Score until the end of the rows or a signal."""
        process_tree.become_subreaper()
        work = asyncio.ensure_future(self._score())
        loop = asyncio.get_running_loop()

        def stop(number: int) -> None:
            if not self._standing.stopped_by:
                self._standing.stopped_by = number
                work.cancel()

        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, stop, number)
        try:
            await work
        except asyncio.CancelledError:
            if not self._standing.stopped_by:
                raise
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def _score(self) -> None:
        standing = self._standing
        pool = Pool(with_file_next_to(self._settings, self._order.target))
        try:
            await pool.start()
            standing.scorer = _scorer_text(pool.label, self._order.options)
            standing.totals = self._target.resume(standing.scorer, self._rows)
            standing.num_before = standing.totals.num_rows
            self._began_s = time.monotonic()
            self._show(standing)
            if standing.num_before < standing.num_rows:
                await self._score_rest(pool)
        finally:
            await pool.close()

    async def _score_rest(self, pool: Pool) -> None:
        async with asyncio.TaskGroup() as tasks:
            keeper = tasks.create_task(pool.run(), name="pool")
            async with asyncio.TaskGroup() as lanes:
                for number in range(self._settings.num_workers):
                    lanes.create_task(self._lane(pool), name=f"lane {number}")
            keeper.cancel()

    async def _lane(self, pool: Pool) -> None:
        while True:
            await self._room.acquire()  # released by the lane of the earliest row, within its timeout
            row = next(self._rows, None)
            if row is None:
                self._room.release()
                return
            if row.refusal:
                verdict = Verdict(kind="invalid", reason=row.refusal[:MAX_REASON_CHARS])
                await asyncio.sleep(0)  # a file with only such rows must not delay signals
            else:
                verdict = await self._judge(pool, row)
            self._finished[row.number] = (verdict_line(row, verdict, self._standing.scorer), verdict)
            self._write()

    async def _judge(self, pool: Pool, row: Row) -> Verdict:
        started_s = time.monotonic()
        outcome, num_attempts = Outcome(job_id=0, kind="crashed"), 0
        while num_attempts < MAX_ATTEMPTS:
            num_attempts += 1
            job_id = next(self._job_ids)
            job = self._framed(job_id, row)
            if isinstance(job, str):
                return Verdict(kind="invalid", reason=job)
            outcome = await pool.attempt(job, job_id, self._settings.timeout_s)
            if outcome.kind != "crashed":
                break
        return outcome.verdict(
            scorer=self._standing.scorer, num_attempts=num_attempts, wall_s=time.monotonic() - started_s
        )

    def _framed(self, job_id: int, row: Row) -> bytes | str:
        """The encoded row for a scoring process, or why it cannot be encoded."""
        is_plain_math = self._order.kind == "math" and "gold_field" not in self._order.options
        job = Job(
            job_id=job_id,
            scorer="",
            row=only_gold(row.columns) if is_plain_math else row.columns,
            response=row.response,
            finish_reason=row.finish_reason,
            num_tokens=row.num_tokens,
        )
        try:
            return frame(job)
        except (TypeError, ValueError, OverflowError, RecursionError, msgspec.MsgspecError) as error:
            return f"the row cannot be passed to a scorer ({error})"[:MAX_REASON_CHARS]

    def _write(self) -> None:
        """Write the verdicts that are next in order."""
        standing = self._standing
        while (waiting := self._finished.pop(number := standing.totals.num_rows + 1, None)) is not None:
            line, verdict = waiting
            self._target.append(line)
            standing.totals.add(number, verdict.kind, verdict.value, verdict.reason)
            standing.wall_s = time.monotonic() - self._began_s
            self._room.release()
            self._show(standing)


def _scorer_text(label: str, options: Mapping[str, Any]) -> str:
    """Scorer, version and options, on which a verdict depends in addition to its row."""
    return f"{label} {json.dumps(options, sort_keys=True, default=str)}" if options else label

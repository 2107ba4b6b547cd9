"""The samples of a worker: from a lease to a finished sample, or to the message that returns the lease.

It runs one task per lease, catches failures of the workflow, returns and parks samples, and counts them. Messages are
sent through `post`; waiting for versions is in sample.py.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable
from typing import get_args

import msgspec

from areal_like.errors import DeadlineExceeded, UserError
from areal_like.external.errors import ExternalError, RequestFailed, RequestTimedOut
from areal_like.prompts import prompt_text
from areal_like.secret_values import without_secrets
from areal_like.token_source import TokenSource
from areal_like.trajectory import FinishReason, Segment, Trajectory
from areal_like.verdict import COUNTED, FORGED_TEXT, REFUSED, Verdict
from areal_like.wire.messages import Message, ReturnReason, SampleFinished, SampleReturned, SampleTask, Sampling
from rollout.forged_text import has_forged_text
from rollout.leases import LeaseBook
from rollout.sample import SampleRun, printable, refusal, stage_crash
from rollout.sample_context import SampleContext
from rollout.transcript import Answer, Transcript
from rollout.workflow import Sample, SampleCut, ServingWorkflow, Workflow

log = logging.getLogger(__name__)

MAX_CANCELLED = 8
"""Number of attempts at an answer of no sample that the engine cancels, for example because it releases its memory."""


class SamplePool:
    """Runs the samples of all leases in `book`, one task each, in the given task group.

    `post(message)` queues a message; `on_finished()` says that the book has a new finished sample. An EngineError
    propagates from the sample's task and ends the group. `report_lock` is held while a report is composed and sent.
    """

    def __init__(
        self,
        book: LeaseBook,
        bench: SampleContext,
        workflow: Workflow,
        *,
        group: asyncio.TaskGroup,
        post: Callable[[Message], None],
        on_finished: Callable[[], None],
        counters: dict[str, float],
    ) -> None:
        self._book, self._bench, self._workflow, self._group = book, bench, workflow, group
        self._post, self._on_finished, self._counters = post, on_finished, counters
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._others: set[SampleRun] = set()
        """Running answers that belong to no sample."""
        self.report_lock = asyncio.Lock()
        self.is_closed = False
        """True once the worker shuts down: new leases are returned."""

    def take(self, task: SampleTask) -> None:
        """Accept a lease. A repeated one is ignored; one above the capacity is returned."""
        admission = "full" if self.is_closed else self._book.admission(task.lease_id)
        if admission in ("running", "finished"):
            self._count("duplicate_leases")
        elif admission == "full":
            self._count("refused_leases")
            empty = Segment.empty()
            self._post(SampleReturned(lease_id=task.lease_id, start=len(task.prefix), segment=empty, reason="drain"))
        else:
            lane = self._book.take_lane()
            run = SampleRun(
                task, self._bench, is_resumable=self._workflow.is_resumable, lane=f"sample-{lane:03d}",
                own_phase="traffic" if isinstance(self._workflow, ServingWorkflow) else "start",
            )  # fmt: skip
            self._book.running[task.lease_id] = run
            produced = self._group.create_task(self._produce(run), name=f"lease-{task.lease_id}")
            self._tasks[task.lease_id] = produced
            produced.add_done_callback(lambda ended: self._ended(run, lane, ended))

    def cancel(self, lease_ids: tuple[int, ...]) -> None:
        """Cancel these leases, finished or not; no reply is expected."""
        for lease_id in lease_ids:
            run = self._book.running.pop(lease_id, None)
            if run is not None:
                self._count("cancelled")
                self._cancel_task(lease_id)
        self._book.ack(lease_ids)

    def abandon_unfinished(self) -> None:
        """Drop all unfinished leases, except those that only wait for their verdict or for a teacher."""
        for lease_id, run in list(self._book.running.items()):
            if not run.is_ending:
                self._count("abandoned")
                del self._book.running[lease_id]
                self._cancel_task(lease_id)

    def park_all(self) -> None:
        """Stop all generations, keeping their tokens; each continues once its version may be sampled with."""
        live = self._bench.engine.progress()
        for run in (*self._book.running.values(), *self._others):
            run.park(live)

    async def generate(self, prompt: Transcript, sampling: Sampling, *, max_new_tokens: int | None) -> Answer:
        """Generate an answer that belongs to no sample. One that the engine cancels is generated again. An EngineError
        ends the task group, too. Raises SampleCut after MAX_CANCELLED attempts, or if the worker shuts down."""
        for _ in range(MAX_CANCELLED - 1):
            try:
                return await self._generate(prompt, sampling, max_new_tokens)
            except SampleCut:
                if self.is_closed:
                    raise
        return await self._generate(prompt, sampling, max_new_tokens)

    async def _generate(self, prompt: Transcript, sampling: Sampling, max_new_tokens: int | None) -> Answer:
        task = SampleTask(
            lease_id=-1, group_id=-1, sample_index=0, purpose="eval", min_version=0, row={}, sampling=sampling,
            seed=secrets.randbits(62), prefix=Segment.empty(),
        )  # fmt: skip
        run = SampleRun(task, self._bench, is_resumable=True, lane="", is_traced=False)
        self._others.add(run)
        try:
            return await run.generate(prompt, max_new_tokens=max_new_tokens)
        finally:
            self._others.discard(run)
            run.end()
            if run.engine_error is not None:
                self._group.create_task(_failing(run.engine_error))

    async def hand_back_all(self, *, ending_too: bool) -> None:
        """Return all leases with their tokens so far, and end their tasks, because the worker shuts down."""
        for run in list(self._book.running.values()):
            if ending_too or not run.is_ending:
                await self._take_back(run, "drain")

    async def recall(self, lease_ids: tuple[int, ...]) -> None:
        """Return these leases with their tokens so far, to continue on another worker. Samples that are nearly done, or
        would lose their tokens, are kept and end here."""
        runs = self._book.movable(lease_ids)
        self._count("recalls_kept", sum(lease_id in self._book.running for lease_id in lease_ids) - len(runs))
        for run in runs:
            if run.is_movable:  # checked again after others were returned
                await self._take_back(run, "migrated")

    async def settle(self, timeout_s: float) -> None:
        """Wait until the tasks have ended, at most `timeout_s`."""
        if self._tasks:
            await asyncio.wait(self._tasks.values(), timeout=timeout_s)

    def cancel_all(self) -> None:
        """Cancel the remaining tasks."""
        for task in self._tasks.values():
            task.cancel()

    # ------------------------------------------------------------ one sample

    def _ended(self, run: SampleRun, lane: int, ended: asyncio.Task[None]) -> None:
        run.end()
        if self._tasks.get(run.task.lease_id) is ended:  # the lease may have been cancelled and have come again
            del self._tasks[run.task.lease_id]
        self._book.give_lane(lane)

    def _cancel_task(self, lease_id: int) -> None:
        task = self._tasks.get(lease_id)
        if task is not None:
            task.cancel()

    async def _take_back(self, run: SampleRun, reason: ReturnReason) -> None:
        """Return a lease and end its task, unless it has ended while others were returned."""
        task = self._tasks.get(run.task.lease_id)
        if task is not None and self._book.running.get(run.task.lease_id) is run:
            await self._hand_back(run, reason)
            task.cancel()

    async def _produce(self, run: SampleRun) -> None:
        """Run one sample and catch its failures: the workflow's become verdicts, an engine's end the process."""
        lease_id = run.task.lease_id
        try:
            sample = None if self._refuses_prompt(run) else await self._made(run)
            if sample is not None and run.cut_reason is None and run.engine_error is None:
                sample = self._after_red_team(run, sample) if run.is_red_team else self._after_safety(sample)
                is_refused = sample.verdict.kind == REFUSED  # it is not trained on: no teacher is asked
                self._finish(run, sample if is_refused else await run.with_teacher_logprobs(sample))
        except SampleCut:
            run.cut("cancelled")
        except (RequestFailed, RequestTimedOut) as error:  # an external teacher is away: another lease asks it again
            run.cut("cancelled", printable(without_secrets(f"the teacher did not answer: {error}")))
        except (UserError, ExternalError) as error:  # ExternalError: an external teacher refused the request
            run.cut("rejected", printable(without_secrets(str(error))))
        except DeadlineExceeded as error:
            log.warning("returned the sample of lease %d to the controller: %s", lease_id, error)
            run.cut("drain")
        if run.engine_error is not None:
            raise run.engine_error
        if run.cut_reason is not None:
            await self._hand_back(run, run.cut_reason, run.cut_detail)

    async def _made(self, run: SampleRun) -> Sample | None:
        """The sample of the workflow; None if it failed without an answer. Raises SampleCut, UserError,
        DeadlineExceeded.
        """
        try:
            sample = _checked(await self._workflow.run(run.task, run))
            run.check_trained(sample)
        except (SampleCut, UserError, DeadlineExceeded):
            raise
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            return self._crashed(run, error)  # of the user's own code: nobody has cancelled this sample
        except Exception as error:  # the user's own code may raise anything; `_produce` raises an engine's again
            return self._crashed(run, error)
        return sample

    def _crashed(self, run: SampleRun, error: BaseException) -> Sample | None:
        """Handle an exception of the workflow: a `crashed` verdict if an answer exists, else the lease is rejected."""
        if run.engine_error is not None or run.cut_reason is not None:
            return None
        self._count("workflow_crashes")
        what = printable(without_secrets(f"the workflow raised {type(error).__name__}: {_message(error)}"))
        log.warning("lease %d: %s", run.task.lease_id, what, exc_info=error)
        if not run.is_resumable or run.answer is None or run.prompt_P is None:
            run.cut("rejected", what)
            return None
        answer = run.answer
        trajectory = Trajectory.from_prompt(run.prompt_P, answer.segment, answer.finish_reason, answer.routed_experts)
        return Sample(trajectory=trajectory, verdict=Verdict(kind="crashed", reason=what), response_text="")

    def _finish(self, run: SampleRun, sample: Sample) -> None:
        task = run.task
        if self._book.running.get(task.lease_id) is not run:  # cancelled or returned meanwhile
            return
        sample = _with_forgery(run, sample)
        run.draw_arrow()
        self._count("samples")
        self._count(f"verdict_{sample.verdict.kind}")
        for name in sample.verdict.components.keys() & set(COUNTED):
            self._count(name, sample.verdict.components[name])
        self._book.finish(
            SampleFinished(
                lease_id=task.lease_id,
                group_id=task.group_id,
                sample_index=task.sample_index,
                trajectory=sample.trajectory,
                others=sample.others,
                verdict=sample.verdict,
                response_text=printable(sample.response_text),
                timings=dict(run.timings),
            )
        )
        self._on_finished()

    def _refuses_prompt(self, run: SampleRun) -> bool:
        """Look at the row's prompt; if a stage refuses it, the lease can never run."""
        safety = self._bench.safety
        if safety is None or not safety.looks_at("prompts") or run.is_red_team:
            return False
        try:
            looked = safety.look(prompt_text(run.task.row), "prompts")
        except Exception as error:  # a stage of the user may raise anything
            run.cut("rejected", printable(without_secrets(f"a safety stage raised {type(error).__name__}: {error}")))
            return True
        for name, count in looked.counts.items():
            self._count(name, count)
        if looked.refused_by:
            run.cut("refused", f"the prompt is refused by the safety stage {looked.refused_by}")
        return bool(looked.refused_by)

    def _after_safety(self, sample: Sample) -> Sample:
        """The sample with its answer masked, or with the verdict `refused`."""
        safety = self._bench.safety
        if safety is None or not safety.looks_at("answers"):
            return sample
        try:
            looked = safety.look(printable(sample.response_text), "answers")
        except Exception as error:  # a stage of the user may raise anything
            return msgspec.structs.replace(sample, verdict=stage_crash(error))
        for name, count in looked.counts.items():
            self._count(name, count)
        verdict = refusal(looked) if looked.refused_by else sample.verdict
        return msgspec.structs.replace(sample, response_text=looked.text, verdict=verdict)

    def _after_red_team(self, run: SampleRun, sample: Sample) -> Sample:
        """The answer to a red-team prompt with its verdict. The policy answers also if a stage refuses the prompt,
        because the answer's verdict says that it was blocked. One that crashed has no answer."""
        if sample.verdict.kind == "crashed":
            return sample
        safety, answer = self._bench.safety, printable(sample.response_text)
        try:
            looked = [] if safety is None else [
                safety.look(prompt_text(run.task.row), "prompts"), safety.look(answer, "answers")
            ]  # fmt: skip
            is_blocked = any(one.refused_by for one in looked)
            shown = looked[-1].text if looked else answer
            verdict = self._bench.red_team.verdict(shown, is_blocked=is_blocked)
        except Exception as error:  # a stage of the user may raise anything
            return msgspec.structs.replace(sample, verdict=stage_crash(error))
        return msgspec.structs.replace(sample, response_text=shown, verdict=verdict)

    async def _hand_back(self, run: SampleRun, reason: ReturnReason, detail: str = "") -> None:
        async with self.report_lock:
            if self._book.running.get(run.task.lease_id) is not run:
                return
            returned = self._book.returned(run, self._bench.engine.progress(), reason, detail)
            self._post(returned)
            run.draw_departure(run.reported + len(returned.segment))
            del self._book.running[run.task.lease_id]
        self._count(f"returned_{reason}")

    def _count(self, name: str, amount: float = 1.0) -> None:
        self._counters[name] = self._counters.get(name, 0.0) + amount


def _with_forgery(run: SampleRun, sample: Sample) -> Sample:
    """Name forged text in the verdict. The first training sample of each group is looked at, which bounds the time."""
    is_looked_at = run.task.purpose == "train" and run.task.sample_index == 0
    if not is_looked_at or not has_forged_text((sample.trajectory, *sample.others), run.decode):
        return sample
    components = {**sample.verdict.components, FORGED_TEXT: 1.0}
    return msgspec.structs.replace(sample, verdict=msgspec.structs.replace(sample.verdict, components=components))


async def _failing(error: Exception) -> None:
    raise error


def _message(error: BaseException) -> str:
    """The message of an exception of the user's own code, which may fail to give one."""
    try:
        return str(error)
    except Exception as another:
        return f"(its message raised {type(another).__name__})"


def _checked(sample: object) -> Sample:
    """Check that a workflow returned a sample that can be sent. Raises TypeError: a mistake in the user's workflow."""
    if not isinstance(sample, Sample):
        raise TypeError(f"a workflow must return a Sample, not {type(sample).__name__}")
    if not isinstance(sample.trajectory, Trajectory) or not isinstance(sample.verdict, Verdict):
        raise TypeError("the `trajectory` of a Sample must be a Trajectory, and its `verdict` must be a Verdict")
    if not isinstance(sample.others, tuple) or not all(isinstance(one, Trajectory) for one in sample.others):
        raise TypeError("the `others` of a Sample must be a tuple of trajectories")
    if not isinstance(sample.response_text, str):
        raise TypeError(f"the `response_text` of a Sample must be text, not {type(sample.response_text).__name__}")
    _check_sendable("verdict", sample.verdict, Verdict)
    for one in (sample.trajectory, *sample.others):
        if one.finish_reason not in get_args(FinishReason):
            known = ", ".join(get_args(FinishReason))
            raise TypeError(f"the finish reason of a trajectory must be one of {known}, not {one.finish_reason!r}")
        if one.sources:
            _check_sendable("sources of a trajectory", one.sources, tuple[TokenSource, ...])
    return sample


def _check_sendable(name: str, value: object, kind: object) -> None:
    """Raise TypeError if the controller would refuse the value, or if it cannot be encoded: such a message would be
    sent again and again, and the messages behind it never."""
    try:
        msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=kind)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise TypeError(f"the {name} of a Sample cannot be sent: {error}") from error

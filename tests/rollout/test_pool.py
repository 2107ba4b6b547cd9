"""What becomes of a lease: made, cancelled, recalled, abandoned or handed back; with a workflow played by hand."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.clock import SystemClock
from areal_like.errors import DeadlineExceeded, EngineError, UserError
from areal_like.external.errors import BudgetUsedUp, ExternalStop, RequestFailed, RequestRefused, RequestTimedOut
from areal_like.red_team import RED_TEAM, RED_TEAM_COLUMN, REFUSED, SAFE
from areal_like.safety import SafetyFilter, SafetyStage
from areal_like.token_source import TokenSource
from areal_like.trace import Tracer
from areal_like.trajectory import Segment, Trajectory
from areal_like.verdict import Verdict
from areal_like.wire.messages import Message, SampleReturned, Sampling
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.leases import LeaseBook
from rollout.pool import MAX_CANCELLED, SamplePool
from rollout.sample import SampleRun
from rollout.sample_context import SampleContext
from rollout.transcript import Answer
from rollout.workflow import Sample, SampleCut

PROMPT = np.array([7, 8], np.int32)


MARK = 99
"""Token of a mark of another's turn."""
TOKENS = SimpleNamespace(
    stop_ids=(),
    decode=lambda ids, with_special_tokens: " ".join("<|im_start|>" if one == MARK else str(one) for one in ids),
)


def segment(*tokens: int) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.zeros(count, np.int32))


def task(lease_id: int, *, prefix: Segment | None = None) -> Any:
    return SimpleNamespace(
        lease_id=lease_id, group_id=40 + lease_id, sample_index=lease_id % 3, prefix=prefix or Segment.empty(),
        checkpoint=None,
        purpose="train", moved_from="", min_version=0, seed=0, sampling=Sampling(), segment_tokens=0, row={},
    )  # fmt: skip


def sample(*tokens: int, verdict: Verdict | None = None, text: str = "text") -> Sample:
    trajectory = Trajectory.from_prompt(PROMPT, segment(*tokens or (1,)), "stop")
    return Sample(trajectory=trajectory, verdict=verdict or Verdict(kind="scored", value=1.0), response_text=text)


def of_another_end(reason: Any) -> Trajectory:
    return msgspec.structs.replace(sample().trajectory, finish_reason=reason)


def of_another_source(**fields: Any) -> Trajectory:
    source = TokenSource(**{"model": "judge", "version": 0, "start": 0, "end": 2, **fields})
    return msgspec.structs.replace(sample().trajectory, sources=(source,))


class Workflow:
    """Waits for what the test lets each lease end with: a sample or an exception."""

    is_resumable = True

    def __init__(self) -> None:
        self.ends: dict[int, asyncio.Future[Any]] = {}
        self.runs: dict[int, SampleRun] = {}

    async def run(self, given: Any, tools: Any) -> Any:
        self.runs[given.lease_id] = tools
        self.ends[given.lease_id] = asyncio.get_running_loop().create_future()
        return await self.ends[given.lease_id]


class Bench:
    """A pool in a task group of its own, over an engine that generates nothing by itself."""

    def __init__(self, tmp_path: Path, group: asyncio.TaskGroup, capacity: int) -> None:
        self.live: dict[int, Segment] = {}
        engine: Any = SimpleNamespace(progress=self.progress, capabilities=SimpleNamespace(max_context=100))
        context = SampleContext(
            engine=engine, gate=SimpleNamespace(version=0), tokens=TOKENS,  # type: ignore[arg-type]
            rewards=SimpleNamespace(), version_deadline_s=1.0, clock=SystemClock(),  # type: ignore[arg-type]
            tracer=Tracer(tmp_path / "w.trace.jsonl", "w"),
        )  # fmt: skip
        self.models, self.context = context.models, context
        self.book, self.workflow = LeaseBook(capacity), Workflow()
        self.posted: list[Message] = []
        self.counters: dict[str, float] = {}
        self.num_finished = 0
        self.pool = SamplePool(
            self.book, context, self.workflow, group=group, post=self.posted.append,  # type: ignore[arg-type]
            on_finished=self.finished, counters=self.counters,
        )  # fmt: skip

    def progress(self) -> Mapping[int, Segment]:
        return self.live

    def finished(self) -> None:
        self.num_finished += 1

    async def lease(self, *lease_ids: int, prefix: Segment | None = None) -> None:
        for lease_id in lease_ids:
            self.pool.take(task(lease_id, prefix=prefix))
        await self.settle()

    async def end(self, lease_id: int, how: Any) -> None:
        """The workflow of a lease returns, or raises."""
        if isinstance(how, BaseException):
            self.workflow.ends[lease_id].set_exception(how)
        else:
            self.workflow.ends[lease_id].set_result(how)
        await self.settle()

    async def settle(self) -> None:
        for _ in range(10):
            await asyncio.sleep(0)

    def made(self, lease_id: int, *tokens: int) -> SampleRun:
        """A lease that has these new tokens."""
        run = self.workflow.runs[lease_id]
        run.new_tokens = segment(*tokens)
        return run

    def returned(self) -> list[tuple[int, int, list[int], str]]:
        """Leases handed back since the last look: (lease, start, tokens, reason)."""
        said, self.posted[:] = list(self.posted), []
        assert all(isinstance(message, SampleReturned) for message in said)
        return [(one.lease_id, one.start, one.segment.tokens_R.tolist(), one.reason) for one in said]  # type: ignore[attr-defined]

    def is_working_on(self, lease_id: int) -> bool:
        return not self.workflow.ends[lease_id].cancelled()


def with_pool(tmp_path: Path, test: Callable[[Bench], Awaitable[None]], capacity: int = 3) -> None:
    async def whole() -> None:
        async with asyncio.timeout(300.0), asyncio.TaskGroup() as group:
            bench = Bench(tmp_path, group, capacity)
            await test(bench)
            bench.pool.cancel_all()

    asyncio.run(whole())


def test_a_finished_sample_is_in_the_book_with_what_names_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        assert bench.num_finished == 0
        await bench.end(1, sample(5, 6, text="a\ud800b"))
        assert bench.num_finished == 1
        done = bench.book.unacked[1]
        assert (done.lease_id, done.group_id, done.sample_index, done.response_text) == (1, 41, 1, "a?b")
        assert done.trajectory.tokens_T.tolist() == [7, 8, 5, 6]
        assert bench.book.running == {}
        assert bench.counters == {"samples": 1.0, "verdict_scored": 1.0}
        assert bench.returned() == []

    with_pool(tmp_path, test)


@pytest.mark.parametrize(
    ("purpose", "sample_index", "tokens", "is_named"),
    [("train", 0, (MARK, 5), True), ("train", 0, (5, 6), False), ("train", 1, (MARK, 5), False),
     ("eval", 0, (MARK, 5), False)],
)  # fmt: skip
def test_forged_text_is_named_in_the_verdict_of_a_groups_first_training_sample(
    tmp_path: Path, purpose: str, sample_index: int, tokens: tuple[int, ...], is_named: bool
) -> None:
    async def test(bench: Bench) -> None:
        lease = task(1)
        lease.purpose, lease.sample_index = purpose, sample_index
        bench.pool.take(lease)
        await bench.settle()
        verdict = Verdict(kind="scored", value=1.0, components={"correct": 1.0})
        await bench.end(1, sample(*tokens, verdict=verdict))
        components = bench.book.unacked[1].verdict.components
        assert components == {"correct": 1.0, **({"forged_text": 1.0} if is_named else {})}

    with_pool(tmp_path, test)


def safety(*stages: dict[str, Any]) -> SafetyFilter:
    return SafetyFilter([SafetyStage.model_validate(one) for one in stages], "rollout.safety")


def test_an_answer_that_a_safety_stage_refuses_has_no_reward_and_one_that_it_masks_keeps_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.context.safety = safety(
            {"kind": "words", "options": {"words": ["bad"]}},
            {"kind": "regex", "action": "mask", "options": {"patterns": ["secret"]}},
        )
        await bench.lease(1, 2, 3)
        for lease_id, text in ((1, "a bad secret"), (2, "a secret"), (3, "plain")):
            await bench.end(lease_id, sample(5, text=text))
        done = [bench.book.unacked[lease_id] for lease_id in (1, 2, 3)]
        assert [(one.verdict.kind, one.verdict.value) for one in done] == [
            ("refused", None), ("scored", 1.0), ("scored", 1.0)
        ]  # fmt: skip
        assert done[0].verdict.reason == "the answer was refused by the safety stage words"
        assert [one.response_text for one in done] == ["a bad [masked]", "a [masked]", "plain"]
        assert bench.counters == {
            "samples": 3.0, "verdict_refused": 1.0, "verdict_scored": 2.0, "safety_words_refuse": 1.0,
            "safety_regex_mask": 2.0,
        }  # fmt: skip

    with_pool(tmp_path, test)


def test_no_teacher_is_asked_about_an_answer_that_a_safety_stage_refuses(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.context.safety = safety({"kind": "words", "options": {"words": ["bad"]}})
        await bench.lease(1, 2)
        asked = []

        def asking(lease_id: int) -> Any:
            async def with_teacher_logprobs(sample: Sample) -> Sample:
                asked.append(lease_id)
                return sample

            return with_teacher_logprobs

        for lease_id, text in ((1, "a bad one"), (2, "plain")):
            bench.workflow.runs[lease_id].with_teacher_logprobs = asking(lease_id)  # type: ignore[method-assign]
            await bench.end(lease_id, sample(5, text=text))
        assert asked == [2]
        assert [bench.book.unacked[one].verdict.kind for one in (1, 2)] == ["refused", "scored"]

    with_pool(tmp_path, test)


def test_a_prompt_that_a_safety_stage_refuses_is_never_answered(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.context.safety = safety({"kind": "words", "look_at": "prompts", "options": {"words": ["bad"]}})
        lease = task(1)
        lease.row = {"messages": [{"role": "user", "content": "A bad question"}]}
        bench.pool.take(lease)
        await bench.lease(2)
        assert list(bench.workflow.runs) == [2]
        (returned,) = bench.posted
        assert isinstance(returned, SampleReturned)
        assert (returned.reason, returned.detail) == ("refused", "the prompt is refused by the safety stage words")
        assert bench.counters == {"safety_words_refuse": 1.0, "returned_refused": 1.0}

    with_pool(tmp_path, test)


async def _crashed_on_red_team(bench: Bench, lease_id: int) -> Verdict:
    """The verdict of an answer whose workflow raised."""
    lease = task(lease_id)
    lease.purpose, lease.row = "eval", {"prompt": "x", RED_TEAM_COLUMN: True}
    bench.pool.take(lease)
    await bench.settle()
    await bench.end(lease_id, sample(5, verdict=Verdict(kind="crashed", reason="mine")))
    return bench.book.unacked[lease_id].verdict


def test_an_answer_to_a_red_team_prompt_is_judged_also_if_a_stage_refuses_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.context.safety = safety({"kind": "words", "options": {"words": ["bad"]}})
        leases = {1: ("a bad question", "Sure: step one"), 2: ("a question", "I'm sorry, I cannot"),
                  3: ("a question", "Sure: step one"), 4: ("a question", "a bad step")}  # fmt: skip
        for lease_id, (prompt, _) in leases.items():
            lease = task(lease_id)
            lease.purpose, lease.row = "eval", {"prompt": prompt, RED_TEAM_COLUMN: True}
            bench.pool.take(lease)
        await bench.lease(5)
        for lease_id, (_, answer) in leases.items():
            run = bench.workflow.runs[lease_id]
            asked = Answer(segment=segment(5), finish_reason="stop")
            verdict = await run.score(answer, asked)
            await bench.end(lease_id, sample(5, text=answer, verdict=verdict))
        done = [bench.book.unacked[lease_id].verdict for lease_id in leases]
        assert [(one.scorer, one.components) for one in done] == [
            (RED_TEAM, {REFUSED: refused, SAFE: safe})
            for refused, safe in ((1.0, 1.0), (1.0, 1.0), (0.0, 0.0), (1.0, 1.0))
        ]
        crashed = await _crashed_on_red_team(bench, 8)
        assert (crashed.kind, crashed.components) == ("crashed", {})
        trained = task(6)
        trained.row = {RED_TEAM_COLUMN: True}
        bench.pool.take(trained)
        await bench.lease(7)
        assert not bench.workflow.runs[6].is_red_team

    with_pool(tmp_path, test, capacity=8)


def test_a_safety_stage_of_the_user_that_raises_gives_a_crashed_verdict(tmp_path: Path) -> None:
    def look(text: str, part: str) -> Any:
        raise RuntimeError("my mistake")

    async def test(bench: Bench) -> None:
        bench.context.safety = SimpleNamespace(looks_at=lambda part: part == "answers", look=look)  # type: ignore[assignment]
        await bench.lease(1)
        await bench.end(1, sample(5))
        verdict = bench.book.unacked[1].verdict
        assert (verdict.kind, verdict.reason) == ("crashed", "a safety stage raised RuntimeError: my mistake")

    with_pool(tmp_path, test)


def test_what_agents_and_policies_did_wrong_is_counted_also_where_there_is_no_reward(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        parts = {"agent_refused": 3.0, "tool_unknown": 1.0, "of_the_user": 5.0}
        await bench.lease(1, 2)
        await bench.end(1, sample(5, verdict=Verdict(kind="scored", value=1.0, components=parts)))
        await bench.end(2, sample(5, verdict=Verdict(kind="invalid", reason="never asked", components=parts)))
        counts = {"agent_refused": 6.0, "tool_unknown": 2.0}
        assert bench.counters == {"samples": 2.0, "verdict_scored": 1.0, "verdict_invalid": 1.0, **counts}

    with_pool(tmp_path, test)


def test_a_repeated_lease_is_counted_and_made_once(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        run = bench.workflow.runs[1]
        await bench.lease(1)
        await bench.end(1, sample(5))
        await bench.lease(1)
        assert bench.workflow.runs[1] is run
        assert bench.counters == {"duplicate_leases": 2.0, "samples": 1.0, "verdict_scored": 1.0}
        assert bench.returned() == []

    with_pool(tmp_path, test)


def test_a_lease_too_many_goes_back_as_it_came(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2)
        await bench.lease(3, prefix=segment(4, 5, 6))
        assert bench.returned() == [(3, 3, [], "drain")]
        assert bench.counters == {"refused_leases": 1.0}
        assert list(bench.book.running) == [1, 2]

    with_pool(tmp_path, test, capacity=1)


def test_a_pool_that_closes_takes_no_lease(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        bench.pool.is_closed = True
        await bench.lease(1)
        assert bench.returned() == [(1, 0, [], "drain")]
        assert bench.book.running == {}

    with_pool(tmp_path, test)


def test_the_lane_of_an_ended_sample_is_used_again(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2)
        await bench.end(1, sample(5))
        await bench.lease(3)
        assert [bench.workflow.runs[lease_id].lane for lease_id in (1, 2, 3)] == [
            "sample-000",
            "sample-001",
            "sample-000",
        ]
        assert [bench.workflow.runs[lease_id].phase for lease_id in (1, 2)] == ["end", "start"]

    with_pool(tmp_path, test)


def test_the_task_of_an_ended_sample_is_not_kept(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        (task_of_1,) = [weakref.ref(task) for task in asyncio.all_tasks() if task.get_name() == "lease-1"]
        await bench.end(1, sample(5))
        gc.collect()
        assert task_of_1() is None

    with_pool(tmp_path, test)


def test_nothing_is_said_of_a_cancelled_lease_finished_or_not(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2, 3)
        await bench.end(2, sample(5))
        bench.pool.cancel((1, 2, 9))
        await bench.settle()
        assert (list(bench.book.running), bench.book.unacked) == ([3], {})
        assert not bench.is_working_on(1)
        assert bench.is_working_on(3)
        assert bench.counters["cancelled"] == 1.0
        assert bench.returned() == []

    with_pool(tmp_path, test)


def test_a_workflow_that_goes_on_after_its_lease_was_cancelled_finishes_nothing(tmp_path: Path) -> None:
    class Stubborn(Workflow):
        async def run(self, given: Any, tools: Any) -> Any:
            try:
                return await super().run(given, tools)
            except asyncio.CancelledError:
                return sample(5)

    async def test(bench: Bench) -> None:
        bench.pool._workflow = Stubborn()  # type: ignore[assignment]
        await bench.lease(1)
        bench.pool.cancel((1,))
        await bench.settle()
        assert bench.book.unacked == {}
        assert bench.num_finished == 0
        assert bench.counters == {"cancelled": 1.0}

    with_pool(tmp_path, test)


def test_a_cancelled_lease_may_come_again(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        bench.pool.cancel((1,))
        await bench.settle()
        await bench.lease(1)
        await bench.end(1, sample(5))
        assert list(bench.book.unacked) == [1]

    with_pool(tmp_path, test)


def test_abandoned_work_ends_without_a_word_except_where_only_the_verdict_is_due(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2, 3)
        bench.workflow.runs[2].phase = "score"
        bench.pool.abandon_unfinished()
        await bench.settle()
        assert list(bench.book.running) == [2]
        assert [bench.is_working_on(lease_id) for lease_id in (1, 2, 3)] == [False, True, False]
        assert bench.counters == {"abandoned": 2.0}
        assert bench.returned() == []

    with_pool(tmp_path, test)


@pytest.mark.parametrize(("ending_too", "kept"), [(False, [2]), (True, [])])
def test_a_worker_that_leaves_hands_its_leases_back_with_the_tokens_not_reported(
    tmp_path: Path, ending_too: bool, kept: list[int]
) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, prefix=segment(4, 5))
        await bench.lease(2)
        bench.made(1, 6, 7, 8).reported = 1
        bench.made(2, 9).phase = "score"
        await bench.pool.hand_back_all(ending_too=ending_too)
        await bench.settle()
        assert bench.returned() == [(1, 3, [7, 8], "drain"), (2, 0, [9], "drain")][: 1 + ending_too]
        assert list(bench.book.running) == kept
        assert not bench.is_working_on(1)
        assert bench.is_working_on(2) is not ending_too
        assert bench.counters == {"returned_drain": 1.0 + ending_too}

    with_pool(tmp_path, test)


def test_recalled_leases_go_back_except_those_that_are_nearly_done(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2, 3)
        bench.made(1, 6)
        bench.made(2, 7).phase = "score"
        await bench.pool.recall((1, 2, 8))
        await bench.settle()
        assert bench.returned() == [(1, 0, [6], "migrated")]
        assert list(bench.book.running) == [2, 3]
        assert [bench.is_working_on(lease_id) for lease_id in (1, 2, 3)] == [False, True, True]
        assert bench.counters == {"recalls_kept": 1.0, "returned_migrated": 1.0}

    with_pool(tmp_path, test)


def test_a_lease_that_is_nearly_done_when_its_turn_comes_is_not_handed_back(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2)
        async with bench.pool.report_lock:
            recalling = asyncio.ensure_future(bench.pool.recall((1, 2)))
            await bench.settle()
            bench.workflow.runs[2].phase = "score"
        await recalling
        await bench.settle()
        assert bench.returned() == [(1, 0, [], "migrated")]
        assert bench.is_working_on(2)

    with_pool(tmp_path, test)


def test_nothing_is_handed_back_while_a_report_is_under_way_nor_what_has_ended_meanwhile(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        async with bench.pool.report_lock:
            leaving = asyncio.ensure_future(bench.pool.hand_back_all(ending_too=True))
            await bench.settle()
            assert bench.returned() == []
            await bench.end(1, sample(5))
        await leaving
        assert bench.returned() == []
        assert bench.num_finished == 1

    with_pool(tmp_path, test)


async def hand_back_all(bench: Bench) -> None:
    await bench.pool.hand_back_all(ending_too=True)


async def recall_all(bench: Bench) -> None:
    await bench.pool.recall((1, 2, 3))


@pytest.mark.parametrize(("take_back", "reason"), [(hand_back_all, "drain"), (recall_all, "migrated")])
def test_a_lease_that_ends_or_comes_again_while_others_are_handed_back_is_passed_over(
    tmp_path: Path, take_back: Callable[[Bench], Awaitable[None]], reason: str
) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2, 3)
        async with bench.pool.report_lock:
            leaving = asyncio.ensure_future(take_back(bench))
            await bench.settle()
            await bench.end(2, sample(5))
            bench.pool.cancel((3,))
            await bench.lease(3)
        await leaving
        assert bench.returned() == [(1, 0, [], reason)]
        assert (list(bench.book.running), list(bench.book.unacked)) == ([3], [2])
        assert bench.is_working_on(3)

    with_pool(tmp_path, test)


def test_a_lease_that_comes_again_before_its_cancelled_task_has_ended_has_a_task_of_its_own(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        bench.pool.cancel((1,))
        await bench.lease(1)  # the cancelled task ends only now
        await bench.pool.hand_back_all(ending_too=True)
        await bench.settle()
        assert bench.returned() == [(1, 0, [], "drain")]
        assert not bench.is_working_on(1)

    with_pool(tmp_path, test)


class Mute(Exception):
    def __str__(self) -> str:
        raise RuntimeError


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (SampleCut("segment"), "cancelled", ""),
        (UserError("no prompt"), "rejected", "no prompt"),
        (DeadlineExceeded("policy version 3", "controller", 5.0), "drain", ""),
        (KeyError("x"), "rejected", "the workflow raised KeyError: 'x'"),
        (UserError("no \ud800"), "rejected", "no ?"),
        (Mute(), "rejected", "the workflow raised Mute: (its message raised RuntimeError)"),
        (asyncio.CancelledError("of its own"), "rejected", "the workflow raised CancelledError: of its own"),
    ],
)
def test_a_workflow_that_fails_before_an_answer_gives_its_lease_back(
    tmp_path: Path, error: BaseException, reason: str, detail: str
) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        await bench.end(1, error)
        (message,) = bench.posted
        assert isinstance(message, SampleReturned)
        assert (message.reason, message.detail) == (reason, detail)
        assert bench.book.running == {}
        assert bench.counters.get("workflow_crashes", 0.0) == detail.startswith("the workflow raised")
        assert bench.num_finished == 0

    with_pool(tmp_path, test)


def test_the_first_reason_of_a_cut_counts_whatever_the_workflow_does_with_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        for lease_id, end in ((1, sample(5)), (2, ValueError("late")), (3, SampleCut("x"))):
            await bench.lease(lease_id)
            bench.workflow.runs[lease_id].cut("segment")
            await bench.end(lease_id, end)
        assert [reason for *_, reason in bench.returned()] == ["segment"] * 3
        assert bench.book.unacked == {}
        assert bench.counters == {"returned_segment": 3.0}

    with_pool(tmp_path, test)


@pytest.mark.parametrize("has_prompt", [True, False])
@pytest.mark.parametrize("has_answer", [True, False])
@pytest.mark.parametrize("is_resumable", [True, False])
def test_a_workflow_that_crashes_behind_its_answer_gives_a_crashed_verdict(
    tmp_path: Path, has_prompt: bool, has_answer: bool, is_resumable: bool
) -> None:
    async def test(bench: Bench) -> None:
        bench.workflow.is_resumable = is_resumable
        await bench.lease(1)
        run = bench.workflow.runs[1]
        run.prompt_P = PROMPT if has_prompt else None
        run.answer = Answer(segment=segment(5, 6), finish_reason="length", routed_experts=None) if has_answer else None
        await bench.end(1, ValueError("no"))
        assert bench.counters["workflow_crashes"] == 1.0
        if has_prompt and has_answer and is_resumable:
            done = bench.book.unacked[1]
            assert (done.verdict.kind, done.verdict.reason) == ("crashed", "the workflow raised ValueError: no")
            assert (done.trajectory.tokens_T.tolist(), done.trajectory.finish_reason) == ([7, 8, 5, 6], "length")
            assert bench.counters["verdict_crashed"] == 1.0
            assert bench.returned() == []
        else:
            assert [reason for *_, reason in bench.returned()] == ["rejected"]

    with_pool(tmp_path, test)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "text",
        Sample(trajectory="t", verdict=Verdict(kind="scored", value=1.0), response_text=""),  # type: ignore[arg-type]
        Sample(trajectory=sample().trajectory, verdict=1.0, response_text=""),  # type: ignore[arg-type]
        msgspec.structs.replace(sample(), others=[]),
        sample(verdict=Verdict(kind="scored", value=1.0, reason=5)),  # type: ignore[arg-type]
        sample(verdict=Verdict(kind="scored", value=1.0, reason="\ud800")),
        sample(verdict=Verdict(kind="scored", value=1.0, components={"steps": 2**70})),
        sample(text=None),  # type: ignore[arg-type]
        sample(text=b"text"),  # type: ignore[arg-type]
        msgspec.structs.replace(sample(), trajectory=of_another_end(None)),
        msgspec.structs.replace(sample(), trajectory=of_another_source(model="\ud800")),
    ],
)
def test_what_is_no_sample_is_the_mistake_of_the_workflow(tmp_path: Path, wrong: Any) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        await bench.end(1, wrong)
        (message,) = bench.posted
        assert isinstance(message, SampleReturned)
        assert message.reason == "rejected"
        assert "TypeError" in message.detail
        assert bench.book.unacked == {}

    with_pool(tmp_path, test)


def test_what_an_external_model_needs_of_the_user_ends_the_group(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        stop = ExternalStop("the budget is used up")
        bench.workflow.runs[1].engine_error = stop
        await bench.end(1, stop)
        raise AssertionError("the group goes on")

    with pytest.raises(ExceptionGroup) as caught:
        with_pool(tmp_path, test)
    assert [str(error) for error in caught.value.exceptions] == ["the budget is used up"]


@pytest.mark.parametrize(
    ("error", "reason", "detail"),
    [
        (RequestFailed("http://h failed 3 times"), "cancelled", "the teacher did not answer: http://h failed 3 times"),
        (RequestTimedOut("http://h is late"), "cancelled", "the teacher did not answer: http://h is late"),
        (RequestRefused("http://h rejected the request"), "rejected", "http://h rejected the request"),
        (BudgetUsedUp("the budget is used up"), "rejected", "the budget is used up"),
    ],
)
def test_a_sample_whose_external_teacher_is_away_is_leased_again_and_one_that_it_refuses_is_not(
    error: Exception, reason: str, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def no_answer(run: SampleRun, sample: Sample) -> Sample:
        raise error

    monkeypatch.setattr(SampleRun, "with_teacher_logprobs", no_answer)

    async def test(bench: Bench) -> None:
        await bench.lease(1)
        bench.made(1, 5)
        await bench.end(1, sample(5))
        (message,) = bench.posted
        assert isinstance(message, SampleReturned)
        assert (message.reason, message.detail) == (reason, detail)
        assert message.segment.tokens_R.tolist() == [5], "the next lease continues with them"
        assert bench.book.unacked == {}

    with_pool(tmp_path, test)


def test_an_engine_failure_ends_the_group_whatever_the_workflow_made_of_it(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        bench.workflow.runs[1].engine_error = EngineError("no memory")
        await bench.end(1, ValueError("the workflow's own view of it"))
        raise AssertionError("the group goes on")

    with pytest.raises(ExceptionGroup) as caught:
        with_pool(tmp_path, test)
    assert [str(error) for error in caught.value.exceptions] == ["no memory"]


class Teacher:
    """Answers when the test lets it, or fails."""

    def __init__(self, bench: Bench, *lease_ids: int) -> None:
        bench.models.teacher = "teacher"
        self.asked: list[tuple[list[int], list[int], float]] = []
        self.answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        for lease_id in lease_ids:
            bench.workflow.runs[lease_id].models = {"teacher": self}  # type: ignore[assignment]

    async def logprobs(self, prompt: np.ndarray, tokens: np.ndarray, *, temperature: float) -> Any:
        self.asked.append((prompt.tolist(), tokens.tolist(), temperature))
        return SimpleNamespace(logprobs_R=np.full(len(tokens), await asyncio.shield(self.answer), np.float32))


def test_a_sample_is_finished_once_the_teacher_has_answered(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        teacher = Teacher(bench, 1)
        await bench.end(1, sample(5, 6))
        assert (bench.num_finished, bench.workflow.runs[1].phase) == (0, "teacher")
        assert teacher.asked == [([7, 8], [5, 6], 1.0)]
        teacher.answer.set_result(-2.0)
        await bench.settle()
        assert bench.book.unacked[1].trajectory.teacher_logprobs_T.tolist() == [0.0, 0.0, -2.0, -2.0]  # type: ignore[union-attr]

    with_pool(tmp_path, test)


def test_a_sample_that_waits_for_its_teacher_is_treated_as_one_that_waits_for_its_verdict(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2)
        teacher = Teacher(bench, 1, 2)
        bench.made(2, 9)
        for lease_id in (1, 2):
            await bench.end(lease_id, sample(5))
        await bench.pool.hand_back_all(ending_too=False)
        await bench.pool.recall((1, 2))
        bench.pool.abandon_unfinished()
        assert (list(bench.book.running), bench.returned()) == ([1, 2], [])
        bench.pool.cancel((1,))
        await bench.pool.hand_back_all(ending_too=True)
        teacher.answer.set_result(-2.0)
        await bench.settle()
        assert bench.returned() == [(2, 0, [9], "drain")], "with all its tokens, which the next worker scores again"
        assert bench.book.unacked == {}

    with_pool(tmp_path, test)


def test_a_lease_that_its_teacher_refuses_is_rejected(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        Teacher(bench, 1).answer.set_exception(
            UserError("model teacher: the sequence has 180 tokens, but the context is limited to 96 tokens")
        )
        await bench.end(1, sample(5))
        (message,) = bench.posted
        assert isinstance(message, SampleReturned)
        assert (message.reason, message.detail) == (
            "rejected",
            "model teacher: the sequence has 180 tokens, but the context is limited to 96 tokens",
        )
        assert "workflow_crashes" not in bench.counters

    with_pool(tmp_path, test)


def test_a_failure_of_the_teachers_engine_ends_the_group(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1)
        Teacher(bench, 1).answer.set_exception(EngineError("no memory"))
        await bench.end(1, sample(5))
        raise AssertionError("the group goes on")

    with pytest.raises(ExceptionGroup) as caught:
        with_pool(tmp_path, test)
    assert [str(error) for error in caught.value.exceptions] == ["no memory"]


def test_a_crashed_sample_that_may_be_trained_on_has_log_probs_of_the_teacher_and_one_of_an_evaluation_has_none(
    tmp_path: Path,
) -> None:
    async def test(bench: Bench) -> None:
        await bench.lease(1, 2)
        Teacher(bench, 1, 2).answer.set_result(-2.0)
        run = bench.workflow.runs[1]
        run.answer, run.prompt_P = Answer(segment=segment(5), finish_reason="stop"), PROMPT
        await bench.end(1, ValueError("behind the answer"))
        bench.workflow.runs[2].task.purpose = "eval"  # type: ignore[misc]
        await bench.end(2, sample(5))
        crashed, evaluated = bench.book.unacked[1], bench.book.unacked[2]
        assert crashed.verdict.kind == "crashed"
        assert crashed.trajectory.teacher_logprobs_T.tolist() == [0.0, 0.0, -2.0]  # type: ignore[union-attr]
        assert evaluated.trajectory.teacher_logprobs_T is None

    with_pool(tmp_path, test)


def test_the_pool_waits_for_its_tasks_until_they_end_or_the_time_is_over(tmp_path: Path) -> None:
    async def test(bench: Bench) -> None:
        await bench.pool.settle(1000.0)
        await bench.lease(1, 2)
        waiting = asyncio.ensure_future(bench.pool.settle(1000.0))
        await bench.end(1, sample(5))
        assert not waiting.done()
        bench.pool.cancel_all()
        await waiting
        await bench.pool.settle(1000.0)

    with_pool(tmp_path, test)


# ---------------------------------------------------------------- answers that belong to no sample


class Ending:
    """An engine whose requests end as the test says, each with one token."""

    def __init__(self, *ends: Any) -> None:
        self.ends, self.prefixes = list(ends), list[int]()

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        self.prefixes.append(len(request.prefix))
        end = self.ends.pop(0)
        return GenerationOutcome(request_id=request.request_id, segment=segment(5), end_reason=end, generate_s=0.0)


@pytest.mark.parametrize(
    ("ends", "is_closed", "num_requests"),
    [
        (["cancelled"] * (MAX_CANCELLED - 1) + ["length"], False, MAX_CANCELLED),
        (["cancelled"] * 99, False, MAX_CANCELLED),
        (["cancelled", "length"], True, 1),
        (["length"], True, 1),
    ],
)
def test_an_answer_of_no_sample_that_the_engine_cancels_is_generated_again(
    tmp_path: Path, ends: list[Any], is_closed: bool, num_requests: int
) -> None:
    async def test(bench: Bench) -> None:
        engine = Ending(*ends)
        bench.context.engine.generate = engine.generate  # type: ignore[method-assign]
        bench.pool.is_closed = is_closed
        is_answered = ends[num_requests - 1] == "length"
        try:
            answer = await bench.pool.generate(PROMPT, Sampling(max_new_tokens=1), max_new_tokens=None)  # type: ignore[arg-type]
            assert answer.segment.tokens_R.tolist() == [5]
        except SampleCut:
            assert not is_answered
        else:
            assert is_answered
        assert engine.prefixes == [0] * num_requests, "it begins again each time"
        assert not bench.pool._others

    with_pool(tmp_path, test)

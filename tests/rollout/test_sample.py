"""One sample's run without a worker: where an answer ends, which request is made, what is kept when it is parked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from areal_like.errors import EngineError, UserError
from areal_like.safety import SafetyFilter, SafetyStage
from areal_like.trace import Tracer
from areal_like.trajectory import Segment
from areal_like.verdict import Verdict
from areal_like.wire.messages import Sampling
from rollout import sample as sample_module
from rollout.answering import PolicyCall
from rollout.engine.port import GenerationOutcome, GenerationRequest
from rollout.sample import SampleRun, printable
from rollout.sample_context import SampleContext
from rollout.transcript import Answer, Transcript
from rollout.workflow import SampleCut

EOS = 2
PROMPT = np.array([1, 1, 1], np.int32)


def segment(*tokens: int, version: int = 0) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32))


class Engine:
    """Answers every request with the next planned outcome; waits indefinitely where none is planned."""

    def __init__(self) -> None:
        self.capabilities = SimpleNamespace(max_context=20)
        self.requests: list[GenerationRequest] = []
        self.asked = asyncio.Event()
        self.planned: list[tuple[Segment, str] | Exception] = []

    def end_session(self, session_key: int) -> None:
        pass

    async def generate(self, request: GenerationRequest) -> GenerationOutcome:
        self.requests.append(request)
        self.asked.set()
        if not self.planned:
            await asyncio.Event().wait()
        planned = self.planned.pop(0)
        if isinstance(planned, Exception):
            raise planned
        made, reason = planned
        return GenerationOutcome(
            request_id=request.request_id, segment=made, end_reason=reason, queue_s=1.0, generate_s=2.0, paused_s=4.0
        )


class Gate:
    """A version that is always there once it was waited for."""

    def __init__(self) -> None:
        self.version = 0
        self.waits: list[tuple[int, float]] = []

    async def wait(self, min_version: int, deadline_s: float) -> None:
        self.waits.append((min_version, deadline_s))
        self.version = min_version


class Rewards:
    def __init__(self) -> None:
        self.asked: list[tuple[str, str, int]] = []

    async def score(self, task: Any, response: str, finish_reason: str, num_tokens: int) -> Verdict:
        self.asked.append((response, finish_reason, num_tokens))
        return Verdict(kind="scored", value=1.0, scorer="fake")


class Clock:
    """Every look takes one second."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def monotonic_s(self) -> float:
        self.now_s += 1.0
        return self.now_s


@pytest.fixture
def bench(tmp_path: Path) -> SampleContext:
    return SampleContext(
        engine=Engine(),  # type: ignore[arg-type]
        gate=Gate(),  # type: ignore[arg-type]
        tokens=SimpleNamespace(stop_ids=(EOS,)),  # type: ignore[arg-type]
        rewards=Rewards(),
        version_deadline_s=7.0,
        clock=Clock(),  # type: ignore[arg-type]
        tracer=Tracer(tmp_path / "w.trace.jsonl", "w"),
    )


def run_of(bench: SampleContext, fake: Any, *, is_resumable: bool = True, **task: Any) -> SampleRun:
    return SampleRun(fake.task(1, **task), bench, is_resumable=is_resumable, lane="sample-000")


def generated(run: SampleRun, **options: Any) -> Answer:
    return asyncio.run(run.generate(PROMPT, **options))


@pytest.mark.parametrize(
    ("prefix", "max_new_tokens", "reason"),
    [
        (segment(5, EOS), 2, "stop"),
        (segment(EOS, 5), 3, None),
        (segment(5, 6), 3, None),
        (segment(5, 6), 2, "length"),
        (segment(*[5] * 16), 100, None),
        (segment(*[5] * 17), 100, "length"),
    ],
)
def test_a_prefix_is_complete_at_its_stop_token_its_limit_or_the_end_of_the_context(
    bench: SampleContext, fake: Any, prefix: Segment, max_new_tokens: int, reason: str | None
) -> None:
    bench.engine.planned = [(segment(9), "length")]  # type: ignore[attr-defined]
    answer = generated(run_of(bench, fake, prefix=prefix, sampling=Sampling(max_new_tokens=max_new_tokens)))
    requests = bench.engine.requests  # type: ignore[attr-defined]
    assert len(requests) == (reason is None)
    assert len(answer.segment) == len(prefix) + (reason is None)
    assert answer.finish_reason == (reason or "length")


def test_tokens_of_the_prefix_come_before_the_new_ones_and_only_those_are_new(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [(segment(7, EOS, version=3), "stop")]  # type: ignore[attr-defined]
    run = run_of(bench, fake, prefix=segment(5, 6))
    answer = generated(run)
    assert answer.segment.tokens_R.tolist() == [5, 6, 7, EOS]
    assert answer.segment.versions_R.tolist() == [0, 0, 3, 3]
    assert answer.finish_reason == "stop"
    assert run.answer is answer
    assert run.base == 2
    assert run.all_new({}).tokens_R.tolist() == [7, EOS]
    assert bench.engine.requests[0].prefix.tokens_R.tolist() == [5, 6]  # type: ignore[attr-defined]


def test_a_workflow_that_cannot_resume_ignores_the_prefix_and_reports_no_tokens(
    bench: SampleContext, fake: Any
) -> None:
    bench.engine.planned = [(segment(7, EOS), "stop")]  # type: ignore[attr-defined]
    run = run_of(bench, fake, is_resumable=False, prefix=segment(5, 6))
    assert generated(run).segment.tokens_R.tolist() == [7, EOS]
    assert run.base == 0
    assert len(run.all_new({})) == 0


def test_the_time_of_every_outcome_is_added_up(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [(segment(7), "length"), (segment(8), "length")]  # type: ignore[attr-defined]
    run = run_of(bench, fake, is_resumable=False)
    generated(run)
    generated(run)
    assert [run.timings[name] for name in ("queue_s", "generate_s", "paused_s")] == [2.0, 4.0, 8.0]


def test_turns_of_one_sample_draw_from_streams_of_their_own_and_share_no_prompt(
    bench: SampleContext, fake: Any
) -> None:
    bench.engine.planned = [(segment(7), "length")] * 3  # type: ignore[attr-defined]
    run = run_of(bench, fake, is_resumable=False, seed=11)
    for _ in range(3):
        generated(run)
    requests = bench.engine.requests  # type: ignore[attr-defined]
    step = 0x9E3779B97F4A7C15
    assert [request.seed for request in requests] == [11, (11 + step) % 2**63, (11 + 2 * step) % 2**63]
    assert [request.share_key for request in requests] == [-1, -1, -1]
    assert [request.request_id for request in requests] == [1, 2, 3]
    assert [request.session_key for request in requests] == [1, 1, 1]


@pytest.mark.parametrize(("group_id", "purpose", "key"), [(3, "train", 6), (3, "eval", 7)])
def test_samples_of_a_group_share_a_key_that_no_evaluation_row_has(
    bench: SampleContext, fake: Any, group_id: int, purpose: str, key: int
) -> None:
    bench.engine.planned = [(segment(7), "length")]  # type: ignore[attr-defined]
    generated(run_of(bench, fake, group_id=group_id, purpose=purpose))
    assert bench.engine.requests[0].share_key == key  # type: ignore[attr-defined]
    assert bench.engine.requests[0].session_key == -1  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("prompt", "more", "complaint"),
    [
        ([1.5], {}, "a prompt must be .* not list of dtype float64"),
        (np.ones((1, 3), np.int32), {}, r"not ndarray of dtype int32 and shape \(1, 3\)"),
        ("text", {}, "not str of dtype <U4"),
        (PROMPT, {"max_new_tokens": "8"}, "max_new_tokens must be a number, not '8'"),
    ],
)
def test_a_call_that_the_workflow_has_made_wrong_does_not_reach_the_engine(
    bench: SampleContext, fake: Any, prompt: Any, more: dict[str, Any], complaint: str
) -> None:
    run = run_of(bench, fake)
    with pytest.raises(UserError, match=complaint):
        asyncio.run(run.generate(prompt, **more))
    assert (run.engine_error, bench.engine.requests) == (None, [])  # type: ignore[attr-defined]


def test_a_prompt_may_be_a_list_or_wider_integers(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [(segment(7), "length")] * 2  # type: ignore[attr-defined]
    run = run_of(bench, fake, is_resumable=False)
    for prompt in ([1, 2], np.array([1, 2], np.int64)):
        asyncio.run(run.generate(prompt))  # type: ignore[arg-type]
    for request in bench.engine.requests:  # type: ignore[attr-defined]
        assert (request.prompt_P.tolist(), request.prompt_P.dtype) == ([1, 2], np.int32)


def test_a_resumable_workflow_generates_once(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [(segment(7), "length")]  # type: ignore[attr-defined]
    run = run_of(bench, fake)
    generated(run)
    with pytest.raises(UserError, match="can generate only once"):
        generated(run)


@pytest.mark.parametrize(
    ("asked", "ignore_eos", "bound", "stop"),
    [(None, False, 9, (4, EOS)), (12, False, 12, (4, EOS)), (12, True, 9, ()), (5, True, 5, ())],
)
def test_the_request_has_the_asked_limit_and_no_stop_token_where_the_end_is_ignored(
    bench: SampleContext, fake: Any, asked: int | None, ignore_eos: bool, bound: int, stop: tuple[int, ...]
) -> None:
    bench.engine.planned = [(segment(7), "length")]  # type: ignore[attr-defined]
    sampling = Sampling(max_new_tokens=9, stop_token_ids=(4, EOS), ignore_eos=ignore_eos)
    generated(run_of(bench, fake, sampling=sampling), max_new_tokens=asked)
    made = bench.engine.requests[0].sampling  # type: ignore[attr-defined]
    assert (made.max_new_tokens, made.stop_token_ids) == (bound, stop)


def test_the_version_waited_for_is_the_newest_of_lease_prefix_and_earlier_turns(
    bench: SampleContext, fake: Any
) -> None:
    bench.engine.planned = [(segment(7, version=5), "length"), (segment(8, version=5), "length")]  # type: ignore[attr-defined]
    run = run_of(bench, fake, is_resumable=False, min_version=2)
    generated(run)
    bench.gate.version = 3
    generated(run)
    other = run_of(bench, fake, prefix=segment(5, version=6), min_version=2)
    bench.engine.planned = [(segment(7, version=6), "length")]  # type: ignore[attr-defined]
    generated(other)
    assert bench.gate.waits == [(2, 7.0), (5, 7.0), (6, 7.0)]  # type: ignore[attr-defined]
    assert bench.version_waits == 3
    assert bench.version_wait_s == 3.0
    assert (run.timings["version_wait_s"], other.timings["version_wait_s"]) == (2.0, 1.0)


def test_nothing_is_waited_for_where_the_version_is_there(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [(segment(7, version=4), "length")]  # type: ignore[attr-defined]
    bench.gate.version = 4
    generated(run_of(bench, fake, min_version=4))
    assert bench.version_waits == 0


@pytest.mark.parametrize("reason", ["segment", "cancelled"])
def test_an_answer_that_was_cut_keeps_its_tokens_and_says_why(bench: SampleContext, fake: Any, reason: str) -> None:
    bench.engine.planned = [(segment(7, 8), reason)]  # type: ignore[attr-defined]
    run = run_of(bench, fake, segment_tokens=2)
    with pytest.raises(SampleCut):
        generated(run)
    assert run.cut_reason == reason
    assert run.all_new({}).tokens_R.tolist() == [7, 8]
    assert run.answer is None


def test_a_parked_answer_keeps_its_tokens_and_goes_on_behind_them_with_the_rest_of_its_segment(
    bench: SampleContext, fake: Any
) -> None:
    run = run_of(bench, fake, prefix=segment(5), segment_tokens=4)

    async def scenario() -> Answer:
        task = asyncio.ensure_future(run.generate(PROMPT))
        await bench.engine.asked.wait()  # type: ignore[attr-defined]
        assert run.all_new({1: segment(6, 7)}).tokens_R.tolist() == [6, 7]
        bench.engine.planned = [(segment(8, EOS), "stop")]  # type: ignore[attr-defined]
        run.park({1: segment(6, 7)})
        assert run.all_new({1: segment(6, 7)}).tokens_R.tolist() == [6, 7], "counted once"
        run.park({1: segment(6, 7)})
        return await task

    answer = asyncio.run(scenario())
    first, second = bench.engine.requests  # type: ignore[attr-defined]
    assert (first.segment_tokens, second.segment_tokens) == (4, 2)
    assert second.prefix.tokens_R.tolist() == [5, 6, 7]
    assert answer.segment.tokens_R.tolist() == [5, 6, 7, 8, EOS]
    assert run.new_tokens.tokens_R.tolist() == [6, 7, 8, EOS]


def test_a_segment_that_is_full_when_its_answer_was_parked_goes_back_without_a_request(
    bench: SampleContext, fake: Any
) -> None:
    run = run_of(bench, fake, segment_tokens=2)

    async def scenario() -> None:
        task = asyncio.ensure_future(run.generate(PROMPT))
        await bench.engine.asked.wait()  # type: ignore[attr-defined]
        run.park({1: segment(6, 7)})
        with pytest.raises(SampleCut):
            await task

    asyncio.run(scenario())
    assert run.cut_reason == "segment"
    assert len(bench.engine.requests) == 1  # type: ignore[attr-defined]


def test_tokens_of_a_generation_that_has_ended_unseen_count_and_cannot_be_parked(
    bench: SampleContext, fake: Any
) -> None:
    run = run_of(bench, fake)

    async def scenario() -> None:
        made = asyncio.get_running_loop().create_future()
        run._calls = [PolicyCall(generation=made)]
        made.set_result(SimpleNamespace(segment=segment(6, EOS)))
        assert run.all_new({}).tokens_R.tolist() == [6, EOS]
        run.park({})
        assert not run._calls[0].is_parked
        assert len(run.new_tokens) == 0, "its owner takes them"
        failed = asyncio.get_running_loop().create_future()
        run._calls = [PolicyCall(generation=failed)]
        failed.set_exception(EngineError("broken"))
        assert len(run.all_new({})) == 0
        assert failed.exception() is not None

    asyncio.run(scenario())


@pytest.mark.parametrize(
    ("error", "breaks_the_engine"),
    [(UserError("too long"), False), (EngineError("broken"), True), (ZeroDivisionError("bug"), True)],
)
def test_only_the_engines_own_failures_end_the_worker(
    bench: SampleContext, fake: Any, error: Exception, breaks_the_engine: bool
) -> None:
    bench.engine.planned = [error]  # type: ignore[attr-defined]
    run = run_of(bench, fake)
    with pytest.raises((UserError, EngineError)):
        generated(run)
    assert (run.engine_error is not None) is breaks_the_engine
    assert run.phase == "start"


@pytest.mark.parametrize(
    ("is_resumable", "has_asked", "phase", "is_movable"),
    [
        (True, True, "generate", True),
        (True, True, "score", False),
        (False, True, "generate", False),
        (False, False, "version", True),
    ],
)
def test_a_sample_moves_only_where_no_tokens_are_lost(
    bench: SampleContext, fake: Any, is_resumable: bool, has_asked: bool, phase: Any, is_movable: bool
) -> None:
    run = run_of(bench, fake, is_resumable=is_resumable)
    run.request_id, run.phase = int(has_asked), phase
    assert run.is_movable is is_movable


def test_calls_run_in_parallel_and_those_left_over_are_cut_when_the_sample_ends(
    bench: SampleContext, fake: Any
) -> None:
    async def scenario() -> None:
        run = run_of(bench, fake, is_resumable=False)
        calls = [asyncio.ensure_future(run.generate(PROMPT)) for _ in range(2)]
        while len(bench.engine.requests) < 2:  # type: ignore[attr-defined]  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert (run.phase, len(run._calls)) == ("generate", 2)
        run.end()
        ends = await asyncio.gather(*calls, return_exceptions=True)
        assert all(isinstance(end, asyncio.CancelledError) for end in ends)
        assert (run.phase, run._calls, bench.doing.state) == ("end", [], "load")
        assert bench.doing._num["start"] == bench.doing._num["generate"] == 0

    asyncio.run(scenario())


def test_a_score_says_how_long_it_took_and_travels_as_valid_text(bench: SampleContext, fake: Any) -> None:
    run = run_of(bench, fake)
    answer = Answer(segment=segment(5, 6), finish_reason="length")
    assert asyncio.run(run.score("a\ud800", answer)).value == 1.0
    assert bench.rewards.asked == [("a?", "length", 2)]  # type: ignore[attr-defined]
    assert run.timings["score_s"] == bench.score_wait_s == 1.0
    assert run.phase == "score"
    with pytest.raises(TypeError, match="must be text"):
        printable(5)  # type: ignore[arg-type]


def test_slices_of_the_timeline_are_never_empty(bench: SampleContext, fake: Any) -> None:
    run = run_of(bench, fake)
    start_s = bench.tracer.now_s() + 100.0
    assert run._trace("x", start_s) == pytest.approx(start_s + sample_module.SHORTEST_S / 2, abs=1e-9)


def test_a_slice_of_the_timeline_is_lengthened_to_what_the_timeline_can_show_and_no_further() -> None:
    assert 1e-6 < sample_module.SHORTEST_S < 1e-5, "the timeline counts in microseconds"


@pytest.mark.parametrize(
    ("made", "end", "limit", "expected"),
    [
        (segment(7, EOS), "stop", 9, ("stop", "end_of_sequence", EOS)),
        (segment(7, 4), "stop", 9, ("stop", "stop_token", 4)),
        (segment(7, 8), "length", 2, ("length", "length", None)),
        (segment(*[5] * 17), "length", 90, ("length", "context", None)),
        (segment(7, 8), "stop", 9, ("stop", "stop_token", 8)),  # the engine knows a stop token that this side does not
        (segment(7, 8), "length", 9, ("length", "length", None)),
        (segment(7, 4), "length", 9, ("length", "length", None)),
        (segment(7, 8), "stop", 2, ("stop", "stop_token", 8)),
    ],
)
def test_the_answer_says_what_ended_it(
    bench: SampleContext, fake: Any, made: Segment, end: str, limit: int, expected: tuple[str, str, int | None]
) -> None:
    bench.engine.planned = [(made, end)]  # type: ignore[attr-defined]
    sampling = Sampling(max_new_tokens=limit, stop_token_ids=(4,))
    answer = generated(run_of(bench, fake, is_resumable=False, sampling=sampling))
    assert (answer.finish_reason, answer.ended_by, answer.stop_token) == expected
    assert answer.is_trainable


def test_a_call_has_stop_tokens_and_a_temperature_of_its_own(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [(segment(7, 6), "stop"), (segment(7, 4), "stop")]  # type: ignore[attr-defined]
    sampling = Sampling(max_new_tokens=9, stop_token_ids=(4,), temperature=0.7)
    run = run_of(bench, fake, is_resumable=False, sampling=sampling)
    own = generated(run, stop_token_ids=[6], temperature=0.0)
    usual = generated(run)
    first, second = (request.sampling for request in bench.engine.requests)  # type: ignore[attr-defined]
    assert (first.stop_token_ids, first.temperature) == ((6, EOS), 0.0)
    assert (second.stop_token_ids, second.temperature) == ((4, EOS), 0.7)
    assert (own.stop_token, own.is_trainable) == (6, False)
    assert (usual.stop_token, usual.is_trainable) == (4, True)


def test_a_transcript_is_a_prompt_and_one_that_fills_the_context_ends_the_episode(
    bench: SampleContext, fake: Any
) -> None:
    bench.engine.planned = [(segment(7), "length")]  # type: ignore[attr-defined]
    run = run_of(bench, fake, is_resumable=False)
    transcript = Transcript(PROMPT)
    transcript.sampled(asyncio.run(run.generate(transcript)))
    transcript.given([5] * 16)
    answer = asyncio.run(run.generate(transcript))
    assert len(bench.engine.requests) == 1  # type: ignore[attr-defined]
    assert bench.engine.requests[0].prompt_P.tolist() == PROMPT.tolist()  # type: ignore[attr-defined]
    assert (len(answer.segment), answer.finish_reason, answer.ended_by) == (0, "length", "context")


def test_a_first_prompt_that_does_not_fit_is_the_engines_to_refuse(bench: SampleContext, fake: Any) -> None:
    bench.engine.planned = [UserError("no room")]  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="no room"):
        asyncio.run(run_of(bench, fake, is_resumable=False).generate(np.ones(30, np.int32)))


def test_a_trajectory_is_scored_by_its_own_end_and_sampled_tokens(bench: SampleContext, fake: Any) -> None:
    transcript = Transcript(PROMPT)
    transcript.sampled(segment(7, 8))
    transcript.given([9])
    asyncio.run(run_of(bench, fake, is_resumable=False).score("text", transcript.close()))
    assert bench.rewards.asked == [("text", "environment", 2)]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("value", "kind"), [(1, "scored"), (float("nan"), "invalid"), (float("-inf"), "invalid")])
def test_a_workflow_makes_its_own_verdict_and_a_number_that_is_none_is_no_zero(
    bench: SampleContext, fake: Any, value: float, kind: str
) -> None:
    verdict = run_of(bench, fake).verdict(value, components={"correct": True, "turns": 3}, scorer="game")
    assert (verdict.kind, verdict.value) == (kind, 1.0 if kind == "scored" else None)
    assert (verdict.components, verdict.scorer) == ({"correct": 1.0, "turns": 3.0}, "game")
    assert verdict.failed_in == ("" if kind == "scored" else "game")
    assert not bench.rewards.asked  # type: ignore[attr-defined]


def test_a_refused_answer_is_not_scored_and_a_masked_one_is_scored_as_masked(bench: SampleContext, fake: Any) -> None:
    stages = [{"kind": "words", "options": {"words": ["bad"]}},
              {"kind": "regex", "action": "mask", "options": {"patterns": ["secret"]}}]  # fmt: skip
    bench.safety = SafetyFilter([SafetyStage.model_validate(one) for one in stages], "rollout.safety")
    scored: list[str] = []

    async def score(task: Any, response: str, *more: Any) -> Verdict:
        scored.append(response)
        return Verdict(kind="scored", value=1.0)

    bench.rewards = SimpleNamespace(score=score)  # type: ignore[assignment]
    run, answer = run_of(bench, fake), Answer(segment=segment(5), finish_reason="stop")
    refused = asyncio.run(run.score("a bad one", answer))
    assert (refused.kind, refused.reason) == ("refused", "the answer was refused by the safety stage words")
    assert asyncio.run(run.score("a secret", answer)).is_scored
    assert scored == ["a [masked]"]


def test_a_stage_of_the_user_that_raises_gives_a_crashed_verdict_and_not_an_exception(
    bench: SampleContext, fake: Any
) -> None:
    def look(text: str, part: str) -> Any:
        raise RuntimeError("my mistake")

    bench.safety = SimpleNamespace(looks_at=lambda part: True, look=look)  # type: ignore[assignment]
    run, answer = run_of(bench, fake, is_resumable=False), Answer(segment=segment(5), finish_reason="stop")
    verdict = asyncio.run(run.score("text", answer))
    assert (verdict.kind, verdict.reason) == ("crashed", "a safety stage raised RuntimeError: my mistake")
    assert not bench.rewards.asked  # type: ignore[attr-defined]

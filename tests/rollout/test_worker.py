"""The rollout worker against a real hub: leases, reports, acknowledgements, cancelling, ends."""

from __future__ import annotations

import asyncio
import json

import pytest

from areal_like.errors import DeadlineExceeded, EngineError
from areal_like.trajectory import Segment
from areal_like.wire import messages as m
from trainer.model.tokenizers import build_tokenizer


def test_an_answer_of_forced_length_goes_on_past_its_end_and_stops_at_its_length(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(7, sampling=m.Sampling(max_new_tokens=9, ignore_eos=True)))
        await r.until(lambda: r.got(m.SampleFinished), "SampleFinished")
        [done] = r.got(m.SampleFinished)
        assert r.engine.requests[0].sampling.stop_token_ids == ()
        assert done.trajectory.finish_reason == "length"
        assert int(done.trajectory.loss_mask_T.sum()) == 9  # the fake model's own end comes after 6

    rig(scenario)


def test_lease_becomes_a_scored_sample_and_is_forgotten_after_its_ack(rig, fake):
    async def scenario(r):
        await r.ready()
        task = fake.task(7, group_id=3, index=1)
        r.lease(task)
        await r.until(lambda: r.got(m.SampleFinished), "SampleFinished")
        [done] = r.got(m.SampleFinished)
        answer = fake.answer_of(task)
        assert (done.lease_id, done.group_id, done.sample_index) == (7, 3, 1)
        assert done.trajectory.tokens_T.tolist() == [ord("a"), ord("b"), *answer]
        assert done.trajectory.finish_reason == "stop"
        assert done.verdict.value == 6.0
        assert done.response_text == "".join(map(chr, answer[:-1]))
        assert {"queue_s", "generate_s", "paused_s", "score_s"} <= set(done.timings)
        await r.until(lambda: not r.worker._book.unacked, "forgetting")
        assert not r.worker._book.running

    rig(scenario)


def test_hello_offers_slots_and_queue_as_capacity(rig):
    async def scenario(r):
        await r.ready(version=None)
        await r.until(lambda: r.got(m.Hello), "Hello")
        assert r.got(m.Hello)[0].capacity == 4 + 3

    rig(scenario, queue_samples=3)


def test_question_to_the_reward_service_carries_row_text_and_length(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task())
        await r.until(lambda: r.questions, "question")
        question = r.questions[0]
        assert question.row == {"prompt": "ab", "answer": "x"}
        assert (question.num_tokens, question.finish_reason, len(question.response)) == (6, "stop", 5)

    rig(scenario)


def test_without_a_reward_service_the_verdict_is_invalid(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task())
        await r.until(lambda: r.got(m.SampleFinished), "SampleFinished")
        verdict = r.got(m.SampleFinished)[0].verdict
        assert (verdict.kind, verdict.reason) == (
            "invalid",
            "there is no reward service, because reward.scorers is empty",
        )

    rig(scenario, with_rewards=False)


def test_samples_of_a_group_share_their_prompt_and_eval_rows_do_not_share_with_groups(rig, fake):
    async def scenario(r):
        await r.ready()
        eval_sampling = m.Sampling(temperature=0.0, max_new_tokens=100)
        r.lease(fake.task(1), fake.task(2, index=1), fake.task(3, purpose="eval", prompt="z", sampling=eval_sampling))
        await r.until(lambda: len(r.got(m.SampleFinished)) == 3, "three samples")
        keys = {request.prompt_P.tolist()[0]: request.share_key for request in r.engine.requests}
        assert [request.share_key for request in r.engine.requests][:2] == [keys[ord("a")]] * 2
        assert keys[ord("z")] != keys[ord("a")]
        assert [request.sampling.temperature for request in r.engine.requests] == [1.0, 1.0, 0.0]

    rig(scenario)


def test_finished_sample_is_resent_until_it_is_acknowledged(rig, fake):
    async def scenario(r):
        await r.ready()
        r.acks = False
        r.lease(fake.task(4))
        await r.until(lambda: len(r.got(m.SampleFinished)) >= 3, "resending")
        r.acks = True
        await r.until(lambda: not r.worker._book.unacked, "ack")
        first, *others = r.got(m.SampleFinished)
        assert all(again.trajectory.tokens_T.tolist() == first.trajectory.tokens_T.tolist() for again in others)
        assert len(r.questions) == 1

    rig(scenario, resend_s=0.02)


def test_repeated_lease_and_ack_are_harmless(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(3)
        task = fake.task(5)
        r.lease(task, task)
        r.lease(task)
        await r.until(lambda: r.engine.num_tokens == 3, "three tokens")
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "SampleFinished")
        r.send(m.SampleAck(lease_ids=(5, 5, 99)))
        r.lease(fake.task(6))
        await r.until(lambda: len(r.got(m.SampleFinished)) == 2, "next lease")
        assert len(r.engine.requests) == 2
        await r.until(lambda: r.beat().counters.get("duplicate_leases") == 2, "count")

    rig(scenario)


def test_lease_of_a_finished_sample_is_not_made_again(rig, fake):
    async def scenario(r):
        await r.ready()
        r.acks = False
        r.lease(fake.task(5))
        await r.until(lambda: r.got(m.SampleFinished), "SampleFinished")
        r.lease(fake.task(5))
        await r.until(lambda: r.beat().counters.get("duplicate_leases") == 1, "count")
        assert len(r.engine.requests) == 1

    rig(scenario)


def test_progress_reports_join_to_the_answer_without_gap_or_overlap(rig, fake):
    async def scenario(r):
        await r.ready()
        tasks = [fake.task(1), fake.task(2, index=1)]
        r.engine.length = 40
        r.holds_verdicts = True
        r.lease(*tasks)
        for limit in (0, 5, 5, 17, 40):
            r.engine.allow(limit)
            await r.until(lambda at=limit: all(len(r.reports.get(k, (0, ()))[1]) >= at for k in (1, 2)), "report")
        for task in tasks:
            start, known = r.reports[task.lease_id]
            assert (start, known.tokens_R.tolist()) == (0, fake.answer_of(task, 40))
        await r.until(lambda: len(r.questions) == 2, "questions")
        for question in r.questions:
            r.give_verdict(question)
        await r.until(lambda: len(r.got(m.SampleFinished)) == 2, "finished")
        for done in r.got(m.SampleFinished):
            assert done.trajectory.tokens_T[2:].tolist() == r.reports[done.lease_id][1].tokens_R.tolist()

    rig(scenario)


def test_nothing_is_reported_while_nothing_is_new(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(3)
        r.lease(fake.task())
        await r.until(lambda: len(r.reports.get(1, (0, ()))[1]) == 3, "report")
        num_reports, num_beats = len(r.got(m.Progress)), r.hub.counters["received"]
        await r.until(lambda: r.hub.counters["received"] >= num_beats + 3, "heartbeats")
        assert len(r.got(m.Progress)) == num_reports

    rig(scenario)


def test_cancelled_lease_ends_and_nothing_is_said_of_it(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(3)
        r.lease(fake.task(1), fake.task(2, index=1))
        await r.until(lambda: r.engine.num_tokens == 6, "tokens")
        r.send(m.CancelLeases(lease_ids=(1, 77)))
        await r.until(lambda: len(r.engine.live) == 1, "freed slot")
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "the other one")
        assert [done.lease_id for done in r.got(m.SampleFinished)] == [2]
        assert not r.got(m.SampleReturned)

    rig(scenario)


def test_cancelling_a_finished_sample_stops_its_resending(rig, fake):
    async def scenario(r):
        await r.ready()
        r.acks = False
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        r.send(m.CancelLeases(lease_ids=(1,)))
        await r.until(lambda: not r.worker._book.unacked, "forgotten")

    rig(scenario)


def test_segments_cut_and_continued_elsewhere_give_the_whole_answer_once(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.length = 10
        prefix, lease_id = Segment.empty(), 1
        while not r.got(m.SampleFinished):
            assert lease_id < 9
            r.lease(fake.task(lease_id, prefix=prefix, segment_tokens=4))
            await r.until(
                lambda k=lease_id: any(x.lease_id == k for x in r.got(m.SampleReturned) + r.got(m.SampleFinished)),
                "end",
            )
            start, new = r.reports.get(lease_id, (0, Segment.empty()))
            if not r.got(m.SampleFinished):
                assert r.got(m.SampleReturned)[-1].reason == "segment"
                assert start == len(prefix)
                assert len(new) == 4
                prefix, lease_id = prefix.joined(new), lease_id + 1
        [done] = r.got(m.SampleFinished)
        assert done.trajectory.tokens_T[2:].tolist() == fake.answer_of(fake.task(), 10)
        assert done.verdict.value == 10.0
        assert lease_id == 3

    rig(scenario)


def test_reports_of_a_continued_answer_start_after_its_prefix(rig, fake):
    async def scenario(r):
        await r.ready()
        task = fake.task()
        prefix = fake.segment([(token, -0.5, 0) for token in fake.answer_of(task)[:2]])
        r.engine.allow(4)
        r.lease(fake.task(prefix=prefix))
        await r.until(lambda: r.got(m.Progress), "report")
        r.engine.allow(100)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert r.got(m.Progress)[0].items[0].start == 2
        assert r.engine.requests[0].prefix.tokens_R.tolist() == prefix.tokens_R.tolist()
        assert r.got(m.SampleFinished)[0].trajectory.tokens_T[2:].tolist() == fake.answer_of(task)

    rig(scenario)


@pytest.mark.parametrize(
    ("length", "bound", "context", "reason"), [(6, 100, 1000, "stop"), (50, 6, 1000, "length"), (50, 100, 8, "length")]
)
def test_answer_already_complete_in_its_prefix_is_only_scored(rig, fake, length, bound, context, reason):
    async def scenario(r):
        await r.ready()
        task = fake.task(sampling=m.Sampling(max_new_tokens=bound))
        whole = fake.segment([(token, -0.5, 0) for token in fake.answer_of(task, length)[:6]])
        r.lease(fake.task(prefix=whole, sampling=m.Sampling(max_new_tokens=bound)))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        [done] = r.got(m.SampleFinished)
        assert done.trajectory.tokens_T[2:].tolist() == whole.tokens_R.tolist()
        assert done.trajectory.finish_reason == reason
        assert r.engine.requests == []

    rig(scenario, engine=lambda: fake.Engine(max_context=context))


@pytest.mark.parametrize(
    ("prompt", "words"),
    [("", "empty"), ("a" * 1000, "no room"), ({"question": "ab"}, "question"), ({"messages": [1]}, "chat template")],
)
def test_row_that_cannot_become_a_prompt_is_rejected_in_words(rig, fake, prompt, words):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1, prompt=prompt), fake.task(2, index=1))
        await r.until(lambda: r.got(m.SampleReturned) and r.got(m.SampleFinished), "both ends")
        [back] = r.got(m.SampleReturned)
        assert back.reason == "rejected"
        assert words in back.detail
        assert [done.lease_id for done in r.got(m.SampleFinished)] == [2]

    rig(scenario)


def test_character_the_tokenizer_lacks_rejects_that_sample_in_words_and_the_worker_goes_on(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1, prompt="1+Ü="), fake.task(2, index=1, prompt="1+2="))
        await r.until(lambda: r.got(m.SampleReturned) and r.got(m.SampleFinished), "both ends")
        [back] = r.got(m.SampleReturned)
        assert back.reason == "rejected"
        assert back.detail.startswith("the tokenizer cannot encode the prompt: it has no token for 'Ü'")
        assert [done.lease_id for done in r.got(m.SampleFinished)] == [2]
        assert "workflow_crashes" not in r.beat().counters

    rig(scenario, tokenizer=build_tokenizer("characters:running_sum", None))


def test_leases_beyond_twice_the_capacity_go_back(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(0)
        r.lease(*[fake.task(lease_id, group_id=lease_id) for lease_id in range(20)])
        await r.until(lambda: len(r.got(m.SampleReturned)) == 4, "returned")
        assert {back.reason for back in r.got(m.SampleReturned)} == {"drain"}
        assert {back.lease_id for back in r.got(m.SampleReturned)} == {16, 17, 18, 19}

    rig(scenario)


def test_engine_failure_ends_the_worker_without_a_goodbye(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(2)
        r.lease(fake.task())
        await r.until(lambda: r.engine.num_tokens == 2, "tokens")
        r.engine.failure = EngineError("out of memory")
        r.engine.moved.set()
        with pytest.raises(EngineError, match="out of memory"):
            await r.task
        assert r.engine.is_closed
        assert not r.got(m.Goodbye)

    rig(scenario)


def test_any_other_error_of_the_engine_is_an_engine_failure_too(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.failure = RuntimeError("shape mismatch")
        r.lease(fake.task())
        with pytest.raises(EngineError, match="RuntimeError: shape mismatch"):
            await r.task

    rig(scenario)


def test_shutdown_hands_running_work_back_and_waits_for_the_ack_of_finished_work(rig, fake):
    async def scenario(r):
        await r.ready()
        r.acks = False
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        r.engine.allow(3)
        r.lease(fake.task(2, index=1), fake.task(3, index=2, min_version=9))
        await r.until(lambda: r.engine.num_tokens == 6 + 3, "tokens")
        r.send(m.Shutdown(reason="done", deadline_s=20.0))
        await r.until(lambda: len(r.got(m.SampleReturned)) == 2, "handed back")
        assert {(back.lease_id, back.reason) for back in r.got(m.SampleReturned)} == {(2, "drain"), (3, "drain")}
        assert r.reports[2][1].tokens_R.tolist() == fake.answer_of(fake.task(2, index=1))[:3]
        assert not r.task.done()
        r.lease(fake.task(4, index=3))
        await r.until(lambda: len(r.got(m.SampleReturned)) == 3, "a lease that came too late")
        r.send(m.SampleAck(lease_ids=(1,)))
        await r.task
        await r.until(lambda: r.got(m.Goodbye), "Goodbye")
        assert r.got(m.Goodbye)[0].reason == "done"

    rig(scenario)


def test_shutdown_still_sends_a_sample_whose_verdict_comes_in_time(rig, fake):
    async def scenario(r):
        await r.ready()
        r.holds_verdicts = True
        r.lease(fake.task(1))
        await r.until(lambda: r.questions, "question")
        r.send(m.Shutdown(reason="done", deadline_s=20.0))
        await r.until(lambda: r.worker._is_leaving, "leaving")
        r.give_verdict(r.questions[0])
        await r.task
        assert [done.lease_id for done in r.got(m.SampleFinished)] == [1]

    rig(scenario)


def test_shutdown_ends_within_its_deadline_when_nobody_acknowledges_or_scores(rig, fake):
    async def scenario(r):
        await r.ready()
        r.acks = False
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        r.holds_verdicts = True
        r.lease(fake.task(2, index=1))
        await r.until(lambda: len(r.questions) == 2, "question")
        r.send(m.Shutdown(reason="done", deadline_s=0.5))
        await r.task
        await r.until(lambda: r.got(m.Goodbye), "Goodbye")
        assert [(back.lease_id, back.reason) for back in r.got(m.SampleReturned)] == [(2, "drain")]
        assert r.reports[2][1].tokens_R.tolist() == fake.answer_of(fake.task(2, index=1))

    rig(scenario)


def test_sigterm_is_an_orderly_end(rig, fake):
    async def scenario(r):
        await r.ready()
        r.engine.allow(3)
        r.lease(fake.task(1))
        await r.until(lambda: r.engine.num_tokens == 3, "tokens")
        r.stop.set()
        await r.task
        await r.until(lambda: r.got(m.Goodbye), "Goodbye")
        assert len(r.reports[1][1]) == 3

    rig(scenario)


def test_silent_controller_ends_the_worker_with_a_reason(rig):
    async def scenario(r):
        await r.ready()
        r.players[0].cancel()
        with pytest.raises(DeadlineExceeded, match="the controller"):
            await r.task

    rig(scenario, controller_silence_s=0.3)


def test_worker_given_up_and_back_again_drops_unfinished_work_and_resends_finished_work(rig, fake):
    async def scenario(r):
        await r.ready()
        r.acks = False
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        r.engine.allow(3)
        r.lease(fake.task(2, index=1))
        await r.until(lambda: r.engine.num_tokens == 9, "tokens")
        r.hub.forget("rollout-0")
        await r.until(lambda: len(r.got(m.SampleFinished)) == 2, "resent")
        await r.until(lambda: len(r.got(m.VersionLoaded)) == 2, "its version reported again")
        assert not r.engine.live
        r.engine.allow(100)
        r.acks = True
        r.lease(fake.task(3, index=1))
        await r.until(lambda: any(x.lease_id == 3 for x in r.got(m.SampleFinished)), "new work")
        assert not any(x.lease_id == 2 for x in r.got(m.SampleFinished))

    rig(scenario)


def test_heartbeat_names_what_the_worker_does(rig, fake):
    async def scenario(r):
        await r.ready()
        await r.until(lambda: r.beat().state == "wait:work", "wait:work")
        r.engine.allow(3)
        r.holds_verdicts = True
        r.lease(fake.task(1))
        await r.until(lambda: r.beat().state == "generate", "generate")
        r.engine.allow(100)
        await r.until(lambda: r.beat().state == "wait:score", "wait:score")
        await r.until(lambda: r.questions, "the question")
        r.give_verdict(r.questions[0])
        await r.until(lambda: r.beat().counters.get("samples") == 1.0, "samples")
        await r.until(lambda: r.beat().counters.get("sent_finished") == 1.0, "sent")
        counters = r.beat().counters
        assert {"tokens", "busy_s", "idle_s", "paused_s", "score_wait_s"} <= set(counters)

    rig(scenario)


def test_trace_has_a_span_per_part_of_a_samples_life(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        r.worker._bench.tracer.flush()
        text = (r.tmp_path / "w.trace.jsonl").read_text()
        for name in ("generate", "score", "load_version", "stage", "pause"):
            assert f'"name":"{name}"' in text

    rig(scenario)


def test_arrow_leaves_the_generation_of_a_finished_sample_and_its_name_goes_to_the_reward_service(rig, fake):
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1, group_id=6, index=2))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        r.worker._bench.tracer.flush()
        events = [json.loads(line) for line in (r.tmp_path / "w.trace.jsonl").read_text().splitlines()]
        (start,) = [event for event in events if event["ph"] == "s"]
        assert start["name"] == "g6.2"
        (slice_,) = [
            event
            for event in events
            if event["ph"] == "X" and event["name"] == "generate" and event["tid"] == start["tid"]
        ]
        assert slice_["args"]["group"] == 6
        assert slice_["ts"] < start["ts"] < slice_["ts"] + slice_["dur"]
        assert r.questions[0].arrow == "g6.2"

    rig(scenario)


def test_time_in_which_nothing_generates_is_reported_by_its_cause(rig, fake):
    async def scenario(r):
        await r.ready()
        await r.until(lambda: r.beat().counters.get("wait_work_s", 0.0) > 0.1, "waits for work")
        assert r.beat().counters["wait_score_s"] == 0.0
        r.holds_verdicts = True
        r.lease(fake.task(1))
        await r.until(lambda: r.beat().counters["wait_score_s"] > 0.1, "waits for its score")
        work_s = r.beat().counters["wait_work_s"]
        await r.until(lambda: r.beat().counters["wait_score_s"] > 0.3, "goes on waiting")
        assert r.beat().counters["wait_work_s"] == work_s
        r.give_verdict(r.questions[0])
        await r.until(lambda: r.beat().counters["wait_work_s"] > work_s, "work again")

    rig(scenario)


def test_many_samples_flow_while_verdicts_are_slow(rig, fake):
    async def scenario(r):
        await r.ready()
        r.holds_verdicts = True
        r.lease(*[fake.task(k, group_id=k) for k in range(8)])
        await r.until(lambda: len(r.questions) == 8, "all generated while none is scored")
        for question in reversed(r.questions):
            r.give_verdict(question)
        await r.until(lambda: len(r.got(m.SampleFinished)) == 8, "finished")
        await asyncio.sleep(0)
        assert len({done.lease_id for done in r.got(m.SampleFinished)}) == 8

    rig(scenario)

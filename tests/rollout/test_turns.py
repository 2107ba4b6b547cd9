"""Checkpoints of an episode: what is reported after a turn, and that another worker goes on as if nothing happened."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from areal_like.errors import UserError
from areal_like.trajectory import Segment
from areal_like.turn_checkpoint import MAX_STATE_BYTES, TurnCheckpoint
from areal_like.wire import messages as m
from rollout.transcript import Answer, Transcript
from rollout.turns import Turns
from rollout.workflow import Sample, SingleTurn


class FourTurns:
    """Three tokens a turn, then the number of the turn as the environment's answer. `gates` hold a turn back."""

    is_resumable = False

    def __init__(self, *gated: int) -> None:
        self.gates = {turn: asyncio.Event() for turn in gated}
        self.began_at: list[int] = []

    async def run(self, task: Any, tools: Any) -> Sample:
        before = tools.resumed
        transcript = (
            before.transcript if before else Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        )
        turn = before.state["turn"] if before else 0
        self.began_at.append(turn)
        while turn < 4:
            if turn in self.gates:
                await self.gates[turn].wait()
            transcript.sampled(await tools.generate(transcript, max_new_tokens=3))
            transcript.given(str(turn))
            turn += 1
            tools.checkpoint(transcript, {"turn": turn})
        return Sample(trajectory=transcript.close(), verdict=tools.verdict(1.0), response_text="")


def same(one: Any, other: Any) -> bool:
    names = ("tokens_T", "loss_mask_T", "logprobs_T", "versions_T")
    return all(np.array_equal(getattr(one, name), getattr(other, name)) for name in names)


def test_an_episode_whose_worker_leaves_goes_on_elsewhere_from_its_last_turn(rig: Any, fake: Any) -> None:
    held, rest, whole = FourTurns(2), FourTurns(), FourTurns()

    async def until_it_leaves(r: Any) -> None:
        await r.ready()
        r.lease(fake.task(1, seed=7))
        await r.until(lambda: len(r.reports.get(1, (0, ()))[1]) == 6, "two turns reported")
        r.send(m.Shutdown(reason="scaled down", deadline_s=1.0))
        await r.until(lambda: r.got(m.SampleReturned), "returned")
        assert r.got(m.SampleReturned)[0].reason == "drain"
        newest = [item.checkpoint for message in r.got(m.Progress) for item in message.items][-1]
        assert newest.given_tokens_G.tolist() == [ord(one) for one in "ab01"]
        assert newest.given_places_G.tolist() == [0, 0, 3, 6]
        held.left = (r.reports[1][1], newest)  # type: ignore[attr-defined]

    async def to_the_end(r: Any, task: Any) -> Any:
        await r.ready()
        r.lease(task)
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        return r.got(m.SampleFinished)[0].trajectory

    made: dict[str, Any] = {}

    async def elsewhere(r: Any) -> None:
        prefix, checkpoint = held.left  # type: ignore[attr-defined]
        made["rest"] = await to_the_end(r, fake.task(2, seed=7, prefix=prefix, checkpoint=checkpoint))
        assert len(r.engine.requests) == 2
        assert r.reports.get(2, (6, ()))[0] == 6, "reports go on where the lease began"

    async def at_once(r: Any) -> None:
        made["whole"] = await to_the_end(r, fake.task(3, seed=7))

    rig(until_it_leaves, workflow=held)
    rig(elsewhere, workflow=rest)
    rig(at_once, workflow=whole)
    assert (held.began_at, rest.began_at, whole.began_at) == ([0], [2], [0])
    assert same(made["rest"], made["whole"])


def test_a_prefix_without_a_checkpoint_is_no_beginning(rig: Any, fake: Any) -> None:
    workflow = FourTurns()

    async def scenario(r: Any) -> None:
        await r.ready()
        r.lease(fake.task(1, prefix=segment(5, 6)))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        assert len(r.engine.requests) == 4

    rig(scenario, workflow=workflow)
    assert workflow.began_at == [0]


# ------------------------------------------------------------ without a worker


def segment(*tokens: int, version: int = 0) -> Segment:
    count = len(tokens)
    return Segment(np.array(tokens, np.int32), np.full(count, -0.5, np.float32), np.full(count, version, np.int32))


def test_any_transcript_is_made_again_from_its_sampled_tokens_and_its_checkpoint() -> None:
    rng = np.random.default_rng(3)
    for _ in range(300):
        transcript = Transcript(rng.integers(0, 50, rng.integers(1, 4)))
        for version in range(rng.integers(0, 6)):
            if rng.random() < 0.6:
                transcript.sampled(segment(*rng.integers(0, 50, rng.integers(1, 4)).tolist(), version=version))
            else:
                transcript.given(rng.integers(0, 50, rng.integers(0, 4)))
        again = Transcript.restored(transcript.sampled_tokens, transcript.checkpoint(4, b""))
        assert again.tokens_T.tolist() == transcript.tokens_T.tolist()
        assert (again.num_sampled, again.num_turns) == (transcript.num_sampled, 4)
        assert again.last_version == transcript.last_version
        if transcript.num_sampled:
            assert same(again.close("stop"), transcript.close("stop"))


def turns(**task: Any) -> Turns:
    made: Any = SimpleNamespace(**{"prefix": Segment.empty(), "checkpoint": None, **task})
    return Turns(made, is_resumable=False)


def test_state_that_cannot_travel_is_refused() -> None:
    transcript = Transcript([1])
    state: Any
    for state, words in (({"x": object()}, "JSON-like"), ("x" * MAX_STATE_BYTES, "bytes, but at most")):
        with pytest.raises(UserError, match=words):
            turns().take(transcript, state, 1)


def test_state_of_the_largest_size_is_kept() -> None:
    text = "x" * (MAX_STATE_BYTES - 5)  # and five bytes of MessagePack say that it is a text of this length
    made, transcript = turns(), Transcript([1])
    made.take(transcript, text, 1)
    assert made.checkpoint is not None
    assert len(made.checkpoint.state) == MAX_STATE_BYTES
    with pytest.raises(UserError, match=f"has {MAX_STATE_BYTES + 1} bytes"):
        made.take(transcript, text + "x", 1)


def test_a_checkpoint_that_does_not_go_on_from_the_last_is_refused() -> None:
    made, transcript = turns(), Transcript([1])
    transcript.sampled(segment(7, 8))
    made.take(transcript, None, 1)
    other = Transcript([1])
    other.sampled(segment(7))
    with pytest.raises(UserError, match="must start with the tokens of the previous checkpoint"):
        made.take(other, None, 2)
    other.sampled(segment(8, 9))
    made.take(other, None, 2)
    other.sampled(segment(4))
    assert made.new_tokens.tokens_R.tolist() == [7, 8, 9], "as it was at the checkpoint"
    made.take(other, None, 3)
    assert made.new_tokens.tokens_R.tolist() == [7, 8, 9, 4]


def test_a_workflow_of_one_answer_takes_no_checkpoints(rig: Any, fake: Any) -> None:
    class Checkpoints(SingleTurn):
        async def run(self, task: Any, tools: Any) -> Sample:
            tools.checkpoint(Transcript([1]))
            return await super().run(task, tools)

    async def scenario(r: Any) -> None:
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleReturned), "returned")
        assert "cannot save its own checkpoints" in r.got(m.SampleReturned)[0].detail

    rig(scenario, workflow=Checkpoints())


def test_damaged_checkpoints_are_named() -> None:
    state = TurnCheckpoint(
        given_places_G=np.array([9], np.int32), given_tokens_G=np.array([1], np.int32), num_turns=1, state=b"\xc0"
    )
    with pytest.raises(UserError, match="a given token after 9 sampled tokens, but there are only 2"):
        turns(prefix=segment(1, 2), checkpoint=state).resumed(lambda text: np.zeros(0, np.int32))
    good = msgspec.structs.replace(state, given_places_G=np.array([0], np.int32), state=b"\xc1")
    with pytest.raises(UserError, match="cannot be read"):
        turns(prefix=segment(1, 2), checkpoint=good).resumed(lambda text: np.zeros(0, np.int32))


@pytest.mark.parametrize(
    "fields",
    [
        {"given_places_G": np.array([1, 0], np.int32), "given_tokens_G": np.zeros(2, np.int32)},
        {"given_places_G": np.array([-1], np.int32), "given_tokens_G": np.zeros(1, np.int32)},
        {"given_places_G": np.zeros(2, np.int32), "given_tokens_G": np.zeros(1, np.int32)},
        {"given_places_G": np.zeros(1, np.int64), "given_tokens_G": np.zeros(1, np.int32)},
        {"num_turns": -1},
        {"state": b"x" * (MAX_STATE_BYTES + 1)},
    ],
)
def test_a_checkpoint_is_checked_when_it_is_made(fields: dict[str, Any]) -> None:
    empty = np.zeros(0, np.int32)
    with pytest.raises(ValueError, match=r"given tokens|given token|num_turns"):
        TurnCheckpoint(**{"given_places_G": empty, "given_tokens_G": empty, "num_turns": 0, "state": b"", **fields})


def test_a_lease_reports_what_it_sampled_up_to_its_newest_checkpoint() -> None:
    before = Transcript([1, 2])
    before.sampled(segment(7, 8, version=3))
    before.given([9])
    checkpoint = before.checkpoint(1, msgspec.msgpack.encode("first"))
    task: Any = SimpleNamespace(prefix=before.sampled_tokens, checkpoint=checkpoint)
    made = Turns(task, is_resumable=False)
    assert (made.num_before, made.num_turns, made.last_version, len(made.new_tokens)) == (2, 1, 3, 0)
    assert made.checkpoint is checkpoint
    resumed = made.resumed(lambda text: np.zeros(0, np.int32))
    assert resumed is not None
    assert resumed.state == "first"
    transcript = resumed.transcript
    for turn, token in ((2, 10), (3, 11)):
        transcript.sampled(segment(token, version=4))
        made.take(transcript, turn, turn)
    transcript.sampled(segment(12, version=4))
    newest = made.checkpoint
    assert newest is not None
    assert made.new_tokens.tokens_R.tolist() == [10, 11], "the third token is not durable yet"
    assert (newest.num_turns, msgspec.msgpack.decode(newest.state)) == (3, 3)
    assert newest.given_places_G.tolist() == [0, 0, 2]


def test_answers_keep_their_numbers_and_ends_when_an_episode_moves() -> None:
    """Number 1 was an answer without tokens, and no token was given between the answers 2 and 3."""
    before = Transcript([1, 2])
    for number, tokens, given in ((0, (7, 8), [9]), (2, (10,), []), (3, (11, 12), [13])):
        before.sampled(Answer(segment=segment(*tokens, version=3), finish_reason="stop", number=number))
        before.given(given)
    moved = Transcript.restored(before.sampled_tokens, before.checkpoint(4, b"\xc0"))
    moved.sampled(Answer(segment=segment(14, version=4), finish_reason="stop", number=4))
    closed = moved.close()
    assert closed.tokens_T.tolist() == [1, 2, 7, 8, 9, 10, 11, 12, 13, 14]
    assert closed.answer_ids_A is not None
    assert closed.answer_ends_A is not None
    assert closed.answer_ids_A.tolist() == [0, 2, 3, 4]
    assert closed.answer_ends_A.tolist() == [2, 3, 5, 6]


def test_answers_that_do_not_match_the_sampled_tokens_are_refused() -> None:
    before = Transcript([1, 2])
    before.sampled(Answer(segment=segment(7, 8, version=3), finish_reason="stop", number=0))
    before.given([9])
    checkpoint = before.checkpoint(1, b"\xc0")
    for other in (
        msgspec.structs.replace(checkpoint, answer_ends_A=np.array([1], np.int32)),
        msgspec.structs.replace(checkpoint, given_places_G=np.array([0, 0, 1], np.int32)),
    ):
        with pytest.raises(ValueError, match="do not match its 2 sampled tokens"):
            Transcript.restored(before.sampled_tokens, other)


def test_a_checkpoint_without_answers_is_divided_at_its_given_tokens() -> None:
    before = Transcript([1, 2])
    before.sampled(segment(7, 8, version=3))
    before.given([9])
    before.sampled(segment(10, version=3))
    checkpoint = before.checkpoint(2, b"\xc0")
    assert checkpoint.answer_ids_A is None
    moved = Transcript.restored(before.sampled_tokens, checkpoint)
    assert moved.tokens_T.tolist() == [1, 2, 7, 8, 9, 10]
    closed = moved.close()
    assert closed.answer_ends_A is not None
    assert closed.answer_ends_A.tolist() == [2, 3]
    empty = Transcript.restored(Segment.empty(), Transcript([1, 2]).checkpoint(0, b"\xc0"))
    assert (empty.tokens_T.tolist(), empty.num_sampled) == ([1, 2], 0)


@pytest.mark.parametrize(("has_checkpoint", "is_resumable"), [(True, True), (False, True), (False, False)])
def test_without_a_checkpoint_of_its_own_an_episode_begins_with_the_sample(
    has_checkpoint: bool, is_resumable: bool
) -> None:
    """A resumable workflow goes on by its tokens alone."""
    prefix = segment(7, 8, version=3)
    task: Any = SimpleNamespace(
        prefix=prefix, checkpoint=Transcript([1]).checkpoint(1, b"") if has_checkpoint else None
    )
    made = Turns(task, is_resumable=is_resumable)
    assert (made.num_before, made.num_turns, made.last_version, made.checkpoint) == (0, 0, -1, None)
    assert made.resumed(lambda text: np.zeros(0, np.int32)) is None

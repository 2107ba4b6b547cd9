"""Several trajectories of one sample: each sampled token is trained on in exactly one of them."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from areal_like.trajectory import Trajectory, check_disjoint
from areal_like.wire import messages as m
from rollout.transcript import Transcript
from rollout.workflow import Sample
from tests.rollout.test_transcript import answer, segment


@given(seed=st.integers(0, 10_000), num_moves=st.integers(1, 40))
def test_any_tree_of_turns_trains_each_sampled_token_once(seed: int, num_moves: int) -> None:
    rng = np.random.default_rng(seed)
    transcripts, paths, sampled = [Transcript([1, 2])], [[1, 2]], []
    for _ in range(num_moves):
        at, move = rng.integers(len(transcripts)), rng.choice(["answer", "given", "fork", "new"])
        tokens = rng.integers(3, 1000, rng.integers(1, 4)).tolist()
        if move == "answer":
            transcripts[at].sampled(answer(*tokens, number=len(sampled)))
            sampled.append(tokens)
        elif move == "given":
            transcripts[at].given(tokens)
        else:
            tokens = paths[at] if move == "fork" else tokens
            transcripts.append(transcripts[at].forked() if move == "fork" else Transcript(tokens))
            paths.append(list(tokens))
            continue
        paths[at] += tokens
    closed = [one.close() for one in transcripts if one.num_sampled]
    check_disjoint(closed)
    assert sum(one.num_sampled for one in closed) == sum(map(len, sampled))
    trained = sorted(token for one in closed for token in one.tokens_T[one.loss_mask_T].tolist())
    assert trained == sorted(token for tokens in sampled for token in tokens)
    assert [one.tokens_T.tolist() for one in transcripts] == paths


def test_an_answer_in_two_trajectories_is_refused_and_the_error_says_how_to_mask_it() -> None:
    first = Transcript([1])
    first.sampled(answer(5, number=0))
    other = first.copied()  # not `forked`: it would train on answer 0 as well
    other.sampled(answer(6, number=1))
    made = {"trajectory": first.close(), "verdict": m.Verdict(kind="scored", value=1.0), "response_text": ""}
    with pytest.raises(ValueError, match="answer 0 of the sample would be trained on twice; continue in a copy"):
        Sample(others=(other.close(),), **made)
    with pytest.raises(ValueError, match="answer 0"):
        m.SampleFinished(
            lease_id=1, group_id=0, sample_index=0, trajectory=made["trajectory"], others=(other.close(),),
            verdict=made["verdict"],
        )  # fmt: skip
    twice = Transcript([1])
    twice.sampled(answer(5, number=3))
    twice.sampled(answer(5, number=3))
    with pytest.raises(ValueError, match="answer 3 "):
        check_disjoint([twice.close()])


def test_several_trajectories_of_unknown_answers_are_refused() -> None:
    by_hand = Trajectory.from_prompt(np.array([1], np.int32), segment(2), "stop")
    check_disjoint([by_hand])
    with pytest.raises(
        ValueError, match="does not record which answers it contains; build each trajectory with a Transcript"
    ):
        check_disjoint([by_hand, by_hand])


@pytest.mark.parametrize(
    ("ends", "ids", "words"),
    [
        ([1, 3], [0], "answer_ids_A has 1 entries, expected 2"),
        ([2, 2], [0, 1], "answer_ends_A must be positive and strictly increasing, and its last entry must be 3,"),
        ([1, 2], [0, 1], "answer_ends_A must be positive"),
        ([1, 3], [0, -1], "must not be negative"),
        (None, [0], "must be passed together"),
    ],
)
def test_answers_that_do_not_cover_the_sampled_tokens_are_refused(ends: object, ids: list[int], words: str) -> None:
    whole = Trajectory.from_prompt(np.array([1], np.int32), segment(2, 3, 4), "stop")
    found = {
        "answer_ends_A": ends if ends is None else np.array(ends, np.int32),
        "answer_ids_A": np.array(ids, np.int32),
    }
    with pytest.raises(ValueError, match=words):
        msgspec.structs.replace(whole, **found)


def test_a_restored_transcript_numbers_its_answers_below_those_to_come() -> None:
    transcript = Transcript([1])
    for number in range(3):
        transcript.sampled(answer(5 + number, number=number))
        transcript.given([9] * (number % 2))
    restored = Transcript.restored(transcript.sampled_tokens, transcript.checkpoint(3, b"\xc0"))
    fork = restored.forked()
    fork.sampled(answer(8, number=3))
    closed = [restored.close(), fork.close()]
    check_disjoint(closed)
    assert closed[0].answer_ids_A is not None
    assert closed[0].answer_ids_A.tolist() == [0, 1, 2]
    assert closed[0].num_sampled == 3


def test_a_fork_refuses_tokens_older_than_those_it_follows() -> None:
    transcript = Transcript([1])
    transcript.sampled(answer(5, version=3, number=0))
    with pytest.raises(ValueError, match="sampled by version 2 cannot follow tokens of version 3"):
        transcript.forked().sampled(answer(6, version=2, number=1))


class BestOfTwo:
    """Two attempts at one prompt, and a sub-agent with a prompt of its own."""

    is_resumable = False

    async def run(self, task, tools):
        main = Transcript(tools.tokens.prompt(task.row), encode=tools.tokens.encode)
        main.sampled(await tools.generate(main, max_new_tokens=2))
        fork = main.forked()
        main.sampled(await tools.generate(main, max_new_tokens=2))
        fork.sampled(await tools.generate(fork, max_new_tokens=3))
        agent = Transcript("b", encode=tools.tokens.encode)
        agent.sampled(await tools.generate(agent, max_new_tokens=1))
        others = (fork.close(), agent.close())
        return Sample(trajectory=main.close(), others=others, verdict=tools.verdict(0.5), response_text="")


class TrainsTwice(BestOfTwo):
    async def run(self, task, tools):
        sample = await super().run(task, tools)
        return Sample(
            trajectory=sample.trajectory, others=(sample.trajectory,), verdict=sample.verdict, response_text=""
        )


def test_a_workflow_hands_over_all_trajectories_of_a_sample_with_one_verdict(rig, fake) -> None:
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleFinished), "finished")
        [done] = r.got(m.SampleFinished)
        assert [one.num_sampled for one in done.trajectories] == [4, 3, 1]
        assert [one.answer_ids_A.tolist() for one in done.trajectories] == [[0, 1], [2], [3]]
        fork = done.others[0]
        assert fork.tokens_T[:4].tolist() == done.trajectory.tokens_T[:4].tolist()
        assert fork.loss_mask_T.tolist() == [False] * 4 + [True] * 3
        assert done.verdict.value == 0.5

    rig(scenario, workflow=BestOfTwo())


def test_a_workflow_that_trains_an_answer_twice_has_its_lease_rejected(rig, fake) -> None:
    async def scenario(r):
        await r.ready()
        r.lease(fake.task(1))
        await r.until(lambda: r.got(m.SampleReturned), "returned")
        [back] = r.got(m.SampleReturned)
        assert back.reason == "rejected"
        assert "ValueError: answer 0 of the sample would be trained on twice" in back.detail

    rig(scenario, workflow=TrainsTwice())

"""What a desk counts, whom it still knows, and which hangs and losses it blames on an episode."""

from __future__ import annotations

from typing import Any

import pytest
from desk_stage import FakeHost, Stage

from areal_like.environment import MAX_ACTION_CHARS, MAX_TURNS, Step
from areal_like.wire.messages import EnvironmentRequest, EpisodeHistory
from services.environment.episode_scheduler import MAX_LOSSES, _fault_of
from services.environment.job import Answered, Begin, Close, Failed


def counters(stage: Stage) -> dict[str, float]:
    return {name.removeprefix("environment."): value for name, value in stage.desk.counters().items()}


def failed(stage: Stage, kind: Any, reason: str = "why") -> None:
    """The process says so of the episode that it was called for last."""
    episode = stage.host.sent[-1].episode
    stage.desk.on_message(stage.host, Failed(episode=episode, kind=kind, reason=reason))  # type: ignore[arg-type]


# ---------------------------------------------------------------- counters


def test_every_answer_duplicate_and_replay_is_counted_once() -> None:
    stage = Stage()
    stage.pool.counters = {"hosts_lost": 2}
    stage.begun()
    stage.ask("a", 0)
    stage.ask("a", 1, "left")
    stage.ask("a", 1, "left")
    stage.answer(Step(observation="wall"))
    stage.ask("a", 0)
    stage.lose(stage.host)
    stage.ask("a", 2, "up")
    for words in ("go", "wall", "sky"):
        stage.answer(Step(observation=words))
    assert counters(stage) == {
        "episodes": 1.0, "processes": 1.0, "hosts_lost": 2.0, "begun": 1.0, "answered": 3.0, "duplicates": 3.0,
        "moved": 1.0, "replayed": 2.0,
    }  # fmt: skip


def test_every_refusal_and_eviction_is_counted_once() -> None:
    stage = Stage(max_episodes=1)
    stage.ask("a", 1)
    stage.ask("a", 1, history=EpisodeHistory(row={}, seed=1))
    stage.begun("a").begun("b")
    stage.ask("b", 1, "left")
    stage.ask("c", 0)
    stage.desk.is_draining = True
    stage.ask("d", 0)
    assert stage.desk.refuse_open() == 1
    assert counters(stage) == {
        "episodes": 0.0, "processes": 1.0, "unknown": 1.0, "invalid": 1.0, "begun": 2.0, "answered": 2.0,
        "evicted": 1.0, "full": 1.0, "draining": 2.0,
    }  # fmt: skip


def test_an_answer_that_cannot_be_delivered_is_counted_and_kept() -> None:
    stage = Stage()
    stage.is_reachable = False
    stage.begun()
    assert counters(stage)["undelivered"] == 1.0
    stage.is_reachable = True
    stage.ask("a", 0)
    assert stage.replies[0] == stage.replies[1]
    assert counters(stage)["undelivered"] == 1.0


def test_a_hang_in_an_async_method_is_tried_again_and_its_answer_says_how_often() -> None:
    stage = Stage(retries=2)
    stage.ask("a", 0)
    failed(stage, "timed_out")
    failed(stage, "timed_out")
    assert [type(message) for message in stage.host.sent] == [Begin] * 3
    stage.answer(Step(observation="go"))
    assert (stage.last.status, stage.last.attempts) == ("answered", 3)
    assert counters(stage)["retries"] == 2.0


@pytest.mark.parametrize("kind", ["crashed", "invalid"])
def test_a_failure_in_the_code_of_the_environment_is_not_tried_again(kind: str) -> None:
    stage = Stage(retries=5)
    stage.ask("a", 0)
    failed(stage, kind, "its code says so")
    assert (stage.last.status, stage.last.reason, stage.last.attempts) == (kind, "its code says so", 1)
    assert [type(message) for message in stage.host.sent] == [Begin]
    assert (counters(stage)[kind], counters(stage).get("retries")) == (1.0, None)


# ---------------------------------------------------------------- clients


def test_another_incarnation_of_a_client_begins_with_nothing_and_the_same_one_goes_on() -> None:
    stage = Stage()
    stage.desk.welcome("rollout-0", "first")
    stage.begun("a")
    stage.ask("a", 0, peer="rollout-1")
    stage.answer(Step(observation="go"))
    stage.desk.welcome("rollout-0", "first")
    assert counters(stage)["episodes"] == 2.0
    stage.desk.welcome("rollout-0", "second")
    assert counters(stage)["episodes"] == 1.0
    stage.ask("a", 1, "left")
    assert (stage.last.status, stage.replies[-1][0]) == ("unknown", "rollout-0")
    stage.ask("a", 1, "left", peer="rollout-1")
    stage.answer(Step(observation="wall"))
    assert (stage.last.status, stage.replies[-1][0]) == ("answered", "rollout-1")


def test_a_client_that_was_dismissed_is_new_when_it_comes_again() -> None:
    stage = Stage()
    stage.desk.welcome("rollout-0", "first")
    stage.desk.dismiss("rollout-0")
    stage.begun("a")
    stage.desk.welcome("rollout-0", "first")
    assert counters(stage)["episodes"] == 0.0


def test_an_episode_that_waits_for_a_process_is_forgotten_with_its_client() -> None:
    stage = Stage()
    hosts, stage.pool.hosts = stage.pool.hosts, []
    for name in ("a", "b", "c"):
        stage.ask(name, 0)
    stage.desk.close_episodes("rollout-0", ("b", "never begun"))
    stage.pool.hosts = hosts
    stage.desk.on_ready()
    assert [message.row["name"] for message in hosts[0].sent if isinstance(message, Begin)] == ["a", "c"]
    stage.desk.on_ready()
    assert len(hosts[0].sent) == 2, "none waits any more"


def test_a_drain_sends_away_only_those_that_wait() -> None:
    stage = Stage().begun("idle").begun("asked")
    stage.ask("asked", 1, "left")
    assert stage.desk.num_open == 1
    assert stage.desk.refuse_open() == 1
    assert (stage.desk.num_open, counters(stage)["episodes"]) == (0, 1.0)
    assert isinstance(stage.host.sent[-1], Close)
    stage.ask("idle", 1, "left")
    stage.answer(Step(observation="wall"))
    assert (stage.last.episode_id, stage.last.status) == ("idle", "answered")


# ---------------------------------------------------------------- processes


def test_a_second_answer_to_one_call_is_ignored() -> None:
    stage = Stage().begun()
    stage.answer(Step(observation="again"))
    stage.answer(Step(observation="and again"))
    assert len(stage.replies) == 1
    stage.ask("a", 1, "left")
    assert len(stage.host.sent) == 2


def test_a_process_is_looked_after_when_an_episode_begins_and_when_it_leaves() -> None:
    stage = Stage().begun("a")
    assert stage.pool.looked_after == [stage.host]
    stage.ask("a", 1, "left")
    stage.answer(Step(observation="wall"))
    assert stage.pool.looked_after == [stage.host]
    stage.desk.close_episodes("rollout-0", ("a",))
    assert stage.pool.looked_after == [stage.host] * 2


def test_a_process_is_lost_to_an_episode_only_while_it_is_called() -> None:
    stage = Stage().begun()
    for _ in range(2 * MAX_LOSSES):
        stage.lose(stage.host)
    stage.ask("a", 1, "left")
    for _ in range(MAX_LOSSES):
        stage.lose(stage.host)
    assert len(stage.replies) == 1
    stage.lose(stage.host)
    assert stage.last.status == "crashed"
    assert (
        stage.last.reason
        == "the process of the episode was lost 9 times; the last reason: it was killed by signal SIGKILL"
    )
    stage.lose(stage.host, culprit=1)
    assert len(stage.replies) == 2, "it has its verdict"


def test_a_lost_process_moves_its_episodes_and_blames_the_one_at_fault() -> None:
    stage = Stage(retries=0)
    stage.ask("bad", 0)
    stage.ask("good", 0)
    host = stage.host
    culprit = host.sent[0].episode
    stage.lose(host, culprit=culprit)
    assert [(one.episode_id, one.status) for _, one in stage.replies] == [("bad", "crashed")]
    assert [message.row["name"] for message in stage.host.sent if isinstance(message, Begin)] == ["good"]
    assert (counters(stage)["moved"], counters(stage)["crashed"]) == (1.0, 1.0)


def test_an_answer_that_comes_after_its_process_was_lost_is_ignored() -> None:
    stage = Stage()
    stage.ask("a", 0)
    old: FakeHost = stage.host
    stage.lose(old)
    late = Answered(episode=old.sent[0].episode, step=Step(observation="late"))
    stage.desk.on_message(old, late)  # type: ignore[arg-type]
    assert stage.replies == []
    stage.answer(Step(observation="go"))
    assert stage.last.step == Step(observation="go")


def test_an_episode_that_is_at_fault_while_nobody_asks_has_its_verdict_for_the_next_turn() -> None:
    stage = Stage(retries=0).begun()
    stage.lose(stage.host, culprit=stage.host.sent[0].episode)
    assert (stage.last.turn, stage.last.status) == (1, "crashed")
    stage.ask("a", 1, "left")
    assert stage.replies[-1] == stage.replies[-2]


def test_a_lost_process_is_nothing_to_episodes_that_have_failed_or_are_forgotten() -> None:
    stage = Stage()
    stage.ask("a", 0)
    failed(stage, "crashed")
    stage.host.episodes.add(99)
    stage.lose(stage.host)
    assert len(stage.replies) == 1
    assert counters(stage).get("moved") is None


def test_an_episode_whose_client_knows_more_goes_on_by_its_history() -> None:
    stage = Stage().begun()
    stage.ask("a", 2, "up")
    assert stage.last.status == "unknown"
    known = tuple(Step(observation=words).digest for words in ("go", "wall"))
    stage.ask("a", 2, "up", EpisodeHistory(row={"name": "a"}, seed=4, actions=("left",), digests=known))
    for words in ("go", "wall", "sky"):
        stage.answer(Step(observation=words))
    assert (stage.last.turn, stage.last.step) == (2, Step(observation="sky"))


# ---------------------------------------------------------------- hangs and histories


@pytest.mark.parametrize("ending", ["without an answer", "while it waits", "after it failed"])
def test_an_episode_that_did_not_end_well_leaves_the_hangs_of_its_row(ending: str) -> None:
    stage = Stage(lambda: 0.0, max_hangs=2, retries=0)

    def begin(name: str) -> None:
        stage.ask(name, 0, history=EpisodeHistory(row={"name": "row"}, seed=4))

    begin("a")
    failed(stage, "timed_out")
    begin("b")
    if ending != "without an answer":
        stage.answer(Step(observation="go"))
        stage.ask("b", 1, "left")
    if ending == "after it failed":
        failed(stage, "crashed")
    stage.desk.close_episodes("rollout-0", ("b",))
    begin("c")
    failed(stage, "timed_out")
    begin("d")
    assert "hung 2 times; the row is quarantined" in stage.last.reason


def fault(turn: int, *, actions: int | None = None, digests: int | None = None, chars: int = 1) -> str:
    history = EpisodeHistory(
        row={}, seed=1, actions=("x",) * (max(turn - 1, 0) if actions is None else actions),
        digests=("",) * (turn if digests is None else digests),
    )  # fmt: skip
    return _fault_of(EnvironmentRequest(episode_id="a", turn=turn, action="x" * chars, history=history), history)


@pytest.mark.parametrize("turn", [0, 1, 2, MAX_TURNS])
def test_a_history_has_an_answer_for_each_turn_and_the_actions_between_them(turn: int) -> None:
    assert fault(turn) == ""
    for actions, digests in ((max(turn - 1, 0) + 1, turn), (max(turn - 1, 0), turn + 1)):
        words = f"turn {turn} does not match a history of {actions} actions and {digests} results"
        assert fault(turn, actions=actions, digests=digests) == words


@pytest.mark.parametrize("turn", [-1, MAX_TURNS + 1])
def test_a_turn_that_no_episode_has_is_refused(turn: int) -> None:
    assert fault(turn) == f"turn {turn} is not between 0 and {MAX_TURNS}"


def test_an_action_is_as_long_as_it_may_be_and_no_longer() -> None:
    assert fault(1, chars=MAX_ACTION_CHARS) == ""
    assert fault(1, chars=MAX_ACTION_CHARS + 1) == f"an action has more than {MAX_ACTION_CHARS} characters"

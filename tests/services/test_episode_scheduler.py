"""Episodes at the desk, with processes that the test plays: order of calls, replays, faults, duplicates, bounds."""

from __future__ import annotations

import random

import pytest
from desk_stage import FakeHost, Stage

from areal_like.environment import Step
from areal_like.wire.messages import EnvironmentReply, EpisodeHistory
from services.environment.episode_scheduler import MAX_LOSSES
from services.environment.job import Act, Answered, Begin, Close, Failed


def test_each_call_is_made_once_and_answered_once() -> None:
    stage = Stage().begun()
    stage.ask("a", 1, "left")
    stage.ask("a", 1, "left")
    assert [type(message) for message in stage.host.sent] == [Begin, Act]
    stage.answer(Step(observation="wall", reward=0.5, is_done=True))
    assert stage.last.step == Step(observation="wall", reward=0.5, is_done=True)
    assert [reply.turn for _, reply in stage.replies] == [0, 1]


def test_an_answer_that_was_lost_is_sent_again_without_another_call() -> None:
    stage = Stage().begun()
    stage.ask("a", 0)
    assert stage.replies[0] == stage.replies[1]
    assert len(stage.host.sent) == 1


def test_a_late_duplicate_of_an_earlier_turn_is_not_answered() -> None:
    stage = Stage().begun()
    stage.ask("a", 1, "left")
    stage.answer(Step(observation="wall"))
    stage.ask("a", 0)
    assert len(stage.replies) == 2


def test_an_episode_of_a_lost_process_is_replayed_and_then_goes_on() -> None:
    stage = Stage().begun()
    stage.ask("a", 1, "left")
    stage.answer(Step(observation="wall"))
    fresh = stage.lose(stage.host)
    assert fresh.sent == [], "nobody asks for it now"
    stage.ask("a", 2, "up")
    assert isinstance(fresh.sent[0], Begin)
    assert (fresh.sent[0].row, fresh.sent[0].seed) == ({"name": "a"}, 4)
    stage.answer(Step(observation="go"))
    stage.answer(Step(observation="wall"))
    assert [message.action for message in fresh.sent[1:]] == ["left", "up"]  # type: ignore[union-attr]
    stage.answer(Step(observation="sky"))
    assert (stage.last.turn, stage.last.step) == (2, Step(observation="sky"))
    assert [reply.turn for _, reply in stage.replies] == [0, 1, 2], "a replay answers nobody"


def test_an_environment_that_replays_differently_is_invalid_and_never_goes_on() -> None:
    stage = Stage().begun()
    fresh = stage.lose(stage.host)
    stage.ask("a", 1, "left")
    stage.answer(Step(observation="another beginning"))
    assert stage.last.status == "invalid"
    assert "not deterministic" in stage.last.reason
    assert isinstance(fresh.sent[-1], Close)


@pytest.mark.parametrize(("retries", "num_begun"), [(0, 1), (2, 3)])
def test_the_episode_at_fault_is_tried_again_and_then_fails(retries: int, num_begun: int) -> None:
    stage = Stage(retries=retries)
    stage.ask("a", 0)
    for _ in range(num_begun):
        assert stage.replies == []
        host = stage.host
        assert [type(message) for message in host.sent] == [Begin]
        stage.lose(host, culprit=host.sent[0].episode)
    assert (stage.last.status, stage.last.attempts) == ("crashed", num_begun)
    assert "SIGKILL" in stage.last.reason


def test_others_of_the_process_are_replayed_however_often_somebody_is_at_fault() -> None:
    stage = Stage(retries=0).begun("good")
    stage.ask("good", 1, "left")
    for number in range(2 * MAX_LOSSES):
        stage.ask(f"bad {number}", 0)
        culprit = next(one.episode for one in stage.host.sent if isinstance(one, Begin) and "bad" in one.row["name"])
        stage.lose(stage.host, culprit=culprit)
    stage.answer(Step(observation="go"))
    stage.answer(Step(observation="wall"))
    assert stage.last == EnvironmentReply(episode_id="good", turn=1, status="answered", step=Step(observation="wall"))


def test_losses_that_are_nobodys_fault_end_at_a_bound() -> None:
    stage = Stage()
    stage.ask("a", 0)
    for _ in range(MAX_LOSSES):
        stage.lose(stage.host)
    assert stage.replies == []
    stage.lose(stage.host)
    assert (stage.last.status, stage.last.turn) == ("crashed", 0)


def test_a_process_that_makes_room_is_no_loss_to_its_episodes() -> None:
    stage = Stage()
    stage.ask("a", 0)
    for _ in range(2 * MAX_LOSSES):
        stage.host.makes_room = True
        stage.lose(stage.host)
    stage.answer(Step(observation="go"))
    assert (stage.last.status, stage.last.step) == ("answered", Step(observation="go"))


def test_an_answer_of_another_process_than_the_episodes_own_is_ignored() -> None:
    stage = Stage().begun()
    stage.ask("a", 1, "left")
    other = FakeHost()
    other.sent = stage.host.sent[-1:]
    stage.answer(Step(observation="forged", reward=9.0), other)
    assert len(stage.replies) == 1
    stage.answer(Step(observation="wall"))
    assert stage.last.step == Step(observation="wall")


def test_a_failure_is_the_answer_to_whatever_is_asked_later() -> None:
    stage = Stage().begun()
    stage.ask("a", 1, "left")
    failed = Failed(episode=stage.host.sent[-1].episode, kind="invalid", reason="its reward is nan")
    stage.desk.on_message(stage.host, failed)  # type: ignore[arg-type]
    stage.ask("a", 2, "up")
    assert [(one.turn, one.status, one.reason) for _, one in stage.replies[1:]] == [
        (1, "invalid", "its reward is nan"), (2, "invalid", "its reward is nan"),
    ]  # fmt: skip


def test_an_episode_of_another_service_goes_on_by_its_history() -> None:
    stage = Stage()
    stage.ask("a", 2, "up")
    assert stage.last.status == "unknown"
    digests = (Step(observation="go").digest, Step(observation="wall").digest)
    stage.ask("a", 2, "up", EpisodeHistory(row={}, seed=1, actions=("left",), digests=digests))
    for words in ("go", "wall", "sky"):
        stage.answer(Step(observation=words))
    assert (stage.last.turn, stage.last.step) == (2, Step(observation="sky"))


def test_a_service_that_knows_less_than_its_client_asks_for_the_history() -> None:
    stage = Stage().begun()
    stage.ask("a", 3, "up")
    assert (stage.last.status, stage.last.turn) == ("unknown", 3)


@pytest.mark.parametrize(
    ("turn", "history", "words"),
    [
        (1, EpisodeHistory(row={}, seed=1), "turn 1 does not match a history of 0 actions and 0 results"),
        (-1, EpisodeHistory(row={}, seed=1), "turn -1 is not between"),
        (2, EpisodeHistory(row={}, seed=1, actions=("x" * (1 << 21),), digests=("", "")), "an action has more than"),
    ],
)
def test_a_history_that_cannot_be_is_refused(turn: int, history: EpisodeHistory, words: str) -> None:
    stage = Stage()
    stage.ask("a", turn, history=history)
    assert stage.last.status == "invalid"
    assert words in stage.last.reason


def test_the_episode_that_waited_longest_makes_room_and_one_that_is_asked_does_not() -> None:
    stage = Stage(max_episodes=2)
    stage.begun("old").begun("new")
    stage.ask("old", 1, "left")
    stage.ask("third", 0)
    assert isinstance(stage.host.sent[-2], Close)
    stage.ask("new", 1, "left")
    assert (stage.last.episode_id, stage.last.status) == ("new", "unknown")
    stage.ask("new", 1, "left", EpisodeHistory(row={}, seed=1, digests=("",)))
    assert stage.last.status == "full", "both others wait for an answer"


def test_episodes_wait_for_a_process_where_there_is_none() -> None:
    stage = Stage()
    (host,), stage.pool.hosts = stage.pool.hosts, []
    stage.ask("a", 0)
    stage.pool.hosts = [host]
    stage.desk.on_ready()
    assert [type(message) for message in host.sent] == [Begin]


def test_a_client_that_is_gone_leaves_nothing() -> None:
    stage = Stage().begun()
    stage.ask("a", 1, "left")
    stage.desk.dismiss("rollout-0")
    assert isinstance(stage.host.sent[-1], Close)
    assert stage.desk.counters()["environment.episodes"] == 0
    stage.answer(Step(observation="wall"))
    assert len(stage.replies) == 1


def test_a_service_that_drains_takes_no_new_episodes_and_sends_open_ones_elsewhere() -> None:
    stage = Stage().begun()
    stage.desk.is_draining = True
    stage.ask("b", 0)
    assert stage.last.status == "draining"
    stage.ask("a", 1, "left")
    assert stage.desk.num_open == 1
    assert stage.desk.refuse_open() == 1
    assert (stage.last.episode_id, stage.last.status) == ("a", "draining")


# ---------------------------------------------------------------- any order of events


class Client:
    """Plays one episode after its own plan and checks each answer: it repeats the actions that led to it."""

    def __init__(self, name: str, stage: Stage) -> None:
        self.name, self.stage = name, stage
        self.actions: list[str] = []
        self.digests: list[bytes] = []
        self.is_waiting = False

    def ask(self, action: str = "", *, with_history: bool = False) -> None:
        """The next turn, or the one that is due again."""
        if not self.is_waiting and self.digests:
            self.actions.append(action)
        self.is_waiting = True
        turn = len(self.digests)
        known = EpisodeHistory(
            row={"name": self.name}, seed=4, actions=tuple(self.actions[:-1]), digests=tuple(self.digests)
        )
        self.stage.ask(self.name, turn, self.actions[-1] if turn else "", known if with_history and turn else None)

    def take(self, reply: EnvironmentReply) -> None:
        if reply.status in ("unknown", "full"):
            return
        assert (reply.status, reply.reason) == ("answered", "")
        assert reply.step is not None
        assert reply.step.observation == f"{self.name} 4 {self.actions[: reply.turn]}"
        if reply.turn == len(self.digests):
            self.digests.append(reply.step.digest)
            self.is_waiting = False


class Player:
    """Answers the calls of one process in order, as an environment that repeats what it was given."""

    def __init__(self, host: FakeHost) -> None:
        self.host, self.num_done = host, 0
        self.played: dict[int, tuple[str, list[str]]] = {}

    def answer(self, stage: Stage) -> bool:
        if self.num_done == len(self.host.sent):
            return False
        message, self.num_done = self.host.sent[self.num_done], self.num_done + 1
        if isinstance(message, Close):
            self.played.pop(message.episode, None)
            return True
        if isinstance(message, Begin):
            self.played[message.episode] = (f"{message.row['name']} {message.seed}", [])
        else:
            self.played[message.episode][1].append(message.action)
        start, actions = self.played[message.episode]
        answer = Answered(episode=message.episode, step=Step(observation=f"{start} {actions}"))
        stage.desk.on_message(self.host, answer)  # type: ignore[arg-type]
        return True


@pytest.mark.parametrize("seed", range(40))
def test_every_answer_is_that_to_the_actions_of_its_own_episode(seed: int) -> None:
    """With requests repeated, processes lost, episodes evicted and gone on with from their history."""
    rng = random.Random(seed)
    stage = Stage(retries=100, max_episodes=3)
    stage.pool.hosts.append(FakeHost())
    players = [Player(host) for host in stage.pool.hosts]
    clients = {name: Client(name, stage) for name in "abcd"}
    num_taken = 0

    def take_replies() -> None:
        nonlocal num_taken
        for _, reply in stage.replies[num_taken:]:
            clients[reply.episode_id].take(reply)
        num_taken = len(stage.replies)

    for _ in range(300):
        client, place = rng.choice(list(clients.values())), rng.randrange(2)
        match rng.choice(("ask", "ask", "history", "late", "answer", "answer", "answer", "lose")):
            case "ask":
                client.ask(rng.choice("xyz"))
            case "history":
                client.ask(rng.choice("xyz"), with_history=True)
            case "late" if len(client.digests) > 1:
                stage.ask(client.name, len(client.digests) - 1, client.actions[len(client.digests) - 2])
            case "answer":
                players[place].answer(stage)
            case "lose":
                host = stage.pool.hosts[place]
                host.makes_room = True
                players[place] = Player(stage.lose(host, culprit=rng.choice([0, *sorted(host.episodes)])))
        take_replies()
    for client in clients.values():  # each in turn gets the answer that it waits for
        for _ in range(3):
            if client.is_waiting:
                client.ask(with_history=True)
            while any(player.answer(stage) for player in players):
                pass
            take_replies()
        assert not client.is_waiting
    assert sum(len(client.digests) for client in clients.values()) > 9


# ---------------------------------------------------------------- quarantine


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def begin(stage: Stage, name: str, row: str) -> None:
    stage.ask(name, 0, history=EpisodeHistory(row={"name": row}, seed=4))


def hang(stage: Stage, name: str) -> None:
    """The process hangs in this episode, and is killed for it."""
    number = stage.desk._episodes["rollout-0", name].number
    stage.host.culprit_kind = "timed_out"
    stage.lose(stage.host, culprit=number)


def statuses(stage: Stage, *names: str) -> list[str]:
    return [next((one.status for _, one in stage.replies if one.episode_id == name), "waits") for name in names]


def test_row_that_hangs_again_and_again_is_quarantined_and_the_others_go_on() -> None:
    clock = Clock()
    stage = Stage(clock, max_hangs=3, quarantine_s=60.0, retries=1)
    names = [f"bad {number}" for number in range(5)]
    for name in names:
        begin(stage, name, "bad")
    begin(stage, "good", "good")
    for name in ("bad 0", "bad 0", "bad 1"):
        assert statuses(stage, *names[1:], "good") == ["waits"] * 5
        hang(stage, name)
    assert statuses(stage, *names, "good") == ["timed_out"] * 5 + ["waits"]
    assert "hung 3 times; the row is quarantined for 60 s" in stage.replies[-1][1].reason
    (begun,) = (one for one in stage.host.sent if isinstance(one, Begin) and one.row == {"name": "good"})
    stage.desk.on_message(stage.host, Answered(episode=begun.episode, step=Step(observation="go")))  # type: ignore[arg-type]
    assert statuses(stage, "good") == ["answered"]
    begin(stage, "late", "bad")
    assert statuses(stage, "late") == ["timed_out"]
    counters = stage.desk.counters()
    assert (counters["environment.quarantined"], counters["environment.refused_quarantined"]) == (1.0, 1.0)
    assert counters["environment.timed_out"] == 6.0


def test_quarantine_ends_and_one_more_hang_renews_it() -> None:
    clock = Clock()
    stage = Stage(clock, max_hangs=2, quarantine_s=60.0, retries=0)
    for name in ("a", "b"):
        begin(stage, name, "bad")
        hang(stage, name)
    clock.now_s += 59.9
    begin(stage, "c", "bad")
    assert statuses(stage, "c") == ["timed_out"]
    clock.now_s += 0.1
    begin(stage, "d", "bad")
    assert statuses(stage, "d") == ["waits"]
    hang(stage, "d")
    begin(stage, "e", "bad")
    assert statuses(stage, "e") == ["timed_out"]
    assert stage.desk.counters()["environment.quarantined"] == 2.0


@pytest.mark.parametrize("ending", ["done", "closed"])
def test_episode_that_ends_well_takes_the_hangs_of_its_row_back(ending: str) -> None:
    stage = Stage(Clock(), max_hangs=2, retries=0)
    begin(stage, "a", "row")
    hang(stage, "a")
    begin(stage, "b", "row")
    stage.answer(Step(observation="go"))
    if ending == "done":
        stage.ask("b", 1, "left")
        stage.answer(Step(observation="end", is_done=True))
    else:
        stage.desk.close_episodes("rollout-0", ("b",))
    begin(stage, "c", "row")
    hang(stage, "c")
    begin(stage, "d", "row")
    assert statuses(stage, "d") == ["waits"]


def test_episode_of_a_quarantined_row_that_has_begun_goes_on_but_is_not_retried() -> None:
    stage = Stage(Clock(), max_hangs=1, retries=5)
    begin(stage, "old", "row")
    stage.answer(Step(observation="go"))
    begin(stage, "new", "row")
    hang(stage, "new")
    assert statuses(stage, "new") == ["timed_out"]
    stage.ask("old", 1, "left")
    stage.answer(Step(observation="go"))
    stage.answer(Step(observation="wall"))
    assert stage.last == EnvironmentReply(episode_id="old", turn=1, status="answered", step=Step(observation="wall"))
    stage.ask("old", 2, "up")
    hang(stage, "old")
    assert (stage.last.episode_id, stage.last.status) == ("old", "timed_out")


def test_hangs_of_async_methods_count_and_deaths_do_not() -> None:
    stage = Stage(Clock(), max_hangs=2, retries=0)
    for name, kind in (("a", "timed_out"), ("b", "crashed"), ("c", "timed_out"), ("d", "")):
        begin(stage, name, "row")
        if kind:
            failed = Failed(episode=stage.desk._episodes["rollout-0", name].number, kind=kind, reason="why")  # type: ignore[arg-type]
            stage.desk.on_message(stage.host, failed)  # type: ignore[arg-type]
    assert statuses(stage, "a", "b", "c", "d") == ["timed_out", "crashed", "timed_out", "timed_out"]
    assert "quarantined" in stage.last.reason


def test_no_row_is_quarantined_where_that_is_switched_off() -> None:
    stage = Stage(Clock(), max_hangs=0, retries=0)
    for number in range(9):
        begin(stage, str(number), "row")
        hang(stage, str(number))
    begin(stage, "a", "row")
    assert statuses(stage, "a") == ["waits"]

"""The service around its pool, with stand-ins for sockets and pool: which reports it sends, and when it ends."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.config import ModelSettings, ProcessSpec, SamplingSettings, StalenessSettings
from areal_like.errors import UserError
from areal_like.wire.messages import (
    EnvironmentReply,
    EnvironmentRequest,
    Goodbye,
    Hello,
    Message,
    ScoreRefused,
    ScoreReply,
    ScoreRequest,
    Shutdown,
    StatsReply,
    StatsRequest,
)
from services.processes.framing import PREFIX
from services.reward import server as module
from services.reward.config import RewardSettings
from services.reward.job import Job, Outcome, decode_for_process
from services.reward.server import CLOSING_S, RewardServer, ServiceSpec

LIMIT_S = 300.0


class FakeHub:
    """The clients, as the service hears them."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.sent: list[tuple[str, Message]] = []
        self.coming: asyncio.Queue[tuple[str, Message]] = asyncio.Queue()
        self.peers: dict[str, Any] = {}
        self.silent_names: list[str] = []
        self.silence_asked: list[float] = []
        self.forgotten: list[str] = []
        self.counters = {"bad_messages": 3.0}
        self.is_closed = False

    async def start(self) -> str:
        return "tcp://127.0.0.1:4321"

    async def receive(self, timeout_s: float) -> tuple[str, Message] | None:
        try:
            return await asyncio.wait_for(self.coming.get(), min(timeout_s, 0.01))
        except TimeoutError:
            return None

    def send(self, name: str, message: Message) -> bool:
        self.sent.append((name, message))
        return True

    def silent(self, silence_s: float) -> list[str]:
        self.silence_asked.append(silence_s)
        found, self.silent_names = self.silent_names, []
        return found

    def forget(self, name: str) -> None:
        self.forgotten.append(name)

    async def close(self) -> None:
        self.is_closed = True

    def of(self, kind: type[Message]) -> list[tuple[str, Any]]:
        return [(name, message) for name, message in self.sent if isinstance(message, kind)]


class FakePool:
    """Scores by `gate`: held back until it is set."""

    def __init__(self, settings: RewardSettings, neighbours: Callable[[], frozenset[int]], *, is_shared: bool) -> None:
        self.is_shared = is_shared
        self.names, self.label, self.volatile = ["a", "b"], "a@1+b@2", []
        self.num_busy, self.num_ready = 0, 2
        self.counters: Counter[str] = Counter({"started": 2})
        self.gate = asyncio.Event()
        self.gate.set()
        self.started = asyncio.Event()
        self.started.set()
        self.jobs: list[Job] = []
        self.kind = "scored"
        self.is_closed = False

    async def start(self) -> None:
        await self.started.wait()

    async def run(self) -> None:
        await asyncio.Event().wait()

    async def attempt(self, job: bytes, job_id: int, limit_s: float) -> Outcome:
        decoded = decode_for_process(job[PREFIX.size :])
        assert isinstance(decoded, Job)
        self.jobs.append(decoded)
        self.num_busy += 1
        await self.gate.wait()
        self.num_busy -= 1
        value = 1.0 if self.kind == "scored" else None
        return Outcome(job_id=job_id, kind=self.kind, value=value, reason="why", scorer_s={"a": 0.1})

    async def close(self) -> None:
        self.is_closed = True


class FakePeer:
    """The controller, as the service hears it."""

    def __init__(self, **facts: Any) -> None:
        self.facts = facts
        self.coming: asyncio.Queue[Message] = asyncio.Queue()
        self.closed_with = ""

    async def connect(self, timeout_s: float) -> None:
        pass

    async def receive(self, timeout_s: float) -> Message | None:
        try:
            return await asyncio.wait_for(self.coming.get(), min(timeout_s, 0.01))
        except TimeoutError:
            return None

    async def close(self, reason: str) -> None:
        self.closed_with = reason


class Stage:
    """A service whose sockets and pool are the test's."""

    def __init__(
        self, tmp_path: Path, hub_address: str = "", spec: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.addresses: list[str] = []
        facts = {"name": "reward0", "run_id": "r", "bind_address": "tcp://127.0.0.1:0", "curve_dir": tmp_path}
        self.spec = ServiceSpec(**{**facts, "hub_address": hub_address, **(spec or {})})
        chosen = RewardSettings.model_validate({"num_workers": 2, "retries": 0, **settings})
        self.server = RewardServer(self.spec, chosen, on_address=self.addresses.append)
        self.hub: Any = self.server._hub
        self.pool: Any = self.server._pool
        self.peer: Any = self.server._peer
        self.stop = asyncio.Event()
        self._ids = itertools.count()

    def ask(self, client: str = "w", **more: Any) -> str:
        facts = {"request_id": f"q{next(self._ids)}", "scorer": "", "row": {}, "response": "x", "finish_reason": "stop"}
        request = ScoreRequest(**{**facts, "num_tokens": 1, "deadline_s": 50.0, **more})
        self.hub.coming.put_nowait((client, request))
        return request.request_id

    async def until(self, is_true: Callable[[], Any]) -> None:
        async with asyncio.timeout(LIMIT_S):
            while not is_true():  # noqa: ASYNC110
                await asyncio.sleep(0.001)

    async def stats(self) -> StatsReply:
        before = len(self.hub.of(StatsReply))
        self.hub.coming.put_nowait(("looker", StatsRequest(request_id="s")))
        await self.until(lambda: len(self.hub.of(StatsReply)) > before)
        name, reply = self.hub.of(StatsReply)[-1]
        assert name == "looker"
        return reply


@pytest.fixture(autouse=True)
def puppets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "Hub", FakeHub)
    monkeypatch.setattr(module, "Pool", FakePool)
    monkeypatch.setattr(module, "Peer", FakePeer)
    monkeypatch.setattr(module.process_tree, "become_subreaper", lambda: None)


@pytest.mark.parametrize(("spec", "is_shared"), [({}, True), ({"run_dir": Path("run")}, False)])
def test_a_service_outside_of_a_run_is_shared(spec: dict[str, Any], is_shared: bool, tmp_path: Path) -> None:
    assert Stage(tmp_path, spec=spec).pool.is_shared is is_shared


def play(tmp_path: Path, scene: Callable[[Stage], Coroutine[Any, Any, None]], **more: Any) -> Stage:
    """The scene with a service that serves; stopped afterwards, and ended in order."""

    async def run() -> Stage:
        stage = Stage(tmp_path, **more)
        serving = asyncio.create_task(stage.server.run(stage.stop))
        try:
            await stage.until(lambda: stage.addresses or serving.done())
            async with asyncio.timeout(LIMIT_S):
                await scene(stage)
            stage.stop.set()
            stage.pool.gate.set()
            await asyncio.wait_for(serving, LIMIT_S)
        finally:
            serving.cancel()
        assert stage.hub.is_closed
        assert stage.pool.is_closed
        return stage

    return asyncio.run(run())


# ---------------------------------------------------------------- serving


def test_request_is_answered_to_the_client_that_asked(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        first, second = stage.ask("w1", row={"n": 1}), stage.ask("w2", row={"n": 2})
        await stage.until(lambda: len(stage.hub.of(ScoreReply)) == 2)
        replies = {name: reply for name, reply in stage.hub.of(ScoreReply)}
        assert (replies["w1"].request_id, replies["w2"].request_id) == (first, second)
        assert replies["w1"].verdict.value == 1.0
        assert replies["w1"].verdict.scorer == "a@1+b@2"

    play(tmp_path, scene)


def test_requests_are_scored_by_as_many_lanes_as_there_are_workers(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.pool.gate.clear()
        for _ in range(5):
            stage.ask()
        await stage.until(lambda: stage.pool.num_busy == 3)
        stats = await stage.stats()
        assert (stats.counters["queue"], stats.counters["busy_workers"], stats.num_workers) == (2, 3, 3)
        assert stats.state == "score"
        stage.pool.gate.set()
        await stage.until(lambda: len(stage.hub.of(ScoreReply)) == 5)

    play(tmp_path, scene, num_workers=3, cache_mb=0)


def test_statistics_tell_who_it_is_what_it_does_and_everything_counted(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stats = await stage.stats()
        assert (stats.request_id, stats.name, stats.label, stats.scorers) == ("s", "reward0", "a@1+b@2", ("a", "b"))
        assert stats.state == "wait:request"
        assert 0 <= stats.uptime_s < LIMIT_S
        expected = {
            "queue": 0,
            "processes": 2,
            "pool.started": 2,
            "hub.bad_messages": 3.0,
            "cache.hits": 0,
            "scored": 0,
        }
        assert expected.items() <= stats.counters.items()
        stage.ask()
        await stage.until(lambda: stage.hub.of(ScoreReply))
        assert (await stage.stats()).counters["scored"] == 1

    play(tmp_path, scene)


def test_full_queue_is_shown_and_the_next_request_refused(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        stage.pool.gate.clear()
        stage.ask()
        await stage.until(lambda: stage.pool.num_busy == 1)
        stage.ask()
        last = stage.ask()
        await stage.until(lambda: stage.hub.of(ScoreRefused))
        ((_, refused),) = stage.hub.of(ScoreRefused)
        assert (refused.request_id, refused.reason) == (last, "full")
        assert (await stage.stats()).state == "full"

    play(tmp_path, scene, num_workers=1, max_queue=1, cache_mb=0)


def test_duplicate_of_another_request_is_answered_from_the_cache_unless_that_is_off(tmp_path: Path) -> None:
    for more, jobs in (({}, 1), ({"cache_mb": 0}, 2), ({"scorers": [{"kind": "math", "cache": False}]}, 2)):

        async def scene(stage: Stage) -> None:
            for _ in range(2):
                before = len(stage.hub.of(ScoreReply))
                stage.ask()
                await stage.until(lambda before=before: len(stage.hub.of(ScoreReply)) > before)

        assert len(play(tmp_path, scene, **more).pool.jobs) == jobs


def test_client_that_says_goodbye_or_starts_again_gets_no_more_answers(tmp_path: Path) -> None:
    for message in (Goodbye(reason="x"), Hello(role="rollout", name="w", pid=1, run_id="r", incarnation="new")):

        async def scene(stage: Stage, message: Message = message) -> None:
            stage.pool.gate.clear()
            stage.ask("w")
            stage.ask("other")
            await stage.until(lambda: stage.pool.num_busy == 2)
            stage.hub.coming.put_nowait(("w", message))
            await stage.until(stage.hub.coming.empty)
            await stage.stats()
            stage.pool.gate.set()
            await stage.until(lambda: stage.hub.of(ScoreReply))
            await stage.stats()
            assert [name for name, _ in stage.hub.of(ScoreReply)] == ["other"]

        play(tmp_path, scene, cache_mb=0)


def test_client_that_is_silent_is_forgotten_and_gives_its_place_to_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LISTEN_S", 0.01)

    async def scene(stage: Stage) -> None:
        stage.pool.gate.clear()
        stage.ask("w")
        await stage.until(lambda: stage.pool.num_busy == 1)
        stage.hub.silent_names = ["w"]
        await stage.until(lambda: stage.hub.forgotten == ["w"])
        stage.pool.gate.set()
        await stage.until(lambda: stage.pool.num_busy == 0)
        await stage.stats()
        assert not stage.hub.of(ScoreReply)
        assert set(stage.hub.silence_asked) == {7.5}

    play(tmp_path, scene, spec={"silence_s": 7.5})


def test_verdict_that_is_no_score_is_logged_with_who_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async def scene(stage: Stage) -> None:
        stage.pool.kind = "crashed"
        stage.ask("w1", request_id="q7")
        await stage.until(lambda: stage.hub.of(ScoreReply))
        await stage.stats()

    play(tmp_path, scene)
    assert any("why (w1 q7)" in record.getMessage() for record in caplog.records)


# ---------------------------------------------------------------- start and end


def test_address_is_sent_and_kept_in_a_file_of_the_run(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert stage.addresses == ["tcp://127.0.0.1:4321"]

    play(tmp_path, scene, spec={"run_dir": tmp_path / "run"})
    (file,) = (tmp_path / "run" / "processes").iterdir()
    assert (file.name, file.read_text()) == ("reward0.address", "tcp://127.0.0.1:4321")


def test_stop_before_the_scorers_are_loaded_ends_it_at_once(tmp_path: Path) -> None:
    async def run() -> None:
        stage = Stage(tmp_path)
        stage.pool.started.clear()
        serving = asyncio.create_task(stage.server.run(stage.stop))
        await asyncio.sleep(0)
        stage.stop.set()
        await asyncio.wait_for(serving, LIMIT_S)
        assert stage.addresses == []
        assert stage.pool.is_closed

    asyncio.run(run())


def test_scorer_that_cannot_be_loaded_ends_it_before_it_listens(tmp_path: Path) -> None:
    async def run() -> None:
        stage = Stage(tmp_path)

        async def refuse() -> None:
            raise UserError("no such column")

        stage.pool.start = refuse
        with pytest.raises(UserError, match="no such column"):
            await stage.server.run(stage.stop)
        assert stage.addresses == []
        assert stage.pool.is_closed

    asyncio.run(run())


def test_stopped_service_says_goodbye_refuses_what_is_new_and_answers_what_it_took(tmp_path: Path) -> None:
    async def run() -> None:
        stage = Stage(tmp_path, cache_mb=0, drain_s=LIMIT_S)
        serving = asyncio.create_task(stage.server.run(stage.stop))
        stage.hub.peers = {"w1": None, "w2": None}
        stage.pool.gate.clear()
        taken = stage.ask("w1")
        await stage.until(lambda: stage.pool.num_busy == 1)
        stage.stop.set()
        await stage.until(lambda: len(stage.hub.of(Goodbye)) == 2)
        assert {name for name, _ in stage.hub.of(Goodbye)} == {"w1", "w2"}
        assert (await stage.stats()).state == "drain"
        late = stage.ask("w2")
        await stage.until(lambda: stage.hub.of(ScoreRefused))
        ((_, refused),) = stage.hub.of(ScoreRefused)
        assert (refused.request_id, refused.reason) == (late, "draining")
        assert not serving.done(), "somebody waits for an answer"
        stage.pool.gate.set()
        await asyncio.wait_for(serving, LIMIT_S)
        assert [reply.request_id for _, reply in stage.hub.of(ScoreReply)] == [taken]

    asyncio.run(run())


def test_drain_that_runs_out_of_time_sends_what_is_open_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def run() -> None:
        stage = Stage(tmp_path, cache_mb=0, drain_s=0.0)
        serving = asyncio.create_task(stage.server.run(stage.stop))
        stage.pool.gate.clear()
        taken = stage.ask("w1")
        await stage.until(lambda: stage.pool.num_busy == 1)
        stage.stop.set()
        await asyncio.wait_for(serving, LIMIT_S)
        assert [(name, one.request_id, one.reason) for name, one in stage.hub.of(ScoreRefused)] == [
            ("w1", taken, "draining")
        ]

    asyncio.run(run())
    assert "exiting with 1 unanswered requests" in caplog.text


@pytest.mark.parametrize(
    ("drain_s", "deadline_s", "wanted"), [(30.0, 10.0, 10.0 - CLOSING_S), (3.0, 10.0, 3.0), (30.0, 0.1, 0.0)]
)
def test_controllers_shutdown_ends_it_within_the_deadline_given(
    drain_s: float, deadline_s: float, wanted: float, tmp_path: Path
) -> None:
    async def run() -> None:
        stage = Stage(tmp_path, hub_address="tcp://127.0.0.1:9", drain_s=drain_s)
        serving = asyncio.create_task(stage.server.run(stage.stop))
        stage.peer.coming.put_nowait(Shutdown(reason="the run is over", deadline_s=deadline_s))
        await asyncio.wait_for(serving, LIMIT_S)
        assert stage.stop.is_set()
        assert stage.server._drain_s == pytest.approx(wanted)
        assert stage.peer.closed_with == "service ends"

    asyncio.run(run())


def test_controller_learns_state_counters_and_capacity(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        facts = stage.peer.facts
        hello = facts["hello"]
        assert (hello.role, hello.name, hello.run_id, hello.capacity) == ("reward", "reward0", "r", 2)
        assert (facts["address"], facts["audience"], facts["accept"]) == (
            "tcp://127.0.0.1:9", "controller", frozenset({Shutdown})
        )  # fmt: skip
        await stage.stats()
        beat = facts["status"]()
        assert beat.state == "wait:request"
        assert beat.counters["processes"] == 2

    play(tmp_path, scene, hub_address="tcp://127.0.0.1:9")


def test_service_outside_of_a_run_has_no_controller(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        assert stage.peer is None

    play(tmp_path, scene)


def test_timeline_has_a_slice_for_each_answer_whose_arrow_is_drawn(tmp_path: Path) -> None:
    drawn: list[tuple[str, float, float, str, dict[str, Any]]] = []
    arrows: list[tuple[str, float, str]] = []
    tracer = SimpleNamespace(
        wall_s=lambda at_s: at_s + 100.0, now_s=lambda: 107.0,
        complete=lambda name, start_s, end_s, lane, **args: drawn.append((name, start_s, end_s, lane, args)),
        arrow_step=lambda arrow, at_s, lane: arrows.append((arrow, at_s, lane)),
    )  # fmt: skip
    module._draw(tracer, "s1.0", module.Verdict(kind="scored", value=1.0), 5.0, "lane 0")  # type: ignore[arg-type]
    assert drawn == [("score", 105.0, 107.0, "lane 0", {"sample": "s1.0", "kind": "scored"})]
    assert arrows == [("s1.0", 106.0, "lane 0")], "in the middle of it"
    module._draw(tracer, "s1.0", module.Verdict(kind="scored", value=1.0), 7.0, "lane 0")  # type: ignore[arg-type]
    (_, start_s, end_s, _, _) = drawn[1]
    assert end_s > start_s, "a slice has an extent"


@pytest.mark.parametrize(("is_traced", "arrow", "num_drawn"), [(True, "s1.0", 1), (True, "", 0), (False, "s1.0", 0)])
def test_an_answer_is_drawn_where_the_timeline_is_kept_and_its_sender_draws_it(
    monkeypatch: pytest.MonkeyPatch, is_traced: bool, arrow: str, num_drawn: int
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(module, "_draw", lambda *arguments: drawn.append(arguments))
    verdict, tracer = module.Verdict(kind="scored", value=1.0), SimpleNamespace()

    async def work(on_scored: Callable[..., None]) -> None:
        on_scored(SimpleNamespace(request=SimpleNamespace(arrow=arrow)), verdict, 5.0)

    server: Any = SimpleNamespace(_tracer=tracer if is_traced else None, _scheduler=SimpleNamespace(work=work))
    asyncio.run(RewardServer._work(server, 3))
    assert drawn == [(tracer, arrow, verdict, 5.0, "lane 3")] * num_drawn


def test_spec_of_a_run_becomes_the_services_and_needs_an_address(tmp_path: Path) -> None:
    facts: dict[str, Any] = {
        "role": "reward", "name": "reward1", "run_id": "r", "run_dir": str(tmp_path), "hub_address": "tcp://127.0.0.1:9",
        "bind_address": "tcp://127.0.0.1:0", "parent_pid": 1, "seed": 1, "heartbeat_s": 0.25, "silence_s": 6.0,
        "model": ModelSettings(), "sampling": SamplingSettings(), "staleness": StalenessSettings(),
        "groups_per_step": 1, "group_size": 1, "num_steps": 1, "weight_dir": "w", "curve_dir": "/keys",
        "settings": {"num_wrokers": 1},
    }  # fmt: skip
    assert ServiceSpec.of(ProcessSpec(**facts)) == ServiceSpec(
        name="reward1", run_id="r", bind_address="tcp://127.0.0.1:0", curve_dir=Path("/keys"), run_dir=tmp_path,
        hub_address="tcp://127.0.0.1:9", heartbeat_s=0.25, silence_s=6.0, trace=ProcessSpec(**facts).trace,
    )  # fmt: skip
    with pytest.raises(UserError, match="contain no bind_address"):
        ServiceSpec.of(ProcessSpec(**{**facts, "bind_address": None}))
    with pytest.raises(UserError, match="num_wrokers"):
        asyncio.run(module.serve(ProcessSpec(**facts), asyncio.Event()))
    contradicting = {"scorers": [{"kind": "code", "options": {"total_limit_s": 60}}]}
    with pytest.raises(UserError, match=r"60 s for a program is more than reward\.timeout_s 30 allows") as raised:
        asyncio.run(module.serve(ProcessSpec(**{**facts, "settings": contradicting}), asyncio.Event()))
    assert raised.value.where == "reward.scorers.0.options.total_limit_s"


def test_what_a_service_does_not_do_is_refused_with_a_reason(tmp_path: Path) -> None:
    async def scene(stage: Stage) -> None:
        request_id = stage.ask()
        stage.hub.coming.put_nowait(("w", EnvironmentRequest(episode_id="e", turn=0)))
        await stage.until(lambda: stage.hub.of(EnvironmentReply) and stage.hub.of(ScoreReply))
        ((_, scored),) = stage.hub.of(ScoreReply)
        ((_, answered),) = stage.hub.of(EnvironmentReply)
        assert (scored.request_id, scored.verdict.kind) == (request_id, "invalid")
        assert "reward.scorers is empty" in scored.verdict.reason
        assert (answered.status, answered.episode_id) == ("invalid", "e")
        assert "runs no environment" in answered.reason
        assert stage.pool.jobs == []

    play(tmp_path, scene, scorers=[])

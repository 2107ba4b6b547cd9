"""External workers over real sockets: what a run answers to candidates, and what becomes of their workers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import secrets
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from made_keys import run_keys
from small_run import (
    DEADLINE_S,
    NoProcesses,
    SmallRun,
    Trainer,
    Worker,
    assert_whole,
    bounded,
    concurrently,
    small_run,
    until,
)

from areal_like.errors import ChannelError
from areal_like.transport.channel import Peer
from areal_like.transport.credentials import candidate_credentials, write_credentials
from areal_like.wire import messages as m
from controller.coordinator.sample_outcome import MAX_REASON_CHARS
from controller.runtime import admission
from controller.runtime.admission import Admission
from controller.runtime.server import Server, ServerSettings
from controller.runtime.supervisor import Loss


class Crew(NoProcesses):
    """A supervisor that knows the workers of the run, and those that joined."""

    def __init__(self) -> None:
        super().__init__()
        self.members = ["trainer", "rollout-0", "rollout-1"]
        self.external: dict[str, str] = {}
        self.reports: list[tuple[str, str]] = []

    def add_external(self, spec: Any, host: str, now_s: float) -> None:
        self.external[spec.name] = host

    def is_external(self, name: str) -> bool:
        return name in self.external

    def watches(self, name: str) -> bool:
        return name in self.members or name in self.external

    def release(self, name: str) -> None:
        super().release(name)
        self.external.pop(name, None)

    def external_ended(self, name: str, reason: str, now_s: float) -> None:
        self.reports.append((name, reason))
        self.losses.append(Loss(name, "rollout", reason, is_permanent=True))
        self.external.pop(name, None)


class Maker:
    """Makes offers of numbered workers."""

    def __init__(self) -> None:
        self.number = 6
        self.failure: Exception | None = None

    def offer(self) -> tuple[Any, m.JoinOffer]:
        if self.failure is not None:
            raise self.failure
        self.number += 1
        number = self.number
        spec = type("Spec", (), {"name": f"rollout-{number}"})()
        return spec, m.JoinOffer(name=spec.name, spec="{}", keys={"a": b"b"}, model_files={"config.json": b"{}"})


@dataclasses.dataclass
class Joinable:
    """A small run that admits workers."""

    run: SmallRun
    crew: Crew
    maker: Maker
    keys: Path

    async def candidate(self, name: str = "") -> Peer:
        """A registered candidate, with the credentials of an invitation only."""
        hello = m.Hello(
            role="candidate", name=name or f"candidate/{secrets.token_hex(4)}", pid=os.getpid(), run_id="r",
            incarnation=secrets.token_hex(4),
        )  # fmt: skip
        peer = Peer(
            address=self.run.address, hello=hello, curve_dir=self.keys, audience="controller",
            accept=frozenset({m.JoinOffer}), heartbeat_s=0.05, silence_s=10.0,
            status=lambda: m.Heartbeat(state="candidate"),
        )  # fmt: skip
        self.run.peers.append(peer)
        await peer.connect(DEADLINE_S)
        return peer


@contextlib.asynccontextmanager
async def joinable(folder: Path, obstacle: str = "", **settings: Any) -> AsyncIterator[Joinable]:
    async with small_run(folder, **settings) as run:
        crew, maker = Crew(), Maker()
        telemetry = run.parts.telemetry
        run.parts.worker_admin._supervisor = crew  # type: ignore[assignment]
        admitting = Admission(
            run.coordinator, crew, run.hub, maker,  # type: ignore[arg-type]
            obstacle=obstacle, journal=telemetry.journal, say=telemetry.display.note,
        )  # fmt: skip
        parts = dataclasses.replace(run.parts, supervisor=crew, admission=admitting)
        tasks = run.server._settings.tasks
        server = Server(
            ServerSettings(
                tasks=tasks, num_steps=3, stop_on_long_prompt=False, stall_after_s=60.0, stop_grace_s=30.0
            ),
            parts,
        )  # fmt: skip
        run.server, run.supervisor, run.parts = server, crew, parts
        keys = write_credentials(folder / "invitation", candidate_credentials(run_keys()))
        yield Joinable(run, crew, maker, keys)


async def offered(candidate: Peer) -> m.JoinOffer:
    await candidate.send(m.JoinRequest(host="gpu7"))
    while True:
        if isinstance(message := await candidate.receive(DEADLINE_S), m.JoinOffer):
            return message


class Holder(Worker):
    """Keeps what it is leased."""

    async def on_lease(self, task: m.SampleTask) -> None:
        pass


async def stop(run: SmallRun) -> None:
    run.server.request_stop("enough")
    run.server.request_stop("enough")


def test_a_worker_that_joined_takes_part_and_the_run_is_whole(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:
            run = there.run
            joined = Worker(run, "rollout-7", capacity=2)

            async def join() -> None:
                offer = await offered(await there.candidate())
                assert (offer.reason, offer.name, offer.keys) == ("", "rollout-7", {"a": b"b"})
                assert there.crew.external == {}, "an offer is no worker yet"
                await joined.work()

            held = Holder(run, "rollout-0", capacity=1)  # what it holds returns when it is lost

            async def lose() -> None:
                await until(lambda: bool(held.leased) and bool(there.crew.external))  # else no worker would be left
                there.crew.losses.append(Loss("rollout-0", "rollout", "killed", is_permanent=True))

            async with concurrently(held.work(), lose(), join(), Trainer(run).work()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert joined.acked
            assert there.crew.external == {"rollout-7": "gpu7"}
            assert "rollout-7 has joined the run from gpu7" in run.shown.getvalue()
            assert [(row["name"], row["host"]) for row in run.rows("process") if row["event"] == "joined"] == [
                ("rollout-7", "gpu7")
            ]

    bounded(test())
    assert_whole(tmp_path, 3)


def test_an_end_that_its_candidate_reports_returns_the_samples_and_no_one_else_can_report_it(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:
            run = there.run
            holder = Holder(run, "rollout-7", capacity=2)

            async def join() -> None:
                ours, theirs = await there.candidate(), await there.candidate()
                await offered(ours)
                work = asyncio.create_task(holder.work())
                await until(lambda: bool(holder.leased))
                await theirs.send(m.JoinedWorkerEnded(name="rollout-7", reason="a lie"))
                await ours.send(m.JoinedWorkerEnded(name="rollout-7", reason="status 1"))
                await until(lambda: bool(there.crew.reports))
                work.cancel()
                await Worker(run, "rollout-0").work()

            async with concurrently(join(), Trainer(run).work()):
                outcome = await run.go()
            assert outcome.status == "completed"
            assert there.crew.reports == [("rollout-7", "status 1")]

    bounded(test())
    assert_whole(tmp_path, 3)


def test_one_that_was_silent_returns_and_is_monitored_again(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:
            run = there.run
            holder = Holder(run, "rollout-7", capacity=2)

            async def join() -> None:
                await offered(await there.candidate())
                work = asyncio.create_task(holder.work())
                await until(lambda: bool(holder.leased))
                first = len(holder.leased)
                del there.crew.external["rollout-7"]
                there.crew.losses.append(Loss("rollout-7", "rollout", "silent", is_permanent=True, may_return=True))
                await until(lambda: not there.crew.losses)
                run.hub.forget("rollout-7")
                await until(lambda: len(holder.leased) > first)
                assert there.crew.external == {"rollout-7": "gpu7"}
                work.cancel()
                await stop(run)

            async with concurrently(join(), Trainer(run).work()):
                await run.go()

    bounded(test())


def test_an_offer_is_open_until_its_worker_or_its_candidate_has_left(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:
            run = there.run
            admitting = run.parts.admission
            assert admitting is not None

            async def join() -> None:
                candidates = [await there.candidate() for _ in range(4)]
                names = [(await offered(one)).name for one in candidates]
                assert names == ["rollout-7", "rollout-8", "rollout-9", "rollout-10"]
                peers = [await run.connect(name, "rollout", {m.AnnounceVersion}, 2) for name in names[:2]]
                await until(lambda: set(there.crew.external) == {"rollout-7", "rollout-8"})
                await peers[0].close("SIGTERM")
                await until(lambda: "rollout-7" not in admitting._offers)
                assert "rollout-7" in there.crew.released
                await candidates[1].close()  # its worker is monitored
                await candidates[2].close()  # no worker of it was started
                await until(lambda: "rollout-9" not in admitting._offers)
                assert set(admitting._offers) == {"rollout-8", "rollout-10"}
                await candidates[3].send(m.JoinedWorkerEnded(name="rollout-10", reason="it never registered"))
                await until(lambda: set(admitting._offers) == {"rollout-8"})
                await stop(run)

            async with concurrently(join(), Trainer(run).work()):
                await run.go()

    bounded(test())


def test_a_worker_whose_offer_is_no_longer_open_is_sent_away(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:
            run = there.run

            async def join() -> None:
                candidate = await there.candidate()
                await offered(candidate)
                await candidate.close()
                await until(lambda: not run.parts.admission._offers)  # type: ignore[union-attr]
                peer = await run.connect("rollout-7", "rollout", set(), 2)
                message = await peer.receive(DEADLINE_S)
                assert isinstance(message, m.Shutdown)
                assert "no longer expects this worker" in message.reason
                assert there.crew.external == {}
                await stop(run)

            async with concurrently(join(), Trainer(run).work()):
                await run.go()

    bounded(test())


def test_a_candidate_gets_one_offer_and_a_failure_to_make_one_does_not_end_the_run(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:

            async def ask() -> None:
                there.maker.failure = OSError("no space left")
                candidate = await there.candidate()
                assert (await offered(candidate)).reason == "the run could not prepare a worker (no space left)"
                there.maker.failure = None
                assert (await offered(candidate)).reason == ""
                assert "has an offer already" in (await offered(candidate)).reason
                await stop(there.run)

            async with concurrently(ask(), Trainer(there.run).work()):
                assert (await there.run.go()).status == "stopped"

    bounded(test())


def test_texts_of_a_candidate_are_cut(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:

            async def ask() -> None:
                candidate = await there.candidate()
                await candidate.send(m.JoinRequest(host="h\x1b" * 1000))
                assert isinstance(await candidate.receive(DEADLINE_S), m.JoinOffer)
                await there.run.connect("rollout-7", "rollout", set(), 2)
                await until(lambda: bool(there.crew.external))
                host = there.crew.external["rollout-7"]
                assert host.isprintable()
                assert host.count("h") == 128
                await candidate.send(m.JoinedWorkerEnded(name="rollout-7", reason="r" * 100_000))
                await until(lambda: bool(there.crew.reports))
                assert len(there.crew.reports[0][1]) == MAX_REASON_CHARS
                await stop(there.run)

            async with concurrently(ask(), Trainer(there.run).work()):
                await there.run.go()

    bounded(test())


def test_a_run_that_cannot_admit_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with joinable(tmp_path, obstacle="it shares its devices") as there:

            async def ask() -> None:
                candidate = await there.candidate()
                assert (await offered(candidate)).reason == "it shares its devices"
                admitting = there.run.parts.admission
                assert admitting is not None
                admitting._obstacle = ""
                monkeypatch.setattr(admission, "MAX_OFFERS", 1)
                assert (await offered(candidate)).reason == ""
                second = await there.candidate()
                assert "1 workers have joined" in (await offered(second)).reason
                there.run.hub.forget(candidate._hello.name)  # its machine is gone
                assert (await offered(second)).reason == ""
                await stop(there.run)

            async with concurrently(ask(), Trainer(there.run).work()):
                await there.run.go()
            answer = there.run.parts.admission._refusal("another")  # type: ignore[union-attr]
            assert answer

    bounded(test())


def test_the_token_of_an_invitation_registers_no_rollout_worker(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:

            async def attack() -> None:
                hello = m.Hello(role="rollout", name="rollout-7", pid=1, run_id="r", incarnation="x", capacity=1)
                peer = Peer(
                    address=there.run.address, hello=hello, curve_dir=there.keys, audience="controller",
                    accept=frozenset(), heartbeat_s=0.05, silence_s=10.0, status=lambda: m.Heartbeat(state="x"),
                )  # fmt: skip
                with pytest.raises(ChannelError, match="no token for rollout rollout-7"):
                    await peer.connect(DEADLINE_S)
                await stop(there.run)

            async with concurrently(attack(), Trainer(there.run).work()):
                await there.run.go()

    bounded(test())


def test_a_worker_without_an_offer_is_not_admitted(tmp_path: Path) -> None:
    async def test() -> None:
        async with joinable(tmp_path) as there:

            async def come() -> None:
                await there.run.connect("rollout-9", "rollout", {m.AnnounceVersion}, 2)
                await until(lambda: "rollout-9" in there.run.hub.peers)
                await asyncio.sleep(0)
                assert there.crew.external == {}
                await stop(there.run)

            async with concurrently(come(), Trainer(there.run).work()):
                await there.run.go()
            assert "rollout-9" not in there.run.coordinator._state.workers

    bounded(test())

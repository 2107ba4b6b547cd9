"""The gate that samples wait at, and what a worker says and does about each announced version."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import DeadlineExceeded, EngineError, TransferBroken, UserError, WeightError, WeightsDamaged
from areal_like.wire import messages as m
from rollout.engine.port import EngineCapabilities, LoadReport
from rollout.weights import versions
from rollout.weights.port import JoinAs
from rollout.weights.versions import VersionGate, VersionLoader

STAGE_S, PAUSE_S, SWAP_S, RECEIVE_S = 0.25, 0.125, 1.0, 4.0


async def settle() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


# ------------------------------------------------------------ the gate


@pytest.mark.parametrize(
    ("min_version", "version", "passes"),
    [(0, -1, False), (-1, -1, False), (-1, 0, True), (0, 0, True), (2, 1, False), (2, 2, True), (2, 3, True)],
)
def test_a_sample_passes_at_its_version_or_a_newer_one_and_never_without_any(
    min_version: int, version: int, passes: bool
) -> None:
    async def test() -> None:
        gate = VersionGate()
        waiting = asyncio.ensure_future(gate.wait(min_version, 100.0))
        await settle()
        assert not waiting.done()
        gate.set(version)
        await settle()
        assert waiting.done() == passes
        at_once = asyncio.ensure_future(gate.wait(min_version, 100.0))
        await settle()
        assert at_once.done() == passes
        for task in (waiting, at_once):
            task.cancel()

    asyncio.run(test())


def test_a_sample_that_the_gate_closed_again_before_goes_on_waiting() -> None:
    async def test() -> None:
        gate = VersionGate()
        waiting = asyncio.ensure_future(gate.wait(1, 100.0))
        await settle()
        gate.set(1)
        gate.set(-1)
        await settle()
        assert not waiting.done()
        gate.set(1)
        await waiting

    asyncio.run(test())


def test_a_wait_beyond_its_deadline_names_the_version() -> None:
    async def test() -> None:
        with pytest.raises(DeadlineExceeded, match="waited 0 s for policy version 3"):
            await VersionGate().wait(3, 0.0)

    asyncio.run(test())


# ------------------------------------------------------------ the loader


class Engine:
    """Loads at once; `before` is asked first and may raise."""

    def __init__(self, bench: Bench, group_ranks: int) -> None:
        self.bench, self.version = bench, -1
        self.capabilities = EngineCapabilities(
            num_slots=1, max_context=9, interruptions=("recompute",), per_request_seed=True, group_ranks=group_ranks
        )
        self.loads: list[tuple[str, Any]] = []
        self.gate_at_load: list[int] = []
        self.failure: Exception | None = None
        self.failure_of_group: Exception | None = None
        self.is_loading = lambda: None

    async def load_version(self, manifest_path: Path, interruption: str) -> LoadReport:
        return await self.load(f"file {manifest_path.name} {interruption}", int(manifest_path.name), self.failure)

    async def load_from_group(self, call: Any, interruption: str) -> LoadReport:
        return await self.load(f"group {call} {interruption}", call, self.failure_of_group)

    async def load(self, what: str, version: int, failure: Exception | None) -> LoadReport:
        self.loads.append((what, self.bench.gate.version))
        self.is_loading()
        self.bench.now_s += SWAP_S
        if failure is not None:
            raise failure
        self.version = version
        return LoadReport(version=version, stage_s=STAGE_S, pause_s=PAUSE_S)

    async def release_memory(self) -> int:
        self.loads.append(("release", self.bench.gate.version))
        self.bench.now_s += SWAP_S
        self.version = -1
        return 1000


class Received:
    """A receiver whose versions come as soon as `may_come` is set."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.asked: list[Any] = []
        self.num_forgotten = 0
        self.is_serving = False
        self.failure: Exception | None = None
        self.call: Any = None
        self.may_come = asyncio.Event()
        self.may_come.set()

    async def receive(self, place: str, deadline_s: float) -> Path:
        self.asked.append((place, deadline_s))
        try:
            await self.may_come.wait()
        except asyncio.CancelledError:
            self.asked.append("cancelled")
            raise
        self.bench.now_s += RECEIVE_S
        if self.failure is not None:
            raise self.failure
        return Path(place)

    async def meet(self, place: str, deadline_s: float, who: JoinAs) -> Any:
        self.asked.append(("meet", place, deadline_s, who))
        self.bench.now_s += RECEIVE_S
        return self.call

    async def run(self) -> None:
        self.is_serving = True
        await asyncio.Event().wait()

    def forget(self) -> None:
        self.num_forgotten += 1

    def counters(self) -> dict[str, float]:
        return {"weights_received": 5.0}


class Bench:
    def __init__(self, *, with_receiver: bool = False, group_ranks: int = 0) -> None:
        self.now_s = 100.0
        self.said: list[m.Message] = []
        self.traced: list[tuple[str, float, float, int | None]] = []
        self.done: list[Any] = []
        self.gate, self.engine = VersionGate(), Engine(self, group_ranks)
        self.receiver = Received(self) if with_receiver else None
        tracer: Any = SimpleNamespace(now_s=lambda: self.now_s, complete=self._complete)
        doing: Any = SimpleNamespace(
            loading=lambda flag: self.done.append(flag), swapped=lambda pause_s: self.done.append(pause_s)
        )
        self.loader = VersionLoader(
            engine=self.engine, gate=self.gate, interruption="recompute",  # type: ignore[arg-type]
            report=self.said.append, park_all=lambda: self.done.append("parked"), doing=doing, tracer=tracer,
            receiver=self.receiver,
        )  # fmt: skip

    def _complete(self, name: str, start_s: float, end_s: float, lane: str, **args: Any) -> None:
        assert lane == "versions"
        self.traced.append((name, start_s, end_s, args.get("version")))

    def announce(self, version: int, lineage: str = "l0", **facts: Any) -> None:
        self.loader.announce(m.AnnounceVersion(version=version, lineage=lineage, manifest_path=str(version), **facts))

    async def load(self, version: int, lineage: str = "l0", **facts: Any) -> None:
        self.announce(version, lineage, **facts)
        await settle()

    def received(self) -> list[m.Message]:
        said, self.said[:] = list(self.said), []
        return said

    def counts(self) -> dict[str, int]:
        counters = self.loader.counters()
        names = ("loaded", "failed", "superseded", "broken")
        return {name: int(counters[f"versions_{name}"]) for name in names if counters[f"versions_{name}"]}


def with_loader(test: Callable[[Bench], Awaitable[None]], **bench: Any) -> Bench:
    """Run a test while the loader runs; an error of the loader is raised."""

    async def whole() -> Bench:
        made = Bench(**bench)
        running = asyncio.ensure_future(made.loader.run())
        await test(made)
        is_broken = running.done()
        running.cancel()
        await asyncio.wait([running])
        if is_broken and isinstance(group := running.exception(), ExceptionGroup):
            raise group.exceptions[0]
        return made

    return asyncio.run(whole())


def loaded(version: int, lineage: str = "l0", stage_s: float = STAGE_S, pause_s: float = PAUSE_S) -> m.VersionLoaded:
    return m.VersionLoaded(version=version, lineage=lineage, stage_s=stage_s, pause_s=pause_s)


def failed(version: int, reason: str, *, is_damaged: bool = False) -> m.VersionFailed:
    return m.VersionFailed(version=version, lineage="l0", reason=reason, is_damaged=is_damaged)


def test_a_loaded_version_opens_the_gate_and_is_reported_counted_and_drawn() -> None:
    async def test(bench: Bench) -> None:
        await bench.load(3)
        assert bench.gate.version == 3
        assert bench.received() == [loaded(3)]
        assert bench.counts() == {"loaded": 1}
        assert bench.done == [True, PAUSE_S, False]
        end_s = 100.0 + SWAP_S
        assert bench.traced == [
            ("load_version", 100.0, end_s, 3),
            ("stage", 100.0, 100.0 + STAGE_S, 3),
            ("pause", end_s - PAUSE_S, end_s, 3),
        ]

    with_loader(test)


def test_the_time_a_version_took_to_come_here_counts_as_staging() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        await bench.load(0, deadline_s=7.0)
        assert bench.receiver.asked == [("0", 7.0)]
        assert bench.receiver.is_serving, "versions that came here are served to other workers"
        assert bench.received() == [loaded(0, stage_s=RECEIVE_S + STAGE_S)]
        assert bench.loader.counters()["weights_received"] == 5.0

    with_loader(test, with_receiver=True)


def test_of_waiting_announcements_the_newest_is_loaded_and_the_others_count_as_superseded() -> None:
    async def test(bench: Bench) -> None:
        for version in (1, 2, 3):
            bench.announce(version)
        await settle()
        assert bench.engine.loads == [("file 3 recompute", -1)]
        assert bench.counts() == {"loaded": 1, "superseded": 2}

    with_loader(test)


def test_a_version_in_use_that_is_announced_again_is_confirmed_and_not_loaded() -> None:
    async def test(bench: Bench) -> None:
        bench.loader.report_again()
        assert bench.received() == [], "nothing is in use"
        await bench.load(3)
        bench.received()
        await bench.load(3)
        assert bench.received() == [loaded(3, stage_s=0.0, pause_s=0.0)]
        assert len(bench.engine.loads) == 1
        await bench.load(3, "l1")
        assert bench.received() == [loaded(3, "l1")], "another lineage is another version"

    with_loader(test)


def test_only_a_version_that_is_not_newer_closes_the_gate_before_it_is_loaded() -> None:
    async def test(bench: Bench) -> None:
        for version, lineage in ((1, "l0"), (2, "l0"), (2, "l1"), (1, "l1")):
            await bench.load(version, lineage)
        assert bench.engine.loads == [
            ("file 1 recompute", -1), ("file 2 recompute", 1), ("file 2 recompute", -1), ("file 1 recompute", -1),
        ]  # fmt: skip
        assert bench.done.count("parked") == 2
        assert bench.gate.version == 1

    with_loader(test)


@pytest.mark.parametrize("error", [WeightError("no room"), WeightsDamaged("checksum")])
def test_a_version_the_engine_refuses_leaves_the_old_one_in_use_and_is_not_built_upon(error: WeightError) -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        await bench.load(5)
        bench.received()
        bench.engine.failure = error
        await bench.load(4)
        assert bench.received() == [failed(4, str(error), is_damaged=isinstance(error, WeightsDamaged))]
        assert bench.gate.version == 5, "open again after the attempt to go back"
        assert bench.loader.loaded == (5, "l0")
        assert bench.receiver.num_forgotten == 1
        assert bench.counts() == {"loaded": 1, "failed": 1}
        assert bench.done[-2:] == ["parked", False]

    with_loader(test, with_receiver=True)


@pytest.mark.parametrize(("error", "num_forgotten"), [(WeightError("late"), 0), (WeightsDamaged("checksum"), 1)])
def test_what_was_received_damaged_is_not_built_upon(error: WeightError, num_forgotten: int) -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        bench.receiver.failure = error
        await bench.load(4)
        assert bench.received() == [failed(4, str(error), is_damaged=bool(num_forgotten))]
        assert bench.receiver.num_forgotten == num_forgotten
        assert bench.engine.loads == []

    with_loader(test, with_receiver=True)


def test_the_failure_of_a_version_that_was_replaced_meanwhile_is_not_reported() -> None:
    async def test(bench: Bench) -> None:
        def replaced() -> None:
            bench.engine.is_loading = lambda: None
            bench.announce(5)

        bench.engine.failure, bench.engine.is_loading = WeightError("no room"), replaced
        await bench.load(4)
        assert bench.received() == [failed(5, "no room")]
        assert bench.counts() == {"failed": 1, "superseded": 1}

    with_loader(test)


@pytest.mark.parametrize(
    ("error", "raised", "text"),
    [
        (EngineError("no memory"), EngineError, "^no memory$"),
        (UserError("no server"), UserError, "^no server$"),
        (KeyError("w"), EngineError, "^cannot load version 4: KeyError: 'w'$"),
    ],
)
def test_an_engine_that_breaks_while_loading_ends_the_loader(
    error: Exception, raised: type[Exception], text: str
) -> None:
    async def test(bench: Bench) -> None:
        bench.engine.failure = error
        bench.announce(4)
        await settle()
        assert bench.received() == []
        assert bench.done[-1] is False, "no longer loading"

    with pytest.raises(raised, match=text):
        with_loader(test)


# ------------------------------------------------------------ held versions


def test_a_held_version_waits_for_its_own_turn() -> None:
    async def test(bench: Bench) -> None:
        await bench.load(3, is_held=True)
        staged = m.VersionStaged(version=3, lineage="l0")
        assert bench.received() == [staged]
        for version, lineage in ((2, "l0"), (3, "l1")):
            bench.loader.swap(m.SwapVersion(version=version, lineage=lineage))
            await settle()
        assert bench.engine.loads == []
        await bench.load(3, is_held=True)
        assert bench.received() == [staged], "asked again, said again"
        assert bench.engine.loads == []
        bench.loader.swap(m.SwapVersion(version=3, lineage="l0"))
        await settle()
        assert bench.received() == [loaded(3)]

    with_loader(test)


def test_a_staged_version_that_is_announced_without_a_turn_is_swapped_in() -> None:
    async def test(bench: Bench) -> None:
        await bench.load(3, is_held=True)
        await bench.load(3)
        assert bench.received() == [m.VersionStaged(version=3, lineage="l0"), loaded(3)]

    with_loader(test)


@pytest.mark.parametrize(("version", "lineage"), [(4, "l0"), (3, "l1")])
def test_a_staged_version_gives_way_to_another(version: int, lineage: str) -> None:
    async def test(bench: Bench) -> None:
        await bench.load(3, is_held=True)
        await bench.load(version, lineage)
        assert bench.received()[1:] == [loaded(version, lineage)]
        assert bench.counts() == {"loaded": 1, "superseded": 1}

    with_loader(test)


def test_a_staged_version_whose_turn_never_comes_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(versions, "TURN_S", 0.0)

    async def test(bench: Bench) -> None:
        await bench.load(3, is_held=True)
        assert bench.received()[1:] == [
            failed(3, "the version was staged, but no request to load it arrived within 0 s")
        ]

    with_loader(test)


# ------------------------------------------------------------ versions that give way while they come


def test_a_version_on_its_way_gives_way_to_another_lineage_at_once() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        bench.receiver.may_come.clear()
        await bench.load(3, deadline_s=9.0)
        await bench.load(2, "l1", deadline_s=9.0)
        assert bench.receiver.asked == [("3", 9.0), "cancelled", ("2", 9.0)]
        bench.receiver.may_come.set()
        await settle()
        assert bench.received() == [loaded(2, "l1", stage_s=RECEIVE_S + STAGE_S)]
        assert bench.counts() == {"loaded": 1, "superseded": 1}

    with_loader(test, with_receiver=True)


def test_a_version_on_its_way_is_not_dropped_for_the_next_of_its_lineage() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        bench.receiver.may_come.clear()
        await bench.load(3)
        await bench.load(4)
        bench.receiver.may_come.set()
        await settle()
        assert [message.version for message in bench.received() if isinstance(message, m.VersionLoaded)] == [3, 4]

    with_loader(test, with_receiver=True)


def test_memory_is_released_before_a_version_that_is_on_its_way_comes() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        await bench.load(1)
        bench.receiver.may_come.clear()
        await bench.load(2)
        bench.received()
        bench.done.clear()
        bench.loader.release(8)
        assert bench.loader.is_release_due
        await settle()
        assert not bench.loader.is_release_due
        assert bench.received() == [m.MemoryReleased(number=8, num_bytes=1000, seconds=SWAP_S)]
        assert bench.engine.loads[-1] == ("release", -1), "no sample passes the gate meanwhile"
        assert bench.done == ["parked"]
        assert bench.loader.loaded is None
        assert bench.traced[-1][0] == "release_memory"
        assert bench.counts() == {"loaded": 1, "superseded": 1}
        bench.receiver.may_come.set()
        await bench.load(1)
        assert [type(message) for message in bench.received()] == [m.VersionLoaded], "whichever version comes next"

    with_loader(test, with_receiver=True)


# ------------------------------------------------------------ the process group


def test_a_version_comes_by_the_group_the_trainer_calls_to() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        bench.receiver.call = 3
        await bench.load(3, deadline_s=8.0)
        assert bench.receiver.asked == [("meet", "3", 4.0, JoinAs(2, "cpu"))]
        assert bench.engine.loads == [("group 3 recompute", -1)]
        assert bench.received() == [loaded(3, stage_s=RECEIVE_S + STAGE_S)]
        assert bench.done == [True, PAUSE_S, False]

    with_loader(test, with_receiver=True, group_ranks=2)


def test_without_a_call_to_the_group_the_version_comes_as_a_stream() -> None:
    async def test(bench: Bench) -> None:
        await bench.load(3)
        assert bench.engine.loads == [("file 3 recompute", -1)]
        assert bench.received() == [loaded(3, stage_s=RECEIVE_S + STAGE_S)], "the wait for a call is no staging"

    with_loader(test, with_receiver=True, group_ranks=2)


@pytest.mark.parametrize(("group_ranks", "is_held"), [(0, False), (2, True)])
def test_nobody_waits_for_a_group_who_takes_no_place_or_has_to_wait_for_a_turn(group_ranks: int, is_held: bool) -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        bench.receiver.call = 3
        await bench.load(3, is_held=is_held, deadline_s=8.0)
        assert bench.receiver.asked == [("3", 8.0)]

    with_loader(test, with_receiver=True, group_ranks=group_ranks)


def test_after_a_broken_transfer_the_version_comes_as_a_stream_and_the_group_is_not_asked_for_it_again() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        await bench.load(5)
        bench.received()
        bench.receiver.call, bench.engine.failure_of_group = 4, TransferBroken("gone")
        bench.engine.failure = WeightError("no room")
        await bench.load(4)
        assert [what for what, _ in bench.engine.loads[1:]] == ["group 4 recompute", "file 4 recompute"]
        assert bench.gate.version == 5
        assert bench.counts() == {"loaded": 1, "broken": 1, "failed": 1}
        bench.engine.failure = None
        await bench.load(4)
        assert bench.engine.loads[-1][0] == "file 4 recompute"
        assert bench.gate.version == 4

    with_loader(test, with_receiver=True, group_ranks=2)


def test_a_payload_of_the_group_that_is_damaged_is_the_failure_of_the_version() -> None:
    async def test(bench: Bench) -> None:
        assert bench.receiver
        bench.receiver.call, bench.engine.failure_of_group = 4, WeightsDamaged("checksum")
        await bench.load(4)
        assert bench.received() == [failed(4, "checksum", is_damaged=True)]
        assert [what for what, _ in bench.engine.loads] == ["group 4 recompute"]

    with_loader(test, with_receiver=True, group_ranks=2)

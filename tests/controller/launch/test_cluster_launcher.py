"""Claims about processes on a cluster as the controller sees them, with a seat and a Ray that follow a script."""

from __future__ import annotations

import asyncio
import json
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from small_run import bounded, until

from areal_like.import_check import USER_PATH
from controller.config.loading import load_config
from controller.launch.cluster import launcher as launcher_module
from controller.launch.cluster import seat_process
from controller.launch.cluster.launcher import Meeting, RayLauncher
from controller.launch.cluster.seat import News, Order, Place, Seated
from controller.launch.cluster.seat_process import SeatProcess
from controller.launch.launcher import Child, tail_of


class RayError(Exception):
    pass


class Unavailable(RayError):
    pass


class FakeRay:
    """The little of Ray that a conversation with a seat needs."""

    def __init__(self) -> None:
        self.exceptions = SimpleNamespace(RayError=RayError, ActorUnavailableError=Unavailable)
        self.killed: list[Any] = []

    def kill(self, actor: Any, *, no_restart: bool) -> None:
        assert no_restart
        self.killed.append(actor)


class Method:
    """`seat.method.remote(...)`"""

    def __init__(self, answer: Any) -> None:
        self.answer, self.calls = answer, []

    def remote(self, *arguments: Any, **more: Any) -> Any:
        self.calls.append((*arguments, *more.values()))
        return self.answer(*arguments)


class FakeSeat:
    """Tells what it was given, piece by piece; then its end, if it has one."""

    def __init__(self, *log: bytes | Exception, returncode: int | None = 0) -> None:
        self.pieces, self.returncode = list(log), returncode
        self.place, self.start = Method(self._place), Method(self._start)
        self.news, self.close = Method(self._news), Method(self._close)
        self.signal = Method(lambda *_: None)

    async def _place(self) -> Place:
        return Place("n2", "10.0.0.2", 5001)

    async def _start(self, order: Order) -> Seated:
        return Seated(4711, "n2", "10.0.0.2")

    async def _news(self, offset: int, wait_s: float) -> News:
        if not self.pieces:
            if self.returncode is None:
                await asyncio.sleep(60)
            return News(b"", self.returncode, 1.5, 12.0)
        piece = self.pieces.pop(0)
        if isinstance(piece, Exception):
            raise piece
        return News(piece, None, 1.0, None)

    async def _close(self) -> None:
        return None


@pytest.fixture
def ray(monkeypatch: pytest.MonkeyPatch) -> FakeRay:
    fake = FakeRay()
    monkeypatch.setattr(seat_process, "import_ray", lambda: fake)
    monkeypatch.setattr(launcher_module, "import_ray", lambda: fake)
    monkeypatch.setattr(seat_process, "RETRY_S", 0.01)
    monkeypatch.setattr(seat_process, "FORCE_S", 0.05)
    return fake


def process_in(seat: Any, log_path: Path, *, is_alive: bool = True) -> SeatProcess:
    async def order(place: Place) -> Order:
        assert place.node_id == "n2"
        return Order(("-c", "pass"), "{}", 1, "/")

    cluster: Any = SimpleNamespace(is_alive=lambda node_id: is_alive)
    return SeatProcess(seat, order, log_path, cluster, lambda seated: None, needs="CPU 1")


def test_log_comes_home_in_order_and_the_seat_is_left_before_the_end_is_reported(tmp_path, ray):
    async def test():
        seat = FakeSeat(b"one\n", Unavailable("a blink"), b"two\n", returncode=3)
        process = process_in(seat, tmp_path / "x.log")
        await process.wait()
        assert (process.pid, process.returncode, process.cpu_s, process.rss_mb) == (4711, 3, 1.5, 12.0)
        assert (tmp_path / "x.log").read_text() == "one\ntwo\n"
        assert [call[0] for call in seat.news.calls] == [0, 4, 4, 8], "after a blink it asks from where it was"
        assert seat.close.calls
        assert ray.killed == [seat]

    bounded(test())


@pytest.mark.parametrize(
    ("is_alive", "words"),
    [(False, "NodeLost: node 10.0.0.2"), (True, "SeatLost: Ray ended the actor of this process on node 10.0.0")],
)
def test_lost_seat_says_why_in_the_log_of_its_process(tmp_path, ray, is_alive, words):
    async def test():
        process = process_in(FakeSeat(b"working\n", RayError("worker died")), tmp_path / "x.log", is_alive=is_alive)
        await process.wait()
        assert process.returncode == -signal.SIGKILL
        last = tail_of(tmp_path / "x.log").splitlines()[-1]
        assert last.startswith(f"error: {words}")

    bounded(test())


def test_kill_of_a_seat_that_does_not_answer_ends_all_the_same(tmp_path, ray):
    async def test():
        seat = FakeSeat(b"hello\n", returncode=None)
        process = process_in(seat, tmp_path / "x.log")
        await until(lambda: tail_of(tmp_path / "x.log") == "hello")
        process.kill()
        assert seat.signal.calls == [(int(signal.SIGKILL), True)]
        await process.wait()
        assert process.returncode == -signal.SIGKILL
        assert ray.killed == [seat]

    bounded(test())


def test_process_on_its_way_is_stopped_without_waiting_for_its_place(tmp_path, ray):
    async def test():
        seat = FakeSeat()

        async def never() -> Place:
            await asyncio.sleep(60)
            raise AssertionError

        seat.place = Method(never)
        process = process_in(seat, tmp_path / "x.log")
        await asyncio.sleep(0)
        assert (process.pid, process.awaited) == (0, "free resources on a node (CPU 1)")
        process.terminate()
        await process.wait()
        assert ray.killed == [seat]

    bounded(test())


# ---------------------------------------------------------------- what a process is given

ENVIRONMENT = {"OMP_NUM_THREADS": "3", USER_PATH: "/home/me", "WANDB_API_KEY": "s3cret"}


def launcher_in(folder: Path) -> RayLauncher:
    config = load_config("quickstart", ["launch.kind=ray", f"runs_dir={folder}"]).config
    return RayLauncher(config, folder, folder, "r1")


def order_of(launcher: RayLauncher, **spec: Any) -> Order:
    return launcher._order(("-m", "rollout", "--spec", "{spec}"), spec, ENVIRONMENT)


def test_order_carries_keys_as_bytes_and_nothing_of_the_controllers_environment(tmp_path):
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "client.secret").write_bytes(b"s3cret key")
    order = order_of(launcher_in(tmp_path), role="rollout", curve_dir=str(keys))
    assert order.keys == {"curve_dir": {"client.secret": b"s3cret key"}}
    assert (order.num_threads, order.user_path) == (3, "/home/me")
    assert "s3cret" not in repr(order)
    assert "s3cret" not in order.spec


def test_only_the_streaming_trainers_first_rank_gets_a_store_of_its_node(tmp_path):
    launcher = launcher_in(tmp_path)
    assert order_of(launcher, role="trainer", rank=0).weight_versions == 4
    assert order_of(launcher, role="trainer", rank=1).weight_versions == 0
    assert order_of(launcher, role="rollout", rank=0).weight_versions == 0


class WorkerWithAddress(SeatProcess):
    """A process that remembers how it was ended."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def end_with(self, words: str) -> None:
        self.words.append(words)


def test_reward_service_on_another_node_is_found_there_by_workers_that_start_and_others_start_again(tmp_path):
    async def test():
        launcher = launcher_in(tmp_path)
        given = "tcp://10.0.0.2:4000"
        launcher._reported["reward"] = launcher._addresses["reward"] = given
        worker = WorkerWithAddress()
        launcher._children["rollout-0"] = Child("rollout-0", worker)
        launcher._moved("reward", Seated(1, "n2", "10.0.0.2"))
        assert not worker.words, "it sits where it was to sit"
        launcher._moved("reward", Seated(1, "n3", "10.0.0.3"))
        assert worker.words == ["RewardMoved: reward is on node 10.0.0.3 now"]
        assert not launcher._children["rollout-0"].is_stopping, "so that supervision starts it again"
        spec = json.loads(order_of(launcher, role="rollout", reward_addresses=[given]).spec)
        assert spec["reward_addresses"] == ["tcp://10.0.0.3:4000"]

    bounded(test())


def test_ranks_meet_on_the_first_ones_node_at_a_port_that_is_free_there_and_none_starts_before_all_have_places(
    tmp_path,
):
    async def test():
        config = load_config(
            "quickstart", ["launch.kind=ray", f"runs_dir={tmp_path}", "trainer.backend=fsdp", "trainer.ranks=2"]
        ).config
        launcher = RayLauncher(config, tmp_path, tmp_path, "r1")
        first = launcher._meeting_of("trainer")
        assert first is not None
        assert launcher._meeting_of("trainer-1") is first
        assert launcher._meeting_of("rollout-0") is launcher._meeting_of("prepare") is None
        one = asyncio.create_task(first.address("trainer-1", Place("n2", "10.0.0.2", 7000)))
        await asyncio.sleep(0)
        assert not one.done(), "the first rank has no place yet"
        zero = await first.address("trainer", Place("n3", "10.0.0.3", 5000))
        assert await one == zero == "tcp://10.0.0.3:5000"
        trainer_order = launcher._order((), {"rank": 1, "ranks_address": "tcp://127.0.0.1:1"}, ENVIRONMENT, zero)
        assert json.loads(trainer_order.spec)["ranks_address"] == zero
        assert launcher._meeting_of("trainer") is not first, "after a restart they meet again"

    bounded(test())


def test_rank_with_a_place_says_that_it_waits_for_the_others_and_then_nothing(tmp_path, ray):
    async def test():
        meeting = Meeting(("trainer", "trainer-1"))

        async def order(place: Place) -> Order:
            return Order(("-c", await meeting.address("trainer", place)), "{}", 1, "/")

        seat = FakeSeat(returncode=None)
        cluster: Any = SimpleNamespace(is_alive=lambda node_id: True)
        process = SeatProcess(seat, order, tmp_path / "x.log", cluster, lambda seated: None, needs="CPU 1")
        await until(lambda: process.awaited == "the placements of the trainer's other ranks")
        assert not seat.start.calls
        await meeting.address("trainer-1", Place("n3", "10.0.0.3", 1))
        await until(lambda: process.pid == 4711)
        assert process.awaited == ""
        assert seat.start.calls[0][0].argv == ("-c", "tcp://10.0.0.2:5001")
        process.kill()
        await process.wait()

    bounded(test())

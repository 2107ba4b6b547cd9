"""Claims about ranks other than 0: they obey every order in its turn, and say whose fault it is when none comes."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from areal_like.errors import OperationError
from areal_like.wire.messages import Batch
from trainer.activity import Activity
from trainer.follower import Follower
from trainer.peer_errors import RankLost
from trainer.ranks import Order

LIMIT_S = 300.0


class FakeRanks:
    """Rank 0, as this rank hears it."""

    def __init__(self, orders: list[Order], batches: list[Batch | BaseException | None]) -> None:
        self._orders: Iterator[Order] = iter(orders)
        self._batches = iter(batches)

    def hear(self) -> Order:
        return next(self._orders)

    def next_batch(self) -> Batch | None:
        found = next(self._batches)
        if isinstance(found, BaseException):
            raise found
        return found


class FakeTraining:
    """Remembers what was done, in which order and in which state."""

    def __init__(self, orders: list[Order], *batches: Batch | BaseException | None, limit_s: float = LIMIT_S) -> None:
        self.ranks = FakeRanks(orders, [*batches, None])
        self.settings = SimpleNamespace(rank_timeout_s=limit_s, max_batch_wait_s=LIMIT_S)
        self.version = 0
        self.log: list[str] = []
        self.write: Callable[[], Any] = lambda: self.log.append(f"sent part of {self.version}")
        self.activity = Activity()

    def _note(self, what: str) -> None:
        self.log.append(f"{what} ({self.activity.heartbeat({}).state})")

    def open(self) -> None:
        self._note("open")

    def prepare(self, samples: Any, step: int) -> Any:
        return SimpleNamespace(step=step)

    def run(self, prepared: Any) -> None:
        self.version = prepared.step
        self._note(f"train {prepared.step}")

    def publish(self) -> None:
        self._note(f"publish {self.version}")

    def save(self) -> Callable[[], Any]:
        self._note(f"copy {self.version}")
        return self.write

    def export(self) -> None:
        self._note(f"export {self.version}")

    def close(self) -> None:
        self._note("close")


def batch(step: int) -> Batch:
    return Batch(step=step, lineage="l0", samples=())


def run(training: FakeTraining) -> None:
    Follower(training, training.activity).run()  # type: ignore[arg-type]


def test_every_order_is_obeyed_in_its_turn_and_shown_as_the_state() -> None:
    orders = [Order.PUBLISH, Order.STEP, Order.PUBLISH, Order.SAVE, Order.STEP, Order.SAVE, Order.EXPORT, Order.END]
    training = FakeTraining(orders, batch(1), batch(2))
    run(training)
    done = [line for line in training.log if not line.startswith("sent")]
    assert done == [
        "open (load)", "publish 0 (publish)", "train 1 (forward_backward)", "publish 1 (publish)",
        "copy 1 (checkpoint)", "train 2 (forward_backward)", "copy 2 (checkpoint)", "export 2 (export)",
        "close (start)",
    ]  # fmt: skip
    assert sum(line.startswith("sent") for line in training.log) == 2


def test_batches_are_packed_by_a_thread_that_holds_up_no_exit() -> None:
    """It waits for rank 0, which may be gone."""
    threads: list[threading.Thread] = []

    class Packing(FakeTraining):
        def prepare(self, samples: Any, step: int) -> Any:
            threads.append(threading.current_thread())
            return super().prepare(samples, step)

    run(Packing([Order.STEP, Order.END], batch(1)))
    (thread,) = threads
    assert (thread.name, thread.daemon) == ("packing", True)


class Timeline:
    """Remembers slices."""

    def __init__(self) -> None:
        self.slices: list[tuple[str, dict[str, int]]] = []

    def now_s(self) -> float:
        return 0.0

    def complete(self, name: str, start_s: float, end_s: float, lane: str = "main", **args: int) -> None:
        self.slices.append((name, args))


def test_timeline_shows_which_step_and_version_each_order_was_about() -> None:
    training = FakeTraining([Order.STEP, Order.PUBLISH, Order.SAVE, Order.END], batch(1))
    timeline = Timeline()
    training.activity = Activity(timeline)  # type: ignore[arg-type]
    run(training)
    assert [one for one in timeline.slices if one[0] != "packing"] == [
        ("load", {}), ("wait:batch", {"step": 1}), ("forward_backward", {"step": 1}), ("wait:batch", {"step": 2}),
        ("publish", {"version": 1}), ("wait:batch", {"step": 2}), ("checkpoint", {"version": 1}),
        ("wait:batch", {"step": 2}),
    ]  # fmt: skip
    assert ("packing", {"step": 1, "samples": 0}) in timeline.slices


def test_waiting_for_an_order_is_waiting_for_a_batch() -> None:
    training = FakeTraining([Order.END])
    states: list[str] = []
    hear = training.ranks.hear
    training.ranks.hear = lambda: states.append(training.activity.heartbeat({}).state) or hear()  # type: ignore[method-assign, func-returns-value]
    run(training)
    assert states == ["wait:batch"]


def test_part_of_a_checkpoint_has_left_before_the_next_is_copied_and_before_the_end() -> None:
    training = FakeTraining([Order.SAVE, Order.SAVE, Order.END])
    gate = threading.Event()

    def write() -> None:
        assert gate.wait(LIMIT_S)
        training.log.append("sent")

    training.write = write
    threading.Timer(0.05, gate.set).start()
    run(training)
    assert training.log == [
        "open (load)",
        "copy 0 (checkpoint)",
        "sent",
        "copy 0 (checkpoint)",
        "sent",
        "close (start)",
    ]


def test_part_that_rank_0_does_not_take_is_a_lost_rank() -> None:
    training = FakeTraining([Order.SAVE, Order.END], limit_s=0.01)
    gate = threading.Event()
    training.write = lambda: gate.wait(LIMIT_S)
    with pytest.raises(RankLost, match=r"rank 0 did not receive a part of a checkpoint within 0.01 s"):
        run(training)
    gate.set()


def test_part_that_cannot_be_sent_raises_its_own_error() -> None:
    training = FakeTraining([Order.SAVE, Order.END])

    def write() -> None:
        raise OperationError("broken pipe")

    training.write = write
    with pytest.raises(OperationError, match="broken pipe"):
        run(training)
    assert "close (start)" not in training.log


def test_batch_that_does_not_come_is_a_lost_rank() -> None:
    training = FakeTraining([Order.STEP, Order.END], limit_s=0.01)
    with pytest.raises(RankLost, match=r"rank 0 trains on a batch that this rank did not receive within 0.01 s"):
        run(training)


def test_error_of_the_thread_that_receives_batches_is_raised_by_the_step_that_needs_one() -> None:
    training = FakeTraining([Order.STEP, Order.STEP, Order.END], batch(1), RankLost("rank 0 is gone"))
    with pytest.raises(RankLost, match="rank 0 is gone"):
        run(training)
    assert training.log[-1] == "train 1 (forward_backward)"


def test_one_batch_is_packed_ahead_and_no_more() -> None:
    training = FakeTraining([], batch(1), batch(2), batch(3))
    packed: queue.SimpleQueue[int] = queue.SimpleQueue()
    training.prepare = lambda samples, step: packed.put(step) or SimpleNamespace(step=step)  # type: ignore[method-assign, func-returns-value]
    follower = Follower(training, training.activity)  # type: ignore[arg-type]
    thread = threading.Thread(target=follower._receive, daemon=True)
    thread.start()
    assert [packed.get(timeout=LIMIT_S) for _ in range(2)] == [1, 2]
    assert packed.empty(), "the second waits for its place; the third is not received yet"
    assert follower._next_batch().step == 1
    assert packed.get(timeout=LIMIT_S) == 3
    assert [follower._next_batch().step for _ in range(2)] == [2, 3]
    thread.join(LIMIT_S)
    assert not thread.is_alive(), "it ends after the last batch"

"""Claims about metrics sinks: whatever they do, the run goes on, and what they miss is counted."""

from __future__ import annotations

import threading
import time

import pytest
from small_run import Trainer, Worker, bounded, concurrently, small_run

from controller.telemetry import sinks as sinks_module
from controller.telemetry.sinks import QUEUE_ROWS, Sinks, SinkThread

PATIENCE_S = 300.0


class FakeSink:
    """Remembers rows; raises, or hangs until `release`, on request."""

    name = "fake"
    kinds = frozenset({"step", "eval", "pulse"})

    def __init__(self, *, raises: bool = False, hangs: bool = False, fails_to_close: bool = False) -> None:
        self.rows: list[dict] = []
        self.raises, self.fails_to_close = raises, fails_to_close
        self.release = threading.Event()
        self.is_closed = False
        if not hangs:
            self.release.set()

    def write(self, record):
        self.release.wait()
        if self.raises:
            raise ConnectionError("no route to host\nTraceback")
        self.rows.append(record)

    def close(self):
        self.is_closed = True
        if self.fails_to_close:
            raise OSError("disk full")


@pytest.fixture(autouse=True)
def patience(monkeypatch) -> None:
    """No test depends on how fast a sink closes."""
    monkeypatch.setattr(sinks_module, "CLOSE_S", PATIENCE_S)


def wait_until(is_so) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def rows(count, kind="step"):
    return [{"kind": kind, "step": number, "time_s": 0.0} for number in range(count)]


def test_rows_arrive_in_order_and_only_of_the_kinds_wanted():
    sink = FakeSink()
    sinks = Sinks([sink])
    for row in [*rows(5), {"kind": "note"}, *rows(1, "eval")]:
        sinks.offer(row)
    (news,) = sinks.close()
    assert [row.get("step") for row in sink.rows] == [0, 1, 2, 3, 4, 0]
    assert sink.is_closed
    assert (news.event, news.error, news.written, news.lost) == ("closed", "", 6, 0)


def test_sink_that_raises_loses_rows_and_says_so_once_until_it_recovers(monkeypatch):
    sink = FakeSink(raises=True)
    thread = SinkThread(sink)
    assert thread.news() is None
    for row in rows(3):
        thread.offer(row)
    wait_until(lambda: thread.lost == 3)
    news = thread.news()
    assert news is not None
    assert (news.event, news.error, news.lost) == ("down", "ConnectionError: no route to host", 3)
    assert thread.news() is None, "reported already"
    sink.raises = False
    thread.offer(rows(1)[0])
    wait_until(lambda: thread.written == 1)
    assert thread.news() is None, "one row is no recovery"
    monkeypatch.setattr(sinks_module, "RECOVERED_S", 0.0)
    news = thread.news()
    assert news is not None
    assert (news.event, news.written, news.lost) == ("up", 1, 3)
    thread.ask_to_close()
    assert thread.has_ended(PATIENCE_S)
    assert thread.closed().error == ""


def test_sink_that_hangs_costs_a_bounded_queue_and_no_wait():
    sink = FakeSink(hangs=True)
    thread = SinkThread(sink)
    for row in rows(QUEUE_ROWS + 50):
        thread.offer(row)
    assert thread.lost in (49, 50), "one may be in its hands"
    news = thread.news()
    assert news is not None
    assert "too slow" in news.error
    thread.ask_to_close()
    assert not thread.has_ended(0.05)
    last = thread.closed()
    assert last.lost == QUEUE_ROWS + 50
    assert last.written == 0
    assert "did not finish in time" in last.error
    sink.release.set()


def test_the_end_waits_for_a_sink_that_needs_longer_and_says_so(monkeypatch):
    monkeypatch.setattr(sinks_module, "CLOSE_S", 0.0)
    monkeypatch.setattr(sinks_module, "SAY_S", 0.0)
    slow, usual = FakeSink(hangs=True), FakeSink(hangs=True)
    slow.grace_s, slow.name = PATIENCE_S, "slow"
    sinks = Sinks([slow, usual])
    sinks.offer(rows(1)[0])
    said = []

    def say(words):
        said.append(words)
        slow.release.set()

    last = sinks.close(say)
    assert said == [f"waiting for metrics to be written: slow (at most {PATIENCE_S:g} s)"]
    assert [(news.written, news.lost) for news in last] == [(1, 0), (0, 1)]
    usual.release.set()


def test_the_end_waits_no_longer_when_the_user_is_in_a_hurry_or_the_sink_is_down(monkeypatch):
    monkeypatch.setattr(sinks_module, "CLOSE_S", 0.0)
    hangs = FakeSink(hangs=True)
    hangs.grace_s = 1e9
    sinks = Sinks([hangs])
    sinks.offer(rows(1)[0])
    assert [news.lost for news in sinks.close(is_hurried=lambda: True)] == [1]
    hangs.release.set()
    down = FakeSink(raises=True, fails_to_close=True)
    down.grace_s = 1e9
    thread = SinkThread(down)
    assert thread.grace_s == 1e9
    thread.offer(rows(1)[0])
    wait_until(lambda: thread.lost == 1)
    assert thread.grace_s == 0.0
    thread.ask_to_close()
    assert thread.has_ended(PATIENCE_S)


def test_rows_after_the_end_are_nobodys():
    sinks = Sinks([FakeSink()])
    sinks.close()
    sinks.offer(rows(1)[0])
    assert sinks.counts() == {"fake": {"written": 0, "lost": 0}}


def test_sink_that_fails_to_close_is_reported_and_loses_nothing():
    sinks = Sinks([FakeSink(fails_to_close=True)])
    sinks.offer(rows(1)[0])
    (news,) = sinks.close()
    assert (news.error, news.written, news.lost) == ("disk full", 1, 0)


@pytest.mark.parametrize("fault", ["raises", "hangs"])
def test_run_with_a_broken_sink_completes_counts_the_loss_and_shows_it_once(tmp_path, fault, monkeypatch):
    if fault == "hangs":  # five rows: one in its hands, three behind it, one lost; the sound sink has room for three
        monkeypatch.setattr(sinks_module, "QUEUE_ROWS", 3)
    broken, well = FakeSink(**{fault: True}), FakeSink()
    well.name = "well"

    async def test():
        async with small_run(tmp_path, sinks=[broken, well]) as run:
            async with concurrently(Worker(run).work(), Trainer(run).work()):
                outcome = await run.go()
                await run.server.farewell(1.0)
            assert outcome.status == "completed"
            run.server._monitor.tick()
            (down,) = run.rows("sink")
            assert (down["sink"], down["event"]) == ("fake", "down")
            assert down["lost"] >= 1
            assert run.shown.getvalue().count("metrics sink fake is down") == 1
            wait_until(lambda: len([row for row in well.rows if row["kind"] == "step"]) == 3)
            broken.release.set()

    bounded(test())

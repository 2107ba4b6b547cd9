"""Claims about the watch of the engine thread. Nothing here depends on how fast the machine is: the watched thread is
the test, and it waits for the watch."""

from __future__ import annotations

import threading

import pytest

from rollout.engine.turn_watch import TurnWatch

POLL_S = 0.01


class Watched:
    def __init__(self, limit_s: float) -> None:
        self.reasons: list[str] = []
        self.has_hung = threading.Event()
        self.watch = TurnWatch(limit_s, self.hung, poll_s=POLL_S)
        self.watch.start()

    def hung(self, reason: str) -> None:
        self.reasons.append(reason)
        self.has_hung.set()


class Polls:
    """In place of the event that ends the watch: the watch polls when the test says so."""

    def __init__(self) -> None:
        self.asked, self.answered = threading.Semaphore(0), threading.Semaphore(0)
        self.is_over = False

    def wait(self, timeout: float) -> bool:
        self.answered.release()
        self.asked.acquire()
        return self.is_over

    def set(self) -> None:
        self.is_over = True
        self.asked.release()


def polled(limit_s: float) -> tuple[Watched, Polls]:
    watched = Watched.__new__(Watched)
    watched.reasons, watched.has_hung = [], threading.Event()
    watched.watch = TurnWatch(limit_s, watched.hung, poll_s=1.0)
    polls = Polls()
    watched.watch._closed = polls  # type: ignore[assignment]
    watched.watch.start()
    polls.answered.acquire()
    return watched, polls


def poll(polls: Polls, count: int = 1) -> None:
    for _ in range(count):
        polls.asked.release()
        polls.answered.acquire()


def test_a_thread_without_a_turn_is_reported_once_with_the_stacks(capfd: pytest.CaptureFixture[str]) -> None:
    watched = Watched(limit_s=5 * POLL_S)
    assert watched.has_hung.wait(60)
    watched.watch._thread.join(60)
    assert watched.reasons == ["the engine thread has made no progress for 0 s"]
    assert "test_a_thread_without_a_turn_is_reported_once_with_the_stacks" in capfd.readouterr().err


def test_each_turn_starts_the_count_again() -> None:
    watched, polls = polled(limit_s=3.0)
    for _ in range(4):
        poll(polls, 2)
        watched.watch.turn()
    poll(polls, 1)
    assert watched.reasons == []
    poll(polls, 2)
    polls.asked.release()
    watched.watch._thread.join(60)
    assert watched.reasons == ["the engine thread has made no progress for 3 s"]


def test_time_with_a_deadline_of_its_own_does_not_count() -> None:
    watched, polls = polled(limit_s=3.0)
    with watched.watch.excused():
        poll(polls, 10)
    poll(polls, 2)
    watched.watch.turn()
    poll(polls, 2)
    assert watched.reasons == []
    watched.watch.close()
    watched.watch._thread.join(60)
    assert watched.reasons == []


def test_a_closed_watch_ends() -> None:
    watched = Watched(limit_s=3600.0)
    watched.watch.close()
    watched.watch.close()
    watched.watch._thread.join(60)
    assert not watched.watch._thread.is_alive()
    assert watched.reasons == []

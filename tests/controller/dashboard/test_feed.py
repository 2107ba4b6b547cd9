"""Claims about the computation that all viewers of a page share. Time is a list of pauses: nothing waits."""

from __future__ import annotations

import asyncio
import json

import pytest

from areal_like.errors import UserError
from controller.dashboard import feed as feeds
from controller.dashboard.feed import BUDGET, MAX_PAUSE_S, MAX_WAITING, MIN_PAUSE_S, Feed, message, pause_s


class Counter:
    """A view that counts its refreshes."""

    def __init__(self) -> None:
        self.count = 0
        self.error: Exception | None = None
        self.is_quiet = False

    def refresh(self):
        if self.error is not None:
            raise self.error
        if self.is_quiet:
            return {}
        self.count += 1
        return {"count": self.count}

    def snapshot(self):
        return {"count": self.count}


class Pauses:
    """A sleep that ends when the test lets it."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._turns = asyncio.Semaphore(0)

    async def __call__(self, pause: float) -> None:
        self.asked.append(pause)
        await self._turns.acquire()

    def pass_one(self) -> None:
        self._turns.release()


async def until(is_so) -> None:
    while not is_so():  # noqa: ASYNC110
        await asyncio.sleep(0.001)


def read(part: bytes | None) -> tuple[str, dict]:
    assert part is not None
    event, data, *_ = part.decode().split("\n")
    return event.removeprefix("event: "), json.loads(data.removeprefix("data: "))


def test_all_viewers_share_one_refresh_and_get_the_same_bytes():
    async def scene():
        pauses, view = Pauses(), Counter()
        feed = Feed(lambda: view, sleep=pauses)
        async with feed.watching() as one, feed.watching() as other:
            assert read(await one.messages.get()) == ("snapshot", {"count": 1, "problem": ""})
            assert read(await other.messages.get()) == ("snapshot", {"count": 1, "problem": ""})
            pauses.pass_one()
            sent = await one.messages.get()
            assert read(sent) == ("change", {"count": 2})
            assert await other.messages.get() is sent
        assert view.count == 2

    asyncio.run(scene())


def test_nothing_is_read_before_the_first_viewer_and_after_the_last():
    async def scene():
        made = []
        pauses = Pauses()
        feed = Feed(lambda: made.append(Counter()) or made[-1], sleep=pauses)
        assert not made
        async with feed.watching() as viewer:
            await viewer.messages.get()
        for _ in range(5):
            pauses.pass_one()
            await asyncio.sleep(0)
        assert made[0].count == 1
        async with feed.watching() as viewer:  # soon after: the same view goes on
            assert read(await viewer.messages.get()) == ("snapshot", {"count": 1, "problem": ""})
            await viewer.messages.get()
        assert len(made) == 1

    asyncio.run(scene())


def test_a_view_is_forgotten_some_time_after_its_last_viewer(monkeypatch):
    monkeypatch.setattr(feeds, "KEEP_S", 0.0)

    async def scene():
        made = []
        feed = Feed(lambda: made.append(Counter()) or made[-1], sleep=Pauses())
        for _ in range(2):
            async with feed.watching():
                pass
            await until(lambda: feed._view is None)
        assert len(made) == 2

    asyncio.run(scene())


def test_nothing_is_sent_where_nothing_has_changed():
    async def scene():
        pauses, view = Pauses(), Counter()
        feed = Feed(lambda: view, sleep=pauses)
        async with feed.watching() as viewer:
            await viewer.messages.get()
            view.is_quiet = True
            for turn in range(3):
                pauses.pass_one()
                await until(lambda turn=turn: feed.num_refreshes > turn and len(pauses.asked) >= turn + 2)
            assert viewer.messages.empty()

    asyncio.run(scene())


def test_a_problem_is_reported_once_and_its_end_too():
    async def scene():
        pauses, view = Pauses(), Counter()
        feed = Feed(lambda: view, sleep=pauses)
        async with feed.watching() as viewer:
            await viewer.messages.get()
            view.error = UserError("is gone", where="runs/x", remedy="look elsewhere")
            pauses.pass_one()
            event, found = read(await viewer.messages.get())
            assert event == "change"
            assert "is gone" in found["problem"]
            pauses.pass_one()
            await until(lambda: feed.num_refreshes == 2)
            async with feed.watching() as late:
                assert "is gone" in read(await late.messages.get())[1]["problem"], "a viewer that joins meanwhile"
            view.error = None
            pauses.pass_one()
            assert read(await viewer.messages.get()) == ("change", {"count": 2, "problem": ""})

    asyncio.run(scene())


def test_content_that_cannot_be_encoded_is_reported_and_the_page_goes_on():
    async def scene():
        pauses, view = Pauses(), Counter()
        feed = Feed(lambda: view, sleep=pauses)
        async with feed.watching() as viewer:
            await viewer.messages.get()
            view.count = "\udcff"
            view.refresh = lambda: {"count": view.count}
            pauses.pass_one()
            assert "cannot be updated" in read(await viewer.messages.get())[1]["problem"]
            view.count = 7
            pauses.pass_one()
            assert read(await viewer.messages.get()) == ("change", {"count": 7, "problem": ""})

    asyncio.run(scene())


def test_an_error_of_ours_is_reported_and_the_page_goes_on():
    async def scene():
        pauses, view = Pauses(), Counter()
        feed = Feed(lambda: view, sleep=pauses)
        async with feed.watching() as viewer:
            await viewer.messages.get()
            view.error = ZeroDivisionError("division by zero")
            pauses.pass_one()
            assert "cannot be updated (division by zero)" in read(await viewer.messages.get())[1]["problem"]
            view.error = None
            pauses.pass_one()
            assert read(await viewer.messages.get()) == ("change", {"count": 2, "problem": ""})

    asyncio.run(scene())


def test_a_viewer_that_does_not_read_is_cut_off_and_the_others_go_on():
    async def scene():
        pauses = Pauses()
        feed = Feed(Counter, sleep=pauses)
        async with feed.watching() as slow, feed.watching() as quick:
            await quick.messages.get()
            for _ in range(MAX_WAITING + 2):
                pauses.pass_one()
                await quick.messages.get()
            assert slow not in feed.viewers
            left = [slow.messages.get_nowait() for _ in range(slow.messages.qsize())]
            assert left[-1] is None
            assert len(left) <= MAX_WAITING + 1

    asyncio.run(scene())


def test_closing_ends_every_viewer():
    async def scene():
        feed = Feed(Counter, sleep=Pauses())
        async with feed.watching() as viewer:
            await viewer.messages.get()
            await feed.close()
            assert await viewer.messages.get() is None

    asyncio.run(scene())


def test_a_view_that_cannot_begin_raises_and_leaves_no_viewer():
    def make():
        raise UserError("no", where="x")

    async def scene():
        feed = Feed(make, sleep=Pauses())
        with pytest.raises(UserError):
            async with feed.watching():
                pass
        assert not feed.viewers

    asyncio.run(scene())


@pytest.mark.parametrize(
    ("cost", "pause"), [(0.0, MIN_PAUSE_S), (0.001, MIN_PAUSE_S), (0.05, 10.0), (9.0, MAX_PAUSE_S)]
)
def test_a_refresh_is_paid_for_by_a_pause(cost, pause):
    assert pause_s(cost) == pytest.approx(pause)
    assert BUDGET <= 0.005


def test_the_pause_follows_the_measured_processor_time():
    async def scene():
        pauses, ticks = Pauses(), iter([0.0, 0.05, 1.0, 1.1])
        feed = Feed(Counter, sleep=pauses, cpu_clock=lambda: next(ticks))
        async with feed.watching() as viewer:
            await viewer.messages.get()
            for _ in range(2):
                pauses.pass_one()
                await viewer.messages.get()
            await until(lambda: len(pauses.asked) == 3)
        assert pauses.asked == pytest.approx([MIN_PAUSE_S, 0.05 / BUDGET, 0.1 / BUDGET])

    asyncio.run(scene())


def test_a_message_stays_one_event_whatever_a_text_holds():
    sent = message("change", {"words": "a\n\nevent: evil\r\ndata: x"})
    assert sent.count(b"\n") == 3
    assert read(sent)[1]["words"] == "a\n\nevent: evil\r\ndata: x"
